//! Requests under an id whose outcome is not known yet.
//!
//! ```text
//! queued -- its future is dropped ----------------> never sent
//! sent -- an answer ------------------------------> known
//! sent -- no answer, or its future is dropped ----> in doubt: a copy may still be under way
//! in doubt -- the answer comes after all ---------> known
//! in doubt -- sent again, and a record is found --> known
//! in doubt -- sent again, and refused ------------> resolve the id:
//!                a tombstone -> the refusal is final: no copy can have an effect any more
//!                a record ----> a copy was applied; the same request is answered from it
//!                no room -----> the refusal is answered; the id stays in doubt
//! in doubt -- the deadline -----------------------> `Unknown`; the id stays in doubt
//! ```
//!
//! A refusal leaves no record, so it says nothing about a copy that is still on an old
//! connection. Waiting for that copy, as the locks do with a release, would only make it
//! unlikely. A tombstone makes it impossible, and costs one call. Its price: after a lost
//! answer *and* a refusal, the id is refused for good.

use std::collections::VecDeque;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use dlock::Key;
use hashbrown::HashMap;
use parking_lot::Mutex;
use tokio::time::Instant;

use super::combiner::{Combiner, Reply};
use crate::error::{Error, OperationId, Result};
use crate::observe;
use crate::store::{Answer, Id, Record, Request, Snapshot, Status};

/// The pause before a request whose outcome is not known is sent again.
const RETRY_PAUSE: Duration = Duration::from_millis(100);
/// How many ids in doubt a process remembers; the oldest is forgotten first.
const REMEMBERED: usize = 10_000;

/// The ids in doubt of this process, so that the same call again settles them.
#[derive(Default)]
pub(super) struct UnknownOutcomes {
    ids: Arc<Mutex<Ids>>,
    /// How many tombstones the home has, as it last said.
    tombstones: AtomicU64,
}

#[derive(Default)]
struct Ids {
    known: HashMap<Id, Entry>,
    /// The ids by the numbers of their entries, the oldest first. Some were settled since.
    order: VecDeque<(u64, Id)>,
    numbers: u64,
}

impl Ids {
    /// Whether the entry of this number was not settled.
    fn has(&self, number: u64, id: &Id) -> bool {
        self.known.get(id).is_some_and(|entry| entry.number == number)
    }
}

struct Entry {
    number: u64,
    /// How many requests under this id may still come to the store.
    copies: u32,
}

/// A request that may still come to the store.
pub(super) struct Doubt {
    ids: Arc<Mutex<Ids>>,
    id: Id,
    number: u64,
}

impl Doubt {
    /// The answer to the request has come after all.
    pub(super) fn ends(self) {
        let mut ids = self.ids.lock();
        let Some(entry) = ids.known.get_mut(&self.id) else { return };
        if entry.number == self.number {
            entry.copies -= 1;
            if entry.copies == 0 {
                ids.known.remove(&self.id);
            }
        }
    }
}

impl UnknownOutcomes {
    /// Reports how many tombstones the home has, if that changed.
    pub(super) fn count_tombstones(&self, key: &Key, snapshot: &Snapshot) {
        let count = snapshot.tombstones;
        if self.tombstones.load(Ordering::Relaxed) != count {
            self.tombstones.store(count, Ordering::Relaxed);
            observe::tombstones(key, snapshot.home, count);
        }
    }

    pub(super) fn contains(&self, id: &Id) -> bool {
        self.ids.lock().known.contains_key(id)
    }

    /// Puts an id in doubt.
    pub(super) fn doubt(&self, id: &Id) -> Doubt {
        let mut ids = self.ids.lock();
        let ids = &mut *ids;
        let entry = ids.known.entry(id.clone()).or_insert_with(|| {
            ids.numbers += 1;
            ids.order.push_back((ids.numbers, id.clone()));
            Entry { number: ids.numbers, copies: 0 }
        });
        entry.copies += 1;
        let number = entry.number;
        while ids.known.len() > REMEMBERED
            && let Some((number, oldest)) = ids.order.pop_front()
        {
            if ids.has(number, &oldest) {
                ids.known.remove(&oldest);
            }
        }
        if ids.order.len() > 2 * REMEMBERED {
            let mut order = std::mem::take(&mut ids.order);
            order.retain(|(number, id)| ids.has(*number, id));
            ids.order = order;
        }
        Doubt { ids: self.ids.clone(), id: id.clone(), number }
    }

    fn remove(&self, id: &Id) {
        self.ids.lock().known.remove(id);
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
        let creates = request.class().creates;
        let mut attempt = Attempt { unknown_outcomes: self, id, reply: None };
        let mut was_unknown = false;
        loop {
            let sent = combiner.send(request.clone());
            attempt.reply = creates.then(|| sent.reply());
            let answered = sent.until(deadline).await;
            if !matches!(answered, Err(Error::Unknown(_))) {
                attempt.reply = None;
            }
            attempt.leave();
            // The doubt may be of another call under the same id, dropped meanwhile.
            let in_doubt = || creates && self.contains(id);
            let refused = match answered {
                Err(Error::Unknown(_)) => None,
                // This one was not applied, but an earlier one may have been.
                Err(Error::Store(_)) if was_unknown || in_doubt() => None,
                Ok((snapshot, answer)) if is_refusal(&answer) && in_doubt() => {
                    if !is_final && matches!(answer, Answer::SoldOut { .. }) {
                        return Ok((snapshot, answer));
                    }
                    Some((snapshot, answer))
                }
                Ok(known) => {
                    if creates {
                        self.remove(id);
                    }
                    return Ok(known);
                }
                Err(error) => return Err(error),
            };
            was_unknown = true;
            if let Some(refused) = refused {
                let resolve = Request::Resolve { operation: id.clone() };
                match combiner.send(resolve).until(deadline).await {
                    Ok((_, Answer::Found(Record { status: Status::Tombstone, .. }))) => {
                        self.remove(id);
                        return Ok(refused);
                    }
                    // No room for a tombstone. To ask again would find none either.
                    Ok((_, Answer::Full)) => return Ok(refused),
                    Ok(_) => {
                        self.remove(id);
                        continue;
                    }
                    Err(Error::Unknown(_) | Error::Store(_)) => {}
                    Err(error) => return Err(error),
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

/// A request that is being sent. If it ends without an answer, a copy of it may be under way.
struct Attempt<'a> {
    unknown_outcomes: &'a UnknownOutcomes,
    id: &'a Id,
    reply: Option<Arc<Reply>>,
}

impl Attempt<'_> {
    fn leave(&mut self) {
        if let Some(reply) = self.reply.take() {
            reply.leave(self.unknown_outcomes, self.id);
        }
    }
}

impl Drop for Attempt<'_> {
    fn drop(&mut self) {
        self.leave();
    }
}
