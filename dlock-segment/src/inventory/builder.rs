//! How an inventory is made.

use std::time::{Duration, SystemTime};

use dlock::{Dlock, Key};

use super::Inventory;
use super::backing::{on_driver, store};
use super::checks::{checked_millis, checked_quantity, unix_millis};
use super::sharded::{NewSale, ShardedInventory, limit_needs_buyers};
use crate::MAX_SEGMENTS;
use crate::error::{Error, Result};
use crate::homes::{MAX_HOMES, Routing};
use crate::store::Terms;

/// How long records of operations are kept by default.
const RETENTION: Duration = Duration::from_secs(24 * 3_600);
const MAX_JOURNAL: u64 = 1 << 40;

/// Builds an inventory: [`Inventory::builder`].
#[derive(Clone, Debug)]
#[must_use = "nothing is made until create() is awaited"]
pub struct InventoryBuilder {
    dlock: Dlock,
    key: dlock::Result<Key>,
    stock: Option<u64>,
    segments: u32,
    homes: u32,
    routing: Routing,
    servers: Vec<Dlock>,
    per_buyer: Option<u64>,
    opens: Option<SystemTime>,
    closes: Option<SystemTime>,
    retention: Duration,
    journal: Option<u64>,
    rate: Option<u32>,
    sold_out_for: Option<Duration>,
}

impl InventoryBuilder {
    pub(super) fn new(dlock: &Dlock, key: dlock::Result<Key>) -> Self {
        InventoryBuilder {
            dlock: dlock.clone(),
            key,
            stock: None,
            segments: 1,
            homes: 1,
            routing: Routing::default(),
            servers: Vec::new(),
            per_buyer: None,
            opens: None,
            closes: None,
            retention: RETENTION,
            journal: None,
            rate: None,
            sold_out_for: None,
        }
    }

    /// Sets how many units there are at first, 0 included. [`restock`](Inventory::restock)
    /// adds more.
    pub fn stock(mut self, units: u64) -> Self {
        self.stock = Some(units);
        self
    }

    /// Sets in how many segments each home counts its units. More segments do not make a
    /// Redis server faster; [homes](Self::homes) on several servers do.
    pub fn segments(mut self, segments: u32) -> Self {
        self.segments = segments;
        self
    }

    /// Spreads the inventory over this many homes; 1 by default. On a Redis Cluster, homes
    /// are spread evenly over the primaries; with [`servers`](Self::servers), over those. A
    /// few homes for each server let the inventory sell at the speed of all of them
    /// together. On one server more homes do not make it faster.
    ///
    /// It is fixed when the inventory is created, and so is [`routed_by`](Self::routed_by).
    ///
    /// ```
    /// # #[tokio::main(flavor = "current_thread")] async fn main() -> dlock_segment::Result<()> {
    /// # let dlock = dlock::Dlock::connect("memory://").await?;
    /// # use dlock_segment::{Deduction, Inventory};
    /// let sale = Inventory::builder(&dlock, "phone").stock(100).homes(6).create().await?;
    /// let sold = sale.deduct(60).operation("order-1").send().await?; // from several homes
    /// assert!(matches!(sold, Deduction::Taken(_)));
    /// assert_eq!(sale.stock().await?.available, 40);
    /// # Ok(()) }
    /// ```
    pub fn homes(mut self, homes: u32) -> Self {
        self.homes = homes;
        self
    }

    /// Sets what decides in which home a request is answered; by default its operation id.
    pub fn routed_by(mut self, routing: Routing) -> Self {
        self.routing = routing;
        self
    }

    /// Names further independent servers, by their clients, that keep homes of the
    /// inventory: home 0 is on the first server, home 1 on the next, and so on in turn. Open
    /// it with [`open_on`](Inventory::open_on), with the servers in the same order.
    pub fn servers(mut self, further: impl IntoIterator<Item = Dlock>) -> Self {
        self.servers = further.into_iter().collect();
        self
    }

    /// Sets how many units a buyer may have, reserved and sold. Every request must then
    /// name its buyer. With several homes, it must be [routed by buyer](Routing::Buyer).
    pub fn per_buyer(mut self, limit: u64) -> Self {
        self.per_buyer = Some(limit);
        self
    }

    /// Sets when the inventory starts to sell, by the store's clock.
    pub fn opens_at(mut self, time: SystemTime) -> Self {
        self.opens = Some(time);
        self
    }

    /// Sets when the inventory stops selling, by the store's clock.
    pub fn closes_at(mut self, time: SystemTime) -> Self {
        self.closes = Some(time);
        self
    }

    /// Sets for how long an operation id is remembered at least (and at most twice as
    /// long); a day by default. A retry that comes later counts as a new operation.
    pub fn retention(mut self, retention: Duration) -> Self {
        self.retention = retention;
        self
    }

    /// Keeps a [`journal`](Inventory::journal) of at least the last `entries` effects.
    pub fn journal(mut self, entries: u64) -> Self {
        self.journal = Some(entries);
        self
    }

    /// Limits how many requests this process sends; see
    /// [`Inventory::rate_limit_per_process`].
    pub fn rate_limit_per_process(mut self, per_second: u32) -> Self {
        self.rate = Some(per_second);
        self
    }

