//! The builder of a client.

use std::fmt;
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use super::{Dlock, Handle};
#[cfg(feature = "redis")]
use crate::backend::redis::{Credentials, Provider, UserConnection};
use crate::backend::{Backend, Capabilities};
use crate::claim::Holder;
use crate::clock::Clock;
use crate::config::{Config, Settings};
use crate::driver::Core;
use crate::error::{Error, Result};
use crate::extension::ExtensionMap;
use crate::observe::{Event, Hook, Observer};
use crate::planted_bug::PlantedBug;

/// A builder of a [`Dlock`]: [`Dlock::builder`].
///
/// ```
/// # #[tokio::main(flavor = "current_thread")] async fn main() -> dlock::Result<()> {
/// use std::time::Duration;
/// use dlock::Dlock;
///
/// let dlock = Dlock::builder()
///     .url("memory://")
///     .namespace("shop")
///     .ttl(Duration::from_secs(10))
///     .connect()
///     .await?;
/// # Ok(()) }
/// ```
pub struct DlockBuilder {
    config: Result<Config>,
    backend: Option<Arc<dyn Backend>>,
    #[cfg(feature = "redis")]
    redis: Option<UserConnection>,
    #[cfg(feature = "redis")]
    credentials: Option<Provider>,
    #[cfg(any(feature = "mysql", feature = "postgres", feature = "sqlite"))]
    pub(super) sql: Option<super::builder_sql::SqlBackend>,
    hook: Option<Hook>,
    planted: PlantedBug,
    #[cfg(test)]
    pub(super) clock: Option<Clock>,
}

impl DlockBuilder {
    pub(super) fn new() -> Self {
        DlockBuilder {
            config: Ok(Config::default()),
            backend: None,
            #[cfg(feature = "redis")]
            redis: None,
            #[cfg(feature = "redis")]
            credentials: None,
            #[cfg(any(feature = "mysql", feature = "postgres", feature = "sqlite"))]
            sql: None,
            hook: None,
            planted: PlantedBug::default(),
            #[cfg(test)]
            clock: None,
        }
    }

    /// Merges this configuration. Options that are set in it override earlier values;
    /// options that are not set keep them.
    ///
    /// ```
    /// # #[tokio::main(flavor = "current_thread")] async fn main() -> dlock::Result<()> {
    /// use dlock::{Config, Dlock};
    ///
    /// let dlock = Dlock::builder()
    ///     .url("memory://") // if DLOCK_URL is not set
    ///     .config(Config::from_env("DLOCK_")?)
    ///     .connect()
    ///     .await?;
    /// # Ok(()) }
    /// ```
    #[must_use]
    pub fn config(self, config: Config) -> Self {
        self.put(|own| own.merge(config))
    }

    /// Sets the URL of the backend; its query may set other options.
    #[must_use]
    pub fn url(self, url: &str) -> Self {
        self.set(|config| config.set("url", url))
    }

    /// Sets the namespace, which separates the keys from those of other applications.
    #[must_use]
    pub fn namespace(self, namespace: &str) -> Self {
        self.set(|config| config.set("namespace", namespace))
    }

    /// Sets how long a lock outlives its process, unless the lock sets its own ttl.
    #[must_use]
    pub fn ttl(self, ttl: Duration) -> Self {
        self.put(|config| config.ttl = Some(ttl))
    }

    /// Sets how long `lock()` waits, unless the lock sets its own wait.
    #[must_use]
    pub fn wait(self, wait: Duration) -> Self {
        self.put(|config| config.wait = Some(Some(wait)))
    }

    /// Lets `lock()` wait without limit, unless the lock sets its own wait.
    #[must_use]
    pub fn wait_unlimited(self) -> Self {
        self.put(|config| config.wait = Some(None))
    }

    /// Sets how long one call to the backend may take.
    #[must_use]
    pub fn call_timeout(self, timeout: Duration) -> Self {
        self.put(|config| config.call_timeout = Some(timeout))
    }

    /// Sets how often and for how long a lock is handed over between tasks of this
    /// process before other processes get it.
    #[must_use]
    pub fn handovers(self, count: u32, time: Duration) -> Self {
        self.put(|config| {
            config.max_handovers = Some(count);
            config.max_handover_time = Some(time);
        })
    }

    /// Sets how long a broken lock stays taken, so that its holder is notified before
    /// somebody else is let in.
    #[must_use]
    pub fn break_delay(self, delay: Duration) -> Self {
        self.put(|config| config.break_delay = Some(delay))
    }

    /// Sets how many tasks of this process may wait for one key.
    #[must_use]
    pub fn max_waiters(self, waiters: usize) -> Self {
        self.put(|config| config.max_waiters = Some(waiters))
    }

    /// Sets the name under which operators see this client.
    #[must_use]
    pub fn client_name(self, name: impl Into<String>) -> Self {
        self.put(|config| config.client_name = Some(name.into()))
    }

