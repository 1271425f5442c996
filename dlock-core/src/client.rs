//! The client.

use std::fmt;
use std::path::PathBuf;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, OnceLock};
use std::time::Duration;

#[cfg(feature = "redis")]
use crate::backend::redis::{Credentials, Given, Provider, Redis};
use crate::backend::{Backend, Capabilities, Cursor, KeyState, Page};
use crate::beside::{Beside, Extensions};
use crate::claim::{Holder, Mode};
use crate::config::Config;
use crate::driver::Core;
use crate::engine::{Seen, Standing};
use crate::error::{Error, ErrorKind, Operation, Result};
use crate::guard::State;
use crate::key::{IntoKey, Key};
use crate::observe::{Event, Hook, Observer};
use crate::plant::Planted;
use crate::primitive::{Lock, MultiLock, Mutex, RwLock, Semaphore};

/// A client of a lock backend. Cheap to clone; clones share everything.
///
/// When the last clone and the last guard are gone, releases that are still owed
/// are tried for 100 ms more in the background. To be sure of them before the
/// process exits, await [`Dlock::shutdown`].
#[derive(Clone, Debug)]
pub struct Dlock {
    handle: Arc<Handle>,
}

/// What clones and guards share.
pub(crate) struct Handle {
    pub(crate) core: Arc<Core>,
    pub(crate) config: Config,
    pub(crate) holder: Arc<Holder>,
    capabilities: Capabilities,
    extensions: Extensions,
}

impl Handle {
    pub(crate) fn client(&self) -> u64 {
        self.holder.client
    }

    pub(crate) fn is_fifo(&self) -> bool {
        self.capabilities.fifo
    }

    pub(crate) fn can_release_after(&self) -> bool {
        self.capabilities.release_after
    }

    pub(crate) fn supports(&self, mode: Mode) -> bool {
        match mode {
            Mode::Exclusive => true,
            Mode::Shared => self.capabilities.shared,
            Mode::Permits { .. } => self.capabilities.permits,
        }
    }
}

impl fmt::Debug for Handle {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Handle")
            .field("config", &self.config)
            .field("name", &self.holder.name)
            .finish_non_exhaustive()
    }
}

impl Drop for Handle {
    fn drop(&mut self) {
        self.core.close();
    }
}

impl Dlock {
    /// A client of the backend that the URL names, once that answers.
    ///
    /// ```
    /// # #[tokio::main(flavor = "current_thread")] async fn main() -> dlock_core::Result<()> {
    /// use dlock_core::{Dlock, key};
    ///
    /// let dlock = Dlock::connect("memory://").await?;
    /// let id = 7;
    /// let guard = dlock.mutex(key!("order:{id}")).lock().await?;
    /// println!("write with token {}", guard.token());
    /// let _ = guard.release().await?;
    /// # Ok(()) }
    /// ```
    ///
    /// # Errors
    /// `Config` for a bad URL, `Unavailable` or `Denied` if the backend cannot be
    /// used.
    ///
    /// # Cancel safety
    /// Nothing is left when it is dropped.
    pub async fn connect(url: &str) -> Result<Self> {
        Self::builder().url(url).connect().await
    }

    /// A client that does not wait for its backend: locks can be asked for at
    /// once and are granted when it answers.
    ///
    /// # Errors
    /// `Config` for a bad URL.
    pub fn connect_lazy(url: &str) -> Result<Self> {
        Self::builder().url(url).connect_lazy()
    }

    /// A client put together by hand.
    pub fn builder() -> Builder {
        Builder {
            config: Ok(Config::default()),
            backend: None,
            #[cfg(feature = "redis")]
            redis: None,
            #[cfg(feature = "redis")]
            credentials: None,
            hook: None,
            planted: Planted::default(),
        }
    }

    /// A lock that one task at a time holds, on any machine.
    pub fn mutex(&self, key: impl IntoKey) -> Mutex {
        Lock::new(self.handle.clone(), key.into_key(), Mode::Exclusive)
    }

