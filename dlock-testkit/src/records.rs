//! Who held what when, told by several processes and judged in one place.
//!
//! A holder reads the clock *after* it was let in (`from`) and *before* it lets go
//! (`until`), each time making sure by its guard that it held the lock at that
//! moment; so a record claims no more than its guard did. The holder of a lock
//! that was lost claims it up to the deadline that the guard had named.
//!
//! The judge sweeps over the records in the order of `from`, as far as all of them
//! must have arrived, and forgets what is over, so its memory does not grow:
//!
//! - **overlap**: nobody who is excluded enters while a holder is inside;
//! - **tokens** rise: an exclusive holder's is above all before it, a shared one's
//!   above those of the exclusive ones;
//! - **fence**: a [`Fence`] for each key lets everybody pass who holds the lock,
//!   and no stale one who was overtaken.
//!
//! What a server that lost its data cannot know is excused for as long as leases
//! from before may last; afterwards tokens must be above all from before.

use std::collections::{BinaryHeap, HashMap};
use std::fmt;
use std::str::FromStr;
use std::time::Duration;

use dlock::{Access, Fence, Mode, Token};

/// Somebody held a key.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Record {
    /// Which.
    pub key: String,
    /// What for.
    pub mode: Mode,
    /// With this token; 0 for permits.
    pub token: u64,
    /// Held at this moment, see [`process::now`](crate::process::now).
    pub from: u64,
    /// And until this one.
    pub until: u64,
    /// When the holder, having lost the lock, tried to write nevertheless.
    pub stale: Option<u64>,
    /// Who, for people.
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

/// Judges records as they come in.
#[derive(Debug, Default)]
pub struct Judge {
    waiting: BinaryHeap<Event>,
    keys: HashMap<String, Key>,
    swept_to: u64,
    losses: Vec<(u64, u64)>,
    /// What was found wrong.
    pub violations: Vec<String>,
    /// How many records were judged.
    pub judged: u64,
    /// How many came after the sweep had passed them, and were not.
    pub late: u64,
    /// How many stale writes were tried, and how many of them rejected.
    pub stale: (u64, u64),
    /// How many faults were excused by a loss of data.
    pub excused: u64,
}

/// Something to judge, at a moment. The earliest is the greatest: a heap gives
/// that first.
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

impl Judge {
    /// A record came in.
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

    /// From this moment on the server may have lost its data, and for as long as
    /// `leases` more somebody may rightly believe to hold a lock from before.
    pub fn data_lost(&mut self, from: u64, leases: Duration) {
        let leases = u64::try_from(leases.as_nanos()).unwrap_or(u64::MAX);
        self.losses.push((from, crate::process::now().saturating_add(leases)));
    }

    /// Judges what happened before this moment.
    pub fn sweep(&mut self, to: u64) {
        while self.waiting.peek().is_some_and(|event| event.at < to) {
            let Some(Event { stale, record, .. }) = self.waiting.pop() else { break };
            if stale { self.stale_write(&record) } else { self.enter(record) }
        }
        self.swept_to = self.swept_to.max(to);
    }

    /// How many records wait to be judged.
    pub fn waiting(&self) -> usize {
        self.waiting.len()
    }

    fn is_excused(&self, at: u64) -> bool {
        self.losses.iter().any(|(from, until)| (*from..*until).contains(&at))
    }

    fn enter(&mut self, record: Record) {
        self.judged += 1;
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

    fn judged(records: &[Record]) -> Judge {
        let mut judge = Judge::default();
        for record in records {
            let told: Record = record.to_string().parse().unwrap();
            assert_eq!(told, *record, "what is written is what is read");
            judge.add(told);
        }
        judge.sweep(u64::MAX);
        assert_eq!(judge.judged, records.len() as u64);
        judge
    }

    use Mode::{Exclusive, Shared};

    #[test]
    fn one_after_the_other_is_fine_in_any_order_of_arrival() {
        let later = record(Exclusive, 2, 20, 30);
        let judge = judged(&[later, record(Exclusive, 1, 10, 20), record(Shared, 3, 30, 40)]);
        assert!(judge.violations.is_empty(), "{:?}", judge.violations);
    }

    #[test]
    fn overlaps_are_found() {
        for (one, two) in [(Exclusive, Exclusive), (Exclusive, Shared), (Shared, Exclusive)] {
            let judge = judged(&[record(one, 1, 10, 21), record(two, 2, 20, 30)]);
            assert_eq!(judge.violations.len(), 1, "{one:?} {two:?}");
        }
        let readers = judged(&[record(Shared, 1, 10, 21), record(Shared, 1, 20, 30)]);
        assert!(readers.violations.is_empty());
        let permits = Mode::Permits { count: 2, of: 3 };
        let judge = judged(&[record(permits, 0, 10, 21), record(permits, 0, 20, 30)]);
        assert_eq!(judge.violations.len(), 1);
    }

    #[test]
    fn tokens_must_rise() {
        for (one, two) in [(Exclusive, Exclusive), (Exclusive, Shared), (Shared, Exclusive)] {
            let judge = judged(&[record(one, 2, 10, 20), record(two, 2, 20, 30)]);
            assert_eq!(judge.violations.len(), 1, "{one:?} {two:?}");
        }
    }

    #[test]
    fn stale_writes_are_rejected_once_overtaken() {
        let mut stale = record(Exclusive, 1, 10, 20);
        stale.stale = Some(40);
        let judge = judged(&[stale.clone(), record(Exclusive, 2, 30, 50)]);
        assert_eq!((judge.stale, judge.violations.len()), ((1, 1), 0));
        let judge = judged(&[stale, record(Exclusive, 2, 50, 60)]);
        assert_eq!((judge.stale, judge.violations.len()), ((1, 0), 0));
    }

    #[test]
    fn a_loss_of_data_excuses_overlaps_but_later_tokens_rise() {
        let now = crate::process::now();
        let mut judge = Judge::default();
        judge.data_lost(15, Duration::ZERO);
        let later = now + 1_000_000_000;
        judge.add(record(Exclusive, 5, 10, 30));
        judge.add(record(Exclusive, 9, 20, 40));
        judge.add(record(Exclusive, 6, 25, 30)); // handed over by the holder from before
        judge.add(record(Exclusive, 8, later, later + 1));
        judge.sweep(u64::MAX);
        assert_eq!(judge.violations.len(), 1, "{:?}", judge.violations);
        assert!(judge.violations[0].contains("does not rise above 9"));
        assert_eq!(judge.excused, 4);
    }
}
