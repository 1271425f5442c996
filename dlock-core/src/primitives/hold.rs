//! A held lock: what every guard consists of.

use std::future::Future;
use std::sync::Arc;
use std::task::Poll;
use std::time::Duration;

use super::guard::State;
use crate::claim::{LossReason, Mode, Release, ReleaseOutcome, Token};
use crate::client::Handle;
use crate::clock::Moment;
use crate::config::MAX_TTL;
use crate::driver::{Core, TicketRef, wake_only};
use crate::error::{BodyStatus, Error, ErrorKind, Operation, Result};
use crate::key::Key;
use crate::machine::LeaseStatus;
use crate::observe::Event;
use crate::primitives::reentry::{Frame, Inside};
use crate::primitives::run::{Run, Watch};

/// A held lock of any primitive. Dropping it releases the lock in the background.
pub(crate) struct Hold {
    handle: Arc<Handle>,
    ticket_ref: TicketRef,
    pub(super) key: Key,
    pub(super) mode: Mode,
    /// The key stays taken until this moment, however the hold ends.
    taken_until: Moment,
    /// Whether this is inside another guard of the same key.
    nested: bool,
    /// Whether the release was begun and observers were told.
    released: bool,
    /// Whether the outcome of the release is known, so that the ticket is void.
    settled: bool,
}

impl Hold {
    pub(crate) fn new(
        handle: Arc<Handle>,
        ticket_ref: TicketRef,
        key: Key,
        mode: Mode,
        nested: bool,
    ) -> Self {
        let taken_until = Moment::default();
        Hold { handle, ticket_ref, key, mode, taken_until, nested, released: false, settled: false }
    }

    /// Keeps the key taken until this moment, however the hold ends. A nested hold
    /// releases nothing, so it keeps nothing taken either.
    pub(crate) fn keep_taken_until(&mut self, moment: Moment) {
        if !self.nested {
            self.taken_until = moment;
        }
    }

    pub(crate) fn core(&self) -> &Core {
        &self.handle.core
    }

    pub(crate) fn ticket_ref(&self) -> TicketRef {
        self.ticket_ref
    }

    pub(crate) fn frame(&self) -> Frame {
        Frame::new(self.handle.client(), self.key.clone(), self.mode, self.ticket_ref)
    }

    pub(crate) fn status(&self) -> LeaseStatus {
        let TicketRef { shard, ticket } = self.ticket_ref;
        let now = self.handle.core.now();
        self.handle.core.look(shard, |machine| machine.status(now, ticket))
    }

    pub(super) fn state(&self) -> State {
        match self.status() {
            LeaseStatus::Held { certain: true, .. } => State::Held,
            LeaseStatus::Held { certain: false, .. } => State::Uncertain,
            LeaseStatus::Lost(_) => State::Lost,
        }
    }

    /// Limits how much longer the lock may be held.
    pub(crate) fn limit(&self, hold: Duration) {
        let TicketRef { shard, ticket } = self.ticket_ref;
        self.handle.core.step(shard, |machine, now, _| machine.limit_hold(now, ticket, hold));
    }

    /// Makes the lock shared, and returns its new token if it was exclusive.
    pub(super) fn downgrade(&mut self) -> Option<Token> {
        let TicketRef { shard, ticket } = self.ticket_ref;
        let core = &self.handle.core;
        let token =
            core.step(shard, |machine, now, actions| machine.downgrade(now, ticket, actions));
        let token = token.and_then(Token::new)?;
        self.mode = Mode::Shared;
        // Others may read under the same lease from now on: it is not this hold's to keep.
        self.taken_until = Moment::default();
        Some(token)
    }

    pub(super) fn valid_for(&self) -> Duration {
        match self.status() {
            LeaseStatus::Held { until, .. } => until.since(self.handle.core.now()),
            LeaseStatus::Lost(_) => Duration::ZERO,
        }
    }

    pub(super) async fn lost(&self) -> LossReason {
        let mut watch = Watch::new(self);
        std::future::poll_fn(|cx| watch.poll(cx)).await
    }

