//! Inventories in PostgreSQL, MariaDB and SQLite, in the database of the client's locks.
//!
//! An inventory is one row of `dlock_stock` and rows of other tables; every change locks
//! the row. `batch.rs` says how a batch becomes one transaction. The rules are those of
//! [`home`](super::home), which decides here as it does for `memory://`.

mod batch;
mod head;
mod in_transaction;
mod jobs;
mod outbox;
mod pages;
mod removal;
mod write;

use dlock::Key;
use dlock::extension::ClientExtension;
use dlock::extension::sql::{Dialect, Job};
use rand::RngExt as _;

use self::head::HeadRow;
use super::{
    Answer, Call, Change, Counts, Cursor, Durability, InventoryId, JournalEntry, Page, Request,
    Store, Terms, View, missing,
};
use crate::error::{Error, Result};
use crate::store::home::Home;

/// The inventories in the SQL database of a client. Its calls must be polled on the driver
/// of the client.
#[derive(Clone, Debug)]
pub struct Sql {
    client: ClientExtension,
    dialect: Dialect,
}

impl Sql {
    /// The inventories in the lock store of this client; `None` if that is not a SQL
    /// database.
    pub fn new(client: ClientExtension) -> Option<Self> {
        let dialect = client.sql_dialect()?;
        Some(Sql { client, dialect })
    }

    /// The name of the row of an inventory.
    fn id(&self, key: &Key) -> String {
        format!("{}/i/{}", self.client.namespace(), key.as_str())
    }

    async fn run<J: Job>(&self, key: &Key, job: &J) -> Result<J::Output> {
        self.client.sql(job).await.map_err(|error| error.with_key(key).into())
    }

    /// What a job found, or why there is nothing.
    async fn found<T>(&self, inventory: &InventoryId, found: Option<T>) -> Result<T> {
        if let Some(found) = found {
            return Ok(found);
        }
        let id = self.id(&inventory.key);
        let look = removal::WasRemoved { id: &id, birth: inventory.birth };
        let was_removed = inventory.birth != 0 && self.run(&inventory.key, &look).await?;
        Err(missing(inventory, was_removed))
    }

    /// Runs a job on an inventory. Answers what it found, or why there is nothing.
    async fn run_on<T, J: Job<Output = Option<T>>>(
        &self,
        inventory: &InventoryId,
        job: &J,
    ) -> Result<T> {
        let found = self.run(&inventory.key, job).await?;
        self.found(inventory, found).await
    }

    /// Reads the row of an inventory as it is.
    async fn row(&self, inventory: &InventoryId) -> Result<HeadRow> {
        let id = self.id(&inventory.key);
        let read = jobs::Read { id: &id, birth: inventory.birth };
        self.run_on(inventory, &read).await
    }

    /// The counts as they are, with expired reservations.
    #[cfg(all(test, feature = "redis"))]
    pub(super) async fn counts_without_reclaim(
        &self,
        inventory: &InventoryId,
    ) -> Result<Vec<Counts>> {
        self.row(inventory).await.map(|row| row.head.segments)
    }

    /// Reads the row of an inventory, after expired reservations were given back.
    async fn reclaimed(&self, inventory: &InventoryId) -> Result<HeadRow> {
        let row = self.row(inventory).await?;
        if row.head.next_expiry == 0 || row.head.next_expiry > row.now {
            return Ok(row);
        }
        self.apply_from(inventory, 0, &[]).await?;
        self.row(inventory).await
    }
}

fn view(row: &HeadRow) -> View {
    Home::partial(&row.head).view(row.now)
}

impl Store for Sql {
    fn create<'a>(&'a self, key: &'a Key, terms: &'a Terms) -> Call<'a, View> {
        Box::pin(async move {
            let id = self.id(key);
            let job = jobs::Create { id: &id, home: rand::rng().random_range(1..1 << 53), terms };
            let row = self.run(key, &job).await?;
            let view = view(&row);
            terms.check(key, &row.head.terms, &view)?;
            Ok(view)
        })
    }

    fn open<'a>(&'a self, inventory: &'a InventoryId) -> Call<'a, View> {
        Box::pin(async move { self.row(inventory).await.map(|row| view(&row)) })
    }

    fn view<'a>(&'a self, inventory: &'a InventoryId) -> Call<'a, View> {
        Box::pin(async move { self.reclaimed(inventory).await.map(|row| view(&row)) })
    }

    fn remove<'a>(&'a self, inventory: &'a InventoryId) -> Call<'a, bool> {
        Box::pin(async move {
            let id = self.id(&inventory.key);
            let job = removal::Remove { id: &id, birth: inventory.birth };
            let was_there = self.run(&inventory.key, &job).await?;
            if was_there {
                self.delete_rows(&inventory.key).await;
            }
            Ok(was_there)
        })
    }

    fn apply_from<'a>(
        &'a self,
        inventory: &'a InventoryId,
        start: u32,
        batch: &'a [Request],
    ) -> Call<'a, (View, Vec<Answer>)> {
        Box::pin(async move {
            let id = self.id(&inventory.key);
            let job = jobs::Apply { id: &id, birth: inventory.birth, start: start as usize, batch };
            self.run_on(inventory, &job).await
        })
    }

    fn change<'a>(&'a self, inventory: &'a InventoryId, change: Change) -> Call<'a, View> {
        Box::pin(async move {
            let id = self.id(&inventory.key);
            let job = jobs::Alter { id: &id, birth: inventory.birth, change };
            self.run_on(inventory, &job).await
        })
    }

    fn counts<'a>(&'a self, inventory: &'a InventoryId) -> Call<'a, (View, Vec<Counts>)> {
        Box::pin(async move {
            let row = self.reclaimed(inventory).await?;
            Ok((view(&row), row.head.segments))
        })
    }

    fn sizes<'a>(&'a self, inventory: &'a InventoryId) -> Call<'a, Vec<u32>> {
        Box::pin(async move { self.row(inventory).await.map(|row| row.head.sizes) })
    }

    fn records<'a>(&'a self, inventory: &'a InventoryId, from: Cursor) -> Call<'a, Page> {
        Box::pin(async move {
            let row = self.row(inventory).await?;
            let generations = view(&row).found_generations();
            let job = pages::Records { home: row.home, generations, from };
            self.run(&inventory.key, &job).await
        })
    }

    fn journal<'a>(
        &'a self,
        inventory: &'a InventoryId,
        after: u64,
        limit: usize,
    ) -> Call<'a, Vec<JournalEntry>> {
        Box::pin(async move {
            let home = self.reclaimed(inventory).await?.home;
            self.run(&inventory.key, &pages::Journal { home, after, limit }).await
        })
    }

    fn directory<'a>(&'a self, inventory: &'a InventoryId) -> Call<'a, String> {
        Box::pin(async move { self.row(inventory).await.map(|row| row.head.terms.directory) })
    }

    fn identity<'a>(&'a self, _given: Option<&'a str>) -> Call<'a, Option<String>> {
        Box::pin(async move {
            let identity = self.client.sql(&jobs::Identity).await;
            identity.map_err(Error::Store)
        })
    }

    fn durability(&self) -> Call<'_, Durability> {
        Box::pin(async move {
            let settings = self.client.sql(&jobs::Settings { dialect: self.dialect }).await;
            settings.map_err(Error::Store)
        })
    }
}
