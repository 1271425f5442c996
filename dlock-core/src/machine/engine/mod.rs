//! Pure: the gates and the keeper together. Events go in, and what must be done comes out
//! as [`Action`](super::types::Action)s; the driver, or the simulation, does it.
//!
//! A *ticket* is one task's interest in one key:
//!
//! ```text
//!   Waiting --> Admitted --> Releasing --> Released
//!      |            |
//!   Refused        Lost
//! ```
//!
//! `W` is what the caller wants to remember with a ticket: wakers, a task's number.

use std::num::NonZeroU64;
use std::sync::Arc;
use std::time::Duration;

use slotmap::SlotMap;

use self::gates::{GateEntry, Kind};
use super::coverage::{Coverage, Transition};
use super::gate::Gate;
use super::keeper::Keeper;
use super::timers::Timers;
use super::types::{
    Actions, CallId, ClaimId, GateId, LeaseStatus, Limits, LockRequest, Outcome, QueueScope,
    Refusal, Ticket, TicketSnapshot, Wait, Waiter,
};
use crate::claim::{Answer, Holder, LossReason, Mode, Notice, Owner, ReleaseOutcome};
use crate::clock::{Moment, nanos};
use crate::collections::Map;
use crate::error::Result;
use crate::key::Key;
use crate::planted_bug::{Bug, PlantedBug};

mod gates;
mod holds;

struct TicketEntry<W> {
    gate: GateId,
    mode: Mode,
    since: Moment,
    /// Whether another task was in front of this one when it came.
    is_behind: bool,
    phase: Phase,
    /// The longest time that the lock may be held, in nanoseconds.
    max_hold: Option<NonZeroU64>,
    holder: Arc<Holder>,
    /// The gate of the tasks nested in this one.
    nested: Option<GateId>,
    payload: W,
}

impl<W> TicketEntry<W> {
    /// The moment when the lock has been held for the longest allowed time.
    fn ends(&self) -> Moment {
        let hold = |hold: NonZeroU64| self.since + Duration::from_nanos(hold.get());
        self.max_hold.map_or(Moment::NEVER, hold)
    }
}

enum Phase {
    Waiting,
    Refused(Refusal),
    Admitted {
        claim: ClaimId,
        token: u64,
        handed_over: bool,
        /// Whether the task waited for another holder.
        queued: bool,
        /// The moment of the request.
        asked: Moment,
        revoked: Option<Box<LossReason>>,
    },
    Lost(LossReason),
    Releasing,
    Released(Result<ReleaseOutcome>),
}

/// The machine of one process, or of a part of its keys.
pub struct Engine<W> {
    /// The gate of each key that tasks share.
    shared: Map<Key, GateId>,
    /// The number of tasks that wait for a key with claims of their own.
    separate_waiters: Map<Key, usize>,
    gates: SlotMap<GateId, GateEntry>,
    tickets: SlotMap<Ticket, TicketEntry<W>>,
    keeper: Keeper,
    /// The moments when a wait at a gate is over.
    waits: Timers<GateId>,
    /// The moments when a hold is over.
    holds: Timers<Ticket>,
    /// The number of tickets that wait.
    waiting: usize,
    /// The shared gate that was unused last. It is kept until another one is, since
    /// the same key is often wanted again at once.
    unused: Option<GateId>,
    limits: Limits,
    closed: bool,
    planted: PlantedBug,
    coverage: Coverage,
}

impl<W> Engine<W> {
    /// A machine without tasks. Its owners come from the seed, which must be random.
    pub fn new(limits: Limits, seed: [u8; 32], planted: PlantedBug) -> Self {
        Engine {
            shared: Map::default(),
            separate_waiters: Map::default(),
            gates: SlotMap::with_key(),
            tickets: SlotMap::with_key(),
            keeper: Keeper::new(seed, planted),
            waits: Timers::new(),
            holds: Timers::new(),
            waiting: 0,
            unused: None,
            limits,
            closed: false,
            planted,
            coverage: Coverage::default(),
        }
    }

