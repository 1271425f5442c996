//! The conformance suite on a real MariaDB, and tests of what only MariaDB does.

use dlock::backend::sql::MySql;
use dlock::{Dlock, ErrorKind};
use dlock_testkit::conformance::Suite;
use dlock_testkit::database_servers::MariaDbServer;

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn conformance() {
    let Some(server) = MariaDbServer::start() else { return };
    let url = format!("{}?migrate=true", server.url());
    Suite::new(move || MySql::new(&url, "test").expect("a backend")).run().await;
}

/// Another client makes the tables, one statement after the other. Nobody takes them for
/// complete before the last one.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn tables_that_are_being_made_are_not_used() {
    let Some(server) = MariaDbServer::start() else { return };
    let lines = MySql::SCHEMA.lines().map(|line| line.split("--").next().unwrap_or_default());
    let schema: String = lines.collect::<Vec<_>>().join("\n");
    let statements = schema.split(';').filter(|statement| !statement.trim().is_empty());
    for statement in statements {
        let error = Dlock::connect(&server.url()).await.expect_err("they are not complete");
        assert_eq!(error.kind(), ErrorKind::Config, "{error}");
        server.sql(&format!("USE dlock; {statement}"));
    }
    let dlock = Dlock::connect(&server.url()).await.expect("they are complete");
    drop(dlock.mutex("a").lock().await.expect("the lock"));
}
