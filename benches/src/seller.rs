//! Four ways to sell from one stock.

use std::collections::HashSet;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Mutex, PoisonError};
use std::time::Duration;

use anyhow::{Context as _, Result, bail};
use dlock::{Config, Dlock, Key};
use dlock_segment::{Deduction, HoldState, Inventory, Reservation, SegmentedLock};
use serde::{Deserialize, Serialize};

use crate::contender::give_back;
use crate::net::Net;
use crate::shelf::Shelf;
use crate::{clock, server};

/// How the stock is kept from being sold twice.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Method {
    /// One lock around a count of one's own.
    GlobalLock,
    /// A lock for each segment of a count of one's own.
    SegmentedLock,
    /// The store keeps the count.
    Inventory,
    /// The same, each order under its operation id.
    InventoryIdempotent,
}

impl Method {
    /// All of them, the slowest first.
    pub const ALL: [Method; 4] =
        [Method::GlobalLock, Method::SegmentedLock, Method::Inventory, Method::InventoryIdempotent];

    /// Its name, as in JSON and on the command line.
    pub fn name(self) -> &'static str {
        match self {
            Method::GlobalLock => "global-lock",
            Method::SegmentedLock => "segmented-lock",
            Method::Inventory => "inventory",
            Method::InventoryIdempotent => "inventory-idempotent",
        }
    }
}

/// What is for sale and where.
#[derive(Clone, Debug)]
pub struct Stall {
    /// Where the stock and the locks are.
    pub config: Config,
    /// What the keys of this run start with.
    pub run: String,
    /// How many units there are.
    pub stock: u64,
    /// In how many segments.
    pub segments: u32,
    /// How long an order takes: under the lock where there is one.
    pub think: Duration,
    /// Whether an idempotent order is reserved first and confirmed after it was
    /// thought about, as one that is paid for.
    pub reserves: bool,
    /// How many orders come at the same time, at most.
    pub at_once: usize,
}

impl Stall {
    fn name(&self, method: Method) -> String {
        format!("{}:{}", self.run, method.name())
    }

    /// A unit that is reserved all the time and never sold: what the store keeps of
    /// reservations is then always there, and the net under it holds.
    fn spare(&self, method: Method) -> u64 {
        u64::from(self.reserves && method == Method::InventoryIdempotent)
    }
}

/// How long operation ids are remembered: longer than a run.
const RETENTION: Duration = Duration::from_secs(24 * 60 * 60);

/// One way to sell, ready.
#[derive(Debug)]
pub struct Seller {
    stall: Stall,
    dlock: Dlock,
    way: Way,
    /// Nothing comes back during these sales, so once all is seen to be gone
    /// nobody needs to look again.
    sold_out: AtomicBool,
    /// The segments of one's own count that were seen empty.
    empty: Mutex<HashSet<usize>>,
    /// Of the one who put the stock up.
    #[allow(dead_code, reason = "it works for as long as it is kept")]
    net: Option<Net>,
}

#[derive(Debug)]
enum Way {
    Global(dlock::Mutex, Shelf),
    Segmented(SegmentedLock, Shelf),
    Inventory { sale: Inventory, idempotent: bool },
}

impl Seller {
    /// Puts the stock up for sale.
    ///
    /// # Errors
    /// If the store cannot be reached, or stock and segments are out of bounds.
    pub async fn open(stall: Stall, method: Method) -> Result<Self> {
        let stock = stall.stock;
        let mut seller = Self::at(stall, method, true).await?;
        let keys = match &seller.way {
            Way::Global(_, shelf) | Way::Segmented(_, shelf) => {
                shelf.fill(stock).await?;
                shelf.keys().to_vec()
            }
            Way::Inventory { sale, .. } => {
                if seller.stall.spare(method) > 0 {
                    let spare = sale.reserve(1).operation("spare").expires_in(RETENTION);
                    spare.send().await?;
                }
                seller.keys_of_sale(method)?
            }
        };
        seller.net = Some(Net::under(&seller.stall.config, keys).await?);
        Ok(seller)
    }

    /// Sells beside the process that has put the stock up.
    ///
    /// # Errors
    /// If the store cannot be reached, or there is no stock.
    pub async fn join(stall: Stall, method: Method) -> Result<Self> {
        Self::at(stall, method, false).await
    }

