//! Pure: the queue of one gate.

use super::types::Ticket;
use crate::claim::Mode;
use crate::clock::Moment;
use crate::collections::LazyQueue;

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

/// The tasks that wait, first in, first out. The first one costs no allocation.
#[derive(Debug, Default)]
pub(super) struct Waitlist {
    first: Option<Waiter>,
    rest: LazyQueue<Waiter>,
}

impl Waitlist {
    pub(super) fn push_back(&mut self, waiter: Waiter) {
        if self.first.is_none() {
            self.first = Some(waiter);
        } else {
            self.rest.push_back(waiter);
        }
    }

    pub(super) fn front(&self) -> Option<&Waiter> {
        self.first.as_ref()
    }

    pub(super) fn remove(&mut self, place: usize) -> Option<Waiter> {
        match place.checked_sub(1) {
            Some(place) => self.rest.remove(place),
            None => std::mem::replace(&mut self.first, self.rest.pop_front()),
        }
    }

    pub(super) fn iter(&self) -> impl Iterator<Item = &Waiter> {
        self.first.iter().chain(self.rest.iter())
    }

    pub(super) fn len(&self) -> usize {
        usize::from(self.first.is_some()) + self.rest.len()
    }

    pub(super) fn is_empty(&self) -> bool {
        self.first.is_none()
    }
}
