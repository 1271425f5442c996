//! dlock, Consul's Go package and `consul lock` on one lock of a real Consul: four processes
//! of each side, some of them killed and stopped, checked from outside: no two processes held
//! the lock at the same time. Each test also runs its negative control: on two different locks
//! the same check must find an overlap.
//!
//! Each test takes some seconds; `DLOCK_TEST_SECONDS=60` makes them longer.

use std::sync::Arc;

use dlock_testkit::consul::ConsulServer;
use dlock_testkit::interop::contention::{
    Commands, Holders, Peers, Side, exclude_each_other, overlap_without_a_common_lock, seconds,
};
use dlock_testkit::interop::{Peer, consul_worker};

/// The programs of the other side on this lock, together with dlock and apart.
fn share<S: Side>(
    server: &ConsulServer,
    layout: &str,
    command: &str,
    theirs: impl Fn(&str) -> Option<S>,
) {
    // The namespace of dlock-holder is `test`.
    let theirs = |key: &str| theirs(&format!("test/{key}"));
    let url = format!("{}&layout={layout}", server.url());
    let ours = |key: &str| Holders::start(&url, 15, &[command], key);
    let Some(together) = theirs("shared") else { return };
    exclude_each_other(together, ours("shared"));
    let Some(apart) = theirs("theirs") else { return };
    overlap_without_a_common_lock(apart, ours("ours"));
}

/// Processes with Consul's Go package. The session of the one that is killed ends soon.
fn workers(server: &ConsulServer, kind: &str, key: &str) -> Option<Peers> {
    let first = std::cell::Cell::new(true);
    Peers::start(&[kind], |kind, _| {
        let ttl = if first.replace(false) { "1s" } else { "15s" };
        Peer::consul(server.port(), kind, key, ttl)
    })
}

#[test]
fn consuls_go_package() {
    let Some(server) = ConsulServer::start() else { return };
    share(&server, "lock-key", "serve", |key| workers(&server, "mutex", key));
}

#[test]
fn consul_lock() {
    let Some(server) = ConsulServer::start().map(Arc::new) else { return };
    let Some(worker) = consul_worker() else { return };
    share(&server, "consul-lock", "serve", |key| {
        let (server, worker) = (server.clone(), worker.display().to_string());
        let key = key.to_owned();
        let commands = Commands::start(move || {
            server.command(&["lock", "-shell=false", &key, &worker, "stamp", "5"])
        });
        // A `consul lock` that dies with the lock keeps everybody out for 30 to 45 seconds:
        // its session and its lock-delay. So this is for long runs.
        Some(if seconds() >= 60 { commands } else { commands.unharmed() })
    });
}

#[test]
fn consuls_semaphore() {
    let Some(server) = ConsulServer::start() else { return };
    share(&server, "lock-key", "permits", |key| workers(&server, "semaphore", key));
}
