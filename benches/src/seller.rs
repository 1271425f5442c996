//! Four methods to sell from one stock without selling a unit twice.

use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use anyhow::{Context as _, Result, bail};
use dlock::{Config, Dlock, Key};
use dlock_segment::{Confirmation, Deduction, Inventory, Reservation, SegmentedLock};
use serde::{Deserialize, Serialize};

use crate::expiry_guard::ExpiryGuard;
use crate::lock_client::release_guard;
use crate::naive_stock::NaiveStock;
use crate::{clock, server};

/// The method that keeps a unit from being sold twice.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Method {
    /// One lock around a count that the client reads and writes.
    GlobalLock,
    /// The same count in segments, with a lock for each segment.
    SegmentedLock,
    /// [`Inventory`]: the store keeps the count.
    Inventory,
    /// [`Inventory`], with an operation id for each order.
    InventoryIdempotent,
}

impl Method {
    /// All methods, the slowest first.
    pub const ALL: [Method; 4] =
        [Method::GlobalLock, Method::SegmentedLock, Method::Inventory, Method::InventoryIdempotent];

    /// The name of the method in JSON and on the command line.
    pub fn name(self) -> &'static str {
        match self {
            Method::GlobalLock => "global-lock",
            Method::SegmentedLock => "segmented-lock",
            Method::Inventory => "inventory",
            Method::InventoryIdempotent => "inventory-idempotent",
        }
    }
}

/// What a [`Seller`] sells, and where the stock is.
#[derive(Clone, Debug)]
pub struct SellerConfig {
    /// The configuration of the store that has the stock and the locks.
    pub backend: Config,
    /// The prefix of the keys of this run.
    pub key_prefix: String,
    /// The number of units.
    pub stock: u64,
    /// The number of segments.
    pub segments: u32,
    /// How long an order takes. Methods with a lock hold it for this time.
    pub think: Duration,
    /// Whether [`Method::InventoryIdempotent`] reserves first and confirms after
    /// `think`, like an order that is paid.
    pub reserve_first: bool,
    /// The largest number of orders at the same time.
    pub at_once: usize,
}

impl SellerConfig {
    fn key(&self, method: Method) -> String {
        format!("{}:{}", self.key_prefix, method.name())
    }

    /// The number of extra units that stay reserved and are never sold. With one of
    /// them the store's keys for reservations always exist, so that they can have an
    /// expiry.
    fn spare_units(&self, method: Method) -> u64 {
        u64::from(self.reserve_first && method == Method::InventoryIdempotent)
    }
}

/// How long the store remembers operation ids: longer than a run.
const RETENTION: Duration = Duration::from_secs(24 * 60 * 60);

/// Sells from a stock with one [`Method`].
#[derive(Debug)]
pub struct Seller {
    config: SellerConfig,
    dlock: Dlock,
    strategy: Strategy,
    /// Units never come back during a run, so once the stock was seen empty, nobody
    /// needs to ask again. A segmented lock knows by itself when every segment is dry.
    sold_out: AtomicBool,
    /// Only the seller that created the stock has one.
    #[allow(dead_code, reason = "it works until it is dropped")]
    expiry_guard: Option<ExpiryGuard>,
}

#[derive(Debug)]
enum Strategy {
    Global(dlock::Mutex, NaiveStock),
    Segmented(SegmentedLock, NaiveStock),
    Inventory { inventory: Inventory, idempotent: bool },
}

impl Seller {
    /// Creates the stock.
    ///
    /// # Errors
    /// Fails if the store cannot be reached, or stock and segments are out of bounds.
    pub async fn create(config: SellerConfig, method: Method) -> Result<Self> {
        let units = config.stock;
        let mut seller = Self::connect(config, method, true).await?;
        let keys = match &seller.strategy {
            Strategy::Global(_, stock) | Strategy::Segmented(_, stock) => {
                stock.fill(units).await?;
                stock.keys().to_vec()
            }
            Strategy::Inventory { inventory, .. } => {
                if seller.config.spare_units(method) > 0 {
                    let spare = inventory.reserve(1).operation("spare").expires_in(RETENTION);
                    match spare.send().await? {
                        Reservation::Held(_) => {}
                        other => bail!("the spare unit could not be reserved: {other:?}"),
                    }
                }
                seller.inventory_keys(method)?
            }
        };
        seller.expiry_guard = Some(ExpiryGuard::start(&seller.config.backend, keys).await?);
        Ok(seller)
    }

    /// Opens a stock that another process has created.
    ///
    /// # Errors
    /// Fails if the store cannot be reached, or there is no stock.
    pub async fn open(config: SellerConfig, method: Method) -> Result<Self> {
        Self::connect(config, method, false).await
    }

