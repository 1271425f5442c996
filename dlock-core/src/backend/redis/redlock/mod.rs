//! Locks at a majority of independent Redis servers: RedLock.
//!
//! Every request goes to all nodes at once, and is decided as soon as a majority has decided
//! it, so a node that is slow, paused or dead delays nobody. How votes, tokens and lost data
//! are dealt with is in `quorum.rs` and `quorum_claim.rs`; what a node does is in `lua/redlock_*.lua`.
//!
//! - `calls.rs`: the calls of the driver, their rounds and their answers
//! - `node.rs`: the way to one node; `voter.rs`: what is asked when it is met
//! - `pending_releases.rs`: what a node has not confirmed to have given back; `give_back.rs` sends it
//! - `wakeups.rs`: waiting
//! - `inspect.rs`: what operators see

#[cfg(test)]
mod agreement;
mod answer_sink;
mod calls;
mod codec;
mod give_back;
mod inspect;
#[cfg(test)]
mod model;
mod node;
mod pending_releases;
mod quorum;
mod quorum_claim;
mod scripts;
#[cfg(test)]
mod sim;
mod voter;
mod wakeups;

use std::sync::atomic::AtomicU64;
use std::sync::{Arc, OnceLock, Weak};
use std::time::{Duration, Instant};

use parking_lot::Mutex;
use redis::Value;
use tokio::runtime::Handle;
use tokio::sync::oneshot;
use url::Url;

use self::answer_sink::AnswerSink;
use self::node::Node;
use self::quorum::QuorumSize;
use self::quorum_claim::QuorumClaim;
use self::scripts::QuorumScripts;
pub(super) use self::voter::Voter;
use self::voter::{KnownNodes, NodeHello};
use self::wakeups::Wakeups;
use super::address::Address;
use super::codec::{self as names, Names};
use super::connection::Link;
use super::connector::{Connector, Endpoint, Provider, settings};
use super::join_all::join_all;
use super::layout_marker::LayoutMarker;
use super::notices::Notices;
use super::scripts::Run;
use super::{COMBINED, errors, exclusive_only, has_acquire};
use crate::backend::per_holder::PerHolder;
use crate::backend::{Backend, Batch, Call, Capabilities, KeyState, Listener, ServerState};
use crate::claim::{Answer, Holder, Owner, Request};
use crate::clock::Clock;
use crate::collections::Map;
use crate::config::{Config, HostPort, Settings, parse_url};
use crate::error::{Error, Operation, Result};
use crate::key::Key;

/// The longest ttl if none is configured: twice the default ttl.
const DEFAULT_MAX_TTL: Duration = Duration::from_secs(60);
/// The fewest nodes that can lose one.
const FEWEST: usize = 3;

/// A store of locks in a majority of independent Redis servers, seen by one client.
///
/// ```no_run
/// # async fn example() -> dlock::Result<()> {
/// use dlock::Dlock;
///
/// let dlock = Dlock::connect("redlock://r1,r2,r3,r4,r5?max_ttl=60s").await?;
/// let guard = dlock.mutex("order:7").lock().await?;
/// println!("write with token {}", guard.token());
/// # Ok(()) }
/// ```
pub struct RedLock {
    shared: Arc<Shared>,
}

/// What the backend, its calls and its tasks share.
struct Shared {
    quorum: QuorumSize,
    nodes: Vec<Arc<Node>>,
    names: Names,
    marker: String,
    channel: String,
    longest: Duration,
    call_timeout: Duration,
    clock: Clock,
    /// The claims that nodes may know.
    claims: Mutex<Map<Owner, QuorumClaim>>,
    attempts: AtomicU64,
    wakeups: Wakeups,
    /// The runtime of the driver.
    runtime: OnceLock<Handle>,
    /// The holder of the latest claim, as JSON.
    info: PerHolder<Arc<str>>,
}

impl RedLock {
    /// The nodes that the URL names: `redlock://h1,h2,h3`, or `redlocks://` for TLS. The
    /// options in its query are those of a [`Config`](crate::Config). Nothing is sent before
    /// the first call.
    ///
    /// # Errors
    /// `Config` if the URL or the namespace cannot be used.
    pub fn new(url: &str, namespace: &str) -> Result<Self> {
        let (config, url) = Settings::of_url(url, namespace)?;
        Self::configured(&config, &url, None)
    }

    /// The nodes that the configuration names.
    pub(crate) fn configured(
        config: &Settings,
        url: &Url,
        provider: Option<Provider>,
    ) -> Result<Self> {
        let longest = config.max_ttl.unwrap_or(DEFAULT_MAX_TTL);
        if config.ttl > longest {
            return Err(Error::config(format!(
                "`ttl` is longer than `max_ttl`, which is {}; use a shorter one, or set `max_ttl` in all programs",
                humantime::format_duration(longest)
            )));
        }
        Self::with(config, url, provider, false)
    }

