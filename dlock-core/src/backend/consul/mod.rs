//! Locks in Consul, which are shared with `consul lock` and with Consul's Go package.
//!
//! A client has one session ([`session`]), and a lock is a key that the session has acquired
//! ([`calls`]). Consul has no queue: a client that waits watches the key ([`watch`]) and
//! asks when it is free, so there is no order among processes. There are no shared locks.
//! A permit of a semaphore is a session of its own ([`semaphore`], [`permits`]).
//!
//! `layout.rs` says where the lock of a key is, `wire.rs` what is written there.

mod breaking;
mod calls;
mod errors;
mod fence;
mod http;
mod layout;
mod locks;
mod operators;
mod permits;
mod semaphore;
mod session;
mod watch;
mod wire;

use std::sync::{Arc, OnceLock, Weak};
use std::time::Duration;

use hyper::{Method, StatusCode};
use parking_lot::Mutex;
use serde::de::DeserializeOwned;
use url::Url;

use self::errors::{refused, unreadable};
use self::http::{Http, Response};
use self::layout::{Layout, escaped};
use self::locks::Locks;
use self::permits::PermitSession;
use self::session::CurrentSession;
use self::wire::{Entry, Operation as Op, OperationError, TransactionOutcome};
use super::{
    Backend, Break, Call, Capabilities, Cursor, KeyState, Listener, Page, ServerState, TtlSupport,
};
use crate::claim::{Answer, Claim, Mode, RenewOutcome, Request};
use crate::config::Settings;
use crate::error::{Error, Operation, Result};
use crate::key::Key;

const NAME: &str = "consul";
const PORT: u16 = 8500;
const TLS_PORT: u16 = 8501;
/// The shortest TTL of a session, unless the servers' `session_ttl_min` is lower.
const SESSION_TTL_MIN: Duration = Duration::from_secs(10);
/// The longest TTL of a session.
const SESSION_TTL_MAX: Duration = Duration::from_secs(24 * 60 * 60);
/// Consul's own default, and that of `consul lock`.
const LOCK_DELAY: Duration = Duration::from_secs(15);
/// The longest lock-delay that Consul takes.
const LOCK_DELAY_MAX: Duration = Duration::from_secs(60);
/// How many calls share a transaction, which has 128 operations at most; a call has three.
const COMBINED: usize = 40;
/// Together with `MAX_HANDOVER_TIME`: Consul does not say whether somebody waits, so a client
/// that gives a contended lock up leaves it alone for a while ([`calls::YIELD`]). Before that,
/// it is handed over for longer than at a store with a queue, and others are still let in many
/// times a second. A grant has 1024 tokens.
const MAX_HANDOVERS: u32 = 1000;
const MAX_HANDOVER_TIME: Duration = Duration::from_millis(20);

/// A store of locks in Consul, seen by one client.
pub struct Consul {
    shared: Arc<Shared>,
}

/// What the calls and the tasks of a client have in common.
struct Shared {
    http: Http,
    /// For the query of every request: `dc=..`, or nothing.
    datacenter: String,
    layout: Layout,
    ttl: Duration,
    lock_delay: Duration,
    node_checks: bool,
    call_timeout: Duration,
    client_name: Option<String>,
    current: CurrentSession,
    locks: Mutex<Locks>,
    /// The sessions for permits that nobody has at the moment.
    pool: Mutex<Vec<PermitSession>>,
    listener: OnceLock<Weak<dyn Listener>>,
}

impl Consul {
    /// The locks at the agent of this URL, in this namespace. The query of the URL may have
    /// the options of a client.
    ///
    /// ```
    /// let backend = dlock::backend::consul::Consul::new("consul://127.0.0.1:8500?ttl=20s", "default")?;
    /// let dlock = dlock::Dlock::builder().backend(backend).connect_lazy()?;
    /// # Ok::<(), dlock::Error>(())
    /// ```
    ///
    /// # Errors
    /// `Config` if the URL or the namespace is not valid.
    pub fn new(url: &str, namespace: &str) -> Result<Self> {
        let (settings, url) = Settings::of_url(url, namespace)?;
        Self::configured(&settings, &url)
    }

