//! `dlock bench` and `dlock sale`: their output has the fields of `benches/schema.json`,
//! and no violation is found.

mod support;

use dlock_testkit::redis::RedisServer;
use dlock_testkit::topology::{ClusterServers, QuorumServers, SentinelServers};
use serde_json::Value;
use std::time::Duration;
use support::{dlock, json, on, output, status, stderr_of};

/// Runs a bench and returns the line that it printed, which must follow the schema.
fn measured(command: &mut std::process::Command, arguments: &[&str]) -> Value {
    let done = output(command, arguments);
    assert_eq!(status(&done), 0, "{}", stderr_of(&done));
    let lines = json(&done);
    assert_eq!(lines.len(), 1);
    assert_conforms(&lines[0]);
    lines[0].clone()
}

/// Checks that a line has the fields that the schema names for its workload.
fn assert_conforms(line: &Value) {
    let schema: Value = serde_json::from_str(dlock_bench::SCHEMA).expect("the schema");
    let kinds = schema["oneOf"].as_array().expect("its kinds");
    let is_its_kind = |kind: &&Value| match line.get("workload") {
        Some(workload) => kind["properties"]["workload"]["const"] == *workload,
        None => kind["properties"].get("method").is_some(),
    };
    let kind = kinds.iter().find(is_its_kind).expect("a workload of the schema");
    let fields = line.as_object().expect("an object");
    let known = kind["properties"].as_object().expect("its fields");
    for name in fields.keys() {
        assert!(known.contains_key(name), "{name} is not in the schema");
    }
    for name in kind["required"].as_array().expect("names") {
        assert!(fields.contains_key(name.as_str().expect("a name")), "{name} is missing");
    }
}

const SHORT: [&str; 5] = ["--json", "--duration", "300ms", "--warmup", "100ms"];

#[test]
fn locks_in_memory() {
    let line = measured(dlock().args(["bench", "lock", "--tasks", "20"]), &SHORT);
    assert_eq!((&line["backend"], &line["violations"]), (&"memory".into(), &0.into()));
    assert_eq!(line["peer"], Value::Null);
    assert!(line["operations"].as_u64() > Some(100), "{line}");
    let paced = ["bench", "lock", "--tasks", "4", "--keys", "4", "--rate", "200", "--hold", "1ms"];
    let line = measured(dlock().args(paced), &SHORT);
    let operations = line["operations"].as_u64().expect("a number");
    assert!((20..=80).contains(&operations), "about 60 of 200 a second: {line}");
}

#[test]
fn locks_at_a_majority_and_a_peer() {
    let Some(servers) = QuorumServers::unprepared(3, Duration::from_secs(60)) else { return };
    let prepared = output(&mut on(&servers.url()), &["schema"]);
    assert_eq!(status(&prepared), 0, "{}", stderr_of(&prepared));
    let health = output(&mut on(&servers.url()), &["health", "--json"]);
    assert_eq!(json(&health)[0]["servers"].as_array().map(Vec::len), Some(3));
    for peer in [&[][..], &["--peer", "rslock"]] {
        let bench = ["bench", "lock", "--tasks", "4", "--ttl", "10s"];
        let line = measured(on(&servers.url()).args(bench).args(peer), &SHORT);
        assert_eq!(line["backend"], "redlock");
        assert_eq!((&line["violations"], &line["errors"]), (&0.into(), &0.into()), "{line}");
    }
}

#[test]
fn locks_in_redis_by_several_processes_and_peers() {
    let Some(server) = RedisServer::start() else { return };
    let two = ["bench", "lock", "--tasks", "4", "--processes", "2"];
    let line = measured(on(&server.url()).args(two), &SHORT);
    assert_eq!((&line["violations"], &line["errors"]), (&0.into(), &0.into()), "{line}");
    assert_eq!(line["per_process"].as_array().map(Vec::len), Some(2));
    assert!(line["operations"].as_u64() > Some(10), "{line}");
    for peer in ["rslock", "raw"] {
        let one = ["bench", "lock", "--tasks", "4", "--keys", "4", "--peer", peer];
        let line = measured(on(&server.url()).args(one), &SHORT);
        assert_eq!((&line["peer"], &line["violations"]), (&peer.into(), &0.into()), "{line}");
    }
}

