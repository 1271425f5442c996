//! Pure: the claims of this process at the backend, from the first asking to
//! the last release.
//!
//! ```text
//!   ask --> Asking <--> Queued        acquire is sent, and sent again: when it
//!              |           |          failed, about once a second in the queue,
//!              +--granted--+          and when a notice says so
//!                    v
//!                  Held               renewed every ttl/3; when that fails it is
//!                    |                uncertain and tried again until the deadline
//!        leave, or   |   the backend says lost: gone
//!        deadline    v
//!                 Leaving             release is sent until it is answered
//! ```
//!
//! Invariants:
//! - *Deadline*: a moment before the answered request was sent, plus the term,
//!   minus the drift margin. For a hand-over the request is the asking
//!   that the notice names and the term the patience. A deadline is never counted from an answer
//!   or a notice, and a lost lease never comes back.
//! - *Order*: a release is not sent while an acquire is unanswered. A renewal
//!   may be: it creates nothing.
//! - *Doubt*: an acquire that was never answered may yet be applied, even after
//!   a release sent on another connection. So the release is repeated until one
//!   is answered that was sent a settling time after the backend first answered
//!   again.

use std::sync::Arc;
use std::time::Duration;

use hashbrown::HashTable;
use rand::rngs::StdRng;
use rand::{RngExt as _, SeedableRng as _};
use slotmap::SlotMap;

use crate::claim::{
    Answer, Claim, Grant, Holder, LossReason, Mode, Owner, Release, Released, Request,
};
use crate::clock::{Moment, nanos};
use crate::engine::{Action, Actions, GateId, Ticket};
use crate::error::{Error, ErrorKind, Result};
use crate::key::Key;
use crate::plant::{Plant, Planted};
use crate::timers::Timers;

mod answers;
mod tenure;

use self::tenure::{Doubt, Flight, Phase, Tenure};

slotmap::new_key_type! {
    /// A claim from the first asking to the last release.
    pub struct TenureId;
}

/// One call to the backend.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct CallId {
    tenure: TenureId,
    seq: u32,
}

/// What became of a claim.
#[derive(Debug)]
pub(crate) enum Said {
    Granted(Grant),
    /// In the backend's queue, behind this holder.
    Queued(Option<Arc<Holder>>),
    /// Held by somebody else, and the claim is gone.
    Busy(Option<Arc<Holder>>),
    /// The backend cannot be reached; it is being tried again.
    Trouble(Error),
    /// The claim is gone.
    Failed(Error),
    Renewed {
        others_wait: bool,
    },
    Uncertain(Error),
    Lost(LossReason),
    Released {
        reply_to: Option<Ticket>,
        outcome: Result<Released>,
    },
}

/// What to ask for.
pub(crate) struct Wish {
    pub(crate) gate: GateId,
    pub(crate) key: Key,
    pub(crate) mode: Mode,
    pub(crate) ttl: Duration,
    pub(crate) queue: bool,
    pub(crate) tokens: u32,
    pub(crate) holder: Arc<Holder>,
    pub(crate) instead_of: Option<TenureId>,
}

/// The longest time between two looks at a lock that is waited for.
const LOOK: Duration = Duration::from_secs(1);
/// How long a backend that answers again may take to read what was sent before.
const SETTLE: Duration = Duration::from_secs(1);
/// How long a release is tried beyond the ttl when an acquire is in doubt.
const OWED: Duration = Duration::from_secs(60);
const FIRST_RETRY: Duration = Duration::from_millis(50);

/// Clocks of two machines may differ by this much in rate: one in fifty.
fn margin(term: Duration) -> Duration {
    Duration::from_nanos(nanos(term) / 50)
}

#[derive(Debug)]
pub(crate) struct Keeper {
    tenures: SlotMap<TenureId, Tenure>,
    /// By the owner's bits, which are random; each knows its own.
    by_owner: HashTable<TenureId>,
    timers: Timers<TenureId>,
    random: StdRng,
    planted: Planted,
}

