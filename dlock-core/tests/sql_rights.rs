//! The rights in docs/*-grants.sql suffice, and one less does not.

use std::time::Duration;

use dlock::backend::Cursor;
use dlock::{Config, Dlock, ErrorKind, ReleaseOutcome};
use dlock_testkit::conformance::eventually;
use dlock_testkit::database_servers::{MariaDbServer, MySqlServer, PostgresServer};

const POSTGRES: &str = include_str!("../../docs/postgres-grants.sql");
const MYSQL: &str = include_str!("../../docs/mysql-grants.sql");

async fn make_tables(url: &str) {
    let config = Config::from_url(url).expect("a URL");
    dlock::backend::sql::make_tables(&config).await.expect("tables");
}

async fn everything_works(url: &str) {
    let builder = || Dlock::builder().url(url).wait(Duration::from_secs(20));
    let one = builder().connect().await.expect("a client");
    let two = builder().connect().await.expect("a client");
    let guard = one.mutex("a").lock().await.expect("the lock");
    let waiting = tokio::spawn({
        let lock = two.mutex("a");
        async move { lock.lock().await.map(drop) }
    });
    tokio::time::sleep(Duration::from_millis(50)).await;
    assert_eq!(one.list("", Cursor::default()).await.expect("a page").keys.len(), 1);
    assert_eq!(guard.release().await.expect("an answer"), ReleaseOutcome::Released);
    waiting.await.expect("the task").expect("the lock");
    let guard = one.semaphore("s", 2).permits(1).lock().await.expect("a permit");
    assert_eq!(two.break_permits("s").await.expect("an answer"), 1);
    tokio::time::timeout(Duration::from_secs(5), guard.lost()).await.expect("it is told");
}

async fn is_denied(url: &str) {
    let dlock = Dlock::builder().url(url).connect_lazy().expect("a client");
    let error = dlock.mutex("x").try_lock().await.expect_err("a right is missing");
    assert_eq!(error.kind(), ErrorKind::Denied, "{error}");
    assert!(error.to_string().contains("docs/sql.md"), "{error}");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn postgres() {
    let Some(server) = PostgresServer::start() else { return };
    make_tables(&server.url()).await;
    server.sql("CREATE ROLE shop LOGIN");
    let url = server.url().replace("dlock@", "shop@");
    is_denied(&url).await;
    server.sql(POSTGRES);
    everything_works(&url).await;
    let pool = sqlx::PgPool::connect(&url).await.expect("a pool");
    let mut tx = pool.begin().await.expect("a transaction");
    dlock::sql::lock_in(&mut tx, "a").await.expect("the lock");
    server.sql("REVOKE INSERT ON dlock_lock FROM shop");
    is_denied(&url).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn mariadb() {
    if let Some(server) = MariaDbServer::start() {
        least_rights(&server.url(), |statement| server.sql(statement)).await;
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn mysql() {
    if let Some(server) = MySqlServer::start() {
        // Early versions of MySQL 8 overlook rights on a table when a row is locked.
        server.sql("CREATE USER shop; GRANT LOCK TABLES ON dlock.* TO shop");
        least_rights(&server.url(), |statement| server.sql(statement)).await;
    }
}

async fn least_rights(url: &str, sql: impl Fn(&str) -> String) {
    make_tables(url).await;
    sql("CREATE USER IF NOT EXISTS shop");
    let url = url.replace("root@", "shop@");
    is_denied(&url).await;
    sql(&format!("USE dlock; {MYSQL}"));
    everything_works(&url).await;
    let plain = format!("{url}?ssl-mode=disabled");
    let pool = sqlx::MySqlPool::connect(&plain).await.expect("a pool");
    let mut tx = pool.begin().await.expect("a transaction");
    dlock::sql::lock_in(&mut tx, "a").await.expect("the lock");
    sql("REVOKE INSERT ON dlock.dlock_lock FROM shop");
    is_denied(&url).await;
}

/// `NOTIFY` is not needed: without the right to send messages a lock is handed over all the
/// same.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn hand_overs_work_without_messages() {
    let Some(server) = PostgresServer::start() else { return };
    make_tables(&server.url()).await;
    server.sql("CREATE ROLE shop LOGIN");
    server.sql(POSTGRES);
    server.sql("REVOKE EXECUTE ON FUNCTION pg_notify(text, text) FROM PUBLIC");
    let url = server.url().replace("dlock@", "shop@");
    let builder = || Dlock::builder().url(&url).wait(Duration::from_secs(60));
    let one = builder().connect().await.expect("a client");
    let two = builder().connect().await.expect("a client");
    let began = std::time::Instant::now();
    let mut held = one.mutex("a").lock().await.expect("the lock");
    for next in [&two, &one].into_iter().cycle().take(20) {
        let waiting = tokio::spawn({
            let lock = next.mutex("a");
            async move { lock.lock().await }
        });
        eventually("it waits", async || {
            !one.inspect("a").await.expect("a look").waiters.is_empty()
        })
        .await;
        let token = held.token();
        assert_eq!(held.release().await.expect("an answer"), ReleaseOutcome::Released);
        held = waiting.await.expect("the task").expect("the lock");
        assert!(held.token() > token);
    }
    assert!(began.elapsed() < Duration::from_secs(30), "{:?}", began.elapsed());
}
