//! The session of a client: made when it is needed, kept by answered writes, told when it
//! ends.
//!
//! ```text
//!   none --> connected <--> disconnected       the guards are uncertain
//!                 \            /
//!                  +--> over <+                the guards are lost; the next call makes a
//!                                              new session
//! ```
//!
//! A server that is cut off from the leader still answers pings and reads, while the leader
//! lets the session expire. So only an answered *write* proves that the session lives: what
//! the session holds is certain for two thirds of its time-out from the sending of the last
//! one. (The leader counts from the last packet that the server told it of. That is older
//! than the write by a ping and half a tick, for which there is the last third.)

use std::future::Future;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Weak};
use std::time::Duration;

use parking_lot::Mutex;
use zookeeper_client::{Client, Error as ZkError, SessionState};

use super::claims::Claims;
use super::errors;
use crate::backend::current_session::CurrentSession;
use crate::backend::{Listener, SessionTerm};
use crate::clock::Moment;
use crate::config::values::Secret;
use crate::error::{Error, ErrorKind, Operation, Result};

/// A server that is silent for so long is left for another one.
const MAX_SILENCE: Duration = Duration::from_secs(2);
/// It is left after this part of the time-out at most. The driver crate chooses the next server
/// by chance, and may choose the same one once more: two silences must be over before the guards
/// are lost, which is two thirds of the time-out after the last write.
const SILENCE: u32 = 6;
/// An answered write is fresh for this part of the time-out.
const FRESH: u32 = 12;
/// A node that never exists. To delete it is a write, and leaves nothing.
const NO_NODE: &str = "/dlock-keep-alive";

/// How to make a session.
#[derive(Clone)]
pub(super) struct Address {
    /// The servers, as the driver crate wants them.
    pub(super) servers: String,
    /// The time-out to ask for.
    pub(super) ttl: Duration,
    /// User and password, for the scheme `digest`.
    pub(super) credentials: Option<(String, Secret)>,
}

/// A session, seen by one client.
pub(super) struct Session {
    /// `None` once it was closed.
    client: Mutex<Option<Arc<Client>>>,
    timeout: Duration,
    /// When the last answered write was sent, in nanoseconds.
    last_write: AtomicU64,
    is_connected: AtomicBool,
    is_over: AtomicBool,
    /// What the session has at the store.
    pub(super) claims: Claims,
}

impl Session {
    async fn open(address: Address, listener: Weak<dyn Listener>) -> Result<Arc<Self>> {
        let silence = (address.ttl / SILENCE).min(MAX_SILENCE);
        let mut connector =
            Client::connector().with_session_timeout(address.ttl).with_connection_timeout(silence);
        if let Some((user, password)) = &address.credentials {
            let credentials = format!("{user}:{}", password.read().await?);
            connector = connector.with_auth("digest", credentials.as_bytes());
        }
        let sent = Moment::now();
        let connected = connector.connect(&address.servers).await;
        let client = connected.map_err(|error| errors::read(Operation::Connect, error))?;
        let timeout = client.session_timeout();
        if timeout < address.ttl {
            return Err(Error::new(ErrorKind::Config, Operation::Connect).with_message(format!(
                "the ttl is {}, but ZooKeeper keeps a session for {} at most; lower the ttl, or raise maxSessionTimeout of the servers",
                humantime::format_duration(address.ttl),
                humantime::format_duration(timeout),
            )));
        }
        let states = client.state_watcher();
        let session = Arc::new(Session {
            client: Mutex::new(Some(Arc::new(client))),
            timeout,
            last_write: AtomicU64::new(sent.as_nanos()),
            is_connected: AtomicBool::new(true),
            is_over: AtomicBool::new(false),
            claims: Claims::default(),
        });
        tokio::spawn(watch_state(states, Arc::downgrade(&session), listener.clone()));
        tokio::spawn(super::watches::oversee(Arc::downgrade(&session), listener));
        Ok(session)
    }

    /// The driver crate's client.
    pub(super) fn client(&self) -> Result<Arc<Client>, ZkError> {
        self.client.lock().clone().ok_or(ZkError::ClientClosed)
    }

    pub(super) fn is_over(&self) -> bool {
        self.is_over.load(Ordering::Acquire)
    }

    pub(super) fn is_connected(&self) -> bool {
        self.is_connected.load(Ordering::Acquire)
    }

    /// The time-out that the servers agreed to.
    pub(super) fn timeout(&self) -> Duration {
        self.timeout
    }

