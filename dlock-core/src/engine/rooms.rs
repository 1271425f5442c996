//! Pure: the gates of the machine, each with what belongs to it, and how they and
//! the keeper move each other.

use std::sync::Arc;
use std::time::Duration;

use hashbrown::hash_map::EntryRef;

use super::words::{Action, Actions, Ask, Refusal};
use super::{Engine, GateId, Phase, Ticket};
use crate::claim::{Holder, LossReason, Release};
use crate::clock::Moment;
use crate::error::{Error, ErrorKind, Operation};
use crate::gate::{Gate, Step, View, Waiting};
use crate::keeper::{Said, TenureId, Wish};
use crate::key::Key;

/// A gate and what belongs to it.
pub(super) struct Room {
    pub(super) gate: Gate,
    pub(super) key: Key,
    pub(super) kind: Kind,
    pub(super) news: Option<Box<News>>,
}

/// What the backend last said while somebody waited.
pub(super) enum News {
    /// Who is in the way.
    HeldBy(Arc<Holder>),
    /// What keeps it from answering.
    Trouble(Error),
}

impl Room {
    fn in_the_way(&self) -> Option<Arc<Holder>> {
        match self.news.as_deref() {
            Some(News::HeldBy(holder)) => Some(holder.clone()),
            _ => None,
        }
    }

    fn trouble(&self) -> Option<Error> {
        match self.news.as_deref() {
            Some(News::Trouble(error)) => Some(error.clone()),
            _ => None,
        }
    }
}

fn no_answer_yet() -> Error {
    Error::new(ErrorKind::Unavailable, Operation::Acquire)
        .saying("the backend has not answered yet")
}

#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) enum Kind {
    Shared,
    Own,
    Inside { root: GateId, parent: Ticket },
}

impl<W> Engine<W> {
    pub(super) fn gate_inside(&mut self, parent: Ticket, ask: &Ask<'_>) -> Option<GateId> {
        let entry = self.tickets.get(parent)?;
        let Phase::Admitted { token, .. } = entry.phase else { return None };
        if let Some(nested) = entry.nested {
            return Some(nested);
        }
        let root = self.root_of(entry.gate);
        let gate = self.open_room(Gate::inside(token), ask, Kind::Inside { root, parent });
        self.tickets[parent].nested = Some(gate);
        Some(gate)
    }

    /// The gate that has the lease which a gate is about.
    pub(super) fn root_of(&self, id: GateId) -> GateId {
        match self.rooms.get(id).map(|room| room.kind) {
            Some(Kind::Inside { root, .. }) => root,
            _ => id,
        }
    }

    pub(super) fn open_room(&mut self, gate: Gate, ask: &Ask<'_>, kind: Kind) -> GateId {
        let key = ask.key.clone();
        self.rooms.insert(Room { gate, key, kind, news: None })
    }

    pub(super) fn set_alarm(&mut self, id: GateId, deadline: Moment) {
        if let Some(room) = self.rooms.get_mut(id)
            && deadline < room.gate.alarm
            && room.gate.earliest_deadline() < Moment::NEVER
        {
            room.gate.alarm = deadline;
            self.waits.set(deadline, id);
            let rooms = &self.rooms;
            self.waits.tidy(self.waiting, |at, gate| {
                rooms.get(gate).is_some_and(|room| room.gate.alarm == at)
            });
        }
    }

    pub(super) fn wait_over(&mut self, now: Moment, id: GateId, at: Moment, out: &mut Actions) {
        let Some(room) = self.rooms.get_mut(id).filter(|room| room.gate.alarm == at) else {
            return;
        };
        room.gate.alarm = Moment::NEVER;
        let trouble = room.trouble().or_else(|| room.gate.is_unanswered().then(no_answer_yet));
        let holder = self.in_the_way(id);
        while let Some(ticket) = self.rooms.get_mut(id).and_then(|room| room.gate.overdue(now)) {
            let refusal = Refusal::TimedOut { holder: holder.clone(), trouble: trouble.clone() };
            self.refuse(id, ticket, refusal, out);
        }
        let next = self.rooms[id].gate.earliest_deadline();
        self.set_alarm(id, next);
        self.settle(now, id, &mut None, out);
    }

