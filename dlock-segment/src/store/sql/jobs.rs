//! What is done in one transaction each.

use dlock::extension::sql::{Dialect, Job, Kind, Session, Statement, Value};

use super::batch::{self, Owned};
use super::head::{self, HeadRow, Lock};
use crate::store::home::partial::Head;
use crate::store::{Answer, Change, Durability, Request, Terms, View};

/// Makes an inventory, unless there is one.
pub(super) struct Create<'a> {
    pub(super) id: &'a str,
    /// Its number in the other tables, if it is made.
    pub(super) home: u64,
    pub(super) terms: &'a Terms,
}

impl Job for Create<'_> {
    type Output = HeadRow;
    const WRITES: bool = true;

    async fn run(&self, session: &mut Session<'_>) -> sqlx::Result<HeadRow> {
        if let Some(row) = head::read(session, self.id, Lock::Wait).await? {
            return Ok(row);
        }
        let sql = format!("SELECT {}", head::now(session.dialect()));
        let now = session.fetch(Statement::new(sql), &[Kind::Int]).await?;
        let now = now.first().and_then(|row| row.first()).map_or(0, Value::count);
        // Some clocks count milliseconds only, and two inventories may be made within one.
        let birth = now - now % 1_000 + self.home % 1_000;
        let head = Head::new(birth, self.terms.clone());
        let row = HeadRow { home: self.home, head, swept: 0, trimmed: 0, now: now / 1_000 };
        row.insert(session, self.id).await?;
        Ok(row)
    }
}

/// Reads the row of an inventory; `None` if it is not there.
pub(super) struct Read<'a> {
    pub(super) id: &'a str,
    pub(super) birth: u64,
}

impl Job for Read<'_> {
    type Output = Option<HeadRow>;
    const WRITES: bool = false;

    async fn run(&self, session: &mut Session<'_>) -> sqlx::Result<Option<HeadRow>> {
        let row = head::read(session, self.id, Lock::No).await?;
        Ok(row.filter(|row| self.birth == 0 || self.birth == row.head.birth))
    }
}

/// Applies a batch; `None` if the inventory is not there.
pub(super) struct Apply<'a> {
    pub(super) id: &'a str,
    pub(super) birth: u64,
    pub(super) start: usize,
    pub(super) batch: &'a [Request],
}

impl Job for Apply<'_> {
    type Output = Option<(View, Vec<Answer>)>;
    const WRITES: bool = true;

    async fn run(&self, session: &mut Session<'_>) -> sqlx::Result<Self::Output> {
        batch::apply(session, self.id, self.birth, self.start, self.batch, Owned::ByUs).await
    }
}

/// Changes an inventory as a whole; `None` if it is not there.
pub(super) struct Alter<'a> {
    pub(super) id: &'a str,
    pub(super) birth: u64,
    pub(super) change: Change,
}

impl Job for Alter<'_> {
    type Output = Option<View>;
    const WRITES: bool = true;

    async fn run(&self, session: &mut Session<'_>) -> sqlx::Result<Option<View>> {
        batch::change(session, self.id, self.birth, self.change).await
    }
}

/// Reads what the server would keep after a crash.
pub(super) struct Settings {
    pub(super) dialect: Dialect,
}

impl Job for Settings {
    type Output = Durability;
    const WRITES: bool = false;

    async fn run(&self, session: &mut Session<'_>) -> sqlx::Result<Durability> {
        // Each is "always", "everysec" or "no", as in Redis.
        let sql = match self.dialect {
            #[cfg(feature = "mysql")]
            Dialect::MySql => {
                "SELECT CASE @@innodb_flush_log_at_trx_commit WHEN 1 THEN 'always' ELSE 'everysec' END"
            }
            #[cfg(feature = "postgres")]
            Dialect::Postgres => {
                "SELECT CASE WHEN current_setting('fsync') = 'off' THEN 'no' \
                 WHEN current_setting('synchronous_commit') = 'off' THEN 'everysec' \
                 ELSE 'always' END"
            }
            // Set for the connections that write stock.
            #[cfg(feature = "sqlite")]
            Dialect::Sqlite => "SELECT 'always'",
        };
        let rows = session.fetch(Statement::new(sql), &[Kind::Text]).await?;
        let fsync = rows.into_iter().flatten().next().and_then(Value::text);
        Ok(Durability { append_only: Some(true), fsync, ..Durability::default() })
    }
}

/// Reads the identity of the database, which it got with its tables.
pub(super) struct Identity;

impl Job for Identity {
    type Output = Option<String>;
    const WRITES: bool = false;

    async fn run(&self, session: &mut Session<'_>) -> sqlx::Result<Option<String>> {
        let sql = "SELECT value FROM dlock_meta WHERE name = 'identity'";
        let rows = session.fetch(Statement::new(sql), &[Kind::Int]).await?;
        Ok(rows.iter().flatten().next().map(|value| format!("{:014x}", value.count())))
    }
}
