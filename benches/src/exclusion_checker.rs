//! Checks exclusion while the load runs.
//!
//! Inside a process each key counts who is inside: a task that enters beside somebody
//! who excludes it, or as one more than a semaphore has permits, has found a violation.
//! Between processes each critical section is a [`HeldInterval`] of the machine's
//! monotonic clock, from after the acquire until before the release. That is a part of
//! the time that the lock was really held, so two intervals that overlap and exclude
//! each other are always a violation. A fencing token that does not increase is a
//! violation too: an exclusive token is above all before it, a shared one is above all
//! exclusive ones before it.

use std::cmp::Reverse;
use std::collections::BinaryHeap;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Mutex, PoisonError};

use dlock::Mode;

use crate::clock;

/// The time that one task held a key.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct HeldInterval {
    /// The index of the key.
    pub key: u64,
    /// How the key was held. A task takes one permit of a semaphore.
    pub mode: Mode,
    /// The fencing token; 0 if the lock has none.
    pub token: u64,
    /// The time after the acquire, by [`clock::now`].
    pub from: u64,
    /// The time before the release, by [`clock::now`].
    pub until: u64,
}

impl HeldInterval {
    /// The length of an encoded interval, as processes send it to each other.
    pub const BYTES: usize = 40;

    /// Encodes the interval.
    pub fn to_bytes(self) -> [u8; Self::BYTES] {
        let mode = match self.mode {
            Mode::Shared => 1,
            Mode::Permits { of, .. } => 1 + u64::from(of),
            _ => 0,
        };
        let mut bytes = [0; Self::BYTES];
        let words = [self.key, mode, self.token, self.from, self.until];
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
        let key = next()?;
        let mode = match next()? {
            0 => Mode::Exclusive,
            1 => Mode::Shared,
            permits => Mode::Permits { count: 1, of: u32::try_from(permits - 1).ok()? },
        };
        Some(HeldInterval { key, mode, token: next()?, from: next()?, until: next()? })
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
    /// Exclusive holders count [`EXCLUSIVE`] each, all others 1.
    inside: AtomicU64,
    top_token: AtomicU64,
    top_exclusive_token: AtomicU64,
    intervals: Mutex<Vec<HeldInterval>>,
}

/// The weight of an exclusive holder in the count of those inside.
const EXCLUSIVE: u64 = 1 << 32;

fn weight(mode: Mode) -> u64 {
    if mode == Mode::Exclusive { EXCLUSIVE } else { 1 }
}

impl KeyState {
    /// Counts a holder in; whether it may be inside beside the others.
    fn enter(&self, mode: Mode) -> bool {
        let before = self.inside.fetch_add(weight(mode), Ordering::AcqRel);
        match mode {
            Mode::Shared => before < EXCLUSIVE,
            Mode::Permits { of, .. } => before < u64::from(of),
            _ => before == 0,
        }
    }

    /// Remembers a token; whether it increased as it must.
    fn rises(&self, mode: Mode, token: u64) -> bool {
        if token == 0 {
            return true; // a peer, or a permit
        }
        let top = self.top_token.fetch_max(token, Ordering::AcqRel);
        if mode == Mode::Exclusive {
            self.top_exclusive_token.fetch_max(token, Ordering::AcqRel);
            return token > top;
        }
        token > self.top_exclusive_token.load(Ordering::Acquire)
    }
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
    pub fn enter(&self, key: usize, mode: Mode, token: u64) -> CriticalSection<'_> {
        let state = &self.keys[key];
        let (allowed, rises) = (state.enter(mode), state.rises(mode, token));
        if !(allowed && rises) {
            self.violations.fetch_add(1, Ordering::Relaxed);
        }
        let (key, until) = (key as u64, 0);
        let interval = HeldInterval { key, mode, token, from: clock::now(), until };
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
        self.state.inside.fetch_sub(weight(self.interval.mode), Ordering::AcqRel);
    }
}

