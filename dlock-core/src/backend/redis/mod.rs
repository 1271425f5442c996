//! Locks in Redis 6.2 or newer, or Valkey.
//!
//! Every operation is one Lua script on the server, by the server's clock; see
//! `lua/state.lua` for what is stored. A client has two connections: one for
//! commands, and one on which it hears that a lock was handed to it or broken.
//! Both are made when first needed, in the runtime that makes the call, and made
//! anew when they break.
//!
//! What one Redis does not promise: a lock survives neither a restart without
//! persistence nor a failover to a replica that had not heard of it. The token
//! rises nevertheless, so a [`Fence`](crate::Fence) still rejects the older holder.

mod address;
mod codec;
mod connection;
mod connector;
mod errors;
#[doc(hidden)]
pub mod extension;
mod notices;
mod scripts;
mod server_check;

use std::sync::{Arc, OnceLock, Weak};
use std::time::Duration;

use parking_lot::Mutex;
use redis::Value;
use url::Url;

use self::address::Address;
use self::codec::Names;
use self::connection::Link;
use self::connector::Connector;
pub use self::connector::Credentials;
pub(crate) use self::connector::{Given, Provider, TlsFiles};
use self::notices::Notices;
use self::scripts::{Code, Run, Scripts};
use super::{Backend, Call, Capabilities, Cursor, KeyState, Listener, Page};
use crate::claim::{
    AcquireOutcome, Answer, Claim, Grant, Holder, Release, ReleaseOutcome, RenewOutcome, Request,
};
use crate::config::{Config, Settings, check_namespace};
use crate::error::{Error, ErrorKind, Operation, Result};
use crate::key::Key;

/// How many calls one run of the script makes: some hundred microseconds of the
/// server's time, which everybody else waits for.
const COMBINED: usize = 128;
/// How many names one `SCAN` looks at.
const SCANNED: usize = 1_000;
/// For how long it is remembered who broke a lock, in milliseconds.
const BREAKS_KEPT: u64 = 3_600_000;
/// The most tokens in one grant: they must not run ahead of the clock.
const MOST_TOKENS: u32 = 10_000;

/// A script that writes a value in Redis unless somebody newer wrote before: a
/// [`Fence`](crate::Fence) on the server.
///
/// `KEYS` are the value and its fence, a hash (in a cluster with one hash tag);
/// `ARGV` are `x` for a write under an exclusive lock or `s` under a shared one,
/// the token, and the value. It answers 1 if the value was written, 0 if it came
/// too late.
///
/// ```
/// # async fn example(guard: dlock::Guard, mut connection: redis::aio::MultiplexedConnection)
/// # -> Result<(), redis::RedisError> {
/// let script = redis::Script::new(dlock::backend::redis::FENCED_SET);
/// let written: bool = script
///     .key("{order:7}").key("{order:7}:fence")
///     .arg("x").arg(guard.token().get()).arg("paid")
///     .invoke_async(&mut connection).await?;
/// assert!(written, "the lock was lost, and somebody else wrote since");
/// # Ok(()) }
/// ```
pub const FENCED_SET: &str = include_str!("lua/fenced_set.lua");

/// A client of the driver crate, with the credentials of this moment.
pub(crate) async fn client(config: &Settings, url: &Url) -> Result<redis::Client> {
    Connector::configured(config, url, None)?.client().await
}

/// A store of locks in Redis, seen by one client.
pub struct Redis {
    link: Arc<Link>,
    names: Names,
    notices: Notices,
    listener: OnceLock<Weak<dyn Listener>>,
    /// The holder of the latest claim and the [tail](Self::tail) of its records.
    tail: Mutex<Option<(Arc<Holder>, Arc<str>)>>,
    scripts: &'static Scripts,
}

