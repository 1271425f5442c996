//! The session of a client: a lease, made when it is needed, kept alive by a stream, told
//! when it ends.
//!
//! ```text
//!   none --> alive --> over       the guards are lost; the next call makes a new session
//! ```
//!
//! etcd keeps a lease for its ttl from the last keep-alive on, and longer when its leader
//! changes. So what the session has is certain for the ttl from the *sending* of the last
//! keep-alive that was answered.
//!
//! The session has a key of its own, attached to the lease. A watch on it tells at once when
//! the lease was revoked. And it makes late requests harmless: whatever makes an entry does so
//! only if that key has the version that the session knows. Once [`Session::fence`] was
//! answered, the version is another one, so a request that was sent before and not answered
//! is applied already, or never.

use std::sync::atomic::{AtomicI64, Ordering};
use std::sync::{Arc, Weak};
use std::time::Duration;

use etcd_client::{Compare, CompareOp, PutOptions, Txn, TxnOp, TxnOpResponse, TxnResponse};
use tokio::sync::{Notify, watch};

use super::claims::Claims;
use super::connection::Connections;
use super::errors::CallError;
use super::layout::Root;
use super::queues::{self, Queues};
use crate::backend::current_session::CurrentSession;
use crate::backend::{Listener, SessionTerm};
use crate::clock::Moment;
use crate::error::{Operation, Result};

/// The lease is kept alive so often in its ttl, if nobody asks for more.
const KEEP_ALIVES: u32 = 5;
/// A call or keep-alive that is not answered for so long ends its connection.
const MAX_SILENCE: Duration = Duration::from_secs(2);
/// The pause before a connection is tried again.
pub(super) const RETRY: Duration = Duration::from_millis(50);

/// A session, seen by one client.
pub(super) struct Session {
    pub(super) lease: i64,
    pub(super) ttl: Duration,
    /// The key that is there for as long as the lease.
    pub(super) key: String,
    pub(super) connections: Arc<Connections>,
    /// What the session has at the store.
    pub(super) claims: Claims,
    /// The keys that it waits for.
    pub(super) queues: Queues,
    pub(super) listener: Weak<dyn Listener>,
    /// The version of the key.
    version: AtomicI64,
    fencing: tokio::sync::Mutex<()>,
    /// When the last answered keep-alive was sent.
    as_of: watch::Sender<Moment>,
    wants_keep_alive: Notify,
    is_over: watch::Sender<bool>,
}

impl Session {
    async fn open(
        connections: Arc<Connections>,
        root: &Root,
        ttl: Duration,
        listener: Weak<dyn Listener>,
    ) -> Result<Arc<Self>, CallError> {
        let connection = connections.get().await?;
        let sent = Moment::now();
        let mut leases = connection.client().lease_client();
        let granted = connection.call(leases.grant(whole_seconds(ttl), None)).await?;
        let lease = granted.id();
        let (key, options) = (root.session(lease), PutOptions::new().with_lease(lease));
        connection.call(connection.kv().put(key.as_str(), "", Some(options))).await?;
        let (queues, commands) = Queues::new();
        let session = Arc::new(Session {
            lease,
            ttl,
            key,
            connections,
            claims: Claims::default(),
            queues,
            listener,
            version: AtomicI64::new(1),
            fencing: tokio::sync::Mutex::default(),
            as_of: watch::Sender::new(sent),
            wants_keep_alive: Notify::new(),
            is_over: watch::Sender::new(false),
        });
        tokio::spawn(keep_alive(session.clone()));
        tokio::spawn(queues::watch(session.clone(), commands));
        Ok(session)
    }

    pub(super) fn is_over(&self) -> bool {
        *self.is_over.borrow()
    }

    /// Returns when the session is over.
    pub(super) async fn ended(&self) {
        let mut is_over = self.is_over.subscribe();
        let _ = is_over.wait_for(|is_over| *is_over).await;
    }

