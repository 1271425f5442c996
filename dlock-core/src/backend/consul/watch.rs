//! Waiting for a key: a query that the agent answers when the key has changed.

use std::sync::{Arc, Weak};

use super::Shared;
use super::layout::escaped;
use super::locks::{Locks, is_prefix};
use super::semaphore::Semaphore;
use super::session::{BlockingQuery, PAUSE};
use super::wire::Entry;
use crate::backend::abort_on_drop::AbortOnDrop;
use crate::claim::{Claim, Notice};

impl Shared {
    /// Notes that a claim waits, and starts to watch its key. To be called *before* the key
    /// is looked at for the last time, so that no release is missed.
    pub(super) fn wait(self: &Arc<Self>, claim: &Claim, path: &str) {
        let mut locks = self.locks.lock();
        if locks.wait(claim.owner, path, &claim.key) {
            self.start_watch(&mut locks, path);
        }
    }

    /// Watches the semaphore that a client has permits of, to hear of their loss.
    pub(super) fn watch_permits(self: &Arc<Self>, prefix: &str) {
        let mut locks = self.locks.lock();
        if locks.must_watch(prefix) {
            self.start_watch(&mut locks, prefix);
        }
    }

    fn start_watch(self: &Arc<Self>, locks: &mut Locks, path: &str) {
        let watch = tokio::spawn(watch(Arc::downgrade(self), path.to_owned()));
        locks.watched_by(path, AbortOnDrop(watch.abort_handle()));
    }

    /// Whether what was read of a key or semaphore leaves room for somebody.
    fn is_free(&self, path: &str, found: &[Entry], index: u64) -> bool {
        if !is_prefix(path) {
            return found.first().is_none_or(|entry| entry.holder().is_none());
        }
        match Semaphore::read(path, found) {
            Ok(semaphore) => {
                self.check_permits(path, &semaphore, index);
                semaphore.has_room()
            }
            Err(_) => true, // who asks is told why not
        }
    }

    /// The claims that wait for this key ask again.
    fn wake(&self, path: &str) {
        let waiting = self.locks.lock().waiting(path);
        let Some(listener) = self.listener() else { return };
        for (key, owner) in waiting {
            listener.on_notice(&key, owner, Notice::TryAgain);
        }
    }
}

/// Wakes who waits for a key whenever it is seen free, until it is aborted.
async fn watch(shared: Weak<Shared>, path: String) {
    let recurse = if is_prefix(&path) { "?recurse" } else { "" };
    let mut query = BlockingQuery::new(format!("/v1/kv/{}{recurse}", escaped(&path)));
    loop {
        let Some(shared) = shared.upgrade() else { return };
        match query.next(&shared).await {
            Ok(body) => {
                let found = serde_json::from_slice::<Vec<Entry>>(&body).unwrap_or_default();
                if shared.is_free(&path, &found, query.index()) {
                    shared.wake(&path);
                    // A query of a key that is absent is answered for changes of other keys
                    // too, and for its lock-delay nobody can take it.
                    if shared.locks.lock().is_delayed(&path) {
                        tokio::time::sleep(PAUSE).await;
                    }
                }
            }
            Err(error) => tracing::debug!(why = %error, "a query of a key failed"),
        }
    }
}
