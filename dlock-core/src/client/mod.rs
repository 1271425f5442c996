//! The client: where locks come from, and what operators ask of it.

mod builder;
#[cfg(any(feature = "mysql", feature = "postgres", feature = "sqlite"))]
mod builder_sql;
mod global;
mod local_state;

use std::fmt;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

pub use self::builder::DlockBuilder;
pub use self::global::{global, init};
pub use self::local_state::{LocalHold, LocalState, LocalWait};
use crate::backend::{
    Break, BreakTarget, Capabilities, Cursor, KeyState, Page, ServerState, unsupported,
};
use crate::claim::{Holder, Mode, Printable};
use crate::config::Settings;
use crate::driver::Core;
use crate::error::{Error, ErrorKind, Operation, Result};
use crate::extension::{ClientExtension, ExtensionMap};
use crate::key::{IntoKey, Key};
use crate::primitives::{Lock, MultiLock, Mutex, RwLock, Semaphore};

/// How long before the end of its grace `shutdown` tells guards that they are lost, at
/// most; else a quarter of the grace.
const MAX_REVOKED_TIME: Duration = Duration::from_secs(1);
/// How long `shutdown` waits for releases to be answered beyond its grace.
const MAX_FLUSH_TIME: Duration = Duration::from_millis(100);
/// The first pause between two looks of `shutdown`; it doubles up to the maximum.
const FIRST_SHUTDOWN_PAUSE: Duration = Duration::from_millis(1);
const MAX_SHUTDOWN_PAUSE: Duration = Duration::from_millis(20);

/// A client of a lock backend. Cheap to clone; clones share everything.
///
/// When the last clone and the last guard are dropped, that drop waits up to 100 ms for
/// releases that were not answered yet, since the process may be about to end. A client
/// given to [`init`] is never dropped: await [`Dlock::shutdown`] before `main` ends or
/// `std::process::exit` is called.
#[derive(Clone, Debug)]
pub struct Dlock {
    handle: Arc<Handle>,
}

/// The state that the clones of a client and its guards share.
pub(crate) struct Handle {
    pub(crate) core: Arc<Core>,
    pub(crate) config: Settings,
    pub(crate) holder: Arc<Holder>,
    capabilities: Capabilities,
    extensions: ExtensionMap,
    /// Whether [`Dlock::shutdown`] was called; crates beside the lock look at it.
    pub(crate) shut_down: Arc<AtomicBool>,
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

