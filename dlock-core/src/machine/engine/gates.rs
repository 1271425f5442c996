//! Pure: the gates of the machine, and how gates and keeper act on each other.

use std::sync::Arc;
use std::time::Duration;

use hashbrown::hash_map::EntryRef;

use super::{Engine, Phase};
use crate::claim::{Holder, LossReason, Release};
use crate::clock::Moment;
use crate::error::{Error, ErrorKind, Operation};
use crate::key::Key;
use crate::machine::coverage::Transition;
use crate::machine::gate::{Gate, Step, View};
use crate::machine::keeper::{ClaimEvent, ClaimRequest};
use crate::machine::types::{
    Action, Actions, ClaimId, GateId, LockRequest, Refusal, Ticket, Waiter,
};

/// A gate, its key and its kind.
pub(super) struct GateEntry {
    pub(super) gate: Gate,
    pub(super) key: Key,
    pub(super) kind: Kind,
    pub(super) obstacle: Option<Box<Obstacle>>,
}

/// Why the tasks of a gate still wait, as the backend said last.
pub(super) enum Obstacle {
    /// This client holds the lock.
    HeldBy(Arc<Holder>),
    /// The backend failed.
    Error(Error),
}

impl GateEntry {
    /// The gate that has the lease, if this one is nested.
    pub(super) fn root(&self) -> Option<GateId> {
        match &self.kind {
            Kind::Nested(nesting) => Some(nesting.root),
            Kind::Shared | Kind::Separate => None,
        }
    }

    fn in_the_way(&self) -> Option<Arc<Holder>> {
        match self.obstacle.as_deref() {
            Some(Obstacle::HeldBy(holder)) => Some(holder.clone()),
            _ => None,
        }
    }

    /// The transition that this step is.
    fn transition(&self, step: &Step) -> Transition {
        match step {
            Step::Admit { .. } if matches!(self.kind, Kind::Nested(_)) => Transition::AdmitNested,
            Step::Admit { handed_over: false, .. } => Transition::Admit,
            Step::Admit { .. } if self.gate.holders().len() > 1 => Transition::Join,
            Step::Admit { .. } => Transition::HandOver,
            Step::RefuseBusy { .. } => Transition::RefuseBusy,
            Step::Retire => Transition::Retire,
            Step::Extend { .. } => Transition::Extend,
            Step::Acquire { instead_of: None, .. } => Transition::Acquire,
            Step::Acquire { .. } => Transition::AcquireInstead,
            Step::Release { .. } => Transition::Release,
        }
    }

    fn trouble(&self) -> Option<Error> {
        match self.obstacle.as_deref() {
            Some(Obstacle::Error(error)) => Some(error.clone()),
            _ => None,
        }
    }
}

fn no_answer_yet() -> Error {
    Error::new(ErrorKind::Unavailable, Operation::Acquire)
        .with_message("the backend has not answered yet")
}

pub(super) enum Kind {
    Shared,
    Separate,
    Nested(Box<Nesting>),
}

/// Where a nested gate is.
pub(super) struct Nesting {
    /// The gate that has the lease.
    root: GateId,
    /// The holder that the gate is in.
    parent: Ticket,
}

impl<W> Engine<W> {
    pub(super) fn nested_gate(
        &mut self,
        parent: Ticket,
        request: &LockRequest<'_>,
    ) -> Option<GateId> {
        let entry = self.tickets.get(parent)?;
        // Who was told that its time is over has a lease that is no longer renewed.
        let Phase::Admitted { token, revoked: None, .. } = entry.phase else { return None };
        if let Some(nested) = entry.nested {
            return Some(nested);
        }
        let root = self.root_of(entry.gate);
        let kind = Kind::Nested(Box::new(Nesting { root, parent }));
        let gate = self.open_gate(Gate::nested(token), request, kind);
        self.tickets[parent].nested = Some(gate);
        Some(gate)
    }

    /// The gate that has the lease: this one, or the one that a nested gate is in.
    pub(super) fn root_of(&self, id: GateId) -> GateId {
        self.gates.get(id).and_then(GateEntry::root).unwrap_or(id)
    }

    pub(super) fn open_gate(
        &mut self,
        gate: Gate,
        request: &LockRequest<'_>,
        kind: Kind,
    ) -> GateId {
        let key = request.key.clone();
        self.gates.insert(GateEntry { gate, key, kind, obstacle: None })
    }

