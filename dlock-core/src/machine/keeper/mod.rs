//! Pure: the claims of this process at the backend, from the first request to the last
//! release.
//!
//! ```text
//!   acquire() --> Acquiring <--> Queued   An acquire is sent, and sent again: when it
//!                     |            |      failed, about once a second in the queue,
//!                     +-- granted -+      and when a notice says so.
//!                           v
//!                         Held            Renewed every third of the ttl, and soon after
//!                           |             a hand-over. When that fails it is uncertain, and
//!                           |             tried again until the deadline. When the backend
//!          release(), or    |             says that the lease is lost, the claim is
//!          the deadline     v             removed.
//!                       Releasing         A release is sent until it is answered.
//! ```
//!
//! Invariants:
//! - *Deadline*: the moment before the answered request was sent, plus the term, minus the
//!   drift margin. For a hand-over the request is the one that the notice names, and the
//!   term is the queue ttl. For what a session holds the request is the session's last
//!   answered keep-alive, and the term is in the answer. A deadline is never counted from
//!   an answer or a notice, and a lost lease never comes back.
//! - *Order*: a release is not sent while an acquire is unanswered. A renewal
//!   may be: it creates nothing.
//! - *InDoubt*: an acquire that was never answered may yet be applied, even after
//!   a release sent on another connection. So the release is repeated until one
//!   is answered that was sent a settling time after the backend first answered
//!   again.

use std::sync::Arc;
use std::time::Duration;

use hashbrown::HashTable;
use rand::rngs::StdRng;
use rand::{RngExt as _, SeedableRng as _};
use slotmap::SlotMap;

use super::coverage::{Coverage, Transition};
use super::timers::Timers;
use crate::claim::{
    Answer, Claim, Grant, Holder, LossReason, Mode, Owner, Release, ReleaseOutcome, Request,
};
use crate::clock::{Moment, nanos};
use crate::error::{Error, ErrorKind, Result};
use crate::key::Key;
use crate::machine::types::{Action, Actions, CallId, ClaimId, GateId, Ticket};
use crate::planted_bug::{Bug, PlantedBug};

mod answers;
mod tracked_claim;
mod validity;

use self::tracked_claim::{Call, InDoubt, Phase, TrackedClaim};
use self::validity::{Validity, margin};

/// What happened to a claim, for its gate.
#[derive(Debug)]
pub(crate) enum ClaimEvent {
    Granted(Grant),
    /// The claim is in the backend's queue, behind this holder.
    Queued(Option<Arc<Holder>>),
    /// Somebody else holds the lock, and the claim was removed.
    Busy(Option<Arc<Holder>>),
    /// The backend cannot be reached; the call will be made again.
    Trouble(Error),
    /// The claim failed, and was removed.
    Failed(Error),
    Renewed {
        others_wait: bool,
    },
    /// The lease was renewed by a request that was sent at `sent`, and has these tokens
    /// from now on.
    Extended {
        sent: Moment,
        grant: Grant,
    },
    Uncertain(Error),
    Lost(LossReason),
    Released {
        reply_to: Option<Ticket>,
        outcome: Result<ReleaseOutcome>,
    },
}

/// What a new claim asks the backend for.
pub(crate) struct ClaimRequest {
    pub(crate) gate: GateId,
    pub(crate) key: Key,
    pub(crate) mode: Mode,
    pub(crate) ttl: Duration,
    pub(crate) queue: bool,
    pub(crate) tokens: u32,
    pub(crate) holder: Arc<Holder>,
    pub(crate) instead_of: Option<ClaimId>,
}

/// The longest time between two looks at a lock that is waited for.
const LOOK: Duration = Duration::from_secs(1);
/// The same, for a place in the queue that lives by a session.
const SESSION_LOOK: Duration = Duration::from_secs(10);
/// How long a backend that answers again may take to read what was sent before.
const SETTLE: Duration = Duration::from_secs(1);
/// How long a release is tried beyond the ttl when an acquire is in doubt.
const OWED: Duration = Duration::from_secs(60);
/// A renewal that failed is tried again after this part of the ttl.
const RETRIES_PER_TTL: u32 = 12;
/// The pause before a failed acquire or release is tried again; it doubles.
const FIRST_RETRY: Duration = Duration::from_millis(50);

