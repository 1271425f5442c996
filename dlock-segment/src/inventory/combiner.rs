//! Requests of one process share calls to the store, by a [`BatchQueue`] for each
//! inventory. A busy inventory spawns a task on the driver only when its queue was empty;
//! an idle one holds nothing here.
//!
//! Each request gets its own answer. A request whose future is dropped before its batch is
//! sent is not sent.

use std::future::Future;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll, Waker};

use dlock::extension::{BatchLimits, BatchQueue, ClientExtension, Full, Priority, Slot};
use parking_lot::Mutex;
use tokio::time::Instant;

use super::unknown_outcomes::{Doubt, UnknownOutcomes};
use crate::error::{Error, Result};
use crate::store::{Answer, Id, InventoryId, Request, Snapshot, Store};

pub(super) const LIMITS: BatchLimits = BatchLimits {
    // The server works on one call while the other is on its way.
    in_flight: 2,
    // A few hundred microseconds of the server's time: 256 deductions with an id, twice
    // as many without, or 85 other requests.
    weight: 512,
    pending: if cfg!(test) { 10_000 } else { 1_000_000 },
};

/// For one home of several. The homes keep their servers busy together, and larger batches
/// cost each server less.
pub(super) const LIMITS_OF_ONE_HOME: BatchLimits = BatchLimits { in_flight: 1, ..LIMITS };

pub(crate) struct Combiner {
    store: Arc<dyn Store>,
    extension: ClientExtension,
    inventory: InventoryId,
    queue: Arc<BatchQueue<Pending>>,
}

/// A request that waits for a batch.
struct Pending {
    request: Request,
    reply: Arc<Reply>,
}

/// The place for the answer to one request.
#[derive(Default)]
pub(super) struct Reply(Mutex<ReplyState>);

#[derive(Default)]
struct ReplyState {
    waker: Option<Waker>,
    answer: Option<Result<(Snapshot, Answer)>>,
    /// The future that waited for the answer was dropped.
    abandoned: bool,
    /// It left the queue in a batch, so it may be applied.
    sent: bool,
    /// Its id is in doubt until the answer comes.
    doubt: Option<Doubt>,
}

impl Combiner {
    pub(crate) fn new(
        store: Arc<dyn Store>,
        extension: ClientExtension,
        inventory: InventoryId,
        limits: BatchLimits,
    ) -> Self {
        Combiner { store, extension, inventory, queue: BatchQueue::new(limits) }
    }

    /// Sends a request in a batch with others.
    pub(crate) fn send(self: &Arc<Self>, request: Request) -> Sent {
        let reply = Arc::<Reply>::default();
        let weight = request.class().weight;
        match self.queue.push(Pending { request, reply: reply.clone() }, weight, Priority::Normal) {
            Ok(None) => {}
            Ok(Some(slot)) => {
                let sender = Sender { combiner: self.clone(), finished: false };
                // If the driver has ended, the sender is dropped and answers every request.
                let _ = self.extension.spawn(sender.run(slot));
            }
            Err(Full(pending)) => pending.reply.set(Err(overloaded())),
        }
        Sent { reply, done: false }
    }

    /// The capacity for pending requests, and the number of calls in flight.
    #[cfg(test)]
    pub(super) fn footprint(&self) -> (usize, usize) {
        self.queue.footprint()
    }

    async fn send_batch(&self, mut batch: Unanswered) {
        while !batch.requests.is_empty() {
            match self.store.apply(&self.inventory, &batch.requests).await {
                Ok((view, answers)) => {
                    let snapshot = Snapshot::from(&view);
                    // Requests that must be repeated are sent at once: each call gives
                    // back some more expired reservations.
                    let requests = std::mem::take(&mut batch.requests);
                    let replies = std::mem::take(&mut batch.replies);
                    for ((request, reply), answer) in requests.into_iter().zip(replies).zip(answers)
                    {
                        if answer == Answer::Again {
                            batch.requests.push(request);
                            batch.replies.push(reply);
                        } else {
                            reply.set(Ok((snapshot, answer)));
                        }
                    }
                }
                Err(error) => {
                    for reply in batch.replies.drain(..) {
                        reply.set(Err(error.clone()));
                    }
                    return;
                }
            }
        }
    }
}

/// Sends batches until nothing is pending. If the driver ends meanwhile, every pending
/// request gets an error.
struct Sender {
    combiner: Arc<Combiner>,
    finished: bool,
}

