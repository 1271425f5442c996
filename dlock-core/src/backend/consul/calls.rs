//! Taking and giving back locks.
//!
//! A lock is a key of Consul that a session has *acquired*. It is taken by a transaction
//! that first checks what is known of the key (it is absent, or it was changed last by that
//! write), and given back by one that removes the key if it is still as it was granted. So
//! a session never takes a key twice, a release never touches a successor, and nothing is
//! left behind. The index of the transaction is the token.
//!
//! A request that was not answered may be carried out later. It is outdated before the claim
//! is asked for again or released ([`fence`](super::fence)).
//!
//! Calls that are due at the same time share a transaction. It changes nothing if one of
//! them fails, and says which: those are made by themselves, after a look at the key, and
//! the others once more.

use std::sync::Arc;
use std::time::Duration;

use tokio::task::JoinSet;

use super::Shared;
use super::errors::denied;
use super::fence::FenceState;
use super::locks::{TOKENS, first_token, is_prefix};
use super::session::Session;
use super::wire::{Entry, LOCK_FLAGS, LockValue, Operation as Op, OperationError, SEMAPHORE_FLAGS};
use crate::backend::holder_json::foreign_holder;
use crate::claim::{AcquireOutcome, Answer, Claim, Grant, Holder, Owner, ReleaseOutcome, Request};
use crate::error::{Error, ErrorKind, Operation, Result};

/// How often a key that changes all the time is looked at for one call.
const ATTEMPTS: usize = 8;
/// How long a client that gives a lock up and wants it again leaves it to others. Consul
/// does not say whether somebody waits: they need the time to hear of it and to ask.
pub(super) const YIELD: Duration = Duration::from_millis(4);

/// What a call needs of the shared transaction.
struct Part {
    place: usize,
    operations: Vec<Op>,
}

impl Shared {
    /// Makes calls that are due at the same time; one answer each, in order.
    pub(super) async fn make(self: &Arc<Self>, requests: &[Request]) -> Vec<Answer> {
        let mut answers: Vec<Option<Answer>> = requests.iter().map(|_| None).collect();
        let mut leases = Vec::new();
        let mut parts = Vec::new();
        let mut alone = Vec::new();
        let acquires = requests.iter().any(|request| matches!(request, Request::Acquire(_)));
        let session = if acquires { Some(self.session().await) } else { None };
        let fence = session.as_ref().and_then(|session| session.as_ref().ok());
        let fence = fence.map(|session| (&**session, session.fence.state()));
        for (place, request) in requests.iter().enumerate() {
            match (request, &session) {
                (Request::Acquire(_), Some(Err(error))) => {
                    answers[place] = Some(request.failed(error.clone()));
                }
                (Request::Renew(claim), _) => leases.push((place, claim.clone())),
                _ => match self.operations(request, fence) {
                    Ok(Some(operations)) => parts.push(Part { place, operations }),
                    Ok(None) => alone.push(place),
                    Err(answer) => answers[place] = Some(*answer),
                },
            }
        }
        let check = fence.map(|(session, state)| session.fence.check(state));
        let together = self.together(requests, check, parts, &mut answers);
        alone.extend(together.await);
        let mut tasks = JoinSet::new();
        for place in alone {
            let (shared, request) = (self.clone(), requests[place].clone());
            let session = session.as_ref().and_then(|session| session.as_ref().ok()).cloned();
            tasks.spawn(async move { (place, shared.make_alone(&request, session).await) });
        }
        if !leases.is_empty() {
            let (places, claims): (Vec<_>, Vec<_>) = leases.into_iter().unzip();
            for (place, answer) in places.into_iter().zip(self.renew(&claims).await) {
                answers[place] = Some(Answer::Renew(answer));
            }
        }
        while let Some(made) = tasks.join_next().await {
            if let Ok((place, answer)) = made {
                answers[place] = Some(answer);
            }
        }
        let given = answers.into_iter().zip(requests);
        given.map(|(answer, request)| answer.unwrap_or_else(|| request.unanswered())).collect()
    }

