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
mod answers;
mod busy_polls;
mod cluster;
mod codec;
mod connection;
mod connector;
mod errors;
#[doc(hidden)]
pub mod extension;
mod health;
mod join_all;
mod layout_marker;
mod node_ids;
mod notices;
mod operators;
mod pipeline;
mod reader;
mod recent_releases;
mod redisson;
mod redlock;
mod replication;
mod resp;
mod route;
mod scripts;
mod sentinel;
mod server_check;
mod socket;

use std::sync::{Arc, OnceLock, Weak};

use redis::Value;
use url::Url;

use self::address::Address;
use self::answers::{AnswerReader, one_each};
use self::cluster::{Cluster, ShardNotices};
use self::codec::Names;
use self::connection::Link;
pub use self::connector::Credentials;
use self::connector::{Connector, Endpoint};
pub(crate) use self::connector::{Provider, TlsFiles, UserConnection};
use self::join_all::join_all;
use self::layout_marker::LayoutMarker;
use self::notices::Notices;
use self::recent_releases::{AfterFailover, RecentReleases};
pub use self::redisson::Redisson;
pub use self::redlock::RedLock;
use self::replication::{MinReplicas, ServedBy};
use self::route::Route;
use self::scripts::Run;
use super::per_holder::PerHolder;
use super::{
    Backend, Batch, Break, Call, Capabilities, Cursor, KeyState, Listener, Page, ServerState,
};
use crate::claim::{Answer, Claim, Holder, Mode, Release, Request};
use crate::config::{Settings, parse_url};
use crate::error::{Operation, Result};
use crate::key::Key;

/// How many calls one run of the script makes: some hundred microseconds of the
/// server's time, which everybody else waits for.
const COMBINED: usize = 128;
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

/// The same for every server that the URL names.
pub(crate) async fn clients(config: &Settings, url: &Url) -> Result<Vec<redis::Client>> {
    let hosts = parse_url(config.url.as_deref().unwrap_or(url.as_str()))?.hosts;
    let address = Address::new(url, config.database)?;
    let endpoint = Endpoint::new(address, &config.tls_files(), config.password_file.clone(), None)?;
    let mut clients = Vec::with_capacity(hosts.len());
    for (host, port) in &hosts {
        clients.push(endpoint.at(host, *port).client().await?);
    }
    Ok(clients)
}

/// A store of locks in Redis, seen by one client.
pub struct Redis {
    /// The way of operators and of stock.
    route: Route,
    /// The way of locks: another one if they wait for replicas, which holds up whatever is
    /// behind them.
    locks: Route,
    names: Names,
    notices: Notices,
    reader: AnswerReader,
    listener: OnceLock<Weak<dyn Listener>>,
    after_failover: OnceLock<Arc<AfterFailover>>,
    /// The [tail](Self::tail) of records.
    tail: PerHolder<Arc<str>>,
    min_replicas: Option<MinReplicas>,
}