#[test]
fn locks_with_sentinels_and_in_a_cluster() {
    let Some(sentinels) = SentinelServers::with(1, 1) else { return };
    let Some(cluster) = ClusterServers::with(3, 0, &[]) else { return };
    let urls = [("redis+sentinel", sentinels.url()), ("redis+cluster", cluster.url())];
    for (backend, url) in urls {
        let two = ["bench", "lock", "--tasks", "4", "--processes", "2", "--keys", "3"];
        let line = measured(on(&url).args(two), &SHORT);
        assert_eq!((&line["backend"], &line["violations"]), (&backend.into(), &0.into()), "{line}");
        assert_eq!(line["errors"], 0, "{line}");
        assert!(line["operations"].as_u64() > Some(10), "{line}");
        let rounds = ["bench", "handoff", "--rounds", "20", "--json"];
        let line = measured(&mut on(&url), &rounds);
        assert_eq!((&line["violations"], &line["errors"]), (&0.into(), &0.into()), "{line}");
        let held = ["bench", "held", "--locks", "50", "--ttl", "1s", "--duration", "1s", "--json"];
        assert_eq!(measured(&mut on(&url), &held)["lost"], 0);
        for peer in ["rslock", "raw"] {
            let done = output(&mut on(&url), &["bench", "lock", "--peer", peer]);
            assert_ne!(status(&done), 0);
            assert!(stderr_of(&done).contains("lock at one Redis"), "{}", stderr_of(&done));
        }
        let healthy = output(&mut on(&url), &["health"]);
        assert_eq!(status(&healthy), 0, "{}", stderr_of(&healthy));
    }
}

/// One sale over many servers: in a cluster, and on servers that know nothing of each other.
#[test]
fn stock_is_taken_from_many_servers() {
    let Some(cluster) = ClusterServers::with(3, 0, &[]) else { return };
    let servers: Vec<_> = (0..3).filter_map(|_| RedisServer::start()).collect();
    let ports: Vec<_> = servers.iter().map(|it| format!("127.0.0.1:{}", it.port())).collect();
    let several = format!("redis://{}?homes=6", ports.join(","));
    for (url, backend) in [(cluster.url(), "redis+cluster"), (several, "redis")] {
        for mode in ["inventory", "inventory-idempotent", "leased"] {
            let deduct = ["bench", "deduct", "--tasks", "20", "--mode", mode];
            let line = measured(on(&url).args(deduct), &SHORT);
            assert_eq!((&line["backend"], &line["homes"]), (&backend.into(), &6.into()), "{line}");
            assert_eq!((&line["oversold"], &line["errors"]), (&0.into(), &0.into()), "{line}");
            assert!(line["operations"].as_u64() > Some(0), "{line}");
            assert_eq!(line["server_cpu"].as_array().map(Vec::len), Some(3), "{line}");
        }
        let two = ["bench", "deduct", "--tasks", "8", "--processes", "2"];
        let line = measured(on(&url).args(two), &SHORT);
        assert_eq!((&line["oversold"], &line["errors"]), (&0.into(), &0.into()), "{line}");
        let lines = sold_out(&mut on(&url));
        assert!(lines.iter().all(|line| line["homes"] == 6), "{lines:?}");
        let done = output(&mut on(&url), &["bench", "deduct", "--mode", "global-lock"]);
        assert_eq!(status(&done), 64);
        assert!(stderr_of(&done).contains("kept at one server"), "{}", stderr_of(&done));
        let inventory =
            |arguments: &[&str]| output(on(&url).args(["inventory", "phone"]), arguments);
        let made = inventory(&["create", "--stock", "600", "--homes", "6"]);
        assert_eq!(status(&made), 0, "{}", stderr_of(&made));
        let shown = inventory(&["--json"]);
        assert_eq!(json(&shown)[0]["available"], 600, "{}", stderr_of(&shown));
    }
    for server in &servers {
        // That an inventory was removed is known for some time.
        let left = server.cli(&["--raw", "KEYS", "*bench-*"]);
        let left: Vec<_> = left.lines().filter(|name| !name.contains("}:id")).collect();
        assert!(left.is_empty(), "left behind: {left:?}");
    }
}

/// A share of a core that was measured.
fn share(line: &Value, name: &str) -> bool {
    line[name].as_f64().is_some_and(|share| share > 0.0 && share < 64.0)
}

