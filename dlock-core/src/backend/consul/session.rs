//! The session of a client with Consul, by which all its locks live.
//!
//! ```text
//!   none --the first claim--> alive --renewed every ttl/3--> alive
//!     ^                         |
//!     +-- the listener is told -+  Consul says that it does not know the session:
//!                                  in answer to a renewal, or to the query that waits
//!                                  for just that
//! ```
//!
//! Invariants:
//! - *Term*: Consul does not end a session before its TTL is over, counted from when it got
//!   the last renewal, and gives it up to twice that. So what the session holds is certain
//!   for the TTL from the *sending* of the last answered renewal on. A new leader counts
//!   from its election, which is later than that.
//! - *Order*: the listener hears of the end before another session can be made.
//! - A session that cannot be renewed for now is not given up: its locks are lost by their
//!   deadlines, and Consul says later whether it lives.

use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Weak};
use std::time::Duration;

use hyper::{Method, StatusCode};
use parking_lot::Mutex;
use tokio::task::JoinHandle;

use super::Shared;
use super::errors::refused;
use super::fence::Fence;
use super::wire::{NewSession, SessionId, SessionInfo};
use crate::claim::SessionTerm;
use crate::clock::Moment;
use crate::error::{Error, ErrorKind, Operation, Result};

/// How long a blocking query waits at the agent.
pub(super) const QUERY: Duration = Duration::from_secs(30);
/// How much longer than that its answer may take.
const SLACK: Duration = Duration::from_secs(5);
/// The pause after a query that failed or came back too soon.
pub(super) const PAUSE: Duration = Duration::from_millis(200);

/// What came of a renewal.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Renewal {
    Done,
    /// Consul does not know the session any more.
    Ended,
}

/// A session that was alive when it was last heard of.
pub(super) struct Session {
    pub(super) id: String,
    /// When the last answered renewal was sent.
    as_of: AtomicU64,
    ended: AtomicBool,
    pub(super) fence: Fence,
    tasks: Mutex<Vec<JoinHandle<()>>>,
}

impl Session {
    pub(super) fn term(&self, ttl: Duration) -> SessionTerm {
        let as_of = Moment::from_nanos(self.as_of.load(Ordering::Acquire));
        SessionTerm { as_of, term: ttl }
    }

    pub(super) fn has_ended(&self) -> bool {
        self.ended.load(Ordering::Acquire)
    }

    /// Stops what keeps it alive.
    pub(super) fn stop(&self) {
        self.tasks.lock().drain(..).for_each(|task| task.abort());
    }
}

/// The session that a client has at the moment.
#[derive(Default)]
pub(super) struct CurrentSession {
    session: Mutex<Option<Arc<Session>>>,
    making: tokio::sync::Mutex<()>,
    renewing: tokio::sync::Mutex<()>,
}

impl CurrentSession {
    pub(super) fn get(&self) -> Option<Arc<Session>> {
        self.session.lock().clone()
    }

    pub(super) fn take(&self) -> Option<Arc<Session>> {
        self.session.lock().take()
    }
}

impl Shared {
    /// The session, which is made if there is none.
    pub(super) async fn session(self: &Arc<Self>) -> Result<Arc<Session>> {
        if let Some(session) = self.current.get() {
            return Ok(session);
        }
        let _making = self.current.making.lock().await;
        if let Some(session) = self.current.get() {
            return Ok(session);
        }
        let sent = Moment::now();
        let name = format!("dlock: {}", self.name());
        let id = self.make_session(&name, self.ttl, self.lock_delay).await?;
        let session = Arc::new(Session {
            fence: Fence::new(&id),
            id,
            as_of: AtomicU64::new(sent.as_nanos()),
            ended: AtomicBool::new(false),
            tasks: Mutex::new(Vec::new()),
        });
        let this = || (Arc::downgrade(self), session.clone());
        let (keep_alive, watch, notices) = (this(), this(), this());
        *session.tasks.lock() = vec![
            tokio::spawn(renew_regularly(keep_alive.0, keep_alive.1)),
            tokio::spawn(await_end(watch.0, watch.1)),
            tokio::spawn(super::breaking::await_notices(notices.0, notices.1)),
        ];
        *self.current.session.lock() = Some(session.clone());
        Ok(session)
    }

