//! The words of PostgreSQL.
//!
//! A transaction is four round trips: `BEGIN` with its time-outs, the rows `FOR UPDATE`,
//! the write, `COMMIT`. The isolation is READ COMMITTED, whatever the default of the
//! server: each statement must see what was committed before it.
//!
//! Statements are prepared under a name only when this client has heard a message of its
//! own: then its connections are sessions of the server. A pooler of transactions gives
//! each transaction another session, where the name may be missing or mean something else.

use std::sync::Arc;
use std::time::Duration;

use sqlx::error::DatabaseError;
use sqlx::postgres::{PgConnectOptions, PgConnection, PgSslMode};
use sqlx::{AssertSqlSafe, ConnectOptions as _, Row as _, raw_sql};
use url::Url;

use super::Sql;
use super::address::{self, Server, with_tls_files};
use super::database::{COLUMNS, Database, Messages, REPLACE, RowWrite, lock_timeout};
use super::errors::{Cause, NO_DATABASE, OTHER_TABLES, check_version};
use super::listen::Listening;
use super::session::{Dialect, Session};
use super::transaction::Store;
use crate::config::{Settings, SslMode};
use crate::error::Result;

/// The codes for a named statement that the session does not have, or has already.
const NO_STATEMENT: &str = "26000";
const OTHER_STATEMENT: &str = "42P05";
/// The code for a commit that the queue of `NOTIFY` has no room for.
const QUEUE_IS_FULL: &str = "54000";

/// A database of PostgreSQL.
#[derive(Debug)]
pub struct PostgresDatabase {
    server: Server<PgConnectOptions>,
    begin: Arc<str>,
    pub(super) listening: Listening,
}

impl Sql<PostgresDatabase> {
    /// The database that the URL names: `postgres://user:password@host:port/database`, with
    /// its options. Nothing is sent before the first call.
    ///
    /// # Errors
    /// `Config` if the URL or the namespace cannot be used.
    pub fn new(url: &str, namespace: &str) -> Result<Self> {
        let (config, url) = Settings::of_url(url, namespace)?;
        Self::configured(&config, &url)
    }

    pub(crate) fn configured(config: &Settings, url: &Url) -> Result<Self> {
        let options = PgConnectOptions::from_url(url).map_err(address::unreadable)?;
        let is_local = address::is_local(options.get_host(), options.get_socket());
        let options = options.ssl_mode(match address::ssl_mode(config, is_local) {
            SslMode::Disable => PgSslMode::Disable,
            SslMode::Require => PgSslMode::Require,
            SslMode::VerifyCa => PgSslMode::VerifyCa,
            SslMode::VerifyFull => PgSslMode::VerifyFull,
        });
        let options = with_tls_files(
            options,
            config,
            |options, ca| options.ssl_root_cert(ca),
            |options, cert| options.ssl_client_cert(cert),
            |options, key| options.ssl_client_key(key),
        );
        Ok(Self::given(options.application_name("dlock"), config))
    }

    /// The database that a connection with these options reaches.
    pub(crate) fn given(options: PgConnectOptions, config: &Settings) -> Self {
        let locked = lock_timeout(config.call_timeout).as_millis();
        let idle = config.call_timeout.max(Duration::from_millis(100)).as_millis();
        let begin = format!(
            "BEGIN ISOLATION LEVEL READ COMMITTED; SET LOCAL lock_timeout = {locked}; \
             SET LOCAL idle_in_transaction_session_timeout = {idle}"
        );
        let shown = match options.get_socket() {
            Some(socket) => socket.display().to_string(),
            None => format!("{}:{}", options.get_host(), options.get_port()),
        };
        let database = PostgresDatabase {
            server: Server::new(options, shown, config),
            begin: begin.into(),
            listening: Listening::default(),
        };
        Sql::over(database, config)
    }
}

impl Database for PostgresDatabase {
    type Driver = sqlx::Postgres;
    const NAME: &'static str = "postgres";
    const SCHEMA: &'static str =
        concat!(include_str!("schema/postgres.sql"), include_str!("schema/postgres_stock.sql"));
    const CONNECTIONS: usize = 2;
    const DIALECT: Dialect = Dialect::Postgres;
    const NOW: &'static str = "(extract(epoch FROM clock_timestamp()) * 1000000)::bigint";

