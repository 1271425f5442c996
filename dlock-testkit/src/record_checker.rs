//! Records of who held which lock when, written by several processes and checked in
//! one place.
//!
//! A holder reads the clock *after* it acquired the lock (`from`) and *before* it
//! releases it (`until`), and checks each time by its guard that the lock is held. So
//! a record never claims more than the guard did. A lock that was lost counts as held
//! up to the deadline that the guard had named.
//!
//! The checker sweeps over the records in the order of `from`, up to a time before
//! which all records must have arrived. It drops records that have ended, so its
//! memory does not grow. It checks:
//!
//! - **overlap**: nobody acquires a lock while another holder excludes it;
//! - **tokens** rise: the token of an exclusive holder is above all before it, the
//!   token of a shared holder is above those of all exclusive holders before it;
//! - **fence**: a [`Fence`] for each key accepts every holder, and rejects a stale
//!   one after a later holder.
//!
//! A server that lost its data cannot know the leases from before. Violations are
//! excused as long as these may last; afterwards tokens must be above all earlier
//! ones.

use std::collections::{BinaryHeap, HashMap};
use std::fmt;
use std::str::FromStr;
use std::time::Duration;

use dlock::{Access, Fence, Mode, Token};

/// A record that somebody held a lock.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Record {
    /// The key of the lock.
    pub key: String,
    /// The mode in which the lock was held.
    pub mode: Mode,
    /// The fencing token; 0 for permits.
    pub token: u64,
    /// The lock was held from this moment, see [`process::now`](crate::process::now).
    pub from: u64,
    /// The lock was held until this moment.
    pub until: u64,
    /// When the holder tried to write although it had lost the lock.
    pub stale: Option<u64>,
    /// The holder's name, for error messages.
    pub who: String,
}

impl fmt::Display for Record {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (mode, take, of) = match self.mode {
            Mode::Shared => ('s', 0, 0),
            Mode::Permits { count, of } => ('p', count, of),
            _ => ('x', 0, 0),
        };
        let Record { key, token, from, until, stale, who, .. } = self;
        let stale = stale.unwrap_or(0);
        write!(f, "R {key} {mode} {take} {of} {token} {from} {until} {stale} {who}")
    }
}

impl FromStr for Record {
    type Err = ();

    fn from_str(line: &str) -> Result<Self, ()> {
        let mut words = line.split(' ');
        let mut word = || words.next().ok_or(());
        if word()? != "R" {
            return Err(());
        }
        let key = word()?.to_owned();
        let (mode, take, of) = (word()?, number(word()?)?, number(word()?)?);
        let mode = match mode {
            "x" => Mode::Exclusive,
            "s" => Mode::Shared,
            "p" => Mode::Permits {
                count: u32::try_from(take).map_err(drop)?,
                of: u32::try_from(of).map_err(drop)?,
            },
            _ => return Err(()),
        };
        let (token, from, until) = (number(word()?)?, number(word()?)?, number(word()?)?);
        let stale = Some(number(word()?)?).filter(|at| *at > 0);
        Ok(Record { key, mode, token, from, until, stale, who: word()?.to_owned() })
    }
}

fn number(word: &str) -> Result<u64, ()> {
    word.parse().map_err(drop)
}

/// Checks records as they arrive; see the [module](self).
#[derive(Debug, Default)]
pub struct RecordChecker {
    waiting: BinaryHeap<Event>,
    keys: HashMap<String, Key>,
    swept_to: u64,
    losses: Vec<(u64, u64)>,
    /// The violations that were found.
    pub violations: Vec<String>,
    /// How many records were checked.
    pub checked: u64,
    /// How many records arrived after the sweep had passed them and were not checked.
    pub late: u64,
    /// How many stale writes were tried, and how many of them were rejected.
    pub stale: (u64, u64),
    /// How many violations were excused by a loss of data.
    pub excused: u64,
}

/// Something to check, and its time. The earliest event is the greatest, because a
/// heap returns the greatest first.
#[derive(Debug, PartialEq, Eq)]
struct Event {
    at: u64,
    stale: bool,
    record: Record,
}