/// The number of intervals that began beside another of the same key that excludes
/// them, or with a token that did not increase.
pub fn violations(mut intervals: Vec<HeldInterval>) -> u64 {
    intervals.sort_unstable_by_key(|it| (it.key, it.from));
    let by_key = intervals.chunk_by(|one, two| one.key == two.key);
    by_key
        .map(|of_key| {
            let mut sweep = Sweep::default();
            of_key.iter().filter(|it| !sweep.enter(it)).count() as u64
        })
        .sum()
}

/// What is known of one key at the beginning of an interval.
#[derive(Debug, Default)]
struct Sweep {
    exclusive_until: u64,
    /// The ends of the readers or permits that are inside.
    others: BinaryHeap<Reverse<u64>>,
    top_token: u64,
    top_exclusive_token: u64,
}

impl Sweep {
    /// Adds the next interval; whether it may be beside those before it.
    fn enter(&mut self, it: &HeldInterval) -> bool {
        while self.others.peek().is_some_and(|until| until.0 <= it.from) {
            self.others.pop();
        }
        let exclusive = it.mode == Mode::Exclusive;
        let top = if exclusive { self.top_token } else { self.top_exclusive_token };
        let rises = it.token == 0 || it.token > top;
        let allowed = match it.mode {
            Mode::Permits { of, .. } => self.others.len() < of as usize,
            Mode::Shared => self.exclusive_until <= it.from,
            _ => self.exclusive_until <= it.from && self.others.is_empty(),
        };
        self.top_token = self.top_token.max(it.token);
        if exclusive {
            self.top_exclusive_token = self.top_exclusive_token.max(it.token);
            self.exclusive_until = self.exclusive_until.max(it.until);
        } else {
            self.others.push(Reverse(it.until));
        }
        allowed && rises
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn interval(key: u64, token: u64, from: u64, until: u64) -> HeldInterval {
        HeldInterval { key, mode: Mode::Exclusive, token, from, until }
    }

    #[test]
    fn two_tasks_inside_are_a_violation() {
        let checker = ExclusionChecker::new(2, true);
        let first = checker.enter(0, Mode::Exclusive, 1);
        let elsewhere = checker.enter(1, Mode::Exclusive, 1);
        assert_eq!(checker.violations(), 0);
        let second = checker.enter(0, Mode::Exclusive, 2);
        assert_eq!(checker.violations(), 1);
        drop((first, second, elsewhere));
        assert_eq!(violations(checker.intervals()), 1);
    }

    #[test]
    fn a_token_that_does_not_increase_is_a_violation() {
        let checker = ExclusionChecker::new(1, false);
        drop(checker.enter(0, Mode::Exclusive, 7));
        drop(checker.enter(0, Mode::Exclusive, 7));
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
    fn a_semaphore_has_room_for_its_permits() {
        let permit = Mode::Permits { count: 1, of: 2 };
        let checker = ExclusionChecker::new(1, true);
        let inside = (checker.enter(0, permit, 0), checker.enter(0, permit, 0));
        assert_eq!(checker.violations(), 0);
        let third = checker.enter(0, permit, 0);
        assert_eq!(checker.violations(), 1);
        drop((inside, third));
        drop(checker.enter(0, permit, 0));
        assert_eq!((checker.violations(), violations(checker.intervals())), (1, 1));
    }

    #[test]
    fn readers_are_never_beside_a_writer() {
        let checker = ExclusionChecker::new(1, true);
        let readers = (checker.enter(0, Mode::Shared, 5), checker.enter(0, Mode::Shared, 4));
        assert_eq!(checker.violations(), 0, "readers share");
        let writer = checker.enter(0, Mode::Exclusive, 6);
        assert_eq!(checker.violations(), 1);
        drop(readers);
        let beside = checker.enter(0, Mode::Shared, 7);
        assert_eq!(checker.violations(), 2);
        drop((writer, beside));
        drop(checker.enter(0, Mode::Shared, 6)); // as old as the writer
        assert_eq!((checker.violations(), violations(checker.intervals())), (3, 3));
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
