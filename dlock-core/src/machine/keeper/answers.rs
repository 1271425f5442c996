//! Pure: what the backend's answers and notices do to a claim.

use super::tracked_claim::{InDoubt, InFlight, Phase};
use super::{Answer, CallId, ClaimEvent, ClaimId, Keeper, LOOK, RETRIES_PER_TTL};
use crate::claim::{
    AcquireOutcome, LossReason, Notice, Owner, Release, ReleaseOutcome, RenewOutcome,
};
use crate::clock::Moment;
use crate::error::Result;
use crate::machine::types::{Actions, GateId};
use crate::planted_bug::Bug;
use rand::RngExt as _;
use std::time::Duration;

impl Keeper {
    /// What a claim says upon an answer; `None` if nobody need know.
    pub(crate) fn reply(
        &mut self,
        now: Moment,
        call: CallId,
        answer: Answer,
        out: &mut Actions,
    ) -> Option<(ClaimId, GateId, ClaimEvent)> {
        let id = call.claim;
        let tracked = self.claims.get_mut(id)?;
        if call.seq != tracked.seq {
            return None; // superseded by a later call
        }
        let in_flight = tracked.in_flight.take()?;
        tracked.count_doubt(now, &answer);
        let gate = tracked.gate;
        if let Some(event) = self.expire(now, id, out) {
            return Some((id, gate, event)); // it came too late: what is lost stays lost
        }
        let tracked = self.claims.get_mut(id)?;
        let event = match (tracked.phase, answer) {
            (Phase::Releasing { .. }, Answer::Release(outcome)) => {
                self.release_answered(now, id, in_flight, outcome)
            }
            (Phase::Releasing { .. }, _) => {
                self.send(now, id, out);
                None
            }
            (Phase::Acquiring | Phase::Queued, Answer::Acquire(outcome)) => {
                self.acquire_answered(now, id, in_flight, outcome, out)
            }
            (Phase::Held { .. }, Answer::Acquire(outcome)) => {
                // Asked for once more just before the hand-over's notice came.
                match outcome {
                    Ok(AcquireOutcome::Granted(_)) => {
                        self.prolong(now, id, in_flight.sent);
                    }
                    _ => self.send(now, id, out),
                }
                None
            }
            (Phase::Held { .. }, Answer::Renew(outcome)) => {
                self.renewal_answered(now, id, in_flight, outcome)
            }
            _ => None,
        };
        event.map(|event| (id, gate, event))
    }

    fn release_answered(
        &mut self,
        now: Moment,
        id: ClaimId,
        in_flight: InFlight,
        outcome: Result<ReleaseOutcome>,
    ) -> Option<ClaimEvent> {
        let tracked = self.claims.get_mut(id)?;
        let Phase::Releasing { give_up, reply_to, told, .. } = &mut tracked.phase else {
            return None;
        };
        let (give_up, reply_to, was_told) = (*give_up, reply_to.take(), *told);
        *told = true;
        match (&outcome, tracked.doubt) {
            (Ok(_), InDoubt(settled)) if in_flight.sent < settled => self.set_due(id, settled),
            (Ok(_), _) => {
                self.remove(id);
            }
            (Err(error), InDoubt::NONE) if now >= give_up || !error.kind().is_retryable() => {
                self.remove(id);
            }
            (Err(_), _) => {
                let retry = self.retry_in(id);
                self.set_due(id, now + retry);
            }
        }
        (!was_told).then_some(ClaimEvent::Released { reply_to, outcome })
    }

