//! Pure: the tasks of this process that want one key.
//!
//! Tasks queue here, first in first out, and one claim goes out for all of them.
//!
//! ```text
//!            Acquire                 granted
//!   Vacant ---------->  Acquiring  ---------->  Held  --- Admit --> a holder
//!     ^                     |                     |
//!     |<-- Release ---------+ nobody waits        | the last holder left:
//!     |<-- Release: nobody waits -----------------+   - the next task fits: Admit, a
//!     |<-- lost ----------------------------------+     hand-over without the network
//!     |<-- Retire: a reader may not join ---------+   - else: Acquire instead of it
//! ```
//!
//! A hand-over is allowed if the lease can be handed over (held for certain, with
//! half its term left), has the mode and ttl that the next task wants, has tokens
//! left, and was not passed on too often or for too long. Otherwise one call gives the
//! lease up and asks again, behind whoever waits elsewhere.
//!
//! The round trip of that call would make the whole queue wait. So when nobody seems to
//! wait elsewhere (the claim did not have to queue), the lease is *extended* while
//! hand-overs go on: a renewal asks for new tokens. If the answer brings them, nobody
//! waited elsewhere when it was given, and hand-overs are counted anew from the moment
//! the renewal was sent. If somebody did, the lease ends as before.
//!
//! Readers that come while readers are inside join them under the same conditions,
//! unless a writer waits here (first in, first out) or somebody waits elsewhere. If
//! one may not join, the lease is *retired*: it goes on in a gate of its own until its
//! readers have left, and this gate asks for a new one, which the next readers join.
//! So the readers of a process share a lease, however many come, and each lease is
//! joined for a short time only.
//!
//! A *nested* gate serves the tasks inside one holder: it never acquires or releases,
//! it only lets them in one after the other.
//!
//! Invariants: the holders are one exclusive task or any number of shared ones; each
//! admission of an exclusive holder uses a token of its own, and they rise; nobody is
//! admitted on a lease that is not held.
//!
//! The gate decides one [`Step`] at a time; the engine carries it out and asks again
//! until there is none.

use super::types::{ClaimId, HandoverLimits, Ticket, Waiter};
use crate::claim::{Grant, Mode};
use crate::clock::Moment;
use crate::collections::ShortQueue;
use crate::planted_bug::{Bug, PlantedBug};

/// The next thing that the engine must do for a gate.
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
    /// The lease goes on without this gate, until those inside have left.
    Retire,
    /// More tokens are wanted for the lease, while it is handed over.
    Extend {
        claim: ClaimId,
        tokens: u32,
    },
    Acquire {
        first: Ticket,
        ttl: u64,
        queue: bool,
        tokens: u32,
        instead_of: Option<ClaimId>,
    },
    Release {
        claim: ClaimId,
    },
}

#[derive(Debug)]
pub(crate) struct Gate {
    /// The tasks that wait, first in, first out.
    waitlist: ShortQueue<Waiter>,
    attempts: usize,
    holders: ShortQueue<Ticket>,
    lease: Lease,
    /// The earliest deadline that a timer is set for.
    pub(crate) timer_deadline: Moment,
    /// Whether the wait of some tasks is over, and only the first answer of the backend is
    /// waited for.
    pub(crate) awaits_first_answer: bool,
}

#[derive(Debug)]
enum Lease {
    Vacant,
    Acquiring { claim: ClaimId, queued: bool },
    Held(HeldLease),
    Nested { token: u64, shared: bool },
}

#[derive(Debug)]
struct HeldLease {
    claim: ClaimId,
    mode: Mode,
    ttl: u64,
    /// The token of the holders inside, or the first one before any was.
    token: u64,
    /// How many tokens come after that one.
    tokens_left: u32,
    since: Moment,
    admissions: u32,
    others_wait: bool,
    /// Whether the claim stood in the backend's queue.
    was_queued: bool,
    extension: Extension,
}

/// Whether a lease is to be extended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Extension {
    NotAsked,
    Asked,
    /// Somebody waits elsewhere, or the backend gives no more tokens.
    Refused,
}

/// What the gate must know to decide.
#[derive(Clone, Copy)]
pub(crate) struct View<F> {
    pub(crate) now: Moment,
    /// Whether a lease is held for certain, with half its term left.
    pub(crate) can_hand_over: F,
    pub(crate) limits: HandoverLimits,
    pub(crate) planted: PlantedBug,
}

