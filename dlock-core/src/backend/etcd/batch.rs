//! Calls that are due at the same time: acquires and releases in one transaction, renewals
//! in another one that only reads.
//!
//! An acquire is a transaction inside the transaction: it makes the entry if it is not there,
//! and reads all entries of the key. A transaction has one revision, so it never makes two
//! entries of one key: the second one goes into the next transaction.

use std::collections::HashSet;
use std::sync::Arc;
use std::time::Duration;

use etcd_client::{
    Compare, CompareOp, GetOptions, KeyValue, PutOptions, Txn, TxnOp, TxnOpResponse,
};

use super::Inner;
use super::errors::CallError;
use super::layout::{self, Place, grant, has_room, holders};
use super::queues::place;
use super::record::{Record, holder_of};
use super::removal::was_there;
use super::session::Session;
use crate::claim::{AcquireOutcome, Answer, Claim, Holder, Release, ReleaseOutcome, Request};
use crate::clock::Moment;
use crate::error::{Error, ErrorKind, Operation, Result};

/// How long a batch waits for a removal that goes on by itself.
const PATIENCE: Duration = Duration::from_millis(500);
/// A grant rests on a keep-alive that is not older than this part of the ttl.
const FRESH: u32 = 4;
/// How often a transaction is made again because the session's version was outdated, or
/// because its connection broke.
const ATTEMPTS: usize = 8;
/// A transaction is made again after a broken connection if it began less than this ago.
const AT_ONCE: Duration = Duration::from_millis(500);

/// What a transaction does for one call.
struct Step {
    /// The number of the call in its batch.
    at: usize,
    claim: Arc<Claim>,
    prefix: String,
    entry: String,
    kind: Kind,
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum Kind {
    /// Makes the entry.
    Acquire,
    /// Makes the entry only if there is no other one.
    Probe,
    Release,
}

impl Step {
    fn operation(&self, session: &Session) -> TxnOp {
        if self.kind == Kind::Release {
            return TxnOp::delete(self.entry.as_str(), None);
        }
        let options = PutOptions::new().with_lease(session.lease);
        let value = Record::of(&self.claim).encode();
        let make = TxnOp::put(self.entry.as_str(), value, Some(options));
        let look = TxnOp::get(self.prefix.as_str(), Some(GetOptions::new().with_prefix()));
        let leave = self
            .claim
            .instead_of
            .map(|old| TxnOp::delete(layout::entry(&self.prefix, session.lease, old), None));
        let is_first = match self.kind {
            Kind::Probe => {
                Compare::create_revision(self.prefix.as_str(), CompareOp::Equal, 0).with_prefix()
            }
            _ => Compare::create_revision(self.entry.as_str(), CompareOp::Equal, 0),
        };
        let then: Vec<TxnOp> = leave.clone().into_iter().chain([make, look.clone()]).collect();
        let or_else: Vec<TxnOp> = leave.into_iter().chain([look]).collect();
        TxnOp::txn(Txn::new().when([is_first]).and_then(then).or_else(or_else))
    }

    fn failed(&self, error: CallError) -> Answer {
        match self.kind {
            Kind::Release => {
                Answer::Release(Err(error.written(Operation::Release, &self.claim.key)))
            }
            _ => Answer::Acquire(Err(error.written(Operation::Acquire, &self.claim.key))),
        }
    }
}

/// What became of a step.
enum Outcome {
    Answered(Answer),
    /// It needs another transaction.
    Next(Step),
}

impl Inner {
    /// Makes all calls of a batch; one answer each, in order.
    pub(super) async fn answer_all(self: Arc<Self>, requests: Vec<Request>) -> Vec<Answer> {
        let mut answers: Vec<Option<Answer>> = requests.iter().map(|_| None).collect();
        let (mut leases, mut renewals, mut writes) = (Vec::new(), Vec::new(), Vec::new());
        for (at, request) in requests.iter().enumerate() {
            match request {
                Request::Renew(lease) => {
                    leases.push(lease.clone());
                    renewals.push(at);
                }
                _ => writes.push((at, request)),
            }
        }
        let renewing = async {
            match leases.is_empty() {
                true => Vec::new(),
                false => self.renew_all(&leases).await,
            }
        };
        let (renewed, written) = tokio::join!(renewing, self.write(writes));
        for (at, outcome) in renewals.into_iter().zip(renewed) {
            answers[at] = Some(Answer::Renew(outcome));
        }
        for (at, answer) in written {
            answers[at] = Some(answer);
        }
        let missing = answers.into_iter().zip(&requests);
        missing.map(|(answer, request)| answer.unwrap_or_else(|| request.unanswered())).collect()
    }

