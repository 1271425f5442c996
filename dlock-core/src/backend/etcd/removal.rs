//! How entries are removed. An entry would stay for as long as the session lives, so a
//! removal goes on until it is done or the session is over, whoever still waits for it.
//!
//! An entry that is to stay for a while after the release stays where it is, so that nobody
//! overtakes it, and is attached to a lease of its own with that ttl.

use std::sync::Arc;
use std::time::Duration;

use etcd_client::{Compare, CompareOp, PutOptions, Txn, TxnOp, TxnOpResponse};
use tokio::task::JoinHandle;

use super::claims::Entry;
use super::errors::CallError;
use super::layout;
use super::session::{RETRY, Session, whole_seconds};
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
    /// if a request that makes it may be on its way.
    pub(super) fn discard(self: &Arc<Self>, owner: Owner) {
        match self.claims.get(owner) {
            Some(known) if known.doubtful_version(self.version()).is_some() => {
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
        let removed = loop {
            match self.remove_once(owner, how).await {
                Err(error) if error.is_passing() && !self.is_over() => {
                    tokio::time::sleep(RETRY).await;
                }
                removed => break removed,
            }
        };
        self.claims.forget(owner);
        self.claims.removals.end(owner);
        removed
    }

    async fn remove_once(&self, owner: Owner, how: Release) -> Result<bool, CallError> {
        let Some(known) = self.claims.get(owner) else { return Ok(false) };
        self.queues.leave(&known.prefix, owner);
        if let Some(version) = known.doubtful_version(self.version()) {
            self.fence(version).await?;
        }
        let entry = layout::entry(&known.prefix, self.lease, owner);
        if let Release::After(time) = how {
            return self.keep_taken(&entry, time).await;
        }
        let sent_before = self.claims.removing(owner);
        // An owner that was busy may join the queue. A delete that is late must not remove the
        // entry that it makes then.
        let is_known = known
            .certain_revision()
            .map(|revision| Compare::create_revision(entry.as_str(), CompareOp::Equal, revision));
        let delete = Txn::new().when(is_known.into_iter().collect::<Vec<_>>());
        let delete = delete.and_then([TxnOp::delete(entry, None)]);
        let answer = self.transaction(delete).await?;
        Ok(sent_before || answer.op_responses().iter().any(was_there))
    }

    /// Keeps an entry for this time, whatever becomes of the session. False if it is not there.
    async fn keep_taken(&self, entry: &str, time: Duration) -> Result<bool, CallError> {
        let connection = self.connections.get().await?;
        let mut leases = connection.client().lease_client();
        let lease = connection.call(leases.grant(whole_seconds(time), None)).await?.id();
        let is_there = Compare::create_revision(entry, CompareOp::Greater, 0);
        let options = PutOptions::new().with_lease(lease).with_ignore_value();
        let keep = Txn::new().when([is_there]).and_then([TxnOp::put(entry, "", Some(options))]);
        let is_kept = self.transaction(keep).await?.succeeded();
        let until = if is_kept { time } else { Duration::ZERO };
        // A lease has whole seconds, and etcd is late to end it: it does so if we cannot.
        tokio::spawn(async move {
            tokio::time::sleep(until).await;
            let _ = connection.call(leases.revoke(lease)).await;
        });
        Ok(is_kept)
    }

    /// Removes an entry whose lock was broken, and the message about it. The operator does so
    /// too, unless he cannot any more.
    pub(super) async fn remove_broken(self: Arc<Self>, known: Option<Entry>, keys: [String; 2]) {
        loop {
            match self.remove_broken_once(known.as_ref(), &keys).await {
                Err(error) if error.is_passing() && !self.is_over() => {
                    tokio::time::sleep(RETRY).await;
                }
                _ => return,
            }
        }
    }

    async fn remove_broken_once(
        &self,
        known: Option<&Entry>,
        keys: &[String; 2],
    ) -> Result<(), CallError> {
        if let Some(version) = known.and_then(|known| known.doubtful_version(self.version())) {
            self.fence(version).await?;
        }
        let deletes = keys.each_ref().map(|key| TxnOp::delete(key.as_str(), None));
        self.transaction(Txn::new().and_then(deletes)).await.map(drop)
    }
}

/// Whether a delete found its key.
pub(super) fn was_there(answer: &TxnOpResponse) -> bool {
    matches!(answer, TxnOpResponse::Delete(deleted) if deleted.deleted() > 0)
}
