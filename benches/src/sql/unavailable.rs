//! The types of a build without a SQL database: nothing makes a value of them.

use std::convert::Infallible;
use std::sync::Arc;
use std::time::Duration;

use anyhow::Result;
use dlock::Config;

use crate::{server, usage_error};

pub(crate) struct Pool(Infallible);

/// A transaction that has locked a row.
#[derive(Debug)]
pub struct RowLock(Infallible);

#[derive(Debug)]
pub(crate) struct SqlStock(Infallible);

#[derive(Debug)]
pub(crate) struct BatchedRow {
    pub(crate) stock: Arc<SqlStock>,
}

fn unavailable<T>(config: &Config) -> Result<T> {
    Err(usage_error(format!(
        "the peers `insert`, `row` and `batched-row` need a SQL database, not {}://; for a database, build with --features sqlite, postgres or mysql",
        server::backend(config)
    )))
}

impl Pool {
    pub(crate) async fn connect(config: &Config, _: usize, _: &[String]) -> Result<Self> {
        unavailable(config)
    }

    pub(crate) async fn insert(&self, _: &str) -> Result<()> {
        match self.0 {}
    }

    pub(crate) async fn delete(&self, _: &str) -> Result<()> {
        match self.0 {}
    }

    pub(crate) async fn lock(&self, _: &str) -> Result<RowLock> {
        match self.0 {}
    }

    pub(crate) async fn ping(&self) -> Result<Duration> {
        match self.0 {}
    }

    pub(crate) async fn clean_up(&self, _: &[String]) {
        match self.0 {}
    }
}

impl RowLock {
    pub(crate) async fn release(self) -> Result<()> {
        match self.0 {}
    }
}

impl SqlStock {
    pub(crate) async fn open(config: &Config, _: &str, _: usize, _: usize) -> Result<Self> {
        unavailable(config)
    }

    pub(crate) fn count(&self) -> usize {
        match self.0 {}
    }

    pub(crate) async fn fill(&self, _: &[u64]) -> Result<()> {
        match self.0 {}
    }

    pub(crate) async fn read(&self, _: usize) -> Result<Option<u64>> {
        match self.0 {}
    }

    pub(crate) async fn write(&self, _: usize, _: u64) -> Result<()> {
        match self.0 {}
    }

    pub(crate) async fn deduct(&self, _: usize, _: u64) -> Result<bool> {
        match self.0 {}
    }

    pub(crate) async fn left(&self) -> Result<Vec<Option<u64>>> {
        match self.0 {}
    }

    pub(crate) async fn remove(&self) -> Result<()> {
        match self.0 {}
    }
}

impl BatchedRow {
    pub(crate) fn new(stock: SqlStock) -> Self {
        BatchedRow { stock: Arc::new(stock) }
    }

    pub(crate) async fn deduct(&self, _: u64) -> Result<bool> {
        match self.stock.0 {}
    }
}
