//! How an inventory is opened that exists.

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Weak};

use dlock::{Dlock, IntoKey, Key};

use super::admission::Admission;
use super::backing::{Backing, on_driver, read_failed, store};
use super::combiner::LIMITS;
use super::sharded::{ShardedInventory, site};
use super::unknown_outcomes::UnknownOutcomes;
use super::{CreationId, Inventory, OpenInventories, SOLD_OUT_FOR, Shared};
use crate::error::{Error, Result};
use crate::homes::Site;
use crate::observe::Failures;
use crate::store::{Durability, InventoryId, Store, View};

impl Inventory {
    /// Opens an inventory that exists, whichever it is. A service that sells should use
    /// [`open_created`](Self::open_created), which also notices that the store lost it.
    ///
    /// ```
    /// # #[tokio::main(flavor = "current_thread")] async fn main() -> dlock_segment::Result<()> {
    /// # let dlock = dlock::Dlock::connect("memory://").await?;
    /// use dlock_segment::{Error, Inventory};
    ///
    /// Inventory::builder(&dlock, "phone").stock(5).create().await?;
    /// let sale = Inventory::open(&dlock, "phone").await?;
    /// assert_eq!(sale.stock().await?.available, 5);
    ///
    /// let missing = Inventory::open(&dlock, "never made").await;
    /// assert!(matches!(missing, Err(Error::NotFound(_))));
    /// # Ok(()) }
    /// ```
    ///
    /// # Errors
    /// `NotFound` if there is no inventory of this name. `Invalid` if the name is not a
    /// valid key. `Store` if the store cannot be used, or if it may delete the inventory
    /// when its memory is full.
    ///
    /// # Cancel safety
    /// It only reads, so it can be dropped at any time.
    pub async fn open(dlock: &Dlock, name: impl IntoKey) -> Result<Self> {
        Self::open_born(std::slice::from_ref(dlock), name.into_key()?, 0).await
    }

    /// Opens the inventory that was created with this id. Keep the id where the data of the
    /// store cannot take it along: in the configuration or the database of your service.
    ///
    /// ```
    /// # #[tokio::main(flavor = "current_thread")] async fn main() -> dlock_segment::Result<()> {
    /// # let dlock = dlock::Dlock::connect("memory://").await?;
    /// use dlock_segment::{CreationId, Error, Inventory};
    ///
    /// // Once, by an administrator:
    /// let sale = Inventory::builder(&dlock, "phone").stock(5).create().await?;
    /// let kept = sale.creation_id().to_string();
    ///
    /// // At every start of the service:
    /// let id: CreationId = kept.parse()?;
    /// let sale = Inventory::open_created(&dlock, "phone", id).await?;
    /// assert_eq!(sale.stock().await?.available, 5);
    ///
    /// let empty = dlock::testing::client(); // a store that came back empty
    /// let lost = Inventory::open_created(&empty, "phone", id).await;
    /// assert!(matches!(lost, Err(Error::Lost(_))));
    /// # Ok(()) }
    /// ```
    ///
    /// # Errors
    /// `Lost` if the store does not have this inventory and nobody removed it in the last
    /// day. `NotFound` if it was removed. Else as [`open`](Self::open).
    ///
    /// # Cancel safety
    /// It only reads, so it can be dropped at any time.
    pub async fn open_created(dlock: &Dlock, name: impl IntoKey, id: CreationId) -> Result<Self> {
        Self::open_born(std::slice::from_ref(dlock), name.into_key()?, id.0.get()).await
    }