    /// The ttl of a lock that asks for this one.
    pub(crate) fn honoured_ttl(&self, wanted: Duration) -> Result<Duration> {
        let Capabilities { ttl, name, .. } = self.capabilities;
        ttl.honoured(wanted).ok_or_else(|| {
            Error::new(ErrorKind::Unsupported, Operation::Acquire)
                .with_message(ttl.refusal(name, wanted))
        })
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
    /// Connects to the backend that the URL names, and waits until it answers.
    ///
    /// ```
    /// # #[tokio::main(flavor = "current_thread")] async fn main() -> dlock::Result<()> {
    /// use dlock::{Dlock, key};
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
    /// `Config` if the URL is not valid, `Unavailable` if the backend does not
    /// answer, `Denied` if it refuses the credentials.
    ///
    /// # Cancel safety
    /// Dropping the future closes the connection and leaves nothing behind.
    pub async fn connect(url: &str) -> Result<Self> {
        Self::builder().url(url).connect().await
    }

    /// Makes a client without waiting for its backend: locks can be requested at
    /// once and are granted when the backend answers.
    ///
    /// # Errors
    /// `Config` if the URL is not valid.
    pub fn connect_lazy(url: &str) -> Result<Self> {
        Self::builder().url(url).connect_lazy()
    }

    /// A builder for a client with other options than the URL's.
    pub fn builder() -> DlockBuilder {
        DlockBuilder::new()
    }

    /// A lock that one task at a time holds, over all machines.
    pub fn mutex(&self, key: impl IntoKey) -> Mutex {
        Lock::new(self.handle.clone(), key.into_key(), Mode::Exclusive)
    }

    /// A lock that either one writer or any number of readers hold.
    pub fn rwlock(&self, key: impl IntoKey) -> RwLock {
        RwLock::new(self.handle.clone(), key.into_key())
    }

    /// A semaphore with `capacity` permits. Its keys are separate from those of
    /// locks: a semaphore and a mutex of the same name do not exclude each other.
    ///
    /// Every process should give the same capacity: each request is checked
    /// against the capacity that it brings.
    pub fn semaphore(&self, key: impl IntoKey, capacity: u32) -> Semaphore {
        Semaphore::new(self.handle.clone(), key.into_key(), capacity)
    }

    /// A lock on several keys at once, all exclusive, without deadlock.
    pub fn all_of<K: IntoKey>(&self, keys: impl IntoIterator<Item = K>) -> MultiLock {
        MultiLock::new(self.handle.clone(), keys.into_iter().map(IntoKey::into_key).collect())
    }

    /// Asks the backend who holds a key and who waits for it.
    ///
    /// ```
    /// # #[tokio::main(flavor = "current_thread")] async fn main() -> dlock::Result<()> {
    /// # let dlock = dlock::testing::client();
    /// let guard = dlock.mutex("order:7").lock().await?;
    /// let state = dlock.inspect("order:7").await?;
    /// assert_eq!(state.holders[0].token, Some(guard.token().get()));
    /// assert!(state.waiters.is_empty());
    /// # Ok(()) }
    /// ```
    ///
    /// # Errors
    /// `Invalid` if the key is not valid, `Unavailable` or `Unknown` if the backend
    /// does not answer.
    ///
    /// # Cancel safety
    /// Dropping the future changes nothing: it only reads.
    pub async fn inspect(&self, key: impl IntoKey) -> Result<KeyState> {
        let key = key.into_key()?;
        let core = &self.handle.core;
        let (backend, asked) = (core.backend().clone(), key.clone());
        let looking = async move { backend.inspect(&asked).await };
        let mut state =
            core.ask(Operation::Inspect, looking).await.map_err(|error| error.with_key(&key))?;
        state.broken_by = state.broken_by.map(|by| Printable(&by).to_string());
        Ok(state)
    }

    /// Asks the backend for a page of the keys in use that start with `prefix`.
    /// Continue with the page's `next` until it is `None`.
    ///
    /// ```
    /// # #[tokio::main(flavor = "current_thread")] async fn main() -> dlock::Result<()> {
    /// # let dlock = dlock::testing::client();
    /// use dlock::backend::Cursor;
    ///
    /// let guard = dlock.mutex("order:7").lock().await?;
    /// let mut next = Some(Cursor::default());
    /// while let Some(cursor) = next {
    ///     let page = dlock.list("order:", cursor).await?;
    ///     for key in page.keys {
    ///         println!("{}", key.as_str());
    ///     }
    ///     next = page.next;
    /// }
    /// # drop(guard);
    /// # Ok(()) }
    /// ```
    ///
    /// # Errors
    /// `Unsupported` if the backend cannot list keys, `Unavailable` or `Unknown` if
    /// it does not answer.
    ///
    /// # Cancel safety
    /// Dropping the future changes nothing: it only reads.
    pub async fn list(&self, prefix: &str, cursor: Cursor) -> Result<Page> {
        self.check_operators(Operation::List)?;
        let core = &self.handle.core;
        let (backend, prefix) = (core.backend().clone(), prefix.to_owned());
        core.ask(Operation::List, async move { backend.list(&prefix, cursor).await }).await
    }

    /// Takes a lock away from whoever holds it now, and returns how many holders there
    /// were. Their guards are told that they are [`Lost`](crate::State::Lost).
    ///
    /// The holder may be another one than the one you have seen before: to break that one or
    /// nobody, use [`break_holder`](Self::break_holder). The permits of a semaphore with this
    /// key are left alone; [`break_permits`](Self::break_permits) takes them away.
    ///
    /// ```
    /// # #[tokio::main(flavor = "current_thread")] async fn main() -> dlock::Result<()> {
    /// # let dlock = dlock::testing::client();
    /// use dlock::State;
    ///
    /// let guard = dlock.mutex("order:7").lock().await?;
    /// assert_eq!(dlock.break_lock("order:7").await?, 1);
    /// assert_eq!(guard.state(), State::Lost);
    /// # Ok(()) }
    /// ```
    ///
    /// # Errors
    /// `Invalid` if the key is not valid, `Unsupported` if the backend cannot break
    /// locks, `Unavailable` or `Unknown` if it does not answer.
    ///
    /// # Cancel safety
    /// When the future is dropped the lock may have been broken or not.
    pub async fn break_lock(&self, key: impl IntoKey) -> Result<usize> {
        self.break_target(key.into_key()?, BreakTarget::Lock).await
    }

    /// Takes a lock away from the holder with this token, or from nobody if the lock has
    /// changed hands or is free. Returns whether there was such a holder. Its guards are told
    /// that they are [`Lost`](crate::State::Lost).
    ///
    /// The token is that of [`inspect`](Self::inspect). The store compares it when it breaks
    /// the lock, so a holder that came after your look is safe. (The tasks of one process that
    /// hand the lock to each other count as one holder.)
    ///
    /// ```
    /// # #[tokio::main(flavor = "current_thread")] async fn main() -> dlock::Result<()> {
    /// # let dlock = dlock::testing::client();
    /// use dlock::State;
    ///
    /// let sick = dlock.mutex("order:7").lock().await?;
    /// let seen = dlock.inspect("order:7").await?.holders[0].token.unwrap();
    /// sick.release().await?;
    ///
    /// let healthy = dlock.mutex("order:7").lock().await?;
    /// assert!(!dlock.break_holder("order:7", seen).await?);
    /// assert_eq!(healthy.state(), State::Held);
    /// # Ok(()) }
    /// ```
    ///
    /// # Errors
    /// `Invalid` if the key is not valid, `Unsupported` if the backend cannot break
    /// locks, `Unavailable` or `Unknown` if it does not answer.
    ///
    /// # Cancel safety
    /// When the future is dropped the lock may have been broken or not.
    pub async fn break_holder(&self, key: impl IntoKey, token: u64) -> Result<bool> {
        let broken = self.break_target(key.into_key()?, BreakTarget::Holder { token }).await?;
        Ok(broken > 0)
    }

    /// Takes the permits of a semaphore away from all who have some now, and returns how many
    /// holders there were. Their guards are told that they are [`Lost`](crate::State::Lost).
    /// A lock with this key is left alone.
    ///
    /// ```
    /// # #[tokio::main(flavor = "current_thread")] async fn main() -> dlock::Result<()> {
    /// # let dlock = dlock::testing::client();
    /// use dlock::State;
    ///
    /// let permits = dlock.semaphore("exports", 10).permits(3).lock().await?;
    /// assert_eq!(dlock.break_permits("exports").await?, 1);
    /// assert_eq!(permits.state(), State::Lost);
    /// # Ok(()) }
    /// ```
    ///
    /// # Errors
    /// `Invalid` if the key is not valid, `Unsupported` if the backend cannot break
    /// locks, `Unavailable` or `Unknown` if it does not answer.
    ///
    /// # Cancel safety
    /// When the future is dropped the permits may have been taken away or not.
    pub async fn break_permits(&self, key: impl IntoKey) -> Result<usize> {
        self.break_target(key.into_key()?, BreakTarget::Permits).await
    }

    async fn break_target(&self, key: Key, target: BreakTarget) -> Result<usize> {
        self.check_operators(Operation::Break).map_err(|error| error.with_key(&key))?;
        let core = &self.handle.core;
        let (backend, asked) = (core.backend().clone(), key.clone());
        let delay = self.handle.config.break_delay;
        let how = Break { by: self.handle.holder.clone(), target, delay };
        let breaking = async move { backend.break_lock(&asked, &how).await };
        core.ask(Operation::Break, breaking).await.map_err(|error| error.with_key(&key))
    }

    /// Whether the backend can list keys and break locks.
    fn check_operators(&self, operation: Operation) -> Result<()> {
        let Capabilities { operators, name, .. } = self.handle.capabilities;
        if operators {
            return Ok(());
        }
        Err(unsupported(name, operation))
    }

    /// The abilities of the client's backend.
    pub fn capabilities(&self) -> Capabilities {
        self.handle.capabilities
    }

    /// Access to the client's internals for `dlock-segment`.
    #[doc(hidden)]
    pub fn client_extension(&self) -> ClientExtension {
        ClientExtension::new(&self.handle)
    }

    /// A value of another crate that lives as long as this client.
    #[doc(hidden)]
    pub fn extension<T: Default + Send + Sync + 'static>(&self) -> Arc<T> {
        self.handle.extensions.get()
    }