    async fn write(&self, requests: Vec<(usize, &Request)>) -> Vec<(usize, Answer)> {
        let mut answers = Vec::new();
        // A session that ends meanwhile takes with it what was made in it: once more, then.
        let mut todo = requests;
        for is_last in [false, true] {
            let mut again = Vec::new();
            let before = self.sessions.current();
            for (at, answer) in self.write_once(&todo).await {
                let is_over = before.as_ref().is_some_and(|session| session.is_over());
                let is_lost = matches!(&answer, Answer::Acquire(Err(error)) if error.kind() == ErrorKind::Unavailable);
                match todo.iter().find(|(number, _)| *number == at) {
                    Some(request) if is_over && is_lost && !is_last => again.push(*request),
                    _ => answers.push((at, answer)),
                }
            }
            todo = again;
            if todo.is_empty() {
                break;
            }
        }
        answers
    }

    async fn write_once(&self, requests: &[(usize, &Request)]) -> Vec<(usize, Answer)> {
        let (mut answers, mut steps) = (Vec::new(), Vec::new());
        let acquires = requests.iter().any(|(_, it)| matches!(it, Request::Acquire(_)));
        let session = match acquires {
            true => self.sessions.get(Operation::Acquire).await.map(Some),
            false => Ok(self.sessions.current()),
        };
        let session = match session {
            Ok(Some(session)) => session,
            Ok(None) => {
                let gone = Answer::Release(Ok(ReleaseOutcome::AlreadyLost)); // with the session
                return requests.iter().map(|(at, _)| (*at, gone.clone())).collect();
            }
            Err(error) => {
                let failed = |request: &Request| {
                    request
                        .failed(error.clone().during(request.operation()).on(&request.claim().key))
                };
                return requests.iter().map(|(at, request)| (*at, failed(request))).collect();
            }
        };
        for (at, request) in requests {
            match self.plan(&session, *at, request).await {
                Outcome::Answered(answer) => answers.push((*at, answer)),
                Outcome::Next(step) => steps.push(step),
            }
        }
        while !steps.is_empty() {
            let mut prefixes = HashSet::new();
            let mut later = Vec::new();
            let mut now = Vec::new();
            for step in steps {
                let is_alone = step.kind == Kind::Release || prefixes.insert(step.prefix.clone());
                if is_alone { now.push(step) } else { later.push(step) }
            }
            for (at, outcome) in self.transact(&session, now).await {
                match outcome {
                    Outcome::Answered(answer) => answers.push((at, answer)),
                    Outcome::Next(step) => later.push(step),
                }
            }
            steps = later;
        }
        answers
    }

    /// What a call needs of the store, if it needs anything.
    async fn plan(&self, session: &Arc<Session>, at: usize, request: &Request) -> Outcome {
        let claim = request.claim().clone();
        let prefix = match self.root.prefix(&claim.key, claim.mode) {
            Ok(prefix) => prefix,
            Err(error) => {
                return Outcome::Answered(request.failed(error.during(request.operation())));
            }
        };
        let entry = layout::entry(&prefix, session.lease, claim.owner);
        let known = session.claims.get(claim.owner);
        let kind = match request {
            Request::Release(_, how) => {
                let Some(known) = known else {
                    return Outcome::Answered(released(&claim, Ok(false)));
                };
                let is_leaving = session.claims.is_leaving(claim.owner);
                if known.is_doubtful() || is_leaving || *how != Release::Now {
                    return Outcome::Answered(remove(session, &claim, *how).await);
                }
                Kind::Release
            }
            _ => {
                if let Some(revision) = known.as_ref().and_then(|known| known.revision)
                    && session.queues.holds(&prefix, claim.owner)
                {
                    session.queues.leave(&prefix, claim.owner);
                    return Outcome::Answered(Answer::Acquire(
                        granted(session, &claim, revision).await,
                    ));
                }
                if claim.queue || known.is_some() { Kind::Acquire } else { Kind::Probe }
            }
        };
        Outcome::Next(Step { at, claim, prefix, entry, kind })
    }

