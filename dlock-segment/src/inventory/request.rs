//! The requests for units. Each is built first and then sent.

use std::time::{Duration, SystemTime};

use super::checks::{checked_millis, checked_optional_id, checked_quantity, unix_millis};
use super::outcome::SoldOut;
use super::sharded::Hint;
use super::{Deduction, Inventory, Receipt, Reservation, Resolved};
use crate::error::{Error, Result};
use crate::observe;
use crate::store::{Answer, Effect, Id, Request};

/// How long a reservation lasts by default.
const RESERVED_FOR: Duration = Duration::from_secs(15 * 60);

/// What requests for a number of units have in common.
#[derive(Clone, Debug)]
pub(super) struct UnitRequest<'a> {
    pub(super) inventory: &'a Inventory,
    quantity: u64,
    pub(super) operation: Option<String>,
    pub(super) placed_at: Option<SystemTime>,
    buyer: Option<String>,
    first_try: bool,
    pub(super) deadline: Option<Duration>,
}

impl<'a> UnitRequest<'a> {
    pub(super) fn new(inventory: &'a Inventory, quantity: u64) -> Self {
        UnitRequest {
            inventory,
            quantity,
            operation: None,
            placed_at: None,
            buyer: None,
            first_try: false,
            deadline: None,
        }
    }

    /// The quantity, the operation id and the buyer, if they can be used.
    pub(super) fn checked(&self) -> Result<(u64, Option<Id>, Option<Id>)> {
        let quantity = checked_quantity("the quantity", self.quantity)?;
        let operation = checked_optional_id("operation id", self.operation.as_deref())?;
        Ok((quantity, operation, checked_optional_id("buyer's id", self.buyer.as_deref())?))
    }

    /// The request with the time at which it was placed, if one was given.
    pub(super) fn placed(&self, request: Request) -> Result<Request> {
        match self.placed_at {
            None => Ok(request),
            Some(_) if self.operation.is_none() => Err(Error::Invalid(
                "only a request with an operation id can be sent again; give it one with .operation(id), or no .placed_at(time)".into(),
            )),
            Some(at) => Ok(Request::Placed { at: unix_millis(at), request: Box::new(request) }),
        }
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

        /// Says when the order was placed: the time that was written down with its id, before
        /// the first request. The answer is `TooOld` if the id is not on record and is so old
        /// that its record may be forgotten. Without it, an order that comes again after the
        /// [retention](crate::Inventory::retention) is a new one and takes its units again.
        ///
        /// Give it whenever the request may come late, from a queue for instance. An order is
        /// never too old within one retention; after a change of the retention, those that were
        /// placed before it may be.
        pub fn placed_at(mut self, time: SystemTime) -> Self {
            self.units.placed_at = Some(time);
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
    pub(super) units: UnitRequest<'a>,
}

impl<'a> DeductRequest<'a> {
    pub(super) fn new(inventory: &'a Inventory, quantity: u64) -> Self {
        DeductRequest { units: UnitRequest::new(inventory, quantity) }
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
        let request = self.units.placed(request)?;
        let deadline = inventory.deadline(self.units.deadline)?;
        match inventory.send(request, operation.as_ref(), deadline).await? {
            (snapshot, Answer::Found(record)) => {
                Ok(Deduction::of(inventory.origin(&snapshot), self.units.operation, record))
            }
            (snapshot, refused) => Deduction::refusal(&snapshot, &refused),
        }
    }
}

/// A request that buys as many units as there are, up to a number:
/// [`Inventory::deduct_up_to`].
#[derive(Clone, Debug)]
#[must_use = "nothing is bought until send() is awaited"]
pub struct DeductUpToRequest<'a> {
    units: UnitRequest<'a>,
}

impl<'a> DeductUpToRequest<'a> {
    pub(super) fn new(inventory: &'a Inventory, most: u64) -> Self {
        DeductUpToRequest { units: UnitRequest::new(inventory, most) }
    }

    unit_request_options!();

    /// Buys the units. [`Receipt::quantity`](crate::Receipt::quantity) says how many. The same
    /// call again gets the same receipt.
    ///
    /// It is a [`deduct`](Inventory::deduct) of all of them, and if fewer are left, one of what
    /// is left, under the same id. The limit per buyer must allow all of them.
    ///
    /// ```
    /// # #[tokio::main(flavor = "current_thread")] async fn main() -> dlock_segment::Result<()> {
    /// # let dlock = dlock::Dlock::connect("memory://").await?;
    /// # use dlock_segment::Deduction;
    /// # let sale = dlock_segment::Inventory::builder(&dlock, "phone").stock(3).create().await?;
    /// match sale.deduct_up_to(5).operation("order-981").send().await? {
    ///     Deduction::Taken(receipt) => assert_eq!(receipt.quantity, 3),
    ///     other => panic!("{other:?}"),
    /// }
    /// # Ok(()) }
    /// ```
    ///
    /// # Errors
    /// As [`DeductRequest::send`].
    ///
    /// # Cancel safety
    /// As [`DeductRequest::send`].
    pub async fn send(self) -> Result<Deduction> {
        let UnitRequest { inventory, quantity: most, .. } = self.units;
        let (operation, buyer) = (self.units.operation.clone(), self.units.buyer.clone());
        let mut units = self.units;
        loop {
            match (DeductRequest { units: units.clone() }.send().await, &operation) {
                // What is left becomes less with each answer, so this ends.
                (Ok(Deduction::NotEnough { available, .. }), _) => units.quantity = available,
                (Err(Error::Conflict(what)), Some(id)) => {
                    // The same call before may have got fewer.
                    let hint = Hint {
                        buyer: checked_optional_id("buyer's id", buyer.as_deref())?,
                        home: None,
                    };
                    let found = inventory.lookup_with(id, &hint).await?;
                    let is_same = |receipt: &Receipt| {
                        let is_deduction = receipt.effect == Effect::Taken;
                        is_deduction && receipt.quantity <= most && receipt.buyer == buyer
                    };
                    return match found {
                        Some(Resolved::Taken(receipt)) if is_same(&receipt) => {
                            Ok(Deduction::Taken(receipt))
                        }
                        Some(Resolved::Refunded(receipt)) if is_same(&receipt) => {
                            Ok(Deduction::Refunded(receipt))
                        }
                        _ => Err(Error::Conflict(what)),
                    };
                }
                (answered, _) => return answered,
            }
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
        ReserveRequest { units: UnitRequest::new(inventory, quantity), expires_in: RESERVED_FOR }
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
        let request = self.units.placed(request)?;
        let deadline = inventory.deadline(self.units.deadline)?;
        match inventory.send(request, Some(&id), deadline).await? {
            (snapshot, Answer::Found(record)) => {
                Ok(Reservation::of(inventory.origin(&snapshot), id.to_string(), record))
            }
            (snapshot, refused) => Reservation::refusal(&snapshot, &refused),
        }
    }
}
