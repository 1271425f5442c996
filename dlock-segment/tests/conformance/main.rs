//! What an inventory promises, on every store.

#![allow(clippy::unwrap_used, reason = "a failed step fails the test")]

mod accounting;
mod admission;
#[path = "../common/mod.rs"]
mod common;
mod operations;
mod reservations;
mod terms;

use dlock_segment::{Hold, Receipt, Refund, Reservation};

fn held(reservation: Reservation) -> Hold {
    match reservation {
        Reservation::Held(hold) => hold,
        other => panic!("not held: {other:?}"),
    }
}

fn refunded(refund: Refund) -> Receipt {
    match refund {
        Refund::Refunded(receipt) => receipt,
        other => panic!("not refunded: {other:?}"),
    }
}