    fn session<'a>(&self, conn: &'a mut PgConnection) -> Session<'a> {
        Session::Postgres(conn, self.listening.is_session())
    }

    fn address(&self) -> &str {
        &self.server.shown
    }

    fn options(&self) -> Result<PgConnectOptions> {
        self.server.options(|options, password| options.password(password))
    }

    async fn examine(&self, conn: &mut PgConnection) -> sqlx::Result<()> {
        let row = raw_sql("SELECT version()").fetch_one(conn).await?;
        check_version(row.try_get(0)?)
    }

    async fn make_tables(&self, conn: &mut PgConnection) -> sqlx::Result<()> {
        // One implicit transaction. Without the lock, `IF NOT EXISTS` fails for all but one of
        // those who make them at the same time.
        const SQL: &str = concat!(
            "SELECT pg_advisory_xact_lock(7234305291); ",
            include_str!("schema/postgres.sql"),
            include_str!("schema/postgres_stock.sql")
        );
        raw_sql(SQL).execute(conn).await.map(drop)
    }

    async fn begin(&self, conn: &mut PgConnection) -> sqlx::Result<()> {
        raw_sql(AssertSqlSafe(self.begin.clone())).execute(conn).await.map(drop)
    }

    async fn begin_read(&self, conn: &mut PgConnection) -> sqlx::Result<()> {
        raw_sql("BEGIN ISOLATION LEVEL READ COMMITTED READ ONLY").execute(conn).await.map(drop)
    }

    async fn end_read(&self, conn: &mut PgConnection) -> sqlx::Result<()> {
        self.commit(conn).await
    }

    async fn commit_soon(&self, conn: &mut PgConnection) -> sqlx::Result<()> {
        raw_sql("SET LOCAL synchronous_commit = off; COMMIT").execute(conn).await.map(drop)
    }

    async fn write(&self, conn: &mut PgConnection, rows: Vec<RowWrite>) -> sqlx::Result<bool> {
        let sql = format!(
            "INSERT INTO dlock_lock ({COLUMNS}) \
             SELECT * FROM UNNEST($1::text[], $2::bigint[], $3::bigint[], $4::integer[], \
             $5::integer[], $6::text[], $7::bigint[], $8::bigint[], $9::text[], $10::bigint[], \
             $11::bytea[]) {REPLACE}"
        );
        fn column<T>(rows: &[RowWrite], value: impl Fn(&RowWrite) -> T) -> Vec<T> {
            rows.iter().map(value).collect()
        }
        let written = sqlx::query(AssertSqlSafe(sql))
            .persistent(self.listening.is_session())
            .bind(column(&rows, |row| row.id.clone()))
            .bind(column(&rows, |row| row.version))
            .bind(column(&rows, |row| row.token))
            .bind(column(&rows, |row| row.holders))
            .bind(column(&rows, |row| row.waiters))
            .bind(column(&rows, |row| row.holder.clone()))
            .bind(column(&rows, |row| row.until_us))
            .bind(column(&rows, |row| row.keep_us))
            .bind(column(&rows, |row| row.broken_by.clone()))
            .bind(column(&rows, |row| row.broken_us))
            .bind(column(&rows, |row| row.state.clone()))
            .execute(conn)
            .await?;
        Ok(usize::try_from(written.rows_affected()) == Ok(rows.len()))
    }

    fn cause(&self, error: &sqlx::Error) -> Cause {
        let code = error.as_database_error().and_then(|error| error.code());
        if matches!(code.as_deref(), Some(NO_STATEMENT | OTHER_STATEMENT)) {
            self.listening.is_not_session();
        }
        if code.as_deref() == Some(QUEUE_IS_FULL) {
            self.listening.were_refused();
        }
        Self::DIALECT.cause(error)
    }

    fn messages(&self) -> Option<&dyn Messages> {
        Some(&self.listening)
    }

    async fn send(
        &self,
        conn: &mut PgConnection,
        messages: Vec<(String, String)>,
    ) -> sqlx::Result<()> {
        let (channels, payloads): (Vec<String>, Vec<String>) = messages.into_iter().unzip();
        let sql = "SELECT pg_notify(channel, payload) \
             FROM UNNEST($1::text[], $2::text[]) AS message (channel, payload)";
        let query = sqlx::query(sql).persistent(self.listening.is_session());
        query.bind(channels).bind(payloads).execute(conn).await.map(drop)
    }

    async fn listen(store: &Arc<Store<Self>>) {
        super::listen::ensure(store).await;
    }

    fn stop_listening(&self) {
        self.listening.stop();
    }
}

/// What an error of the server means.
pub(super) fn cause(error: &(dyn DatabaseError + 'static)) -> Cause {
    match error.code().as_deref().unwrap_or_default() {
        "40001" | "40P01" | "23505" => Cause::Conflict,
        // A statement of this name is missing or another one: not our session.
        NO_STATEMENT | OTHER_STATEMENT => Cause::Conflict,
        QUEUE_IS_FULL => Cause::Conflict,
        "55P03" => Cause::Locked,
        "42P01" | "3F000" => Cause::NoTables,
        "42501" => Cause::Denied,
        code if code.starts_with("28") => Cause::Credentials,
        "3D000" => NO_DATABASE,
        "42703" | "42804" => OTHER_TABLES,
        "53300" => Cause::Refused("it has too many connections"),
        "53100" => Cause::Refused("its disk is full"),
        "25006" => Cause::ReadOnly,
        "57P03" => Cause::Refused("it is starting or stopping"),
        "57P01" | "57P02" | "25P03" => Cause::Disconnected,
        code if code.starts_with("08") => Cause::Disconnected,
        _ => Cause::Other,
    }
}
