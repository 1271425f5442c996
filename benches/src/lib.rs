//! Workloads that the criterion benches, `dlock bench` and `dlock sale` share.
//!
//! A workload is a plan (what to do), a run (one process's part) and an outcome
//! (what `--json` prints; the names are fixed by `schema.json`). With several
//! processes the [`fleet`] starts copies of the calling program, each does its
//! part of the plan, and the outcomes are put together here.
//!
//! Every lock workload has the [`checker`] on, for the peers too: a run that was
//! fast because two held the lock at once says so.

pub mod checker;
pub mod clock;
pub mod contender;
mod convoy;
pub mod deduct;
pub mod fleet;
pub mod handoff;
pub mod held;
pub mod interrupt;
pub mod load;
pub mod lock;
pub mod measure;
pub mod net;
pub mod sale;
pub mod seller;
pub mod server;
pub mod shelf;
mod wrong;

pub use convoy::convoy;
pub use wrong::Wrong;
