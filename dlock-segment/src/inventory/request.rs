//! The requests to an inventory. Each is built first and then sent.

use std::time::Duration;

use super::checks::{WHOLE_REFUND, checked_id, checked_millis, checked_quantity, unexpected};
use super::outcome::SoldOut;
use super::{Deduction, Inventory, Receipt, Refund, Reservation};
use crate::error::{Error, Result};
use crate::observe;
use crate::store::{Answer, Id, Record, Request, Status};

/// How long a reservation lasts by default.
const RESERVED_FOR: Duration = Duration::from_secs(15 * 60);

/// What deductions and reservations have in common.
#[derive(Clone, Debug)]
struct UnitRequest<'a> {
    inventory: &'a Inventory,
    quantity: u64,
    operation: Option<String>,
    buyer: Option<String>,
    first_try: bool,
    deadline: Option<Duration>,
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

    /// The answer that needs no round trip. It is "sold out", but not for a request that
    /// may be the retry of somebody who bought.
    fn local_answer(&self) -> Result<Option<SoldOut>> {
        super::refuse_after_shutdown(&self.inventory.dlock)?;
        let (admission, key) =
            (&self.inventory.shared.admission, &self.inventory.shared.inventory.key);
        admission.admit().inspect_err(|_| observe::answered_locally(key, "throttled"))?;
        let may_know = self.operation.is_none() || self.first_try;
        let sold_out = may_know.then(|| admission.sold_out(self.quantity)).flatten();
        Ok(sold_out.inspect(|said| {
            let word = if said.available == 0 { "sold_out_cached" } else { "not_enough_cached" };
            observe::answered_locally(key, word);
        }))
    }
}

/// Writes the options that deductions and reservations share.
macro_rules! unit_request_options {
    () => {
        /// Sets the operation id. The request has its effect once under this id, however
        /// often it is sent, from any process.
        pub fn operation(mut self, id: impl Into<String>) -> Self {
            self.units.operation = Some(id.into());
            self
        }

        /// Sets the id of the buyer, whose units count against the limit per buyer.
        pub fn buyer(mut self, id: impl Into<String>) -> Self {
            self.units.buyer = Some(id.into());
            self
        }

        /// Declares that the operation id was never sent before, so that "sold out" may be
        /// answered without a round trip. Without it a request with an id is always sent,
        /// because it may be the retry of somebody who bought.
        pub fn first_try(mut self) -> Self {
            self.units.first_try = true;
            self
        }

        /// Bounds the whole call, with everything that is sent again; twice the client's
        /// `call_timeout` by default. When it passes, the error is `Unknown`, or `Store`
        /// (`Unavailable`) if nothing was sent.
        pub fn deadline(mut self, duration: Duration) -> Self {
            self.units.deadline = Some(duration);
            self
        }
    };
}

/// A request that buys units: [`Inventory::deduct`].
#[derive(Clone, Debug)]
#[must_use = "nothing is bought until send() is awaited"]
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
                deadline: None,
            },
        }
    }

    unit_request_options!();

    /// Buys the units.
    ///
    /// ```
    /// # #[tokio::main(flavor = "current_thread")] async fn main() -> dlock_segment::Result<()> {
    /// # let dlock = dlock::Dlock::connect("memory://").await?;
    /// # use dlock_segment::Deduction;
    /// # let sale = dlock_segment::Inventory::builder(&dlock, "phone").stock(5).create().await?;
    /// match sale.deduct(2).operation("order-981").buyer("u-7").send().await? {
    ///     Deduction::Taken(receipt) => assert_eq!(receipt.quantity, 2),
    ///     other => panic!("{other:?}"),
    /// }
    /// # Ok(()) }
    /// ```
    ///
    /// # Errors
    /// `Unknown` if the store did not answer; a request with an id was sent again for a
    /// while. `Conflict` if the id belongs to another request. `Throttled`, `Invalid`,
    /// `NotFound` (the inventory was removed) and `Store`: nothing was bought.
    ///
    /// # Cancel safety
    /// If it is dropped before the request was sent, nothing happens. Later, the units may
    /// have been bought: with an id, [`Inventory::resolve`] or the same call again tells.
    pub async fn send(self) -> Result<Deduction> {
        let (quantity, operation, buyer) = self.units.checked()?;
        let inventory = self.units.inventory;
        if let Some(sold_out) = self.units.local_answer()? {
            return Ok(Deduction::sold_out(sold_out));
        }
        let request = Request::Deduct { quantity, operation: operation.clone(), buyer };
        let deadline = inventory.deadline(self.units.deadline)?;
        match inventory.send(request, operation.as_ref(), deadline).await? {
            (_, Answer::Found(record)) => Ok(Deduction::of(self.units.operation, record)),
            (snapshot, refused) => Deduction::refusal(&snapshot, &refused),
        }
    }
}

