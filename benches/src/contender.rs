//! Who is measured: dlock, or a peer that does the same job another way.

use std::time::Duration;

use anyhow::{Context as _, Result, bail};
use dlock::{Config, Dlock, Guard, MAX_TTL, Mutex, ReleaseOutcome};
use rand::RngExt as _;
use redis::aio::MultiplexedConnection;
use serde::{Deserialize, Serialize};

use crate::{Wrong, server};

/// Another way to lock.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Peer {
    /// The crate rslock: as its documentation says, with its own retry.
    Rslock,
    /// What a careful user writes by hand: `SET NX PX` with a random value and a
    /// compare-and-delete script on one multiplexed connection, and between the
    /// tries a pause that doubles from 1 to 64 ms, with jitter.
    Raw,
}

/// The locks of a run.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct Locks {
    /// Who is measured, if not dlock.
    pub peer: Option<Peer>,
    /// What their keys start with.
    pub run: String,
    /// Their ttl.
    pub ttl: Duration,
}

impl Locks {
    pub(crate) fn check(&self) -> Result<()> {
        if self.ttl < Duration::from_millis(1) || self.ttl > MAX_TTL {
            return Err(Wrong::because("the ttl must be a millisecond at least and a day at most"));
        }
        Ok(())
    }
}

/// One way to lock some keys.
#[derive(Debug)]
pub struct Contender {
    kind: Kind,
    ttl: Duration,
}

enum Kind {
    Dlock { dlock: Dlock, locks: Vec<Mutex> },
    Rslock { manager: rslock::LockManager, keys: Vec<String>, pings: MultiplexedConnection },
    Raw { connection: MultiplexedConnection, keys: Vec<String>, release: redis::Script },
}

impl std::fmt::Debug for Kind {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(match self {
            Kind::Dlock { .. } => "Dlock",
            Kind::Rslock { .. } => "Rslock",
            Kind::Raw { .. } => "Raw",
        })
    }
}

/// A lock that was given.
#[derive(Debug)]
pub enum Held {
    /// By dlock.
    Dlock(Guard),
    /// By rslock.
    Rslock(rslock::Lock),
    /// By hand: the value that shows who holds it.
    Raw(u128),
}

impl Held {
    /// The fencing token; zero where there is none.
    pub fn token(&self) -> u64 {
        match self {
            Held::Dlock(guard) => guard.token().get(),
            Held::Rslock(_) | Held::Raw(_) => 0,
        }
    }
}

/// The value is compared on the server, so that nobody deletes a successor's lock.
const COMPARE_AND_DELETE: &str =
    "if redis.call('GET', KEYS[1]) == ARGV[1] then return redis.call('DEL', KEYS[1]) end return 0";

impl Contender {
    /// Connects, and makes the keys of this run ready: `run:0`, `run:1` and so on.
    ///
    /// # Errors
    /// If the URL cannot be used or the server does not answer.
    pub async fn new(config: &Config, locks: &Locks, keys: usize, tasks: usize) -> Result<Self> {
        let &Locks { peer, ref run, ttl } = locks;
        let kind = match peer {
            None => {
                let mut config = config.clone();
                config.max_waiters = config.max_waiters.max(tasks + 1);
                let dlock = Dlock::builder().config(config).connect().await?;
                let lock = |key| dlock.mutex(format!("{run}:{key}")).ttl(ttl).wait_unlimited();
                Kind::Dlock { locks: (0..keys).map(lock).collect(), dlock }
            }
            Some(Peer::Rslock) => {
                server::reach(config).await?;
                let manager = rslock::LockManager::from_clients(vec![config.redis_client().await?]);
                let pings = server::connect(config).await?;
                Kind::Rslock { manager, keys: server::names(config, run, keys)?, pings }
            }
            Some(Peer::Raw) => {
                server::reach(config).await?;
                let keys = server::names(config, run, keys)?;
                let connection = server::connect(config).await?;
                Kind::Raw { connection, keys, release: redis::Script::new(COMPARE_AND_DELETE) }
            }
        };
        Ok(Contender { kind, ttl })
    }

    /// Takes a lock, waiting as long as it takes.
    ///
    /// # Errors
    /// If the backend fails.
    pub async fn acquire(&self, key: usize) -> Result<Held> {
        Ok(match &self.kind {
            Kind::Dlock { locks, .. } => Held::Dlock(locks[key].lock().await?),
            Kind::Rslock { manager, keys, .. } => {
                Held::Rslock(manager.acquire_no_guard(keys[key].as_str(), self.ttl).await?)
            }
            Kind::Raw { connection, keys, .. } => {
                Held::Raw(set_until_taken(connection.clone(), &keys[key], self.ttl).await?)
            }
        })
    }

    /// Gives a lock back and waits for the answer.
    ///
    /// # Errors
    /// If the backend fails, or the lock was lost.
    pub async fn release(&self, key: usize, held: Held) -> Result<()> {
        match (&self.kind, held) {
            (_, Held::Dlock(guard)) => give_back(guard).await?,
            (_, Held::Rslock(lock)) => lock.release().await,
            (Kind::Raw { connection, keys, release }, Held::Raw(value)) => {
                let mut connection = connection.clone();
                let mut call = release.key(&keys[key]);
                let deleted: i64 =
                    call.arg(value.to_string()).invoke_async(&mut connection).await?;
                if deleted == 0 {
                    bail!("the lock expired while it was held");
                }
            }
            (_, Held::Raw(_)) => {}
        }
        Ok(())
    }

    /// How long a PING takes on the same way to the server.
    ///
    /// # Errors
    /// If the server does not answer.
    pub async fn ping(&self) -> Result<Duration> {
        match &self.kind {
            Kind::Dlock { dlock, .. } => {
                let health = dlock.health().await;
                match health.problem {
                    None => Ok(health.round_trip),
                    Some(problem) => Err(problem.into()),
                }
            }
            Kind::Rslock { pings: connection, .. } | Kind::Raw { connection, .. } => {
                let began = std::time::Instant::now();
                let mut connection = connection.clone();
                let _: String = redis::cmd("PING").query_async(&mut connection).await?;
                Ok(began.elapsed())
            }
        }
    }

    /// Lets what is owed reach the server.
    pub async fn close(&self) {
        if let Kind::Dlock { dlock, .. } = &self.kind {
            dlock.shutdown(Duration::from_secs(2)).await;
        }
    }
}

/// Releases a guard; that its lock was lost before is an error.
///
/// # Errors
/// If it was lost, or the backend fails.
pub async fn give_back(guard: Guard) -> Result<()> {
    match guard.release().await? {
        ReleaseOutcome::Released => Ok(()),
        ReleaseOutcome::AlreadyLost => bail!("the lock was lost while it was held"),
    }
}

async fn set_until_taken(
    mut connection: MultiplexedConnection,
    key: &str,
    ttl: Duration,
) -> Result<u128> {
    let value: u128 = rand::random();
    let ttl = u64::try_from(ttl.as_millis()).context("the ttl is too long")?;
    let mut set = redis::cmd("SET");
    set.arg(key).arg(value.to_string()).arg("NX").arg("PX").arg(ttl);
    let mut pause = 1.0;
    loop {
        let taken: Option<String> = set.query_async(&mut connection).await?;
        if taken.is_some() {
            return Ok(value);
        }
        let jittered = pause * rand::rng().random_range(0.5..1.0);
        tokio::time::sleep(Duration::from_secs_f64(jittered / 1_000.0)).await;
        pause = f64::min(pause * 2.0, 64.0);
    }
}
