//! The words of SQLite: one file that the processes of one machine share.
//!
//! The file is in WAL mode without a sync for each commit. A process that is killed loses
//! nothing. After a loss of power the last commits may be missing, but by then every lease
//! is void: leases are counted by the boot clock, and the first connection after a boot
//! clears them. Tokens still rise, since they start at the wall clock.
//!
//! There is one writer at a time. `BEGIN IMMEDIATE` says at once that the file is busy, and
//! the transaction is tried again after a short pause, instead of SQLite's own longer ones.

use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use sqlx::error::DatabaseError;
use sqlx::sqlite::{SqliteConnectOptions, SqliteConnection, SqliteJournalMode, SqliteSynchronous};
use sqlx::{AssertSqlSafe, ConnectOptions as _, raw_sql};
use url::Url;

use super::database::{COLUMNS, Database, REPLACE, RowWrite, Time};
use super::errors::{Cause, OTHER_TABLES};
use super::session::{Dialect, Session};
use super::transaction::signed;
use super::{Sql, address};
use crate::config::Settings;
use crate::error::Result;

/// How long opening the file waits for others. Calls have their own pauses.
const OPEN_TIMEOUT: Duration = Duration::from_millis(500);
/// The state of a lock that nobody holds or waits for.
const FREE: &str = "x'01000000000000000000000000'";

/// A database file.
#[derive(Debug)]
pub struct SqliteDatabase {
    path: PathBuf,
    shown: String,
    /// Whether a missing file is made.
    create: bool,
    boot: i64,
}

impl Sql<SqliteDatabase> {
    /// The store in the file that the URL names: `sqlite:///path/file.db`, with its options.
    /// Nothing is opened before the first call.
    ///
    /// # Errors
    /// `Config` if the URL or the namespace cannot be used.
    pub fn new(url: &str, namespace: &str) -> Result<Self> {
        let (config, url) = Settings::of_url(url, namespace)?;
        Self::configured(&config, &url)
    }

    pub(crate) fn configured(config: &Settings, url: &Url) -> Result<Self> {
        Self::given(&address::file(url)?, config)
    }

    /// The store in this file.
    pub(crate) fn given(path: &Path, config: &Settings) -> Result<Self> {
        address::check_file(path)?;
        let (path, shown) = (path.to_owned(), path.display().to_string());
        let database = SqliteDatabase { path, shown, create: config.migrate, boot: boot() };
        Ok(Sql::over(database, config))
    }
}

impl SqliteDatabase {
    /// Voids the leases of an earlier boot: its clock says nothing about ours.
    async fn clear_earlier_boot(&self, conn: &mut SqliteConnection) -> sqlx::Result<()> {
        let known = "SELECT value FROM dlock_meta WHERE name = 'boot'";
        let known = sqlx::query_scalar::<_, i64>(known).fetch_optional(&mut *conn).await;
        match known {
            Err(error) if self.cause(&error) == Cause::NoTables => return Ok(()),
            known => {
                if known? == Some(self.boot) {
                    return Ok(());
                }
            }
        }
        raw_sql("BEGIN IMMEDIATE").execute(&mut *conn).await?;
        self.void_leases(conn).await?;
        raw_sql("COMMIT").execute(conn).await.map(drop)
    }

    /// Voids all leases, unless they are of this boot, inside a transaction.
    async fn void_leases(&self, conn: &mut SqliteConnection) -> sqlx::Result<()> {
        let clear = format!(
            "UPDATE dlock_lock SET version = version + 1, holders = 0, waiters = 0, holder = NULL, \
             until_us = 0, keep_us = 0, broken_by = NULL, broken_us = 0, state = {FREE} \
             WHERE (SELECT value FROM dlock_meta WHERE name = 'boot') <> ?1"
        );
        sqlx::query(AssertSqlSafe(clear)).bind(self.boot).execute(&mut *conn).await?;
        let set = "UPDATE dlock_meta SET value = ?1 WHERE name = 'boot'";
        sqlx::query(set).bind(self.boot).execute(conn).await.map(drop)
    }
}

impl Database for SqliteDatabase {
    type Driver = sqlx::Sqlite;
    const NAME: &'static str = "sqlite";
    const SCHEMA: &'static str =
        concat!(include_str!("schema/sqlite.sql"), include_str!("schema/sqlite_stock.sql"));
    /// One that writes; there is never a second one.
    const CONNECTIONS: usize = 1;
    const JOB_CONNECTIONS: usize = 1;
    const DIALECT: Dialect = Dialect::Sqlite;
    /// The clock of the machine counts.
    const NOW: &'static str = "0";
    /// A transaction has the file for itself.
    const LOCKS_ROWS: bool = false;

