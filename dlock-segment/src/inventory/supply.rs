//! The requests that bring units back, add units, or take them out of stock. Each is built
//! first and then sent.

use std::time::{Duration, SystemTime};

use super::checks::{WHOLE_REFUND, checked_id, checked_optional_id, checked_quantity, unexpected};
use super::request::UnitRequest;
use super::sharded::Hint;
use super::{GivenBack, HoldState, Inventory, Receipt, Refund, WriteOff};
use crate::error::{Error, Result};
use crate::store::{Answer, Id, Record, Request, Status};

/// A request that gives units back: [`Inventory::refund`].
#[derive(Clone, Debug)]
#[must_use = "nothing is given back until send() is awaited"]
pub struct RefundRequest<'a> {
    inventory: &'a Inventory,
    of: String,
    quantity: Option<u64>,
    operation: Option<String>,
    receipt: Option<Receipt>,
    buyer: Option<String>,
    damaged: bool,
    deadline: Option<Duration>,
}

impl<'a> RefundRequest<'a> {
    pub(super) fn new(inventory: &'a Inventory, of: &str) -> Self {
        RefundRequest {
            inventory,
            of: of.to_owned(),
            quantity: None,
            operation: None,
            receipt: None,
            buyer: None,
            damaged: false,
            deadline: None,
        }
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

    /// Gives the receipt of the operation, so that its units can come back after the
    /// retention, when the inventory has forgotten it. While the operation is on record, the
    /// receipt changes nothing.
    ///
    /// What was given back of an operation is remembered as long as the inventory exists, by
    /// the id of each refund. So a return counts once, whether it comes before the retention
    /// is over, after it, or both. Take the receipt from your own records, never from a
    /// buyer: after the retention the inventory can only check it against its counts.
    pub fn receipt(mut self, receipt: &Receipt) -> Self {
        self.receipt = Some(receipt.clone());
        self
    }

    /// Names the buyer. An inventory that is [routed by buyer](crate::Routing::Buyer) then
    /// finds the operation at once; without the buyer and the receipt it looks in all homes.
    pub fn buyer(mut self, id: impl Into<String>) -> Self {
        self.buyer = Some(id.into());
        self
    }

    /// Declares that the units came back damaged: they are written off, and not available
    /// again.
    pub fn damaged(mut self) -> Self {
        self.damaged = true;
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
    /// `NotFound` if there is no such operation, or no longer and no receipt was given, or if
    /// the inventory was removed. `Conflict` if the operation is still only reserved, if the
    /// refund's id belongs to another request, or if the units of the receipt do not count
    /// as sold. `Invalid` for a part without an id, and for a receipt that is not that of a
    /// sale of this inventory under this id. `Store` if the store cannot be used.
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
        let receipt = self.checked_receipt()?;
        // A home that was made again has the order under the time of its reconciliation, if it
        // has it: another receipt of it would give the same units back a second time.
        let home = self.receipt.as_ref().map_or(0, |receipt| receipt.home);
        let receipt = receipt.filter(|sold| !self.inventory.was_made_again(home, sold.at));
        let receipt = receipt.map(Box::new);
        let damaged = self.damaged;
        let request = Request::Refund { of, quantity, operation: id.clone(), damaged, receipt };
        let deadline = self.inventory.deadline(self.deadline)?;
        let buyer = checked_optional_id("buyer's id", self.buyer.as_deref())?;
        let hint = Hint { buyer, home: self.receipt.as_ref().map(|receipt| receipt.home) };
        match self.inventory.send_to(request, &hint, Some(&id), deadline).await? {
            (_, Answer::Found(Record { status: Status::Tombstone, .. })) => Ok(Refund::Refused),
            (snapshot, Answer::Found(record)) => {
                let sale = self.inventory.origin(&snapshot);
                Ok(Refund::Refunded(Receipt::of(sale, self.operation, record)))
            }
            (_, Answer::TooMuch { left }) => Ok(Refund::TooMuch { left }),
            (_, other) => Err(unexpected(&other)),
        }
    }

    /// The record that the operation had, by its receipt.
    fn checked_receipt(&self) -> Result<Option<Record>> {
        let Some(receipt) = &self.receipt else { return Ok(None) };
        if receipt.inventory != self.inventory.creation_id() {
            let what = "the receipt is of another inventory, or of an earlier one of this name";
            return Err(Error::Invalid(what.into()));
        }
        if receipt.operation.as_ref() != Some(&self.of) {
            let what = "the receipt is of another operation than the one to refund";
            return Err(Error::Invalid(what.into()));
        }
        if let Some(buyer) = &receipt.buyer {
            checked_id("buyer's id", buyer)?;
        }
        receipt.record().map(Some).ok_or_else(|| {
            Error::Invalid(format!(
                "only what was sold can be refunded, and this receipt says {:?}; give the receipt of the deduction or of the confirmation",
                receipt.effect
            ))
        })
    }
}

/// A request that gives an order back, whatever became of it: [`Inventory::give_back`].
#[derive(Clone, Debug)]
#[must_use = "nothing is given back until send() is awaited"]
pub struct GiveBackRequest<'a> {
    refund: RefundRequest<'a>,
}

