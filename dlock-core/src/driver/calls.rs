//! How calls get to the backend.
//!
//! A backend that combines calls ([`Capabilities::max_batch`]) gets them in
//! batches, from a [`BatchQueue`]. Other backends get each call by itself, except
//! renewals, which have a call for many; so many of them at once and no more.

use std::collections::VecDeque;
use std::sync::Arc;
use std::time::Duration;

use smallvec::SmallVec;
use tokio::sync::Semaphore;
use tokio::sync::mpsc::UnboundedSender;

use super::{Core, no_driver_in_child};
use crate::backend::{Backend, Batch, Capabilities};
use crate::batch_queue::{BatchLimits, BatchQueue, Full, Priority, Slot};
use crate::claim::{Answer, Mode, Request};
use crate::clock::Moment;
use crate::error::{Error, ErrorKind};
use crate::machine::CallId;

/// No call is given up earlier than this, however short its lease.
const SHORTEST_CALL: Duration = Duration::from_millis(10);
/// The most calls that are made at the same time and not combined.
pub(super) const MAX_SINGLE_CALLS: usize = 256;
/// How many calls may wait to be sent.
const PENDING: usize = 100_000;

/// A call that waits to be sent, and where its answer goes.
pub(super) struct PendingCall {
    shard: usize,
    call: CallId,
    request: Request,
    /// The deadline of the answer.
    deadline: Moment,
}

/// The slots for calls that were made pending.
pub(super) type Slots = SmallVec<[Slot<PendingCall>; 2]>;

/// A queue for each partition of the backend.
pub(super) type PendingCalls = Box<[Arc<BatchQueue<PendingCall>>]>;

/// The queues for a backend; `None` if it does not combine calls.
pub(super) fn pending_calls(backend: &dyn Backend) -> Option<PendingCalls> {
    let Capabilities { max_batch: weight, in_flight, .. } = backend.capabilities();
    let limits = BatchLimits { in_flight: in_flight.max(1), weight, pending: PENDING };
    (weight > 1).then(|| (0..backend.partitions()).map(|_| BatchQueue::new(limits)).collect())
}

impl Core {
    /// Makes calls of a shard pending. The slots that are returned must be used to
    /// [send](Self::send_batches) them: calls that are pushed before that share their batches.
    pub(super) fn push(self: &Arc<Self>, shard: usize, calls: Vec<(CallId, Request)>) -> Slots {
        let mut slots = Slots::new();
        if calls.is_empty() {
            return slots;
        }
        if self.is_in_child() {
            self.refuse_in_child(shard, calls);
            return slots;
        }
        let Some(queues) = &self.pending_calls else {
            self.send_one_by_one(shard, calls);
            return slots;
        };
        for (call, request) in calls {
            let partition = if queues.len() > 1 { self.backend.partition_of(&request) } else { 0 };
            let queue = &queues[partition % queues.len()];
            let (deadline, weight) = (self.deadline_of(&request), weight_of(&request));
            let priority = match request {
                Request::Acquire(_) => Priority::Normal,
                Request::Renew(_) | Request::Release(..) => Priority::High,
            };
            let pending = PendingCall { shard, call, request, deadline };
            match queue.push(pending, weight, priority) {
                Ok(slot) => slots.extend(slot),
                Err(Full(PendingCall { shard, call, request, .. })) => {
                    let full = Error::new(ErrorKind::Overloaded, request.operation()).with_message(
                        format!("{PENDING} calls already wait to be sent to the backend; send fewer requests"),
                    );
                    self.answered(shard, call, request.failed(full));
                }
            }
        }
        slots
    }

    /// Sends what is pending, in the slots that it has.
    pub(super) fn send_batches(self: &Arc<Self>, slots: Slots) {
        slots.into_iter().for_each(|slot| self.send_next(slot));
    }

    /// Sends the next batch, if anything is pending.
    fn send_next(self: &Arc<Self>, mut slot: Slot<PendingCall>) {
        let mut pending = Vec::new();
        while slot.next_batch(&mut pending) {
            let now = self.now();
            // The most patient call decides: one with a short ttl must not end the others.
            let mut deadline = now;
            let mut to = VecDeque::with_capacity(pending.len());
            let mut requests = Vec::with_capacity(pending.len());
            for call in pending.drain(..) {
                if call.deadline <= now {
                    let late = not_sent_in_time(&call.request);
                    self.answered(call.shard, call.call, call.request.failed(late));
                    continue;
                }
                deadline = deadline.max(call.deadline);
                to.push_back((call.shard, call.call));
                requests.push(call.request);
            }
            if requests.is_empty() {
                continue;
            }
            let (core, slot) = (self.clone(), Some(slot));
            let batch = BatchInFlight { core, slot, requests, to, deadline };
            let Err(batch) = self.backend.submit(Box::new(batch)) else { return };
            if self.jobs.as_ref().is_none_or(UnboundedSender::is_closed) {
                let failed = |request: &Request| request.failed(driver_ended(request));
                let answers = batch.requests().iter().map(failed).collect();
                return batch.complete(answers);
            }
            // Should the driver end now, the batch is dropped, and its calls are told.
            let _ = self.spawn(make(batch, self.backend.clone()));
            return;
        }
    }

