//! What a crate built beside the lock may use of a client: its backend, its
//! driver's thread and a place for its own state. Hidden, and not covered by
//! semantic versioning.

use std::any::{Any, TypeId};
use std::fmt;
use std::future::Future;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use hashbrown::HashMap;
use parking_lot::Mutex;

#[cfg(feature = "axum")]
pub use crate::axum::refusal;
use crate::backend::memory::Memory;
pub use crate::batch_queue::{BatchLimits, BatchQueue, Full, Priority, Slot};
use crate::client::Handle;
use crate::clock::Moment;
use crate::driver::Core;
use crate::error::Result;
pub use crate::observe::outage::{Counts as OutageCounts, Line as OutageLine, Outage};

#[cfg(any(feature = "mysql", feature = "postgres", feature = "sqlite"))]
pub use crate::backend::sql::extension as sql;

/// One value of each type, made when first asked for.
#[derive(Default)]
pub struct ExtensionMap(Mutex<HashMap<TypeId, Arc<dyn Any + Send + Sync>>>);

impl ExtensionMap {
    /// The value of this type.
    pub fn get<T: Default + Send + Sync + 'static>(&self) -> Arc<T> {
        let mut values = self.0.lock();
        let value = values.entry(TypeId::of::<T>()).or_insert_with(|| Arc::new(T::default()));
        // By its type id it is one; a fresh one otherwise, rather than a panic.
        value.clone().downcast().unwrap_or_default()
    }
}

impl fmt::Debug for ExtensionMap {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("ExtensionMap")
    }
}

/// A client, seen by a crate beside it. Does not keep the client alive.
#[derive(Clone)]
pub struct ClientExtension {
    core: Arc<Core>,
    namespace: String,
    call_timeout: Duration,
    shut_down: Arc<AtomicBool>,
}

impl ClientExtension {
    pub(crate) fn new(handle: &Handle) -> Self {
        ClientExtension {
            core: handle.core.clone(),
            namespace: handle.config.namespace.clone(),
            call_timeout: handle.config.call_timeout,
            shut_down: handle.shut_down.clone(),
        }
    }

    /// What keeps this application's keys apart.
    pub fn namespace(&self) -> &str {
        &self.namespace
    }

    /// How long one call to the backend may take.
    pub fn call_timeout(&self) -> Duration {
        self.call_timeout
    }

    /// Whether `shutdown` was called on the client.
    pub fn is_shut_down(&self) -> bool {
        self.shut_down.load(Ordering::Acquire)
    }

    /// The client's clock: on the embedded backend one that a test can pause.
    pub fn now(&self) -> Moment {
        self.core.now()
    }

