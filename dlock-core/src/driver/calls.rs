//! How calls get to the backend.
//!
//! A backend that [combines](crate::Capabilities::combines) calls gets them in
//! batches, from a [`BatchQueue`]. Other backends get each call by itself, except
//! renewals, which have a call for many.

use std::collections::VecDeque;
use std::sync::Arc;
use std::time::Duration;

use super::Core;
use crate::backend::Backend;
use crate::batch_queue::{BatchLimits, BatchQueue, Full, Priority, Slot};
use crate::claim::{Answer, Claim, Mode, Request};
use crate::clock::Moment;
use crate::error::{Error, ErrorKind};
use crate::machine::CallId;

/// How many batches are in flight: one is worked on by the backend while the next is
/// on its way.
const IN_FLIGHT: usize = 2;
/// No call is given up earlier than this, however short its lease.
const SHORTEST_CALL: Duration = Duration::from_millis(10);
/// How many calls may wait to be sent.
const PENDING: usize = 100_000;

/// A call that waits to be sent, and where its answer goes.
pub(super) struct PendingCall {
    shard: usize,
    call: CallId,
    request: Request,
    /// When it must have been answered.
    deadline: Moment,
}

pub(super) type PendingCalls = Arc<BatchQueue<PendingCall>>;

/// The queue for a backend; `None` if it does not combine calls.
pub(super) fn pending_calls(backend: &dyn Backend) -> Option<PendingCalls> {
    let weight = backend.capabilities().combines;
    let limits = BatchLimits { in_flight: IN_FLIGHT, weight, pending: PENDING };
    (weight > 1).then(|| BatchQueue::new(limits))
}

impl Core {
    /// Sends calls of a shard.
    pub(super) fn send(self: &Arc<Self>, shard: usize, calls: Vec<(CallId, Request)>) {
        if calls.is_empty() {
            return;
        }
        if self.is_in_child() {
            return self.refuse_in_child(shard, calls);
        }
        let Some(queue) = &self.pending_calls else { return self.send_one_by_one(shard, calls) };
        for (call, request) in calls {
            let (deadline, weight) = (self.deadline_of(&request), weight_of(&request));
            let priority = match request {
                Request::Acquire(_) => Priority::Normal,
                Request::Renew(_) | Request::Release(..) => Priority::High,
            };
            let pending = PendingCall { shard, call, request, deadline };
            match queue.push(pending, weight, priority) {
                Ok(None) => {}
                Ok(Some(slot)) => {
                    if self.spawn(send_batches(self.clone(), slot)).is_err() {
                        for PendingCall { shard, call, request, .. } in queue.drain() {
                            self.fail(shard, call, &request);
                        }
                    }
                }
                Err(Full(PendingCall { shard, call, request, .. })) => {
                    let full = Error::new(ErrorKind::Overloaded, request.operation()).saying(
                        format!("{PENDING} calls wait to be sent to the backend; shed load"),
                    );
                    self.answered(shard, call, request.failed(full));
                }
            }
        }
    }

    /// When a call must have been answered, counted from now: a renewal in time for
    /// another try before its lease ends.
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
        let slot = self.pending_calls.as_ref().and_then(BatchQueue::slot_for_pending);
        if let Some(slot) = slot {
            let _ = self.spawn(send_batches(self.clone(), slot));
        }
    }

    /// A child after `fork` has no driver, so nothing would ever be answered.
    fn refuse_in_child(self: &Arc<Self>, shard: usize, calls: Vec<(CallId, Request)>) {
        for (call, request) in calls {
            let error = Error::new(ErrorKind::Config, request.operation()).saying(
                "this client was made before fork() and has no driver here; make one in the child",
            );
            self.answered(shard, call, request.failed(error));
        }
    }

    fn send_one_by_one(self: &Arc<Self>, shard: usize, calls: Vec<(CallId, Request)>) {
        let mut renewals = (Vec::new(), Vec::new());
        for (call, request) in calls {
            if let Request::Renew(lease) = request {
                renewals.0.push(call);
                renewals.1.push(lease);
            } else {
                let sent = self.spawn(send_one(self.clone(), shard, call, request.clone()));
                if sent.is_err() {
                    self.fail(shard, call, &request);
                }
            }
        }
        if !renewals.0.is_empty() {
            let (calls, leases) = renewals.clone();
            if self.spawn(renew(self.clone(), shard, calls, leases)).is_err() {
                for (call, lease) in renewals.0.into_iter().zip(renewals.1) {
                    self.fail(shard, call, &Request::Renew(lease));
                }
            }
        }
    }

    /// Answers a call that was not sent, because the driver has ended.
    fn fail(self: &Arc<Self>, shard: usize, call: CallId, request: &Request) {
        let ended =
            Error::new(ErrorKind::Unavailable, request.operation()).saying("the driver has ended");
        self.answered(shard, call, request.failed(ended));
    }
}

