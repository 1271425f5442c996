//! What a store of inventories must do, for all stores.
//!
//! # An inventory
//!
//! An inventory lives in one *home*: everything that must be decided together is kept
//! together (in Redis, in one hash slot) and changed in one atomic step of the store. A
//! home has
//! - the *head*: epoch, totals, opening times, limit, options; without it there is no
//!   inventory;
//! - for each segment, four counts: supplied = available + reserved + sold;
//! - *records* of operations, in generations as long as the retention: a record is found
//!   for at least one retention after it was last written, and is deleted after two;
//! - *holds*: the records of open reservations, which no retention deletes, and the order
//!   in which they expire;
//! - *returns*: for each purchase of which something was given back, what and under which
//!   id. No retention deletes them, so that nothing is given back twice;
//! - what each buyer has, reserved and sold;
//! - the *journal*, if the inventory keeps one.
//!
//! # An operation
//!
//! ```text
//! absent -- deduct ---> taken -- refund n --> taken, n more refunded
//! absent -- reserve --> reserved -- confirm --> confirmed -- refund n --> ...
//!                       reserved -- cancel ---> cancelled
//!                       reserved -- its time -> expired
//! absent -- cancel, resolve --> tombstone: no deduct or reserve under this id any more
//! absent -- refund, restock, write off --> refund, restock, write-off (their own ids)
//! absent -- import or owe ---> taken, or debt: sold by the shop, and not available any more
//! ```
//!
//! A *purchase* is an operation that sold units, named by its id and the time of its effect:
//! an id may be used again after the retention. A refund finds the purchase in its record,
//! or, when the record is gone, in the receipt that comes with the request. In both cases
//! what was given back before is looked up in the returns, in the same atomic step. So the
//! same return counts once, whichever way it comes, and a purchase gives back no more than
//! it bought. A refund writes the record of the purchase, also if it was gone.
//!
//! A request may say when it was placed. If its id has no record, and a record of that time would
//! be forgotten, the request is refused: it may have had its effect, and must not have it again.
//!
//! A request under an id that has a record is answered from the record, *before* anything
//! else is checked. Another quantity, buyer or kind is a conflict. A refusal leaves no
//! record.
//!
//! # Batches
//!
//! The requests of a batch are applied in any order, each as if it were alone: the answer
//! to one request never depends on an error of another. Before the first request, expired
//! reservations are given back, at most [`MAX_RECLAIMED`]. While there are more of them, no
//! request is answered "sold out" or "limit reached", but [`Answer::Again`].
//!
//! # One of several homes
//!
//! A sale may have several homes, each of which is all of the above. Units move between
//! them. For each other home, a home counts what it ever *sent* there and what it ever
//! *received* from there:
//! ```text
//! A: send n to B    if sent[B] is as expected: available -= n, sent[B] += n
//! B: receive S of A if S > received[A]: available += S - received[A], received[A] = S
//! ```
//! Both have their effect once, however often they are repeated, and anybody may finish a
//! move. What was sent and not received is in transit. So for each home
//! initial + restocked + received = available + reserved + sold + written off + sent.

use std::future::Future;
use std::pin::Pin;
use std::sync::Arc;

use dlock::Key;
use rand::RngExt as _;
use serde::{Deserialize, Serialize};
use smallvec::SmallVec;

use crate::MAX_SEGMENTS;
use crate::error::{Error, Result};

mod generations;
pub(crate) mod home;
mod journal;
pub mod memory;
#[cfg(any(feature = "mysql", feature = "postgres", feature = "redis", feature = "sqlite"))]
mod record_codec;
#[cfg(feature = "redis")]
pub mod redis;
#[cfg(any(feature = "mysql", feature = "postgres", feature = "sqlite"))]
pub mod sql;
mod terms;
#[cfg(all(test, feature = "redis"))]
mod tests_agreement;
#[cfg(all(test, feature = "redis", feature = "mysql", feature = "postgres", feature = "sqlite"))]
mod tests_agreement_sql;
mod view;

