//! The locks that are measured: those of dlock, or those of a peer.

use std::time::Duration;

use anyhow::{Context as _, Result, bail};
use dlock::{Config, Dlock, Guard, Lock, MAX_TTL, Mode, Permits, ReleaseOutcome};
use rand::RngExt as _;
use redis::aio::MultiplexedConnection;
use serde::{Deserialize, Serialize};

use crate::sql::{Pool, RowLock};
use crate::{server, usage_error};

/// Another way to lock, to compare dlock with.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Peer {
    /// The crate rslock, used as its documentation says, with its own retry.
    Rslock,
    /// What a careful user writes by hand: `SET NX PX` with a random value and a
    /// compare-and-delete script on one multiplexed connection. The pause between
    /// two tries doubles from 1 to 64 ms, with jitter.
    Raw,
    /// In a SQL database: a row is inserted under a unique key, and again after 100 ms
    /// while it is there.
    Insert,
    /// In a SQL database: one transaction for each lock, which locks a row.
    Row,
}

/// The kind of the locks of a run.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum LockKind {
    /// A mutex.
    Mutex,
    /// The read side of a read-write lock.
    Shared,
    /// A semaphore with this many permits, of which each task takes one.
    Semaphore(u32),
}

/// The options of the locks of a run.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct LockOptions {
    /// The peer to measure; `None`: dlock.
    pub peer: Option<Peer>,
    /// The kind of the locks.
    pub kind: LockKind,
    /// Whether the locks are fair: first come, first served over all processes.
    pub fair: bool,
    /// The prefix of the keys of this run.
    pub key_prefix: String,
    /// The ttl of the locks.
    pub ttl: Duration,
}

impl LockOptions {
    pub(crate) fn check(&self, config: &Config) -> Result<()> {
        if self.ttl < Duration::from_millis(1) || self.ttl > MAX_TTL {
            return Err(usage_error("the ttl must be between 1ms and 24h"));
        }
        if self.peer.is_some() && (self.kind != LockKind::Mutex || self.fair) {
            return Err(usage_error(
                "the peers only have a mutex; leave --peer out, or --permits, --shared and --fair",
            ));
        }
        if matches!(self.peer, Some(Peer::Rslock | Peer::Raw))
            && server::backend(config).starts_with("redis+")
        {
            return Err(usage_error(
                "the peers rslock and raw lock at one Redis and follow no failover; give --url redis://host:port of one server, or leave --peer out",
            ));
        }
        Ok(())
    }

    fn apply<G: dlock::LockGuard>(&self, lock: Lock<G>) -> Lock<G> {
        let lock = lock.ttl(self.ttl).wait_unlimited();
        if self.fair { lock.fair() } else { lock }
    }
}

/// A client that locks the keys of a run.
#[derive(Debug)]
pub struct LockClient {
    implementation: Implementation,
    ttl: Duration,
}

enum Implementation {
    Dlock {
        dlock: Dlock,
        locks: Locks,
    },
    #[cfg(feature = "peers")]
    Rslock {
        manager: rslock::LockManager,
        keys: Vec<String>,
        pings: MultiplexedConnection,
    },
    Raw {
        connection: MultiplexedConnection,
        keys: Vec<String>,
        release: redis::Script,
    },
    Insert {
        pool: Pool,
        keys: Vec<String>,
    },
    Row {
        pool: Pool,
        keys: Vec<String>,
    },
}

/// The locks of dlock, one for each key.
enum Locks {
    Mutex(Vec<Lock<Guard>>),
    Shared { reads: Vec<Lock<Guard>>, writes: Vec<Lock<Guard>> },
    Semaphore { permits: Vec<Lock<Permits>>, of: u32 },
}

impl Locks {
    fn new(dlock: &Dlock, options: &LockOptions, keys: usize) -> Self {
        let names = || (0..keys).map(|key| format!("{}:{key}", options.key_prefix));
        match options.kind {
            LockKind::Mutex => {
                Locks::Mutex(names().map(|key| options.apply(dlock.mutex(key))).collect())
            }
            LockKind::Shared => {
                let side = |side: fn(&dlock::RwLock) -> Lock<Guard>| {
                    names().map(|key| options.apply(side(&dlock.rwlock(key)))).collect()
                };
                Locks::Shared {
                    reads: side(dlock::RwLock::read),
                    writes: side(dlock::RwLock::write),
                }
            }
            LockKind::Semaphore(of) => {
                let permit = |key| options.apply(dlock.semaphore(key, of).permits(1));
                Locks::Semaphore { permits: names().map(permit).collect(), of }
            }
        }
    }
}

