//! How a client ends.

use std::sync::atomic::Ordering;
use std::time::Duration;

use super::Core;
use crate::error::Operation;

/// How long owed releases are tried when the last client is gone, and then how long the end
/// of the session may take.
pub(super) const FLUSH: Duration = Duration::from_millis(100);

impl Core {
    /// Ends the session with the store, if there is one. The next call begins another.
    pub(crate) async fn close_session(&self) {
        if self.backend.capabilities().ttl.is_per_session() {
            let backend = self.backend.clone();
            let closing = async move {
                backend.close().await;
                Ok(())
            };
            let _ = self.ask(Operation::Connect, closing).await;
        }
    }

    /// Nobody uses the client any more. Releases that are owed are waited for, since the
    /// process may be about to end, but for 100 ms at most; and so is the end of a session.
    pub(crate) fn close(&self) {
        self.timer.closed.store(true, Ordering::Release);
        self.timer.changed.notify_one();
        let on_driver = self.driver.thread.get() == Some(&std::thread::current().id());
        let session = self.backend.capabilities().ttl.is_per_session();
        let nothing_to_do = !self.has_pending_releases() && !session;
        if self.jobs.is_none() || on_driver || self.is_in_child() || nothing_to_do {
            return;
        }
        let mut ended = self.driver.ended.lock();
        let patience = if session { FLUSH * 2 } else { FLUSH };
        let until = std::time::Instant::now() + patience;
        while !*ended && !self.driver.changed.wait_until(&mut ended, until).timed_out() {}
    }
}
