//! Methods to sell from one stock without selling a unit twice.

mod method;
mod sell;

use std::sync::atomic::AtomicBool;
use std::time::Duration;

use anyhow::{Context as _, Result, bail};
use dlock::{Config, Dlock, Key};
use dlock_segment::{Inventory, LeasedUnits, Reservation, SegmentedLock};

pub use self::method::Method;
use crate::expiry_guard::ExpiryGuard;
use crate::naive_stock::NaiveStock;
use crate::server;
use crate::spread::Spread;
use crate::sql::{BatchedRow, SqlStock};

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
    /// The homes of the inventory and further servers.
    pub spread: Spread,
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
    /// The clients of all servers.
    clients: Vec<Dlock>,
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
    Leased { inventory: Inventory, units: LeasedUnits },
    Row(SqlStock),
    BatchedRow(BatchedRow),
}

impl Strategy {
    /// The row of a peer in SQL.
    fn row(&self) -> Option<&SqlStock> {
        match self {
            Strategy::Row(row) => Some(row),
            Strategy::BatchedRow(batched) => Some(&batched.stock),
            _ => None,
        }
    }
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
            Strategy::Leased { .. } => seller.inventory_keys(method)?,
            Strategy::Row(_) | Strategy::BatchedRow(_) => {
                if let Some(row) = seller.strategy.row() {
                    row.fill(&[units]).await?;
                }
                Vec::new()
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
        if !seller.is_spread() {
            seller.expiry_guard = Some(ExpiryGuard::start(&seller.config.backend, keys).await?);
        }
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
        let clients = config.spread.connect(&client).await?;
        let dlock = &clients[0];
        let key = config.key(method);
        let stock = |segments| NaiveStock::open(&config.backend, &key, config.stock, segments);
        let strategy = match method {
            Method::GlobalLock => {
                let lock = dlock.mutex(key.as_str()).wait_unlimited();
                Strategy::Global(lock, stock(1).await?)
            }
            Method::SegmentedLock => {
                let lock = SegmentedLock::new(dlock, key.as_str(), config.segments);
                Strategy::Segmented(lock.wait_unlimited(), stock(config.segments as usize).await?)
            }
            Method::Inventory | Method::InventoryIdempotent | Method::Leased => {
                let inventory = if create {
                    let inventory = Inventory::builder(dlock, key.as_str()).retention(RETENTION);
                    let further = clients[1..].iter().cloned();
                    let inventory = inventory.homes(config.spread.homes).servers(further);
                    inventory
                        .stock(config.stock + config.spare_units(method))
                        .segments(config.segments)
                        .create()
                        .await?
                } else {
                    Inventory::open_on(&clients, key.as_str(), None).await?
                };
                match method {
                    Method::Leased => {
                        let units = inventory.lease_units().start().await?;
                        Strategy::Leased { inventory, units }
                    }
                    _ => {
                        let idempotent = method == Method::InventoryIdempotent;
                        Strategy::Inventory { inventory, idempotent }
                    }
                }
            }
            Method::Row => {
                let tasks = config.at_once;
                Strategy::Row(SqlStock::open(&config.backend, &key, 1, tasks).await?)
            }
            Method::BatchedRow => {
                let row = SqlStock::open(&config.backend, &key, 1, 2).await?;
                Strategy::BatchedRow(BatchedRow::new(row))
            }
        };
        let sold_out = AtomicBool::new(false);
        Ok(Seller { config, clients, strategy, sold_out, expiry_guard: None })
    }

    /// The keys of the inventory in the server, without the operation ids, which expire.
    fn inventory_keys(&self, method: Method) -> Result<Vec<String>> {
        if server::backend(&self.config.backend) != "redis" {
            return Ok(Vec::new());
        }
        let name =
            self.clients[0].client_extension().redis_name(&Key::new(self.config.key(method))?)?;
        Ok(["", "t", "z", "h", "x"].iter().map(|part| format!("{name}{part}")).collect())
    }

