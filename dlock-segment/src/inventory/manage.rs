//! Changes of an inventory as a whole, and the health of its store.

use std::time::{Duration, SystemTime};

use super::checks::{checked_millis, checked_quantity};
use super::{Inventory, MAX_EPOCHS, Stock, builder};
use crate::error::{Error, Result};
use crate::observe;
use crate::store::{Answer, Change, Durability, Snapshot};

impl Inventory {
    /// Sets when the inventory sells: from `opens` until `closes`, by the store's clock.
    /// `None` means no bound.
    ///
    /// ```
    /// # #[tokio::main(flavor = "current_thread")] async fn main() -> dlock_segment::Result<()> {
    /// # let dlock = dlock::Dlock::connect("memory://").await?;
    /// # use dlock_segment::Deduction;
    /// # use std::time::{Duration, SystemTime};
    /// # let sale = dlock_segment::Inventory::builder(&dlock, "phone").stock(5).create().await?;
    /// let in_an_hour = SystemTime::now() + Duration::from_secs(3_600);
    /// sale.window(Some(in_an_hour), None).await?;
    /// let early = sale.deduct(1).send().await?;
    /// assert!(matches!(early, Deduction::NotStarted { .. }));
    /// # Ok(()) }
    /// ```
    ///
    /// # Errors
    /// `Invalid` if it would close before it opens.
    /// `NotFound` if the inventory was removed. `Store` if the store cannot be used.
    /// `Unknown` if the store did not answer; call it again.
    ///
    /// # Cancel safety
    /// The change may have been made when this is dropped.
    pub async fn window(
        &self,
        opens: Option<SystemTime>,
        closes: Option<SystemTime>,
    ) -> Result<Stock> {
        let (opens_at, closes_at) = builder::window(opens, closes)?;
        self.change(Change::Window { opens_at, closes_at }).await
    }

    /// Stops selling until [`resume`](Self::resume). Reservations can still be confirmed
    /// and cancelled.
    ///
    /// ```
    /// # #[tokio::main(flavor = "current_thread")] async fn main() -> dlock_segment::Result<()> {
    /// # let dlock = dlock::Dlock::connect("memory://").await?;
    /// # use dlock_segment::Deduction;
    /// # let sale = dlock_segment::Inventory::builder(&dlock, "phone").stock(5).create().await?;
    /// sale.pause().await?;
    /// assert_eq!(sale.deduct(1).send().await?, Deduction::Paused);
    /// # Ok(()) }
    /// ```
    ///
    /// # Errors
    /// `NotFound` if the inventory was removed. `Store` if the store cannot be used.
    /// `Unknown` if the store did not answer; call it again.
    ///
    /// # Cancel safety
    /// The change may have been made when this is dropped.
    pub async fn pause(&self) -> Result<Stock> {
        self.change(Change::Pause).await
    }

    /// Starts selling again after a [`pause`](Self::pause).
    ///
    /// ```
    /// # #[tokio::main(flavor = "current_thread")] async fn main() -> dlock_segment::Result<()> {
    /// # let dlock = dlock::Dlock::connect("memory://").await?;
    /// # let sale = dlock_segment::Inventory::builder(&dlock, "phone").stock(5).create().await?;
    /// sale.pause().await?;
    /// assert!(!sale.resume().await?.paused);
    /// # Ok(()) }
    /// ```
    ///
    /// # Errors
    /// `NotFound` if the inventory was removed. `Store` if the store cannot be used.
    /// `Unknown` if the store did not answer; call it again.
    ///
    /// # Cancel safety
    /// The change may have been made when this is dropped.
    pub async fn resume(&self) -> Result<Stock> {
        self.change(Change::Resume).await
    }