/// How much of the server's time a call takes, compared with that of an exclusive lock
/// that nobody else wants.
fn weight_of(request: &Request) -> usize {
    match request.claim().mode {
        Mode::Exclusive => 1,
        Mode::Shared | Mode::Permits { .. } => 3,
    }
}

async fn send_batches(core: Arc<Core>, mut slot: Slot<PendingCall>) {
    let mut batch = Vec::new();
    while slot.next_batch(&mut batch) {
        let now = core.now();
        let (late, batch): (Vec<_>, Vec<_>) =
            batch.drain(..).partition(|pending| pending.deadline <= now);
        for PendingCall { shard, call, request, .. } in late {
            let late = Error::new(ErrorKind::Unavailable, request.operation())
                .saying("the backend answered too slowly, so the call was not sent in time");
            core.answered(shard, call, request.failed(late));
        }
        let Some(deadline) = batch.iter().map(|pending| pending.deadline).min() else { continue };
        let mut unanswered = Unanswered { core: &core, calls: batch.iter().map(to).collect() };
        let requests: Vec<_> = batch.into_iter().map(|pending| pending.request).collect();
        let made = tokio::time::timeout(deadline.since(now), core.backend.combined(&requests));
        let mut answers = made.await.unwrap_or_default().into_iter();
        for request in requests {
            let Some((shard, call, _)) = unanswered.calls.pop_front() else { break };
            let answer = answers.next().unwrap_or_else(|| request.unanswered());
            core.answered(shard, call, answer);
        }
    }
}

fn to(pending: &PendingCall) -> (usize, CallId, Request) {
    (pending.shard, pending.call, pending.request.clone())
}

/// Calls that were sent. Those that are still here when it is dropped, by a panic, are
/// answered as unknown, so that no claim waits for ever; and what is pending is sent.
struct Unanswered<'a> {
    core: &'a Arc<Core>,
    calls: VecDeque<(usize, CallId, Request)>,
}

impl Drop for Unanswered<'_> {
    fn drop(&mut self) {
        let panicked = !self.calls.is_empty();
        for (shard, call, request) in self.calls.drain(..) {
            self.core.answered(shard, call, request.unanswered());
        }
        if panicked {
            self.core.resume_sending();
        }
    }
}

async fn send_one(core: Arc<Core>, shard: usize, call: CallId, request: Request) {
    let made = async {
        match &request {
            Request::Acquire(claim) => Answer::Acquire(core.backend.acquire(claim).await),
            Request::Release(claim, how) => {
                Answer::Release(core.backend.release(claim, *how).await)
            }
            Request::Renew(_) => request.unanswered(), // renewals are sent together
        }
    };
    let made = tokio::time::timeout(core.call_timeout, made).await;
    core.answered(shard, call, made.unwrap_or_else(|_| request.unanswered()));
}

async fn renew(core: Arc<Core>, shard: usize, calls: Vec<CallId>, leases: Vec<Arc<Claim>>) {
    let made = tokio::time::timeout(core.call_timeout, core.backend.renew(&leases)).await;
    let mut answers = made.unwrap_or_default().into_iter();
    for (call, lease) in calls.into_iter().zip(leases) {
        let silence = || Request::Renew(lease).unanswered();
        core.answered(shard, call, answers.next().map_or_else(silence, Answer::Renew));
    }
}
