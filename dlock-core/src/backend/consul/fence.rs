//! A fence against requests that arrive late.
//!
//! Without a leader, an agent and the servers keep a request for some seconds and send it
//! again, also when its client does not wait for it any more. So a request to take a lock may
//! be carried out after the client has asked again, or has given the lock back. The key would
//! then be taken for as long as the session lives, and nobody would know.
//!
//! So a session has a key of its own, its fence. Every transaction that takes a lock checks
//! that the fence is as the client knew it when it sent the request. A client that was not
//! answered changes the fence before it asks again or gives the lock back: what it reads
//! afterwards is all that will ever come of the earlier request.
//!
//! The key is absent until the first request without an answer, and goes with the session:
//! then late requests fail because their session is not valid.

use parking_lot::Mutex;
use rand::RngExt as _;

use super::Shared;
use super::errors::denied;
use super::layout;
use super::session::Session;
use super::wire::{Operation as Op, OperationError};
use crate::claim::Owner;
use crate::error::{Error, ErrorKind, Operation, Result};

/// The state of a fence: the index of its last change, or `None` while it is absent.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct FenceState(Option<u64>);

/// The fence of a session.
pub(super) struct Fence {
    path: String,
    state: Mutex<FenceState>,
    changing: tokio::sync::Mutex<()>,
}

impl Fence {
    /// The fence of the session with this id, which is new.
    pub(super) fn new(session: &str) -> Self {
        let (path, state) = (layout::fence(session), Mutex::default());
        Fence { path, state, changing: tokio::sync::Mutex::default() }
    }

    pub(super) fn state(&self) -> FenceState {
        *self.state.lock()
    }

    /// Fails a transaction when the fence is not in this state any more.
    pub(super) fn check(&self, state: FenceState) -> Op {
        match state {
            FenceState(None) => Op::check_absent(&self.path),
            FenceState(Some(index)) => Op::check_index(&self.path, index),
        }
    }
}

impl Shared {
    /// Lets no earlier request of this owner be carried out from now on. Whether one was is
    /// to be read after this.
    pub(super) async fn outdate_requests(&self, operation: Operation, owner: Owner) -> Result<()> {
        let in_doubt = self.locks.lock().in_doubt(owner);
        match (in_doubt, self.current.get()) {
            (Some(state), Some(session)) => self.change_fence(operation, &session, state).await,
            _ => Ok(()), // without a session they are not valid
        }
    }

    /// Changes the fence of a session, unless it is not in this state any more.
    pub(super) async fn change_fence(
        &self,
        operation: Operation,
        session: &Session,
        state: FenceState,
    ) -> Result<()> {
        let fence = &session.fence;
        let _changing = fence.changing.lock().await;
        if fence.state() != state {
            return Ok(());
        }
        // Consul does not take the same value for a change.
        let value = format!("{:016x}", rand::rng().random::<u64>());
        let change = Op::lock(&fence.path, &session.id, &value, 0);
        match self.transact(operation, &[change]).await? {
            Ok(changed) => {
                let index = changed.iter().find(|entry| entry.key == fence.path);
                let index = index.map(|entry| entry.modify_index).ok_or_else(|| {
                    Error::new(ErrorKind::Unknown, operation)
                        .with_message("Consul did not say by which write a key was changed")
                })?;
                *fence.state.lock() = FenceState(Some(index));
                Ok(())
            }
            Err(errors) if errors.iter().any(OperationError::is_denied) => {
                Err(denied(operation, &self.http.address()))
            }
            Err(errors) => {
                if errors.iter().any(OperationError::is_invalid_session) {
                    self.session_ended(session);
                }
                Err(Error::new(ErrorKind::Unavailable, operation)
                    .with_message("the session with Consul has ended; a new one is made"))
            }
        }
    }
}
