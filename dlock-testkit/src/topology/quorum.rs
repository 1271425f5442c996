//! Independent servers whose majority keeps the locks.

use std::time::Duration;

use dlock::Config;
use dlock::backend::redis::RedLock;

use crate::redis::RedisServer;

/// Independent servers, as `redlock://` needs them.
#[derive(Debug)]
pub struct QuorumServers {
    /// The servers.
    pub nodes: Vec<RedisServer>,
    max_ttl: Duration,
}

impl QuorumServers {
    /// Starts this many servers, which vote at once; `None` if `redis-server` is not
    /// installed. The longest ttl of their locks is `max_ttl`.
    ///
    /// # Panics
    /// If a server does not start or cannot be prepared.
    pub async fn start(count: usize, max_ttl: Duration) -> Option<Self> {
        Self::start_in("test", count, max_ttl).await
    }

    /// The same, for locks in this namespace.
    ///
    /// # Panics
    /// If a server does not start or cannot be prepared.
    pub async fn start_in(namespace: &str, count: usize, max_ttl: Duration) -> Option<Self> {
        let servers = QuorumServers { nodes: super::independent(count)?, max_ttl };
        servers.prepare(namespace).await;
        Some(servers)
    }

    /// Starts servers that are not prepared, as somebody finds them who reads no manual.
    pub fn unprepared(count: usize, max_ttl: Duration) -> Option<Self> {
        Some(QuorumServers { nodes: super::independent(count)?, max_ttl })
    }

    /// Lets the servers vote at once, since they are new.
    ///
    /// # Panics
    /// If a server does not answer.
    async fn prepare(&self, namespace: &str) {
        let mut config = Config::from_url(&self.url()).expect("a URL");
        config.namespace = Some(namespace.into());
        config.call_timeout = Some(Duration::from_secs(20)); // a busy machine
        RedLock::prepare_new_nodes(&config).await.expect("the nodes are prepared");
    }

    /// The URL of the servers.
    pub fn url(&self) -> String {
        self.url_of(&self.nodes.iter().map(RedisServer::port).collect::<Vec<_>>())
    }

    /// The URL of servers at these ports, for example of proxies.
    pub fn url_of(&self, ports: &[u16]) -> String {
        let hosts: Vec<String> = ports.iter().map(|port| format!("127.0.0.1:{port}")).collect();
        format!("redlock://{}?max_ttl={}ms", hosts.join(","), self.max_ttl.as_millis())
    }
}