pub use self::generations::Generations;
pub(crate) use self::journal::is_zero;
pub use self::journal::{Effect, JournalEntry};
pub use self::terms::Terms;
pub(crate) use self::view::Snapshot;
pub use self::view::{Settings, View};

/// The largest number of expired reservations that one batch gives back.
pub const MAX_RECLAIMED: usize = 256;

/// The most tombstones of one generation. Whoever may cancel or resolve any id could else
/// fill the store.
pub const MAX_TOMBSTONES: u64 = 100_000;

/// All counts stay below this number, so that every language represents them exactly.
pub const MAX_UNITS: u64 = 1 << 53;

/// An operation id or a buyer id.
pub type Id = Arc<str>;

/// A call to a store.
pub type Call<'a, T> = Pin<Box<dyn Future<Output = Result<T>> + Send + 'a>>;

/// The error for an inventory that is not there. Whoever knows when it was made knows that
/// it existed: if it was not removed, it was lost.
pub(crate) fn missing(inventory: &InventoryId, was_removed: bool) -> Error {
    let name = inventory.key.label();
    if inventory.birth == 0 {
        return Error::NotFound(format!(
            "there is no inventory `{name}`; if it is new, create it once, with `dlock inventory NAME create` or create(); if it was there before, the store lost it"
        ));
    }
    if was_removed {
        return Error::NotFound(format!(
            "the inventory `{name}` was removed; open() it again if there is a new one"
        ));
    }
    Error::Lost(format!(
        "the inventory `{name}` with this creation id is not in the store, and nobody removed it: the store lost its data; stop selling, and restore it from your orders. If it never sold anything here, check the URL and the namespace: they must be those with which it was created"
    ))
}

/// How a store identifies an inventory.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct InventoryId {
    /// The name of the inventory.
    pub key: Key,
    /// When it was made, so that an inventory that was removed and made again under the
    /// same name is not mistaken for it; 0 means any.
    pub birth: u64,
}

/// One request of a batch.
#[derive(Clone, Debug)]
#[allow(missing_docs, reason = "the fields are named like what they hold")]
pub enum Request {
    Deduct {
        quantity: u64,
        operation: Option<Id>,
        buyer: Option<Id>,
    },
    Reserve {
        quantity: u64,
        operation: Id,
        buyer: Option<Id>,
        expires_in: u64,
    },
    Confirm {
        operation: Id,
    },
    /// Confirms some units of a reservation, and gives the others back. With 0 it is a
    /// cancellation.
    ConfirmPart {
        operation: Id,
        quantity: u64,
    },
    Cancel {
        operation: Id,
    },
    /// Makes a reservation last at least until then.
    Extend {
        operation: Id,
        until: u64,
    },
    /// Gives `quantity` units of an operation back; 0 means all that are left. Damaged ones
    /// are written off. The receipt is the record that the operation had, for when it is
    /// gone.
    Refund {
        of: Id,
        quantity: u64,
        operation: Id,
        damaged: bool,
        receipt: Option<Box<Record>>,
    },
    Restock {
        quantity: u64,
        operation: Option<Id>,
    },
    /// Takes available units out of the inventory without selling them.
    WriteOff {
        quantity: u64,
        operation: Id,
    },
    /// Reads what became of an operation. If it has no record, it gets a tombstone.
    Resolve {
        operation: Id,
    },
    /// Reads what became of an operation.
    Look {
        operation: Id,
    },
    /// A deduction that the shop made and the inventory has lost: past pause, opening times
    /// and limit. It replaces the record of something that sold nothing. If too few units are
    /// available and `or_debt` is set, it is recorded as a debt.
    Import {
        quantity: u64,
        operation: Id,
        buyer: Option<Id>,
        or_debt: bool,
    },
    /// A request of these that was placed at this time, in milliseconds of Unix time. If its
    /// operation has no record, and could have had one that is forgotten, it is refused.
    Placed {
        at: u64,
        request: Box<Request>,
    },
    /// Sends up to `quantity` available units to another home, if `after` is all that was
    /// ever sent there; else, and with a quantity of 0, it only reads.
    Send {
        to: u32,
        quantity: u64,
        after: u64,
    },
    /// Receives what another home ever sent here, `total`, as far as it is not received
    /// yet; with a total of 0 it only reads. `seen` is the change of the sender that had
    /// sent it.
    Receive {
        from: u32,
        total: u64,
        seen: u64,
    },
}