    /// What a call needs of a transaction; `None` if the key must be looked at first. The
    /// error is an answer that is known already.
    fn operations(
        &self,
        request: &Request,
        session: Option<(&Session, FenceState)>,
    ) -> Result<Option<Vec<Op>>, Box<Answer>> {
        let claim = request.claim();
        let path = self.path_of(claim);
        let path = path.map_err(|error| Box::new(request.failed(error)))?;
        let mut locks = self.locks.lock();
        match (request, session) {
            (Request::Acquire(_), _) if claim.mode.is_permits() => Ok(None),
            (Request::Acquire(_), Some((session, fence))) => {
                if let Some(old) = claim.instead_of {
                    locks.owe(old, &path);
                }
                let old = claim.instead_of.map(|old| locks.held(old).cloned());
                match old {
                    // Somebody else may want it: it is given up now, and asked for later.
                    Some(Some(old)) if claim.queue => Ok(Some(remove(&old.path, old.index))),
                    Some(_) => Ok(None),
                    None if locks.owner_at(&path).is_some() => Ok(None),
                    None if locks.in_doubt(claim.owner).is_some() => Ok(None),
                    None => {
                        locks.ask(claim.owner, fence);
                        let lock = Op::lock(&path, &session.id, &LockValue::of(claim), LOCK_FLAGS);
                        Ok(Some(vec![Op::check_absent(&path), lock]))
                    }
                }
            }
            (Request::Release(..), _) => {
                if locks.only_waits(claim.owner, &path) {
                    locks.stop_waiting(claim.owner, &path);
                    let unused = locks.take_assigned(claim.owner).unwrap_or_default();
                    self.pool.lock().extend(unused);
                    return Err(Box::new(Answer::Release(Ok(ReleaseOutcome::Released))));
                }
                locks.owe(claim.owner, &path);
                Ok(locks.held(claim.owner).map(|held| remove(&held.path, held.index)))
            }
            _ => Ok(None),
        }
    }

    /// Makes calls in one transaction, behind a check of the fence if locks are taken.
    /// Answers which of them must be made by themselves.
    async fn together(
        self: &Arc<Self>,
        requests: &[Request],
        check: Option<Op>,
        mut parts: Vec<Part>,
        answers: &mut [Option<Answer>],
    ) -> Vec<usize> {
        let mut alone = Vec::new();
        while !parts.is_empty() {
            let operations = parts.iter().flat_map(|part| part.operations.iter().cloned());
            let operations: Vec<Op> = check.clone().into_iter().chain(operations).collect();
            match self.transact(Operation::Acquire, &operations).await {
                Ok(Ok(results)) => {
                    for part in parts {
                        let request = &requests[part.place];
                        let answer = self.applied(request, &results);
                        answers[part.place] = Some(answer);
                    }
                    return alone;
                }
                Ok(Err(errors)) => {
                    let mut first = usize::from(check.is_some());
                    let before = parts.len();
                    parts.retain(|part| {
                        let own = first..first + part.operations.len();
                        first = own.end;
                        let failed = errors.iter().any(|error| own.contains(&error.op_index));
                        if failed {
                            self.locks.lock().answered(requests[part.place].claim().owner);
                            alone.push(part.place);
                        }
                        !failed
                    });
                    if parts.len() == before {
                        let mut locks = self.locks.lock();
                        for Part { place, .. } in parts.drain(..) {
                            locks.answered(requests[place].claim().owner);
                            alone.push(place);
                        }
                    }
                }
                Err(error) => {
                    for part in parts {
                        let request = &requests[part.place];
                        let error = error.clone().with_operation(request.operation());
                        answers[part.place] =
                            Some(request.failed(error.with_key(&request.claim().key)));
                    }
                    return alone;
                }
            }
        }
        alone
    }

    /// The answer to a call that the shared transaction has made.
    fn applied(self: &Arc<Self>, request: &Request, results: &[Entry]) -> Answer {
        let claim = request.claim();
        match request {
            Request::Release(..) => {
                self.locks.lock().released(claim.owner);
                Answer::Release(Ok(ReleaseOutcome::Released))
            }
            _ => match claim.instead_of {
                Some(old) => {
                    self.locks.lock().released(old);
                    let free_in = Some(YIELD);
                    Answer::Acquire(Ok(AcquireOutcome::Queued { holder: None, free_in }))
                }
                None => Answer::Acquire(self.granted_by(claim, results)),
            },
        }
    }

    /// The grant of a claim whose lock was taken by a transaction with these results.
    fn granted_by(self: &Arc<Self>, claim: &Claim, results: &[Entry]) -> Result<AcquireOutcome> {
        let path = self.layout.path(&claim.key)?;
        let Some(entry) = results.iter().rfind(|entry| entry.key == path) else {
            let silence = Error::new(ErrorKind::Unknown, Operation::Acquire).with_key(&claim.key);
            return Err(
                silence.with_message("Consul did not say by which write the lock was granted")
            );
        };
        self.grant(claim, entry)
    }

