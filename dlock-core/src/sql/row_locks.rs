//! How each database locks a row of `dlock_row` inside a transaction, also one that is not
//! there yet. One statement does both, so that two transactions never meet in between.

use std::future::Future;

use super::Wait;
use crate::backend::sql::extension::Session;
use crate::error::{Error, ErrorKind, Operation, Result};
use crate::key::Key;

/// A transaction of PostgreSQL, MariaDB, MySQL or SQLite that can lock keys.
pub trait InTransaction: Send + Sealed {
    /// Locks the row of a key; false if somebody else has it.
    #[doc(hidden)]
    fn lock_row(&mut self, key: &Key, wait: Wait) -> impl Future<Output = Result<bool>> + Send;

    /// The connection, for statements of crates beside the lock.
    #[doc(hidden)]
    fn session(&mut self) -> Session<'_>;
}

#[doc(hidden)]
pub trait Sealed {}

/// What an error of the statement means for the caller.
fn failed(key: &Key, error: sqlx::Error, is_missing: bool) -> Error {
    let (kind, what) = match is_missing {
        true => (
            ErrorKind::Config,
            "the table dlock_row is missing; make it with `dlock schema --url ...`",
        ),
        false => (
            ErrorKind::Unavailable,
            "the row could not be locked; roll the transaction back, and try it again if that makes sense",
        ),
    };
    Error::new(kind, Operation::Acquire).with_message(what).with_key(key).with_source(error)
}

#[cfg(feature = "postgres")]
fn code(error: &sqlx::Error) -> String {
    let code = error.as_database_error().and_then(|error| error.code());
    code.map(std::borrow::Cow::into_owned).unwrap_or_default()
}

#[cfg(feature = "postgres")]
mod postgres {
    use sqlx::{AssertSqlSafe, PgConnection, Postgres, Transaction, raw_sql};

    use super::{InTransaction, Key, Result, Sealed, Session, Wait, code, failed};

    /// Locks the row that is there, or makes it. The condition is never true, so a row that
    /// is there is locked and not written.
    const LOCK: &str = "INSERT INTO dlock_row (id) VALUES ($1) \
         ON CONFLICT (id) DO UPDATE SET id = excluded.id WHERE false";
    const LOCK_NOT_AVAILABLE: &str = "55P03";

    impl Sealed for Transaction<'_, Postgres> {}

    impl InTransaction for Transaction<'_, Postgres> {
        fn session(&mut self) -> Session<'_> {
            Session::Postgres(self, true)
        }

        async fn lock_row(&mut self, key: &Key, wait: Wait) -> Result<bool> {
            let conn: &mut PgConnection = self;
            let locked = match wait {
                Wait::Default => lock(conn, key).await.map(|()| true),
                Wait::No => lock_within(conn, key, 1).await,
                Wait::AtMost(wait) => {
                    let millis = u32::try_from(wait.as_millis()).unwrap_or(u32::MAX / 2);
                    lock_within(conn, key, millis.max(1)).await
                }
            };
            match locked {
                Err(error) if code(&error) == LOCK_NOT_AVAILABLE => Ok(false),
                locked => locked.map_err(|error| {
                    let is_missing = code(&error) == "42P01";
                    failed(key, error, is_missing)
                }),
            }
        }
    }

    async fn lock(conn: &mut PgConnection, key: &Key) -> sqlx::Result<()> {
        sqlx::query(LOCK).persistent(false).bind(key.as_str()).execute(conn).await.map(drop)
    }

    /// With a time-out of its own. A savepoint keeps the transaction usable, and takes the
    /// time-out back when the lock is not available.
    async fn lock_within(conn: &mut PgConnection, key: &Key, millis: u32) -> sqlx::Result<bool> {
        let before = sqlx::query_scalar::<_, String>("SHOW lock_timeout").persistent(false);
        let before = before.fetch_one(&mut *conn).await?;
        let begin = format!("SAVEPOINT dlock; SET LOCAL lock_timeout = {millis}");
        raw_sql(AssertSqlSafe(begin)).execute(&mut *conn).await?;
        match lock(conn, key).await {
            Ok(()) => {
                let sql = "SELECT set_config('lock_timeout', $1, true)";
                sqlx::query(sql).persistent(false).bind(before).execute(&mut *conn).await?;
                raw_sql("RELEASE SAVEPOINT dlock").execute(conn).await?;
                Ok(true)
            }
            Err(error) if code(&error) == LOCK_NOT_AVAILABLE => {
                let end = "ROLLBACK TO SAVEPOINT dlock; RELEASE SAVEPOINT dlock";
                raw_sql(end).execute(conn).await?;
                Ok(false)
            }
            Err(error) => Err(error),
        }
    }

    /// See [`advisory_lock_in`](crate::sql::advisory_lock_in).
    pub(in super::super) async fn advisory(
        tx: &mut Transaction<'_, Postgres>,
        key: &Key,
    ) -> Result<()> {
        let conn: &mut PgConnection = tx;
        let sql = "SELECT pg_advisory_xact_lock(hashtextextended($1, 0))";
        let locked = sqlx::query(sql).persistent(false).bind(key.as_str()).execute(conn).await;
        locked.map(drop).map_err(|error| failed(key, error, false))
    }
}