/// What sort of request it is. A new one must be sorted in before it compiles.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Class {
    /// Whether its answer is an effect on units, and not a look at one.
    pub(crate) counts_units: bool,
    /// The available units that it takes. If they are not in its home, they are brought there.
    pub(crate) takes: Option<u64>,
    /// Whether it has an effect of its own under its id. A late copy of another request changes
    /// what the next call about the reservation answers.
    pub(crate) creates: bool,
    /// The relative cost for the store.
    pub(crate) weight: usize,
}

impl Request {
    /// The request itself, whenever it was placed.
    pub(crate) fn what(&self) -> &Request {
        match self {
            Request::Placed { request, .. } => request.what(),
            request => request,
        }
    }

    /// The operation that it makes, if it has an id.
    pub(crate) fn makes(&self) -> Option<&Id> {
        match self {
            Request::Deduct { operation, .. } | Request::Restock { operation, .. } => {
                operation.as_ref()
            }
            Request::Reserve { operation, .. } | Request::WriteOff { operation, .. } => {
                Some(operation)
            }
            Request::Placed { request, .. } => request.makes(),
            _ => None,
        }
    }

    pub(crate) fn class(&self) -> Class {
        let other = Class { counts_units: true, takes: None, creates: false, weight: 6 };
        let taking = |quantity| Class { takes: Some(quantity), creates: true, ..other };
        match *self {
            Request::Deduct { quantity, ref operation, ref buyer } => {
                let weight = match (operation, buyer) {
                    (None, None) => 1,
                    (Some(_), None) => 2,
                    (_, Some(_)) => 6,
                };
                Class { weight, ..taking(quantity) }
            }
            Request::Reserve { quantity, .. }
            | Request::WriteOff { quantity, .. }
            | Request::Import { quantity, .. } => taking(quantity),
            Request::Confirm { .. } | Request::ConfirmPart { .. } | Request::Cancel { .. } => other,
            Request::Refund { .. } | Request::Restock { .. } => Class { creates: true, ..other },
            // A longer reservation has the units that it had.
            Request::Extend { .. } | Request::Resolve { .. } | Request::Look { .. } => {
                Class { counts_units: false, ..other }
            }
            Request::Placed { ref request, .. } => request.class(),
            // Units that move between homes: each home takes what it has.
            Request::Send { .. } | Request::Receive { .. } => other,
        }
    }
}

/// The answer to a request.
#[derive(Clone, Debug, PartialEq, Eq)]
#[allow(missing_docs, reason = "the fields are named like what they hold")]
pub enum Answer {
    /// The current record. For a deduction without an id, the record it would have.
    Found(Record),
    /// There is no operation with this id.
    Absent,
    /// Fewer units are available than were asked for: this many.
    SoldOut {
        available: u64,
    },
    LimitReached,
    NotStarted,
    Ended,
    Paused,
    /// The id belongs to another request.
    Conflict,
    /// The inventory limits each buyer, and the request names none.
    BuyerMissing,
    /// The operation has fewer units left than were to be refunded.
    TooMuch {
        left: u64,
    },
    /// The inventory does not count the units of this receipt as sold.
    NotSold,
    /// There are [`MAX_TOMBSTONES`] already, so the id could not be refused for good.
    Full,
    /// It was placed so long ago that its record may be forgotten.
    TooOld,
    /// The counts would reach [`MAX_UNITS`].
    Overflow,
    /// More expired reservations must be given back first: send the request again.
    Again,
    /// The record of the operation cannot be read; nothing was changed.
    Unreadable,
    /// All that was ever sent to a home, or received from it; `seen` is the latest change of
    /// the sender that a receipt has named.
    Moved {
        total: u64,
        seen: u64,
    },
}

