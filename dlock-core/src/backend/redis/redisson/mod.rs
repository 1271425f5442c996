//! Locks in the layout of Redisson, so that Rust and Java programs exclude each other.
//!
//! A lock is the hash that `RedissonClient.getLock(name)` uses, and a release is told on the
//! channel that Redisson listens to. What that layout has no place for is not there: shared
//! locks, permits, a queue in order, locks that stay taken, breaks. Tokens are ours alone,
//! and rise from one dlock holder to the next: they are in a record beside the hash, which
//! Redisson does not know. [ADR 15](../../../../../docs/adr/0015-redisson.md) has the reasons.
//!
//! - `names.rs`: the names of locks, channels and holders
//! - `channels.rs`: waiting
//! - `lua/redisson_calls.lua`: what a call does at the server

mod channels;
mod names;

use std::sync::{Arc, OnceLock, Weak};
use std::time::{Duration, Instant};

use redis::{Value, from_redis_value};
use tokio::runtime::Handle;
use url::Url;

use self::channels::Channels;
use self::names::{Names, field, field_of};
use super::answers::{one_each, read_all};
use super::connection::Link;
use super::connector::{Connector, Provider, UserConnection};
use super::join_all::join_all;
use super::scripts::{Code, Run};
use super::{codec, errors, exclusive_only, has_acquire, tokens};
use crate::backend::per_holder::PerHolder;
use crate::backend::{
    Backend, Batch, Call, Capabilities, HolderState, KeyState, Listener, WaiterState,
};
use crate::claim::{AcquireOutcome, Answer, Holder, Mode, Release, Request};
use crate::config::Settings;
use crate::error::{Error, ErrorKind, Operation, Result};
use crate::key::Key;

/// How soon a claim looks again when its answer was old before it arrived.
const SOON: Duration = Duration::from_millis(1);

struct Scripts {
    calls: Code,
    inspect: Code,
}

fn scripts() -> &'static Scripts {
    static SCRIPTS: OnceLock<Scripts> = OnceLock::new();
    SCRIPTS.get_or_init(|| Scripts {
        calls: Code::new(include_str!("../lua/redisson_calls.lua")),
        inspect: Code::new(include_str!("../lua/redisson_inspect.lua")),
    })
}

/// A store of locks in Redis that programs with Redisson use too, seen by one client.
///
/// ```no_run
/// # async fn example() -> dlock::Result<()> {
/// use dlock::Dlock;
///
/// // Excludes `redisson.getLock("order:7")` of a Java program.
/// let dlock = Dlock::connect("redis://localhost?layout=redisson").await?;
/// let guard = dlock.mutex("order:7").lock().await?;
/// # Ok(()) }
/// ```
pub struct Redisson {
    shared: Arc<Shared>,
}

struct Shared {
    link: Arc<Link>,
    names: Names,
    channels: Channels,
    /// The runtime of the driver.
    runtime: OnceLock<Handle>,
    /// The holder of the latest claim, as JSON.
    info: PerHolder<Arc<str>>,
}

impl Redisson {
    /// The server that the URL names: `redis://`, `rediss://`, `redis+unix://` or
    /// `redis+sentinel://`. Nothing is sent before the first call.
    ///
    /// # Errors
    /// `Config` if the URL or the namespace cannot be used.
    pub fn new(url: &str, namespace: &str) -> Result<Self> {
        let (config, url) = Settings::of_url(url, namespace)?;
        Self::configured(&config, &url, None)
    }

    /// The server that the configuration names.
    pub(crate) fn configured(
        config: &Settings,
        url: &Url,
        provider: Option<Provider>,
    ) -> Result<Self> {
        if url.scheme().ends_with("+cluster") {
            return Err(Error::config(
                "the layout `redisson` is for one server or for Sentinels, not for a cluster; remove `layout`, or use redis:// or redis+sentinel://",
            ));
        }
        Self::over(Connector::configured(config, url, provider)?, config)
    }

    /// The server that the user is connected to already.
    pub(crate) fn with_connection(connection: UserConnection, config: &Settings) -> Result<Self> {
        Self::over(Connector::UserConnection(connection), config)
    }

