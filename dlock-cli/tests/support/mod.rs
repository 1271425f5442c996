//! What the tests share: how they run the real program.

#![allow(dead_code, reason = "each test file uses a part of it")]

use std::path::Path;
use std::process::{Command, Output};
use std::time::{Duration, Instant};

/// The path of the program.
pub(crate) const PROGRAM: &str = env!("CARGO_BIN_EXE_dlock");

/// The program of this build; see [`dlock_of`].
pub(crate) fn dlock() -> Command {
    dlock_of(Path::new(PROGRAM))
}

/// A program, without the `DLOCK_` variables and the ignored signals of the test's own
/// environment. A test that runs in the background may have signals ignored, and the
/// program would inherit that.
pub(crate) fn dlock_of(program: &Path) -> Command {
    let mut command = Command::new("env");
    command.arg("--default-signal=HUP,INT,QUIT,TERM").arg(program);
    for (name, _) in std::env::vars_os() {
        if name.to_string_lossy().starts_with("DLOCK_") {
            command.env_remove(name);
        }
    }
    // Not the state directory of whoever runs the tests.
    let state =
        Path::new(env!("CARGO_TARGET_TMPDIR")).join(format!("state-{}", std::process::id()));
    std::fs::create_dir_all(&state).expect("a directory");
    command.env("XDG_STATE_HOME", state);
    command
}

/// The program with this URL.
pub(crate) fn on(url: &str) -> Command {
    let mut command = dlock();
    command.env("DLOCK_URL", url);
    command
}

/// Runs the program to its end.
pub(crate) fn output(command: &mut Command, arguments: &[&str]) -> Output {
    command.args(arguments).output().expect("dlock can be run")
}

/// The exit status of the program.
pub(crate) fn status(output: &Output) -> i32 {
    output.status.code().expect("it ended by itself")
}

/// What the program printed on standard output.
pub(crate) fn printed(output: &Output) -> String {
    String::from_utf8_lossy(&output.stdout).into_owned()
}

/// What the program printed on standard error.
pub(crate) fn stderr_of(output: &Output) -> String {
    String::from_utf8_lossy(&output.stderr).into_owned()
}

/// The lines on standard output, parsed as JSON.
pub(crate) fn json(output: &Output) -> Vec<serde_json::Value> {
    let lines = printed(output);
    lines.lines().map(|line| serde_json::from_str(line).expect("a line of JSON")).collect()
}

/// Waits until a condition is true.
pub(crate) fn until(what: &str, mut condition: impl FnMut() -> bool) {
    let began = Instant::now();
    while !condition() {
        assert!(began.elapsed() < Duration::from_secs(60), "never: {what}");
        std::thread::sleep(Duration::from_millis(10));
    }
}