    /// The units that are left in each segment.
    ///
    /// # Errors
    /// Fails if the store fails, or if the audit of the inventory finds a fault.
    pub async fn left(&self) -> Result<Vec<u64>> {
        match &self.strategy {
            Strategy::Global(_, stock) | Strategy::Segmented(_, stock) => stock.left().await,
            Strategy::Inventory { inventory, .. } | Strategy::Leased { inventory, .. } => {
                let audit = inventory.audit().await?;
                if let Some(fault) = audit.disagreements.first() {
                    bail!("the audit found a fault: {}", fault.what);
                }
                Ok(audit.segments.iter().map(|segment| segment.counts.available).collect())
            }
            Strategy::Row(_) | Strategy::BatchedRow(_) => Ok(vec![self.row_left().await?]),
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
            Strategy::Leased { inventory, units } => {
                units.stop().await?; // what it has left is for sale again
                Ok(inventory.stock().await?.available)
            }
            Strategy::Row(_) | Strategy::BatchedRow(_) => self.row_left().await,
        }
    }

    /// The units that are left in the row of a peer.
    async fn row_left(&self) -> Result<u64> {
        let Some(row) = self.strategy.row() else { return Ok(0) };
        row.read(0).await?.context("the row of this run is gone")
    }

    /// The number of scripts that the server has run for all its clients since its
    /// start, including renewals; 0 without a server.
    ///
    /// # Errors
    /// Fails if the server does not answer.
    pub async fn script_calls(&self) -> Result<u64> {
        if server::backend(&self.config.backend) != "redis" {
            return Ok(0);
        }
        let mut calls = 0;
        for server in self.config.spread.servers(&self.config.backend).await? {
            calls += server::script_calls(&mut server::connect(&server).await?).await?;
        }
        Ok(calls)
    }

    /// Whether the keys are on several servers, or in a cluster.
    fn is_spread(&self) -> bool {
        self.config.spread.is_several() || server::backend(&self.config.backend).contains("cluster")
    }

    /// How often this seller brought units from one home to another.
    pub fn moves(&self) -> u64 {
        match &self.strategy {
            Strategy::Inventory { inventory, .. } | Strategy::Leased { inventory, .. } => {
                inventory.moves()
            }
            Strategy::Global(..)
            | Strategy::Segmented(..)
            | Strategy::Row(_)
            | Strategy::BatchedRow(_) => 0,
        }
    }

    /// The number of commands that this seller has sent to a server, without script
    /// calls.
    pub fn commands(&self) -> u64 {
        match &self.strategy {
            Strategy::Global(_, stock) | Strategy::Segmented(_, stock) => stock.commands(),
            Strategy::Inventory { .. }
            | Strategy::Leased { .. }
            | Strategy::Row(_)
            | Strategy::BatchedRow(_) => 0,
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
                let method =
                    if *idempotent { Method::InventoryIdempotent } else { Method::Inventory };
                let removed = inventory.remove().await.map(drop).map_err(Into::into);
                removed.and(self.forget_removal(inventory, method).await)
            }
            Strategy::Leased { inventory, units } => {
                let stopped = units.stop().await.map(drop).map_err(anyhow::Error::from);
                let removed = inventory.remove().await.map(drop).map_err(Into::into);
                stopped.and(removed).and(self.forget_removal(inventory, Method::Leased).await)
            }
            Strategy::Row(_) | Strategy::BatchedRow(_) => match self.strategy.row() {
                Some(row) => row.remove().await,
                None => Ok(()),
            },
        };
        self.disconnect().await;
        removed.context(
            "the stock of this run could not be removed; it expires by itself within a day",
        )
    }

    /// Nobody will ask for the inventory of this run: the note that it was removed goes too.
    async fn forget_removal(&self, inventory: &Inventory, method: Method) -> Result<()> {
        if self.is_spread() {
            return Ok(()); // the notes expire by themselves, within a day
        }
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
        if let Strategy::Leased { units, .. } = &self.strategy {
            let _ = units.stop().await; // else its lot expires
        }
        for client in &self.clients {
            client.shutdown(Duration::from_secs(2)).await;
        }
    }
}