    async fn at(stall: Stall, method: Method, makes: bool) -> Result<Self> {
        if stall.stock == 0 || stall.segments == 0 {
            bail!("stock and segments must be 1 at least");
        }
        let mut config = stall.config.clone();
        config.max_waiters = config.max_waiters.max(stall.at_once + 1);
        let dlock = Dlock::builder().config(config).connect().await?;
        let run = stall.name(method);
        let shelf = |segments| Shelf::open(&stall.config, &run, stall.stock, segments);
        let way = match method {
            Method::GlobalLock => {
                let lock = dlock.mutex(run.as_str()).wait_unlimited();
                Way::Global(lock, shelf(1).await?)
            }
            Method::SegmentedLock => {
                let lock = SegmentedLock::new(&dlock, run.as_str(), stall.segments);
                Way::Segmented(lock.wait_unlimited(), shelf(stall.segments as usize).await?)
            }
            Method::Inventory | Method::InventoryIdempotent => {
                let sale = if makes {
                    let sale = Inventory::builder(&dlock, run.as_str()).retention(RETENTION);
                    sale.stock(stall.stock + stall.spare(method))
                        .segments(stall.segments)
                        .create()
                        .await?
                } else {
                    Inventory::open(&dlock, run.as_str()).await?
                };
                Way::Inventory { sale, idempotent: method == Method::InventoryIdempotent }
            }
        };
        let (sold_out, empty) = (AtomicBool::new(false), Mutex::default());
        Ok(Seller { stall, dlock, way, sold_out, empty, net: None })
    }

    /// What a sale has in a server, apart from its operation ids, which have an end.
    fn keys_of_sale(&self, method: Method) -> Result<Vec<String>> {
        if server::is_embedded(&self.stall.config) {
            return Ok(Vec::new());
        }
        let name = self.dlock.client_extension().redis_name(&Key::new(self.stall.name(method))?)?;
        Ok(["", "t", "z", "h", "x"].iter().map(|part| format!("{name}{part}")).collect())
    }

    /// Sells up to `want` units to one order; answers how many. Zero: sold out.
    /// `None`: its turn did not come until `end`.
    ///
    /// # Errors
    /// If the store fails.
    pub async fn sell(&self, order: &str, want: u64, end: u64) -> Result<Option<u64>> {
        if self.sold_out.load(Ordering::Relaxed) {
            return Ok(Some(0));
        }
        let sold = match &self.way {
            Way::Global(lock, shelf) => {
                let Some(guard) = clock::before(end, lock.lock()).await else { return Ok(None) };
                let guard = guard?;
                let sold = shelf.take(0, want, self.stall.think).await?;
                give_back(guard).await?;
                sold
            }
            Way::Segmented(lock, shelf) => {
                match self.sell_from_segments(lock, shelf, want, end).await? {
                    Some(sold) => sold,
                    None => return Ok(None),
                }
            }
            Way::Inventory { sale, idempotent } => {
                self.sell_from_inventory(sale, *idempotent, order, want).await?
            }
        };
        if sold == 0 {
            self.sold_out.store(true, Ordering::Relaxed);
        }
        Ok(Some(sold))
    }

    /// Goes on from segment to segment until the order is complete.
    async fn sell_from_segments(
        &self,
        lock: &SegmentedLock,
        shelf: &Shelf,
        want: u64,
        end: u64,
    ) -> Result<Option<u64>> {
        let mut sold = 0;
        let mut segments = lock.pick();
        loop {
            let Some(next) = clock::before(end, segments.next()).await else {
                return Ok(Some(sold).filter(|sold| *sold > 0));
            };
            let Some((segment, guard)) = next? else { break };
            sold += shelf.take(segment.index(), want - sold, self.stall.think).await?;
            give_back(guard).await?;
            if sold == want || self.is_empty_now(segment.index()) {
                break;
            }
            segments.dry();
        }
        Ok(Some(sold))
    }

    /// Remembers that a segment is empty; whether all of them are.
    fn is_empty_now(&self, segment: usize) -> bool {
        let mut empty = self.empty.lock().unwrap_or_else(PoisonError::into_inner);
        empty.insert(segment);
        let all = empty.len() == self.stall.segments as usize;
        self.sold_out.fetch_or(all, Ordering::Relaxed);
        all
    }

