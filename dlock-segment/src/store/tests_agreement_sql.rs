//! The SQL store and the embedded machine agree, though only a part of the machine's state
//! is loaded for each batch: the same comparison as with Redis, on all three databases. The
//! journals must be the same in every number, and so must all records.

use dlock::Dlock;
use dlock_testkit::database_servers::{MariaDbServer, PostgresServer};

use super::sql::Sql;
use super::tests_agreement::{Both, Compared};
use super::{Counts, InventoryId, Request};

impl Compared for Sql {
    const SAME_JOURNAL: bool = true;

    fn of(dlock: &Dlock) -> Self {
        Sql::new(dlock.client_extension()).expect("a SQL database")
    }

    fn order(batch: &[Request]) -> Vec<usize> {
        (0..batch.len()).collect()
    }

    async fn counts_as_they_are(&self, inventory: &InventoryId) -> crate::Result<Vec<Counts>> {
        self.counts_without_reclaim(inventory).await
    }
}

async fn agree(url: &str) {
    let dlock = Dlock::builder().url(url).migrate(true);
    let dlock = dlock.call_timeout(std::time::Duration::from_secs(20));
    let dlock = dlock.connect().await.expect("a client");
    let seeds = std::env::var("DLOCK_TEST_SEEDS").ok().and_then(|seeds| seeds.parse().ok());
    for seed in 0..seeds.unwrap_or(12) {
        Both::<Sql>::new(&dlock, seed).await.run().await;
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn postgres_and_the_machine_agree() {
    let Some(server) = PostgresServer::start() else { return };
    agree(&server.url()).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn mariadb_and_the_machine_agree() {
    let Some(server) = MariaDbServer::start() else { return };
    agree(&server.url()).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn sqlite_and_the_machine_agree() {
    let directory = tempfile::TempDir::new().expect("a directory");
    agree(&format!("sqlite://{}/stock.db", directory.path().display())).await;
}