    /// Carries out steps in one transaction.
    async fn transact(&self, session: &Arc<Session>, steps: Vec<Step>) -> Vec<(usize, Outcome)> {
        let (mut outcomes, began) = (Vec::new(), Moment::now());
        let mut steps = steps;
        let made = |step: &Step| step.kind != Kind::Release;
        for _ in 0..ATTEMPTS {
            // The version first: who is leaving after that made another one.
            let version = session.version();
            let mut going = Vec::new();
            for step in steps {
                if made(&step) && session.claims.is_leaving(step.claim.owner) {
                    let given_up = step.failed(CallError::Lost(None));
                    outcomes.push((step.at, Outcome::Answered(given_up)));
                } else {
                    going.push(step);
                }
            }
            steps = going;
            if steps.is_empty() {
                return outcomes;
            }
            for step in &steps {
                match made(step) {
                    true => session.claims.sending(step.claim.owner, &step.claim.key, &step.prefix),
                    false => drop(session.claims.removing(step.claim.owner)),
                }
            }
            let operations = steps.iter().map(|step| step.operation(session)).collect();
            match session.transact(version, operations).await {
                Ok(answers) => {
                    for (step, answer) in steps.into_iter().zip(answers) {
                        outcomes.push((step.at, self.answered(session, step, &answer).await));
                    }
                    return outcomes;
                }
                Err(CallError::Outdated) => settle(session, &steps),
                // An entry is made once, however often that is asked for.
                Err(CallError::Lost(source)) if Moment::now().since(began) < AT_ONCE => {
                    let (again, releases): (Vec<_>, Vec<_>) = steps.into_iter().partition(made);
                    let error = CallError::Lost(source);
                    outcomes.extend(failed(session, releases, error).await);
                    steps = again;
                }
                Err(error) if error.is_too_many() && steps.len() > 1 => {
                    settle(session, &steps);
                    for step in steps {
                        let alone = Box::pin(self.transact(session, vec![step]));
                        outcomes.extend(alone.await);
                    }
                    return outcomes;
                }
                Err(error) => {
                    if !matches!(error, CallError::Lost(_)) {
                        settle(session, &steps);
                    }
                    outcomes.extend(failed(session, steps, error).await);
                    return outcomes;
                }
            }
        }
        for step in steps {
            let gave_up = step.failed(CallError::Outdated);
            outcomes.push((step.at, Outcome::Answered(gave_up)));
        }
        outcomes
    }

