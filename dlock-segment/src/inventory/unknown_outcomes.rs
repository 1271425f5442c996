//! Requests under an id whose outcome is not known yet.
//!
//! ```text
//! sent -- an answer ------------------------------> known
//! sent -- no answer, or its future is dropped ----> in doubt: a copy may still be under way
//! in doubt -- sent again, and a record is found --> known
//! in doubt -- sent again, and refused ------------> resolve the id:
//!                a tombstone -> the refusal is final: no copy can have an effect any more
//!                a record ----> a copy was applied; the same request is answered from it
//! in doubt -- the deadline -----------------------> `Unknown`; the id stays in doubt
//! ```
//!
//! A refusal leaves no record, so it says nothing about a copy that is still on an old
//! connection. Waiting for that copy, as the locks do with a release, would only make it
//! unlikely. A tombstone makes it impossible, and costs one call. Its price: after a lost
//! answer *and* a refusal, the id is refused for good.

use std::collections::VecDeque;
use std::sync::Arc;
use std::time::Duration;

use hashbrown::HashSet;
use parking_lot::Mutex;
use tokio::time::Instant;

use super::combiner::Combiner;
use crate::error::{Error, OperationId, Result};
use crate::store::{Answer, Id, Record, Request, Snapshot, Status};

/// The pause before a request whose outcome is not known is sent again.
const RETRY_PAUSE: Duration = Duration::from_millis(100);
/// How many ids in doubt a process remembers; the oldest is forgotten first.
const REMEMBERED: usize = 10_000;

/// The ids in doubt of this process, so that the same call again settles them.
#[derive(Default)]
pub(super) struct UnknownOutcomes(Mutex<Ids>);

#[derive(Default)]
struct Ids {
    known: HashSet<Id>,
    order: VecDeque<Id>,
}

impl UnknownOutcomes {
    pub(super) fn contains(&self, id: &Id) -> bool {
        self.0.lock().known.contains(id)
    }

    fn insert(&self, id: &Id) {
        let mut ids = self.0.lock();
        if ids.known.insert(id.clone()) {
            ids.order.push_back(id.clone());
        }
        if ids.order.len() > REMEMBERED
            && let Some(oldest) = ids.order.pop_front()
        {
            ids.known.remove(&oldest);
        }
    }

    fn remove(&self, id: &Id) {
        let mut ids = self.0.lock();
        if ids.known.remove(id) {
            ids.order.retain(|other| other != id);
        }
    }

    /// Sends a request until its outcome is known, or until the deadline. Unless `is_final`,
    /// "sold out" is answered as it is, and the id stays in doubt: another home may have units.
    pub(super) async fn settle(
        &self,
        combiner: &Arc<Combiner>,
        request: Request,
        id: &Id,
        deadline: Instant,
        is_final: bool,
    ) -> Result<(Snapshot, Answer)> {
        // Only these have an effect of their own under the id. A late copy of the others
        // changes what the next call about the reservation answers.
        let creates = matches!(
            request,
            Request::Deduct { .. }
                | Request::Reserve { .. }
                | Request::Refund { .. }
                | Request::Restock { .. }
                | Request::WriteOff { .. }
                | Request::Import { .. }
        );
        let mut attempt = Attempt { unknown_outcomes: self, id, creates, sent: false };
        let mut in_doubt = creates && self.contains(id);
        loop {
            attempt.sent = true;
            let refused = match combiner.send(request.clone()).until(deadline).await {
                Err(Error::Unknown(_)) => None,
                // This one was not applied, but an earlier one may have been.
                Err(Error::Store(_)) if in_doubt => None,
                // The doubt may be of another call under the same id, dropped meanwhile.
                Ok((snapshot, answer))
                    if creates && is_refusal(&answer) && (in_doubt || self.contains(id)) =>
                {
                    if !is_final && matches!(answer, Answer::SoldOut { .. }) {
                        return Ok((snapshot, answer));
                    }
                    Some((snapshot, answer))
                }
                known => return attempt.ends(known),
            };
            in_doubt = true;
            if let Some(refused) = refused {
                let resolve = Request::Resolve { operation: id.clone() };
                match combiner.send(resolve).until(deadline).await {
                    Ok((_, Answer::Found(Record { status: Status::Tombstone, .. }))) => {
                        return attempt.ends(Ok(refused));
                    }
                    // No room for a tombstone: the doubt stays.
                    Ok((_, Answer::Full)) => {}
                    Ok(_) => {
                        in_doubt = false;
                        continue;
                    }
                    Err(Error::Unknown(_) | Error::Store(_)) => {}
                    Err(error) => return attempt.ends(Err(error)),
                }
            }
            if Instant::now() + RETRY_PAUSE >= deadline {
                return Err(Error::Unknown(Some(OperationId(id.clone()))));
            }
            tokio::time::sleep(RETRY_PAUSE).await;
        }
    }
}

fn is_refusal(answer: &Answer) -> bool {
    !matches!(answer, Answer::Found(_) | Answer::Unreadable)
}

/// A request that is being sent. If it ends without an answer, its id is in doubt.
struct Attempt<'a> {
    unknown_outcomes: &'a UnknownOutcomes,
    id: &'a Id,
    creates: bool,
    sent: bool,
}

impl Attempt<'_> {
    fn ends<T>(mut self, known: T) -> T {
        self.sent = false;
        if self.creates {
            self.unknown_outcomes.remove(self.id);
        }
        known
    }
}

impl Drop for Attempt<'_> {
    fn drop(&mut self) {
        if self.sent && self.creates {
            self.unknown_outcomes.insert(self.id);
        }
    }
}