    /// Makes a session whose keys are removed when it ends.
    pub(super) async fn make_session(
        &self,
        name: &str,
        ttl: Duration,
        lock_delay: Duration,
    ) -> Result<String> {
        let node_checks: &[_] = if self.node_checks { &["serfHealth"] } else { &[] };
        let (ttl, lock_delay) = (go_duration(ttl), go_duration(lock_delay));
        let wanted = NewSession { name, ttl, lock_delay, behavior: "delete", node_checks };
        let body = serde_json::to_vec(&wanted).unwrap_or_default();
        let made: SessionId =
            self.json(Operation::Acquire, Method::PUT, "/v1/session/create?", body).await?;
        Ok(made.id)
    }

    /// Ends a session. Its keys cannot be taken for its lock-delay.
    pub(super) async fn destroy_session(&self, id: &str) -> Result<()> {
        let path = format!("/v1/session/destroy/{id}?");
        let response = self.request(Operation::Release, Method::PUT, &path, Vec::new()).await?;
        match response.status {
            StatusCode::OK => Ok(()),
            _ => Err(refused(&response, Operation::Release, &self.http.address())),
        }
    }

    /// A session, or `None` if Consul does not know it.
    pub(super) async fn session_info(&self, id: &str) -> Result<Option<SessionInfo>> {
        let path = format!("/v1/session/info/{id}?");
        let found: Option<Vec<SessionInfo>> =
            self.json(Operation::Inspect, Method::GET, &path, Vec::new()).await?;
        Ok(found.and_then(|found| found.into_iter().next()))
    }

    /// Renews the session now, unless that was done in the last `fresh` time.
    pub(super) async fn renew_session(&self, session: &Session, fresh: Duration) -> Result<()> {
        let is_fresh = || {
            let as_of = Moment::from_nanos(session.as_of.load(Ordering::Acquire));
            Moment::now().since(as_of) < fresh
        };
        if is_fresh() {
            return Ok(());
        }
        let _renewing = self.current.renewing.lock().await;
        if is_fresh() {
            return Ok(());
        }
        let sent = Moment::now();
        match self.send_renewal(&session.id).await? {
            Renewal::Done => {
                session.as_of.fetch_max(sent.as_nanos(), Ordering::AcqRel);
                Ok(())
            }
            Renewal::Ended => {
                self.session_ended(session);
                let gone = Error::new(ErrorKind::Unavailable, Operation::Renew);
                Err(gone.with_message("the session with Consul has ended"))
            }
        }
    }

    /// Renews a session.
    pub(super) async fn send_renewal(&self, id: &str) -> Result<Renewal> {
        let path = format!("/v1/session/renew/{id}?");
        let response = self.request(Operation::Renew, Method::PUT, &path, Vec::new()).await?;
        match response.status {
            StatusCode::OK => Ok(Renewal::Done),
            StatusCode::NOT_FOUND => Ok(Renewal::Ended),
            _ => Err(refused(&response, Operation::Renew, &self.http.address())),
        }
    }

    /// Consul does not know the session any more: every guard is told, once.
    pub(super) fn session_ended(&self, session: &Session) {
        if session.ended.swap(true, Ordering::AcqRel) {
            return;
        }
        tracing::warn!(session = session.id, "the session with Consul has ended");
        self.locks.lock().session_ended();
        if let Some(listener) = self.listener() {
            listener.on_session_lost();
        }
        let mut current = self.current.session.lock();
        if current.as_ref().is_some_and(|it| it.id == session.id) {
            *current = None;
        }
        drop(current);
        session.stop();
    }
}

/// A duration as Consul reads it.
pub(super) fn go_duration(duration: Duration) -> String {
    format!("{}ms", duration.as_millis())
}

/// Keeps the session alive.
async fn renew_regularly(shared: Weak<Shared>, session: Arc<Session>) {
    let mut pause = None;
    loop {
        let Some(ttl) = shared.upgrade().map(|shared| shared.ttl) else { return };
        tokio::time::sleep(pause.unwrap_or(ttl / 3)).await;
        let Some(shared) = shared.upgrade() else { return };
        let renewal = shared.renew_session(&session, ttl / 4);
        let within = shared.call_timeout.min(ttl / 4);
        let renewed = tokio::time::timeout(within, renewal).await;
        if session.has_ended() {
            return;
        }
        let is_renewed = matches!(renewed, Ok(Ok(())));
        // A renewal that failed is tried again soon: the locks are uncertain until then.
        pause = (!is_renewed).then_some(ttl / 12);
        if is_renewed {
            let _ = tokio::time::timeout(within, shared.remove_owed()).await;
            let _ = tokio::time::timeout(within, shared.end_idle()).await;
        }
    }
}