impl Gate {
    pub(crate) fn new() -> Self {
        Gate {
            waitlist: ShortQueue::default(),
            attempts: 0,
            holders: ShortQueue::default(),
            lease: Lease::Vacant,
            timer_deadline: Moment::NEVER,
            awaits_first_answer: false,
        }
    }

    /// A gate for the tasks nested in a holder that has this token.
    pub(crate) fn nested(token: u64) -> Self {
        Gate { lease: Lease::Nested { token, shared: false }, ..Gate::new() }
    }

    pub(crate) fn enqueue(&mut self, waiter: Waiter) {
        self.attempts += usize::from(waiter.attempt);
        self.waitlist.push_back(waiter);
    }

    /// Takes a task out of the queue; false if it is not in it.
    pub(crate) fn cancel(&mut self, ticket: Ticket) -> bool {
        let place = self.waitlist.iter().position(|waiter| waiter.ticket == ticket);
        place.is_some_and(|place| self.remove(place).is_some())
    }

    fn remove(&mut self, place: usize) -> Option<Waiter> {
        let waiter = self.waitlist.remove(place)?;
        self.attempts -= usize::from(waiter.attempt);
        Some(waiter)
    }

    /// Takes out one task whose deadline has passed.
    pub(crate) fn overdue(
        &mut self,
        now: Moment,
        deadline: impl Fn(&Waiter) -> Moment,
    ) -> Option<Ticket> {
        let place = self.waitlist.iter().position(|waiter| deadline(waiter) <= now)?;
        self.remove(place).map(|waiter| waiter.ticket)
    }

    /// Takes out any one task that waits.
    pub(crate) fn dismiss(&mut self) -> Option<Ticket> {
        self.remove(0).map(|waiter| waiter.ticket)
    }

    /// Takes out one task that wanted an answer at once.
    pub(crate) fn dismiss_attempt(&mut self) -> Option<Ticket> {
        if self.attempts == 0 {
            return None;
        }
        let place = self.waitlist.iter().position(|waiter| waiter.attempt)?;
        self.remove(place).map(|waiter| waiter.ticket)
    }

    pub(crate) fn earliest_deadline(&self, deadline: impl Fn(&Waiter) -> Moment) -> Moment {
        self.waitlist.iter().map(deadline).min().unwrap_or(Moment::NEVER)
    }

    pub(crate) fn waiting(&self) -> usize {
        self.waitlist.len()
    }

    /// A claim went out for the first in the queue.
    pub(crate) fn acquiring(&mut self, claim: ClaimId) {
        self.lease = Lease::Acquiring { claim, queued: false };
    }

    /// The claim stands in the backend's queue.
    pub(crate) fn queued(&mut self) {
        if let Lease::Acquiring { queued, .. } = &mut self.lease {
            *queued = true;
        }
    }

    pub(crate) fn granted(&mut self, now: Moment, mode: Mode, ttl: u64, grant: Grant) {
        if let Lease::Acquiring { claim, queued } = self.lease {
            self.lease = Lease::Held(HeldLease {
                claim,
                mode,
                ttl,
                token: grant.first,
                tokens_left: grant.count.saturating_sub(1),
                since: now,
                admissions: 0,
                others_wait: false,
                // Who had to queue has company elsewhere.
                extension: if queued { Extension::Refused } else { Extension::NotAsked },
                was_queued: queued,
            });
        }
    }

    /// The lease has these tokens from now on, and nobody waited elsewhere when the
    /// request was sent.
    pub(crate) fn extended(&mut self, sent: Moment, grant: Grant) {
        let Lease::Held(held) = &mut self.lease else { return };
        if held.mode != Mode::Exclusive || grant.first <= held.token {
            held.extension = Extension::Refused; // downgraded meanwhile
            return;
        }
        // The next one admitted has the first of the new tokens.
        held.token = grant.first - 1;
        held.tokens_left = grant.count.max(1);
        held.since = sent;
        held.admissions = 1;
        held.extension = Extension::NotAsked;
    }

    /// The lease is not extended.
    pub(crate) fn not_extended(&mut self) {
        if let Lease::Held(held) = &mut self.lease
            && held.extension == Extension::Asked
        {
            held.extension = Extension::Refused;
        }
    }

