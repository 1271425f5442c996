//! Pure: one claim, from the first request to the last release.

use std::sync::Arc;
use std::time::Duration;

use super::{Answer, LOOK, SETTLE, margin};
use crate::claim::Claim;
use crate::clock::Moment;
use crate::error::ErrorKind;
use crate::machine::types::{GateId, Ticket};

#[derive(Debug)]
pub(super) struct TrackedClaim {
    pub(super) claim: Arc<Claim>,
    pub(super) gate: GateId,
    pub(super) phase: Phase,
    pub(super) in_flight: Option<Call>,
    /// When the last call was sent.
    pub(super) sent: Moment,
    pub(super) seq: u32,
    pub(super) deadline: Moment,
    /// How long the lease lasts from the request that `deadline` counts from, in
    /// nanoseconds.
    pub(super) term: u64,
    pub(super) due: Moment,
    pub(super) failures: u8,
    /// Whether the call is made again when its answer is there, since the answer may be
    /// older than what happened to the backend meanwhile, or than a notice that the key may
    /// be free.
    pub(super) asks_again: bool,
    /// When a notice said that the lease is lost before its grant was known; zero if none
    /// did.
    pub(super) lost_early: Moment,
    pub(super) doubt: InDoubt,
    /// How long the key stays taken after the release.
    pub(super) stays: Option<Box<Duration>>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Phase {
    /// The backend has nothing of it, unless an acquire is under way or in doubt.
    Acquiring,
    /// The backend has a place in the queue for it, or a grant that is of no use.
    Queued,
    Held {
        certain: bool,
        renewing: bool,
    },
    Releasing {
        give_up: Moment,
        reply_to: Option<Ticket>,
        told: bool,
    },
}

/// The moment until which an acquire that was never answered may still be applied.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct InDoubt(pub(super) Moment);

impl InDoubt {
    pub(super) const NONE: InDoubt = InDoubt(Moment::from_nanos(0));
    /// The backend has not answered since. Once it answers again, it is known when it
    /// will have read what was sent before.
    pub(super) const OPEN: InDoubt = InDoubt(Moment::NEVER);
}

/// A call that was not answered yet.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Call {
    Acquire,
    RenewOrRelease,
}

impl TrackedClaim {
    pub(super) fn new(claim: Claim, gate: GateId) -> Self {
        TrackedClaim {
            claim: Arc::new(claim),
            gate,
            phase: Phase::Acquiring,
            in_flight: None,
            sent: Moment::default(),
            seq: 0,
            deadline: Moment::NEVER,
            term: 0,
            due: Moment::NEVER,
            failures: 0,
            asks_again: false,
            lost_early: Moment::default(),
            doubt: InDoubt::NONE,
            stays: None,
        }
    }

    /// The moment from which a release is not tried again: the lease has ended by then.
    pub(super) fn gives_up(&self, now: Moment) -> Moment {
        let ttl = self.claim.ttl;
        now + ttl + margin(ttl) + LOOK
    }

    /// The lease that this claim was to replace, as a claim that is released by itself: the
    /// call that was to give it up may never be applied.
    pub(super) fn owed_instead(&self, now: Moment) -> Option<TrackedClaim> {
        let owner = self.claim.instead_of?;
        let claim = Claim { owner, instead_of: None, ..Claim::clone(&self.claim) };
        let mut tracked = TrackedClaim::new(claim, self.gate);
        let give_up = self.gives_up(now);
        tracked.phase = Phase::Releasing { give_up, reply_to: None, told: true };
        Some(tracked)
    }

    /// The lease that this claim replaces was certainly given up.
    pub(super) fn given_up(&mut self) {
        if self.claim.instead_of.is_some() {
            Arc::make_mut(&mut self.claim).instead_of = None;
        }
    }

    /// Whether the lock was lost after this request was sent, so that a grant in the answer
    /// is void.
    pub(super) fn is_lost_since(&self, sent: Moment) -> bool {
        self.lost_early > Moment::default() && self.lost_early >= sent
    }

    pub(super) fn awaits_acquire(&self) -> bool {
        self.in_flight == Some(Call::Acquire)
    }

    pub(super) fn is_in_doubt(&self, now: Moment) -> bool {
        now < self.doubt.0
    }

    pub(super) fn count_doubt(&mut self, now: Moment, answer: &Answer) {
        let error = match answer {
            Answer::Acquire(Err(error)) => {
                if error.kind() == ErrorKind::Unknown {
                    self.doubt = InDoubt::OPEN;
                }
                return;
            }
            Answer::Renew(Err(error)) | Answer::Release(Err(error)) => Some(error.kind()),
            _ => None,
        };
        let silent = matches!(error, Some(ErrorKind::Unknown | ErrorKind::Unavailable));
        if self.doubt == InDoubt::OPEN && !silent {
            self.doubt = InDoubt(now + SETTLE.min(self.claim.ttl));
        }
    }
}
