//! Pure: what one node has not confirmed to have given back.
//!
//! A release that a node does not answer is repeated when it can be reached again, until the
//! ttl has passed: then the lease has ended by itself. If a request of the claim was never
//! answered, it may yet be read from a connection that is gone, even after a release that
//! was answered. So the release is sent once more a settling time after the first answer.

use std::collections::HashMap;
use std::time::Duration;

use super::quorum::AttemptId;
use crate::claim::Owner;
use crate::clock::Moment;

/// How long a node that answers again may take to read what was sent before.
const SETTLE: Duration = Duration::from_secs(1);

/// What is given back again and again.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct PendingRelease {
    /// The name of the key at the node.
    pub(super) name: String,
    pub(super) attempt_id: AttemptId,
    /// Whether the place among those who wait is given back too.
    pub(super) place: bool,
}

#[derive(Debug)]
struct Entry {
    what: PendingRelease,
    until: Moment,
    /// Whether a request may yet be applied; once the node answered, until when.
    doubt: bool,
    settled: Option<Moment>,
}

/// The releases that one node has not confirmed, by owner.
#[derive(Debug, Default)]
pub(super) struct PendingReleases(HashMap<Owner, Entry>);

impl PendingReleases {
    /// Adds what the node did not confirm. `doubt`: a request of the claim was never
    /// answered.
    pub(super) fn add(&mut self, now: Moment, what: PendingRelease, ttl: Duration, doubt: bool) {
        let until = now + ttl + SETTLE;
        let owner = what.attempt_id.owner;
        let entry = self.0.entry(owner).or_insert(Entry {
            what: what.clone(),
            until,
            doubt,
            settled: None,
        });
        entry.until = until;
        entry.doubt |= doubt;
        entry.what.place |= what.place;
        if what.attempt_id.attempt > entry.what.attempt_id.attempt {
            entry.what.attempt_id = what.attempt_id;
        }
    }

    /// What is to be sent now.
    pub(super) fn due(&mut self, now: Moment) -> Vec<PendingRelease> {
        self.0.retain(|_, entry| now < entry.until);
        let due = self.0.values().filter(|entry| entry.settled.is_none_or(|at| now >= at));
        due.map(|entry| entry.what.clone()).collect()
    }

    /// The node confirmed a request that was sent then.
    pub(super) fn confirmed(&mut self, now: Moment, sent: Moment, attempt_id: AttemptId) {
        let Some(entry) = self.0.get_mut(&attempt_id.owner) else { return };
        let settled = !entry.doubt || entry.settled.is_some_and(|settled| sent >= settled);
        if settled && entry.what.attempt_id.attempt <= attempt_id.attempt {
            self.0.remove(&attempt_id.owner);
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

    fn what(attempt: u64) -> PendingRelease {
        let attempt_id = AttemptId { owner: Owner::from_bits(7), attempt };
        PendingRelease { name: "k".into(), attempt_id, place: false }
    }

    #[test]
    fn a_release_is_repeated_until_it_is_confirmed_or_the_ttl_has_passed() {
        let ttl = Duration::from_secs(5);
        let mut pending_releases = PendingReleases::default();
        pending_releases.add(at(0), what(1), ttl, false);
        assert_eq!(pending_releases.due(at(10)), [what(1)]);
        pending_releases.confirmed(at(20), at(10), what(1).attempt_id);
        assert!(pending_releases.is_empty());
        pending_releases.add(at(0), what(1), ttl, false);
        assert!(pending_releases.due(at(6_000)).is_empty());
        assert!(pending_releases.is_empty(), "the lease has ended by itself");
    }

    #[test]
    fn a_doubtful_request_is_given_back_twice() {
        let mut pending_releases = PendingReleases::default();
        pending_releases.add(at(0), what(1), Duration::from_secs(5), true);
        pending_releases.confirmed(at(20), at(10), what(1).attempt_id);
        assert!(pending_releases.due(at(500)).is_empty(), "it may yet be read");
        assert_eq!(pending_releases.due(at(1_030)), [what(1)]);
        pending_releases.confirmed(at(1_040), at(1_030), what(1).attempt_id);
        assert!(pending_releases.is_empty());
    }

    #[test]
    fn a_later_try_is_given_back_with_the_earlier_one() {
        let mut pending_releases = PendingReleases::default();
        pending_releases.add(at(0), what(1), Duration::from_secs(5), false);
        pending_releases.add(at(0), what(3), Duration::from_secs(5), false);
        pending_releases.confirmed(at(20), at(10), what(1).attempt_id);
        assert_eq!(pending_releases.due(at(2_000)), [what(3)]);
    }
}
