//! dlock, programs with Go's concurrency package and `etcdctl lock` on one lock of a real etcd:
//! four processes of each side, some of them killed and stopped, checked from outside: no two
//! processes held the lock at the same time. Each test also runs its negative control: on two
//! different locks the same check must find an overlap.
//!
//! Each test takes some seconds; `DLOCK_TEST_SECONDS=60` makes them longer.

use std::process::Command;
use std::time::Duration;

use dlock::Dlock;
use dlock_testkit::etcd::EtcdServer;
use dlock_testkit::interop::contention::{
    Commands, Holders, Peers, Side, exclude_each_other, overlap_without_a_common_lock,
};
use dlock_testkit::interop::{Peer, consul_worker, etcdctl};
use dlock_testkit::process::ChildProcess;

/// The programs of the other side on this lock, together with dlock and apart.
fn share<S: Side>(server: &EtcdServer, theirs: impl Fn(&str) -> Option<S>) {
    // The namespace of dlock-holder is `test`.
    let (peers, url) = (|key: &str| theirs(&format!("test/{key}")), server.url());
    let Some(together) = peers("shared") else { return };
    exclude_each_other(together, Holders::start(&url, 10, &["serve"], "shared"));
    let Some(apart) = peers("theirs") else { return };
    overlap_without_a_common_lock(apart, Holders::start(&url, 10, &["serve"], "ours"));
}

#[test]
fn gos_mutex() {
    let Some(server) = EtcdServer::start() else { return };
    let host = format!("127.0.0.1:{}", server.port());
    share(&server, |name| {
        Peers::start(&["mutex"], |kind, most| Peer::go_etcd(&host, kind, name, most))
    });
}

/// Processes that run `etcdctl lock` again and again, each for one turn.
#[test]
fn etcdctl_lock_under_contention() {
    let Some(server) = EtcdServer::start() else { return };
    // The worker for Consul can also print when it runs.
    let (Some(etcdctl), Some(worker)) = (etcdctl(), consul_worker()) else { return };
    let endpoint = format!("--endpoints=127.0.0.1:{}", server.port());
    share(&server, |name| {
        let (etcdctl, worker, endpoint) = (etcdctl.clone(), worker.clone(), endpoint.clone());
        let name = name.to_owned();
        Some(Commands::start(move || {
            let mut command = Command::new(&etcdctl);
            command.args([endpoint.as_str(), "lock", "--ttl=3", name.as_str()]);
            command.arg(&worker).args(["stamp", "5"]);
            command
        }))
    });
}

fn client(url: &str) -> Dlock {
    let builder = Dlock::builder().url(url).ttl(Duration::from_secs(2));
    builder.wait(Duration::from_secs(30)).connect_lazy().expect("a client")
}

/// `etcdctl lock` waits for a lock of dlock, and dlock for one of `etcdctl lock`.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn etcdctl_lock() {
    let Some(server) = EtcdServer::start() else { return };
    let Some(etcdctl) = etcdctl() else { return };
    let endpoint = format!("--endpoints=127.0.0.1:{}", server.port());
    let lock = || ChildProcess::start(&etcdctl, &[&endpoint, "lock", "--ttl=2", "nightly"]);
    let is_key = |line: &str| line.starts_with("nightly/").then_some(());
    let dlock = client(&server.url());
    let waiters = async || dlock.inspect("nightly").await.expect("a look").waiters.len();
    let guard = dlock.mutex("nightly").lock().await.expect("the lock");
    let mut other = lock();
    while waiters().await == 0 {
        tokio::time::sleep(Duration::from_millis(10)).await;
    }
    assert!(other.take_lines().is_empty(), "it waits");
    drop(guard);
    tokio::task::block_in_place(|| other.wait_for_line("the lock", is_key));
    // It holds the lock now, and is shown.
    assert!(dlock.mutex("nightly").try_lock().await.expect("an answer").is_none());
    let state = dlock.inspect("nightly").await.expect("a look");
    assert!(state.holders[0].holder.name.contains("without dlock"), "{state:?}");
    other.kill();
    drop(dlock.mutex("nightly").lock().await.expect("the lock, when its lease is over"));
}
