//! Every subcommand on the stores whose locks live by a session.
#![cfg(any(feature = "consul", feature = "zookeeper"))]

mod support;

use std::path::Path;
use std::process::{Child, Stdio};

use support::{json, on, output, printed, status, stderr_of, until};

/// `dlock run` with a program that stays; returns when that runs.
fn holder(url: &str, key: &str, ready: &Path) -> Child {
    let script = format!("touch {}; exec sleep 120", ready.display());
    let mut command = on(url);
    command.args(["run", "--wait", "30s", key, "--", "sh", "-c", &script]);
    let child = command.stdout(Stdio::null()).stderr(Stdio::null()).spawn().expect("it runs");
    until("the program runs", || ready.exists());
    child
}

fn every_subcommand(url: &str) {
    let scheme = url.split(':').next().expect("a scheme");
    let ready = format!("{}/ready-{scheme}-{}", env!("CARGO_TARGET_TMPDIR"), std::process::id());
    let run = |arguments: &[&str]| output(&mut on(url), arguments);
    assert_eq!(status(&run(&["health"])), 0, "{}", stderr_of(&run(&["health"])));
    let token = run(&["run", "job", "--", "sh", "-c", "echo $DLOCK_TOKEN"]);
    let token: u64 =
        printed(&token).trim().parse().unwrap_or_else(|_| panic!("{}", stderr_of(&token)));

    let mut held = holder(url, "job", Path::new(&ready));
    let busy = run(&["run", "--wait", "300ms", "job", "--", "true"]);
    assert_eq!(status(&busy), 75, "{}", stderr_of(&busy));
    let listed = json(&run(&["ls", "--json"]));
    assert_eq!(listed.len(), 1, "{listed:?}");
    assert_eq!(listed[0]["key"], "job");
    let shown = json(&run(&["show", "job", "--json"]));
    let holder = &shown[0]["holders"][0];
    assert_eq!(holder["mode"], "exclusive", "{shown:?}");
    assert!(holder["token"].as_u64().is_some_and(|later| later > token), "{shown:?}");
    assert!(printed(&run(&["show", "nobodys"])).contains("free"));
    let watched = json(&run(&["watch", "--json", "--count", "2", "--every", "50ms"]));
    assert_eq!(watched[1]["keys"][0]["key"], "job", "{watched:?}");

    let broken = run(&["break", "job", "--yes"]);
    assert_eq!(status(&broken), 0, "{}", stderr_of(&broken));
    assert_eq!(held.wait().expect("its status").code(), Some(76), "the lock was lost");
    let _ = std::fs::remove_file(&ready);
    let next = run(&["run", "--wait", "30s", "job", "--", "true"]);
    assert_eq!(status(&next), 0, "{}", stderr_of(&next));

    let bench = run(&["bench", "lock", "--duration", "1s", "--json"]);
    assert_eq!(status(&bench), 0, "{}", stderr_of(&bench));
    let stock = run(&["inventory", "phones"]);
    assert_ne!(status(&stock), 0);
    assert!(stderr_of(&stock).contains("cannot keep an inventory"), "{}", stderr_of(&stock));
    assert_ne!(status(&run(&["schema"])), 0);
    until("nothing is held", || json(&run(&["ls", "--json"])).is_empty());
}

#[cfg(feature = "consul")]
#[test]
fn consul() {
    let Some(server) = dlock_testkit::consul::ConsulServer::start() else { return };
    every_subcommand(&server.url());
}

#[cfg(feature = "zookeeper")]
#[test]
fn zookeeper() {
    let Some(server) = dlock_testkit::zookeeper::ZooKeeperServer::start() else { return };
    every_subcommand(&format!("{}?ttl=4s", server.url()));
}