    pub(super) fn run<F: Future>(&self, future: F) -> Run<'_, F> {
        Run::new([self], [self.frame()], future)
    }

    pub(super) fn run_to_end<F: Future>(&self, future: F) -> Inside<F> {
        Inside::new([self.frame()], future)
    }

    pub(crate) fn lost_error(&self, reason: &LossReason, body: BodyStatus) -> Error {
        lost(&self.key, reason, body)
    }

    pub(super) async fn release(mut self, how: Release) -> Result<ReleaseOutcome> {
        let TicketRef { shard, ticket } = self.ticket_ref;
        let taken_until = self.taken_until;
        let (held, answered) = self.handle.core.step_then(
            shard,
            |machine, now, actions| {
                let held = machine.held_for(now, ticket);
                machine.release(now, ticket, at_least(how, taken_until.since(now)), actions);
                held
            },
            |machine, held| (held, machine.released(ticket)),
        );
        self.observe_release(held);
        let outcome = match answered {
            Some(outcome) => outcome,
            None => self.release_outcome().await,
        };
        self.settled = true;
        outcome.map_err(|error| error.with_key(&self.key))
    }

    /// Waits for the answer to a release. If this future is dropped, `Hold::drop`
    /// forgets the ticket and the release goes on without it.
    async fn release_outcome(&self) -> Result<ReleaseOutcome> {
        let TicketRef { shard, ticket } = self.ticket_ref;
        std::future::poll_fn(|cx| {
            let (outcome, before) = self.handle.core.look(shard, |machine| {
                let outcome = machine.released(ticket);
                let wakers = machine.payload_mut(ticket);
                (outcome, wakers.map(|wakers| wake_only(wakers, cx.waker())))
            });
            drop(before); // here, where no lock is held
            outcome.map_or(Poll::Pending, Poll::Ready)
        })
        .await
    }

    pub(super) async fn release_after(self, duration: Duration) -> Result<ReleaseOutcome> {
        let fault = if duration > MAX_TTL {
            Some("release_after is above a day; set it to a day at most")
        } else if self.mode == Mode::Shared {
            Some("release_after does not work with a shared lock; use an exclusive lock or permits")
        } else if self.nested {
            Some("release_after does not work with a nested guard; call it on the outermost guard")
        } else {
            None
        };
        let (kind, fault) = match fault {
            Some(fault) => (ErrorKind::Invalid, fault),
            None if self.handle.can_release_after() => {
                return self.release(Release::After(duration)).await;
            }
            None => (ErrorKind::Unsupported, "the backend does not support release_after"),
        };
        let error = Error::new(kind, Operation::Release)
            .with_key(&self.key)
            .with_message(format!("{fault} (the lock was released at once)"));
        let _ = self.release(Release::Now).await?;
        Err(error)
    }

    /// Tells observers of the release, once.
    fn observe_release(&mut self, held: Duration) {
        if self.released {
            return;
        }
        self.released = true;
        self.handle.core.observer.emit(&Event::Released { key: &self.key, held });
    }
}

impl Drop for Hold {
    fn drop(&mut self) {
        if self.settled {
            return;
        }
        let TicketRef { shard, ticket } = self.ticket_ref;
        let (taken_until, released) = (self.taken_until, self.released);
        let (held, wakers) = self.handle.core.step(shard, |machine, now, actions| {
            let held = machine.held_for(now, ticket);
            if !released && now < taken_until {
                machine.release(now, ticket, Release::After(taken_until.since(now)), actions);
            }
            (held, machine.forget(now, ticket, actions))
        });
        drop(wakers); // here, where no lock is held
        self.observe_release(held);
    }
}

/// The error that the lock of a key was lost.
pub(super) fn lost(key: &Key, reason: &LossReason, body: BodyStatus) -> Error {
    let advice = match body {
        BodyStatus::NotRun => "nothing was done under it, so it is safe to try again",
        BodyStatus::Cancelled => {
            "a write that was under way may or may not have happened; check it by its token before you try again"
        }
    };
    let error = Error::new(ErrorKind::Lost, Operation::Hold).with_key(key);
    error.with_message(format!("{reason}; {advice}")).with_body_status(body)
}

/// A release that keeps the key taken for `rest` at least.
fn at_least(how: Release, rest: Duration) -> Release {
    match how {
        _ if rest.is_zero() => how,
        Release::Now => Release::After(rest),
        Release::After(duration) => Release::After(duration.max(rest)),
    }
}