    /// A claim says something to its gate.
    pub(super) fn heard(
        &mut self,
        now: Moment,
        tenure: TenureId,
        id: GateId,
        said: Said,
        out: &mut Actions,
    ) {
        if let Said::Released { reply_to, outcome } = said {
            if let Some(ticket) = reply_to {
                self.set_released(ticket, outcome, out);
            }
            return;
        }
        let Some(room) = self.rooms.get_mut(id) else { return };
        match said {
            Said::Granted(grant) => {
                if room.gate.tenure() == Some(tenure)
                    && let Some((mode, ttl)) = self.keeper.mode_and_ttl(tenure)
                {
                    room.news = None;
                    room.gate.granted(now, mode, ttl, grant);
                }
            }
            Said::Queued(holder) => {
                room.news = holder.map(|holder| Box::new(News::HeldBy(holder)));
                room.gate.queued();
            }
            Said::Busy(holder) => {
                room.gate.ended();
                while let Some(ticket) = self.rooms[id].gate.dismiss_attempt() {
                    self.refuse(id, ticket, Refusal::Busy(holder.clone()), out);
                }
            }
            Said::Trouble(error) => {
                while let Some(ticket) = self.rooms[id].gate.dismiss_attempt() {
                    self.refuse(id, ticket, Refusal::Failed(error.clone()), out);
                }
                self.rooms[id].news = Some(Box::new(News::Trouble(error)));
            }
            Said::Failed(error) => {
                room.gate.ended();
                self.refuse_all(id, &Refusal::Failed(error), out);
            }
            Said::Renewed { others_wait } => {
                if others_wait {
                    room.gate.set_others_wait();
                }
                out.push(Action::Renewed(room.key.clone()));
            }
            Said::Uncertain(error) => out.push(Action::Uncertain(room.key.clone(), error)),
            Said::Lost(reason) => self.lost(id, tenure, reason, out),
            Said::Released { .. } => {}
        }
        self.settle(now, id, &mut None, out);
    }

    pub(super) fn lost(
        &mut self,
        id: GateId,
        tenure: TenureId,
        reason: LossReason,
        out: &mut Actions,
    ) {
        let Some(room) = self.rooms.get_mut(id).filter(|room| room.gate.tenure() == Some(tenure))
        else {
            return;
        };
        let key = room.key.clone();
        let tenants = room.gate.ended();
        let mut told = false;
        for ticket in tenants {
            let Some(entry) = self.tickets.get_mut(ticket) else { continue };
            let inside = [entry.nested.take(), Some(entry.gate).filter(|gate| *gate != id)];
            match &mut entry.phase {
                Phase::Admitted { token, revoked, .. } => {
                    told |= revoked.is_none(); // else it was told before
                    let reason = revoked.take().map_or_else(|| reason.clone(), |revoked| *revoked);
                    entry.phase = Phase::Lost { token: *token, reason };
                    out.push(Action::Wake(ticket));
                }
                Phase::Releasing => told |= reason != LossReason::Released,
                _ => {}
            }
            for gate in inside.into_iter().flatten() {
                self.refuse_all(gate, &Refusal::Lost, out);
                self.rooms.remove(gate);
            }
        }
        if told {
            out.push(Action::Lost(key, reason));
        }
    }

