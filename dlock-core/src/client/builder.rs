//! How a client is put together.

use std::fmt;
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use super::{Dlock, Handle};
use crate::backend::Backend;
#[cfg(feature = "redis")]
use crate::backend::redis::{Credentials, Given, Provider, Redis};
use crate::claim::Holder;
use crate::config::Config;
use crate::driver::Core;
use crate::error::Result;
#[cfg(feature = "redis")]
use crate::error::{Error, ErrorKind, Operation};
use crate::extension::ExtensionMap;
use crate::observe::{Event, Hook, Observer};
use crate::planted_bug::PlantedBug;

/// Puts a [`Dlock`] together.
pub struct DlockBuilder {
    config: Result<Config>,
    backend: Option<Arc<dyn Backend>>,
    #[cfg(feature = "redis")]
    redis: Option<Given>,
    #[cfg(feature = "redis")]
    credentials: Option<Provider>,
    hook: Option<Hook>,
    planted: PlantedBug,
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
            hook: None,
            planted: PlantedBug::default(),
        }
    }

    /// Starts from this configuration.
    #[must_use]
    pub fn config(mut self, config: Config) -> Self {
        self.config = Ok(config);
        self
    }

    /// Where the locks are kept; the query may set other options.
    #[must_use]
    pub fn url(self, url: &str) -> Self {
        self.set(|config| config.set("url", url))
    }

    /// Keeps the keys apart from other applications'.
    #[must_use]
    pub fn namespace(self, namespace: &str) -> Self {
        self.set(|config| config.set("namespace", namespace))
    }

    /// How long a lock outlives its process, unless the lock says otherwise.
    #[must_use]
    pub fn ttl(self, ttl: Duration) -> Self {
        self.put(|config| config.ttl = ttl)
    }

    /// How long `lock()` waits, unless the lock says otherwise.
    #[must_use]
    pub fn wait(self, wait: Duration) -> Self {
        self.put(|config| config.wait = Some(wait))
    }

    /// `lock()` waits for as long as it takes, unless the lock says otherwise.
    #[must_use]
    pub fn wait_unlimited(self) -> Self {
        self.put(|config| config.wait = None)
    }

    /// How long one call to the backend may take.
    #[must_use]
    pub fn call_timeout(self, timeout: Duration) -> Self {
        self.put(|config| config.call_timeout = timeout)
    }

    /// How often and how long a lock is passed on inside the process before
    /// others get a chance.
    #[must_use]
    pub fn handovers(self, count: u32, time: Duration) -> Self {
        self.put(|config| {
            config.max_handovers = count;
            config.max_handover_time = time;
        })
    }

    /// How many tasks of this process may wait for one key.
    #[must_use]
    pub fn max_waiters(self, waiters: usize) -> Self {
        self.put(|config| config.max_waiters = waiters)
    }

    /// What operators see.
    #[must_use]
    pub fn client_name(self, name: impl Into<String>) -> Self {
        self.put(|config| config.client_name = Some(name.into()))
    }

    /// A file with the password.
    #[must_use]
    pub fn password_file(self, path: impl Into<PathBuf>) -> Self {
        self.put(|config| config.password_file = Some(path.into()))
    }

    /// A backend of your own instead of the URL's. It serves this client alone.
    #[must_use]
    pub fn backend(mut self, backend: impl Backend) -> Self {
        self.backend = Some(Arc::new(backend));
        self
    }

    /// The Redis that this client of the `redis` crate is for, instead of the
    /// URL's. dlock makes its own two connections from it, with the time-outs and
    /// the thread that locks need.
    #[cfg(feature = "redis")]
    #[must_use]
    pub fn redis(mut self, client: redis::Client) -> Self {
        self.redis = Some(Given::Client(client));
        self
    }

    /// As [`redis`](Self::redis), but commands go through a connection that the
    /// program has already; only notices have a connection of their own, made
    /// from the client.
    ///
    /// That connection lives in the runtime that made it: when this is blocked or
    /// ends, locks are no longer renewed. Its time-out should be as long as
    /// [`call_timeout`](Self::call_timeout).
    #[cfg(feature = "redis")]
    #[must_use]
    pub fn redis_manager(
        mut self,
        client: redis::Client,
        manager: redis::aio::ConnectionManager,
    ) -> Self {
        self.redis = Some(Given::Manager(client, manager));
        self
    }

    /// Asks this for user and password whenever a connection to Redis is made,
    /// for passwords and tokens that change.
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
                    Error::new(ErrorKind::Unavailable, Operation::Connect)
                        .saying("the provider of credentials failed; it is asked again")
                        .because(error)
                })
            })
        }));
        self
    }

    /// Calls this with everything that happens to a lock of the client, on the
    /// task or thread where it happens. It must not block.
    #[must_use]
    pub fn on_event(mut self, hook: impl Fn(&Event<'_>) + Send + Sync + 'static) -> Self {
        self.hook = Some(Arc::new(hook));
        self
    }

    /// A client with this bug, for tests that must find it.
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

    fn put(self, change: impl FnOnce(&mut Config)) -> Self {
        self.set(|config| {
            change(config);
            Ok(())
        })
    }

    /// The client, once its backend answers.
    ///
    /// # Errors
    /// As [`Dlock::connect`].
    ///
    /// # Cancel safety
    /// As [`Dlock::connect`].
    pub async fn connect(self) -> Result<Dlock> {
        let dlock = self.connect_lazy()?;
        dlock.handle.core.ping().await?;
        Ok(dlock)
    }

    /// The client, whether its backend answers or not.
    ///
    /// # Errors
    /// `Config` if an option is out of bounds.
    pub fn connect_lazy(self) -> Result<Dlock> {
        let config = self.config?;
        config.check()?;
        let backend = match self.backend {
            Some(backend) => backend,
            #[cfg(feature = "redis")]
            None if self.redis.is_some() || self.credentials.is_some() => {
                redis(self.redis, self.credentials, &config)?
            }
            None => config.backend()?,
        };
        let capabilities = backend.capabilities();
        let holder = Arc::new(this_process(config.client_name.clone()));
        let observer = Observer::new(self.hook);
        let core = Core::start(
            backend,
            holder.client,
            config.limits(),
            config.call_timeout,
            observer,
            self.planted,
        )?;
        let extensions = ExtensionMap::default();
        let handle = Handle { core, config, holder, capabilities, extensions };
        Ok(Dlock { handle: Arc::new(handle) })
    }
}

/// The Redis that the user has, else that of the URL with these credentials.
#[cfg(feature = "redis")]
fn redis(
    given: Option<Given>,
    credentials: Option<Provider>,
    config: &Config,
) -> Result<Arc<dyn Backend>> {
    match (given, credentials) {
        (Some(given), _) => Ok(Arc::new(Redis::given(given, config))),
        (None, Some(credentials)) => config.redis_with(credentials),
        (None, None) => config.backend(),
    }
}

impl fmt::Debug for DlockBuilder {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("DlockBuilder").field("config", &self.config).finish_non_exhaustive()
    }
}

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
