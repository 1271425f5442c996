//! A seeded simulation of processes, network and servers around the machines
//! that `dlock-core` runs in production.
//!
//! The seed decides everything: the number of processes, tasks, keys and servers, the
//! faults and their times, every delay and every choice of a task. The same seed gives
//! the same log, byte for byte.
//!
//! ```
//! let report = dlock_testkit::sim::run(7, &Default::default());
//! assert_eq!(report.violation, None);
//! ```
//!
//! The gates, the keeper and the lock table of the embedded backend are the real ones.
//! Time, tasks, the network and faults are simulated. [`Checker`] lists what is
//! checked.

mod checker;
mod plan;
mod simulation;

use dlock::machine::{Bug, Coverage};

pub use checker::Checker;
pub use plan::Plan;

/// The options of a run.
#[derive(Clone, Debug, Default)]
pub struct Options {
    /// A planted bug to turn on.
    pub plant: Option<Bug>,
    /// Whether to write a log.
    pub log: bool,
}

/// The result of a run.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Report {
    /// The first violation, if there is one.
    pub violation: Option<String>,
    /// A line for each event, if [`Options::log`] is set.
    pub log: String,
    /// How often a task was given a lock.
    pub admissions: u64,
    /// How many of those were hand-overs inside a process.
    pub handovers: u64,
    /// How many locks were lost while held.
    pub losses: u64,
    /// How many faults were injected, not counting single messages.
    pub faults: u64,
    /// How many messages were dropped, delayed past the time-out or duplicated.
    pub message_faults: u64,
    /// How often each transition of the machines was taken.
    pub coverage: Coverage,
}

/// Runs the simulation with this seed.
pub fn run(seed: u64, options: &Options) -> Report {
    simulation::Simulation::new(seed, options).run()
}

/// The command line that replays a seed.
pub fn replay_command(seed: u64, plant: Option<Bug>) -> String {
    let plant = plant.map(|plant| format!(" --plant {plant:?}")).unwrap_or_default();
    format!("cargo run --release -p dlock-testkit --bin dlock-sim -- --seed {seed}{plant}")
}
