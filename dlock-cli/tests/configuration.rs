//! All commands use the same configuration: variables, password file and namespace. They
//! work for a user with the least rights.

mod support;

use std::process::{Command, Stdio};

use dlock_testkit::redis::RedisServer;
use support::{json, on, output, printed, status, stderr_of, until};

const SECRET: &str = "hunter2-of-the-tests";

/// All commands, with short runs.
const COMMANDS: &[&[&str]] = &[
    &["health"],
    &["ls"],
    &["show", "k"],
    &["break", "k", "--yes"],
    &["watch", "--count", "1"],
    &["run", "k", "--", "true"],
    &["sale", "--stock", "20", "--buyers", "40", "--segments", "2"],
    &["bench", "lock", "--duration", "100ms", "--warmup", "0ms"],
    &["bench", "lock", "--duration", "100ms", "--warmup", "0ms", "--peer", "raw"],
    &["bench", "lock", "--duration", "100ms", "--warmup", "0ms", "--peer", "rslock"],
    &["bench", "lock", "--duration", "100ms", "--warmup", "0ms", "--processes", "2"],
    &["bench", "handoff", "--rounds", "5"],
    &["bench", "deduct", "--duration", "100ms", "--warmup", "0ms", "--mode", "global-lock"],
    &["bench", "deduct", "--duration", "100ms", "--warmup", "0ms", "--processes", "2"],
    &["bench", "held", "--locks", "10", "--duration", "100ms"],
];

#[test]
fn every_command_reads_the_password_from_the_file() {
    let Some(server) = RedisServer::with(&["--requirepass", SECRET]) else { return };
    let file = server.directory().join("password");
    std::fs::write(&file, format!("{SECRET}\n")).expect("the file");
    let on = |url: &str| {
        let mut command = on(url);
        command.env("DLOCK_CALL_TIMEOUT", "30s"); // a busy machine must not fail the test
        command
    };
    for command in COMMANDS {
        let mut with_file = on(&server.url());
        let done = output(with_file.env("DLOCK_PASSWORD_FILE", &file), command);
        assert_eq!(status(&done), 0, "{command:?}: {}", stderr_of(&done));
        assert!(
            !printed(&done).contains(SECRET) && !stderr_of(&done).contains(SECRET),
            "{command:?}"
        );
        let refused = output(&mut on(&server.url()), command);
        assert_eq!(status(&refused), 77, "{command:?}: {}", stderr_of(&refused));
        assert!(stderr_of(&refused).lines().count() <= 2, "{command:?}: {}", stderr_of(&refused));
    }
    // The file can also be given in the URL.
    let url = format!("{}?password_file={}", server.url(), file.display());
    for command in COMMANDS {
        let done = output(&mut on(&url), command);
        assert_eq!(status(&done), 0, "{command:?}: {}", stderr_of(&done));
    }
}

#[test]
fn no_command_line_has_the_password() {
    let Some(server) = RedisServer::with(&["--requirepass", SECRET]) else { return };
    let url = format!("redis://:{SECRET}@127.0.0.1:{}", server.port());
    let two = ["bench", "lock", "--processes", "2", "--duration", "2s", "--warmup", "0ms"];
    let mut bench = on(&url)
        .args(two)
        .stdout(Stdio::null())
        .stderr(Stdio::null())
        .spawn()
        .expect("dlock can be run");
    let lines = || {
        let parent = bench.id().to_string();
        let listed = Command::new("ps").args(["-o", "args=", "--ppid", &parent]).output();
        String::from_utf8_lossy(&listed.expect("ps can be run").stdout).into_owned()
    };
    until("its processes run", || lines().lines().count() == 2);
    assert!(!lines().contains(SECRET), "{}", lines());
    assert!(bench.wait().expect("its end").success());
}

