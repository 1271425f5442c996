//! Whether everything works again after a fault.
//!
//! When a fault is over, each key must have a holder, each worker must get a lock, and
//! each worker must listen to notices, all of them within the ttl and
//! [`RECOVERY`]. A lock that was held all the time needs no new holder.

use std::collections::BTreeMap;
use std::time::Duration;

use super::Options;
use super::load::{self, SLOW_KEYS, TTL};
use super::run::{Run, nanos};
use crate::process::now;
use crate::record_checker::Record;

/// How long it may take until everything works again, beyond the ttl.
const RECOVERY: Duration = Duration::from_secs(3);
/// How long a line of a worker may be on its way. It says when its lock was acquired, so
/// this adds nothing to the recovery.
const ON_ITS_WAY: Duration = Duration::from_secs(1);

/// What the workers got since the last fault was over.
#[derive(Debug, Default)]
pub(super) struct Recovery {
    since: u64,
    keys: BTreeMap<String, u64>,
    workers: BTreeMap<usize, u64>,
    /// Who holds the slow keys now, and since when.
    holding: BTreeMap<String, (String, u64)>,
}

impl Recovery {
    /// A fault is over.
    fn begin(&mut self, since: u64) {
        self.since = since;
        self.keys.clear();
        self.workers.clear();
    }

    /// Somebody said that it acquired a slow key just now.
    pub(super) fn on_acquired(&mut self, key: &str, who: &str) {
        self.holding.insert(key.to_owned(), (who.to_owned(), now()));
    }

    pub(super) fn on_record(&mut self, record: &Record) {
        if self.holding.get(&record.key).is_some_and(|(who, _)| *who == record.who) {
            self.holding.remove(&record.key);
        }
        if record.from <= self.since {
            return;
        }
        let first = |at: &mut u64| *at = record.from.min(*at);
        self.keys.entry(record.key.clone()).and_modify(first).or_insert(record.from);
        let worker = record.who.split('.').next().and_then(|number| number.parse().ok());
        if let Some(worker) = worker {
            self.workers.entry(worker).and_modify(first).or_insert(record.from);
        }
    }

    /// The process with this id has ended, and all its lines were read.
    pub(super) fn worker_is_gone(&mut self, id: u32) {
        let id = id.to_string();
        self.holding.retain(|_, (who, _)| who.split('.').nth(1) != Some(&id));
    }

    /// When the key had a holder first.
    fn of_key(&self, key: &str) -> Option<u64> {
        let held = self.holding.get(key).map(|(_, since)| *since);
        self.keys.get(key).copied().into_iter().chain(held).min()
    }
}

/// One thing that must work again.
struct Expected {
    what: String,
    within: Duration,
    /// When it worked again; the end of the fault if it worked all the time.
    worked: Option<u64>,
}

/// Waits until everything works again after a fault that is over now. Returns how long
/// that took in milliseconds, and what was the last; `None` if the run ends meanwhile.
pub(super) async fn recovered(
    run: &Run,
    options: &Options,
    is_listening: impl Fn(usize) -> bool,
    after: &str,
) -> Option<(u64, String)> {
    let (over, count, slack) = (now(), options.processes, options.slack);
    run.state().recovery.begin(over);
    let bound = |ttl| load::expiry(options.topology, ttl) + RECOVERY + slack;
    let (short, long) = (bound(load::short_ttl(options.topology)), bound(TTL));
    let expected = |what: String, within| Expected { what, within, worked: None };
    let mut keys: Vec<_> =
        (load::keys(options.topology).iter().map(|key| expected((*key).to_owned(), short)))
            .chain(SLOW_KEYS.iter().take(count).map(|key| expected((*key).to_owned(), long)))
            .collect();
    let mut workers: Vec<_> =
        (0..count).map(|number| expected(format!("worker {number}"), short)).collect();
    let mut notices: Vec<_> = (0..count)
        .map(|number| expected(format!("the subscription of worker {number}"), short))
        .collect();
    loop {
        {
            let state = run.state();
            for key in &mut keys {
                key.worked = key.worked.or_else(|| state.recovery.of_key(&key.what));
            }
            for (number, worker) in workers.iter_mut().enumerate() {
                worker.worked =
                    worker.worked.or_else(|| state.recovery.workers.get(&number).copied());
            }
        }
        for (worker, notices) in notices.iter_mut().enumerate() {
            let works = || is_listening(worker).then(now);
            notices.worked = notices.worked.or_else(works);
        }
        let all = || keys.iter().chain(&workers).chain(&notices);
        let is_over = now() > over + nanos(long + ON_ITS_WAY);
        if is_over || all().all(|expected| expected.worked.is_some()) {
            let took = |it: &Expected| it.worked.map(|at| at.saturating_sub(over));
            for late in all().filter(|it| took(it).is_none_or(|took| took > nanos(it.within))) {
                let took = took(late).map_or("did not recover".to_owned(), |took| {
                    format!("recovered after {:?}", Duration::from_nanos(took))
                });
                let Expected { what, within, .. } = late;
                run.report_violation(format!("{what} {took}, not within {within:?} after {after}"));
            }
            let slowest = all().max_by_key(|it| took(it))?;
            return took(slowest).map(|took| (took / 1_000_000, slowest.what.clone()));
        }
        if run.is_stopping() {
            return None; // the workers are shutting down
        }
        tokio::time::sleep(Duration::from_millis(5)).await;
    }
}
