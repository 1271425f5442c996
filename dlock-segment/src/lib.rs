//! Locks and counts for resources that everybody wants at once.
//!
//! - [`SegmentedLock`]: a hot resource of your own is split into segments with a lock each.
//!   A task locks a free segment, and tries the next one if that has nothing left.
//! - [`Inventory`]: the stock of a flash sale, counted in the store of the locks. It never
//!   goes below zero, each operation has its effect once, and many requests share few
//!   round trips.

#![doc(test(attr(deny(unused_must_use))))]

mod attribute;
#[cfg(feature = "axum")]
mod axum;
mod error;
mod homes;
mod inventory;
mod lock;
mod observe;
mod planted_bug;
#[cfg(any(feature = "mysql", feature = "postgres", feature = "sqlite"))]
pub mod sql;
#[doc(hidden)]
pub mod store;

pub use attribute::MayBeDry;
pub use error::{Error, OperationId, Result};
pub use homes::{MAX_HOMES, Routing};
pub use inventory::{
    Audit, Confirmation, Correction, CreationId, DeductRequest, DeductUpToRequest, Deduction,
    Difference, DifferenceKind, Disagreement, GiveBackRequest, GivenBack, Health, Hold, HoldState,
    Inventory, InventoryBuilder, JournalCursor, LeaseBuilder, LeaseTotals, LeasedDeduction,
    LeasedUnits, MAX_EPOCHS, MAX_ID_BYTES, MAX_QUANTITY, OrderState, Receipt, Reconciliation,
    Refund, RefundRequest, Repaired, Reservation, ReservationHandle, ReserveRequest, Resolved,
    RestockRequest, SegmentAudit, ShopOrder, Stock, WriteOff, WriteOffRequest,
};
pub use lock::{MAX_SEGMENTS, Segment, SegmentOutcome, SegmentShare, SegmentedLock, Segments};
#[doc(hidden)]
pub use planted_bug::{Bug, PlantedBug};
pub use store::{Counts, Durability, Effect, JournalEntry};

#[cfg(feature = "macros")]
pub use dlock_macros::segmented_lock;

/// The names that expanded macros use.
#[doc(hidden)]
pub mod __private {
    pub use crate::attribute::{Split, split, unbound};
    pub use dlock as core;
}

/// Compiles and runs the examples in the documents.
#[cfg(doctest)]
mod documents {
    #[doc = include_str!("../../docs/inventory.md")]
    struct Inventory;

    #[cfg(any(feature = "mysql", feature = "postgres", feature = "sqlite"))]
    #[doc = include_str!("../../docs/sql.md")]
    struct Sql;

    /// Writes a test that this call compiles, and only if its answer is used.
    macro_rules! must_use {
        ($($name:ident: $call:literal)*) => {
            $(
                #[doc = concat!(
                    "```\nasync fn f(sale: &dlock_segment::Inventory) -> dlock_segment::Result<()> {\n",
                    "let _ = ", $call, ";\nOk(()) }\n```\n",
                    "```compile_fail\nasync fn f(sale: &dlock_segment::Inventory) -> dlock_segment::Result<()> {\n",
                    $call, ";\nOk(()) }\n```\n",
                )]
                struct $name;
            )*
        };
    }

    must_use! {
        Deduction: "sale.deduct(1).send().await?"
        Reservation: "sale.reserve(1).operation(\"o\").send().await?"
        Confirmation: "sale.reservation(\"o\").confirm().await?"
        HoldState: "sale.reservation(\"o\").cancel().await?"
        Refund: "sale.refund(\"o\").send().await?"
        GivenBack: "sale.give_back(\"o\").send().await?"
        WriteOff: "sale.write_off(1).operation(\"o\").send().await?"
        Resolved: "sale.resolve(\"o\").await?"
    }
}
