//! Rows of the list of faults on a real ZooKeeper.

use std::time::{Duration, Instant};

use dlock::{Dlock, ReleaseOutcome, State};
use dlock_testkit::conformance::eventually;
use dlock_testkit::proxy::Proxy;
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
