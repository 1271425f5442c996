//! A primary with replicas, watched by Sentinels.

use std::time::{Duration, Instant};

use super::{REPLICATING, is_primary, is_synchronized, wait_until};
use crate::redis::RedisServer;

/// The name under which the Sentinels know the primary.
pub const MASTER_NAME: &str = "mymaster";

/// How long a primary is silent before a Sentinel takes it for down.
const DOWN_AFTER: Duration = Duration::from_millis(500);

/// The same until all of them have started: a failover before that may leave replicas that
/// follow nobody.
const DOWN_AFTER_AT_START: Duration = Duration::from_secs(30);

/// After this time a Sentinel gives up a failover that does not go on.
const FAILOVER_TIMEOUT: Duration = Duration::from_secs(4);

/// One primary, two replicas and three Sentinels.
#[derive(Debug)]
pub struct SentinelServers {
    /// The servers: the first one starts as the primary.
    pub servers: Vec<RedisServer>,
    /// The Sentinels.
    pub sentinels: Vec<RedisServer>,
    /// The port at which the others and the clients reach each server.
    ports: Vec<u16>,
}

impl SentinelServers {
    /// Starts them and waits until all know each other; `None` if `redis-server` is not
    /// installed.
    ///
    /// # Panics
    /// If a server does not start.
    pub fn start() -> Option<Self> {
        Self::with(3, 3)
    }

    /// Starts this many servers and Sentinels; a majority of the Sentinels decides.
    ///
    /// # Panics
    /// If a server does not start.
    pub fn with(servers: usize, sentinels: usize) -> Option<Self> {
        Self::of(servers, sentinels, &[], &[], |port| port)
    }

    /// The same as [`start`](Self::start), and everybody reaches a server at the port that
    /// `public` gives for its own: that of a proxy.
    ///
    /// # Panics
    /// If a server does not start.
    pub fn behind(public: impl FnMut(u16) -> u16) -> Option<Self> {
        Self::of(3, 3, &[], &[], public)
    }

    /// Starts one server and one Sentinel with these passwords.
    ///
    /// # Panics
    /// If a server does not start.
    pub fn with_passwords(server: &str, sentinel: &str) -> Option<Self> {
        Self::of(1, 1, &["--requirepass", server], &["--requirepass", sentinel], |port| port)
    }

    fn of(
        servers: usize,
        sentinels: usize,
        options: &[&str],
        sentinel_options: &[&str],
        mut public: impl FnMut(u16) -> u16,
    ) -> Option<Self> {
        let (mut started, mut ports): (Vec<RedisServer>, Vec<u16>) = (Vec::new(), Vec::new());
        for _ in 0..servers {
            let mut server = RedisServer::with(&[REPLICATING, options].concat())?;
            let port = public(server.port());
            if port != server.port() {
                server.cli(&["CONFIG", "SET", "replica-announce-port", &port.to_string()]);
                server.add_options(&["--replica-announce-port", &port.to_string()]);
            }
            if let Some(primary) = ports.first() {
                server.cli(&["REPLICAOF", "127.0.0.1", &primary.to_string()]);
                server.add_options(&["--replicaof", "127.0.0.1", &primary.to_string()]);
            }
            started.push(server);
            ports.push(port);
        }
        let port = ports[0];
        let quorum = sentinels / 2 + 1;
        let down_after = DOWN_AFTER_AT_START.as_millis();
        let failover_timeout = FAILOVER_TIMEOUT.as_millis();
        let password = options.iter().skip_while(|option| **option != "--requirepass").nth(1);
        let password = password.map(|it| format!("sentinel auth-pass {MASTER_NAME} {it}\n"));
        let password = password.unwrap_or_default();
        let configuration = format!(
            "sentinel monitor {MASTER_NAME} 127.0.0.1 {port} {quorum}\n\
             sentinel down-after-milliseconds {MASTER_NAME} {down_after}\n\
             sentinel failover-timeout {MASTER_NAME} {failover_timeout}\n\
             sentinel parallel-syncs {MASTER_NAME} 4\n{password}"
        );
        let sentinels: Option<Vec<_>> = (0..sentinels)
            .map(|_| {
                let options = [&["--sentinel"], sentinel_options].concat();
                RedisServer::configured(&configuration, &options)
            })
            .collect();
        let topology = SentinelServers { servers: started, sentinels: sentinels?, ports };
        topology.settle();
        topology.set_down_after(DOWN_AFTER);
        Some(topology)
    }

    /// The URL of the primary, by its Sentinels.
    pub fn url(&self) -> String {
        let hosts: Vec<_> =
            self.sentinels.iter().map(|it| format!("127.0.0.1:{}", it.port())).collect();
        format!("redis+sentinel://{}/{MASTER_NAME}", hosts.join(","))
    }

