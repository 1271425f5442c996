//! How far each reader of the journal is. What a reader has not acknowledged is kept.

use dlock::extension::sql::{Job, Kind, Session, Statement, Value};

use super::head::{self, HeadRow, Lock};
use super::in_transaction::failed;
use super::{Sql, pages};
use crate::error::Result;
use crate::store::{InventoryId, JournalEntry};

/// Reads what a reader has not acknowledged; `None` if the inventory is not there. A new
/// reader begins with the oldest entry that is kept.
struct Unread<'a> {
    id: &'a str,
    birth: u64,
    reader: &'a str,
    limit: usize,
}

impl Job for Unread<'_> {
    type Output = Option<Vec<JournalEntry>>;
    const WRITES: bool = true;

    async fn run(&self, session: &mut Session<'_>) -> sqlx::Result<Self::Output> {
        let Some(row) = self.row(session, Lock::No).await? else { return Ok(None) };
        let done = match self.done(session, row.home).await? {
            Some(done) => done,
            None => {
                // Under the lock of the row, so that no batch deletes entries meanwhile.
                let Some(row) = self.row(session, Lock::Wait).await? else { return Ok(None) };
                match self.done(session, row.home).await? {
                    Some(done) => done,
                    None => {
                        let sql =
                            "INSERT INTO dlock_stock_reader (home, reader, done) VALUES (?, ?, ?)";
                        let statement = Statement::new(sql).bind(row.home).bind(self.reader);
                        session.execute(statement.bind(row.trimmed)).await?;
                        row.trimmed
                    }
                }
            }
        };
        pages::entries(session, row.home, done, self.limit).await.map(Some)
    }
}

impl Unread<'_> {
    async fn row(&self, session: &mut Session<'_>, lock: Lock) -> sqlx::Result<Option<HeadRow>> {
        let row = head::read(session, self.id, lock).await?;
        Ok(row.filter(|row| self.birth == 0 || self.birth == row.head.birth))
    }

    async fn done(&self, session: &mut Session<'_>, home: u64) -> sqlx::Result<Option<u64>> {
        let sql = "SELECT done FROM dlock_stock_reader WHERE home = ? AND reader = ?";
        let statement = Statement::new(sql).bind(home).bind(self.reader);
        let rows = session.fetch(statement, &[Kind::Int]).await?;
        Ok(rows.iter().flatten().next().map(Value::count))
    }
}

/// Acknowledges entries, or forgets a reader.
struct Update<'a> {
    id: &'a str,
    birth: u64,
    reader: &'a str,
    /// The last entry that is done; `None` forgets the reader.
    done: Option<u64>,
}

impl Job for Update<'_> {
    type Output = Option<()>;
    const WRITES: bool = true;

    async fn run(&self, session: &mut Session<'_>) -> sqlx::Result<Self::Output> {
        let row = head::read(session, self.id, Lock::No).await?;
        let row = row.filter(|row| self.birth == 0 || self.birth == row.head.birth);
        let Some(row) = row else { return Ok(None) };
        let statement = match self.done {
            // Never back: an answer that was lost may be followed by an older one.
            Some(done) => Statement::new(
                "UPDATE dlock_stock_reader SET done = ? WHERE home = ? AND reader = ? AND done < ?",
            )
            .bind(done.min(row.head.journaled))
            .bind(row.home)
            .bind(self.reader)
            .bind(done.min(row.head.journaled)),
            None => Statement::new("DELETE FROM dlock_stock_reader WHERE home = ? AND reader = ?")
                .bind(row.home)
                .bind(self.reader),
        };
        session.execute(statement).await?;
        Ok(Some(()))
    }
}

impl Sql {
    pub(crate) async fn unread(
        &self,
        inventory: &InventoryId,
        reader: &str,
        limit: usize,
    ) -> Result<Vec<JournalEntry>> {
        let id = self.id(&inventory.key);
        let job = Unread { id: &id, birth: inventory.birth, reader, limit };
        self.run_on(inventory, &job).await
    }

    /// Acknowledges entries up to `done`; `None` forgets the reader.
    pub(crate) async fn acknowledge(
        &self,
        inventory: &InventoryId,
        reader: &str,
        done: Option<u64>,
    ) -> Result<()> {
        let id = self.id(&inventory.key);
        let job = Update { id: &id, birth: inventory.birth, reader, done };
        self.run_on(inventory, &job).await
    }

    /// The same in a transaction of the caller.
    pub(crate) async fn acknowledge_in(
        &self,
        session: &mut Session<'_>,
        inventory: &InventoryId,
        reader: &str,
        done: u64,
    ) -> Result<()> {
        self.check_dialect(session)?;
        let id = self.id(&inventory.key);
        let job = Update { id: &id, birth: inventory.birth, reader, done: Some(done) };
        let updated = job.run(session).await;
        let updated = updated.map_err(|error| failed(session, &inventory.key, error))?;
        self.found(inventory, updated).await
    }
}
