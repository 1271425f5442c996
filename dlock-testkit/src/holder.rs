//! The program `dlock-holder`, from the side of a test.

use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::OnceLock;

use serde_json::Value;

use crate::process::Puppet;
use crate::records::Judge;

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

/// A process that holds locks; see the program for what it can be told.
#[derive(Debug)]
pub struct Holder {
    /// The process: to be told something, stopped, killed.
    pub process: Puppet,
    pid: u64,
}

impl Holder {
    /// Starts the program with a client of this URL.
    ///
    /// # Panics
    /// If it cannot be built or started.
    pub fn start(url: &str) -> Self {
        let mut holder = Holder { process: Puppet::start(program(), &[url]), pid: 0 };
        holder.pid = number(&holder.hear("ready"), "pid");
        holder
    }

    /// Its process id.
    pub fn pid(&self) -> u64 {
        self.pid
    }

    /// Tells it something.
    pub fn tell(&mut self, line: &str) {
        self.process.tell(line);
    }

    /// Waits for the next event of this name.
    ///
    /// # Panics
    /// If there is none in half a minute.
    pub fn hear(&mut self, event: &str) -> Value {
        self.process.hear(event, |line| {
            let told: Value = serde_json::from_str(line).ok()?;
            (told["event"] == event).then_some(told)
        })
    }

    /// Hands all records so far to a judge.
    pub fn confess(&mut self, judge: &mut Judge) {
        for line in self.process.rest() {
            if let Ok(record) = line.parse() {
                judge.add(record);
            }
        }
    }
}

/// A number in what was told.
///
/// # Panics
/// If there is none of this name.
pub fn number(told: &Value, name: &str) -> u64 {
    told[name].as_u64().unwrap_or_else(|| panic!("no {name} in {told}"))
}