    pub(crate) fn configured(config: &Settings, url: &Url) -> Result<Self> {
        let tls = url.scheme() == "consuls";
        if !tls {
            config.refuse_tls_files("write consuls:// instead of consul://")?;
        }
        if !matches!(url.path(), "" | "/") || !url.username().is_empty() {
            return Err(Error::config(
                "consul:// takes a host and a port, and a token as the password: consul://:TOKEN@host:8500; a folder for the locks is set by `namespace`",
            ));
        }
        let host = url.host_str().unwrap_or_default().trim_matches(['[', ']']).to_owned();
        if host.is_empty() {
            return Err(Error::config(
                "the URL names no host; write for example consul://localhost:8500",
            ));
        }
        let port = url.port().unwrap_or(if tls { TLS_PORT } else { PORT });
        let mut http = Http::new(host, port, tls, config)?;
        if let Some(token) = config.secret(url)? {
            http = http.with_token(token)?;
        }
        let options = &config.consul;
        let min = options.session_ttl_min.unwrap_or(SESSION_TTL_MIN);
        if config.ttl > SESSION_TTL_MAX {
            return Err(Error::config(
                "the ttl of a session of Consul is a day at most; set a shorter ttl",
            ));
        }
        let lock_delay = options.lock_delay.unwrap_or(LOCK_DELAY);
        if lock_delay > LOCK_DELAY_MAX {
            return Err(Error::config(
                "`consul.lock_delay` is above 60s, the longest that Consul takes",
            ));
        }
        let datacenter = options.datacenter.as_deref();
        let datacenter = datacenter.map(|name| format!("dc={}", escaped(name)));
        let shared = Shared {
            http,
            datacenter: datacenter.unwrap_or_default(),
            layout: Layout::new(&config.namespace, config.layout.as_deref())?,
            ttl: config.ttl.max(min),
            lock_delay,
            node_checks: options.node_checks.unwrap_or(false),
            call_timeout: config.call_timeout,
            client_name: config.client_name.clone(),
            current: CurrentSession::default(),
            locks: Mutex::default(),
            pool: Mutex::default(),
            listener: OnceLock::new(),
        };
        Ok(Consul { shared: Arc::new(shared) })
    }

    /// The id of the session that the client has at the moment. Hidden, for tests.
    #[cfg(feature = "simulation")]
    #[doc(hidden)]
    pub fn session_id(&self) -> Option<String> {
        self.shared.current.get().map(|session| session.id.clone())
    }
}

impl Shared {
    fn listener(&self) -> Option<Arc<dyn Listener>> {
        self.listener.get()?.upgrade()
    }

    /// The name of the session, for operators.
    fn name(&self) -> String {
        self.client_name.clone().unwrap_or_else(|| {
            let host = gethostname::gethostname();
            format!("pid {} on {}", std::process::id(), host.to_string_lossy())
        })
    }

    /// Makes a request. The path ends with `?` or `&`.
    async fn request(
        &self,
        operation: Operation,
        method: Method,
        path: &str,
        body: Vec<u8>,
    ) -> Result<Response> {
        let path = format!("{path}{}", self.datacenter);
        let answer = self.http.call(method, &path, body).await;
        answer.map_err(|failure| failure.error(operation, &self.http.address()))
    }

    /// Makes a request that the agent answers when something has changed.
    async fn query(&self, path: &str) -> Result<Response> {
        let path = format!("{path}{}", self.datacenter);
        let answer = self.http.query(&path).await;
        answer.map_err(|failure| failure.error(Operation::Inspect, &self.http.address()))
    }

    async fn json<T: DeserializeOwned>(
        &self,
        operation: Operation,
        method: Method,
        path: &str,
        body: Vec<u8>,
    ) -> Result<T> {
        let response = self.request(operation, method, path, body).await?;
        self.read_json(operation, &response)
    }

