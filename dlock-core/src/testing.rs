//! Help for tests of code that uses locks: a client for each test, and faults on
//! demand. It needs neither a server nor a thread, and works under
//! `tokio::time::pause`.
//!
//! ```
//! use dlock::{ErrorKind, State, testing};
//!
//! # #[tokio::main(flavor = "current_thread")] async fn main() -> dlock::Result<()> {
//! testing::scope(async {
//!     let dlock = dlock::global()?; // what the code under test uses
//!     let busy = testing::force_busy("order:7").await?;
//!     assert!(dlock.mutex("order:7").try_lock().await?.is_none());
//!     drop(busy);
//!
//!     let guard = dlock.mutex("order:7").lock().await?;
//!     testing::force_lost("order:7").await?;
//!     assert_eq!(guard.state(), State::Lost);
//!     Ok(())
//! })
//! .await
//! # }
//! ```

use std::future::Future;
use std::sync::atomic::{AtomicUsize, Ordering};

use parking_lot::Mutex;
use tokio::runtime::{Handle, Id};

use crate::backend::memory::Memory;
use crate::client::{Dlock, global};
use crate::error::{Error, ErrorKind, Operation, Result};
use crate::key::{IntoKey, Key};
use crate::primitives::guard::Guard;

tokio::task_local! {
    static SCOPE: Scope;
}

#[derive(Clone)]
struct Scope {
    dlock: Dlock,
    /// Another client of the same store, which stands for another process.
    other: Dlock,
}

impl Scope {
    fn id(&self) -> u64 {
        self.dlock.number()
    }
}

/// Makes a client with its own in-memory store, which nobody else uses.
///
/// # Panics
/// If the in-memory backend does not start, which does not happen in practice.
pub fn client() -> Dlock {
    new_scope().dlock
}

fn new_scope() -> Scope {
    let store = Memory::new();
    let other = Dlock::builder().backend(store.another()).client_name("somebody else");
    let dlock = Dlock::builder().backend(store).client_name("test");
    match (dlock.connect_lazy(), other.connect_lazy()) {
        (Ok(dlock), Ok(other)) => Scope { dlock, other },
        (Err(error), _) | (_, Err(error)) => panic!("the in-memory backend did not start: {error}"),
    }
}

/// Runs a future with its own in-memory client: inside the future [`global`], and so
/// the attribute, uses that client.
///
/// Tasks that are spawned on the same runtime while the scope runs are inside it too, a
/// server under test for example: each `#[tokio::test]` has a runtime of its own. If
/// several scopes run in one runtime at the same time, a spawned task cannot know which
/// one is meant and gets `NoClient`; give it a clone of the client. The same holds for
/// threads of your own.
///
/// ```
/// # #[tokio::main(flavor = "current_thread")] async fn main() -> dlock::Result<()> {
/// use dlock::testing;
///
/// testing::scope(async {
///     let guard = dlock::global()?.mutex("order:7").lock().await?;
///     assert_eq!(guard.key().as_str(), "order:7");
///     Ok(())
/// })
/// .await
/// # }
/// ```
///
/// # Errors
/// It returns none of its own, only the output of the future.
///
/// # Cancel safety
/// Dropping this drops the future and its client.
pub async fn scope<T>(future: impl Future<Output = T>) -> T {
    let scope = new_scope();
    let _listed = Handle::try_current().ok().map(|runtime| Listed::new(runtime.id(), &scope));
    SCOPE.scope(scope, future).await
}

/// The scopes that run, by their runtime, so that spawned tasks find them.
static RUNNING: Mutex<Vec<(Id, Scope)>> = Mutex::new(Vec::new());
/// How many there are: a program without scopes does not take the mutex.
static RUNNING_COUNT: AtomicUsize = AtomicUsize::new(0);

/// The entry of a scope in [`RUNNING`], as long as it lives.
struct Listed {
    client: u64,
}

impl Listed {
    fn new(runtime: Id, scope: &Scope) -> Self {
        RUNNING.lock().push((runtime, scope.clone()));
        RUNNING_COUNT.fetch_add(1, Ordering::Release);
        Listed { client: scope.id() }
    }
}

impl Drop for Listed {
    fn drop(&mut self) {
        let mut running = RUNNING.lock();
        let index = running.iter().position(|(_, scope)| scope.id() == self.client);
        let ended = index.map(|index| running.swap_remove(index));
        RUNNING_COUNT.fetch_sub(1, Ordering::Release);
        drop(running);
        drop(ended); // here, where the list is not locked: it may end the client
    }
}

/// The scope of this task, else the only one of its runtime.
fn current() -> Option<Scope> {
    if let Ok(scope) = SCOPE.try_with(Clone::clone) {
        return Some(scope);
    }
    if RUNNING_COUNT.load(Ordering::Acquire) == 0 {
        return None;
    }
    let runtime = Handle::try_current().ok()?.id();
    let running = RUNNING.lock();
    let mut here = running.iter().filter(|(of, _)| *of == runtime);
    match (here.next(), here.next()) {
        (Some((_, scope)), None) => Some(scope.clone()),
        _ => None,
    }
}

