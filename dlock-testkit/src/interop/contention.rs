//! Programs of two sides that want the same lock for a while, some of which are killed and
//! stopped. The times at which each held it are compared from outside.

use std::process::{Child, Command, Stdio};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::{Receiver, channel};
use std::sync::{Arc, Mutex, PoisonError};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use dlock::Mode;

use super::{Held, Peer, Span, overlap, span};
use crate::holder::HolderProcess;
use crate::process;
use crate::record_checker::{Record, RecordChecker};

/// The processes of each side.
const PROCESSES: usize = 4;
/// The number of the process that is killed, and of the one that is stopped.
const KILLED: usize = 0;
const STOPPED: usize = 2;
/// How often each side must have held the lock, however long that takes.
const TURNS: usize = 10;
/// A test fails when this time has passed beyond the time that was asked for.
const TOO_LONG: Duration = Duration::from_secs(180);
/// The time for which a process is stopped. Sessions live three times as long.
const STOP: Duration = Duration::from_millis(600);
/// The permits of all semaphores.
const PERMITS: usize = 2;

/// How long both sides want the lock, in seconds: five, or `DLOCK_TEST_SECONDS`.
pub fn seconds() -> u64 {
    let seconds = std::env::var("DLOCK_TEST_SECONDS").ok();
    seconds.and_then(|seconds| seconds.parse().ok()).unwrap_or(5)
}

/// One side: programs that take the lock again and again.
pub trait Side {
    /// When the lock was held, as far as that is new.
    fn spans(&mut self) -> Vec<Span>;
    /// Kills one of the programs with SIGKILL.
    fn kill_one(&mut self);
    /// Stops another one with SIGSTOP.
    fn stop_one(&mut self);
    /// Lets it go on.
    fn continue_it(&mut self);
    /// Ends all programs.
    fn end(&mut self);
}

/// Processes of dlock.
#[derive(Debug)]
pub struct Holders {
    processes: Vec<HolderProcess>,
    checker: RecordChecker,
}

impl Holders {
    /// Starts processes with clients of this URL, which do these [commands](HolderProcess) in
    /// turn. They have a session of so many seconds, and a short one for the one that is killed.
    pub fn start(url: &str, ttl: u64, commands: &[&str], key: &str) -> Self {
        let separator = if url.contains('?') { '&' } else { '?' };
        let start = |n: usize| {
            let ttl = if n == KILLED { ttl.min(2) } else { ttl };
            let mut holder = HolderProcess::start(&format!("{url}{separator}ttl={ttl}s"));
            holder.send(&format!("{} {key} {ttl}000 2", commands[n % commands.len()]));
            holder
        };
        let processes = (0..PROCESSES).map(start).collect();
        Holders { processes, checker: RecordChecker::default() }
    }
}

impl Side for Holders {
    fn spans(&mut self) -> Vec<Span> {
        let mut spans = Vec::new();
        for (n, holder) in self.processes.iter_mut().enumerate() {
            let lines = holder.process.take_lines();
            for record in lines.iter().filter_map(|line| line.parse::<Record>().ok()) {
                let held = match record.mode {
                    Mode::Shared => Held::Shared,
                    Mode::Exclusive => Held::Exclusive,
                    _ => Held::Permit,
                };
                spans.push(Span { held, from: record.from, to: record.until, who: 100 + n });
                self.checker.add(record);
            }
        }
        spans
    }

    fn kill_one(&mut self) {
        self.processes[KILLED].process.kill();
    }

    fn stop_one(&mut self) {
        self.processes[STOPPED].process.pause();
    }

    fn continue_it(&mut self) {
        self.processes[STOPPED].process.resume();
    }

    fn end(&mut self) {
        self.processes.iter_mut().for_each(|holder| holder.process.kill());
    }
}

/// Programs of another language that go on until they are killed.
#[derive(Debug)]
pub struct Peers(Vec<Peer>);

impl Peers {
    /// Starts programs of these kinds in turn, for so many seconds at most; `None` if one is
    /// not installed.
    pub fn start(kinds: &[&str], start: impl Fn(&str, u64) -> Option<Peer>) -> Option<Self> {
        let most = TOO_LONG.as_secs() * 2 + seconds();
        let start = |n: usize| start(kinds[n % kinds.len()], most);
        let mut peers: Vec<_> = (0..PROCESSES).map(start).collect::<Option<_>>()?;
        peers.iter_mut().for_each(Peer::go);
        Some(Peers(peers))
    }
}

impl Side for Peers {
    fn spans(&mut self) -> Vec<Span> {
        let peers = self.0.iter_mut().enumerate();
        peers.flat_map(|(who, peer)| peer.new_spans(who)).collect()
    }

    fn kill_one(&mut self) {
        self.0[KILLED].process.kill();
    }

    fn stop_one(&mut self) {
        self.0[STOPPED].process.pause();
    }

    fn continue_it(&mut self) {
        self.0[STOPPED].process.resume();
    }

    fn end(&mut self) {
        self.0.iter_mut().for_each(|peer| peer.process.kill());
    }
}

type Running = Arc<Mutex<Option<Child>>>;

