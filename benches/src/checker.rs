//! Judges mutual exclusion while the load runs, by overlap and tokens.
//!
//! Inside a process each key has a flag: who enters and finds it up has found an
//! overlap. Between processes each stay is an [`Interval`] of the machine's
//! monotonic clock, from after the lock was given until before it is given back:
//! a part of the time it was truly held, so two that overlap are a violation and
//! never an artefact. A token that does not rise counts too.

use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Mutex, PoisonError};

use crate::clock;

/// A stay under a lock.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Interval {
    /// The number of the key.
    pub key: u64,
    /// The fencing token; zero where there is none.
    pub token: u64,
    /// After the lock was given.
    pub from: u64,
    /// Before it was given back.
    pub until: u64,
}

impl Interval {
    /// How many bytes one takes on its way between processes.
    pub const BYTES: usize = 32;

    /// As bytes.
    pub fn to_bytes(self) -> [u8; Self::BYTES] {
        let mut bytes = [0; Self::BYTES];
        let words = [self.key, self.token, self.from, self.until];
        for (place, word) in bytes.chunks_exact_mut(8).zip(words) {
            place.copy_from_slice(&word.to_le_bytes());
        }
        bytes
    }

    /// From bytes; `None` if they are not [`Self::BYTES`].
    pub fn from_bytes(bytes: &[u8]) -> Option<Self> {
        let mut words = bytes
            .chunks_exact(8)
            .filter_map(|word| Some(u64::from_le_bytes(word.try_into().ok()?)));
        let mut next = || words.next();
        Some(Interval { key: next()?, token: next()?, from: next()?, until: next()? })
    }
}

/// Watches the keys of one process.
#[derive(Debug)]
pub struct Checker {
    keys: Vec<Watched>,
    /// Whether stays are kept, to be compared with other processes'.
    keeps: bool,
    violations: AtomicU64,
}

#[derive(Debug, Default)]
struct Watched {
    inside: AtomicBool,
    last_token: AtomicU64,
    stays: Mutex<Vec<Interval>>,
}

impl Checker {
    /// For so many keys; `keeps` the intervals if other processes are at work.
    pub fn new(keys: usize, keeps: bool) -> Self {
        let keys = (0..keys).map(|_| Watched::default()).collect();
        Checker { keys, keeps, violations: AtomicU64::new(0) }
    }

    /// Somebody was given this key; they are inside until the stay is dropped.
    pub fn enter(&self, key: usize, token: u64) -> Stay<'_> {
        let watched = &self.keys[key];
        let crowded = watched.inside.swap(true, Ordering::AcqRel);
        let last = watched.last_token.swap(token, Ordering::AcqRel);
        if crowded || (token != 0 && token <= last) {
            self.violations.fetch_add(1, Ordering::Relaxed);
        }
        let (key, until) = (key as u64, 0);
        let interval = Interval { key, token, from: clock::now(), until };
        Stay { checker: self, watched, interval }
    }

    /// How many entered beside another or with a token that did not rise, as far
    /// as this process can tell.
    pub fn violations(&self) -> u64 {
        self.violations.load(Ordering::Relaxed)
    }

    /// The stays so far, if they are kept.
    pub fn intervals(&self) -> Vec<Interval> {
        let stays = |watched: &Watched| {
            std::mem::take(&mut *watched.stays.lock().unwrap_or_else(PoisonError::into_inner))
        };
        self.keys.iter().flat_map(stays).collect()
    }
}

/// Somebody inside.
#[derive(Debug)]
pub struct Stay<'a> {
    checker: &'a Checker,
    watched: &'a Watched,
    interval: Interval,
}

impl Stay<'_> {
    /// When they came in.
    pub fn from(&self) -> u64 {
        self.interval.from
    }
}

impl Drop for Stay<'_> {
    fn drop(&mut self) {
        if self.checker.keeps {
            self.interval.until = clock::now();
            let mut stays = self.watched.stays.lock().unwrap_or_else(PoisonError::into_inner);
            stays.push(self.interval);
        }
        self.watched.inside.store(false, Ordering::Release);
    }
}

/// How many of these stays began before an earlier one of their key was over, or
/// with a token that did not rise.
pub fn violations(mut intervals: Vec<Interval>) -> u64 {
    intervals.sort_unstable_by_key(|it| (it.key, it.from));
    let mut found = 0;
    let mut before: Option<Interval> = None;
    for it in intervals {
        if let Some(last) = before.filter(|last| last.key == it.key) {
            found += u64::from(it.from < last.until || (it.token != 0 && it.token <= last.token));
        }
        let until = before.filter(|last| last.key == it.key).map_or(0, |last| last.until);
        before = Some(Interval { until: it.until.max(until), ..it });
    }
    found
}

#[cfg(test)]
mod tests {
    use super::*;

    fn stay(key: u64, token: u64, from: u64, until: u64) -> Interval {
        Interval { key, token, from, until }
    }

    #[test]
    fn two_inside_are_seen() {
        let checker = Checker::new(2, true);
        let first = checker.enter(0, 1);
        let elsewhere = checker.enter(1, 1);
        assert_eq!(checker.violations(), 0);
        let second = checker.enter(0, 2);
        assert_eq!(checker.violations(), 1);
        drop((first, second, elsewhere));
        assert_eq!(violations(checker.intervals()), 1);
    }

    #[test]
    fn a_token_that_does_not_rise_is_seen() {
        let checker = Checker::new(1, false);
        drop(checker.enter(0, 7));
        drop(checker.enter(0, 7));
        assert_eq!(checker.violations(), 1);
        assert!(checker.intervals().is_empty(), "nobody asked to keep them");
        assert_eq!(violations(vec![stay(0, 5, 0, 1), stay(0, 4, 2, 3)]), 1);
        assert_eq!(violations(vec![stay(0, 0, 0, 1), stay(0, 0, 2, 3)]), 0, "a peer has none");
    }

    #[test]
    fn stays_of_several_processes_are_put_in_order() {
        let apart =
            vec![stay(0, 3, 20, 30), stay(0, 1, 0, 9), stay(0, 2, 10, 20), stay(1, 9, 5, 25)];
        assert_eq!(violations(apart.clone()), 0);
        let mut long = apart;
        long[1].until = 100; // over both that follow
        assert_eq!(violations(long), 2);
    }

    #[test]
    fn intervals_travel_as_bytes() {
        let it = stay(1, 2, u64::MAX, 4);
        assert_eq!(Interval::from_bytes(&it.to_bytes()), Some(it));
        assert_eq!(Interval::from_bytes(&[0; 31]), None);
    }
}
