//! The methods of a [`Seller`](super::Seller).

use serde::{Deserialize, Serialize};

/// The method that keeps a unit from being sold twice.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Method {
    /// One lock around a count that the client reads and writes.
    GlobalLock,
    /// The same count in segments, with a lock for each segment.
    SegmentedLock,
    /// [`Inventory`](dlock_segment::Inventory): the store keeps the count.
    Inventory,
    /// `Inventory`, with an operation id for each order.
    InventoryIdempotent,
    /// `Inventory`, from units that the process has leased and sells from memory.
    Leased,
    /// In SQL, to compare: the guarded UPDATE of one row, with a connection for each task.
    Row,
    /// In SQL, to compare: guarded UPDATEs of one row that requests in flight share.
    BatchedRow,
}

impl Method {
    /// The methods of dlock that a sale compares, the slowest first.
    pub const ALL: [Method; 4] =
        [Method::GlobalLock, Method::SegmentedLock, Method::Inventory, Method::InventoryIdempotent];

    /// The name of the method in JSON and on the command line.
    pub fn name(self) -> &'static str {
        match self {
            Method::GlobalLock => "global-lock",
            Method::SegmentedLock => "segmented-lock",
            Method::Inventory => "inventory",
            Method::InventoryIdempotent => "inventory-idempotent",
            Method::Leased => "leased",
            Method::Row => "row",
            Method::BatchedRow => "batched-row",
        }
    }
}
