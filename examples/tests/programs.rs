//! Runs each example that ends by itself, in memory and on a real Redis.

mod support;

use dlock_testkit::redis::RedisServer;

/// Runs an example and returns what it printed.
fn run(program: &str, url: Option<&str>) -> String {
    let output = support::example(program, url).output().expect("the example can be run");
    let printed = String::from_utf8_lossy(&output.stdout).into_owned();
    let said = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{program} on {url:?}: {printed}{said}");
    printed
}

/// Runs an example in memory and on Redis.
fn on_each_backend(program: &str, check: impl Fn(&str)) {
    check(&run(program, None));
    if let Some(server) = RedisServer::start() {
        check(&run(program, Some(&server.url())));
    }
}

#[test]
fn quickstart() {
    on_each_backend(env!("CARGO_BIN_EXE_quickstart"), |printed| {
        assert!(printed.contains("paid, lock released"), "{printed}");
        assert!(printed.contains("still held by"), "{printed}");
    });
}

#[test]
fn scheduled_job() {
    on_each_backend(env!("CARGO_BIN_EXE_scheduled_job"), |printed| {
        assert_eq!(printed.matches("RUNS the report").count(), 1, "{printed}");
        assert_eq!(printed.matches("another node runs it").count(), 2, "{printed}");
    });
}

#[test]
fn fencing() {
    on_each_backend(env!("CARGO_BIN_EXE_fencing"), |printed| {
        assert!(printed.contains("the successor writes 100"), "{printed}");
        assert!(printed.contains("REJECTED"), "{printed}");
        assert!(printed.contains("the balance is 100"), "{printed}");
    });
}

#[test]
fn segmented_rows() {
    on_each_backend(env!("CARGO_BIN_EXE_segmented_rows"), |printed| {
        assert_eq!(printed, "500 sold, 0 left, 100 buyers too late\n");
    });
}

#[test]
fn testing() {
    let printed = run(env!("CARGO_BIN_EXE_testing"), None);
    assert!(printed.contains("all without a server"), "{printed}");
}

/// On each SQL database, which has the locks and the table of the shop.
#[cfg(feature = "sql")]
#[test]
fn segmented_columns() {
    use dlock_testkit::database_servers::{MariaDbServer, PostgresServer};

    let check = |url: Option<&str>| {
        let printed = run(env!("CARGO_BIN_EXE_segmented_columns"), url);
        assert_eq!(printed, "500 sold, 0 left, 100 buyers too late\n");
    };
    check(None); // a file of SQLite
    if let Some(server) = PostgresServer::start() {
        check(Some(&server.url()));
    }
    if let Some(server) = MariaDbServer::start() {
        check(Some(&server.url()));
    }
}