impl std::fmt::Debug for Implementation {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(match self {
            Implementation::Dlock { .. } => "Dlock",
            #[cfg(feature = "peers")]
            Implementation::Rslock { .. } => "Rslock",
            Implementation::Raw { .. } => "Raw",
            Implementation::Insert { .. } => "Insert",
            Implementation::Row { .. } => "Row",
        })
    }
}

/// A lock that is held.
#[derive(Debug)]
pub enum HeldLock {
    /// A lock of dlock.
    Dlock(Guard),
    /// A permit of a semaphore of dlock, and how many it has.
    Permit(Permits, u32),
    /// A lock of rslock.
    #[cfg(feature = "peers")]
    Rslock(Box<rslock::Lock>),
    /// A lock written by hand: the random value of its holder.
    Raw(u128),
    /// A row that was inserted.
    Insert,
    /// A row that a transaction has locked.
    Row(Box<RowLock>),
}

impl HeldLock {
    /// The fencing token; 0 if the lock has none.
    pub fn token(&self) -> u64 {
        match self {
            HeldLock::Dlock(guard) => guard.token().get(),
            _ => 0,
        }
    }

    /// How the key is held.
    pub fn mode(&self) -> Mode {
        match self {
            HeldLock::Dlock(guard) => guard.mode(),
            HeldLock::Permit(permit, of) => Mode::Permits { count: permit.count(), of: *of },
            _ => Mode::Exclusive,
        }
    }
}

/// The server compares the value, so that no client deletes the lock of the next holder.
const COMPARE_AND_DELETE: &str =
    "if redis.call('GET', KEYS[1]) == ARGV[1] then return redis.call('DEL', KEYS[1]) end return 0";

impl LockClient {
    /// Connects. The keys are `key_prefix:0`, `key_prefix:1` and so on.
    ///
    /// # Errors
    /// Fails if the URL cannot be used or the server does not answer.
    pub async fn new(
        config: &Config,
        locks: &LockOptions,
        keys: usize,
        tasks: usize,
    ) -> Result<Self> {
        let &LockOptions { peer, ref key_prefix, ttl, .. } = locks;
        let implementation = match peer {
            None => {
                let mut config = config.clone();
                config.max_waiters = Some(config.max_waiters.unwrap_or(10_000).max(tasks + 1));
                let dlock = Dlock::builder().config(config).connect().await?;
                Implementation::Dlock { locks: Locks::new(&dlock, locks, keys), dlock }
            }
            #[cfg(not(feature = "peers"))]
            Some(Peer::Rslock) => {
                return Err(usage_error(
                    "this build has no rslock; build it with --features peers",
                ));
            }
            #[cfg(feature = "peers")]
            Some(Peer::Rslock) => {
                server::check_reachable(config).await?;
                let (clients, keys) = if server::is_quorum(config) {
                    (config.redis_clients().await?, server::quorum_names(key_prefix, keys))
                } else {
                    let keys = server::redis_names(config, key_prefix, keys)?;
                    (vec![config.redis_client().await?], keys)
                };
                let manager = rslock::LockManager::from_clients(clients);
                let pings = server::connect(config).await?;
                Implementation::Rslock { manager, keys, pings }
            }
            Some(Peer::Raw) if server::is_quorum(config) => {
                return Err(usage_error("the peer raw locks at one server; use --peer rslock"));
            }
            Some(Peer::Raw) => {
                server::check_reachable(config).await?;
                let keys = server::redis_names(config, key_prefix, keys)?;
                let connection = server::connect(config).await?;
                Implementation::Raw {
                    connection,
                    keys,
                    release: redis::Script::new(COMPARE_AND_DELETE),
                }
            }
            Some(Peer::Insert) => {
                let pool = Pool::connect(config, tasks, &[]).await?;
                Implementation::Insert { pool, keys: names(key_prefix, keys) }
            }
            Some(Peer::Row) => {
                let keys = names(key_prefix, keys);
                Implementation::Row { pool: Pool::connect(config, tasks, &keys).await?, keys }
            }
        };
        Ok(LockClient { implementation, ttl })
    }

