//! What a store of stock must do, said once for all of them, and the words it is
//! said in.
//!
//! # A sale
//!
//! A sale lives in one *home*: whatever must be decided together is kept together
//! and changed by one step of the store. In a home there are
//! - the *head*: epoch, totals, window, limit, options; without it there is no sale;
//! - for each segment, four counts: supplied = available + reserved + sold;
//! - *records* of operations, in generations as long as the retention: a record
//!   is found for at least one retention after it was last written, and is gone
//!   after two;
//! - *holds*: the records of open reservations, which no retention ends, and their
//!   order of expiry;
//! - what each buyer has, reserved and sold;
//! - the *journal*, if the sale keeps one.
//!
//! # An operation
//!
//! ```text
//! absent -- deduct ---> taken -- refund n --> taken, n more refunded
//! absent -- reserve --> reserved -- confirm --> confirmed -- refund n --> ...
//!                       reserved -- cancel ---> cancelled
//!                       reserved -- its time -> expired
//! absent -- cancel, resolve --> tombstone: no deduct or reserve under this id any more
//! absent -- refund, restock --> refund, restock (their own ids)
//! ```
//!
//! Whatever comes again under an id finds its record, *before* anything else is
//! looked at, and is answered from it. Another quantity, buyer or kind is a
//! conflict. A refusal leaves nothing.
//!
//! # Batches
//!
//! A batch is applied request by request, in any order, each as if alone: one
//! request's answer never depends on another's fault. Before the first, expired
//! reservations go back, [`MAX_RECLAIMED`] at most; as long as more are left, nobody
//! hears "sold out" or "limit reached", but [`Answer::Again`].

use std::future::Future;
use std::pin::Pin;
use std::sync::Arc;

use dlock::Key;
use serde::{Deserialize, Serialize};
use smallvec::SmallVec;

use crate::error::Result;

pub(crate) mod home;
pub mod memory;
#[cfg(feature = "redis")]
pub mod redis;
#[cfg(all(test, feature = "redis"))]
mod tests_agreement;

/// The most expired reservations that one batch gives back.
pub const MAX_RECLAIMED: usize = 256;

/// Counts stay below this, exact in every language that a store may be written in.
pub const MAX_UNITS: u64 = 1 << 53;

/// An operation id, or a buyer's.
pub type Id = Arc<str>;

/// A call to a store.
pub type Call<'a, T> = Pin<Box<dyn Future<Output = Result<T>> + Send + 'a>>;

/// A sale as a store knows it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct InventoryId {
    /// Its name.
    pub key: Key,
    /// When it was made, so that a sale of the same name that was removed and
    /// made again is not taken for it; 0: whichever there is.
    pub birth: u64,
}

/// How a sale starts.
#[derive(Clone, Debug, PartialEq, Eq)]
#[allow(missing_docs, reason = "the fields are named like what they hold")]
pub struct Terms {
    pub stock: u64,
    pub segments: u32,
    /// The most a buyer may have; 0: any number.
    pub per_buyer: u64,
    /// In milliseconds of Unix time by the store's clock; 0: no bound.
    pub opens_at: u64,
    pub closes_at: u64,
    /// In milliseconds.
    pub retention: u64,
    /// How many entries of a journal are kept at least; 0: there is none.
    pub journal: u64,
}

impl Terms {
    /// The terms as one text, to be compared.
    pub(crate) fn text(&self) -> String {
        let Terms { stock, segments, per_buyer, opens_at, closes_at, retention, journal } = self;
        format!("{stock} {segments} {per_buyer} {opens_at} {closes_at} {retention} {journal}")
    }
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
    Cancel {
        operation: Id,
    },
    /// Lasts until then at least.
    Extend {
        operation: Id,
        until: u64,
    },
    /// Gives `quantity` units of an operation back; 0: whatever is left of it.
    Refund {
        of: Id,
        quantity: u64,
        operation: Id,
    },
    Restock {
        quantity: u64,
        operation: Option<Id>,
    },
    /// What became of it; if nothing, nothing ever will.
    Resolve {
        operation: Id,
    },
    /// What became of it.
    Look {
        operation: Id,
    },
}

impl Request {
    /// What it costs the store, beside others.
    pub(crate) fn weight(&self) -> usize {
        match self {
            Request::Deduct { operation: None, buyer: None, .. } => 1,
            Request::Deduct { buyer: None, .. } => 2,
            _ => 6,
        }
    }
}

