//! Locks in PostgreSQL, MariaDB and SQLite.
//!
//! A lock is one row of `dlock_lock`. Calls that are due at the same time are one
//! transaction: it locks their rows in order, reads them, lets the same code decide that
//! decides for `memory://`, writes what has changed and commits. See `transaction.rs` for
//! the rules, `schema/` for the tables and `database.rs` for what differs between the
//! databases.
//!
//! A client has at most two connections for calls, and on PostgreSQL one more for messages.
//! Waiting holds no connection and no transaction: a claim waits in its row, and its client
//! hears or looks when it is its turn.

mod address;
#[cfg(feature = "sqlite")]
pub(crate) use self::address::default_file;
mod calls;
mod connections;
mod database;
mod errors;
#[doc(hidden)]
pub mod extension;
#[cfg(feature = "postgres")]
mod listen;
mod messages;
#[cfg(feature = "mysql")]
mod mysql;
mod names;
mod polling;
#[cfg(feature = "postgres")]
mod postgres;
mod schema;
mod session;
#[cfg(feature = "sqlite")]
mod sqlite;
mod statements;
mod stuck;
mod sweep;
mod transaction;

use std::sync::{Arc, Weak};

use self::database::{Database, LAYOUT, OnLocked};
use self::errors::{Cause, Fault};
#[cfg(feature = "mysql")]
pub use self::mysql::MySqlDatabase;
#[cfg(feature = "postgres")]
pub use self::postgres::PostgresDatabase;
pub use self::schema::{make_tables, schema};
#[cfg(feature = "sqlite")]
pub use self::sqlite::SqliteDatabase;
use self::transaction::{Decision, Store};
use super::{Backend, Break, Call, Capabilities, Cursor, KeyState, Listener, Page};
use crate::claim::{Answer, Request};
use crate::config::Settings;
use crate::error::{Error, Operation, Result};
use crate::key::Key;

/// How many calls one transaction makes.
const COMBINED: usize = 128;
/// How many rows one step of a listing looks at.
const LISTED: i64 = 500;

/// A store of locks in MariaDB or MySQL.
#[cfg(feature = "mysql")]
pub type MySql = Sql<MySqlDatabase>;

/// A store of locks in PostgreSQL.
#[cfg(feature = "postgres")]
pub type Postgres = Sql<PostgresDatabase>;

/// A store of locks in SQLite, for the processes of one machine.
#[cfg(feature = "sqlite")]
pub type Sqlite = Sql<SqliteDatabase>;

/// A store of locks in a database, seen by one client.
pub struct Sql<D: Database> {
    store: Arc<Store<D>>,
    /// Whether the tables are made when the first connection is made.
    migrate: tokio::sync::OnceCell<()>,
    may_migrate: bool,
}

impl<D: Database> Sql<D> {
    fn over(database: D, config: &Settings) -> Self {
        let store = Store::new(database, &config.namespace, config.call_timeout);
        Sql {
            store: Arc::new(store),
            migrate: tokio::sync::OnceCell::new(),
            may_migrate: config.migrate,
        }
    }

    /// The statements that make the tables.
    pub const SCHEMA: &'static str = D::SCHEMA;

    /// Makes the tables that are missing.
    ///
    /// ```
    /// # #[cfg(feature = "sqlite")]
    /// # async fn example() -> dlock::Result<()> {
    /// use dlock::backend::sql::Sqlite;
    ///
    /// Sqlite::new("sqlite:///var/lib/shop/locks.db?migrate=true", "shop")?.migrate().await?;
    /// # Ok(()) }
    /// ```
    ///
    /// # Errors
    /// `Denied` if the user may not make tables, `Unavailable` if the database cannot be
    /// reached.
    ///
    /// # Cancel safety
    /// Dropping the future may leave some of the tables made. Calling it again makes the
    /// rest.
    pub async fn migrate(&self) -> Result<()> {
        self.store.make_tables().await.map_err(|fault| fault.error)
    }

    /// Removes the rows that were not used for this long, now. Hidden, for tests.
    ///
    /// # Errors
    /// As the calls.
    #[cfg(feature = "simulation")]
    #[doc(hidden)]
    pub async fn sweep(&self, kept: std::time::Duration) -> Result<usize> {
        self.ready().await.map_err(|fault| fault.error)?;
        let swept = self.store.sweep(std::time::Duration::ZERO, kept).await;
        swept.map_err(|fault| fault.error)
    }

    /// Checks the tables once, and makes them if that is allowed.
    async fn ready(&self) -> Result<(), Fault> {
        let check = || async {
            self.store.examine().await?;
            match self.store.check_tables().await {
                Err(fault) if fault.cause == Cause::NoTables && self.may_migrate => {
                    self.store.make_tables().await
                }
                checked => checked,
            }
        };
        self.migrate.get_or_try_init(check).await.map(drop)
    }

    async fn make(&self, requests: &[Request]) -> Vec<Answer> {
        let answers = match self.ready().await {
            Ok(()) => {
                if requests.iter().any(|request| matches!(request, Request::Acquire(_))) {
                    D::listen(&self.store).await;
                }
                self.store.make(requests).await
            }
            Err(fault) => calls::failed(requests, &fault.error),
        };
        self.store.look_if_needed();
        self.store.sweep_if_due();
        answers
    }
}

impl<D: Database> std::fmt::Debug for Sql<D> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "Sql({})", D::NAME)
    }
}