    /// What all clients of this embedded store share; `None` if it is another backend.
    pub fn embedded<T: Default + Send + Sync + 'static>(&self) -> Option<Arc<T>> {
        self.backend::<Memory>().map(|memory| memory.extensions().get())
    }

    /// The backend, if it is of this type.
    fn backend<B: 'static>(&self) -> Option<&B> {
        self.core.backend().as_any()?.downcast_ref()
    }

    /// Runs a future in the driver's runtime, where the connections live.
    ///
    /// # Errors
    /// `Unavailable` if the driver has ended, or there is none.
    pub fn spawn(&self, job: impl Future<Output = ()> + Send + 'static) -> Result<()> {
        self.core.spawn(job)
    }

    /// Runs a script on the client's Redis connection. To be polled in the
    /// driver's runtime: see [`spawn`](Self::spawn).
    ///
    /// # Errors
    /// `Unknown` if it may have been applied; any other kind: it was not.
    #[cfg(feature = "redis")]
    pub async fn script(
        &self,
        script: &'static crate::backend::redis::extension::Script,
        keys: &[&str],
        arguments: &[&[u8]],
    ) -> Result<redis::Value> {
        self.in_time(self.redis()?.run_for_extension(script, keys, arguments)).await
    }

    /// Sends a command on a key of this name; see [`script`](Self::script).
    ///
    /// # Errors
    /// As [`script`](Self::script).
    #[cfg(feature = "redis")]
    pub async fn command(&self, name: &str, command: &[&[u8]]) -> Result<redis::Value> {
        self.in_time(self.redis()?.command_for_extension(name, command)).await
    }

    /// Sends a command to every server that has keys; see [`script`](Self::script).
    ///
    /// # Errors
    /// As [`script`](Self::script).
    #[cfg(feature = "redis")]
    pub async fn command_everywhere(&self, command: &[&[u8]]) -> Result<Vec<redis::Value>> {
        self.in_time(self.redis()?.command_everywhere(command)).await
    }

    /// Whether the backend is a Redis Cluster, in which a slot may move while a script
    /// runs.
    #[cfg(feature = "redis")]
    pub fn is_redis_cluster(&self) -> bool {
        self.redis().is_ok_and(crate::backend::redis::Redis::is_cluster)
    }

    /// The server that serves a key of this name; empty if there is only one. To be polled
    /// in the driver's runtime: see [`spawn`](Self::spawn).
    ///
    /// # Errors
    /// If no node of a cluster tells, or none serves the key.
    #[cfg(feature = "redis")]
    pub async fn redis_server_of(&self, name: &str) -> Result<String> {
        self.in_time(self.redis()?.server_of(name)).await
    }

    /// The name under which Redis keeps what is beside the lock of this key.
    ///
    /// # Errors
    /// `Unsupported` if the backend is not Redis.
    #[cfg(feature = "redis")]
    pub fn redis_name(&self, key: &crate::Key) -> Result<String> {
        self.redis().map(|redis| redis.name_for_extension(key))
    }

    #[cfg(feature = "redis")]
    fn redis(&self) -> Result<&crate::backend::redis::Redis> {
        use crate::error::{Error, ErrorKind, Operation};

        self.backend().ok_or_else(|| {
            Error::new(ErrorKind::Unsupported, Operation::Inventory)
                .with_message("the backend is not Redis")
        })
    }

    /// The words of SQL of the client's database; `None` if the backend is another one.
    #[cfg(any(feature = "mysql", feature = "postgres", feature = "sqlite"))]
    pub fn sql_dialect(&self) -> Option<sql::Dialect> {
        self.database().map(sql::SqlDatabase::dialect)
    }

    /// Does a job in a transaction of the client's database. To be polled in the driver's
    /// runtime: see [`spawn`](Self::spawn).
    ///
    /// # Errors
    /// `Unknown` if it may have been committed; any other kind: it was not.
    #[cfg(any(feature = "mysql", feature = "postgres", feature = "sqlite"))]
    pub async fn sql<J: sql::Job>(&self, job: &J) -> Result<J::Output> {
        use crate::error::{Error, ErrorKind, Operation};

        let database = self.database().ok_or_else(|| {
            Error::new(ErrorKind::Unsupported, Operation::Inventory)
                .with_message("the backend is not a SQL database")
        })?;
        sql::run(database, job).await
    }

    #[cfg(any(feature = "mysql", feature = "postgres", feature = "sqlite"))]
    fn database(&self) -> Option<&dyn sql::SqlDatabase> {
        #[cfg(feature = "postgres")]
        if let Some(postgres) = self.backend::<crate::backend::sql::Postgres>() {
            return Some(postgres);
        }
        #[cfg(feature = "mysql")]
        if let Some(mysql) = self.backend::<crate::backend::sql::MySql>() {
            return Some(mysql);
        }
        #[cfg(feature = "sqlite")]
        if let Some(sqlite) = self.backend::<crate::backend::sql::Sqlite>() {
            return Some(sqlite);
        }
        None
    }

    #[cfg(feature = "redis")]
    async fn in_time<T>(&self, call: impl Future<Output = Result<T>>) -> Result<T> {
        use crate::error::{Error, ErrorKind, Operation};

        tokio::time::timeout(self.call_timeout, call).await.unwrap_or_else(|_| {
            Err(Error::new(ErrorKind::Unknown, Operation::Inventory).with_message(format!(
                "no answer within {:?}; the change may or may not have been made",
                self.call_timeout
            )))
        })
    }
}

impl fmt::Debug for ClientExtension {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("ClientExtension")
            .field("namespace", &self.namespace)
            .finish_non_exhaustive()
    }
}
