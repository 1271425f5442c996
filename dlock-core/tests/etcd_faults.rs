//! Rows of the list of faults on a real etcd.

use std::time::{Duration, Instant};

use dlock::{Dlock, ReleaseOutcome};
use dlock_testkit::conformance::eventually;
use dlock_testkit::etcd::{EtcdCluster, EtcdServer};
use dlock_testkit::proxy::{Proxy, Way};
use dlock_testkit::session_faults;

session_faults!(EtcdServer, EtcdCluster);

/// The ttl of the leases.
const TTL: Duration = Duration::from_secs(2);

fn client(url: &str) -> Dlock {
    let builder = Dlock::builder().url(url).namespace("test").ttl(TTL);
    builder.wait(Duration::from_secs(30)).connect_lazy().expect("a client")
}

fn behind(proxy: &Proxy) -> Dlock {
    client(&format!("etcd://127.0.0.1:{}", proxy.port()))
}

async fn is_free(dlock: &Dlock, key: &str) -> bool {
    let state = dlock.inspect(key).await.expect("an inspection");
    state.holders.is_empty() && state.waiters.is_empty()
}

/// A request is stuck on its way while the same owner gets the lock over another connection
/// and gives it back. When it arrives, it must not make a lock that nobody holds.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn row_21_a_late_request_makes_no_ghost() {
    let Some(server) = EtcdServer::start() else { return };
    let ways = [Proxy::opaque(server.port()), Proxy::opaque(server.port())];
    let url = format!("etcd://127.0.0.1:{},127.0.0.1:{}", ways[0].port(), ways[1].port());
    // Long enough to outlive the silence on the first way.
    let builder = Dlock::builder().url(&url).namespace("test").ttl(Duration::from_secs(20));
    let dlock = builder.wait(Duration::from_secs(30)).connect_lazy().expect("a client");
    let other = client(&server.url());
    drop(dlock.mutex("warm").lock().await.expect("the lock"));
    eventually("warm is free", async || is_free(&other, "warm").await).await;
    let used = ways.iter().find(|way| way.open() > 0).expect("it is connected");
    used.stall(&[Way::ToServer]);
    let guard = dlock.mutex("late").lock().await.expect("the lock, the other way");
    assert_eq!(guard.release().await.expect("an answer"), ReleaseOutcome::Released);
    let before = server.revision();
    used.heal();
    // Whatever was stuck has arrived when the connection is closed.
    eventually("the stuck connection is closed", async || used.open() == 0).await;
    drop(dlock.mutex("after").lock().await.expect("the lock"));
    assert!(server.revision() > before, "the store was written to afterwards");
    assert!(is_free(&other, "late").await, "a ghost");
}

/// The history is compacted while somebody waits, and the watch has to begin anew.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_waiter_survives_a_compaction_and_a_cut() {
    let Some(server) = EtcdServer::start() else { return };
    let proxy = Proxy::opaque(server.port());
    let (dlock, other) = (behind(&proxy), client(&server.url()));
    let held = other.mutex("a").lock().await.expect("the lock");
    let lock = dlock.mutex("a");
    let waiting = tokio::spawn(async move { lock.lock().await.map(|guard| guard.token()) });
    let waiters = async || other.inspect("a").await.expect("a look").waiters.len();
    eventually("it waits", async || waiters().await == 1).await;
    tokio::task::block_in_place(|| server.compact());
    proxy.cut();
    let token = held.token();
    drop(held);
    let began = Instant::now();
    assert!(waiting.await.expect("the task").expect("the lock") > token);
    // Without a watch it would look again after 7 seconds or more.
    assert!(began.elapsed() < Duration::from_secs(6), "{:?}", began.elapsed());
}