    /// Prepares nodes that are new: they may vote at once, instead of after the longest ttl.
    /// Returns for how long the last of them does not vote: zero when all vote.
    ///
    /// Without it, a node that dlock finds empty does not vote until `max_ttl` has passed,
    /// since it may have lost locks that are held. Call it only when no program uses these
    /// nodes and this namespace yet. Nodes are new together or not at all: if one of them was
    /// prepared or used before, an empty one has lost its data, and nothing is changed.
    ///
    /// ```no_run
    /// # async fn example() -> dlock::Result<()> {
    /// use dlock::Config;
    /// use dlock::backend::redis::RedLock;
    ///
    /// let config = Config::from_url("redlock://r1,r2,r3,r4,r5?namespace=shop")?;
    /// RedLock::prepare_new_nodes(&config).await?;
    /// # Ok(()) }
    /// ```
    ///
    /// # Errors
    /// `Config` if the URL is not one of redlock, or a node cannot be used; `Unavailable` if
    /// a node does not answer.
    ///
    /// # Cancel safety
    /// When the future is dropped some nodes may be prepared. The others then vote after
    /// `max_ttl`.
    pub async fn prepare_new_nodes(config: &Config) -> Result<Duration> {
        let settings = Settings::from(config.clone());
        let text = settings.url.clone().unwrap_or_default();
        let url = parse_url(&text)?.url;
        let backend = Self::with(&settings, &url, None, true)?;
        let backend = match are_marked(&settings, &url, &backend.shared.marker).await? {
            true => Self::with(&settings, &url, None, false)?,
            false => backend,
        };
        let shared = &backend.shared;
        shared.open(&Handle::current());
        let all = shared.call_timeout;
        let replies = shared.ask_all(all, Operation::Connect, |node| node.voter.hello()).await;
        let mut votes_in = Duration::ZERO;
        for (node, reply) in shared.nodes.iter().zip(replies) {
            let reply = reply.unwrap_or_else(|| Err(errors::silent(node.link.shown())))?;
            let hello = NodeHello::read(&reply);
            let hello = hello.ok_or_else(|| errors::unreadable(Operation::Connect))?;
            votes_in = votes_in.max(node.voter.silent_for(&hello).unwrap_or_default());
        }
        Ok(votes_in)
    }

    fn with(config: &Settings, url: &Url, provider: Option<Provider>, new: bool) -> Result<Self> {
        let hosts = parse_url(config.url.as_deref().unwrap_or(url.as_str()))?.hosts;
        check_nodes(&hosts)?;
        let longest = config.max_ttl.unwrap_or(DEFAULT_MAX_TTL);
        if config.min_replicas > 0 {
            return Err(Error::config(
                "the nodes of redlock:// have no replicas; remove `min_replicas`",
            ));
        }
        let names = Names::new(&config.namespace);
        let channel = names::channel(rand::random());
        let address = Address::new(url, config.database)?;
        let files = config.tls_files();
        let endpoint = Endpoint::new(address, &files, config.password_file.clone(), provider)?;
        let known_nodes = Arc::new(KnownNodes::default());
        let nodes = hosts.iter().enumerate().map(|(place, (host, port))| {
            let marker = names.marker();
            let voter = Arc::new(Voter::new(place, known_nodes.clone(), marker, longest, new));
            let connector = Connector::Voter(endpoint.at(host, *port), voter.clone());
            let link = Link::new(connector, Some(LayoutMarker::of(config)), config);
            Node::new(link, voter, Notices::new(channel.clone(), names.clone(), false))
        });
        let nodes: Vec<_> = nodes.collect();
        let shared = Arc::new(Shared {
            quorum: QuorumSize::of(nodes.len()),
            nodes,
            marker: names.marker(),
            names,
            channel,
            longest,
            call_timeout: config.call_timeout,
            clock: Clock::boot(),
            claims: Mutex::default(),
            attempts: AtomicU64::new(0),
            wakeups: Wakeups::default(),
            runtime: OnceLock::new(),
            info: PerHolder::new(),
        });
        Ok(RedLock { shared })
    }

    /// Makes calls that are not part of a batch.
    async fn make(&self, requests: Vec<Request>) -> Vec<Answer> {
        if requests.is_empty() {
            return Vec::new();
        }
        self.shared.open(&Handle::current());
        if has_acquire(&requests) {
            self.shared.listening().await;
        }
        let (answer, answers) = oneshot::channel();
        let until = Instant::now() + self.shared.call_timeout;
        self.shared.start(requests, until, AnswerSink::Channel(answer));
        answers.await.unwrap_or_default()
    }
}

