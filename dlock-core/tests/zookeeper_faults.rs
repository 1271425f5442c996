//! Rows of the list of faults on a real ZooKeeper.

use std::time::{Duration, Instant};

use dlock::{Dlock, ReleaseOutcome, State};
use dlock_testkit::conformance::eventually;
use dlock_testkit::proxy::{Once, Proxy, Way};
use dlock_testkit::session_faults;
use dlock_testkit::zookeeper::{ZooKeeperEnsemble, ZooKeeperServer};

session_faults!(ZooKeeperServer, ZooKeeperEnsemble);

fn client(url: &str) -> Dlock {
    let builder = Dlock::builder().url(url).namespace("test").ttl(Duration::from_secs(2));
    builder.wait(Duration::from_secs(30)).connect_lazy().expect("a client")
}

/// A follower that is cut off answers reads while the leader lets the session expire: the
/// guard is lost before its successor is granted.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_holder_on_a_cut_off_follower_is_lost_in_time() {
    let Some((ensemble, link)) = ZooKeeperEnsemble::start_with_link() else { return };
    let cut_off = client(&ensemble.servers[2].url());
    let other = client(&ensemble.servers[ensemble.leader()].url());
    let guard = cut_off.mutex("a").lock().await.expect("the lock");
    let token = guard.token();
    let successor = tokio::spawn(async move {
        let guard = other.mutex("a").lock().await.expect("the lock");
        (Instant::now(), guard)
    });
    tokio::time::sleep(Duration::from_millis(300)).await;
    assert_eq!(guard.state(), State::Held);
    link.iter().for_each(Proxy::go_silent);
    guard.lost().await;
    let lost = Instant::now();
    let (granted, successor) = successor.await.expect("the task");
    assert!(granted >= lost, "granted {:?} before the loss", lost.duration_since(granted));
    assert!(successor.token() > token);
}

/// The server of a client becomes silent again and again, and the next one that the client
/// tries may be the same: it is left in time, and session and lock are kept.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn row_07_a_silent_server_is_left_before_the_lock_is_lost() {
    const SILENCES: usize = 12;
    let Some(ensemble) = ZooKeeperEnsemble::start() else { return };
    let ways: Vec<_> = ensemble.ports().into_iter().map(Proxy::opaque).collect();
    let url = ensemble.url_at(&ways.iter().map(Proxy::port).collect::<Vec<_>>());
    let builder = Dlock::builder().url(&url).namespace("test").ttl(Duration::from_secs(4));
    let dlock = builder.wait(Duration::from_secs(30)).connect_lazy().expect("a client");
    let guard = dlock.mutex("a").lock().await.expect("the lock");
    let mut longest = Duration::ZERO;
    for _ in 0..SILENCES {
        // Of the two thirds of the time-out most is left when the silence begins.
        let is_renewed = async || guard.valid_for() > Duration::from_millis(2300);
        eventually("renewed", is_renewed).await;
        let used = ways.iter().position(|way| way.open() > 0).expect("it is connected");
        ways[used].go_silent();
        let began = Instant::now();
        let is_elsewhere = async || {
            assert_ne!(guard.state(), State::Lost, "after {:?}", began.elapsed());
            ways.iter().enumerate().any(|(at, way)| at != used && way.open() > 0)
        };
        eventually("another server is used", is_elsewhere).await;
        longest = longest.max(began.elapsed());
        ways[used].heal();
    }
    println!("the longest silence was {longest:?}");
    assert_eq!(guard.release().await.expect("an answer"), ReleaseOutcome::Released);
}

/// One of several permits is deleted: the guard is lost, and the others are given back.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_permits_of_a_lost_guard_are_given_back() {
    let Some(server) = ZooKeeperServer::start() else { return };
    let (one, two) = (client(&server.url()), client(&server.url()));
    let guard = one.semaphore("pool", 3).permits(3).lock().await.expect("permits");
    let mut permits = server.ephemeral_nodes();
    permits.sort();
    assert_eq!(permits.len(), 3, "{permits:?}");
    // The first one is watched; of the others the next renewal knows.
    server.delete(&permits[2]);
    guard.lost().await;
    let all = two.semaphore("pool", 3).permits(3).wait(Duration::from_secs(10)).lock().await;
    drop(all.expect("the others were given back, and the session of their client lives"));
}

