//! The conformance suite on a real ZooKeeper, and tests of what only ZooKeeper does.

use std::time::Duration;

use dlock::backend::zookeeper::ZooKeeper;
use dlock::{Dlock, ErrorKind, ReleaseOutcome};
use dlock_testkit::conformance::{Suite, eventually};
use dlock_testkit::zookeeper::{ZooKeeperEnsemble, ZooKeeperServer};

/// The time-out of the sessions: ten ticks of the servers.
const TTL: Duration = Duration::from_secs(2);

fn backend(url: &str) -> ZooKeeper {
    ZooKeeper::new(url, "default", TTL).expect("a backend")
}

fn client(url: &str) -> Dlock {
    let builder = Dlock::builder().url(url).ttl(TTL).wait(Duration::from_secs(20));
    builder.connect_lazy().expect("a client")
}

async fn suite(url: String, port: u16, layout: &str) {
    let path = format!("/dlock-tests?layout={layout}");
    let url = format!("{url}{path}");
    let at = move |port: u16| backend(&format!("zookeeper://127.0.0.1:{port}{path}"));
    Suite::new(move || backend(&url)).with_proxy(port, at).run().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn conformance_as_curators_read_write_lock() {
    let Some(server) = ZooKeeperServer::start() else { return };
    suite(server.url(), server.port(), "rwlock").await;
    eventually("no session is left", async || server.sessions_with_nodes() == 0).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn conformance_as_curators_mutex() {
    let Some(server) = ZooKeeperServer::start() else { return };
    suite(server.url(), server.port(), "mutex").await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn conformance_on_an_ensemble_of_three() {
    let Some(ensemble) = ZooKeeperEnsemble::start() else { return };
    let follower = (ensemble.leader() + 1) % 3;
    suite(ensemble.url(), ensemble.servers[follower].port(), "kazoo").await;
}

/// Who tries after a release gets the lock, also by way of a server that is behind.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_release_is_seen_by_every_member() {
    let Some(ensemble) = ZooKeeperEnsemble::start() else { return };
    let leader = ensemble.leader();
    let clients: Vec<_> =
        (0..3).map(|n| client(&ensemble.servers[(leader + n) % 3].url())).collect();
    for round in 0..300 {
        let lock = clients[round % 3].mutex("a");
        let guard = lock.try_lock().await.expect("an answer");
        let guard = guard.unwrap_or_else(|| panic!("round {round}: it was released"));
        assert_eq!(guard.release().await.expect("an answer"), ReleaseOutcome::Released);
    }
    let permits = |n: usize| clients[n % 3].semaphore("b", 1).permits(1);
    for round in 0..100 {
        let guard = permits(round).try_lock().await.expect("an answer");
        let guard = guard.unwrap_or_else(|| panic!("round {round}: it was released"));
        assert_eq!(guard.release().await.expect("an answer"), ReleaseOutcome::Released);
    }
}

/// The layout of Curator's mutex has no readers, and says what to do.
#[tokio::test]
async fn readers_need_another_layout() {
    let dlock = client("zookeeper://127.0.0.1:1");
    let error = dlock.rwlock("a").read().lock().await.expect_err("no readers");
    assert_eq!(error.kind(), ErrorKind::Unsupported, "{error}");
    assert!(error.to_string().contains("layout=rwlock"), "{error}");
}

/// All locks of a client have the ttl of its session.
#[tokio::test]
async fn a_longer_ttl_than_the_sessions_is_refused() {
    let dlock = client("zookeeper://127.0.0.1:1");
    let error = dlock.mutex("a").ttl(TTL * 2).lock().await.expect_err("too long");
    assert_eq!(error.kind(), ErrorKind::Unsupported, "{error}");
    assert!(error.to_string().contains("lasts 2s"), "{error}");
    let Some(server) = ZooKeeperServer::start() else { return };
    let dlock = client(&server.url());
    drop(dlock.mutex("a").ttl(TTL / 2).lock().await.expect("it is rounded up"));
    // The servers of the tests keep a session for 4 s at most.
    let long = Dlock::builder().url(&server.url()).ttl(Duration::from_secs(60));
    let error = long.connect().await.expect_err("too long for the server");
    assert_eq!(error.kind(), ErrorKind::Config, "{error}");
    assert!(error.to_string().contains("maxSessionTimeout"), "{error}");
}

/// The session of a client that goes is closed, and does not wait for its time-out.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_session_ends_with_the_client() {
    let Some(server) = ZooKeeperServer::start() else { return };
    let sessions = || server.command("cons").matches("sid=0x").count();
    let dlock = client(&server.url());
    let guard = dlock.mutex("a").lock().await.expect("the lock");
    assert!(sessions() >= 1);
    drop(guard);
    drop(dlock);
    eventually("no connection is left", async || sessions() == 0).await;
    assert!(!server.command("dump").contains("0x0000"), "{}", server.command("dump"));
    let dlock = client(&server.url());
    drop(dlock.mutex("a").lock().await.expect("the lock"));
    dlock.shutdown(Duration::from_secs(1)).await;
    eventually("shutdown ends it too", async || sessions() == 0).await;
}