impl Keeper {
    pub(crate) fn new(seed: [u8; 32], planted: Planted) -> Self {
        Keeper {
            tenures: SlotMap::with_key(),
            by_owner: HashTable::new(),
            timers: Timers::new(),
            random: StdRng::from_seed(seed),
            planted,
        }
    }

    pub(crate) fn ask(&mut self, now: Moment, wish: Wish, out: &mut Actions) -> TenureId {
        let instead_of = wish.instead_of.and_then(|old| self.replaced(now, old, out));
        let owner = Owner::from_bits(self.random.random());
        let claim = Claim {
            key: wish.key,
            owner,
            mode: wish.mode,
            ttl: wish.ttl,
            queue: wish.queue,
            instead_of,
            tokens: wish.tokens,
            holder: wish.holder,
            sent: now,
        };
        let id = self.tenures.insert(Tenure::new(claim, wish.gate));
        let tenures = &self.tenures;
        let bits_of = |id: &TenureId| tenures.get(*id).map_or(0, |it| it.claim.owner.low_bits());
        self.by_owner.insert_unique(owner.low_bits(), id, bits_of);
        self.send(now, id, out);
        id
    }

    /// The owner whose lease a new claim takes the place of. If it cannot be
    /// given up in the same call, because an acquire of it is unanswered, it
    /// leaves by itself.
    fn replaced(&mut self, now: Moment, old: TenureId, out: &mut Actions) -> Option<Owner> {
        let tenure = self.tenures.get(old)?;
        if tenure.awaits_acquire() || tenure.is_in_doubt(now) {
            self.leave(now, old, Release::Now, None, out);
            return None;
        }
        self.remove(old).map(|tenure| tenure.claim.owner)
    }

    /// A claim that only tried now wants to wait.
    pub(crate) fn join_queue(&mut self, id: TenureId) {
        if let Some(tenure) = self.tenures.get_mut(id) {
            Arc::make_mut(&mut tenure.claim).queue = true;
        }
    }

    /// Nobody wants the claim any more.
    pub(crate) fn leave(
        &mut self,
        now: Moment,
        id: TenureId,
        how: Release,
        reply_to: Option<Ticket>,
        out: &mut Actions,
    ) {
        let planted = self.planted;
        let Some(tenure) = self.tenures.get_mut(id) else { return };
        let nothing_there =
            tenure.phase == Phase::Asking && tenure.flight.is_none() && tenure.doubt == Doubt::NONE;
        let queued = matches!(tenure.phase, Phase::Asking | Phase::Queued);
        let unapplied = if queued { tenure.owed_instead(now) } else { None };
        let give_up = tenure.gives_up(now);
        if nothing_there || (queued && planted.is(Plant::CancelForgetsGrant)) {
            self.remove(id);
        } else {
            tenure.phase = Phase::Leaving { give_up, reply_to, told: false };
            if let Release::After(stay) = how {
                tenure.stays = Some(Box::new(stay));
            }
            tenure.failures = 0;
            if !tenure.awaits_acquire() || planted.is(Plant::ReleaseOvertakesAcquire) {
                self.send(now, id, out);
            } else {
                self.set_due(id, give_up + OWED);
            }
        }
        if let Some(old) = unapplied {
            let id = self.tenures.insert(old);
            self.send(now, id, out);
        }
    }

