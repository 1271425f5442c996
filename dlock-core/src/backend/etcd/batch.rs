//! Calls that are due at the same time: acquires and releases in one transaction, renewals
//! in another one that only reads.
//!
//! ```text
//!   call --> answered                            nothing is needed of the store
//!        --> a step of a transaction --> answered, granted
//!                    ^             \---> another step
//!        --> a removal                           it goes on by itself
//! ```
//!
//! A transaction has one revision, so it never makes two entries of one key: the second one
//! goes into the next transaction. What was granted is answered at the end, by one keep-alive.

use std::collections::HashSet;
use std::sync::Arc;
use std::time::Duration;

use etcd_client::TxnOpResponse;
use tokio::sync::oneshot;
use tokio::task::JoinHandle;

use super::Inner;
use super::errors::CallError;
use super::layout::{grant, has_room, holders};
use super::mirror::QueueStatus;
use super::session::Session;
use super::step::{Kind, Step, was_there};
use crate::claim::{
    AcquireOutcome, Answer, Claim, Holder, Owner, Release, ReleaseOutcome, Request, SessionTerm,
};
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

/// Who waits for the answers. It is closed when nobody does any more.
type Caller = oneshot::Sender<Vec<Answer>>;

/// What became of a call.
enum Outcome {
    Answered(Answer),
    /// It has the lock, by an entry with this create revision.
    Granted(Arc<Claim>, i64),
    /// A task ends with the answer.
    Removing(JoinHandle<Answer>),
    /// It needs a transaction.
    Next(Step),
}

/// What became of the calls of a batch, by their number.
#[derive(Default)]
struct Outcomes {
    answers: Vec<(usize, Answer)>,
    granted: Vec<(usize, Arc<Claim>, i64)>,
    removals: Vec<(usize, JoinHandle<Answer>)>,
    steps: Vec<Step>,
}

impl Outcomes {
    fn add(&mut self, at: usize, outcome: Outcome) {
        match outcome {
            Outcome::Answered(answer) => self.answers.push((at, answer)),
            Outcome::Granted(claim, revision) => self.granted.push((at, claim, revision)),
            Outcome::Removing(removal) => self.removals.push((at, removal)),
            Outcome::Next(step) => self.steps.push(step),
        }
    }

    /// The answers, when all steps are done.
    async fn answers(self, session: &Session) -> Vec<(usize, Answer)> {
        let mut answers = self.answers;
        if !self.granted.is_empty() {
            let term = session.term(session.ttl / FRESH).await;
            let answer = |(at, claim, revision): (usize, Arc<Claim>, i64)| {
                (at, Answer::Acquire(granted(&claim, revision, term)))
            };
            answers.extend(self.granted.into_iter().map(answer));
        }
        for (at, removal) in self.removals {
            // Without an answer the call counts as not answered.
            answers.extend(removal.await.ok().map(|answer| (at, answer)));
        }
        answers
    }
}

impl Inner {
    /// Makes all calls of a batch, and answers each, in order.
    pub(super) async fn answer_all(self: Arc<Self>, requests: Vec<Request>, caller: Caller) {
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
        let (renewed, written) = tokio::join!(renewing, self.write(writes, &caller));
        for (at, outcome) in renewals.into_iter().zip(renewed) {
            answers[at] = Some(Answer::Renew(outcome));
        }
        for (at, answer) in written {
            answers[at] = Some(answer);
        }
        let missing = answers.into_iter().zip(&requests);
        let answers =
            missing.map(|(answer, request)| answer.unwrap_or_else(|| request.unanswered()));
        let _ = caller.send(answers.collect());
    }

    async fn write(
        &self,
        requests: Vec<(usize, &Request)>,
        caller: &Caller,
    ) -> Vec<(usize, Answer)> {
        let mut answers = Vec::new();
        // A session that ends meanwhile takes with it what was made in it: once more, then.
        let mut todo = requests;
        for is_last in [false, true] {
            let mut again = Vec::new();
            let before = self.sessions.current();
            for (at, answer) in self.write_once(&todo, caller).await {
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

    async fn write_once(
        &self,
        requests: &[(usize, &Request)],
        caller: &Caller,
    ) -> Vec<(usize, Answer)> {
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
                    request.failed(
                        error
                            .clone()
                            .with_operation(request.operation())
                            .with_key(&request.claim().key),
                    )
                };
                return requests.iter().map(|(at, request)| (*at, failed(request))).collect();
            }
        };
        let mut outcomes = Outcomes::default();
        for (at, request) in requests {
            outcomes.add(*at, self.plan(&session, *at, request));
        }
        while !outcomes.steps.is_empty() {
            let mut prefixes = HashSet::new();
            let is_now =
                |step: &Step| !step.makes_entry() || prefixes.insert(step.name.prefix.clone());
            let (now, later) = std::mem::take(&mut outcomes.steps).into_iter().partition(is_now);
            outcomes.steps = later;
            transact(&session, now, caller, &mut outcomes).await;
        }
        outcomes.answers(&session).await
    }

