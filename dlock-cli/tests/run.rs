//! `dlock run` on a real Redis.

mod support;

use std::io::{BufRead as _, BufReader};
use std::process::{Child, Command, Stdio};

use dlock::Dlock;
use dlock_testkit::redis::RedisServer;
use support::{PROGRAM, on, output, printed, status, stderr_of, until};

/// Starts `dlock run` with a program that prints `ready`, and waits for that line.
fn started(url: &str, arguments: &[&str]) -> Child {
    let mut child = on(url)
        .args(arguments)
        .stdin(Stdio::null())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .expect("dlock can be run");
    let mut line = String::new();
    let stdout = child.stdout.as_mut().expect("its output");
    BufReader::new(stdout).read_line(&mut line).expect("a line");
    assert_eq!(line, "ready\n");
    child
}

fn signal(child: &Child, signal: &str) {
    let sent = Command::new("kill").args([signal, &child.id().to_string()]).status();
    assert!(sent.expect("kill can be run").success());
}

#[test]
fn the_program_knows_key_and_token_and_its_status_comes_back() {
    let Some(server) = RedisServer::start() else { return };
    let told = output(
        &mut on(&server.url()),
        &["run", "a key", "--", "sh", "-c", "echo $DLOCK_KEY $DLOCK_TOKEN; exit 7"],
    );
    assert_eq!(status(&told), 7, "{}", stderr_of(&told));
    let text = printed(&told);
    let token = text.trim().strip_prefix("a key ").expect("the key");
    let first: u64 = token.parse().expect("the token");

    let again = ["run", "a key", "--", "sh", "-c", "echo $DLOCK_TOKEN; kill -9 $$"];
    let killed = output(&mut on(&server.url()), &again);
    assert_eq!(status(&killed), 128 + 9);
    let second: u64 = printed(&killed).trim().parse().expect("the token");
    assert!(second > first, "{second} after {first}");

    let gone = output(&mut on(&server.url()), &["run", "k", "--", "no-such-program-here"]);
    assert_eq!(status(&gone), 127);
    assert!(stderr_of(&gone).contains("no-such-program-here"), "{}", stderr_of(&gone));
    assert_eq!(server.cli(&["--raw", "KEYS", "*}:l"]), "", "nothing is left");
}

#[tokio::test(flavor = "multi_thread")]
async fn busy_is_75_and_names_the_holder() {
    let Some(server) = RedisServer::start() else { return };
    let dlock = Dlock::builder().url(&server.url()).client_name("somebody").connect().await;
    let dlock = dlock.expect("a client");
    let guard = dlock.mutex("k").lock().await.expect("the lock");
    for wait in ["0s", "50ms"] {
        let busy =
            output(&mut on(&server.url()), &["run", "-q", "--wait", wait, "k", "--", "true"]);
        assert_eq!(status(&busy), 75);
        assert!(stderr_of(&busy).contains("somebody"), "{}", stderr_of(&busy));
        assert_eq!(stderr_of(&busy).lines().count(), 1, "{}", stderr_of(&busy));
        assert!(stderr_of(&busy).contains("raise --wait"), "{}", stderr_of(&busy));
    }
    drop(guard);
    let free = output(&mut on(&server.url()), &["run", "--wait", "30s", "k", "--", "true"]);
    assert_eq!(status(&free), 0, "{}", stderr_of(&free));
}

#[test]
fn two_programs_never_overlap() {
    let Some(server) = RedisServer::start() else { return };
    // `mkdir` fails if another program is inside.
    let directory = server.socket().with_file_name("inside");
    let body = format!("mkdir {0} && sleep 0.02 && rmdir {0}", directory.display());
    let runs: Vec<Child> = (0..6)
        .map(|_| {
            on(&server.url())
                .args(["run", "--wait", "unlimited", "k", "--", "sh", "-c", &body])
                .spawn()
                .expect("dlock can be run")
        })
        .collect();
    for mut run in runs {
        assert!(run.wait().expect("its end").success());
    }
}

