//! The calls of a batch: one transaction for all keys whose rows are free, and one for each
//! other key.

use std::collections::BTreeMap;
use std::sync::Arc;

use super::database::{Database, OnLocked};
use super::errors::{Cause, Fault};
use super::names::LockId;
use super::transaction::{Decision, Store};
use crate::backend::memory::lock_table::LockTable;
use crate::claim::{AcquireOutcome, Answer, Claim, Release, RenewOutcome, Request};
use crate::clock::Moment;
use crate::error::{Error, ErrorKind, Operation, Result};

/// The most holders and waiters of a key. They are written with every change, so more
/// would be slow: see docs/sql.md.
const MAX_ENTRIES: usize = 10_000;

impl<D: Database> Store<D> {
    /// Makes calls, in their order for each key.
    pub(super) async fn make(&self, requests: &[Request]) -> Vec<Answer> {
        let mut by_lock: BTreeMap<LockId, Vec<usize>> = BTreeMap::new();
        for (place, request) in requests.iter().enumerate() {
            let claim = request.claim();
            let lock = self.names.lock(&claim.key, claim.mode.is_permits());
            by_lock.entry(lock).or_default().push(place);
        }
        let mut answers: Vec<Option<Answer>> = requests.iter().map(|_| None).collect();
        if by_lock.len() > 1 {
            self.together(&by_lock, requests, &mut answers).await;
        }
        self.alone(&by_lock, requests, &mut answers).await;
        let all = requests.iter().zip(answers);
        let answers: Vec<Answer> =
            all.map(|(it, answer)| answer.unwrap_or_else(|| it.unanswered())).collect();
        for (lock, places) in &by_lock {
            for &place in places {
                self.tracker.answered(lock, &requests[place], &answers[place]);
            }
        }
        answers
    }

    /// One transaction for the rows that nobody else has locked.
    async fn together(
        &self,
        by_lock: &BTreeMap<LockId, Vec<usize>>,
        requests: &[Request],
        answers: &mut [Option<Answer>],
    ) {
        let free = || by_lock.iter().filter(|(lock, _)| !self.stuck.contains(lock));
        let locks: Vec<LockId> = free().map(|(lock, _)| lock.clone()).collect();
        if locks.len() < 2 {
            return;
        }
        let mut places: Vec<usize> = free().flat_map(|(_, places)| places.clone()).collect();
        places.sort_unstable(); // in the order of the requests
        let some: Vec<Request> = places.iter().map(|&place| requests[place].clone()).collect();
        let made = match self.in_one(&locks, &some, OnLocked::Skip).await {
            Ok(made) => made,
            Err(fault) if is_of_one_key(&fault) => return,
            Err(fault) => failed(&some, &fault.error).into_iter().map(Some).collect(),
        };
        for (place, answer) in places.into_iter().zip(made) {
            answers[place] = answer;
        }
    }

    /// One transaction for each key that is left.
    async fn alone(
        &self,
        by_lock: &BTreeMap<LockId, Vec<usize>>,
        requests: &[Request],
        answers: &mut [Option<Answer>],
    ) {
        let left: Vec<(&LockId, &Vec<usize>)> =
            by_lock.iter().filter(|(_, places)| answers[places[0]].is_none()).collect();
        let waits = left.iter().map(|(lock, _)| *lock).filter(|lock| !self.stuck.contains(lock));
        let waits: Vec<LockId> = waits.cloned().collect();
        let mut waiting = self.stuck.wait_for(waits.clone());
        let mut was_in_vain = false;
        for (lock, places) in left {
            let some: Vec<Request> = places.iter().map(|&place| requests[place].clone()).collect();
            let on_locked = match waits.contains(lock) {
                false => OnLocked::Fail,
                // One wait in vain is enough for the others.
                true if was_in_vain => OnLocked::Fail,
                true if by_lock.len() > 1 => OnLocked::WaitBriefly,
                true => OnLocked::Wait,
            };
            let made = self.in_one(std::slice::from_ref(lock), &some, on_locked).await;
            match &made {
                Err(Fault { cause: Cause::Locked | Cause::StillWaiting, .. })
                    if on_locked != OnLocked::Fail =>
                {
                    waiting.was_in_vain(lock);
                    was_in_vain = true;
                }
                _ => waiting.is_over(lock),
            }
            let made = made.unwrap_or_else(|fault| {
                failed(&some, &fault.error).into_iter().map(Some).collect()
            });
            for (&place, answer) in places.iter().zip(made) {
                answers[place] = answer;
            }
        }
    }