#[test]
fn semaphores_and_read_locks_with_their_checker() {
    let Some(server) = RedisServer::start() else { return };
    for url in ["memory://".to_owned(), server.url()] {
        let lock = ["bench", "lock", "--tasks", "12", "--hold", "5ms"];
        let line = measured(on(&url).args(lock).args(["--permits", "3"]), &SHORT);
        assert_eq!((&line["permits"], &line["shared"]), (&3.into(), &false.into()), "{line}");
        assert_eq!((&line["violations"], &line["errors"]), (&0.into(), &0.into()), "{line}");
        let operations = line["operations"].as_u64();
        assert!(operations > Some(0) && operations <= Some(180 + 3), "3 at a time: {line}");
        let line = measured(on(&url).args(lock).args(["--shared", "--fair"]), &SHORT);
        assert_eq!((&line["shared"], &line["fair"]), (&true.into(), &true.into()), "{line}");
        assert_eq!((&line["violations"], &line["errors"]), (&0.into(), &0.into()), "{line}");
        assert!(line["operations"].as_u64() > Some(0), "{line}");
        assert!(share(&line, "client_cpu"), "{line}");
        assert_eq!(share(&line, "server_cpu"), url != "memory://", "{line}");
    }
    let two = ["bench", "lock", "--tasks", "4", "--processes", "2", "--permits", "3"];
    let line = measured(on(&server.url()).args(two), &SHORT);
    assert_eq!((&line["violations"], &line["errors"]), (&0.into(), &0.into()), "{line}");
    assert!(share(&line, "client_cpu") && share(&line, "server_cpu"), "{line}");
    let two = ["bench", "lock", "--tasks", "4", "--processes", "2", "--shared"];
    let line = measured(on(&server.url()).args(two), &SHORT);
    assert_eq!((&line["violations"], &line["errors"]), (&0.into(), &0.into()), "{line}");
}

#[test]
fn the_processor_time_of_a_server_that_does_not_tell_is_null() {
    let Some(server) = RedisServer::start() else { return };
    server.cli(&["ACL", "SETUSER", "default", "-info"]);
    let line = measured(on(&server.url()).args(["bench", "lock", "--tasks", "2"]), &SHORT);
    assert_eq!((&line["server_cpu"], &line["errors"]), (&Value::Null, &0.into()), "{line}");
    let table = ["bench", "lock", "--tasks", "2", "--duration", "200ms", "--warmup", "0ms"];
    let shown = support::printed(&output(&mut dlock(), &table));
    let row = |name: &str| shown.lines().find(|line| line.contains(name)).map(str::to_owned);
    assert!(row("client_cpu").is_some_and(|row| row.contains("% of a core")), "{shown}");
    assert!(row("server_cpu").is_some_and(|row| row.ends_with('-')), "{shown}");
}

#[test]
fn a_bystander_tells_what_the_load_does_to_others() {
    let Some(server) = RedisServer::start() else { return };
    for processes in ["1", "2"] {
        let beside = ["bench", "lock", "--tasks", "4", "--bystander", "--processes", processes];
        let line = measured(on(&server.url()).args(beside), &SHORT);
        assert_eq!((&line["bystander_lost"], &line["errors"]), (&0.into(), &0.into()), "{line}");
        let (p50, p99) = (line["ping_p50_us"].as_f64(), line["ping_p99_us"].as_f64());
        assert!(p50 > Some(0.0) && p99 >= p50, "{line}");
    }
    // A server that stalls for longer than the ttl of 2 s takes the mutex away.
    let beside = ["bench", "lock", "--tasks", "4", "--bystander", "--duration", "5s"];
    let line = stalled(&server, "3000", &beside);
    assert!(line["bystander_lost"].as_u64() > Some(0), "{line}");
    assert!(line["ping_p99_us"].as_f64() > Some(1_000_000.0), "{line}");
}

#[test]
fn hand_overs_and_held_locks() {
    let Some(server) = RedisServer::start() else { return };
    let line = measured(&mut on(&server.url()), &["bench", "handoff", "--rounds", "20", "--json"]);
    assert!(
        line["p50_us"].as_f64() > Some(0.0) && line["rtt_p50_us"].as_f64() > Some(0.0),
        "{line}"
    );
    assert_eq!((&line["violations"], &line["errors"]), (&0.into(), &0.into()), "{line}");
    let held = ["bench", "held", "--locks", "300", "--ttl", "1s", "--duration", "2s", "--json"];
    let line = measured(&mut on(&server.url()), &held);
    assert_eq!(line["lost"], 0, "{line}");
    assert!(line["renewed"].as_u64() > Some(300), "{line}");
    assert!(line["server_commands_per_s"].as_f64() > Some(0.0), "{line}");
}

