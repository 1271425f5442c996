//! The test kit of dlock: a seeded simulation of the state machines, checkers of
//! lock histories, a backend and a proxy that fail on demand, real Redis servers
//! and processes for tests, and the conformance suite of a backend.

pub mod chaos;
pub mod conformance;
mod faulty_backend;
mod history;
pub mod holder;
pub mod interval;
pub mod process;
pub mod proxy;
pub mod record_checker;
pub mod redis;
pub mod resp;
pub mod sale;
pub mod servers;
pub mod sim;

pub use faulty_backend::{FaultControl, FaultMode, FaultyBackend};
pub use history::{Entry, History};
