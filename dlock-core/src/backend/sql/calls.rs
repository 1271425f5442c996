//! The calls of a batch: one transaction for all, and one for each key if a key is in the
//! way of the others.

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
        let locks: Vec<LockId> = by_lock.keys().cloned().collect();
        let answers = match self.in_one(&locks, requests, OnLocked::Wait).await {
            Ok(answers) => answers,
            Err(fault) if locks.len() > 1 && is_of_one_key(&fault) => {
                self.one_by_one(&by_lock, requests).await
            }
            Err(fault) => failed(requests, &fault.error),
        };
        for (lock, places) in &by_lock {
            for &place in places {
                self.tracker.answered(lock, &requests[place], &answers[place]);
            }
        }
        answers
    }

    async fn in_one(
        &self,
        locks: &[LockId],
        requests: &[Request],
        on_locked: OnLocked,
    ) -> Result<Vec<Answer>, Fault> {
        let requests: Vec<Request> = requests.iter().map(|it| self.written(it)).collect();
        self.transact(locks, on_locked, |table, now, sent| {
            let value: Vec<Answer> =
                requests.iter().map(|request| answer(table, now, request, sent)).collect();
            let relied_upon = requests.iter().zip(&value).any(is_relied_upon);
            Decision { value, relied_upon }
        })
        .await
    }

    /// One transaction for each key: only those fail that are in the way.
    async fn one_by_one(
        &self,
        by_lock: &BTreeMap<LockId, Vec<usize>>,
        requests: &[Request],
    ) -> Vec<Answer> {
        let mut answers: Vec<Option<Answer>> = requests.iter().map(|_| None).collect();
        for (lock, places) in by_lock {
            let some: Vec<Request> = places.iter().map(|&place| requests[place].clone()).collect();
            let made = self.in_one(std::slice::from_ref(lock), &some, OnLocked::Fail).await;
            let made = made.unwrap_or_else(|fault| failed(&some, &fault.error));
            for (&place, answer) in places.iter().zip(made) {
                answers[place] = Some(answer);
            }
        }
        let all = requests.iter().zip(answers);
        all.map(|(request, answer)| answer.unwrap_or_else(|| request.unanswered())).collect()
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
    matches!(fault.cause, Cause::Locked | Cause::Other) && fault.error.kind() != ErrorKind::Unknown
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
