//! Inventories inside this process, for all clients of one embedded lock store. They end
//! with the process.

use std::collections::BTreeSet;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{SystemTime, UNIX_EPOCH};

use dlock::Key;
use dlock::backend::Moment;
use dlock::extension::ClientExtension;
use hashbrown::HashMap;
use parking_lot::Mutex;
use rand::RngExt as _;

use super::home::Home;
use super::{
    Answer, Call, Change, Counts, Cursor, Durability, InventoryId, JournalEntry, Page, Request,
    Store, Terms, View, missing,
};
use crate::error::{Error, Result};
use crate::planted_bug::{Bug, PlantedBug};

/// The inventories of one embedded store.
#[derive(Debug)]
pub struct Memory {
    homes: Arc<Homes>,
    client: ClientExtension,
}

/// Keeps apart what is made within a millisecond, also in different stores.
static BIRTHS: AtomicU64 = AtomicU64::new(1);

/// How many removed inventories are remembered.
const MAX_REMOVED: usize = 10_000;

/// One inventory.
pub(crate) type SharedHome = Arc<Mutex<Home>>;

#[derive(Debug, Default)]
pub(crate) struct Homes {
    inventories: Mutex<HashMap<Key, SharedHome>>,
    /// The last inventories that were removed, by their births.
    removed: Mutex<BTreeSet<u64>>,
    identity: Mutex<Option<String>>,
    /// The planted bug of inventories that are made from now on.
    planted: Mutex<PlantedBug>,
}

impl Memory {
    /// The inventories in the lock store of this client; `None` if that is not the
    /// embedded one.
    pub fn new(client: ClientExtension) -> Option<Self> {
        let homes = client.embedded()?;
        Some(Memory { homes, client })
    }

    /// Plants a bug in the inventories that are made from now on.
    #[cfg(feature = "simulation")]
    pub fn plant(&self, bug: Bug) {
        *self.homes.planted.lock() = PlantedBug::with(Some(bug));
    }

    /// Milliseconds of Unix time by the client's clock, which a test can pause.
    fn now(&self) -> u64 {
        unix_millis(self.client.now())
    }

    pub(crate) fn home(&self, inventory: &InventoryId) -> Result<SharedHome> {
        let home = self.homes.inventories.lock().get(&inventory.key).cloned();
        let home =
            home.filter(|home| inventory.birth == 0 || inventory.birth == home.lock().birth());
        home.ok_or_else(|| self.missing(inventory))
    }

    fn missing(&self, inventory: &InventoryId) -> Error {
        missing(inventory, self.homes.removed.lock().contains(&inventory.birth))
    }

    fn with<T>(
        &self,
        inventory: &InventoryId,
        work: impl FnOnce(&mut Home, u64) -> T,
    ) -> Result<T> {
        let home = self.home(inventory)?;
        let now = self.now();
        Ok(work(&mut home.lock(), now))
    }

    /// Applies one request at once.
    pub(crate) fn apply_one(
        &self,
        inventory: &InventoryId,
        home: &SharedHome,
        request: &Request,
    ) -> Result<(View, Answer)> {
        let start = rand::rng().random_range(0..crate::MAX_SEGMENTS as usize);
        if cfg!(feature = "simulation")
            && let Some(answer) = self.read_then_write(inventory, request)?
        {
            return Ok(answer);
        }
        let now = self.now();
        let mut home = home.lock();
        if home.is_removed {
            return Err(self.missing(inventory));
        }
        home.reclaim(now);
        let answer = home.apply(now, start, request);
        Ok((home.view(now), answer))
    }

    /// The planted bug: the count is read first and written in a second step.
    fn read_then_write(
        &self,
        inventory: &InventoryId,
        request: &Request,
    ) -> Result<Option<(View, Answer)>> {
        if !self.homes.planted.lock().is(Bug::ReadThenWrite) {
            return Ok(None);
        }
        let Request::Deduct { quantity, .. } = request else { return Ok(None) };
        let before = self.with(inventory, |home, now| home.view(now))?;
        if before.available < *quantity {
            let available = before.available;
            return Ok(Some((before, Answer::SoldOut { available })));
        }
        std::thread::yield_now();
        self.with(inventory, |home, now| {
            let missing = quantity.saturating_sub(home.view(now).available);
            if missing > 0 {
                home.units.restock(0, missing);
            }
            let answer = home.apply(now, 0, request);
            Some((home.view(now), answer))
        })
    }
}

