//! Permits of a semaphore: taking, keeping and giving them back.
//!
//! A permit of Consul is a session ([`semaphore`](super::semaphore)), so they come from a pool
//! of sessions. A session in the pool is not renewed: it is used again while it is young, and
//! ended when it is not ([`Shared::end_idle`]). Those of a claim are renewed with it.
//!
//! A claim in doubt that is given up or asked for again has its sessions ended, so that a
//! request which arrives late cannot take permits by them.

use std::sync::Arc;
use std::time::Duration;

use tokio::task::JoinSet;

use super::Shared;
use super::calls::delayed;
use super::errors::denied;
use super::fence::FenceState;
use super::semaphore::{self, Foreign, Semaphore};
use super::session::{Renewal, Session};
use super::wire::{Entry, LockValue, Operation as Op, OperationError};
use crate::claim::{
    AcquireOutcome, Claim, Grant, Holder, LossReason, Mode, Notice, Owner, ReleaseOutcome,
    RenewOutcome, SessionTerm,
};
use crate::clock::Moment;
use crate::error::{Error, ErrorKind, Operation, Result};
use crate::key::Key;

/// How often a semaphore that changes all the time is looked at for one call.
const ATTEMPTS: usize = 16;
/// Permits have no tokens.
const NO_TOKENS: Grant = Grant { first: 0, count: 0 };
/// How many permits a claim may have: all are taken in one transaction.
const MAX_PERMITS: u32 = 100;

/// How long the call that breaks a semaphore lasts. A longer delay goes on after it.
const MAX_WAIT: Duration = Duration::from_secs(1);

/// A session of the pool, and when its last answered renewal was sent.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct PermitSession {
    pub(super) id: String,
    as_of: Moment,
}

/// The permits of a claim.
#[derive(Clone, Debug)]
pub(super) struct HeldPermits {
    pub(super) prefix: String,
    pub(super) key: Key,
    /// The index of the write that granted them.
    pub(super) index: u64,
}

/// What came of leaving the dead holders of a semaphore out.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Burial {
    /// There are none.
    Nobody,
    /// They have their permits until their lock-delay is over.
    Delayed,
    /// Some were left out, or something has changed: the semaphore must be read again.
    Done,
}

fn wanted(claim: &Claim) -> (u32, u32) {
    match claim.mode {
        Mode::Permits { count, of } => (count, of),
        _ => (1, 1),
    }
}

impl Shared {
    /// What is below the prefix of a semaphore.
    pub(super) async fn semaphore(&self, operation: Operation, prefix: &str) -> Result<Semaphore> {
        match self.transact(operation, &[Op::get_tree(prefix)]).await? {
            Ok(entries) => Semaphore::read(prefix, &entries).map_err(|Foreign(flags)| {
                Error::new(ErrorKind::Invalid, operation).with_message(format!(
                    "the key {} in Consul is used for something else than a semaphore (its flags are {flags:#x}); choose another key or namespace",
                    semaphore::value_path(prefix)
                ))
            }),
            // Nothing else can go wrong with a read.
            Err(_) => Err(denied(operation, &self.http.address())),
        }
    }

    /// The same for operators: something else than a semaphore has no permits.
    pub(super) async fn semaphore_if_any(
        &self,
        operation: Operation,
        prefix: &str,
    ) -> Result<Semaphore> {
        match self.semaphore(operation, prefix).await {
            Err(error) if error.kind() == ErrorKind::Invalid => Ok(Semaphore::default()),
            semaphore => semaphore,
        }
    }

