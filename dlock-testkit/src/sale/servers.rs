//! The servers of a soak, and what happens to them.

use std::path::Path;
use std::time::Duration;

use dlock::Dlock;
use rand::RngExt as _;
use rand::rngs::StdRng;

use super::Soak;
use crate::redis::RedisServer;
use crate::topology::{ClusterServers, block_replication};

/// What is done to a server.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum ServerFault {
    /// It is killed and restarted, with all that it answered.
    Restart,
    /// It is killed, and its replica takes over. What it answered in its last moment may be
    /// lost.
    Failover,
    /// The same after replication was blocked for a while: what it answered meanwhile is lost.
    LossyFailover,
}

/// The longest time without replication before a primary is killed.
const WITHOUT_REPLICATION: Duration = Duration::from_millis(500);

pub(super) enum Servers {
    Independent(Vec<RedisServer>),
    Cluster(ClusterServers),
}

impl Servers {
    /// Starts the servers; `None` if `redis-server` is not installed.
    pub(super) fn start(soak: &Soak) -> Option<Self> {
        let durable = ["--appendonly", "yes", "--appendfsync", "always"];
        let mut options: Vec<&str> = Vec::new();
        if soak.server_kills > 0 {
            options.extend(durable);
        }
        if !soak.cluster {
            let servers = (0..soak.servers).map(|_| RedisServer::with(&options));
            return servers.collect::<Option<_>>().map(Servers::Independent);
        }
        options.extend(["--cluster-require-full-coverage", "no"]);
        // A busy machine must not take a slow node for a dead one.
        options.extend(["--cluster-node-timeout", "3000"]);
        ClusterServers::with(3, 1, &options).map(Servers::Cluster)
    }

    /// A directory for the files of the soak.
    pub(super) fn directory(&self) -> &Path {
        match self {
            Servers::Independent(servers) => servers[0].directory(),
            Servers::Cluster(cluster) => cluster.nodes[0].directory(),
        }
    }

    /// What a worker is told: a port, or a URL.
    pub(super) fn addresses(&self) -> Vec<String> {
        match self {
            Servers::Independent(servers) => {
                servers.iter().map(|server| server.port().to_string()).collect()
            }
            Servers::Cluster(cluster) => vec![cluster.url()],
        }
    }

    pub(super) async fn clients(&self) -> Vec<Dlock> {
        let urls = match self {
            Servers::Independent(servers) => servers.iter().map(RedisServer::url).collect(),
            Servers::Cluster(cluster) => vec![cluster.url()],
        };
        let mut clients = Vec::new();
        for url in urls {
            clients.push(Dlock::connect(&url).await.expect("a client"));
        }
        clients
    }

    /// Does this to one of the servers, and waits until all of them work again.
    pub(super) async fn strike(&mut self, fault: ServerFault, random: &mut StdRng) {
        let cluster = match self {
            Servers::Independent(servers) => {
                let at = random.random_range(0..servers.len());
                return tokio::task::block_in_place(|| servers[at].restart());
            }
            Servers::Cluster(cluster) => cluster,
        };
        let primaries = tokio::task::block_in_place(|| cluster.primaries());
        let primary = primaries[random.random_range(0..primaries.len())];
        if fault == ServerFault::LossyFailover {
            tokio::task::block_in_place(|| block_replication(&cluster.nodes[primary]));
            tokio::time::sleep(WITHOUT_REPLICATION.mul_f64(random.random_range(0.1..1.0))).await;
        }
        tokio::task::block_in_place(|| match fault {
            ServerFault::Restart => cluster.kill_and_restart(primary),
            ServerFault::Failover | ServerFault::LossyFailover => {
                cluster.kill_and_fail_over(primary);
            }
        });
    }
}
