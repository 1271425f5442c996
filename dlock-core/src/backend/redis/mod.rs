//! Locks in Redis 6.2 or newer, or Valkey.
//!
//! Every operation is one Lua script on the server, by the server's clock; see
//! `lua/common.lua` for what is stored. A client has two connections: one for
//! commands, and one on which it hears that a lock was handed to it or broken.
//! Both are made when first needed, in the runtime that makes the call, and made
//! anew when they break.
//!
//! What one Redis does not promise: a lock survives neither a restart without
//! persistence nor a failover to a replica that had not heard of it. The token
//! rises nevertheless, so a [`Fence`](crate::Fence) still rejects the older holder.

mod address;
#[doc(hidden)]
pub mod beside;
mod combine;
mod connection;
mod faults;
mod greeting;
mod layout;
mod notices;
mod scripts;
mod source;

use std::sync::{Arc, OnceLock, Weak};

use redis::{Cmd, Value};
use url::Url;

use self::address::Address;
use self::combine::{Combiner, Item};
use self::connection::Link;
use self::layout::Names;
use self::notices::Notices;
use self::scripts::Scripts;
pub use self::source::Credentials;
use self::source::Source;
pub(crate) use self::source::{Given, Provider, TlsFiles};
use super::{Backend, Call, Capabilities, Cursor, KeyState, Listener, Page};
use crate::claim::{Attempt, Claim, Grant, Holder, Release, Released, Renewed};
use crate::config::{Config, Eviction};
use crate::error::{Error, ErrorKind, Operation, Result};
use crate::key::Key;

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
/// # async fn example(guard: dlock_core::Guard, mut connection: redis::aio::MultiplexedConnection)
/// # -> Result<(), redis::RedisError> {
/// let script = redis::Script::new(dlock_core::backend::redis::FENCED_SET);
/// let written: bool = script
///     .key("{order:7}").key("{order:7}:fence")
///     .arg("x").arg(guard.token().get()).arg("paid")
///     .invoke_async(&mut connection).await?;
/// assert!(written, "the lock was lost, and somebody else wrote since");
/// # Ok(()) }
/// ```
pub const FENCED_SET: &str = include_str!("lua/fenced_set.lua");

/// A store of locks in Redis, seen by one client.
pub struct Redis {
    link: Arc<Link>,
    calls: Arc<Combiner>,
    names: Names,
    notices: Notices,
    listener: OnceLock<Weak<dyn Listener>>,
    scripts: &'static Scripts,
}

impl Redis {
    /// The server that the URL names: `redis://`, `rediss://` or `redis+unix://`.
    /// Nothing is sent before the first call.
    ///
    /// # Errors
    /// `Config` if the URL cannot be used.
    pub fn new(url: &str, namespace: &str) -> Result<Self> {
        let url = Url::parse(url).map_err(|error| {
            Error::new(ErrorKind::Config, Operation::Configure).saying(format!(
                "the URL cannot be read ({error}); write for example redis://localhost/0"
            ))
        })?;
        let address = Address::new(&url, None)?;
        let source = Source::address(address, &TlsFiles::default(), None, None)?;
        Ok(Self::over(source, Eviction::default(), namespace))
    }

    /// The server that the configuration names.
    pub(crate) fn configured(
        config: &Config,
        url: &Url,
        provider: Option<Provider>,
    ) -> Result<Self> {
        let address = Address::new(url, config.database)?;
        let source =
            Source::address(address, &config.tls_files(), config.password_file.clone(), provider)?;
        Ok(Self::over(source, config.eviction, &config.namespace))
    }

    /// The server that the user is connected to already.
    pub(crate) fn given(given: Given, config: &Config) -> Self {
        Self::over(Source::Given(given), config.eviction, &config.namespace)
    }

    fn over(source: Source, eviction: Eviction, namespace: &str) -> Self {
        let link = Link::new(source, eviction);
        let names = Names::new(namespace);
        let channel = layout::channel(rand::random());
        let notices = Notices::new(channel, names.clone());
        let scripts = Scripts::get();
        let calls = Combiner::new(link.clone(), &scripts.calls);
        Redis { link, calls, names, notices, listener: OnceLock::new(), scripts }
    }

    async fn acquire_once(&self, claim: &Claim) -> Result<Attempt> {
        self.link.connected(Operation::Acquire).await?;
        if let Some(listener) = self.listener.get() {
            self.notices.subscribed(&self.link, listener).await;
        }
        let (mode, take, of) = layout::mode(claim.mode);
        let mut words = Cmd::new();
        words
            .arg("a")
            .arg(claim.owner.to_string())
            .arg(mode)
            .arg(take)
            .arg(of)
            .arg(layout::micros(claim.ttl))
            .arg(u8::from(claim.queue))
            .arg(claim.instead_of.map(|owner| owner.to_string()).unwrap_or_default())
            .arg(claim.tokens.clamp(1, MOST_TOKENS))
            .arg(layout::micros(claim.patience()))
            .arg(claim.sent.as_nanos())
            .arg(&self.notices.channel)
            .arg(layout::info(claim));
        let answer = self.calls.call(self.item(Operation::Acquire, claim, words)).await?;
        attempt(&answer).ok_or_else(|| faults::unreadable(Operation::Acquire))
    }

    fn renewal(&self, lease: &Claim) -> Item {
        let (mode, take, of) = layout::mode(lease.mode);
        let mut words = Cmd::new();
        words.arg("r").arg(lease.owner.to_string()).arg(mode).arg(take).arg(of);
        words.arg(layout::micros(lease.ttl));
        self.item(Operation::Renew, lease, words)
    }

