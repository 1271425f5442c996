//! The same on every SQL database, and on PostgreSQL behind a pooler of transactions.

use super::common::Trial;
use super::common::databases::Database;
use super::{accounting, admission, operations, outcomes, reservations, returns, terms};

fn trials() -> Vec<(&'static str, Trial)> {
    let mut trials = accounting::trials();
    trials.extend(admission::trials());
    trials.extend(operations::trials());
    trials.extend(outcomes::trials());
    trials.extend(reservations::trials());
    trials.extend(returns::trials());
    trials.extend(terms::trials());
    trials
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn on_postgres() {
    let Some(database) = Database::postgres() else { return };
    database.run(1, trials()).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn on_postgres_behind_a_pooler() {
    let Some(database) = Database::pooled() else { return };
    database.run(1, trials()).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn on_mariadb() {
    let Some(database) = Database::mariadb() else { return };
    database.run(1, trials()).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn on_sqlite() {
    let Some(database) = Database::sqlite() else { return };
    database.run(1, trials()).await;
}

/// A sale with several homes in one database.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn on_postgres_with_homes() {
    let Some(database) = Database::postgres() else { return };
    database.run(3, trials()).await;
}
