//! Stock in SQL databases, by the command: sales, benches and the operators' commands.

#![cfg(all(feature = "mysql", feature = "postgres"))]

mod support;

use dlock_testkit::database_servers::{MariaDbServer, PostgresServer};
use support::{json, on, output, printed, status, stderr_of};

fn everything(url: &str) {
    let run = |arguments: &[&str]| {
        let done = output(&mut on(url), arguments);
        assert_eq!(status(&done), 0, "{arguments:?}: {}", stderr_of(&done));
        done
    };
    let missing = output(&mut on(url), &["inventory", "phone"]);
    assert_ne!(status(&missing), 0);
    assert!(stderr_of(&missing).contains("dlock schema"), "{}", stderr_of(&missing));
    run(&["schema"]);

    let create = ["create", "--stock", "10", "--segments", "2", "--per-buyer", "3"];
    run(&[&["inventory", "phone"], &create[..]].concat());
    run(&["inventory", "phone", "write-off", "4", "--id", "damage-1"]);
    run(&["inventory", "phone", "retention", "7200"]);
    let shown = json(&run(&["inventory", "phone", "audit", "--json"]));
    assert_eq!((&shown[0]["available"], &shown[0]["clean"]), (&6.into(), &true.into()));
    assert!(printed(&run(&["inventory", "phone"])).contains("available"));

    let small = ["--duration", "200ms", "--warmup", "0ms", "--json"];
    let deduct = ["bench", "deduct", "--tasks", "8", "--segments", "4"];
    for how in [
        ["--mode", "segmented-lock"],
        ["--mode", "inventory"],
        ["--mode", "inventory-idempotent"],
        ["--peer", "row"],
        ["--peer", "batched-row"],
    ] {
        let line = json(&run(&[&deduct[..], &how, &small].concat())).remove(0);
        assert_eq!((&line["oversold"], &line["errors"]), (&0.into(), &0.into()), "{line}");
        assert!(line["operations"].as_u64() > Some(0), "{line}");
    }
    let sale = ["sale", "--stock", "40", "--buyers", "60", "--segments", "4", "--think", "0ms"];
    for line in json(&run(&[&sale[..], &["--json"]].concat())) {
        let figures = (&line["left"], &line["oversold"]);
        assert_eq!(figures, (&0.into(), &0.into()), "{line}");
    }
}

#[test]
fn on_postgres() {
    let Some(server) = PostgresServer::start() else { return };
    everything(&server.url());
    let left = "SELECT count(*) FROM dlock_stock_record \
         WHERE home NOT IN (SELECT home FROM dlock_stock WHERE id LIKE '%/phone')";
    assert_eq!(server.sql(left), "0", "the runs remove what they made");
}

#[test]
fn on_mariadb() {
    let Some(server) = MariaDbServer::start() else { return };
    everything(&server.url());
}

#[cfg(feature = "sqlite")]
#[test]
fn on_sqlite() {
    let directory = tempfile::TempDir::new().expect("a directory");
    everything(&format!("sqlite://{}/stock.db", directory.path().display()));
}