#[test]
fn a_namespace_is_taken_literally() {
    for command in COMMANDS.iter().filter(|command| !command.contains(&"handoff")) {
        let mut given = command.to_vec();
        given.splice(1..1, ["--namespace", "a&ttl=1s"]);
        if command[0] == "bench" {
            given = command.to_vec();
            given.extend(["--namespace", "a&ttl=1s"]);
        }
        let refused = output(&mut on("memory://"), &given);
        assert!([64, 78].contains(&status(&refused)), "{given:?}: {}", stderr_of(&refused));
    }
    let Some(server) = RedisServer::start() else { return };
    let kept = ["run", "--namespace", "shop", "k", "--", "sleep", "30"];
    let mut holder = on(&server.url()).args(kept).spawn().expect("dlock can be run");
    let keys = || server.cli(&["--raw", "KEYS", "*}:l"]);
    until("it is held", || !keys().is_empty());
    assert_eq!(keys(), "dlock:2:{shop:k}:l");
    // The command line wins over a variable.
    let mut ls = on(&server.url());
    let seen =
        json(&output(ls.env("DLOCK_NAMESPACE", "other"), &["ls", "--json", "--namespace", "shop"]));
    assert_eq!(seen.len(), 1, "{seen:?}");
    holder.kill().expect("killed");
    holder.wait().expect("its end");
}

#[test]
fn loads_know_the_variables_too() {
    let held = ["bench", "held", "--locks", "1", "--duration", "100ms", "--json"];
    let line = json(&output(on("memory://").env("DLOCK_TTL", "7s"), &held));
    assert_eq!(line[0]["ttl_ms"], 7_000, "{line:?}");
    for load in [&["sale"][..], &["bench", "lock"], &["bench", "handoff"]] {
        let refused = output(on("memory://").env("DLOCK_TTL", "nonsense"), load);
        assert_eq!(status(&refused), 78, "{load:?}: {}", stderr_of(&refused));
        assert!(stderr_of(&refused).contains("DLOCK_"), "{}", stderr_of(&refused));
    }
}

#[test]
fn the_command_line_replaces_the_variable_with_all_its_options() {
    let mut health = on("redis://127.0.0.1:1?password_file=/nowhere&ttl=nonsense");
    let well = output(&mut health, &["health", "--url", "memory://"]);
    assert_eq!(status(&well), 0, "{}", stderr_of(&well));
}

#[test]
fn bad_input_is_64_before_anything_is_asked() {
    let nobody = "redis://127.0.0.1:1";
    let long = "x".repeat(600);
    for key in ["", &long, "a\tb"] {
        for command in ["show", "break", "inventory"] {
            let refused = output(&mut on(nobody), &[command, key]);
            assert_eq!(status(&refused), 64, "{command} {key:?}: {}", stderr_of(&refused));
            assert_eq!(stderr_of(&refused).lines().count(), 1, "{}", stderr_of(&refused));
        }
        let refused = output(&mut on(nobody), &["run", key, "--", "true"]);
        assert_eq!(status(&refused), 64, "run {key:?}: {}", stderr_of(&refused));
    }
    for wrong in [
        &["run", "--hold-at-least", "48h", "k", "--", "true"][..],
        &["bench", "lock", "--ttl", "0s"],
        &["bench", "lock", "--ttl", "48h"],
        &["bench", "lock", "--rate", "0"],
        &["bench", "deduct", "--duration", "0s"],
    ] {
        let refused = output(&mut on(nobody), wrong);
        assert_eq!(status(&refused), 64, "{wrong:?}: {}", stderr_of(&refused));
    }
}

#[test]
fn the_least_rights_are_enough_for_a_sale() {
    let Some(server) = RedisServer::start() else { return };
    let rights =
        [include_str!("../../docs/redis.acl"), include_str!("../../docs/redis-inventory.acl")];
    let rights = rights.iter().flat_map(|text| text.lines());
    let rights = rights.filter(|line| !line.starts_with('#')).flat_map(str::split_whitespace);
    let mut user = vec!["ACL", "SETUSER", "least", "reset", "on", ">secret"];
    user.extend(rights);
    assert_eq!(server.cli(&user), "OK");
    let url = format!("redis://least:secret@127.0.0.1:{}", server.port());
    for command in COMMANDS.iter().filter(|command| !command.contains(&"--peer")) {
        let done = output(&mut on(&url), command);
        assert_eq!(status(&done), 0, "{command:?}: {}", stderr_of(&done));
    }
}