    /// Sets how many units a buyer may have; `None` means any number. The units that
    /// buyers have already count.
    ///
    /// ```
    /// # #[tokio::main(flavor = "current_thread")] async fn main() -> dlock_segment::Result<()> {
    /// # let dlock = dlock::Dlock::connect("memory://").await?;
    /// # use dlock_segment::Deduction;
    /// # let sale = dlock_segment::Inventory::builder(&dlock, "phone").stock(5).create().await?;
    /// sale.limit_per_buyer(2).await?;
    /// let greedy = sale.deduct(3).operation("order-1").buyer("u-7").send().await?;
    /// assert_eq!(greedy, Deduction::LimitReached);
    /// # Ok(()) }
    /// ```
    ///
    /// # Errors
    /// `Invalid` if the limit is zero or larger than [`MAX_QUANTITY`](crate::MAX_QUANTITY).
    /// `NotFound` if the inventory was removed. `Store` if the store cannot be used.
    /// `Unknown` if the store did not answer; call it again.
    ///
    /// # Cancel safety
    /// The change may have been made when this is dropped.
    pub async fn limit_per_buyer(&self, limit: impl Into<Option<u64>>) -> Result<Stock> {
        let limit = match limit.into() {
            Some(limit) => checked_quantity("the limit per buyer", limit)?,
            None => 0,
        };
        self.change(Change::PerBuyer(limit)).await
    }

    /// Sets for how long an operation id is remembered at least (and at most twice as long).
    ///
    /// The new retention begins now, also for the records that exist: each of them is found
    /// for at least this time from now on, and at most twice as long. So a longer retention
    /// saves every id that is still known, and a shorter one forgets none of them at once.
    /// Records that are gone do not come back.
    ///
    /// ```
    /// # #[tokio::main(flavor = "current_thread")] async fn main() -> dlock_segment::Result<()> {
    /// # let dlock = dlock::Dlock::connect("memory://").await?;
    /// # use std::time::Duration;
    /// # let sale = dlock_segment::Inventory::builder(&dlock, "phone").stock(5).create().await?;
    /// let month = Duration::from_secs(30 * 24 * 3_600);
    /// assert_eq!(u128::from(sale.retention(month).await?.retention), month.as_millis());
    /// # Ok(()) }
    /// ```
    ///
    /// # Errors
    /// `Invalid` if it is shorter than a millisecond or longer than ten years.
    /// `NotFound` if the inventory was removed. `Store` if the store cannot be used.
    /// `Unknown` if the store did not answer; call it again.
    ///
    /// # Cancel safety
    /// The change may have been made when this is dropped.
    pub async fn retention(&self, retention: Duration) -> Result<Stock> {
        self.change(Change::Retention(checked_millis("the retention", retention)?)).await
    }

    /// Distributes the available units over another number of segments, while the
    /// inventory is in use. Receipts stay valid.
    ///
    /// ```
    /// # #[tokio::main(flavor = "current_thread")] async fn main() -> dlock_segment::Result<()> {
    /// # let dlock = dlock::Dlock::connect("memory://").await?;
    /// # let sale = dlock_segment::Inventory::builder(&dlock, "phone").stock(5).create().await?;
    /// assert_eq!(sale.resize(16).await?.segments, 16);
    /// # Ok(()) }
    /// ```
    ///
    /// # Errors
    /// `Invalid` if the number is zero or larger than [`MAX_SEGMENTS`](crate::MAX_SEGMENTS),
    /// or if the inventory was resized [`MAX_EPOCHS`] times.
    /// `NotFound` if the inventory was removed. `Store` if the store cannot be used.
    /// `Unknown` if the store did not answer; call it again.
    ///
    /// # Cancel safety
    /// The change may have been made when this is dropped.
    pub async fn resize(&self, segments: u32) -> Result<Stock> {
        builder::checked_segments(segments)?;
        if self.stock().await?.epoch >= MAX_EPOCHS {
            let what = format!("the inventory was resized {MAX_EPOCHS} times; make a new one");
            return Err(Error::Invalid(what));
        }
        self.change(Change::Resize(segments)).await
    }

    /// Distributes the available units evenly over the segments.
    ///
    /// ```
    /// # #[tokio::main(flavor = "current_thread")] async fn main() -> dlock_segment::Result<()> {
    /// # let dlock = dlock::Dlock::connect("memory://").await?;
    /// # let sale = dlock_segment::Inventory::builder(&dlock, "phone").stock(5).create().await?;
    /// let stock = sale.rebalance().await?;
    /// assert_eq!(stock.available, 5);
    /// # Ok(()) }
    /// ```
    ///
    /// # Errors
    /// `NotFound` if the inventory was removed. `Store` if the store cannot be used.
    /// `Unknown` if the store did not answer; call it again.
    ///
    /// # Cancel safety
    /// The change may have been made when this is dropped.
    pub async fn rebalance(&self) -> Result<Stock> {
        self.change(Change::Rebalance).await
    }

