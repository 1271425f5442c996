//! What the tasks of a worker do.

use std::future::Future;
use std::ops::Range;
use std::sync::Arc;
use std::time::Duration;

use dlock::{Dlock, Error, ErrorKind};
use rand::rngs::StdRng;
use rand::{RngExt as _, SeedableRng as _};
use tokio::task::JoinSet;

use super::servers::Topology;
use super::worker::Output;
use crate::interval::{HeldGuard, HeldInterval};

/// The keys that all workers want all the time: mutexes, read-write locks, semaphores.
pub(super) const KEYS: [&str; 8] = ["m0", "m1", "m2", "r0", "r1", "r2", "s0", "many"];
/// The keys of mutexes that are held for long.
pub(super) const SLOW_KEYS: [&str; 2] = ["slow0", "slow1"];
/// The longest lease.
pub(super) const TTL: Duration = Duration::from_secs(3);
/// The lease of all keys but the slow ones, where each lock has its own.
const SHORT_TTL: Duration = Duration::from_secs(1);
/// How long Consul keeps others from what a session held that ended without a release: longer
/// than any guard of it can last.
pub(super) const LOCK_DELAY: Duration = Duration::from_secs(4);
/// How many of the keys are those of mutexes.
const MUTEXES: usize = 3;
const PERMITS: u32 = 3;
/// The capacity of the semaphore with many holders, and the most that one of them takes.
const MANY: u32 = 100;
const MANY_AT_ONCE: u32 = 50;
/// How many holders of permits, and how many readers, each process has at a time.
const CROWD: usize = 25;
const READERS: usize = 20;
/// How often a task locks something before it pauses.
const BURST: usize = 30;
/// The longest time for which a task holds a lock.
const LONGEST: Duration = Duration::from_millis(2_500);

/// What a task does.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Load {
    /// Holds mutexes for so long that they are renewed.
    Slow,
    /// Many holders of permits of one semaphore at the same time.
    Crowd,
    /// Many readers of one key at the same time, and a writer now and then.
    Readers,
    /// All primitives, as fast as possible.
    Quick,
}

/// The keys that all workers want all the time. A quorum has exclusive locks only, and
/// Consul no readers.
pub(super) fn keys(topology: Topology) -> &'static [&'static str] {
    match topology {
        Topology::Redlock => &KEYS[..MUTEXES],
        Topology::Consul => &["m0", "m1", "m2", "s0", "many"],
        _ => &KEYS,
    }
}

/// What the first tasks of each worker do.
pub(super) fn loads(topology: Topology) -> &'static [Load] {
    match topology {
        Topology::Redlock => &[Load::Slow],
        Topology::Consul => &[Load::Slow, Load::Crowd],
        _ => &[Load::Slow, Load::Crowd, Load::Readers],
    }
}

/// The lease of all keys but the slow ones. The locks of a session have all the same.
pub(super) fn short_ttl(topology: Topology) -> Duration {
    if topology.has_sessions() { TTL } else { SHORT_TTL }
}

/// How long the store may keep a lock of a process that died.
pub(super) fn expiry(topology: Topology, ttl: Duration) -> Duration {
    // Consul ends a session after one to two ttls, and then there is the lock-delay.
    if topology == Topology::Consul { ttl * 2 + LOCK_DELAY } else { ttl }
}

/// A task of a worker.
pub(super) struct Task {
    pub(super) client: Dlock,
    pub(super) topology: Topology,
    pub(super) output: Arc<Output>,
    pub(super) random: StdRng,
    /// The number of the process.
    pub(super) number: usize,
    /// The number of the process, its id, and the number of the task.
    pub(super) who: String,
}

impl Task {
    pub(super) async fn run(mut self, load: Load) {
        while !self.output.is_stopping() {
            match load {
                Load::Slow => {
                    let done = self.slow().await;
                    self.finish(done).await;
                }
                Load::Crowd => self.side_by_side(self.crowd(), Task::permits).await,
                Load::Readers => self.side_by_side(READERS, Task::read_or_write).await,
                Load::Quick => {
                    let mutex = self.mutex_of_burst();
                    for _ in 0..BURST {
                        let done = self.quick(mutex).await;
                        self.finish(done).await;
                        if self.output.is_stopping() {
                            return;
                        }
                    }
                }
            }
            self.pause(50..400).await;
        }
    }

    async fn finish(&mut self, done: dlock::Result<()>) {
        if let Err(error) = done {
            self.report_error(&error);
            self.pause(10..60).await;
        }
    }

    /// Runs this work many times at the same time.
    async fn side_by_side<F>(&mut self, times: usize, work: fn(Task) -> F)
    where
        F: Future<Output = ()> + Send + 'static,
    {
        let mut running = JoinSet::new();
        for part in 0..times {
            running.spawn(work(Task {
                client: self.client.clone(),
                topology: self.topology,
                output: self.output.clone(),
                random: StdRng::seed_from_u64(self.random.random()),
                number: self.number,
                who: format!("{}.{part}", self.who),
            }));
        }
        while let Some(ended) = running.join_next().await {
            if let Err(error) = ended {
                self.output.write_line(format_args!("V a task panicked: {error}"));
            }
        }
    }

    /// How many holders of permits there are at a time. At Consul each permit is a session.
    fn crowd(&self) -> usize {
        if self.topology == Topology::Consul { CROWD / 5 } else { CROWD }
    }