    pub(super) fn set_timer(&mut self, id: GateId, deadline: Moment) {
        if let Some(gate_entry) = self.gates.get_mut(id)
            && deadline < gate_entry.gate.timer_deadline
            && gate_entry.gate.waiting() > 0
            && deadline < Moment::NEVER
        {
            gate_entry.gate.timer_deadline = deadline;
            self.waits.set(deadline, id);
            let gates = &self.gates;
            self.waits.tidy(self.waiting, |at, gate| {
                gates.get(gate).is_some_and(|gate_entry| gate_entry.gate.timer_deadline == at)
            });
        }
    }

    pub(super) fn wait_over(&mut self, now: Moment, id: GateId, at: Moment, out: &mut Actions) {
        let Some(gate_entry) =
            self.gates.get_mut(id).filter(|gate_entry| gate_entry.gate.timer_deadline == at)
        else {
            return;
        };
        gate_entry.gate.timer_deadline = Moment::NEVER;
        // The first answer is waited for as long as by a task that tries once: a short wait
        // must not be worse than none.
        let first_answer = gate_entry.gate.is_unanswered().then_some(self.limits.attempt);
        self.refuse_overdue(now, id, first_answer, out);
    }

    /// Refuses the tasks whose wait is over; `first_answer` is the time that each of them
    /// has at least.
    fn refuse_overdue(
        &mut self,
        now: Moment,
        id: GateId,
        first_answer: Option<Duration>,
        out: &mut Actions,
    ) {
        let Some(GateEntry { gate, .. }) = self.gates.get_mut(id) else { return };
        let tickets = &self.tickets;
        let deadline = |waiter: &Waiter| match (first_answer, tickets.get(waiter.ticket)) {
            (Some(time), Some(entry)) => waiter.deadline.max(entry.since + time),
            _ => waiter.deadline,
        };
        let mut overdue = Vec::new();
        while let Some(ticket) = gate.overdue(now, deadline) {
            overdue.push(ticket);
        }
        let next = gate.earliest_deadline(deadline);
        gate.awaits_first_answer = gate.earliest_deadline(|waiter| waiter.deadline) <= now;
        let gate_entry = &self.gates[id];
        let trouble =
            gate_entry.trouble().or_else(|| gate_entry.gate.is_unanswered().then(no_answer_yet));
        let holder = self.in_the_way(id);
        for ticket in overdue {
            let refusal = Refusal::TimedOut { holder: holder.clone(), trouble: trouble.clone() };
            self.refuse(id, ticket, refusal, out);
        }
        self.set_timer(id, next);
        self.settle(now, id, &mut None, out);
    }

    /// Handles what happened to the claim of a gate.
    pub(super) fn on_claim_event(
        &mut self,
        now: Moment,
        claim: ClaimId,
        id: GateId,
        event: ClaimEvent,
        out: &mut Actions,
    ) {
        if let ClaimEvent::Released { reply_to, outcome } = event {
            if let Some(ticket) = reply_to {
                self.set_released(ticket, outcome, out);
            }
            return;
        }
        let Some(gate_entry) = self.gates.get_mut(id) else { return };
        match event {
            ClaimEvent::Granted(grant) => {
                if gate_entry.gate.claim() == Some(claim)
                    && let Some((mode, ttl)) = self.keeper.mode_and_ttl(claim)
                {
                    gate_entry.obstacle = None;
                    gate_entry.gate.granted(now, mode, ttl, grant);
                }
            }
            ClaimEvent::Queued(holder) => {
                gate_entry.obstacle = holder.map(|holder| Box::new(Obstacle::HeldBy(holder)));
                gate_entry.gate.queued();
            }
            ClaimEvent::Busy(holder) => {
                gate_entry.gate.ended();
                while let Some(ticket) = self.gates[id].gate.dismiss_attempt() {
                    self.refuse(id, ticket, Refusal::Busy(holder.clone()), out);
                }
            }
            ClaimEvent::Trouble(error) => {
                while let Some(ticket) = self.gates[id].gate.dismiss_attempt() {
                    self.refuse(id, ticket, Refusal::Failed(error.clone()), out);
                }
                self.gates[id].obstacle = Some(Box::new(Obstacle::Error(error)));
            }
            ClaimEvent::Failed(error) => {
                gate_entry.gate.ended();
                self.refuse_all(id, &Refusal::Failed(error), out);
            }
            ClaimEvent::Extended { sent, grant } => gate_entry.gate.extended(sent, grant),
            ClaimEvent::Renewed { others_wait } => {
                gate_entry.gate.not_extended();
                if others_wait {
                    gate_entry.gate.set_others_wait();
                }
                out.push(Action::Renewed(gate_entry.key.clone()));
            }
            ClaimEvent::Uncertain(error) => {
                gate_entry.gate.not_extended();
                out.push(Action::Uncertain(gate_entry.key.clone(), error))
            }
            ClaimEvent::Lost(reason) => self.lost(id, claim, reason, out),
            ClaimEvent::Released { .. } => {}
        }
        self.settle(now, id, &mut None, out);
        if self.gates.get(id).is_some_and(|gate_entry| gate_entry.gate.awaits_first_answer) {
            self.refuse_overdue(now, id, None, out);
        }
    }