    fn session<'a>(&self, conn: &'a mut SqliteConnection) -> Session<'a> {
        Session::Sqlite(conn)
    }

    /// Stock must survive a loss of power, so each of its commits reaches the disk.
    async fn set_up_for_jobs(&self, conn: &mut SqliteConnection) -> sqlx::Result<()> {
        raw_sql("PRAGMA synchronous = FULL").execute(conn).await.map(drop)
    }

    fn address(&self) -> &str {
        &self.shown
    }

    fn options(&self) -> Result<SqliteConnectOptions> {
        if self.create {
            address::check_directory(&self.path)?;
        }
        Ok(SqliteConnectOptions::new()
            .filename(&self.path)
            .create_if_missing(self.create)
            .journal_mode(SqliteJournalMode::Wal)
            .synchronous(SqliteSynchronous::Normal)
            .busy_timeout(OPEN_TIMEOUT)
            .disable_statement_logging())
    }

    async fn set_up(&self, conn: &mut SqliteConnection) -> sqlx::Result<()> {
        self.clear_earlier_boot(conn).await?;
        raw_sql("PRAGMA busy_timeout = 0").execute(conn).await.map(drop)
    }

    async fn make_tables(&self, conn: &mut SqliteConnection) -> sqlx::Result<()> {
        raw_sql("PRAGMA busy_timeout = 5000").execute(&mut *conn).await?;
        // Others see all tables, with this boot, or none.
        raw_sql("BEGIN IMMEDIATE").execute(&mut *conn).await?;
        raw_sql(Self::SCHEMA).execute(&mut *conn).await?;
        self.void_leases(conn).await?;
        raw_sql("COMMIT").execute(&mut *conn).await?;
        self.set_up(conn).await
    }

    async fn begin(&self, conn: &mut SqliteConnection) -> sqlx::Result<()> {
        raw_sql("BEGIN IMMEDIATE").execute(conn).await.map(drop)
    }

    fn time(&self, _now_us: i64) -> Time {
        time()
    }

    fn check_meta(&self, value: &dyn Fn(&str) -> sqlx::Result<i64>) -> sqlx::Result<()> {
        if value("boot")? == self.boot {
            return Ok(());
        }
        let why = "another machine, or another boot of it, uses the same file";
        Err(sqlx::Error::Configuration(why.into()))
    }

    async fn write(&self, conn: &mut SqliteConnection, rows: Vec<RowWrite>) -> sqlx::Result<bool> {
        let sql: Arc<str> = format!(
            "INSERT INTO dlock_lock ({COLUMNS}) \
             VALUES (?1, ?2, ?3, ?4, ?5, ?6, ?7, ?8, ?9, ?10, ?11) {REPLACE}"
        )
        .into();
        for row in rows {
            let query = sqlx::query(AssertSqlSafe(sql.clone()));
            let query = query.bind(row.id).bind(row.version).bind(row.token);
            let query = query.bind(row.holders).bind(row.waiters).bind(row.holder);
            let query = query.bind(row.until_us).bind(row.keep_us).bind(row.broken_by);
            let written = query.bind(row.broken_us).bind(row.state).execute(&mut *conn).await?;
            if written.rows_affected() != 1 {
                return Ok(false);
            }
        }
        Ok(true)
    }
}

/// What an error of the file means.
pub(super) fn cause(error: &(dyn DatabaseError + 'static)) -> Cause {
    let code = error.code().and_then(|code| code.parse::<u32>().ok()).unwrap_or(0);
    match code & 0xff {
        5 | 6 => Cause::Conflict,
        1 if error.message().starts_with("no such table") => Cause::NoTables,
        1 if error.message().contains("no column") => OTHER_TABLES,
        1 if error.message().starts_with("no such column") => OTHER_TABLES,
        26 => Cause::Unfit("the file is not one of SQLite; give another path"),
        14 => Cause::NoTables,
        10 => Cause::Refused("the file cannot be read or written"),
        13 => Cause::Refused("the disk is full"),
        3 | 8 | 23 => Cause::Denied,
        _ => Cause::Other,
    }
}

/// The boot clock, and how far it is from 1970.
#[cfg(any(target_os = "linux", target_os = "android"))]
fn time() -> Time {
    let now_us = crate::clock::Clock::boot().now().as_micros();
    Time { now_us, epoch_us: wall_us().saturating_sub(now_us) }
}

/// Other systems do not tell their boots apart, so the wall clock has to do.
#[cfg(not(any(target_os = "linux", target_os = "android")))]
fn time() -> Time {
    Time { now_us: wall_us(), epoch_us: 0 }
}

fn wall_us() -> u64 {
    let since = std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH);
    u64::try_from(since.unwrap_or_default().as_micros()).unwrap_or(0)
}

/// A number for this boot of the machine.
fn boot() -> i64 {
    let id = std::fs::read_to_string("/proc/sys/kernel/random/boot_id").unwrap_or_default();
    let digits: String = id.chars().filter(char::is_ascii_hexdigit).take(15).collect();
    signed(u64::from_str_radix(&digits, 16).unwrap_or(0)).max(1)
}
