//! A database: the statements that all of them understand, and what each says by itself (the
//! words of SQL, the clock, the errors).

use std::collections::BTreeSet;
use std::future::Future;
use std::sync::Arc;
#[cfg(feature = "postgres")]
use std::time::Duration;

use sqlx::{ConnectOptions as _, Connection};

use super::errors::Cause;
use super::session::{Cells, Dialect, Session};
use super::statements::{Statement, Value};
use super::transaction::Store;
use crate::backend::memory::lock_table::LockTable;
use crate::clock::Moment;
use crate::error::Result;
use crate::planted_bug::PlantedBug;

/// A connection of a driver.
pub(super) type Conn<D> = <<D as Database>::Driver as sqlx::Database>::Connection;
/// How a connection is made.
pub(super) type Options<D> = <Conn<D> as Connection>::Options;
type Sent<T> = std::result::Result<T, sqlx::Error>;

/// The name of the tables' layout.
pub(super) const LAYOUT: i64 = 1;

/// The columns of `dlock_lock`.
pub(super) const COLUMNS: &str = "id, version, token, holders, waiters, holder, until_us, \
     keep_us, broken_by, broken_us, state";
/// Replaces the row that is there already, if it has the version before.
#[cfg(any(feature = "postgres", feature = "sqlite"))]
pub(super) const REPLACE: &str = "ON CONFLICT (id) DO UPDATE SET version = excluded.version, \
     token = excluded.token, holders = excluded.holders, waiters = excluded.waiters, \
     holder = excluded.holder, until_us = excluded.until_us, keep_us = excluded.keep_us, \
     broken_by = excluded.broken_by, broken_us = excluded.broken_us, state = excluded.state \
     WHERE dlock_lock.version = excluded.version - 1";

/// A row of `dlock_lock`, as far as a decision needs it.
#[derive(Clone, Debug)]
pub(super) struct LockRow {
    pub(super) id: String,
    pub(super) version: i64,
    pub(super) token: u64,
    pub(super) broken_by: Option<String>,
    pub(super) broken_us: i64,
    pub(super) state: Vec<u8>,
}

impl LockRow {
    /// A row with the time at which it was read.
    fn read(row: &dyn Cells) -> Sent<(Self, i64)> {
        let read = LockRow {
            id: row.text(0)?.unwrap_or_default(),
            version: row.int(1)?,
            token: row.int(2)?.try_into().unwrap_or(0),
            broken_by: row.text(3)?,
            broken_us: row.int(4)?,
            state: row.bytes(5)?,
        };
        Ok((read, row.int(6)?))
    }
}

/// A row of `dlock_lock` that is written: a new one, or one that is locked and had the
/// version before.
#[derive(Clone, Debug)]
pub struct RowWrite {
    pub(super) id: String,
    pub(super) version: i64,
    pub(super) token: i64,
    pub(super) holders: i32,
    pub(super) waiters: i32,
    pub(super) holder: Option<String>,
    pub(super) until_us: i64,
    pub(super) keep_us: i64,
    pub(super) broken_by: Option<String>,
    pub(super) broken_us: i64,
    pub(super) state: Vec<u8>,
}

#[cfg(feature = "mysql")]
impl RowWrite {
    /// Whether there was no such row.
    pub(super) fn is_new(&self) -> bool {
        self.version == 1
    }
}

/// The time of a database, in microseconds.
#[derive(Clone, Copy, Debug)]
pub struct Time {
    pub(super) now_us: u64,
    /// The time since 1970 when this clock shows zero.
    pub(super) epoch_us: u64,
}

impl Time {
    pub(super) fn now(self) -> Moment {
        Moment::from_nanos(self.now_us.saturating_mul(1_000))
    }

    /// An empty table by this clock.
    pub(super) fn table(self) -> LockTable {
        LockTable::new(self.epoch_us, PlantedBug::default())
    }
}

/// What `dlock_meta` says.
#[derive(Clone, Copy, Debug)]
pub struct Meta {
    /// The highest token of a row that was removed.
    pub(super) floor: u64,
    /// How many locks were broken.
    pub(super) breaks: i64,
    pub(super) time: Time,
}

/// Rows and the time at which they were read; no time if there are no rows.
#[derive(Clone, Debug, Default)]
pub struct Rows {
    pub(super) rows: Vec<LockRow>,
    pub(super) time: Option<Time>,
}

/// What to do when a row is locked by somebody else.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum OnLocked {
    /// Wait, but not as long as a call may take.
    Wait,
    /// Wait, but so shortly that calls of other keys can be late by that.
    WaitBriefly,
    /// Fail at once.
    Fail,
    /// Leave it out.
    Skip,
}