fn locked(running: &Running) -> std::sync::MutexGuard<'_, Option<Child>> {
    running.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Threads that run a command again and again, which holds the lock once.
#[derive(Debug)]
pub struct Commands {
    may_be_killed: bool,
    is_over: Arc<AtomicBool>,
    spans: Receiver<Span>,
    threads: Vec<JoinHandle<()>>,
    /// The process of each thread.
    running: Vec<Running>,
}

impl Commands {
    /// Starts the threads. The command prints a span, as [`span`] reads it.
    pub fn start(command: impl Fn() -> Command + Clone + Send + 'static) -> Self {
        let (sender, spans) = channel();
        let is_over = Arc::new(AtomicBool::new(false));
        let running: Vec<Running> = (0..PROCESSES).map(|_| Running::default()).collect();
        let thread = |who: usize| {
            let (command, is_over) = (command.clone(), is_over.clone());
            let (running, sender) = (running[who].clone(), sender.clone());
            std::thread::spawn(move || {
                while !is_over.load(Ordering::Relaxed) {
                    let mut command = command();
                    command.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::null());
                    let mut child = command.spawn().expect("the command can be run");
                    let mut output = child.stdout.take().expect("its output");
                    *locked(&running) = Some(child);
                    let mut printed = String::new();
                    let _ = std::io::Read::read_to_string(&mut output, &mut printed);
                    printed.lines().filter_map(|line| span(line, who)).for_each(|span| {
                        let _ = sender.send(span);
                    });
                    let child = locked(&running).take();
                    if let Some(mut child) = child {
                        let _ = child.wait();
                    }
                }
            })
        };
        let threads = (0..PROCESSES).map(thread).collect();
        Commands { may_be_killed: true, is_over, spans, threads, running }
    }

    /// None of them is killed.
    #[must_use]
    pub fn unharmed(self) -> Self {
        Commands { may_be_killed: false, ..self }
    }
}

impl Side for Commands {
    fn spans(&mut self) -> Vec<Span> {
        self.spans.try_iter().collect()
    }

    fn kill_one(&mut self) {
        if let Some(child) = locked(&self.running[KILLED]).as_mut().filter(|_| self.may_be_killed) {
            let _ = child.kill();
        }
    }

    fn stop_one(&mut self) {
        if let Some(child) = locked(&self.running[STOPPED]).as_ref() {
            process::pause(child.id());
        }
    }

    fn continue_it(&mut self) {
        if let Some(child) = locked(&self.running[STOPPED]).as_ref() {
            process::resume(child.id());
        }
    }

    fn end(&mut self) {
        self.is_over.store(true, Ordering::Relaxed);
        for thread in self.threads.drain(..) {
            let _ = thread.join();
        }
    }
}

/// Both sides want one lock for [some time](seconds), and until each had its turns. One
/// program of each side is killed, and others are stopped now and then.
///
/// # Panics
/// If two held the lock together, or if one side gets no turns.
pub fn exclude_each_other(mut theirs: impl Side, mut ours: Holders) {
    let (began, asked) = (Instant::now(), Duration::from_secs(seconds()));
    let (mut of_them, mut of_us) = (Vec::new(), Vec::new());
    let mut step = 0_u32;
    loop {
        of_them.extend(theirs.spans());
        of_us.extend(ours.spans());
        let turns = of_them.len().min(of_us.len());
        if began.elapsed() >= asked && turns >= TURNS && step >= 3 {
            break;
        }
        let counts = (of_them.len(), of_us.len());
        assert!(began.elapsed() < asked + TOO_LONG, "their and our turns: {counts:?}, step {step}");
        // When both sides are at work.
        if step == 0 && turns >= TURNS / 2 {
            theirs.kill_one();
            ours.kill_one();
            step = 1;
        } else if step > 0 && turns >= TURNS {
            let side: &mut dyn Side = if step % 2 == 1 { &mut theirs } else { &mut ours };
            side.stop_one();
            std::thread::sleep(STOP);
            side.continue_it();
            std::thread::sleep(STOP); // the others need their turns too
            step += 1;
        }
        std::thread::sleep(Duration::from_millis(20));
    }
    theirs.end();
    ours.end();
    of_them.extend(theirs.spans());
    of_us.extend(ours.spans());
    let stops = step - 1;
    println!("{} turns of them, {} of ours, {stops} stops", of_them.len(), of_us.len());
    assert_eq!(overlap(&[of_them, of_us].concat(), PERMITS), None);
    ours.checker.sweep(u64::MAX);
    assert_eq!(ours.checker.violations, Vec::<String>::new(), "tokens rise");
}

/// The negative control: on a lock each, the same check finds an overlap.
///
/// # Panics
/// If it finds none.
pub fn overlap_without_a_common_lock(mut theirs: impl Side, mut ours: Holders) {
    let began = Instant::now();
    let mut all = Vec::new();
    while overlap(&all, PERMITS).is_none() {
        all.extend(theirs.spans());
        all.extend(ours.spans());
        assert!(began.elapsed() < TOO_LONG, "the check finds nothing in {} turns", all.len());
        std::thread::sleep(Duration::from_millis(20));
    }
    theirs.end();
    ours.end();
}
