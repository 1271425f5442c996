//! What dlock is compared with in a SQL database. A build without a database has the same
//! types, of which there is no value.

#[cfg(any(feature = "mysql", feature = "postgres", feature = "sqlite"))]
mod peer;
#[cfg(any(feature = "mysql", feature = "postgres", feature = "sqlite"))]
mod stock;
#[cfg(not(any(feature = "mysql", feature = "postgres", feature = "sqlite")))]
mod unavailable;

#[cfg(not(any(feature = "mysql", feature = "postgres", feature = "sqlite")))]
pub(crate) use unavailable::{BatchedRow, Pool, RowLock, SqlStock};
#[cfg(any(feature = "mysql", feature = "postgres", feature = "sqlite"))]
pub(crate) use {
    peer::{Pool, RowLock},
    stock::{BatchedRow, SqlStock},
};
