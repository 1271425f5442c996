//! Several Redis servers that work together, started by the tests that need them: a
//! primary with replicas and Sentinels, a Cluster, or independent servers. All of them
//! are on loopback ports and are killed when the value is dropped.
//!
//! The servers replicate as a user of their own, so that a test can
//! [block replication](block_replication) and let everything else go on.

mod cluster;
mod quorum;
mod sentinel;

use std::time::{Duration, Instant};

pub use self::cluster::{ClusterServers, SlotMove};
pub use self::quorum::QuorumServers;
pub use self::sentinel::{MASTER_NAME, SentinelServers};
use crate::redis::RedisServer;

/// The longest time that a topology takes to do what was asked.
const PATIENCE: Duration = Duration::from_secs(60);
/// The user as which replicas connect to their primary.
const REPLICATION_USER: &str = "replication";

/// The options of every server that replicates or is replicated.
const REPLICATING: &[&str] = &[
    "--user",
    REPLICATION_USER,
    "on",
    ">copy",
    "+psync",
    "+replconf",
    "+ping",
    "--masteruser",
    REPLICATION_USER,
    "--masterauth",
    "copy",
    "--repl-diskless-sync",
    "yes",
    "--repl-diskless-sync-delay",
    "0",
];

/// Starts independent servers, as a quorum needs them; `None` if `redis-server` is not
/// installed.
///
/// # Panics
/// If a server does not start.
pub fn independent(count: usize) -> Option<Vec<RedisServer>> {
    (0..count).map(|_| RedisServer::start()).collect()
}

/// Cuts the replicas of this server off and keeps them off. Clients notice nothing.
pub fn block_replication(primary: &RedisServer) {
    primary.cli(&["ACL", "SETUSER", REPLICATION_USER, "off"]);
    primary.cli(&["CLIENT", "KILL", "USER", REPLICATION_USER]);
}

/// Lets replicas connect to this server again.
pub fn allow_replication(primary: &RedisServer) {
    primary.cli(&["ACL", "SETUSER", REPLICATION_USER, "on"]);
}

/// The value of a field in what `INFO` and its like print.
fn field<'a>(info: &'a str, name: &str) -> Option<&'a str> {
    info.lines().find_map(|line| line.trim().strip_prefix(name)?.strip_prefix(':'))
}

/// Whether a server is a primary by its own account.
fn is_primary(server: &RedisServer) -> bool {
    server.cli(&["ROLE"]).starts_with("master")
}

/// Whether a server is a replica that has everything its primary had.
fn is_synchronized(server: &RedisServer) -> bool {
    let info = server.cli(&["INFO", "replication"]);
    field(&info, "role") == Some("slave") && field(&info, "master_link_status") == Some("up")
}

/// How many replicas of this server have answered within a second.
fn followers(primary: &RedisServer) -> usize {
    let info = primary.cli(&["INFO", "replication"]);
    let follows = |line: &str| {
        line.contains("state=online") && (line.contains("lag=0") || line.contains("lag=1"))
    };
    info.lines().filter(|line| line.starts_with("slave") && follows(line)).count()
}

/// Waits until the replicas of these servers have what their primaries have now. One that was
/// copied to is online before that: what was written since is sent to it up to a second later.
fn await_replication(servers: &[RedisServer]) {
    let offset = |server: &RedisServer| -> u64 {
        let info = server.cli(&["INFO", "replication"]);
        field(&info, "master_repl_offset").and_then(|offset| offset.parse().ok()).unwrap_or(0)
    };
    let primaries: Vec<_> = servers.iter().filter(|server| is_primary(server)).collect();
    for (primary, offset) in primaries.iter().map(|it| (it, offset(it))).collect::<Vec<_>>() {
        wait_until("every replica has what its primary has", || {
            let info = primary.cli(&["INFO", "replication"]);
            let behind = |line: &str| {
                let acknowledged = line.split(',').find_map(|word| word.strip_prefix("offset="));
                acknowledged.is_none_or(|it| it.parse().unwrap_or(0) < offset)
            };
            info.lines().filter(|line| line.contains("state=")).all(|line| !behind(line))
        });
    }
}

/// Waits until something is so.
///
/// # Panics
/// If it is not after a minute.
fn wait_until(what: &str, mut is_so: impl FnMut() -> bool) {
    let began = Instant::now();
    while !is_so() {
        assert!(began.elapsed() < PATIENCE, "waited in vain until {what}");
        std::thread::sleep(Duration::from_millis(20));
    }
}