#[cfg(feature = "postgres")]
pub(super) use self::postgres::advisory;

#[cfg(feature = "mysql")]
mod mysql {
    use sqlx::mysql::MySqlDatabaseError;
    use sqlx::{AssertSqlSafe, MySql, MySqlConnection, Transaction, raw_sql};

    use super::{
        Error, ErrorKind, InTransaction, Key, Operation, Result, Sealed, Session, Wait, failed,
    };

    /// Locks the row that is there, or makes it.
    const LOCK: &str = "INSERT INTO dlock_row (id) VALUES (?) ON DUPLICATE KEY UPDATE id = id";
    const LOCK_WAIT_TIMEOUT: u16 = 1205;
    const DEADLOCK: u16 = 1213;
    const LOCKED_BY_ANOTHER: u16 = 3572;
    const NO_SUCH_TABLE: u16 = 1146;
    const SYNTAX_ERROR: u16 = 1064;
    /// MySQL waits for one second at least.
    const SHORTEST: u64 = 1;

    impl Sealed for Transaction<'_, MySql> {}

    impl InTransaction for Transaction<'_, MySql> {
        fn session(&mut self) -> Session<'_> {
            Session::MySql(self)
        }

        async fn lock_row(&mut self, key: &Key, wait: Wait) -> Result<bool> {
            let conn: &mut MySqlConnection = self;
            let locked = match wait {
                Wait::Default => lock(conn, key, LOCK).await,
                Wait::No => lock_within(conn, key, 0).await,
                Wait::AtMost(wait) => lock_within(conn, key, wait.as_secs().max(1)).await,
            };
            let Err(error) = locked else { return Ok(true) };
            match number(&error) {
                LOCKED_BY_ANOTHER => Ok(false),
                LOCK_WAIT_TIMEOUT if !was_rolled_back(conn).await => Ok(false),
                LOCK_WAIT_TIMEOUT | DEADLOCK => {
                    refuse_writes(conn).await;
                    Err(rolled_back(key, error))
                }
                number => Err(failed(key, error, number == NO_SUCH_TABLE)),
            }
        }
    }

    async fn lock(conn: &mut MySqlConnection, key: &Key, sql: &str) -> sqlx::Result<()> {
        let query = sqlx::query(AssertSqlSafe(sql.to_owned())).bind(key.as_str().as_bytes());
        query.execute(conn).await.map(drop)
    }

    /// With a time-out of its own. MariaDB has one for a statement.
    async fn lock_within(conn: &mut MySqlConnection, key: &Key, seconds: u64) -> sqlx::Result<()> {
        let sql = format!("SET STATEMENT innodb_lock_wait_timeout = {seconds} FOR {LOCK}");
        match lock(conn, key, &sql).await {
            Err(error) if number(&error) == SYNTAX_ERROR => in_mysql(conn, key, seconds).await,
            locked => locked,
        }
    }

    /// MySQL has a time-out for the session only. It waits for no row that is there where the
    /// isolation is READ COMMITTED; elsewhere, to look for a missing row would lock the gap
    /// that other keys are made in.
    async fn in_mysql(conn: &mut MySqlConnection, key: &Key, seconds: u64) -> sqlx::Result<()> {
        const LOCKS_NO_GAPS: &str = "SELECT @@SESSION.transaction_isolation = 'READ-COMMITTED'";
        if seconds == 0
            && sqlx::query_scalar::<_, i64>(LOCKS_NO_GAPS).fetch_one(&mut *conn).await? == 1
        {
            let sql = "SELECT id FROM dlock_row WHERE id = ? FOR UPDATE NOWAIT";
            let found = sqlx::query(sql).bind(key.as_str().as_bytes()).fetch_optional(&mut *conn);
            if found.await?.is_some() {
                return Ok(());
            }
        }
        let shorten = format!(
            "SET @dlock_wait = @@SESSION.innodb_lock_wait_timeout, \
             SESSION innodb_lock_wait_timeout = {}",
            seconds.max(SHORTEST)
        );
        raw_sql(AssertSqlSafe(shorten)).execute(&mut *conn).await?;
        let locked = lock(conn, key, LOCK).await;
        let restore = "SET SESSION innodb_lock_wait_timeout = @dlock_wait";
        raw_sql(restore).execute(conn).await?;
        locked
    }

    /// Whether a lock-wait time-out has ended the whole transaction, and not the statement only.
    /// If the server does not say, it has.
    async fn was_rolled_back(conn: &mut MySqlConnection) -> bool {
        let sql = "SELECT @@GLOBAL.innodb_rollback_on_timeout";
        !matches!(sqlx::query_scalar::<_, i64>(sql).fetch_one(conn).await, Ok(0))
    }

    /// The server has rolled the transaction back, and would commit each further statement by
    /// itself: half of the work. A read-only transaction refuses them until the caller's ROLLBACK.
    async fn refuse_writes(conn: &mut MySqlConnection) {
        // If that fails, the connection is broken.
        let _ = raw_sql("START TRANSACTION READ ONLY").execute(conn).await;
    }

    fn rolled_back(key: &Key, error: sqlx::Error) -> Error {
        let is_deadlock = number(&error) == DEADLOCK;
        let (kind, why) = match is_deadlock {
            true => (ErrorKind::Unavailable, "found a deadlock"),
            false => (
                ErrorKind::TimedOut,
                "gave up waiting for another transaction, with innodb_rollback_on_timeout",
            ),
        };
        let what = format!(
            "the server {why}, and has rolled back all that this transaction did; roll back, and begin it again"
        );
        Error::new(kind, Operation::Acquire).with_message(what).with_key(key).with_source(error)
    }

    fn number(error: &sqlx::Error) -> u16 {
        let error = error.as_database_error();
        let error = error.and_then(|error| error.try_downcast_ref::<MySqlDatabaseError>());
        error.map_or(0, MySqlDatabaseError::number)
    }
}

