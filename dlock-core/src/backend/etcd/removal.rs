//! How entries are removed. An entry would stay for as long as the session lives, so a
//! removal goes on until it is done or the session is over, whoever still waits for it.
//!
//! An entry that is to stay for a while after the release stays where it is, so that nobody
//! overtakes it, and is attached to a lease of its own with that ttl.

use std::sync::Arc;
use std::time::Duration;

use etcd_client::{Compare, CompareOp, PutOptions, Txn, TxnOp, TxnOpResponse};

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
        if !self.claims.leave(owner) {
            let left = async {
                while self.claims.is_leaving(owner) {
                    tokio::time::sleep(RETRY / 10).await;
                }
            };
            return tokio::time::timeout(patience, left).await.ok().map(|()| Ok(true));
        }
        let removing = tokio::spawn(self.clone().remove_until_done(owner, how));
        match tokio::time::timeout(patience, removing).await {
            Ok(Ok(removed)) => Some(removed),
            _ => None,
        }
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
        self.claims.left(owner);
        removed
    }

    async fn remove_once(&self, owner: Owner, how: Release) -> Result<bool, CallError> {
        let Some(known) = self.claims.get(owner) else { return Ok(false) };
        self.queues.leave(&known.prefix, owner);
        if known.is_doubtful() {
            self.fence().await?;
        }
        let entry = layout::entry(&known.prefix, self.lease, owner);
        if let Release::After(time) = how {
            return self.keep_taken(&entry, time).await;
        }
        let sent_before = self.claims.removing(owner);
        let delete = Txn::new().and_then([TxnOp::delete(entry, None)]);
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

    /// Deletes keys, if the store can be reached.
    pub(super) async fn delete(&self, keys: &[String]) {
        let deletes: Vec<TxnOp> =
            keys.iter().map(|key| TxnOp::delete(key.as_str(), None)).collect();
        let _ = self.transaction(Txn::new().and_then(deletes)).await;
    }
}

/// Whether a delete found its key.
pub(super) fn was_there(answer: &TxnOpResponse) -> bool {
    matches!(answer, TxnOpResponse::Delete(deleted) if deleted.deleted() > 0)
}