    pub(super) async fn acquire_permits(
        self: &Arc<Self>,
        claim: &Claim,
        prefix: &str,
    ) -> Result<AcquireOutcome> {
        let (count, of) = wanted(claim);
        if count > MAX_PERMITS {
            return Err(Error::new(ErrorKind::Unsupported, Operation::Acquire).with_message(format!(
                "{count} permits are asked for at once, and consul:// can give {MAX_PERMITS} at most"
            )));
        }
        // Its keep-alive looks after the sessions of permits, and it gets the messages.
        let main = self.session().await?;
        if let Some(old) = claim.instead_of {
            let _ = self.remove_permits(old, prefix).await?;
        }
        if claim.queue {
            self.wait(claim, prefix);
        }
        for _ in 0..ATTEMPTS {
            let semaphore = self.semaphore(Operation::Acquire, prefix).await?;
            let own = semaphore.sessions_of(claim.owner);
            if !own.is_empty() && own.iter().all(|session| semaphore.is_held_by(session)) {
                return self.grant_permits(claim, prefix, semaphore.index.unwrap_or_default());
            }
            let has_another_limit =
                semaphore.taken() > 0 && semaphore.limit.is_some_and(|limit| limit != of);
            let is_full = semaphore.taken() + count as usize > of as usize;
            if is_full || has_another_limit {
                let burial = self.bury_dead(Operation::Acquire, &main, &semaphore).await?;
                self.locks.lock().set_delayed(prefix, burial == Burial::Delayed);
                if burial == Burial::Done {
                    continue;
                }
                if burial == Burial::Delayed && semaphore.has_room() {
                    return Ok(delayed(claim));
                }
            }
            if has_another_limit {
                return Err(Error::new(ErrorKind::Invalid, Operation::Acquire).with_message(format!(
                    "the semaphore has {} permits in Consul, and {of} were named here; all programs must name the same number",
                    semaphore.limit.unwrap_or_default()
                )));
            }
            if is_full {
                let first = semaphore.permits().next();
                let holder = match first.and_then(|entry| Some((entry, entry.holder()?))) {
                    Some((entry, session)) => self.holder_of(entry.value(), session).await,
                    None => None,
                };
                return Ok(self.busy(claim, prefix, holder));
            }
            let is_in_doubt = self.locks.lock().in_doubt(claim.owner).is_some();
            if is_in_doubt {
                let _ = self.remove_permits(claim.owner, prefix).await?;
                continue;
            }
            let sessions = self.take_sessions(claim.owner, count as usize).await?;
            let ids: Vec<String> = sessions.into_iter().map(|session| session.id).collect();
            let operations = semaphore.add(&ids, of, &LockValue::of_permit(claim, &main.id));
            self.locks.lock().ask(claim.owner, FenceState::default());
            match self.transact(Operation::Acquire, &operations).await? {
                Ok(results) => {
                    let index = results.iter().map(|entry| entry.modify_index).max();
                    return self.grant_permits(claim, prefix, index.unwrap_or_default());
                }
                Err(errors) => {
                    self.locks.lock().answered(claim.owner);
                    if errors.iter().any(OperationError::is_denied) {
                        return Err(denied(Operation::Acquire, &self.http.address()));
                    }
                    if errors.iter().any(OperationError::is_invalid_session) {
                        drop(self.locks.lock().take_assigned(claim.owner)); // they are over
                    }
                }
            }
        }
        // It changes all the time.
        match claim.queue {
            true => Ok(AcquireOutcome::Queued { holder: None, free_in: Some(super::calls::YIELD) }),
            false => Ok(AcquireOutcome::Busy { holder: None }),
        }
    }

    fn grant_permits(
        self: &Arc<Self>,
        claim: &Claim,
        prefix: &str,
        index: u64,
    ) -> Result<AcquireOutcome> {
        let Some(sessions) = self.locks.lock().assigned(claim.owner) else {
            return Err(Error::new(ErrorKind::Unknown, Operation::Acquire)
                .with_message("the sessions of the permits are not known any more"));
        };
        let (held, key) = (prefix.to_owned(), claim.key.clone());
        let held = HeldPermits { prefix: held, key, index };
        self.locks.lock().granted_permits(claim.owner, held);
        self.watch_permits(prefix);
        Ok(AcquireOutcome::SessionGranted { grant: NO_TOKENS, term: self.term_of(&sessions) })
    }

    fn term_of(&self, sessions: &[PermitSession]) -> SessionTerm {
        let as_of = sessions.iter().map(|session| session.as_of).min();
        SessionTerm { as_of: as_of.unwrap_or(Moment::from_nanos(0)), term: self.ttl }
    }

    /// The sessions for a claim: those that it has already, young ones of the pool, new ones.
    async fn take_sessions(&self, owner: Owner, count: usize) -> Result<Vec<PermitSession>> {
        let assigned = self.locks.lock().take_assigned(owner).unwrap_or_default();
        let (mut sessions, old): (Vec<_>, Vec<_>) =
            assigned.into_iter().partition(|session| self.is_young(session));
        {
            let mut pool = self.pool.lock();
            pool.extend(old); // to be ended
            while sessions.len() < count
                && let Some(place) = pool.iter().position(|session| self.is_young(session))
            {
                sessions.push(pool.swap_remove(place));
            }
        }
        loop {
            // Those that are made stay known when the call is given up meanwhile, so that a
            // claim of many permits gets on by asking again.
            self.locks.lock().assign(owner, sessions.clone());
            if sessions.len() >= count {
                return Ok(sessions);
            }
            let as_of = Moment::now();
            let name = format!("dlock: {}, a permit", self.name());
            match self.make_session(&name, self.ttl, self.lock_delay).await {
                Ok(id) => sessions.push(PermitSession { id, as_of }),
                Err(error) => {
                    let unused = self.locks.lock().take_assigned(owner).unwrap_or_default();
                    self.pool.lock().extend(unused);
                    return Err(error);
                }
            }
        }
    }