    /// What a call needs of the store, if it needs anything.
    fn plan(&self, session: &Arc<Session>, at: usize, request: &Request) -> Outcome {
        let claim = request.claim().clone();
        let prefix = match self.root.prefix(&claim.key, claim.mode) {
            Ok(prefix) => prefix,
            Err(error) => {
                return Outcome::Answered(
                    request.failed(error.with_operation(request.operation())),
                );
            }
        };
        let known = session.claims.get(claim.owner);
        let kind = match (request, &known) {
            (Request::Release(..), None) => {
                return Outcome::Answered(released(&claim, Ok(false)));
            }
            (Request::Release(_, how), Some(known)) => {
                let is_leaving = session.claims.removals.is_under_way(claim.owner);
                match known.certain_revision() {
                    Some(revision) if !is_leaving && *how == Release::Now => {
                        Kind::Release(revision)
                    }
                    _ => return remove(session, &claim, *how),
                }
            }
            (_, known) => match known.as_ref().map(|known| known.revision) {
                Some(Some(revision)) if session.queues.holds(&prefix, claim.owner) => {
                    session.queues.leave(&prefix, claim.owner);
                    return Outcome::Granted(claim, revision);
                }
                Some(Some(_)) => Kind::Look,
                Some(None) => Kind::Acquire,
                None if claim.queue => Kind::Acquire,
                None => Kind::Probe,
            },
        };
        let name = match known {
            Some(known) => known.name,
            None => session.claims.names.take(&prefix, session.lease),
        };
        let old = claim.instead_of.and_then(|old| session.claims.get(old));
        let replaced =
            old.and_then(|old| old.certain_revision().map(|revision| (old.name, revision)));
        Outcome::Next(Step { at, claim, name, replaced, kind })
    }
}

/// Carries out steps in one transaction.
async fn transact(
    session: &Arc<Session>,
    mut steps: Vec<Step>,
    caller: &Caller,
    outcomes: &mut Outcomes,
) {
    let began = Moment::now();
    for _ in 0..ATTEMPTS {
        // The version first: who is leaving after that made another one.
        let version = session.version();
        let is_leaving = |step: &Step| {
            !matches!(step.kind, Kind::Release(_))
                && session.claims.removals.is_under_way(step.claim.owner)
        };
        let (leaving, going) = steps.into_iter().partition(is_leaving);
        failed(session, leaving, CallError::Lost(None), outcomes);
        steps = going;
        if steps.is_empty() {
            return;
        }
        for step in &mut steps {
            let Claim { owner, key, .. } = &*step.claim;
            match step.kind {
                Kind::Acquire | Kind::Probe => {
                    step.name = session.claims.sending(*owner, key, &step.name, version);
                }
                Kind::Release(_) => drop(session.claims.removing(*owner)),
                Kind::Look => {}
            }
        }
        // Looked at now: a release that follows an abandoned call finds either the entry that
        // is about to be made, or that nothing is sent.
        if caller.is_closed() {
            settle(session, version, &steps);
            return failed(session, steps, CallError::Lost(None), outcomes);
        }
        let operations = steps.iter().map(|step| step.operation(session)).collect();
        match session.transact(version, operations).await {
            Ok(answers) => {
                for (step, answer) in steps.into_iter().zip(answers) {
                    outcomes.add(step.at, answered(session, step, version, &answer));
                }
                return;
            }
            // Nothing was done. Another connection is one to a member with a leader.
            Err(CallError::Outdated | CallError::NoLeader(_)) => settle(session, version, &steps),
            // An entry is made once, however often that is asked for.
            Err(CallError::Lost(source)) if Moment::now().since(began) < AT_ONCE => {
                let is_release = |step: &Step| matches!(step.kind, Kind::Release(_));
                let (releases, again) = steps.into_iter().partition(is_release);
                failed(session, releases, CallError::Lost(source), outcomes);
                steps = again;
            }
            Err(error) if error.is_too_many() && steps.len() > 1 => {
                settle(session, version, &steps);
                for step in steps {
                    Box::pin(transact(session, vec![step], caller, outcomes)).await;
                }
                return;
            }
            Err(error) => {
                if !matches!(error, CallError::Lost(_)) {
                    settle(session, version, &steps);
                }
                return failed(session, steps, error, outcomes);
            }
        }
    }
    failed(session, steps, CallError::Outdated, outcomes);
}

