//! How entries are removed. An entry would stay for as long as the session lives, so a
//! removal goes on until it is done or the session is over, whoever still waits for it.

use std::sync::Arc;
use std::time::Duration;

use etcd_client::{Txn, TxnOp, TxnOpResponse};

use super::errors::CallError;
use super::layout;
use super::session::{RETRY, Session};
use crate::claim::Owner;

impl Session {
    /// Removes what this owner has. True if it was there; `None` if it is not done after
    /// `patience`: it goes on then.
    pub(super) async fn remove(
        self: &Arc<Self>,
        owner: Owner,
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
        let removing = tokio::spawn(self.clone().remove_until_done(owner));
        match tokio::time::timeout(patience, removing).await {
            Ok(Ok(removed)) => Some(removed),
            _ => None,
        }
    }

    async fn remove_until_done(self: Arc<Self>, owner: Owner) -> Result<bool, CallError> {
        let removed = loop {
            match self.remove_once(owner).await {
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

    async fn remove_once(&self, owner: Owner) -> Result<bool, CallError> {
        let Some(known) = self.claims.get(owner) else { return Ok(false) };
        self.queues.leave(&known.prefix, owner);
        if known.is_doubtful() {
            self.fence().await?;
        }
        let sent_before = self.claims.removing(owner);
        let entry = TxnOp::delete(layout::entry(&known.prefix, self.lease, owner), None);
        let answer = self.transaction(Txn::new().and_then([entry])).await?;
        Ok(sent_before || answer.op_responses().iter().any(was_there))
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