#[test]
fn stock_is_taken_in_every_mode() {
    let Some(server) = RedisServer::start() else { return };
    for mode in ["global-lock", "segmented-lock", "inventory", "inventory-idempotent"] {
        for url in ["memory://".to_owned(), server.url()] {
            let deduct = ["bench", "deduct", "--tasks", "20", "--segments", "4", "--mode", mode];
            let line = measured(on(&url).args(deduct), &SHORT);
            assert_eq!((&line["oversold"], &line["errors"]), (&0.into(), &0.into()), "{line}");
            assert!(line["operations"].as_u64() > Some(0), "{line}");
            let asked = line["round_trips"].as_f64() > Some(0.0);
            assert_eq!(asked, url != "memory://", "{line}");
        }
    }
}

#[test]
fn stock_is_taken_by_several_processes() {
    let Some(server) = RedisServer::start() else { return };
    for mode in ["global-lock", "segmented-lock", "inventory", "inventory-idempotent"] {
        let two = ["bench", "deduct", "--tasks", "8", "--segments", "4", "--processes", "2"];
        let line = measured(on(&server.url()).args(two).args(["--mode", mode]), &SHORT);
        assert_eq!((&line["oversold"], &line["errors"]), (&0.into(), &0.into()), "{line}");
        let parts = line["per_process"].as_array().expect("one for each");
        assert!(parts.len() == 2 && parts.iter().all(|part| part.as_u64() > Some(0)), "{line}");
        assert!(line["round_trips"].as_f64() > Some(0.0), "{line}");
    }
    let slow = ["bench", "deduct", "--tasks", "200", "--mode", "global-lock", "--hold", "100ms"];
    let began = std::time::Instant::now();
    let line = measured(on(&server.url()).args(slow), &SHORT);
    assert!(began.elapsed().as_secs() < 15, "200 tasks do not each have their turn: {line}");
    assert!(line["max_us"].as_f64() > Some(250_000.0), "those who wait to the end count: {line}");
}

/// Runs a bench whose server stops for a while as soon as it is under load.
fn stalled(server: &RedisServer, millis: &str, bench: &[&str]) -> Value {
    server.cli(&["CONFIG", "RESETSTAT"]);
    let mut command = on(&server.url());
    command.args(bench).args(["--json", "--warmup", "0ms"]).stdout(std::process::Stdio::piped());
    let running = command.spawn().expect("dlock can be run");
    support::until("it runs", || {
        let calls = server.cli(&["INFO", "commandstats"]);
        let calls = calls.lines().find_map(|line| line.strip_prefix("cmdstat_evalsha:calls="));
        let calls = calls.and_then(|rest| rest.split(',').next()?.parse::<u64>().ok());
        calls.is_some_and(|calls| calls > 20)
    });
    assert_eq!(server.cli(&["CLIENT", "PAUSE", millis, "ALL"]), "OK");
    let done = running.wait_with_output().expect("its end");
    let line = json(&done).pop().expect("a line");
    assert_conforms(&line);
    line
}

#[test]
fn a_stall_is_seen_in_the_latencies() {
    let Some(server) = RedisServer::start() else { return };
    // One second of four: without the correction these would be four slow operations among
    // hundreds.
    let paced = ["bench", "lock", "--tasks", "4", "--keys", "4", "--rate", "200"];
    let line = stalled(&server, "1000", &[&paced[..], &["--duration", "4s"]].concat());
    assert!(line["p99_us"].as_f64() > Some(500_000.0), "{line}");
    assert!(line["p50_us"].as_f64() < Some(500_000.0), "{line}");
    let paced = ["bench", "deduct", "--tasks", "4", "--rate", "200", "--duration", "4s"];
    let line = stalled(&server, "1000", &paced);
    assert!(line["p99_us"].as_f64() > Some(500_000.0), "{line}");
}

#[test]
fn a_stall_that_outlasts_the_run_is_seen_too() {
    let Some(server) = RedisServer::start() else { return };
    let fast = ["bench", "lock", "--tasks", "4", "--keys", "4", "--duration", "1500ms"];
    let line = stalled(&server, "6000", &fast);
    assert!(line["max_us"].as_f64() > Some(200_000.0), "{line}");
}

/// Runs a sale that must sell out exactly with all four methods.
fn sold_out(command: &mut std::process::Command) -> Vec<Value> {
    let small = ["sale", "--stock", "60", "--buyers", "200", "--segments", "4", "--json"];
    let sale = output(command, &small);
    assert_eq!(status(&sale), 0, "{}", stderr_of(&sale));
    assert_eq!(stderr_of(&sale), "", "no bars without a terminal");
    let lines = json(&sale);
    for line in &lines {
        assert_conforms(line);
        let figures = (&line["sold"], &line["left"], &line["oversold"]);
        assert_eq!(figures, (&60.into(), &0.into(), &0.into()), "{line}");
    }
    lines
}

