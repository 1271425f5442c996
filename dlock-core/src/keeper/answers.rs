//! Pure: what the backend's answers and notices do to a claim.

use super::tenure::{Doubt, Flight, Phase};
use super::{Answer, CallId, Keeper, LOOK, Said, TenureId};
use crate::claim::{Attempt, LossReason, Notice, Owner, Release, Released, Renewed};
use crate::clock::Moment;
use crate::engine::{Actions, GateId};
use crate::error::Result;
use crate::plant::Plant;
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
    ) -> Option<(TenureId, GateId, Said)> {
        let id = call.tenure;
        let tenure = self.tenures.get_mut(id)?;
        if call.seq != tenure.seq {
            return None; // superseded by a later call
        }
        let flight = tenure.flight.take()?;
        tenure.count_doubt(now, &answer);
        let gate = tenure.gate;
        if let Some(said) = self.lapse(now, id, out) {
            return Some((id, gate, said)); // it came too late: what is lost stays lost
        }
        let tenure = self.tenures.get_mut(id)?;
        let said = match (tenure.phase, answer) {
            (Phase::Leaving { .. }, Answer::Release(outcome)) => {
                self.release_answered(now, id, flight, outcome)
            }
            (Phase::Leaving { .. }, _) => {
                self.send(now, id, out);
                None
            }
            (Phase::Asking | Phase::Queued, Answer::Acquire(outcome)) => {
                self.acquire_answered(now, id, flight, outcome, out)
            }
            (Phase::Held { .. }, Answer::Acquire(outcome)) => {
                // Asked for once more just before the hand-over's notice came.
                match outcome {
                    Ok(Attempt::Granted(_)) => {
                        self.prolong(now, id, flight.sent);
                    }
                    _ => self.send(now, id, out),
                }
                None
            }
            (Phase::Held { .. }, Answer::Renew(outcome)) => {
                self.renewal_answered(now, id, flight, outcome)
            }
            _ => None,
        };
        said.map(|said| (id, gate, said))
    }

    fn release_answered(
        &mut self,
        now: Moment,
        id: TenureId,
        flight: Flight,
        outcome: Result<Released>,
    ) -> Option<Said> {
        let tenure = self.tenures.get_mut(id)?;
        let Phase::Leaving { give_up, reply_to, told, .. } = &mut tenure.phase else { return None };
        let (give_up, reply_to, was_told) = (*give_up, reply_to.take(), *told);
        *told = true;
        match (&outcome, tenure.doubt) {
            (Ok(_), Doubt(settled)) if flight.sent < settled => self.set_due(id, settled),
            (Ok(_), _) => {
                self.remove(id);
            }
            (Err(error), Doubt::NONE) if now >= give_up || !error.kind().is_retryable() => {
                self.remove(id);
            }
            (Err(_), _) => {
                let retry = self.retry_in(id);
                self.set_due(id, now + retry);
            }
        }
        (!was_told).then_some(Said::Released { reply_to, outcome })
    }

    fn acquire_answered(
        &mut self,
        now: Moment,
        id: TenureId,
        flight: Flight,
        outcome: Result<Attempt>,
        out: &mut Actions,
    ) -> Option<Said> {
        let planted = self.planted;
        let tenure = self.tenures.get_mut(id)?;
        match outcome {
            Ok(Attempt::Granted(grant)) => {
                tenure.given_up();
                let counted_from =
                    if planted.is(Plant::LeaseCountedFromReply) { now } else { flight.sent };
                if self.hold(now, id, counted_from, self.tenures[id].claim.ttl) {
                    Some(Said::Granted(grant))
                } else {
                    // Came too late to be of use. Asked again, but not at once: the
                    // ttl may be shorter than the way.
                    let retry = self.retry_in(id);
                    self.set_due(id, now + retry);
                    None
                }
            }
            Ok(Attempt::Queued { free_in, holder }) => {
                tenure.given_up();
                tenure.phase = Phase::Queued;
                tenure.failures = 0;
                let spread = self.random.random_range(0.75..1.0);
                let look = LOOK.min(tenure.claim.patience() / 3).mul_f64(spread);
                let look = free_in.map_or(look, |free| look.min(free + Duration::from_millis(1)));
                let due = if planted.is(Plant::LostWakeup) { Moment::NEVER } else { now + look };
                self.set_due(id, due);
                Some(Said::Queued(holder))
            }
            Ok(Attempt::Busy { holder }) => {
                tenure.given_up();
                if tenure.claim.queue {
                    self.send(now, id, out); // somebody joined while it was only tried
                    return None;
                }
                self.leave(now, id, Release::Now, None, out);
                Some(Said::Busy(holder))
            }
            Err(error) if error.kind().is_retryable() && tenure.claim.queue => {
                tenure.phase = Phase::Asking;
                let retry = self.retry_in(id);
                self.set_due(id, now + retry);
                Some(Said::Trouble(error))
            }
            Err(error) => {
                self.leave(now, id, Release::Now, None, out);
                Some(Said::Failed(error))
            }
        }
    }

    fn renewal_answered(
        &mut self,
        now: Moment,
        id: TenureId,
        flight: Flight,
        outcome: Result<Renewed>,
    ) -> Option<Said> {
        match outcome {
            Ok(Renewed::Held { others_wait }) => {
                let planted = self.planted;
                let sent = if planted.is(Plant::LeaseCountedFromReply) { now } else { flight.sent };
                self.prolong(now, id, sent);
                if planted.is(Plant::OneShotRenewal) {
                    self.stop_renewing(id);
                }
                Some(Said::Renewed { others_wait })
            }
            Ok(Renewed::Lost) => {
                self.remove(id);
                Some(Said::Lost(LossReason::Forgotten))
            }
            Err(error) => {
                let planted = self.planted;
                let tenure = self.tenures.get_mut(id)?;
                let retry = (tenure.claim.ttl / 12).min(LOOK);
                if let Phase::Held { certain, .. } = &mut tenure.phase {
                    *certain = false;
                }
                let mut due = (now + retry).min(tenure.deadline);
                if planted.is(Plant::KeeperStopsAfterError) {
                    due = Moment::NEVER;
                }
                self.set_due(id, due);
                Some(Said::Uncertain(error))
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
    ) -> Option<(TenureId, GateId, Said)> {
        let tenures = &self.tenures;
        let is_it = |id: &TenureId| tenures.get(*id).is_some_and(|it| it.claim.owner == owner);
        let id = *self.by_owner.find(owner.low_bits(), is_it)?;
        let tenure = self.tenures.get_mut(id)?;
        let gate = tenure.gate;
        let said = match (notice, tenure.phase) {
            (Notice::Granted { grant, sent }, Phase::Asking | Phase::Queued) => {
                tenure.given_up();
                let counted_from =
                    if self.planted.is(Plant::HandoverCountedFromReceipt) { now } else { sent };
                let patience = tenure.claim.patience();
                let asking = tenure.awaits_acquire();
                let held = self.hold(now, id, counted_from, patience);
                if !asking {
                    self.send(now, id, out); // confirm it, or ask again
                }
                held.then_some(Said::Granted(grant))
            }
            (Notice::TryAgain, Phase::Asking | Phase::Queued) => {
                if tenure.flight.is_none() {
                    self.send(now, id, out);
                }
                None
            }
            (Notice::Lost(reason), Phase::Held { .. }) => {
                self.remove(id);
                Some(Said::Lost(reason))
            }
            _ => None,
        };
        said.map(|said| (id, gate, said))
    }
}
