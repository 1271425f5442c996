//! Pure: the tasks of this process that want one key.
//!
//! Tasks queue here, first in first out, and one claim goes out for all of them.
//!
//! ```text
//!            Ask                  granted
//!   Vacant ------->  Asking  ---------------->  Held  --- Admit --> a tenant
//!     ^                |  nobody waits any more   |  last tenant left:
//!     |<--- Leave -----+                          |   - next one fits: Admit (hand-over, no network)
//!     |<------------- Leave: nobody waits --------+   - it does not:   Ask instead of this lease
//!     |<------------- lost ----------------------/
//! ```
//!
//! A hand-over is allowed if the lease is fit (held for certain, with half its
//! term left), is of the mode and ttl that the next task wants, has tokens left,
//! and the tenancy is neither too long nor too often handed over. Otherwise one
//! call gives the lease up and asks anew, behind whoever waits elsewhere.
//!
//! Readers that come while readers are inside join them under the same
//! conditions, unless a writer waits here (first in, first out) or somebody
//! waits elsewhere. One that may not join goes *apart*, with a claim of its own,
//! and the backend decides.
//!
//! A gate *inside* a lease serves the tasks nested in one tenant: it never asks
//! nor leaves, it only lets them in one after the other.
//!
//! Invariants: the tenants are one exclusive task or any number of shared ones;
//! each admission of an exclusive tenant uses a token of its own, rising; nobody
//! is admitted on a lease that is not held.
//!
//! The gate decides one [`Step`] at a time; the engine carries it out and asks
//! again until there is none.

use std::time::Duration;

use smallvec::SmallVec;

use crate::claim::{Grant, Mode};
use crate::clock::Moment;
use crate::engine::Ticket;
use crate::keeper::TenureId;
use crate::line::Line;
use crate::plant::{Plant, Planted};

/// How far a lease may be passed on inside the process.
#[derive(Clone, Copy, Debug)]
pub struct HandoverLimits {
    /// At most this often.
    pub count: u32,
    /// At most this long after the grant.
    pub tenure: Duration,
}

/// A task in the queue.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Waiting {
    pub(crate) ticket: Ticket,
    pub(crate) mode: Mode,
    /// In nanoseconds, as is every ttl here.
    pub(crate) ttl: u64,
    /// Wants an answer now rather than to wait.
    pub(crate) attempt: bool,
    /// When it gives up.
    pub(crate) deadline: Moment,
}

/// What is to be done next.
#[derive(Debug, PartialEq, Eq)]
pub(crate) enum Step {
    Admit {
        ticket: Ticket,
        token: u64,
        handed_over: bool,
    },
    RefuseBusy {
        ticket: Ticket,
    },
    /// This one is to have a claim of its own.
    Apart {
        waiting: Waiting,
    },
    Ask {
        first: Ticket,
        ttl: u64,
        queue: bool,
        tokens: u32,
        instead_of: Option<TenureId>,
    },
    Leave {
        tenure: TenureId,
    },
}

/// The queue; the first in it costs no allocation.
#[derive(Debug, Default)]
struct Queue {
    first: Option<Waiting>,
    rest: Line<Waiting>,
}

impl Queue {
    fn push_back(&mut self, waiting: Waiting) {
        if self.first.is_none() {
            self.first = Some(waiting);
        } else {
            self.rest.push_back(waiting);
        }
    }

    fn front(&self) -> Option<&Waiting> {
        self.first.as_ref()
    }

    fn remove(&mut self, place: usize) -> Option<Waiting> {
        match place.checked_sub(1) {
            Some(place) => self.rest.remove(place),
            None => std::mem::replace(&mut self.first, self.rest.pop_front()),
        }
    }

    fn iter(&self) -> impl Iterator<Item = &Waiting> {
        self.first.iter().chain(self.rest.iter())
    }

    fn len(&self) -> usize {
        usize::from(self.first.is_some()) + self.rest.len()
    }

    fn is_empty(&self) -> bool {
        self.first.is_none()
    }
}

#[derive(Debug)]
pub(crate) struct Gate {
    queue: Queue,
    attempts: usize,
    tenants: SmallVec<[Ticket; 1]>,
    lease: Lease,
    /// The earliest deadline that an alarm is set for.
    pub(crate) alarm: Moment,
}

#[derive(Debug)]
enum Lease {
    Vacant,
    Asking { tenure: TenureId, queued: bool },
    Held(Tenancy),
    Inside { token: u64, shared: bool },
}

#[derive(Debug)]
struct Tenancy {
    tenure: TenureId,
    mode: Mode,
    ttl: u64,
    /// The token of the tenants inside, or the first one before any was.
    token: u64,
    last_token: u64,
    since: Moment,
    admissions: u32,
    others_wait: bool,
}

