//! The workloads that `dlock bench`, `dlock sale` and the criterion benches run.
//!
//! Each module of [`workload`] has a `Plan` (what to do), a `run` function and an
//! `Outcome` (what `--json` prints; [`SCHEMA`] fixes the field names). If a plan
//! asks for several processes, [`processes`] starts copies of the calling program.
//! Each copy does its share of the plan, and the workload merges their reports.
//!
//! Every lock workload runs with the [`exclusion_checker`], also when it measures
//! another crate: a run that is fast because two tasks held the lock at the same
//! time reports violations.

pub mod clock;
mod contended_lock;
pub mod cpu;
pub mod exclusion_checker;
pub mod expiry_guard;
pub mod interrupt;
pub mod load;
pub mod lock_client;
pub mod measurement;
pub mod naive_stock;
pub mod processes;
pub mod seller;
pub mod server;
pub mod spread;
mod sql;
mod usage_error;
pub mod workload;

pub use contended_lock::run_contended;
pub use usage_error::{UsageError, usage_error};

/// The JSON schema of the lines that `dlock bench --json` and `dlock sale --json` print.
pub const SCHEMA: &str = include_str!("../schema.json");
