//! dlock, Consul's Go package and `consul lock` on one lock of a real Consul: four processes
//! of each side, one of them killed and one paused, checked from outside: no two processes held
//! the lock at the same time. Each test also runs its negative control: on two different locks
//! the same check must find an overlap.
//!
//! Each test takes some seconds; `DLOCK_TEST_SECONDS=60` makes them longer.

use std::process::{Child, Stdio};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::{Receiver, channel};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use dlock::Mode;
use dlock_testkit::consul::ConsulServer;
use dlock_testkit::holder::HolderProcess;
use dlock_testkit::interop::{Held, Peer, Span, consul_worker, overlap, span};
use dlock_testkit::process;
use dlock_testkit::record_checker::Record;

/// The processes of each side.
const PROCESSES: usize = 4;
/// How often each side must have held the lock, however long that takes.
const TURNS: usize = 10;
/// When a test gives up.
const TOO_LONG: Duration = Duration::from_secs(180);
/// The time for which a process is paused. Its session lives ten times as long.
const PAUSE: Duration = Duration::from_secs(1);
/// The permits of the semaphores.
const PERMITS: usize = 2;
/// The namespace of `dlock-holder`.
const NAMESPACE: &str = "test";

fn seconds() -> u64 {
    let seconds = std::env::var("DLOCK_TEST_SECONDS").ok();
    seconds.and_then(|seconds| seconds.parse().ok()).unwrap_or(5)
}

/// One side: programs that take the lock again and again.
trait Side {
    /// When the lock was held, as far as that is new.
    fn spans(&mut self) -> Vec<Span>;
    /// Kills one of the programs with SIGKILL.
    fn kill_one(&mut self);
    /// Pauses another one, or lets it go on.
    fn pause_one(&mut self, pauses: bool);
    /// Ends all programs.
    fn stop(&mut self);
}

/// Processes of dlock. The first is killed, the last is paused.
struct Holders(Vec<HolderProcess>);

impl Holders {
    fn start(server: &ConsulServer, layout: &str, key: &str) -> Self {
        Self::doing(server, layout, "serve", key)
    }

    fn doing(server: &ConsulServer, layout: &str, command: &str, key: &str) -> Self {
        let start = |n: usize| {
            // The session of the one that is killed ends soon, that of the others late.
            let ttl = if n == 0 { 2 } else { 15 };
            let url = format!("{}&layout={layout}&ttl={ttl}s", server.url());
            let mut holder = HolderProcess::start(&url);
            holder.send(&format!("{command} {key} {ttl}000 1"));
            holder
        };
        Holders((0..PROCESSES).map(start).collect())
    }
}

impl Side for Holders {
    fn spans(&mut self) -> Vec<Span> {
        let mut spans = Vec::new();
        for (n, holder) in self.0.iter_mut().enumerate() {
            let lines = holder.process.take_lines();
            let records = lines.iter().filter_map(|line| line.parse::<Record>().ok());
            spans.extend(records.map(|Record { from, until, mode, .. }| Span {
                held: if mode == Mode::Exclusive { Held::Exclusive } else { Held::Permit },
                from,
                to: until,
                who: 100 + n,
            }));
        }
        spans
    }

    fn kill_one(&mut self) {
        self.0[0].process.kill();
    }

    fn pause_one(&mut self, pauses: bool) {
        let process = &self.0[PROCESSES - 1].process;
        if pauses { process.pause() } else { process.resume() }
    }

    fn stop(&mut self) {
        self.0.iter_mut().for_each(|holder| holder.send("shutdown 10000"));
        for holder in &mut self.0 {
            holder.process.wait_for_exit(Duration::from_secs(20));
        }
    }
}

/// Processes with Consul's Go package.
struct Workers(Vec<Peer>);

impl Workers {
    fn start(server: &ConsulServer, kind: &str, key: &str) -> Option<Self> {
        let ttl = |n| if n == 0 { "1s" } else { "15s" };
        let start = |n| Peer::consul(server.port(), kind, key, ttl(n));
        let mut workers: Vec<_> = (0..PROCESSES).map(start).collect::<Option<_>>()?;
        workers.iter_mut().for_each(Peer::go);
        Some(Workers(workers))
    }
}

impl Side for Workers {
    fn spans(&mut self) -> Vec<Span> {
        let workers = self.0.iter_mut().enumerate();
        workers.flat_map(|(who, worker)| worker.new_spans(who)).collect()
    }

    fn kill_one(&mut self) {
        self.0[0].process.kill();
    }

    fn pause_one(&mut self, pauses: bool) {
        let process = &self.0[PROCESSES - 1].process;
        if pauses { process.pause() } else { process.resume() }
    }

    fn stop(&mut self) {
        self.0.iter_mut().for_each(Peer::stop);
        for worker in &mut self.0 {
            worker.process.wait_for_exit(Duration::from_secs(20));
        }
    }
}

type Running = Arc<parking_lot::Mutex<Option<Child>>>;

/// Threads that run `consul lock` again and again.
struct Commands {
    stop: Arc<AtomicBool>,
    spans: Receiver<Span>,
    threads: Vec<JoinHandle<()>>,
    /// The process of each thread.
    running: Vec<Running>,
}

