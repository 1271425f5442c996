//! The usual locks in a SQL database, to compare dlock with: a row that is inserted under a
//! unique key, and a row that is locked by a transaction.

use std::time::{Duration, Instant};

use anyhow::{Result, bail};
use dlock::Config;
use sqlx::AssertSqlSafe;

use crate::{server, usage_error};

/// How long the lock by insertion waits before it tries again, as it is usually written.
const RETRY: Duration = Duration::from_millis(100);
/// The most connections of a peer.
const MAX_CONNECTIONS: usize = 64;

/// A pool of one of the databases.
pub(crate) enum Pool {
    #[cfg(feature = "mysql")]
    MySql(sqlx::MySqlPool),
    #[cfg(feature = "postgres")]
    Postgres(sqlx::PgPool),
    #[cfg(feature = "sqlite")]
    Sqlite(sqlx::SqlitePool),
}

/// A transaction that has locked a row.
#[derive(Debug)]
pub enum RowLock {
    /// On MariaDB.
    #[cfg(feature = "mysql")]
    MySql(sqlx::Transaction<'static, sqlx::MySql>),
    /// On PostgreSQL.
    #[cfg(feature = "postgres")]
    Postgres(sqlx::Transaction<'static, sqlx::Postgres>),
    #[cfg(feature = "sqlite")]
    /// On SQLite, where the whole file is locked.
    Sqlite(sqlx::Transaction<'static, sqlx::Sqlite>),
}

/// Does the same on any pool.
macro_rules! on_pool {
    ($of:expr, $pool:ident => $do:expr) => {
        match $of {
            #[cfg(feature = "mysql")]
            $crate::sql::peer::Pool::MySql($pool) => $do,
            #[cfg(feature = "postgres")]
            $crate::sql::peer::Pool::Postgres($pool) => $do,
            #[cfg(feature = "sqlite")]
            $crate::sql::peer::Pool::Sqlite($pool) => $do,
        }
    };
}

pub(crate) use on_pool;

impl Pool {
    /// Connects as many times as there are tasks, but not too often.
    pub(crate) async fn open(config: &Config, tasks: usize) -> Result<Self> {
        let url = config.url.as_deref().unwrap_or_default();
        // One more for pings.
        let most = u32::try_from(tasks.clamp(1, MAX_CONNECTIONS) + 1).unwrap_or(2);
        let patience = Duration::from_secs(60);
        Ok(match server::backend(config) {
            #[cfg(feature = "mysql")]
            "mysql" => {
                let pool = sqlx::mysql::MySqlPoolOptions::new().acquire_timeout(patience);
                Pool::MySql(pool.max_connections(most).connect(url).await?)
            }
            #[cfg(feature = "postgres")]
            "postgres" => {
                let pool = sqlx::postgres::PgPoolOptions::new().acquire_timeout(patience);
                Pool::Postgres(pool.max_connections(most).connect(url).await?)
            }
            #[cfg(feature = "sqlite")]
            "sqlite" => {
                let pool = sqlx::sqlite::SqlitePoolOptions::new().acquire_timeout(patience);
                Pool::Sqlite(pool.max_connections(most).connect(url).await?)
            }
            other => {
                return Err(usage_error(format!(
                    "the peers `insert`, `row` and `batched-row` need a SQL database, not {other}://"
                )));
            }
        })
    }

    /// Connects, and makes the table of the peers and a row for each key.
    pub(crate) async fn connect(config: &Config, tasks: usize, keys: &[String]) -> Result<Self> {
        let pool = Self::open(config, tasks).await?;
        let make = "CREATE TABLE IF NOT EXISTS dlock_bench_row (id VARCHAR(200) PRIMARY KEY)";
        // Several processes may make it at the same time; then the rows fail below if it is
        // missing.
        let _ = on_pool!(&pool, pool => sqlx::query(make).execute(pool).await.map(drop));
        for key in keys {
            let insert = pool.statement("INSERT INTO dlock_bench_row (id) VALUES (?)");
            let made = on_pool!(&pool, pool => {
                sqlx::query(AssertSqlSafe(insert)).bind(key).execute(pool).await.map(drop)
            });
            if let Err(error) = made
                && !is_duplicate(&error)
            {
                return Err(error.into());
            }
        }
        Ok(pool)
    }

    /// A statement with the placeholders of this database.
    pub(crate) fn statement(&self, sql: &str) -> String {
        match self {
            #[cfg(feature = "postgres")]
            Pool::Postgres(_) => {
                let mut words = sql.split('?');
                let mut numbered = words.next().unwrap_or_default().to_owned();
                for (number, rest) in (1..).zip(words) {
                    numbered.push_str(&format!("${number}{rest}"));
                }
                numbered
            }
            #[cfg(any(feature = "mysql", feature = "sqlite"))]
            _ => sql.to_owned(),
        }
    }

    /// Inserts the row of a lock, and tries again until it is not there.
    pub(crate) async fn insert(&self, key: &str) -> Result<()> {
        loop {
            let sql = self.statement("INSERT INTO dlock_bench_row (id) VALUES (?)");
            let inserted = on_pool!(self, pool => {
                sqlx::query(AssertSqlSafe(sql)).bind(key).execute(pool).await.map(drop)
            });
            match inserted {
                Ok(()) => return Ok(()),
                Err(error) if is_duplicate(&error) => tokio::time::sleep(RETRY).await,
                Err(error) => return Err(error.into()),
            }
        }
    }

    /// Deletes the row of a lock.
    pub(crate) async fn delete(&self, key: &str) -> Result<()> {
        let sql = self.statement("DELETE FROM dlock_bench_row WHERE id = ?");
        let deleted = on_pool!(self, pool => {
            sqlx::query(AssertSqlSafe(sql)).bind(key).execute(pool).await?.rows_affected()
        });
        if deleted == 0 {
            bail!("the row of the lock is gone");
        }
        Ok(())
    }

    /// Locks the row of a key in a transaction.
    pub(crate) async fn lock(&self, key: &str) -> Result<RowLock> {
        Ok(match self {
            #[cfg(feature = "mysql")]
            Pool::MySql(pool) => {
                let mut tx = pool.begin().await?;
                let sql = "SELECT id FROM dlock_bench_row WHERE id = ? FOR UPDATE";
                sqlx::query(sql).bind(key).fetch_one(&mut *tx).await?;
                RowLock::MySql(tx)
            }
            #[cfg(feature = "postgres")]
            Pool::Postgres(pool) => {
                let mut tx = pool.begin().await?;
                let sql = "SELECT id FROM dlock_bench_row WHERE id = $1 FOR UPDATE";
                sqlx::query(sql).bind(key).fetch_one(&mut *tx).await?;
                RowLock::Postgres(tx)
            }
            #[cfg(feature = "sqlite")]
            Pool::Sqlite(pool) => {
                let mut tx = pool.begin_with("BEGIN IMMEDIATE").await?;
                let sql = "UPDATE dlock_bench_row SET id = id WHERE id = ?";
                sqlx::query(sql).bind(key).execute(&mut *tx).await?;
                RowLock::Sqlite(tx)
            }
        })
    }

    /// Measures the round trip of a `SELECT 1`.
    pub(crate) async fn ping(&self) -> Result<Duration> {
        let began = Instant::now();
        on_pool!(self, pool => sqlx::query("SELECT 1").execute(pool).await.map(drop))?;
        Ok(began.elapsed())
    }

    /// Deletes the rows of these keys.
    pub(crate) async fn clean_up(&self, keys: &[String]) {
        for key in keys {
            let _ = self.delete(key).await;
        }
    }
}

impl RowLock {
    pub(crate) async fn release(self) -> Result<()> {
        match self {
            #[cfg(feature = "mysql")]
            RowLock::MySql(tx) => tx.commit().await?,
            #[cfg(feature = "postgres")]
            RowLock::Postgres(tx) => tx.commit().await?,
            #[cfg(feature = "sqlite")]
            RowLock::Sqlite(tx) => tx.commit().await?,
        }
        Ok(())
    }
}

fn is_duplicate(error: &sqlx::Error) -> bool {
    error.as_database_error().is_some_and(|error| error.is_unique_violation())
}