#[test]
fn signals_are_passed_on() {
    let Some(server) = RedisServer::start() else { return };
    let script = "trap 'exit 9' TERM; echo ready; while :; do sleep 0.05; done";
    let mut child = started(&server.url(), &["run", "k", "--", "sh", "-c", script]);
    signal(&child, "-TERM");
    assert_eq!(child.wait().expect("its end").code(), Some(9));
    assert_eq!(server.cli(&["--raw", "KEYS", "*}:l"]), "", "nothing is left");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_signal_while_waiting_leaves_no_place_in_the_queue() {
    let Some(server) = RedisServer::start() else { return };
    let dlock = Dlock::connect(&server.url()).await.expect("a client");
    let guard = dlock.mutex("k").lock().await.expect("the lock");
    let mut waiting = on(&server.url())
        .args(["run", "--wait", "unlimited", "k", "--", "true"])
        .stderr(Stdio::null())
        .spawn()
        .expect("dlock can be run");
    let waiters = || async { dlock.inspect("k").await.expect("a look").waiters.len() };
    while waiters().await == 0 {
        tokio::time::sleep(std::time::Duration::from_millis(10)).await;
    }
    signal(&waiting, "-INT");
    assert_eq!(waiting.wait().expect("its end").code(), Some(128 + 2));
    assert_eq!(waiters().await, 0);
    drop(guard);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_lost_lock_ends_the_program_with_76() {
    let Some(server) = RedisServer::start() else { return };
    let dlock = Dlock::connect(&server.url()).await.expect("a client");
    let ended = server.socket().with_file_name("ended");
    let script = format!(
        "trap 'touch {}; exit 0' TERM; echo ready; while :; do sleep 0.05; done",
        ended.display()
    );
    let mut child = started(&server.url(), &["run", "k", "--", "sh", "-c", &script]);
    assert_eq!(dlock.break_lock("k").await.expect("broken"), 1);
    assert_eq!(child.wait().expect("its end").code(), Some(76));
    assert!(ended.exists(), "the program was told by SIGTERM");

    let stubborn = "trap '' TERM; echo ready; while :; do sleep 0.05; done";
    let arguments = ["run", "--kill-after", "100ms", "k", "--", "sh", "-c", stubborn];
    let mut child = started(&server.url(), &arguments);
    assert_eq!(dlock.break_lock("k").await.expect("broken"), 1);
    assert_eq!(child.wait().expect("its end").code(), Some(76));

    let go = server.socket().with_file_name("go");
    let script =
        format!("echo ready; while ! [ -e {} ]; do sleep 0.05; done; exit 3", go.display());
    let mut child =
        started(&server.url(), &["run", "-q", "--on-lost", "warn", "k", "--", "sh", "-c", &script]);
    assert_eq!(dlock.break_lock("k").await.expect("broken"), 1);
    let mut line = String::new();
    let stderr = child.stderr.take().expect("its words");
    BufReader::new(stderr).read_line(&mut line).expect("a line");
    assert!(line.contains("was lost"), "{line}");
    std::fs::write(&go, "").expect("the file");
    assert_eq!(child.wait().expect("its end").code(), Some(3), "its own status");
}

/// Whether no process has exactly this command line.
fn none_runs(command_line: &str) -> bool {
    let listed = Command::new("ps").args(["-eo", "args="]).output().expect("ps can be run");
    !String::from_utf8_lossy(&listed.stdout).lines().any(|line| line == command_line)
}

#[tokio::test(flavor = "multi_thread")]
async fn what_the_program_started_ends_with_it() {
    let Some(server) = RedisServer::start() else { return };
    let dlock = Dlock::connect(&server.url()).await.expect("a client");
    // Sleep times that no other process uses.
    let nap = |part: u32| format!("sleep 4{part}{}", server.port());
    let (lost, told, stubborn) = (nap(1), nap(2), nap(3));

    let script = format!("{lost} & echo ready; wait");
    let mut child = started(&server.url(), &["run", "k", "--", "sh", "-c", &script]);
    assert!(!none_runs(&lost));
    assert_eq!(dlock.break_lock("k").await.expect("broken"), 1);
    assert_eq!(child.wait().expect("its end").code(), Some(76));
    assert!(none_runs(&lost), "what it started goes on without the lock");

    let script = format!("{told} & echo ready; wait");
    let mut child = started(&server.url(), &["run", "k", "--", "sh", "-c", &script]);
    signal(&child, "-TERM");
    assert_eq!(child.wait().expect("its end").code(), Some(128 + 15));
    until("what it started ends by the signal too", || none_runs(&told));

    // The program ends by SIGTERM, but the process that it started does not.
    let script = format!("(trap '' TERM; exec {stubborn}) & echo ready; wait");
    let arguments = ["run", "--kill-after", "300ms", "k", "--", "sh", "-c", &script];
    let mut child = started(&server.url(), &arguments);
    until("it runs", || !none_runs(&stubborn));
    assert_eq!(dlock.break_lock("k").await.expect("broken"), 1);
    assert_eq!(child.wait().expect("its end").code(), Some(76));
    until("what it started is killed", || none_runs(&stubborn));
}

#[test]
fn a_signal_that_is_to_be_ignored_is_not_passed_on() {
    let Some(server) = RedisServer::start() else { return };
    let script = format!("trap '' HUP; exec {PROGRAM} run k -- sh -c 'echo ready; read x; exit 5'");
    let mut shell = Command::new("sh");
    shell.args(["-c", &script]).env("DLOCK_URL", server.url());
    let mut child =
        shell.stdin(Stdio::piped()).stdout(Stdio::piped()).spawn().expect("sh can be run");
    let mut line = String::new();
    let stdout = child.stdout.as_mut().expect("its output");
    BufReader::new(stdout).read_line(&mut line).expect("a line");
    signal(&child, "-HUP");
    std::io::Write::write_all(child.stdin.as_mut().expect("its input"), b"\n").expect("written");
    assert_eq!(child.wait().expect("its end").code(), Some(5), "as under nohup");
}

#[test]
fn a_job_does_not_run_again_too_soon() {
    let Some(server) = RedisServer::start() else { return };
    let job = ["run", "--wait", "0s", "--hold-at-least", "1h", "job", "--", "true"];
    assert_eq!(status(&output(&mut on(&server.url()), &job)), 0);
    assert_eq!(status(&output(&mut on(&server.url()), &job)), 75);
    assert_eq!(status(&output(&mut on(&server.url()), &["break", "job", "--yes"])), 0);
    assert_eq!(status(&output(&mut on(&server.url()), &job)), 0);
}

#[test]
fn a_server_that_is_not_there_is_69_without_secrets() {
    let url = "redis://user:hunter2@127.0.0.1:1";
    let run = output(&mut on(url), &["run", "k", "--", "true"]);
    assert_eq!(status(&run), 69, "{}", stderr_of(&run));
    assert!(!stderr_of(&run).contains("hunter2"), "{}", stderr_of(&run));
    let lines = stderr_of(&run).lines().count();
    assert!((1..=2).contains(&lines), "{}", stderr_of(&run));
}

#[test]
fn a_killed_dlock_leaves_the_lock_to_its_ttl() {
    let Some(server) = RedisServer::start() else { return };
    let arguments = ["run", "--ttl", "500ms", "k", "--", "sh", "-c", "echo ready; sleep 2"];
    let mut child = started(&server.url(), &arguments);
    child.kill().expect("killed");
    child.wait().expect("its end");
    until("free", || {
        status(&output(&mut on(&server.url()), &["run", "--wait", "0s", "k", "--", "true"])) == 0
    });
}
