//! Locks that live in a transaction of the caller, for work that happens in one database.
//!
//! | you want | use |
//! |---|---|
//! | one at a time for as long as a transaction runs (the pessimistic lock) | [`lock_in`], [`try_lock_in`], [`lock_in_for`], [`lock_first_free_in`] |
//! | to notice that somebody else has changed a row (the optimistic lock) | [`versioned`] |
//! | the same as `lock_in` on PostgreSQL, without a table | [`advisory_lock_in`] |
//! | a lock for work outside of the database, or longer than a transaction | a lease: [`Dlock`](crate::Dlock) |
//!
//! A lock in a transaction ends with its COMMIT or ROLLBACK, and with its connection. It
//! needs no ttl, no renewal and no fencing token, because what is written under it is
//! committed or rolled back with it. It is kept in a table of its own, `dlock_row`, which
//! `dlock schema` makes: a long transaction of yours never stalls a lease.
//!
//! The locks are those of the transactions only. A lease of [`Dlock`](crate::Dlock) with the
//! same key is another lock.
//!
//! `GET_LOCK` of MySQL and MariaDB is not offered: it belongs to the connection, outlives
//! COMMIT and ROLLBACK, and is lost without a word when a pool replaces the connection.

use std::future::Future;
use std::time::Duration;

use rand::RngExt as _;

use crate::error::{Error, ErrorKind, Operation, Result};
use crate::key::{IntoKey, Key};

mod row_locks;

pub use self::row_locks::InTransaction;

/// How long a lock is waited for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[doc(hidden)]
pub enum Wait {
    /// As long as the database does.
    Default,
    /// Not at all.
    No,
    /// At most this long.
    AtMost(Duration),
}

/// Locks a key until the transaction ends. Waits as long as the database lets a statement
/// wait for a row.
///
/// On SQLite the whole file is locked for other writers, since there is nothing smaller.
///
/// ```
/// # #[cfg(feature = "postgres")]
/// # async fn example(pool: sqlx::PgPool) -> Result<(), Box<dyn std::error::Error>> {
/// let mut tx = pool.begin().await?;
/// dlock::sql::lock_in(&mut tx, "account:7").await?;
/// // ... read and write what belongs to account 7 ...
/// tx.commit().await?; // this releases the lock
/// # Ok(()) }
/// ```
///
/// # Errors
/// `TimedOut` if the database gave up waiting, `Unavailable` if it could not be asked or
/// found a deadlock (the transaction must then be rolled back), `Config` if the table is
/// missing.
///
/// # Cancel safety
/// Dropping the future leaves the transaction with or without the lock; roll it back.
pub async fn lock_in<T: InTransaction>(tx: &mut T, key: impl IntoKey) -> Result<()> {
    let key = key.into_key()?;
    match tx.lock_row(&key, Wait::Default).await? {
        true => Ok(()),
        false => Err(Error::new(ErrorKind::TimedOut, Operation::Acquire)
            .with_message("the database gave up waiting for another transaction; roll back")
            .with_key(&key)),
    }
}

/// Locks a key until the transaction ends, if no other transaction has locked it. Answers
/// whether it did.
///
/// ```
/// # #[cfg(feature = "postgres")]
/// # async fn example(pool: sqlx::PgPool) -> Result<(), Box<dyn std::error::Error>> {
/// let mut tx = pool.begin().await?;
/// if dlock::sql::try_lock_in(&mut tx, "nightly").await? {
///     // ... nobody else runs it now ...
/// }
/// tx.commit().await?;
/// # Ok(()) }
/// ```
///
/// # Errors
/// As [`lock_in`]. After `Ok(false)` the transaction can go on. `TimedOut` comes only from a
/// MariaDB or MySQL with `innodb_rollback_on_timeout`, which rolls the transaction back when
/// somebody else has locked the key: nothing of it was done, and it refuses further writes.
///
/// MySQL answers at once in transactions with READ COMMITTED. In others it waits for up to two
/// seconds for a key that somebody else has locked.
///
/// # Cancel safety
/// As [`lock_in_for`].
pub async fn try_lock_in<T: InTransaction>(tx: &mut T, key: impl IntoKey) -> Result<bool> {
    tx.lock_row(&key.into_key()?, Wait::No).await
}

/// Locks a key until the transaction ends, and waits at most this long for it. Answers
/// whether it did. MariaDB and MySQL count whole seconds.
///
/// ```
/// # #[cfg(feature = "postgres")]
/// # async fn example(pool: sqlx::PgPool) -> Result<(), Box<dyn std::error::Error>> {
/// let mut tx = pool.begin().await?;
/// let second = std::time::Duration::from_secs(1);
/// if !dlock::sql::lock_in_for(&mut tx, "account:7", second).await? {
///     tx.rollback().await?; // somebody else has it
/// }
/// # Ok(()) }
/// ```
///
/// # Errors
/// As [`try_lock_in`].
///
/// # Cancel safety
/// As [`lock_in`]. On MySQL the connection may keep the time-out of this call; close it.
pub async fn lock_in_for<T: InTransaction>(
    tx: &mut T,
    key: impl IntoKey,
    wait: Duration,
) -> Result<bool> {
    let wait = if wait.is_zero() { Wait::No } else { Wait::AtMost(wait) };
    tx.lock_row(&key.into_key()?, wait).await
}