    /// Makes a write. The closure must make the call, which sends it.
    pub(super) async fn write<T, F>(&self, call: impl FnOnce() -> F) -> Result<T, ZkError>
    where
        F: Future<Output = Result<T, ZkError>>,
    {
        let sent = Moment::now();
        let answer = call().await;
        if answer.as_ref().err().is_none_or(errors::is_answer) {
            self.wrote(sent);
        }
        answer
    }

    /// Sends a write that changes nothing. When it is answered, the server has all that was
    /// written before.
    pub(super) fn write_nothing<'a>(
        &'a self,
        client: &'a Client,
    ) -> impl Future<Output = Result<(), ZkError>> + 'a {
        let sent = Moment::now();
        let answer = client.delete(NO_NODE, None);
        async move {
            match answer.await {
                Err(error) if !errors::is_answer(&error) => Err(error),
                _ => {
                    self.wrote(sent);
                    Ok(())
                }
            }
        }
    }

    /// A write was answered that was sent then, or later.
    pub(super) fn wrote(&self, sent: Moment) {
        self.last_write.fetch_max(sent.as_nanos(), Ordering::AcqRel);
    }

    /// How long what the session has is certain, after a write if the last one is old.
    pub(super) async fn term(&self) -> Result<SessionTerm, ZkError> {
        if Moment::now().since(self.last_write()) > self.timeout / FRESH {
            let client = self.client()?;
            self.write_nothing(&client).await?;
        }
        Ok(SessionTerm { as_of: self.last_write(), term: self.timeout * 2 / 3 })
    }

    fn last_write(&self) -> Moment {
        Moment::from_nanos(self.last_write.load(Ordering::Acquire))
    }

    /// The store ended the session: tells everybody, once.
    fn end(&self, listener: &dyn Listener) {
        self.is_connected.store(false, Ordering::Release);
        if !self.is_over.swap(true, Ordering::AcqRel) {
            self.claims.clear();
            listener.on_session_lost();
        }
    }

    /// Whether the store ended the session, whoever was told.
    fn has_ended(&self) -> bool {
        self.client().map_or(true, |client| client.state().is_terminated())
    }

    /// Ends the session in order, and waits for that.
    async fn close(&self) {
        self.is_over.store(true, Ordering::Release);
        self.claims.clear();
        let Some(client) = self.client.lock().take() else { return };
        let mut states = client.state_watcher();
        drop(client);
        while !states.peek_state().is_terminated() {
            states.changed().await;
        }
    }
}

/// Tells the client what becomes of its session.
async fn watch_state(
    mut states: zookeeper_client::StateWatcher,
    session: Weak<Session>,
    listener: Weak<dyn Listener>,
) {
    loop {
        let state = states.changed().await;
        let (Some(session), Some(listener)) = (session.upgrade(), listener.upgrade()) else {
            return;
        };
        match state {
            SessionState::SyncConnected | SessionState::Disconnected => {
                let connected = state == SessionState::SyncConnected;
                session.is_connected.store(connected, Ordering::Release);
                // Leases are renewed, which tells their guards whether they are certain.
                listener.on_reconnected();
            }
            state if state.is_terminated() => {
                session.end(&*listener);
                return;
            }
            _ => {}
        }
    }
}

/// The sessions of a client, one at a time.
pub(super) struct Sessions {
    address: Address,
    current: CurrentSession<Session>,
}

impl Sessions {
    pub(super) fn new(address: Address) -> Self {
        Sessions { address, current: CurrentSession::new() }
    }

    pub(super) fn listen(&self, listener: Weak<dyn Listener>) {
        self.current.listen(listener);
    }

    pub(super) fn listener(&self) -> Weak<dyn Listener> {
        self.current.listener()
    }

    pub(super) fn ttl(&self) -> Duration {
        self.address.ttl
    }

    /// The session, if there is one that lives. The end of one is told before there is
    /// another.
    pub(super) fn current(&self) -> Option<Arc<Session>> {
        let session = self.current.last()?;
        if session.has_ended()
            && let Some(listener) = self.listener().upgrade()
        {
            session.end(&*listener);
        }
        (!session.is_over()).then_some(session)
    }

    /// The session; a new one if there is none.
    pub(super) async fn get(&self, operation: Operation) -> Result<Arc<Session>> {
        let open = || Session::open(self.address.clone(), self.listener());
        self.current.get_or_open(operation, || self.current(), open).await
    }

    pub(super) async fn close(&self) {
        if let Some(session) = self.current.take() {
            session.close().await;
        }
    }
}