impl<'a> GiveBackRequest<'a> {
    pub(super) fn new(inventory: &'a Inventory, of: &str) -> Self {
        GiveBackRequest { refund: RefundRequest::new(inventory, of) }
    }

    /// Gives the receipt of the order, of its deduction, confirmation or reservation. It is
    /// needed after the retention, as for a [refund](RefundRequest::receipt).
    pub fn receipt(mut self, receipt: &Receipt) -> Self {
        self.refund = self.refund.receipt(receipt);
        self
    }

    /// Names the buyer. An inventory that is [routed by buyer](crate::Routing::Buyer) then
    /// finds the order at once; without the buyer and the receipt it looks in all homes.
    pub fn buyer(mut self, id: impl Into<String>) -> Self {
        self.refund = self.refund.buyer(id);
        self
    }

    /// Bounds each of the two calls, with everything that is sent again; twice the client's
    /// `call_timeout` by default.
    pub fn deadline(mut self, duration: Duration) -> Self {
        self.refund = self.refund.deadline(duration);
        self
    }

    /// Gives back what the order has: a reservation is cancelled, what was sold is refunded.
    ///
    /// ```
    /// # #[tokio::main(flavor = "current_thread")] async fn main() -> dlock_segment::Result<()> {
    /// # let dlock = dlock::Dlock::connect("memory://").await?;
    /// # use dlock_segment::GivenBack;
    /// # let sale = dlock_segment::Inventory::builder(&dlock, "phone").stock(5).create().await?;
    /// # let _ = sale.reserve(2).operation("order-1").send().await?;
    /// match sale.give_back("order-1").send().await? {
    ///     GivenBack::Refunded(receipt) => println!("pay for {} back", receipt.quantity),
    ///     GivenBack::NotSold(state) => println!("{state:?}: there is nothing to pay back"),
    ///     GivenBack::NothingLeft => println!("it was given back before"),
    ///     other => println!("{other:?}"),
    /// }
    /// assert_eq!(sale.stock().await?.available, 5);
    /// # Ok(()) }
    /// ```
    ///
    /// # Errors
    /// `Conflict` if the id is not that of an order. `Invalid` for a receipt that is not one of
    /// this inventory under this id. `NotFound` if the inventory was removed. `Store` if the
    /// store cannot be used. `Unknown` if it did not answer; call it again.
    ///
    /// # Cancel safety
    /// It may have happened when it is dropped; call it again.
    pub async fn send(self) -> Result<GivenBack> {
        let RefundRequest { inventory, of, receipt, buyer, deadline, .. } = &self.refund;
        let is_sold = receipt.as_ref().is_some_and(|receipt| receipt.record().is_some());
        if !is_sold {
            let id = checked_id("operation id", of)?;
            let buyer = checked_optional_id("buyer's id", buyer.as_deref())?;
            let hint = Hint { buyer, home: receipt.as_ref().map(|receipt| receipt.home) };
            let cancel = Request::Cancel { operation: id.clone() };
            let deadline = inventory.deadline(*deadline)?;
            match inventory.send_to(cancel, &hint, Some(&id), deadline).await? {
                (_, Answer::Found(record)) => match HoldState::of(&record) {
                    Some(HoldState::Refused) => return Ok(GivenBack::NotOnRecord),
                    Some(HoldState::Confirmed | HoldState::Refunded) => {}
                    Some(state) => return Ok(GivenBack::NotSold(state)),
                    None => return Err(unexpected(&Answer::Conflict)),
                },
                // It is no reservation: then it was bought at once.
                (_, Answer::Conflict) => {}
                (_, other) => return Err(unexpected(&other)),
            }
        }
        // What is not sold has a receipt that a refund does not take.
        let receipt = self.refund.receipt.clone().filter(|_| is_sold);
        match (RefundRequest { receipt, ..self.refund }).send().await? {
            Refund::Refunded(receipt) => Ok(GivenBack::Refunded(receipt)),
            Refund::TooMuch { .. } => Ok(GivenBack::NothingLeft),
            Refund::Refused => Err(Error::Conflict(
                "the refund of this order was resolved as not applied; refund it under an id of your own".into(),
            )),
        }
    }
}

