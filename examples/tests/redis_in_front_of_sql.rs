//! The recipe survives kill -9 of its worker and of both servers.

#![cfg(feature = "sql")]

mod support;

use std::process::{Child, Command, Stdio};
use std::time::Duration;

use dlock_testkit::database_servers::PostgresServer;
use dlock_testkit::redis::RedisServer;

fn program(redis: &RedisServer, shop: &PostgresServer, arguments: &[&str]) -> Command {
    let program = env!("CARGO_BIN_EXE_redis_in_front_of_sql");
    let mut command = support::example(program, Some(&redis.url()));
    command.env("SHOP_URL", shop.url()).args(arguments);
    command
}

fn run(redis: &RedisServer, shop: &PostgresServer, arguments: &[&str]) -> String {
    let output = program(redis, shop, arguments).output().expect("it can be run");
    let said = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{arguments:?}: {said}");
    String::from_utf8_lossy(&output.stdout).trim().to_owned()
}

fn start(redis: &RedisServer, shop: &PostgresServer, arguments: &[&str]) -> Child {
    let mut command = program(redis, shop, arguments);
    command.stdout(Stdio::piped()).stderr(Stdio::null()).spawn().expect("it can be run")
}

fn kill(mut process: Child) {
    process.kill().expect("it is killed with SIGKILL");
    process.wait().expect("its end");
}

#[test]
fn nothing_is_lost_or_copied_twice() {
    let options = ["--appendonly", "yes", "--appendfsync", "always"];
    let Some(mut redis) = RedisServer::with(&options) else { return };
    let Some(mut shop) = PostgresServer::start() else { return };
    run(&redis, &shop, &["create"]);
    let seller = start(&redis, &shop, &["sell", "3000"]);
    for round in 0..3 {
        let worker = start(&redis, &shop, &["copy"]);
        std::thread::sleep(Duration::from_millis(400));
        match round {
            0 => {}
            1 => shop.restart(),
            _ => redis.restart(),
        }
        std::thread::sleep(Duration::from_millis(400));
        kill(worker);
    }
    let sold = seller.wait_with_output().expect("it ends");
    assert_eq!(String::from_utf8_lossy(&sold.stdout).trim(), "3000 sold");
    run(&redis, &shop, &["copy-once"]);
    let reconciled = run(&redis, &shop, &["reconcile"]);
    assert_eq!(reconciled, "3000 sold by Redis, 3000 in the database");
    let twice = "SELECT count(*) FROM (SELECT operation FROM sale_entry \
         GROUP BY operation HAVING count(*) > 1) AS twice";
    assert_eq!(shop.sql(twice), "0");
}