impl Redis {
    /// The server that the URL names: `redis://`, `rediss://` or `redis+unix://`.
    /// Nothing is sent before the first call.
    ///
    /// # Errors
    /// `Config` if the URL or the namespace cannot be used.
    pub fn new(url: &str, namespace: &str) -> Result<Self> {
        check_namespace(namespace)?;
        let url = Url::parse(url).map_err(|error| {
            Error::new(ErrorKind::Config, Operation::Configure).saying(format!(
                "the URL cannot be read ({error}); write for example redis://localhost/0"
            ))
        })?;
        let address = Address::new(&url, None)?;
        let connector = Connector::address(address, &TlsFiles::default(), None, None)?;
        let config = Config { namespace: Some(namespace.to_owned()), ..Config::default() };
        Ok(Self::over(connector, &config.into()))
    }

    /// The server that the configuration names.
    pub(crate) fn configured(
        config: &Settings,
        url: &Url,
        provider: Option<Provider>,
    ) -> Result<Self> {
        Ok(Self::over(Connector::configured(config, url, provider)?, config))
    }

    /// The server that the user is connected to already.
    pub(crate) fn given(given: Given, config: &Settings) -> Self {
        Self::over(Connector::Given(given), config)
    }

    fn over(connector: Connector, config: &Settings) -> Self {
        let link = Link::new(connector, config);
        let names = Names::new(&config.namespace);
        let channel = codec::channel(rand::random());
        let notices = Notices::new(channel, names.clone());
        let scripts = Scripts::get();
        let (listener, tail) = (OnceLock::new(), Mutex::new(None));
        Redis { link, names, notices, listener, tail, scripts }
    }

    /// Makes calls in one run of the script.
    async fn run(&self, requests: &[Request]) -> Result<Vec<Value>> {
        let Some(operation) = requests.first().map(Request::operation) else { return Ok(vec![]) };
        if requests.iter().any(|request| matches!(request, Request::Acquire(_))) {
            self.link.connected(operation).await?;
            if let Some(listener) = self.listener.get() {
                self.notices.subscribed(&self.link, listener).await;
            }
        }
        let run = self.said(requests);
        match self.link.run(operation, &run).await? {
            Value::Array(answers) if answers.len() == requests.len() => Ok(answers),
            _ => Err(errors::unreadable(operation)),
        }
    }

    /// Calls in the words of the script.
    fn said(&self, requests: &[Request]) -> Run {
        let mut run = self.scripts.calls.on(requests.len());
        for request in requests {
            let claim = request.claim();
            run.write(|word| self.names.write_state(&claim.key, claim.mode.is_permits(), word));
        }
        run.write(|letters| letters.extend(requests.iter().map(letter)));
        for request in requests {
            match request {
                Request::Acquire(claim) => {
                    run.write(|word| codec::write_head(claim, word));
                    run.arg(&*self.tail(&claim.holder));
                    run.arg(codec::millis(claim.ttl)).arg(tokens(claim));
                    run.write(|word| codec::write_asking(claim, word));
                    if let Some(owner) = claim.instead_of {
                        run.write(|word| codec::write_mark(owner, word));
                    }
                }
                Request::Renew(lease) => {
                    run.write(|word| codec::write_head(lease, word));
                    run.arg(codec::millis(lease.ttl));
                }
                Request::Release(lease, how) => {
                    run.write(|word| codec::write_mark(lease.owner, word));
                    if let Release::After(stay) = how {
                        run.arg(codec::micros(*stay));
                    }
                }
            }
        }
        run
    }

    async fn make(&self, requests: &[Request]) -> Vec<Answer> {
        match self.run(requests).await {
            Ok(answers) => {
                let answers: Vec<Answer> =
                    requests.iter().zip(answers).map(|(request, it)| read(request, it)).collect();
                let is_queued = |answer: &Answer| {
                    matches!(answer, Answer::Acquire(Ok(AcquireOutcome::Queued { .. })))
                };
                if answers.iter().any(is_queued) {
                    self.notices.set_waiting();
                }
                answers
            }
            Err(error) => requests
                .iter()
                .map(|request| {
                    let error = error.clone().during(request.operation());
                    request.failed(error.on(&request.claim().key))
                })
                .collect(),
        }
    }

    async fn make_one(&self, request: Request) -> Option<Answer> {
        self.make(&[request]).await.pop()
    }

