//! What a process holds and waits for, as [`Dlock::local_state`] shows it.

use std::time::Duration;

use super::Dlock;
use crate::claim::Mode;
use crate::clock::Moment;
use crate::key::Key;
use crate::machine::{LeaseStatus, TicketSnapshot};
use crate::primitives::guard::State;

/// The locks that this process holds and waits for: [`Dlock::local_state`].
#[derive(Clone, Debug, Default)]
#[non_exhaustive]
pub struct LocalState {
    /// The locks and permits that this process holds.
    pub held: Vec<LocalHold>,
    /// The locks and permits that tasks of this process wait for.
    pub waiting: Vec<LocalWait>,
}

/// A lock that this process holds.
#[derive(Clone, Debug)]
#[non_exhaustive]
pub struct LocalHold {
    /// The key that is held.
    pub key: Key,
    /// How the key is held.
    pub mode: Mode,
    /// The fencing token of the holder; `None` for permits, which have none.
    pub token: Option<u64>,
    /// The state of the lock, as [`Guard::state`](crate::Guard::state) tells it.
    pub state: State,
    /// How long the lock has been held.
    pub held_for: Duration,
    /// How long the lock is still held for certain if it is not renewed.
    pub valid_for: Duration,
    /// The tags that `.tag(name, value)` added.
    pub tags: Vec<(String, String)>,
}

/// A lock that a task of this process waits for.
#[derive(Clone, Debug)]
#[non_exhaustive]
pub struct LocalWait {
    /// The key that the task waits for.
    pub key: Key,
    /// How the task wants to hold the key.
    pub mode: Mode,
    /// How long the task has waited.
    pub waiting_for: Duration,
    /// The tags that `.tag(name, value)` added.
    pub tags: Vec<(String, String)>,
}

impl Dlock {
    /// The locks that this process holds and waits for through this client. It
    /// asks no backend.
    ///
    /// ```
    /// # #[tokio::main(flavor = "current_thread")] async fn main() -> dlock::Result<()> {
    /// # let dlock = dlock::testing::client();
    /// let guard = dlock.mutex("order:7").lock().await?;
    /// let state = dlock.local_state();
    /// assert_eq!(state.held[0].key.as_str(), "order:7");
    /// assert!(state.waiting.is_empty());
    /// # drop(guard);
    /// # Ok(()) }
    /// ```
    pub fn local_state(&self) -> LocalState {
        let core = &self.handle.core;
        let mut state = LocalState::default();
        let now = core.now();
        for snapshot in core.look_all(|machine| machine.snapshot(now)).into_iter().flatten() {
            state.add(now, snapshot);
        }
        state
    }
}

impl LocalState {
    fn add(&mut self, now: Moment, snapshot: TicketSnapshot) {
        let TicketSnapshot { key, mode, since, lease, holder } = snapshot;
        let since = now.since(since);
        let tags = holder.tags.clone();
        let Some((token, status)) = lease else {
            self.waiting.push(LocalWait { key, mode, waiting_for: since, tags });
            return;
        };
        let (state, valid_for) = match status {
            LeaseStatus::Held { until, certain: true } => (State::Held, until.since(now)),
            LeaseStatus::Held { until, certain: false } => (State::Uncertain, until.since(now)),
            LeaseStatus::Lost(_) => (State::Lost, Duration::ZERO),
        };
        let token = (!mode.is_permits()).then_some(token);
        self.held.push(LocalHold { key, mode, token, state, held_for: since, valid_for, tags });
    }
}
