//! dlock, Curator and kazoo on the same locks of a real ZooKeeper: four processes of each side,
//! some of them killed and stopped, checked from outside: no two processes held a lock at the
//! same time. Each test also runs its negative control: on two different locks the same check
//! must find an overlap.
//!
//! Each test takes some seconds; `DLOCK_TEST_SECONDS=60` makes them longer.

use dlock_testkit::interop::Peer;
use dlock_testkit::interop::contention::{
    Holders, Peers, exclude_each_other, overlap_without_a_common_lock,
};
use dlock_testkit::zookeeper::ZooKeeperServer;

type Start = fn(&str, &str, &str, u64) -> Option<Peer>;

/// Programs that do these kinds of things, and processes of dlock that do these commands.
fn share(layout: &str, start: Start, kinds: &[&str], commands: &[&str]) {
    let Some(server) = ZooKeeperServer::start() else { return };
    let (host, url) = (format!("127.0.0.1:{}", server.port()), server.url());
    let theirs = |key: &str| {
        // The namespace of dlock-holder is `test`.
        Peers::start(kinds, |kind, most| start(&host, kind, &format!("/test/{key}"), most))
    };
    let ours = |key: &str| Holders::start(&format!("{url}?layout={layout}"), 4, commands, key);
    let Some(peers) = theirs("shared/lock") else { return };
    exclude_each_other(peers, ours("shared/lock"));
    let Some(peers) = theirs("theirs/lock") else { return };
    overlap_without_a_common_lock(peers, ours("ours/lock"));
}

#[test]
fn curators_mutex() {
    share("mutex", Peer::curator, &["mutex"], &["serve"]);
}

#[test]
fn curators_read_write_lock() {
    share("rwlock", Peer::curator, &["write", "read"], &["serve", "read"]);
}

#[test]
fn curators_semaphore() {
    share("mutex", Peer::curator, &["semaphore"], &["permits"]);
}

#[test]
fn kazoos_lock() {
    share("kazoo", Peer::kazoo, &["mutex"], &["serve"]);
}

#[test]
fn kazoos_readers_and_writers() {
    share("kazoo", Peer::kazoo, &["write", "read"], &["serve", "read"]);
}
