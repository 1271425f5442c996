//! Deductions inside a transaction of the caller, and the journal as an outbox: what only a
//! SQL database can give.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use dlock::sql::InTransaction;

use super::backing::{on_driver, read_failed, refuse_after_shutdown};
use super::checks::{checked_id, checked_quantity};
use super::{DeductRequest, Deduction, Inventory, no_journal};
use crate::error::{Error, Result};
use crate::observe;
use crate::store::sql::Sql;
use crate::store::{Answer, InventoryId, JournalEntry, Request, Snapshot, Store as _, View};

/// After how many deductions in transactions of the caller rows that are kept no longer are
/// deleted. A batch deletes some hundreds, so it keeps up.
const TIDIED_AFTER: u64 = 64;
/// How much later, so that the transaction of the caller has probably ended.
const TIDIED_LATER: Duration = Duration::from_millis(200);

impl DeductRequest<'_> {
    /// Buys the units inside a transaction of yours: if you commit, they are bought, and if
    /// you roll back, nothing happened. So the order and its units are one. It needs no
    /// operation id; with one, it has its effect once, as [`send`](Self::send).
    ///
    /// The row of the inventory stays locked until your transaction ends, and other buyers
    /// of this inventory wait for it. So make it the last statement before the commit.
    ///
    /// ```
    /// # #[cfg(feature = "postgres")]
    /// # async fn example(pool: sqlx::PgPool, sale: dlock_segment::Inventory) -> Result<(), Box<dyn std::error::Error>> {
    /// use dlock_segment::Deduction;
    ///
    /// let mut tx = pool.begin().await?;
    /// sqlx::query("INSERT INTO orders (id, buyer) VALUES (981, 'u-7')").execute(&mut *tx).await?;
    /// match sale.deduct(2).buyer("u-7").send_in(&mut tx).await? {
    ///     Deduction::Taken(_) => tx.commit().await?, // the order and its units
    ///     other => {
    ///         tx.rollback().await?; // neither
    ///         println!("{other:?}");
    ///     }
    /// }
    /// # Ok(()) }
    /// ```
    ///
    /// # Errors
    /// `Conflict` if the id belongs to another request. `Invalid` if the transaction is one
    /// of another database than that of the inventory. `NotFound` or `Lost` if the inventory
    /// is not there. `Store` if the database failed, found a deadlock or gave up waiting for
    /// another transaction: roll back, and try it again if that makes sense. `Store` also if
    /// the inventory has several homes.
    ///
    /// # Cancel safety
    /// Dropping the future leaves the transaction with or without the deduction; roll it
    /// back.
    pub async fn send_in<T: InTransaction>(self, tx: &mut T) -> Result<Deduction> {
        let (quantity, operation, buyer) = self.units.checked()?;
        let inventory = self.units.inventory;
        refuse_after_shutdown(&inventory.dlock)?;
        let store = inventory.sql()?;
        let request = self.units.placed(Request::Deduct { quantity, operation, buyer })?;
        let id = &inventory.shared.inventory;
        let answered = store.apply_in(&mut tx.session(), id, &request).await;
        inventory.deduction(self.units.operation, answered)
    }
}

impl Inventory {
    /// The store, if it is a SQL database.
    fn sql(&self) -> Result<Sql> {
        let unsupported = |why: String| {
            let kind = dlock::ErrorKind::Unsupported;
            Error::Store(dlock::Error::new(kind, dlock::Operation::Inventory).with_message(why))
        };
        if self.shared.sharded.is_some() {
            // Units of other homes could not be brought inside the transaction.
            return Err(unsupported(
                "this inventory has several homes; make it with one home for transactions and the outbox".into(),
            ));
        }
        Sql::new(self.dlock.client_extension()).ok_or_else(|| {
            let name = self.dlock.capabilities().name;
            unsupported(format!(
                "{name}:// has no transactions; keep the inventory in a SQL database for this"
            ))
        })
    }

    fn deduction(
        &self,
        operation: Option<String>,
        answered: Result<(View, Answer)>,
    ) -> Result<Deduction> {
        let answered = answered.map(|(view, answer)| (Snapshot::from(&view), answer));
        observe::answered(&self.shared.inventory.key, &self.shared.failures, &answered, false);
        match answered? {
            (snapshot, Answer::Found(record)) => {
                self.tidy_now_and_then();
                Ok(Deduction::of(self.origin(&snapshot), operation, record))
            }
            (snapshot, refused) => Deduction::refusal(&snapshot, &refused),
        }
    }

    /// Deletes some rows that are kept no longer, after one in so many deductions in
    /// transactions of the caller. Those leave that to others, so that they lock no more rows.
    /// It has a transaction of its own, which waits for that of the caller.
    fn tidy_now_and_then(&self) {
        static SENT: AtomicU64 = AtomicU64::new(1);
        if !SENT.fetch_add(1, Ordering::Relaxed).is_multiple_of(TIDIED_AFTER) {
            return;
        }
        let Ok(store) = self.sql() else { return };
        let id = self.shared.inventory.clone();
        let tidy = async move {
            tokio::time::sleep(TIDIED_LATER).await;
            drop(store.apply_from(&id, 0, &[]).await);
        };
        let _ = self.dlock.client_extension().spawn(tidy); // the next one does more
    }