    /// The same; `None` if there is no such thing.
    async fn json_or_absent<T: DeserializeOwned>(
        &self,
        operation: Operation,
        method: Method,
        path: &str,
    ) -> Result<Option<T>> {
        let response = self.request(operation, method, path, Vec::new()).await?;
        if response.status == StatusCode::NOT_FOUND {
            return Ok(None);
        }
        self.read_json(operation, &response).map(Some)
    }

    fn read_json<T: DeserializeOwned>(
        &self,
        operation: Operation,
        response: &Response,
    ) -> Result<T> {
        if response.status != StatusCode::OK {
            return Err(refused(response, operation, &self.http.address()));
        }
        let read = serde_json::from_slice(&response.body);
        read.map_err(|error| unreadable(operation, &self.http.address(), error))
    }

    /// Makes operations together or none of them: the keys that they changed or read, or
    /// what was in the way. What is read is not stale, also while another leader is elected.
    async fn transact(
        &self,
        operation: Operation,
        operations: &[Op],
    ) -> Result<Result<Vec<Entry>, Vec<OperationError>>> {
        let body = serde_json::to_vec(operations).unwrap_or_default();
        let response = self.request(operation, Method::PUT, "/v1/txn?consistent&", body).await?;
        if !matches!(response.status, StatusCode::OK | StatusCode::CONFLICT) {
            return Err(refused(&response, operation, &self.http.address()));
        }
        let outcome = serde_json::from_slice::<TransactionOutcome>(&response.body);
        let outcome =
            outcome.map_err(|error| unreadable(operation, &self.http.address(), error))?;
        match outcome.errors.filter(|errors| !errors.is_empty()) {
            Some(errors) => Ok(Err(errors)),
            None => {
                let results = outcome.results.unwrap_or_default();
                Ok(Ok(results.into_iter().filter_map(|result| result.kv).collect()))
            }
        }
    }

    /// Reads a key; `None` if there is no such key.
    async fn read(&self, operation: Operation, path: &str) -> Result<Option<Entry>> {
        match self.transact(operation, &[Op::get(path)]).await? {
            Ok(found) => Ok(found.into_iter().find(|entry| entry.modify_index > 0)),
            Err(errors) if errors.iter().any(OperationError::is_denied) => {
                Err(errors::denied(operation, &self.http.address()))
            }
            Err(_) => Ok(None),
        }
    }

    /// What became of leases: whether the session lives, and whether it has their keys.
    async fn renew(self: &Arc<Self>, leases: &[Arc<Claim>]) -> Vec<Result<RenewOutcome>> {
        let Some(session) = self.current.get() else {
            return leases.iter().map(|_| Ok(RenewOutcome::Lost)).collect();
        };
        let renewed = self.renew_session(&session, self.ttl / 3).await;
        if session.has_ended() {
            return leases.iter().map(|_| Ok(RenewOutcome::Lost)).collect();
        }
        if let Err(error) = renewed {
            return leases.iter().map(|lease| Err(error.clone().with_key(&lease.key))).collect();
        }
        let term = session.term(self.ttl);
        let held = Ok(RenewOutcome::SessionHeld { others_wait: false, term });
        let mut answers: Vec<Result<RenewOutcome>> = Vec::with_capacity(leases.len());
        let mut looked_at = Vec::new();
        for (place, lease) in leases.iter().enumerate() {
            if lease.mode.is_permits() {
                let renewed = self.renew_permits(lease).await;
                answers.push(renewed.map_err(|error| error.with_key(&lease.key)));
                continue;
            }
            match self.locks.lock().held(lease.owner) {
                None => answers.push(Ok(RenewOutcome::Lost)),
                Some(lock) => {
                    // One that asks for tokens is about to be used, and was looked at.
                    if lease.tokens == 0 {
                        looked_at.push((place, Op::check_session(&lock.path, &session.id)));
                    }
                    answers.push(held.clone());
                }
            }
        }
        for some in looked_at.chunks(2 * COMBINED) {
            let operations: Vec<Op> = some.iter().map(|(_, it)| it.clone()).collect();
            match self.transact(Operation::Renew, &operations).await {
                Ok(Ok(_)) => {}
                Ok(Err(errors)) => {
                    for (place, _) in errors.iter().filter_map(|error| some.get(error.op_index)) {
                        self.locks.lock().released(leases[*place].owner);
                        answers[*place] = Ok(RenewOutcome::Lost);
                    }
                }
                Err(error) => {
                    for (place, _) in some {
                        answers[*place] = Err(error.clone().with_key(&leases[*place].key));
                    }
                }
            }
        }
        answers
    }

