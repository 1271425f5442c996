//! Units that a process sells from memory, without a round trip each.
//!
//! The process reserves a *lot* of units, sells them by an atomic counter, and reports at the
//! end of the lot how many it sold: these are confirmed and the rest is given back, in one
//! step. The next lot is reserved before the last one is used up.
//!
//! ```text
//! reserved -- sold from memory until (sent + ttl - margin), or used up -> closed
//! closed -- reported -----------------------------> sold n, the rest is available again
//! closed -- reported too late: the lot expired ---> n are taken from what is available
//!                                                   else they are a debt
//! the process dies -- its lots expire ------------> all their units are available again
//! ```
//! So what a process promised and did not report may be sold again after a crash: at most two
//! lots.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::Duration;

use dlock::extension::ClientExtension;
use parking_lot::Mutex;
use tokio::sync::Notify;

use super::Inventory;
use super::checks::{checked_millis, checked_quantity, unexpected};
use crate::error::{Error, Result};
use crate::store::{Answer, Id, Record, Request, Status};

/// How long a lot lasts by default.
const TTL: Duration = Duration::from_secs(10);
/// How long the units of a lot should last: then the next lot is as large.
const LASTS: f64 = 0.1;
/// The pause after the inventory was sold out, or did not answer.
const PAUSE: Duration = Duration::from_millis(100);
/// The low bits of the state are the units that are left; the others tell lots apart.
const UNITS: u64 = (1 << 40) - 1;

/// Builds a [`LeasedUnits`]: [`Inventory::lease_units`].
#[derive(Clone, Debug)]
#[must_use = "nothing is reserved until start() is awaited"]
pub struct LeaseBuilder {
    sale: Inventory,
    at_least: u64,
    at_most: u64,
    ttl: Duration,
}

/// The answer to [`LeasedUnits::deduct`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[must_use = "only `Taken` means that the units are sold"]
#[non_exhaustive]
pub enum LeasedDeduction {
    /// The units are sold, from the memory of this process.
    Taken,
    /// This process has too few units at the moment, and the next lot is on its way.
    NotNow,
    /// The inventory had none when this process last asked for a lot.
    SoldOut,
}

/// What a process did with its leased units.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct LeaseTotals {
    /// The units that were sold from memory.
    pub sold: u64,
    /// The units that were reported in time.
    pub reported: u64,
    /// The units of lots that expired before they were reported, and that were taken from what
    /// was available.
    pub late: u64,
    /// The units that were sold from memory and then were not available any more: sold twice.
    pub debt: u64,
    /// The units whose report got no answer: it is not known whether they were reported.
    pub unknown: u64,
}

/// Units of an inventory that this process sells from memory. Stop it with
/// [`stop`](Self::stop); a drop stops it in the background.
#[derive(Debug)]
pub struct LeasedUnits {
    inner: Arc<Inner>,
}

struct Inner {
    /// The units that are left of the lot, and the number of the lot.
    state: AtomicU64,
    /// Until when the lot is sold, by the client's clock in microseconds.
    until: AtomicU64,
    /// At this number of units the next lot is reserved.
    low: AtomicU64,
    is_sold_out: AtomicBool,
    is_stopping: AtomicBool,
    wake: Notify,
    refilled: Notify,
    clock: ClientExtension,
    at_least: u64,
    at_most: u64,
    ttl: Duration,
    lot: Mutex<Option<Lot>>,
    totals: Mutex<LeaseTotals>,
}

struct Lot {
    id: Id,
    size: u64,
    began: u64,
}

impl std::fmt::Debug for Inner {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("LeasedUnits").finish_non_exhaustive()
    }
}

impl Inventory {
    /// Builds a lease of units that this process sells from memory, for the hottest items: an
    /// answer takes a fraction of a microsecond instead of a round trip.
    ///
    /// It is right for whoever can live with this: if the process dies, the units that it
    /// sold and did not report (two lots at most) are for sale again, so some buyers may be
    /// told that their order cannot be filled. It has no operation ids and no buyers.
    ///
    /// ```
    /// # #[tokio::main(flavor = "current_thread")] async fn main() -> dlock_segment::Result<()> {
    /// # let dlock = dlock::Dlock::connect("memory://").await?;
    /// use dlock_segment::{Inventory, LeasedDeduction};
    ///
    /// let sale = Inventory::builder(&dlock, "phone").stock(1_000).create().await?;
    /// let units = sale.lease_units().start().await?;
    /// assert_eq!(units.deduct(3), LeasedDeduction::Taken);
    /// assert_eq!(units.stop().await?.reported, 3);
    /// assert_eq!(sale.stock().await?.sold, 3);
    /// # Ok(()) }
    /// ```
    pub fn lease_units(&self) -> LeaseBuilder {
        LeaseBuilder { sale: self.clone(), at_least: 200, at_most: 1_000_000, ttl: TTL }
    }
}

