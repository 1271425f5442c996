//! `dlock` of this build and of an earlier one, at the same time on one Redis, as in a
//! rolling deploy. `scripts/previous-build` builds the earlier one.

mod support;

use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};

use dlock_testkit::redis::RedisServer;
use dlock_testkit::servers::{cache, skipped};
use support::{PROGRAM, dlock_of, json, output, status, stderr_of, until};

/// The server, and both programs; `None` if one of them is missing.
fn both() -> Option<(RedisServer, [PathBuf; 2])> {
    let previous = cache().join("dlock-previous");
    if !previous.exists() {
        // A shallow clone cannot build it, so this is no failure anywhere.
        skipped("there is no previous build of dlock; scripts/previous-build makes it");
        return None;
    }
    Some((RedisServer::start()?, [previous, PROGRAM.into()]))
}

fn on(program: &Path, server: &RedisServer) -> Command {
    let mut command = dlock_of(program);
    command.env("DLOCK_URL", server.url());
    command
}

/// What a program shows of the key `k`.
fn shown(program: &Path, server: &RedisServer) -> serde_json::Value {
    let shown = output(&mut on(program, server), &["show", "k", "--json"]);
    assert_eq!(status(&shown), 0, "{}", stderr_of(&shown));
    json(&shown).remove(0)
}

fn pids(list: &serde_json::Value) -> Vec<u64> {
    let list = list.as_array().expect("a list");
    list.iter().map(|one| one["pid"].as_u64().expect("a process")).collect()
}

fn run(program: &Path, server: &RedisServer, script: &str) -> Child {
    let mut command = on(program, server);
    command.args(["run", "--wait", "unlimited", "k", "--", "sh", "-c", script]);
    command.stdin(Stdio::null()).spawn().expect("dlock can be run")
}

#[test]
fn they_exclude_each_other() {
    let Some((server, programs)) = both() else { return };
    // `mkdir` fails if another program is inside.
    let (inside, tokens) = (server.directory().join("inside"), server.directory().join("tokens"));
    let body = format!(
        "mkdir {0} && echo $DLOCK_TOKEN >>{1} && sleep 0.02 && rmdir {0}",
        inside.display(),
        tokens.display()
    );
    let runs: Vec<Child> =
        (0..12).map(|number| run(&programs[number % 2], &server, &body)).collect();
    for (number, mut run) in runs.into_iter().enumerate() {
        assert!(run.wait().expect("its end").success(), "{:?}", programs[number % 2]);
    }
    let tokens = std::fs::read_to_string(tokens).expect("the tokens");
    let tokens: Vec<u64> = tokens.lines().map(|line| line.parse().expect("a token")).collect();
    assert_eq!(tokens.len(), 12);
    assert!(tokens.is_sorted_by(|before, after| before < after), "{tokens:?}");
}

#[test]
fn they_see_each_other_and_hand_over() {
    let Some((server, programs)) = both() else { return };
    let published = || {
        let stats = server.cli(&["INFO", "commandstats"]);
        let calls = stats.lines().find_map(|line| line.strip_prefix("cmdstat_publish:calls="));
        calls.map_or(0, |rest| rest.split(',').next().and_then(|it| it.parse().ok()).expect("it"))
    };
    for (holder, waiter) in [(0, 1), (1, 0)] {
        let go = server.directory().join(format!("go-{holder}"));
        let body = format!("until [ -e {} ]; do sleep 0.01; done", go.display());
        let mut held = run(&programs[holder], &server, &body);
        for program in &programs {
            until("its holder is seen", || {
                pids(&shown(program, &server)["holders"]) == [u64::from(held.id())]
            });
            let busy =
                output(&mut on(program, &server), &["run", "--wait", "0s", "k", "--", "true"]);
            assert_eq!(status(&busy), 75, "{}", stderr_of(&busy));
        }
        let mut waiting = run(&programs[waiter], &server, "true");
        for program in &programs {
            until("its waiter is seen", || {
                pids(&shown(program, &server)["waiters"]) == [u64::from(waiting.id())]
            });
        }
        let before: u64 = published();
        std::fs::write(&go, "").expect("the file");
        assert!(held.wait().expect("its end").success());
        assert!(waiting.wait().expect("its end").success());
        assert!(published() > before, "the release hands the lock over");
        until("nothing is left", || server.keys().iter().all(|key| !key.ends_with("}:l")));
    }
}