/// What the gate must know to decide.
#[derive(Clone, Copy)]
pub(crate) struct View<F> {
    pub(crate) now: Moment,
    /// Whether a lease is held for certain, with half its term left.
    pub(crate) fit: F,
    pub(crate) limits: HandoverLimits,
    pub(crate) planted: Planted,
}

impl Gate {
    pub(crate) fn new() -> Self {
        Gate {
            queue: Queue::default(),
            attempts: 0,
            tenants: SmallVec::new(),
            lease: Lease::Vacant,
            alarm: Moment::NEVER,
        }
    }

    /// A gate for the tasks nested in a tenant that has this token.
    pub(crate) fn inside(token: u64) -> Self {
        Gate { lease: Lease::Inside { token, shared: false }, ..Gate::new() }
    }

    pub(crate) fn enqueue(&mut self, waiting: Waiting) {
        self.attempts += usize::from(waiting.attempt);
        self.queue.push_back(waiting);
    }

    /// Takes a task out of the queue; false if it is not in it.
    pub(crate) fn cancel(&mut self, ticket: Ticket) -> bool {
        let place = self.queue.iter().position(|waiting| waiting.ticket == ticket);
        place.is_some_and(|place| self.take(place).is_some())
    }

    fn take(&mut self, place: usize) -> Option<Waiting> {
        let waiting = self.queue.remove(place)?;
        self.attempts -= usize::from(waiting.attempt);
        Some(waiting)
    }

    /// Takes out one task whose wait is over.
    pub(crate) fn overdue(&mut self, now: Moment) -> Option<Ticket> {
        let place = self.queue.iter().position(|waiting| waiting.deadline <= now)?;
        self.take(place).map(|waiting| waiting.ticket)
    }

    /// Takes out any one task that waits.
    pub(crate) fn dismiss(&mut self) -> Option<Ticket> {
        self.take(0).map(|waiting| waiting.ticket)
    }

    /// Takes out one task that wanted an answer at once.
    pub(crate) fn dismiss_attempt(&mut self) -> Option<Ticket> {
        if self.attempts == 0 {
            return None;
        }
        let place = self.queue.iter().position(|waiting| waiting.attempt)?;
        self.take(place).map(|waiting| waiting.ticket)
    }

    pub(crate) fn earliest_deadline(&self) -> Moment {
        self.queue.iter().map(|waiting| waiting.deadline).min().unwrap_or(Moment::NEVER)
    }

    pub(crate) fn waiting(&self) -> usize {
        self.queue.len()
    }

    /// A claim went out for the first in the queue.
    pub(crate) fn asked(&mut self, tenure: TenureId) {
        self.lease = Lease::Asking { tenure, queued: false };
    }

    /// The claim stands in the backend's queue.
    pub(crate) fn queued(&mut self) {
        if let Lease::Asking { queued, .. } = &mut self.lease {
            *queued = true;
        }
    }

    pub(crate) fn granted(&mut self, now: Moment, mode: Mode, ttl: u64, grant: Grant) {
        if let Lease::Asking { tenure, .. } = self.lease {
            self.lease = Lease::Held(Tenancy {
                tenure,
                mode,
                ttl,
                token: grant.first,
                last_token: grant.first + u64::from(grant.count.max(1)) - 1,
                since: now,
                admissions: 0,
                others_wait: false,
            });
        }
    }

    /// The claim came to nothing, or the lease ended: the tenants are out.
    pub(crate) fn ended(&mut self) -> SmallVec<[Ticket; 1]> {
        self.lease = Lease::Vacant;
        std::mem::take(&mut self.tenants)
    }

    /// Somebody waits elsewhere.
    pub(crate) fn set_others_wait(&mut self) {
        if let Lease::Held(tenancy) = &mut self.lease {
            tenancy.others_wait = true;
        }
    }

    /// A task nested in a tenant of this gate's lease keeps the lease too.
    pub(crate) fn add_nested_tenant(&mut self, ticket: Ticket) {
        self.tenants.push(ticket);
    }

    /// A tenant is done.
    pub(crate) fn depart(&mut self, ticket: Ticket) {
        self.tenants.retain(|tenant| *tenant != ticket);
    }

    /// The only tenant goes on as a reader, with this token.
    pub(crate) fn downgrade(&mut self) -> Option<u64> {
        let Lease::Held(tenancy) = &mut self.lease else { return None };
        // Something exclusive may be nested in it, and the backend may have given
        // fewer tokens than it was asked for.
        if self.tenants.len() > 1 || tenancy.token >= tenancy.last_token {
            return None;
        }
        if tenancy.mode == Mode::Exclusive {
            tenancy.mode = Mode::Shared;
            tenancy.token += 1;
        }
        Some(tenancy.token)
    }

    pub(crate) fn tenure(&self) -> Option<TenureId> {
        match &self.lease {
            Lease::Vacant | Lease::Inside { .. } => None,
            Lease::Asking { tenure, .. } => Some(*tenure),
            Lease::Held(tenancy) => Some(tenancy.tenure),
        }
    }

