//! A Redis Cluster: every lock is at the node that serves its slot.
//!
//! - There is one link for each primary, so a node that is slow or dead delays only its
//!   own keys.
//! - The map of the slots is asked for when it is first needed, when a node says `MOVED`,
//!   when the connection to a primary is lost, and now and then.
//! - Every request is on one key. It is sent again only after a refusal that says that
//!   nothing was done, and before its caller hears anything, so the calls of one owner
//!   keep their order.
//! - Whether another primary was elected is asked for while there may be leases: nobody
//!   tells a client, and a lease that the new primary does not know must be told lost.
//! - Notices are published to a plain channel, which reaches subscribers at every node:
//!   whoever subscribes at any node hears them, also while a slot moves. Hand-overs are
//!   told at one node where that is possible, see `shard_notices.rs`.

mod answers;
mod identity;
mod shard_notices;
mod slots;
mod submit;
mod topology;

use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, OnceLock, Weak};
use std::time::{Duration, Instant};

use parking_lot::{Mutex, RwLock};
use redis::{Cmd, Value, cmd};
use tokio::runtime::Handle;
use tokio::sync::Notify;
use url::Url;

use self::identity::Identity;
pub(super) use self::identity::Member;
pub(super) use self::shard_notices::ShardNotices;
use self::slots::{Node, Redirection, SlotMap, slot_of};
use super::address::Address;
use super::connection::{Link, Live};
use super::connector::{Connector, Endpoint, Provider};
use super::errors;
use super::layout_marker::LayoutMarker;
use super::replication::ServedBy;
use super::scripts::Run;
use crate::backend::abort_on_drop::AbortOnDrop;
use crate::backend::{Call, Listener};
use crate::config::{Settings, parse_url};
use crate::error::{Error, ErrorKind, Operation, Result};

/// How often a request is redirected before it is given up: a slot that moves takes two
/// steps, and the map may be old.
const REDIRECTIONS: usize = 8;
/// The pause before a request that hit a slot half-way is sent again.
const TRY_AGAIN: Duration = Duration::from_millis(20);

/// A cluster, seen by one client.
pub(super) struct Cluster {
    /// How every node is reached.
    endpoint: Endpoint,
    /// The nodes that the user named.
    seeds: Vec<Node>,
    /// Read at the node that serves its slot, before the first call.
    layout: Arc<LayoutMarker>,
    settings: Settings,
    map: RwLock<SlotMap>,
    links: Mutex<Vec<(Node, Arc<Link>)>>,
    /// Which nodes are of this cluster.
    identity: Arc<Identity>,
    /// The epoch of the map.
    epoch: AtomicU64,
    /// How often the map has changed.
    map_changes: AtomicU64,
    /// Whether all nodes that told the map serve their slots.
    is_serving: AtomicBool,
    refreshed: tokio::sync::Mutex<Option<Instant>>,
    /// The map may be old.
    stale: Arc<Notify>,
    /// There were no leases, and now there may be some.
    leases_begin: Arc<Notify>,
    start: Instant,
    /// The last moment at which a lease may end, in nanoseconds since the start.
    leased: AtomicU64,
    /// The driver's runtime.
    runtime: OnceLock<Handle>,
    listener: OnceLock<Weak<dyn Listener>>,
    watcher: Mutex<Option<AbortOnDrop>>,
}

