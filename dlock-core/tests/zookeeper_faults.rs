//! Rows of the list of faults on a real ZooKeeper.

use std::time::{Duration, Instant};

use dlock::{Dlock, State};
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
