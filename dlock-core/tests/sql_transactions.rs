//! Locks inside transactions of the caller, on all three databases.

use std::time::{Duration, Instant};

use dlock::sql::{InTransaction, lock_first_free_in, lock_in, lock_in_for, try_lock_in};
use dlock::{Config, Dlock, ErrorKind};
use dlock_testkit::database_servers::{MariaDbServer, PostgresServer};
use dlock_testkit::latencies::{Latencies, held_for};
use sqlx::{MySqlPool, PgPool, SqlitePool};

async fn make_tables(url: &str) {
    let config = Config::from_url(url).expect("a URL");
    dlock::backend::sql::make_tables(&config).await.expect("tables");
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
