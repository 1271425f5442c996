//! How a sale is made.

use std::time::{Duration, SystemTime};

use dlock::{Dlock, Key};

use super::Inventory;
use super::backing::{on_driver, store};
use super::checks::{checked_millis, checked_quantity, unix_millis};
use crate::MAX_SEGMENTS;
use crate::error::{Error, Result};
use crate::store::Terms;

/// How long records of operations are kept, unless set otherwise.
const RETENTION: Duration = Duration::from_secs(24 * 3_600);
const MAX_JOURNAL: u64 = 1 << 40;

/// Puts a sale together: [`Inventory::builder`].
#[derive(Clone, Debug)]
#[must_use = "nothing is made until create() is awaited"]
pub struct InventoryBuilder {
    dlock: Dlock,
    key: dlock::Result<Key>,
    stock: u64,
    segments: u32,
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
            stock: 0,
            segments: 1,
            per_buyer: None,
            opens: None,
            closes: None,
            retention: RETENTION,
            journal: None,
            rate: None,
            sold_out_for: None,
        }
    }

    /// How many units there are to begin with; more come by
    /// [`restock`](Inventory::restock).
    pub fn stock(mut self, units: u64) -> Self {
        self.stock = units;
        self
    }

    /// In how many segments they are counted. One Redis gains nothing by many.
    pub fn segments(mut self, segments: u32) -> Self {
        self.segments = segments;
        self
    }

    /// How many units a buyer may have, reserved and sold. Every request must
    /// name its buyer then.
    pub fn per_buyer(mut self, limit: u64) -> Self {
        self.per_buyer = Some(limit);
        self
    }

    /// Sells nothing before, by the store's clock.
    pub fn opens_at(mut self, time: SystemTime) -> Self {
        self.opens = Some(time);
        self
    }

    /// Sells nothing from then on, by the store's clock.
    pub fn closes_at(mut self, time: SystemTime) -> Self {
        self.closes = Some(time);
        self
    }

    /// For how long an operation id is remembered at least (and at most twice as
    /// long); a day by default. A retry that comes later counts as new.
    pub fn retention(mut self, retention: Duration) -> Self {
        self.retention = retention;
        self
    }

    /// Keeps a [`journal`](Inventory::journal) of the last so many effects.
    pub fn journal(mut self, entries: u64) -> Self {
        self.journal = Some(entries);
        self
    }

    /// As [`Inventory::rate_limit_per_process`].
    pub fn rate_limit_per_process(mut self, per_second: u32) -> Self {
        self.rate = Some(per_second);
        self
    }

    /// As [`Inventory::sold_out_for`].
    pub fn sold_out_for(mut self, age: Duration) -> Self {
        self.sold_out_for = Some(age);
        self
    }

    /// Makes the sale. One that was made with the same terms is found again.
    ///
    /// # Errors
    /// `Conflict` if there is one with other terms; `Invalid` for terms out of
    /// bounds; `Store` if the store cannot be used, or may throw stock away when
    /// its memory is full; `Unknown` if it did not answer: call it again.
    ///
    /// # Cancel safety
    /// The sale may have been made when this is dropped.
    pub async fn create(self) -> Result<Inventory> {
        let key = self.key.clone()?;
        let terms = self.terms()?;
        if self.rate == Some(0) {
            return Err(Error::Invalid("a rate of 0 would admit nobody".into()));
        }
        let store = store(&self.dlock)?;
        let name = key.clone();
        let create = move |store: std::sync::Arc<dyn crate::store::Store>| async move {
            store.create(&name, &terms).await
        };
        let view = on_driver(&self.dlock, store, create).await?;
        let mut inventory = Inventory::of(&self.dlock, key, &view)?;
        if let Some(age) = self.sold_out_for {
            inventory = inventory.sold_out_for(age);
        }
        match self.rate {
            Some(rate) => inventory.rate_limit_per_process(rate),
            None => Ok(inventory),
        }
    }

    fn terms(&self) -> Result<Terms> {
        checked_segments(self.segments)?;
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
            stock: checked_quantity("the stock", self.stock)?,
            segments: self.segments,
            per_buyer,
            opens_at,
            closes_at,
            retention: checked_millis("the retention", self.retention)?,
            journal,
        })
    }
}

pub(super) fn checked_segments(segments: u32) -> Result<()> {
    if segments == 0 || segments > MAX_SEGMENTS {
        return Err(Error::Invalid(format!("an inventory has 1 to {MAX_SEGMENTS} segments")));
    }
    Ok(())
}

/// The bounds in milliseconds; 0: none.
pub(super) fn window(opens: Option<SystemTime>, closes: Option<SystemTime>) -> Result<(u64, u64)> {
    let (opens, closes) = (opens.map_or(0, unix_millis), closes.map(unix_millis));
    if closes.is_some_and(|closes| closes <= opens) || closes.unwrap_or(opens) >= 1 << 53 {
        return Err(Error::Invalid(
            "the inventory would close before it opens, or never open".into(),
        ));
    }
    Ok((opens, closes.unwrap_or(0)))
}