    /// The end of the record of a lease of this holder, nearly always the same one.
    fn tail(&self, holder: &Arc<Holder>) -> Arc<str> {
        let mut latest = self.tail.lock();
        match &*latest {
            Some((whose, tail)) if Arc::ptr_eq(whose, holder) => tail.clone(),
            _ => {
                let tail: Arc<str> = codec::tail(&self.notices.channel, holder).into();
                *latest = Some((holder.clone(), tail.clone()));
                tail
            }
        }
    }

    async fn scan(&self, prefix: &str, cursor: Cursor) -> Result<Page> {
        let from = if cursor.0.is_empty() { "0".to_owned() } else { cursor.0 };
        let mut command = redis::cmd("SCAN");
        command.arg(from).arg("MATCH").arg(self.names.pattern(prefix));
        command.arg("COUNT").arg(SCANNED);
        let answer = self.link.command(Operation::List, &command).await?;
        let unreadable = || errors::unreadable(Operation::List);
        let (next, names): (String, Vec<Vec<u8>>) =
            redis::from_redis_value(answer).map_err(|_| unreadable())?;
        let keys =
            names.iter().filter_map(|name| self.names.key_of(std::str::from_utf8(name).ok()?));
        let next = (next != "0").then_some(Cursor(next));
        Ok(Page { keys: keys.collect(), next })
    }

    /// A run of a script on a key as a lock and as a semaphore, and on who broke it.
    fn on_all(&self, code: &'static Code, key: &Key) -> Run {
        let mut run = code.on(3);
        run.arg(self.names.state(key, false)).arg(self.names.state(key, true));
        run.arg(self.names.broken(key));
        run
    }
}

impl std::fmt::Debug for Redis {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("Redis")
    }
}

impl Backend for Redis {
    fn capabilities(&self) -> Capabilities {
        Capabilities { combines: COMBINED, ..Capabilities::all("redis") }
    }

    fn open(&self, _client: u64, listener: Weak<dyn Listener>) {
        let _ = self.listener.set(listener);
    }

    fn acquire<'a>(&'a self, claim: &'a Claim) -> Call<'a, Result<AcquireOutcome>> {
        Call::new(async move {
            match self.make_one(Request::Acquire(Arc::new(claim.clone()))).await {
                Some(Answer::Acquire(answer)) => answer,
                _ => Err(errors::unreadable(Operation::Acquire)),
            }
        })
    }

    fn renew<'a>(&'a self, leases: &'a [Arc<Claim>]) -> Call<'a, Vec<Result<RenewOutcome>>> {
        Call::new(async move {
            let mut answers = Vec::with_capacity(leases.len());
            for some in leases.chunks(COMBINED) {
                let requests: Vec<_> = some.iter().cloned().map(Request::Renew).collect();
                answers.extend(self.make(&requests).await.into_iter().map(|answer| match answer {
                    Answer::Renew(answer) => answer,
                    _ => Err(errors::unreadable(Operation::Renew)),
                }));
            }
            answers
        })
    }

    fn release<'a>(&'a self, lease: &'a Claim, how: Release) -> Call<'a, Result<ReleaseOutcome>> {
        Call::new(async move {
            match self.make_one(Request::Release(Arc::new(lease.clone()), how)).await {
                Some(Answer::Release(answer)) => answer,
                _ => Err(errors::unreadable(Operation::Release)),
            }
        })
    }

    fn combined<'a>(&'a self, requests: &'a [Request]) -> Call<'a, Vec<Answer>> {
        Call::new(self.make(requests))
    }

    fn inspect<'a>(&'a self, key: &'a Key) -> Call<'a, Result<KeyState>> {
        Call::new(async move {
            let run = self.on_all(&self.scripts.inspect, key);
            let answer = self.link.run(Operation::Inspect, &run).await?;
            let unreadable = || errors::unreadable(Operation::Inspect);
            let (now, broken, holders, waiters): (u64, String, Vec<String>, Vec<String>) =
                redis::from_redis_value(answer).map_err(|_| unreadable())?;
            Ok(KeyState {
                holders: codec::holder_states(now, &holders),
                waiters: codec::waiter_states(now, &waiters),
                broken_by: (!broken.is_empty()).then_some(broken),
            })
        })
    }

    fn list<'a>(&'a self, prefix: &'a str, cursor: Cursor) -> Call<'a, Result<Page>> {
        Call::new(self.scan(prefix, cursor))
    }