#[test]
fn a_sale_sells_out_exactly() {
    let methods = ["global-lock", "segmented-lock", "inventory", "inventory-idempotent"];
    let lines = sold_out(&mut dlock());
    assert_eq!(lines.iter().map(|line| &line["method"]).collect::<Vec<_>>(), methods);
    let Some(server) = RedisServer::start() else { return };
    let lines = sold_out(&mut on(&server.url()));
    assert!(lines.iter().all(|line| line["round_trips"].as_f64() > Some(0.0)), "{lines:?}");
    let left = server.cli(&["--raw", "KEYS", "*"]);
    let is_lock = |name: &str| name.ends_with("}:l");
    assert!(!left.contains(":stock:") && !left.lines().any(is_lock), "something is left: {left}");
}

#[test]
fn a_sale_has_a_report() {
    let path = std::env::temp_dir().join(format!("dlock-report-{}.html", std::process::id()));
    let small = ["sale", "--stock", "50", "--buyers", "100", "--quantity", "1", "--report"];
    let sale = output(dlock().args(small), &[path.to_str().expect("a path")]);
    assert_eq!(status(&sale), 0, "{}", stderr_of(&sale));
    let table = support::printed(&sale);
    assert!(table.contains("inventory-idempotent") && table.contains("OVERSOLD"), "{table}");
    let page = std::fs::read_to_string(&path).expect("the report");
    let _ = std::fs::remove_file(&path);
    assert_eq!(page.matches("<svg").count(), 5);
    assert!(page.contains("prefers-color-scheme: dark") && page.contains("currentColor"));
    for outside in ["src=", "href=", "@import", "url("] {
        assert!(!page.contains(outside), "{outside}: it is not self-contained");
    }
}

#[test]
fn options_that_cannot_work_are_rejected() {
    let memory = output(&mut dlock(), &["bench", "lock", "--processes", "2"]);
    assert_eq!(status(&memory), 64);
    assert!(stderr_of(&memory).contains("redis://"), "{}", stderr_of(&memory));
    assert_eq!(status(&output(&mut dlock(), &["bench", "handoff"])), 64);
    assert_eq!(status(&output(&mut dlock(), &["bench", "lock", "--tasks", "0"])), 2);
    assert_eq!(status(&output(&mut dlock(), &["bench", "lock", "--permits", "0"])), 2);
    assert_eq!(status(&output(&mut dlock(), &["bench", "lock", "--permits", "2", "--shared"])), 2);
    assert_eq!(status(&output(&mut dlock(), &["bench", "lock", "--bystander"])), 64);
    let peer = output(&mut dlock(), &["bench", "lock", "--peer", "raw", "--permits", "2"]);
    assert_eq!(status(&peer), 64);
    assert!(stderr_of(&peer).contains("only have a mutex"), "{}", stderr_of(&peer));
    let nowhere = ["sale", "--stock", "10", "--buyers", "10", "--report", "/nowhere/report.html"];
    let unwritten = output(&mut dlock(), &nowhere);
    assert_eq!(status(&unwritten), 1);
    assert!(
        stderr_of(&unwritten).contains("cannot write /nowhere/report.html"),
        "{}",
        stderr_of(&unwritten)
    );
    assert_eq!(support::printed(&unwritten), "", "it is told before the sale");
    let down = output(&mut on("redis://127.0.0.1:1"), &["bench", "lock"]);
    assert_eq!(status(&down), 69, "{}", stderr_of(&down));
}

/// New nodes of a quorum do not vote for a time; nobody gets a lock, and nobody gets an error.
#[test]
fn a_bench_that_locks_nothing_fails_and_says_why() {
    let servers: Vec<_> = (0..3).filter_map(|_| RedisServer::start()).collect();
    let [one, two, three] = &servers[..] else { return };
    let url = format!(
        "redlock://127.0.0.1:{},127.0.0.1:{},127.0.0.1:{}",
        one.port(),
        two.port(),
        three.port()
    );
    let arguments = ["bench", "lock", "--tasks", "2", "--duration", "300ms", "--warmup", "0ms"];
    let done = output(&mut on(&url), &arguments);
    assert_eq!(status(&done), 69, "{}", stderr_of(&done));
    assert!(stderr_of(&done).contains("no lock was acquired"), "{}", stderr_of(&done));
}
