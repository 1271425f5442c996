//! The conformance suite on a real ZooKeeper, and tests of what only ZooKeeper does.

use std::time::Duration;

use dlock::backend::zookeeper::ZooKeeper;
use dlock::{Dlock, ErrorKind};
use dlock_testkit::conformance::{Link, Suite, eventually};
use dlock_testkit::proxy::Proxy;
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
    let (query, root) = (format!("?layout={layout}"), "/dlock-tests");
    let url = format!("{url}{root}{query}");
    let cut_off = move || {
        let proxy = Proxy::opaque(port);
        let url = format!("zookeeper://127.0.0.1:{}{root}{query}", proxy.port());
        let link: Link =
            Box::new(move |is_cut| if is_cut { proxy.go_silent() } else { proxy.heal() });
        (backend(&url), link)
    };
    Suite::new(move || backend(&url)).with_link(cut_off).run().await;
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
