//! Programs in other languages that hold the same locks, and a check from outside that no
//! two of them held one at the same time.

pub mod contention;

use std::path::PathBuf;
use std::process::Command;
use std::sync::OnceLock;

use crate::process::ChildProcess;
use crate::servers::cache;

/// How a lock was held.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Held {
    /// By nobody else.
    Exclusive,
    /// With other readers.
    Shared,
    /// As one permit of a semaphore.
    Permit,
}

/// From when to when a lock was held, by [`process::now`](crate::process::now), and by whom.
#[derive(Clone, Copy, Debug)]
pub struct Span {
    /// How the lock was held.
    pub held: Held,
    /// When it was surely held already.
    pub from: u64,
    /// When it was surely held still.
    pub to: u64,
    /// The number of the program.
    pub who: usize,
}

/// The first two spans that exclude each other and overlap, or the first permit too many of
/// `permits`.
pub fn overlap(spans: &[Span], permits: usize) -> Option<String> {
    let mut spans = spans.to_vec();
    spans.sort_by_key(|span| span.from);
    let mut open: Vec<Span> = Vec::new();
    for span in spans {
        open.retain(|other| other.to > span.from);
        let together = open.iter().filter(|other| {
            span.held == Held::Exclusive
                || other.held == Held::Exclusive
                || span.held == Held::Permit
        });
        let together: Vec<_> = together.collect();
        let allowed = if span.held == Held::Permit { permits - 1 } else { 0 };
        if together.len() > allowed {
            return Some(format!("{span:?} overlaps {together:?}"));
        }
        open.push(span);
    }
    None
}

/// A running program of another language.
#[derive(Debug)]
pub struct Peer {
    /// The process, which a test can pause and kill.
    pub process: ChildProcess,
}

/// How a small Java program is started on a busy machine.
const JAVA: [&str; 3] = ["-Xmx128m", "-XX:+UseSerialGC", "-XX:TieredStopAtLevel=1"];

/// The command `etcdctl`; `None` if it was not built.
pub fn etcdctl() -> Option<PathBuf> {
    let program = cache().join("etcd-peers/etcdctl");
    crate::servers::found("etcdctl", program.is_file()).then_some(program)
}

fn source(name: &str) -> String {
    format!("{}/interop/{name}", env!("CARGO_MANIFEST_DIR"))
}

impl Peer {
    /// Starts a worker of Curator; `None` if Curator is not installed.
    pub fn curator(host: &str, kind: &str, path: &str, seconds: u64) -> Option<Self> {
        let jars = cache().join("curator/jars");
        if !crate::servers::found("Curator", jars.is_dir()) {
            return None;
        }
        let (classes, seconds) = (format!("{}/*", jars.display()), seconds.to_string());
        let source = source("CuratorWorker.java");
        let arguments = [&JAVA[..], &["-cp", &classes, &source, host, kind, path]].concat();
        let arguments = [&arguments[..], &[seconds.as_str()]].concat();
        Some(Self::ready(ChildProcess::start("java", &arguments)))
    }

    /// Starts a worker of Redisson on the lock of this name; `None` if Redisson is not
    /// installed. The worker is compiled once.
    ///
    /// # Panics
    /// If it cannot be compiled.
    pub fn redisson(host: &str, name: &str, seconds: u64) -> Option<Self> {
        static CLASSES: OnceLock<PathBuf> = OnceLock::new();
        let jars = cache().join("redisson/jars");
        if !crate::servers::found("Redisson", jars.is_dir()) {
            return None;
        }
        let jars = format!("{}/*", jars.display());
        let classes = CLASSES.get_or_init(|| {
            let classes = std::env::temp_dir().join(format!("dlock-peer-{}", std::process::id()));
            let directory = classes.display().to_string();
            let compiled = Command::new("javac")
                .args(["-cp", &jars, "-d", &directory, &source("RedissonWorker.java")])
                .status();
            assert!(compiled.is_ok_and(|status| status.success()), "javac cannot compile it");
            classes
        });
        let path = format!("{jars}:{}", classes.display());
        let arguments = [&JAVA[..], &["-cp", &path, "RedissonWorker", host, name]].concat();
        let seconds = seconds.to_string();
        let arguments = [&arguments[..], &[seconds.as_str()]].concat();
        Some(Self::ready(ChildProcess::start("java", &arguments)))
    }