/// What came of a request.
#[derive(Clone, Debug, PartialEq, Eq)]
#[allow(missing_docs, reason = "the fields are named like what they hold")]
pub enum Answer {
    /// The record as it stands now; for an anonymous deduction, as it would.
    Found(Record),
    /// There is no such operation.
    Absent,
    SoldOut,
    LimitReached,
    NotStarted,
    Ended,
    Paused,
    /// The id stands for something else.
    Conflict,
    /// The sale limits each buyer, and none was named.
    BuyerMissing,
    /// More than is left to be refunded.
    TooMuch {
        left: u64,
    },
    /// The counts would reach [`MAX_UNITS`].
    Overflow,
    /// Expired reservations are in the way: ask again.
    Again,
    /// Its record is not in words known here; nothing was changed.
    Unreadable,
}

/// Where units came from: segments of an epoch, and how many of each.
pub type Parts = SmallVec<[(u32, u64); 1]>;

/// What became of an operation.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[allow(missing_docs, reason = "see the module's words")]
pub enum Status {
    Taken,
    Reserved,
    Confirmed,
    Cancelled,
    Expired,
    Refund,
    Restock,
    Tombstone,
}

/// What a store remembers of an operation.
#[derive(Clone, Debug, PartialEq, Eq)]
#[allow(missing_docs, reason = "the fields are named like what they hold")]
pub struct Record {
    pub status: Status,
    pub quantity: u64,
    pub refunded: u64,
    /// The epoch that the segments are of.
    pub epoch: u32,
    pub parts: Parts,
    /// When it had its effect, and when it expires, in milliseconds of Unix time.
    pub at: u64,
    pub expires: u64,
    /// Whose it is; for a refund, which operation's.
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

    /// Units sold by it and not given back.
    pub(crate) fn sold(&self) -> u64 {
        match self.status {
            Status::Taken | Status::Confirmed => self.quantity - self.refunded,
            _ => 0,
        }
    }

    /// Whether this is the operation that is asked for again.
    pub(crate) fn is_same(&self, statuses: &[Status], quantity: u64, whose: Option<&Id>) -> bool {
        statuses.contains(&self.status) && self.quantity == quantity && self.whose.as_ref() == whose
    }
}

/// A sale, seen at one moment.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
#[allow(missing_docs, reason = "the fields are named like what they hold")]
pub struct View {
    pub now: u64,
    pub birth: u64,
    pub epoch: u32,
    pub segments: u32,
    pub available: u64,
    pub reserved: u64,
    pub sold: u64,
    pub initial: u64,
    pub restocked: u64,
    pub opens_at: u64,
    pub closes_at: u64,
    pub paused: bool,
    pub per_buyer: u64,
    pub retention: u64,
    pub journal: u64,
    /// Open reservations, and when the first of them expires; 0: none does.
    pub holds: u64,
    pub next_expiry: u64,
    /// Units sold under an operation id and not given back.
    pub sold_by_id: u64,
    /// Rises with every change.
    pub changes: u64,
    /// The generation of records that was written last, and the one before it; 0:
    /// none was. The last may be ahead of the clock, if that was set back.
    pub generations: [u64; 2],
}

impl View {
    /// The generations whose records are still found; 0 instead of one that is not,
    /// or was never written.
    pub(crate) fn found_generations(&self) -> [u64; 2] {
        let oldest = (self.now / self.retention).saturating_sub(1);
        self.generations.map(|of| if of >= oldest { of } else { 0 })
    }

    /// Whether no record was dropped yet because its time was over.
    pub(crate) fn has_all_records(&self) -> bool {
        let first = self.birth / 1_000 / self.retention;
        let [last, before] = self.generations;
        let kept_all = before == 0 || [last, before] == [first + 1, first];
        let oldest = if before == 0 { last } else { before };
        kept_all && (oldest == 0 || self.now / self.retention <= oldest + 1)
    }
}

/// What a request hears of the sale beside its answer.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Snapshot {
    pub(crate) now: u64,
    pub(crate) available: u64,
    pub(crate) reserved: u64,
    pub(crate) next_expiry: u64,
    pub(crate) opens_at: u64,
    pub(crate) changes: u64,
}