/// A request that reserves units: [`Inventory::reserve`].
#[derive(Clone, Debug)]
#[must_use = "nothing is reserved until send() is awaited"]
pub struct ReserveRequest<'a> {
    units: UnitRequest<'a>,
    expires_in: Duration,
}

impl<'a> ReserveRequest<'a> {
    pub(super) fn new(inventory: &'a Inventory, quantity: u64) -> Self {
        let DeductRequest { units } = DeductRequest::new(inventory, quantity);
        ReserveRequest { units, expires_in: RESERVED_FOR }
    }

    unit_request_options!();

    /// Sets how long the reservation lasts; 15 minutes by default.
    pub fn expires_in(mut self, duration: Duration) -> Self {
        self.expires_in = duration;
        self
    }

    /// Reserves the units. A reservation needs an operation id.
    ///
    /// ```
    /// # #[tokio::main(flavor = "current_thread")] async fn main() -> dlock_segment::Result<()> {
    /// # let dlock = dlock::Dlock::connect("memory://").await?;
    /// # use dlock_segment::{HoldState, Reservation};
    /// # let sale = dlock_segment::Inventory::builder(&dlock, "phone").stock(5).create().await?;
    /// let reservation = sale.reserve(1).operation("order-982").send().await?;
    /// let Reservation::Held(hold) = reservation else { panic!("{reservation:?}") };
    /// assert_eq!(hold.state, HoldState::Open);
    /// # Ok(()) }
    /// ```
    ///
    /// # Errors
    /// As [`DeductRequest::send`], and `Invalid` without an operation id.
    ///
    /// # Cancel safety
    /// As [`DeductRequest::send`]. A reservation that nobody confirms expires.
    pub async fn send(self) -> Result<Reservation> {
        let (quantity, operation, buyer) = self.units.checked()?;
        let expires_in = checked_millis("the time of a reservation", self.expires_in)?;
        let Some(operation) = operation else {
            return Err(Error::Invalid(
                "a reservation needs an operation id; give one with .operation(id)".into(),
            ));
        };
        let inventory = self.units.inventory;
        if let Some(sold_out) = self.units.local_answer()? {
            return Ok(Reservation::sold_out(sold_out));
        }
        let id = operation.clone();
        let request = Request::Reserve { quantity, operation, buyer, expires_in };
        let deadline = inventory.deadline(self.units.deadline)?;
        match inventory.send(request, Some(&id), deadline).await? {
            (_, Answer::Found(record)) => Ok(Reservation::of(id.to_string(), record)),
            (snapshot, refused) => Reservation::refusal(&snapshot, &refused),
        }
    }
}

/// A request that gives units back: [`Inventory::refund`].
#[derive(Clone, Debug)]
#[must_use = "nothing is given back until send() is awaited"]
pub struct RefundRequest<'a> {
    inventory: &'a Inventory,
    of: String,
    quantity: Option<u64>,
    operation: Option<String>,
    deadline: Option<Duration>,
}

impl<'a> RefundRequest<'a> {
    pub(super) fn new(inventory: &'a Inventory, of: &str) -> Self {
        let of = of.to_owned();
        RefundRequest { inventory, of, quantity: None, operation: None, deadline: None }
    }

    /// Sets how many units are given back; by default all that are left.
    pub fn quantity(mut self, units: u64) -> Self {
        self.quantity = Some(units);
        self
    }

    /// Sets the operation id of the refund itself, under which it happens once. It is only
    /// needed to refund a part.
    pub fn operation(mut self, id: impl Into<String>) -> Self {
        self.operation = Some(id.into());
        self
    }

    /// Bounds the whole call, with everything that is sent again; twice the client's
    /// `call_timeout` by default.
    pub fn deadline(mut self, duration: Duration) -> Self {
        self.deadline = Some(duration);
        self
    }