    /// The number of this client among those of the process.
    pub(crate) fn number(&self) -> u64 {
        self.handle.client()
    }

    /// Where the locks of this client are, for people.
    ///
    /// ```
    /// # #[tokio::main(flavor = "current_thread")] async fn main() -> dlock::Result<()> {
    /// let dlock = dlock::Dlock::connect("memory://shop").await?;
    /// assert_eq!(dlock.store().to_string(), "memory://shop (namespace `default`)");
    /// # Ok(()) }
    /// ```
    pub fn store(&self) -> Store {
        let Handle { config, capabilities, .. } = &*self.handle;
        let address = config.address().unwrap_or_else(|| format!("{}://", capabilities.name));
        Store { address, namespace: config.namespace.clone() }
    }

    /// The client's name, as holders and waiters are shown to operators.
    pub fn name(&self) -> &str {
        &self.handle.holder.name
    }

    /// Calls the backend once and tells whether it answered, and how fast.
    ///
    /// ```
    /// # #[tokio::main(flavor = "current_thread")] async fn main() -> dlock::Result<()> {
    /// # let dlock = dlock::testing::client();
    /// let health = dlock.health().await;
    /// assert!(health.is_ok(), "{:?}", health.problem);
    /// # Ok(()) }
    /// ```
    ///
    /// # Errors
    /// It returns none: a failure is in [`Health::problem`].
    ///
    /// # Cancel safety
    /// Dropping the future changes nothing: it only reads.
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

