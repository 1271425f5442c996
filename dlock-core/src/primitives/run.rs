//! Work under a lock, which stops when the lock is lost.

use std::future::Future;
use std::pin::Pin;
use std::task::{Context, Poll, Waker};

use pin_project_lite::pin_project;
use smallvec::SmallVec;

use crate::claim::LossReason;
use crate::driver::TicketRef;
use crate::error::{BodyStatus, Result};
use crate::machine::LeaseStatus;
use crate::primitives::hold::Hold;
use crate::primitives::reentry::{Frame, Inside};

/// Wakes a task when a lock is lost, until it is dropped.
pub(crate) struct Watch<'a> {
    hold: &'a Hold,
    waker: Option<Waker>,
}

impl<'a> Watch<'a> {
    pub(crate) fn new(hold: &'a Hold) -> Self {
        Watch { hold, waker: None }
    }

    pub(crate) fn poll(&mut self, cx: &mut Context<'_>) -> Poll<LossReason> {
        // Register first, then look, so that a loss in between is seen.
        if !self.waker.as_ref().is_some_and(|waker| waker.will_wake(cx.waker())) {
            self.unregister();
            self.waker = Some(cx.waker().clone());
            let TicketRef { shard, ticket } = self.hold.ticket_ref();
            self.hold.core().look(shard, |machine| {
                if let Some(wakers) = machine.payload_mut(ticket) {
                    wakers.push(cx.waker().clone());
                }
            });
        }
        self.look()
    }

    fn look(&self) -> Poll<LossReason> {
        match self.hold.status() {
            LeaseStatus::Lost(reason) => Poll::Ready(reason),
            LeaseStatus::Held { .. } => Poll::Pending,
        }
    }

    fn unregister(&mut self) {
        let Some(waker) = self.waker.take() else { return };
        let TicketRef { shard, ticket } = self.hold.ticket_ref();
        let removed = self.hold.core().look(shard, |machine| {
            let wakers = machine.payload_mut(ticket)?;
            // Any waker of the same task will do: each watch added one.
            let place = wakers.iter().position(|other| other.will_wake(&waker))?;
            Some(wakers.swap_remove(place))
        });
        drop(removed); // here, where no lock is held
    }
}

impl Drop for Watch<'_> {
    fn drop(&mut self) {
        self.unregister();
    }
}

pin_project! {
    /// Runs a future for as long as all of some locks are held, inside their frames.
    #[must_use = "it does nothing unless it is polled"]
    pub(crate) struct Run<'a, F> {
        watches: SmallVec<[Watch<'a>; 1]>,
        began: bool,
        to_end: bool,
        #[pin]
        work: Inside<F>,
    }
}

impl<'a, F> Run<'a, F> {
    pub(crate) fn new(
        holds: impl IntoIterator<Item = &'a Hold>,
        frames: impl IntoIterator<Item = Frame>,
        future: F,
    ) -> Self {
        let watches = holds.into_iter().map(Watch::new).collect();
        Run { watches, began: false, to_end: false, work: Inside::new(frames, future) }
    }

    /// Lets a future that has started run to its end when a lock is lost.
    pub(crate) fn once_begun(self) -> Self {
        Run { to_end: true, ..self }
    }
}

impl<F: Future> Future for Run<'_, F> {
    type Output = Result<F::Output>;

    fn poll(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Self::Output> {
        let this = self.project();
        let began = std::mem::replace(this.began, true);
        if !began {
            for watch in this.watches.iter_mut() {
                if let Poll::Ready(reason) = watch.look() {
                    return Poll::Ready(Err(watch.hold.lost_error(&reason, BodyStatus::NotRun)));
                }
            }
        } else if !*this.to_end {
            unless_lost(this.watches, cx)?;
        }
        if let Poll::Ready(value) = this.work.poll(cx) {
            return Poll::Ready(Ok(value));
        }
        if !began && !*this.to_end {
            // Work that ends at its first poll, which is common, registers nothing.
            unless_lost(this.watches, cx)?;
        }
        Poll::Pending
    }
}

/// Registers with all locks, or fails if one is lost.
fn unless_lost(watches: &mut [Watch<'_>], cx: &mut Context<'_>) -> Result<()> {
    for watch in watches {
        if let Poll::Ready(reason) = watch.poll(cx) {
            return Err(watch.hold.lost_error(&reason, BodyStatus::Cancelled));
        }
    }
    Ok(())
}
