//! An inventory: the count of a flash sale, kept in the store of the locks.

mod admission;
mod audit;
mod backing;
mod builder;
mod checks;
mod combiner;
mod creation_id;
#[cfg(any(feature = "mysql", feature = "postgres", feature = "sqlite"))]
mod in_transaction;
mod journal;
mod leased;
mod manage;
mod opening;
mod outcome;
mod reconcile;
mod request;
mod reservation;
mod sending;
mod sharded;
mod supply;
#[cfg(all(test, feature = "redis"))]
mod tests_idle;
mod unknown_outcomes;

use std::fmt;
use std::num::{NonZeroU32, NonZeroU64};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Weak};
use std::time::Duration;

use dlock::{Dlock, IntoKey, Key};
use futures_util::future::join_all;
use hashbrown::HashMap;
use parking_lot::Mutex;
use tokio::time::Instant;

use self::admission::{Admission, Limiters};
pub use self::audit::{Audit, Disagreement, SegmentAudit};
pub(crate) use self::backing::on_driver;
use self::backing::{Backing, read_failed, refuse_after_shutdown};
pub use self::builder::InventoryBuilder;
use self::checks::{checked_id, checked_millis, checked_own_id, unexpected};
pub use self::creation_id::CreationId;
#[cfg(any(feature = "mysql", feature = "postgres", feature = "sqlite"))]
pub use self::in_transaction::Outbox;
#[cfg(any(feature = "mysql", feature = "postgres", feature = "sqlite"))]
pub(crate) use self::in_transaction::deduct_first_free_in as deduct_first_free;
pub use self::journal::JournalCursor;
pub(crate) use self::journal::no_journal;
pub use self::leased::{LeaseBuilder, LeaseTotals, LeasedDeduction, LeasedUnits};
pub use self::manage::Health;
pub use self::opening::Repaired;
use self::outcome::Origin;
pub use self::outcome::{
    Confirmation, Deduction, GivenBack, Hold, HoldState, Receipt, Refund, Reservation, Resolved,
    Stock, WriteOff,
};
pub use self::reconcile::{
    Correction, Difference, DifferenceKind, OrderState, Reconciliation, ShopOrder,
};
pub use self::request::{DeductRequest, DeductUpToRequest, ReserveRequest};
pub use self::reservation::ReservationHandle;
use self::sharded::{Hint, ShardedInventory, site};
pub use self::supply::{GiveBackRequest, RefundRequest, RestockRequest, WriteOffRequest};
use self::unknown_outcomes::UnknownOutcomes;
use crate::error::{Error, Result};
use crate::homes::Routing;
use crate::observe::Failures;
use crate::store::{Answer, Counts, InventoryId, Request, Snapshot, Store};

/// The longest operation id or buyer id, in bytes.
pub const MAX_ID_BYTES: usize = 256;
/// The largest quantity of one request, in units.
pub const MAX_QUANTITY: u64 = u32::MAX as u64;
/// The largest number of resizes of one inventory.
pub const MAX_EPOCHS: u32 = 10_000;

/// How long "sold out" is answered without a round trip, by default.
const SOLD_OUT_FOR: Duration = Duration::from_millis(100);

/// An inventory whose count the store keeps, such as the stock of a flash sale. The
/// count never goes below zero, and each operation id has its effect once.
///
/// It is cheap to clone. The handles of one inventory in a process share round trips.
///
/// ```
/// # #[tokio::main(flavor = "current_thread")] async fn main() -> dlock_segment::Result<()> {
/// use dlock_segment::{Deduction, Inventory};
///
/// let dlock = dlock::Dlock::connect("memory://").await?;
/// let sale =
///     Inventory::builder(&dlock, "phone").stock(1_000).segments(16).per_buyer(2).create().await?;
/// match sale.deduct(1).operation("order-981").buyer("u-7").send().await? {
///     Deduction::Taken(receipt) => println!("sold {}", receipt.quantity),
///     Deduction::SoldOut { reserved, .. } => println!("sold out, {reserved} only reserved"),
///     other => println!("{other:?}"),
/// }
/// # Ok(()) }
/// ```
#[derive(Clone)]
pub struct Inventory {
    dlock: Dlock,
    shared: Arc<Shared>,
    sold_out_for: Duration,
}

/// What all handles of one inventory in this process share.
pub(crate) struct Shared {
    inventory: InventoryId,
    backing: Backing,
    admission: Admission,
    unknown_outcomes: UnknownOutcomes,
    failures: Failures,
    /// All homes, if there are several; then `backing` is that of the first.
    sharded: Option<Arc<ShardedInventory>>,
    open: Weak<OpenInventories>,
}