pub(crate) fn scoped() -> Option<Dlock> {
    current().map(|scope| scope.dlock)
}

fn other() -> Result<Dlock> {
    current().map(|scope| scope.other).ok_or_else(|| {
        Error::new(ErrorKind::NoClient, Operation::Configure).with_message(
            "force_busy and force_lost work only inside dlock::testing::scope(..); call them there",
        )
    })
}

/// Makes another client hold this key until the guard is dropped.
///
/// ```
/// # #[tokio::main(flavor = "current_thread")] async fn main() -> dlock::Result<()> {
/// use dlock::testing;
///
/// testing::scope(async {
///     let busy = testing::force_busy("order:7").await?;
///     assert!(dlock::global()?.mutex("order:7").try_lock().await?.is_none());
///     # drop(busy);
///     Ok(())
/// })
/// .await
/// # }
/// ```
///
/// # Errors
/// `NoClient` outside [`scope`], `TimedOut` if somebody holds the key already.
///
/// # Cancel safety
/// Dropping the future leaves neither a lock nor a place in a queue.
pub async fn force_busy(key: impl IntoKey) -> Result<Guard> {
    other()?.mutex(key).wait(std::time::Duration::ZERO).lock().await
}

/// Makes every holder of this key lose it.
///
/// ```
/// # #[tokio::main(flavor = "current_thread")] async fn main() -> dlock::Result<()> {
/// use dlock::{State, testing};
///
/// testing::scope(async {
///     let guard = dlock::global()?.mutex("order:7").lock().await?;
///     testing::force_lost("order:7").await?;
///     assert_eq!(guard.state(), State::Lost);
///     Ok(())
/// })
/// .await
/// # }
/// ```
///
/// # Errors
/// `NoClient` outside [`scope`], `Invalid` if nobody holds the key.
///
/// # Cancel safety
/// When the future is dropped the key may have been lost or not.
pub async fn force_lost(key: impl IntoKey) -> Result<()> {
    let key = key.into_key()?;
    let other = other()?;
    match other.break_lock(&key).await? + other.break_permits(&key).await? {
        0 => Err(Error::new(ErrorKind::Invalid, Operation::Break).with_key(&key).with_message(
            "nobody holds the key, so nobody can lose it; lock it before force_lost",
        )),
        _ => Ok(()),
    }
}

/// Whether the running code is under a lock of this key: inside
/// [`Guard::run`](crate::Guard::run) or an annotated function, or in a process whose
/// [`global`](crate::global) client holds it.
#[doc(hidden)]
pub fn is_locked(key: &Key) -> bool {
    crate::primitives::reentry::is_inside(key)
        || global().is_ok_and(|dlock| {
            let held = dlock.local_state().held;
            held.iter().any(|held| {
                held.key == *key && !held.mode.is_permits() && held.state != crate::State::Lost
            })
        })
}

/// Panics unless the running code is under a lock of this key: inside
/// [`Guard::run`](crate::Guard::run) or an annotated function, or in a process
/// whose [`global`](crate::global) client holds it.
///
/// The argument is a template, as for [`key!`](crate::key!), or anything that makes a
/// key.
///
/// ```
/// # #[tokio::main(flavor = "current_thread")] async fn main() -> dlock::Result<()> {
/// # let dlock = dlock::testing::client();
/// use dlock::{assert_locked, key};
///
/// async fn save(id: u64) {
///     assert_locked!("order:{id}");
/// }
/// let id = 7;
/// let guard = dlock.mutex(key!("order:{id}")).lock().await?;
/// guard.run(save(id)).await?;
/// # Ok(()) }
/// ```
#[macro_export]
macro_rules! assert_locked {
    ($template:literal $(,)?) => {
        $crate::__assert_locked!($crate::__template!($template))
    };
    ($key:expr $(,)?) => {
        $crate::__assert_locked!($key)
    };
}

#[doc(hidden)]
#[macro_export]
macro_rules! __assert_locked {
    ($key:expr) => {
        match $crate::IntoKey::into_key($key) {
            ::core::result::Result::Ok(key) if $crate::testing::is_locked(&key) => {}
            ::core::result::Result::Ok(key) => panic!("not under a lock of `{}`", key.label()),
            ::core::result::Result::Err(error) => panic!("{error}"),
        }
    };
}

/// Makes a key from a literal. Without the feature `macros` the literal is the key.
#[cfg(feature = "macros")]
#[doc(hidden)]
#[macro_export]
macro_rules! __template {
    ($template:literal) => {
        $crate::key!($template)
    };
}
#[cfg(not(feature = "macros"))]
#[doc(hidden)]
#[macro_export]
macro_rules! __template {
    ($template:literal) => {
        $template
    };
}