    /// The store ended the session: tells everybody, once.
    pub(super) fn end(&self) {
        if !self.is_over.send_replace(true) {
            self.claims.clear();
            if let Some(listener) = self.listener.upgrade() {
                listener.on_session_lost();
            }
        }
    }

    /// How long what the session has is certain, by a keep-alive that is not older than
    /// `age`. `None` if none was answered in time.
    pub(super) async fn term(&self, age: Duration) -> Option<SessionTerm> {
        let wanted = Moment::now() - age;
        let mut last = self.as_of.subscribe();
        if *last.borrow() < wanted {
            self.wants_keep_alive.notify_one();
            let answered = last.wait_for(|as_of| *as_of >= wanted);
            let answered = tokio::time::timeout(self.connections.silence(), answered).await;
            if !matches!(answered, Ok(Ok(_))) {
                return None;
            }
        }
        let as_of = *self.as_of.borrow();
        (!self.is_over()).then_some(SessionTerm { as_of, term: self.ttl })
    }

    /// Makes a transaction, as whoever asks.
    pub(super) async fn transaction(&self, txn: Txn) -> Result<TxnResponse, CallError> {
        if self.is_over() {
            return Err(CallError::SessionOver);
        }
        let connection = self.connections.get().await?;
        let answer = connection.call(connection.kv().txn(txn)).await;
        if let Err(CallError::SessionOver) = &answer {
            self.end();
        }
        answer
    }

    /// The version of the session, for [`transact`](Self::transact).
    pub(super) fn version(&self) -> i64 {
        self.version.load(Ordering::Acquire)
    }

    /// Carries out operations, all or none of them, if the session has this version.
    pub(super) async fn transact(
        &self,
        version: i64,
        operations: Vec<TxnOp>,
    ) -> Result<Vec<TxnOpResponse>, CallError> {
        let is_same = Compare::version(self.key.as_str(), CompareOp::Equal, version);
        let txn = Txn::new().when([is_same]).and_then(operations);
        let answer = self.transaction(txn.or_else([TxnOp::get(self.key.as_str(), None)])).await?;
        if answer.succeeded() {
            return Ok(answer.op_responses());
        }
        match self.version_in(&answer) {
            Some(version) => {
                self.version.fetch_max(version, Ordering::AcqRel);
                Err(CallError::Outdated)
            }
            None => {
                self.end();
                Err(CallError::SessionOver)
            }
        }
    }

    /// The version of the session's key, in the answer of a transaction that read it.
    fn version_in(&self, answer: &TxnResponse) -> Option<i64> {
        answer.op_responses().iter().find_map(|answer| match answer {
            TxnOpResponse::Get(found) => found.kvs().first().map(etcd_client::KeyValue::version),
            _ => None,
        })
    }

    /// Makes sure that no request that was sent for this version is applied after this. One
    /// write settles all doubts about a version, however many owners have one.
    pub(super) async fn fence(&self, outdated: i64) -> Result<(), CallError> {
        let _one = self.fencing.lock().await;
        if self.version() > outdated {
            return Ok(());
        }
        let options = PutOptions::new().with_lease(self.lease);
        let next = TxnOp::put(self.key.as_str(), "", Some(options));
        let version = self.version();
        match self.transact(version, vec![next]).await {
            Ok(_) => {
                self.version.fetch_max(version + 1, Ordering::AcqRel);
                Ok(())
            }
            // An earlier attempt was applied, whose answer was lost.
            Err(CallError::Outdated) => Ok(()),
            Err(error) => Err(error),
        }
    }

    /// Ends the session in order.
    async fn close(&self) {
        self.is_over.send_replace(true);
        self.claims.clear();
        if let Ok(connection) = self.connections.get().await {
            let mut leases = connection.client().lease_client();
            let _ = connection.call(leases.revoke(self.lease)).await;
        }
    }
}

/// How long a call may take: with this ttl there is time for another connection before the
/// session ends.
pub(super) fn silence(ttl: Duration) -> Duration {
    (ttl * 2 / 5).min(MAX_SILENCE)
}

