//! The requests of a sale, each built up and then sent.

use std::time::Duration;

use super::checks::{WHOLE_REFUND, checked_id, checked_millis, checked_quantity, unexpected};
use super::outcome::SoldOut;
use super::{Deduction, Hold, HoldState, Inventory, Receipt, Refund, Reservation};
use crate::error::{Error, Result};
use crate::observe;
use crate::store::{Answer, Id, Record, Request, Snapshot, Status};

/// How long a reservation lasts, unless set otherwise.
const RESERVED_FOR: Duration = Duration::from_secs(15 * 60);

/// UnitRequest asks for units, under which id.
#[derive(Clone, Debug)]
struct UnitRequest<'a> {
    inventory: &'a Inventory,
    quantity: u64,
    operation: Option<String>,
    buyer: Option<String>,
    first_try: bool,
}

impl UnitRequest<'_> {
    fn checked(&self) -> Result<(u64, Option<Id>, Option<Id>)> {
        let quantity = checked_quantity("the quantity", self.quantity)?;
        let id = |what, id: &Option<String>| match id {
            Some(id) => checked_id(what, id).map(Some),
            None => Ok(None),
        };
        Ok((quantity, id("operation id", &self.operation)?, id("buyer's id", &self.buyer)?))
    }

    /// What is answered without asking: "sold out", but not to one who may have
    /// bought already.
    fn local_answer(&self) -> Result<Option<SoldOut>> {
        let (admission, key) =
            (&self.inventory.shared.admission, &self.inventory.shared.inventory.key);
        admission.admit().inspect_err(|_| observe::answered_locally(key, "throttled"))?;
        let may_know = self.operation.is_none() || self.first_try;
        let sold_out = may_know.then(|| admission.sold_out(self.quantity)).flatten();
        Ok(sold_out.inspect(|_| observe::answered_locally(key, "sold_out_cached")))
    }
}

/// Writes the options of a request for units.
macro_rules! unit_request_options {
    () => {
        /// The id under which this happens once, whoever sends it however often.
        pub fn operation(mut self, id: impl Into<String>) -> Self {
            self.units.operation = Some(id.into());
            self
        }

        /// For whom.
        pub fn buyer(mut self, id: impl Into<String>) -> Self {
            self.units.buyer = Some(id.into());
            self
        }

        /// Says that the operation id is new and was never sent before, so that
        /// "sold out" may be answered without a round trip. Without it a request
        /// with an id always asks: it may be the retry of somebody who bought.
        pub fn first_try(mut self) -> Self {
            self.units.first_try = true;
            self
        }
    };
}

/// A deduction: [`Inventory::deduct`].
#[derive(Clone, Debug)]
#[must_use = "nothing is taken until send() is awaited"]
pub struct DeductRequest<'a> {
    units: UnitRequest<'a>,
}

impl<'a> DeductRequest<'a> {
    pub(super) fn new(inventory: &'a Inventory, quantity: u64) -> Self {
        DeductRequest {
            units: UnitRequest {
                inventory,
                quantity,
                operation: None,
                buyer: None,
                first_try: false,
            },
        }
    }

    unit_request_options!();

    /// Takes the units.
    ///
    /// # Errors
    /// `Unknown` if the store did not answer; under an id it was asked again for
    /// a while. `Conflict` if the id stands for something else. `Throttled`,
    /// `Invalid`, `NotFound`, `Store`: nothing was taken.
    ///
    /// # Cancel safety
    /// Dropped before it was sent, nothing happens; later, the units may be taken:
    /// under an id, [`Inventory::resolve`] or the same call again tells.
    pub async fn send(self) -> Result<Deduction> {
        let (quantity, operation, buyer) = self.units.checked()?;
        let inventory = self.units.inventory;
        if let Some(sold_out) = self.units.local_answer()? {
            return Ok(Deduction::sold_out(sold_out));
        }
        let request = Request::Deduct { quantity, operation: operation.clone(), buyer };
        let (snapshot, answer) = inventory.send(request, operation.as_ref()).await?;
        Ok(match answer {
            Answer::Found(Record { status: Status::Tombstone, .. }) => Deduction::Refused,
            Answer::Found(record) => Deduction::Taken(Receipt::of(self.units.operation, record)),
            Answer::SoldOut => Deduction::sold_out(SoldOut::of(&snapshot)),
            Answer::LimitReached => Deduction::LimitReached,
            Answer::NotStarted => Deduction::NotStarted { opens_in: opens_in(&snapshot) },
            Answer::Ended => Deduction::Ended,
            Answer::Paused => Deduction::Paused,
            other => return Err(unexpected(&other)),
        })
    }
}

fn opens_in(snapshot: &Snapshot) -> Duration {
    Duration::from_millis(snapshot.opens_at.saturating_sub(snapshot.now))
}