/// A client that holds many locks far away reconnects: it renews all of them in time.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn many_locks_are_renewed_together_after_a_reconnect() {
    const LOCKS: usize = 400;
    let Some(server) = ZooKeeperServer::start() else { return };
    let proxy = Proxy::opaque(server.port());
    let url = format!("zookeeper://127.0.0.1:{}", proxy.port());
    let builder = Dlock::builder().url(&url).namespace("test").ttl(Duration::from_secs(4));
    let dlock = builder.wait(Duration::from_secs(60)).connect_lazy().expect("a client");
    let locking: Vec<_> = (0..LOCKS)
        .map(|n| {
            let lock = dlock.mutex(format!("k{n}"));
            tokio::spawn(async move { lock.lock().await })
        })
        .collect();
    let mut guards = Vec::new();
    for locking in locking {
        guards.push(locking.await.expect("the task").expect("the lock"));
    }
    proxy.delay(Way::ToServer, Duration::from_millis(30));
    proxy.delay(Way::ToClient, Duration::from_millis(30));
    proxy.cut();
    tokio::time::sleep(Duration::from_secs(6)).await;
    let lost = guards.iter().filter(|guard| guard.state() == State::Lost).count();
    assert_eq!(lost, 0, "of {LOCKS}");
    dlock.shutdown(Duration::ZERO).await;
}

/// A server, a proxy in front of it, and a client on each side, with readers.
fn with_readers() -> Option<(ZooKeeperServer, Proxy, Dlock, Dlock)> {
    let server = ZooKeeperServer::start()?;
    let proxy = Proxy::opaque(server.port());
    let behind = client(&format!("zookeeper://127.0.0.1:{}?layout=rwlock", proxy.port()));
    let other = client(&format!("{}?layout=rwlock", server.url()));
    Some((server, proxy, behind, other))
}

/// A writer becomes a reader, and the connection breaks before the node of the writer is
/// deleted: the guard stays held, and with it go both nodes.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn row_02_a_downgrade_that_was_cut_short_is_finished() {
    let Some((server, proxy, dlock, other)) = with_readers() else { return };
    let guard = dlock.rwlock("a").write().lock().await.expect("the lock");
    // Long enough for the watch of its own node, whose name is in the request too.
    tokio::time::sleep(Duration::from_millis(500)).await;
    proxy.once(Once::HoldRequest, "__WRIT__");
    let guard = guard.downgrade();
    eventually("the deletion is kept back", async || proxy.done() == 1).await;
    proxy.cut();
    let reader = other.rwlock("a").read().wait(Duration::from_secs(10)).lock().await;
    drop(reader.expect("the downgrade was finished"));
    assert_ne!(guard.state(), State::Lost);
    drop(guard);
    let writer = other.rwlock("a").write().wait(Duration::from_secs(3)).lock().await;
    drop(writer.expect("nothing of the guard is left"));
    eventually("no node is left", async || server.ephemeral_nodes().is_empty()).await;
}

/// The node of the reader is made and the answer is lost. The guard is dropped before anybody
/// asks again: both nodes go.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn row_04_a_downgrade_without_an_answer_leaves_nothing() {
    let Some((server, proxy, dlock, other)) = with_readers() else { return };
    let guard = dlock.rwlock("a").write().lock().await.expect("the lock");
    proxy.once(Once::LoseReply, "__READ__");
    let guard = guard.downgrade();
    eventually("the answer is lost", async || proxy.done() == 1).await;
    drop(guard);
    let writer = other.rwlock("a").write().wait(Duration::from_secs(3)).lock().await;
    drop(writer.expect("nothing of the guard is left"));
    eventually("no node is left", async || server.ephemeral_nodes().is_empty()).await;
}

/// A guard is dropped while it becomes a reader: before, between and after the two requests.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_downgrade_and_a_release_at_once_leave_nothing() {
    let Some((server, proxy, dlock, _other)) = with_readers() else { return };
    drop(dlock.rwlock("warm").write().lock().await.expect("the lock"));
    proxy.delay(Way::ToServer, Duration::from_millis(5));
    for n in 0..40 {
        let lock = dlock.rwlock(format!("k{n}"));
        let guard = lock.write().lock().await.expect("the lock").downgrade();
        tokio::time::sleep(Duration::from_millis(n)).await;
        drop(guard);
    }
    eventually("no node is left", async || server.ephemeral_nodes().is_empty()).await;
}
