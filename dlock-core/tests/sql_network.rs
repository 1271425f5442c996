//! Faults of the network between a client and a SQL server.

use std::time::{Duration, Instant};

use dlock::{Dlock, State};
use dlock_testkit::conformance::eventually;
use dlock_testkit::database_servers::{MariaDbServer, MySqlServer, PostgresServer};
use dlock_testkit::proxy::Proxy;

async fn client(url: &str) -> Dlock {
    let builder = Dlock::builder().url(&format!("{url}?migrate=true")).namespace("test");
    let builder = builder.ttl(Duration::from_secs(10)).wait(Duration::from_secs(60));
    builder.connect().await.expect("a client")
}

/// The URL of a server behind a proxy.
fn behind(proxy: &Proxy, url: &str, port: u16) -> String {
    url.replace(&format!(":{port}/"), &format!(":{}/", proxy.port()))
}

/// All connections are half open: they look alive, and nothing arrives. Calls end by their
/// time-out, also those that nobody waits for, and the client goes on with new connections.
async fn half_open(url: &str, port: u16) {
    let proxy = Proxy::opaque(port);
    let (through, direct) = (client(&behind(&proxy, url, port)).await, client(url).await);
    let kept = through.mutex("kept").lock().await.expect("the lock");
    let held = direct.mutex("a").lock().await.expect("the lock");
    let waiting = tokio::spawn({
        let lock = through.mutex("a");
        async move { lock.lock().await }
    });
    eventually("it waits", async || direct.inspect("a").await.expect("a look").waiters.len() == 1)
        .await;
    proxy.freeze();
    let _ = held.release().await.expect("an answer");
    let began = Instant::now();
    drop(waiting.await.expect("the task").expect("the lock, although nobody was told"));
    assert!(began.elapsed() < Duration::from_secs(45), "{:?}", began.elapsed());
    for round in 0..20 {
        let lock = through.mutex(format!("b:{round}"));
        drop(lock.lock().await.expect("the lock"));
        assert_ne!(kept.state(), State::Lost);
    }
    eventually("it is held for certain", async || kept.state() == State::Held).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn row_07_half_open_connections_are_left() {
    if let Some(server) = PostgresServer::start() {
        half_open(&server.url(), server.port()).await;
    }
    if let Some(server) = MariaDbServer::start() {
        half_open(&server.url(), server.port()).await;
    }
    if let Some(server) = MySqlServer::start() {
        half_open(&server.url(), server.port()).await;
    }
}