    fn acquire_answered(
        &mut self,
        now: Moment,
        id: ClaimId,
        in_flight: InFlight,
        outcome: Result<AcquireOutcome>,
        out: &mut Actions,
    ) -> Option<ClaimEvent> {
        let planted = self.planted;
        let tracked = self.claims.get_mut(id)?;
        match outcome {
            // The backend took it away before its answer came.
            Ok(AcquireOutcome::Granted(_)) if tracked.is_lost_since(in_flight.sent) => {
                tracked.given_up();
                tracked.phase = Phase::Acquiring;
                let retry = self.retry_in(id);
                self.set_due(id, now + retry);
                None
            }
            Ok(AcquireOutcome::Granted(grant)) => {
                tracked.given_up();
                let counted_from =
                    if planted.is(Bug::LeaseCountedFromReply) { now } else { in_flight.sent };
                if self.hold(now, id, counted_from, self.claims[id].claim.ttl) {
                    Some(ClaimEvent::Granted(grant))
                } else {
                    // Came too late to be of use. Asked again, but not at once: the
                    // ttl may be shorter than the way.
                    let retry = self.retry_in(id);
                    self.set_due(id, now + retry);
                    None
                }
            }
            Ok(AcquireOutcome::Queued { free_in, holder }) => {
                tracked.given_up();
                tracked.phase = Phase::Queued;
                tracked.failures = 0;
                let spread = self.random.random_range(0.75..1.0);
                let look = LOOK.min(tracked.claim.patience() / 3).mul_f64(spread);
                let look = free_in.map_or(look, |free| look.min(free + Duration::from_millis(1)));
                let due = if planted.is(Bug::LostWakeup) { Moment::NEVER } else { now + look };
                self.set_due(id, due);
                Some(ClaimEvent::Queued(holder))
            }
            Ok(AcquireOutcome::Busy { holder }) => {
                tracked.given_up();
                if tracked.claim.queue {
                    self.send(now, id, out); // somebody joined while it was only tried
                    return None;
                }
                self.release(now, id, Release::Now, None, out);
                Some(ClaimEvent::Busy(holder))
            }
            Err(error) if error.kind().is_retryable() && tracked.claim.queue => {
                tracked.phase = Phase::Acquiring;
                let retry = self.retry_in(id);
                self.set_due(id, now + retry);
                Some(ClaimEvent::Trouble(error))
            }
            Err(error) => {
                self.release(now, id, Release::Now, None, out);
                Some(ClaimEvent::Failed(error))
            }
        }
    }

    fn renewal_answered(
        &mut self,
        now: Moment,
        id: ClaimId,
        in_flight: InFlight,
        outcome: Result<RenewOutcome>,
    ) -> Option<ClaimEvent> {
        match outcome {
            Ok(RenewOutcome::Held { others_wait }) => {
                let planted = self.planted;
                let sent =
                    if planted.is(Bug::LeaseCountedFromReply) { now } else { in_flight.sent };
                self.prolong(now, id, sent);
                if planted.is(Bug::OneShotRenewal) {
                    self.stop_renewing(id);
                }
                Some(ClaimEvent::Renewed { others_wait })
            }
            Ok(RenewOutcome::Lost) => {
                self.remove(id);
                Some(ClaimEvent::Lost(LossReason::Forgotten))
            }
            Err(error) => {
                let planted = self.planted;
                let tracked = self.claims.get_mut(id)?;
                let retry = (tracked.claim.ttl / RETRIES_PER_TTL).min(LOOK);
                if let Phase::Held { certain, .. } = &mut tracked.phase {
                    *certain = false;
                }
                let mut due = (now + retry).min(tracked.deadline);
                if planted.is(Bug::KeeperStopsAfterError) {
                    due = Moment::NEVER;
                }
                self.set_due(id, due);
                Some(ClaimEvent::Uncertain(error))
            }
        }
    }

    /// What a claim says upon a notice of the backend.
    pub(crate) fn notice(
        &mut self,
        now: Moment,
        owner: Owner,
        notice: Notice,
        out: &mut Actions,
    ) -> Option<(ClaimId, GateId, ClaimEvent)> {
        let claims = &self.claims;
        let is_it = |id: &ClaimId| claims.get(*id).is_some_and(|it| it.claim.owner == owner);
        let id = *self.by_owner.find(owner.low_bits(), is_it)?;
        let tracked = self.claims.get_mut(id)?;
        let gate = tracked.gate;
        let event = match (notice, tracked.phase) {
            (Notice::Granted { grant, sent }, Phase::Acquiring | Phase::Queued) => {
                tracked.given_up();
                let counted_from =
                    if self.planted.is(Bug::HandoverCountedFromReceipt) { now } else { sent };
                let patience = tracked.claim.patience();
                let asking = tracked.awaits_acquire();
                let held = self.hold(now, id, counted_from, patience);
                if !asking {
                    self.send(now, id, out); // confirm it, or ask again
                }
                held.then_some(ClaimEvent::Granted(grant))
            }
            (Notice::TryAgain, Phase::Acquiring | Phase::Queued) => {
                if tracked.in_flight.is_none() {
                    self.send(now, id, out);
                }
                None
            }
            (Notice::Lost(reason), Phase::Held { .. }) => {
                self.remove(id);
                Some(ClaimEvent::Lost(reason))
            }
            // It has overtaken the grant that it is about.
            (Notice::Lost(_), Phase::Acquiring | Phase::Queued) => {
                tracked.lost_early = Some(now);
                None
            }
            _ => None,
        };
        event.map(|event| (id, gate, event))
    }
}
