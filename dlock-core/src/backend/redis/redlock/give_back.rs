//! Giving back: votes of a try that failed, behind the request for them, and what a node did
//! not confirm, again and again.

use std::sync::atomic::Ordering;
use std::sync::{Arc, Weak};
use std::time::{Duration, Instant};

use redis::Value;

use super::calls::CallBatch;
use super::node::OnReply;
use super::pending_releases::PendingRelease;
use super::quorum::{NodeRequest, Round};
use super::quorum_claim::QuorumClaim;
use super::{COMBINED, Shared, codec};
use crate::claim::Request;
use crate::error::{ErrorKind, Operation, Result};

/// How often the pending releases of a node are sent.
const COLLECT: Duration = Duration::from_millis(300);

impl Shared {
    /// Gives something back at a node later, and again.
    pub(super) fn retry_release(
        self: &Arc<Self>,
        place: usize,
        request: &Request,
        round: &Round,
        doubt: bool,
    ) {
        let claim = request.claim();
        let what = PendingRelease {
            name: self.names.quorum(&claim.key),
            attempt_id: round.attempt_id(),
            place: matches!(round.ask, NodeRequest::Release { .. }),
        };
        let node = &self.nodes[place];
        node.pending_releases.lock().add(self.clock.now(), what, claim.ttl, doubt);
        if let Some(runtime) = self.runtime.get()
            && !node.collecting.swap(true, Ordering::AcqRel)
        {
            runtime.spawn(collect(Arc::downgrade(self), place));
        }
    }

    /// Takes votes back at one node, behind the request for them. Nobody waits for it.
    pub(super) fn give_back(
        self: &Arc<Self>,
        batch: &CallBatch,
        place: usize,
        asks: Vec<(usize, NodeRequest)>,
    ) {
        let requests = batch.requests.clone();
        let undo = PendingUndo { shared: self.clone(), requests, asks: asks.clone(), place };
        let undo = Arc::new(undo);
        let listener = undo.clone();
        let done = Box::new(move |answer: Option<Result<Value>>| listener.on_reply(answer));
        let until = Instant::now() + self.call_timeout;
        let on_reply = OnReply { operation: Operation::Release, until, done };
        if let Err(error) = self.send(place, self.encode(batch, &asks), on_reply) {
            undo.on_reply(Some(Err(error)));
        }
    }
}

/// Votes that are taken back at one node.
struct PendingUndo {
    shared: Arc<Shared>,
    requests: Vec<Request>,
    asks: Vec<(usize, NodeRequest)>,
    place: usize,
}

impl PendingUndo {
    fn on_reply(&self, answer: Option<Result<Value>>) {
        let silent = match &answer {
            Some(Ok(_)) => return,
            Some(Err(error)) => error.kind() == ErrorKind::Unknown,
            None => true,
        };
        for (call, ask) in &self.asks {
            let request = &self.requests[*call];
            let round = QuorumClaim::unknown(self.shared.quorum, request.claim().owner)
                .round_of(*ask, request.claim().ttl);
            self.shared.retry_release(self.place, request, &round, silent);
        }
    }
}

/// Sends the pending releases of a node until none is left.
async fn collect(shared: Weak<Shared>, place: usize) {
    loop {
        tokio::time::sleep(COLLECT).await;
        let Some(shared) = shared.upgrade() else { return };
        let node = &shared.nodes[place];
        let now = shared.clock.now();
        let due = {
            let mut pending_releases = node.pending_releases.lock();
            let due = pending_releases.due(now);
            if pending_releases.is_empty() {
                node.collecting.store(false, Ordering::Release);
                return;
            }
            due
        };
        let Some(runtime) = shared.runtime.get() else { return };
        if !node.link.has_connection() {
            node.reconnect(runtime);
            continue;
        }
        for some in due.chunks(COMBINED) {
            let mut run = shared.run(some.len());
            for what in some {
                run.arg(&what.name);
            }
            run.write(|word| word.extend(some.iter().map(|it| if it.place { 'x' } else { 'u' })));
            codec::write_silence(&mut run, shared.longest);
            for what in some {
                codec::write_attempt_id(&mut run, what.attempt_id);
            }
            let until = Instant::now() + shared.call_timeout;
            let attempt_ids: Vec<_> = some.iter().map(|what| what.attempt_id).collect();
            let confirmed = Arc::downgrade(&shared);
            let done = Box::new(move |answer: Option<Result<Value>>| {
                let Some(shared) = confirmed.upgrade() else { return };
                if let Some(Ok(_)) = answer {
                    let mut pending_releases = shared.nodes[place].pending_releases.lock();
                    let here = shared.clock.now();
                    attempt_ids
                        .iter()
                        .for_each(|attempt_id| pending_releases.confirmed(here, now, *attempt_id));
                }
            });
            let on_reply = OnReply { operation: Operation::Release, until, done };
            let _ = node.send(runtime, Arc::new(run.packed()), on_reply); // what is not sent stays pending
        }
    }
}