/// A reservation to be made: [`Inventory::reserve`].
#[derive(Clone, Debug)]
#[must_use = "nothing is reserved until send() is awaited"]
pub struct ReserveRequest<'a> {
    units: UnitRequest<'a>,
    expires_in: Duration,
}

impl<'a> ReserveRequest<'a> {
    pub(super) fn new(inventory: &'a Inventory, quantity: u64) -> Self {
        let units =
            UnitRequest { inventory, quantity, operation: None, buyer: None, first_try: false };
        ReserveRequest { units, expires_in: RESERVED_FOR }
    }

    unit_request_options!();

    /// For how long; 15 minutes by default.
    pub fn expires_in(mut self, duration: Duration) -> Self {
        self.expires_in = duration;
        self
    }

    /// Reserves the units. They need an operation id, to be confirmed by.
    ///
    /// # Errors
    /// As [`DeductRequest::send`].
    ///
    /// # Cancel safety
    /// As [`DeductRequest::send`]; what nobody confirms expires.
    pub async fn send(self) -> Result<Reservation> {
        let (quantity, operation, buyer) = self.units.checked()?;
        let expires_in = checked_millis("the time of a reservation", self.expires_in)?;
        let Some(operation) = operation else {
            return Err(Error::Invalid("a reservation needs an .operation(id)".into()));
        };
        let inventory = self.units.inventory;
        if let Some(sold_out) = self.units.local_answer()? {
            return Ok(Reservation::sold_out(sold_out));
        }
        let id = operation.clone();
        let request = Request::Reserve { quantity, operation, buyer, expires_in };
        let (snapshot, answer) = inventory.send(request, Some(&id)).await?;
        Ok(match answer {
            Answer::Found(Record { status: Status::Tombstone, .. }) => Reservation::Refused,
            Answer::Found(record) => Reservation::Held(Hold::of(id.to_string(), record)),
            Answer::SoldOut => Reservation::sold_out(SoldOut::of(&snapshot)),
            Answer::LimitReached => Reservation::LimitReached,
            Answer::NotStarted => Reservation::NotStarted { opens_in: opens_in(&snapshot) },
            Answer::Ended => Reservation::Ended,
            Answer::Paused => Reservation::Paused,
            other => return Err(unexpected(&other)),
        })
    }
}

/// The reservation of an operation: [`Inventory::reservation`].
///
/// Every call answers how the reservation stands afterwards: who confirms one
/// that expired hears [`HoldState::Expired`], and who does the same twice hears
/// the same twice.
#[derive(Clone, Debug)]
#[must_use = "it does nothing until one of its calls is awaited"]
pub struct ReservationHandle<'a> {
    inventory: &'a Inventory,
    operation: String,
}

impl<'a> ReservationHandle<'a> {
    pub(super) fn new(inventory: &'a Inventory, operation: &str) -> Self {
        ReservationHandle { inventory, operation: operation.to_owned() }
    }

    /// Sells what is reserved.
    ///
    /// # Errors
    /// `NotFound` if there is no such operation, `Conflict` if it is not a
    /// reservation, `Unknown`, `Store`.
    ///
    /// # Cancel safety
    /// It may have happened when it is dropped; so for the calls below.
    pub async fn confirm(&self) -> Result<HoldState> {
        self.settle(|operation| Request::Confirm { operation }).await
    }

    /// Gives back what is reserved. Before the reservation came, it refuses it.
    ///
    /// # Errors
    /// As [`confirm`](Self::confirm), but never `NotFound` for the operation.
    pub async fn cancel(&self) -> Result<HoldState> {
        self.settle(|operation| Request::Cancel { operation }).await
    }

    /// Lets it last for `duration` from now, if that is longer than it would.
    /// Repeated or raced, it is done once: the end is fixed before it is sent.
    ///
    /// # Errors
    /// As [`confirm`](Self::confirm).
    pub async fn extend(&self, duration: Duration) -> Result<HoldState> {
        let lasts = checked_millis("the time of a reservation", duration)?;
        let id = checked_id("operation id", &self.operation)?;
        let (snapshot, _) =
            self.inventory.send(Request::Look { operation: id.clone() }, Some(&id)).await?;
        let until = snapshot.now + lasts;
        self.settle(|operation| Request::Extend { operation, until }).await
    }

    /// The reservation as it stands.
    ///
    /// # Errors
    /// As [`confirm`](Self::confirm).
    pub async fn look(&self) -> Result<Hold> {
        let id = checked_id("operation id", &self.operation)?;
        match self.inventory.send(Request::Look { operation: id.clone() }, Some(&id)).await? {
            (_, Answer::Found(record)) if state_of(&record).is_some() => {
                Ok(Hold::of(id.to_string(), record))
            }
            (_, Answer::Found(_)) => Err(unexpected(&Answer::Conflict)),
            (_, other) => Err(unexpected(&other)),
        }
    }