impl Sender {
    async fn run(mut self, mut slot: Slot<Pending>) {
        let mut batch = Vec::new();
        while slot.next_batch(&mut batch) {
            self.combiner.send_batch(Unanswered::new(&mut batch)).await;
        }
        self.finished = true;
    }
}

impl Drop for Sender {
    fn drop(&mut self) {
        if !self.finished {
            for Pending { reply, .. } in self.combiner.queue.drain() {
                reply.set(Err(driver_ended()));
            }
        }
    }
}

/// The error for requests that were not sent, so they were not applied.
fn driver_ended() -> Error {
    Error::Store(
        dlock::Error::new(dlock::ErrorKind::Unavailable, dlock::Operation::Inventory)
            .with_message("the client has shut down; connect a new one"),
    )
}

fn not_sent() -> Error {
    Error::Store(
        dlock::Error::new(dlock::ErrorKind::Unavailable, dlock::Operation::Inventory)
            .with_message("the deadline passed before the request was sent, because the store answers too slowly; try again, or give it a longer .deadline(..)"),
    )
}

fn overloaded() -> Error {
    let pending = LIMITS.pending;
    Error::Store(
        dlock::Error::new(dlock::ErrorKind::Overloaded, dlock::Operation::Inventory)
            .with_message(format!("{pending} requests of this inventory wait to be sent; send fewer, e.g. with rate_limit_per_process()")),
    )
}

/// A batch that left the queue. When it is dropped, requests without an answer get
/// [`Error::Unknown`].
struct Unanswered {
    requests: Vec<Request>,
    replies: Vec<Arc<Reply>>,
}

impl Unanswered {
    fn new(batch: &mut Vec<Pending>) -> Self {
        let wanted = batch.drain(..).filter(|pending| {
            let mut state = pending.reply.0.lock();
            state.sent = !state.abandoned;
            state.sent
        });
        let (requests, replies) = wanted.map(|Pending { request, reply }| (request, reply)).unzip();
        Unanswered { requests, replies }
    }
}

impl Drop for Unanswered {
    fn drop(&mut self) {
        for reply in self.replies.drain(..) {
            reply.set(Err(Error::Unknown(None)));
        }
    }
}

impl Reply {
    fn set(&self, answer: Result<(Snapshot, Answer)>) {
        let mut state = self.0.lock();
        let is_known = !matches!(answer, Err(Error::Unknown(_)));
        state.answer = Some(answer);
        let waker = state.waker.take();
        let doubt = state.doubt.take().filter(|_| is_known);
        drop(state);
        if let Some(doubt) = doubt {
            doubt.ends();
        }
        if let Some(waker) = waker {
            waker.wake();
        }
    }
}

impl Reply {
    /// Nobody waits for the answer any more. If a copy of the request may be under way, its id
    /// is in doubt until the answer comes.
    pub(super) fn leave(&self, unknown_outcomes: &UnknownOutcomes, id: &Id) {
        let mut state = self.0.lock();
        state.abandoned = true; // it is not sent from now on
        let may_come = match &state.answer {
            None | Some(Err(Error::Unknown(_))) => state.sent,
            Some(_) => false,
        };
        if may_come {
            state.doubt = Some(unknown_outcomes.doubt(id));
        }
    }
}

/// The future of a request that was queued or sent.
pub(crate) struct Sent {
    reply: Arc<Reply>,
    done: bool,
}

impl Sent {
    pub(super) fn reply(&self) -> Arc<Reply> {
        self.reply.clone()
    }

    /// Waits for the answer until the deadline.
    pub(crate) async fn until(mut self, deadline: Instant) -> Result<(Snapshot, Answer)> {
        if let Ok(answered) = tokio::time::timeout_at(deadline, &mut self).await {
            return answered;
        }
        let mut state = self.reply.0.lock();
        state.abandoned = true;
        Err(if state.sent { Error::Unknown(None) } else { not_sent() })
    }
}

impl Future for Sent {
    type Output = Result<(Snapshot, Answer)>;

    fn poll(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Self::Output> {
        let mut state = self.reply.0.lock();
        if let Some(answer) = state.answer.take() {
            drop(state);
            self.done = true;
            return Poll::Ready(answer);
        }
        let before = state.waker.replace(cx.waker().clone());
        drop(state);
        drop(before); // here, where no lock is held
        Poll::Pending
    }
}

impl Drop for Sent {
    fn drop(&mut self) {
        if !self.done {
            let mut state = self.reply.0.lock();
            state.abandoned = true;
            let waker = state.waker.take();
            drop(state);
            drop(waker);
        }
    }
}