    /// Opens an inventory whose homes are on several independent servers: their clients, in
    /// the order in which they were given when it was created.
    ///
    /// ```
    /// # async fn example() -> dlock_segment::Result<()> {
    /// use dlock::Dlock;
    /// use dlock_segment::Inventory;
    ///
    /// let one = Dlock::connect("redis://a.internal").await?;
    /// let two = Dlock::connect("redis://b.internal").await?;
    /// let sale = Inventory::open_on(&[one, two], "phone", None).await?;
    /// # Ok(()) }
    /// ```
    ///
    /// # Errors
    /// As [`open_created`](Self::open_created), and `Conflict` if the servers are others, or
    /// in another order. `Lost` if some of the homes are there and others are not. A server
    /// that cannot be reached is no error, unless it is the first and `id` is `None`: the
    /// other homes can be used.
    ///
    /// # Cancel safety
    /// It can be dropped at any time.
    pub async fn open_on(
        servers: &[Dlock],
        name: impl IntoKey,
        id: impl Into<Option<CreationId>>,
    ) -> Result<Self> {
        let birth = id.into().map_or(0, |id: CreationId| id.0.get());
        Self::open_born(servers, name.into_key()?, birth).await
    }

    /// Makes homes of an inventory again that are gone, for instance because one of several
    /// servers came back empty. The other homes keep what they have, and go on selling.
    ///
    /// A home that is made again has no units, and none of its orders. Add the units that it
    /// had with [`restock`](Self::restock), and [`reconcile`](Self::reconcile) the inventory
    /// with your orders. Processes that had it open must open it again. If the first home was
    /// lost, the inventory has another [`creation_id`](Self::creation_id) from now on.
    ///
    /// The servers are given as to [`open_on`](Self::open_on). An empty server cannot be told
    /// from another one, so make sure that the list is the one of the creation.
    ///
    /// ```
    /// # async fn example(servers: &[dlock::Dlock]) -> dlock_segment::Result<()> {
    /// use dlock_segment::Inventory;
    ///
    /// let repaired = Inventory::repair(servers, "phone").await?;
    /// println!("homes {:?} were made again", repaired.homes);
    /// println!("its id is {} now", repaired.inventory.creation_id());
    /// # Ok(()) }
    /// ```
    ///
    /// # Errors
    /// `NotFound` if nothing is left of it, or if its creation was interrupted: create it again.
    /// `OutOfReach` if a server does not answer. `Conflict` if the servers are others, or in
    /// another order. `Store` if the store cannot be used. `Unknown` if it did not answer; call
    /// it again.
    ///
    /// # Cancel safety
    /// Some homes may have been made when it is dropped; call it again.
    pub async fn repair(servers: &[Dlock], name: impl IntoKey) -> Result<Repaired> {
        let key = name.into_key()?;
        if servers.is_empty() {
            return Err(no_server());
        }
        let homes = ShardedInventory::repair(servers, &key).await?;
        Ok(Repaired { homes, inventory: Self::open_born(servers, key, 0).await? })
    }

    /// Deletes the inventory of this name, also if it cannot be opened because some of its homes
    /// are gone: a [`remove`](Self::remove) that was interrupted can be finished so. Returns
    /// whether anything was there.
    ///
    /// ```
    /// # #[tokio::main(flavor = "current_thread")] async fn main() -> dlock_segment::Result<()> {
    /// # let dlock = dlock::Dlock::connect("memory://").await?;
    /// use dlock_segment::Inventory;
    ///
    /// Inventory::builder(&dlock, "phone").stock(5).create().await?;
    /// assert!(Inventory::remove_by_name(&[dlock.clone()], "phone").await?);
    /// assert!(!Inventory::remove_by_name(&[dlock], "phone").await?, "it is gone");
    /// # Ok(()) }
    /// ```
    ///
    /// # Errors
    /// `Conflict` if the servers are others than those of the creation, or in another order.
    /// `Store` if the store cannot be used. `Unknown` if it did not answer; call it again.
    ///
    /// # Cancel safety
    /// Some homes may have been removed when it is dropped; call it again.
    pub async fn remove_by_name(servers: &[Dlock], name: impl IntoKey) -> Result<bool> {
        let key = name.into_key()?;
        if servers.is_empty() {
            return Err(no_server());
        }
        ShardedInventory::remove_by_name(servers, &key).await
    }

