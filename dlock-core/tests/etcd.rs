//! The conformance suite on a real etcd, and tests of what only etcd does.

use std::collections::HashSet;
use std::time::{Duration, Instant};

use dlock::backend::etcd::Etcd;
use dlock::backend::{Cursor, Page};
use dlock::{Dlock, ErrorKind, Key, ReleaseOutcome};
use dlock_testkit::conformance::{Suite, eventually};
use dlock_testkit::etcd::{EtcdCluster, EtcdServer};

/// The ttl of the leases.
const TTL: Duration = Duration::from_secs(2);

fn backend(url: &str) -> Etcd {
    Etcd::new(url, "default", TTL).expect("a backend")
}

fn client(url: &str) -> Dlock {
    let builder = Dlock::builder().url(url).ttl(TTL).wait(Duration::from_secs(20));
    builder.connect_lazy().expect("a client")
}

async fn suite(url: String, port: u16) {
    let url = format!("{url}/dlock-tests");
    let at = |port: u16| backend(&format!("etcd://127.0.0.1:{port}/dlock-tests"));
    Suite::new(move || backend(&url)).with_proxy(port, at).run().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn conformance_on_one_server() {
    let Some(server) = EtcdServer::start() else { return };
    suite(server.url(), server.port()).await;
    // What is left has a lease of its own: records of broken locks, for some minutes, and keys
    // that stay taken after their release.
    let is_clean = async || server.keys().len() == server.leases().len();
    eventually("only records and kept keys are left", is_clean).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn conformance_on_a_cluster_of_three() {
    let Some(cluster) = EtcdCluster::start() else { return };
    let follower = (cluster.leader() + 1) % 3;
    suite(cluster.url(), cluster.servers[follower].port()).await;
}

/// All locks of a client have the ttl of its session.
#[tokio::test]
async fn a_longer_ttl_than_the_sessions_is_refused() {
    let dlock = client("etcd://127.0.0.1:1");
    let error = dlock.mutex("a").ttl(TTL * 2).lock().await.expect_err("too long");
    assert_eq!(error.kind(), ErrorKind::Unsupported, "{error}");
    assert!(error.to_string().contains("lasts 2s"), "{error}");
    let Some(server) = EtcdServer::start() else { return };
    let dlock = client(&server.url());
    drop(dlock.mutex("a").ttl(TTL / 2).lock().await.expect("it is rounded up"));
}

/// Keys that would be in the way of dlock's own entries are refused.
#[tokio::test]
async fn reserved_keys_are_refused() {
    let Some(server) = EtcdServer::start() else { return };
    for bad in ["a;permits", ";dlock/x"] {
        let error = client(&server.url()).mutex(bad).lock().await.expect_err("reserved");
        assert_eq!(error.kind(), ErrorKind::Invalid, "{error}");
    }
}

/// A key that stays taken after its release does so when the client has gone, keeps its
/// place before those who wait, and leaves nothing behind.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_key_stays_taken_when_the_client_has_gone() {
    let Some(server) = EtcdServer::start() else { return };
    let (one, two) = (client(&server.url()), client(&server.url()));
    let time = Duration::from_secs(4);
    let guard = one.mutex("a").lock().await.expect("the lock");
    let other = one.mutex("b").lock().await.expect("the lock");
    let token = guard.token();
    let lock = two.mutex("a");
    let waiting = tokio::spawn(async move { lock.lock().await });
    eventually("it waits", async || !one.inspect("a").await.expect("a look").waiters.is_empty())
        .await;
    let began = Instant::now();
    for guard in [guard, other] {
        assert_eq!(guard.release_after(time).await.expect("an answer"), ReleaseOutcome::Released);
    }
    drop(one);
    let Page { keys, .. } = two.list("", Cursor::default()).await.expect("the keys in use");
    assert_eq!(keys.iter().map(Key::as_str).collect::<Vec<_>>(), ["a", "b"]);
    let next = waiting.await.expect("the task").expect("the lock");
    assert!(began.elapsed() >= time, "{:?}", began.elapsed());
    assert!(next.token() > token);
    drop((next, two));
    eventually("nothing is left", async || server.keys().is_empty() && server.leases().is_empty())
        .await;
}

/// A lock `a` has nothing to do with a lock `a/b`.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn keys_do_not_nest() {
    let Some(server) = EtcdServer::start() else { return };
    let (one, two) = (client(&server.url()), client(&server.url()));
    let inner = one.mutex("a/b").lock().await.expect("the lock");
    let outer = two.mutex("a").try_lock().await.expect("an answer").expect("the lock is free");
    assert_eq!(two.inspect("a").await.expect("a look").holders.len(), 1);
    assert!(two.mutex("a/b").try_lock().await.expect("an answer").is_none());
    // A semaphore of the same name is apart too, and so is its name for a Go program.
    let permits = two.semaphore("a", 1).permits(1).lock().await.expect("the permit");
    drop((inner, outer, permits));
}

/// etcd keeps the name of a deleted key until it is compacted, and reads slow down with them.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_contended_lock_leaves_few_names() {
    const CLIENTS: usize = 3;
    let Some(server) = EtcdServer::start() else { return };
    let tasks: Vec<_> = (0..CLIENTS)
        .map(|_| {
            let client = client(&server.url());
            tokio::spawn(async move {
                for _ in 0..100 {
                    let guard = client.mutex("a").fair().lock().await.expect("the lock");
                    assert_eq!(guard.release().await.expect("an answer"), ReleaseOutcome::Released);
                }
            })
        })
        .collect();
    for task in tasks {
        task.await.expect("the task");
    }
    let revisions = server.revision();
    assert!(revisions >= 300, "an entry each: {revisions}");
    let names: HashSet<String> = (1..=revisions).flat_map(|at| server.keys_at(at)).collect();
    let names: Vec<_> = names.iter().filter(|name| name.starts_with("a/")).collect();
    // The entry that is being released, and the next one.
    assert!((CLIENTS..=CLIENTS * 2).contains(&names.len()), "{names:?}");
}

/// The lease of a client that goes is revoked, and does not wait for its end.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_lease_ends_with_the_client() {
    let Some(server) = EtcdServer::start() else { return };
    let dlock = client(&server.url());
    let guard = dlock.mutex("a").lock().await.expect("the lock");
    assert_eq!(server.leases().len(), 1);
    drop(guard);
    drop(dlock);
    eventually("no lease is left", async || server.leases().is_empty()).await;
    let dlock = client(&server.url());
    drop(dlock.mutex("a").lock().await.expect("the lock"));
    dlock.shutdown(Duration::from_secs(1)).await;
    eventually("shutdown ends it too", async || server.leases().is_empty()).await;
    assert!(server.keys().is_empty());
}
