//! The types that go into the machine and come out of it.

use std::sync::Arc;
use std::time::Duration;

use smallvec::SmallVec;

use crate::claim::{Holder, LossReason, Mode, Request};
use crate::clock::Moment;
use crate::error::Error;
use crate::key::Key;

slotmap::new_key_type! {
    /// One task's interest in one key.
    pub struct Ticket;
    /// A gate: the tasks of this process that want one key.
    pub struct GateId;
    /// A claim at the backend, from the first request to the last release.
    pub struct ClaimId;
}

/// One call to the backend.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct CallId {
    pub(super) claim: ClaimId,
    pub(super) seq: u32,
}

/// How far a lease may be passed on inside the process.
#[derive(Clone, Copy, Debug)]
pub struct HandoverLimits {
    /// The most hand-overs of one lease.
    pub count: u32,
    /// The longest time after the grant in which a lease is handed over.
    pub time: Duration,
    /// After how many hand-overs the lease is extended, if nobody else seems to wait.
    pub extend_after: u32,
}

/// Something that the driver must do.
#[derive(Debug)]
#[non_exhaustive]
pub enum Action {
    /// Make this call to the backend, and bring the answer to [`Engine::reply`](super::Engine::reply).
    Call(CallId, Request),
    /// Wake the task of this ticket: its outcome or its lease has changed.
    Wake(Ticket),
    /// Report that a lease on this key was renewed.
    Renewed(Key),
    /// Report that a renewal failed; the lock is held until its deadline.
    Uncertain(Key, Error),
    /// Report that the lock on this key was lost.
    Lost(Key, LossReason),
}

/// What the driver must do, in this order.
pub type Actions = SmallVec<[Action; 2]>;

/// The limits of one process.
#[derive(Clone, Copy, Debug)]
pub struct Limits {
    /// The limits of hand-overs inside the process.
    pub handover: HandoverLimits,
    /// The most tasks that may wait for one key.
    pub waiters: usize,
    /// The longest time that a task that does not want to wait waits for an answer.
    pub attempt: Duration,
}

/// The request of a task for a lock.
#[derive(Clone, Debug)]
pub struct LockRequest<'a> {
    /// The key that is wanted.
    pub key: &'a Key,
    /// How the key is to be held.
    pub mode: Mode,
    /// How long the lease lasts if it is not renewed.
    pub ttl: Duration,
    /// How long the task waits for the lock.
    pub wait: Wait,
    /// Whether the task queues with the others of its process.
    pub scope: QueueScope,
    /// The longest time that the lock may be held.
    pub max_hold: Option<Duration>,
    /// The client that asks.
    pub holder: Arc<Holder>,
}

/// How long a task waits for a lock.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Wait {
    /// It does not wait: the answer comes at once.
    Try,
    /// It waits until this moment.
    Until(Moment),
    /// It waits for this long.
    For(Duration),
}

/// Where a task queues.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum QueueScope {
    /// With the other tasks of this process, in the gate of the key.
    Shared,
    /// With a claim of its own at the backend, which decides the order of all processes.
    Separate,
    /// Inside the lock that this ticket holds.
    Nested(Ticket),
}

/// Why a ticket was not admitted.
#[derive(Clone, Debug)]
pub enum Refusal {
    /// Somebody else holds the lock, and the task did not want to wait.
    Busy(Option<Arc<Holder>>),
    /// The wait was over before the lock was free, or before the backend answered.
    TimedOut {
        /// The holder, if it is known.
        holder: Option<Arc<Holder>>,
        /// The last error of the backend, if it did not answer.
        trouble: Option<Error>,
    },
    /// The backend refused the claim.
    Failed(Error),
    /// The outer lock that it was nested in was lost.
    Lost,
    /// The lock was granted, and lost before its task could run.
    LostEarly(LossReason),
    /// Too many tasks wait for the key already.
    Overloaded,
    /// The client is shutting down.
    ShuttingDown,
}

/// The outcome of a ticket.
#[derive(Clone, Debug)]
pub enum Outcome {
    /// The task still waits.
    Waiting,
    /// The task has the lock.
    Admitted {
        /// The fencing token; zero for permits.
        token: u64,
        /// Whether another task of this process handed the lock over.
        handed_over: bool,
        /// Whether the task waited for another holder, and not only for an answer.
        queued: bool,
        /// The time from the request to the admission.
        waited: Duration,
        /// The moment of the admission.
        since: Moment,
    },
    /// The task had the lock, and lost it before anybody looked. The ticket is to be
    /// forgotten.
    Lost(LossReason),
    /// The task does not get the lock, and the ticket is void.
    Refused(Refusal),
}

/// The state of the lease of an admitted ticket.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum LeaseStatus {
    /// The lock is held, and the lease is renewed.
    Held {
        /// The deadline: the lock is certainly held until then.
        until: Moment,
        /// Whether the last renewal was answered.
        certain: bool,
    },
    /// The lock was lost.
    Lost(LossReason),
}

/// A ticket as `local_state` shows it.
#[derive(Clone, Debug)]
pub struct TicketSnapshot {
    /// The key of the ticket.
    pub key: Key,
    /// How the key is held or wanted.
    pub mode: Mode,
    /// The moment since which the task waits, or holds the lock.
    pub since: Moment,
    /// The token and the state of the lease; `None` while the task waits.
    pub lease: Option<(u64, LeaseStatus)>,
    /// The client of the ticket.
    pub holder: Arc<Holder>,
}

/// A task that waits at a gate.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Waiter {
    pub(crate) ticket: Ticket,
    pub(crate) mode: Mode,
    /// The ttl in nanoseconds, as everywhere in the machine.
    pub(crate) ttl: u64,
    /// Whether the task wants an answer at once instead of waiting.
    pub(crate) attempt: bool,
    /// The moment when the task gives up.
    pub(crate) deadline: Moment,
}