    async fn open_born(servers: &[Dlock], key: Key, birth: u64) -> Result<Self> {
        let Some(dlock) = servers.first() else { return Err(no_server()) };
        let inventory = InventoryId { key: key.clone(), birth };
        let open = move |store: Arc<dyn Store>| async move { store.open(&inventory).await };
        let opened = on_driver(dlock, store(dlock)?, open).await.map_err(read_failed);
        // One home: the usual case, with one round trip.
        if let Ok(view) = &opened
            && !view.is_one_of_several
            && servers.len() == 1
        {
            return Self::of(dlock, key, view, None);
        }
        match ShardedInventory::open(servers, &key, birth).await.map_err(read_failed)? {
            Some((sharded, view)) => Self::of(dlock, key, &view, Some(sharded)),
            None => Self::of(dlock, key, &opened?, None),
        }
    }

    /// Whether this home was lost and made again after this time, in milliseconds.
    pub(super) fn was_made_again(&self, home: u32, at: u64) -> bool {
        self.shared.sharded.as_ref().is_some_and(|sharded| sharded.is_younger(home, at))
    }

    /// Where its homes are.
    pub(super) fn sites(&self) -> Result<Vec<Site>> {
        match &self.shared.sharded {
            Some(sharded) => Ok(sharded.homes.sites.clone()),
            None => Ok(vec![site(&self.dlock, self.shared.inventory.clone())?]),
        }
    }

    pub(super) fn of(
        dlock: &Dlock,
        key: Key,
        view: &View,
        sharded: Option<ShardedInventory>,
    ) -> Result<Self> {
        let inventory = InventoryId { key, birth: view.birth };
        let all = dlock.extension::<OpenInventories>();
        let mut open = all.0.lock();
        let known = open.get(&(inventory.key.clone(), inventory.birth)).and_then(Weak::upgrade);
        // A home may have been made again since it was opened.
        let known = known.filter(|known| match (&known.sharded, &sharded) {
            (Some(known), Some(now)) => known.has_homes_of(now),
            _ => true,
        });
        let shared = match known {
            Some(shared) => shared,
            None => {
                warn_if_a_crash_loses_it(dlock);
                for further in sharded.iter().flat_map(|sharded| &sharded.homes.sites) {
                    further.dlock.as_ref().inspect(|dlock| warn_if_a_crash_loses_it(dlock));
                }
                let shared = Arc::new(Shared {
                    inventory: inventory.clone(),
                    backing: Backing::new(dlock, &inventory, LIMITS)?,
                    admission: Admission::default(),
                    unknown_outcomes: UnknownOutcomes::default(),
                    failures: Failures::default(),
                    sharded: sharded.map(Arc::new),
                    open: Arc::downgrade(&all),
                });
                open.insert((inventory.key.clone(), inventory.birth), Arc::downgrade(&shared));
                shared
            }
        };
        Ok(Inventory { dlock: dlock.clone(), shared, sold_out_for: SOLD_OUT_FOR })
    }
}

/// Whether a client has asked its server what that keeps.
#[derive(Default)]
struct AskedWhatIsKept(AtomicBool);

/// Warns, once for each client, if its server does not write effects to disk as they happen.
/// It is asked in the background: nobody waits for it, and it may not be allowed.
fn warn_if_a_crash_loses_it(dlock: &Dlock) {
    let is_asked = || dlock.extension::<AskedWhatIsKept>().0.swap(true, Ordering::Relaxed);
    if !dlock.capabilities().remote || is_asked() {
        return;
    }
    let Ok(store) = store(dlock) else { return };
    let ask = async move {
        if let Ok(Durability { append_only: Some(false), .. }) = store.durability().await {
            tracing::warn!(
                target: "dlock::inventory",
                "the server does not write to disk what it answers (appendonly no): a crash may lose all sales since the last snapshot, or all of them, and those units are sold again; set appendonly yes"
            );
        }
    };
    let _ = dlock.client_extension().spawn(ask);
}

fn no_server() -> Error {
    Error::Invalid("an inventory needs a server; name one at least".into())
}

/// The result of [`Inventory::repair`].
#[derive(Clone, Debug)]
#[non_exhaustive]
pub struct Repaired {
    /// The homes that were made again; none if all were there.
    pub homes: Vec<u32>,
    /// The inventory.
    pub inventory: Inventory,
}