    async fn answered(
        &self,
        session: &Arc<Session>,
        step: Step,
        answer: &TxnOpResponse,
    ) -> Outcome {
        let Step { at, claim, prefix, entry, kind } = step;
        if kind == Kind::Release {
            session.claims.forget(claim.owner);
            session.queues.leave(&prefix, claim.owner);
            return Outcome::Answered(released(&claim, Ok(was_there(answer))));
        }
        if let Some(old) = claim.instead_of {
            session.claims.forget(old);
        }
        let found = entries(&prefix, answer);
        let places: Vec<Place> = found.iter().map(|(place, _)| place.clone()).collect();
        let own = places.iter().position(|place| place.entry == entry);
        let revision = own.map(|own| places[own].revision);
        session.claims.answered(claim.owner, revision);
        let Some(own) = own else {
            if kind == Kind::Probe && has_room(&places, claim.mode) {
                let claim = Arc::new(Claim { instead_of: None, ..Claim::clone(&claim) });
                return Outcome::Next(Step { at, claim, prefix, entry, kind: Kind::Acquire });
            }
            return Outcome::Answered(Answer::Acquire(Ok(AcquireOutcome::Busy {
                holder: first(&found),
            })));
        };
        let revision = places[own].revision;
        let holds = own < holders(&places);
        if holds || (claim.queue && session.queues.wait(&prefix, &claim.key, claim.owner, revision))
        {
            return Outcome::Answered(Answer::Acquire(granted(session, &claim, revision).await));
        }
        let outcome = if claim.queue {
            AcquireOutcome::SessionQueued { holder: first(&found) }
        } else {
            let _ = session.remove(claim.owner, Release::Now, PATIENCE).await;
            AcquireOutcome::Busy { holder: first(&found) }
        };
        Outcome::Answered(Answer::Acquire(Ok(outcome)))
    }
}

/// The requests of these steps were answered, or will surely not be applied.
fn settle(session: &Session, steps: &[Step]) {
    for step in steps.iter().filter(|step| step.kind != Kind::Release) {
        session.claims.answered(step.claim.owner, None);
    }
}

/// A transaction failed. What was to be removed is removed by itself.
async fn failed(
    session: &Arc<Session>,
    steps: Vec<Step>,
    error: CallError,
) -> Vec<(usize, Outcome)> {
    let mut outcomes = Vec::new();
    let mut error = Some(error);
    for step in steps {
        let error = match error.take() {
            Some(CallError::SessionOver) | None if session.is_over() => CallError::SessionOver,
            Some(CallError::NotSent(why)) => {
                error = Some(CallError::NotSent(why.clone()));
                CallError::NotSent(why)
            }
            Some(first) => first,
            None => CallError::Lost(None),
        };
        let answer = match step.kind {
            Kind::Release => remove(session, &step.claim, Release::Now).await,
            _ => step.failed(error),
        };
        outcomes.push((step.at, Outcome::Answered(answer)));
    }
    outcomes
}

/// Removes what the owner of a claim has, for as long as that takes.
async fn remove(session: &Arc<Session>, claim: &Claim, how: Release) -> Answer {
    let removed = session.remove(claim.owner, how, PATIENCE).await;
    released(claim, removed.unwrap_or(Err(CallError::Lost(None))))
}

fn released(claim: &Claim, removed: Result<bool, CallError>) -> Answer {
    Answer::Release(match removed {
        Ok(true) => Ok(ReleaseOutcome::Released),
        Ok(false) | Err(CallError::SessionOver) => Ok(ReleaseOutcome::AlreadyLost),
        Err(error) => Err(error.written(Operation::Release, &claim.key)),
    })
}

/// The entries of a key in their order, with what they are.
fn entries(prefix: &str, answer: &TxnOpResponse) -> Vec<(Place, KeyValue)> {
    let TxnOpResponse::Txn(made) = answer else { return Vec::new() };
    match made.op_responses().pop() {
        Some(TxnOpResponse::Get(mut look)) => sorted(prefix, look.take_kvs()),
        _ => Vec::new(),
    }
}

/// The entries below a prefix in their order.
pub(super) fn sorted(prefix: &str, found: Vec<KeyValue>) -> Vec<(Place, KeyValue)> {
    let mut places: Vec<_> =
        found.into_iter().filter_map(|it| Some((place(prefix, &it)?, it))).collect();
    places.sort_by_key(|(place, _)| place.revision);
    places
}

fn first(found: &[(Place, KeyValue)]) -> Option<Arc<Holder>> {
    found.first().map(|(_, entry)| holder_of(entry.value(), entry.lease()))
}

async fn granted(session: &Session, claim: &Claim, revision: i64) -> Result<AcquireOutcome> {
    let on = |error: Error| error.on(&claim.key);
    let grant = grant(claim.mode, revision, claim.tokens).map_err(on)?;
    match session.term(session.ttl / FRESH).await {
        Some(term) => Ok(AcquireOutcome::SessionGranted { grant, term }),
        None => Err(on(Error::new(ErrorKind::Unknown, Operation::Acquire)
            .saying("the lock was granted, but etcd did not confirm that the session lives"))),
    }
}