    fn over(connector: Connector, config: &Settings) -> Result<Self> {
        if config.min_replicas > 0 {
            return Err(Error::config(
                "the layout `redisson` does not wait for replicas; remove `min_replicas` or `layout`",
            ));
        }
        let link = Link::new(connector, None, config);
        let shared = Shared {
            channels: Channels::new(link.clone()),
            link,
            names: Names::new(&config.namespace),
            runtime: OnceLock::new(),
            info: PerHolder::new(),
        };
        Ok(Redisson { shared: Arc::new(shared) })
    }

    async fn make(&self, requests: &[Request]) -> Vec<Answer> {
        let shared = &self.shared;
        let _ = shared.runtime.set(Handle::current()); // the first one is the driver's
        if let Some(at) = requests.iter().position(is_unsupported) {
            // Nothing of it is sent; the others are made as if it were not there.
            let (before, rest) = requests.split_at(at);
            let mut answers = Box::pin(self.make(before)).await;
            answers.push(unsupported(&rest[0]));
            answers.extend(Box::pin(self.make(&rest[1..])).await);
            return answers;
        }
        let Some(first) = requests.first() else { return Vec::new() };
        if shared.link.wants_one_slot() && requests.len() > 1 {
            let each = join_all(requests.chunks(1).map(|one| Box::pin(self.make(one))));
            return each.await.into_iter().flatten().collect();
        }
        let (run, sent) = (shared.encode(requests), Instant::now());
        let answer = shared.link.run(first.operation(), &run).await;
        shared.read(requests, answer, sent)
    }

    async fn inspect_key(&self, key: &Key) -> Result<KeyState> {
        let mut run = scripts().inspect.on(3);
        run.arg(&self.shared.names.keys(key));
        let answer = self.shared.link.run(Operation::Inspect, &run).await?;
        let (now, left, record, fields, waiters): (u64, i64, String, Vec<String>, Vec<String>) =
            from_redis_value(answer).map_err(|_| errors::unreadable(Operation::Inspect))?;
        let expires_in = Duration::from_millis(u64::try_from(left).unwrap_or(0));
        let holder = |field: &String| holder_state(field, &record, now, expires_in);
        let holders = fields.iter().map(holder).collect();
        let mut waiters: Vec<_> =
            waiters.iter().filter_map(|waiter| waiter_state(waiter, now)).collect();
        waiters.sort_by_key(|waiter| std::cmp::Reverse(waiter.waiting_for));
        Ok(KeyState { holders, waiters, broken_by: None })
    }
}

impl Shared {
    /// Calls in the words of the script.
    fn encode(&self, requests: &[Request]) -> Run {
        let mut run = scripts().calls.on(3 * requests.len());
        for request in requests {
            run.arg(&self.names.keys(&request.claim().key));
        }
        run.write(|letters| letters.extend(requests.iter().map(letter)));
        for request in requests {
            let claim = request.claim();
            let channel = self.names.channel(&claim.key);
            run.arg(field(claim)).arg(&channel);
            match request {
                Request::Acquire(claim) => {
                    run.arg(codec::millis(claim.ttl)).arg(tokens(claim));
                    let queue_ttl = if claim.queue { codec::micros(claim.queue_ttl()) } else { 0 };
                    run.arg(&*self.info(&claim.holder)).arg(queue_ttl);
                    let given_up = claim.instead_of.map(|old| field_of(old, claim.holder.pid));
                    run.arg(given_up.unwrap_or_default()).arg(self.channels.subscribers(&channel));
                }
                Request::Renew(_) => drop(run.arg(codec::millis(claim.ttl))),
                Request::Release(..) => {}
            }
        }
        run
    }

    /// What the script answered, and who waits because of it.
    fn read(&self, requests: &[Request], answer: Result<Value>, sent: Instant) -> Vec<Answer> {
        let mut answers = read_all(requests, answer.and_then(|it| one_each(requests, it)));
        for (request, answer) in requests.iter().zip(&mut answers) {
            let claim = request.claim();
            let channel = || self.names.channel(&claim.key);
            match answer {
                Answer::Acquire(Ok(AcquireOutcome::Queued { free_in, .. })) => {
                    let Some(runtime) = self.runtime.get() else { continue };
                    if self.channels.queued(runtime, channel(), &claim.key, claim.owner, sent) {
                        *free_in = Some(SOON);
                    }
                }
                Answer::Acquire(Ok(_)) | Answer::Release(_) => {
                    self.channels.forget(&channel(), claim.owner);
                }
                _ => {}
            }
        }
        answers
    }