impl Commands {
    fn start(server: &Arc<ConsulServer>, key: &str) -> Option<Self> {
        let worker = consul_worker()?.display().to_string();
        let (sender, spans) = channel();
        let stop = Arc::new(AtomicBool::new(false));
        let running: Vec<Running> = (0..PROCESSES).map(|_| Running::default()).collect();
        let thread = |who: usize| {
            let (server, stop) = (server.clone(), stop.clone());
            let (running, sender) = (running[who].clone(), sender.clone());
            let (key, worker) = (key.to_owned(), worker.clone());
            std::thread::spawn(move || {
                while !stop.load(Ordering::Relaxed) {
                    let words = ["lock", "-shell=false", &key, &worker, "stamp", "5"];
                    let mut command = server.command(&words);
                    command.stdout(Stdio::piped()).stderr(Stdio::null());
                    let mut child = command.spawn().expect("consul can be run");
                    let mut output = child.stdout.take().expect("its output");
                    *running.lock() = Some(child);
                    let mut printed = String::new();
                    let _ = std::io::Read::read_to_string(&mut output, &mut printed);
                    printed.lines().filter_map(|line| span(line, who)).for_each(|span| {
                        let _ = sender.send(span);
                    });
                    if let Some(mut child) = running.lock().take() {
                        let _ = child.wait();
                    }
                }
            })
        };
        let threads = (0..PROCESSES).map(thread).collect();
        Some(Commands { stop, spans, threads, running })
    }
}

impl Side for Commands {
    fn spans(&mut self) -> Vec<Span> {
        self.spans.try_iter().collect()
    }

    /// A `consul lock` that dies with the lock keeps everybody out for 30 to 45 seconds: its
    /// session and its lock-delay. So this is for long runs.
    fn kill_one(&mut self) {
        if seconds() >= 60
            && let Some(child) = self.running[0].lock().as_mut()
        {
            let _ = child.kill();
        }
    }

    fn pause_one(&mut self, pauses: bool) {
        if let Some(child) = self.running[PROCESSES - 1].lock().as_ref() {
            if pauses { process::pause(child.id()) } else { process::resume(child.id()) }
        }
    }

    fn stop(&mut self) {
        self.stop.store(true, Ordering::Relaxed);
        for thread in self.threads.drain(..) {
            let _ = thread.join();
        }
    }
}

/// Both sides want one lock for a while, and until each had its turns.
fn exclude_each_other(mut theirs: impl Side, mut ours: impl Side) {
    let began = Instant::now();
    let (mut of_them, mut of_us) = (Vec::new(), Vec::new());
    let mut step = 0;
    while began.elapsed() < Duration::from_secs(seconds())
        || of_them.len().min(of_us.len()) < TURNS
        || step < 3
    {
        of_them.extend(theirs.spans());
        of_us.extend(ours.spans());
        // One after the other, when both sides are at work.
        let at_work = of_them.len().min(of_us.len()) >= TURNS / 2;
        match step {
            0 if at_work => {
                theirs.kill_one();
                ours.kill_one();
                step = 1;
            }
            1 if of_them.len().min(of_us.len()) >= TURNS => {
                theirs.pause_one(true);
                std::thread::sleep(PAUSE);
                theirs.pause_one(false);
                step = 2;
            }
            2 => {
                ours.pause_one(true);
                std::thread::sleep(PAUSE);
                ours.pause_one(false);
                step = 3;
            }
            _ => {}
        }
        let counts = (of_them.len(), of_us.len());
        assert!(began.elapsed() < TOO_LONG, "their and our turns: {counts:?}, step {step}");
        std::thread::sleep(Duration::from_millis(20));
    }
    theirs.stop();
    ours.stop();
    of_them.extend(theirs.spans());
    of_us.extend(ours.spans());
    println!("{} turns of them, {} of ours", of_them.len(), of_us.len());
    assert_eq!(overlap(&[of_them, of_us].concat(), PERMITS), None);
}

/// The negative control: on a lock each, the same check finds an overlap.
fn overlap_without_a_common_lock(mut theirs: impl Side, mut ours: impl Side) {
    let began = Instant::now();
    let mut all = Vec::new();
    while overlap(&all, PERMITS).is_none() {
        all.extend(theirs.spans());
        all.extend(ours.spans());
        assert!(began.elapsed() < TOO_LONG, "the check finds nothing in {} turns", all.len());
        std::thread::sleep(Duration::from_millis(20));
    }
    theirs.stop();
    ours.stop();
}

#[test]
fn consuls_go_package() {
    let Some(server) = ConsulServer::start() else { return };
    let workers = |key: &str| Workers::start(&server, "mutex", &format!("{NAMESPACE}/{key}"));
    let Some(theirs) = workers("shared") else { return };
    exclude_each_other(theirs, Holders::start(&server, "lock-key", "shared"));
    let Some(theirs) = workers("theirs") else { return };
    overlap_without_a_common_lock(theirs, Holders::start(&server, "lock-key", "ours"));
}

#[test]
fn consul_lock() {
    let Some(server) = ConsulServer::start() else { return };
    let server = Arc::new(server);
    let commands = |key: &str| Commands::start(&server, &format!("{NAMESPACE}/{key}"));
    let Some(theirs) = commands("shared") else { return };
    exclude_each_other(theirs, Holders::start(&server, "consul-lock", "shared"));
    let Some(theirs) = commands("theirs") else { return };
    overlap_without_a_common_lock(theirs, Holders::start(&server, "consul-lock", "ours"));
}

#[test]
fn consuls_semaphore() {
    let Some(server) = ConsulServer::start() else { return };
    let workers = |key: &str| Workers::start(&server, "semaphore", &format!("{NAMESPACE}/{key}"));
    let holders = |key: &str| Holders::doing(&server, "lock-key", "permits", key);
    let Some(theirs) = workers("shared") else { return };
    exclude_each_other(theirs, holders("shared"));
    let Some(theirs) = workers("theirs") else { return };
    overlap_without_a_common_lock(theirs, holders("ours"));
}
