//! What is event to the machine and what it says.

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
    /// How often at most.
    pub count: u32,
    /// How long after the grant at most.
    pub time: Duration,
    /// After how many hand-overs the lease is extended, if nobody else seems to wait.
    pub extend_after: u32,
}

/// Something to do.
#[derive(Debug)]
#[non_exhaustive]
pub enum Action {
    /// Call the backend and bring the answer.
    Call(CallId, Request),
    /// Something changed for this ticket.
    Wake(Ticket),
    /// A lease was renewed.
    Renewed(Key),
    /// A renewal failed.
    Uncertain(Key, Error),
    /// A lease was lost.
    Lost(Key, LossReason),
}

/// Things to do, in this order.
pub type Actions = SmallVec<[Action; 2]>;

/// Limits of one process.
#[derive(Clone, Copy, Debug)]
pub struct Limits {
    /// How far a lease is passed on locally.
    pub handover: HandoverLimits,
    /// How many tasks may wait for one key.
    pub waiters: usize,
    /// How long a task that does not want to wait is kept waiting for an answer.
    pub attempt: Duration,
}

/// What a task asks for.
#[derive(Clone, Debug)]
pub struct LockRequest<'a> {
    /// On what.
    pub key: &'a Key,
    /// What for.
    pub mode: Mode,
    /// How long the lease lasts unless renewed.
    pub ttl: Duration,
    /// How long to wait.
    pub wait: Wait,
    /// Which way.
    pub lane: Lane,
    /// How long it may be held.
    pub max_hold: Option<Duration>,
    /// Who asks.
    pub holder: Arc<Holder>,
}

/// How long to wait.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Wait {
    /// Answer at once.
    Try,
    /// Until then.
    Until(Moment),
    /// For this long.
    For(Duration),
}

/// Which way a claim goes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Lane {
    /// With the other tasks of this process.
    Shared,
    /// As a claim of its own: its place is decided at the backend.
    Separate,
    /// Nested in what this ticket holds.
    Nested(Ticket),
}

/// Why a ticket was not admitted.
#[derive(Clone, Debug)]
pub enum Refusal {
    /// Held by somebody else.
    Busy(Option<Arc<Holder>>),
    /// Still held by somebody else, or still not to be reached, when the wait was over.
    TimedOut {
        /// By whom, if known.
        holder: Option<Arc<Holder>>,
        /// What kept the backend from answering, if it did.
        trouble: Option<Error>,
    },
    /// The backend refused.
    Failed(Error),
    /// The lock it was nested in was lost.
    Lost,
    /// Too many wait already.
    Overloaded,
    /// The client is shutting down.
    ShuttingDown,
}

/// What became of a ticket.
#[derive(Clone, Debug)]
pub enum Outcome {
    /// Not decided yet.
    Waiting,
    /// In.
    Admitted {
        /// The fencing token; zero for permits.
        token: u64,
        /// Whether it came from another task of this process.
        handed_over: bool,
        /// Whether it waited for another holder, and not only for an answer.
        queued: bool,
        /// How long it took.
        waited: Duration,
        /// Since when.
        since: Moment,
    },
    /// Out; the ticket is void.
    Refused(Refusal),
}

/// How an admitted ticket stands.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum LeaseStatus {
    /// Held until then at least, and renewed.
    Held {
        /// The deadline.
        until: Moment,
        /// Whether the last renewal was answered.
        certain: bool,
    },
    /// No longer.
    Lost(LossReason),
}

/// A ticket as `local_state` shows it.
#[derive(Clone, Debug)]
pub struct TicketSnapshot {
    /// On what.
    pub key: Key,
    /// What for.
    pub mode: Mode,
    /// Since when it waits or holds.
    pub since: Moment,
    /// `None` while it waits.
    pub standing: Option<(u64, LeaseStatus)>,
    /// Who.
    pub holder: Arc<Holder>,
}
