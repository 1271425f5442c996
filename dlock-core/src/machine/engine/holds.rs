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
        self.holds.set(entry.ends(), ticket);
    }
}