    /// Puts a task into the queue of a lock. [`Engine::outcome`] says what becomes of it.
    ///
    /// # Errors
    /// At once when nobody may queue any more.
    pub fn enqueue(
        &mut self,
        now: Moment,
        request: LockRequest<'_>,
        payload: W,
        out: &mut Actions,
    ) -> Result<Ticket, Refusal> {
        // What is nested is no new claim: a body that has its grace may go on.
        if self.closed && !matches!(request.scope, QueueScope::Nested(_)) {
            return Err(Refusal::ShuttingDown);
        }
        let full =
            if request.wait == Wait::Try { Refusal::Busy(None) } else { Refusal::Overloaded };
        let gate = match request.scope {
            QueueScope::Shared => match self.shared.get(request.key) {
                Some(gate) => {
                    let gate_entry = &mut self.gates[*gate];
                    if gate_entry.gate.is_unused() && !gate_entry.key.is_same(request.key) {
                        gate_entry.key = request.key.clone(); // it may be shown under another name now
                    }
                    *gate
                }
                None => {
                    let gate = self.open_gate(Gate::new(), &request, Kind::Shared);
                    self.shared.insert(request.key.clone(), gate);
                    gate
                }
            },
            QueueScope::Separate => {
                let waiting = self.separate_waiters.entry_ref(request.key).or_default();
                if *waiting >= self.limits.waiters {
                    return Err(full);
                }
                *waiting += 1;
                self.open_gate(Gate::new(), &request, Kind::Separate)
            }
            QueueScope::Nested(parent) => {
                self.nested_gate(parent, &request).ok_or(Refusal::Lost)?
            }
        };
        if self.gates[gate].gate.waiting() >= self.limits.waiters {
            return Err(full);
        }
        self.waiting += 1;
        let ticket = self.tickets.insert(TicketEntry {
            gate,
            mode: request.mode,
            since: now,
            is_behind: false,
            phase: Phase::Waiting,
            max_hold: request.max_hold.and_then(|hold| NonZeroU64::new(nanos(hold))),
            holder: request.holder,
            nested: None,
            payload,
        });
        let (attempt, deadline) = match request.wait {
            Wait::Try => (true, now + self.limits.attempt),
            Wait::Until(deadline) => (false, deadline),
            Wait::For(wait) => (false, now + wait),
        };
        let gate_entry = &mut self.gates[gate];
        gate_entry.gate.enqueue(Waiter {
            ticket,
            mode: request.mode,
            ttl: nanos(request.ttl),
            attempt,
            deadline,
        });
        if !attempt && let Some(claim) = gate_entry.gate.acquiring_claim() {
            self.keeper.join_queue(claim);
        }
        self.settle(now, gate, &mut None, out);
        self.set_timer(gate, deadline);
        if let Some(gate_entry) = self.gates.get(gate)
            && let Some(entry) = self.tickets.get_mut(ticket)
        {
            entry.is_behind = gate_entry.gate.is_behind(ticket, entry.mode);
        }
        Ok(ticket)
    }

    /// What became of a ticket. A refused one is void afterwards.
    pub fn outcome(&mut self, ticket: Ticket) -> Outcome {
        let Some(entry) = self.tickets.get(ticket) else { return Outcome::Waiting };
        match &entry.phase {
            Phase::Waiting => Outcome::Waiting,
            Phase::Refused(refusal) => {
                let refusal = refusal.clone();
                self.tickets.remove(ticket);
                Outcome::Refused(refusal)
            }
            Phase::Admitted { revoked: Some(reason), .. } => {
                Outcome::Lost(LossReason::clone(reason))
            }
            Phase::Admitted { token, handed_over, queued, asked, .. } => Outcome::Admitted {
                token: *token,
                handed_over: *handed_over,
                queued: *queued,
                waited: entry.since.since(*asked),
                since: entry.since,
            },
            Phase::Lost(reason) => Outcome::Lost(reason.clone()),
            Phase::Releasing | Phase::Released(_) => Outcome::Waiting,
        }
    }

    /// How an admitted ticket stands.
    pub fn status(&self, now: Moment, ticket: Ticket) -> LeaseStatus {
        let Some(entry) = self.tickets.get(ticket) else {
            return LeaseStatus::Lost(LossReason::Forgotten);
        };
        match &entry.phase {
            Phase::Admitted { revoked: Some(reason), .. } => {
                LeaseStatus::Lost(LossReason::clone(reason))
            }
            Phase::Lost(reason) => LeaseStatus::Lost(reason.clone()),
            Phase::Admitted { claim, .. } => {
                let (deadline, certain) =
                    self.keeper.status(*claim).unwrap_or((Moment::default(), false));
                let ends = entry.ends();
                if now >= ends {
                    LeaseStatus::Lost(LossReason::MaxHold)
                } else if now >= deadline {
                    LeaseStatus::Lost(LossReason::Deadline)
                } else {
                    LeaseStatus::Held { until: deadline.min(ends), certain }
                }
            }
            _ => LeaseStatus::Lost(LossReason::Forgotten),
        }
    }

    /// How long the holder of a ticket has had the lock.
    pub fn held_for(&self, now: Moment, ticket: Ticket) -> Duration {
        self.tickets.get(ticket).map_or(Duration::ZERO, |entry| now.since(entry.since))
    }

    /// What the caller remembers with a ticket.
    pub fn payload_mut(&mut self, ticket: Ticket) -> Option<&mut W> {
        self.tickets.get_mut(ticket).map(|entry| &mut entry.payload)
    }

