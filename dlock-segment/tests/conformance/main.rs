//! What an inventory promises, on every store.

#![allow(clippy::unwrap_used, reason = "a failed step fails the test")]

mod accounting;
mod admission;
#[path = "../common/mod.rs"]
mod common;
#[cfg(all(feature = "mysql", feature = "postgres", feature = "sqlite"))]
mod databases;
mod operations;
mod outcomes;
mod reservations;
mod returns;
mod terms;

use common::{held, refunded, state_of};