    fn item(&self, operation: Operation, claim: &Claim, words: Cmd) -> Item {
        Item { operation, key: self.names.state(&claim.key, claim.mode.is_permits()), words }
    }

    async fn scan(&self, prefix: &str, cursor: Cursor) -> Result<Page> {
        let from = if cursor.0.is_empty() { "0".to_owned() } else { cursor.0 };
        let mut command = redis::cmd("SCAN");
        command.arg(from).arg("MATCH").arg(self.names.pattern(prefix));
        command.arg("COUNT").arg(SCANNED).arg("TYPE").arg("string");
        let answer = self.link.command(Operation::List, &command).await?;
        let unreadable = || faults::unreadable(Operation::List);
        let (next, names): (String, Vec<Vec<u8>>) =
            redis::from_redis_value(answer).map_err(|_| unreadable())?;
        let keys =
            names.iter().filter_map(|name| self.names.key_of(std::str::from_utf8(name).ok()?));
        let next = (next != "0").then_some(Cursor(next));
        Ok(Page { keys: keys.collect(), next })
    }

    fn both(&self, key: &Key) -> [String; 2] {
        [self.names.state(key, false), self.names.state(key, true)]
    }
}

impl std::fmt::Debug for Redis {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("Redis")
    }
}

impl Backend for Redis {
    fn capabilities(&self) -> Capabilities {
        Capabilities::all("redis")
    }

    fn open(&self, _client: u64, listener: Weak<dyn Listener>) {
        let _ = self.listener.set(listener);
    }

    fn acquire<'a>(&'a self, claim: &'a Claim) -> Call<'a, Result<Attempt>> {
        Call::new(
            async move { self.acquire_once(claim).await.map_err(|error| error.on(&claim.key)) },
        )
    }

    fn renew<'a>(&'a self, leases: &'a [Arc<Claim>]) -> Call<'a, Vec<Result<Renewed>>> {
        Call::new(async move {
            let mut answers = Vec::with_capacity(leases.len());
            for answered in self.calls.place(leases.iter().map(|lease| self.renewal(lease))) {
                let answer = combine::answer(Operation::Renew, answered).await;
                answers.push(answer.and_then(|answer| renewed(&answer)));
            }
            answers
        })
    }

    fn release<'a>(&'a self, lease: &'a Claim, how: Release) -> Call<'a, Result<Released>> {
        Call::new(async move {
            let stays = match how {
                Release::Now => String::new(),
                Release::After(stay) => layout::micros(stay).to_string(),
            };
            let mut words = Cmd::new();
            words.arg("x").arg(lease.owner.to_string()).arg(stays);
            let item = self.item(Operation::Release, lease, words);
            match word(&self.calls.call(item).await?) {
                Some("r") => Ok(Released::Released),
                Some("l") => Ok(Released::AlreadyLost),
                _ => Err(faults::unreadable(Operation::Release)),
            }
        })
    }

    fn inspect<'a>(&'a self, key: &'a Key) -> Call<'a, Result<KeyState>> {
        Call::new(async move {
            let run = self.scripts.inspect.on(self.both(key).iter());
            let answer = self.link.run(Operation::Inspect, &run).await?;
            let unreadable = || faults::unreadable(Operation::Inspect);
            let (now, broken, holders, waiters): (u64, String, Vec<String>, Vec<String>) =
                redis::from_redis_value(answer).map_err(|_| unreadable())?;
            Ok(KeyState {
                holders: holders.iter().filter_map(|it| layout::holder_state(now, it)).collect(),
                waiters: waiters.iter().filter_map(|it| layout::waiter_state(now, it)).collect(),
                broken_by: (!broken.is_empty()).then_some(broken),
            })
        })
    }

    fn list<'a>(&'a self, prefix: &'a str, cursor: Cursor) -> Call<'a, Result<Page>> {
        Call::new(self.scan(prefix, cursor))
    }

    fn break_lock<'a>(&'a self, key: &'a Key, by: &'a Holder) -> Call<'a, Result<usize>> {
        Call::new(async move {
            let run = self
                .scripts
                .break_lock
                .on(self.both(key).iter())
                .arg(by.to_string())
                .arg(BREAKS_KEPT);
            let answer = self.link.run(Operation::Break, &run).await?;
            redis::from_redis_value(answer).map_err(|_| faults::unreadable(Operation::Break))
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

fn attempt(answer: &Value) -> Option<Attempt> {
    let Value::Array(fields) = answer else { return None };
    let holder = || layout::holder(word(fields.get(1)?)?);
    match word(fields.first()?)? {
        "g" => {
            let first = u64::try_from(number(fields.get(1)?)?).ok()?;
            let count = u32::try_from(number(fields.get(2)?)?).ok()?;
            Some(Attempt::Granted(Grant { first, count }))
        }
        "b" => Some(Attempt::Busy { holder: holder() }),
        "q" => {
            let free_in = u64::try_from(number(fields.get(2)?)?).ok();
            let free_in = free_in.map(std::time::Duration::from_micros);
            Some(Attempt::Queued { holder: holder(), free_in })
        }
        _ => None,
    }
}

fn renewed(answer: &Value) -> Result<Renewed> {
    match word(answer) {
        Some("h") => Ok(Renewed::Held { others_wait: false }),
        Some("w") => Ok(Renewed::Held { others_wait: true }),
        Some("l") => Ok(Renewed::Lost),
        _ => Err(faults::unreadable(Operation::Renew)),
    }
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