/// The segments of an epoch that units are from, with the number of units of each.
pub type Parts = SmallVec<[(u32, u64); 1]>;

/// The status of an operation.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[allow(missing_docs, reason = "the module documentation has the state diagram")]
pub enum Status {
    Taken,
    Reserved,
    Confirmed,
    Cancelled,
    Expired,
    Refund,
    /// A refund of damaged units, which are not available again.
    DamagedRefund,
    Restock,
    WriteOff,
    Tombstone,
    /// Units that were sold elsewhere and were not available any more.
    Debt,
}

/// The record of an operation.
#[derive(Clone, Debug, PartialEq, Eq)]
#[allow(missing_docs, reason = "the fields are named like what they hold")]
pub struct Record {
    pub status: Status,
    pub quantity: u64,
    pub refunded: u64,
    /// The epoch that the segment numbers belong to.
    pub epoch: u32,
    pub parts: Parts,
    /// When it had its effect, in milliseconds of Unix time, as `expires`.
    pub at: u64,
    /// When a reservation expires; of a refund, when the refunded operation had its effect.
    pub expires: u64,
    /// The buyer; of a refund, the operation that it refunds.
    pub whose: Option<Id>,
}

impl Record {
    pub(crate) fn tombstone(at: u64) -> Self {
        Record {
            status: Status::Tombstone,
            quantity: 0,
            refunded: 0,
            epoch: 0,
            parts: Parts::new(),
            at,
            expires: 0,
            whose: None,
        }
    }

    /// The units that it bought and did not give back.
    pub(crate) fn sold(&self) -> u64 {
        match self.status {
            Status::Taken | Status::Confirmed => self.quantity - self.refunded,
            _ => 0,
        }
    }

    /// The units that its effect still counts for: none once it was given back.
    pub(crate) fn left(&self) -> u64 {
        match self.status {
            Status::Cancelled | Status::Expired | Status::Tombstone | Status::Debt => 0,
            _ => self.quantity - self.refunded,
        }
    }

    /// Whether a request under the same id is the same request.
    pub(crate) fn is_same(&self, statuses: &[Status], quantity: u64, whose: Option<&Id>) -> bool {
        statuses.contains(&self.status) && self.quantity == quantity && self.whose.as_ref() == whose
    }
}

/// The counts of one segment.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[allow(missing_docs, reason = "the fields are named like what they hold")]
pub struct Counts {
    pub available: u64,
    pub reserved: u64,
    pub sold: u64,
    pub supplied: u64,
}

/// A change of the inventory as a whole.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[allow(missing_docs, reason = "each is named like what it does")]
pub enum Change {
    Window {
        opens_at: u64,
        closes_at: u64,
    },
    Pause,
    Resume,
    PerBuyer(u64),
    /// The new retention, in milliseconds.
    Retention(u64),
    Resize(u32),
    Rebalance,
    /// The settings of a sale with several homes, unless the home has newer ones.
    Settings(Settings),
    /// All homes of the sale were made: from now on, one that is not there is lost.
    Complete,
    /// Changes are counted from here at least: the home was made again, and what the others
    /// know of its changes must not make it look as if it had lost the new ones too.
    CountFrom(u64),
}

/// The position from which records are read next; start with the default.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Cursor(pub String);

/// Some of the records of an inventory. One may come twice, the newer one first.
#[derive(Clone, Debug, Default)]
#[allow(missing_docs, reason = "the fields are named like what they hold")]
pub struct Page {
    /// The records by operation id; `None` if a record cannot be read.
    pub records: Vec<(Id, Option<Record>)>,
    pub buyers: Vec<(Id, u64)>,
    /// The next position; `None` at the end.
    pub next: Option<Cursor>,
}