    async fn connect(config: SellerConfig, method: Method, create: bool) -> Result<Self> {
        if config.stock == 0 || config.segments == 0 {
            bail!("stock and segments must be at least 1");
        }
        let mut client = config.backend.clone();
        client.max_waiters = Some(client.max_waiters.unwrap_or(10_000).max(config.at_once + 1));
        let dlock = Dlock::builder().config(client).connect().await?;
        let key = config.key(method);
        let stock = |segments| NaiveStock::open(&config.backend, &key, config.stock, segments);
        let strategy = match method {
            Method::GlobalLock => {
                let lock = dlock.mutex(key.as_str()).wait_unlimited();
                Strategy::Global(lock, stock(1).await?)
            }
            Method::SegmentedLock => {
                let lock = SegmentedLock::new(&dlock, key.as_str(), config.segments);
                Strategy::Segmented(lock.wait_unlimited(), stock(config.segments as usize).await?)
            }
            Method::Inventory | Method::InventoryIdempotent => {
                let inventory = if create {
                    let inventory = Inventory::builder(&dlock, key.as_str()).retention(RETENTION);
                    inventory
                        .stock(config.stock + config.spare_units(method))
                        .segments(config.segments)
                        .create()
                        .await?
                } else {
                    Inventory::open(&dlock, key.as_str()).await?
                };
                Strategy::Inventory { inventory, idempotent: method == Method::InventoryIdempotent }
            }
        };
        let sold_out = AtomicBool::new(false);
        Ok(Seller { config, dlock, strategy, sold_out, expiry_guard: None })
    }

    /// The keys of the inventory in the server, without the operation ids, which expire.
    fn inventory_keys(&self, method: Method) -> Result<Vec<String>> {
        if server::is_embedded(&self.config.backend) {
            return Ok(Vec::new());
        }
        let name = self.dlock.client_extension().redis_name(&Key::new(self.config.key(method))?)?;
        Ok(["", "t", "z", "h", "x"].iter().map(|part| format!("{name}{part}")).collect())
    }

    /// Sells up to `want` units to one order and returns how many; 0 if the stock is
    /// sold out, `None` if the lock was not acquired before `end`.
    ///
    /// # Errors
    /// Fails if the store fails.
    pub async fn sell(&self, order: &str, want: u64, end: u64) -> Result<Option<u64>> {
        if self.sold_out.load(Ordering::Relaxed) {
            return Ok(Some(0));
        }
        let sold = match &self.strategy {
            Strategy::Global(lock, stock) => {
                let Some(guard) = clock::timeout_at(end, lock.lock()).await else {
                    return Ok(None);
                };
                let guard = guard?;
                let sold = stock.take(0, want, self.config.think).await?;
                release_guard(guard).await?;
                sold
            }
            Strategy::Segmented(lock, stock) => {
                match self.sell_from_segments(lock, stock, want, end).await? {
                    Some(sold) => sold,
                    None => return Ok(None),
                }
            }
            Strategy::Inventory { inventory, idempotent } => {
                self.sell_from_inventory(inventory, *idempotent, order, want).await?
            }
        };
        if sold == 0 && !matches!(self.strategy, Strategy::Segmented(..)) {
            self.sold_out.store(true, Ordering::Relaxed);
        }
        Ok(Some(sold))
    }

    /// Takes units from one segment after the other until the order is complete.
    async fn sell_from_segments(
        &self,
        lock: &SegmentedLock,
        stock: &NaiveStock,
        want: u64,
        end: u64,
    ) -> Result<Option<u64>> {
        let mut sold = 0;
        let mut segments = lock.pick();
        loop {
            let Some(next) = clock::timeout_at(end, segments.next()).await else {
                return Ok(Some(sold).filter(|sold| *sold > 0));
            };
            let Some((segment, guard)) = next? else { break };
            sold += stock.take(segment.index(), want - sold, self.config.think).await?;
            release_guard(guard).await?;
            if sold == want {
                break;
            }
            segments.dry();
        }
        Ok(Some(sold))
    }

