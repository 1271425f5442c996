//! The client.

mod builder;
mod global;
mod local_state;

use std::fmt;
use std::sync::Arc;
use std::time::Duration;

pub use self::builder::DlockBuilder;
pub use self::global::{global, init};
pub use self::local_state::{LocalHold, LocalState, LocalWait};
use crate::backend::{Capabilities, Cursor, KeyState, Page, unsupported};
use crate::claim::{Holder, Mode};
use crate::config::Config;
use crate::driver::Core;
use crate::error::{Error, Operation, Result};
use crate::extension::{ClientExtension, ExtensionMap};
use crate::key::IntoKey;
use crate::primitives::{Lock, MultiLock, Mutex, RwLock, Semaphore};

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
    extensions: ExtensionMap,
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
    pub fn builder() -> DlockBuilder {
        DlockBuilder::new()
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
        Err(unsupported(name, operation))
    }

    /// What the backend can do.
    pub fn capabilities(&self) -> Capabilities {
        self.handle.capabilities
    }

    /// The client, for crates built beside the lock.
    #[doc(hidden)]
    pub fn client_extension(&self) -> ClientExtension {
        ClientExtension::new(&self.handle)
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

    /// Ends the client in order: takes no new claims, waits up to `grace` for the
    /// guards there are, then tells the rest that they are lost, so that bodies
    /// under [`run`](crate::Guard::run) stop. Each lock is released when its guard
    /// lets go; one whose guard does not within a second is left to end by its
    /// ttl: its body may still be at work, and releasing it would let two in.
    ///
    /// ```
    /// # #[tokio::main(flavor = "current_thread")] async fn main() -> dlock::Result<()> {
    /// # let dlock = dlock::Dlock::connect("memory://").await?;
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
        let gone = async {
            let mut pause = Duration::from_millis(1);
            while self.holding() > 0 {
                tokio::time::sleep(pause).await;
                pause = (pause * 2).min(Duration::from_millis(20));
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