    /// One transaction. The requests to a row that was left out have no answer.
    async fn in_one(
        &self,
        locks: &[LockId],
        requests: &[Request],
        on_locked: OnLocked,
    ) -> Result<Vec<Option<Answer>>, Fault> {
        let requests: Vec<(LockId, Request)> = requests
            .iter()
            .map(|it| {
                let claim = it.claim();
                (self.names.lock(&claim.key, claim.mode.is_permits()), self.written(it))
            })
            .collect();
        self.transact(locks, on_locked, |table, now, skipped, sent| {
            let decide = |(lock, request): &(LockId, Request)| {
                (!skipped.contains(&lock.id)).then(|| answer(table, now, request, sent))
            };
            let value: Vec<Option<Answer>> = requests.iter().map(decide).collect();
            let relied_upon = requests.iter().zip(&value).any(|((_, request), answer)| {
                answer.as_ref().is_some_and(|answer| is_relied_upon((request, answer)))
            });
            Decision { value, relied_upon }
        })
        .await
    }

    /// A request as it is written: the number of the client is that of the rows.
    fn written(&self, request: &Request) -> Request {
        match request {
            Request::Acquire(claim) => {
                let holder = self.holder(&claim.holder);
                Request::Acquire(Arc::new(Claim { holder, ..(**claim).clone() }))
            }
            other => other.clone(),
        }
    }
}

/// Whether somebody relies on the outcome of a call: that a lock is held, or stays taken.
fn is_relied_upon((request, answer): (&Request, &Answer)) -> bool {
    match (request, answer) {
        (_, Answer::Acquire(Ok(outcome))) => matches!(outcome, AcquireOutcome::Granted(_)),
        (_, Answer::Renew(Ok(outcome))) => *outcome != RenewOutcome::Lost,
        (Request::Release(_, how), Answer::Release(Ok(_))) => *how != Release::Now,
        _ => false,
    }
}

/// Whether a fault may be that of one row of several.
fn is_of_one_key(fault: &Fault) -> bool {
    matches!(fault.cause, Cause::Locked | Cause::StillWaiting | Cause::Other)
        && fault.error.kind() != ErrorKind::Unknown
}

fn answer(
    table: &mut LockTable,
    now: Moment,
    request: &Request,
    sent: &mut Vec<crate::backend::memory::lock_table::SentNotice>,
) -> Answer {
    match request {
        Request::Acquire(claim) => {
            if table.is_full(claim, MAX_ENTRIES) {
                let error = Error::new(ErrorKind::Overloaded, Operation::Acquire).with_message(format!(
                    "{MAX_ENTRIES} claims hold this key or wait for it; more do not fit in its row"
                ));
                return Answer::Acquire(Err(error.with_key(&claim.key)));
            }
            Answer::Acquire(Ok(table.acquire(now, claim, sent)))
        }
        Request::Renew(lease) => Answer::Renew(Ok(table.renew(now, lease, sent))),
        Request::Release(lease, how) => Answer::Release(Ok(table.release(now, lease, *how, sent))),
    }
}

/// The answers if none of the calls could be made.
pub(super) fn failed(requests: &[Request], error: &Error) -> Vec<Answer> {
    requests
        .iter()
        .map(|request| {
            let error = error.clone().with_operation(request.operation());
            request.failed(error.with_key(&request.claim().key))
        })
        .collect()
}