    /// If there are fewer units than wanted, the order takes fewer.
    async fn sell_from_inventory(
        &self,
        inventory: &Inventory,
        idempotent: bool,
        order: &str,
        want: u64,
    ) -> Result<u64> {
        for units in (1..=want).rev() {
            let id = format!("{order}-{units}");
            let sold = match (idempotent, self.config.reserve_first) {
                (false, _) => taken(inventory.deduct(units).send().await?)?,
                (true, false) => {
                    taken(inventory.deduct(units).operation(id).first_try().send().await?)?
                }
                (true, true) => {
                    let reserving = inventory.reserve(units).operation(id.clone()).first_try();
                    match reserving.send().await? {
                        Reservation::Held(_) => {
                            self.think().await;
                            return match inventory.reservation(&id).confirm().await? {
                                Confirmation::Confirmed(_) => Ok(units),
                                other => bail!("a reservation is {other:?} instead of confirmed"),
                            };
                        }
                        Reservation::SoldOut { .. } | Reservation::NotEnough { .. } => false,
                        other => bail!("unexpected answer of the inventory: {other:?}"),
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
        if !self.config.think.is_zero() {
            tokio::time::sleep(self.config.think).await;
        }
    }

    /// The units that are left in each segment.
    ///
    /// # Errors
    /// Fails if the store fails, or if the audit of the inventory finds a fault.
    pub async fn left(&self) -> Result<Vec<u64>> {
        match &self.strategy {
            Strategy::Global(_, stock) | Strategy::Segmented(_, stock) => stock.left().await,
            Strategy::Inventory { inventory, .. } => {
                let audit = inventory.audit().await?;
                if let Some(fault) = audit.disagreements.first() {
                    bail!("the audit found a fault: {}", fault.what);
                }
                Ok(audit.segments.iter().map(|segment| segment.counts.available).collect())
            }
        }
    }

    /// The units that are left in all segments together.
    ///
    /// # Errors
    /// Fails if the store fails.
    pub async fn total_left(&self) -> Result<u64> {
        match &self.strategy {
            Strategy::Global(_, stock) | Strategy::Segmented(_, stock) => {
                Ok(stock.left().await?.iter().sum())
            }
            Strategy::Inventory { inventory, .. } => Ok(inventory.stock().await?.available),
        }
    }

    /// The number of scripts that the server has run for all its clients since its
    /// start, including renewals; 0 without a server.
    ///
    /// # Errors
    /// Fails if the server does not answer.
    pub async fn script_calls(&self) -> Result<u64> {
        if server::is_embedded(&self.config.backend) {
            return Ok(0);
        }
        server::script_calls(&mut server::connect(&self.config.backend).await?).await
    }

    /// The number of commands that this seller has sent to a server, without script
    /// calls.
    pub fn commands(&self) -> u64 {
        match &self.strategy {
            Strategy::Global(_, stock) | Strategy::Segmented(_, stock) => stock.commands(),
            Strategy::Inventory { .. } => 0,
        }
    }

    /// Removes the stock and disconnects.
    ///
    /// # Errors
    /// Fails if the store fails.
    pub async fn close(&self) -> Result<()> {
        let removed = match &self.strategy {
            Strategy::Global(_, stock) | Strategy::Segmented(_, stock) => stock.remove().await,
            Strategy::Inventory { inventory, idempotent } => {
                let removed = inventory.remove().await.map(drop).map_err(Into::into);
                removed.and(self.forget_removal(inventory, *idempotent).await)
            }
        };
        self.disconnect().await;
        removed.context(
            "the stock of this run could not be removed; it expires by itself within a day",
        )
    }

    /// Nobody will ask for the inventory of this run: the note that it was removed goes too.
    async fn forget_removal(&self, inventory: &Inventory, idempotent: bool) -> Result<()> {
        let method = if idempotent { Method::InventoryIdempotent } else { Method::Inventory };
        let Some(name) = self.inventory_keys(method)?.into_iter().next() else { return Ok(()) };
        let mut connection = server::connect(&self.config.backend).await?;
        let note = format!("{name}d{}", inventory.creation_id());
        redis::cmd("DEL").arg(note).exec_async(&mut connection).await?;
        Ok(())
    }

    /// Removes the stock and disconnects, then returns the result of the run.
    ///
    /// # Errors
    /// Fails with the error of the run, or if the store fails.
    pub async fn close_after<T>(&self, result: Result<T>) -> Result<T> {
        match (result, self.close().await) {
            (Ok(value), closed) => closed.map(|()| value),
            (Err(error), Ok(())) => Err(error),
            (Err(error), Err(not_removed)) => Err(error.context(format!("{not_removed:#}"))),
        }
    }

    /// Disconnects. The stock stays for the process that created it.
    pub async fn disconnect(&self) {
        self.dlock.shutdown(Duration::from_secs(2)).await;
    }
}

fn taken(deduction: Deduction) -> Result<bool> {
    match deduction {
        Deduction::Taken(_) => Ok(true),
        Deduction::SoldOut { .. } | Deduction::NotEnough { .. } => Ok(false),
        other => bail!("unexpected answer of the inventory: {other:?}"),
    }
}
