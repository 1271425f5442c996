//! Locks under load while servers fail over, and the rule by which it is judged.
//!
//! Asynchronous replication loses locks. So guards may overlap across a failover, but
//! only until a second after the promotion; tokens rise nevertheless, and a fence rejects
//! the older guard.

use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use dlock::Dlock;
use tokio::task::{JoinHandle, JoinSet};

use crate::failover_watch::FailsOver;
use crate::interval::HeldInterval;
use crate::process::now;
use crate::record_checker::{Record, RecordChecker};

/// How long after a promotion guards may overlap, and clients may be without a grant.
pub const AFTER_PROMOTION: Duration = Duration::from_secs(1);

/// Tasks that take and release locks until they are stopped.
#[derive(Debug)]
pub struct Load {
    shared: Arc<Shared>,
    tasks: Vec<JoinHandle<()>>,
    watching: JoinSet<()>,
}

#[derive(Debug, Default)]
struct Shared {
    stop: AtomicBool,
    /// For each client when it last got a lock.
    granted: Vec<AtomicU64>,
    /// For each key when it was last granted.
    granted_keys: Vec<AtomicU64>,
    records: Mutex<Vec<Record>>,
    errors: Mutex<Vec<String>>,
    /// A moment before each failover, and that of the promotion.
    failovers: Mutex<Vec<(u64, u64)>>,
}

/// What came of a load.
#[derive(Debug)]
pub struct LoadReport {
    /// How many locks were held and checked.
    pub checked: u64,
    /// How many failovers there were.
    pub failovers: usize,
    /// How many guards overlapped because of a failover.
    pub excused: u64,
    /// Overlaps and tokens for which no failover is an excuse.
    pub violations: Vec<String>,
    /// The errors that callers got.
    pub errors: Vec<String>,
}

impl Load {
    /// Starts `tasks` tasks for each client, which lock `keys` keys again and again.
    pub fn start(clients: &[Dlock], tasks: usize, keys: usize) -> Self {
        let granted = clients.iter().map(|_| AtomicU64::new(0)).collect();
        let granted_keys = (0..keys).map(|_| AtomicU64::new(0)).collect();
        let shared = Arc::new(Shared { granted, granted_keys, ..Shared::default() });
        let mut running = Vec::new();
        for (number, client) in clients.iter().enumerate() {
            for task in 0..tasks {
                let (shared, client) = (shared.clone(), client.clone());
                let first = number * tasks + task;
                running.push(tokio::spawn(async move {
                    for n in first.. {
                        if shared.stop.load(Ordering::Relaxed) {
                            return;
                        }
                        cycle(&shared, &client, number, n % keys, first).await;
                    }
                }));
            }
        }
        Load { shared, tasks: running, watching: JoinSet::new() }
    }

    /// Watches these servers for failovers.
    #[must_use]
    pub fn watching(mut self, servers: &impl FailsOver) -> Self {
        let shared = self.shared.clone();
        self.watching = servers.watch(Arc::new(move |from, promoted| {
            let failovers = shared.failovers.lock();
            failovers.unwrap_or_else(PoisonError::into_inner).push((from, promoted));
        }));
        self
    }

    /// How many locks were held so far.
    pub fn cycles(&self) -> usize {
        self.shared.records.lock().unwrap_or_else(PoisonError::into_inner).len()
    }

    /// Waits until each client got a lock after this moment, and returns how long after it
    /// that was.
    ///
    /// # Panics
    /// If that takes longer than 20 s.
    pub async fn clients_served_since(&self, moment: u64) -> Duration {
        served_since(&self.shared.granted, moment).await
    }

    /// Waits until each key was granted after this moment, and returns how long after it
    /// that was. When a release was answered and then lost by a failover, the key is taken
    /// until the end of its ttl.
    ///
    /// # Panics
    /// If that takes longer than 20 s.
    pub async fn keys_granted_since(&self, moment: u64) -> Duration {
        served_since(&self.shared.granted_keys, moment).await
    }

    /// Waits until clients and keys are served again after the failover of this round, and
    /// checks that it was soon: the clients had a lock within [`AFTER_PROMOTION`], and
    /// releases that were lost are made again well before the ttl is over.
    ///
    /// # Panics
    /// If it took longer.
    pub async fn recovers(&self, round: u64, killed: u64, promoted: u64, ttl: Duration) {
        let took = self.clients_served_since(promoted).await;
        let keys = self.keys_granted_since(promoted).await;
        println!(
            "round {round}: promoted after {:?}, all clients have locks {took:?} later, all keys {keys:?}",
            Duration::from_nanos(promoted - killed),
        );
        assert!(took < AFTER_PROMOTION, "{took:?} after the promotion");
        assert!(keys < ttl / 2, "lost releases are made again: {keys:?}");
    }

    /// Stops the tasks and judges what they did.
    ///
    /// # Panics
    /// If a task panicked.
    pub async fn stop(self) -> LoadReport {
        self.shared.stop.store(true, Ordering::Relaxed);
        for task in self.tasks {
            task.await.expect("a task of the load");
        }
        drop(self.watching);
        let mut checker = RecordChecker::default();
        let failovers = self.shared.failovers.lock().unwrap_or_else(PoisonError::into_inner);
        for (from, promoted) in &*failovers {
            let after = u64::try_from(AFTER_PROMOTION.as_nanos()).unwrap_or(u64::MAX);
            checker.failed_over(*from, promoted.saturating_add(after));
        }
        let take = |list: &Mutex<Vec<String>>| {
            std::mem::take(&mut *list.lock().unwrap_or_else(PoisonError::into_inner))
        };
        let records = &self.shared.records;
        for record in std::mem::take(&mut *records.lock().unwrap_or_else(PoisonError::into_inner)) {
            checker.add(record);
        }
        checker.sweep(u64::MAX);
        LoadReport {
            checked: checker.checked,
            failovers: failovers.len(),
            excused: checker.excused,
            violations: checker.violations,
            errors: take(&self.shared.errors),
        }
    }
}

async fn served_since(moments: &[AtomicU64], moment: u64) -> Duration {
    crate::conformance::eventually("everybody has a turn", async || {
        moments.iter().all(|at| at.load(Ordering::Relaxed) > moment)
    })
    .await;
    Duration::from_nanos(now().saturating_sub(moment))
}

async fn cycle(shared: &Shared, client: &Dlock, number: usize, key: usize, task: usize) {
    let guard = match client.mutex(format!("load:{key}")).lock().await {
        Ok(guard) => guard,
        Err(error) => {
            let mut errors = shared.errors.lock().unwrap_or_else(PoisonError::into_inner);
            errors.push(error.to_string());
            return;
        }
    };
    let mut held = HeldInterval::begin(&guard);
    shared.granted[number].store(now(), Ordering::Relaxed);
    shared.granted_keys[key].store(now(), Ordering::Relaxed);
    let work = tokio::time::sleep(Duration::from_millis(5));
    if let Some(held) = &mut held {
        held.during(&guard, work).await;
        let records = held.end(&guard, &format!("task-{task}"));
        shared.records.lock().unwrap_or_else(PoisonError::into_inner).extend(records);
    }
    // Lost or not is in the record; without an answer it is settled in the background.
    let _ = guard.release().await;
}
