//! The servers of a chaos run, and the proxies in front of them.
//!
//! At one server, of Redis or of a database, each worker has a proxy of its own; at a store
//! of sessions it has one for each member. With Sentinels and in a cluster the servers tell
//! clients where to go. So each server has a proxy there, and tells its port instead of its
//! own. Each node of a quorum has a proxy too.

use std::sync::Arc;
use std::time::Duration;

use tokio::task::JoinSet;

use super::Options;
use super::databases::Database;
use super::quorum_faults::QuorumNodes;
use super::sessions::SessionStore;
use crate::failover_watch::{FailsOver as _, OnFailover};
use crate::proxy::Proxy;
use crate::redis::RedisServer;
use crate::topology::{ClusterServers, SentinelServers};

/// How the servers work together.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Topology {
    Single,
    Sentinel,
    Cluster,
    Redlock,
    Postgres,
    MariaDb,
    Sqlite,
    ZooKeeper,
    Etcd,
    Consul,
}

impl Topology {
    pub(super) const ALL: [Topology; 10] = [
        Topology::Single,
        Topology::Sentinel,
        Topology::Cluster,
        Topology::Redlock,
        Topology::Postgres,
        Topology::MariaDb,
        Topology::Sqlite,
        Topology::ZooKeeper,
        Topology::Etcd,
        Topology::Consul,
    ];

    /// Whether locks live by the session of a client.
    pub(super) fn has_sessions(self) -> bool {
        matches!(self, Topology::ZooKeeper | Topology::Etcd | Topology::Consul)
    }

    /// Whether there are readers and fair locks.
    pub(super) fn has_readers(self) -> bool {
        !matches!(self, Topology::Redlock | Topology::Consul)
    }

    pub(super) fn name(self) -> &'static str {
        match self {
            Topology::Single => "single",
            Topology::Sentinel => "sentinel",
            Topology::Cluster => "cluster",
            Topology::Redlock => "redlock",
            Topology::Postgres => "postgres",
            Topology::MariaDb => "mariadb",
            Topology::Sqlite => "sqlite",
            Topology::ZooKeeper => "zookeeper",
            Topology::Etcd => "etcd",
            Topology::Consul => "consul",
        }
    }

    pub(super) fn parse(name: &str) -> Result<Self, String> {
        let names = Topology::ALL.map(Topology::name).join(", ");
        let found = Topology::ALL.into_iter().find(|topology| topology.name() == name);
        found.ok_or_else(|| format!("{name} is not a topology; use one of {names}"))
    }
}

/// Silence for so long is a reason for a failover; a busy machine is shorter.
const DOWN_AFTER: Duration = Duration::from_millis(1_000);

/// The servers that have the locks.
pub(super) enum Servers {
    Single(RedisServer),
    Sentinel(SentinelServers),
    Cluster(ClusterServers),
    Redlock(QuorumNodes),
    Database(Database),
    Sessions(SessionStore),
}

impl Servers {
    /// Starts servers and proxies; `None` if they are not installed.
    pub(super) fn start(options: &Options) -> Option<(Self, Vec<Arc<Proxy>>)> {
        let mut proxies = Vec::new();
        let mut public = |port: u16| {
            let proxy = Arc::new(Proxy::listen(port));
            proxies.push(proxy.clone());
            proxy.port()
        };
        let servers = match options.topology {
            Topology::Single => {
                // What was written survives a kill of the process.
                let lasting = ["--appendonly", "yes", "--appendfsync", "no"];
                let server = RedisServer::with(&lasting)?;
                for _ in 0..options.processes {
                    public(server.port());
                }
                Servers::Single(server)
            }
            Topology::Sentinel => {
                let servers = SentinelServers::behind(public)?;
                servers.set_down_after(DOWN_AFTER);
                Servers::Sentinel(servers)
            }
            Topology::Cluster => Servers::Cluster(ClusterServers::behind(public)?),
            Topology::Redlock => {
                let quorum = QuorumNodes::start()?;
                for node in &quorum.servers.nodes {
                    public(node.port());
                }
                Servers::Redlock(quorum)
            }
            Topology::Postgres | Topology::MariaDb | Topology::Sqlite => {
                let database = Database::start(options.topology)?;
                let ports = database.port().into_iter().cycle().take(options.processes);
                proxies.extend(ports.map(|port| Arc::new(Proxy::opaque(port))));
                Servers::Database(database)
            }
            Topology::ZooKeeper | Topology::Etcd | Topology::Consul => {
                let store = SessionStore::start(options.topology)?;
                let ports = store.ports().repeat(options.processes).into_iter();
                proxies.extend(ports.map(|port| Arc::new(Proxy::opaque(port))));
                Servers::Sessions(store)
            }
        };
        Some((servers, proxies))
    }

