//! Pure: how holds end: by a release, a downgrade, a limit or a shutdown.

use std::num::NonZeroU64;
use std::time::Duration;

use super::{Engine, Phase, TicketEntry};
use crate::claim::{LossReason, Mode, Release, ReleaseOutcome};
use crate::clock::{Moment, nanos};
use crate::error::Result;
use crate::machine::coverage::Transition;
use crate::machine::types::{Action, Actions, ClaimId, GateId, LeaseStatus, Refusal, Ticket};
use crate::planted_bug::Bug;

impl<W> Engine<W> {
    /// Releases the lock of a guard that wants to know the outcome: see
    /// [`Engine::released`].
    pub fn release(&mut self, now: Moment, ticket: Ticket, how: Release, out: &mut Actions) {
        let Some(entry) = self.tickets.get(ticket) else { return };
        let Phase::Admitted { claim, .. } = entry.phase else {
            return self.set_released(ticket, Ok(ReleaseOutcome::AlreadyLost), out);
        };
        let held = match self.status(now, ticket) {
            LeaseStatus::Held { .. } => ReleaseOutcome::Released,
            LeaseStatus::Lost(_) => ReleaseOutcome::AlreadyLost,
        };
        let gate = self.tickets[ticket].gate;
        let nested = self.root_of(gate) != gate; // what is nested gives nothing back
        let lease = self.keeper.status(claim);
        if let Release::After(_) = how
            && lease.is_some_and(|(deadline, _)| now < deadline)
            && !nested
        {
            // Ends the lease whoever waits here, who asks anew, or is nested in it.
            // Also for one whose holder was told that it is over: the key is ours yet.
            self.tickets[ticket].phase = Phase::Releasing;
            self.lost(gate, claim, LossReason::Released, out);
            let reply_to = Some(ticket).filter(|_| held == ReleaseOutcome::Released);
            self.keeper.release(now, claim, how, reply_to, out);
            if reply_to.is_none() {
                self.set_released(ticket, Ok(held), out);
            }
            return self.settle(now, gate, &mut None, out);
        }
        let mut reply_to = Some(ticket).filter(|_| held == ReleaseOutcome::Released);
        let lost = reply_to.is_none();
        self.end_hold(now, ticket, &mut reply_to, out);
        if lost || reply_to.is_some() {
            // Lost before, or the lease goes on in other hands.
            self.set_released(ticket, Ok(held), out);
        }
    }

    pub(super) fn set_released(
        &mut self,
        ticket: Ticket,
        outcome: Result<ReleaseOutcome>,
        out: &mut Actions,
    ) {
        if let Some(entry) = self.tickets.get_mut(ticket) {
            entry.phase = Phase::Released(outcome);
            out.push(Action::Wake(ticket));
        }
    }

    /// The outcome of a release; the ticket is void afterwards.
    pub fn released(&mut self, ticket: Ticket) -> Option<Result<ReleaseOutcome>> {
        let Some(entry) = self.tickets.get(ticket) else {
            return Some(Ok(ReleaseOutcome::AlreadyLost));
        };
        let Phase::Released(outcome) = &entry.phase else { return None };
        let outcome = outcome.clone();
        self.tickets.remove(ticket);
        Some(outcome)
    }

    /// A holder leaves. `reply_to` is taken if the lease is released with it.
    pub(super) fn end_hold(
        &mut self,
        now: Moment,
        ticket: Ticket,
        reply_to: &mut Option<Ticket>,
        out: &mut Actions,
    ) {
        let Some(entry) = self.tickets.get_mut(ticket) else { return };
        let Phase::Admitted { claim, .. } = entry.phase else { return };
        let gate = entry.gate;
        entry.phase = Phase::Releasing;
        if !self.planted.is(Bug::HandoverIgnoresDeadline)
            && let Some(event) = self.keeper.expire(now, claim, out)
        {
            self.on_claim_event(now, claim, self.root_of(gate), event, out);
        }
        let Some(gate_entry) = self.gates.get_mut(gate) else { return };
        gate_entry.gate.remove_holder(ticket);
        if let Some(root) = gate_entry.root() {
            self.settle(now, gate, &mut None, out);
            if let Some(gate_entry) = self.gates.get_mut(root) {
                gate_entry.gate.remove_holder(ticket);
            }
            self.settle(now, root, &mut None, out);
            self.stop_if_all_revoked(root, claim);
        } else {
            self.settle(now, gate, reply_to, out);
            self.stop_if_all_revoked(gate, claim);
        }
    }

    /// Stops renewing a lease if all its holders were told that it is over.
    fn stop_if_all_revoked(&mut self, id: GateId, claim: ClaimId) {
        let Some(gate_entry) = self.gates.get(id) else { return };
        let mut holders =
            gate_entry.gate.holders().iter().filter_map(|ticket| self.tickets.get(*ticket));
        let revoked = |entry: &TicketEntry<W>| {
            matches!(entry.phase, Phase::Admitted { revoked: Some(_), .. })
        };
        if gate_entry.gate.claim() == Some(claim)
            && !gate_entry.gate.holders().is_empty()
            && holders.all(revoked)
        {
            self.keeper.stop_renewing(claim);
        }
    }

