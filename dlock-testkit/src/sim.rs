//! A seeded simulation of processes, network and servers around the machines
//! that `dlock-core` runs in production.
//!
//! One seed, one history: the seed decides the number of processes, tasks, keys
//! and servers, which faults there are and when, every delay and every choice of
//! a task. The same seed gives the same log, byte for byte.
//!
//! ```
//! let report = dlock_testkit::sim::run(7, &Default::default());
//! assert_eq!(report.violation, None);
//! ```
//!
//! What is real: gates, keeper and the queue of the embedded backend. What is
//! simulated: time, tasks, the network and faults. See [`Checker`] for what is
//! judged.

mod checker;
mod plan;
mod world;

use dlock::machine::Bug;

pub use checker::Checker;
pub use plan::Plan;

/// How to run a seed.
#[derive(Clone, Debug, Default)]
pub struct Options {
    /// A bug to switch on.
    pub plant: Option<Bug>,
    /// Whether to write the log.
    pub log: bool,
}

/// What came of a seed.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Report {
    /// What was violated, if anything.
    pub violation: Option<String>,
    /// Every event, if wanted.
    pub log: String,
    /// How often a task was let in.
    pub admissions: u64,
    /// How many of those came from a task of the same process.
    pub handovers: u64,
    /// How many locks were lost while held.
    pub losses: u64,
    /// How many faults were injected, not counting single messages.
    pub faults: u64,
    /// How many messages were dropped, delayed past the time-out or duplicated.
    pub message_faults: u64,
}

/// Plays the history of one seed.
pub fn run(seed: u64, options: &Options) -> Report {
    world::World::new(seed, options).play()
}

/// The command that replays a seed.
pub fn replay_command(seed: u64, plant: Option<Bug>) -> String {
    let plant = plant.map(|plant| format!(" --plant {plant:?}")).unwrap_or_default();
    format!("cargo run --release -p dlock-testkit --bin dlock-sim -- --seed {seed}{plant}")
}
