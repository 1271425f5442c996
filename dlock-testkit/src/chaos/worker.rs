//! A worker process of a run: its tasks acquire locks and print a line for each.
//!
//! `R ...` are the records of one acquisition, `E kind` is an error that faults
//! explain, `V ...` is one that they do not. The process shuts down when it reads
//! `stop` or the end of its input.

use std::io::{BufRead as _, Write as _};
use std::process::ExitCode;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use dlock::{Dlock, Error, ErrorKind};
use rand::rngs::StdRng;
use rand::{RngExt as _, SeedableRng as _};

use super::Options;
use crate::interval::{HeldGuard, HeldInterval};

/// The keys that all workers use: mutexes, read-write locks, a semaphore, and mutexes
/// that are held for long.
pub(super) const KEYS: [&str; 8] = ["m0", "m1", "m2", "r0", "r1", "s0", "slow0", "slow1"];
/// The longest lease.
pub(super) const TTL: Duration = Duration::from_secs(3);
const SHORT_TTL: Duration = Duration::from_secs(1);
const PERMITS: u32 = 3;
/// The longest time for which a task holds a lock.
const LONGEST: Duration = Duration::from_millis(2_500);

#[derive(Default)]
struct Output {
    lines: Mutex<String>,
    stop: AtomicBool,
}

impl Output {
    fn write_line(&self, line: std::fmt::Arguments<'_>) {
        use std::fmt::Write as _;
        let mut lines = self.lines.lock().unwrap_or_else(PoisonError::into_inner);
        let _ = writeln!(lines, "{line}");
    }

    fn flush(&self) -> std::io::Result<()> {
        let lines = std::mem::take(&mut *self.lines.lock().unwrap_or_else(PoisonError::into_inner));
        let mut out = std::io::stdout().lock();
        out.write_all(lines.as_bytes())?;
        out.flush()
    }

    fn is_stopping(&self) -> bool {
        self.stop.load(Ordering::Relaxed)
    }
}

