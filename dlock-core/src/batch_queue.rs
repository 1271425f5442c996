//! Calls that are due at the same time share one round trip, as a database commits
//! several transactions with one write.
//!
//! ```text
//!   push --> pending, by priority --> a batch, bounded by weight --> in flight
//! ```
//!
//! A call that is pushed while fewer than `in_flight` batches are on their way gets a
//! [`Slot`] back: whoever gets it must send batches until [`Slot::next_batch`] says
//! that nothing is pending. So a lone call leaves at once, and under load the pending
//! calls grow while batches are on their way, and the batches with them. No timer.
//!
//! Invariants: there are never more slots than `in_flight`; as long as a call is
//! pending there is a slot; of one priority, calls leave in the order in which they
//! were pushed; a call of high priority is never behind one of normal priority.
//! Dropping a slot gives it back, also when its task panics or its runtime ends.

use std::collections::VecDeque;
use std::fmt;
use std::sync::Arc;

use parking_lot::Mutex;

/// The limits of a [`BatchQueue`].
#[derive(Clone, Copy, Debug)]
pub struct BatchLimits {
    /// The most batches in flight.
    pub in_flight: usize,
    /// The most that one batch weighs; a call that weighs more goes alone.
    pub weight: usize,
    /// The most calls that may be pending.
    pub pending: usize,
}

/// The priority of a call: the higher one leaves first.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Priority {
    /// Calls that keep or free something: renewals and releases.
    High,
    /// All other calls.
    Normal,
}

/// Calls that wait for a batch.
pub struct BatchQueue<T> {
    limits: BatchLimits,
    state: Mutex<State<T>>,
}

struct State<T> {
    high: VecDeque<(T, usize)>,
    normal: VecDeque<(T, usize)>,
    in_flight: usize,
}

/// The queue is full; the call is given back.
pub struct Full<T>(pub T);

impl<T> BatchQueue<T> {
    /// An empty queue.
    pub fn new(limits: BatchLimits) -> Arc<Self> {
        let state = State { high: VecDeque::new(), normal: VecDeque::new(), in_flight: 0 };
        Arc::new(BatchQueue { limits, state: Mutex::new(state) })
    }

    /// Adds a call. A slot that is returned must be used to send it.
    ///
    /// # Errors
    /// [`Full`] if too many calls are pending; one of high priority always finds room.
    pub fn push(
        self: &Arc<Self>,
        item: T,
        weight: usize,
        priority: Priority,
    ) -> Result<Option<Slot<T>>, Full<T>> {
        let mut state = self.state.lock();
        match priority {
            Priority::High => state.high.push_back((item, weight)),
            Priority::Normal if state.normal.len() >= self.limits.pending => {
                return Err(Full(item));
            }
            Priority::Normal => state.normal.push_back((item, weight)),
        }
        if state.in_flight >= self.limits.in_flight {
            return Ok(None);
        }
        state.in_flight += 1;
        Ok(Some(Slot { queue: self.clone(), in_use: true }))
    }

    /// A slot, if calls are pending and one is free: a sender that was lost to a panic
    /// may have left them.
    pub fn slot_for_pending(self: &Arc<Self>) -> Option<Slot<T>> {
        let mut state = self.state.lock();
        let pending = !state.high.is_empty() || !state.normal.is_empty();
        if !pending || state.in_flight >= self.limits.in_flight {
            return None;
        }
        state.in_flight += 1;
        Some(Slot { queue: self.clone(), in_use: true })
    }

    /// Takes out everything that is pending.
    pub fn drain(&self) -> Vec<T> {
        let mut state = self.state.lock();
        let high = std::mem::take(&mut state.high);
        let normal = std::mem::take(&mut state.normal);
        high.into_iter().chain(normal).map(|(item, _)| item).collect()
    }

    /// How many calls there is room for without allocating, and how many batches are
    /// in flight.
    pub fn footprint(&self) -> (usize, usize) {
        let state = self.state.lock();
        (state.high.capacity() + state.normal.capacity(), state.in_flight)
    }
}

/// The right to have one batch in flight.
#[must_use = "pending calls wait for this slot to send them"]
pub struct Slot<T> {
    queue: Arc<BatchQueue<T>>,
    in_use: bool,
}

