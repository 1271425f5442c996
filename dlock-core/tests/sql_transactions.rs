//! Locks inside transactions of the caller, on all databases.

use std::time::{Duration, Instant};

use dlock::sql::{InTransaction, lock_first_free_in, lock_in, lock_in_for, try_lock_in};
use dlock::{Config, Dlock, ErrorKind};
use dlock_testkit::database_servers::{MariaDbServer, MySqlServer, PostgresServer};
use dlock_testkit::latencies::{Latencies, held_for};
use sqlx::{MySqlPool, PgPool, SqlitePool};

async fn make_tables(url: &str) {
    let config = Config::from_url(url).expect("a URL");
    dlock::backend::sql::make_tables(&config).await.expect("tables");
}

/// A URL for a pool: TLS of an early MySQL 8 is too old for the driver.
fn plain(url: &str) -> String {
    format!("{url}?ssl-mode=disabled")
}

/// What two transactions promise each other, on keys with and without a row.
async fn check<T: InTransaction>(mut begin: impl AsyncFnMut() -> T, end: impl AsyncFn(T)) {
    for round in 0..2 {
        let mut one = begin().await;
        lock_in(&mut one, "a").await.expect("the lock");
        lock_in(&mut one, "a").await.expect("it is its own");
        let mut two = begin().await;
        assert!(!try_lock_in(&mut two, "a").await.expect("an answer"), "round {round}");
        let began = Instant::now();
        let wait = Duration::from_secs(1);
        assert!(!lock_in_for(&mut two, "a", wait).await.expect("an answer"));
        assert!(began.elapsed() >= wait.mul_f64(0.9), "{:?}", began.elapsed());
        let free = lock_first_free_in(&mut two, ["a", "b"]).await.expect("an answer");
        assert_eq!(free.expect("b is free").as_str(), "b");
        end(two).await;
        end(one).await;
        let mut three = begin().await;
        assert!(try_lock_in(&mut three, "a").await.expect("an answer"), "it was released");
        assert!(lock_in_for(&mut three, "c", wait).await.expect("an answer"));
        end(three).await;
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn postgres() {
    let Some(server) = PostgresServer::start() else { return };
    make_tables(&server.url()).await;
    let pool = PgPool::connect(&server.url()).await.expect("a pool");
    let begin = async || pool.begin().await.expect("a transaction");
    check(begin, async |tx| tx.commit().await.expect("a commit")).await;
    server.sql("TRUNCATE dlock_row");
    check(begin, async |tx| tx.rollback().await.expect("a rollback")).await;

    // The time-out of the caller is as it was.
    let mut tx = begin().await;
    let _ = sqlx::query("SET LOCAL lock_timeout = 77").execute(&mut *tx).await.expect("set");
    assert!(try_lock_in(&mut tx, "d").await.expect("an answer"));
    let now: String =
        sqlx::query_scalar("SHOW lock_timeout").fetch_one(&mut *tx).await.expect("it");
    assert_eq!(now, "77ms");
    dlock::sql::advisory_lock_in(&mut tx, "d").await.expect("the lock");
    let held = "SELECT count(*) FROM pg_locks WHERE locktype = 'advisory'";
    assert_eq!(server.sql(held), "1");
    tx.commit().await.expect("a commit");
    assert_eq!(server.sql(held), "0");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn mariadb() {
    let Some(server) = MariaDbServer::start() else { return };
    make_tables(&server.url()).await;
    let pool = MySqlPool::connect(&server.url()).await.expect("a pool");
    let begin = async || pool.begin().await.expect("a transaction");
    check(begin, async |tx| tx.commit().await.expect("a commit")).await;
    server.sql("TRUNCATE dlock.dlock_row");
    check(begin, async |tx| tx.rollback().await.expect("a rollback")).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn mysql() {
    let Some(server) = MySqlServer::start() else { return };
    make_tables(&server.url()).await;
    let pool = MySqlPool::connect(&plain(&server.url())).await.expect("a pool");
    let begin = async || pool.begin().await.expect("a transaction");
    check(begin, async |tx| tx.commit().await.expect("a commit")).await;
    server.sql("TRUNCATE dlock.dlock_row");
    check(begin, async |tx| tx.rollback().await.expect("a rollback")).await;

    // The time-out of the caller is as it was.
    let mut tx = begin().await;
    let _ = sqlx::query("SET SESSION innodb_lock_wait_timeout = 77").execute(&mut *tx).await;
    assert!(try_lock_in(&mut tx, "d").await.expect("an answer"));
    let mut other = begin().await;
    assert!(!try_lock_in(&mut other, "d").await.expect("an answer"));
    for (tx, expected) in [(&mut tx, 77), (&mut other, 50)] {
        let now = sqlx::query_scalar::<_, u64>("SELECT @@SESSION.innodb_lock_wait_timeout");
        assert_eq!(now.fetch_one(&mut **tx).await.expect("it"), expected);
    }
    drop((tx, other));

    // Nobody waits in a transaction with READ COMMITTED.
    let mut holder = begin().await;
    lock_in(&mut holder, "e").await.expect("the lock");
    let committed = "SET TRANSACTION ISOLATION LEVEL READ COMMITTED";
    let mut conn = pool.acquire().await.expect("a connection");
    let session = committed.replace("SET", "SET SESSION");
    let _ = sqlx::query(sqlx::AssertSqlSafe(session)).execute(&mut *conn).await.expect("set");
    let mut tx = sqlx::Connection::begin(&mut *conn).await.expect("a transaction");
    let began = Instant::now();
    assert!(!try_lock_in(&mut tx, "e").await.expect("an answer"));
    assert!(try_lock_in(&mut tx, "new").await.expect("an answer"));
    assert!(try_lock_in(&mut tx, "new").await.expect("it is its own"));
    assert!(began.elapsed() < Duration::from_millis(700), "{:?}", began.elapsed());
}

/// The server ends the whole transaction when a statement waits for a lock too long. What the
/// caller does before and after is done, or not done, together, even if it overlooks the error.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn half_an_order_is_never_committed() {
    let option = "--innodb-rollback-on-timeout=ON";
    let mut urls = Vec::new();
    let mariadb = MariaDbServer::with(&[option]);
    urls.extend(mariadb.as_ref().map(MariaDbServer::url));
    let mysql = MySqlServer::with(&[option]);
    urls.extend(mysql.as_ref().map(MySqlServer::url));
    for url in urls {
        make_tables(&url).await;
        let pool = MySqlPool::connect(&plain(&url)).await.expect("a pool");
        sqlx::raw_sql("CREATE TABLE orders (id INT, part INT) ENGINE = InnoDB")
            .execute(&pool)
            .await
            .expect("a table");
        let mut holder = pool.begin().await.expect("a transaction");
        for key in ["a", "b"] {
            lock_in(&mut holder, key).await.expect("the lock");
        }
        let second = Duration::from_secs(1);
        for id in 0..3 {
            let mut tx = pool.begin().await.expect("a transaction");
            let part = async |tx: &mut sqlx::MySqlConnection, part: i32| {
                let insert = sqlx::query("INSERT INTO orders VALUES (?, ?)").bind(id).bind(part);
                insert.execute(tx).await
            };
            let _ = part(&mut tx, 1).await.expect("the first part");
            let answer = match id {
                0 => try_lock_in(&mut tx, "a").await,
                1 => lock_in_for(&mut tx, "a", second).await,
                _ => lock_first_free_in(&mut tx, ["a", "b"]).await.map(|free| free.is_some()),
            };
            let wrote = part(&mut tx, 2).await;
            let committed = tx.commit().await;
            let count = sqlx::query_scalar::<_, i64>("SELECT count(*) FROM orders WHERE id = ?");
            let count = count.bind(id).fetch_one(&pool).await.expect("a count");
            match answer {
                Ok(is_locked) => assert_eq!((is_locked, count), (false, 2), "{url}"),
                Err(error) => {
                    assert_eq!(count, 0, "{url}: half an order {id} after {error}");
                    assert_eq!(error.kind(), ErrorKind::TimedOut, "{error}");
                    assert!(error.to_string().contains("begin it again"), "{error}");
                    assert!(wrote.is_err() || committed.is_err(), "nobody was told");
                }
            }
        }
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn sqlite() {
    let directory = tempfile::TempDir::new().expect("a directory");
    let url = format!("sqlite://{}/locks.db", directory.path().display());
    make_tables(&url).await;
    let pool = SqlitePool::connect(&url).await.expect("a pool");
    let mut one = pool.begin().await.expect("a transaction");
    lock_in(&mut one, "a").await.expect("the lock");
    let mut two = pool.begin().await.expect("a transaction");
    assert!(!try_lock_in(&mut two, "b").await.expect("an answer"), "it is the whole file");
    one.commit().await.expect("a commit");
    assert!(try_lock_in(&mut two, "b").await.expect("an answer"));
    two.rollback().await.expect("a rollback");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_missing_table_is_told() {
    let directory = tempfile::TempDir::new().expect("a directory");
    let url = format!("sqlite://{}/locks.db?mode=rwc", directory.path().display());
    let pool = SqlitePool::connect(&url).await.expect("a pool");
    let mut tx = pool.begin().await.expect("a transaction");
    let error = lock_in(&mut tx, "a").await.expect_err("no table");
    assert_eq!(error.kind(), ErrorKind::Config);
    assert!(error.to_string().contains("dlock schema"), "{error}");
}

/// A transaction that locks a key for a long time does not touch leases, not even that of
/// the same key. `DLOCK_TEST_HELD_SECONDS=30` makes it longer.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_long_transaction_does_not_stall_leases() {
    let Some(server) = PostgresServer::start() else { return };
    make_tables(&server.url()).await;
    let pool = PgPool::connect(&server.url()).await.expect("a pool");
    // The pool's own options: dlock opens its own connections from them.
    let builder = Dlock::builder().postgres(&pool).ttl(Duration::from_secs(2));
    let dlock = builder.connect().await.expect("a client");
    let kept = dlock.mutex("kept").lock().await.expect("the lock");
    let cycles = async |lasts| {
        let mut took = Latencies::default();
        while took.began.elapsed() < lasts {
            let cycle = Instant::now();
            let guard = dlock.mutex("a").lock().await.expect("the lease");
            let _ = guard.release().await.expect("an answer");
            took.add(cycle.elapsed());
            assert_ne!(kept.state(), dlock::State::Lost);
        }
        took
    };
    let before = cycles(held_for() / 2).await;
    let mut tx = pool.begin().await.expect("a transaction");
    for key in ["a", "kept"] {
        lock_in(&mut tx, key).await.expect("the lock");
    }
    let meanwhile = cycles(held_for()).await;
    println!("a lease: {before} before, {meanwhile} while another key was locked");
    assert!(meanwhile.slowest() < Duration::from_secs(2), "{meanwhile}");
    tx.commit().await.expect("a commit");
}
