//! What a sale answers.

use std::time::{Duration, SystemTime, UNIX_EPOCH};

use serde::{Deserialize, Serialize};

use crate::store::{Parts, Record, Snapshot, Status, View};

/// Proof of an effect: of a deduction, a reservation, a refund or a restock.
/// Survives a resize of the sale; the same operation gives the same again.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[non_exhaustive]
pub struct Receipt {
    /// The id, if one was given.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub operation: Option<String>,
    /// How many units.
    pub quantity: u64,
    /// The segments and how many units of each.
    pub parts: Parts,
    /// What the segments' numbers are to be read by.
    pub epoch: u32,
    /// When, in milliseconds of Unix time by the store's clock.
    pub at: u64,
}

impl Receipt {
    pub(crate) fn of(operation: Option<String>, record: Record) -> Self {
        let Record { quantity, parts, epoch, at, .. } = record;
        Receipt { operation, quantity, parts, epoch, at }
    }
}

/// Nothing is left, or not enough.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct SoldOut {
    pub(crate) reserved: u64,
    pub(crate) next_expiry: Option<Duration>,
}

impl SoldOut {
    pub(crate) fn of(snapshot: &Snapshot) -> Self {
        let left = snapshot.next_expiry.saturating_sub(snapshot.now);
        let next_expiry = (snapshot.next_expiry != 0).then(|| Duration::from_millis(left));
        SoldOut { reserved: snapshot.reserved, next_expiry }
    }
}

/// Writes an enum of what may come of asking for units.
macro_rules! outcomes {
    ($(#[$about:meta])* $name:ident { $(#[$done_about:meta])* $done:ident($what:ty) }) => {
        $(#[$about])*
        #[derive(Clone, Debug, PartialEq, Eq)]
        #[non_exhaustive]
        pub enum $name {
            $(#[$done_about])*
            $done($what),
            /// Not enough is left.
            SoldOut {
                /// How many units are only reserved and may come back.
                reserved: u64,
                /// When the next reservation expires.
                next_expiry: Option<Duration>,
            },
            /// The buyer would have more than the limit.
            LimitReached,
            /// The sale has not opened.
            NotStarted {
                /// When it will.
                opens_in: Duration,
            },
            /// The sale is over.
            Ended,
            /// The sale is paused.
            Paused,
            /// Under this id nothing happens any more: it was resolved as not
            /// applied, or cancelled before it came.
            Refused,
        }

        impl $name {
            pub(crate) fn sold_out(SoldOut { reserved, next_expiry }: SoldOut) -> Self {
                $name::SoldOut { reserved, next_expiry }
            }
        }
    };
}

outcomes! {
    /// What came of [`deduct`](crate::Inventory::deduct).
    Deduction {
        /// The units are sold.
        Taken(Receipt)
    }
}

outcomes! {
    /// What came of [`reserve`](crate::Inventory::reserve).
    Reservation {
        /// The units are held; asked for again, what became of them since.
        Held(Hold)
    }
}

/// A reservation.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[non_exhaustive]
pub struct Hold {
    /// What is reserved.
    pub receipt: Receipt,
    /// Until when, in milliseconds of Unix time by the store's clock.
    pub expires_at: u64,
    /// How it stands.
    pub state: HoldState,
}

impl Hold {
    pub(crate) fn of(id: String, record: Record) -> Self {
        let state = match record.status {
            Status::Confirmed => HoldState::Confirmed,
            Status::Cancelled => HoldState::Cancelled,
            Status::Expired => HoldState::Expired,
            _ => HoldState::Open,
        };
        Hold { expires_at: record.expires, state, receipt: Receipt::of(Some(id), record) }
    }

    /// Until when.
    pub fn expires(&self) -> SystemTime {
        UNIX_EPOCH + Duration::from_millis(self.expires_at)
    }
}

/// How a reservation stands.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
#[non_exhaustive]
pub enum HoldState {
    /// The units are reserved.
    Open,
    /// They are sold.
    Confirmed,
    /// They went back.
    Cancelled,
    /// They went back when their time was over.
    Expired,
    /// It was cancelled, or resolved as not applied, before it came.
    Refused,
}

/// What came of [`refund`](crate::Inventory::refund).
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum Refund {
    /// The units are available again.
    Refunded(Receipt),
    /// More than the operation has left to be refunded; nothing was changed.
    TooMuch {
        /// How many it has.
        left: u64,
    },
    /// Under this refund's id nothing happens any more.
    Refused,
}

/// What became of an operation: [`resolve`](crate::Inventory::resolve).
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum Resolved {
    /// The deduction was applied.
    Taken(Receipt),
    /// The reservation was applied; how it stands is in it.
    Reserved(Hold),
    /// The refund was applied.
    Refunded(Receipt),
    /// The restock was applied.
    Restocked(Receipt),
    /// It was not applied, and never will be within the retention.
    NotApplied,
}

impl Resolved {
    pub(crate) fn of(id: String, record: Record) -> Self {
        match record.status {
            Status::Taken => Resolved::Taken(Receipt::of(Some(id), record)),
            Status::Refund => Resolved::Refunded(Receipt::of(Some(id), record)),
            Status::Restock => Resolved::Restocked(Receipt::of(Some(id), record)),
            Status::Tombstone => Resolved::NotApplied,
            Status::Reserved | Status::Confirmed | Status::Cancelled | Status::Expired => {
                Resolved::Reserved(Hold::of(id, record))
            }
        }
    }
}

/// The counts of a sale at one moment.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[non_exhaustive]
#[allow(missing_docs, reason = "the fields are named like what they hold")]
pub struct Stock {
    pub initial: u64,
    pub restocked: u64,
    pub available: u64,
    pub reserved: u64,
    pub sold: u64,
    pub segments: u32,
    /// Rises with every resize.
    pub epoch: u32,
    pub paused: bool,
    pub per_buyer: Option<u64>,
    /// In milliseconds of Unix time by the store's clock, as `now`.
    pub opens_at: Option<u64>,
    pub closes_at: Option<u64>,
    /// Open reservations, and when the first expires.
    pub reservations: u64,
    pub next_expiry: Option<u64>,
    pub now: u64,
}

impl From<View> for Stock {
    fn from(view: View) -> Self {
        let some = |number: u64| (number != 0).then_some(number);
        Stock {
            initial: view.initial,
            restocked: view.restocked,
            available: view.available,
            reserved: view.reserved,
            sold: view.sold,
            segments: view.segments,
            epoch: view.epoch,
            paused: view.paused,
            per_buyer: some(view.per_buyer),
            opens_at: some(view.opens_at),
            closes_at: some(view.closes_at),
            reservations: view.holds,
            next_expiry: some(view.next_expiry),
            now: view.now,
        }
    }
}
