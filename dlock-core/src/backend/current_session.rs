//! The session that a client has with its store: one at a time, made when it is needed.

use std::future::Future;
use std::sync::{Arc, OnceLock, Weak};

use parking_lot::RwLock;

use super::Listener;
use crate::claim::{Notice, Owner};
use crate::error::{Error, ErrorKind, Operation, Result};
use crate::key::Key;

/// The session of a client, if it has one.
pub(super) struct CurrentSession<S> {
    session: Arc<RwLock<Option<Arc<S>>>>,
    /// Who has it makes a session.
    opening: Arc<tokio::sync::Mutex<()>>,
    listener: OnceLock<Weak<dyn Listener>>,
}

impl<S: Send + Sync + 'static> CurrentSession<S> {
    pub(super) fn new() -> Self {
        let (session, opening) = (Arc::default(), Arc::default());
        CurrentSession { session, opening, listener: OnceLock::new() }
    }

    /// Sets who is told of the end of sessions.
    pub(super) fn listen(&self, listener: Weak<dyn Listener>) {
        let _ = self.listener.set(listener);
    }

    pub(super) fn listener(&self) -> Weak<dyn Listener> {
        self.listener.get().cloned().unwrap_or_else(|| Weak::<NoListener>::new())
    }

    /// The session that was made last, whether it lives or not.
    pub(super) fn last(&self) -> Option<Arc<S>> {
        self.session.read().clone()
    }

    pub(super) fn take(&self) -> Option<Arc<S>> {
        self.session.write().take()
    }

    /// The session if it lives, else a new one.
    ///
    /// A session is made by a task of its own: who waits for it may give up, and the next
    /// call need not begin anew.
    pub(super) async fn get_or_open<F>(
        &self,
        operation: Operation,
        living: impl Fn() -> Option<Arc<S>>,
        open: impl FnOnce() -> F,
    ) -> Result<Arc<S>>
    where
        F: Future<Output = Result<Arc<S>>> + Send + 'static,
    {
        if let Some(session) = living() {
            return Ok(session);
        }
        let making = self.opening.clone().lock_owned().await;
        if let Some(session) = living() {
            return Ok(session);
        }
        let (open, current) = (open(), self.session.clone());
        let opened = tokio::spawn(async move {
            let opened = open.await;
            if let Ok(session) = &opened {
                *current.write() = Some(session.clone());
            }
            drop(making);
            opened
        });
        let ended = |_| {
            Error::new(ErrorKind::Unavailable, operation)
                .with_message("the driver ended before the store answered")
        };
        opened.await.map_err(ended)?.map_err(|error| error.with_operation(operation))
    }
}

/// Hears nothing, before the backend was opened.
struct NoListener;

impl Listener for NoListener {
    fn on_notice(&self, _: &Key, _: Owner, _: Notice) {}
}