    /// The claim that was not answered yet.
    pub(crate) fn asking(&self) -> Option<TenureId> {
        match &self.lease {
            Lease::Asking { tenure, .. } => Some(*tenure),
            _ => None,
        }
    }

    /// Whether the backend has not said yet who is in the way.
    pub(crate) fn is_unanswered(&self) -> bool {
        matches!(self.lease, Lease::Asking { queued: false, .. })
    }

    pub(crate) fn tenants(&self) -> &[Ticket] {
        &self.tenants
    }

    pub(crate) fn is_unused(&self) -> bool {
        self.queue.is_empty()
            && self.tenants.is_empty()
            && matches!(self.lease, Lease::Vacant | Lease::Inside { .. })
    }

    /// What is to be done next; `None` when there is nothing.
    pub(crate) fn next<F: Fn(TenureId) -> bool>(&mut self, view: View<F>) -> Option<Step> {
        match &mut self.lease {
            Lease::Vacant => {
                let first = *self.queue.front()?;
                Some(self.ask(first, None, view.limits))
            }
            Lease::Asking { tenure, queued } => {
                if self.queue.is_empty() {
                    let tenure = *tenure;
                    self.lease = Lease::Vacant;
                    return Some(Step::Leave { tenure });
                }
                if *queued { self.refuse_attempt() } else { None }
            }
            Lease::Inside { token, shared } => {
                let token = *token;
                let first = self.queue.front();
                let enters = first.is_some_and(|first| {
                    self.tenants.is_empty() || (*shared && first.mode == Mode::Shared)
                });
                if !enters {
                    return self.refuse_attempt();
                }
                *shared = first.is_some_and(|first| first.mode == Mode::Shared);
                self.admit(token, true)
            }
            Lease::Held(tenancy) if self.tenants.is_empty() => {
                let tenure = tenancy.tenure;
                let Some(first) = self.queue.front() else {
                    self.lease = Lease::Vacant;
                    return Some(Step::Leave { tenure });
                };
                if !tenancy.serves(first, &view) {
                    let first = *first;
                    return Some(self.ask(first, Some(tenure), view.limits));
                }
                let handed_over = tenancy.admissions > 0;
                tenancy.admissions += 1;
                tenancy.token += u64::from(handed_over);
                let token = tenancy.token;
                self.admit(token, handed_over)
            }
            Lease::Held(tenancy) => {
                let token = tenancy.token;
                let reads = tenancy.mode == Mode::Shared;
                match self.queue.front() {
                    Some(first) if reads && first.mode == Mode::Shared => {
                        if tenancy.joined_by(first, &view) {
                            return self.admit(token, true);
                        }
                        self.take(0).map(|waiting| Step::Apart { waiting })
                    }
                    _ => self.refuse_attempt(),
                }
            }
        }
    }

    fn admit(&mut self, token: u64, handed_over: bool) -> Option<Step> {
        let ticket = self.take(0)?.ticket;
        self.tenants.push(ticket);
        Some(Step::Admit { ticket, token, handed_over })
    }

    fn refuse_attempt(&mut self) -> Option<Step> {
        self.dismiss_attempt().map(|ticket| Step::RefuseBusy { ticket })
    }

    fn ask(
        &mut self,
        first: Waiting,
        instead_of: Option<TenureId>,
        limits: HandoverLimits,
    ) -> Step {
        let waiting = u32::try_from(self.queue.len()).unwrap_or(u32::MAX);
        Step::Ask {
            first: first.ticket,
            ttl: first.ttl,
            queue: self.attempts < self.queue.len(),
            // Enough for the queue as it is and some company; no more than that,
            // to keep a key's counter behind the server's clock.
            tokens: waiting.saturating_mul(2).saturating_add(6).min(limits.count.saturating_add(2)),
            instead_of,
        }
    }
}

impl Tenancy {
    fn is_over<F>(&self, view: &View<F>) -> bool {
        view.now.since(self.since) >= view.limits.tenure
    }

    fn suits(&self, next: &Waiting) -> bool {
        next.mode == self.mode && next.ttl == self.ttl
    }

    fn serves<F: Fn(TenureId) -> bool>(&self, next: &Waiting, view: &View<F>) -> bool {
        if !self.suits(next) {
            return false;
        }
        if self.admissions == 0 {
            return true;
        }
        // The last token is kept for a downgrade.
        let token_left = self.token + 1 < self.last_token
            || (self.mode == Mode::Shared && self.token < self.last_token);
        let fit = (view.fit)(self.tenure) || view.planted.is(Plant::HandoverIgnoresDeadline);
        fit && token_left && self.admissions <= view.limits.count && !self.is_over(view)
    }

    fn joined_by<F: Fn(TenureId) -> bool>(&self, next: &Waiting, view: &View<F>) -> bool {
        self.suits(next) && (view.fit)(self.tenure) && !self.others_wait && !self.is_over(view)
    }
}
