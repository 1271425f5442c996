//! `dlock sale` and `dlock bench` that are ended by a signal, or killed.

mod support;

use std::process::{Child, Command, Stdio};

use dlock_testkit::redis::RedisServer;
use support::{on, until};

/// The keys in the server, without tokens, which expire a second later.
fn keys(server: &RedisServer) -> Vec<String> {
    server.keys().into_iter().filter(|name| !name.ends_with("}:lt")).collect()
}

fn started(server: &RedisServer, arguments: &[&str]) -> Child {
    let mut command = on(&server.url());
    command.args(arguments).stdout(Stdio::null()).stderr(Stdio::null());
    command.spawn().expect("dlock can be run")
}

fn send(child: &Child, signal: &str) {
    let sent = Command::new("kill").args([signal, &child.id().to_string()]).status();
    assert!(sent.expect("kill can be run").success());
}

/// One buyer at a time, so that each method takes about a second.
const SALE: [&str; 9] =
    ["sale", "--stock", "50", "--quantity", "1", "--at-once", "1", "--think", "20ms"];

#[test]
fn a_sale_that_is_interrupted_leaves_nothing() {
    let Some(server) = RedisServer::start() else { return };
    for (signal, code, its) in [
        ("-INT", 130, ":global-lock:stock:"),
        ("-TERM", 143, ":segmented-lock:stock:"),
        ("-INT", 130, ":inventory}:"),
        ("-TERM", 143, ":inventory-idempotent}:"),
    ] {
        let mut sale = started(&server, &SALE);
        until("its method began", || keys(&server).iter().any(|key| key.contains(its)));
        send(&sale, signal);
        assert_eq!(sale.wait().expect("its end").code(), Some(code), "{its}");
        assert_eq!(keys(&server), [""; 0], "{signal} during {its}");
    }
}

#[test]
fn a_sale_in_full_swing_that_is_interrupted_leaves_nothing() {
    let Some(server) = RedisServer::start() else { return };
    let long = ["sale", "--stock", "1000000", "--buyers", "1000000"];
    let mut sale = started(&server, &long);
    until("a lock is held", || keys(&server).iter().any(|key| key.ends_with("}:l")));
    send(&sale, "-INT");
    assert_eq!(sale.wait().expect("its end").code(), Some(130));
    assert_eq!(keys(&server), [""; 0]);
}

#[test]
fn what_a_killed_sale_leaves_has_an_end() {
    let Some(server) = RedisServer::start() else { return };
    for its in [":global-lock:stock:", ":segmented-lock:stock:", ":inventory-idempotent}:ix"] {
        let mut sale = started(&server, &SALE);
        let ends_in = |key: &str| server.cli(&["PTTL", key]).parse::<i64>().expect("a number");
        until("its method began", || {
            keys(&server).iter().any(|key| key.contains(its) && ends_in(key) > 0)
        });
        sale.kill().expect("killed");
        sale.wait().expect("its end");
        for key in keys(&server) {
            assert!(key.starts_with("dlock:2:{default:"), "{key}");
            assert!(ends_in(&key) > 0, "{key} stays for ever");
        }
        server.cli(&["FLUSHALL"]);
    }
}

#[test]
fn a_bench_that_is_interrupted_gives_its_locks_back() {
    let Some(server) = RedisServer::start() else { return };
    for bench in [
        &["lock", "--tasks", "4", "--duration", "60s"][..],
        &["lock", "--tasks", "4", "--duration", "60s", "--processes", "3"],
        &["deduct", "--duration", "60s", "--processes", "2", "--mode", "segmented-lock"],
        &["deduct", "--duration", "60s", "--processes", "2", "--mode", "inventory-idempotent"],
        &["handoff", "--rounds", "100000"],
        &["held", "--locks", "200", "--duration", "60s"],
    ] {
        let mut running = started(&server, &[&["bench"], bench].concat());
        until("it runs", || !keys(&server).is_empty());
        send(&running, "-TERM");
        assert_eq!(running.wait().expect("its end").code(), Some(143), "{bench:?}");
        until("all is given back", || keys(&server).is_empty());
        let clients = || server.cli(&["CLIENT", "LIST"]);
        until("its processes ended", || clients().lines().count() == 1);
    }
}

#[test]
fn the_processes_of_a_killed_bench_end() {
    let Some(server) = RedisServer::start() else { return };
    let two = ["bench", "lock", "--tasks", "4", "--duration", "60s", "--processes", "2"];
    let mut running = started(&server, &two);
    until("it runs", || !keys(&server).is_empty());
    running.kill().expect("killed");
    running.wait().expect("its end");
    let clients = || server.cli(&["CLIENT", "LIST"]);
    until("its processes ended", || clients().lines().count() == 1);
}