    fn is_young(&self, session: &PermitSession) -> bool {
        Moment::now().since(session.as_of) < self.ttl / 3
    }

    /// Ends the sessions of the pool that are not young any more.
    pub(super) async fn end_idle(&self) {
        let old: Vec<_> = {
            let mut pool = self.pool.lock();
            let (young, old) = pool.drain(..).partition(|session| self.is_young(session));
            *pool = young;
            old
        };
        self.end_sessions(old).await;
    }

    async fn end_sessions(&self, sessions: Vec<PermitSession>) {
        for session in sessions {
            if let Err(error) = self.destroy_session(&session.id).await {
                tracing::debug!(why = %error, "a session of a permit ends by its time");
            }
        }
    }

    /// Gives back what the client has of semaphores, and ends their sessions.
    pub(super) async fn close_permits(&self) {
        let held = self.locks.lock().all_permits();
        for (owner, prefix) in held {
            let _ = self.remove_permits(owner, &prefix).await;
        }
        let idle = std::mem::take(&mut *self.pool.lock());
        self.end_sessions(idle).await;
    }

    /// Renews the sessions of a claim, and looks whether they have their permits.
    pub(super) async fn renew_permits(self: &Arc<Self>, lease: &Claim) -> Result<RenewOutcome> {
        let held = self.locks.lock().permits(lease.owner).cloned();
        let sessions = self.locks.lock().assigned(lease.owner);
        let (Some(held), Some(sessions)) = (held, sessions) else {
            return Ok(RenewOutcome::Lost);
        };
        let mut renewals = JoinSet::new();
        for session in sessions {
            let shared = self.clone();
            renewals.spawn(async move {
                let as_of = Moment::now();
                let renewal = shared.send_renewal(&session.id).await;
                (PermitSession { id: session.id, as_of }, renewal)
            });
        }
        let mut sessions = Vec::new();
        while let Some(renewed) = renewals.join_next().await {
            match renewed {
                Ok((session, Ok(Renewal::Done))) => sessions.push(session),
                Ok((_, Ok(Renewal::Ended))) => {
                    self.lose_permits(lease.owner, &held.prefix);
                    return Ok(RenewOutcome::Lost);
                }
                Ok((_, Err(error))) => return Err(error),
                Err(_) => return Err(Error::new(ErrorKind::Unknown, Operation::Renew)),
            }
        }
        let semaphore = self.semaphore(Operation::Renew, &held.prefix).await?;
        if !sessions.iter().all(|session| semaphore.is_held_by(&session.id)) {
            self.lose_permits(lease.owner, &held.prefix);
            return Ok(RenewOutcome::Lost);
        }
        let term = self.term_of(&sessions);
        self.locks.lock().assign(lease.owner, sessions);
        Ok(RenewOutcome::SessionHeld { others_wait: false, term })
    }

    /// Some of a claim's permits are gone: the others are given back by the keep-alive.
    fn lose_permits(&self, owner: Owner, prefix: &str) {
        let mut locks = self.locks.lock();
        locks.lost_permits(owner);
        locks.owe(owner, prefix);
    }

    /// Tells the claims that have lost permits, by a look that is at least as new as their
    /// grants.
    pub(super) fn check_permits(&self, prefix: &str, semaphore: &Semaphore, index: u64) {
        let held = self.locks.lock().permits_below(prefix);
        for (owner, held) in held.into_iter().filter(|(_, held)| held.index <= index) {
            let sessions = self.locks.lock().assigned(owner).unwrap_or_default();
            if sessions.iter().all(|session| semaphore.is_held_by(&session.id)) {
                continue;
            }
            self.lose_permits(owner, prefix);
            if let Some(listener) = self.listener() {
                listener.on_notice(&held.key, owner, Notice::Lost(LossReason::SessionLost));
            }
        }
    }

