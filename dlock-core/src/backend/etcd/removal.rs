//! How entries are removed. An entry would stay for as long as the session lives, so a
//! removal goes on until it is done or the session is over, whoever still waits for it. Only
//! then its name can be used again (`names.rs`).
//!
//! An entry that is to stay for a while after the release stays where it is, so that nobody
//! overtakes it, and is attached to a lease of its own with that ttl.

use std::sync::Arc;
use std::time::Duration;

use etcd_client::{Compare, CompareOp, KeyValue, PutOptions, Txn, TxnOp, TxnOpResponse};
use tokio::task::JoinHandle;

use super::claims::Entry;
use super::errors::CallError;
use super::names::Name;
use super::record::Broken;
use super::session::{RETRY, Session, whole_seconds};
use super::step::{delete, was_there};
use crate::claim::{Owner, Release};

impl Session {
    /// Removes what this owner has. True if it was there; `None` if it is not done after
    /// `patience`: it goes on then.
    pub(super) async fn remove(
        self: &Arc<Self>,
        owner: Owner,
        how: Release,
        patience: Duration,
    ) -> Option<Result<bool, CallError>> {
        let Some(removing) = self.start_removal(owner, how) else {
            let left = async {
                while self.claims.removals.is_under_way(owner) {
                    tokio::time::sleep(RETRY / 10).await;
                }
            };
            return tokio::time::timeout(patience, left).await.ok().map(|()| Ok(true));
        };
        match tokio::time::timeout(patience, removing).await {
            Ok(Ok(removed)) => Some(removed),
            _ => None,
        }
    }

    /// What this owner has is not wanted any more, or is gone. It is not enough to forget it
    /// if a request that makes it may be on its way, or was carried out.
    pub(super) fn discard(self: &Arc<Self>, owner: Owner) {
        match self.claims.get(owner) {
            Some(known) if known.certain_revision().is_none() => {
                drop(self.start_removal(owner, Release::Now));
            }
            _ => drop(self.claims.forget(owner)),
        }
    }

    /// `None` if the removal is under way.
    pub(super) fn start_removal(
        self: &Arc<Self>,
        owner: Owner,
        how: Release,
    ) -> Option<JoinHandle<Result<bool, CallError>>> {
        let is_first = self.claims.removals.begin(owner);
        is_first.then(|| tokio::spawn(self.clone().remove_until_done(owner, how)))
    }

    async fn remove_until_done(
        self: Arc<Self>,
        owner: Owner,
        how: Release,
    ) -> Result<bool, CallError> {
        let removed = self.until_answered(|| self.remove_once(owner, how)).await;
        if let (Some(known), Err(_)) = (self.claims.forget(owner), &removed) {
            known.name.abandon();
        }
        self.claims.removals.end(owner);
        removed
    }

    async fn remove_once(self: &Arc<Self>, owner: Owner, how: Release) -> Result<bool, CallError> {
        let Some(known) = self.claims.get(owner) else { return Ok(false) };
        self.queues.leave(&known.name.prefix, owner);
        let Some(revision) = self.settled_revision(&known).await? else {
            return Ok(self.claims.removing(owner));
        };
        if let Release::After(time) = how {
            return self.keep_taken(&known.name, revision, time).await;
        }
        let sent_before = self.claims.removing(owner);
        let answer = self.transaction(delete(&known.name.entry, revision)).await?;
        Ok(sent_before || answer.op_responses().iter().any(was_there))
    }

    /// The create revision of an entry that no request makes any more; `None` if it is not
    /// there.
    async fn settled_revision(&self, known: &Entry) -> Result<Option<i64>, CallError> {
        if let Some(revision) = known.certain_revision() {
            return Ok(Some(revision));
        }
        if let Some(version) = known.doubtful_version(self.version()) {
            self.fence(version).await?;
        }
        let read = TxnOp::get(known.name.entry.as_str(), None);
        let answer = self.transaction(Txn::new().and_then([read])).await?;
        Ok(answer.op_responses().iter().find_map(|answer| match answer {
            TxnOpResponse::Get(found) => found.kvs().first().map(KeyValue::create_revision),
            _ => None,
        }))
    }

    /// Keeps an entry for this time, whatever becomes of the session. False if it is not there.
    async fn keep_taken(
        self: &Arc<Self>,
        name: &Arc<Name>,
        revision: i64,
        time: Duration,
    ) -> Result<bool, CallError> {
        let connection = self.connections.get().await?;
        let mut leases = connection.client().lease_client();
        let lease = connection.call(leases.grant(whole_seconds(time), None)).await?.id();
        let is_same = Compare::create_revision(name.entry.as_str(), CompareOp::Equal, revision);
        let options = PutOptions::new().with_lease(lease).with_ignore_value();
        let keep = TxnOp::put(name.entry.as_str(), "", Some(options));
        let keeping = Txn::new().when([is_same]).and_then([keep]);
        let is_kept = match connection.call(connection.kv().txn(keeping)).await {
            Ok(answer) => answer.succeeded(),
            // This lease is over and not that of the session, so another one is asked for.
            Err(CallError::SessionOver) => return Err(CallError::Outdated),
            Err(error) => return Err(error),
        };
        let until = if is_kept { time } else { Duration::ZERO };
        // A lease has whole seconds, and etcd is late to end it: it does so if we cannot.
        let (session, name) = (self.clone(), name.clone());
        tokio::spawn(async move {
            tokio::time::sleep(until).await;
            let _ = connection.call(leases.revoke(lease)).await;
            // An earlier attempt may have kept it by another lease.
            let removing = || session.transaction(delete(&name.entry, revision));
            if session.until_answered(removing).await.is_err() {
                name.abandon();
            }
        });
        Ok(is_kept)
    }

    /// Removes an entry whose lock was broken, and the message about it. The operator does so
    /// too, unless he cannot any more.
    pub(super) async fn remove_broken(
        self: Arc<Self>,
        known: Option<Entry>,
        broken: Broken,
        message: String,
    ) {
        let removing = || self.remove_broken_once(known.as_ref(), &broken, &message);
        let removed = self.until_answered(removing).await;
        if let (Some(known), Err(_)) = (&known, removed) {
            known.name.abandon();
        }
    }

    async fn remove_broken_once(
        &self,
        known: Option<&Entry>,
        broken: &Broken,
        message: &str,
    ) -> Result<(), CallError> {
        let mut entries = vec![(broken.entry.as_str(), broken.revision)];
        if let Some(known) = known
            && let Some(revision) = self.settled_revision(known).await?
        {
            entries.push((&known.name.entry, revision));
        }
        entries.dedup();
        let deletes = entries.iter().map(|(entry, revision)| TxnOp::txn(delete(entry, *revision)));
        let deletes: Vec<TxnOp> = deletes.chain([TxnOp::delete(message, None)]).collect();
        self.transaction(Txn::new().and_then(deletes)).await.map(drop)
    }

    /// Makes a call until it is answered, refused, or the session is over.
    async fn until_answered<T, C: Future<Output = Result<T, CallError>>>(
        &self,
        call: impl Fn() -> C,
    ) -> Result<T, CallError> {
        loop {
            match call().await {
                Err(error) if error.is_passing() && !self.is_over() => {
                    tokio::time::sleep(RETRY).await;
                }
                answer => return answer,
            }
        }
    }
}