    /// Acquires the lock of a key; waits without a limit. The futures of the peers are on
    /// the heap: they are larger than ours, and would be moved with it.
    ///
    /// # Errors
    /// Fails if the backend fails.
    pub async fn acquire(&self, key: usize) -> Result<HeldLock> {
        Ok(match &self.implementation {
            Implementation::Dlock { locks, .. } => match locks {
                Locks::Mutex(locks) | Locks::Shared { reads: locks, .. } => {
                    HeldLock::Dlock(locks[key].lock().await?)
                }
                Locks::Semaphore { permits, of } => {
                    HeldLock::Permit(permits[key].lock().await?, *of)
                }
            },
            #[cfg(feature = "peers")]
            Implementation::Rslock { manager, keys, .. } => {
                let acquiring = manager.acquire_no_guard(keys[key].as_str(), self.ttl);
                HeldLock::Rslock(Box::new(Box::pin(acquiring).await?))
            }
            Implementation::Raw { connection, keys, .. } => {
                let acquiring = acquire_raw(connection.clone(), &keys[key], self.ttl);
                HeldLock::Raw(Box::pin(acquiring).await?)
            }
            Implementation::Insert { pool, keys } => {
                Box::pin(pool.insert(&keys[key])).await?;
                HeldLock::Insert
            }
            Implementation::Row { pool, keys } => {
                HeldLock::Row(Box::new(Box::pin(pool.lock(&keys[key])).await?))
            }
        })
    }

    /// As [`acquire`](Self::acquire), but read-write locks are acquired for writing.
    ///
    /// # Errors
    /// Fails if the backend fails.
    pub async fn acquire_for_writing(&self, key: usize) -> Result<HeldLock> {
        match &self.implementation {
            Implementation::Dlock { locks: Locks::Shared { writes, .. }, .. } => {
                Ok(HeldLock::Dlock(writes[key].lock().await?))
            }
            _ => self.acquire(key).await,
        }
    }

    /// Releases a lock and waits for the answer.
    ///
    /// # Errors
    /// Fails if the backend fails, or the lock was lost.
    pub async fn release(&self, key: usize, held: HeldLock) -> Result<()> {
        match (&self.implementation, held) {
            (_, HeldLock::Dlock(guard)) => release_guard(guard).await?,
            (_, HeldLock::Permit(permit, _)) => check_released(permit.release().await?)?,
            #[cfg(feature = "peers")]
            (_, HeldLock::Rslock(lock)) => Box::pin(lock.release()).await,
            (Implementation::Raw { connection, keys, release }, HeldLock::Raw(value)) => {
                let mut connection = connection.clone();
                let mut call = release.key(&keys[key]);
                let call = call.arg(value.to_string());
                let deleted: i64 = Box::pin(call.invoke_async(&mut connection)).await?;
                if deleted == 0 {
                    bail!("the lock expired while it was held");
                }
            }
            (Implementation::Insert { pool, keys }, HeldLock::Insert) => {
                Box::pin(pool.delete(&keys[key])).await?;
            }
            (_, HeldLock::Row(lock)) => Box::pin(lock.release()).await?,
            (_, HeldLock::Raw(_) | HeldLock::Insert) => {}
        }
        Ok(())
    }

    /// Measures the round trip of a PING through the same client.
    ///
    /// # Errors
    /// Fails if the server does not answer.
    pub async fn ping(&self) -> Result<Duration> {
        match &self.implementation {
            Implementation::Dlock { dlock, .. } => {
                let health = dlock.health().await;
                match health.problem {
                    None => Ok(health.round_trip),
                    Some(problem) => Err(problem.into()),
                }
            }
            #[cfg(feature = "peers")]
            Implementation::Rslock { pings, .. } => ping(pings).await,
            Implementation::Raw { connection, .. } => ping(connection).await,
            Implementation::Insert { pool, .. } | Implementation::Row { pool, .. } => {
                pool.ping().await
            }
        }
    }

    /// Releases what is still held and disconnects.
    pub async fn close(&self) {
        match &self.implementation {
            Implementation::Dlock { dlock, .. } => {
                dlock.shutdown(Duration::from_secs(2)).await;
            }
            Implementation::Insert { pool, keys } | Implementation::Row { pool, keys } => {
                pool.clean_up(keys).await;
            }
            _ => {}
        }
    }
}

async fn ping(connection: &MultiplexedConnection) -> Result<Duration> {
    let began = std::time::Instant::now();
    let _: String = redis::cmd("PING").query_async(&mut connection.clone()).await?;
    Ok(began.elapsed())
}

fn names(key_prefix: &str, keys: usize) -> Vec<String> {
    (0..keys).map(|key| format!("{key_prefix}:{key}")).collect()
}

/// Releases a guard.
///
/// # Errors
/// Fails if the lock was lost before, or the backend fails.
pub async fn release_guard(guard: Guard) -> Result<()> {
    check_released(guard.release().await?)
}

fn check_released(outcome: ReleaseOutcome) -> Result<()> {
    match outcome {
        ReleaseOutcome::Released => Ok(()),
        ReleaseOutcome::AlreadyLost => bail!("the lock was lost while it was held"),
    }
}

async fn acquire_raw(
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