/// Writes the options that restocks and write-offs share.
macro_rules! supply_request_options {
    ($operation:literal) => {
        #[doc = $operation]
        pub fn operation(mut self, id: impl Into<String>) -> Self {
            self.units.operation = Some(id.into());
            self
        }

        /// Says when it was placed: see [`DeductRequest::placed_at`](crate::DeductRequest::placed_at).
        pub fn placed_at(mut self, time: SystemTime) -> Self {
            self.units.placed_at = Some(time);
            self
        }

        /// Bounds the whole call, with everything that is sent again; twice the client's
        /// `call_timeout` by default.
        pub fn deadline(mut self, duration: Duration) -> Self {
            self.units.deadline = Some(duration);
            self
        }
    };
}

/// A request that adds units: [`Inventory::restock`].
#[derive(Clone, Debug)]
#[must_use = "nothing is added until send() is awaited"]
pub struct RestockRequest<'a> {
    units: UnitRequest<'a>,
}

impl<'a> RestockRequest<'a> {
    pub(super) fn new(inventory: &'a Inventory, quantity: u64) -> Self {
        RestockRequest { units: UnitRequest::new(inventory, quantity) }
    }

    supply_request_options!("Sets the operation id, under which the restock happens once.");

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
    /// request or was resolved as not applied, or if it was placed too long ago. `NotFound` if the inventory was removed.
    /// `Store` if the store cannot be used. `Unknown` if the store did not answer; with an
    /// id, call it again.
    ///
    /// # Cancel safety
    /// It may have happened when it is dropped; with an id, send it again.
    pub async fn send(self) -> Result<Receipt> {
        let (quantity, id, _) = self.units.checked()?;
        let request = self.units.placed(Request::Restock { quantity, operation: id.clone() })?;
        let UnitRequest { inventory, operation, deadline, .. } = self.units;
        let deadline = inventory.deadline(deadline)?;
        match inventory.send(request, id.as_ref(), deadline).await? {
            (_, Answer::Found(Record { status: Status::Tombstone, .. })) => Err(Error::Conflict(
                "this restock was resolved as not applied; use a new operation id".into(),
            )),
            (snapshot, Answer::Found(record)) => {
                inventory.spread().await;
                Ok(Receipt::of(inventory.origin(&snapshot), operation, record))
            }
            (_, other) => Err(unexpected(&other)),
        }
    }
}

/// A request that takes units out of stock: [`Inventory::write_off`].
#[derive(Clone, Debug)]
#[must_use = "nothing is written off until send() is awaited"]
pub struct WriteOffRequest<'a> {
    units: UnitRequest<'a>,
}

impl<'a> WriteOffRequest<'a> {
    pub(super) fn new(inventory: &'a Inventory, quantity: u64) -> Self {
        WriteOffRequest { units: UnitRequest::new(inventory, quantity) }
    }

    supply_request_options!(
        "Sets the operation id, under which the write-off happens once. It is required."
    );

    /// Takes the units out of stock: all of them or none. It also works while the inventory
    /// is paused or closed.
    ///
    /// ```
    /// # #[tokio::main(flavor = "current_thread")] async fn main() -> dlock_segment::Result<()> {
    /// # let dlock = dlock::Dlock::connect("memory://").await?;
    /// # use dlock_segment::WriteOff;
    /// # let sale = dlock_segment::Inventory::builder(&dlock, "phone").stock(5).create().await?;
    /// let answer = sale.write_off(2).operation("damage-7").send().await?;
    /// assert!(matches!(answer, WriteOff::WrittenOff(_)));
    /// let stock = sale.stock().await?;
    /// assert_eq!((stock.available, stock.sold, stock.written_off), (3, 0, 2));
    /// # Ok(()) }
    /// ```
    ///
    /// # Errors
    /// `Invalid` if the quantity is out of bounds or there is no operation id. `Conflict` if
    /// the id belongs to another request. `NotFound` if the inventory was removed. `Store` if
    /// the store cannot be used. `Unknown` if the store did not answer; call it again.
    ///
    /// # Cancel safety
    /// It may have happened when it is dropped; call it again.
    pub async fn send(self) -> Result<WriteOff> {
        let (quantity, Some(id), _) = self.units.checked()? else {
            return Err(Error::Invalid(
                "a write-off needs an operation id; give one with .operation(id)".into(),
            ));
        };
        let request = self.units.placed(Request::WriteOff { quantity, operation: id.clone() })?;
        let UnitRequest { inventory, operation, deadline, .. } = self.units;
        let deadline = inventory.deadline(deadline)?;
        match inventory.send(request, Some(&id), deadline).await? {
            (_, Answer::Found(Record { status: Status::Tombstone, .. })) => Ok(WriteOff::Refused),
            (snapshot, Answer::Found(record)) => {
                let sale = inventory.origin(&snapshot);
                Ok(WriteOff::WrittenOff(Receipt::of(sale, operation, record)))
            }
            (_, Answer::TooOld) => Ok(WriteOff::TooOld),
            (snapshot, Answer::SoldOut { available }) => {
                Ok(WriteOff::NotEnough { available, reserved: snapshot.reserved })
            }
            (_, other) => Err(unexpected(&other)),
        }
    }
}
