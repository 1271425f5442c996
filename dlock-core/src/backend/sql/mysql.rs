//! The words of MariaDB and of MySQL 8.
//!
//! Keys are bytes: with a collation two keys could be one. Rows are not removed by a
//! release, since a removed row leaves a gap lock to others. The isolation is READ
//! COMMITTED, where a statement sees what was committed before it and locks no gaps. A
//! lock-wait time-out rolls back only the statement, so every fault is followed by a
//! ROLLBACK.

use std::collections::HashMap;
use std::sync::atomic::{AtomicBool, Ordering};

use sqlx::error::DatabaseError;
use sqlx::mysql::{MySqlConnectOptions, MySqlConnection, MySqlDatabaseError, MySqlSslMode};
use sqlx::{AssertSqlSafe, ConnectOptions as _, Row as _, raw_sql};
use url::Url;

use super::Sql;
use super::address::{self, Server, with_tls_files};
use super::database::{COLUMNS, Database, RowWrite};
use super::errors::{Cause, Found, NEEDS_TLS, NO_DATABASE, OTHER_TABLES, check_version};
use super::session::{Dialect, Session};
use crate::config::{Settings, SslMode};
use crate::error::Result;

/// The most rows that one statement writes.
const WRITTEN: usize = 64;
/// The number of the error for a variable that the server does not know.
const UNKNOWN_VARIABLE: u16 = 1193;

/// A database of MariaDB or MySQL.
#[derive(Debug)]
pub struct MySqlDatabase {
    server: Server<MySqlConnectOptions>,
    /// Whether TLS may be used that nobody asked for: for a password that MySQL does not take
    /// in plain text, at a server of this machine.
    may_switch_to_tls: bool,
    /// How many seconds the server keeps a transaction whose client is silent.
    idle: u64,
    /// Whether it is MySQL: it was seen that `idle_transaction_timeout` is missing.
    is_mysql: AtomicBool,
}

impl Sql<MySqlDatabase> {
    /// The database that the URL names: `mysql://user:password@host:port/database`, with its
    /// options. Nothing is sent before the first call.
    ///
    /// # Errors
    /// `Config` if the URL or the namespace cannot be used.
    pub fn new(url: &str, namespace: &str) -> Result<Self> {
        let (config, url) = Settings::of_url(url, namespace)?;
        Self::configured(&config, &url)
    }

    pub(crate) fn configured(config: &Settings, url: &Url) -> Result<Self> {
        let options = MySqlConnectOptions::from_url(url).map_err(address::unreadable)?;
        let is_local = address::is_local(options.get_host(), options.get_socket());
        let options = options.ssl_mode(match address::ssl_mode(config, is_local) {
            SslMode::Disable => MySqlSslMode::Disabled,
            SslMode::Require => MySqlSslMode::Required,
            SslMode::VerifyCa => MySqlSslMode::VerifyCa,
            SslMode::VerifyFull => MySqlSslMode::VerifyIdentity,
        });
        let options = with_tls_files(
            options,
            config,
            |options, ca| options.ssl_ca(ca),
            |options, cert| options.ssl_client_cert(cert),
            |options, key| options.ssl_client_key(key),
        );
        let may_switch_to_tls = is_local && config.sslmode.is_none();
        Ok(Self::over_options(options, config, may_switch_to_tls))
    }

    /// The database that a connection with these options reaches.
    pub(crate) fn given(options: MySqlConnectOptions, config: &Settings) -> Self {
        Self::over_options(options, config, false)
    }

    fn over_options(
        options: MySqlConnectOptions,
        config: &Settings,
        may_switch_to_tls: bool,
    ) -> Self {
        let shown = format!("{}:{}", options.get_host(), options.get_port());
        let server = Server::new(options, shown, config);
        let idle = config.call_timeout.as_secs().max(1);
        let is_mysql = AtomicBool::new(false);
        let database = MySqlDatabase { server, may_switch_to_tls, idle, is_mysql };
        Sql::over(database, config)
    }
}

impl MySqlDatabase {
    /// Ends a transaction. MySQL has a time-out for connections that are idle, and none for
    /// transactions, so it is a short one from the first to the last statement of each.
    async fn end(
        &self,
        conn: &mut MySqlConnection,
        sql: &'static str,
        of_mysql: &'static str,
    ) -> sqlx::Result<()> {
        let sql = if self.is_mysql.load(Ordering::Relaxed) { of_mysql } else { sql };
        raw_sql(sql).execute(conn).await.map(drop)
    }