impl Redis {
    /// The server that the URL names: `redis://`, `rediss://`, `redis+unix://` or
    /// `redis+sentinel://`. The options in its query are those of a
    /// [`Config`](crate::Config). Nothing is sent before the first call.
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
        let route = || -> Result<Route> {
            let provider = provider.clone();
            if url.scheme().ends_with("+cluster") {
                return Ok(Route::Cluster(Cluster::configured(config, url, provider)?));
            }
            let connector = Connector::configured(config, url, provider)?;
            Ok(Route::Server(Link::new(connector, Some(LayoutMarker::of(config)), config)))
        };
        Self::over(route, config)
    }

    /// The server that the user is connected to already.
    pub(crate) fn with_connection(connection: UserConnection, config: &Settings) -> Result<Self> {
        let connector = || Connector::UserConnection(connection.clone());
        let link = || Link::new(connector(), Some(LayoutMarker::of(config)), config);
        Self::over(|| Ok(Route::Server(link())), config)
    }

    fn over(new_route: impl Fn() -> Result<Route>, config: &Settings) -> Result<Self> {
        let route = new_route()?;
        let locks = if config.min_replicas > 0 { new_route()? } else { route.clone() };
        let names = Names::new(&config.namespace);
        let channel = codec::channel(rand::random());
        let notices = Notices::new(channel, names.clone(), config.min_replicas > 0);
        let shards = matches!(route, Route::Cluster(_)).then(ShardNotices::new);
        let (waits, names_read) = (notices.waits.clone(), names.clone());
        // An address may lead to another server after a failover, too.
        let releases = Arc::new(RecentReleases::new(locks.clone(), names.clone()));
        let reader = AnswerReader { names: names_read, waits, shards, releases };
        let (listener, tail) = (OnceLock::new(), PerHolder::new());
        let after_failover = OnceLock::new();
        let patience = config.call_timeout / 4;
        let min_replicas = (config.min_replicas > 0)
            .then_some(MinReplicas { count: config.min_replicas, patience });
        Ok(Redis {
            route,
            locks,
            names,
            notices,
            reader,
            listener,
            after_failover,
            tail,
            min_replicas,
        })
    }

    /// Makes calls in one run of the script. In a cluster they are on one key.
    async fn run(&self, requests: &[Request]) -> Result<(ServedBy, Vec<Value>)> {
        let claim = requests[0].claim();
        let operation = requests[0].operation();
        if has_acquire(requests) {
            self.locks.connected(operation).await?;
            if let Some(listener) = self.listener.get() {
                self.listen(listener);
                self.notices.subscribed(&self.locks, listener).await;
            }
        }
        let run = self.encode(requests);
        let (served_by, answer) = self.locks.run(operation, &self.name_of(claim), &run).await?;
        Ok((served_by, one_each(requests, answer)?))
    }

    /// Hears of hand-overs at the nodes of a cluster.
    fn listen(&self, listener: &Weak<dyn Listener>) {
        if let (Route::Cluster(cluster), Some(shards)) = (&self.locks, &self.reader.shards) {
            let Notices { channel, names, confirmed, .. } = &self.notices;
            shards.listen(cluster, channel, names, *confirmed, listener);
        }
    }

    /// The name of the key that a claim is on.
    fn name_of(&self, claim: &Claim) -> String {
        self.names.state(&claim.key, claim.mode.is_permits())
    }

    /// A call is about to be made that may be followed by a lease.
    fn leased(&self, request: &Request) {
        if let (Route::Cluster(cluster), Request::Acquire(claim) | Request::Renew(claim)) =
            (&self.locks, request)
        {
            cluster.leased_for(claim.ttl);
        }
    }

    /// Calls in the words of the script.
    fn encode(&self, requests: &[Request]) -> Run {
        let mut run = self.locks.scripts().calls.on(requests.len());
        for request in requests {
            let claim = request.claim();
            run.write(|word| self.names.write_state(&claim.key, claim.mode.is_permits(), word));
        }
        let letters = letters(requests);
        run.arg(&letters);
        for (request, letter) in requests.iter().zip(letters.chars()) {
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
                Request::Renew(lease) if letter == 't' => {
                    run.write(|word| codec::write_mark(lease.owner, word));
                }
                Request::Renew(lease) => {
                    run.write(|word| codec::write_head(lease, word));
                    run.arg(codec::millis(lease.ttl)).arg(further_tokens(lease));
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
        if requests.len() > 1 && has_acquire(requests) {
            // Then it is known how many keys a run may have.
            let _ = self.locks.connected(requests[0].operation()).await;
        }
        if !self.locks.wants_one_key() {
            return self.make_together(requests).await;
        }
        requests.iter().for_each(|request| self.leased(request));
        // Several keys in one run would be refused, even at one node.
        let each = requests.iter().map(std::slice::from_ref);
        let made = join_all(each.map(|one| self.make_together(one)));
        made.await.into_iter().flatten().collect()
    }

    async fn make_together(&self, requests: &[Request]) -> Vec<Answer> {
        if requests.is_empty() {
            return Vec::new();
        }
        let (served_by, answers) = match self.run(requests).await {
            Ok((served_by, answers)) => (Some(served_by), Ok(answers)),
            Err(error) => (None, Err(error)),
        };
        let answers = self.reader.read(requests, answers);
        self.replicated(requests, answers, served_by).await
    }

    /// The end of the record of a lease of this holder.
    fn tail(&self, holder: &Arc<Holder>) -> Arc<str> {
        self.tail.get(holder, || codec::tail(&self.notices.channel, holder).into())
    }
}

impl std::fmt::Debug for Redis {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("Redis")
    }
}

impl Backend for Redis {
    fn capabilities(&self) -> Capabilities {
        Capabilities { max_batch: COMBINED, ..Capabilities::all("redis") }
    }

    fn open(&self, _client: u64, listener: Weak<dyn Listener>) {
        let _ = self.listener.set(listener.clone());
        let after = Arc::new(AfterFailover { listener, releases: self.reader.releases.clone() });
        let after = self.after_failover.get_or_init(|| after);
        let listener: Arc<dyn Listener> = after.clone();
        self.locks.set_listener(Arc::downgrade(&listener));
    }

