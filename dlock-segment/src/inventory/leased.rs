//! Units that a process sells from memory, without a round trip each.
//!
//! The process reserves a *lot* of units, sells them by an atomic counter, and reports at the
//! end of the lot how many it sold: these are confirmed and the rest is given back, in one
//! step. The next lot is reserved before the last one is used up.
//!
//! ```text
//! reserved -- sold from memory until (sent + ttl - margin), or used up -> closed
//! reserved -- the inventory is paused, ended or not open any more ------> closed
//! closed -- reported -----------------------------> sold n, the rest is available again
//! closed -- reported too late: the lot expired ---> n are taken from what is available
//!                                                   else they are a debt
//! closed -- no answer ----------------------------> reported again, until it is stopped
//! the process dies -- its lots expire ------------> all their units are available again
//! ```
//! No lot is reserved while a report is unanswered: it could be given the units of the lot
//! that is not reported yet. So what a process promised and did not report is at most two
//! lots: the one that it sells and the one before.
//!
//! While a lot lasts, the process looks at it in the store about once a second. So it hears
//! of a pause and of other opening times, and that its lot is gone.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use dlock::extension::ClientExtension;
use parking_lot::Mutex;
use tokio::sync::Notify;
use tokio::time::Instant;

use super::checks::{checked_millis, checked_quantity, unexpected};
use super::{Inventory, MAX_QUANTITY};
use crate::error::{Error, Result};
use crate::store::{Answer, Id, Record, Request, Snapshot, Status};

/// How long a lot lasts by default.
const TTL: Duration = Duration::from_secs(10);
/// How long the units of a lot should last: then the next lot is as large.
const LASTS: f64 = 0.1;
/// How many units a lot has while the process sells slowly, or just began.
const SLOW_LOT: u64 = 200;
/// A lot is at most this part of what is available, so that all processes get some.
const SHARE: u64 = 16;
/// How often a lot is looked at.
const LOOK_EVERY: Duration = Duration::from_secs(1);
/// The pause before a lot is asked for again when there was none to get.
const ASK_AGAIN: Duration = Duration::from_millis(1_250);
/// The first pause after the store did not answer.
const PAUSE: Duration = Duration::from_millis(100);
/// How often an unanswered report is logged.
const LOG_EVERY: Duration = Duration::from_secs(60);
/// How often a smaller lot is tried at once.
const TRIES: usize = 8;
/// The low bits of the state are the units that are left; the others tell lots apart.
const UNITS: u64 = (1 << 40) - 1;

/// Builds a [`LeasedUnits`]: [`Inventory::lease_units`].
#[derive(Clone, Debug)]
#[must_use = "nothing is reserved until start() is awaited"]
pub struct LeaseBuilder {
    sale: Inventory,
    lots: Lots,
    ttl: Duration,
    wait: Option<Duration>,
}

/// How many units a lot has.
#[derive(Clone, Copy, Debug)]
struct Lots {
    /// At least, as long as there are so many.
    at_least: u64,
    /// While the process sells slowly.
    slow: u64,
    at_most: u64,
}

/// The answer to [`LeasedUnits::deduct`]. What it says about the inventory may be two seconds
/// old.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[must_use = "only `Taken` means that the units are sold"]
#[non_exhaustive]
pub enum LeasedDeduction {
    /// The units are sold, from the memory of this process.
    Taken,
    /// This process has too few units at the moment, and asks for the next lot. Nothing was
    /// sold; try it again.
    NotNow,
    /// The inventory had none when this process last asked for a lot.
    SoldOut,
    /// The inventory had fewer than were asked for when this process last asked for a lot.
    NotEnough {
        /// The number of units that were left, here and in the inventory.
        available: u64,
    },
    /// The inventory does not sell yet.
    NotStarted {
        /// The time until it sells.
        opens_in: Duration,
    },
    /// The inventory does not sell any more.
    Ended,
    /// The inventory is paused.
    Paused,
    /// This lease was stopped: nothing is sold from it any more.
    Stopped,
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
    /// The units whose report had no answer until the lease was stopped: it is not known
    /// whether they were reported. An error line in the log says so.
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
    /// Below this number of units the next lot is reserved.
    low: AtomicU64,
    /// The largest quantity for which there were too few units since the last lot.
    wanted: AtomicU64,
    /// The units that are available in the inventory, about.
    available: AtomicU64,
    /// The closed lots whose report is unanswered.
    unreported: AtomicU64,
    /// When it was stopped, by the client's clock in microseconds.
    stopped: AtomicU64,
    sells: Mutex<Sells>,
    wake: Notify,
    refilled: Notify,
    clock: ClientExtension,
    homes: u64,
    lots: Lots,
    ttl: Duration,
    wait: Duration,
    lot: Mutex<Option<Lot>>,
    totals: Mutex<LeaseTotals>,
}