    /// Writes rows in statements of few different lengths.
    async fn insert(
        &self,
        conn: &mut MySqlConnection,
        mut rows: &[RowWrite],
        on_duplicate: &str,
    ) -> sqlx::Result<()> {
        while !rows.is_empty() {
            let largest = 1 << rows.len().min(WRITTEN).ilog2();
            let (some, rest) = rows.split_at(largest);
            let values = vec!["(?,?,?,?,?,?,?,?,?,?,?)"; some.len()].join(",");
            let sql = format!("INSERT INTO dlock_lock ({COLUMNS}) VALUES {values} {on_duplicate}");
            let mut query = sqlx::query(AssertSqlSafe(sql));
            for row in some {
                query = query.bind(row.id.as_bytes()).bind(row.version).bind(row.token);
                query = query.bind(row.holders).bind(row.waiters);
                query = query.bind(row.holder.as_ref().map(String::as_bytes));
                query = query.bind(row.until_us).bind(row.keep_us);
                query = query.bind(row.broken_by.as_ref().map(String::as_bytes));
                query = query.bind(row.broken_us).bind(&row.state);
            }
            query.execute(&mut *conn).await?;
            rows = rest;
        }
        Ok(())
    }
}

impl Database for MySqlDatabase {
    type Driver = sqlx::MySql;
    const NAME: &'static str = "mysql";
    const SCHEMA: &'static str =
        concat!(include_str!("schema/mysql.sql"), include_str!("schema/mysql_stock.sql"));
    const CONNECTIONS: usize = 2;
    const DIALECT: Dialect = Dialect::MySql;
    const LOCK_TABLE: &'static str = "dlock_lock FORCE INDEX (PRIMARY)";
    const NOW: &'static str =
        "TIMESTAMPDIFF(MICROSECOND, TIMESTAMP'1970-01-01 00:00:00', UTC_TIMESTAMP(6))";

