//! What can be done with a reservation after it was made.

use std::time::Duration;

use tokio::time::Instant;

use super::checks::{checked_id, checked_millis, unexpected};
use super::outcome::Origin;
use super::sharded::Hint;
use super::{Confirmation, Hold, HoldState, Inventory, Receipt};
use crate::error::{Error, Result};
use crate::store::{Answer, Id, Record, Request};

/// The reservation of an operation: [`Inventory::reservation`].
///
/// The same call twice has its effect once and returns the same answer twice. Confirming or
/// extending a reservation that is not open any more is the error
/// [`NotHeld`](Error::NotHeld).
#[derive(Clone, Debug)]
#[must_use = "it does nothing until one of its calls is awaited"]
pub struct ReservationHandle<'a> {
    inventory: &'a Inventory,
    operation: String,
    hint: Hint,
    /// The receipt that was given is of another inventory or operation.
    has_wrong_receipt: bool,
    deadline: Option<Duration>,
}

impl<'a> ReservationHandle<'a> {
    pub(super) fn new(inventory: &'a Inventory, operation: &str) -> Self {
        ReservationHandle {
            inventory,
            operation: operation.to_owned(),
            hint: Hint::default(),
            has_wrong_receipt: false,
            deadline: None,
        }
    }

    /// Names the buyer. An inventory that is [routed by buyer](crate::Routing::Buyer) then
    /// finds the reservation at once; without the buyer and the receipt it looks in all homes.
    pub fn buyer(mut self, id: impl AsRef<str>) -> Self {
        self.hint.buyer = Some(id.as_ref().into());
        self
    }

    /// Gives the receipt of the reservation, which leads to its home. With the receipt of
    /// another inventory or operation, every call fails with `Invalid`.
    pub fn receipt(mut self, receipt: &Receipt) -> Self {
        self.has_wrong_receipt = receipt.inventory != self.inventory.creation_id()
            || receipt.operation.as_ref() != Some(&self.operation);
        self.hint.home = Some(receipt.home);
        self
    }

    /// Bounds each call, with everything that is sent again; twice the client's
    /// `call_timeout` by default.
    pub fn deadline(mut self, duration: Duration) -> Self {
        self.deadline = Some(duration);
        self
    }

    /// Sells the reserved units.
    ///
    /// ```
    /// # #[tokio::main(flavor = "current_thread")] async fn main() -> dlock_segment::Result<()> {
    /// # let dlock = dlock::Dlock::connect("memory://").await?;
    /// # use dlock_segment::{Confirmation, Error};
    /// # let sale = dlock_segment::Inventory::builder(&dlock, "phone").stock(5).create().await?;
    /// # let _ = sale.reserve(2).operation("order-1").send().await?;
    /// match sale.reservation("order-1").confirm().await {
    ///     Ok(Confirmation::Confirmed(receipt)) => assert_eq!(receipt.left, 2), // ship them
    ///     Ok(other) => println!("{other:?}"), // confirmed before and refunded since
    ///     Err(Error::NotHeld(state)) => println!("{state:?}: give the money back"),
    ///     Err(error) => return Err(error),
    /// }
    /// assert_eq!(sale.stock().await?.sold, 2);
    /// # Ok(()) }
    /// ```
    ///
    /// # Errors
    /// `NotHeld` if the reservation expired, was cancelled or was refused: nothing was sold.
    /// `NotFound` if there is no such operation or the inventory was removed. `Conflict` if
    /// the operation is not a reservation. `Invalid` if the id is empty or too long. `Store`
    /// if the store cannot be used. `Unknown` if the store did not answer; call it again.
    ///
    /// # Cancel safety
    /// It may have happened when it is dropped; call it again.
    pub async fn confirm(&self) -> Result<Confirmation> {
        let deadline = self.inventory.deadline(self.deadline)?;
        let (state, origin, record) =
            self.settle(|operation| Request::Confirm { operation }, deadline).await?;
        let receipt = Receipt::of(origin, Some(self.operation.clone()), record);
        match state {
            HoldState::Confirmed => Ok(Confirmation::Confirmed(receipt)),
            HoldState::Refunded => Ok(Confirmation::Refunded(receipt)),
            state => Err(Error::NotHeld(state)),
        }
    }

