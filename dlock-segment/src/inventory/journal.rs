//! Reading the journal.

use std::sync::Arc;

use serde::{Deserialize, Serialize};

use super::Inventory;
#[cfg(doc)]
use super::InventoryBuilder;
use super::backing::read_failed;
use crate::error::{Error, Result};
use crate::store::{JournalEntry, Store};

/// About how many entries of the journal one call returns, of each home.
const ENTRIES: usize = 1_000;

/// How far the journal was read: the last `sequence` of each home. Store it, in its
/// serialized form, with what was made of the entries.
///
/// ```
/// # #[tokio::main(flavor = "current_thread")] async fn main() -> dlock_segment::Result<()> {
/// # let dlock = dlock::Dlock::connect("memory://").await?;
/// # use dlock_segment::{Inventory, JournalCursor};
/// let sale = Inventory::builder(&dlock, "phone").stock(50).homes(3).journal(1_000).create().await?;
/// # for order in 0..9 { let _ = sale.deduct(1).operation(format!("order-{order}")).send().await?; }
/// let mut cursor = JournalCursor::default();
/// let mut read = 0;
/// loop {
///     let entries = sale.journal(&cursor).await?;
///     if entries.is_empty() { break }
///     for entry in entries {
///         read += 1; // process it, and then
///         cursor.advance(&entry);
///     }
/// }
/// assert_eq!(read, 9);
/// # Ok(()) }
/// ```
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(transparent)]
pub struct JournalCursor(Vec<u64>);

impl JournalCursor {
    /// The last `sequence` that was read of a home; 0 if none was.
    pub fn sequence(&self, home: u32) -> u64 {
        self.0.get(home as usize).copied().unwrap_or(0)
    }

    /// Takes note that an entry was processed.
    pub fn advance(&mut self, entry: &JournalEntry) {
        let home = entry.home as usize;
        if self.0.len() <= home {
            self.0.resize(home + 1, 0);
        }
        self.0[home] = self.0[home].max(entry.sequence);
    }
}

/// After this entry of the only home.
impl From<u64> for JournalCursor {
    fn from(sequence: u64) -> Self {
        JournalCursor(vec![sequence])
    }
}

impl From<&JournalCursor> for JournalCursor {
    fn from(cursor: &JournalCursor) -> Self {
        cursor.clone()
    }
}

pub(crate) fn no_journal() -> Error {
    Error::Invalid("this inventory keeps no journal; make one with .journal(entries)".into())
}

impl Inventory {
    /// Reads the entries of the journal after this `sequence` (0: from the start), in
    /// order. One call returns some of them; call it again with the last `sequence`. An
    /// empty list means that there are no more for now.
    ///
    /// Every home of an inventory has its own numbers: with several homes, read on with a
    /// [`JournalCursor`]. The entries of each home are in order, one home after the other.
    ///
    /// The entries that the [`journal`](InventoryBuilder::journal) keeps can be read as
    /// often as needed. If the first `sequence` is above `after + 1`, entries between
    /// them were deleted.
    ///
    /// ```
    /// # #[tokio::main(flavor = "current_thread")] async fn main() -> dlock_segment::Result<()> {
    /// # let dlock = dlock::Dlock::connect("memory://").await?;
    /// # use dlock_segment::{Effect, Inventory};
    /// let sale = Inventory::builder(&dlock, "phone").stock(5).journal(1_000).create().await?;
    /// # let _ = sale.deduct(2).operation("order-1").send().await?;
    /// let entries = sale.journal(0).await?;
    /// assert_eq!((entries[0].sequence, entries[0].effect), (1, Effect::Taken));
    /// assert!(sale.journal(1).await?.is_empty());
    /// # Ok(()) }
    /// ```
    ///
    /// # Errors
    /// `Invalid` if the inventory was made without a
    /// [`journal`](InventoryBuilder::journal). `NotFound` if it was removed, `Store` if
    /// the store cannot be used.
    ///
    /// # Cancel safety
    /// It only reads, so it can be dropped at any time.
    pub async fn journal(&self, after: impl Into<JournalCursor>) -> Result<Vec<JournalEntry>> {
        let after = after.into();
        if let Some(sharded) = &self.shared.sharded {
            return sharded.journal(&after, ENTRIES).await.map_err(read_failed);
        }
        let after = after.sequence(0);
        let inventory = self.shared.inventory.clone();
        let read = move |store: Arc<dyn Store>| async move {
            let entries = store.journal(&inventory, after, ENTRIES).await?;
            if entries.is_empty() && store.view(&inventory).await?.journal == 0 {
                return Err(no_journal());
            }
            Ok(entries)
        };
        self.call(read).await.map_err(read_failed)
    }
}
