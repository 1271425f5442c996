//! Pure: a task in the queue of a gate.

use super::types::Ticket;
use crate::claim::Mode;
use crate::clock::Moment;

/// A task that waits.
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