    /// Gives back what is held, then ends the session: an end alone would start the delay.
    async fn close(&self) {
        if let Some(session) = self.current.get() {
            session.stop();
        }
        self.remove_owed().await;
        self.close_permits().await;
        let session = self.current.take();
        let held = self.locks.lock().all_held();
        for lock in held {
            let _ = self.transact(Operation::Release, &calls::remove(&lock.path, lock.index)).await;
        }
        self.locks.lock().clear();
        if let Some(session) = session
            && let Err(error) = self.destroy_session(&session.id).await
        {
            tracing::debug!(why = %error, "the session with Consul ends by its time");
        }
    }
}

impl std::fmt::Debug for Consul {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "Consul({})", self.shared.http.address())
    }
}

impl Drop for Consul {
    fn drop(&mut self) {
        if let Some(session) = self.shared.current.take() {
            session.stop();
        }
        self.shared.locks.lock().clear();
    }
}

impl Backend for Consul {
    fn capabilities(&self) -> Capabilities {
        Capabilities {
            shared: false,
            permits: self.shared.layout.has_permits(),
            fifo: false,
            release_after: false,
            waiters: false,
            max_batch: COMBINED,
            ttl: TtlSupport::PerSession { ttl: self.shared.ttl },
            max_handovers: MAX_HANDOVERS,
            max_handover_time: MAX_HANDOVER_TIME,
            ..Capabilities::all(NAME)
        }
    }

    fn unsupported_hint(&self, mode: Mode) -> Option<&'static str> {
        mode.is_permits().then_some(
            "in the layout of `consul lock` a semaphore is in the same place as the lock of its name; add ?layout=lock-key to the URL, for all programs that use these keys",
        )
    }

    fn open(&self, _client: u64, listener: Weak<dyn Listener>) {
        let _ = self.shared.listener.set(listener);
    }

    fn call<'a>(&'a self, requests: &'a [Request]) -> Call<'a, Vec<Answer>> {
        Call::new(self.shared.make(requests))
    }

    fn inspect<'a>(&'a self, key: &'a Key) -> Call<'a, Result<KeyState>> {
        Call::new(async move {
            let seen = self.shared.inspect(key).await;
            seen.map_err(|error| error.with_operation(Operation::Inspect).with_key(key))
        })
    }

    fn list<'a>(&'a self, prefix: &'a str, _cursor: Cursor) -> Call<'a, Result<Page>> {
        Call::new(self.shared.list(prefix))
    }

    fn break_lock<'a>(&'a self, key: &'a Key, how: &'a Break) -> Call<'a, Result<usize>> {
        Call::new(async move {
            let broken = self.shared.break_lock(key, how).await;
            broken.map_err(|error| error.with_operation(Operation::Break).with_key(key))
        })
    }

    fn ping(&self) -> Call<'_, Result<()>> {
        Call::new(async move { self.shared.servers().await.map(drop) })
    }

    fn servers(&self) -> Call<'_, Result<Vec<ServerState>>> {
        Call::new(self.shared.servers())
    }

    fn close(&self) -> Call<'_, ()> {
        Call::new(self.shared.close())
    }

    fn as_any(&self) -> Option<&dyn std::any::Any> {
        Some(self)
    }
}