/// The inventories that are open through a client. Each is removed with its last handle.
#[derive(Default)]
struct OpenInventories(Mutex<HashMap<(Key, u64), Weak<Shared>>>);

impl Drop for Shared {
    fn drop(&mut self) {
        let Some(open) = self.open.upgrade() else { return };
        let mut open = open.0.lock();
        let name = (self.inventory.key.clone(), self.inventory.birth);
        // It may have been opened again since the last handle was dropped.
        if open.get(&name).is_some_and(|shared| shared.strong_count() == 0) {
            open.remove(&name);
        }
        if open.len() < open.capacity() / 4 {
            let room = open.len() * 2;
            open.shrink_to(room);
        }
    }
}

impl Inventory {
    /// Starts to build an inventory of this name.
    pub fn builder(dlock: &Dlock, name: impl IntoKey) -> InventoryBuilder {
        InventoryBuilder::new(dlock, name.into_key())
    }

    /// The id that this inventory got when it was created; see
    /// [`open_created`](Self::open_created).
    pub fn creation_id(&self) -> CreationId {
        CreationId(NonZeroU64::new(self.shared.inventory.birth).unwrap_or(NonZeroU64::MIN))
    }

    fn origin(&self, answered: &Snapshot) -> Origin {
        Origin { inventory: self.creation_id(), home: answered.home }
    }

    /// How requests find their home; `None` if the inventory has one home.
    pub fn routing(&self) -> Option<Routing> {
        self.shared.sharded.as_ref().map(|sharded| sharded.directory.routing)
    }

    /// How many times this process brought units from one home to another so far; 0 if the
    /// inventory has one home.
    pub fn moves(&self) -> u64 {
        self.shared.sharded.as_ref().map_or(0, |sharded| sharded.balancer.moves())
    }

    /// The name of the inventory.
    pub fn name(&self) -> &Key {
        &self.shared.inventory.key
    }

    /// Limits how many requests for units this process sends per second, over all handles
    /// of the inventory. Further requests fail with `Throttled`, without a round trip.
    ///
    /// # Errors
    /// `Invalid` if the rate is zero.
    pub fn rate_limit_per_process(self, per_second: u32) -> Result<Self> {
        let per_second = NonZeroU32::new(per_second).ok_or_else(|| {
            Error::Invalid("a rate of 0 would let no request through; give 1 or more".into())
        })?;
        let limiters = self.dlock.extension::<Limiters>();
        self.shared.admission.limit(limiters.of(&self.shared.inventory.key, per_second));
        Ok(self)
    }

    /// Sets for how long this handle answers "sold out" without a round trip after the
    /// store said so; 100 ms by default. The answer may be stale by that much. With zero it
    /// always asks the store.
    #[must_use]
    pub fn sold_out_for(mut self, age: Duration) -> Self {
        self.sold_out_for = age;
        self
    }

