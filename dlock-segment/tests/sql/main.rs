//! What only a SQL database can give: deductions in transactions of the caller, an outbox,
//! a column of the shop's own. All of it on PostgreSQL, MariaDB and SQLite.

#![allow(clippy::unwrap_used, reason = "a failed step fails the test")]

mod column;
#[path = "../common/mod.rs"]
mod common;
mod outbox;
mod shop;
mod transactions;

use std::sync::Arc;

use common::Place;
use common::databases::Database;
use shop::Shop;

/// Everything on one database.
async fn everything<S: Shop>(database: Database) {
    let database = Arc::new(database);
    let mut number = 0;
    let mut place = async || {
        number += 1;
        Place::on(&database, &format!("trial{number}")).await
    };
    let first = place().await; // it makes the tables
    let shop = S::open(&database.url()).await;
    transactions::the_order_and_its_units_are_one(&first, &shop).await;
    transactions::an_id_has_its_effect_once(&place().await, &shop).await;
    transactions::the_limit_counts_what_is_not_committed(&place().await, &shop).await;
    transactions::many_transactions_never_oversell(&place().await, &shop).await;
    transactions::a_part_that_does_not_sell_is_passed_over(&place().await, &shop).await;
    transactions::a_shop_with_transactions_only_is_tidied(&place().await, &shop).await;
    outbox::entries_are_delivered_until_they_are_acknowledged(&place().await, &shop).await;
    outbox::what_is_not_acknowledged_is_kept(&place().await).await;
    column::a_column_never_goes_below_zero(&shop).await;
    if S::LOCKS_ROWS {
        transactions::a_locked_part_is_skipped_and_then_waited_for(&place().await, &shop).await;
        transactions::an_old_snapshot_sells_nothing_twice(&place().await, &shop).await;
        transactions::a_long_transaction_holds_up_nothing_else(&place().await, &shop).await;
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn on_postgres() {
    let Some(database) = Database::postgres() else { return };
    everything::<sqlx::PgPool>(database).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn on_mariadb() {
    let Some(database) = Database::mariadb() else { return };
    everything::<sqlx::MySqlPool>(database).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn on_sqlite() {
    let Some(database) = Database::sqlite() else { return };
    everything::<sqlx::SqlitePool>(database).await;
}

/// Units of other homes cannot be brought inside a transaction.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_sale_with_several_homes_has_neither() {
    let Some(database) = Database::sqlite() else { return };
    let database = Arc::new(database);
    let mut place = Place::on(&database, "test").await;
    place.homes = 3;
    let sale = place.sale(5, 1).await;
    let error = sale.outbox("reader").unwrap_err();
    assert!(error.to_string().contains("one home"), "{error}");
    let pool = sqlx::SqlitePool::connect(&database.url()).await.unwrap();
    let mut tx = pool.begin().await.unwrap();
    let error = sale.deduct(1).send_in(&mut tx).await.unwrap_err();
    assert!(error.to_string().contains("one home"), "{error}");
}

/// Other stores have no transactions, and say so.
#[tokio::test]
async fn an_embedded_sale_has_neither() {
    let place = Place::memory().expect("it is embedded");
    let sale = place.sale(5, 1).await;
    assert!(matches!(sale.outbox("reader"), Err(dlock_segment::Error::Store(_))));
    let pool = sqlx::SqlitePool::connect("sqlite::memory:").await.unwrap();
    let mut tx = pool.begin().await.unwrap();
    let error = sale.deduct(1).send_in(&mut tx).await.unwrap_err();
    assert!(error.to_string().contains("SQL database"), "{error}");
}