    /// Waits until every replica follows the primary and has what that has, and every
    /// Sentinel knows all others.
    ///
    /// # Panics
    /// If that does not happen.
    pub fn settle(&self) {
        let replicas = self.servers.len() - 1;
        wait_until("every replica follows the primary", || {
            let followers: usize = self.servers.iter().map(super::followers).sum();
            followers == replicas
                && self.servers.iter().filter(|it| is_synchronized(it)).count() == replicas
        });
        let others = self.sentinels.len() - 1;
        wait_until("the Sentinels know each other and the replicas", || {
            self.sentinels.iter().all(|sentinel| {
                let known = sentinel.cli(&["SENTINEL", "MASTER", MASTER_NAME]);
                value(&known, "num-other-sentinels") == Some(&others.to_string())
                    && value(&known, "num-slaves") == Some(&replicas.to_string())
                    && value(&known, "flags") == Some("master")
            })
        });
        super::await_replication(&self.servers);
    }

    /// Sets how long a primary is silent before a Sentinel takes it for down. It starts
    /// with half a second, which a busy machine may be silent for.
    pub fn set_down_after(&self, silence: Duration) {
        let silence = silence.as_millis().to_string();
        for sentinel in &self.sentinels {
            let set = ["SENTINEL", "SET", MASTER_NAME, "down-after-milliseconds", &silence];
            sentinel.cli(&set);
        }
    }

    /// The place in `servers` of the primary that most Sentinels name.
    ///
    /// # Panics
    /// If they name none of the servers.
    pub fn primary(&self) -> usize {
        let named = |sentinel: &RedisServer| -> Option<usize> {
            let known = sentinel.cli(&["SENTINEL", "GET-MASTER-ADDR-BY-NAME", MASTER_NAME]);
            let port: u16 = known.lines().nth(1)?.parse().ok()?;
            self.ports.iter().position(|known| *known == port)
        };
        let mut named: Vec<usize> = self.sentinels.iter().filter_map(named).collect();
        named.sort_unstable();
        *named.get(named.len() / 2).expect("a primary")
    }

    /// Kills the primary with SIGKILL and returns its place.
    pub fn kill_primary(&mut self) -> usize {
        let primary = self.primary();
        self.servers[primary].kill();
        primary
    }

    /// Waits until another server than this one is the primary, and returns its place.
    ///
    /// # Panics
    /// If there is no failover.
    pub fn await_failover(&self, from: usize) -> usize {
        let mut primary = from;
        wait_until("another server is the primary", || {
            primary = self.primary();
            primary != from && is_primary(&self.servers[primary])
        });
        primary
    }

    /// Lets the Sentinels promote a replica although the primary lives.
    ///
    /// # Panics
    /// If there is no failover.
    pub fn force_failover(&self) -> usize {
        let from = self.primary();
        let mut primary = from;
        let mut asked: Option<Instant> = None;
        wait_until("another server is the primary", || {
            primary = self.primary();
            if primary != from && is_primary(&self.servers[primary]) {
                return true;
            }
            // Another Sentinel that hears of it late makes the new primary a replica again, and
            // the failover is given up.
            if asked.is_none_or(|asked| asked.elapsed() > FAILOVER_TIMEOUT)
                && self.sentinels[0].cli(&["SENTINEL", "FAILOVER", MASTER_NAME]) == "OK"
            {
                asked = Some(Instant::now());
            }
            false
        });
        primary
    }

    /// Restarts a killed server as a replica of the current primary, sooner than the
    /// Sentinels would make it one, and waits until all is well again.
    ///
    /// # Panics
    /// If that does not happen.
    pub fn rejoin(&mut self, place: usize) {
        self.servers[place].restart();
        self.demote(place);
        self.settle();
    }

    /// Makes a server a replica of the current primary.
    fn demote(&self, place: usize) {
        let port = self.ports[self.primary()].to_string();
        self.servers[place].cli(&["REPLICAOF", "127.0.0.1", &port]);
    }

    /// Puts everything right that was stopped, killed or blocked, and waits until all is
    /// well again.
    ///
    /// # Panics
    /// If that does not happen.
    pub fn repair(&mut self) {
        for server in self.servers.iter_mut().chain(&mut self.sentinels) {
            server.resume();
            if !server.is_running() {
                server.restart();
            }
        }
        let primary = self.primary();
        for (place, server) in self.servers.iter().enumerate() {
            super::allow_replication(server);
            if place != primary && is_primary(server) {
                self.demote(place);
            }
        }
        self.settle();
    }
}

/// The value after a name in a list of names and values, one on each line.
fn value<'a>(lines: &'a str, name: &str) -> Option<&'a str> {
    lines.lines().skip_while(|line| *line != name).nth(1)
}