#[derive(Debug)]
pub(crate) struct Keeper {
    claims: SlotMap<ClaimId, TrackedClaim>,
    /// The claims by the bits of their owners, which are random.
    by_owner: HashTable<ClaimId>,
    timers: Timers<ClaimId>,
    random: StdRng,
    planted: PlantedBug,
    coverage: Coverage,
}

impl Keeper {
    pub(crate) fn new(seed: [u8; 32], planted: PlantedBug) -> Self {
        Keeper {
            claims: SlotMap::with_key(),
            by_owner: HashTable::new(),
            timers: Timers::new(),
            random: StdRng::from_seed(seed),
            planted,
            coverage: Coverage::default(),
        }
    }

    pub(crate) fn acquire(
        &mut self,
        now: Moment,
        request: ClaimRequest,
        out: &mut Actions,
    ) -> ClaimId {
        let instead_of = request.instead_of.and_then(|old| self.replaced(now, old, out));
        let owner = Owner::from_bits(self.random.random());
        let claim = Claim {
            key: request.key,
            owner,
            mode: request.mode,
            ttl: request.ttl,
            queue: request.queue,
            instead_of,
            tokens: request.tokens,
            holder: request.holder,
            sent: now,
        };
        let id = self.claims.insert(TrackedClaim::new(claim, request.gate));
        let claims = &self.claims;
        let bits_of = |id: &ClaimId| claims.get(*id).map_or(0, |it| it.claim.owner.low_bits());
        self.by_owner.insert_unique(owner.low_bits(), id, bits_of);
        self.send(now, id, out);
        id
    }

    /// The owner whose lease a new claim takes the place of. If it cannot be
    /// given up in the same call, because an acquire of it is unanswered, it is
    /// released by itself.
    fn replaced(&mut self, now: Moment, old: ClaimId, out: &mut Actions) -> Option<Owner> {
        let tracked = self.claims.get(old)?;
        if tracked.awaits_acquire() || tracked.is_in_doubt(now) {
            self.release(now, old, Release::Now, None, out);
            return None;
        }
        self.remove(old).map(|tracked| tracked.claim.owner)
    }

    /// A claim that did not want to wait now joins the queue.
    pub(crate) fn join_queue(&mut self, id: ClaimId) {
        if let Some(tracked) = self.claims.get_mut(id) {
            Arc::make_mut(&mut tracked.claim).queue = true;
        }
    }

    /// From now on this gate is told what happens to the claim.
    pub(crate) fn set_gate(&mut self, id: ClaimId, gate: GateId) {
        if let Some(tracked) = self.claims.get_mut(id) {
            tracked.gate = gate;
        }
    }

    /// Renews a lease and asks for further tokens. Nothing happens, and false is
    /// returned, unless the lease is held for certain and no call of it is under way.
    pub(crate) fn extend(
        &mut self,
        now: Moment,
        id: ClaimId,
        tokens: u32,
        out: &mut Actions,
    ) -> bool {
        let Some(tracked) = self.claims.get_mut(id) else { return false };
        let certain = matches!(tracked.phase, Phase::Held { certain: true, renewing: true });
        if !certain || tracked.in_flight.is_some() || now >= tracked.deadline {
            return false;
        }
        self.send_with(now, id, tokens, out);
        true
    }

    /// Releases a claim that nobody wants any more.
    pub(crate) fn release(
        &mut self,
        now: Moment,
        id: ClaimId,
        how: Release,
        reply_to: Option<Ticket>,
        out: &mut Actions,
    ) {
        let planted = self.planted;
        let Some(tracked) = self.claims.get_mut(id) else { return };
        let nothing_there = tracked.phase == Phase::Acquiring
            && tracked.in_flight.is_none()
            && tracked.doubt == InDoubt::NONE;
        let queued = matches!(tracked.phase, Phase::Acquiring | Phase::Queued);
        let unapplied = if queued { tracked.owed_instead(now) } else { None };
        let give_up = tracked.gives_up(now);
        if nothing_there || (queued && planted.is(Bug::CancelForgetsGrant)) {
            self.remove(id);
        } else {
            tracked.phase = Phase::Releasing { give_up, reply_to, told: false };
            if let Release::After(stay) = how {
                tracked.stays = Some(Box::new(stay));
            }
            tracked.failures = 0;
            if !tracked.awaits_acquire() || planted.is(Bug::ReleaseOvertakesAcquire) {
                self.send(now, id, out);
            } else {
                self.set_due(id, give_up + OWED);
            }
        }
        if let Some(old) = unapplied {
            let id = self.claims.insert(old);
            self.send(now, id, out);
        }
    }

