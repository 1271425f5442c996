//! Short chaos runs, as CI has them. For longer ones:
//! `cargo run --release -p dlock-testkit --bin dlock-chaos -- --minutes 60`, and the same
//! with `--topology sentinel`, `cluster` and `redlock`; with `--features
//! postgres,mysql,sqlite` also `postgres`, `mariadb` and `sqlite`, and with `--features
//! zookeeper,etcd,consul` also those.

use std::io::{Read as _, Write as _};
use std::net::TcpStream;
use std::process::Command;
use std::sync::{Mutex, PoisonError};

use dlock_testkit::redis::RedisServer;
use serde_json::Value;

/// The runs have time limits, so there is one at a time.
static ONE_AT_A_TIME: Mutex<()> = Mutex::new(());

/// Runs it and returns its summary, in which there must be no violation. `None` if there
/// is no Redis.
fn without_a_violation(arguments: &[&str]) -> Option<Value> {
    RedisServer::start()?;
    Some(summary_of(arguments))
}

/// The same for a server that is there.
fn summary_of(arguments: &[&str]) -> Value {
    let _turn = ONE_AT_A_TIME.lock().unwrap_or_else(PoisonError::into_inner);
    let output = Command::new(env!("CARGO_BIN_EXE_dlock-chaos")).args(arguments).output();
    let output = output.expect("the program runs");
    let (said, log) =
        (String::from_utf8_lossy(&output.stdout), String::from_utf8_lossy(&output.stderr));
    println!("{said}");
    let summary: Value = serde_json::from_str(&said).unwrap_or_else(|_| panic!("{said}\n{log}"));
    assert!(output.status.success(), "{said}\n{log}");
    assert_eq!(summary["violations"].as_array().map(Vec::len), Some(0), "{said}");
    assert_eq!(summary["left_behind"], 0, "{said}");
    assert!(summary["checked"].as_u64() >= summary["cycles"].as_u64(), "{said}");
    summary
}

/// There was enough for the run to mean something.
#[track_caller]
fn assert_enough(summary: &Value, faults: u64, cycles: u64) {
    let number = |name: &str| summary[name].as_u64().unwrap_or(0);
    let is_enough = number("faults") >= faults && number("cycles") >= cycles;
    assert!(is_enough, "too little: {summary}");
}

#[test]
fn random_faults_of_one_server() {
    let arguments = ["--seconds", "30", "--faults-per-minute", "90", "--seed", "9"];
    let Some(summary) = without_a_violation(&arguments) else { return };
    assert_enough(&summary, 10, 2_000);
}

/// Failovers of all kinds, with Sentinels and in a cluster.
#[test]
fn random_faults_of_topologies() {
    for topology in ["sentinel", "cluster"] {
        let short = ["--seconds", "20", "--faults-per-minute", "60", "--seed", "1"];
        let small = ["--processes", "4", "--tasks", "8", "--slack", "500"];
        let arguments = [&["--topology", topology][..], &short, &small].concat();
        let Some(summary) = without_a_violation(&arguments) else { return };
        let number = |name: &str| summary[name].as_u64().unwrap_or(0);
        assert_eq!(summary["topology"], topology);
        assert!(number("failovers") >= 1 && number("cycles") >= 2_000, "too little: {summary}");
    }
}

/// Two of five nodes fail in all ways, and now and then a majority: nothing is held twice,
/// and nobody waits for the nodes that are out.
#[test]
fn random_faults_of_a_quorum() {
    let short = ["--seconds", "20", "--faults-per-minute", "60", "--seed", "3"];
    let small = ["--processes", "4", "--tasks", "8", "--slack", "500"];
    let arguments = [&["--topology", "redlock"][..], &short, &small].concat();
    let Some(summary) = without_a_violation(&arguments) else { return };
    assert_enough(&summary, 3, 500);
}