    /// Gives the reserved units back. If the reservation has not arrived yet, it will be
    /// refused.
    ///
    /// ```
    /// # #[tokio::main(flavor = "current_thread")] async fn main() -> dlock_segment::Result<()> {
    /// # let dlock = dlock::Dlock::connect("memory://").await?;
    /// # use dlock_segment::HoldState;
    /// # let sale = dlock_segment::Inventory::builder(&dlock, "phone").stock(5).create().await?;
    /// # let _ = sale.reserve(2).operation("order-1").send().await?;
    /// assert_eq!(sale.reservation("order-1").cancel().await?, HoldState::Cancelled);
    /// assert_eq!(sale.stock().await?.available, 5);
    /// # Ok(()) }
    /// ```
    ///
    /// # Errors
    /// As [`confirm`](Self::confirm), but neither an unknown operation nor a state is an
    /// error: a reservation that was confirmed stays `Confirmed`.
    ///
    /// # Cancel safety
    /// It may have happened when it is dropped; call it again.
    pub async fn cancel(&self) -> Result<HoldState> {
        let deadline = self.inventory.deadline(self.deadline)?;
        let (state, ..) = self.settle(|operation| Request::Cancel { operation }, deadline).await?;
        Ok(state)
    }

    /// Makes the reservation last for `duration` from now, unless it already lasts longer.
    /// The new end is fixed before it is sent, so a repeated call does not add up.
    ///
    /// ```
    /// # #[tokio::main(flavor = "current_thread")] async fn main() -> dlock_segment::Result<()> {
    /// # let dlock = dlock::Dlock::connect("memory://").await?;
    /// # use std::time::Duration;
    /// # let sale = dlock_segment::Inventory::builder(&dlock, "phone").stock(5).create().await?;
    /// # let _ = sale.reserve(2).operation("order-1").send().await?;
    /// let hold = sale.reservation("order-1").extend(Duration::from_secs(3_600)).await?;
    /// println!("until {:?}", hold.expires());
    /// # Ok(()) }
    /// ```
    ///
    /// # Errors
    /// As [`confirm`](Self::confirm), `NotHeld` also if it is confirmed, and `Invalid` if the
    /// duration is shorter than a millisecond or longer than ten years.
    ///
    /// # Cancel safety
    /// It may have happened when it is dropped; call it again.
    pub async fn extend(&self, duration: Duration) -> Result<Hold> {
        let lasts = checked_millis("the time of a reservation", duration)?;
        let id = self.checked_id()?;
        let deadline = self.inventory.deadline(self.deadline)?;
        let look = Request::Look { operation: id.clone() };
        let (snapshot, _) = self.inventory.send_to(look, &self.hint, Some(&id), deadline).await?;
        let until = snapshot.now + lasts;
        let extend = |operation| Request::Extend { operation, until };
        match self.settle(extend, deadline).await? {
            (HoldState::Open, origin, record) => {
                Ok(Hold::of(origin, self.operation.clone(), record))
            }
            (state, ..) => Err(Error::NotHeld(state)),
        }
    }

    /// Reads the reservation.
    ///
    /// ```
    /// # #[tokio::main(flavor = "current_thread")] async fn main() -> dlock_segment::Result<()> {
    /// # let dlock = dlock::Dlock::connect("memory://").await?;
    /// # use dlock_segment::HoldState;
    /// # let sale = dlock_segment::Inventory::builder(&dlock, "phone").stock(5).create().await?;
    /// # let _ = sale.reserve(2).operation("order-1").send().await?;
    /// let hold = sale.reservation("order-1").get().await?;
    /// assert_eq!((hold.receipt.quantity, hold.state), (2, HoldState::Open));
    /// # Ok(()) }
    /// ```
    ///
    /// # Errors
    /// As [`confirm`](Self::confirm).
    ///
    /// # Cancel safety
    /// It only reads, so it can be dropped at any time.
    pub async fn get(&self) -> Result<Hold> {
        let id = self.checked_id()?;
        let deadline = self.inventory.deadline(self.deadline)?;
        let (_, origin, record) =
            self.settle(|operation| Request::Look { operation }, deadline).await?;
        Ok(Hold::of(origin, id.to_string(), record))
    }

    fn checked_id(&self) -> Result<Id> {
        if self.has_wrong_receipt {
            return Err(Error::Invalid(
                "the receipt is of another inventory or operation than the reservation".into(),
            ));
        }
        checked_id("operation id", &self.operation)
    }

    async fn settle(
        &self,
        request: impl FnOnce(Id) -> Request,
        deadline: Instant,
    ) -> Result<(HoldState, Origin, Record)> {
        let id = self.checked_id()?;
        let request = request(id.clone());
        match self.inventory.send_to(request, &self.hint, Some(&id), deadline).await? {
            (snapshot, Answer::Found(record)) => match HoldState::of(&record) {
                Some(state) => Ok((state, self.inventory.origin(&snapshot), record)),
                None => Err(unexpected(&Answer::Conflict)),
            },
            (_, other) => Err(unexpected(&other)),
        }
    }
}
