//! The workloads, one module for each.

pub mod deduct;
pub mod handoff;
pub mod held;
pub mod lock;
pub mod sale;