    /// The journal as an outbox, for one reader: what it has not acknowledged is kept, and
    /// delivered at least once. Only inventories in a SQL database have one.
    ///
    /// ```
    /// # async fn example(sale: dlock_segment::Inventory) -> dlock_segment::Result<()> {
    /// let outbox = sale.outbox("billing")?;
    /// let entries = outbox.next(100).await?;
    /// for entry in &entries {
    ///     println!("{} {:?} {}", entry.sequence, entry.effect, entry.quantity);
    /// }
    /// if let Some(last) = entries.last() {
    ///     outbox.acknowledge(last.sequence).await?;
    /// }
    /// # Ok(()) }
    /// ```
    ///
    /// # Errors
    /// `Invalid` if the name is empty or too long. `Store` if the inventory is not kept in a
    /// SQL database, or has several homes.
    pub fn outbox(&self, reader: impl AsRef<str>) -> Result<Outbox> {
        let reader = checked_id("reader's name", reader.as_ref())?;
        Ok(Outbox { store: self.sql()?, sale: self.clone(), reader: reader.to_string().into() })
    }
}

/// Deducts from the first of several inventories that nobody else has locked and that has
/// enough. `Err` if they are not all in one database.
pub(crate) async fn deduct_first_free_in<T: InTransaction>(
    tx: &mut T,
    sales: &[Inventory],
    quantity: u64,
) -> Result<Deduction> {
    let quantity = checked_quantity("the quantity", quantity)?;
    let Some(first) = sales.first() else {
        return Err(Error::Invalid("there is no inventory to deduct from".into()));
    };
    refuse_after_shutdown(&first.dlock)?;
    let store = first.sql()?;
    sales.iter().try_for_each(|sale| sale.sql().map(drop))?;
    let request = Request::Deduct { quantity, operation: None, buyer: None };
    let mut refused = None;
    let mut free: Vec<&Inventory> = sales.iter().collect();
    while !free.is_empty() {
        let inventories: Vec<_> = free.iter().map(|sale| &sale.shared.inventory).collect();
        let session = &mut tx.session();
        let applied = store.apply_to_free_in(session, &inventories, quantity, &request).await;
        let (place, answered) = match applied {
            Ok(None) => break,
            Ok(Some((place, view, answer))) => (place, Ok((view, answer))),
            // It is not known which one failed; the first one tells of it.
            Err(error) => (0, Err(error)),
        };
        let deduction = free[place].deduction(None, answered)?;
        let Some(rank) = rank(&deduction) else { return Ok(deduction) };
        note(&mut refused, rank, deduction);
        free.remove(place); // it does not sell, or was sold out meanwhile
    }
    // Those that were skipped may have some: now it waits for each of them, in one order, so
    // that two transactions do not wait for each other. Nobody waits for those that do not
    // sell: who found that out has locked them out of order.
    let mut in_order: Vec<&Inventory> = sales.iter().collect();
    in_order.sort_by(|one, other| one.name().as_str().cmp(other.name().as_str()));
    for sale in in_order {
        let id = &sale.shared.inventory;
        let session = &mut tx.session();
        let answered = match store.halted_in(session, id).await {
            Ok(Some(halted)) => Ok(halted),
            Ok(None) => store.apply_in(session, id, &request).await,
            Err(error) => Err(error),
        };
        let deduction = sale.deduction(None, answered)?;
        let Some(rank) = rank(&deduction) else { return Ok(deduction) };
        note(&mut refused, rank, deduction);
    }
    let (_, refused) =
        refused.ok_or_else(|| Error::Invalid("there is no inventory to deduct from".into()))?;
    Ok(refused)
}

/// Whether another inventory may sell after this answer: then, how much the answer says about
/// all of them together.
fn rank(deduction: &Deduction) -> Option<u8> {
    Some(match deduction {
        Deduction::Ended => 0,
        Deduction::SoldOut { .. } => 1,
        Deduction::NotStarted { .. } => 2,
        Deduction::Paused => 3,
        Deduction::NotEnough { .. } => 4,
        _ => return None,
    })
}

fn note(refused: &mut Option<(u8, Deduction)>, rank: u8, deduction: Deduction) {
    if refused.as_ref().is_none_or(|(best, _)| rank > *best) {
        *refused = Some((rank, deduction));
    }
}

/// The journal of an inventory for one reader: [`Inventory::outbox`].
///
/// Entries are numbered under the lock of the inventory's row, so they become visible in
/// the order of their numbers: a reader never misses one that was committed late. All
/// entries of a buyer are in the order of their effects.
///
/// An entry stays until all readers have acknowledged it (and longer, if
/// [`journal`](crate::InventoryBuilder::journal) says so). So a reader that is not used any
/// more must be [forgotten](Self::forget), or the journal grows.
///
/// Run one worker for each reader at a time, under a lock of dlock for instance: two workers
/// get the same entries.
#[derive(Clone, Debug)]
pub struct Outbox {
    store: Sql,
    sale: Inventory,
    reader: Arc<str>,
}