    /// Makes the only holder of an exclusive lease a reader, and returns its new token.
    pub fn downgrade(&mut self, now: Moment, ticket: Ticket, out: &mut Actions) -> Option<u64> {
        if let LeaseStatus::Lost(_) = self.status(now, ticket) {
            return None;
        }
        let entry = self.tickets.get_mut(ticket)?;
        let gate = entry.gate;
        let Phase::Admitted { claim, token, .. } = &mut entry.phase else { return None };
        let claim = *claim;
        if entry.mode != Mode::Exclusive {
            return Some(*token);
        }
        *token = self.gates.get_mut(gate)?.gate.downgrade()?;
        entry.mode = Mode::Shared;
        let token = *token;
        self.coverage.count(Transition::Downgrade);
        self.keeper.downgrade(now, claim, out);
        self.settle(now, gate, &mut None, out);
        Some(token)
    }

    /// Tells every holder that its lock is lost. The leases are released when the holders
    /// drop their guards, or else they expire.
    pub fn revoke_all(&mut self, out: &mut Actions) {
        // Those nested in a holder may still wait: nobody is let in from now on.
        for id in self.gates.keys().collect::<Vec<_>>() {
            self.refuse_all(id, &Refusal::ShuttingDown, out);
        }
        let skip = usize::from(self.planted.is(Bug::RevokeSkipsOne));
        for ticket in self.tickets.keys().skip(skip).collect::<Vec<_>>() {
            self.revoke(ticket, LossReason::Shutdown, out);
        }
    }

    pub(super) fn revoke(&mut self, ticket: Ticket, reason: LossReason, out: &mut Actions) {
        let Some(entry) = self.tickets.get_mut(ticket) else { return };
        let Phase::Admitted { claim, revoked, .. } = &mut entry.phase else { return };
        if revoked.is_some() {
            return;
        }
        let claim = *claim;
        *revoked = Some(Box::new(reason.clone()));
        self.coverage.count(Transition::Revoke);
        out.push(Action::Wake(ticket));
        let (gate, inside) = (entry.gate, entry.nested);
        if let Some(inside) = inside {
            self.refuse_all(inside, &Refusal::Lost, out);
        }
        let root = self.root_of(gate);
        let Some(gate_entry) = self.gates.get(root) else { return };
        out.push(Action::Lost(gate_entry.key.clone(), reason));
        self.stop_if_all_revoked(root, claim);
    }

    /// Lets the holder of an admitted ticket hold the lock for this much longer.
    pub fn limit_hold(&mut self, now: Moment, ticket: Ticket, hold: Duration) {
        let Some(entry) = self.tickets.get_mut(ticket) else { return };
        entry.max_hold = NonZeroU64::new(nanos(now.since(entry.since).saturating_add(hold)));
        let ends = entry.ends();
        self.set_end(ends, ticket);
    }

    /// Sets the timer of a hold that ends at this moment.
    pub(super) fn set_end(&mut self, ends: Moment, ticket: Ticket) {
        if ends == Moment::NEVER {
            return;
        }
        self.holds.set(ends, ticket);
        let tickets = &self.tickets;
        self.holds.tidy(tickets.len(), |at, ticket| {
            tickets.get(ticket).is_some_and(|entry| entry.ends() == at)
        });
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use super::*;
    use crate::claim::{AcquireOutcome, Answer, Grant, Holder, Request};
    use crate::key::Key;
    use crate::machine::types::{HandoverLimits, Limits, LockRequest, QueueScope, Wait};
    use crate::planted_bug::PlantedBug;

    /// A limit that is set again for each hold, as several keys do, leaves no timers behind.
    #[test]
    fn limits_of_holds_that_are_over_are_forgotten() {
        let handover = HandoverLimits { count: 64, time: hour(), extend_after: 9 };
        let limits = Limits { handover, waiters: 10, attempt: hour() };
        let mut engine: Engine<()> = Engine::new(limits, [0; 32], PlantedBug::default());
        let (name, host) = ("client".into(), "here".into());
        let holder = Arc::new(Holder { client: 1, name, host, pid: 1, tags: Vec::new() });
        let key = Key::new("a").unwrap();
        for n in 0..10_000 {
            let now = Moment::from_nanos(n * 1_000);
            let request = LockRequest {
                key: &key,
                mode: Mode::Exclusive,
                ttl: hour(),
                wait: Wait::Try,
                scope: QueueScope::Shared,
                max_hold: None,
                holder: holder.clone(),
            };
            let mut out = Actions::new();
            let ticket = engine.enqueue(now, request, (), &mut out).unwrap();
            answer(&mut engine, now, n, &mut out);
            engine.limit_hold(now, ticket, hour());
            engine.forget(now, ticket, &mut out);
            answer(&mut engine, now, n, &mut out);
        }
        assert!(engine.holds.len() < 200, "{} timers", engine.holds.len());
    }

    fn hour() -> Duration {
        Duration::from_secs(3_600)
    }

    /// Grants every acquire, and answers every release.
    fn answer(engine: &mut Engine<()>, now: Moment, n: u64, out: &mut Actions) {
        for action in std::mem::take(out) {
            let Action::Call(call, request) = action else { continue };
            let answer = match request {
                Request::Acquire(_) => {
                    let grant = Grant { first: n + 1, count: 1 };
                    Answer::Acquire(Ok(AcquireOutcome::Granted(grant)))
                }
                Request::Release(..) => Answer::Release(Ok(ReleaseOutcome::Released)),
                Request::Renew(_) => continue,
            };
            engine.reply(now, call, answer, out);
        }
    }
}
