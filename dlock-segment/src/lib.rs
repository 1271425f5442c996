//! For what everybody wants at once.
//!
//! - [`SegmentedLock`]: something hot of your own is split in segments, each with
//!   a lock; a task takes a free one and goes on to the next when it is dry.
//! - [`Inventory`]: the count of a flash sale, kept by the store of the locks:
//!   never below zero, each operation once, many requests in few round trips.

mod attribute;
mod dry;
mod error;
mod inventory;
mod lock;
mod observe;
mod plant;
#[doc(hidden)]
pub mod store;

pub use attribute::Takes;
pub use error::{Error, Operation, Result};
pub use inventory::{
    Audit, Builder, Deduct, Deduction, Disagreement, Health, Hold, HoldState, Inventory,
    MAX_EPOCHS, MAX_ID_BYTES, MAX_QUANTITY, Receipt, Refund, Refunding, Reservation,
    ReservationHandle, Reserve, Resolved, Restock, SegmentAudit, Stock,
};
pub use lock::{MAX_SEGMENTS, Segment, SegmentedLock, Segments, Take};
#[doc(hidden)]
pub use plant::Plant;
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
