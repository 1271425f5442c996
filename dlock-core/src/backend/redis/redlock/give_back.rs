//! Giving back: votes of a try that failed, behind the request for them, and what a node did
//! not confirm, again and again.

use std::sync::atomic::Ordering;
use std::sync::{Arc, Weak};
use std::time::{Duration, Instant};

use redis::Value;

use super::calls::Flight;
use super::node::Then;
use super::owed::GiveBack;
use super::quorum::{Ask, Round};
use super::quorum_claim::QuorumClaim;
use super::{COMBINED, Shared, codec};
use crate::claim::Request;
use crate::error::{ErrorKind, Operation, Result};

/// How often what a node owes is asked for.
const COLLECT: Duration = Duration::from_millis(300);

impl Shared {
    /// Gives something back at a node later, and again.
    pub(super) fn owe(
        self: &Arc<Self>,
        place: usize,
        request: &Request,
        round: &Round,
        doubt: bool,
    ) {
        let claim = request.claim();
        let what = GiveBack {
            name: self.names.quorum(&claim.key),
            mark: round.mark(),
            place: matches!(round.ask, Ask::Release { .. }),
        };
        let node = &self.nodes[place];
        node.owed.lock().add(self.clock.now(), what, claim.ttl, doubt);
        if let Some(runtime) = self.runtime.get()
            && !node.collecting.swap(true, Ordering::AcqRel)
        {
            runtime.spawn(collect(Arc::downgrade(self), place));
        }
    }

    /// Takes votes back at one node, behind the request for them. Nobody waits for it.
    pub(super) fn give_back(
        self: &Arc<Self>,
        flight: &Flight,
        place: usize,
        asks: Vec<(usize, Ask)>,
    ) {
        let requests = flight.requests.clone();
        let undone = Undone { shared: self.clone(), requests, asks: asks.clone(), place };
        let undone = Arc::new(undone);
        let heard = undone.clone();
        let done = Box::new(move |answer: Option<Result<Value>>| heard.heard(answer));
        let until = Instant::now() + self.call_timeout;
        let then = Then { operation: Operation::Release, until, done };
        if let Err(error) = self.send(place, self.said(flight, &asks), then) {
            undone.heard(Some(Err(error)));
        }
    }
}

/// Votes that are taken back at one node.
struct Undone {
    shared: Arc<Shared>,
    requests: Vec<Request>,
    asks: Vec<(usize, Ask)>,
    place: usize,
}

impl Undone {
    fn heard(&self, answer: Option<Result<Value>>) {
        let silent = match &answer {
            Some(Ok(_)) => return,
            Some(Err(error)) => error.kind() == ErrorKind::Unknown,
            None => true,
        };
        for (call, ask) in &self.asks {
            let request = &self.requests[*call];
            let round = QuorumClaim::unknown(self.shared.rules, request.claim().owner)
                .round_of(*ask, request.claim().ttl);
            self.shared.owe(self.place, request, &round, silent);
        }
    }
}

/// Gives back what a node owes, until nothing is left.
async fn collect(shared: Weak<Shared>, place: usize) {
    loop {
        tokio::time::sleep(COLLECT).await;
        let Some(shared) = shared.upgrade() else { return };
        let node = &shared.nodes[place];
        let now = shared.clock.now();
        let due = {
            let mut owed = node.owed.lock();
            let due = owed.due(now);
            if owed.is_empty() {
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
                codec::write_mark(&mut run, what.mark);
            }
            let until = Instant::now() + shared.call_timeout;
            let marks: Vec<_> = some.iter().map(|what| what.mark).collect();
            let confirmed = Arc::downgrade(&shared);
            let done = Box::new(move |answer: Option<Result<Value>>| {
                let Some(shared) = confirmed.upgrade() else { return };
                if let Some(Ok(_)) = answer {
                    let mut owed = shared.nodes[place].owed.lock();
                    let here = shared.clock.now();
                    marks.iter().for_each(|mark| owed.confirmed(here, now, *mark));
                }
            });
            let then = Then { operation: Operation::Release, until, done };
            let _ = node.send(runtime, Arc::new(run.packed()), then); // what is not sent stays owed
        }
    }
}
