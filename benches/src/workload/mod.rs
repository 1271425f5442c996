//! The workloads, one module for each.

pub mod bystander;
pub mod deduct;
pub mod handoff;
pub mod held;
pub mod lock;
pub mod sale;