    /// Gives back the permits of an owner, after a look which there are.
    pub(super) async fn remove_permits(
        &self,
        owner: Owner,
        prefix: &str,
    ) -> Result<ReleaseOutcome> {
        let mut outcome = ReleaseOutcome::AlreadyLost;
        for _ in 0..ATTEMPTS {
            let semaphore = self.semaphore(Operation::Release, prefix).await?;
            let own = semaphore.sessions_of(owner);
            if !own.is_empty() {
                match self.transact(Operation::Release, &semaphore.remove(&own)).await? {
                    Ok(_) => outcome = ReleaseOutcome::Released,
                    Err(errors) if errors.iter().any(OperationError::is_denied) => {
                        return Err(denied(Operation::Release, &self.http.address()));
                    }
                    Err(_) => continue, // it changed in the meantime
                }
                if !semaphore.dead().is_empty() {
                    continue; // they may be all that is left
                }
            }
            // The last one removes the value, also if its own permits were lost: the value
            // would stay until somebody uses the semaphore again.
            let mut burial = Burial::Nobody;
            if own.is_empty()
                && semaphore.is_abandoned()
                && let Some(session) = self.current.get()
            {
                burial = self.bury_dead(Operation::Release, &session, &semaphore).await?;
                if burial == Burial::Done {
                    continue;
                }
            }
            let (sessions, in_doubt) = self.locks.lock().released_permits(owner);
            if burial == Burial::Delayed {
                self.locks.lock().owe(owner, prefix);
            }
            if in_doubt || outcome == ReleaseOutcome::AlreadyLost {
                self.end_sessions(sessions).await;
            } else {
                self.pool.lock().extend(sessions);
            }
            return Ok(outcome);
        }
        Err(Error::new(ErrorKind::Unavailable, Operation::Release)
            .with_message("the semaphore changes all the time; it is tried again"))
    }

    /// Leaves the holders out whose sessions have ended, and whose lock-delay is over.
    async fn bury_dead(
        &self,
        operation: Operation,
        session: &Session,
        semaphore: &Semaphore,
    ) -> Result<Burial> {
        let mut dead = semaphore.dead();
        dead.truncate(semaphore::BURIED_AT_ONCE);
        while !dead.is_empty() {
            let burial = semaphore.bury(&dead, &session.id);
            let Err(errors) = self.transact(operation, &burial).await? else {
                return Ok(Burial::Done);
            };
            if errors.iter().any(OperationError::is_denied) {
                return Err(denied(operation, &self.http.address()));
            }
            if errors.iter().any(OperationError::is_invalid_session) {
                self.session_ended(session);
                let ended = Error::new(ErrorKind::Unavailable, operation);
                return Err(ended.with_message("the session with Consul has ended"));
            }
            let delayed = errors.iter().filter(|error| error.is_lock_delay());
            let delayed: Vec<usize> =
                delayed.map(|error| error.op_index / semaphore::BURIAL).collect();
            if delayed.is_empty() {
                return Ok(Burial::Done); // it changed in the meantime
            }
            let mut place = 0..;
            dead.retain(|_| place.next().is_none_or(|place| !delayed.contains(&place)));
        }
        Ok(if semaphore.dead().is_empty() { Burial::Nobody } else { Burial::Delayed })
    }

    /// Takes the permits of a semaphore from whoever has them, a delay after they were told.
    pub(super) async fn break_permits(
        self: &Arc<Self>,
        key: &Key,
        by: &Holder,
        delay: Duration,
    ) -> Result<usize> {
        let prefix = self.layout.permits(key)?;
        let semaphore = self.semaphore_if_any(Operation::Break, &prefix).await?;
        let broken: Vec<Entry> = semaphore.permits().cloned().collect();
        if broken.is_empty() {
            return Ok(0);
        }
        for (entry, _) in semaphore::by_owner(broken.iter()) {
            self.send_break_notice(&prefix, by, entry).await?;
        }
        let sessions = broken.iter().filter_map(|entry| entry.holder().map(str::to_owned));
        let sessions: Vec<String> = sessions.collect();
        let shared = self.clone();
        let removing = tokio::spawn(async move {
            tokio::time::sleep(delay).await;
            for _ in 0..ATTEMPTS {
                let semaphore = shared.semaphore(Operation::Break, &prefix).await?;
                let removal = semaphore.remove(&sessions);
                if shared.transact(Operation::Break, &removal).await?.is_ok() {
                    break;
                }
            }
            Ok::<(), Error>(())
        });
        // A command that breaks a lock ends after this call.
        if let Ok(Ok(removed)) = tokio::time::timeout(MAX_WAIT, removing).await {
            removed?;
        }
        Ok(semaphore::by_owner(broken.iter()).len())
    }
}