    fn call<'a>(&'a self, requests: &'a [Request]) -> Call<'a, Vec<Answer>> {
        Call::new(self.make(requests))
    }

    fn submit(&self, batch: Box<dyn Batch>) -> std::result::Result<(), Box<dyn Batch>> {
        if self.min_replicas.is_some() {
            return Err(batch); // replicas are waited for
        }
        let requests = batch.requests();
        if has_acquire(requests) && !self.notices.is_listening() {
            return Err(batch); // it is waited for, a little
        }
        let link = match &self.locks {
            Route::Server(link) if link.wants_one_slot() && requests.len() > 1 => {
                return Err(batch); // they are made one by one
            }
            Route::Server(link) => link,
            Route::Cluster(cluster) => {
                let encode = |request: &Request| self.encode(std::slice::from_ref(request));
                let name = |request: &Request| self.name_of(request.claim());
                requests.iter().for_each(|request| self.leased(request));
                return cluster.submit(batch, &self.reader, name, encode);
            }
        };
        let Some(live) = link.plain() else { return Err(batch) };
        let (run, reader) = (self.encode(requests), self.reader.clone());
        link.submit_batch(live, run, batch, move |requests, answer| {
            reader.read(requests, answer.and_then(|answer| one_each(requests, answer)))
        });
        Ok(())
    }

    fn partitions(&self) -> usize {
        self.locks.partitions()
    }

    fn partition_of(&self, request: &Request) -> usize {
        self.locks.partition_of(&self.names.state(&request.claim().key, false))
    }

    fn inspect<'a>(&'a self, key: &'a Key) -> Call<'a, Result<KeyState>> {
        Call::new(self.inspect_key(key))
    }

    fn list<'a>(&'a self, prefix: &'a str, cursor: Cursor) -> Call<'a, Result<Page>> {
        Call::new(self.scan(prefix, cursor))
    }

    fn break_lock<'a>(&'a self, key: &'a Key, how: &'a Break) -> Call<'a, Result<usize>> {
        Call::new(self.break_key(key, how))
    }

    fn ping(&self) -> Call<'_, Result<()>> {
        Call::new(async move {
            for (_, server) in self.route.servers(Operation::Connect).await? {
                server.command(Operation::Connect, &redis::cmd("PING")).await?;
            }
            Ok(())
        })
    }

    fn servers(&self) -> Call<'_, Result<Vec<ServerState>>> {
        Call::new(self.server_states())
    }

    fn as_any(&self) -> Option<&dyn std::any::Any> {
        Some(self)
    }
}

/// What a backend can do that has exclusive locks only, which are free when they are released.
fn exclusive_only(name: &'static str) -> Capabilities {
    Capabilities {
        shared: false,
        permits: false,
        fifo: false,
        release_after: false,
        operators: false,
        max_batch: COMBINED,
        ..Capabilities::all(name)
    }
}

fn has_acquire(requests: &[Request]) -> bool {
    requests.iter().any(|request| matches!(request, Request::Acquire(_)))
}

/// What the script calls such calls. Of renewals on the same terms, which is what a program
/// sends that holds many locks, the terms are written once.
fn letters(requests: &[Request]) -> String {
    let mut terms: Option<&Claim> = None;
    let mut letters = String::with_capacity(requests.len());
    for request in requests {
        letters.push(match request {
            Request::Acquire(claim) if claim.instead_of.is_some() => 'i',
            Request::Acquire(_) => 'a',
            Request::Renew(lease) if terms.is_some_and(|it| has_terms_of(lease, it)) => 't',
            Request::Renew(lease) => {
                terms = Some(lease);
                'r'
            }
            Request::Release(_, Release::Now) => 'x',
            Request::Release(_, Release::After(_)) => 'p',
        });
    }
    letters
}

/// Whether a lease is renewed as another one is.
fn has_terms_of(lease: &Claim, other: &Claim) -> bool {
    lease.mode == other.mode
        && lease.ttl == other.ttl
        && further_tokens(lease) == further_tokens(other)
}

/// How many tokens a claim is given, if the clock allows.
fn tokens(claim: &Claim) -> u32 {
    if claim.mode.is_permits() { 0 } else { claim.tokens.clamp(1, MOST_TOKENS) }
}

/// How many further tokens a renewal is given, if nobody waits.
fn further_tokens(lease: &Claim) -> u32 {
    if lease.mode == Mode::Exclusive { lease.tokens.min(MOST_TOKENS) } else { 0 }
}
