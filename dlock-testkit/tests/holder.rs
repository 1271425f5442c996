//! The locks of a process that ends by itself: by returning from main, or by
//! `std::process::exit` after guard and client were dropped. What a process still holds
//! when it calls `exit` is free after its ttl only, since nothing is dropped then.

use std::time::Duration;

use dlock_testkit::process::ChildProcess;
use dlock_testkit::redis::RedisServer;

const LONG: &str = "60000";

fn start(server: &RedisServer) -> ChildProcess {
    let mut process = ChildProcess::start(env!("CARGO_BIN_EXE_dlock-holder"), &[&server.url()]);
    process.wait_for_line("ready", |line| line.contains("ready").then_some(()));
    process
}

#[test]
fn main_that_returns_releases_what_it_holds() {
    let Some(server) = RedisServer::start() else { return };
    for round in 0..10 {
        let mut process = start(&server);
        process.send_line(&format!("lock a {LONG}"));
        process.wait_for_line("granted", |line| line.contains("granted").then_some(()));
        process.send_line("return");
        assert!(process.wait_for_exit(Duration::from_secs(10)), "round {round}");
        assert_eq!(server.cli(&["EXISTS", "dlock:2:{test:a}:l"]), "0", "round {round}");
    }
}

#[test]
fn exit_after_the_client_was_dropped_leaves_nothing() {
    let Some(server) = RedisServer::start() else { return };
    for round in 0..10 {
        let mut process = start(&server);
        process.send_line(&format!("exit a {LONG}"));
        assert!(process.wait_for_exit(Duration::from_secs(10)), "round {round}");
        assert_eq!(server.cli(&["EXISTS", "dlock:2:{test:a}:l"]), "0", "round {round}");
    }
}