impl LeaseBuilder {
    /// Sets how many units a lot has, at least and at most; 200 and 1,000,000 by default. In
    /// between, a lot is as large as what the process sells in a tenth of a second, so that few
    /// units are left in one process while others are sold out.
    pub fn lot(mut self, at_least: u64, at_most: u64) -> Self {
        (self.at_least, self.at_most) = (at_least, at_most);
        self
    }

    /// Sets how long a lot lasts. If the process dies, its units cannot be sold for this long.
    /// 10 s by default.
    pub fn ttl(mut self, ttl: Duration) -> Self {
        self.ttl = ttl;
        self
    }

    /// Reserves the first lot and starts to sell.
    ///
    /// ```
    /// # #[tokio::main(flavor = "current_thread")] async fn main() -> dlock_segment::Result<()> {
    /// # let dlock = dlock::Dlock::connect("memory://").await?;
    /// let sale = dlock_segment::Inventory::builder(&dlock, "tablet").stock(1_000).create().await?;
    /// let units = sale.lease_units().lot(100, 500).start().await?;
    /// # Ok(()) }
    /// ```
    ///
    /// # Errors
    /// `Invalid` if the inventory limits each buyer or is routed by buyer, or if a lot or the
    /// ttl is out of bounds. Else as [`DeductRequest::send`](crate::DeductRequest::send).
    ///
    /// # Cancel safety
    /// If it is dropped, a lot may be reserved until it expires.
    pub async fn start(self) -> Result<LeasedUnits> {
        let LeaseBuilder { sale, at_least, at_most, ttl } = self;
        checked_quantity("the smallest lot", at_least)?;
        checked_quantity("the largest lot", at_most)?;
        checked_millis("the ttl of a lot", ttl)?;
        if at_least > at_most || ttl < Duration::from_millis(100) {
            let what = "the largest lot must not be smaller than the smallest, and a lot lasts 100 ms at least";
            return Err(Error::Invalid(what.into()));
        }
        let stock = sale.stock().await?;
        if stock.per_buyer.is_some() || sale.routing() == Some(crate::Routing::Buyer) {
            return Err(Error::Invalid(
                "leased units have no buyers, so an inventory that limits each buyer or is routed by buyer cannot lease them; use deduct()".into(),
            ));
        }
        let inner = Arc::new(Inner {
            state: AtomicU64::new(0),
            until: AtomicU64::new(0),
            low: AtomicU64::new(0),
            is_sold_out: AtomicBool::new(false),
            is_stopping: AtomicBool::new(false),
            wake: Notify::new(),
            refilled: Notify::new(),
            clock: sale.dlock.client_extension(),
            at_least,
            at_most,
            ttl,
            lot: Mutex::new(None),
            totals: Mutex::default(),
        });
        inner.refill(&sale, at_least).await?;
        tokio::spawn(inner.clone().keep_stocked(sale));
        Ok(LeasedUnits { inner })
    }
}

impl LeasedUnits {
    /// Sells units from memory: all of them or none.
    pub fn deduct(&self, quantity: u64) -> LeasedDeduction {
        let inner = &*self.inner;
        let mut state = inner.state.load(Ordering::Acquire);
        loop {
            let left = state & UNITS;
            if left < quantity || inner.now() >= inner.until.load(Ordering::Acquire) {
                inner.wake.notify_one();
                return match inner.is_sold_out.load(Ordering::Relaxed) {
                    true => LeasedDeduction::SoldOut,
                    false => LeasedDeduction::NotNow,
                };
            }
            // A lot that was closed meanwhile has another number, and this fails.
            let taken = inner.state.compare_exchange_weak(
                state,
                state - quantity,
                Ordering::AcqRel,
                Ordering::Acquire,
            );
            match taken {
                Ok(_) => {
                    let low = inner.low.load(Ordering::Relaxed);
                    if left >= low && left - quantity < low {
                        inner.wake.notify_one();
                    }
                    return LeasedDeduction::Taken;
                }
                Err(now) => state = now,
            }
        }
    }

    /// Sells units, and waits for the next lot if this process has too few.
    ///
    /// ```
    /// # #[tokio::main(flavor = "current_thread")] async fn main() -> dlock_segment::Result<()> {
    /// # let dlock = dlock::Dlock::connect("memory://").await?;
    /// use dlock_segment::{Inventory, LeasedDeduction};
    /// let sale = Inventory::builder(&dlock, "watch").stock(1_000).create().await?;
    /// let units = sale.lease_units().start().await?;
    /// assert_eq!(units.deduct_or_wait(2).await, LeasedDeduction::Taken);
    /// # Ok(()) }
    /// ```
    ///
    /// # Cancel safety
    /// If it is dropped while it waits, nothing was sold.
    pub async fn deduct_or_wait(&self, quantity: u64) -> LeasedDeduction {
        loop {
            let mut refilled = std::pin::pin!(self.inner.refilled.notified());
            refilled.as_mut().enable(); // a lot that comes from now on is heard
            match self.deduct(quantity) {
                LeasedDeduction::NotNow if !self.inner.is_stopping.load(Ordering::Acquire) => {
                    let _ = tokio::time::timeout(PAUSE, refilled).await;
                }
                answer => return answer,
            }
        }
    }