/// A row in a listing, or one that the sweep looks at.
#[derive(Clone, Debug)]
pub struct IdleRow {
    pub(super) id: String,
    pub(super) token: i64,
    pub(super) until_us: i64,
    pub(super) keep_us: i64,
}

impl IdleRow {
    fn read(row: &dyn Cells) -> Sent<Self> {
        Ok(IdleRow {
            id: row.text(0)?.unwrap_or_default(),
            token: row.int(1)?,
            until_us: row.int(2)?,
            keep_us: row.int(3)?,
        })
    }
}

/// A database that has the tables of `schema/`. All calls but `begin` and `begin_read` are
/// made inside a transaction, so that they also work through a pooler of transactions.
pub trait Database: Send + Sync + Sized + 'static {
    /// The driver.
    type Driver: sqlx::Database;
    /// The short name, as in the URL.
    const NAME: &'static str;
    /// The statements that make the tables.
    const SCHEMA: &'static str;
    /// How many connections are used for calls.
    const CONNECTIONS: usize;
    /// How many connections are used for the jobs of crates beside the lock.
    const JOB_CONNECTIONS: usize = 8;
    /// The words of SQL.
    const DIALECT: Dialect;
    /// The table of locks, where its rows are selected by their ids.
    const LOCK_TABLE: &'static str = "dlock_lock";
    /// The time of the server in microseconds.
    const NOW: &'static str;
    /// Whether rows are locked one by one.
    const LOCKS_ROWS: bool = true;

    /// A connection for statements.
    fn session<'a>(&self, conn: &'a mut Conn<Self>) -> Session<'a>;

    /// Sets up a new connection for jobs, after `set_up`.
    fn set_up_for_jobs(&self, _conn: &mut Conn<Self>) -> impl Future<Output = Sent<()>> + Send {
        async { Ok(()) }
    }

    /// The address for errors: without user and password.
    fn address(&self) -> &str;

    /// How a connection is made now: passwords may change.
    fn options(&self) -> Result<Options<Self>>;

    /// Makes a connection.
    fn connect(&self, options: Options<Self>) -> impl Future<Output = Sent<Conn<Self>>> + Send {
        async move { options.connect().await }
    }

    /// Sets up a new connection.
    fn set_up(&self, _conn: &mut Conn<Self>) -> impl Future<Output = Sent<()>> + Send {
        async { Ok(()) }
    }

    /// Looks whether this is a database that keeps locks, which is an error if it is not. Some
    /// other databases speak the same language.
    fn examine(&self, _conn: &mut Conn<Self>) -> impl Future<Output = Sent<()>> + Send {
        async { Ok(()) }
    }

    /// Makes the tables that are missing.
    fn make_tables(&self, conn: &mut Conn<Self>) -> impl Future<Output = Sent<()>> + Send {
        async move { self.session(conn).send(Self::SCHEMA).await }
    }

    /// The layout of the tables; `None` while they are being made.
    fn layout(&self, conn: &mut Conn<Self>) -> impl Future<Output = Sent<Option<i64>>> + Send {
        async move {
            let statement = Statement::new("SELECT value FROM dlock_meta WHERE name = 'layout'");
            let rows = self.session(conn).fetch_as(statement, |row| row.int(0)).await?;
            Ok(rows.first().copied())
        }
    }

    /// Starts a transaction that writes.
    fn begin(&self, conn: &mut Conn<Self>) -> impl Future<Output = Sent<()>> + Send;

    /// Starts a transaction that reads, if one is needed.
    fn begin_read(&self, _conn: &mut Conn<Self>) -> impl Future<Output = Sent<()>> + Send {
        async { Ok(()) }
    }

    /// Ends what `begin_read` has started.
    fn end_read(&self, _conn: &mut Conn<Self>) -> impl Future<Output = Sent<()>> + Send {
        async { Ok(()) }
    }

    /// Commits a transaction.
    fn commit(&self, conn: &mut Conn<Self>) -> impl Future<Output = Sent<()>> + Send {
        async move { self.session(conn).send("COMMIT").await }
    }

    /// Commits a transaction that may be lost if the server crashes now, without waiting for
    /// the disk where the database can do that.
    fn commit_soon(&self, conn: &mut Conn<Self>) -> impl Future<Output = Sent<()>> + Send {
        self.commit(conn)
    }

    /// Rolls a transaction back.
    fn roll_back(&self, conn: &mut Conn<Self>) -> impl Future<Output = Sent<()>> + Send {
        async move { self.session(conn).send("ROLLBACK").await }
    }

    /// Reads the rows with these ids, and locks them first, in this order, if it is said
    /// what to do when one is locked.
    fn rows(
        &self,
        conn: &mut Conn<Self>,
        ids: &[String],
        lock: Option<OnLocked>,
    ) -> impl Future<Output = Sent<Rows>> + Send {
        async move {
            let lock = match lock {
                Some(OnLocked::Wait | OnLocked::WaitBriefly) if Self::LOCKS_ROWS => "FOR UPDATE",
                Some(OnLocked::Fail) if Self::LOCKS_ROWS => "FOR UPDATE NOWAIT",
                Some(OnLocked::Skip) if Self::LOCKS_ROWS => "FOR UPDATE SKIP LOCKED",
                _ => "",
            };
            let sql = format!(
                "SELECT id, version, token, broken_by, broken_us, state, {} FROM {} \
                 WHERE id @IN ORDER BY id {lock}",
                Self::NOW,
                Self::LOCK_TABLE
            );
            let statement = Statement::new(sql).bind_list(ids.iter().cloned());
            let rows = self.session(conn).fetch_as(statement, LockRow::read).await?;
            // The row that was waited for longest has the latest time.
            let time = rows.iter().map(|(_, now_us)| *now_us).max().map(|now| self.time(now));
            Ok(Rows { rows: rows.into_iter().map(|(row, _)| row).collect(), time })
        }
    }

    /// Which of these rows are there, locked or not.
    fn present(
        &self,
        conn: &mut Conn<Self>,
        ids: &[String],
    ) -> impl Future<Output = Sent<BTreeSet<String>>> + Send {
        async move {
            let statement = Statement::new("SELECT id FROM dlock_lock WHERE id @IN");
            let statement = statement.bind_list(ids.iter().cloned());
            let ids = self.session(conn).fetch_as(statement, |row| row.text(0)).await?;
            Ok(ids.into_iter().flatten().collect())
        }
    }

    /// The time, when the server says that it is `now_us`.
    fn time(&self, now_us: i64) -> Time {
        Time { now_us: now_us.try_into().unwrap_or(0), epoch_us: 0 }
    }

    /// Reads `dlock_meta`. After rows were locked, it must see what was committed before.
    fn meta(&self, conn: &mut Conn<Self>) -> impl Future<Output = Sent<Meta>> + Send {
        async move {
            let sql = format!("SELECT name, value, {} FROM dlock_meta", Self::NOW);
            let read =
                |row: &dyn Cells| Ok((row.text(0)?.unwrap_or_default(), row.int(1)?, row.int(2)?));
            let rows = self.session(conn).fetch_as(Statement::new(sql), read).await?;
            let value = |name: &str| {
                let found = rows.iter().find(|(known, ..)| known == name);
                found.map(|(_, value, _)| *value).ok_or(sqlx::Error::RowNotFound)
            };
            self.check_meta(&value)?;
            let now_us = rows.last().map_or(0, |(.., now_us)| *now_us);
            let floor = value("floor")?.try_into().unwrap_or(0);
            Ok(Meta { floor, breaks: value("breaks")?, time: self.time(now_us) })
        }
    }

    /// Whether this client may use tables in which `dlock_meta` has these values.
    fn check_meta(&self, _value: &dyn Fn(&str) -> Sent<i64>) -> Sent<()> {
        Ok(())
    }

    /// Writes rows, sorted by their ids. False: one of the new ones is there already.
    fn write(
        &self,
        conn: &mut Conn<Self>,
        rows: Vec<RowWrite>,
    ) -> impl Future<Output = Sent<bool>> + Send;

    /// Counts a break in `dlock_meta`.
    fn count_break(&self, conn: &mut Conn<Self>) -> impl Future<Output = Sent<()>> + Send {
        async move {
            let sql = "UPDATE dlock_meta SET value = value + 1 WHERE name = 'breaks'";
            self.session(conn).execute(Statement::new(sql)).await.map(drop)
        }
    }

    /// Some rows from this id on, in order, for listings and the sweep.
    fn rows_from(
        &self,
        conn: &mut Conn<Self>,
        id: &str,
        limit: i64,
    ) -> impl Future<Output = Sent<Vec<IdleRow>>> + Send {
        async move {
            let sql = "SELECT id, token, until_us, keep_us FROM dlock_lock WHERE id >= ? \
                 ORDER BY id LIMIT ?";
            let statement = Statement::new(sql).bind(id).bind(Value::Int(limit));
            self.session(conn).fetch_as(statement, IdleRow::read).await
        }
    }

    /// Locks those of these rows that nobody else has locked, and reads them.
    fn lock_idle(
        &self,
        conn: &mut Conn<Self>,
        ids: &[String],
    ) -> impl Future<Output = Sent<Vec<IdleRow>>> + Send {
        async move {
            let lock = if Self::LOCKS_ROWS { "FOR UPDATE SKIP LOCKED" } else { "" };
            let sql = format!(
                "SELECT id, token, until_us, keep_us FROM {} WHERE id @IN ORDER BY id {lock}",
                Self::LOCK_TABLE
            );
            let statement = Statement::new(sql).bind_list(ids.iter().cloned());
            self.session(conn).fetch_as(statement, IdleRow::read).await
        }
    }

    /// Whether this client is the one to sweep now: nobody has since that time.
    fn claim_sweep(
        &self,
        conn: &mut Conn<Self>,
        now_us: i64,
        since_us: i64,
    ) -> impl Future<Output = Sent<bool>> + Send {
        async move {
            let sql = "UPDATE dlock_meta SET value = ? \
                 WHERE name = 'swept' AND value NOT BETWEEN ? AND ?";
            let (now, since) = (Value::Int(now_us), Value::Int(since_us));
            let statement = Statement::new(sql).bind(now.clone()).bind(since).bind(now);
            Ok(self.session(conn).execute(statement).await? == 1)
        }
    }

    /// Whether there are more rows of `lock_in` than this.
    fn has_more_row_locks(
        &self,
        conn: &mut Conn<Self>,
        than: i64,
    ) -> impl Future<Output = Sent<bool>> + Send {
        async move {
            let sql = "SELECT id FROM dlock_row ORDER BY id LIMIT 1 OFFSET ?";
            let next = Statement::new(sql).bind(Value::Int(than));
            Ok(!self.session(conn).fetch_as(next, |row| row.text(0)).await?.is_empty())
        }
    }

    /// Removes some rows of `lock_in` that nobody has locked. Answers how many.
    fn remove_row_locks(
        &self,
        conn: &mut Conn<Self>,
        limit: i64,
    ) -> impl Future<Output = Sent<usize>> + Send {
        async move {
            let mut session = self.session(conn);
            let lock = if Self::LOCKS_ROWS { "FOR UPDATE SKIP LOCKED" } else { "" };
            let sql = format!("SELECT id FROM dlock_row ORDER BY id LIMIT ? {lock}");
            let some = Statement::new(sql).bind(Value::Int(limit));
            let ids = session.fetch_as(some, |row| row.text(0)).await?;
            if !ids.is_empty() {
                let delete = Statement::new("DELETE FROM dlock_row WHERE id @IN");
                session.execute(delete.bind_list(ids.iter().flatten().cloned())).await?;
            }
            Ok(ids.len())
        }
    }

    /// Removes rows that are locked, and raises the floor.
    fn remove(
        &self,
        conn: &mut Conn<Self>,
        ids: &[String],
        floor: i64,
    ) -> impl Future<Output = Sent<()>> + Send {
        async move {
            let mut session = self.session(conn);
            let delete = Statement::new("DELETE FROM dlock_lock WHERE id @IN");
            session.execute(delete.bind_list(ids.iter().cloned())).await?;
            let raise = "UPDATE dlock_meta SET value = ? WHERE name = 'floor' AND value < ?";
            let raise = Statement::new(raise).bind(Value::Int(floor)).bind(Value::Int(floor));
            session.execute(raise).await.map(drop)
        }
    }

    /// What an error means.
    fn cause(&self, error: &sqlx::Error) -> Cause {
        Self::DIALECT.cause(error)
    }

    /// How messages reach other processes. Without them a process looks.
    fn messages(&self) -> Option<&dyn Messages> {
        None
    }

    /// Starts to listen for messages, and waits a little until they come.
    fn listen(_store: &Arc<Store<Self>>) -> impl Future<Output = ()> + Send {
        async {}
    }

    /// The client is gone.
    fn stop_listening(&self) {}

    /// Puts messages for other clients into the transaction: channel and payload.
    fn send(
        &self,
        _conn: &mut Conn<Self>,
        _messages: Vec<(String, String)>,
    ) -> impl Future<Output = Sent<()>> + Send {
        async { Ok(()) }
    }
}

/// Whether a database delivers messages to this client now.
pub trait Messages: Send + Sync {
    /// Whether a message has arrived since the connection was made.
    fn arrive(&self) -> bool;

    /// Whether the server takes messages: it did not refuse one of late.
    fn are_taken(&self) -> bool;

    /// The server refused a message.
    fn were_refused(&self);
}

/// How long a statement waits for the lock of a row: well below the time of a call.
#[cfg(feature = "postgres")]
pub(super) fn lock_timeout(call_timeout: Duration) -> Duration {
    (call_timeout / 8).max(Duration::from_millis(5))
}