    pub(super) fn lost(
        &mut self,
        id: GateId,
        claim: ClaimId,
        reason: LossReason,
        out: &mut Actions,
    ) {
        let Some(gate_entry) =
            self.gates.get_mut(id).filter(|gate_entry| gate_entry.gate.claim() == Some(claim))
        else {
            return;
        };
        let key = gate_entry.key.clone();
        let holders = gate_entry.gate.ended();
        let mut told = false;
        for ticket in holders.iter().copied() {
            let Some(entry) = self.tickets.get_mut(ticket) else { continue };
            let inside = [entry.nested.take(), Some(entry.gate).filter(|gate| *gate != id)];
            match &mut entry.phase {
                Phase::Admitted { revoked, .. } => {
                    told |= revoked.is_none(); // else it was told before
                    let reason = revoked.take().map_or_else(|| reason.clone(), |revoked| *revoked);
                    entry.phase = Phase::Lost(reason);
                    out.push(Action::Wake(ticket));
                }
                Phase::Releasing => told |= reason != LossReason::Released,
                _ => {}
            }
            for gate in inside.into_iter().flatten() {
                self.refuse_all(gate, &Refusal::Lost, out);
                self.gates.remove(gate);
            }
        }
        if told {
            out.push(Action::Lost(key, reason));
        }
    }

    pub(super) fn refuse_all(&mut self, id: GateId, refusal: &Refusal, out: &mut Actions) {
        while let Some(ticket) =
            self.gates.get_mut(id).and_then(|gate_entry| gate_entry.gate.dismiss())
        {
            self.refuse(id, ticket, refusal.clone(), out);
        }
    }

    fn refuse(&mut self, id: GateId, ticket: Ticket, refusal: Refusal, out: &mut Actions) {
        self.no_longer_waits(id);
        if let Some(entry) = self.tickets.get_mut(ticket) {
            entry.phase = Phase::Refused(refusal);
            out.push(Action::Wake(ticket));
        }
    }

    pub(super) fn no_longer_waits(&mut self, id: GateId) {
        self.waiting -= 1;
        let Some(gate_entry) = self.gates.get_mut(id) else { return };
        if gate_entry.gate.waiting() == 0 {
            gate_entry.gate.timer_deadline = Moment::NEVER;
        }
        if matches!(gate_entry.kind, Kind::Separate)
            && let EntryRef::Occupied(mut waiting) =
                self.separate_waiters.entry_ref(&gate_entry.key)
        {
            *waiting.get_mut() -= 1;
            if *waiting.get() == 0 {
                waiting.remove();
            }
        }
    }

    /// Carries out the steps of a gate until there is none.
    pub(super) fn settle(
        &mut self,
        now: Moment,
        id: GateId,
        reply_to: &mut Option<Ticket>,
        out: &mut Actions,
    ) {
        while let Some(gate_entry) = self.gates.get_mut(id) {
            let keeper = &self.keeper;
            let can_hand_over = |claim| keeper.can_hand_over(now, claim);
            let view =
                View { now, can_hand_over, limits: self.limits.handover, planted: self.planted };
            let step = gate_entry.gate.next(view);
            if let Some(step) = &step {
                self.coverage.count(gate_entry.transition(step));
            }
            match step {
                Some(Step::Admit { ticket, token, handed_over }) => {
                    self.admit(now, id, ticket, token, handed_over, out);
                }
                Some(Step::RefuseBusy { ticket }) => {
                    let refusal = Refusal::Busy(self.in_the_way(id));
                    self.refuse(id, ticket, refusal, out);
                }
                Some(Step::Retire) => self.retire_lease(id),
                Some(Step::Extend { claim, tokens }) => {
                    if !self.keeper.extend(now, claim, tokens, out) {
                        gate_entry.gate.not_extended();
                    }
                }
                Some(Step::Acquire { first, ttl, queue, tokens, instead_of }) => {
                    let entry = &self.tickets[first];
                    let request = ClaimRequest {
                        gate: id,
                        key: gate_entry.key.clone(),
                        mode: entry.mode,
                        ttl: Duration::from_nanos(ttl),
                        queue,
                        tokens,
                        holder: entry.holder.clone(),
                        instead_of,
                    };
                    let claim = self.keeper.acquire(now, request, out);
                    gate_entry.gate.acquiring(claim);
                    break;
                }
                Some(Step::Release { claim }) => {
                    let ticket = reply_to.take();
                    self.keeper.release(now, claim, Release::Now, ticket, out);
                }
                None => break,
            }
        }
        self.close_gate_if_unused(id);
    }