    /// The last orders are content with fewer units than they wanted.
    async fn sell_from_inventory(
        &self,
        sale: &Inventory,
        idempotent: bool,
        order: &str,
        want: u64,
    ) -> Result<u64> {
        for units in (1..=want).rev() {
            let id = format!("{order}-{units}");
            let sold = match (idempotent, self.stall.reserves) {
                (false, _) => taken(sale.deduct(units).send().await?)?,
                (true, false) => taken(sale.deduct(units).operation(id).first_try().send().await?)?,
                (true, true) => {
                    let reserving = sale.reserve(units).operation(id.clone()).first_try();
                    match reserving.send().await? {
                        Reservation::Held(_) => {
                            self.think().await;
                            let state = sale.reservation(&id).confirm().await?;
                            if state != HoldState::Confirmed {
                                bail!("a reservation is {state:?} instead of confirmed");
                            }
                            return Ok(units);
                        }
                        Reservation::SoldOut { .. } => false,
                        other => bail!("the sale said {other:?}"),
                    }
                }
            };
            if sold {
                self.think().await;
                return Ok(units);
            }
        }
        Ok(0)
    }

    async fn think(&self) {
        if !self.stall.think.is_zero() {
            tokio::time::sleep(self.stall.think).await;
        }
    }

    /// What is left in each segment.
    ///
    /// # Errors
    /// If the store fails, or the audit of the store's own count finds a fault.
    pub async fn left(&self) -> Result<Vec<u64>> {
        match &self.way {
            Way::Global(_, shelf) | Way::Segmented(_, shelf) => shelf.left().await,
            Way::Inventory { sale, .. } => {
                let audit = sale.audit().await?;
                if let Some(fault) = audit.disagreements.first() {
                    bail!("the audit does not agree: {}", fault.what);
                }
                Ok(audit.segments.iter().map(|segment| segment.counts.available).collect())
            }
        }
    }

    /// What is left in all.
    ///
    /// # Errors
    /// If the store fails.
    pub async fn total_left(&self) -> Result<u64> {
        match &self.way {
            Way::Global(_, shelf) | Way::Segmented(_, shelf) => {
                Ok(shelf.left().await?.iter().sum())
            }
            Way::Inventory { sale, .. } => Ok(sale.stock().await?.available),
        }
    }

    /// How many scripts a server has run so far for these sales, renewals included,
    /// and for anybody else. Zero without a server.
    ///
    /// # Errors
    /// If the server does not answer.
    pub async fn scripts(&self) -> Result<u64> {
        if server::is_embedded(&self.stall.config) {
            return Ok(0);
        }
        server::scripts(&mut server::connect(&self.stall.config).await?).await
    }

    /// How many commands of its own this seller has sent to a server.
    pub fn commands(&self) -> u64 {
        match &self.way {
            Way::Global(_, shelf) | Way::Segmented(_, shelf) => shelf.commands(),
            Way::Inventory { .. } => 0,
        }
    }

    /// Leaves nothing behind.
    ///
    /// # Errors
    /// If the store fails.
    pub async fn close(&self) -> Result<()> {
        let removed = match &self.way {
            Way::Global(_, shelf) | Way::Segmented(_, shelf) => shelf.remove().await,
            Way::Inventory { sale, .. } => sale.remove().await.map(drop).map_err(Into::into),
        };
        self.leave().await;
        removed.context("what was for sale could not be removed; it ends by itself")
    }

    /// Leaves nothing behind, whatever came of the sale, and tells that.
    ///
    /// # Errors
    /// Those of the sale, or if the store fails.
    pub async fn after<T>(&self, sale: Result<T>) -> Result<T> {
        match (sale, self.close().await) {
            (Ok(sale), closed) => closed.map(|()| sale),
            (Err(error), Ok(())) => Err(error),
            (Err(error), Err(left)) => Err(error.context(format!("{left:#}"))),
        }
    }

    /// Leaves what was put up to whom it belongs.
    pub async fn leave(&self) {
        self.dlock.shutdown(Duration::from_secs(2)).await;
    }
}

fn taken(deduction: Deduction) -> Result<bool> {
    match deduction {
        Deduction::Taken(_) => Ok(true),
        Deduction::SoldOut { .. } => Ok(false),
        other => bail!("the sale said {other:?}"),
    }
}