/// The databases that are compiled in; a busy machine is given time.
#[test]
#[cfg(all(feature = "mysql", feature = "postgres", feature = "sqlite"))]
fn random_faults_of_databases() {
    use dlock_testkit::database_servers::{MariaDbServer, PostgresServer};
    let installed = [
        ("postgres", PostgresServer::start().is_some()),
        ("mariadb", MariaDbServer::start().is_some()),
        ("sqlite", true),
    ];
    for (topology, _) in installed.into_iter().filter(|(_, is_installed)| *is_installed) {
        let short =
            ["--seconds", "15", "--faults-per-minute", "60", "--seed", "5", "--slack", "5000"];
        let small = ["--processes", "3", "--tasks", "4"];
        let arguments = [&["--topology", topology][..], &short, &small].concat();
        assert_enough(&summary_of(&arguments), 3, 500);
    }
}

/// Members of stores of sessions fail, and sessions are ended; a busy machine is given time.
#[test]
#[cfg(all(feature = "consul", feature = "etcd", feature = "zookeeper"))]
fn random_faults_of_stores_of_sessions() {
    use dlock_testkit::consul::ConsulServer;
    use dlock_testkit::etcd::EtcdServer;
    use dlock_testkit::zookeeper::ZooKeeperServer;
    let installed = [
        ("zookeeper", ZooKeeperServer::start().is_some()),
        ("etcd", EtcdServer::start().is_some()),
        ("consul", ConsulServer::start().is_some()),
    ];
    for (topology, _) in installed.into_iter().filter(|(_, is_installed)| *is_installed) {
        let short =
            ["--seconds", "20", "--faults-per-minute", "60", "--seed", "7", "--slack", "30000"];
        let small = ["--processes", "3", "--tasks", "4"];
        let arguments = [&["--topology", topology][..], &short, &small].concat();
        assert_enough(&summary_of(&arguments), 1, 50);
    }
}

/// The fault `DemotePrimary` is the real one: the server answers READONLY on the
/// connection that was open before, and loses nothing.
#[test]
fn a_demoted_server_keeps_its_connections_and_data() {
    let Some(server) = RedisServer::start() else { return };
    let mut connection = TcpStream::connect(("127.0.0.1", server.port())).expect("a connection");
    let mut ask = |command: &str| {
        connection.write_all(format!("{command}\r\n").as_bytes()).expect("it is open");
        let mut answer = [0; 200];
        let length = connection.read(&mut answer).expect("it is open");
        String::from_utf8_lossy(&answer[..length]).trim().to_owned()
    };
    assert_eq!(ask("SET a 1"), "+OK");
    server.cli(&["REPLICAOF", "127.0.0.1", "1"]);
    assert!(ask("SET a 2").starts_with("-READONLY"));
    server.cli(&["REPLICAOF", "NO", "ONE"]);
    assert_eq!(ask("GET a"), "$1\r\n1");
    assert_eq!(ask("SET a 2"), "+OK");
}

#[test]
fn faults_can_be_listed_and_chosen() {
    let chaos = |arguments: &[&str]| {
        let output = Command::new(env!("CARGO_BIN_EXE_dlock-chaos")).args(arguments).output();
        let output = output.expect("the program runs");
        let printed = String::from_utf8_lossy(&output.stdout).into_owned();
        (output.status.code(), printed + &String::from_utf8_lossy(&output.stderr))
    };
    let (status, list) = chaos(&["--list-faults"]);
    assert_eq!(status, Some(0));
    for fault in [
        "KillSentinel",
        "HalfMigratedSlot",
        "DemotePrimary",
        "HalfOpenNotices",
        "BreakLocks",
        "PanicInHooks",
        "FlushNodes",
        "KillMajority",
        "StopFollower",
    ] {
        assert!(list.lines().any(|line| line.starts_with(fault)), "{fault} in {list}");
    }
    let (status, said) = chaos(&["--seconds", "1", "--faults", "Cut,Flood"]);
    assert_eq!(status, Some(2));
    assert!(said.contains("Flood is not a fault"), "{said}");
    let (status, said) = chaos(&["--faults", "KillSentinel", "--topology", "cluster"]);
    assert_eq!(status, Some(2));
    assert!(said.contains("not a fault of the topology cluster"), "{said}");
    let (status, said) = chaos(&["--topology", "ring"]);
    assert_eq!(status, Some(2));
    assert!(said.contains("single, sentinel, cluster, redlock"), "{said}");
}