impl Outbox {
    /// Reads the entries after the last one that was acknowledged, in order, at most
    /// `limit`. A new reader begins with the oldest entry that is kept. Entries that are not
    /// acknowledged come again.
    ///
    /// ```
    /// # async fn example(sale: dlock_segment::Inventory) -> dlock_segment::Result<()> {
    /// let outbox = sale.outbox("mail")?;
    /// for entry in outbox.next(100).await? {
    ///     println!("{}: {} units", entry.sequence, entry.quantity);
    /// }
    /// # Ok(()) }
    /// ```
    ///
    /// # Errors
    /// `Invalid` if the inventory keeps no journal. `NotFound` if it was removed, `Store` if
    /// the database cannot be used.
    ///
    /// # Cancel safety
    /// It can be dropped at any time.
    pub async fn next(&self, limit: usize) -> Result<Vec<JournalEntry>> {
        let (id, reader) = (self.id(), self.reader.clone());
        let store = self.store.clone();
        let read = move |any: Arc<dyn crate::store::Store>| async move {
            let entries = store.unread(&id, &reader, limit.max(1)).await?;
            if entries.is_empty() && any.view(&id).await?.journal == 0 {
                return Err(no_journal());
            }
            Ok(entries)
        };
        on_driver(&self.sale.dlock, Arc::new(self.store.clone()), read).await.map_err(read_failed)
    }

    /// Says that all entries up to this `sequence` are done.
    ///
    /// ```
    /// # async fn example(sale: dlock_segment::Inventory) -> dlock_segment::Result<()> {
    /// let outbox = sale.outbox("mail")?;
    /// if let Some(last) = outbox.next(100).await?.last() {
    ///     outbox.acknowledge(last.sequence).await?; // after the mails were sent
    /// }
    /// # Ok(()) }
    /// ```
    ///
    /// # Errors
    /// As [`next`](Self::next). `Unknown` if the database did not answer; then some entries
    /// may come again.
    ///
    /// # Cancel safety
    /// The entries may or may not be acknowledged when this is dropped.
    pub async fn acknowledge(&self, sequence: u64) -> Result<()> {
        self.update(Some(sequence)).await
    }

    /// The same inside a transaction of yours: with what you write there about the entries,
    /// each of them has its effect in this database exactly once.
    ///
    /// ```
    /// # #[cfg(feature = "postgres")]
    /// # async fn example(pool: sqlx::PgPool, sale: dlock_segment::Inventory) -> Result<(), Box<dyn std::error::Error>> {
    /// let outbox = sale.outbox("report")?;
    /// let entries = outbox.next(1_000).await?;
    /// let mut tx = pool.begin().await?;
    /// for entry in &entries {
    ///     let insert = sqlx::query("INSERT INTO report (entry, units) VALUES ($1, $2)");
    ///     let insert = insert.bind(i64::try_from(entry.sequence)?);
    ///     insert.bind(i64::try_from(entry.quantity)?).execute(&mut *tx).await?;
    /// }
    /// if let Some(last) = entries.last() {
    ///     outbox.acknowledge_in(&mut tx, last.sequence).await?;
    /// }
    /// tx.commit().await?;
    /// # Ok(()) }
    /// ```
    ///
    /// # Errors
    /// As [`DeductRequest::send_in`].
    ///
    /// # Cancel safety
    /// As [`DeductRequest::send_in`].
    pub async fn acknowledge_in<T: InTransaction>(&self, tx: &mut T, sequence: u64) -> Result<()> {
        refuse_after_shutdown(&self.sale.dlock)?;
        let (id, reader) = (self.id(), &self.reader);
        self.store.acknowledge_in(&mut tx.session(), &id, reader, sequence).await
    }

    /// Forgets the reader, so that nothing is kept for it.
    ///
    /// ```
    /// # async fn example(sale: dlock_segment::Inventory) -> dlock_segment::Result<()> {
    /// let outbox = sale.outbox("mail")?;
    /// outbox.forget().await?; // there are no mails any more
    /// # Ok(()) }
    /// ```
    ///
    /// # Errors
    /// As [`acknowledge`](Self::acknowledge).
    ///
    /// # Cancel safety
    /// The reader may or may not be forgotten when this is dropped.
    pub async fn forget(&self) -> Result<()> {
        self.update(None).await
    }

    async fn update(&self, done: Option<u64>) -> Result<()> {
        let (id, reader, store) = (self.id(), self.reader.clone(), self.store.clone());
        let update = move |_| async move { store.acknowledge(&id, &reader, done).await };
        on_driver(&self.sale.dlock, Arc::new(self.store.clone()), update).await
    }

    fn id(&self) -> InventoryId {
        self.sale.shared.inventory.clone()
    }
}
