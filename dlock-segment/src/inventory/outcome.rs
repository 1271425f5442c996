//! The answers of an inventory.

use std::time::{Duration, SystemTime, UNIX_EPOCH};

use serde::{Deserialize, Serialize};

use super::checks::unexpected;
use super::{CreationId, MAX_QUANTITY};
use crate::error::Result;
use crate::store::{Answer, Effect, Parts, Record, Snapshot, Status, View, is_zero};

/// The inventory and the home that an answer is from.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Origin {
    pub(crate) inventory: CreationId,
    pub(crate) home: u32,
}

/// The proof of an effect: of a deduction, a reservation, a refund, a restock or a write-off.
///
/// It stays valid after a resize. The same operation gives the same receipt again; only
/// `left` falls when units are given back, and `effect` follows a reservation.
///
/// Store it with the order, in its serialized form. When the retention is over, the
/// inventory has forgotten the operation, and
/// [`refund`](crate::RefundRequest::receipt) needs the receipt.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[non_exhaustive]
pub struct Receipt {
    /// The operation id, if one was given.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub operation: Option<String>,
    /// The inventory that it belongs to.
    pub inventory: CreationId,
    /// The home of the inventory that has the record; 0 if there is only one.
    #[serde(default, skip_serializing_if = "is_zero")]
    pub home: u32,
    /// What happened to the units. Only `Taken` and `Confirmed` mean that they were sold.
    pub effect: Effect,
    /// The buyer, if one was named.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub buyer: Option<String>,
    /// The number of units that were asked for.
    pub quantity: u64,
    /// The number of those units that were not given back (refunded, cancelled, expired).
    pub left: u64,
    /// The segments that the units are from, with the number of units of each.
    pub parts: Parts,
    /// The epoch that the segment numbers belong to; a resize starts a new one.
    pub epoch: u32,
    /// The time of the effect, in milliseconds of Unix time by the store's clock.
    pub at: u64,
}

impl Receipt {
    pub(crate) fn of(from: Origin, operation: Option<String>, record: Record) -> Self {
        let Origin { inventory, home } = from;
        let left = record.left();
        let Record { status, quantity, parts, epoch, at, whose, .. } = record;
        let (effect, has_buyer) = match status {
            Status::Taken => (Effect::Taken, true),
            Status::Reserved => (Effect::Reserved, true),
            Status::Confirmed => (Effect::Confirmed, true),
            Status::Cancelled => (Effect::Cancelled, true),
            Status::Expired => (Effect::Expired, true),
            Status::Refund => (Effect::Refunded, false),
            Status::DamagedRefund => (Effect::RefundedDamaged, false),
            Status::Restock => (Effect::Restocked, false),
            Status::WriteOff => (Effect::WrittenOff, false),
            Status::Tombstone => (Effect::Settled, false),
            Status::Debt => (Effect::Owed, true),
        };
        let buyer = whose.filter(|_| has_buyer).map(|buyer| buyer.to_string());
        Receipt { operation, inventory, home, effect, buyer, quantity, left, parts, epoch, at }
    }

    /// The record that the operation had, if this is the receipt of something sold.
    pub(crate) fn record(&self) -> Option<Record> {
        let status = match self.effect {
            Effect::Taken => Status::Taken,
            Effect::Confirmed => Status::Confirmed,
            _ => return None,
        };
        let parts = self.parts.iter().map(|(_, units)| *units);
        let sum = parts.fold(0, u64::saturating_add);
        (sum == self.quantity && self.quantity <= MAX_QUANTITY).then(|| Record {
            status,
            quantity: self.quantity,
            refunded: 0,
            epoch: self.epoch,
            parts: self.parts.clone(),
            at: self.at,
            expires: 0,
            whose: self.buyer.as_deref().map(Into::into),
        })
    }
}

/// What is known when not enough units are left.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct SoldOut {
    pub(crate) available: u64,
    pub(crate) reserved: u64,
    pub(crate) next_expiry: Option<Duration>,
}