    /// The servers behind the backend: their roles, and what a failover would lose. Empty
    /// if the backend has nothing to tell of.
    ///
    /// ```
    /// # #[tokio::main(flavor = "current_thread")] async fn main() -> dlock::Result<()> {
    /// # let dlock = dlock::testing::client();
    /// for server in dlock.servers().await? {
    ///     println!("{} {:?} {:?}", server.address, server.role, server.behind);
    /// }
    /// # Ok(()) }
    /// ```
    ///
    /// # Errors
    /// `Unavailable` if the backend does not answer, `Denied` if the user lacks rights.
    ///
    /// # Cancel safety
    /// Dropping the future changes nothing: it only reads.
    pub async fn servers(&self) -> Result<Vec<ServerState>> {
        let core = &self.handle.core;
        let backend = core.backend().clone();
        core.ask(Operation::Connect, async move { backend.servers().await }).await
    }

    /// Shuts the client down and returns how many guards are still held.
    ///
    /// New requests are refused from now on. It waits for the guards that exist, up to
    /// `grace`. Shortly before the end of it (a quarter of it, a second at most) it
    /// tells the remaining ones that they are lost, so that work under
    /// [`run`](crate::Guard::run) stops. A lock whose guard is not dropped when the
    /// grace is over is not released but expires with its ttl: its work may still be
    /// running, and a release would let somebody else in. Releases that are not
    /// answered yet then are waited for another 100 ms at most.
    ///
    /// The number is 0 if every lock was given back. Each guard that it counts keeps its
    /// lock until its ttl is over.
    ///
    /// ```
    /// # #[tokio::main(flavor = "current_thread")] async fn main() -> dlock::Result<()> {
    /// # let dlock = dlock::Dlock::connect("memory://").await?;
    /// let left = dlock.shutdown(std::time::Duration::from_secs(5)).await;
    /// assert_eq!(left, 0, "every lock was released");
    /// # Ok(()) }
    /// ```
    ///
    /// # Errors
    /// It returns none: releases that the backend did not answer expire with their ttl.
    ///
    /// # Cancel safety
    /// When the future is dropped the client still refuses new requests.
    pub async fn shutdown(&self, grace: Duration) -> usize {
        let core = &self.handle.core;
        self.handle.shut_down.store(true, Ordering::Release);
        core.step_all(|machine, now, actions| machine.close(now, actions));
        let told_before_end = (grace / 4).min(MAX_REVOKED_TIME);
        if !self.all_guards_dropped(grace - told_before_end).await {
            core.step_all(|machine, _, actions| machine.revoke_all(actions));
            self.all_guards_dropped(told_before_end).await;
        }
        self.flush().await;
        let held = self.held_count();
        if held == 0 {
            core.close_session().await;
        }
        held
    }

    /// How many tasks hold a lock, or were granted one that they did not see yet.
    fn held_count(&self) -> usize {
        let core = &self.handle.core;
        core.look_all(|machine| machine.admitted()).into_iter().sum()
    }