impl<T> Slot<T> {
    /// Fills `batch` with the calls that leave next. False: nothing is pending, and the
    /// slot is given back.
    pub fn next_batch(&mut self, batch: &mut Vec<T>) -> bool {
        let mut state = self.queue.state.lock();
        let mut left = self.queue.limits.weight;
        let State { high, normal, in_flight } = &mut *state;
        let mut filled = false;
        for pending in [high, normal] {
            while let Some((_, weight)) = pending.front()
                && (*weight <= left || !filled)
                && let Some((item, weight)) = pending.pop_front()
            {
                left = left.saturating_sub(weight);
                filled = true;
                batch.push(item);
            }
            if !pending.is_empty() {
                return true;
            }
        }
        if !filled {
            self.in_use = false;
            *in_flight -= 1;
            if *in_flight == 0 {
                // An idle queue keeps no memory.
                state.high = VecDeque::new();
                state.normal = VecDeque::new();
            }
        }
        filled
    }
}

impl<T> Drop for Slot<T> {
    fn drop(&mut self) {
        if self.in_use {
            self.queue.state.lock().in_flight -= 1;
        }
    }
}

impl<T> fmt::Debug for BatchQueue<T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("BatchQueue").field("limits", &self.limits).finish_non_exhaustive()
    }
}

impl<T> fmt::Debug for Slot<T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Slot")
    }
}

impl<T> fmt::Debug for Full<T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Full")
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const LIMITS: BatchLimits = BatchLimits { in_flight: 1, weight: 3, pending: 5 };

    fn batch(slot: &mut Slot<u32>) -> Option<Vec<u32>> {
        let mut batch = Vec::new();
        slot.next_batch(&mut batch).then_some(batch)
    }

    #[test]
    fn a_lone_call_leaves_at_once_and_an_idle_queue_is_empty() {
        let queue = BatchQueue::new(LIMITS);
        let mut slot = queue.push(1, 1, Priority::Normal).unwrap().unwrap();
        assert_eq!(batch(&mut slot), Some(vec![1]));
        assert!(queue.push(2, 1, Priority::Normal).unwrap().is_none(), "one is in flight");
        assert_eq!(batch(&mut slot), Some(vec![2]));
        assert_eq!(batch(&mut slot), None);
        drop(slot);
        assert_eq!(queue.footprint(), (0, 0));
    }

    #[test]
    fn batches_are_bounded_by_weight_and_keep_the_order_of_a_priority() {
        let queue = BatchQueue::new(LIMITS);
        let mut slot = queue.push(1, 2, Priority::Normal).unwrap().unwrap();
        for (call, weight) in [(2, 2), (3, 1), (4, 9)] {
            assert!(queue.push(call, weight, Priority::Normal).unwrap().is_none());
        }
        assert!(queue.push(7, 1, Priority::High).unwrap().is_none());
        assert_eq!(batch(&mut slot), Some(vec![7, 1]), "the high one first");
        assert_eq!(batch(&mut slot), Some(vec![2, 3]));
        assert_eq!(batch(&mut slot), Some(vec![4]), "too heavy for any batch: alone");
        assert_eq!(batch(&mut slot), None);
    }

    #[test]
    fn a_full_queue_refuses_all_but_high_priority() {
        let queue = BatchQueue::new(LIMITS);
        let _slot = queue.push(0, 1, Priority::Normal).unwrap();
        for call in 1..5 {
            assert!(queue.push(call, 1, Priority::Normal).is_ok());
        }
        assert_eq!(queue.push(5, 1, Priority::Normal).unwrap_err().0, 5);
        assert!(queue.push(6, 1, Priority::High).is_ok());
        assert_eq!(queue.drain(), [6, 0, 1, 2, 3, 4]);
    }

    #[test]
    fn a_dropped_slot_is_given_back() {
        let queue = BatchQueue::new(LIMITS);
        drop(queue.push(1, 1, Priority::Normal).unwrap());
        let mut slot = queue.push(2, 1, Priority::Normal).unwrap().unwrap();
        assert_eq!(batch(&mut slot), Some(vec![1, 2]));
    }
}
