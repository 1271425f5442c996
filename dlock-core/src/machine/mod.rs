//! The pure part: it decides who gets a lock, when a lease is renewed and when it is
//! lost, without I/O, without a clock and without tokio.
//!
//! ```text
//!   engine ---> gate      the tasks of this process that want one key
//!      |------> keeper    the claims of this process at the backend
//!   all -----> types      what goes in and out, and the ids
//! ```
//!
//! [`Engine`] puts gates and keeper together. The driver feeds it with what happens
//! (a task asks, the backend answers, time passes) and carries out the [`Action`]s
//! that it returns; the simulation of `dlock-testkit` does the same on a virtual
//! clock and network. Gate and keeper do not know each other.

mod coverage;
mod engine;
mod gate;
mod keeper;
mod timers;
mod types;

pub use self::coverage::{Coverage, Transition};
pub use self::engine::Engine;
pub use self::types::{
    Action, Actions, CallId, GateId, HandoverLimits, LeaseStatus, Limits, LockRequest, Outcome,
    QueueScope, Refusal, Ticket, TicketSnapshot, Wait,
};
pub use crate::planted_bug::{Bug, PlantedBug};