    /// Does one thing that is due, if any. `Some(None)`: it did, and nobody need know.
    pub(crate) fn due(
        &mut self,
        now: Moment,
        out: &mut Actions,
    ) -> Option<Option<(TenureId, GateId, Said)>> {
        let (at, id) = self.timers.take_due(now)?;
        let Some(tenure) = self.tenures.get_mut(id).filter(|tenure| tenure.due == at) else {
            return Some(None);
        };
        tenure.due = Moment::NEVER;
        let gate = tenure.gate;
        match tenure.phase {
            Phase::Held { .. } if now >= tenure.deadline => {
                Some(self.lapse(now, id, out).map(|said| (id, gate, said)))
            }
            Phase::Held { renewing, .. } => {
                let deadline = tenure.deadline;
                if renewing && tenure.flight.is_none() {
                    self.send(now, id, out);
                } else {
                    self.set_due(id, deadline);
                }
                Some(None)
            }
            Phase::Leaving { give_up, reply_to, told, .. } => {
                let over = now >= if tenure.is_in_doubt(now) { give_up + OWED } else { give_up };
                if !over {
                    if !tenure.awaits_acquire() {
                        self.send(now, id, out);
                    }
                    return Some(None);
                }
                self.remove(id);
                let unknown = Err(Error::new(ErrorKind::Unknown, crate::Operation::Release));
                let said = Said::Released { reply_to, outcome: unknown };
                Some((!told).then_some((id, gate, said)))
            }
            Phase::Asking | Phase::Queued => {
                if tenure.flight.is_none() {
                    self.send(now, id, out);
                }
                Some(None)
            }
        }
    }

    /// The deadline has passed: the lease is lost, and what may be left of it at
    /// the backend is released.
    pub(crate) fn lapse(&mut self, now: Moment, id: TenureId, out: &mut Actions) -> Option<Said> {
        let tenure = self.tenures.get(id)?;
        if !matches!(tenure.phase, Phase::Held { .. }) || now < tenure.deadline {
            return None;
        }
        self.leave(now, id, Release::Now, None, out);
        Some(Said::Lost(LossReason::Deadline))
    }

    pub(crate) fn next_due(&self) -> Moment {
        self.timers.next()
    }

    /// Whether the lease may be handed on: held for certain, still renewed, half
    /// its term left.
    pub(crate) fn is_fit(&self, now: Moment, id: TenureId) -> bool {
        self.tenures.get(id).is_some_and(|tenure| {
            matches!(tenure.phase, Phase::Held { certain: true, renewing: true })
                && nanos(tenure.deadline.since(now)) >= tenure.term / 2
        })
    }

    /// The deadline of a lease and whether its last renewal was answered.
    pub(crate) fn standing(&self, id: TenureId) -> Option<(Moment, bool)> {
        let tenure = self.tenures.get(id)?;
        match tenure.phase {
            Phase::Held { certain, .. } => Some((tenure.deadline, certain)),
            _ => None,
        }
    }

    /// The lease ends at its deadline at the latest.
    pub(crate) fn stop_renewing(&mut self, id: TenureId) {
        if let Some(Tenure { phase: Phase::Held { renewing, .. }, .. }) = self.tenures.get_mut(id) {
            *renewing = false;
        }
    }

    /// From now on the lease is a reader's; the backend hears of it at once, and
    /// until it does is merely stricter than it need be.
    pub(crate) fn downgrade(&mut self, now: Moment, id: TenureId, out: &mut Actions) {
        let Some(tenure) = self.tenures.get_mut(id) else { return };
        Arc::make_mut(&mut tenure.claim).mode = Mode::Shared;
        if !tenure.awaits_acquire() {
            self.send(now, id, out);
        }
    }

    pub(crate) fn mode_and_ttl(&self, id: TenureId) -> Option<(Mode, u64)> {
        self.tenures.get(id).map(|tenure| (tenure.claim.mode, nanos(tenure.claim.ttl)))
    }

    pub(crate) fn owes_nothing(&self) -> bool {
        !self.tenures.values().any(|tenure| matches!(tenure.phase, Phase::Leaving { .. }))
    }

    pub(crate) fn is_empty(&self) -> bool {
        self.tenures.is_empty()
    }