    /// The grant of a claim that has this key.
    fn grant(&self, claim: &Claim, entry: &Entry) -> Result<AcquireOutcome> {
        let index = entry.modify_index;
        let Some(first) = first_token(index) else {
            return Err(Error::new(ErrorKind::Unsupported, Operation::Acquire).with_key(&claim.key).with_message(
                format!("the index of Consul is {index}, and fencing tokens end at 2^43; no lock is granted"),
            ));
        };
        let session = self.current.get();
        let session = session.filter(|it| !it.has_ended() && entry.holder() == Some(&it.id));
        let Some(session) = session else {
            return Err(Error::new(ErrorKind::Unavailable, Operation::Acquire)
                .with_key(&claim.key)
                .with_message("the session with Consul ended in the meantime"));
        };
        self.locks.lock().granted(claim.owner, &entry.key, index);
        let grant = Grant { first, count: TOKENS };
        Ok(AcquireOutcome::SessionGranted { grant, term: session.term(self.ttl) })
    }

    /// Where a claim is in Consul.
    fn path_of(&self, claim: &Claim) -> Result<String> {
        match claim.mode.is_permits() {
            true => self.layout.permits(&claim.key),
            false => self.layout.path(&claim.key),
        }
    }

    /// Makes a call by itself, after a look at its key.
    async fn make_alone(
        self: &Arc<Self>,
        request: &Request,
        session: Option<Arc<Session>>,
    ) -> Answer {
        match (request, session) {
            (Request::Acquire(claim), Some(session)) => {
                let acquired = self.acquire_alone(claim, &session).await;
                Answer::Acquire(acquired.map_err(|error| error.with_key(&claim.key)))
            }
            (Request::Release(claim, _), _) => {
                let released = self.release_alone(claim).await;
                Answer::Release(released.map_err(|error| error.with_key(&claim.key)))
            }
            (request, _) => request.unanswered(),
        }
    }

    async fn acquire_alone(
        self: &Arc<Self>,
        claim: &Claim,
        session: &Session,
    ) -> Result<AcquireOutcome> {
        let path = self.path_of(claim)?;
        if claim.mode.is_permits() {
            return self.acquire_permits(claim, &path).await;
        }
        if let Some(old) = claim.instead_of {
            let _ = self.remove_lock(old, &path).await?;
        }
        if claim.queue {
            self.wait(claim, &path);
        }
        self.outdate_requests(Operation::Acquire, claim.owner).await?;
        for _ in 0..ATTEMPTS {
            let entry = self.read(Operation::Acquire, &path).await?;
            let check = match &entry {
                None => Op::check_absent(&path),
                Some(entry) => {
                    check_flags(entry, claim)?;
                    match entry.holder() {
                        None => Op::check_index(&path, entry.modify_index),
                        Some(holder) => {
                            if holder == session.id && entry.owner() == Some(claim.owner) {
                                return self.grant(claim, entry);
                            }
                            let by = self.holder_of(entry.value(), holder).await;
                            return Ok(self.busy(claim, &path, by));
                        }
                    }
                }
            };
            let lock = Op::lock(&path, &session.id, &LockValue::of(claim), LOCK_FLAGS);
            let fence = session.fence.state();
            self.locks.lock().ask(claim.owner, fence);
            let operations = [session.fence.check(fence), check, lock];
            match self.transact(Operation::Acquire, &operations).await? {
                Ok(results) => return self.granted_by(claim, &results),
                Err(errors) => {
                    self.locks.lock().answered(claim.owner);
                    let is = |which: fn(&OperationError) -> bool| errors.iter().any(which);
                    if is(OperationError::is_denied) {
                        return Err(denied(Operation::Acquire, &self.http.address()));
                    }
                    let is_delayed = is(OperationError::is_lock_delay);
                    self.locks.lock().set_delayed(&path, is_delayed);
                    if is_delayed {
                        return Ok(delayed(claim));
                    }
                    if is(OperationError::is_invalid_session) {
                        self.session_ended(session);
                        return Err(Error::new(ErrorKind::Unavailable, Operation::Acquire)
                            .with_message("the session with Consul has ended; a new one is made"));
                    }
                    if is(|error| error.op_index == 0) {
                        // A change of the fence was not answered, or somebody removed it.
                        self.change_fence(Operation::Acquire, session, fence).await?;
                    }
                }
            }
        }
        Ok(self.busy(claim, &path, None))
    }