/// What a store keeps if its server crashes.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct Durability {
    /// Whether effects are written to disk as they happen; `None` if that is not known.
    pub append_only: Option<bool>,
    /// When they are flushed to disk: `always`, `everysec` or `no`.
    pub fsync: Option<String>,
    /// The server's name for what happens when its memory is full.
    pub eviction: Option<String>,
}

/// A store of inventories. A call may fail as a whole: with
/// [`Error::Unknown`](crate::Error::Unknown) if it may have been applied, with
/// anything else if it was not.
pub trait Store: Send + Sync + 'static {
    /// Makes an inventory, or opens one with the same terms. Other terms are a conflict.
    fn create<'a>(&'a self, key: &'a Key, terms: &'a Terms) -> Call<'a, View>;
    /// Opens an inventory, for a user who has the rights for all calls.
    fn open<'a>(&'a self, inventory: &'a InventoryId) -> Call<'a, View>;
    /// Reads the inventory, after some expired reservations were given back.
    fn view<'a>(&'a self, inventory: &'a InventoryId) -> Call<'a, View>;
    /// Deletes an inventory and all its data, and remembers for a day that
    /// it was removed and not lost. Answers whether it was there.
    fn remove<'a>(&'a self, inventory: &'a InventoryId) -> Call<'a, bool>;
    /// Applies a batch, beginning with any segment. Answers each request, in order.
    fn apply<'a>(
        &'a self,
        inventory: &'a InventoryId,
        batch: &'a [Request],
    ) -> Call<'a, (View, Vec<Answer>)> {
        self.apply_from(inventory, rand::rng().random_range(0..MAX_SEGMENTS), batch)
    }
    /// Applies a batch, beginning with this segment.
    fn apply_from<'a>(
        &'a self,
        inventory: &'a InventoryId,
        start: u32,
        batch: &'a [Request],
    ) -> Call<'a, (View, Vec<Answer>)>;
    /// Changes the inventory as a whole.
    fn change<'a>(&'a self, inventory: &'a InventoryId, change: Change) -> Call<'a, View>;
    /// Reads the counts of every segment, and the inventory at the same moment.
    fn counts<'a>(&'a self, inventory: &'a InventoryId) -> Call<'a, (View, Vec<Counts>)>;
    /// Reads how many segments each epoch had.
    fn sizes<'a>(&'a self, inventory: &'a InventoryId) -> Call<'a, Vec<u32>>;
    /// Reads some of the records.
    fn records<'a>(&'a self, inventory: &'a InventoryId, from: Cursor) -> Call<'a, Page>;
    /// Reads up to about `limit` entries of the journal after this number.
    fn journal<'a>(
        &'a self,
        inventory: &'a InventoryId,
        after: u64,
        limit: usize,
    ) -> Call<'a, Vec<JournalEntry>>;
    /// Reads what the server would keep after a crash.
    fn durability(&self) -> Call<'_, Durability>;
    /// Reads the directory of homes that the home was made with; empty if it is the only one.
    fn directory<'a>(&'a self, inventory: &'a InventoryId) -> Call<'a, String> {
        let _ = inventory;
        Box::pin(std::future::ready(Ok(String::new())))
    }
    /// Reads the identity of the server, which lasts as long as its data. If it has none, it
    /// is given this one. `None`: it has none, or this kind of store needs none.
    fn identity<'a>(&'a self, given: Option<&'a str>) -> Call<'a, Option<String>> {
        let _ = given;
        Box::pin(std::future::ready(Ok(None)))
    }
    /// The name of the server that keeps what has this key, for as long as the servers
    /// share the keys like this; empty if there is only one.
    fn server_of<'a>(&'a self, key: &'a Key) -> Call<'a, String> {
        let _ = key;
        Box::pin(std::future::ready(Ok(String::new())))
    }
}
