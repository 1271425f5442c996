//! Checks mutual exclusion while the load runs.
//!
//! Inside a process each key has a flag: a task that enters and finds the flag set
//! has found an overlap. Between processes each critical section is a
//! [`HeldInterval`] of the machine's monotonic clock, from after the acquire until
//! before the release. That is a part of the time that the lock was really held, so
//! two intervals that overlap are always a violation. A fencing token that does not
//! increase is a violation too.

use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Mutex, PoisonError};

use crate::clock;

/// The time that one task held a key.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct HeldInterval {
    /// The index of the key.
    pub key: u64,
    /// The fencing token; 0 if the lock has none.
    pub token: u64,
    /// The time after the acquire, by [`clock::now`].
    pub from: u64,
    /// The time before the release, by [`clock::now`].
    pub until: u64,
}

impl HeldInterval {
    /// The length of an encoded interval, as processes send it to each other.
    pub const BYTES: usize = 32;

    /// Encodes the interval.
    pub fn to_bytes(self) -> [u8; Self::BYTES] {
        let mut bytes = [0; Self::BYTES];
        let words = [self.key, self.token, self.from, self.until];
        for (target, word) in bytes.chunks_exact_mut(8).zip(words) {
            target.copy_from_slice(&word.to_le_bytes());
        }
        bytes
    }

    /// Decodes an interval; `None` if there are fewer than [`Self::BYTES`] bytes.
    pub fn from_bytes(bytes: &[u8]) -> Option<Self> {
        let mut words = bytes
            .chunks_exact(8)
            .filter_map(|word| Some(u64::from_le_bytes(word.try_into().ok()?)));
        let mut next = || words.next();
        Some(HeldInterval { key: next()?, token: next()?, from: next()?, until: next()? })
    }
}

/// Checks the keys of one process.
#[derive(Debug)]
pub struct ExclusionChecker {
    keys: Vec<KeyState>,
    /// Whether intervals are recorded, to be compared with those of other processes.
    record_intervals: bool,
    violations: AtomicU64,
}

#[derive(Debug, Default)]
struct KeyState {
    inside: AtomicBool,
    last_token: AtomicU64,
    intervals: Mutex<Vec<HeldInterval>>,
}

impl ExclusionChecker {
    /// Makes a checker for `keys` keys. Set `record_intervals` if other processes take
    /// part in the run.
    pub fn new(keys: usize, record_intervals: bool) -> Self {
        let keys = (0..keys).map(|_| KeyState::default()).collect();
        ExclusionChecker { keys, record_intervals, violations: AtomicU64::new(0) }
    }

    /// Records that a task acquired this key. The task must drop the critical section
    /// before it releases the lock.
    pub fn enter(&self, key: usize, token: u64) -> CriticalSection<'_> {
        let state = &self.keys[key];
        let occupied = state.inside.swap(true, Ordering::AcqRel);
        let last = state.last_token.swap(token, Ordering::AcqRel);
        if occupied || (token != 0 && token <= last) {
            self.violations.fetch_add(1, Ordering::Relaxed);
        }
        let (key, until) = (key as u64, 0);
        let interval = HeldInterval { key, token, from: clock::now(), until };
        CriticalSection { checker: self, state, interval }
    }

    /// The number of violations that this process has seen: overlaps, and tokens that
    /// did not increase.
    pub fn violations(&self) -> u64 {
        self.violations.load(Ordering::Relaxed)
    }

    /// Takes the intervals that were recorded so far.
    pub fn intervals(&self) -> Vec<HeldInterval> {
        let take = |state: &KeyState| {
            std::mem::take(&mut *state.intervals.lock().unwrap_or_else(PoisonError::into_inner))
        };
        self.keys.iter().flat_map(take).collect()
    }
}

/// A task that holds a key, from [`ExclusionChecker::enter`] until this is dropped.
#[derive(Debug)]
pub struct CriticalSection<'a> {
    checker: &'a ExclusionChecker,
    state: &'a KeyState,
    interval: HeldInterval,
}

impl CriticalSection<'_> {
    /// The time when the task acquired the key, by [`clock::now`].
    pub fn from(&self) -> u64 {
        self.interval.from
    }
}

impl Drop for CriticalSection<'_> {
    fn drop(&mut self) {
        if self.checker.record_intervals {
            self.interval.until = clock::now();
            let mut intervals = self.state.intervals.lock().unwrap_or_else(PoisonError::into_inner);
            intervals.push(self.interval);
        }
        self.state.inside.store(false, Ordering::Release);
    }
}

/// The number of intervals that began before an earlier one of the same key was over,
/// or with a token that did not increase.
pub fn violations(mut intervals: Vec<HeldInterval>) -> u64 {
    intervals.sort_unstable_by_key(|it| (it.key, it.from));
    let mut found = 0;
    let mut before: Option<HeldInterval> = None;
    for it in intervals {
        if let Some(last) = before.filter(|last| last.key == it.key) {
            found += u64::from(it.from < last.until || (it.token != 0 && it.token <= last.token));
        }
        let until = before.filter(|last| last.key == it.key).map_or(0, |last| last.until);
        before = Some(HeldInterval { until: it.until.max(until), ..it });
    }
    found
}

#[cfg(test)]
mod tests {
    use super::*;

    fn interval(key: u64, token: u64, from: u64, until: u64) -> HeldInterval {
        HeldInterval { key, token, from, until }
    }

    #[test]
    fn two_tasks_inside_are_a_violation() {
        let checker = ExclusionChecker::new(2, true);
        let first = checker.enter(0, 1);
        let elsewhere = checker.enter(1, 1);
        assert_eq!(checker.violations(), 0);
        let second = checker.enter(0, 2);
        assert_eq!(checker.violations(), 1);
        drop((first, second, elsewhere));
        assert_eq!(violations(checker.intervals()), 1);
    }

    #[test]
    fn a_token_that_does_not_increase_is_a_violation() {
        let checker = ExclusionChecker::new(1, false);
        drop(checker.enter(0, 7));
        drop(checker.enter(0, 7));
        assert_eq!(checker.violations(), 1);
        assert!(checker.intervals().is_empty(), "they are not recorded");
        assert_eq!(violations(vec![interval(0, 5, 0, 1), interval(0, 4, 2, 3)]), 1);
        assert_eq!(
            violations(vec![interval(0, 0, 0, 1), interval(0, 0, 2, 3)]),
            0,
            "a peer has no token"
        );
    }

    #[test]
    fn intervals_of_several_processes_are_put_in_order() {
        let apart = vec![
            interval(0, 3, 20, 30),
            interval(0, 1, 0, 9),
            interval(0, 2, 10, 20),
            interval(1, 9, 5, 25),
        ];
        assert_eq!(violations(apart.clone()), 0);
        let mut long = apart;
        long[1].until = 100; // overlaps both that follow
        assert_eq!(violations(long), 2);
    }

    #[test]
    fn intervals_are_encoded_and_decoded() {
        let it = interval(1, 2, u64::MAX, 4);
        assert_eq!(HeldInterval::from_bytes(&it.to_bytes()), Some(it));
        assert_eq!(HeldInterval::from_bytes(&[0; 31]), None);
    }
}