    /// Takes one permit, or many at once, of a semaphore with many holders.
    async fn permits(mut self) {
        let many = if self.topology == Topology::Consul { MANY_AT_ONCE / 10 } else { MANY_AT_ONCE };
        let count = if self.random.random_bool(0.02) { many } else { 1 };
        let done = async {
            let lock = self.client.semaphore("many", MANY).permits(count);
            let permits = (lock.lock().await?, MANY);
            self.hold_for(&permits, 5..200).await;
            Ok(())
        };
        let done = done.await;
        self.finish(done).await;
    }

    /// Reads for some time; one of many writes.
    async fn read_or_write(mut self) {
        let done = async {
            let lock = self.client.rwlock("r2");
            let lock = if self.random.random_bool(0.03) { lock.write() } else { lock.read() };
            let lock = if self.random.random_bool(0.2) { lock.fair() } else { lock };
            let guard = lock.lock().await?;
            self.hold_for(&guard, 1..60).await;
            Ok(())
        };
        let done = done.await;
        self.finish(done).await;
    }

    /// The mutex of a burst. For some time it is mostly the same for all tasks of a
    /// process, so that there are hand-overs inside the process too.
    fn mutex_of_burst(&mut self) -> &'static str {
        let stray = if self.random.random_bool(0.2) { self.random.random_range(0..3) } else { 0 };
        let second = usize::try_from(crate::process::now() / 1_000_000_000).unwrap_or(0);
        KEYS[(self.number + second / 3 + stray) % MUTEXES]
    }

    async fn pause(&mut self, millis: Range<u64>) {
        let millis = self.random.random_range(millis);
        tokio::time::sleep(Duration::from_millis(millis)).await;
    }

    fn report_error(&self, error: &Error) {
        match error.kind() {
            ErrorKind::ShuttingDown if self.output.is_stopping() => {}
            kind @ (ErrorKind::TimedOut
            | ErrorKind::Lost
            | ErrorKind::Unavailable
            | ErrorKind::Unknown) => {
                let key = error.key().map_or("", |key| key.as_str());
                self.output.write_line(format_args!("E {kind:?} {key}"));
            }
            _ => self.output.write_line(format_args!("V {}: {error}", self.who)),
        }
    }

    /// Holds a lock for so long that it must be renewed meanwhile.
    async fn slow(&mut self) -> dlock::Result<()> {
        // Each process wants always the same one, so that both are wanted all the time.
        let key = SLOW_KEYS[self.number % SLOW_KEYS.len()];
        let ttl = if self.random.random_bool(0.5) { short_ttl(self.topology) } else { TTL };
        let guard = self.client.mutex(key).ttl(ttl).lock().await?;
        let Some(mut interval) = HeldInterval::begin(&guard) else { return Ok(()) };
        self.output.write_line(format_args!("A {key} {}", self.who));
        let length = self.random.random_range(Duration::ZERO..LONGEST);
        let ran = interval.during(&guard, guard.run(tokio::time::sleep(length))).await;
        self.report(interval, &guard);
        drop(guard);
        ran
    }

    async fn quick(&mut self, mutex: &str) -> dlock::Result<()> {
        let rwlock = KEYS[3 + self.random.random_range(0..2)];
        let lock = self.client.mutex(mutex);
        let what = match self.random.random_range(0..100) {
            85..91 | 95 if !self.topology.has_readers() => 0,
            91..93 if self.topology == Topology::Redlock => 0, // not with a quorum
            what => what,
        };
        match what {
            0..85 => {
                let guard = lock.lock().await?;
                if self.hold(&guard).await && self.random.random_bool(0.5) {
                    return guard.release().await.map(drop);
                }
            }
            85..91 => {
                let lock = self.client.rwlock(rwlock);
                let writes = self.random.random_bool(0.2);
                let guard = if writes { lock.write() } else { lock.read() }.lock().await?;
                self.hold(&guard).await;
            }
            91..93 => {
                let take = self.random.random_range(1..=2);
                let permits = self.client.semaphore("s0", PERMITS).permits(take).lock().await?;
                let permits = (permits, PERMITS);
                self.hold(&permits).await;
            }
            93..95 => {
                let other = KEYS[self.random.random_range(0..3)];
                let guard = self.client.all_of([mutex, other]).lock().await?;
                self.hold(&guard).await;
            }
            95..96 => {
                let guard = lock.fair().lock().await?;
                self.hold(&guard).await;
            }
            96..98 => {
                let Some(guard) = lock.try_lock().await? else { return Ok(()) };
                self.hold(&guard).await;
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

    /// Holds the lock for some milliseconds, and reports that.
    async fn hold_for(&mut self, guard: &impl HeldGuard, millis: Range<u64>) {
        let Some(mut interval) = HeldInterval::begin(guard) else { return };
        interval.during(guard, self.pause(millis)).await;
        self.report(interval, guard);
    }

    /// Holds the lock, most often as short as possible, and reports that; false if it was
    /// lost before.
    async fn hold(&mut self, guard: &impl HeldGuard) -> bool {
        let Some(mut interval) = HeldInterval::begin(guard) else { return false };
        match self.random.random_range(0..5_000) {
            0 => interval.during(guard, self.pause(20..100)).await,
            1..50 => interval.during(guard, self.pause(0..3)).await,
            _ => tokio::task::yield_now().await,
        }
        self.report(interval, guard);
        true
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