impl Ord for Event {
    fn cmp(&self, other: &Self) -> std::cmp::Ordering {
        let rank = |event: &Event| (event.at, event.stale, event.record.token);
        rank(other).cmp(&rank(self))
    }
}

impl PartialOrd for Event {
    fn partial_cmp(&self, other: &Self) -> Option<std::cmp::Ordering> {
        Some(self.cmp(other))
    }
}

#[derive(Debug, Default)]
struct Key {
    inside: Vec<Record>,
    fence: Fence,
    top_exclusive: u64,
    top: u64,
}

impl RecordChecker {
    /// Adds a record.
    pub fn add(&mut self, record: Record) {
        if record.from < self.swept_to {
            self.late += 1;
            return;
        }
        if let Some(at) = record.stale {
            let (at, record) = (at.max(record.from), record.clone());
            self.waiting.push(Event { at, stale: true, record });
        }
        self.waiting.push(Event { at: record.from, stale: false, record });
    }

    /// Tells the checker that the server lost its data at or after this moment. For the
    /// time `leases` from now, clients may still hold locks from before.
    pub fn data_lost(&mut self, from: u64, leases: Duration) {
        let leases = u64::try_from(leases.as_nanos()).unwrap_or(u64::MAX);
        self.losses.push((from, crate::process::now().saturating_add(leases)));
    }

    /// Checks what happened before this moment.
    pub fn sweep(&mut self, to: u64) {
        while self.waiting.peek().is_some_and(|event| event.at < to) {
            let Some(Event { stale, record, .. }) = self.waiting.pop() else { break };
            if stale { self.stale_write(&record) } else { self.enter(record) }
        }
        self.swept_to = self.swept_to.max(to);
    }

    /// How many events wait to be checked.
    pub fn waiting(&self) -> usize {
        self.waiting.len()
    }

    fn is_excused(&self, at: u64) -> bool {
        self.losses.iter().any(|(from, until)| (*from..*until).contains(&at))
    }

    fn enter(&mut self, record: Record) {
        self.checked += 1;
        let excused = self.is_excused(record.from);
        let key = self.keys.entry(record.key.clone()).or_default();
        let faults = key.enter(record);
        if excused {
            self.excused += faults.len() as u64;
        } else {
            self.violations.extend(faults);
        }
    }

    fn stale_write(&mut self, record: &Record) {
        let excused = record.stale.is_some_and(|at| self.is_excused(at));
        let Some((access, token)) = access(record) else { return };
        let key = self.keys.entry(record.key.clone()).or_default();
        let overtaken = match access {
            Access::Exclusive => key.top > record.token,
            Access::Shared => key.top_exclusive > record.token,
        };
        let passed = key.fence.pass(access, token);
        self.stale.0 += 1;
        self.stale.1 += u64::from(!passed);
        if passed && overtaken && !excused {
            self.violations.push(format!("a stale write was accepted: {record}"));
        }
    }
}

fn access(record: &Record) -> Option<(Access, Token)> {
    let access = match record.mode {
        Mode::Exclusive => Access::Exclusive,
        Mode::Shared => Access::Shared,
        _ => return None,
    };
    Some((access, Token::new(record.token)?))
}

