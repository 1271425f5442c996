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
//!
//! After a [failover](RecordChecker::failed_over) the new primary may not know the newest
//! leases. Holders may overlap until their losers must have been told, and not longer; and
//! whoever comes with an older token is rejected by the fence. Two holders with the same
//! token are never excused.
//!
//! An operator may [break](RecordChecker::broken) a lock. Its holder must hear of it
//! before the delay of the break is over, and nobody else may be let in before. Both are
//! excused only for a holder whose process was [paused](RecordChecker::paused) meanwhile.

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
    failovers: Vec<(u64, u64)>,
    breaks: Vec<Break>,
    /// The first part of the name of a holder, and when its process was paused.
    pauses: Vec<(String, u64, u64)>,
    /// The violations that were found.
    pub violations: Vec<String>,
    /// How many records were checked.
    pub checked: u64,
    /// How many records arrived after the sweep had passed them and were not checked.
    pub late: u64,
    /// How many stale writes were tried, and how many of them were rejected.
    pub stale: (u64, u64),
    /// How many violations were excused by a loss of data or a failover.
    pub excused: u64,
    /// How many violations were excused by a holder that could not hear of a break.
    pub excused_by_pause: u64,
}

/// A lock that was broken.
#[derive(Debug)]
struct Break {
    key: String,
    /// When the break was sent.
    from: u64,
    /// Its holders must have heard of it by then.
    told_by: u64,
    /// The last moment at which a lease of an old holder may end.
    until: u64,
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
        self.data_lost_between(from, crate::process::now().saturating_add(leases));
    }

    fn data_lost_between(&mut self, from: u64, until: u64) {
        self.losses.push((from, until));
    }

    /// Tells the checker that another server became the primary at or after `from`, and
    /// that whoever lost a lock by it must know at `told_by`.
    pub fn failed_over(&mut self, from: u64, told_by: u64) {
        self.failovers.push((from, told_by));
    }

    /// Tells the checker that a key was broken: the break was sent at `from`, its holders
    /// must know it at `told_by`, and none of their leases lasts beyond `until`.
    pub fn broken(&mut self, key: &str, from: u64, told_by: u64, until: u64) {
        self.breaks.push(Break { key: key.to_owned(), from, told_by, until });
    }

    /// Tells the checker that the processes of all holders whose name starts like this
    /// were paused, so that they could not hear of a break.
    pub fn paused(&mut self, name: &str, from: u64, until: u64) {
        self.pauses.push((name.to_owned(), from, until));
    }

    /// Checks what happened before this moment.
    pub fn sweep(&mut self, to: u64) {
        while self.waiting.peek().is_some_and(|event| event.at < to) {
            let Some(Event { stale, record, .. }) = self.waiting.pop() else { break };
            if stale { self.stale_write(&record) } else { self.enter(record) }
        }
        self.swept_to = self.swept_to.max(to);
        // No record can reach that far back any more.
        let old = to.saturating_sub(60_000_000_000);
        self.breaks.retain(|it| it.until > old);
        self.pauses.retain(|(_, _, until)| *until > old);
    }

    /// Checks all records, and that there are enough of them for the check to mean something.
    ///
    /// # Panics
    /// If there is a violation, or if fewer records were checked.
    #[track_caller]
    pub fn assert_clean(&mut self, at_least: u64) {
        self.sweep(u64::MAX);
        assert_eq!(self.violations, Vec::<String>::new());
        assert!(self.checked >= at_least, "only {} records", self.checked);
    }

    /// How many events wait to be checked.
    pub fn waiting(&self) -> usize {
        self.waiting.len()
    }

    fn is_excused(&self, at: u64) -> bool {
        self.losses.iter().any(|(from, until)| (*from..*until).contains(&at))
    }

    /// Whether a failover explains what a holder found that entered at this moment.
    fn is_of_failover(&self, at: u64, kind: FaultKind) -> bool {
        let until = match kind {
            FaultKind::Overlap { until } => until,
            FaultKind::OlderToken => at,
            FaultKind::Other => return false,
        };
        self.failovers.iter().any(|(from, told_by)| *from <= at && until <= *told_by)
    }

    /// Whether one of these holders was paused while it should have heard of a break.
    fn could_not_hear(&self, key: &str, at: u64, holders: &[String]) -> bool {
        let breaks =
            self.breaks.iter().filter(|it| it.key == key && (it.from..it.until).contains(&at));
        let paused = |it: &Break, holder: &String| {
            self.pauses.iter().any(|(name, from, until)| {
                holder.starts_with(name.as_str()) && *from < it.told_by && *until > it.from
            })
        };
        breaks.into_iter().any(|it| holders.iter().any(|holder| paused(it, holder)))
    }

    fn enter(&mut self, record: Record) {
        self.checked += 1;
        let (name, at) = (record.key.clone(), record.from);
        let untold = self
            .breaks
            .iter()
            .find(|it| it.key == name && record.from < it.from && record.until > it.told_by);
        let untold = untold.map(|it| Fault {
            what: format!("a holder was not told that its lock was broken: {record}"),
            holders: vec![record.who.clone()],
            at: it.told_by,
            kind: FaultKind::Other,
        });
        let key = self.keys.entry(name.clone()).or_default();
        let faults = key.enter(record);
        for fault in untold.into_iter().chain(faults) {
            if self.is_excused(at) || self.is_of_failover(at, fault.kind) {
                self.excused += 1;
            } else if self.could_not_hear(&name, fault.at, &fault.holders) {
                self.excused_by_pause += 1;
            } else {
                self.violations.push(fault.what);
            }
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

/// Something that must not be.
struct Fault {
    what: String,
    holders: Vec<String>,
    at: u64,
    kind: FaultKind,
}

#[derive(Clone, Copy)]
enum FaultKind {
    /// More hold the lock than may, until this moment.
    Overlap {
        until: u64,
    },
    /// The token is older than one before, so a fence rejects it.
    OlderToken,
    Other,
}

impl Key {
    fn enter(&mut self, record: Record) -> Vec<Fault> {
        let mut faults = Vec::new();
        self.inside.retain(|inside| inside.until > record.from);
        let fault = |what, others: Vec<String>, kind| {
            let holders = others.into_iter().chain([record.who.clone()]).collect();
            Fault { what, holders, at: record.from, kind }
        };
        let mut taken = 0;
        for inside in &self.inside {
            match (inside.mode, record.mode) {
                (Mode::Permits { count, .. }, Mode::Permits { .. }) => taken += count,
                (Mode::Shared, Mode::Shared) => {}
                _ => faults.push(fault(
                    format!("held twice: {inside} and {record}"),
                    vec![inside.who.clone()],
                    FaultKind::Overlap { until: inside.until.min(record.until) },
                )),
            }
        }
        let last = match record.mode {
            Mode::Exclusive => self.top,
            Mode::Shared => self.top_exclusive,
            _ => 0,
        };
        match record.mode {
            Mode::Permits { count, of } if taken + count > of => {
                let others = self.inside.iter().map(|inside| inside.who.clone()).collect();
                let what = format!("{taken} of {of} permits are taken when: {record}");
                let until = self.left_by(taken + count - of).min(record.until);
                faults.push(fault(what, others, FaultKind::Overlap { until }));
            }
            Mode::Exclusive | Mode::Shared if record.token <= last => {
                let what = format!("the token does not rise above {last}: {record}");
                let is_older = record.token < last;
                let kind = if is_older { FaultKind::OlderToken } else { FaultKind::Other };
                faults.push(fault(what, vec![], kind));
            }
            _ => {}
        }
        if let Some((access, token)) = access(&record) {
            if !self.fence.pass(access, token) && faults.is_empty() {
                let what = format!("the fence rejects a holder: {record}");
                faults.push(fault(what, vec![], FaultKind::Other));
            }
            self.top = self.top.max(record.token);
            if access == Access::Exclusive {
                self.top_exclusive = self.top_exclusive.max(record.token);
            }
        }
        self.inside.push(record);
        faults
    }

    /// When those inside will have given back this many permits.
    fn left_by(&self, permits: u32) -> u64 {
        let count = |record: &Record| match record.mode {
            Mode::Permits { count, .. } => count,
            _ => 0,
        };
        let mut leaving: Vec<_> = self.inside.iter().map(|it| (it.until, count(it))).collect();
        leaving.sort_unstable();
        let mut left = 0;
        let enough = leaving.iter().find(|(_, count)| {
            left += count;
            left >= permits
        });
        enough.map_or(0, |(until, _)| *until)
    }
}

#[cfg(test)]
mod tests;