    /// The holder as JSON.
    fn info(&self, holder: &Arc<Holder>) -> Arc<str> {
        self.info.get(holder, || codec::info(holder).into())
    }
}

/// One holder of a lock: of dlock if the record is of this field, else of Redisson.
fn holder_state(field: &str, record: &str, now: u64, expires_in: Duration) -> HolderState {
    let words: Vec<&str> = record.splitn(5, '\t').collect();
    if let [_, first, since, whose, json] = words[..]
        && whose == field
        && let Some(holder) = codec::holder(json)
    {
        let since = since.parse().unwrap_or(now);
        return HolderState {
            holder,
            mode: Mode::Exclusive,
            token: first.parse().ok(),
            held_for: Duration::from_micros(now.saturating_sub(since)),
            expires_in,
            is_over: false,
        };
    }
    let (name, host) = (field.to_owned(), "Redisson".to_owned());
    HolderState {
        holder: Arc::new(Holder { client: 0, name, host, pid: 0, tags: Vec::new() }),
        mode: Mode::Exclusive,
        token: None,
        held_for: Duration::ZERO,
        expires_in,
        is_over: false,
    }
}

/// One client of dlock that waits; `None` if it is gone.
fn waiter_state(waiter: &str, now: u64) -> Option<WaiterState> {
    let mut words = waiter.splitn(3, '\t');
    let ends: u64 = words.next()?.parse().ok()?;
    let since: u64 = words.next()?.parse().ok()?;
    let holder = codec::holder(words.next()?)?;
    let waiting_for = Duration::from_micros(now.saturating_sub(since));
    (ends > now).then_some(WaiterState { holder, mode: Mode::Exclusive, waiting_for })
}

fn letter(request: &Request) -> char {
    match request {
        Request::Acquire(_) => 'a',
        Request::Renew(_) => 'r',
        Request::Release(..) => 'x',
    }
}

fn is_unsupported(request: &Request) -> bool {
    request.claim().mode != Mode::Exclusive
        || matches!(request, Request::Release(_, Release::After(_)))
}

fn unsupported(request: &Request) -> Answer {
    let error = Error::new(ErrorKind::Unsupported, request.operation());
    request.failed(error.with_key(&request.claim().key).with_message(
        "the layout `redisson` has exclusive locks only, which are free when they are released",
    ))
}

impl std::fmt::Debug for Redisson {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("Redisson")
    }
}

impl Backend for Redisson {
    fn capabilities(&self) -> Capabilities {
        exclusive_only("redis")
    }

    fn unsupported_hint(&self, _mode: Mode) -> Option<&'static str> {
        Some("the layout `redisson` shares plain locks only; use a client without `layout` for it")
    }

    fn open(&self, _client: u64, listener: Weak<dyn Listener>) {
        self.shared.channels.set_listener(listener.clone());
        self.shared.link.set_listener(listener);
    }

    fn call<'a>(&'a self, requests: &'a [Request]) -> Call<'a, Vec<Answer>> {
        Call::new(self.make(requests))
    }

    fn submit(&self, batch: Box<dyn Batch>) -> std::result::Result<(), Box<dyn Batch>> {
        let shared = &self.shared;
        let requests = batch.requests();
        let is_first = has_acquire(requests) && shared.runtime.get().is_none();
        let one_by_one = shared.link.wants_one_slot() && requests.len() > 1;
        if is_first || one_by_one || requests.iter().any(is_unsupported) {
            return Err(batch);
        }
        let Some(live) = shared.link.plain() else { return Err(batch) };
        let (run, reading, sent) = (shared.encode(requests), shared.clone(), Instant::now());
        shared.link.submit_batch(live, run, batch, move |requests, answer| {
            reading.read(requests, answer, sent)
        });
        Ok(())
    }

    fn inspect<'a>(&'a self, key: &'a Key) -> Call<'a, Result<KeyState>> {
        Call::new(self.inspect_key(key))
    }

    fn ping(&self) -> Call<'_, Result<()>> {
        Call::new(async move {
            let ping = redis::cmd("PING");
            self.shared.link.command(Operation::Connect, &ping).await.map(drop)
        })
    }
}
