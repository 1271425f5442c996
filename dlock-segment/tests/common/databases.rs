//! The SQL databases that tests of an inventory run on. Starting one takes seconds, so the
//! trials share it, each in a namespace of its own.

use std::sync::Arc;
use std::time::Duration;

use dlock::Dlock;
use dlock_testkit::database_servers::{MariaDbServer, PgBouncer, PostgresServer};
use tempfile::TempDir;

/// A database, which ends when this value is dropped.
pub(crate) enum Database {
    Postgres(PostgresServer),
    Pooled(PgBouncer, PostgresServer),
    MariaDb(MariaDbServer),
    Sqlite(TempDir),
}

impl Database {
    pub(crate) fn postgres() -> Option<Self> {
        PostgresServer::start().map(Database::Postgres)
    }

    /// PostgreSQL behind a pooler of transactions.
    pub(crate) fn pooled() -> Option<Self> {
        let server = PostgresServer::start()?;
        Some(Database::Pooled(PgBouncer::start(&server)?, server))
    }

    pub(crate) fn mariadb() -> Option<Self> {
        MariaDbServer::start().map(Database::MariaDb)
    }

    pub(crate) fn sqlite() -> Option<Self> {
        Some(Database::Sqlite(TempDir::new().expect("a directory")))
    }

    pub(crate) fn url(&self) -> String {
        match self {
            Database::Postgres(server) => server.url(),
            Database::Pooled(pooler, _) => pooler.url(),
            Database::MariaDb(server) => server.url(),
            Database::Sqlite(directory) => {
                format!("sqlite://{}/stock.db", directory.path().display())
            }
        }
    }

    /// A client that does not give up on a busy machine.
    pub(crate) async fn client(&self, namespace: &str) -> Dlock {
        let client = Dlock::builder().url(&self.url()).namespace(namespace).migrate(true);
        let client = client.call_timeout(Duration::from_secs(20));
        client.connect().await.expect("a client")
    }

    /// Runs a statement.
    pub(crate) async fn sql(&self, sql: &'static str) {
        match self {
            Database::Postgres(server) | Database::Pooled(_, server) => {
                server.sql(sql);
            }
            Database::MariaDb(server) => {
                server.sql(&format!("USE dlock; {sql}"));
            }
            Database::Sqlite(_) => {
                let pool = sqlx::SqlitePool::connect(&self.url()).await.expect("the file");
                sqlx::raw_sql(sql).execute(&pool).await.expect("it runs");
                pool.close().await;
            }
        }
    }

    /// Runs trials, one after the other, with sales that have so many homes.
    pub(crate) async fn run(self, homes: u32, trials: Vec<(&'static str, super::Trial)>) {
        let database = Arc::new(self);
        for (number, (name, trial)) in trials.into_iter().enumerate() {
            let began = std::time::Instant::now();
            let place = super::Place::on(&database, &format!("trial{number}")).await;
            trial(super::Place { homes, ..place }).await;
            println!("{name}: {:?}", began.elapsed());
        }
    }
}

/// Runs trials on each database.
pub(crate) async fn on_each(trials: fn() -> Vec<(&'static str, super::Trial)>) {
    let databases = [Database::sqlite(), Database::postgres(), Database::mariadb()];
    for database in databases.into_iter().flatten() {
        database.run(1, trials()).await;
    }
}