/// The real time at the first call, and the client's clock since then.
fn unix_millis(now: Moment) -> u64 {
    static START: std::sync::OnceLock<(u64, u64)> = std::sync::OnceLock::new();
    let (unix, start) = *START.get_or_init(|| {
        let unix = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
        (u64::try_from(unix.as_millis()).unwrap_or(0), now.as_micros() / 1_000)
    });
    (unix + now.as_micros() / 1_000).saturating_sub(start)
}

fn done<'a, T: Send + 'a>(result: Result<T>) -> Call<'a, T> {
    Box::pin(std::future::ready(result))
}

impl Store for Memory {
    fn create<'a>(&'a self, key: &'a Key, terms: &'a Terms) -> Call<'a, View> {
        let now = self.now();
        let mut inventories = self.homes.inventories.lock();
        let home = inventories.entry(key.clone()).or_insert_with(|| {
            let birth = now * 1_000 + BIRTHS.fetch_add(1, Ordering::Relaxed) % 1_000;
            let planted = *self.homes.planted.lock();
            Arc::new(Mutex::new(Home::new(birth, terms.clone(), planted)))
        });
        let home = home.lock();
        let view = home.view(now);
        done(terms.check(key, &home.terms, &view).map(|()| view))
    }

    fn open<'a>(&'a self, inventory: &'a InventoryId) -> Call<'a, View> {
        done(self.with(inventory, |home, now| home.view(now)))
    }

    fn view<'a>(&'a self, inventory: &'a InventoryId) -> Call<'a, View> {
        done(self.with(inventory, |home, now| {
            home.reclaim(now);
            home.view(now)
        }))
    }

    fn remove<'a>(&'a self, inventory: &'a InventoryId) -> Call<'a, bool> {
        let mut inventories = self.homes.inventories.lock();
        let there = inventories.get(&inventory.key).filter(|home| {
            let mut home = home.lock();
            let is_it = inventory.birth == 0 || inventory.birth == home.birth();
            home.is_removed = is_it;
            if is_it {
                let mut removed = self.homes.removed.lock();
                removed.insert(home.birth());
                if removed.len() > MAX_REMOVED {
                    removed.pop_first();
                }
            }
            is_it
        });
        let was_there = there.is_some();
        if was_there {
            inventories.remove(&inventory.key);
        }
        done(Ok(was_there))
    }

    fn apply_from<'a>(
        &'a self,
        inventory: &'a InventoryId,
        start: u32,
        batch: &'a [Request],
    ) -> Call<'a, (View, Vec<Answer>)> {
        done(self.with(inventory, |home, now| home.apply_batch(now, start as usize, batch)))
    }

    fn change<'a>(&'a self, inventory: &'a InventoryId, change: Change) -> Call<'a, View> {
        done(self.with(inventory, |home, now| {
            home.change(now, change);
            home.view(now)
        }))
    }

    fn counts<'a>(&'a self, inventory: &'a InventoryId) -> Call<'a, (View, Vec<Counts>)> {
        done(self.with(inventory, |home, now| {
            home.reclaim(now);
            (home.view(now), home.units.segments().to_vec())
        }))
    }

    fn sizes<'a>(&'a self, inventory: &'a InventoryId) -> Call<'a, Vec<u32>> {
        done(self.with(inventory, |home, _| home.units.sizes().to_vec()))
    }

    fn records<'a>(&'a self, inventory: &'a InventoryId, _: Cursor) -> Call<'a, Page> {
        done(self.with(inventory, |home, now| {
            Page {
                records: home
                    .ledger
                    .all(now)
                    .map(|(id, record)| (id.clone(), Some(record.clone())))
                    .collect(),
                buyers: home.buyers.iter().map(|(buyer, has)| (buyer.clone(), *has)).collect(),
                next: None,
            }
        }))
    }

    fn journal<'a>(
        &'a self,
        inventory: &'a InventoryId,
        after: u64,
        limit: usize,
    ) -> Call<'a, Vec<JournalEntry>> {
        done(self.with(inventory, |home, _| home.entries(after, limit)))
    }

    fn durability(&self) -> Call<'_, Durability> {
        done(Ok(Durability { append_only: Some(false), ..Durability::default() }))
    }

    fn directory<'a>(&'a self, inventory: &'a InventoryId) -> Call<'a, String> {
        done(self.with(inventory, |home, _| home.terms.directory.clone()))
    }

    fn identity<'a>(&'a self, given: Option<&'a str>) -> Call<'a, Option<String>> {
        let mut identity = self.homes.identity.lock();
        if identity.is_none() {
            *identity = given.map(str::to_owned);
        }
        done(Ok(identity.clone()))
    }
}
