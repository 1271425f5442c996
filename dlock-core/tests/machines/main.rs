//! Tests of the state machines step by step: what goes in and what comes out, one rule
//! at a time.

mod leases;
mod lock_table;
mod process;
mod random;
mod sessions;
mod tasks;