/// Waits until Consul does not know the session any more.
async fn await_end(shared: Weak<Shared>, session: Arc<Session>) {
    // A leader that was replaced may not know a session that is new.
    let path = format!("/v1/session/info/{}?consistent", session.id);
    let mut query = BlockingQuery::new(path);
    loop {
        let Some(shared) = shared.upgrade() else { return };
        match query.next(&shared).await {
            Ok(body) => {
                let found = serde_json::from_slice::<Option<Vec<SessionInfo>>>(&body);
                if found.is_ok_and(|found| found.is_none_or(|found| found.is_empty())) {
                    return shared.session_ended(&session);
                }
                if query.has_recovered()
                    && let Some(listener) = shared.listener()
                {
                    listener.on_reconnected();
                }
            }
            Err(error) => tracing::debug!(why = %error, "a query of the session failed"),
        }
    }
}

/// A query that the agent answers when something has changed.
///
/// The index of an answer is where the next one goes on from. If it goes back, the server
/// was restored from a backup or lost its data: then the query starts anew.
pub(super) struct BlockingQuery {
    path: String,
    index: u64,
    failed: bool,
    recovered: bool,
}

impl BlockingQuery {
    pub(super) fn new(path: String) -> Self {
        BlockingQuery { path, index: 0, failed: false, recovered: false }
    }

    /// The index of the last answer.
    pub(super) fn index(&self) -> u64 {
        self.index
    }

    /// Whether the last answer came after one that failed.
    pub(super) fn has_recovered(&self) -> bool {
        self.recovered
    }

    /// The next answer: at once the first time, then when something has changed, and
    /// sometimes when nothing has. Absent keys are an empty body. After a failure it pauses.
    pub(super) async fn next(&mut self, shared: &Shared) -> Result<Vec<u8>> {
        let wait = if self.failed { Duration::from_millis(1) } else { QUERY };
        let sent = Moment::now();
        let separator = if self.path.contains('?') { '&' } else { '?' };
        let path = match self.index {
            0 => format!("{}{separator}", self.path),
            index => {
                format!("{}{separator}index={index}&wait={}&", self.path, go_duration(wait))
            }
        };
        let answer = tokio::time::timeout(wait + SLACK, shared.query(&path)).await;
        let address = shared.http.address();
        let answer = match answer {
            Ok(Ok(response)) if response.status == StatusCode::OK => {
                Ok((response.index, response.body.to_vec()))
            }
            Ok(Ok(response)) if response.status == StatusCode::NOT_FOUND => {
                Ok((response.index, Vec::new()))
            }
            Ok(Ok(response)) => Err(refused(&response, Operation::Inspect, &address)),
            Ok(Err(error)) => Err(error),
            Err(_) => Err(Error::new(ErrorKind::Unavailable, Operation::Inspect)
                .with_message(format!("Consul at {address} did not answer a query"))),
        };
        match answer {
            Ok((index, body)) => {
                self.recovered = std::mem::take(&mut self.failed);
                let same = index == self.index && !self.recovered;
                if same && Moment::now().since(sent) < PAUSE {
                    tokio::time::sleep(PAUSE).await; // who answers so does not wait
                }
                self.index = next_index(self.index, index);
                Ok(body)
            }
            Err(error) => {
                self.failed = true;
                self.recovered = false;
                tokio::time::sleep(PAUSE).await;
                Err(error)
            }
        }
    }
}

/// Where a blocking query goes on from.
fn next_index(last: u64, index: u64) -> u64 {
    if index < last { 0 } else { index.max(1) }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_index_that_goes_back_starts_anew() {
        assert_eq!(next_index(0, 7), 7);
        assert_eq!(next_index(7, 7), 7);
        assert_eq!(next_index(7, 9), 9);
        assert_eq!(next_index(9, 3), 0, "the server was restored");
        assert_eq!(next_index(0, 0), 1, "an index of zero would never wait");
    }

    #[test]
    fn durations_are_written_as_consul_reads_them() {
        assert_eq!(go_duration(Duration::from_secs(15)), "15000ms");
        assert_eq!(go_duration(Duration::ZERO), "0ms");
    }
}
