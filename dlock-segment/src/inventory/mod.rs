//! The count of a flash sale, kept by the store of the locks.

mod admission;
mod audit;
mod backing;
mod builder;
mod checks;
mod combiner;
mod outcome;
mod request;
#[cfg(all(test, feature = "redis"))]
mod tests_idle;

use std::fmt;
use std::num::NonZeroU32;
use std::sync::{Arc, Weak};
use std::time::{Duration, SystemTime};

use dlock::{Dlock, IntoKey, Key};
use hashbrown::HashMap;
use parking_lot::Mutex;

use self::admission::Admission;
pub use self::audit::{Audit, Disagreement, SegmentAudit};
use self::backing::{Backing, on_driver, read_failed, store};
pub use self::builder::InventoryBuilder;
use self::checks::{checked_own_id, checked_quantity, unexpected};
pub use self::outcome::{
    Deduction, Hold, HoldState, Receipt, Refund, Reservation, Resolved, Stock,
};
pub use self::request::{
    DeductRequest, RefundRequest, ReservationHandle, ReserveRequest, RestockRequest,
};
use crate::error::{Error, Result};
use crate::observe;
use crate::store::{
    Answer, Change, Durability, Entry, Id, InventoryId, Request, Snapshot, Store, View,
};

/// The longest operation id or buyer's id, in bytes.
pub const MAX_ID_BYTES: usize = 256;
/// The most units of one request.
pub const MAX_QUANTITY: u64 = u32::MAX as u64;
/// The most resizes of one sale.
pub const MAX_EPOCHS: u32 = 10_000;

/// How long "sold out" is believed without asking again, unless set otherwise.
const SOLD_OUT_FOR: Duration = Duration::from_millis(100);
/// How many entries of the journal come at once, about.
const ENTRIES: usize = 1_000;

/// A sale whose count the store keeps: never below zero, each operation once.
///
/// Cheap to clone. Handles of one sale in a process share their round trips.
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

/// What the handles of a sale in a process share.
pub(crate) struct Shared {
    inventory: InventoryId,
    backing: Backing,
    admission: Admission,
    open: Weak<OpenInventories>,
}

/// The sales in use through a client. The last handle of a sale takes it out.
#[derive(Default)]
struct OpenInventories(Mutex<HashMap<(Key, u64), Weak<Shared>>>);

impl Drop for Shared {
    fn drop(&mut self) {
        let Some(open) = self.open.upgrade() else { return };
        let mut open = open.0.lock();
        let name = (self.inventory.key.clone(), self.inventory.birth);
        // Somebody may have opened it again since the last handle went.
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
    /// A sale to be made.
    pub fn builder(dlock: &Dlock, name: impl IntoKey) -> InventoryBuilder {
        InventoryBuilder::new(dlock, name.into_key())
    }

    /// A sale that somebody made.
    ///
    /// ```
    /// # #[tokio::main(flavor = "current_thread")] async fn main() -> dlock_segment::Result<()> {
    /// # let dlock = dlock::Dlock::connect("memory://").await?;
    /// use dlock_segment::{Error, Inventory};
    ///
    /// let missing = Inventory::open(&dlock, "never made").await;
    /// assert!(matches!(missing, Err(Error::NotFound(_))));
    /// # Ok(()) }
    /// ```
    ///
    /// # Errors
    /// `NotFound` if nobody did; `Store` if the store cannot be used, or may throw
    /// stock away when its memory is full.
    ///
    /// # Cancel safety
    /// It only looks.
    pub async fn open(dlock: &Dlock, name: impl IntoKey) -> Result<Self> {
        let key = name.into_key()?;
        let name = key.clone();
        let store = store(dlock)?;
        let view = on_driver(dlock, store, move |store| async move { store.open(&name).await });
        let view = view.await.map_err(read_failed)?;
        Self::of(dlock, key, &view)
    }

    fn of(dlock: &Dlock, key: Key, view: &View) -> Result<Self> {
        let inventory = InventoryId { key, birth: view.birth };
        let all = dlock.extension::<OpenInventories>();
        let mut open = all.0.lock();
        let known = open.get(&(inventory.key.clone(), inventory.birth)).and_then(Weak::upgrade);
        let shared = match known {
            Some(shared) => shared,
            None => {
                let shared = Arc::new(Shared {
                    inventory: inventory.clone(),
                    backing: Backing::new(dlock, &inventory)?,
                    admission: Admission::default(),
                    open: Arc::downgrade(&all),
                });
                open.insert((inventory.key.clone(), inventory.birth), Arc::downgrade(&shared));
                shared
            }
        };
        Ok(Inventory { dlock: dlock.clone(), shared, sold_out_for: SOLD_OUT_FOR })
    }

    /// The name of the sale.
    pub fn name(&self) -> &Key {
        &self.shared.inventory.key
    }

    /// This process asks for units so many times a second at most, over all
    /// handles of the sale; more is `Throttled`, without a round trip.
    ///
    /// # Errors
    /// `Invalid` if the rate is zero.
    pub fn rate_limit_per_process(self, per_second: u32) -> Result<Self> {
        let per_second = NonZeroU32::new(per_second)
            .ok_or_else(|| Error::Invalid("a rate of 0 would admit nobody".into()))?;
        self.shared.admission.limit(per_second);
        Ok(self)
    }

    /// For how long this handle believes "sold out" without asking again. Zero:
    /// it always asks.
    #[must_use]
    pub fn sold_out_for(mut self, age: Duration) -> Self {
        self.sold_out_for = age;
        self
    }

    /// Takes units: all of them or none.
    pub fn deduct(&self, quantity: u64) -> DeductRequest<'_> {
        DeductRequest::new(self, quantity)
    }