/// Locks the first of these keys that no other transaction has locked, and skips those
/// that are locked. `None` if all of them are.
///
/// ```
/// # #[cfg(feature = "postgres")]
/// # async fn example(pool: sqlx::PgPool) -> Result<(), Box<dyn std::error::Error>> {
/// let mut tx = pool.begin().await?;
/// let segments = ["stock:1", "stock:2", "stock:3"];
/// if let Some(segment) = dlock::sql::lock_first_free_in(&mut tx, segments).await? {
///     println!("took {}", segment.as_str());
/// }
/// # Ok(()) }
/// ```
///
/// # Errors
/// As [`try_lock_in`].
///
/// # Cancel safety
/// As [`lock_in_for`].
pub async fn lock_first_free_in<T: InTransaction, K: IntoKey>(
    tx: &mut T,
    keys: impl IntoIterator<Item = K>,
) -> Result<Option<Key>> {
    for key in keys {
        let key = key.into_key()?;
        if tx.lock_row(&key, Wait::No).await? {
            return Ok(Some(key));
        }
    }
    Ok(None)
}

/// Takes an advisory lock of PostgreSQL until the transaction ends, and waits for it. It
/// needs no table. Two keys with the same 64-bit hash share a lock.
///
/// ```
/// # async fn example(pool: sqlx::PgPool) -> Result<(), Box<dyn std::error::Error>> {
/// let mut tx = pool.begin().await?;
/// dlock::sql::advisory_lock_in(&mut tx, "account:7").await?;
/// tx.commit().await?; // this releases the lock
/// # Ok(()) }
/// ```
///
/// # Errors
/// As [`lock_in`].
///
/// # Cancel safety
/// As [`lock_in`].
#[cfg(feature = "postgres")]
pub async fn advisory_lock_in(
    tx: &mut sqlx::Transaction<'_, sqlx::Postgres>,
    key: impl IntoKey,
) -> Result<()> {
    row_locks::advisory(tx, &key.into_key()?).await
}

/// The outcome of one attempt of a [`versioned`] update.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Attempt<T> {
    /// The version was the one that was read, and the row is updated.
    Done(T),
    /// Somebody else has updated the row since it was read.
    Conflict,
}

/// Repeats an update that compares a version, until nobody else was faster: the optimistic
/// lock. The attempt reads the row with its version, and updates it with
/// `... SET version = version + 1 WHERE id = ? AND version = ?`; if no row was affected, it
/// answers [`Attempt::Conflict`]. Between attempts there is a short pause that grows.
/// `None` if all attempts met a conflict.
///
/// ```
/// use dlock::sql::{Attempt, versioned};
///
/// # #[cfg(feature = "postgres")]
/// # async fn example(pool: sqlx::PgPool) -> Result<(), sqlx::Error> {
/// let paid = versioned(5, async || {
///     let (cents, version): (i64, i64) =
///         sqlx::query_as("SELECT cents, version FROM account WHERE id = 7").fetch_one(&pool).await?;
///     let done = sqlx::query(
///         "UPDATE account SET cents = $1, version = version + 1 WHERE id = 7 AND version = $2",
///     );
///     let done = done.bind(cents - 100).bind(version).execute(&pool).await?;
///     Ok::<_, sqlx::Error>(match done.rows_affected() {
///         0 => Attempt::Conflict,
///         _ => Attempt::Done(cents - 100),
///     })
/// });
/// if paid.await?.is_none() {
///     println!("too much going on; try again later");
/// }
/// # Ok(()) }
/// ```
///
/// # Errors
/// The error of an attempt, at once.
///
/// # Cancel safety
/// As that of the attempts.
pub async fn versioned<T, E, F>(
    attempts: u32,
    mut attempt: impl FnMut() -> F,
) -> std::result::Result<Option<T>, E>
where
    F: Future<Output = std::result::Result<Attempt<T>, E>>,
{
    for number in 0..attempts {
        if number > 0 {
            let pause = Duration::from_millis(1 << number.min(7));
            let spread = rand::rng().random_range(0.5..1.5);
            tokio::time::sleep(pause.mul_f64(spread)).await;
        }
        if let Attempt::Done(value) = attempt().await? {
            return Ok(Some(value));
        }
    }
    Ok(None)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test(start_paused = true)]
    async fn a_versioned_update_is_repeated_and_given_up() {
        let mut tries = 0;
        let third = versioned(5, || {
            tries += 1;
            std::future::ready(Ok::<_, ()>(match tries {
                3 => Attempt::Done("done"),
                _ => Attempt::Conflict,
            }))
        });
        assert_eq!(third.await, Ok(Some("done")));
        assert_eq!(tries, 3);
        let mut tries = 0;
        let never = versioned(4, || {
            tries += 1;
            std::future::ready(Ok::<Attempt<()>, ()>(Attempt::Conflict))
        });
        assert_eq!(never.await, Ok(None));
        assert_eq!(tries, 4);
        let failed = versioned(4, || std::future::ready(Err::<Attempt<()>, _>("broken")));
        assert_eq!(failed.await, Err("broken"));
    }
}
