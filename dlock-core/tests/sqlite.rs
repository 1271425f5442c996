//! The conformance suite on SQLite, and tests of what only SQLite does.

use std::time::Duration;

use dlock::backend::sql::Sqlite;
use dlock::{Dlock, ErrorKind};
use dlock_testkit::conformance::Suite;
use tempfile::TempDir;

fn url(directory: &TempDir) -> String {
    format!("sqlite://{}/locks.db?migrate=true", directory.path().display())
}

fn client(url: &str) -> Dlock {
    let builder = Dlock::builder().url(url).namespace("test").ttl(Duration::from_millis(900));
    builder.wait(Duration::from_secs(20)).connect_lazy().expect("a client")
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn conformance() {
    let directory = TempDir::new().expect("a directory");
    let url = url(&directory);
    let suite = Suite::new(move || Sqlite::new(&url, "test").expect("a backend"));
    suite.run().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn tables_are_not_made_silently() {
    let directory = TempDir::new().expect("a directory");
    let path = format!("sqlite://{}/locks.db", directory.path().display());
    let error = Dlock::connect(&path).await.expect_err("there are no tables");
    assert_eq!(error.kind(), ErrorKind::Config);
    assert!(error.to_string().contains("dlock schema"), "{error}");
    assert_eq!(std::fs::read_dir(directory.path()).expect("it").count(), 0, "no file is made");
    Dlock::connect(&format!("{path}?migrate=true")).await.expect("they are made");
    Dlock::connect(&path).await.expect("they are there");
}

/// What was held in an earlier boot is free, and its tokens are not used again.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_boot_ends_all_leases() {
    let directory = TempDir::new().expect("a directory");
    let url = url(&directory);
    let before = client(&url);
    let lock = before.mutex("a").ttl(Duration::from_secs(3_600));
    let guard = lock.lock().await.expect("the lock");
    let token = guard.token();
    guard.release_after(Duration::from_secs(3_600)).await.map(drop).expect("it stays taken");
    drop((lock, before));
    sql(&directory, "UPDATE dlock_meta SET value = 42 WHERE name = 'boot'").await;
    let after = client(&url);
    let guard = after.mutex("a").try_lock().await.expect("an answer").expect("the lock is free");
    assert!(guard.token() > token);
}

async fn sql(directory: &TempDir, statement: &'static str) {
    use sqlx::Connection as _;
    let path = directory.path().join("locks.db");
    let url = format!("sqlite://{}", path.display());
    let mut conn = sqlx::SqliteConnection::connect(&url).await.expect("a connection");
    sqlx::query(statement).execute(&mut conn).await.expect("it is done");
}