/// Whether the inventory sells, as it last said. Times are by the client's clock in
/// microseconds.
#[derive(Clone, Copy)]
enum Sells {
    Yes,
    /// It has only so many units; after that time it is asked again.
    Few {
        available: u64,
        until: u64,
    },
    NotStarted {
        opens: u64,
    },
    Ended,
    Paused,
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
        let lots = Lots { at_least: 1, slow: SLOW_LOT, at_most: 1_000_000 };
        LeaseBuilder { sale: self.clone(), lots, ttl: TTL, wait: None }
    }
}

impl LeaseBuilder {
    /// Sets how many units a lot has, at least and at most. In between, a lot is as large as
    /// what the process sells in a tenth of a second, so that few units are left in one process
    /// while others are sold out. A [`deduct`](LeasedUnits::deduct) of more gets a lot of its
    /// own size.
    ///
    /// By default a lot has at most 1,000,000 units, 200 while the process sells slowly, and
    /// never more than a sixteenth of what is available, so that many processes get some.
    pub fn lot(mut self, at_least: u64, at_most: u64) -> Self {
        self.lots = Lots { at_least, slow: at_least, at_most };
        self
    }

    /// Sets how long [`deduct_or_wait`](LeasedUnits::deduct_or_wait) waits at most; twice the
    /// client's `call_timeout` by default.
    pub fn wait(mut self, at_most: Duration) -> Self {
        self.wait = Some(at_most);
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
        let LeaseBuilder { sale, lots, ttl, wait } = self;
        checked_quantity("the smallest lot", lots.at_least)?;
        checked_quantity("the largest lot", lots.at_most)?;
        checked_millis("the ttl of a lot", ttl)?;
        if let Some(wait) = wait {
            checked_millis("the time to wait for a lot", wait)?;
        }
        if lots.at_least > lots.at_most || ttl < Duration::from_millis(100) {
            let what = "the largest lot must not be smaller than the smallest, and a lot lasts 100 ms at least";
            return Err(Error::Invalid(what.into()));
        }
        let stock = sale.stock().await?;
        if stock.per_buyer.is_some() || sale.routing() == Some(crate::Routing::Buyer) {
            return Err(Error::Invalid(
                "leased units have no buyers, so an inventory that limits each buyer or is routed by buyer cannot lease them; use deduct()".into(),
            ));
        }
        let clock = sale.dlock.client_extension();
        let inner = Arc::new(Inner {
            state: AtomicU64::new(0),
            until: AtomicU64::new(0),
            low: AtomicU64::new(0),
            wanted: AtomicU64::new(0),
            available: AtomicU64::new(stock.available),
            unreported: AtomicU64::new(0),
            stopped: AtomicU64::new(u64::MAX),
            sells: Mutex::new(Sells::Yes),
            wake: Notify::new(),
            refilled: Notify::new(),
            wait: wait.unwrap_or(2 * clock.call_timeout()),
            clock,
            homes: stock.homes.into(),
            lots,
            ttl,
            lot: Mutex::new(None),
            totals: Mutex::default(),
        });
        let pause = inner.reserve(&sale).await?;
        tokio::spawn(inner.clone().keep_stocked(sale, pause));
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
                return inner.refusal(quantity, left);
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

    /// Sells units, and waits for the next lot if this process has too few. It waits for
    /// [`wait`](LeaseBuilder::wait) at most, and answers `NotNow` then. If the inventory does
    /// not sell, or has too few, it answers that at once.
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
        let deadline = Instant::now() + self.inner.wait;
        loop {
            let mut refilled = std::pin::pin!(self.inner.refilled.notified());
            refilled.as_mut().enable(); // a lot that comes from now on is heard
            match self.deduct(quantity) {
                LeasedDeduction::NotNow if Instant::now() < deadline => {
                    let until = deadline.min(Instant::now() + PAUSE);
                    let _ = tokio::time::timeout_at(until, refilled).await;
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
    /// `Unknown` if the store did not answer for as long as a lot lasts:
    /// [`totals`](Self::totals) says how many units are then not reported. They are for sale
    /// again when their lots expire, so restore them from your own records.
    ///
    /// # Cancel safety
    /// The last lot may not be reported when it is dropped.
    pub async fn stop(&self) -> Result<LeaseTotals> {
        let inner = &self.inner;
        inner.begin_to_stop();
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
        self.inner.begin_to_stop();
    }
}

impl Inner {
    fn now(&self) -> u64 {
        self.clock.now().as_micros()
    }

    fn left(&self) -> u64 {
        self.state.load(Ordering::Acquire) & UNITS
    }

    fn is_stopping(&self) -> bool {
        self.stopped.load(Ordering::Acquire) != u64::MAX
    }

    fn begin_to_stop(&self) {
        self.stopped.fetch_min(self.now(), Ordering::AcqRel);
        self.wake.notify_one();
    }

    /// The answer to whoever wants more than is left, or comes when the lot is over.
    fn refusal(&self, quantity: u64, left: u64) -> LeasedDeduction {
        if self.is_stopping() {
            return LeasedDeduction::Stopped;
        }
        let now = self.now();
        match *self.sells.lock() {
            Sells::Paused => return LeasedDeduction::Paused,
            Sells::Ended => return LeasedDeduction::Ended,
            Sells::NotStarted { opens } if now < opens => {
                return LeasedDeduction::NotStarted {
                    opens_in: Duration::from_micros(opens - now),
                };
            }
            Sells::Few { available, until } if now < until && quantity > available + left => {
                return match available + left {
                    0 => LeasedDeduction::SoldOut,
                    available => LeasedDeduction::NotEnough { available },
                };
            }
            Sells::Yes | Sells::Few { .. } | Sells::NotStarted { .. } => {}
        }
        self.wanted.fetch_max(quantity.min(MAX_QUANTITY), Ordering::AcqRel);
        self.wake.notify_one();
        LeasedDeduction::NotNow
    }

    /// Remembers whether the inventory sells, and tells those who wait.
    fn say(&self, sells: Sells) {
        *self.sells.lock() = sells;
        self.refilled.notify_waiters();
    }

    /// Keeps a lot in stock, and reports it when it is over, until it is stopped. The first
    /// lot was reserved before.
    async fn keep_stocked(self: Arc<Self>, sale: Inventory, pause: Duration) {
        let mut reserve_from = Instant::now() + pause;
        let mut look_from = Instant::now() + LOOK_EVERY;
        let mut failed = PAUSE;
        while !self.is_stopping() {
            let has_lot = self.lot.lock().is_some();
            let lasts = self.until.load(Ordering::Acquire).saturating_sub(self.now());
            let (now, lasts) = (Instant::now(), Duration::from_micros(lasts));
            // Near its end a lot is closed before the next one is reserved: a request without
            // an answer would delay its report.
            let ends_soon = has_lot && lasts < self.ttl / 8;
            if has_lot && (lasts.is_zero() || ends_soon && self.has_too_few()) {
                self.close_and_report(&sale);
                continue;
            }
            let is_low = !has_lot || self.left() < self.low.load(Ordering::Acquire);
            // While a report is unanswered, no lot is reserved.
            let wants = (is_low || self.has_too_few())
                && !ends_soon
                && self.unreported.load(Ordering::Acquire) == 0;
            if wants && now >= reserve_from {
                match self.reserve(&sale).await {
                    Ok(pause) => {
                        failed = PAUSE;
                        reserve_from = Instant::now() + pause;
                        look_from = Instant::now() + LOOK_EVERY;
                    }
                    Err(_) => {
                        reserve_from = Instant::now() + failed;
                        failed = (failed * 2).min(ASK_AGAIN);
                    }
                }
                continue;
            }
            if has_lot && now >= look_from {
                self.look(&sale).await;
                look_from = Instant::now() + LOOK_EVERY;
                continue;
            }
            let next = [wants.then_some(reserve_from), has_lot.then_some(look_from)];
            let next = next.into_iter().flatten().chain(has_lot.then_some(now + lasts)).min();
            match next {
                Some(next) => drop(tokio::time::timeout_at(next, self.wake.notified()).await),
                None => self.wake.notified().await, // the report of a lot ends
            }
        }
        self.close_and_report(&sale);
    }

    /// Whether the lot is used up, or somebody wants more than is left of it.
    fn has_too_few(&self) -> bool {
        let left = self.left();
        left == 0 || left < self.wanted.load(Ordering::Acquire)
    }

    /// Reserves a lot and sells it instead of the one before, which is then reported. Returns
    /// the pause before the next one may be reserved.
    async fn reserve(self: &Arc<Self>, sale: &Inventory) -> Result<Duration> {
        let wanted = self.wanted.swap(0, Ordering::AcqRel);
        let mut size = self.next_size().max(wanted);
        let mut is_few = None;
        for _ in 0..TRIES {
            let id: Id = format!("lease:{:032x}", rand::random::<u128>()).into();
            let lot = Lot { id: id.clone(), size, began: self.now() };
            let (snapshot, answer) = match self.send_reserve(sale, &lot).await {
                // It may be reserved, or will be: give it back.
                Err(error @ Error::Unknown(_)) => {
                    self.report(sale, id, 0);
                    return Err(error);
                }
                answered => answered?,
            };
            match answer {
                Answer::Found(Record { status: Status::Reserved, .. }) => {
                    let available = snapshot.available.saturating_mul(self.homes);
                    self.available.store(available, Ordering::Relaxed);
                    let given_back = self.close_and_report(sale);
                    self.sell(lot, &snapshot);
                    self.say(is_few.map_or(Sells::Yes, |available: u64| {
                        self.few((available + given_back).saturating_sub(size))
                    }));
                    return Ok(Duration::ZERO);
                }
                Answer::SoldOut { available } => {
                    self.available.store(available, Ordering::Relaxed);
                    let left = self.left();
                    if wanted > available && wanted <= available + left {
                        // Together with what is left here it is enough.
                        self.wanted.fetch_max(wanted, Ordering::AcqRel);
                        self.close_and_report(sale);
                        return Ok(Duration::ZERO);
                    }
                    if available == 0 {
                        if left == 0 {
                            self.close_and_report(sale);
                        }
                        self.say(self.few(0));
                        return Ok(ask_again());
                    }
                    size = (available / SHARE).max(1);
                    if wanted > available {
                        is_few = Some(available);
                    } else {
                        size = size.max(wanted);
                    }
                }
                Answer::Paused | Answer::Ended | Answer::NotStarted => {
                    return Ok(self.halt(sale, self.halted(&snapshot).unwrap_or(Sells::Paused)));
                }
                other => return Err(unexpected(&other)),
            }
        }
        Ok(PAUSE) // others were faster each time
    }

    async fn send_reserve(&self, sale: &Inventory, lot: &Lot) -> Result<(Snapshot, Answer)> {
        let request = Request::Reserve {
            quantity: lot.size,
            operation: lot.id.clone(),
            buyer: None,
            expires_in: u64::try_from(self.ttl.as_millis()).unwrap_or(u64::MAX),
        };
        let mut deadline = sale.deadline(None)?;
        if self.lot.lock().is_some() {
            // The open lot must be reported in time.
            let lasts = self.until.load(Ordering::Acquire).saturating_sub(lot.began);
            deadline = deadline.min(Instant::now() + Duration::from_micros(lasts));
        }
        sale.send(request, Some(&lot.id), deadline).await
    }

    /// Begins to sell a lot. The one before was closed.
    fn sell(&self, lot: Lot, snapshot: &Snapshot) {
        let mut open = self.lot.lock();
        self.until.store(self.sold_until(&lot, snapshot), Ordering::Release);
        self.low.store(lot.size.div_ceil(2), Ordering::Relaxed);
        self.state.fetch_add(lot.size, Ordering::AcqRel);
        *open = Some(lot);
    }

    /// Until when a lot is sold: a quarter of its time is for the report, and for clocks that
    /// differ. The inventory may close before.
    fn sold_until(&self, lot: &Lot, snapshot: &Snapshot) -> u64 {
        let until = lot.began + u64::try_from(self.ttl.as_micros()).unwrap_or(u64::MAX) / 4 * 3;
        if snapshot.closes_at == 0 {
            return until;
        }
        let closes_in = snapshot.closes_at.saturating_sub(snapshot.now) * 1_000;
        until.min(self.now() + closes_in)
    }

    /// Why the inventory does not sell, if so.
    fn halted(&self, snapshot: &Snapshot) -> Option<Sells> {
        let Snapshot { now, paused, opens_at, closes_at, .. } = *snapshot;
        if paused {
            return Some(Sells::Paused);
        }
        if now < opens_at {
            return Some(Sells::NotStarted { opens: self.now() + (opens_at - now) * 1_000 });
        }
        (closes_at != 0 && now >= closes_at).then_some(Sells::Ended)
    }

    /// Sells nothing while the inventory does not. Returns when to ask again.
    fn halt(self: &Arc<Self>, sale: &Inventory, sells: Sells) -> Duration {
        self.close_and_report(sale);
        self.say(sells);
        match sells {
            Sells::NotStarted { opens } => {
                Duration::from_micros(opens.saturating_sub(self.now())).min(ask_again())
            }
            _ => ask_again(),
        }
    }

    fn few(&self, available: u64) -> Sells {
        // Somewhat longer than until it is asked again.
        let lasts = u64::try_from(2 * ASK_AGAIN.as_micros()).unwrap_or(u64::MAX);
        Sells::Few { available, until: self.now() + lasts }
    }

    /// Looks at the open lot: whether the inventory still sells, and whether it is there.
    async fn look(self: &Arc<Self>, sale: &Inventory) {
        let Some(id) = self.lot.lock().as_ref().map(|lot| lot.id.clone()) else { return };
        let request = Request::Look { operation: id.clone() };
        match sale.send(request, Some(&id), Instant::now() + LOOK_EVERY).await {
            Ok((snapshot, Answer::Found(Record { status: Status::Reserved, .. }))) => {
                if let Some(sells) = self.halted(&snapshot) {
                    self.halt(sale, sells);
                } else if let Some(lot) = &*self.lot.lock() {
                    self.until.store(self.sold_until(lot, &snapshot), Ordering::Release);
                }
            }
            // The store has lost it, or its clock was set ahead.
            Ok(_) | Err(Error::Lost(_) | Error::NotFound(_)) => {
                self.close_and_report(sale);
            }
            Err(_) => {} // it is sold until its time is over
        }
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

    /// Closes the lot, if there is one, and reports it in the background. Returns how many
    /// of its units were not sold.
    fn close_and_report(self: &Arc<Self>, sale: &Inventory) -> u64 {
        let mut sells = self.sells.lock();
        if self.left() > 0 && matches!(*sells, Sells::Few { .. }) {
            *sells = Sells::Yes; // the rest goes back to the inventory, which then has more
        }
        drop(sells);
        let Some((lot, sold)) = self.close() else { return 0 };
        self.report(sale, lot.id, sold);
        lot.size - sold
    }

    /// Reports in the background how many units of a closed lot were sold.
    fn report(self: &Arc<Self>, sale: &Inventory, id: Id, sold: u64) {
        self.totals.lock().sold += sold;
        self.unreported.fetch_add(1, Ordering::AcqRel);
        let (inner, sale) = (self.clone(), sale.clone());
        tokio::spawn(async move {
            let done = inner.settle(&sale, &id, sold).await;
            let mut totals = inner.totals.lock();
            totals.reported += done.reported;
            totals.late += done.late;
            totals.debt += done.debt;
            totals.unknown += done.unknown;
            drop(totals);
            inner.unreported.fetch_sub(1, Ordering::AcqRel);
            inner.wake.notify_one();
            inner.refilled.notify_waiters();
        });
    }

    /// Settles a closed lot. Returns what became of the units that were sold of it.
    async fn settle(&self, sale: &Inventory, id: &Id, sold: u64) -> LeaseTotals {
        let none = LeaseTotals::default();
        let request = Request::ConfirmPart { operation: id.clone(), quantity: sold };
        match self.insist(sale, request, id, sold).await {
            Some(Answer::Found(Record {
                status: Status::Confirmed | Status::Cancelled, ..
            })) => return LeaseTotals { reported: sold, ..none },
            _ if sold == 0 => return none, // it expires, or did
            None => return LeaseTotals { unknown: sold, ..none },
            Some(_) => {}
        }
        // It expired, and its units are for sale: take as many again, past any window.
        let id: Id = format!("{id}:late").into();
        let late = |or_debt| Request::Import {
            quantity: sold,
            operation: id.clone(),
            buyer: None,
            or_debt,
        };
        let mut answer = self.insist(sale, late(false), &id, sold).await;
        if matches!(answer, Some(Answer::SoldOut { .. })) {
            answer = self.insist(sale, late(true), &id, sold).await; // an audit names it
        }
        let inventory = sale.name().label();
        match answer {
            Some(Answer::Found(Record { status: Status::Taken, .. })) => {
                LeaseTotals { late: sold, ..none }
            }
            Some(_) => {
                tracing::error!(
                    target: "dlock::inventory", inventory, units = sold,
                    "leased units were sold and their lot expired; they are not available any more"
                );
                LeaseTotals { debt: sold, ..none }
            }
            None => LeaseTotals { unknown: sold, ..none },
        }
    }

    /// Sends a request about `sold` units of a closed lot until there is an answer. It gives
    /// up when the lease was stopped and as much time has passed as a lot lasts.
    async fn insist(
        &self,
        sale: &Inventory,
        request: Request,
        id: &Id,
        sold: u64,
    ) -> Option<Answer> {
        let lasts = u64::try_from(self.ttl.as_micros()).unwrap_or(u64::MAX);
        let inventory = sale.name().label();
        let (began, mut pause, mut logged) = (self.now(), PAUSE, None::<Instant>);
        loop {
            let deadline = sale.deadline(None).ok()?;
            let error = match sale.send(request.clone(), Some(id), deadline).await {
                Ok((_, answer)) => return Some(answer),
                Err(error) => error,
            };
            let stopped = self.stopped.load(Ordering::Acquire);
            let since = if sold == 0 { began.min(stopped) } else { stopped };
            let is_over = self.now() >= since.saturating_add(lasts);
            if is_over || (self.is_stopping() && !error.is_retryable()) {
                if sold > 0 {
                    tracing::error!(
                        target: "dlock::inventory", inventory, units = sold, %error,
                        "leased units were sold, and the lease was stopped before they could be reported; they are for sale again when their lot expires"
                    );
                }
                return None;
            }
            if sold > 0 && logged.is_none_or(|at| at.elapsed() >= LOG_EVERY) {
                logged = Some(Instant::now());
                tracing::error!(
                    target: "dlock::inventory", inventory, units = sold, %error,
                    "leased units were sold and are not reported yet; this is tried again until the lease is stopped"
                );
            }
            tokio::time::sleep(pause).await;
            pause = (pause * 2).min(ASK_AGAIN);
        }
    }

    /// As many units as the process sells in the time that a lot should last.
    fn next_size(&self) -> u64 {
        let Lots { at_least, slow, at_most } = self.lots;
        let sells = self.lot.lock().as_ref().map_or(0.0, |lot| {
            let sold = lot.size - self.left().min(lot.size);
            let seconds = self.now().saturating_sub(lot.began) as f64 / 1e6;
            sold as f64 / seconds.max(1e-6) * LASTS
        });
        let share = self.available.load(Ordering::Relaxed) / SHARE;
        (sells as u64).max(slow).min(share).clamp(at_least, at_most)
    }
}

/// The pause before a lot is asked for again, which differs so that processes do not all ask
/// at once.
fn ask_again() -> Duration {
    ASK_AGAIN.mul_f64(1.0 + rand::random::<f64>() / 5.0)
}