    fn break_lock<'a>(
        &'a self,
        key: &'a Key,
        by: &'a Holder,
        delay: Duration,
    ) -> Call<'a, Result<usize>> {
        Call::new(async move {
            let mut run = self.on_all(&self.scripts.break_lock, key);
            run.arg(by.to_string()).arg(BREAKS_KEPT).arg(codec::micros(delay));
            let answer = self.link.run(Operation::Break, &run).await?;
            redis::from_redis_value(answer).map_err(|_| errors::unreadable(Operation::Break))
        })
    }

    fn ping(&self) -> Call<'_, Result<()>> {
        Call::new(async move {
            self.link.command(Operation::Connect, &redis::cmd("PING")).await.map(drop)
        })
    }

    fn as_any(&self) -> Option<&dyn std::any::Any> {
        Some(self)
    }
}

fn attempt(answer: &Value, tokens: u32) -> Option<AcquireOutcome> {
    if let Value::Int(first) = answer {
        let first = u64::try_from(*first).ok()?;
        return Some(AcquireOutcome::Granted(Grant { first, count: tokens }));
    }
    let Value::Array(fields) = answer else { return None };
    let holder = || codec::holder(word(fields.get(1)?)?);
    match word(fields.first()?)? {
        "g" => {
            let first = u64::try_from(number(fields.get(1)?)?).ok()?;
            let count = u32::try_from(number(fields.get(2)?)?).ok()?;
            Some(AcquireOutcome::Granted(Grant { first, count }))
        }
        "b" => Some(AcquireOutcome::Busy { holder: holder() }),
        "q" => {
            let free_in = u64::try_from(number(fields.get(2)?)?).ok();
            let free_in = free_in.map(Duration::from_micros);
            Some(AcquireOutcome::Queued { holder: holder(), free_in })
        }
        _ => None,
    }
}

fn renewed(answer: &Value) -> Option<RenewOutcome> {
    match answer {
        Value::Int(1) => Some(RenewOutcome::Held { others_wait: false }),
        Value::Int(2) => Some(RenewOutcome::Held { others_wait: true }),
        Value::Int(0) => Some(RenewOutcome::Lost),
        _ => None,
    }
}

fn released(answer: &Value) -> Option<ReleaseOutcome> {
    match answer {
        Value::Int(1) => Some(ReleaseOutcome::Released),
        Value::Int(0) => Some(ReleaseOutcome::AlreadyLost),
        _ => None,
    }
}

/// What the script answered to a call.
fn read(request: &Request, answer: Value) -> Answer {
    let operation = request.operation();
    if let Value::ServerError(error) = answer {
        return request.failed(errors::refused(operation, &error).on(&request.claim().key));
    }
    let unreadable = || errors::unreadable(operation);
    match request {
        Request::Acquire(claim) => {
            Answer::Acquire(attempt(&answer, tokens(claim)).ok_or_else(unreadable))
        }
        Request::Renew(_) => Answer::Renew(renewed(&answer).ok_or_else(unreadable)),
        Request::Release(..) => Answer::Release(released(&answer).ok_or_else(unreadable)),
    }
}

/// What the script calls such a call.
fn letter(request: &Request) -> char {
    match request {
        Request::Acquire(claim) if claim.instead_of.is_some() => 'i',
        Request::Acquire(_) => 'a',
        Request::Renew(_) => 'r',
        Request::Release(_, Release::Now) => 'x',
        Request::Release(_, Release::After(_)) => 'p',
    }
}

/// How many tokens a claim is given, if the clock allows.
fn tokens(claim: &Claim) -> u32 {
    if claim.mode.is_permits() { 0 } else { claim.tokens.clamp(1, MOST_TOKENS) }
}

fn word(value: &Value) -> Option<&str> {
    match value {
        Value::BulkString(bytes) => std::str::from_utf8(bytes).ok(),
        Value::SimpleString(text) => Some(text),
        _ => None,
    }
}

fn number(value: &Value) -> Option<i64> {
    match value {
        Value::Int(number) => Some(*number),
        _ => None,
    }
}