    /// Starts a worker of kazoo; `None` if kazoo is not installed.
    pub fn kazoo(host: &str, kind: &str, path: &str, seconds: u64) -> Option<Self> {
        let python = cache().join("kazoo/bin/python");
        if !crate::servers::found("kazoo", python.is_file()) {
            return None;
        }
        let (source, seconds) = (source("kazoo_worker.py"), seconds.to_string());
        let arguments = [source.as_str(), host, kind, path, &seconds];
        Some(Self::ready(ChildProcess::start(python, &arguments)))
    }

    /// Starts a worker of Go's concurrency package for etcd; `None` if it was not built.
    pub fn go_etcd(host: &str, kind: &str, name: &str, seconds: u64) -> Option<Self> {
        let worker = cache().join("etcd-peers/worker");
        if !crate::servers::found("the Go worker for etcd", worker.is_file()) {
            return None;
        }
        let seconds = seconds.to_string();
        Some(Self::ready(ChildProcess::start(worker, &[host, kind, name, &seconds])))
    }

    /// Starts a worker with Consul's Go package, which goes on until it is told to stop;
    /// `None` if it is not built. Its session lives for one to two of this ttl after a kill.
    pub fn consul(port: u16, kind: &str, key: &str, ttl: &str) -> Option<Self> {
        let (worker, address) = (consul_worker()?, format!("127.0.0.1:{port}"));
        Some(Self::ready(ChildProcess::start(worker, &[&address, kind, key, ttl])))
    }

    fn ready(mut process: ChildProcess) -> Self {
        process.wait_for_line("ready", |line| (line == "ready").then_some(()));
        Peer { process }
    }

    /// Lets the program begin.
    pub fn go(&mut self) {
        self.process.send_line("go");
    }

    /// When the program held the lock, as far as it printed that since the last call.
    pub fn new_spans(&mut self, who: usize) -> Vec<Span> {
        self.process.take_lines().iter().filter_map(|line| span(line, who)).collect()
    }
}

/// The worker with Consul's Go package; `None` if it is not built.
pub fn consul_worker() -> Option<PathBuf> {
    let worker = cache().join("consul_worker");
    crate::servers::found("the worker with Consul's Go package", worker.is_file()).then_some(worker)
}

/// A span of a line that a program printed.
pub fn span(line: &str, who: usize) -> Option<Span> {
    let mut words = line.split(' ');
    let held = match words.next()? {
        "X" => Held::Exclusive,
        "R" => Held::Shared,
        "P" => Held::Permit,
        _ => return None,
    };
    Some(Span { held, from: words.next()?.parse().ok()?, to: words.next()?.parse().ok()?, who })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn spans(lines: &[&str]) -> Vec<Span> {
        lines.iter().enumerate().filter_map(|(who, line)| span(line, who)).collect()
    }

    #[test]
    fn overlaps_are_found() {
        assert!(overlap(&spans(&["X 1 5", "X 5 9", "R 9 20", "R 10 15"]), 1).is_none());
        assert!(overlap(&spans(&["X 1 5", "X 4 9"]), 1).is_some());
        assert!(overlap(&spans(&["R 1 5", "X 4 9"]), 1).is_some());
        assert!(overlap(&spans(&["X 1 9", "R 2 3"]), 1).is_some());
        assert!(overlap(&spans(&["P 1 5", "P 2 6", "P 5 9"]), 2).is_none());
        assert!(overlap(&spans(&["P 1 5", "P 2 6", "P 3 9"]), 2).is_some());
        assert!(spans(&["ready", "done", "X 1"]).is_empty());
    }
}