pub(super) async fn work(url: &str, number: usize, options: &Options) -> ExitCode {
    let output = Arc::new(Output::default());
    let client = Dlock::builder()
        .url(url)
        .namespace("chaos")
        .ttl(SHORT_TTL)
        .wait(Duration::from_secs(8))
        .call_timeout(Duration::from_secs(1))
        .client_name(format!("worker-{number}"));
    let client = match options.plant {
        Some(bug) => client.plant(bug),
        None => client,
    };
    let client = match client.connect_lazy() {
        Ok(client) => client,
        Err(error) => {
            eprintln!("{error}");
            return ExitCode::FAILURE;
        }
    };
    std::thread::spawn({
        let output = output.clone();
        move || {
            for line in std::io::stdin().lock().lines() {
                if !line.is_ok_and(|line| line != "stop") {
                    break;
                }
            }
            output.stop.store(true, Ordering::Relaxed);
        }
    });
    std::thread::spawn({
        let output = output.clone();
        move || {
            // The coordinator is gone: there is nothing left to do.
            while output.flush().is_ok() {
                std::thread::sleep(Duration::from_millis(20));
            }
            std::process::exit(1);
        }
    });
    let tasks: Vec<_> = (0..options.tasks)
        .map(|number_of_task| {
            let who = format!("{number}.{}.{number_of_task}", std::process::id());
            let seed = options.seed ^ u64::from(std::process::id()) << 20 ^ number_of_task as u64;
            let random = StdRng::seed_from_u64(seed);
            let (client, output) = (client.clone(), output.clone());
            let task = Task { client, output, random, number, who };
            tokio::spawn(task.run(number_of_task == 0))
        })
        .collect();
    while !output.is_stopping() {
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
    // The tasks are still at work, as in a rolling restart.
    client.shutdown(Duration::from_millis(300)).await;
    for task in tasks {
        if let Err(error) = task.await {
            output.write_line(format_args!("V a task panicked: {error}"));
        }
    }
    client.shutdown(Duration::ZERO).await; // releases that are still to be sent
    drop(client);
    tokio::time::sleep(Duration::from_millis(150)).await;
    let _ = output.flush();
    ExitCode::SUCCESS
}

struct Task {
    client: Dlock,
    output: Arc<Output>,
    random: StdRng,
    /// The number of the process.
    number: usize,
    who: String,
}

impl Task {
    async fn run(mut self, slow: bool) {
        while !self.output.is_stopping() {
            let burst = if slow { 1 } else { 30 };
            let mutex = self.mutex_of_burst();
            for _ in 0..burst {
                let done = if slow { self.slow().await } else { self.quick(mutex).await };
                if let Err(error) = done {
                    self.report_error(&error);
                    self.pause(10..60).await;
                }
                if self.output.is_stopping() {
                    return;
                }
            }
            self.pause(50..400).await;
        }
    }

    /// The mutex of a burst. For some time it is mostly the same for all tasks of a
    /// process, so that there are hand-overs inside the process too.
    fn mutex_of_burst(&mut self) -> &'static str {
        let stray = if self.random.random_bool(0.2) { self.random.random_range(0..3) } else { 0 };
        let second = usize::try_from(crate::process::now() / 1_000_000_000).unwrap_or(0);
        KEYS[(self.number + second / 3 + stray) % 3]
    }

    async fn pause(&mut self, millis: std::ops::Range<u64>) {
        let millis = self.random.random_range(millis);
        tokio::time::sleep(Duration::from_millis(millis)).await;
    }

    fn report_error(&self, error: &Error) {
        match error.kind() {
            ErrorKind::ShuttingDown if self.output.is_stopping() => {}
            kind @ (ErrorKind::TimedOut
            | ErrorKind::Lost
            | ErrorKind::Unavailable
            | ErrorKind::Unknown) => self.output.write_line(format_args!("E {kind:?}")),
            _ => self.output.write_line(format_args!("V {}: {error}", self.who)),
        }
    }

    /// Holds a lock for so long that it must be renewed meanwhile.
    async fn slow(&mut self) -> dlock::Result<()> {
        let key = KEYS[6 + self.random.random_range(0..2)];
        let ttl = if self.random.random_bool(0.5) { SHORT_TTL } else { TTL };
        let guard = self.client.mutex(key).ttl(ttl).lock().await?;
        let Some(interval) = HeldInterval::begin(&guard) else { return Ok(()) };
        let length = self.random.random_range(Duration::ZERO..LONGEST);
        let ran = guard.run(tokio::time::sleep(length)).await;
        self.report(interval, &guard);
        drop(guard);
        ran
    }

    async fn quick(&mut self, mutex: &str) -> dlock::Result<()> {
        let rwlock = KEYS[3 + self.random.random_range(0..2)];
        let lock = self.client.mutex(mutex);
        match self.random.random_range(0..100) {
            0..85 => {
                let guard = lock.lock().await?;
                let Some(interval) = self.hold(&guard).await else { return Ok(()) };
                self.report(interval, &guard);
                if self.random.random_bool(0.5) {
                    return guard.release().await.map(drop);
                }
            }
            85..91 => {
                let lock = self.client.rwlock(rwlock);
                let writes = self.random.random_bool(0.2);
                let guard = if writes { lock.write() } else { lock.read() }.lock().await?;
                let Some(interval) = self.hold(&guard).await else { return Ok(()) };
                self.report(interval, &guard);
            }
            91..93 => {
                let take = self.random.random_range(1..=2);
                let permits = self.client.semaphore(KEYS[5], PERMITS).permits(take).lock().await?;
                let permits = (permits, PERMITS);
                let Some(interval) = self.hold(&permits).await else { return Ok(()) };
                self.report(interval, &permits);
            }
            93..95 => {
                let other = KEYS[self.random.random_range(0..3)];
                let guard = self.client.all_of([mutex, other]).lock().await?;
                let Some(interval) = self.hold(&guard).await else { return Ok(()) };
                self.report(interval, &guard);
            }
            95..96 => {
                let guard = lock.fair().lock().await?;
                let Some(interval) = self.hold(&guard).await else { return Ok(()) };
                self.report(interval, &guard);
            }
            96..98 => {
                let Some(guard) = lock.try_lock().await? else { return Ok(()) };
                let Some(interval) = self.hold(&guard).await else { return Ok(()) };
                self.report(interval, &guard);
            }
            _ => {
                // The acquire is cancelled at a random point.
                let patience = Duration::from_micros(self.random.random_range(0..20_000));
                let Ok(guard) = tokio::time::timeout(patience, lock.lock()).await else {
                    return Ok(());
                };
                let guard = guard?;
                let Some(interval) = HeldInterval::begin(&guard) else { return Ok(()) };
                self.report(interval, &guard);
            }
        }
        Ok(())
    }

    /// Holds the lock, most often as short as possible.
    async fn hold(&mut self, guard: &impl HeldGuard) -> Option<HeldInterval> {
        let interval = HeldInterval::begin(guard)?;
        match self.random.random_range(0..5_000) {
            0 => self.pause(20..100).await,
            1..50 => self.pause(0..3).await,
            _ => tokio::task::yield_now().await,
        }
        Some(interval)
    }

    fn report(&self, interval: HeldInterval, guard: &impl HeldGuard) {
        use std::fmt::Write as _;
        let mut line = String::new();
        for record in interval.end(guard, &self.who) {
            let _ = write!(line, "{}{record}", if line.is_empty() { "" } else { ";" });
        }
        self.output.write_line(format_args!("{line}"));
    }
}
