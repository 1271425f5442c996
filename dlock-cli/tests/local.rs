//! With `--local` the commands lock between the processes of this machine, in a file. Without
//! any store they do nothing.

mod support;

use std::process::Command;
#[cfg(feature = "sqlite")]
use std::process::{Child, Stdio};

use support::{dlock, output, printed, status, stderr_of};
#[cfg(feature = "sqlite")]
use support::{json, until};
use tempfile::TempDir;

fn local(state: &TempDir) -> Command {
    let mut command = dlock();
    command.env("XDG_STATE_HOME", state.path()).arg("--local");
    command
}

#[cfg(feature = "sqlite")]
fn hold(state: &TempDir, options: &[&str]) -> Child {
    let mut command = local(state);
    command.arg("run").args(options).args(["nightly", "--", "sleep", "10"]);
    command.stdin(Stdio::null()).stdout(Stdio::null()).spawn().expect("dlock can be run")
}

#[cfg(feature = "sqlite")]
fn holders(state: &TempDir) -> usize {
    json(&output(&mut local(state), &["ls", "--json"])).len()
}

#[cfg(feature = "sqlite")]
#[test]
fn a_program_runs_under_a_lock_of_this_machine() {
    let state = TempDir::new().expect("a directory");
    let file = state.path().join("dlock/locks.db");
    let nothing = output(&mut local(&state), &["ls"]);
    assert_eq!(status(&nothing), 0, "{}", stderr_of(&nothing));
    let named = format!("sqlite://{}", file.display());
    assert!(printed(&nothing).contains(&named), "{}", printed(&nothing));
    let done =
        output(&mut local(&state), &["run", "nightly", "--", "sh", "-c", "echo $DLOCK_TOKEN"]);
    assert_eq!(status(&done), 0, "{}", stderr_of(&done));
    assert!(printed(&done).trim().parse::<u64>().is_ok_and(|token| token > 0), "{done:?}");
    assert!(stderr_of(&done).contains(&named), "{}", stderr_of(&done));
    let quiet = output(&mut local(&state), &["run", "--quiet", "nightly", "--", "true"]);
    assert_eq!((status(&quiet), stderr_of(&quiet).as_str()), (0, ""));

    let mut holder = hold(&state, &[]);
    until("it is held", || holders(&state) == 1);
    let busy = output(&mut local(&state), &["run", "--wait", "0s", "nightly", "--", "true"]);
    assert_eq!(status(&busy), 75, "{}", stderr_of(&busy));
    holder.kill().expect("it is killed");
    holder.wait().expect("its end");
    assert!(file.exists(), "the file is in the state directory");
}

/// A killed process leaves a file that others go on with, and its lock ends with its ttl.
#[cfg(feature = "sqlite")]
#[test]
fn a_killed_holder_loses_its_lock() {
    let state = TempDir::new().expect("a directory");
    let mut holder = hold(&state, &["--ttl", "2s"]);
    until("it is held", || holders(&state) == 1);
    holder.kill().expect("it is killed with SIGKILL");
    holder.wait().expect("its end");
    let next = output(&mut local(&state), &["run", "--wait", "20s", "nightly", "--", "true"]);
    assert_eq!(status(&next), 0, "{}", stderr_of(&next));
}

#[cfg(feature = "sqlite")]
#[test]
fn the_tables_are_printed_or_made() {
    let state = TempDir::new().expect("a directory");
    let printed_schema = output(&mut local(&state), &["schema", "--print"]);
    assert!(printed(&printed_schema).contains("CREATE TABLE IF NOT EXISTS dlock_lock"));
    let url = format!("sqlite://{}/own.db", state.path().display());
    let missing = output(&mut dlock(), &["ls", "--url", &url]);
    assert_eq!(status(&missing), 78, "{}", stderr_of(&missing));
    assert!(stderr_of(&missing).contains("dlock schema"), "{}", stderr_of(&missing));
    for _ in 0..2 {
        let made = output(&mut dlock(), &["schema", "--url", &url]);
        assert_eq!(status(&made), 0, "{}", stderr_of(&made));
    }
    assert_eq!(status(&output(&mut dlock(), &["ls", "--url", &url])), 0);
    let nowhere = format!("sqlite://{}/missing/locks.db", state.path().display());
    let nowhere = output(&mut dlock(), &["schema", "--url", &nowhere]);
    assert_eq!(status(&nowhere), 78, "{}", stderr_of(&nowhere));
    assert!(stderr_of(&nowhere).contains("/missing does not exist"), "{}", stderr_of(&nowhere));
    let none = output(&mut dlock(), &["schema", "--url", "memory://"]);
    assert!(stderr_of(&none).contains("has no tables"), "{}", stderr_of(&none));
}

/// A job of cron, or an operator, without the variable that the others have.
#[test]
fn without_a_store_nothing_is_locked_and_nothing_is_free() {
    let state = TempDir::new().expect("a directory");
    let marker = state.path().join("ran");
    let marker = marker.to_str().expect("a path");
    for arguments in [
        &["run", "nightly", "--", "touch", marker][..],
        &["ls"],
        &["show", "nightly"],
        &["watch", "--count", "1"],
        &["break", "--yes", "nightly"],
        &["inventory", "phone"],
        &["health"],
        &["schema"],
    ] {
        let mut command = dlock();
        command.env("XDG_STATE_HOME", state.path());
        let refused = output(&mut command, arguments);
        assert_eq!(status(&refused), 64, "{arguments:?}: {}", stderr_of(&refused));
        for way in ["--url", "DLOCK_URL", "--local"] {
            assert!(stderr_of(&refused).contains(way), "{}", stderr_of(&refused));
        }
        assert_eq!(printed(&refused), "", "{arguments:?}");
    }
    assert!(!state.path().join("ran").exists() && !state.path().join("dlock").exists());
}

#[cfg(not(feature = "sqlite"))]
#[test]
fn a_build_without_sqlite_names_the_feature() {
    let state = TempDir::new().expect("a directory");
    let refused = output(&mut local(&state), &["ls"]);
    assert_eq!(status(&refused), 64, "{}", stderr_of(&refused));
    assert!(stderr_of(&refused).contains("--features sqlite"), "{}", stderr_of(&refused));
}

#[cfg(not(feature = "postgres"))]
#[test]
fn a_store_that_is_not_compiled_in_names_its_feature() {
    let refused = output(&mut dlock(), &["ls", "--url", "postgres://localhost/shop"]);
    assert!(
        stderr_of(&refused).contains("build with the feature `postgres`"),
        "{}",
        stderr_of(&refused)
    );
}