    fn session<'a>(&self, conn: &'a mut MySqlConnection) -> Session<'a> {
        Session::MySql(conn)
    }

    fn address(&self) -> &str {
        &self.server.shown
    }

    fn options(&self) -> Result<MySqlConnectOptions> {
        self.server.options(|options, password| options.password(password))
    }

    async fn connect(&self, options: MySqlConnectOptions) -> sqlx::Result<MySqlConnection> {
        // The driver encrypts no password by itself (caching_sha2_password, the default of
        // MySQL 8), and says so as an error of the configuration.
        let needs_tls = |error: &sqlx::Error| matches!(error, sqlx::Error::Configuration(_));
        let is_plain = matches!(options.get_ssl_mode(), MySqlSslMode::Disabled);
        match options.connect().await {
            Err(error) if is_plain && needs_tls(&error) => {
                if !self.may_switch_to_tls {
                    return Err(Found::error(NEEDS_TLS, error.to_string()));
                }
                match options.ssl_mode(MySqlSslMode::Required).connect().await {
                    Err(error) if is_of_tls(&error) => {
                        Err(Found::error(NEEDS_TLS, error.to_string()))
                    }
                    connected => connected,
                }
            }
            connected => connected,
        }
    }

    async fn set_up(&self, conn: &mut MySqlConnection) -> sqlx::Result<()> {
        let sql = "SET SESSION TRANSACTION ISOLATION LEVEL READ COMMITTED";
        raw_sql(sql).execute(&mut *conn).await?;
        raw_sql("SET SESSION innodb_lock_wait_timeout = 1").execute(&mut *conn).await?;
        let sql = format!("SET SESSION idle_transaction_timeout = {}", self.idle);
        let set = raw_sql(AssertSqlSafe(sql)).execute(&mut *conn).await;
        match set {
            Err(error) if error.as_database_error().map(number) == Some(UNKNOWN_VARIABLE) => {
                self.is_mysql.store(true, Ordering::Relaxed);
                Ok(())
            }
            set => set.map(drop),
        }
    }

    async fn examine(&self, conn: &mut MySqlConnection) -> sqlx::Result<()> {
        let sql = "SHOW GLOBAL VARIABLES WHERE Variable_name IN \
             ('version', 'wsrep_on', 'group_replication_single_primary_mode', \
             'group_replication_group_name')";
        let rows = raw_sql(sql).fetch_all(conn).await?;
        let mut values = HashMap::new();
        for row in &rows {
            values.insert(row.try_get::<String, _>(0)?, row.try_get::<String, _>(1)?);
        }
        let value = |name: &str| values.get(name).map_or("", String::as_str);
        check_version(value("version"))?;
        let has_group = !value("group_replication_group_name").is_empty();
        let has_many_primaries =
            has_group && value("group_replication_single_primary_mode") == "OFF";
        if value("wsrep_on") == "ON" || has_many_primaries {
            tracing::warn!(
                address = self.address(),
                "this server is one of several that take changes (Galera, or a group with several primaries); each has the time of its own clock, so a lock ends early where a clock is ahead, and it conflicts at the commit; give all clients the address of the same server, and keep the clocks together"
            );
        }
        Ok(())
    }

    async fn begin(&self, conn: &mut MySqlConnection) -> sqlx::Result<()> {
        // A user with SUPER or READ_ONLY ADMIN writes to a replica as well, where nobody else
        // would see its locks. In some versions the variable is a number, in others a word.
        const BEGIN: &str = "START TRANSACTION; \
             SELECT CAST(@@global.read_only AS CHAR) NOT IN ('0', 'OFF')";
        let sql = match self.is_mysql.load(Ordering::Relaxed) {
            true => format!("SET SESSION wait_timeout = {}; {BEGIN}", self.idle),
            false => BEGIN.to_owned(),
        };
        let rows = raw_sql(AssertSqlSafe(sql)).fetch_all(conn).await?;
        match rows.first().map(|row| row.try_get::<i64, _>(0)).transpose()? {
            Some(0) => Ok(()),
            _ => Err(Found::error(Cause::ReadOnly, "read_only is on")),
        }
    }

    async fn commit(&self, conn: &mut MySqlConnection) -> sqlx::Result<()> {
        self.end(conn, "COMMIT", "COMMIT; SET SESSION wait_timeout = DEFAULT").await
    }

    async fn roll_back(&self, conn: &mut MySqlConnection) -> sqlx::Result<()> {
        self.end(conn, "ROLLBACK", "ROLLBACK; SET SESSION wait_timeout = DEFAULT").await
    }

    async fn write(&self, conn: &mut MySqlConnection, rows: Vec<RowWrite>) -> sqlx::Result<bool> {
        const REPLACE: &str = "ON DUPLICATE KEY UPDATE version = VALUES(version), \
             token = VALUES(token), holders = VALUES(holders), waiters = VALUES(waiters), \
             holder = VALUES(holder), until_us = VALUES(until_us), keep_us = VALUES(keep_us), \
             broken_by = VALUES(broken_by), broken_us = VALUES(broken_us), \
             state = VALUES(state)";
        let (new, locked): (Vec<_>, Vec<_>) = rows.into_iter().partition(RowWrite::is_new);
        self.insert(conn, &locked, REPLACE).await?;
        // A row that others made in the meantime is an error of its own.
        self.insert(conn, &new, "").await?;
        Ok(true)
    }
}

/// Whether a connection failed because the two sides do not agree on TLS.
fn is_of_tls(error: &sqlx::Error) -> bool {
    match error {
        sqlx::Error::Tls(_) => true,
        sqlx::Error::Io(error) => error.kind() == std::io::ErrorKind::InvalidData,
        _ => false,
    }
}

/// What an error of the server means.
pub(super) fn cause(error: &(dyn DatabaseError + 'static)) -> Cause {
    match number(error) {
        1213 | 1062 | 1020 => Cause::Conflict,
        1205 | 3572 => Cause::Locked,
        1045 | 1698 => Cause::Credentials,
        1044 | 1142 | 1143 | 1227 | 1370 => Cause::Denied,
        1049 => NO_DATABASE,
        1054 => OTHER_TABLES,
        1146 => Cause::NoTables,
        1040 | 1203 | 1226 => Cause::Refused("it has too many connections"),
        1021 | 1041 | 1114 => Cause::Refused("its disk or memory is full"),
        1290 | 1836 | 1792 => Cause::ReadOnly,
        1053 | 1927 | 1317 | 4031 | 1077 => Cause::Disconnected,
        _ => Cause::Other,
    }
}

fn number(error: &(dyn DatabaseError + 'static)) -> u16 {
    error.try_downcast_ref::<MySqlDatabaseError>().map_or(0, |error| error.number())
}