impl From<&View> for Snapshot {
    fn from(view: &View) -> Self {
        let View { now, available, reserved, next_expiry, opens_at, changes, .. } = *view;
        Snapshot { now, available, reserved, next_expiry, opens_at, changes }
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

/// A change of the sale as a whole.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[allow(missing_docs, reason = "each is named like what it does")]
pub enum Change {
    Window { opens_at: u64, closes_at: u64 },
    Pause,
    Resume,
    PerBuyer(u64),
    Resize(u32),
    Rebalance,
}

/// Where records are read on; start with the default.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Cursor(pub String);

/// Some of the records of a sale. One may come twice, the newer first.
#[derive(Clone, Debug, Default)]
#[allow(missing_docs, reason = "the fields are named like what they hold")]
pub struct Page {
    /// `None`: it cannot be read.
    pub records: Vec<(Id, Option<Record>)>,
    pub buyers: Vec<(Id, u64)>,
    /// Where to go on; `None` at the end.
    pub next: Option<Cursor>,
}

/// What a journal's entry is about.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
#[non_exhaustive]
#[allow(missing_docs, reason = "each is named like what happened")]
pub enum Effect {
    Taken,
    Reserved,
    Confirmed,
    Cancelled,
    Expired,
    Extended,
    Refunded,
    Restocked,
    Settled,
    Resized,
    Rebalanced,
}

impl Effect {
    pub(crate) const ALL: [(Effect, char); 11] = [
        (Effect::Taken, 't'),
        (Effect::Reserved, 'h'),
        (Effect::Confirmed, 'c'),
        (Effect::Cancelled, 'x'),
        (Effect::Expired, 'e'),
        (Effect::Extended, 'm'),
        (Effect::Refunded, 'r'),
        (Effect::Restocked, 's'),
        (Effect::Settled, 'q'),
        (Effect::Resized, 'z'),
        (Effect::Rebalanced, 'b'),
    ];
}

/// An entry of a sale's journal.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[non_exhaustive]
pub struct Entry {
    /// Rising by one from 1.
    pub sequence: u64,
    /// What happened.
    pub effect: Effect,
    /// Under which id, if under any.
    pub operation: Option<String>,
    /// The buyer; of a refund, the operation that it refunds.
    pub whose: Option<String>,
    /// How many units; of a resize, how many segments.
    pub quantity: u64,
    /// The segments and how many units of each.
    pub parts: Vec<(u32, u64)>,
    /// The epoch of the segments.
    pub epoch: u32,
    /// When, in milliseconds of Unix time by the store's clock.
    pub at: u64,
}

/// What a store keeps when its server ends.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct Durability {
    /// Whether effects are written to disk as they happen; `None`: not known.
    pub append_only: Option<bool>,
    /// How: `always`, `everysec` or `no`.
    pub fsync: Option<String>,
    /// What happens when the memory is full, as the server calls it.
    pub eviction: Option<String>,
}

/// A store of stock. A call may fail as a whole: with
/// [`Error::Unknown`](crate::Error::Unknown) if it may have been applied, with
/// anything else if it was not.
pub trait Store: Send + Sync + 'static {
    /// Makes a sale. One with the same terms is found again; others are a conflict.
    fn create<'a>(&'a self, key: &'a Key, terms: &'a Terms) -> Call<'a, View>;
    /// Finds a sale by its name, for somebody who may do all that is said here.
    fn open<'a>(&'a self, key: &'a Key) -> Call<'a, View>;
    /// The sale as it is, after some expired reservations were given back.
    fn view<'a>(&'a self, inventory: &'a InventoryId) -> Call<'a, View>;
    /// Forgets a sale and all that is kept of it; whether there was one.
    fn remove<'a>(&'a self, inventory: &'a InventoryId) -> Call<'a, bool>;
    /// Applies a batch: an answer each, in order.
    fn apply<'a>(
        &'a self,
        inventory: &'a InventoryId,
        batch: &'a [Request],
    ) -> Call<'a, (View, Vec<Answer>)>;
    /// Changes the sale as a whole.
    fn change<'a>(&'a self, inventory: &'a InventoryId, change: Change) -> Call<'a, View>;
    /// The counts of every segment, and the sale at the same moment.
    fn counts<'a>(&'a self, inventory: &'a InventoryId) -> Call<'a, (View, Vec<Counts>)>;
    /// How many segments each epoch had.
    fn sizes<'a>(&'a self, inventory: &'a InventoryId) -> Call<'a, Vec<u32>>;
    /// Some of the records.
    fn records<'a>(&'a self, inventory: &'a InventoryId, from: Cursor) -> Call<'a, Page>;
    /// Entries of the journal after this number, up to about `limit`.
    fn journal<'a>(
        &'a self,
        inventory: &'a InventoryId,
        after: u64,
        limit: usize,
    ) -> Call<'a, Vec<Entry>>;
    /// What would survive.
    fn durability(&self) -> Call<'_, Durability>;
}
