//! A stock that is kept the naive way: a number per segment that the client reads
//! and writes back. Only a lock keeps two clients apart, so a lock that fails shows
//! up as units that are sold twice.

use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use anyhow::{Context as _, Result};
use dlock::Config;
use redis::aio::MultiplexedConnection;

use crate::expiry_guard::EXPIRY;
use crate::server;
use crate::sql::SqlStock;

/// The number of units in each segment, kept in the same store as the locks.
#[derive(Debug)]
pub struct NaiveStock {
    storage: Storage,
    commands: AtomicU64,
}

enum Storage {
    Memory(Vec<AtomicU64>),
    Redis { connection: MultiplexedConnection, keys: Vec<String> },
    Sql(SqlStock),
}

impl std::fmt::Debug for Storage {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(match self {
            Storage::Memory(_) => "Memory",
            Storage::Redis { .. } => "Redis",
            Storage::Sql(_) => "Sql",
        })
    }
}

const GONE: &str = "the stock of this run is no longer in the server; was it flushed?";

/// Splits `stock` over the segments; the first segments have one unit more if it does
/// not divide.
pub fn split(stock: u64, segments: usize) -> Vec<u64> {
    let (each, rest) = (stock / segments as u64, stock % segments as u64);
    (0..segments as u64).map(|segment| each + u64::from(segment < rest)).collect()
}

impl NaiveStock {
    /// Opens the stock. In a server it is empty until somebody calls [`Self::fill`].
    ///
    /// # Errors
    /// Fails if the store cannot be reached.
    pub async fn open(
        config: &Config,
        key_prefix: &str,
        stock: u64,
        segments: usize,
    ) -> Result<Self> {
        let storage = match server::backend(config) {
            "memory" => {
                Storage::Memory(split(stock, segments).into_iter().map(AtomicU64::new).collect())
            }
            "redis" => {
                let connection = server::connect(config).await?;
                let keys = server::redis_names(config, &format!("{key_prefix}:stock"), segments)?;
                Storage::Redis { connection, keys }
            }
            _ => Storage::Sql(SqlStock::open(config, key_prefix, segments, segments).await?),
        };
        Ok(NaiveStock { storage, commands: AtomicU64::new(0) })
    }

    /// Writes the stock to the server.
    ///
    /// # Errors
    /// Fails if the store fails.
    pub async fn fill(&self, stock: u64) -> Result<()> {
        if let Storage::Sql(rows) = &self.storage {
            return rows.fill(&split(stock, rows.count())).await;
        }
        let Storage::Redis { connection, keys } = &self.storage else { return Ok(()) };
        let mut sets = redis::pipe();
        for (key, part) in keys.iter().zip(split(stock, keys.len())) {
            sets.cmd("SET").arg(key).arg(part).arg("PX").arg(EXPIRY.as_millis() as u64).ignore();
        }
        Ok(sets.exec_async(&mut connection.clone()).await?)
    }

    /// The names of the keys in the server; none without a server.
    pub fn keys(&self) -> &[String] {
        match &self.storage {
            Storage::Memory(_) | Storage::Sql(_) => &[],
            Storage::Redis { keys, .. } => keys,
        }
    }

    /// Takes up to `want` units of a segment and returns how many. The caller must hold
    /// the lock of the segment. `think` is the pause between read and write.
    ///
    /// # Errors
    /// Fails if the store fails.
    pub async fn take(&self, segment: usize, want: u64, think: Duration) -> Result<u64> {
        let left = self.read(segment).await?;
        let got = left.min(want);
        if got > 0 {
            if !think.is_zero() {
                tokio::time::sleep(think).await;
            }
            self.write(segment, left - got).await?;
        }
        Ok(got)
    }

    async fn read(&self, segment: usize) -> Result<u64> {
        match &self.storage {
            Storage::Memory(segments) => Ok(segments[segment].load(Ordering::Acquire)),
            Storage::Redis { connection, keys } => {
                self.commands.fetch_add(1, Ordering::Relaxed);
                let mut get = redis::cmd("GET");
                let left: Option<u64> =
                    get.arg(&keys[segment]).query_async(&mut connection.clone()).await?;
                left.context(GONE)
            }
            Storage::Sql(rows) => {
                self.commands.fetch_add(1, Ordering::Relaxed);
                rows.read(segment).await?.context(GONE)
            }
        }
    }

    async fn write(&self, segment: usize, left: u64) -> Result<()> {
        match &self.storage {
            Storage::Memory(segments) => segments[segment].store(left, Ordering::Release),
            Storage::Redis { connection, keys } => {
                self.commands.fetch_add(1, Ordering::Relaxed);
                let mut set = redis::cmd("SET");
                // XX: a run that was interrupted writes nothing after its keys were removed.
                set.arg(&keys[segment]).arg(left).arg("XX").arg("KEEPTTL");
                set.exec_async(&mut connection.clone()).await?;
            }
            Storage::Sql(rows) => {
                self.commands.fetch_add(1, Ordering::Relaxed);
                rows.write(segment, left).await?;
            }
        }
        Ok(())
    }

    /// The units that are left in each segment.
    ///
    /// # Errors
    /// Fails if the store fails.
    pub async fn left(&self) -> Result<Vec<u64>> {
        match &self.storage {
            Storage::Memory(segments) => {
                Ok(segments.iter().map(|units| units.load(Ordering::Acquire)).collect())
            }
            Storage::Redis { connection, keys } => {
                let mut gets = redis::pipe(); // docs/redis.acl does not allow MGET
                for key in keys {
                    gets.get(key);
                }
                let left: Vec<Option<u64>> = gets.query_async(&mut connection.clone()).await?;
                left.into_iter().collect::<Option<_>>().context(GONE)
            }
            Storage::Sql(rows) => {
                rows.left().await?.into_iter().collect::<Option<_>>().context(GONE)
            }
        }
    }

    /// The number of commands that [`Self::take`] has sent to a server.
    pub fn commands(&self) -> u64 {
        self.commands.load(Ordering::Relaxed)
    }

    /// Removes the stock from the server.
    ///
    /// # Errors
    /// Fails if the store fails.
    pub async fn remove(&self) -> Result<()> {
        if let Storage::Redis { connection, keys } = &self.storage {
            redis::cmd("DEL").arg(keys).exec_async(&mut connection.clone()).await?;
        }
        if let Storage::Sql(rows) = &self.storage {
            rows.remove().await?;
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn without_a_lock_units_are_sold_twice() {
        assert_eq!(split(10, 3), [4, 3, 3]);
        let stock =
            NaiveStock::open(&Config::from_url("memory://").unwrap(), "test", 10, 1).await.unwrap();
        let think = Duration::from_millis(5);
        let (one, other) = tokio::join!(stock.take(0, 3, think), stock.take(0, 3, think));
        let sold = one.unwrap() + other.unwrap();
        let left: u64 = stock.left().await.unwrap().iter().sum();
        assert_eq!((sold, left), (6, 7), "without a lock 10 units became 13");
    }
}