    /// Sets the file that the password is read from.
    #[must_use]
    pub fn password_file(self, path: impl Into<PathBuf>) -> Self {
        self.put(|config| config.password_file = Some(path.into()))
    }

    /// Keeps locks as another program does, so that both exclude each other: `redisson` at
    /// a `redis://` URL; `mutex`, `rwlock` or `kazoo` at a `zookeeper://` URL; `consul-lock`
    /// or `lock-key` at a `consul://` URL. The same as `layout` in the URL; docs/interop.md
    /// lists which programs share which locks.
    #[must_use]
    pub fn layout(self, layout: impl Into<String>) -> Self {
        self.put(|config| config.layout = Some(layout.into()))
    }

    /// Uses your own backend instead of the URL's. It serves this client only.
    #[must_use]
    pub fn backend(mut self, backend: impl Backend) -> Self {
        self.backend = Some(Arc::new(backend));
        self
    }

    /// Uses the server of this `redis::Client` instead of the URL's. dlock opens
    /// its own two connections from it, with the time-outs and the thread that locks
    /// need.
    #[cfg(feature = "redis")]
    #[must_use]
    pub fn redis(mut self, client: redis::Client) -> Self {
        self.redis = Some(UserConnection::Client(client));
        self
    }

    /// Uses the server of this `redis::Client`, and sends commands through a
    /// connection that the program already has. Only notices have a connection of
    /// their own, opened from the client.
    ///
    /// The given connection lives in the runtime that made it: when that runtime is
    /// blocked or ends, locks are no longer renewed. Its time-out should be as long
    /// as [`call_timeout`](Self::call_timeout).
    #[cfg(feature = "redis")]
    #[must_use]
    pub fn redis_manager(
        mut self,
        client: redis::Client,
        manager: redis::aio::ConnectionManager,
    ) -> Self {
        self.redis = Some(UserConnection::Manager(client, manager));
        self
    }

    /// Uses the primary that this `redis::sentinel::SentinelClient` finds, instead of the
    /// URL's server. It is asked again for each connection.
    ///
    /// A `redis+sentinel://` URL does more: it believes the newest of all answers and not
    /// the first one, and it leaves a demoted primary as soon as a Sentinel says so. Here
    /// that is noticed when the old primary refuses a request or its connection breaks.
    #[cfg(feature = "redis")]
    #[must_use]
    pub fn redis_sentinel(mut self, client: redis::sentinel::SentinelClient) -> Self {
        self.redis = Some(UserConnection::Sentinel(Arc::new(tokio::sync::Mutex::new(client))));
        self
    }

    /// Calls `provider` for user and password before each connection to Redis, for
    /// passwords and tokens that change. It may block, as here: it runs on a thread of its own,
    /// and not on the one that renews locks. If it takes longer than a connection may take, it is
    /// called again for the next attempt.
    ///
    /// ```
    /// use dlock::Dlock;
    /// use dlock::backend::redis::Credentials;
    ///
    /// # fn example() -> dlock::Result<Dlock> {
    /// Dlock::builder()
    ///     .url("redis://localhost")
    ///     .redis_credentials(|| async {
    ///         let password = std::fs::read_to_string("/run/secrets/redis")?;
    ///         Ok::<_, std::io::Error>(Credentials { user: Some("shop".into()), password })
    ///     })
    ///     .connect_lazy()
    /// # }
    /// ```
    #[cfg(feature = "redis")]
    #[must_use]
    pub fn redis_credentials<P, F, E>(mut self, provider: P) -> Self
    where
        P: Fn() -> F + Send + Sync + 'static,
        F: Future<Output = std::result::Result<Credentials, E>> + Send + 'static,
        E: std::error::Error + Send + Sync + 'static,
    {
        self.credentials = Some(Arc::new(move || {
            let asked = provider();
            Box::pin(async move {
                asked.await.map_err(|error| {
                    Error::new(crate::ErrorKind::Unavailable, crate::Operation::Connect)
                        .with_message("the provider of Redis credentials failed; it is called again with the next connection")
                        .with_source(error)
                })
            })
        }));
        self
    }

