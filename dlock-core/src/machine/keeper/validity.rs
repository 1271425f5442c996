//! Pure: how long a lease is certain, and when it is renewed.

use std::time::Duration;

use rand::RngExt as _;

use super::tracked_claim::Phase;
use super::{ClaimId, Keeper, RETRIES_PER_TTL};
use crate::claim::SessionTerm;
use crate::clock::{Moment, nanos};

/// How long an exclusive lease that was handed over is held, at least, before it is
/// confirmed.
const CONFIRM: Duration = Duration::from_millis(50);
/// How many times a lease is renewed in its term.
const RENEWALS_PER_TERM: u64 = 3;
/// The number of beats in a term: leases that are due in the same beat are renewed
/// together.
const BEATS: u64 = 1024;
/// Renewals are spread from seven eighths of their time on.
const EARLIEST_RENEWAL: u64 = BEATS * 7 / 8;

/// The drift margin: the clocks of two machines may differ in rate by one in fifty.
pub(super) fn margin(term: Duration) -> Duration {
    Duration::from_nanos(nanos(term) / 50)
}

/// How long a lease is certain, and when it may be renewed.
#[derive(Clone, Copy)]
pub(super) struct Validity {
    since: Moment,
    term: Duration,
    /// The lease is not renewed before this moment.
    earliest_renewal: Moment,
}

impl Validity {
    /// The validity of a lease whose request was sent at `sent`, as an answer or a notice
    /// says: it is never taken to be in the future.
    pub(super) fn sent(now: Moment, sent: Moment, term: Duration) -> Self {
        Validity { since: sent.min(now), term, earliest_renewal: now }
    }

    /// The validity of what a session holds. An answer may be about an old keep-alive, so
    /// the next one is not asked for at once.
    pub(super) fn of_session(now: Moment, SessionTerm { as_of, term }: SessionTerm) -> Self {
        let earliest_renewal = now + term / RETRIES_PER_TTL;
        Validity { since: as_of.min(now), term, earliest_renewal }
    }

    fn deadline(self) -> Moment {
        self.since + (self.term - margin(self.term))
    }
}

impl Keeper {
    /// Makes the claim a lease; false if its term is over already.
    pub(super) fn hold(&mut self, now: Moment, id: ClaimId, validity: Validity) -> bool {
        if validity.deadline() <= now {
            return false;
        }
        let tracked = &mut self.claims[id];
        tracked.phase = Phase::Held { certain: true, renewing: true };
        tracked.deadline = validity.deadline();
        tracked.failures = 0;
        self.renew_later(id, validity);
        true
    }

    /// A lease that was handed over lasts for the queue ttl. An exclusive one is confirmed
    /// soon, but not at once: most are released before. All of the same time are confirmed
    /// together.
    ///
    /// (Others are confirmed at once: the answer tells whether somebody waits, and the
    /// call lets further ones in.)
    pub(super) fn confirm_soon(&mut self, now: Moment, id: ClaimId) {
        let at = (now + CONFIRM * 2).as_nanos();
        let due = Moment::from_nanos(at - at % nanos(CONFIRM)).min(self.claims[id].due);
        self.set_due(id, due);
    }

    /// Prolongs a lease that was renewed.
    pub(super) fn prolong(&mut self, id: ClaimId, validity: Validity) {
        let tracked = &mut self.claims[id];
        let Phase::Held { certain, .. } = &mut tracked.phase else { return };
        *certain = true;
        tracked.deadline = tracked.deadline.max(validity.deadline());
        self.renew_later(id, validity);
    }

    fn renew_later(&mut self, id: ClaimId, validity: Validity) {
        let renewal = self.renewal(validity.since, validity.term);
        let tracked = &mut self.claims[id];
        tracked.term = nanos(validity.term);
        let due = renewal.max(validity.earliest_renewal).min(tracked.deadline);
        self.set_due(id, due);
    }

    /// The moment when a lease whose request was sent at `sent` is renewed: after about a
    /// third of its term, spread out, but on a beat that all leases of this term share, so
    /// that many are renewed by one call.
    fn renewal(&mut self, sent: Moment, term: Duration) -> Moment {
        let beat = (nanos(term) / BEATS).max(1);
        let spread = self.random.random_range(EARLIEST_RENEWAL..BEATS);
        let at = (sent + Duration::from_nanos(beat * spread / RENEWALS_PER_TERM)).as_nanos();
        Moment::from_nanos(at - at % beat)
    }
}
