//! The conformance suite on a real PostgreSQL, and tests of what only PostgreSQL does.

use std::sync::Arc;
use std::time::Duration;

use dlock::Dlock;
use dlock::backend::sql::Postgres;
use dlock_testkit::conformance::Suite;
use dlock_testkit::database_servers::{PgBouncer, PostgresServer};
use dlock_testkit::proxy::Proxy;

fn client(url: &str) -> Dlock {
    let url = format!("{url}?migrate=true");
    let builder = Dlock::builder().url(&url).namespace("test").ttl(Duration::from_millis(900));
    builder.wait(Duration::from_secs(20)).connect_lazy().expect("a client")
}

async fn suite(url: String) {
    let url = format!("{url}?migrate=true");
    Suite::new(move || Postgres::new(&url, "test").expect("a backend")).run().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn conformance() {
    let Some(server) = PostgresServer::start() else { return };
    suite(server.url()).await;
    let left = "SELECT count(*) FROM pg_stat_activity WHERE application_name = 'dlock'";
    let began = std::time::Instant::now();
    while server.sql(left) != "0" {
        assert!(began.elapsed() < Duration::from_secs(20), "{} connections", server.sql(left));
        tokio::time::sleep(Duration::from_millis(50)).await;
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn conformance_through_a_pooler_of_transactions() {
    let Some(server) = PostgresServer::start() else { return };
    let Some(pooler) = PgBouncer::start(&server) else { return };
    suite(pooler.url()).await;
}

/// A lock is handed over to another process by a message, not by looking.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn hand_overs_are_told() {
    let Some(server) = PostgresServer::start() else { return };
    let server = Arc::new(server);
    let (one, two) = (client(&server.url()), client(&server.url()));
    drop(two.mutex("a").lock().await.expect("the lock"));
    let mut took = Vec::new();
    for _ in 0..20 {
        let guard = one.mutex("a").lock().await.expect("the lock");
        let waiting = tokio::spawn({
            let lock = two.mutex("a");
            async move {
                let guard = lock.lock().await.expect("the lock");
                (std::time::Instant::now(), guard)
            }
        });
        // Long enough that one who looks would look rarely.
        tokio::time::sleep(Duration::from_millis(100)).await;
        let released = std::time::Instant::now();
        let _ = guard.release().await.expect("an answer");
        let (woken, _guard) = waiting.await.expect("the task");
        took.push(woken.saturating_duration_since(released));
    }
    took.sort();
    assert!(took[10] < Duration::from_millis(100), "handed over after {took:?}");
}

/// The connection that listens is half open: no messages come, and nobody says so. The client
/// notices, and listens on another one.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_half_open_listener_is_replaced() {
    let Some(server) = PostgresServer::start() else { return };
    let proxy = Proxy::opaque(server.port());
    let through = client(&format!("postgres://dlock@127.0.0.1:{}/dlock", proxy.port()));
    drop(through.mutex("a").lock().await.expect("the lock"));
    let listening =
        || server.sql("SELECT count(*) FROM pg_stat_activity WHERE query LIKE 'LISTEN%dlock_%'");
    assert_eq!(listening(), "1");
    proxy.freeze();
    let lock = through.mutex("a").wait(Duration::from_secs(60));
    drop(lock.lock().await.expect("the lock, on another connection"));
    let began = std::time::Instant::now();
    while listening() != "2" {
        // The old one is still there: the server does not know that it is cut off.
        assert!(began.elapsed() < Duration::from_secs(60), "{} listen", listening());
        tokio::time::sleep(Duration::from_millis(100)).await;
    }
}

/// Nothing listens on the sessions of a pooler: whoever uses them next would get messages
/// that it does not expect.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_sessions_of_a_pooler_do_not_listen() {
    let Some(server) = PostgresServer::start() else { return };
    let Some(pooler) = PgBouncer::start(&server) else { return };
    let (one, two) = (client(&pooler.url()), client(&pooler.url()));
    for client in [&one, &two] {
        drop(client.mutex("a").lock().await.expect("the lock"));
    }
    let options = pooler.url().parse::<sqlx::postgres::PgConnectOptions>().expect("a URL");
    let pool = sqlx::postgres::PgPoolOptions::new().max_connections(5);
    let pool = pool.connect_with(options).await.expect("a pool");
    let mut sessions = Vec::new();
    for _ in 0..5 {
        let mut conn = pool.acquire().await.expect("a connection");
        sqlx::raw_sql("BEGIN").execute(&mut *conn).await.expect("a transaction");
        let sql = "SELECT pg_listening_channels()";
        let heard = sqlx::raw_sql(sql).fetch_all(&mut *conn).await.expect("the channels");
        assert!(heard.is_empty(), "a session of the pooler listens");
        sessions.push(conn); // so that the next one is another session
    }
}