    /// Gives the units back.
    ///
    /// ```
    /// # #[tokio::main(flavor = "current_thread")] async fn main() -> dlock_segment::Result<()> {
    /// # let dlock = dlock::Dlock::connect("memory://").await?;
    /// # use dlock_segment::Refund;
    /// # let sale = dlock_segment::Inventory::builder(&dlock, "phone").stock(5).create().await?;
    /// # let _ = sale.deduct(3).operation("order-1").send().await?;
    /// let refund = sale.refund("order-1").quantity(1).operation("refund-1").send().await?;
    /// assert!(matches!(refund, Refund::Refunded(_)));
    /// assert_eq!(sale.stock().await?.sold, 2);
    /// # Ok(()) }
    /// ```
    ///
    /// # Errors
    /// `NotFound` if there is no such operation or the inventory was removed. `Conflict` if
    /// the operation is still only reserved, or if the refund's id belongs to another
    /// request. `Invalid` for a part without an id. `Store` if the store cannot be used.
    /// `Unknown` if the store did not answer; call it again.
    ///
    /// # Cancel safety
    /// It may have happened when it is dropped; call it again.
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
                let what =
                    "to refund a part of an operation, give the refund an id with .operation(id)";
                return Err(Error::Invalid(what.into()));
            }
        };
        if id == of {
            return Err(Error::Conflict(
                "a refund needs an id of its own, not that of the operation it refunds".into(),
            ));
        }
        let request = Request::Refund { of, quantity, operation: id.clone() };
        let deadline = self.inventory.deadline(self.deadline)?;
        match self.inventory.send(request, Some(&id), deadline).await? {
            (_, Answer::Found(Record { status: Status::Tombstone, .. })) => Ok(Refund::Refused),
            (_, Answer::Found(record)) => Ok(Refund::Refunded(Receipt::of(self.operation, record))),
            (_, Answer::TooMuch { left }) => Ok(Refund::TooMuch { left }),
            (_, other) => Err(unexpected(&other)),
        }
    }
}

/// A request that adds units: [`Inventory::restock`].
#[derive(Clone, Debug)]
#[must_use = "nothing is added until send() is awaited"]
pub struct RestockRequest<'a> {
    inventory: &'a Inventory,
    quantity: u64,
    operation: Option<String>,
    deadline: Option<Duration>,
}

impl<'a> RestockRequest<'a> {
    pub(super) fn new(inventory: &'a Inventory, quantity: u64) -> Self {
        RestockRequest { inventory, quantity, operation: None, deadline: None }
    }

    /// Sets the operation id, under which the restock happens once.
    pub fn operation(mut self, id: impl Into<String>) -> Self {
        self.operation = Some(id.into());
        self
    }

    /// Bounds the whole call, with everything that is sent again; twice the client's
    /// `call_timeout` by default.
    pub fn deadline(mut self, duration: Duration) -> Self {
        self.deadline = Some(duration);
        self
    }

    /// Adds the units.
    ///
    /// ```
    /// # #[tokio::main(flavor = "current_thread")] async fn main() -> dlock_segment::Result<()> {
    /// # let dlock = dlock::Dlock::connect("memory://").await?;
    /// # let sale = dlock_segment::Inventory::builder(&dlock, "phone").stock(5).create().await?;
    /// let receipt = sale.restock(500).operation("delivery-3").send().await?;
    /// assert_eq!(receipt.quantity, 500);
    /// assert_eq!(sale.stock().await?.available, 505);
    /// # Ok(()) }
    /// ```
    ///
    /// # Errors
    /// `Invalid` if the quantity is out of bounds. `Conflict` if the id belongs to another
    /// request or was resolved as not applied. `NotFound` if the inventory was removed.
    /// `Store` if the store cannot be used. `Unknown` if the store did not answer; with an
    /// id, call it again.
    ///
    /// # Cancel safety
    /// It may have happened when it is dropped; with an id, send it again.
    pub async fn send(self) -> Result<Receipt> {
        let quantity = checked_quantity("the quantity", self.quantity)?;
        let id = match &self.operation {
            Some(id) => Some(checked_id("operation id", id)?),
            None => None,
        };
        let request = Request::Restock { quantity, operation: id.clone() };
        let deadline = self.inventory.deadline(self.deadline)?;
        match self.inventory.send(request, id.as_ref(), deadline).await? {
            (_, Answer::Found(Record { status: Status::Tombstone, .. })) => Err(Error::Conflict(
                "this restock was resolved as not applied; use a new operation id".into(),
            )),
            (_, Answer::Found(record)) => Ok(Receipt::of(self.operation, record)),
            (_, other) => Err(unexpected(&other)),
        }
    }
}