    /// The claim came to nothing, or the lease ended: the holders are out.
    pub(crate) fn ended(&mut self) -> ShortQueue<Ticket> {
        self.lease = Lease::Vacant;
        std::mem::take(&mut self.holders)
    }

    /// Somebody waits elsewhere.
    pub(crate) fn set_others_wait(&mut self) {
        if let Lease::Held(held) = &mut self.lease {
            held.others_wait = true;
        }
    }

    /// A task nested in a holder of this gate's lease keeps the lease too.
    pub(crate) fn add_nested_holder(&mut self, ticket: Ticket) {
        self.holders.push_back(ticket);
    }

    /// A holder has released the lock.
    pub(crate) fn remove_holder(&mut self, ticket: Ticket) {
        let place = self.holders.iter().position(|holder| *holder == ticket);
        place.and_then(|place| self.holders.remove(place));
    }

    /// The only holder goes on as a reader, with this token.
    pub(crate) fn downgrade(&mut self) -> Option<u64> {
        let Lease::Held(held) = &mut self.lease else { return None };
        // Something exclusive may be nested in it, and the backend may have given
        // fewer tokens than it was asked for.
        if self.holders.len() > 1 || held.tokens_left == 0 {
            return None;
        }
        if held.mode == Mode::Exclusive {
            held.mode = Mode::Shared;
            held.next_token();
        }
        Some(held.token)
    }

    pub(crate) fn claim(&self) -> Option<ClaimId> {
        match &self.lease {
            Lease::Vacant | Lease::Nested { .. } => None,
            Lease::Acquiring { claim, .. } => Some(*claim),
            Lease::Held(held) => Some(held.claim),
        }
    }

    /// The claim that was not answered yet.
    pub(crate) fn acquiring_claim(&self) -> Option<ClaimId> {
        match &self.lease {
            Lease::Acquiring { claim, .. } => Some(*claim),
            _ => None,
        }
    }

    /// Whether the backend has not said yet who is in the way.
    pub(crate) fn is_unanswered(&self) -> bool {
        matches!(self.lease, Lease::Acquiring { queued: false, .. })
    }

    /// Whether the lease was held by somebody else when it was asked for.
    pub(crate) fn was_queued(&self) -> bool {
        matches!(&self.lease, Lease::Held(held) if held.was_queued)
    }

    /// Whether a task that was just put into the queue stands behind somebody of this
    /// process, or behind a claim that the backend queued. Else only an answer of the
    /// backend is missing, which may let it in.
    pub(crate) fn is_behind(&self, ticket: Ticket, mode: Mode) -> bool {
        let Some(first) = self.waitlist.front() else { return false };
        let is_next = first.ticket == ticket || (first.mode, mode) == (Mode::Shared, Mode::Shared);
        !(is_next && self.is_unanswered())
    }

    /// A gate with this one's lease and those inside; this one is vacant from now on.
    pub(crate) fn retire(&mut self) -> Gate {
        Gate {
            lease: std::mem::replace(&mut self.lease, Lease::Vacant),
            holders: std::mem::take(&mut self.holders),
            ..Gate::new()
        }
    }

    pub(crate) fn holders(&self) -> &ShortQueue<Ticket> {
        &self.holders
    }

    pub(crate) fn is_unused(&self) -> bool {
        self.waitlist.is_empty()
            && self.holders.is_empty()
            && matches!(self.lease, Lease::Vacant | Lease::Nested { .. })
    }