    /// Calls `hook` with every [`Event`] of the client's locks, on the task or thread
    /// where it happens. The hook must not block.
    #[must_use]
    pub fn on_event(mut self, hook: impl Fn(&Event<'_>) + Send + Sync + 'static) -> Self {
        self.hook = Some(Arc::new(hook));
        self
    }

    /// Adds this bug to the client, for tests that must find it.
    #[cfg(feature = "simulation")]
    #[doc(hidden)]
    #[must_use]
    pub fn plant(mut self, bug: crate::planted_bug::Bug) -> Self {
        self.planted = PlantedBug::with(Some(bug));
        self
    }

    fn set(mut self, change: impl FnOnce(&mut Config) -> Result<()>) -> Self {
        self.config = self.config.and_then(|mut config| change(&mut config).map(|()| config));
        self
    }

    pub(super) fn put(self, change: impl FnOnce(&mut Config)) -> Self {
        self.set(|config| {
            change(config);
            Ok(())
        })
    }

    /// Makes the client and waits until its backend answers.
    ///
    /// ```
    /// # #[tokio::main(flavor = "current_thread")] async fn main() -> dlock::Result<()> {
    /// let dlock = dlock::Dlock::builder().url("memory://").namespace("shop").connect().await?;
    /// assert!(dlock.health().await.is_ok());
    /// # Ok(()) }
    /// ```
    ///
    /// # Errors
    /// `Config` if an option is not valid or no backend is named, `Unavailable` if the backend does not
    /// answer, `Denied` if it refuses the credentials.
    ///
    /// # Cancel safety
    /// Dropping the future closes the connection and leaves nothing behind.
    pub async fn connect(self) -> Result<Dlock> {
        let dlock = self.make()?;
        dlock.handle.core.ping().await?;
        dlock.log("connected");
        Ok(dlock)
    }

    /// Makes the client without waiting for its backend.
    ///
    /// # Errors
    /// `Config` if an option is not valid or no backend is named.
    pub fn connect_lazy(self) -> Result<Dlock> {
        let dlock = self.make()?;
        dlock.log("connects when it is first used");
        Ok(dlock)
    }

    fn make(self) -> Result<Dlock> {
        let given = self.config?;
        let ttl_is_set = given.ttl.is_some();
        let mut config = Settings::from(given);
        config.check()?;
        let backend = match self.backend {
            Some(backend) => backend,
            #[cfg(feature = "redis")]
            None if self.redis.is_some() || self.credentials.is_some() => {
                redis(self.redis, self.credentials, &config)?
            }
            #[cfg(any(feature = "mysql", feature = "postgres", feature = "sqlite"))]
            None if self.sql.is_some() => {
                let make = self.sql.map(|make| make(&config));
                make.unwrap_or_else(|| config.backend())?
            }
            None => config.backend()?,
        };
        let capabilities = backend.capabilities();
        config.ttl = honoured_ttl(&capabilities, config.ttl, ttl_is_set)?;
        let holder = Arc::new(this_process(config.client_name.clone()));
        let observer = Observer::new(self.hook);
        let clock = if capabilities.remote { Clock::boot() } else { Clock::tokio() };
        #[cfg(test)]
        let clock = self.clock.unwrap_or(clock);
        let core = Core::start(
            backend,
            clock,
            holder.client,
            config.limits(&capabilities),
            config.call_timeout,
            observer,
            self.planted,
        )?;
        let extensions = ExtensionMap::default();
        let shut_down = Arc::default();
        let handle = Handle { core, config, holder, capabilities, extensions, shut_down };
        Ok(Dlock { handle: Arc::new(handle) })
    }
}

impl Dlock {
    /// Says once for each client where its locks are, so that nobody has to guess.
    fn log(&self, message: &'static str) {
        let Handle { config, capabilities, .. } = &*self.handle;
        let wait = config.wait.map(humantime::format_duration);
        tracing::info!(
            target: "dlock::client",
            backend = capabilities.name,
            address = config.address().as_deref().unwrap_or("given by the program"),
            namespace = config.namespace,
            ttl = %humantime::format_duration(config.ttl),
            wait = wait.map_or_else(|| "unlimited".to_owned(), |wait| wait.to_string()),
            "{message}"
        );
    }
}

/// The ttl of locks that do not set their own: what was said, rounded up to what the
/// backend can honour; or, if nothing was said, what is nearest to the default.
fn honoured_ttl(capabilities: &Capabilities, ttl: Duration, is_said: bool) -> Result<Duration> {
    let Capabilities { name, ttl: support, .. } = capabilities;
    if !is_said {
        return Ok(support.nearest(ttl));
    }
    support.honoured(ttl).ok_or_else(|| Error::config(support.refusal(name, ttl)))
}

/// The Redis backend of the given connection, else that of the URL with these
/// credentials.
#[cfg(feature = "redis")]
fn redis(
    connection: Option<UserConnection>,
    credentials: Option<Provider>,
    config: &Settings,
) -> Result<Arc<dyn Backend>> {
    match (connection, credentials) {
        (Some(connection), _) => config.redis_over(connection),
        (None, Some(credentials)) => config.redis_with(credentials),
        (None, None) => config.backend(),
    }
}

impl fmt::Debug for DlockBuilder {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("DlockBuilder").field("config", &self.config).finish_non_exhaustive()
    }
}

/// The holder that stands for a new client of this process.
fn this_process(name: Option<String>) -> Holder {
    static NEXT: AtomicU64 = AtomicU64::new(1);
    let host = gethostname::gethostname().to_string_lossy().into_owned();
    let pid = std::process::id();
    let name = name.unwrap_or_else(|| {
        let place = std::env::var("POD_NAME").ok().filter(|pod| !pod.is_empty());
        format!("{}-{pid}", place.as_deref().unwrap_or(&host))
    });
    let client = NEXT.fetch_add(1, Ordering::Relaxed);
    Holder { client, name, host, pid, tags: Vec::new() }
}