    /// Sends what the phase calls for.
    fn send(&mut self, now: Moment, id: TenureId, out: &mut Actions) {
        let Some(tenure) = self.tenures.get_mut(id) else { return };
        tenure.seq = tenure.seq.wrapping_add(1);
        let (request, acquire) = match tenure.phase {
            Phase::Asking | Phase::Queued => {
                if tenure.claim.sent != now {
                    Arc::make_mut(&mut tenure.claim).sent = now;
                }
                (Request::Acquire(tenure.claim.clone()), true)
            }
            Phase::Held { .. } => (Request::Renew(tenure.claim.clone()), false),
            Phase::Leaving { .. } => {
                let how = tenure.stays.as_ref().map_or(Release::Now, |stay| Release::After(**stay));
                (Request::Release(tenure.claim.clone(), how), false)
            }
        };
        tenure.flight = Some(Flight { sent: now, acquire });
        let call = CallId { tenure: id, seq: tenure.seq };
        out.push(Action::Call(call, request));
        let until = match tenure.phase {
            Phase::Held { .. } => tenure.deadline,
            _ => Moment::NEVER,
        };
        self.set_due(id, until);
    }

    /// Makes it a lease, if there is anything left of the term.
    fn hold(&mut self, now: Moment, id: TenureId, sent: Moment, term: Duration) -> bool {
        let deadline = sent + (term - margin(term));
        if deadline <= now {
            return false;
        }
        let tenure = &mut self.tenures[id];
        tenure.phase = Phase::Held { certain: true, renewing: true };
        tenure.deadline = deadline;
        tenure.term = nanos(term);
        tenure.failures = 0;
        let renew = self.renewal(sent, term);
        self.set_due(id, renew.max(now).min(deadline));
        true
    }

    /// A lease was renewed by a request sent then.
    fn prolong(&mut self, now: Moment, id: TenureId, sent: Moment) {
        let tenure = &mut self.tenures[id];
        let ttl = tenure.claim.ttl;
        let Phase::Held { certain, .. } = &mut tenure.phase else { return };
        *certain = true;
        tenure.deadline = tenure.deadline.max(sent + (ttl - margin(ttl)));
        tenure.term = nanos(ttl);
        let deadline = tenure.deadline;
        let renew = self.renewal(sent, ttl);
        self.set_due(id, renew.max(now).min(deadline));
    }

    /// When a lease that was asked for then is to be renewed: after about a third of
    /// its term, spread out, but on a beat that all leases of this term share, so
    /// that many are renewed by one call.
    fn renewal(&mut self, sent: Moment, term: Duration) -> Moment {
        let beat = (nanos(term) / 1024).max(1);
        let spread = self.random.random_range(896..1024_u64);
        let at = (sent + Duration::from_nanos(beat * spread / 3)).as_nanos();
        Moment::from_nanos(at - at % beat)
    }

    fn retry_in(&mut self, id: TenureId) -> Duration {
        let failures = self.tenures.get_mut(id).map_or(0, |tenure| {
            tenure.failures = tenure.failures.saturating_add(1);
            tenure.failures
        });
        let delay = FIRST_RETRY * (1 << failures.clamp(1, 6));
        delay.min(LOOK).mul_f64(self.random.random_range(0.5..1.0))
    }

    fn set_due(&mut self, id: TenureId, due: Moment) {
        let Some(tenure) = self.tenures.get_mut(id) else { return };
        tenure.due = due;
        if due < Moment::NEVER {
            self.timers.set(due, id);
            let tenures = &self.tenures;
            self.timers.tidy(tenures.len(), |at, id| {
                tenures.get(id).is_some_and(|tenure| tenure.due == at)
            });
        }
    }

    fn remove(&mut self, id: TenureId) -> Option<Tenure> {
        let tenure = self.tenures.remove(id)?;
        let bits = tenure.claim.owner.low_bits();
        if let Ok(entry) = self.by_owner.find_entry(bits, |other| *other == id) {
            entry.remove();
        }
        Some(tenure)
    }
}