impl<D: Database> Drop for Sql<D> {
    fn drop(&mut self) {
        self.store.database.stop_listening();
    }
}

impl<D: Database> Store<D> {
    async fn make_tables(&self) -> Result<(), Fault> {
        let mut in_use = self.connections.take(&self.database).await?;
        let made = self.database.make_tables(in_use.conn()).await;
        made.map_err(|error| self.fault(error))?;
        in_use.give_back();
        Ok(())
    }

    async fn examine(&self) -> Result<(), Fault> {
        let mut in_use = self.connections.take(&self.database).await?;
        let examined = self.database.examine(in_use.conn()).await;
        examined.map_err(|error| self.fault(error))?;
        in_use.give_back();
        Ok(())
    }

    async fn check_tables(&self) -> Result<(), Fault> {
        let mut in_use = self.connections.take(&self.database).await?;
        let (database, conn) = (&self.database, in_use.conn());
        let read = async {
            database.begin_read(conn).await?;
            let layout = database.layout(conn).await?;
            database.end_read(conn).await?;
            Ok(layout)
        };
        let layout = read.await.map_err(|error| self.fault(error))?;
        in_use.give_back();
        let cause = match layout {
            Some(LAYOUT) => return Ok(()),
            Some(_) => errors::OTHER_TABLES,
            None => Cause::NoTables,
        };
        Err(Fault::before_commit(cause, sqlx::Error::RowNotFound, self.database.address()))
    }

    /// Some keys in use, and where to go on.
    async fn list(&self, prefix: &str, cursor: Cursor) -> Result<Page, Fault> {
        let first = self.names.prefix(prefix, false);
        let from = if cursor.0.is_empty() { first.clone() } else { cursor.0 };
        let start = match from.starts_with(&first) {
            true => first,
            false => self.names.prefix(prefix, true),
        };
        let mut in_use = self.connections.take(&self.database).await?;
        let (database, conn) = (&self.database, in_use.conn());
        let read = async {
            database.begin_read(conn).await?;
            let time = database.meta(conn).await?.time;
            let rows = database.rows_from(conn, &from, LISTED).await?;
            database.end_read(conn).await?;
            Ok((time, rows))
        };
        let (time, rows) = read.await.map_err(|error| self.fault(error))?;
        in_use.give_back();
        let now = transaction::signed(time.now_us);
        let is_whole = usize::try_from(LISTED).is_ok_and(|limit| rows.len() < limit)
            || rows.last().is_some_and(|row| !row.id.starts_with(&start));
        let next = match (is_whole, rows.last()) {
            (false, Some(last)) => Some(Cursor(format!("{}\u{1}", last.id))),
            _ if start == self.names.prefix(prefix, false) => {
                Some(Cursor(self.names.prefix(prefix, true)))
            }
            _ => None,
        };
        let keys = rows
            .into_iter()
            .filter(|row| row.id.starts_with(&start) && row.until_us > now)
            .filter_map(|row| Some(self.names.lock_of(&row.id)?.key));
        Ok(Page { keys: keys.collect(), next })
    }
}

impl<D: Database> Backend for Sql<D> {
    fn capabilities(&self) -> Capabilities {
        Capabilities { max_batch: COMBINED, ..Capabilities::all(D::NAME) }
    }

    fn open(&self, _client: u64, listener: Weak<dyn Listener>) {
        let _ = self.store.listener.set(listener);
    }

    fn call<'a>(&'a self, requests: &'a [Request]) -> Call<'a, Vec<Answer>> {
        Call::new(self.make(requests))
    }

    fn inspect<'a>(&'a self, key: &'a Key) -> Call<'a, Result<KeyState>> {
        Call::new(async move {
            let look = async {
                self.ready().await?;
                self.store.table_of(&self.store.names.both(key)).await
            };
            let (meta, table) =
                look.await.map_err(|fault| with_context(fault, Operation::Inspect, key))?;
            Ok(table.inspect(meta.time.now(), key))
        })
    }

    fn list<'a>(&'a self, prefix: &'a str, cursor: Cursor) -> Call<'a, Result<Page>> {
        Call::new(async move {
            let listed = async {
                self.ready().await?;
                self.store.list(prefix, cursor).await
            };
            listed.await.map_err(|fault| fault.error.with_operation(Operation::List))
        })
    }

    fn break_lock<'a>(&'a self, key: &'a Key, how: &'a Break) -> Call<'a, Result<usize>> {
        Call::new(async move {
            let broken = async {
                self.ready().await?;
                let locks = self.store.names.both(key);
                let decided = self.store.transact(&locks, OnLocked::Wait, |table, now, _, sent| {
                    let value = table.break_lock(now, key, how, sent);
                    Decision { value, relied_upon: true }
                });
                decided.await
            };
            broken.await.map_err(|fault| with_context(fault, Operation::Break, key))
        })
    }

    fn ping(&self) -> Call<'_, Result<()>> {
        Call::new(async move {
            let asked = async {
                self.ready().await?;
                self.store.check_tables().await
            };
            asked.await.map_err(|fault| fault.error)
        })
    }

    fn as_any(&self) -> Option<&dyn std::any::Any> {
        Some(self)
    }
}

fn with_context(fault: Fault, operation: Operation, key: &Key) -> Error {
    fault.error.with_operation(operation).with_key(key)
}