    /// A lock that one writer or any number of readers hold.
    pub fn rwlock(&self, key: impl IntoKey) -> RwLock {
        RwLock::new(self.handle.clone(), key.into_key())
    }

    /// `capacity` permits, in a key space apart from the locks.
    ///
    /// Everybody should bring the same capacity: each claim is checked against
    /// its own.
    pub fn semaphore(&self, key: impl IntoKey, capacity: u32) -> Semaphore {
        Semaphore::new(self.handle.clone(), key.into_key(), capacity)
    }

    /// Several keys at once, exclusively, without deadlock.
    pub fn all_of<K: IntoKey>(&self, keys: impl IntoIterator<Item = K>) -> MultiLock {
        MultiLock::new(self.handle.clone(), keys.into_iter().map(IntoKey::into_key).collect())
    }

    /// Who holds a key and who waits for it, at the backend.
    ///
    /// # Errors
    /// `Unavailable` if the backend does not answer.
    ///
    /// # Cancel safety
    /// It only looks.
    pub async fn inspect(&self, key: impl IntoKey) -> Result<KeyState> {
        let key = key.into_key()?;
        let core = &self.handle.core;
        let (backend, asked) = (core.backend().clone(), key.clone());
        let looking = async move { backend.inspect(&asked).await };
        core.ask(Operation::Inspect, looking).await.map_err(|error| error.on(&key))
    }

    /// Some of the keys in use that start with `prefix`; go on with `page.next`.
    ///
    /// # Errors
    /// `Unavailable` if the backend does not answer, `Unsupported` if it keeps no list.
    ///
    /// # Cancel safety
    /// It only looks.
    pub async fn list(&self, prefix: &str, cursor: Cursor) -> Result<Page> {
        self.operators(Operation::List)?;
        let core = &self.handle.core;
        let (backend, prefix) = (core.backend().clone(), prefix.to_owned());
        core.ask(Operation::List, async move { backend.list(&prefix, cursor).await }).await
    }

    /// Takes a lock away from whoever holds it. Their guards are lost at once.
    /// Answers how many holders there were.
    ///
    /// # Errors
    /// `Unavailable` if the backend does not answer, `Unsupported` if it cannot.
    ///
    /// # Cancel safety
    /// It may have happened when it is dropped.
    pub async fn break_lock(&self, key: impl IntoKey) -> Result<usize> {
        let key = key.into_key()?;
        self.operators(Operation::Break).map_err(|error| error.on(&key))?;
        let core = &self.handle.core;
        let (backend, asked, by) =
            (core.backend().clone(), key.clone(), self.handle.holder.clone());
        let breaking = async move { backend.break_lock(&asked, &by).await };
        core.ask(Operation::Break, breaking).await.map_err(|error| error.on(&key))
    }

    fn operators(&self, operation: Operation) -> Result<()> {
        let Capabilities { operators, name, .. } = self.handle.capabilities;
        if operators {
            return Ok(());
        }
        Err(Error::new(ErrorKind::Unsupported, operation)
            .saying(format!("{name}:// cannot list or break locks")))
    }

    /// What the backend can do.
    pub fn capabilities(&self) -> Capabilities {
        self.handle.capabilities
    }

    /// The client, for crates built beside the lock.
    #[doc(hidden)]
    pub fn beside(&self) -> Beside {
        Beside::new(&self.handle)
    }

