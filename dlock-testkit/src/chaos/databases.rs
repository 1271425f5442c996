//! The databases of a chaos run, and what goes wrong with them.
//!
//! Each worker has a proxy of its own in front of a database server, as at one Redis. SQLite
//! has no server: there the faults are those of the workers, which share the file.

use std::path::PathBuf;
use std::time::Duration;

use dlock::Dlock;
use dlock::backend::Cursor;
use rand::RngExt as _;
use rand::rngs::StdRng;

use super::failover_faults::blocking;
use super::faults::Fault;
use super::load::KEYS;
use super::servers::Topology;
use crate::database_servers::{MariaDbServer, PostgresServer};

/// A database that has the locks.
pub(super) enum Database {
    Postgres(PostgresServer),
    MariaDb(MariaDbServer),
    Sqlite(SqliteFile),
}

/// A database file in a directory of its own, which is removed with this value.
pub(super) struct SqliteFile(PathBuf);

impl Drop for SqliteFile {
    fn drop(&mut self) {
        let _ = std::fs::remove_dir_all(&self.0);
    }
}

impl Database {
    /// Starts a database and makes its tables; `None` if it is not installed.
    ///
    /// # Panics
    /// If the tables cannot be made, for example because the store is not compiled in.
    pub(super) fn start(topology: Topology) -> Option<Self> {
        let database = match topology {
            Topology::Postgres => Database::Postgres(PostgresServer::start()?),
            Topology::MariaDb => Database::MariaDb(MariaDbServer::start()?),
            _ => {
                let name = format!("dlock-chaos-{}", std::process::id());
                let directory = std::env::temp_dir().join(name);
                std::fs::create_dir_all(&directory).expect("a directory for the file");
                Database::Sqlite(SqliteFile(directory))
            }
        };
        let url = format!("{}?migrate=true", database.url());
        let made = tokio::runtime::Handle::current().block_on(operator(&url));
        drop(made.expect("the tables are made"));
        Some(database)
    }

    /// The port of the server, if there is one.
    pub(super) fn port(&self) -> Option<u16> {
        match self {
            Database::Postgres(server) => Some(server.port()),
            Database::MariaDb(server) => Some(server.port()),
            Database::Sqlite(_) => None,
        }
    }

    pub(super) fn url(&self) -> String {
        match self {
            Database::Postgres(server) => server.url(),
            Database::MariaDb(server) => server.url(),
            Database::Sqlite(file) => format!("sqlite://{}", file.0.join("locks.db").display()),
        }
    }

    /// The URL of the same database behind a proxy at another port.
    pub(super) fn url_at(&self, port: u16) -> String {
        let own = self.port().unwrap_or(0);
        self.url().replace(&format!(":{own}/"), &format!(":{port}/"))
    }

    fn sql(&self, statement: &str) -> String {
        blocking(|| match self {
            Database::Postgres(server) => server.sql(statement),
            Database::MariaDb(server) => server.sql(&format!("USE dlock; {statement}")),
            Database::Sqlite(_) => String::new(),
        })
    }

    /// A fault of the server. It is over when this returns.
    pub(super) async fn inject(&mut self, fault: Fault, lasts: Duration, random: &mut StdRng) {
        match fault {
            Fault::PauseServer => {
                self.pause();
                tokio::time::sleep(lasts).await;
                self.resume();
            }
            Fault::RestartServer => {
                self.kill();
                tokio::time::sleep(lasts).await;
                blocking(|| self.restart());
            }
            Fault::EndSessions => self.end_sessions(),
            Fault::LockRows => {
                let key = KEYS[random.random_range(0..KEYS.len())];
                self.lock_rows(key, lasts);
            }
            _ => {}
        }
    }

    fn pause(&self) {
        match self {
            Database::Postgres(server) => server.pause(),
            Database::MariaDb(server) => server.pause(),
            Database::Sqlite(_) => {}
        }
    }

    fn resume(&self) {
        match self {
            Database::Postgres(server) => server.resume(),
            Database::MariaDb(server) => server.resume(),
            Database::Sqlite(_) => {}
        }
    }

    fn kill(&mut self) {
        match self {
            Database::Postgres(server) => server.kill(),
            Database::MariaDb(server) => server.kill(),
            Database::Sqlite(_) => {}
        }
    }

    fn restart(&mut self) {
        match self {
            Database::Postgres(server) => {
                server.restart();
                server.wait_until_ready();
            }
            Database::MariaDb(server) => {
                server.restart();
                server.wait_until_ready();
            }
            Database::Sqlite(_) => {}
        }
    }

    fn end_sessions(&self) {
        match self {
            Database::Postgres(_) => {
                self.sql(
                    "SELECT count(pg_terminate_backend(pid)) FROM pg_stat_activity \
                     WHERE datname = 'dlock' AND pid <> pg_backend_pid()",
                );
            }
            Database::MariaDb(server) => {
                let sessions = self.sql(
                    "SELECT id FROM information_schema.processlist \
                     WHERE db = 'dlock' AND id <> CONNECTION_ID()",
                );
                for session in sessions.lines() {
                    // It may have ended by itself meanwhile.
                    let _ = blocking(|| server.mariadb(&format!("KILL {session}")));
                }
            }
            Database::Sqlite(_) => {}
        }
    }

    /// Somebody else's transaction locks the rows of a key.
    fn lock_rows(&self, key: &str, lasts: Duration) {
        let seconds = lasts.as_secs_f64();
        let rows = format!("SELECT id FROM dlock_lock WHERE id LIKE 'chaos/_/{key}' FOR UPDATE");
        match self {
            Database::Postgres(_) => {
                self.sql(&format!("BEGIN; {rows}; SELECT pg_sleep({seconds}); COMMIT"));
            }
            Database::MariaDb(_) => {
                self.sql(&format!(
                    "SET SESSION TRANSACTION ISOLATION LEVEL READ COMMITTED; \
                     START TRANSACTION; {rows}; SELECT SLEEP({seconds}); COMMIT"
                ));
            }
            Database::Sqlite(_) => {}
        }
    }

    /// The locks that are held or waited for when clients had this long to end.
    pub(super) async fn left_after(&self, within: Duration) -> Vec<String> {
        let began = std::time::Instant::now();
        loop {
            let left = match self.left().await {
                Ok(left) => left,
                Err(error) => vec![format!("the database does not answer: {error}")],
            };
            if left.is_empty() || began.elapsed() >= within {
                return left;
            }
            tokio::time::sleep(Duration::from_millis(100)).await;
        }
    }

    async fn left(&self) -> dlock::Result<Vec<String>> {
        let operator = operator(&self.url()).await?;
        let mut left = Vec::new();
        let mut cursor = Some(Cursor::default());
        while let Some(from) = cursor {
            let page = operator.list("", from).await?;
            for key in page.keys {
                let state = operator.inspect(key.as_str()).await?;
                if !state.holders.is_empty() || !state.waiters.is_empty() {
                    left.push(format!("{key:?}: {state:?}"));
                }
            }
            cursor = page.next;
        }
        Ok(left)
    }
}

async fn operator(url: &str) -> dlock::Result<Dlock> {
    Dlock::builder().url(url).namespace("chaos").client_name("operator").connect().await
}