    /// Builds a request that buys units: all of them or none.
    pub fn deduct(&self, quantity: u64) -> DeductRequest<'_> {
        DeductRequest::new(self, quantity)
    }

    /// Builds a request that buys as many units as there are, up to `most` of them.
    pub fn deduct_up_to(&self, most: u64) -> DeductUpToRequest<'_> {
        DeductUpToRequest::new(self, most)
    }

    /// Builds a request that reserves units for a limited time.
    pub fn reserve(&self, quantity: u64) -> ReserveRequest<'_> {
        ReserveRequest::new(self, quantity)
    }

    /// The reservation with this operation id, from whichever process it was made.
    pub fn reservation(&self, operation: impl AsRef<str>) -> ReservationHandle<'_> {
        ReservationHandle::new(self, operation.as_ref())
    }

    /// Builds a request that gives units of an operation back. When the retention of the
    /// operation is over, the request needs its [`receipt`](RefundRequest::receipt).
    pub fn refund(&self, operation: impl AsRef<str>) -> RefundRequest<'_> {
        RefundRequest::new(self, operation.as_ref())
    }

    /// Builds a request that gives an order back, whatever became of it: it cancels what is
    /// reserved, refunds what is sold, and refuses what did not come yet.
    pub fn give_back(&self, operation: impl AsRef<str>) -> GiveBackRequest<'_> {
        GiveBackRequest::new(self, operation.as_ref())
    }

    /// Builds a request that adds units.
    pub fn restock(&self, quantity: u64) -> RestockRequest<'_> {
        RestockRequest::new(self, quantity)
    }

    /// Builds a request that takes available units out of stock without selling them, for
    /// instance because they are damaged or were lost.
    pub fn write_off(&self, quantity: u64) -> WriteOffRequest<'_> {
        WriteOffRequest::new(self, quantity)
    }

    /// Settles for good what became of an operation: it was applied, or it was not applied
    /// and will be refused from now on, however late it comes (within the retention).
    ///
    /// ```
    /// # #[tokio::main(flavor = "current_thread")] async fn main() -> dlock_segment::Result<()> {
    /// # let dlock = dlock::Dlock::connect("memory://").await?;
    /// # use dlock_segment::{Deduction, Resolved};
    /// # let sale = dlock_segment::Inventory::builder(&dlock, "phone").stock(5).create().await?;
    /// assert_eq!(sale.resolve("order-1").await?, Resolved::NotApplied);
    /// assert_eq!(sale.deduct(1).operation("order-1").send().await?, Deduction::Refused);
    /// # Ok(()) }
    /// ```
    ///
    /// # Errors
    /// `Unknown` if the store did not answer; call it again. `NotFound` if the inventory
    /// was removed. `Invalid` if the id is empty or too long. `Store` if the store cannot
    /// be used.
    ///
    /// # Cancel safety
    /// The operation may have been settled when this is dropped; call it again.
    pub async fn resolve(&self, operation: impl AsRef<str>) -> Result<Resolved> {
        self.resolve_with(operation.as_ref(), &Hint::default()).await
    }

    /// The same as [`resolve`](Self::resolve) for an operation of this buyer. In an inventory
    /// that is routed by buyer it asks one home instead of all, so it also works while another
    /// home cannot be reached, and if other buyers have used the same id.
    ///
    /// # Errors
    /// As [`resolve`](Self::resolve).
    ///
    /// # Cancel safety
    /// The operation may have been settled when this is dropped; call it again.
    pub async fn resolve_for(
        &self,
        operation: impl AsRef<str>,
        buyer: impl AsRef<str>,
    ) -> Result<Resolved> {
        let buyer = checked_id("buyer's id", buyer.as_ref())?;
        let is_routed = self.routing() == Some(Routing::Buyer);
        let hint = Hint { buyer: is_routed.then_some(buyer), home: None };
        self.resolve_with(operation.as_ref(), &hint).await
    }

    async fn resolve_with(&self, operation: &str, hint: &Hint) -> Result<Resolved> {
        let id = checked_own_id("operation id", operation)?;
        let request = Request::Resolve { operation: id.clone() };
        match self.send_to(request, hint, Some(&id), self.deadline(None)?).await? {
            (snapshot, Answer::Found(record)) => {
                Ok(Resolved::of(self.origin(&snapshot), id.to_string(), record))
            }
            (_, other) => Err(unexpected(&other)),
        }
    }

    /// Reads the counts. Expired reservations count as available.
    ///
    /// ```
    /// # #[tokio::main(flavor = "current_thread")] async fn main() -> dlock_segment::Result<()> {
    /// # let dlock = dlock::Dlock::connect("memory://").await?;
    /// # let sale = dlock_segment::Inventory::builder(&dlock, "phone").stock(5).create().await?;
    /// # let _ = sale.deduct(2).send().await?;
    /// let stock = sale.stock().await?;
    /// assert_eq!((stock.available, stock.sold), (3, 2));
    /// # Ok(()) }
    /// ```
    ///
    /// # Errors
    /// `NotFound` if the inventory was removed, `Store` if the store cannot be used.
    ///
    /// # Cancel safety
    /// It only reads, so it can be dropped at any time.
    pub async fn stock(&self) -> Result<Stock> {
        if let Some(sharded) = &self.shared.sharded {
            return sharded.stock(self).await.map_err(read_failed);
        }
        loop {
            let inventory = self.shared.inventory.clone();
            let view = self.call(move |store| async move { store.view(&inventory).await }).await;
            let view = view.map_err(read_failed)?;
            // Thousands of reservations that expired together are given back in steps.
            if view.next_expiry == 0 || view.next_expiry > view.now {
                self.shared.admission.update(
                    &Snapshot::from(&view),
                    &Answer::Absent,
                    self.sold_out_for,
                );
                return Ok(view.into());
            }
        }
    }

    /// Reads the counts of several inventories at once, in their order, for a page that shows
    /// many.
    ///
    /// ```
    /// # #[tokio::main(flavor = "current_thread")] async fn main() -> dlock_segment::Result<()> {
    /// # let dlock = dlock::Dlock::connect("memory://").await?;
    /// # use dlock_segment::Inventory;
    /// let phone = Inventory::builder(&dlock, "phone").stock(5).create().await?;
    /// let watch = Inventory::builder(&dlock, "watch").stock(7).create().await?;
    /// let stock = Inventory::stock_of(&[phone, watch]).await?;
    /// assert_eq!((stock[0].available, stock[1].available), (5, 7));
    /// # Ok(()) }
    /// ```
    ///
    /// # Errors
    /// That of the first inventory whose [`stock`](Self::stock) cannot be read.
    ///
    /// # Cancel safety
    /// It only reads, so it can be dropped at any time.
    pub async fn stock_of(sales: &[Inventory]) -> Result<Vec<Stock>> {
        join_all(sales.iter().map(Inventory::stock)).await.into_iter().collect()
    }

    /// Reads the counts of every segment, and the totals at the same moment. It costs one
    /// round trip and reads no records, so a page may show it live.
    ///
    /// ```
    /// # #[tokio::main(flavor = "current_thread")] async fn main() -> dlock_segment::Result<()> {
    /// # let dlock = dlock::Dlock::connect("memory://").await?;
    /// # let sale = dlock_segment::Inventory::builder(&dlock, "phone").stock(5).segments(2).create().await?;
    /// let (stock, segments) = sale.segments().await?;
    /// assert_eq!(segments.iter().map(|segment| segment.available).sum::<u64>(), stock.available);
    /// # Ok(()) }
    /// ```
    ///
    /// # Errors
    /// `NotFound` if the inventory was removed, `Lost` if the store lost it, `Store` if the
    /// store cannot be used.
    ///
    /// # Cancel safety
    /// It only reads, so it can be dropped at any time.
    pub async fn segments(&self) -> Result<(Stock, Vec<Counts>)> {
        if let Some(sharded) = &self.shared.sharded {
            return sharded.segments().await.map_err(read_failed);
        }
        let inventory = self.shared.inventory.clone();
        let read = self.call(move |store| async move { store.counts(&inventory).await });
        let (view, counts) = read.await.map_err(read_failed)?;
        Ok((view.into(), counts))
    }

    /// Counts everything again from the records of the operations; see [`Audit`]. It reads
    /// every record; [`segments`](Self::segments) is the cheap way to show the counts.
    ///
    /// ```
    /// # #[tokio::main(flavor = "current_thread")] async fn main() -> dlock_segment::Result<()> {
    /// # let dlock = dlock::Dlock::connect("memory://").await?;
    /// # let sale = dlock_segment::Inventory::builder(&dlock, "phone").stock(5).create().await?;
    /// # let _ = sale.deduct(2).operation("order-1").send().await?;
    /// let audit = sale.audit().await?;
    /// assert!(audit.is_clean(), "{:?}", audit.disagreements);
    /// # Ok(()) }
    /// ```
    ///
    /// # Errors
    /// `NotFound` if the inventory was removed, `Store` if the store cannot be used.
    ///
    /// # Cancel safety
    /// It only reads, so it can be dropped at any time.
    pub async fn audit(&self) -> Result<Audit> {
        self.audit_with_progress(|_| ()).await
    }

    /// The same as [`audit`](Self::audit), and says how many records were read so far. It needs
    /// memory for some numbers (up to 70 bytes) for each order, and not for the records.
    ///
    /// ```
    /// # #[tokio::main(flavor = "current_thread")] async fn main() -> dlock_segment::Result<()> {
    /// # let dlock = dlock::Dlock::connect("memory://").await?;
    /// # let sale = dlock_segment::Inventory::builder(&dlock, "phone").stock(5).create().await?;
    /// # let _ = sale.deduct(2).operation("order-1").send().await?;
    /// let audit = sale.audit_with_progress(|records| println!("{records} records")).await?;
    /// assert_eq!(audit.operations, 1);
    /// # Ok(()) }
    /// ```
    ///
    /// # Errors
    /// As [`audit`](Self::audit).
    ///
    /// # Cancel safety
    /// It only reads, so it can be dropped at any time.
    pub async fn audit_with_progress(&self, progress: impl Fn(u64) + Send + Sync) -> Result<Audit> {
        let read = AtomicU64::new(0);
        let progress = |records| progress(read.fetch_add(records, Ordering::Relaxed) + records);
        let audit = match &self.shared.sharded {
            Some(sharded) => sharded.audit(&progress).await,
            None => audit::of(&site(&self.dlock, self.shared.inventory.clone())?, &progress).await,
        };
        audit.map_err(read_failed)
    }

    /// Reads what is on record of an operation, and leaves no trace: `None` if there is
    /// nothing. Then it has not come yet, was refused, or its retention is over. To find out for
    /// good what became of a request, call [`resolve`](Self::resolve).
    ///
    /// ```
    /// # #[tokio::main(flavor = "current_thread")] async fn main() -> dlock_segment::Result<()> {
    /// # let dlock = dlock::Dlock::connect("memory://").await?;
    /// # use dlock_segment::{Deduction, Resolved};
    /// # let sale = dlock_segment::Inventory::builder(&dlock, "phone").stock(5).create().await?;
    /// assert_eq!(sale.lookup("order-1").await?, None);
    /// let sold = sale.deduct(1).operation("order-1").send().await?;
    /// assert!(matches!(sold, Deduction::Taken(_)), "it may still come");
    /// assert!(matches!(sale.lookup("order-1").await?, Some(Resolved::Taken(_))));
    /// # Ok(()) }
    /// ```
    ///
    /// # Errors
    /// `NotFound` if the inventory was removed. `Invalid` if the id is empty or too long.
    /// `Conflict` if several buyers have an operation with this id; see
    /// [`lookup_for`](Self::lookup_for). `OutOfReach` or `Store` if the store cannot be used.
    ///
    /// # Cancel safety
    /// It only reads, so it can be dropped at any time.
    pub async fn lookup(&self, operation: impl AsRef<str>) -> Result<Option<Resolved>> {
        self.lookup_with(operation.as_ref(), &Hint::default()).await
    }

    /// The same as [`lookup`](Self::lookup) for an operation of this buyer. In an inventory that
    /// is routed by buyer it asks one home instead of all.
    ///
    /// # Errors
    /// As [`lookup`](Self::lookup).
    ///
    /// # Cancel safety
    /// It only reads, so it can be dropped at any time.
    pub async fn lookup_for(
        &self,
        operation: impl AsRef<str>,
        buyer: impl AsRef<str>,
    ) -> Result<Option<Resolved>> {
        let hint = Hint { buyer: Some(checked_id("buyer's id", buyer.as_ref())?), home: None };
        self.lookup_with(operation.as_ref(), &hint).await
    }

    pub(super) async fn lookup_with(
        &self,
        operation: &str,
        hint: &Hint,
    ) -> Result<Option<Resolved>> {
        let id = checked_own_id("operation id", operation)?;
        let look = Request::Look { operation: id.clone() };
        let deadline = self.deadline(None)?;
        let is_routed = self.routing() == Some(Routing::Buyer) && hint.buyer.is_some();
        let looked = match &self.shared.sharded {
            // The id of a refund is in the home of its purchase.
            Some(sharded) if !is_routed => sharded.search(self, look, Some(&id), deadline).await,
            _ => self.send_to(look, hint, Some(&id), deadline).await,
        };
        match looked.map_err(read_failed)? {
            (snapshot, Answer::Found(record)) => {
                Ok(Some(Resolved::of(self.origin(&snapshot), id.to_string(), record)))
            }
            (_, Answer::Absent) => Ok(None),
            (_, other) => Err(unexpected(&other)),
        }
    }

    /// Makes a call that does not go through the combiner.
    async fn call<T, C, F>(&self, call: C) -> Result<T>
    where
        T: Send + 'static,
        C: FnOnce(Arc<dyn Store>) -> F + Send + 'static,
        F: Future<Output = Result<T>> + Send + 'static,
    {
        on_driver(&self.dlock, self.shared.backing.store(&self.dlock)?, call).await
    }

    /// When a call that begins now must have ended.
    fn deadline(&self, duration: Option<Duration>) -> Result<Instant> {
        let duration = match duration {
            Some(duration) => Duration::from_millis(checked_millis("the deadline", duration)?),
            // A lost answer is only noticed after one; then there is time to ask once more.
            None => 2 * self.dlock.client_extension().call_timeout(),
        };
        Ok(Instant::now() + duration)
    }
}

impl fmt::Debug for Inventory {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Inventory")
            .field("name", &self.shared.inventory.key)
            .finish_non_exhaustive()
    }
}