#[cfg(feature = "sqlite")]
mod sqlite {
    use sqlx::{AssertSqlSafe, Sqlite, SqliteConnection, Transaction, raw_sql};

    use super::{InTransaction, Key, Result, Sealed, Session, Wait, failed};

    /// A write, so that the transaction has the file for itself.
    const LOCK: &str = "INSERT INTO dlock_row (id, touched) VALUES (?1, 1) \
         ON CONFLICT (id) DO UPDATE SET touched = 1";

    impl Sealed for Transaction<'_, Sqlite> {}

    impl InTransaction for Transaction<'_, Sqlite> {
        fn session(&mut self) -> Session<'_> {
            Session::Sqlite(self)
        }

        async fn lock_row(&mut self, key: &Key, wait: Wait) -> Result<bool> {
            let conn: &mut SqliteConnection = self;
            let millis = match wait {
                Wait::Default => None,
                Wait::No => Some(0),
                Wait::AtMost(wait) => Some(wait.as_millis()),
            };
            match lock(conn, key, millis).await {
                Ok(()) => Ok(true),
                Err(error) if is_busy(&error) => Ok(false),
                Err(error) => {
                    let told = error.as_database_error();
                    let is_missing =
                        told.is_some_and(|it| it.message().starts_with("no such table"));
                    Err(failed(key, error, is_missing))
                }
            }
        }
    }

    async fn lock(
        conn: &mut SqliteConnection,
        key: &Key,
        millis: Option<u128>,
    ) -> sqlx::Result<()> {
        let Some(millis) = millis else { return write(conn, key).await };
        let before = sqlx::query_scalar::<_, i64>("PRAGMA busy_timeout");
        let before = before.fetch_one(&mut *conn).await?;
        let set = |millis: u128| AssertSqlSafe(format!("PRAGMA busy_timeout = {millis}"));
        raw_sql(set(millis)).execute(&mut *conn).await?;
        let locked = write(conn, key).await;
        raw_sql(set(before.try_into().unwrap_or(0))).execute(conn).await?;
        locked
    }

    async fn write(conn: &mut SqliteConnection, key: &Key) -> sqlx::Result<()> {
        sqlx::query(LOCK).bind(key.as_str()).execute(conn).await.map(drop)
    }

    fn is_busy(error: &sqlx::Error) -> bool {
        let code = error.as_database_error().and_then(|error| error.code());
        let code = code.and_then(|code| code.parse::<u32>().ok());
        code.is_some_and(|code| code & 0xff == 5)
    }
}