    /// Does one thing that is due, if there is any. `Some(None)`: it was done, and no gate
    /// needs to know.
    pub(crate) fn due(
        &mut self,
        now: Moment,
        out: &mut Actions,
    ) -> Option<Option<(ClaimId, GateId, ClaimEvent)>> {
        let (at, id) = self.timers.take_due(now)?;
        let Some(tracked) = self.claims.get_mut(id).filter(|tracked| tracked.due == at) else {
            return Some(None);
        };
        tracked.due = Moment::NEVER;
        let gate = tracked.gate;
        match tracked.phase {
            Phase::Held { .. } if now >= tracked.deadline => {
                Some(self.expire(now, id, out).map(|event| (id, gate, event)))
            }
            Phase::Held { renewing, .. } => {
                let deadline = tracked.deadline;
                if renewing && tracked.in_flight.is_none() {
                    self.send(now, id, out);
                } else {
                    self.set_due(id, deadline);
                }
                Some(None)
            }
            Phase::Releasing { give_up, reply_to, told, .. } => {
                let over = now >= if tracked.is_in_doubt(now) { give_up + OWED } else { give_up };
                if !over {
                    if !tracked.awaits_acquire() {
                        self.send(now, id, out);
                    }
                    return Some(None);
                }
                self.remove(id);
                let unknown = Err(Error::new(ErrorKind::Unknown, crate::Operation::Release));
                let event = ClaimEvent::Released { reply_to, outcome: unknown };
                Some((!told).then_some((id, gate, event)))
            }
            Phase::Acquiring | Phase::Queued => {
                if tracked.in_flight.is_none() {
                    self.send(now, id, out);
                }
                Some(None)
            }
        }
    }

    /// Makes every claim due: leases are renewed, and claims in the queue are sent again. A
    /// claim that waits for an answer does so when the answer is there.
    pub(crate) fn ask_again(&mut self, now: Moment) {
        for id in self.claims.keys().collect::<Vec<_>>() {
            let Some(tracked) = self.claims.get_mut(id) else { continue };
            if tracked.in_flight.is_some() {
                tracked.asks_again = true;
            } else if tracked.due > now {
                self.set_due(id, now);
            }
        }
    }

    /// The session ended. Answers that are under way are about that session: a grant in
    /// them is void, and claims in the queue are sent again. Returns the owners of the
    /// leases that are lost.
    pub(crate) fn session_lost(&mut self, now: Moment) -> Vec<Owner> {
        let mut held = Vec::new();
        for id in self.claims.keys().collect::<Vec<_>>() {
            let Some(tracked) = self.claims.get_mut(id) else { continue };
            match tracked.phase {
                Phase::Held { .. } => held.push(tracked.claim.owner),
                Phase::Acquiring | Phase::Queued if tracked.in_flight.is_some() => {
                    tracked.lost_early = now;
                    tracked.asks_again = true;
                }
                Phase::Acquiring | Phase::Queued => self.set_due(id, now),
                Phase::Releasing { .. } => {}
            }
        }
        held
    }

    /// The deadline has passed: the lease is lost, and what may be left of it at
    /// the backend is released.
    pub(crate) fn expire(
        &mut self,
        now: Moment,
        id: ClaimId,
        out: &mut Actions,
    ) -> Option<ClaimEvent> {
        let tracked = self.claims.get(id)?;
        if !matches!(tracked.phase, Phase::Held { .. }) || now < tracked.deadline {
            return None;
        }
        self.coverage.count(Transition::Expire);
        self.release(now, id, Release::Now, None, out);
        Some(ClaimEvent::Lost(LossReason::Deadline))
    }

    /// How often each transition was taken.
    #[cfg(feature = "simulation")]
    pub(crate) fn coverage(&self) -> &Coverage {
        &self.coverage
    }

    pub(crate) fn next_due(&self) -> Moment {
        self.timers.next()
    }

    /// Whether the lease may be handed over: it is held for certain, it is still renewed,
    /// and half its term is left.
    pub(crate) fn can_hand_over(&self, now: Moment, id: ClaimId) -> bool {
        self.claims.get(id).is_some_and(|tracked| {
            matches!(tracked.phase, Phase::Held { certain: true, renewing: true })
                && nanos(tracked.deadline.since(now)) >= tracked.term / 2
        })
    }