    /// What is to be done next; `None` when there is nothing.
    pub(crate) fn next<F: Fn(ClaimId) -> bool>(&mut self, view: View<F>) -> Option<Step> {
        match &mut self.lease {
            Lease::Vacant => {
                let first = *self.waitlist.front()?;
                Some(self.acquire(first, None, view.limits))
            }
            Lease::Acquiring { claim, queued } => {
                if self.waitlist.is_empty() {
                    let claim = *claim;
                    self.lease = Lease::Vacant;
                    return Some(Step::Release { claim });
                }
                if *queued { self.refuse_attempt() } else { None }
            }
            Lease::Nested { token, shared } => {
                let token = *token;
                let first = self.waitlist.front();
                let enters = first.is_some_and(|first| {
                    self.holders.is_empty()
                        || (*shared && first.mode == Mode::Shared)
                        || view.planted.is(Bug::SiblingsEnterTogether)
                });
                if !enters {
                    return self.refuse_attempt();
                }
                *shared = first.is_some_and(|first| first.mode == Mode::Shared);
                self.admit(token, true)
            }
            Lease::Held(held) if held.wants_extension(self.waitlist.front(), view.limits) => {
                held.extension = Extension::Asked;
                let claim = held.claim;
                Some(Step::Extend { claim, tokens: self.tokens_wanted(view.limits) })
            }
            Lease::Held(held) if self.holders.is_empty() => {
                let claim = held.claim;
                let Some(first) = self.waitlist.front() else {
                    self.lease = Lease::Vacant;
                    return Some(Step::Release { claim });
                };
                if !held.serves(first, &view) {
                    if held.extension == Extension::Asked && held.suits(first) {
                        return None; // its answer comes sooner than that of a new claim
                    }
                    let first = *first;
                    return Some(self.acquire(first, Some(claim), view.limits));
                }
                let handed_over = held.admissions > 0;
                held.admissions += 1;
                if handed_over {
                    held.next_token();
                }
                let token = held.token;
                self.admit(token, handed_over)
            }
            Lease::Held(held) => {
                let token = held.token;
                let reads = held.mode == Mode::Shared;
                match self.waitlist.front() {
                    Some(first) if reads && first.mode == Mode::Shared => {
                        if held.joined_by(first, &view) {
                            return self.admit(token, true);
                        }
                        Some(Step::Retire)
                    }
                    _ => self.refuse_attempt(),
                }
            }
        }
    }

    fn admit(&mut self, token: u64, handed_over: bool) -> Option<Step> {
        let ticket = self.remove(0)?.ticket;
        self.holders.push_back(ticket);
        Some(Step::Admit { ticket, token, handed_over })
    }

    fn refuse_attempt(&mut self) -> Option<Step> {
        self.dismiss_attempt().map(|ticket| Step::RefuseBusy { ticket })
    }

    fn acquire(
        &mut self,
        first: Waiter,
        instead_of: Option<ClaimId>,
        limits: HandoverLimits,
    ) -> Step {
        Step::Acquire {
            first: first.ticket,
            ttl: first.ttl,
            queue: self.attempts < self.waitlist.len(),
            tokens: self.tokens_wanted(limits),
            instead_of,
        }
    }

    /// Enough tokens for the tasks in the queue if they come again and again; no more than
    /// that, to keep a key's counter behind the server's clock.
    fn tokens_wanted(&self, limits: HandoverLimits) -> u32 {
        let waiting = u32::try_from(self.waitlist.len()).unwrap_or(u32::MAX);
        waiting.saturating_mul(8).saturating_add(6).min(limits.count.saturating_add(2))
    }
}

impl HeldLease {
    fn next_token(&mut self) {
        self.token += 1;
        self.tokens_left = self.tokens_left.saturating_sub(1);
    }

    fn is_over<F>(&self, view: &View<F>) -> bool {
        view.now.since(self.since) >= view.limits.time
    }

    fn suits(&self, next: &Waiter) -> bool {
        next.mode == self.mode && next.ttl == self.ttl
    }

    fn wants_extension(&self, next: Option<&Waiter>, limits: HandoverLimits) -> bool {
        self.extension == Extension::NotAsked
            && self.mode == Mode::Exclusive
            && !self.others_wait
            // Somebody was admitted since it was extended last.
            && self.admissions >= limits.extend_after.max(2)
            && next.is_some_and(|next| self.suits(next))
    }

    fn serves<F: Fn(ClaimId) -> bool>(&self, next: &Waiter, view: &View<F>) -> bool {
        if !self.suits(next) {
            return false;
        }
        if self.admissions == 0 {
            return true;
        }
        // The last token is kept for a downgrade.
        let kept = u32::from(self.mode != Mode::Shared);
        let token_left = self.tokens_left > kept;
        let fit = (view.can_hand_over)(self.claim) || view.planted.is(Bug::HandoverIgnoresDeadline);
        fit && token_left && self.admissions <= view.limits.count && !self.is_over(view)
    }

    fn joined_by<F: Fn(ClaimId) -> bool>(&self, next: &Waiter, view: &View<F>) -> bool {
        self.suits(next)
            && (view.can_hand_over)(self.claim)
            && !self.others_wait
            && !self.is_over(view)
    }
}