/// What is sent to the node of a key.
#[derive(Clone, Copy)]
pub(super) enum Sent<'a> {
    Run(&'a Run),
    Command(&'a Cmd),
}

impl Cluster {
    /// The cluster of a `redis+cluster://` URL.
    pub(super) fn configured(
        config: &Settings,
        url: &Url,
        provider: Option<Provider>,
    ) -> Result<Arc<Self>> {
        let hosts = parse_url(config.url.as_deref().unwrap_or(url.as_str()))?.hosts;
        let address = Address::new(url, config.database)?;
        if address.info.redis_settings().db() != 0 {
            return Err(Error::config(
                "a Redis Cluster has the database 0 only; remove the number from the URL and `database`, and use another namespace",
            ));
        }
        let files = config.tls_files();
        let endpoint = Endpoint::new(address, &files, config.password_file.clone(), provider)?;
        Ok(Arc::new(Cluster {
            endpoint,
            seeds: hosts.into_iter().map(Node::from).collect(),
            layout: LayoutMarker::of(config),
            settings: config.clone(),
            map: RwLock::new(SlotMap::empty()),
            links: Mutex::default(),
            identity: Arc::default(),
            epoch: AtomicU64::new(0),
            map_changes: AtomicU64::new(0),
            is_serving: AtomicBool::new(true),
            refreshed: tokio::sync::Mutex::new(None),
            stale: Arc::default(),
            leases_begin: Arc::default(),
            start: Instant::now(),
            leased: AtomicU64::new(0),
            runtime: OnceLock::new(),
            listener: OnceLock::new(),
            watcher: Mutex::new(None),
        }))
    }

    /// Who is told when a node was found again, or another one serves its slots.
    pub(super) fn set_listener(&self, listener: Weak<dyn Listener>) {
        let _ = self.listener.set(listener);
    }

    /// How many slots nobody serves.
    pub(super) fn uncovered(&self) -> usize {
        self.map.read().uncovered()
    }

    /// The partition of a key: its node.
    pub(super) fn partition_of(&self, name: &str) -> usize {
        self.map.read().place(slot_of(name)).unwrap_or(0)
    }

    /// There may be a lease for this long.
    pub(super) fn leased_for(&self, ttl: Duration) {
        let now = self.start.elapsed();
        let until = u64::try_from((now + ttl).as_nanos()).unwrap_or(u64::MAX);
        let before = self.leased.fetch_max(until, Ordering::Relaxed);
        if u128::from(before) < now.as_nanos() {
            self.leases_begin.notify_one(); // the watcher may be asleep
        }
    }

    /// Whether there may be leases.
    fn is_leased(&self) -> bool {
        u128::from(self.leased.load(Ordering::Relaxed)) > self.start.elapsed().as_nanos()
    }

    /// The link to a node, if it was used before.
    fn known_link(&self, node: &Node) -> Option<Arc<Link>> {
        let links = self.links.lock();
        links.iter().find(|(known, _)| known == node).map(|(_, link)| link.clone())
    }

    /// The link to a node.
    fn link(&self, node: &Node) -> Arc<Link> {
        let mut links = self.links.lock();
        if let Some((_, link)) = links.iter().find(|(known, _)| known == node) {
            return link.clone();
        }
        let endpoint = self.endpoint.at(&node.host, node.port);
        let member = Member { node: node.clone(), identity: self.identity.clone() };
        let connector = match self.seeds.contains(node) {
            true => Connector::Node(endpoint, member),
            false => Connector::AnnouncedNode(endpoint, member),
        };
        let link = Link::new(connector, Some(self.layout.clone()), &self.settings);
        if let Some(listener) = self.listener.get() {
            link.set_listener(listener.clone());
        }
        let stale = self.stale.clone();
        link.on_loss(move || stale.notify_one());
        links.push((node.clone(), link.clone()));
        link
    }

    /// The link to the node that serves a slot.
    async fn owner(self: &Arc<Self>, slot: u16, operation: Operation) -> Result<Node> {
        let known = self.map.read().owner(slot).cloned();
        if let Some(node) = known {
            return Ok(node);
        }
        self.refresh(operation).await?;
        let known = self.map.read().owner(slot).cloned();
        known.ok_or_else(|| {
            Error::new(ErrorKind::Unavailable, operation).with_message(
                "no node of the Redis Cluster serves the slot of this key; see `redis-cli --cluster check`",
            )
        })
    }

    /// The node that serves this name, by the map as it is known.
    pub(super) async fn server_of(
        self: &Arc<Self>,
        operation: Operation,
        name: &str,
    ) -> Result<String> {
        self.owner(slot_of(name), operation).await.map(|node| node.to_string())
    }

    /// Sees to it that there is a map, and that the namespace is kept in this layout.
    pub(super) async fn connected(self: &Arc<Self>, operation: Operation) -> Result<()> {
        self.primaries(operation).await?;
        self.confirm_layout(operation).await
    }

    /// Asks the node that knows in which layout the namespace is kept, unless that is
    /// known: another node, which the call is for, does not know it.
    async fn confirm_layout(self: &Arc<Self>, operation: Operation) -> Result<()> {
        if self.layout.is_confirmed() {
            return Ok(());
        }
        let ask = |command: Cmd| {
            Call::new(async move {
                let sent = Sent::Command(&command);
                let (_, answer) = self.routed(operation, self.layout.name(), sent).await?;
                Ok(answer)
            })
        };
        self.layout.check(ask).await.map_err(|error| error.with_operation(operation))?;
        if self.layout.is_confirmed() {
            return Ok(());
        }
        let name = self.layout.name();
        Err(Error::new(ErrorKind::Unavailable, operation).with_message(format!(
            "no node of the Redis Cluster serves the slot of `{name}`, which is read before the first call; see `redis-cli --cluster check`"
        )))
    }

    /// Sends a request to the node that serves this name, wherever that is by now.
    pub(super) async fn send(
        self: &Arc<Self>,
        operation: Operation,
        name: &str,
        sent: Sent<'_>,
    ) -> Result<(ServedBy, Value)> {
        self.confirm_layout(operation).await?;
        let ((link, live), answer) = self.routed(operation, name, sent).await?;
        let answer = link.checked(&live, operation, answer)?;
        Ok(((link, live), answer))
    }

    /// The same, whatever the layout. The refusal of the last node is an answer.
    async fn routed(
        self: &Arc<Self>,
        operation: Operation,
        name: &str,
        sent: Sent<'_>,
    ) -> Result<(ServedBy, Value)> {
        self.watch();
        let slot = slot_of(name);
        let asking = cmd("ASKING");
        let mut asked_of: Option<Node> = None;
        for _ in 0..REDIRECTIONS {
            let first = asked_of.is_some().then_some(&asking);
            let node = match asked_of.take() {
                Some(node) => node,
                None => self.owner(slot, operation).await?,
            };
            let link = self.link(&node);
            let (live, answer) = match request(&link, first, operation, sent).await {
                Ok(answered) => answered,
                Err(error) if error.kind() == ErrorKind::Unavailable => {
                    // It was not sent, so another node may get it.
                    let _ = self.refresh(operation).await;
                    if self.map.read().owner(slot).is_some_and(|owner| *owner != node) {
                        continue;
                    }
                    return Err(error);
                }
                Err(error) => {
                    self.stale.notify_one();
                    return Err(error);
                }
            };
            let redirection = match &answer {
                Value::ServerError(error) => Redirection::of(error, &node),
                _ => None,
            };
            match redirection {
                None | Some(Redirection::Down) => {
                    if redirection.is_some() {
                        self.stale.notify_one();
                    }
                    return Ok(((link, live), answer));
                }
                Some(Redirection::Moved { slot, to }) => {
                    self.map.write().correct(slot, to);
                    self.stale.notify_one();
                }
                Some(Redirection::Ask { to }) => asked_of = Some(to),
                Some(Redirection::TryAgain) => tokio::time::sleep(TRY_AGAIN).await,
            }
        }
        Err(Error::new(ErrorKind::Unavailable, operation)
            .with_message("the Redis Cluster moves the slot of this key; it is tried again"))
    }

    /// The primaries, sorted, each with its name.
    ///
    /// # Errors
    /// If no node tells.
    pub(super) async fn primaries(
        self: &Arc<Self>,
        operation: Operation,
    ) -> Result<Vec<(String, Arc<Link>)>> {
        if self.map.read().primaries().is_empty() {
            self.refresh(operation).await?;
        }
        self.watch();
        let nodes: Vec<Node> = self.map.read().primaries().into_iter().cloned().collect();
        Ok(nodes.iter().map(|node| (node.to_string(), self.link(node))).collect())
    }

    /// A link to a primary that has a connection. There notices are heard: a node that was
    /// removed from the cluster still answers, and hears nothing.
    pub(super) async fn any_link(self: &Arc<Self>) -> Arc<Link> {
        loop {
            let primaries: Vec<Node> = self.map.read().primaries().into_iter().cloned().collect();
            let mut links: Vec<_> = primaries.iter().map(|node| self.link(node)).collect();
            links.sort_by_key(|link| !link.has_connection());
            for link in links {
                if link.connected(Operation::Connect).await.is_ok() {
                    return link;
                }
            }
            tokio::time::sleep(TRY_AGAIN).await;
        }
    }
}

async fn request(
    link: &Arc<Link>,
    first: Option<&Cmd>,
    operation: Operation,
    sent: Sent<'_>,
) -> Result<(Arc<Live>, Value)> {
    match sent {
        Sent::Run(run) => link.run_behind(first, operation, run).await,
        Sent::Command(command) => link.command_behind(first, operation, command).await,
    }
}