    /// Reserves units for a while.
    pub fn reserve(&self, quantity: u64) -> ReserveRequest<'_> {
        ReserveRequest::new(self, quantity)
    }

    /// The reservation of this operation, whoever made it.
    pub fn reservation(&self, operation: impl AsRef<str>) -> ReservationHandle<'_> {
        ReservationHandle::new(self, operation.as_ref())
    }

    /// Gives units of an operation back.
    pub fn refund(&self, operation: impl AsRef<str>) -> RefundRequest<'_> {
        RefundRequest::new(self, operation.as_ref())
    }

    /// Adds units.
    pub fn restock(&self, quantity: u64) -> RestockRequest<'_> {
        RestockRequest::new(self, quantity)
    }

    /// Settles for good what became of an operation: applied, or not applied and
    /// refused from now on, however late it comes (within the retention).
    ///
    /// ```
    /// # #[tokio::main(flavor = "current_thread")] async fn main() -> dlock_segment::Result<()> {
    /// # let dlock = dlock::Dlock::connect("memory://").await?;
    /// # use dlock_segment::{Deduction, Inventory, Resolved};
    /// # let sale = Inventory::builder(&dlock, "resolve").stock(5).create().await?;
    /// assert_eq!(sale.resolve("order-1").await?, Resolved::NotApplied);
    /// assert_eq!(sale.deduct(1).operation("order-1").send().await?, Deduction::Refused);
    /// # Ok(()) }
    /// ```
    ///
    /// # Errors
    /// `Unknown` if the store did not answer: call it again. `NotFound` if the sale
    /// is gone, `Invalid` for an id out of bounds.
    ///
    /// # Cancel safety
    /// It may have been settled when it is dropped.
    pub async fn resolve(&self, operation: impl AsRef<str>) -> Result<Resolved> {
        let id = checked_own_id("operation id", operation.as_ref())?;
        let request = Request::Resolve { operation: id.clone() };
        match self.send(request, Some(&id)).await? {
            (_, Answer::Found(record)) => Ok(Resolved::of(id.to_string(), record)),
            (_, other) => Err(unexpected(&other)),
        }
    }

    /// The counts now. Reservations that expired count as available.
    ///
    /// # Errors
    /// `NotFound` if the sale is gone, `Store` if the store cannot be used.
    ///
    /// # Cancel safety
    /// It only looks.
    pub async fn stock(&self) -> Result<Stock> {
        loop {
            let inventory = self.shared.inventory.clone();
            let view = self.call(move |store| async move { store.view(&inventory).await }).await;
            let view = view.map_err(read_failed)?;
            // Thousands that expired at once are given back some at a time.
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

    /// Counts everything again: see [`Audit`].
    ///
    /// # Errors
    /// As [`stock`](Self::stock).
    ///
    /// # Cancel safety
    /// It only looks.
    pub async fn audit(&self) -> Result<Audit> {
        let inventory = self.shared.inventory.clone();
        self.call(move |store| async move { audit::of(&*store, &inventory).await })
            .await
            .map_err(read_failed)
    }

    /// The effects after this entry of the journal (0: from the start), in order,
    /// some at a time; go on after the last. Empty: no more for now. The last ones
    /// that the [`journal`](InventoryBuilder::journal) keeps come as often as they are asked
    /// for; a first `sequence` above `after + 1` tells that some are gone.
    ///
    /// # Errors
    /// `Invalid` if the sale was made without a [`journal`](InventoryBuilder::journal);
    /// else as [`stock`](Self::stock).
    ///
    /// # Cancel safety
    /// It only looks.
    pub async fn journal(&self, after: u64) -> Result<Vec<Entry>> {
        let inventory = self.shared.inventory.clone();
        let read = move |store: Arc<dyn Store>| async move {
            let entries = store.journal(&inventory, after, ENTRIES).await?;
            if entries.is_empty() && store.view(&inventory).await?.journal == 0 {
                return Err(Error::Invalid(
                    "the inventory keeps no journal; make it with .journal(entries)".into(),
                ));
            }
            Ok(entries)
        };
        self.call(read).await.map_err(read_failed)
    }

    /// Sells from `opens` until `closes`, by the store's clock; `None`: no bound.
    ///
    /// # Errors
    /// `Invalid` if it would close before it opens; `NotFound`, `Store`, `Unknown`.
    ///
    /// # Cancel safety
    /// It may have happened when it is dropped. So for every change below.
    pub async fn window(
        &self,
        opens: Option<SystemTime>,
        closes: Option<SystemTime>,
    ) -> Result<Stock> {
        let (opens_at, closes_at) = builder::window(opens, closes)?;
        self.change(Change::Window { opens_at, closes_at }).await
    }

    /// Sells nothing until [`resume`](Self::resume). Reservations go on.
    ///
    /// # Errors
    /// `NotFound`, `Store`, `Unknown`.
    pub async fn pause(&self) -> Result<Stock> {
        self.change(Change::Pause).await
    }

    /// Ends a [`pause`](Self::pause).
    ///
    /// # Errors
    /// As [`pause`](Self::pause).
    pub async fn resume(&self) -> Result<Stock> {
        self.change(Change::Resume).await
    }

    /// Changes how many units a buyer may have; `None`: any number. What buyers
    /// have already counts.
    ///
    /// # Errors
    /// `Invalid` out of bounds; else as [`pause`](Self::pause).
    pub async fn limit_per_buyer(&self, limit: impl Into<Option<u64>>) -> Result<Stock> {
        let limit = match limit.into() {
            Some(limit) => checked_quantity("the limit per buyer", limit)?,
            None => 0,
        };
        self.change(Change::PerBuyer(limit)).await
    }

    /// Shares what is available out over another number of segments, while the
    /// sale runs. Receipts stay good.
    ///
    /// # Errors
    /// `Invalid` out of bounds; else as [`pause`](Self::pause).
    pub async fn resize(&self, segments: u32) -> Result<Stock> {
        builder::checked_segments(segments)?;
        if self.stock().await?.epoch >= MAX_EPOCHS {
            let what = format!("the inventory was resized {MAX_EPOCHS} times; make a new one");
            return Err(Error::Invalid(what));
        }
        self.change(Change::Resize(segments)).await
    }

    /// Shares what is available out evenly.
    ///
    /// # Errors
    /// As [`pause`](Self::pause).
    pub async fn rebalance(&self) -> Result<Stock> {
        self.change(Change::Rebalance).await
    }

    /// Forgets the sale and all that is kept of it; whether it was there.
    ///
    /// # Errors
    /// `Store`, `Unknown`.
    ///
    /// # Cancel safety
    /// It may have happened when it is dropped.
    pub async fn remove(&self) -> Result<bool> {
        let inventory = self.shared.inventory.clone();
        self.call(move |store| async move { store.remove(&inventory).await }).await
    }

    /// Whether the store answers, and what it would lose if its server ended.
    ///
    /// # Cancel safety
    /// It only looks.
    pub async fn health(&self) -> Health {
        let client = self.dlock.health().await;
        let durability = self.call(|store| async move { store.durability().await }).await;
        Health { client, durability: durability.unwrap_or_default() }
    }

    async fn change(&self, change: Change) -> Result<Stock> {
        let inventory = self.shared.inventory.clone();
        let view =
            self.call(move |store| async move { store.change(&inventory, change).await }).await?;
        self.shared.admission.update(&Snapshot::from(&view), &Answer::Absent, self.sold_out_for);
        observe::changed(&self.shared.inventory.key, &change);
        Ok(view.into())
    }

    /// A call outside the combiner.
    async fn call<T, C, F>(&self, call: C) -> Result<T>
    where
        T: Send + 'static,
        C: FnOnce(Arc<dyn Store>) -> F + Send + 'static,
        F: Future<Output = Result<T>> + Send + 'static,
    {
        on_driver(&self.dlock, self.shared.backing.store(&self.dlock)?, call).await
    }

    /// Sends a request, and again under its id for as long as nobody knows what
    /// came of it.
    async fn send(&self, request: Request, id: Option<&Id>) -> Result<(Snapshot, Answer)> {
        let only_looks = matches!(
            request,
            Request::Look { .. } | Request::Resolve { .. } | Request::Extend { .. }
        );
        let answered = self.send_until_known(request, id).await;
        if let Ok((snapshot, answer)) = &answered {
            self.shared.admission.update(snapshot, answer, self.sold_out_for);
        }
        observe::answered(&self.shared.inventory.key, &answered, only_looks);
        answered
    }

    async fn send_until_known(
        &self,
        request: Request,
        id: Option<&Id>,
    ) -> Result<(Snapshot, Answer)> {
        let combiner = match &self.shared.backing {
            Backing::Memory(memory, home) => loop {
                match memory.apply_one(&self.shared.inventory, home, &request)? {
                    (_, Answer::Again) => {}
                    (view, answer) => return Ok((Snapshot::from(&view), answer)),
                }
            },
            Backing::Remote(_, combiner) => combiner,
        };
        let Some(id) = id else { return combiner.send(request).await };
        let mut doubted_until = None;
        loop {
            match combiner.send(request.clone()).await {
                Err(Error::Unknown(_)) => {}
                // Not this time; but an earlier one may have been applied.
                Err(Error::Store(_)) if doubted_until.is_some() => {}
                known => return known,
            }
            let now = tokio::time::Instant::now();
            let patience = self.dlock.client_extension().call_timeout() * 2;
            if now >= *doubted_until.get_or_insert(now + patience) {
                return Err(Error::Unknown(Some(crate::error::OperationId(id.clone()))));
            }
            tokio::time::sleep(PAUSE).await;
        }
    }
}

/// Before a request whose outcome is not known is sent again.
const PAUSE: Duration = Duration::from_millis(100);

impl fmt::Debug for Inventory {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Inventory")
            .field("name", &self.shared.inventory.key)
            .finish_non_exhaustive()
    }
}

/// How the store of a sale does: [`Inventory::health`].
#[derive(Clone, Debug)]
#[non_exhaustive]
pub struct Health {
    /// Whether the server answers, and how fast.
    pub client: dlock::Health,
    /// What would survive its end.
    pub durability: Durability,
}

impl Health {
    /// Whether the server answers.
    pub fn is_ok(&self) -> bool {
        self.client.is_ok()
    }

    /// What a crash of the server could lose, in words; `None`: nothing that was
    /// answered.
    pub fn at_risk(&self) -> Option<&'static str> {
        match (self.durability.append_only, self.durability.fsync.as_deref()) {
            (Some(true), Some("always")) => None,
            (Some(true), Some("everysec")) => Some("about a second of effects"),
            (Some(true), _) => Some("effects since the system last wrote to disk"),
            (Some(false), _) => Some("everything since the last snapshot, or everything"),
            (None, _) => Some("not known: the server does not tell how it persists"),
        }
    }
}
