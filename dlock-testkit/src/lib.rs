//! What it takes to believe a lock: a seeded simulation of the machines, a
//! history checker, and the conformance suite of a backend.

pub mod sim;