    /// The URL of a worker.
    pub(super) fn url_of(&self, worker: usize, proxies: &[Arc<Proxy>]) -> String {
        match self {
            Servers::Single(_) => proxies[worker].url(),
            Servers::Redlock(quorum) => {
                let ports: Vec<u16> = proxies.iter().map(|proxy| proxy.port()).collect();
                quorum.servers.url_of(&ports)
            }
            Servers::Database(database) => match proxies.get(worker) {
                Some(proxy) => database.url_at(proxy.port()),
                None => database.url(),
            },
            Servers::Sessions(store) => store.url_of(worker, proxies),
            _ => self.url(),
        }
    }

    /// The URL of an operator.
    pub(super) fn url(&self) -> String {
        match self {
            Servers::Single(server) => server.url(),
            Servers::Sentinel(servers) => servers.url(),
            Servers::Cluster(cluster) => cluster.url(),
            Servers::Redlock(quorum) => quorum.servers.url(),
            Servers::Database(database) => database.url(),
            Servers::Sessions(store) => store.url(),
        }
    }

    /// The Redis servers that have keys.
    pub(super) fn all(&self) -> &[RedisServer] {
        match self {
            Servers::Single(server) => std::slice::from_ref(server),
            Servers::Sentinel(servers) => &servers.servers,
            Servers::Cluster(cluster) => &cluster.nodes,
            Servers::Redlock(quorum) => &quorum.servers.nodes,
            Servers::Database(_) | Servers::Sessions(_) => &[],
        }
    }

    /// How many proxies next to each other are the links of one worker.
    pub(super) fn links(&self) -> usize {
        match self {
            Servers::Sessions(store) => store.ports().len(),
            _ => 1,
        }
    }

    /// What is in every request that writes.
    pub(super) fn text_of_writes(&self) -> &'static str {
        match self {
            Servers::Database(_) => "COMMIT",
            Servers::Sessions(_) => "chaos/", // the namespace
            _ => "EVAL",
        }
    }

    /// Watches for failovers for as long as the tasks live.
    pub(super) fn watch(&self, on_failover: OnFailover) -> JoinSet<()> {
        match self {
            Servers::Sentinel(servers) => servers.watch(on_failover),
            Servers::Cluster(cluster) => cluster.watch(on_failover),
            _ => JoinSet::new(),
        }
    }

    /// Puts right what a fault left.
    pub(super) fn repair(&mut self) {
        match self {
            Servers::Single(_) | Servers::Database(_) => {}
            Servers::Sentinel(servers) => servers.repair(),
            Servers::Cluster(cluster) => cluster.repair(),
            Servers::Redlock(quorum) => quorum.repair(),
            Servers::Sessions(store) => store.repair(),
        }
    }

    /// What clients have left behind, when they had this long.
    pub(super) async fn left_after(&self, within: Duration) -> Vec<String> {
        match self {
            Servers::Database(database) => return database.left_after(within).await,
            Servers::Sessions(store) => return store.left_after(within).await,
            _ => {}
        }
        let mut left = Vec::new();
        for server in self.all() {
            left.extend(server.left_after(within).await);
        }
        left
    }
}
