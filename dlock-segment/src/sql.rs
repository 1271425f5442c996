//! Stock inside transactions of your own, for programs whose orders are in the same
//! database.
//!
//! | you want | use |
//! |---|---|
//! | an order and its units in one commit | [`deduct_in`], or [`DeductRequest::send_in`](crate::DeductRequest::send_in) for a buyer or an id |
//! | the same from one of several inventories, so that buyers wait less for each other | [`deduct_first_free_in`] |
//! | each effect delivered to another system, at least once | [`Inventory::outbox`](crate::Inventory::outbox) |
//! | a column that the shop already has, never below zero | [`StockColumn`] |
//!
//! All of them work on PostgreSQL, MariaDB and SQLite, with the transactions of sqlx.

mod column;

use dlock::sql::InTransaction;

pub use self::column::{ColumnKey, StockColumn};
use crate::error::Result;
pub use crate::inventory::Outbox;
use crate::inventory::deduct_first_free;
use crate::{Deduction, Inventory};

/// Buys units inside a transaction of yours: if you commit, they are bought, and if you roll
/// back, nothing happened.
///
/// ```
/// # #[cfg(feature = "postgres")]
/// # async fn example(pool: sqlx::PgPool, sale: dlock_segment::Inventory) -> Result<(), Box<dyn std::error::Error>> {
/// use dlock_segment::{Deduction, sql::deduct_in};
///
/// let mut tx = pool.begin().await?;
/// sqlx::query("INSERT INTO orders (id, units) VALUES (981, 2)").execute(&mut *tx).await?;
/// if let Deduction::Taken(_) = deduct_in(&mut tx, &sale, 2).await? {
///     tx.commit().await?; // the order and its units; else neither
/// }
/// # Ok(()) }
/// ```
///
/// # Errors
/// As [`DeductRequest::send_in`](crate::DeductRequest::send_in).
///
/// # Cancel safety
/// As [`DeductRequest::send_in`](crate::DeductRequest::send_in).
pub async fn deduct_in<T: InTransaction>(
    tx: &mut T,
    sale: &Inventory,
    quantity: u64,
) -> Result<Deduction> {
    sale.deduct(quantity).send_in(tx).await
}

/// Buys units inside a transaction of yours, all from one of several inventories in the same
/// database: from one that no other transaction has locked and that has enough. So many
/// transactions can buy at the same time, each with an inventory of its own.
///
/// An inventory that is paused, ended or not open is passed over. An inventory that is locked
/// may have units, too: a refusal is returned only after waiting for each of them. It is the one
/// that says most about when there are units: `NotEnough`, then `Paused`, `NotStarted`,
/// `SoldOut`, `Ended`. The creation id in the receipt says which inventory the units are from.
///
/// ```
/// # #[cfg(feature = "postgres")]
/// # async fn example(pool: sqlx::PgPool, parts: Vec<dlock_segment::Inventory>) -> Result<(), Box<dyn std::error::Error>> {
/// use dlock_segment::{Deduction, sql::deduct_first_free_in};
///
/// let mut tx = pool.begin().await?;
/// sqlx::query("INSERT INTO orders (id, units) VALUES (981, 1)").execute(&mut *tx).await?;
/// if let Deduction::Taken(_) = deduct_first_free_in(&mut tx, &parts, 1).await? {
///     tx.commit().await?;
/// }
/// # Ok(()) }
/// ```
///
/// # Errors
/// As [`DeductRequest::send_in`](crate::DeductRequest::send_in).
///
/// # Cancel safety
/// As [`DeductRequest::send_in`](crate::DeductRequest::send_in).
pub async fn deduct_first_free_in<T: InTransaction>(
    tx: &mut T,
    sales: &[Inventory],
    quantity: u64,
) -> Result<Deduction> {
    deduct_first_free(tx, sales, quantity).await
}