    /// What was sold and reported so far. What is sold of the open lot is not reported yet.
    pub fn totals(&self) -> LeaseTotals {
        *self.inner.totals.lock()
    }

    /// Stops selling, reports what was sold and gives the rest back.
    ///
    /// ```
    /// # #[tokio::main(flavor = "current_thread")] async fn main() -> dlock_segment::Result<()> {
    /// # let dlock = dlock::Dlock::connect("memory://").await?;
    /// use dlock_segment::{Inventory, LeasedDeduction};
    /// let sale = Inventory::builder(&dlock, "camera").stock(1_000).create().await?;
    /// let units = sale.lease_units().start().await?;
    /// assert_eq!(units.deduct(3), LeasedDeduction::Taken);
    /// assert_eq!(units.stop().await?.reported, 3);
    /// # Ok(()) }
    /// ```
    ///
    /// # Errors
    /// `Unknown` or `Store` if the store does not answer: then the units that were sold of the
    /// last lot are not reported, and are for sale again when it expires.
    ///
    /// # Cancel safety
    /// The last lot may not be reported when it is dropped.
    pub async fn stop(&self) -> Result<LeaseTotals> {
        let inner = &self.inner;
        inner.is_stopping.store(true, Ordering::Release);
        inner.wake.notify_one();
        while Arc::strong_count(inner) > 1 {
            let _ =
                tokio::time::timeout(Duration::from_millis(20), inner.refilled.notified()).await;
        }
        let totals = *inner.totals.lock();
        if totals.unknown > 0 {
            return Err(Error::Unknown(None));
        }
        Ok(totals)
    }
}

impl Drop for LeasedUnits {
    fn drop(&mut self) {
        self.inner.is_stopping.store(true, Ordering::Release);
        self.inner.wake.notify_one();
    }
}

impl Inner {
    fn now(&self) -> u64 {
        self.clock.now().as_micros()
    }

    /// Closes the lot: nothing of it is sold any more. Returns it and what was sold of it.
    fn close(&self) -> Option<(Lot, u64)> {
        let mut lot = self.lot.lock();
        let before = self.state.fetch_update(Ordering::AcqRel, Ordering::Acquire, |state| {
            Some((state & !UNITS).wrapping_add(UNITS + 1)) // another number, and nothing left
        });
        let left = before.unwrap_or_else(|state| state) & UNITS;
        lot.take().map(|lot| {
            let sold = lot.size - left;
            (lot, sold)
        })
    }

    /// Reserves a lot and sells it instead of the one before, which is then reported.
    async fn refill(&self, sale: &Inventory, wanted: u64) -> Result<Option<(Lot, u64)>> {
        let mut wanted = wanted;
        for _ in 0..8 {
            let id: Id = format!("lease:{:032x}", rand::random::<u128>()).into();
            let sent = self.now();
            let lasts = u64::try_from(self.ttl.as_millis()).unwrap_or(u64::MAX);
            let request = Request::Reserve {
                quantity: wanted,
                operation: id.clone(),
                buyer: None,
                expires_in: lasts,
            };
            let deadline = sale.deadline(None)?;
            match sale.send(request, Some(&id), deadline).await? {
                (_, Answer::Found(Record { status: Status::Reserved, .. })) => {
                    let before = self.close();
                    let mut lot = self.lot.lock();
                    // A quarter of the time is for the report, and for clocks that differ.
                    self.until.store(sent + lasts * 750, Ordering::Release);
                    self.low.store(wanted / 2, Ordering::Relaxed);
                    self.state.fetch_add(wanted, Ordering::AcqRel);
                    *lot = Some(Lot { id, size: wanted, began: sent });
                    drop(lot);
                    self.is_sold_out.store(false, Ordering::Relaxed);
                    self.refilled.notify_waiters();
                    return Ok(before);
                }
                // Near the end lots become small, so that others get some too.
                (_, Answer::SoldOut { available }) if available > 1 => {
                    wanted = (available / 2).min(wanted / 2).max(1);
                }
                (_, Answer::SoldOut { available: 1 }) => wanted = 1,
                (_, Answer::SoldOut { .. }) => {
                    self.is_sold_out.store(true, Ordering::Relaxed);
                    self.refilled.notify_waiters();
                    return Ok(None);
                }
                (_, Answer::Paused | Answer::Ended | Answer::NotStarted) => return Ok(None),
                (_, other) => return Err(unexpected(&other)),
            }
        }
        Ok(None)
    }