    /// Removes a ticket: its task gave up waiting, or its guard was dropped. Returns what
    /// the caller remembered with it.
    pub fn forget(&mut self, now: Moment, ticket: Ticket, out: &mut Actions) -> Option<W> {
        let entry = self.tickets.get(ticket)?;
        let gate = entry.gate;
        match entry.phase {
            Phase::Waiting => {
                if self.gates.get_mut(gate).is_some_and(|gate_entry| gate_entry.gate.cancel(ticket))
                {
                    self.no_longer_waits(gate);
                }
                self.settle(now, gate, &mut None, out);
            }
            Phase::Admitted { .. } => self.end_hold(now, ticket, &mut None, out),
            _ => {}
        }
        self.tickets.remove(ticket).map(|entry| entry.payload)
    }

    /// Takes the answer of the backend to a call.
    pub fn reply(&mut self, now: Moment, call: CallId, answer: Answer, out: &mut Actions) {
        if let Some((claim, gate, event)) = self.keeper.reply(now, call, answer, out) {
            self.on_claim_event(now, claim, gate, event, out);
        }
    }

    /// Takes a notice of the backend.
    pub fn notice(&mut self, now: Moment, owner: Owner, notice: Notice, out: &mut Actions) {
        if let Some((claim, gate, event)) = self.keeper.notice(now, owner, notice, out) {
            self.on_claim_event(now, claim, gate, event, out);
        }
    }

    /// Does everything that is due.
    pub fn tick(&mut self, now: Moment, out: &mut Actions) {
        while let Some(due) = self.keeper.due(now, out) {
            if let Some((claim, gate, event)) = due {
                self.on_claim_event(now, claim, gate, event, out);
            }
        }
        while let Some((at, gate)) = self.waits.take_due(now) {
            self.wait_over(now, gate, at, out);
        }
        while let Some((_, ticket)) = self.holds.take_due(now) {
            let due = self.tickets.get(ticket).is_some_and(|entry| entry.ends() <= now);
            if due {
                self.revoke(ticket, LossReason::MaxHold, out);
            }
        }
    }

    /// The backend may have lost its data: every claim makes its next call now, and not
    /// when it is due.
    pub fn ask_again(&mut self, now: Moment, out: &mut Actions) {
        self.keeper.ask_again(now);
        self.tick(now, out);
    }

    /// The session with the store ended, and all its locks with it: every holder is told,
    /// and claims in the queue are sent again.
    pub fn session_lost(&mut self, now: Moment, out: &mut Actions) {
        for owner in self.keeper.session_lost(now) {
            self.notice(now, owner, Notice::Lost(LossReason::SessionLost), out);
        }
        self.tick(now, out);
    }

    /// When [`Engine::tick`] has something to do.
    pub fn next_due(&self) -> Moment {
        self.keeper.next_due().min(self.waits.next()).min(self.holds.next())
    }

    /// Takes no new claims; who waits is refused.
    pub fn close(&mut self, now: Moment, out: &mut Actions) {
        self.closed = true;
        self.coverage.count(Transition::Close);
        if self.planted.is(Bug::CloseKeepsWaiters) {
            return;
        }
        for id in self.gates.keys().collect::<Vec<_>>() {
            self.refuse_all(id, &Refusal::ShuttingDown, out);
            self.settle(now, id, &mut None, out);
        }
    }

    /// What this process holds and waits for.
    pub fn snapshot(&self, now: Moment) -> Vec<TicketSnapshot> {
        let seen = |(ticket, entry): (Ticket, &TicketEntry<W>)| {
            let lease = match entry.phase {
                Phase::Waiting => None,
                Phase::Admitted { token, .. } => Some((token, self.status(now, ticket))),
                _ => return None,
            };
            let key = self.gates.get(entry.gate)?.key.clone();
            let holder = entry.holder.clone();
            Some(TicketSnapshot { key, mode: entry.mode, since: entry.since, lease, holder })
        };
        self.tickets.iter().filter_map(seen).collect()
    }

    /// Whether nothing is held, waited for or owed.
    pub fn is_idle(&self) -> bool {
        self.tickets.is_empty()
            && self.gates.len() <= 1
            && self.gates.values().all(|gate_entry| gate_entry.gate.is_unused())
            && self.shared.len() == self.gates.len()
            && self.separate_waiters.is_empty()
            && self.keeper.is_empty()
    }

    /// How often each transition was taken.
    #[cfg(feature = "simulation")]
    pub fn coverage(&self) -> Coverage {
        let mut coverage = self.coverage.clone();
        coverage.add(self.keeper.coverage());
        coverage
    }

    /// Whether a release was not yet confirmed by the backend.
    pub fn has_pending_releases(&self) -> bool {
        self.keeper.has_pending_releases()
    }

    /// How many tickets are admitted, whether or not anybody has looked yet.
    pub fn admitted(&self) -> usize {
        let admitted = |entry: &&TicketEntry<W>| {
            matches!(entry.phase, Phase::Admitted { .. } | Phase::Lost(_))
        };
        self.tickets.values().filter(admitted).count()
    }
}

impl<W> std::fmt::Debug for Engine<W> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Engine")
            .field("tickets", &self.tickets.len())
            .field("gates", &self.gates.len())
            .finish_non_exhaustive()
    }
}