/// The ttl of a lease that lasts for this time at least.
pub(super) fn whole_seconds(time: Duration) -> i64 {
    let seconds = time.as_secs() + u64::from(time.subsec_nanos() > 0);
    i64::try_from(seconds).unwrap_or(i64::MAX)
}

/// Keeps the lease alive for as long as the session is not over.
async fn keep_alive(session: Arc<Session>) {
    let mut is_first = true;
    while !session.is_over() {
        let kept = tokio::select! {
            kept = keep_alive_over_one(&session, is_first) => kept,
            () = session.ended() => return,
        };
        is_first = false;
        match kept {
            Err(CallError::SessionOver) => session.end(),
            _ => tokio::time::sleep(RETRY).await,
        }
    }
}

/// Keeps the lease alive over one connection, until that ends.
async fn keep_alive_over_one(session: &Session, is_first: bool) -> Result<(), CallError> {
    let connection = session.connections.get().await?;
    let mut sent = Moment::now();
    let mut leases = connection.client().lease_client();
    let (mut keeper, mut answers) = connection.call(leases.keep_alive(session.lease)).await?;
    session.as_of.send_replace(sent);
    if !is_first && let Some(listener) = session.listener.upgrade() {
        // Leases are renewed, which tells their guards that they are certain again.
        listener.on_reconnected();
    }
    loop {
        let due = (session.ttl / KEEP_ALIVES).saturating_sub(Moment::now().since(sent));
        tokio::select! {
            () = tokio::time::sleep(due) => {}
            () = session.wants_keep_alive.notified() => {}
            () = connection.ended() => return Ok(()),
        }
        sent = Moment::now();
        let answer = async {
            keeper.keep_alive().await?;
            answers.message().await
        };
        let silence = session.connections.silence();
        let answer = tokio::select! {
            answer = answer => answer.map_err(CallError::of),
            () = connection.ended() => return Ok(()),
            () = tokio::time::sleep(silence) => {
                // A follower waits for the leader that it passed the keep-alive to, also when
                // there is another leader by now. If it answers calls, only the stream is new.
                if !connection.has_answered_since(Moment::now() - silence / 2) {
                    connection.give_up();
                }
                return Ok(());
            }
        };
        match answer {
            Ok(Some(answer)) if answer.ttl() > 0 => {
                session.as_of.send_replace(sent);
            }
            Ok(Some(_)) | Err(CallError::SessionOver) => return Err(CallError::SessionOver),
            Ok(None) | Err(_) => {
                connection.give_up();
                return Ok(());
            }
        }
    }
}

/// The sessions of a client, one at a time.
pub(super) struct Sessions {
    pub(super) connections: Arc<Connections>,
    root: Root,
    ttl: Duration,
    current: CurrentSession<Session>,
}

impl Sessions {
    pub(super) fn new(connections: Arc<Connections>, root: Root, ttl: Duration) -> Self {
        Sessions { connections, root, ttl, current: CurrentSession::new() }
    }

    pub(super) fn listen(&self, listener: Weak<dyn Listener>) {
        self.current.listen(listener);
    }

    pub(super) fn ttl(&self) -> Duration {
        self.ttl
    }

    /// The session, if there is one that lives.
    pub(super) fn current(&self) -> Option<Arc<Session>> {
        self.current.last().filter(|session| !session.is_over())
    }

    /// The session; a new one if there is none.
    pub(super) async fn get(&self, operation: Operation) -> Result<Arc<Session>> {
        let open = move || {
            let (connections, root, ttl) = (self.connections.clone(), self.root.clone(), self.ttl);
            let listener = self.current.listener();
            async move {
                let opened = Session::open(connections, &root, ttl, listener).await;
                opened.map_err(|error| error.read(operation))
            }
        };
        self.current.get_or_open(operation, || self.current(), open).await
    }

    pub(super) async fn close(&self) {
        if let Some(session) = self.current.take() {
            session.close().await;
        }
        self.connections.close();
    }
}