    /// Deletes the inventory and all its data. Returns whether it existed.
    ///
    /// ```
    /// # #[tokio::main(flavor = "current_thread")] async fn main() -> dlock_segment::Result<()> {
    /// # let dlock = dlock::Dlock::connect("memory://").await?;
    /// # let sale = dlock_segment::Inventory::builder(&dlock, "phone").stock(5).create().await?;
    /// assert!(sale.remove().await?);
    /// assert!(!sale.remove().await?, "it is gone");
    /// # Ok(()) }
    /// ```
    ///
    /// # Errors
    /// `Store` if the store cannot be used. `Unknown` if the store did not answer; call it
    /// again.
    ///
    /// # Cancel safety
    /// The inventory may have been deleted when this is dropped.
    pub async fn remove(&self) -> Result<bool> {
        if let Some(sharded) = &self.shared.sharded {
            return sharded.remove().await;
        }
        let inventory = self.shared.inventory.clone();
        self.call(move |store| async move { store.remove(&inventory).await }).await
    }

    /// Asks whether the store answers, and what it would lose if its server crashed.
    ///
    /// ```
    /// # #[tokio::main(flavor = "current_thread")] async fn main() -> dlock_segment::Result<()> {
    /// # let dlock = dlock::Dlock::connect("memory://").await?;
    /// # let sale = dlock_segment::Inventory::builder(&dlock, "phone").stock(5).create().await?;
    /// let health = sale.health().await;
    /// assert!(health.is_ok());
    /// assert!(health.at_risk().is_some(), "memory:// keeps nothing");
    /// # Ok(()) }
    /// ```
    ///
    /// # Errors
    /// It has none: a store that does not answer is reported in [`Health`].
    ///
    /// # Cancel safety
    /// It only reads, so it can be dropped at any time.
    pub async fn health(&self) -> Health {
        let client = self.dlock.health().await;
        let durability = match &self.shared.sharded {
            Some(sharded) => sharded.durability().await,
            None => self.call(|store| async move { store.durability().await }).await,
        };
        Health { client, durability: durability.unwrap_or_default() }
    }

    async fn change(&self, change: Change) -> Result<Stock> {
        if let Some(sharded) = &self.shared.sharded {
            let stock = sharded.change(self, change).await?;
            observe::changed(&self.shared.inventory.key, &change);
            return Ok(stock);
        }
        let inventory = self.shared.inventory.clone();
        let view =
            self.call(move |store| async move { store.change(&inventory, change).await }).await?;
        self.shared.admission.update(&Snapshot::from(&view), &Answer::Absent, self.sold_out_for);
        observe::changed(&self.shared.inventory.key, &change);
        Ok(view.into())
    }
}

/// The state of the store of an inventory: [`Inventory::health`].
#[derive(Clone, Debug)]
#[non_exhaustive]
pub struct Health {
    /// Whether the server answers, and how fast.
    pub client: dlock::Health,
    /// What the server would keep after a crash.
    pub durability: Durability,
}

impl Health {
    /// Whether the server answers.
    pub fn is_ok(&self) -> bool {
        self.client.is_ok()
    }

    /// A description of what a crash of the server could lose. `None` means that nothing
    /// that was answered can be lost.
    pub fn at_risk(&self) -> Option<&'static str> {
        match (self.durability.append_only, self.durability.fsync.as_deref()) {
            (Some(true), Some("always")) => None,
            (Some(true), Some("everysec")) => {
                Some("a crash may lose about the last second of changes")
            }
            (Some(true), _) => {
                Some("a crash may lose the changes since the operating system last flushed to disk")
            }
            (Some(false), _) => {
                Some("a crash may lose all changes since the last snapshot, or everything")
            }
            (None, _) => Some(
                "it is not known what a crash may lose: the server does not report how it persists",
            ),
        }
    }
}