impl Key {
    fn enter(&mut self, record: Record) -> Vec<String> {
        let mut faults = Vec::new();
        self.inside.retain(|inside| inside.until > record.from);
        let mut taken = 0;
        for inside in &self.inside {
            match (inside.mode, record.mode) {
                (Mode::Permits { count, .. }, Mode::Permits { .. }) => taken += count,
                (Mode::Shared, Mode::Shared) => {}
                _ => faults.push(format!("held twice: {inside} and {record}")),
            }
        }
        match record.mode {
            Mode::Permits { count, of } if taken + count > of => {
                faults.push(format!("{taken} of {of} permits are taken when: {record}"));
            }
            Mode::Exclusive if record.token <= self.top => {
                faults.push(format!("the token does not rise above {}: {record}", self.top));
            }
            Mode::Shared if record.token <= self.top_exclusive => {
                let top = self.top_exclusive;
                faults.push(format!("the token does not rise above {top}: {record}"));
            }
            _ => {}
        }
        if let Some((access, token)) = access(&record) {
            if !self.fence.pass(access, token) && faults.is_empty() {
                faults.push(format!("the fence rejects a holder: {record}"));
            }
            self.top = self.top.max(record.token);
            if access == Access::Exclusive {
                self.top_exclusive = self.top_exclusive.max(record.token);
            }
        }
        self.inside.push(record);
        faults
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn record(mode: Mode, token: u64, from: u64, until: u64) -> Record {
        Record { key: "k".into(), mode, token, from, until, stale: None, who: "w".into() }
    }

    fn checked(records: &[Record]) -> RecordChecker {
        let mut checker = RecordChecker::default();
        for record in records {
            let parsed: Record = record.to_string().parse().unwrap();
            assert_eq!(parsed, *record, "what is written is what is read");
            checker.add(parsed);
        }
        checker.sweep(u64::MAX);
        assert_eq!(checker.checked, records.len() as u64);
        checker
    }

    use Mode::{Exclusive, Shared};

    #[test]
    fn one_after_the_other_is_fine_in_any_order_of_arrival() {
        let later = record(Exclusive, 2, 20, 30);
        let checker = checked(&[later, record(Exclusive, 1, 10, 20), record(Shared, 3, 30, 40)]);
        assert!(checker.violations.is_empty(), "{:?}", checker.violations);
    }

    #[test]
    fn overlaps_are_found() {
        for (one, two) in [(Exclusive, Exclusive), (Exclusive, Shared), (Shared, Exclusive)] {
            let checker = checked(&[record(one, 1, 10, 21), record(two, 2, 20, 30)]);
            assert_eq!(checker.violations.len(), 1, "{one:?} {two:?}");
        }
        let readers = checked(&[record(Shared, 1, 10, 21), record(Shared, 1, 20, 30)]);
        assert!(readers.violations.is_empty());
        let permits = Mode::Permits { count: 2, of: 3 };
        let checker = checked(&[record(permits, 0, 10, 21), record(permits, 0, 20, 30)]);
        assert_eq!(checker.violations.len(), 1);
    }

    #[test]
    fn tokens_must_rise() {
        for (one, two) in [(Exclusive, Exclusive), (Exclusive, Shared), (Shared, Exclusive)] {
            let checker = checked(&[record(one, 2, 10, 20), record(two, 2, 20, 30)]);
            assert_eq!(checker.violations.len(), 1, "{one:?} {two:?}");
        }
    }

    #[test]
    fn stale_writes_are_rejected_once_overtaken() {
        let mut stale = record(Exclusive, 1, 10, 20);
        stale.stale = Some(40);
        let checker = checked(&[stale.clone(), record(Exclusive, 2, 30, 50)]);
        assert_eq!((checker.stale, checker.violations.len()), ((1, 1), 0));
        let checker = checked(&[stale, record(Exclusive, 2, 50, 60)]);
        assert_eq!((checker.stale, checker.violations.len()), ((1, 0), 0));
    }

    #[test]
    fn a_loss_of_data_excuses_overlaps_but_later_tokens_rise() {
        let now = crate::process::now();
        let mut checker = RecordChecker::default();
        checker.data_lost(15, Duration::ZERO);
        let later = now + 1_000_000_000;
        checker.add(record(Exclusive, 5, 10, 30));
        checker.add(record(Exclusive, 9, 20, 40));
        checker.add(record(Exclusive, 6, 25, 30)); // handed over by the holder from before
        checker.add(record(Exclusive, 8, later, later + 1));
        checker.sweep(u64::MAX);
        assert_eq!(checker.violations.len(), 1, "{:?}", checker.violations);
        assert!(checker.violations[0].contains("does not rise above 9"));
        assert_eq!(checker.excused, 4);
    }
}