    /// What crates built beside the lock keep for as long as this client lives.
    #[doc(hidden)]
    pub fn extension<T: Default + Send + Sync + 'static>(&self) -> Arc<T> {
        self.handle.extensions.get()
    }

    /// The name that operators see.
    pub fn name(&self) -> &str {
        &self.handle.holder.name
    }

    /// Whether the backend answers, and how fast.
    ///
    /// # Cancel safety
    /// It only looks.
    pub async fn health(&self) -> Health {
        let core = &self.handle.core;
        let start = core.now();
        let answer = core.ping().await;
        Health {
            backend: self.handle.capabilities.name,
            round_trip: core.now().since(start),
            problem: answer.err(),
        }
    }

    /// What this process holds and waits for, through this client.
    pub fn local_state(&self) -> LocalState {
        let core = &self.handle.core;
        let mut state = LocalState::default();
        let now = core.now();
        for seen in core.look_all(|machine| machine.seen(now)) {
            for Seen { key, mode, since, standing, holder } in seen {
                let since = now.since(since);
                let tags = holder.tags.clone();
                match standing {
                    None => state.waiting.push(LocalWait { key, mode, waiting_for: since, tags }),
                    Some((token, standing)) => {
                        let (lock_state, valid_for) = match standing {
                            Standing::Held { until, certain } => {
                                let state = if certain { State::Held } else { State::Uncertain };
                                (state, until.since(now))
                            }
                            Standing::Lost(_) => (State::Lost, Duration::ZERO),
                        };
                        let token = (!mode.is_permits()).then_some(token);
                        state.held.push(LocalHold {
                            key,
                            mode,
                            token,
                            state: lock_state,
                            held_for: since,
                            valid_for,
                            tags,
                        });
                    }
                }
            }
        }
        state
    }

    /// Ends the client in order: takes no new claims, waits up to `grace` for the
    /// guards there are, then tells the rest that they are lost, so that bodies
    /// under [`run`](crate::Guard::run) stop. Each lock is released when its guard
    /// lets go; one whose guard does not within a second is left to end by its
    /// ttl: its body may still be at work, and releasing it would let two in.
    ///
    /// ```
    /// # #[tokio::main(flavor = "current_thread")] async fn main() -> dlock_core::Result<()> {
    /// # let dlock = dlock_core::Dlock::connect("memory://").await?;
    /// let left = dlock.shutdown(std::time::Duration::from_secs(5)).await;
    /// assert_eq!(left, 0, "every lock was given back");
    /// # Ok(()) }
    /// ```
    ///
    /// Returns how many guards did not let go.
    ///
    /// # Cancel safety
    /// Dropping it leaves the client closed to new claims.
    pub async fn shutdown(&self, grace: Duration) -> usize {
        let core = &self.handle.core;
        core.step_all(|machine, now, actions| machine.close(now, actions));
        if !self.guards_gone(grace).await {
            core.step_all(|machine, _, actions| machine.revoke_all(actions));
            self.guards_gone(LET_GO).await;
        }
        self.flushed().await;
        self.holding()
    }

    /// How many hold a lock, or have been given one.
    fn holding(&self) -> usize {
        let core = &self.handle.core;
        core.look_all(|machine| machine.admitted()).into_iter().sum()
    }

    /// Whether every guard was gone in time.
    async fn guards_gone(&self, within: Duration) -> bool {
        let core = &self.handle.core;
        let gone = async {
            loop {
                if self.holding() == 0 {
                    return;
                }
                // One that was admitted and not polled yet tells nobody when it goes.
                let changed = core.guard_gone.notified();
                let _ = tokio::time::timeout(Duration::from_millis(10), changed).await;
            }
        };
        tokio::time::timeout(within, gone).await.is_ok()
    }

    /// Waits until nothing is owed to the backend, at most a call's time.
    async fn flushed(&self) {
        let core = &self.handle.core;
        let until = core.now() + self.handle.config.call_timeout;
        while !core.owes_nothing() && core.now() < until {
            tokio::time::sleep(Duration::from_millis(1)).await;
        }
    }
}

/// How long guards have to let go after they were told.
const LET_GO: Duration = Duration::from_secs(1);