    /// Waits until no guard is left, and tells whether that was in time.
    async fn all_guards_dropped(&self, timeout: Duration) -> bool {
        let dropped = async {
            let mut pause = FIRST_SHUTDOWN_PAUSE;
            while self.held_count() > 0 {
                tokio::time::sleep(pause).await;
                pause = (pause * 2).min(MAX_SHUTDOWN_PAUSE);
            }
        };
        tokio::time::timeout(timeout, dropped).await.is_ok()
    }

    /// Waits until every release was answered, for a short time.
    async fn flush(&self) {
        let core = &self.handle.core;
        let until = core.now() + MAX_FLUSH_TIME;
        while core.has_pending_releases() && core.now() < until {
            tokio::time::sleep(FIRST_SHUTDOWN_PAUSE).await;
        }
    }
}

/// Where the locks of a client are: the answer of [`Dlock::store`].
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct Store {
    /// The URL without user, password and options.
    pub address: String,
    /// The namespace.
    pub namespace: String,
}

impl std::fmt::Display for Store {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{} (namespace `{}`)", self.address, self.namespace)
    }
}

/// The answer of a backend to [`Dlock::health`].
#[derive(Clone, Debug)]
#[non_exhaustive]
pub struct Health {
    /// The name of the backend, as in the URL.
    pub backend: &'static str,
    /// How long the backend took to answer.
    pub round_trip: Duration,
    /// Why the backend cannot be used; `None` if it can.
    pub problem: Option<Error>,
}

impl Health {
    /// Whether the backend answered without an error.
    pub fn is_ok(&self) -> bool {
        self.problem.is_none()
    }
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::{AtomicU64, Ordering};

    use super::*;
    use crate::Key;
    use crate::backend::memory::Memory;
    use crate::backend::{Answer, Backend, Call, KeyState, Listener, Request};
    use crate::clock::Clock;

    /// A child after `fork` has the client, but not the thread that would answer.
    #[cfg(feature = "redis")]
    #[tokio::test]
    async fn a_child_after_fork_is_told_at_once() {
        let client = Dlock::builder().url("redis://127.0.0.1:1").connect_lazy().unwrap();
        client.handle.core.set_in_child();
        let refused = client.mutex("a").lock().await.unwrap_err();
        assert_eq!(refused.kind(), crate::ErrorKind::Config, "{refused}");
        assert!(refused.to_string().contains("fork()"), "{refused}");
        let refused = client.health().await.problem.expect("an error");
        assert!(refused.to_string().contains("fork()"), "{refused}");
        let refused = client.inspect("a").await.unwrap_err();
        assert!(refused.to_string().contains("fork()"), "{refused}");
        client.shutdown(std::time::Duration::ZERO).await;
    }

    /// A store that is reached through a network, as far as the client knows.
    struct Remote(crate::backend::memory::Memory);

    impl Backend for Remote {
        fn capabilities(&self) -> Capabilities {
            Capabilities { remote: true, ..self.0.capabilities() }
        }
        fn open(&self, client: u64, listener: std::sync::Weak<dyn Listener>) {
            self.0.open(client, listener);
        }
        fn call<'a>(&'a self, requests: &'a [Request]) -> Call<'a, Vec<Answer>> {
            self.0.call(requests)
        }
        fn inspect<'a>(&'a self, key: &'a Key) -> Call<'a, Result<KeyState>> {
            self.0.inspect(key)
        }
        fn ping(&self) -> Call<'_, Result<()>> {
            self.0.ping()
        }
    }

    /// Timers stand still while a machine is suspended, and the time of a lease does not.
    #[tokio::test]
    async fn a_loss_during_a_suspend_is_told_within_a_second() {
        static SUSPENDED: AtomicU64 = AtomicU64::new(0);
        let mut builder = Dlock::builder().backend(Remote(Memory::new()));
        builder.clock = Some(Clock::Suspended(&SUSPENDED));
        let client = builder.connect().await.unwrap();
        let hour = Duration::from_secs(60 * 60);
        let guard = client.mutex("order:7").ttl(hour).lock().await.unwrap();
        // Whoever asks now would look at the clock: this one is told.
        let waiting = tokio::spawn(async move { guard.lost().await });
        // The driver sleeps by now, until the renewal in twenty minutes.
        tokio::time::sleep(Duration::from_millis(100)).await;
        SUSPENDED.store(2 * hour.as_nanos() as u64, Ordering::Release);
        let told = tokio::time::timeout(Duration::from_secs(2), waiting).await;
        assert_eq!(told.expect("a loss").unwrap(), crate::LossReason::Deadline);
    }
}