    /// The deadline of a call that is made now: for a renewal, early enough for another
    /// try before its lease ends.
    fn deadline_of(&self, request: &Request) -> Moment {
        let ttl = request.claim().ttl;
        let timeout = match request {
            Request::Renew(_) => ttl * 3 / 10,
            Request::Acquire(_) => ttl,
            Request::Release(..) => self.call_timeout,
        };
        self.now() + timeout.clamp(SHORTEST_CALL, self.call_timeout.max(SHORTEST_CALL))
    }

    /// Sends what is pending, after a sender was lost to a panic.
    pub(super) fn resume_sending(self: &Arc<Self>) {
        let queues = self.pending_calls.iter().flatten();
        for slot in queues.filter_map(BatchQueue::slot_for_pending) {
            self.send_next(slot);
        }
    }

    fn refuse_in_child(self: &Arc<Self>, shard: usize, calls: Vec<(CallId, Request)>) {
        for (call, request) in calls {
            let error = no_driver_in_child(request.operation());
            self.answered(shard, call, request.failed(error));
        }
    }

    fn send_one_by_one(self: &Arc<Self>, shard: usize, calls: Vec<(CallId, Request)>) {
        let is_renewal = |(_, request): &(CallId, Request)| matches!(request, Request::Renew(_));
        let (renewals, others): (Vec<_>, Vec<_>) = calls.into_iter().partition(is_renewal);
        let batches = others.into_iter().map(|call| vec![call]).chain([renewals]);
        for calls in batches.filter(|calls| !calls.is_empty()) {
            let (to, requests) = calls.into_iter().map(|(call, it)| ((shard, call), it)).unzip();
            let (core, deadline) = (self.clone(), self.now() + self.call_timeout);
            let batch = BatchInFlight { core, slot: None, requests, to, deadline };
            // If the driver has ended, the batch is dropped, and its calls are told.
            let allowed = self.single_calls.clone();
            let _ = self.spawn(make_one_by_one(Box::new(batch), self.backend.clone(), allowed));
        }
    }
}

fn not_sent_in_time(request: &Request) -> Error {
    Error::new(ErrorKind::Unavailable, request.operation())
        .with_message("the backend answered too slowly, so the call was not sent in time")
}

fn driver_ended(request: &Request) -> Error {
    Error::new(ErrorKind::Unavailable, request.operation()).with_message("the driver has ended")
}

/// How much of the server's time a call takes, compared with that of an exclusive lock
/// that nobody else wants.
fn weight_of(request: &Request) -> usize {
    match request.claim().mode {
        Mode::Exclusive => 1,
        Mode::Shared | Mode::Permits { .. } => 3,
    }
}

/// A batch of calls in flight, with its slot. Calls that have no answer when it is dropped,
/// by a panic or because the runtime ended, may or may not have been made.
struct BatchInFlight {
    core: Arc<Core>,
    /// `None` once the next batch has it, and for calls that are not combined.
    slot: Option<Slot<PendingCall>>,
    requests: Vec<Request>,
    to: VecDeque<(usize, CallId)>,
    /// The deadline of the answers.
    deadline: Moment,
}

impl Batch for BatchInFlight {
    fn requests(&self) -> &[Request] {
        &self.requests
    }

    fn time_left(&self) -> Duration {
        self.deadline.since(self.core.now())
    }

    /// The next batch leaves before anybody is woken.
    fn complete(mut self: Box<Self>, answers: Vec<Answer>) {
        if let Some(slot) = self.slot.take() {
            self.core.send_next(slot);
        }
        self.answer(answers);
    }
}

impl BatchInFlight {
    fn answer(&mut self, answers: Vec<Answer>) {
        let mut answers = answers.into_iter();
        while let Some((shard, call)) = self.to.pop_front() {
            let request = &self.requests[self.requests.len() - self.to.len() - 1];
            let answer = answers.next().unwrap_or_else(|| request.unanswered());
            self.core.answered(shard, call, answer);
        }
    }
}

impl Drop for BatchInFlight {
    fn drop(&mut self) {
        self.answer(Vec::new());
        if let Some(slot) = self.slot.take() {
            drop(slot);
            self.core.resume_sending();
        }
    }
}

/// Makes calls on the driver's thread.
async fn make(batch: Box<dyn Batch>, backend: Arc<dyn Backend>) {
    let made = tokio::time::timeout(batch.time_left(), backend.call(batch.requests())).await;
    batch.complete(made.unwrap_or_default());
}

/// Makes calls for a backend that does not combine them: one alone, or renewals.
async fn make_one_by_one(
    batch: Box<dyn Batch>,
    backend: Arc<dyn Backend>,
    allowed: Arc<Semaphore>,
) {
    let requests = batch.requests();
    let Ok(_allowed) = tokio::time::timeout(batch.time_left(), allowed.acquire()).await else {
        let answers = requests.iter().map(|request| request.failed(not_sent_in_time(request)));
        let answers = answers.collect();
        return batch.complete(answers);
    };
    make(batch, backend).await;
}