/// What the answer to a step says.
fn answered(session: &Arc<Session>, step: Step, version: i64, answer: &TxnOpResponse) -> Outcome {
    let (claim, owner) = (step.claim.clone(), step.claim.owner);
    if let Kind::Release(_) = step.kind {
        session.claims.forget(owner);
        session.queues.leave(&step.name.prefix, owner);
        return Outcome::Answered(released(&claim, Ok(was_there(answer))));
    }
    if let Some(old) = claim.instead_of.filter(|_| step.makes_entry()) {
        if step.replaced.is_some() {
            session.claims.forget(old);
        } else if session.claims.has(old) {
            drop(session.start_removal(old, Release::Now));
        }
    }
    let queue = step.queue_in(answer);
    let own = queue.places.iter().position(|place| place.entry == step.name.entry);
    if step.makes_entry() {
        session.claims.answered(owner, version, own.map(|own| queue.places[own].revision));
    }
    let Some(own) = own else {
        let has_room = step.kind == Kind::Probe && has_room(&queue.places, claim.mode);
        if has_room || step.kind == Kind::Look {
            return Outcome::Next(again(step));
        }
        // An earlier attempt whose answer was lost may make the entry yet.
        return match session.claims.has(owner) {
            true => give_up(session, owner, queue.holder),
            false => Outcome::Answered(busy(queue.holder)),
        };
    };
    let revision = queue.places[own].revision;
    if own < holders(&queue.places) {
        return Outcome::Granted(claim, revision);
    }
    if !claim.queue {
        return give_up(session, owner, queue.holder);
    }
    match session.queues.wait(&step.name.prefix, &claim.key, owner, revision) {
        QueueStatus::Holds => Outcome::Granted(claim, revision),
        QueueStatus::Gone => Outcome::Next(again(step)),
        QueueStatus::Waits | QueueStatus::Unknown => {
            let outcome = AcquireOutcome::SessionQueued { holder: queue.holder };
            Outcome::Answered(Answer::Acquire(Ok(outcome)))
        }
    }
}

/// The step that makes the entry, since it is not there.
fn again(step: Step) -> Step {
    let claim = Arc::new(Claim { instead_of: None, ..Claim::clone(&step.claim) });
    Step { claim, replaced: None, kind: Kind::Acquire, ..step }
}

/// The requests of these steps will surely not be applied.
fn settle(session: &Session, version: i64, steps: &[Step]) {
    for step in steps.iter().filter(|step| step.makes_entry()) {
        session.claims.not_applied(step.claim.owner, version);
    }
}

/// A transaction failed. What was to be removed is removed by itself.
fn failed(session: &Arc<Session>, steps: Vec<Step>, error: CallError, outcomes: &mut Outcomes) {
    let error = if session.is_over() { CallError::SessionOver } else { error };
    for step in steps {
        let outcome = match step.kind {
            Kind::Release(_) => remove(session, &step.claim, Release::Now),
            _ => Outcome::Answered(step.failed(session, error.clone())),
        };
        outcomes.add(step.at, outcome);
    }
}

/// Answers that the key is busy, to an owner that does not wait, and removes what it has.
fn give_up(session: &Arc<Session>, owner: Owner, holder: Option<Arc<Holder>>) -> Outcome {
    let session = session.clone();
    Outcome::Removing(tokio::spawn(async move {
        let _ = session.remove(owner, Release::Now, PATIENCE).await;
        busy(holder)
    }))
}

/// Removes what the owner of a claim has, for as long as that takes.
fn remove(session: &Arc<Session>, claim: &Arc<Claim>, how: Release) -> Outcome {
    let (session, claim) = (session.clone(), claim.clone());
    Outcome::Removing(tokio::spawn(async move {
        let removed = session.remove(claim.owner, how, PATIENCE).await;
        released(&claim, removed.unwrap_or(Err(CallError::Lost(None))))
    }))
}

fn released(claim: &Claim, removed: Result<bool, CallError>) -> Answer {
    Answer::Release(match removed {
        Ok(true) => Ok(ReleaseOutcome::Released),
        Ok(false) | Err(CallError::SessionOver) => Ok(ReleaseOutcome::AlreadyLost),
        Err(error) => Err(error.written(Operation::Release, &claim.key)),
    })
}

fn busy(holder: Option<Arc<Holder>>) -> Answer {
    Answer::Acquire(Ok(AcquireOutcome::Busy { holder }))
}

fn granted(claim: &Claim, revision: i64, term: Option<SessionTerm>) -> Result<AcquireOutcome> {
    let on = |error: Error| error.with_key(&claim.key);
    let grant = grant(claim.mode, revision, claim.tokens).map_err(on)?;
    match term {
        Some(term) => Ok(AcquireOutcome::SessionGranted { grant, term }),
        None => Err(on(Error::new(ErrorKind::Unknown, Operation::Acquire).with_message(
            "the lock was granted, but etcd did not confirm that the session lives",
        ))),
    }
}
