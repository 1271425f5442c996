//! Starts and controls the program `dlock-holder` from a test.

use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::OnceLock;
use std::time::Duration;

use serde_json::Value;

use crate::process::ChildProcess;
use crate::record_checker::RecordChecker;

/// The path of the program `dlock-holder`, which is built at the first call.
///
/// Cargo tells a test only of the programs of its own package
/// (`CARGO_BIN_EXE_...`), and tests of other packages need this one too. The
/// program is built into the directory of the test that runs, with its profile.
/// The features are those of the whole workspace with its dev-dependencies: after
/// `scripts/test` has built the tests, there is nothing left to build.
///
/// # Panics
/// If the program cannot be built.
pub fn program() -> &'static Path {
    static PROGRAM: OnceLock<PathBuf> = OnceLock::new();
    PROGRAM.get_or_init(build)
}

fn build() -> PathBuf {
    // The test lies in <target directory>/<profile>/deps.
    let test = std::env::current_exe().expect("the path of the running test");
    let directory = test.ancestors().nth(2).expect("the directory of the profile");
    let target = directory.parent().expect("the target directory");
    let profile = match directory.file_name() {
        Some(name) if name != "debug" => name,
        _ => "dev".as_ref(),
    };
    let mut cargo = Command::new(std::env::var_os("CARGO").unwrap_or_else(|| "cargo".into()));
    // Cargo describes the package under test to the test. Some build scripts depend
    // on these variables and would run again, with all that is built upon them.
    for (name, _) in std::env::vars_os() {
        let set_for_tests = ["CARGO_PKG_", "CARGO_MANIFEST_", "CARGO_BIN_", "CARGO_CRATE_"];
        if set_for_tests.iter().any(|prefix| name.to_string_lossy().starts_with(prefix)) {
            cargo.env_remove(name);
        }
    }
    let status = cargo
        .current_dir(env!("CARGO_MANIFEST_DIR"))
        .args(["build", "--quiet", "--workspace", "--all-features"])
        // A test among the targets adds the features of the dev-dependencies.
        .args(["--bin", "dlock-holder", "--test", "chaos", "--profile"])
        .arg(profile)
        .arg("--target-dir")
        .arg(target)
        .status()
        .expect("cargo can be run");
    let program = directory.join("dlock-holder").with_extension(std::env::consts::EXE_EXTENSION);
    assert!(status.success() && program.exists(), "cargo could not build {}", program.display());
    program
}

/// A running `dlock-holder`: a process that holds locks. The source of the program
/// lists the commands that it accepts.
#[derive(Debug)]
pub struct HolderProcess {
    /// The process itself, which a test can pause, resume and kill.
    pub process: ChildProcess,
    pid: u64,
}

impl HolderProcess {
    /// Starts the program with a client of this URL.
    ///
    /// # Panics
    /// If it cannot be built or started.
    pub fn start(url: &str) -> Self {
        let mut holder = HolderProcess { process: ChildProcess::start(program(), &[url]), pid: 0 };
        holder.pid = number(&holder.wait_for("ready"), "pid");
        holder
    }

    /// The process id.
    pub fn pid(&self) -> u64 {
        self.pid
    }

    /// Sends a command to the process.
    pub fn send(&mut self, line: &str) {
        self.process.send_line(line);
    }

    /// Waits for the next event of this name and returns it.
    ///
    /// # Panics
    /// If there is no such event within 30 s.
    pub fn wait_for(&mut self, event: &str) -> Value {
        self.process.wait_for_line(event, |line| {
            let parsed: Value = serde_json::from_str(line).ok()?;
            (parsed["event"] == event).then_some(parsed)
        })
    }

    /// Adds all records that the process has printed so far to a checker.
    pub fn add_records_to(&mut self, checker: &mut RecordChecker) {
        for line in self.process.take_lines() {
            if let Ok(record) = line.parse() {
                checker.add(record);
            }
        }
    }
}

/// Starts three processes that work under one lock, and shuts them down and replaces them,
/// one by one. Returns what all of them recorded.
///
/// # Panics
/// If a process does not end within this time, and outside a runtime with several threads.
pub async fn rolling_restart(
    start: impl Fn() -> HolderProcess,
    ttl: Duration,
    ends_within: Duration,
) -> RecordChecker {
    let mut checker = RecordChecker::default();
    let serving = || {
        let mut process = tokio::task::block_in_place(&start);
        process.send(&format!("serve a {} 4", ttl.as_millis()));
        process
    };
    let mut shut_down = |process: &mut HolderProcess, millis: usize| {
        process.send(&format!("shutdown {millis}"));
        tokio::task::block_in_place(|| {
            process.wait_for("shutdown");
            assert!(process.process.wait_for_exit(ends_within), "it ends well");
            process.add_records_to(&mut checker);
        });
    };
    let mut fleet = [serving(), serving(), serving()];
    for round in 0..6_usize {
        tokio::time::sleep(Duration::from_millis(400)).await;
        shut_down(&mut fleet[round % 3], 40 * (round % 2));
        fleet[round % 3] = serving();
    }
    fleet.iter_mut().for_each(|process| shut_down(process, 500));
    checker
}

/// The number in this field of an event.
///
/// # Panics
/// If the event has no such field, or it is not a number.
pub fn number(event: &Value, name: &str) -> u64 {
    event[name].as_u64().unwrap_or_else(|| panic!("no number {name} in {event}"))
}