/// Puts a [`Dlock`] together.
pub struct Builder {
    config: Result<Config>,
    backend: Option<Arc<dyn Backend>>,
    #[cfg(feature = "redis")]
    redis: Option<Given>,
    #[cfg(feature = "redis")]
    credentials: Option<Provider>,
    hook: Option<Hook>,
    planted: Planted,
}

impl Builder {
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

    /// How long `lock()` waits, unless the lock says otherwise; `None`: for ever.
    #[must_use]
    pub fn wait(self, wait: impl Into<Option<Duration>>) -> Self {
        self.put(|config| config.wait = wait.into())
    }

    /// How long one call to the backend may take.
    #[must_use]
    pub fn call_timeout(self, timeout: Duration) -> Self {
        self.put(|config| config.call_timeout = timeout)
    }

    /// How often and how long a lock is passed on inside the process before
    /// others get a chance.
    #[must_use]
    pub fn handovers(self, count: u32, tenure: Duration) -> Self {
        self.put(|config| {
            config.max_handovers = count;
            config.max_tenure = tenure;
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
    /// use dlock_core::Dlock;
    /// use dlock_core::backend::redis::Credentials;
    ///
    /// # fn example() -> dlock_core::Result<Dlock> {
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
    pub fn plant(mut self, bug: crate::plant::Plant) -> Self {
        self.planted = Planted::with(Some(bug));
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
        let extensions = Extensions::default();
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

impl fmt::Debug for Builder {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Builder").field("config", &self.config).finish_non_exhaustive()
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

/// How the backend does: [`Dlock::health`].
#[derive(Clone, Debug)]
#[non_exhaustive]
pub struct Health {
    /// Its name, as in the URL.
    pub backend: &'static str,
    /// How long it took to answer.
    pub round_trip: Duration,
    /// What is wrong, if anything.
    pub problem: Option<Error>,
}

impl Health {
    /// Whether the backend answers.
    pub fn is_ok(&self) -> bool {
        self.problem.is_none()
    }
}

/// What a process holds and waits for: [`Dlock::local_state`].
#[derive(Clone, Debug, Default)]
#[non_exhaustive]
pub struct LocalState {
    /// What it holds.
    pub held: Vec<LocalHold>,
    /// What it waits for.
    pub waiting: Vec<LocalWait>,
}

/// A lock that this process holds.
#[derive(Clone, Debug)]
#[non_exhaustive]
#[allow(missing_docs, reason = "the fields are named like what they hold")]
pub struct LocalHold {
    pub key: Key,
    pub mode: Mode,
    pub token: Option<u64>,
    pub state: State,
    pub held_for: Duration,
    pub valid_for: Duration,
    pub tags: Vec<(String, String)>,
}

/// A lock that a task of this process waits for.
#[derive(Clone, Debug)]
#[non_exhaustive]
#[allow(missing_docs, reason = "the fields are named like what they hold")]
pub struct LocalWait {
    pub key: Key,
    pub mode: Mode,
    pub waiting_for: Duration,
    pub tags: Vec<(String, String)>,
}

static GLOBAL: OnceLock<Dlock> = OnceLock::new();

/// Makes this client the one that [`global`] returns.
///
/// # Errors
/// `Config` if there is one already.
pub fn init(dlock: Dlock) -> Result<()> {
    GLOBAL.set(dlock).map_err(|_| {
        Error::new(ErrorKind::Config, Operation::Configure)
            .saying("dlock::init was called before; call it once, at the start")
    })
}

/// The client of this code: that of the test around it
/// ([`testing`](crate::testing)), else the one given to [`init`].
///
/// # Errors
/// `NoClient` if there is none.
pub fn global() -> Result<Dlock> {
    crate::testing::scoped().or_else(|| GLOBAL.get().cloned()).ok_or_else(|| {
        Error::new(ErrorKind::NoClient, Operation::Configure).saying(
            "call dlock::init(Dlock::connect(url).await?) when the program starts, or in a test dlock::testing::scope(..)",
        )
    })
}