    /// Moves a lease and its holders to a gate of its own. The tasks that wait here get a
    /// new claim.
    fn retire_lease(&mut self, id: GateId) {
        let Some(gate_entry) = self.gates.get_mut(id) else { return };
        let (gate, key) = (gate_entry.gate.retire(), gate_entry.key.clone());
        let (claim, holders) = (gate.claim(), gate.holders().iter().copied().collect::<Vec<_>>());
        let retired =
            self.gates.insert(GateEntry { gate, key, kind: Kind::Separate, obstacle: None });
        if let Some(claim) = claim {
            self.keeper.set_gate(claim, retired);
        }
        for ticket in holders {
            let Some(entry) = self.tickets.get_mut(ticket) else { continue };
            // Who is nested may outlive its parent, so both its own gate and the one
            // inside it must know where the lease is now.
            let own = if entry.gate == id {
                entry.gate = retired;
                None
            } else {
                Some(entry.gate)
            };
            for gate in own.into_iter().chain(entry.nested) {
                if let Some(GateEntry { kind: Kind::Nested(nesting), .. }) =
                    self.gates.get_mut(gate)
                {
                    nesting.root = retired;
                }
            }
        }
    }

    /// The holder that the tasks wait for: one of this process, or the one that the backend
    /// named.
    fn in_the_way(&self, id: GateId) -> Option<Arc<Holder>> {
        let gate_entry = self.gates.get(id)?;
        let holder = gate_entry.gate.holders().front().and_then(|ticket| self.tickets.get(*ticket));
        holder.map(|entry| entry.holder.clone()).or_else(|| gate_entry.in_the_way())
    }

    fn admit(
        &mut self,
        now: Moment,
        id: GateId,
        ticket: Ticket,
        token: u64,
        handed_over: bool,
        out: &mut Actions,
    ) {
        self.no_longer_waits(id);
        let gate_entry = &self.gates[id];
        let was_queued = gate_entry.gate.was_queued();
        let root = gate_entry.root();
        let claim = self.gates.get(root.unwrap_or(id)).and_then(|root| root.gate.claim());
        let (Some(claim), Some(entry)) = (claim, self.tickets.get_mut(ticket)) else { return };
        let asked = std::mem::replace(&mut entry.since, now);
        let queued = now > asked && (entry.is_behind || was_queued);
        entry.phase = Phase::Admitted { claim, token, handed_over, queued, asked, revoked: None };
        out.push(Action::Wake(ticket));
        let ends = entry.ends();
        self.set_end(ends, ticket);
        if let Some(gate_entry) = root.and_then(|root| self.gates.get_mut(root)) {
            gate_entry.gate.add_nested_holder(ticket);
        }
    }

    fn close_gate_if_unused(&mut self, id: GateId) {
        let Some(gate_entry) =
            self.gates.get_mut(id).filter(|gate_entry| gate_entry.gate.is_unused())
        else {
            return;
        };
        match &gate_entry.kind {
            Kind::Separate => {}
            Kind::Nested(nesting) => {
                if let Some(parent) = self.tickets.get_mut(nesting.parent) {
                    parent.nested = None;
                }
            }
            Kind::Shared => {
                gate_entry.gate.timer_deadline = Moment::NEVER;
                gate_entry.obstacle = None;
                if self.unused != Some(id) {
                    self.close_unused();
                    self.unused = Some(id);
                }
                return;
            }
        }
        self.gates.remove(id);
    }

    fn close_unused(&mut self) {
        let Some(id) = self.unused.take() else { return };
        if self.gates.get(id).is_some_and(|gate_entry| gate_entry.gate.is_unused())
            && let Some(gate_entry) = self.gates.remove(id)
        {
            self.shared.remove(&gate_entry.key);
        }
    }
}
