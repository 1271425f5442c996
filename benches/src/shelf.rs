//! The stock of somebody who counts for themselves: a number per segment, read,
//! thought about, and written back. Nothing but a lock keeps two of them apart,
//! so a lock that fails shows as units sold twice.

use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use anyhow::{Context as _, Result};
use dlock::Config;
use redis::aio::MultiplexedConnection;

use crate::net::NET;
use crate::server;

/// Numbers in the same store as the locks.
#[derive(Debug)]
pub struct Shelf {
    place: Place,
    commands: AtomicU64,
}

enum Place {
    Memory(Vec<AtomicU64>),
    Redis { connection: MultiplexedConnection, keys: Vec<String> },
}

impl std::fmt::Debug for Place {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(match self {
            Place::Memory(_) => "Memory",
            Place::Redis { .. } => "Redis",
        })
    }
}

/// What somebody else did to it.
const GONE: &str = "the count is gone from the server; was it flushed?";

/// `stock` in so many parts, the first ones with one more if it does not divide.
pub fn parts(stock: u64, segments: usize) -> Vec<u64> {
    let (each, rest) = (stock / segments as u64, stock % segments as u64);
    (0..segments as u64).map(|segment| each + u64::from(segment < rest)).collect()
}

impl Shelf {
    /// A shelf of so many segments, which somebody has put `stock` units on.
    ///
    /// # Errors
    /// If the store cannot be reached.
    pub async fn open(config: &Config, run: &str, stock: u64, segments: usize) -> Result<Self> {
        let place = if server::is_embedded(config) {
            Place::Memory(parts(stock, segments).into_iter().map(AtomicU64::new).collect())
        } else {
            let connection = server::connect(config).await?;
            let keys = server::names(config, &format!("{run}:shelf"), segments)?;
            Place::Redis { connection, keys }
        };
        Ok(Shelf { place, commands: AtomicU64::new(0) })
    }

    /// Puts the stock on it.
    ///
    /// # Errors
    /// If the store fails.
    pub async fn fill(&self, stock: u64) -> Result<()> {
        let Place::Redis { connection, keys } = &self.place else { return Ok(()) };
        let mut sets = redis::pipe();
        for (key, part) in keys.iter().zip(parts(stock, keys.len())) {
            sets.cmd("SET").arg(key).arg(part).arg("PX").arg(NET.as_millis() as u64).ignore();
        }
        Ok(sets.exec_async(&mut connection.clone()).await?)
    }

    /// What it is called in a server.
    pub fn keys(&self) -> &[String] {
        match &self.place {
            Place::Memory(_) => &[],
            Place::Redis { keys, .. } => keys,
        }
    }

    /// Takes up to `want` units of a segment, which the caller must have locked.
    ///
    /// # Errors
    /// If the store fails.
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
        match &self.place {
            Place::Memory(parts) => Ok(parts[segment].load(Ordering::Acquire)),
            Place::Redis { connection, keys } => {
                self.commands.fetch_add(1, Ordering::Relaxed);
                let mut get = redis::cmd("GET");
                let left: Option<u64> =
                    get.arg(&keys[segment]).query_async(&mut connection.clone()).await?;
                left.context(GONE)
            }
        }
    }

    async fn write(&self, segment: usize, left: u64) -> Result<()> {
        match &self.place {
            Place::Memory(parts) => parts[segment].store(left, Ordering::Release),
            Place::Redis { connection, keys } => {
                self.commands.fetch_add(1, Ordering::Relaxed);
                let mut set = redis::cmd("SET");
                // Not there any more: a run that was ended writes nothing after it was removed.
                set.arg(&keys[segment]).arg(left).arg("XX").arg("KEEPTTL");
                set.exec_async(&mut connection.clone()).await?;
            }
        }
        Ok(())
    }

    /// What is left in each segment.
    ///
    /// # Errors
    /// If the store fails.
    pub async fn left(&self) -> Result<Vec<u64>> {
        match &self.place {
            Place::Memory(parts) => {
                Ok(parts.iter().map(|part| part.load(Ordering::Acquire)).collect())
            }
            Place::Redis { connection, keys } => {
                let mut gets = redis::pipe(); // the least rights of a user have no MGET
                for key in keys {
                    gets.get(key);
                }
                let left: Vec<Option<u64>> = gets.query_async(&mut connection.clone()).await?;
                left.into_iter().collect::<Option<_>>().context(GONE)
            }
        }
    }

    /// How many commands takings have sent to a server.
    pub fn commands(&self) -> u64 {
        self.commands.load(Ordering::Relaxed)
    }

    /// Leaves nothing behind.
    ///
    /// # Errors
    /// If the store fails.
    pub async fn remove(&self) -> Result<()> {
        if let Place::Redis { connection, keys } = &self.place {
            redis::cmd("DEL").arg(keys).exec_async(&mut connection.clone()).await?;
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn without_a_lock_units_are_sold_twice() {
        assert_eq!(parts(10, 3), [4, 3, 3]);
        let shelf = Shelf::open(&Config::default(), "test", 10, 1).await.unwrap();
        let think = Duration::from_millis(5);
        let (one, other) = tokio::join!(shelf.take(0, 3, think), shelf.take(0, 3, think));
        let sold = one.unwrap() + other.unwrap();
        let left: u64 = shelf.left().await.unwrap().iter().sum();
        assert_eq!((sold, left), (6, 7), "13 units of 10: what a missing lock does");
    }
}