/// Whether any of these nodes was prepared or used before. They are looked at and not met,
/// which would leave a marker.
async fn are_marked(config: &Settings, url: &Url, marker: &str) -> Result<bool> {
    let mut get = redis::cmd("GET");
    get.arg(marker);
    let clients = super::clients(config, url).await?;
    let looks = clients.iter().map(|client| async {
        let shown = client.get_connection_info().addr().to_string();
        let looking = async {
            let mut connection =
                client.get_multiplexed_async_connection_with_config(&settings()).await?;
            connection.send_packed_command(&get).await
        };
        match tokio::time::timeout(config.call_timeout, looking).await {
            Ok(Ok(Value::ServerError(error))) => Err(errors::refused(Operation::Connect, &error)),
            Ok(Ok(answer)) => Ok(answer != Value::Nil),
            Ok(Err(error)) => Err(errors::unreachable(&error, &shown)),
            Err(_) => Err(errors::silent(&shown)),
        }
    });
    let marked = join_all(looks).await.into_iter().collect::<Result<Vec<bool>>>()?;
    Ok(marked.contains(&true))
}

/// Checks what the URL says of the nodes.
fn check_nodes(hosts: &[HostPort]) -> Result<()> {
    if hosts.len() < FEWEST {
        return Err(Error::config(
            "a quorum needs three nodes or more, better five, so that a majority is left when one fails: redlock://h1,h2,h3; for one server write redis://",
        ));
    }
    for (place, (host, port)) in hosts.iter().enumerate() {
        if hosts[..place].contains(&(host.clone(), *port)) {
            return Err(Error::config(format!(
                "the node {host}:{port} is named twice, and would have two votes; name each node once"
            )));
        }
    }
    if hosts.len().is_multiple_of(2) {
        tracing::warn!(
            target: "dlock::redis",
            nodes = hosts.len(),
            "an even number of nodes tolerates no more failures than one node fewer; use an odd number"
        );
    }
    Ok(())
}

impl Shared {
    /// Starts the tasks, in the runtime of the driver.
    fn open(&self, runtime: &Handle) {
        if self.runtime.get().is_none() {
            for node in &self.nodes {
                node.open(runtime);
            }
            let _ = self.runtime.set(runtime.clone());
        }
    }

    /// What the clocks of the nodes show, in microseconds: the one in the middle.
    fn nodes_clock(&self) -> u64 {
        self.clock.now().as_micros().saturating_add_signed(self.middle_offset())
    }

    /// How many microseconds the clock in the middle is ahead of ours.
    fn middle_offset(&self) -> i64 {
        let mut offsets: Vec<i64> = self.nodes.iter().filter_map(|it| it.voter.offset()).collect();
        offsets.sort_unstable();
        offsets.get(offsets.len() / 2).copied().unwrap_or(0)
    }

    /// A run of the script for this many calls, whose keys follow.
    fn run(&self, calls: usize) -> Run {
        let mut run = QuorumScripts::get().calls.on(calls + 1);
        run.arg(&self.marker);
        run
    }

    /// The holder as JSON.
    fn info(&self, holder: &Arc<Holder>) -> Arc<str> {
        self.info.get(holder, || names::info(holder).into())
    }
}

impl std::fmt::Debug for RedLock {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("RedLock")
    }
}

impl Backend for RedLock {
    fn capabilities(&self) -> Capabilities {
        exclusive_only("redlock")
    }

    fn open(&self, _client: u64, listener: Weak<dyn Listener>) {
        self.shared.wakeups.set_listener(listener);
    }

    fn call<'a>(&'a self, requests: &'a [Request]) -> Call<'a, Vec<Answer>> {
        Call::new(self.make(requests.to_vec()))
    }

    fn submit(&self, batch: Box<dyn Batch>) -> std::result::Result<(), Box<dyn Batch>> {
        let acquires = has_acquire(batch.requests());
        if self.shared.runtime.get().is_none() || acquires && !self.shared.has_listened() {
            return Err(batch); // what is missing is waited for, a little
        }
        let until = Instant::now() + batch.time_left();
        self.shared.start(batch.requests().to_vec(), until, AnswerSink::Batch(batch));
        Ok(())
    }

    fn inspect<'a>(&'a self, key: &'a Key) -> Call<'a, Result<KeyState>> {
        Call::new(self.shared.inspect_key(key))
    }

    fn ping(&self) -> Call<'_, Result<()>> {
        Call::new(self.shared.ping())
    }

    fn servers(&self) -> Call<'_, Result<Vec<ServerState>>> {
        Call::new(self.shared.server_states())
    }
}