    async fn settle(&self, request: impl FnOnce(Id) -> Request) -> Result<HoldState> {
        let id = checked_id("operation id", &self.operation)?;
        match self.inventory.send(request(id.clone()), Some(&id)).await? {
            (_, Answer::Found(record)) => {
                state_of(&record).ok_or_else(|| unexpected(&Answer::Conflict))
            }
            (_, other) => Err(unexpected(&other)),
        }
    }
}

fn state_of(record: &Record) -> Option<HoldState> {
    Some(match record.status {
        Status::Reserved => HoldState::Open,
        Status::Confirmed => HoldState::Confirmed,
        Status::Cancelled => HoldState::Cancelled,
        Status::Expired => HoldState::Expired,
        Status::Tombstone => HoldState::Refused,
        Status::Taken | Status::Refund | Status::Restock => return None,
    })
}

/// A refund: [`Inventory::refund`].
#[derive(Clone, Debug)]
#[must_use = "nothing is given back until send() is awaited"]
pub struct RefundRequest<'a> {
    inventory: &'a Inventory,
    of: String,
    quantity: Option<u64>,
    operation: Option<String>,
}

impl<'a> RefundRequest<'a> {
    pub(super) fn new(inventory: &'a Inventory, of: &str) -> Self {
        RefundRequest { inventory, of: of.to_owned(), quantity: None, operation: None }
    }

    /// How many units; without it, all that are left.
    pub fn quantity(mut self, units: u64) -> Self {
        self.quantity = Some(units);
        self
    }

    /// The id of this refund, under which it happens once. May be left out if all
    /// is refunded.
    pub fn operation(mut self, id: impl Into<String>) -> Self {
        self.operation = Some(id.into());
        self
    }

    /// Gives the units back.
    ///
    /// # Errors
    /// `NotFound` if there is no such operation, `Conflict` if it is still only
    /// reserved or the refund's id stands for something else, `Invalid` for a part
    /// without an id, `Unknown`, `Store`.
    ///
    /// # Cancel safety
    /// It may have happened when it is dropped.
    pub async fn send(self) -> Result<Refund> {
        let of = checked_id("operation id", &self.of)?;
        let quantity = match self.quantity {
            Some(quantity) => checked_quantity("the quantity", quantity)?,
            None => 0,
        };
        let id: Id = match &self.operation {
            Some(id) => checked_id("refund's id", id)?,
            None if quantity == 0 => format!("{of}{WHOLE_REFUND}").into(),
            None => {
                let what = "a part of an operation is refunded under an id: .operation(id)";
                return Err(Error::Invalid(what.into()));
            }
        };
        if id == of {
            return Err(Error::Conflict("a refund needs an id of its own".into()));
        }
        let request = Request::Refund { of, quantity, operation: id.clone() };
        match self.inventory.send(request, Some(&id)).await? {
            (_, Answer::Found(Record { status: Status::Tombstone, .. })) => Ok(Refund::Refused),
            (_, Answer::Found(record)) => Ok(Refund::Refunded(Receipt::of(self.operation, record))),
            (_, Answer::TooMuch { left }) => Ok(Refund::TooMuch { left }),
            (_, other) => Err(unexpected(&other)),
        }
    }
}

/// More units: [`Inventory::restock`].
#[derive(Clone, Debug)]
#[must_use = "nothing is added until send() is awaited"]
pub struct RestockRequest<'a> {
    inventory: &'a Inventory,
    quantity: u64,
    operation: Option<String>,
}

impl<'a> RestockRequest<'a> {
    pub(super) fn new(inventory: &'a Inventory, quantity: u64) -> Self {
        RestockRequest { inventory, quantity, operation: None }
    }

    /// The id under which this happens once.
    pub fn operation(mut self, id: impl Into<String>) -> Self {
        self.operation = Some(id.into());
        self
    }

    /// Adds the units.
    ///
    /// # Errors
    /// `Invalid` out of bounds, `Conflict` if the id stands for something else or
    /// was resolved as not applied, `Unknown`, `Store`, `NotFound`.
    ///
    /// # Cancel safety
    /// It may have happened when it is dropped.
    pub async fn send(self) -> Result<Receipt> {
        let quantity = checked_quantity("the quantity", self.quantity)?;
        let id = match &self.operation {
            Some(id) => Some(checked_id("operation id", id)?),
            None => None,
        };
        let request = Request::Restock { quantity, operation: id.clone() };
        match self.inventory.send(request, id.as_ref()).await? {
            (_, Answer::Found(Record { status: Status::Tombstone, .. })) => {
                Err(Error::Conflict("this restock was resolved as not applied".into()))
            }
            (_, Answer::Found(record)) => Ok(Receipt::of(self.operation, record)),
            (_, other) => Err(unexpected(&other)),
        }
    }
}