    /// Sets for how long "sold out" is answered without a round trip; see
    /// [`Inventory::sold_out_for`].
    pub fn sold_out_for(mut self, age: Duration) -> Self {
        self.sold_out_for = Some(age);
        self
    }

    /// Makes the inventory. If there is one of this name with the same terms, it is opened.
    ///
    /// Call it once, as an administrator (or run `dlock inventory NAME create`), and keep
    /// the [`creation_id`](Inventory::creation_id). A service that calls it at every start
    /// sells the whole stock again after the store lost its data: let services call
    /// [`open_created`](Inventory::open_created).
    ///
    /// ```
    /// # #[tokio::main(flavor = "current_thread")] async fn main() -> dlock_segment::Result<()> {
    /// # let dlock = dlock::Dlock::connect("memory://").await?;
    /// # use dlock_segment::{Error, Inventory};
    /// let sale = Inventory::builder(&dlock, "phone").stock(1_000).per_buyer(2).create().await?;
    /// assert_eq!(sale.stock().await?.available, 1_000);
    ///
    /// let other = Inventory::builder(&dlock, "phone").stock(7).create().await;
    /// assert!(matches!(other, Err(Error::Conflict(_))));
    /// # Ok(()) }
    /// ```
    ///
    /// # Errors
    /// `Conflict` if there is an inventory of this name with other terms; the message names
    /// them. A term that was changed since, as by a resize, may be given as it was or as it
    /// is. `Invalid` if a
    /// term is out of bounds. `Store` if the store cannot be used, or if it may delete the
    /// inventory when its memory is full. `Unknown` if the store did not answer; call it
    /// again.
    ///
    /// # Cancel safety
    /// The inventory may have been made when this is dropped; call it again.
    pub async fn create(self) -> Result<Inventory> {
        let key = self.key.clone()?;
        let terms = self.terms()?;
        if self.rate == Some(0) {
            return Err(Error::Invalid(
                "a rate of 0 would let no request through; give 1 or more".into(),
            ));
        }
        let mut inventory = if self.homes == 1 {
            let store = store(&self.dlock)?;
            let name = key.clone();
            let create = move |store: std::sync::Arc<dyn crate::store::Store>| async move {
                store.create(&name, &terms).await
            };
            let view = on_driver(&self.dlock, store, create).await?;
            Inventory::of(&self.dlock, key, &view, None)?
        } else {
            let (homes, routing) = (self.homes, self.routing);
            let new = NewSale { key: key.clone(), terms, homes, routing };
            let mut clients = vec![self.dlock.clone()];
            clients.extend(self.servers.iter().cloned());
            let (sharded, view) = ShardedInventory::create(&clients, new).await?;
            Inventory::of(&self.dlock, key, &view, Some(sharded))?
        };
        if let Some(age) = self.sold_out_for {
            inventory = inventory.sold_out_for(age);
        }
        match self.rate {
            Some(rate) => inventory.rate_limit_per_process(rate),
            None => Ok(inventory),
        }
    }

    fn checked_stock(&self) -> Result<u64> {
        match self.stock {
            Some(0) => Ok(0), // the units come with a restock
            Some(units) => checked_quantity("the stock", units),
            None => Err(Error::Invalid("the stock is not given; call .stock(units)".into())),
        }
    }

    fn terms(&self) -> Result<Terms> {
        checked_segments(self.segments)?;
        if self.homes == 0 || self.homes > MAX_HOMES {
            return Err(Error::Invalid(format!("an inventory has 1 to {MAX_HOMES} homes")));
        }
        if self.servers.len() as u64 >= u64::from(self.homes) && !self.servers.is_empty() {
            return Err(Error::Invalid(
                "there are more servers than homes; give each server a home at least, with .homes(n)".into(),
            ));
        }
        if self.homes > 1 && self.per_buyer.is_some() && self.routing == Routing::Operation {
            return Err(limit_needs_buyers());
        }
        let (opens_at, closes_at) = window(self.opens, self.closes)?;
        let per_buyer = match self.per_buyer {
            Some(limit) => checked_quantity("the limit per buyer", limit)?,
            None => 0,
        };
        let journal = self.journal.unwrap_or(0);
        if self.journal == Some(0) || journal > MAX_JOURNAL {
            return Err(Error::Invalid(format!("a journal keeps 1 to {MAX_JOURNAL} entries")));
        }
        Ok(Terms {
            stock: self.checked_stock()?,
            segments: self.segments,
            per_buyer,
            opens_at,
            closes_at,
            retention: checked_millis("the retention", self.retention)?,
            journal,
            directory: String::new(),
        })
    }
}

pub(super) fn checked_segments(segments: u32) -> Result<()> {
    if segments == 0 || segments > MAX_SEGMENTS {
        return Err(Error::Invalid(format!("an inventory has 1 to {MAX_SEGMENTS} segments")));
    }
    Ok(())
}

/// The bounds in milliseconds of Unix time; 0 means no bound.
pub(super) fn window(opens: Option<SystemTime>, closes: Option<SystemTime>) -> Result<(u64, u64)> {
    let (opens, closes) = (opens.map_or(0, unix_millis), closes.map(unix_millis));
    if closes.is_some_and(|closes| closes <= opens) || closes.unwrap_or(opens) >= 1 << 53 {
        return Err(Error::Invalid(
            "the inventory would close before it opens, or never open".into(),
        ));
    }
    Ok((opens, closes.unwrap_or(0)))
}
