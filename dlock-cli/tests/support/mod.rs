//! What the tests of the real program share.

#![allow(dead_code, reason = "each test file uses a part of it")]

use std::process::{Command, Output};
use std::time::{Duration, Instant};

/// Where the program is.
pub(crate) const PROGRAM: &str = env!("CARGO_BIN_EXE_dlock");

/// The program, without what the environment of the tests says: whoever runs them in
/// the background may ignore signals, and so would the program.
pub(crate) fn dlock() -> Command {
    let mut command = Command::new("env");
    command.args(["--default-signal=HUP,INT,QUIT,TERM", PROGRAM]);
    for (name, _) in std::env::vars_os() {
        if name.to_string_lossy().starts_with("DLOCK_") {
            command.env_remove(name);
        }
    }
    command
}

/// The program on this server.
pub(crate) fn on(url: &str) -> Command {
    let mut command = dlock();
    command.env("DLOCK_URL", url);
    command
}

/// Runs it to its end.
pub(crate) fn output(command: &mut Command, arguments: &[&str]) -> Output {
    command.args(arguments).output().expect("dlock can be run")
}

/// Its exit status.
pub(crate) fn status(output: &Output) -> i32 {
    output.status.code().expect("it ended by itself")
}

/// What it printed.
pub(crate) fn printed(output: &Output) -> String {
    String::from_utf8_lossy(&output.stdout).into_owned()
}

/// What it said on standard error.
pub(crate) fn said(output: &Output) -> String {
    String::from_utf8_lossy(&output.stderr).into_owned()
}

/// Each line of what it printed, as JSON.
pub(crate) fn json(output: &Output) -> Vec<serde_json::Value> {
    let lines = printed(output);
    lines.lines().map(|line| serde_json::from_str(line).expect("a line of JSON")).collect()
}

/// Waits until something is so.
pub(crate) fn until(what: &str, mut is_so: impl FnMut() -> bool) {
    let began = Instant::now();
    while !is_so() {
        assert!(began.elapsed() < Duration::from_secs(60), "never: {what}");
        std::thread::sleep(Duration::from_millis(10));
    }
}
