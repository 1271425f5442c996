//! What it takes to believe a lock: a seeded simulation of the machines, a
//! history checker, a backend that fails on demand, and the conformance suite of
//! a backend.

pub mod chaos;
pub mod conformance;
mod faulty;
mod history;
pub mod holder;
pub mod holds;
pub mod process;
pub mod proxy;
pub mod records;
pub mod redis;
pub mod resp;
pub mod sale;
pub mod servers;
pub mod sim;

pub use faulty::{Faulty, Switch, Weather};
pub use history::{History, Stay};
