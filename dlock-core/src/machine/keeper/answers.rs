//! Pure: what the backend's answers and notices do to a claim.

use super::tracked_claim::{InDoubt, Phase, TrackedClaim};
use super::{
    Answer, CallId, ClaimEvent, ClaimId, Keeper, LOOK, RETRIES_PER_TTL, SESSION_LOOK, Validity,
};
use crate::claim::{
    AcquireOutcome, Grant, LossReason, Mode, Notice, Owner, Release, ReleaseOutcome, RenewOutcome,
};
use crate::clock::Moment;
use crate::error::Result;
use crate::machine::coverage::Transition;
use crate::machine::types::{Actions, GateId};
use crate::planted_bug::Bug;
use rand::RngExt as _;
use std::time::Duration;

impl Keeper {
    /// Takes an answer; returns what happened to the claim, if its gate needs to know.
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
        tracked.in_flight.take()?;
        let sent = tracked.sent;
        let asks_again = std::mem::take(&mut tracked.asks_again);
        tracked.count_doubt(now, &answer);
        let gate = tracked.gate;
        if let Some(event) = self.expire(now, id, out) {
            return Some((id, gate, event)); // it came too late: what is lost stays lost
        }
        let tracked = self.claims.get_mut(id)?;
        let event = match (tracked.phase, answer) {
            (Phase::Releasing { .. }, Answer::Release(outcome)) => {
                self.release_answered(now, id, sent, outcome)
            }
            (Phase::Releasing { .. }, _) => {
                self.send(now, id, out);
                None
            }
            (Phase::Acquiring | Phase::Queued, Answer::Acquire(outcome)) => {
                self.acquire_answered(now, id, sent, outcome, out)
            }
            (Phase::Held { .. }, Answer::Acquire(outcome)) => {
                // Asked for once more just before the hand-over's notice came.
                let ttl = tracked.claim.ttl;
                match outcome {
                    Ok(AcquireOutcome::Granted(_)) => {
                        self.prolong(id, Validity::sent(now, sent, ttl));
                    }
                    Ok(AcquireOutcome::SessionGranted { term, .. }) => {
                        self.prolong(id, Validity::of_session(now, term));
                    }
                    _ => self.send(now, id, out),
                }
                None
            }
            (Phase::Held { .. }, Answer::Renew(outcome)) => {
                self.renewal_answered(now, id, sent, outcome, out)
            }
            _ => None,
        };
        let is_idle = |tracked: &TrackedClaim| tracked.in_flight.is_none() && tracked.due > now;
        if asks_again && self.claims.get(id).is_some_and(is_idle) {
            self.set_due(id, now);
        }
        event.map(|event| (id, gate, event))
    }

    fn release_answered(
        &mut self,
        now: Moment,
        id: ClaimId,
        sent: Moment,
        outcome: Result<ReleaseOutcome>,
    ) -> Option<ClaimEvent> {
        let tracked = self.claims.get_mut(id)?;
        let Phase::Releasing { give_up, reply_to, told, .. } = &mut tracked.phase else {
            return None;
        };
        let (give_up, reply_to, was_told) = (*give_up, reply_to.take(), *told);
        *told = true;
        match (&outcome, tracked.doubt) {
            (Ok(_), InDoubt(settled)) if sent < settled => {
                self.coverage.count(Transition::ReleaseInDoubt);
                self.set_due(id, settled);
            }
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
        sent: Moment,
        outcome: Result<AcquireOutcome>,
        out: &mut Actions,
    ) -> Option<ClaimEvent> {
        let planted = self.planted;
        let tracked = self.claims.get_mut(id)?;
        match outcome {
            // The backend took it away before its answer came.
            Ok(AcquireOutcome::Granted(_) | AcquireOutcome::SessionGranted { .. })
                if tracked.is_lost_since(sent) && !planted.is(Bug::EarlyLossForgotten) =>
            {
                tracked.given_up();
                tracked.phase = Phase::Queued; // it may have been granted anew since
                self.coverage.count(Transition::GrantVoid);
                let retry = self.retry_in(id);
                self.set_due(id, now + retry);
                None
            }
            Ok(AcquireOutcome::Granted(grant)) => {
                let counted_from = if planted.is(Bug::LeaseCountedFromReply) { now } else { sent };
                let validity = Validity::sent(now, counted_from, tracked.claim.ttl);
                self.granted(now, id, grant, validity)
            }
            Ok(AcquireOutcome::SessionGranted { grant, mut term }) => {
                if planted.is(Bug::LeaseCountedFromReply) {
                    term.as_of = now;
                }
                self.granted(now, id, grant, Validity::of_session(now, term))
            }
            Ok(AcquireOutcome::Queued { free_in, holder }) => {
                tracked.given_up();
                tracked.phase = Phase::Queued;
                tracked.failures = 0;
                let spread = self.random.random_range(0.75..1.0);
                let look = LOOK.min(tracked.claim.queue_ttl() / 3).mul_f64(spread);
                let look = free_in.map_or(look, |free| look.min(free + Duration::from_millis(1)));
                let due = if planted.is(Bug::LostWakeup) { Moment::NEVER } else { now + look };
                self.set_due(id, due);
                Some(ClaimEvent::Queued(holder))
            }
            Ok(AcquireOutcome::SessionQueued { holder }) => {
                tracked.given_up();
                tracked.phase = Phase::Queued;
                tracked.failures = 0;
                let spread = self.random.random_range(0.75..1.0);
                self.set_due(id, now + SESSION_LOOK.mul_f64(spread));
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
            // What it had in the queue is still there.
            Err(error) if error.kind().is_retryable() && tracked.claim.queue => {
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

    fn granted(
        &mut self,
        now: Moment,
        id: ClaimId,
        grant: Grant,
        validity: Validity,
    ) -> Option<ClaimEvent> {
        self.claims.get_mut(id)?.given_up();
        if self.hold(now, id, validity) {
            return Some(ClaimEvent::Granted(grant));
        }
        // It came too late to be of use. It is asked for again, but not at once: the ttl may
        // be shorter than the way. Until then the backend may have it.
        self.claims.get_mut(id)?.phase = Phase::Queued;
        self.coverage.count(Transition::GrantTooLate);
        let retry = self.retry_in(id);
        self.set_due(id, now + retry);
        None
    }

    fn renewal_answered(
        &mut self,
        now: Moment,
        id: ClaimId,
        sent: Moment,
        outcome: Result<RenewOutcome>,
        out: &mut Actions,
    ) -> Option<ClaimEvent> {
        match outcome {
            Ok(RenewOutcome::Held { others_wait }) => {
                self.renewed(now, id, sent);
                Some(ClaimEvent::Renewed { others_wait })
            }
            Ok(RenewOutcome::SessionHeld { others_wait, mut term }) => {
                if self.planted.is(Bug::LeaseCountedFromReply) {
                    term.as_of = now;
                }
                self.prolong(id, Validity::of_session(now, term));
                Some(ClaimEvent::Renewed { others_wait })
            }
            Ok(RenewOutcome::Extended(grant)) => {
                self.renewed(now, id, sent);
                Some(ClaimEvent::Extended { sent, grant })
            }
            Ok(RenewOutcome::Lost) => {
                self.coverage.count(Transition::RenewalLost);
                self.taken_away(now, id, out);
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

    fn renewed(&mut self, now: Moment, id: ClaimId, sent: Moment) {
        let planted = self.planted;
        let sent = if planted.is(Bug::LeaseCountedFromReply) { now } else { sent };
        let ttl = self.claims[id].claim.ttl;
        self.prolong(id, Validity::sent(now, sent, ttl));
        if planted.is(Bug::OneShotRenewal) {
            self.stop_renewing(id);
        }
    }

    /// The backend no longer has the lease. An acquire that is under way, or was never
    /// answered, may bring it back: then it is released, as any other (rule 6).
    fn taken_away(&mut self, now: Moment, id: ClaimId, out: &mut Actions) {
        let Some(tracked) = self.claims.get(id) else { return };
        if tracked.awaits_acquire() || tracked.is_in_doubt(now) {
            self.release(now, id, Release::Now, None, out);
        } else {
            self.remove(id);
        }
    }

    /// Takes a notice of the backend; returns what happened to the claim.
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
            // It was taken away already, and that notice has overtaken this one.
            (Notice::Granted { sent, .. }, Phase::Acquiring | Phase::Queued)
                if tracked.is_lost_since(sent) && !self.planted.is(Bug::EarlyLossForgotten) =>
            {
                tracked.given_up();
                self.coverage.count(Transition::GrantVoid);
                if tracked.in_flight.is_none() {
                    self.send(now, id, out);
                }
                None
            }
            (Notice::Granted { grant, sent }, Phase::Acquiring | Phase::Queued) => {
                tracked.given_up();
                let counted_from =
                    if self.planted.is(Bug::HandoverCountedFromReceipt) { now } else { sent };
                let queue_ttl = tracked.claim.queue_ttl();
                let asking = tracked.awaits_acquire();
                let held = self.hold(now, id, Validity::sent(now, counted_from, queue_ttl));
                if held {
                    self.coverage.count(Transition::GrantedByNotice);
                }
                let exclusive = self.claims.get(id)?.claim.mode == Mode::Exclusive;
                if held && !asking && exclusive {
                    self.confirm_soon(now, id);
                } else if !asking {
                    self.send(now, id, out); // confirm it, or ask again
                }
                held.then_some(ClaimEvent::Granted(grant))
            }
            (Notice::TryAgain, Phase::Acquiring | Phase::Queued) => {
                if tracked.in_flight.is_none() {
                    self.send(now, id, out);
                } else {
                    // The answer that is under way may be older, and it is not told twice.
                    tracked.asks_again = true;
                }
                None
            }
            (Notice::Lost(reason), Phase::Held { .. }) => {
                self.coverage.count(Transition::TakenAway);
                if reason == LossReason::SessionLost {
                    self.taken_away(now, id, out);
                } else {
                    // An acquire that was under way may have been granted anew after the break,
                    // and its answer may have overtaken the notice.
                    self.release(now, id, Release::Now, None, out);
                }
                Some(ClaimEvent::Lost(reason))
            }
            // It has overtaken the grant that it is about.
            (Notice::Lost(_), Phase::Acquiring | Phase::Queued) => {
                tracked.lost_early = now;
                None
            }
            _ => None,
        };
        event.map(|event| (id, gate, event))
    }
}
