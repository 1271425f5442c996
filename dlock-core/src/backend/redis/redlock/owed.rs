//! Pure: what one node has not confirmed to have given back.
//!
//! A release that a node does not answer is repeated when it can be reached again, until the
//! ttl has passed: then the lease has ended by itself. If a request of the claim was never
//! answered, it may yet be read from a connection that is gone, even after a release that
//! was answered. So the release is sent once more a settling time after the first answer.

use std::collections::HashMap;
use std::time::Duration;

use super::quorum::Mark;
use crate::claim::Owner;
use crate::clock::Moment;

/// How long a node that answers again may take to read what was sent before.
const SETTLE: Duration = Duration::from_secs(1);

/// What is given back again and again.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct GiveBack {
    /// The name of the key at the node.
    pub(super) name: String,
    pub(super) mark: Mark,
    /// Whether the place among those who wait is given back too.
    pub(super) place: bool,
}

#[derive(Debug)]
struct Entry {
    what: GiveBack,
    until: Moment,
    /// Whether a request may yet be applied; once the node answered, until when.
    doubt: bool,
    settled: Option<Moment>,
}

/// What one node owes, by owner.
#[derive(Debug, Default)]
pub(super) struct Owed(HashMap<Owner, Entry>);

impl Owed {
    /// Adds what the node did not confirm. `doubt`: a request of the claim was never
    /// answered.
    pub(super) fn add(&mut self, now: Moment, what: GiveBack, ttl: Duration, doubt: bool) {
        let until = now + ttl + SETTLE;
        let owner = what.mark.owner;
        let entry = self.0.entry(owner).or_insert(Entry {
            what: what.clone(),
            until,
            doubt,
            settled: None,
        });
        entry.until = until;
        entry.doubt |= doubt;
        entry.what.place |= what.place;
        if what.mark.attempt > entry.what.mark.attempt {
            entry.what.mark = what.mark;
        }
    }

    /// What is to be sent now.
    pub(super) fn due(&mut self, now: Moment) -> Vec<GiveBack> {
        self.0.retain(|_, entry| now < entry.until);
        let due = self.0.values().filter(|entry| entry.settled.is_none_or(|at| now >= at));
        due.map(|entry| entry.what.clone()).collect()
    }

    /// The node confirmed a request that was sent then.
    pub(super) fn confirmed(&mut self, now: Moment, sent: Moment, mark: Mark) {
        let Some(entry) = self.0.get_mut(&mark.owner) else { return };
        let settled = !entry.doubt || entry.settled.is_some_and(|settled| sent >= settled);
        if settled && entry.what.mark.attempt <= mark.attempt {
            self.0.remove(&mark.owner);
        } else if entry.settled.is_none() {
            entry.settled = Some(now + SETTLE);
        }
    }

    pub(super) fn is_empty(&self) -> bool {
        self.0.is_empty()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn at(millis: u64) -> Moment {
        Moment::from_nanos(millis * 1_000_000)
    }

    fn what(attempt: u64) -> GiveBack {
        let mark = Mark { owner: Owner::from_bits(7), attempt };
        GiveBack { name: "k".into(), mark, place: false }
    }

    #[test]
    fn a_release_is_repeated_until_it_is_confirmed_or_the_ttl_has_passed() {
        let ttl = Duration::from_secs(5);
        let mut owed = Owed::default();
        owed.add(at(0), what(1), ttl, false);
        assert_eq!(owed.due(at(10)), [what(1)]);
        owed.confirmed(at(20), at(10), what(1).mark);
        assert!(owed.is_empty());
        owed.add(at(0), what(1), ttl, false);
        assert!(owed.due(at(6_000)).is_empty());
        assert!(owed.is_empty(), "the lease has ended by itself");
    }

    #[test]
    fn a_doubtful_request_is_given_back_twice() {
        let mut owed = Owed::default();
        owed.add(at(0), what(1), Duration::from_secs(5), true);
        owed.confirmed(at(20), at(10), what(1).mark);
        assert!(owed.due(at(500)).is_empty(), "it may yet be read");
        assert_eq!(owed.due(at(1_030)), [what(1)]);
        owed.confirmed(at(1_040), at(1_030), what(1).mark);
        assert!(owed.is_empty());
    }

    #[test]
    fn a_later_try_is_given_back_with_the_earlier_one() {
        let mut owed = Owed::default();
        owed.add(at(0), what(1), Duration::from_secs(5), false);
        owed.add(at(0), what(3), Duration::from_secs(5), false);
        owed.confirmed(at(20), at(10), what(1).mark);
        assert_eq!(owed.due(at(2_000)), [what(3)]);
    }
}