    /// The deadline of a lease and whether its last renewal was answered.
    pub(crate) fn status(&self, id: ClaimId) -> Option<(Moment, bool)> {
        let tracked = self.claims.get(id)?;
        match tracked.phase {
            Phase::Held { certain, .. } => Some((tracked.deadline, certain)),
            _ => None,
        }
    }

    /// Renews the lease no more: it ends at its deadline at the latest.
    pub(crate) fn stop_renewing(&mut self, id: ClaimId) {
        if let Some(TrackedClaim { phase: Phase::Held { renewing, .. }, .. }) =
            self.claims.get_mut(id)
        {
            *renewing = false;
        }
    }

    /// Makes the lease a shared one. The backend is told at once; until then it is only
    /// stricter than it needs to be.
    pub(crate) fn downgrade(&mut self, now: Moment, id: ClaimId, out: &mut Actions) {
        let Some(tracked) = self.claims.get_mut(id) else { return };
        Arc::make_mut(&mut tracked.claim).mode = Mode::Shared;
        if !tracked.awaits_acquire() {
            self.send(now, id, out);
        }
    }

    pub(crate) fn mode_and_ttl(&self, id: ClaimId) -> Option<(Mode, u64)> {
        self.claims.get(id).map(|tracked| (tracked.claim.mode, nanos(tracked.claim.ttl)))
    }

    pub(crate) fn has_pending_releases(&self) -> bool {
        self.claims.values().any(|tracked| matches!(tracked.phase, Phase::Releasing { .. }))
    }

    pub(crate) fn is_empty(&self) -> bool {
        self.claims.is_empty()
    }

    /// Sends the call that the phase of the claim needs.
    fn send(&mut self, now: Moment, id: ClaimId, out: &mut Actions) {
        self.send_with(now, id, 0, out);
    }

    /// The same; a renewal asks for this many further tokens.
    fn send_with(&mut self, now: Moment, id: ClaimId, further: u32, out: &mut Actions) {
        let Some(tracked) = self.claims.get_mut(id) else { return };
        tracked.seq = tracked.seq.wrapping_add(1);
        let (request, call) = match tracked.phase {
            Phase::Acquiring | Phase::Queued => {
                if tracked.claim.sent != now {
                    Arc::make_mut(&mut tracked.claim).sent = now;
                }
                (Request::Acquire(tracked.claim.clone()), Call::Acquire)
            }
            Phase::Held { .. } => {
                if tracked.claim.tokens != further {
                    Arc::make_mut(&mut tracked.claim).tokens = further;
                }
                (Request::Renew(tracked.claim.clone()), Call::RenewOrRelease)
            }
            Phase::Releasing { .. } => {
                let how =
                    tracked.stays.as_ref().map_or(Release::Now, |stay| Release::After(**stay));
                (Request::Release(tracked.claim.clone(), how), Call::RenewOrRelease)
            }
        };
        tracked.in_flight = Some(call);
        tracked.sent = now;
        let call = CallId { claim: id, seq: tracked.seq };
        out.push(Action::Call(call, request));
        let until = match tracked.phase {
            Phase::Held { .. } => tracked.deadline,
            _ => Moment::NEVER,
        };
        self.set_due(id, until);
    }

    fn retry_in(&mut self, id: ClaimId) -> Duration {
        let failures = self.claims.get_mut(id).map_or(0, |tracked| {
            tracked.failures = tracked.failures.saturating_add(1);
            tracked.failures
        });
        let delay = FIRST_RETRY * (1 << failures.clamp(1, 6));
        delay.min(LOOK).mul_f64(self.random.random_range(0.5..1.0))
    }

    fn set_due(&mut self, id: ClaimId, due: Moment) {
        let Some(tracked) = self.claims.get_mut(id) else { return };
        tracked.due = due;
        if due < Moment::NEVER {
            self.timers.set(due, id);
            let claims = &self.claims;
            self.timers.tidy(claims.len(), |at, id| {
                claims.get(id).is_some_and(|tracked| tracked.due == at)
            });
        }
    }

    fn remove(&mut self, id: ClaimId) -> Option<TrackedClaim> {
        let tracked = self.claims.remove(id)?;
        let bits = tracked.claim.owner.low_bits();
        if let Ok(entry) = self.by_owner.find_entry(bits, |other| *other == id) {
            entry.remove();
        }
        Some(tracked)
    }
}
