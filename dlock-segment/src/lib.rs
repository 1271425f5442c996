//! For what everybody wants at once.
//!
//! - [`SegmentedLock`]: something hot of your own is split in segments, each with
//!   a lock; a task takes a free one and goes on to the next when it is dry.
//! - [`Inventory`]: the count of a flash sale, kept by the store of the locks:
//!   never below zero, each operation once, many requests in few round trips.

mod attribute;

mod error;
mod inventory;
mod lock;
mod observe;
mod planted_bug;
#[doc(hidden)]
pub mod store;

pub use attribute::MayBeDry;
pub use error::{Error, OperationId, Result};
pub use inventory::{
    Audit, DeductRequest, Deduction, Disagreement, Health, Hold, HoldState, Inventory,
    InventoryBuilder, MAX_EPOCHS, MAX_ID_BYTES, MAX_QUANTITY, Receipt, Refund, RefundRequest,
    Reservation, ReservationHandle, ReserveRequest, Resolved, RestockRequest, SegmentAudit, Stock,
};
pub use lock::{MAX_SEGMENTS, Segment, SegmentOutcome, SegmentedLock, Segments};
#[doc(hidden)]
pub use planted_bug::{Bug, PlantedBug};
pub use store::{Durability, Effect, Entry};

#[cfg(feature = "macros")]
pub use dlock_macros::segmented_lock;

/// What expanded macros use.
#[doc(hidden)]
pub mod __private {
    pub use crate::attribute::{Split, split, unbound};
    pub use dlock as core;
}

/// The examples of the documents compile and run.
#[cfg(doctest)]
mod documents {
    #[doc = include_str!("../../docs/inventory.md")]
    struct Inventory;
}
