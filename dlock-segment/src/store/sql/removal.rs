//! Inventories that are removed: the row goes at once, with a note that is kept for a day;
//! the rows of the other tables go in steps, each in a transaction of its own.

use dlock::Key;
use dlock::extension::sql::{Job, Kind, Session, Statement, Value};

use super::Sql;
use super::head::{self, Lock};
use super::write::delete_some;

/// For how long a removal is remembered, in milliseconds.
const REMEMBERED: u64 = 24 * 3_600_000;
/// How many rows of each table one step deletes.
const ROWS: u64 = 1_000;

/// The tables with rows of an inventory, and what tells their rows apart.
const TABLES: [(&str, &str); 6] = [
    ("dlock_stock_record", "operation"),
    ("dlock_stock_hold", "operation"),
    ("dlock_stock_buyer", "buyer"),
    ("dlock_stock_return", "purchase"),
    ("dlock_stock_journal", "sequence"),
    ("dlock_stock_reader", "reader"),
];

/// Removes an inventory. Answers whether it was there.
pub(super) struct Remove<'a> {
    pub(super) id: &'a str,
    pub(super) birth: u64,
}

impl Job for Remove<'_> {
    type Output = bool;
    const WRITES: bool = true;

    async fn run(&self, session: &mut Session<'_>) -> sqlx::Result<bool> {
        let row = head::read(session, self.id, Lock::Wait).await?;
        let Some(row) = row.filter(|row| self.birth == 0 || self.birth == row.head.birth) else {
            return Ok(false);
        };
        let sql = "INSERT INTO dlock_stock_removed (id, birth, home, removed) VALUES (?, ?, ?, ?)";
        let note = Statement::new(sql).bind(self.id).bind(row.head.birth).bind(row.home);
        session.execute(note.bind(row.now)).await?;
        let delete = Statement::new("DELETE FROM dlock_stock WHERE id = ?").bind(self.id);
        session.execute(delete).await?;
        let old = Statement::new("DELETE FROM dlock_stock_removed WHERE removed < ? AND home = 0");
        session.execute(old.bind(row.now.saturating_sub(REMEMBERED))).await?;
        Ok(true)
    }
}

/// Looks whether an inventory was removed in the last day.
pub(super) struct WasRemoved<'a> {
    pub(super) id: &'a str,
    pub(super) birth: u64,
}

impl Job for WasRemoved<'_> {
    type Output = bool;
    const WRITES: bool = false;

    async fn run(&self, session: &mut Session<'_>) -> sqlx::Result<bool> {
        let now = head::now(session.dialect());
        let sql =
            format!("SELECT removed, {now} FROM dlock_stock_removed WHERE id = ? AND birth = ?");
        let statement = Statement::new(sql).bind(self.id).bind(self.birth);
        let rows = session.fetch(statement, &[Kind::Int, Kind::Int]).await?;
        Ok(rows.iter().any(|row| match row.as_slice() {
            [removed, now] => removed.count() + REMEMBERED > now.count() / 1_000,
            _ => false,
        }))
    }
}

/// Deletes some rows of inventories that were removed. Answers whether there are more.
struct DeleteRows;

impl Job for DeleteRows {
    type Output = bool;
    const WRITES: bool = true;

    async fn run(&self, session: &mut Session<'_>) -> sqlx::Result<bool> {
        let sql = "SELECT home FROM dlock_stock_removed WHERE home <> 0 ORDER BY home LIMIT 1";
        let homes = session.fetch(Statement::new(sql), &[Kind::Int]).await?;
        let Some(home) = homes.first().and_then(|row| row.first()).map(Value::count) else {
            return Ok(false);
        };
        let mut deleted = 0;
        for (table, key) in TABLES {
            let sql = delete_some(session.dialect(), table, key, "home = ?");
            deleted += session.execute(Statement::new(sql).bind(home).bind(ROWS)).await?;
        }
        if deleted == 0 {
            let done = Statement::new("UPDATE dlock_stock_removed SET home = 0 WHERE home = ?");
            session.execute(done.bind(home)).await?;
        }
        Ok(true)
    }
}

impl Sql {
    /// Deletes the rows of inventories that were removed, also of those whose removal did
    /// not come this far. What fails here is done with the next removal.
    pub(super) async fn delete_rows(&self, key: &Key) {
        while matches!(self.run(key, &DeleteRows).await, Ok(true)) {}
    }
}