    /// Reports a lot that was closed.
    async fn report(&self, sale: &Inventory, lot: &Lot, sold: u64) {
        self.totals.lock().sold += sold;
        let settle = Request::ConfirmPart { operation: lot.id.clone(), quantity: sold };
        let answer = self.insist(sale, settle, &lot.id).await;
        let reported = matches!(
            &answer,
            Some(Answer::Found(Record { status: Status::Confirmed | Status::Cancelled, .. }))
        );
        if reported {
            self.totals.lock().reported += sold;
            return;
        }
        if sold == 0 {
            return; // the lot expires, or did
        }
        if answer.is_none() {
            self.totals.lock().unknown += sold;
            return;
        }
        // It expired, and its units are for sale: take as many again, past any window.
        let id: Id = format!("{}:late", lot.id).into();
        let late = |or_debt| Request::Import {
            quantity: sold,
            operation: id.clone(),
            buyer: None,
            or_debt,
        };
        let mut answer = self.insist(sale, late(false), &id).await;
        if matches!(answer, Some(Answer::SoldOut { .. })) {
            answer = self.insist(sale, late(true), &id).await; // an audit names it
        }
        let mut totals = LeaseTotals::default();
        match answer {
            Some(Answer::Found(Record { status: Status::Taken, .. })) => totals.late = sold,
            Some(_) => {
                totals.debt = sold;
                tracing::error!(
                    target: "dlock::inventory",
                    inventory = sale.name().label(), units = sold,
                    "leased units were sold and their lot expired; they are not available any more"
                );
            }
            None => totals.unknown = sold,
        }
        let mut all = self.totals.lock();
        all.late += totals.late;
        all.debt += totals.debt;
        all.unknown += totals.unknown;
    }

    /// Sends a request until there is an answer, or the lot has long expired.
    async fn insist(&self, sale: &Inventory, request: Request, id: &Id) -> Option<Answer> {
        let until = self.now() + u64::try_from(self.ttl.as_micros()).unwrap_or(u64::MAX) * 2;
        loop {
            let deadline = sale.deadline(None).ok()?;
            match sale.send(request.clone(), Some(id), deadline).await {
                Ok((_, answer)) => return Some(answer),
                Err(error) if error.is_retryable() && self.now() < until => {
                    tokio::time::sleep(PAUSE).await;
                }
                Err(_) => return None,
            }
        }
    }

    /// Reserves the next lots until it is stopped.
    async fn keep_stocked(self: Arc<Self>, sale: Inventory) {
        let mut reports = tokio::task::JoinSet::new();
        while !self.is_stopping.load(Ordering::Acquire) {
            let left = self.until.load(Ordering::Acquire).saturating_sub(self.now());
            let ends = Duration::from_micros(left).max(Duration::from_millis(1));
            let _ = tokio::time::timeout(ends, self.wake.notified()).await;
            if self.is_stopping.load(Ordering::Acquire) {
                break;
            }
            let wanted = self.next_size();
            match self.refill(&sale, wanted).await {
                Ok(Some((lot, sold))) => {
                    let (inner, sale) = (self.clone(), sale.clone());
                    reports.spawn(async move { inner.report(&sale, &lot, sold).await });
                }
                Ok(None) if self.is_sold_out.load(Ordering::Relaxed) => {
                    self.end_of_lot(&sale).await;
                    tokio::time::sleep(PAUSE).await;
                }
                Ok(None) => {}
                Err(_) => {
                    self.end_of_lot(&sale).await;
                    tokio::time::sleep(PAUSE).await;
                }
            }
            while reports.try_join_next().is_some() {}
        }
        if let Some((lot, sold)) = self.close() {
            self.report(&sale, &lot, sold).await;
        }
        while reports.join_next().await.is_some() {}
        self.refilled.notify_waiters();
    }

    /// Reports a lot that is used up or over, when there is no next one.
    async fn end_of_lot(&self, sale: &Inventory) {
        let is_empty = self.state.load(Ordering::Acquire) & UNITS == 0;
        if (is_empty || self.now() >= self.until.load(Ordering::Acquire))
            && let Some((lot, sold)) = self.close()
        {
            self.report(sale, &lot, sold).await;
        }
    }

    /// As many units as the process sells in the time that a lot should last.
    fn next_size(&self) -> u64 {
        let lot = self.lot.lock();
        let Some(lot) = &*lot else { return self.at_least };
        let sold = lot.size - (self.state.load(Ordering::Acquire) & UNITS).min(lot.size);
        let seconds = (self.now().saturating_sub(lot.began) as f64 / 1e6).max(1e-6);
        ((sold as f64 / seconds * LASTS) as u64).clamp(self.at_least, self.at_most)
    }
}
