//! Pure: timers.

use std::cmp::Reverse;
use std::collections::BinaryHeap;

use crate::clock::Moment;

/// Timers in the order of their moments. Setting one is cheap, and none is ever cancelled:
/// whoever takes a timer checks whether it is still valid, and [`Timers::tidy`] removes the
/// others before they outnumber the valid ones.
#[derive(Debug)]
pub(crate) struct Timers<T: Ord> {
    heap: BinaryHeap<Reverse<(Moment, T)>>,
}

impl<T: Ord + Copy> Timers<T> {
    pub(crate) fn new() -> Self {
        Timers { heap: BinaryHeap::new() }
    }

    pub(crate) fn set(&mut self, at: Moment, what: T) {
        self.heap.push(Reverse((at, what)));
    }

    #[cfg(test)]
    pub(crate) fn len(&self) -> usize {
        self.heap.len()
    }

    pub(crate) fn next(&self) -> Moment {
        self.heap.peek().map_or(Moment::NEVER, |Reverse((at, _))| *at)
    }

    pub(crate) fn take_due(&mut self, now: Moment) -> Option<(Moment, T)> {
        if self.next() > now {
            return None;
        }
        self.heap.pop().map(|Reverse(timer)| timer)
    }

    /// Keeps the number of timers that are no longer valid below that of valid ones.
    pub(crate) fn tidy(&mut self, can_stand: usize, stands: impl Fn(Moment, T) -> bool) {
        if self.heap.len() > 2 * can_stand + 64 {
            self.heap.retain(|Reverse((at, what))| stands(*at, *what));
        }
    }
}
