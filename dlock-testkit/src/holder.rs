//! The program `dlock-holder`, from the side of a test.

use std::ffi::OsStr;

use serde_json::Value;

use crate::process::Puppet;
use crate::records::Judge;

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
    /// If it cannot be started.
    pub fn start(program: impl AsRef<OsStr>, url: &str) -> Self {
        let mut holder = Holder { process: Puppet::start(program, &[url]), pid: 0 };
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
