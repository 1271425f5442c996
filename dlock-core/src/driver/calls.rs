//! How calls get to the backend.
//!
//! A backend that [combines](crate::Capabilities::combines) calls gets them in
//! batches, from a [`BatchQueue`]. Other backends get each call by itself, except
//! renewals, which have a call for many.

use std::sync::Arc;

use super::Core;
use crate::backend::Backend;
use crate::batch_queue::{BatchLimits, BatchQueue, Full, Priority, Slot};
use crate::claim::{Answer, Claim, Request};
use crate::error::{Error, ErrorKind};
use crate::machine::CallId;

/// How many batches are in flight: one is worked on by the backend while the next is
/// on its way.
const IN_FLIGHT: usize = 2;
/// How many calls may wait to be sent.
const PENDING: usize = 100_000;

/// A call that waits to be sent, and where its answer goes.
pub(super) struct PendingCall {
    shard: usize,
    call: CallId,
    request: Request,
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
        let Some(queue) = &self.pending_calls else { return self.send_one_by_one(shard, calls) };
        for (call, request) in calls {
            let priority = match request {
                Request::Acquire(_) => Priority::Normal,
                Request::Renew(_) | Request::Release(..) => Priority::High,
            };
            match queue.push(PendingCall { shard, call, request }, 1, priority) {
                Ok(None) => {}
                Ok(Some(slot)) => {
                    if self.spawn(send_batches(self.clone(), slot)).is_err() {
                        for PendingCall { shard, call, request } in queue.drain() {
                            self.fail(shard, call, &request);
                        }
                    }
                }
                Err(Full(PendingCall { shard, call, request })) => {
                    let full = Error::new(ErrorKind::Overloaded, request.operation()).saying(
                        format!("{PENDING} calls wait to be sent to the backend; shed load"),
                    );
                    self.answered(shard, call, request.failed(full));
                }
            }
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

async fn send_batches(core: Arc<Core>, mut slot: Slot<PendingCall>) {
    let mut batch = Vec::new();
    while slot.next_batch(&mut batch) {
        let (calls, requests): (Vec<_>, Vec<_>) = batch
            .drain(..)
            .map(|PendingCall { shard, call, request }| ((shard, call), request))
            .unzip();
        let made = tokio::time::timeout(core.call_timeout, core.backend.combined(&requests)).await;
        let mut answers = made.unwrap_or_default().into_iter();
        for ((shard, call), request) in calls.into_iter().zip(requests) {
            let answer = answers.next().unwrap_or_else(|| request.unanswered());
            core.answered(shard, call, answer);
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