    pub(super) fn busy(
        &self,
        claim: &Claim,
        path: &str,
        holder: Option<Arc<Holder>>,
    ) -> AcquireOutcome {
        match claim.queue {
            false => AcquireOutcome::Busy { holder },
            true if self.locks.lock().is_watched(path) => AcquireOutcome::SessionQueued { holder },
            true => AcquireOutcome::Queued { holder, free_in: None },
        }
    }

    /// Who has a lock: a client of dlock, or who made the session.
    pub(super) async fn holder_of(
        &self,
        value: Option<LockValue>,
        session: &str,
    ) -> Option<Arc<Holder>> {
        if let Some(value) = value {
            return Some(value.into_holder());
        }
        let info = self.session_info(session).await.ok().flatten()?;
        let name = if info.name.is_empty() { "another client of Consul" } else { &info.name };
        Some(foreign_holder(name, &info.node))
    }

    async fn release_alone(&self, claim: &Claim) -> Result<ReleaseOutcome> {
        let path = self.path_of(claim)?;
        self.locks.lock().stop_waiting(claim.owner, &path);
        self.remove(claim.owner, &path).await
    }

    /// Removes what an owner has.
    async fn remove(&self, owner: Owner, path: &str) -> Result<ReleaseOutcome> {
        match is_prefix(path) {
            true => self.remove_permits(owner, path).await,
            false => self.remove_lock(owner, path).await,
        }
    }

    /// Removes the lock of an owner, after a look whether it is there.
    async fn remove_lock(&self, owner: Owner, path: &str) -> Result<ReleaseOutcome> {
        self.outdate_requests(Operation::Release, owner).await?;
        for _ in 0..ATTEMPTS {
            let entry = self.read(Operation::Release, path).await?;
            let held = entry.filter(|it| it.holder().is_some() && it.owner() == Some(owner));
            let Some(entry) = held else {
                self.locks.lock().released(owner);
                return Ok(ReleaseOutcome::AlreadyLost);
            };
            let removal = remove(path, entry.modify_index);
            match self.transact(Operation::Release, &removal).await? {
                Ok(_) => {
                    self.locks.lock().released(owner);
                    return Ok(ReleaseOutcome::Released);
                }
                Err(errors) if errors.iter().any(OperationError::is_denied) => {
                    return Err(denied(Operation::Release, &self.http.address()));
                }
                Err(_) => {} // it changed in the meantime
            }
        }
        Err(Error::new(ErrorKind::Unavailable, Operation::Release)
            .with_message("the key changes all the time; it is tried again"))
    }

    /// Removes what releases could not: their callers do not wait for it any more.
    pub(super) async fn remove_owed(&self) {
        let owed = self.locks.lock().owed();
        for (owner, path) in owed {
            if let Err(error) = self.remove(owner, &path).await {
                tracing::debug!(why = %error, "a lock that was given up is not removed yet");
            }
        }
    }
}

/// Removes a key if it was changed last by this write.
pub(super) fn remove(path: &str, index: u64) -> Vec<Op> {
    vec![Op::check_index(path, index), Op::delete(path)]
}

/// A key that is used for something else is not touched.
fn check_flags(entry: &Entry, claim: &Claim) -> Result<()> {
    let used_for = match entry.flags {
        LOCK_FLAGS => return Ok(()),
        SEMAPHORE_FLAGS => "a semaphore (`consul lock -n`)".to_owned(),
        flags => format!("something else (its flags are {flags:#x})"),
    };
    Err(Error::new(ErrorKind::Invalid, Operation::Acquire).with_key(&claim.key).with_message(
        format!(
            "the key of this lock in Consul is used for {used_for}; choose another key or namespace"
        ),
    ))
}

/// Nobody has the lock, and nobody gets it yet.
pub(super) fn delayed(claim: &Claim) -> AcquireOutcome {
    let reason = "the lock-delay of Consul (a session ended without a release, so what it held stays taken for its lock-delay)";
    let holder = Some(foreign_holder(reason, ""));
    match claim.queue {
        false => AcquireOutcome::Busy { holder },
        true => AcquireOutcome::Queued { holder, free_in: None },
    }
}
