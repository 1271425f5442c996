//! The answers of an inventory.

use std::time::{Duration, SystemTime, UNIX_EPOCH};

use serde::{Deserialize, Serialize};

use crate::store::{Parts, Record, Snapshot, Status, View};

/// The proof of an effect: of a deduction, a reservation, a refund or a restock.
///
/// It stays valid after a resize. The same operation gives the same receipt again.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[non_exhaustive]
pub struct Receipt {
    /// The operation id, if one was given.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub operation: Option<String>,
    /// The number of units.
    pub quantity: u64,
    /// The segments that the units are from, with the number of units of each.
    pub parts: Parts,
    /// The epoch that the segment numbers belong to; a resize starts a new one.
    pub epoch: u32,
    /// The time of the effect, in milliseconds of Unix time by the store's clock.
    pub at: u64,
}

impl Receipt {
    pub(crate) fn of(operation: Option<String>, record: Record) -> Self {
        let Record { quantity, parts, epoch, at, .. } = record;
        Receipt { operation, quantity, parts, epoch, at }
    }
}

/// What is known when not enough units are left.
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

/// Writes the enum of the possible answers to a request for units.
macro_rules! outcomes {
    ($(#[$about:meta])* $name:ident { $(#[$done_about:meta])* $done:ident($what:ty) }) => {
        $(#[$about])*
        #[derive(Clone, Debug, PartialEq, Eq)]
        #[non_exhaustive]
        pub enum $name {
            $(#[$done_about])*
            $done($what),
            /// Not enough units are left.
            SoldOut {
                /// The number of units that are only reserved and may become available.
                reserved: u64,
                /// The time until the next reservation expires.
                next_expiry: Option<Duration>,
            },
            /// The buyer would have more units than the limit per buyer.
            LimitReached,
            /// The inventory does not sell yet.
            NotStarted {
                /// The time until it sells.
                opens_in: Duration,
            },
            /// The inventory does not sell any more.
            Ended,
            /// The inventory is paused.
            Paused,
            /// This operation id is refused for good: it was resolved as not applied, or
            /// cancelled before the request came.
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
    /// The answer to [`deduct`](crate::Inventory::deduct).
    Deduction {
        /// The units are sold.
        Taken(Receipt)
    }
}

outcomes! {
    /// The answer to [`reserve`](crate::Inventory::reserve).
    Reservation {
        /// The units are reserved. A repeated request gets the current state.
        Held(Hold)
    }
}

/// A reservation.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[non_exhaustive]
pub struct Hold {
    /// The receipt of the reserved units.
    pub receipt: Receipt,
    /// When the reservation expires, in milliseconds of Unix time by the store's clock.
    pub expires_at: u64,
    /// The state of the reservation.
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

    /// When the reservation expires, by the store's clock.
    pub fn expires(&self) -> SystemTime {
        UNIX_EPOCH + Duration::from_millis(self.expires_at)
    }
}

/// The state of a reservation.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
#[non_exhaustive]
pub enum HoldState {
    /// The units are reserved.
    Open,
    /// The units are sold.
    Confirmed,
    /// The units were given back.
    Cancelled,
    /// The units were given back because the time was over.
    Expired,
    /// The reservation was cancelled, or resolved as not applied, before it came.
    Refused,
}

/// The answer to [`refund`](crate::Inventory::refund).
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum Refund {
    /// The units are available again.
    Refunded(Receipt),
    /// The operation has fewer units left than were to be refunded; nothing was changed.
    TooMuch {
        /// The number of units that it has left.
        left: u64,
    },
    /// The id of this refund is refused for good: it was resolved as not applied.
    Refused,
}

/// What became of an operation: [`resolve`](crate::Inventory::resolve).
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum Resolved {
    /// The deduction was applied.
    Taken(Receipt),
    /// The reservation was applied; the value has its state.
    Reserved(Hold),
    /// The refund was applied.
    Refunded(Receipt),
    /// The restock was applied.
    Restocked(Receipt),
    /// The operation was not applied, and will not be within the retention.
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

/// The counts of an inventory at one moment.
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
    /// The number of resizes so far.
    pub epoch: u32,
    pub paused: bool,
    pub per_buyer: Option<u64>,
    /// In milliseconds of Unix time by the store's clock, like all times here.
    pub opens_at: Option<u64>,
    pub closes_at: Option<u64>,
    /// The number of open reservations; `next_expiry` is when the first of them expires.
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
