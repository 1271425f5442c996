//! Rows that somebody else has locked for long: a migration, a person with `psql`.
//!
//! A transaction for several keys leaves out the rows that are locked, so that it waits for none
//! while it has others. Each of those is then locked alone. A row for which that has taken too
//! long is not waited for again for some seconds: one attempt, which fails at once.

use std::collections::HashMap;
use std::time::Duration;

use parking_lot::Mutex;
use tokio::time::Instant;

use super::names::LockId;

/// For how long a row is not waited for.
const REMEMBERED: Duration = Duration::from_secs(5);

/// The rows that were waited for in vain.
#[derive(Default)]
pub(super) struct Stuck(Mutex<HashMap<String, Instant>>);

impl Stuck {
    pub(super) fn contains(&self, lock: &LockId) -> bool {
        let now = Instant::now();
        self.0.lock().get(&lock.id).is_some_and(|until| *until > now)
    }

    fn add<'a>(&self, locks: impl Iterator<Item = &'a LockId>) {
        let now = Instant::now();
        let mut stuck = self.0.lock();
        stuck.retain(|_, until| *until > now);
        stuck.extend(locks.map(|lock| (lock.id.clone(), now + REMEMBERED)));
    }

    /// These rows are waited for now, one after the other.
    pub(super) fn wait_for(&self, locks: Vec<LockId>) -> Waiting<'_> {
        Waiting { stuck: self, locks }
    }
}

/// What is still waited for. If it is dropped before that is over, as when the time of the calls
/// has ended, these rows are stuck.
pub(super) struct Waiting<'a> {
    stuck: &'a Stuck,
    locks: Vec<LockId>,
}

impl Waiting<'_> {
    /// This row was locked, or the attempt failed for another reason.
    pub(super) fn is_over(&mut self, lock: &LockId) {
        self.locks.retain(|it| it != lock);
    }

    /// This row is stuck.
    pub(super) fn was_in_vain(&mut self, lock: &LockId) {
        self.stuck.add(std::iter::once(lock));
        self.is_over(lock);
    }
}

impl Drop for Waiting<'_> {
    fn drop(&mut self) {
        self.stuck.add(self.locks.iter());
    }
}