    pub(super) fn refuse_all(&mut self, id: GateId, refusal: &Refusal, out: &mut Actions) {
        while let Some(ticket) = self.rooms.get_mut(id).and_then(|room| room.gate.dismiss()) {
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
        let Some(room) = self.rooms.get_mut(id) else { return };
        if room.gate.waiting() == 0 {
            room.gate.alarm = Moment::NEVER;
        }
        if room.kind == Kind::Own
            && let EntryRef::Occupied(mut waiting) = self.apart.entry_ref(&room.key)
        {
            *waiting.get_mut() -= 1;
            if *waiting.get() == 0 {
                waiting.remove();
            }
        }
    }

    /// Lets a gate do what it can.
    pub(super) fn settle(
        &mut self,
        now: Moment,
        id: GateId,
        reply_to: &mut Option<Ticket>,
        out: &mut Actions,
    ) {
        while let Some(room) = self.rooms.get_mut(id) {
            let keeper = &self.keeper;
            let fit = |tenure| keeper.is_fit(now, tenure);
            let view = View { now, fit, limits: self.limits.handover, planted: self.planted };
            match room.gate.next(view) {
                Some(Step::Admit { ticket, token, handed_over }) => {
                    self.admit(now, id, ticket, token, handed_over, out);
                }
                Some(Step::RefuseBusy { ticket }) => {
                    let refusal = Refusal::Busy(self.in_the_way(id));
                    self.refuse(id, ticket, refusal, out);
                }
                Some(Step::Apart { waiting }) => self.set_apart(now, id, waiting, out),
                Some(Step::Ask { first, ttl, queue, tokens, instead_of }) => {
                    let entry = &self.tickets[first];
                    let wish = Wish {
                        gate: id,
                        key: room.key.clone(),
                        mode: entry.mode,
                        ttl: Duration::from_nanos(ttl),
                        queue,
                        tokens,
                        holder: entry.holder.clone(),
                        instead_of,
                    };
                    let tenure = self.keeper.ask(now, wish, out);
                    room.gate.asked(tenure);
                    break;
                }
                Some(Step::Leave { tenure }) => {
                    let ticket = reply_to.take();
                    self.keeper.leave(now, tenure, Release::Now, ticket, out);
                }
                None => break,
            }
        }
        self.close_room_if_unused(id);
    }

    /// Gives a task that waits here a claim of its own.
    fn set_apart(&mut self, now: Moment, id: GateId, waiting: Waiting, out: &mut Actions) {
        let key = self.rooms[id].key.clone();
        let apart = self.apart.entry_ref(&key).or_default();
        if *apart >= self.limits.waiters {
            let refusal = if waiting.attempt { Refusal::Busy(None) } else { Refusal::Overloaded };
            return self.refuse(id, waiting.ticket, refusal, out);
        }
        *apart += 1;
        let mut gate = Gate::new();
        gate.enqueue(waiting);
        let own = self.rooms.insert(Room { gate, key, kind: Kind::Own, news: None });
        self.tickets[waiting.ticket].gate = own;
        self.settle(now, own, &mut None, out);
        self.set_alarm(own, waiting.deadline);
    }

    /// Who is in the way: a task of this very process, or whom the backend named.
    fn in_the_way(&self, id: GateId) -> Option<Arc<Holder>> {
        let room = self.rooms.get(id)?;
        let tenant = room.gate.tenants().first().and_then(|tenant| self.tickets.get(*tenant));
        tenant.map(|tenant| tenant.holder.clone()).or_else(|| room.in_the_way())
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
        let room = &self.rooms[id];
        let (tenure, root) = match room.kind {
            Kind::Inside { root, .. } => {
                (self.rooms.get(root).and_then(|room| room.gate.tenure()), Some(root))
            }
            _ => (room.gate.tenure(), None),
        };
        let (Some(tenure), Some(entry)) = (tenure, self.tickets.get_mut(ticket)) else { return };
        let asked = std::mem::replace(&mut entry.since, now);
        entry.phase = Phase::Admitted { tenure, token, handed_over, asked, revoked: None };
        out.push(Action::Wake(ticket));
        let ends = entry.ends();
        if ends < Moment::NEVER {
            self.holds.set(ends, ticket);
            let tickets = &self.tickets;
            self.holds.tidy(tickets.len(), |_, ticket| tickets.contains_key(ticket));
        }
        if let Some(room) = root.and_then(|root| self.rooms.get_mut(root)) {
            room.gate.add_nested_tenant(ticket);
        }
    }

    fn close_room_if_unused(&mut self, id: GateId) {
        let Some(room) = self.rooms.get_mut(id).filter(|room| room.gate.is_unused()) else {
            return;
        };
        match room.kind {
            Kind::Own => {}
            Kind::Inside { parent, .. } => {
                if let Some(parent) = self.tickets.get_mut(parent) {
                    parent.nested = None;
                }
            }
            Kind::Shared => {
                room.gate.alarm = Moment::NEVER;
                room.news = None;
                if self.unused != Some(id) {
                    self.close_unused();
                    self.unused = Some(id);
                }
                return;
            }
        }
        self.rooms.remove(id);
    }

    fn close_unused(&mut self) {
        let Some(id) = self.unused.take() else { return };
        if self.rooms.get(id).is_some_and(|room| room.gate.is_unused())
            && let Some(room) = self.rooms.remove(id)
        {
            self.shared.remove(&room.key);
        }
    }
}