impl SoldOut {
    pub(crate) fn of(available: u64, snapshot: &Snapshot) -> Self {
        let left = snapshot.next_expiry.saturating_sub(snapshot.now);
        let next_expiry = (snapshot.next_expiry != 0).then(|| Duration::from_millis(left));
        SoldOut { available, reserved: snapshot.reserved, next_expiry }
    }
}

/// Writes the enum of the possible answers to a request for units.
macro_rules! outcomes {
    ($(#[$about:meta])* $name:ident { $($done:tt)* }) => {
        $(#[$about])*
        #[derive(Clone, Debug, PartialEq, Eq)]
        #[non_exhaustive]
        pub enum $name {
            $($done)*
            /// The operation was applied before, and some or all of its units were
            /// refunded since: `receipt.left` are still sold. Nothing was taken again.
            Refunded(Receipt),
            /// No unit is left, or was a moment ago: this process repeats the answer for up
            /// to [`sold_out_for`](crate::Inventory::sold_out_for).
            SoldOut {
                /// The number of units that are only reserved and may become available.
                reserved: u64,
                /// The time until the next reservation expires.
                next_expiry: Option<Duration>,
            },
            /// Some units are left, but fewer than were asked for, or were a moment ago, as
            /// for `SoldOut`. Nothing was taken.
            NotEnough {
                /// The number of units that were left.
                available: u64,
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
            /// The request was [placed](crate::DeductRequest::placed_at) so long ago that its
            /// record may be forgotten, and there is none. Nothing was taken now. Whether it
            /// was before, only your own records say.
            TooOld,
            /// This operation id is refused for good: it was resolved as not applied,
            /// cancelled before the request came, or refused after a lost answer.
            Refused,
        }

        impl $name {
            pub(crate) fn sold_out(said: SoldOut) -> Self {
                match said {
                    SoldOut { available: 0, reserved, next_expiry } => {
                        $name::SoldOut { reserved, next_expiry }
                    }
                    SoldOut { available, reserved, next_expiry } => {
                        $name::NotEnough { available, reserved, next_expiry }
                    }
                }
            }

            /// The answer to a request that was refused, or the error.
            pub(crate) fn refusal(snapshot: &Snapshot, answer: &Answer) -> Result<Self> {
                Ok(match *answer {
                    Answer::SoldOut { available } => {
                        Self::sold_out(SoldOut::of(available, snapshot))
                    }
                    Answer::LimitReached => $name::LimitReached,
                    Answer::NotStarted => {
                        let left = snapshot.opens_at.saturating_sub(snapshot.now);
                        $name::NotStarted { opens_in: Duration::from_millis(left) }
                    }
                    Answer::Ended => $name::Ended,
                    Answer::Paused => $name::Paused,
                    Answer::TooOld => $name::TooOld,
                    ref other => return Err(unexpected(other)),
                })
            }
        }
    };
}

outcomes! {
    /// The answer to [`deduct`](crate::Inventory::deduct).
    #[must_use = "only `Taken` means that all units are sold; ship nothing otherwise"]
    Deduction {
        /// All units are sold, and none of them was refunded.
        Taken(Receipt),
    }
}

outcomes! {
    /// The answer to [`reserve`](crate::Inventory::reserve).
    #[must_use = "only `Held` means that the units are reserved; ask for no payment otherwise"]
    Reservation {
        /// The units are reserved until [`Hold::expires`]. The state is always `Open`.
        Held(Hold),
        /// This reservation was made before and is already confirmed: the units are sold.
        Confirmed(Receipt),
        /// This reservation was made before, and its time is over. The units are not
        /// reserved any more; reserve again under a new id.
        Expired(Hold),
        /// This reservation was made before and was cancelled. The units are not reserved
        /// any more; reserve again under a new id.
        Cancelled(Hold),
    }
}

impl Deduction {
    pub(crate) fn of(sale: Origin, operation: Option<String>, record: Record) -> Self {
        match record.status {
            Status::Tombstone => Deduction::Refused,
            _ if record.refunded > 0 => Deduction::Refunded(Receipt::of(sale, operation, record)),
            _ => Deduction::Taken(Receipt::of(sale, operation, record)),
        }
    }
}

impl Reservation {
    pub(crate) fn of(sale: Origin, id: String, record: Record) -> Self {
        match HoldState::of(&record) {
            Some(HoldState::Confirmed) => {
                Reservation::Confirmed(Receipt::of(sale, Some(id), record))
            }
            Some(HoldState::Refunded) => Reservation::Refunded(Receipt::of(sale, Some(id), record)),
            Some(HoldState::Expired) => Reservation::Expired(Hold::of(sale, id, record)),
            Some(HoldState::Cancelled) => Reservation::Cancelled(Hold::of(sale, id, record)),
            Some(HoldState::Open) => Reservation::Held(Hold::of(sale, id, record)),
            Some(HoldState::Refused) | None => Reservation::Refused,
        }
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
    pub(crate) fn of(sale: Origin, id: String, record: Record) -> Self {
        let state = HoldState::of(&record).unwrap_or(HoldState::Refused);
        Hold { expires_at: record.expires, state, receipt: Receipt::of(sale, Some(id), record) }
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
#[must_use = "the reservation may be in another state than the one that was asked for: one that was confirmed cannot be cancelled"]
pub enum HoldState {
    /// The units are reserved.
    Open,
    /// The units are sold, and none of them was refunded.
    Confirmed,
    /// The units were sold, and some or all of them were refunded since.
    Refunded,
    /// The units were given back.
    Cancelled,
    /// The units were given back because the time was over.
    Expired,
    /// The reservation was cancelled, or resolved as not applied, before it came.
    Refused,
}

impl HoldState {
    /// The state of a reservation; `None` if the record is of another operation.
    pub(crate) fn of(record: &Record) -> Option<Self> {
        Some(match record.status {
            Status::Reserved => HoldState::Open,
            Status::Confirmed if record.refunded > 0 => HoldState::Refunded,
            Status::Confirmed => HoldState::Confirmed,
            Status::Cancelled => HoldState::Cancelled,
            Status::Expired => HoldState::Expired,
            Status::Tombstone => HoldState::Refused,
            Status::Taken
            | Status::Refund
            | Status::DamagedRefund
            | Status::Restock
            | Status::WriteOff
            | Status::Debt => return None,
        })
    }
}

/// The answer to [`confirm`](crate::ReservationHandle::confirm). A reservation that cannot
/// be confirmed any more is not among them: it is the error
/// [`NotHeld`](crate::Error::NotHeld).
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
#[must_use = "only `Confirmed` means that all units are sold; after `Refunded` do not ship them again"]
pub enum Confirmation {
    /// All units are sold. The same call again gets the same answer.
    Confirmed(Receipt),
    /// The reservation was confirmed before, and some or all of its units were refunded
    /// since: `receipt.left` are still sold.
    Refunded(Receipt),
}

/// The answer to [`refund`](crate::Inventory::refund).
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
#[must_use = "only `Refunded` means that units were given back; pay no money back otherwise"]
pub enum Refund {
    /// The units are available again, or written off if they came back damaged.
    Refunded(Receipt),
    /// The operation has fewer units left than were to be refunded; nothing was changed.
    TooMuch {
        /// The number of units that it has left.
        left: u64,
    },
    /// The id of this refund is refused for good: it was resolved as not applied.
    Refused,
}

/// The answer to [`give_back`](crate::Inventory::give_back).
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
#[must_use = "only `Refunded` means that the order was sold; pay no money back otherwise"]
pub enum GivenBack {
    /// It was sold, and what was left of it came back, now or by the same call before.
    Refunded(Receipt),
    /// It was sold, and all of it was given back before, in parts.
    NothingLeft,
    /// It was reserved and not sold: it is cancelled now, or was, or had expired.
    NotSold(HoldState),
    /// Nothing is on record of it. It did not come yet, and is refused from now on; or it is
    /// older than the retention, and then its receipt is needed.
    NotOnRecord,
}

/// The answer to [`write_off`](crate::Inventory::write_off).
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
#[must_use = "only `WrittenOff` means that the units are out of stock; otherwise they may still be sold"]
pub enum WriteOff {
    /// The units are not in stock any more.
    WrittenOff(Receipt),
    /// Fewer units are available than were to be written off; nothing was changed. Units
    /// that are reserved or sold cannot be written off.
    NotEnough {
        /// The number of units that are available.
        available: u64,
        /// The number of units that are reserved and may become available.
        reserved: u64,
    },
    /// The request was placed so long ago that its record may be forgotten, and there is none.
    /// Nothing was written off now; whether it was before, only your own records say.
    TooOld,
    /// This operation id is refused for good: it was resolved as not applied.
    Refused,
}

/// What became of an operation: [`resolve`](crate::Inventory::resolve).
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
#[must_use = "it says whether the operation was applied; only then do its units exist"]
pub enum Resolved {
    /// The deduction was applied: all units are sold, and none of them was refunded.
    Taken(Receipt),
    /// The units are reserved until [`Hold::expires`].
    Held(Hold),
    /// The reservation was confirmed: all units are sold, and none of them was refunded.
    Confirmed(Receipt),
    /// The deduction or the confirmed reservation was applied, and some or all of its units
    /// were refunded since: `receipt.left` are still sold.
    Refunded(Receipt),
    /// The time of the reservation is over: its units were given back.
    Expired(Hold),
    /// The reservation was cancelled: its units were given back.
    Cancelled(Hold),
    /// The id is that of a refund, and the refund was applied.
    RefundDone(Receipt),
    /// The restock was applied.
    Restocked(Receipt),
    /// The write-off was applied.
    WrittenOff(Receipt),
    /// The operation was not applied, and will not be within the retention.
    NotApplied,
}

impl Resolved {
    pub(crate) fn of(sale: Origin, id: String, record: Record) -> Self {
        match record.status {
            Status::Taken | Status::Confirmed if record.refunded > 0 => {
                Resolved::Refunded(Receipt::of(sale, Some(id), record))
            }
            Status::Taken => Resolved::Taken(Receipt::of(sale, Some(id), record)),
            Status::Confirmed => Resolved::Confirmed(Receipt::of(sale, Some(id), record)),
            Status::Reserved => Resolved::Held(Hold::of(sale, id, record)),
            Status::Expired => Resolved::Expired(Hold::of(sale, id, record)),
            Status::Cancelled => Resolved::Cancelled(Hold::of(sale, id, record)),
            Status::Refund | Status::DamagedRefund => {
                Resolved::RefundDone(Receipt::of(sale, Some(id), record))
            }
            Status::Restock => Resolved::Restocked(Receipt::of(sale, Some(id), record)),
            Status::WriteOff => Resolved::WrittenOff(Receipt::of(sale, Some(id), record)),
            // The units of a debt were not there.
            Status::Tombstone | Status::Debt => Resolved::NotApplied,
        }
    }
}

/// The counts of an inventory at one moment: initial + restocked = available + reserved +
/// sold + written off + in transit.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[non_exhaustive]
#[allow(missing_docs, reason = "the fields are named like what they hold")]
pub struct Stock {
    pub initial: u64,
    pub restocked: u64,
    pub available: u64,
    pub reserved: u64,
    pub sold: u64,
    pub written_off: u64,
    /// The units that are on their way from one home to another.
    pub in_transit: u64,
    /// The number of homes, and of segments in each of them.
    pub homes: u32,
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
    /// For how many milliseconds an operation id is remembered at least.
    pub retention: u64,
    /// The ids of the present retention that are refused for good, of 100,000 that are
    /// possible; with several homes, in the home that has most.
    #[serde(default)]
    pub tombstones: u64,
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
            written_off: view.written_off,
            in_transit: 0,
            homes: 1,
            segments: view.segments,
            epoch: view.epoch,
            paused: view.paused,
            per_buyer: some(view.per_buyer),
            opens_at: some(view.opens_at),
            closes_at: some(view.closes_at),
            reservations: view.holds,
            next_expiry: some(view.next_expiry),
            retention: view.numbering.retention,
            tombstones: view.tombstones,
            now: view.now,
        }
    }
}
