//! The future of one acquisition.

use std::future::Future;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll};
use std::time::Duration;

use crate::client::Handle;
use crate::clock::Moment;
use crate::driver::{Machine, TicketRef, Wakers, wake_only};
use crate::machine::{LockRequest, Outcome, Refusal};

/// Waits until a ticket is admitted. Dropped before that, it leaves nothing behind.
pub(super) struct Acquire<'a> {
    handle: &'a Arc<Handle>,
    stage: Stage<'a>,
}

enum Stage<'a> {
    Start(LockRequest<'a>),
    Waiting(TicketRef),
    Done,
}

/// The lock that the ticket was admitted to.
pub(super) struct Admission {
    pub(super) ticket_ref: TicketRef,
    pub(super) token: u64,
    pub(super) handed_over: bool,
    pub(super) queued: bool,
    pub(super) waited: Duration,
    pub(super) since: Moment,
}

impl<'a> Acquire<'a> {
    pub(super) fn new(handle: &'a Arc<Handle>, request: LockRequest<'a>) -> Self {
        Acquire { handle, stage: Stage::Start(request) }
    }
}

impl Future for Acquire<'_> {
    type Output = Result<Admission, Refusal>;

    fn poll(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Self::Output> {
        let core = &self.handle.core;
        let look = |machine: &mut Machine, ticket| {
            let outcome = machine.outcome(ticket);
            let before = match (&outcome, machine.payload_mut(ticket)) {
                (Outcome::Waiting, Some(wakers)) => wake_only(wakers, cx.waker()),
                _ => Wakers::new(),
            };
            (outcome, before)
        };
        let (ticket_ref, (outcome, before)) = match std::mem::replace(&mut self.stage, Stage::Done)
        {
            Stage::Start(request) => {
                let shard = core.shard_of(request.key);
                let enqueued = core.step_then(
                    shard,
                    |machine, now, actions| machine.enqueue(now, request, Wakers::new(), actions),
                    |machine, enqueued| enqueued.map(|ticket| (ticket, look(machine, ticket))),
                );
                match enqueued {
                    Ok((ticket, outcome)) => (TicketRef { shard, ticket }, outcome),
                    Err(refusal) => return Poll::Ready(Err(refusal)),
                }
            }
            Stage::Waiting(ticket_ref) => (
                ticket_ref,
                core.look(ticket_ref.shard, |machine| look(machine, ticket_ref.ticket)),
            ),
            Stage::Done => return Poll::Pending,
        };
        drop(before); // here, where no lock is held
        match outcome {
            Outcome::Waiting => {
                self.stage = Stage::Waiting(ticket_ref);
                Poll::Pending
            }
            Outcome::Admitted { token, handed_over, queued, waited, since } => {
                Poll::Ready(Ok(Admission { ticket_ref, token, handed_over, queued, waited, since }))
            }
            Outcome::Lost(reason) => {
                self.stage = Stage::Waiting(ticket_ref); // so that the ticket is forgotten
                Poll::Ready(Err(Refusal::LostEarly(reason)))
            }
            Outcome::Refused(refusal) => Poll::Ready(Err(refusal)),
        }
    }
}

impl Drop for Acquire<'_> {
    fn drop(&mut self) {
        if let Stage::Waiting(TicketRef { shard, ticket }) = self.stage {
            let core = &self.handle.core;
            let wakers =
                core.step(shard, |machine, now, actions| machine.forget(now, ticket, actions));
            drop(wakers); // here, where no lock is held
        }
    }
}
