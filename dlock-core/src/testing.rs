//! For tests of code that takes locks: a client of its own for each test, and
//! faults on demand. No server, no thread; works under `tokio::time::pause`.
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
    /// Another client of the same store: the somebody else of a test.
    other: Dlock,
}

/// An in-memory client that nobody else uses.
///
/// # Panics
/// Never in practice: the defaults are valid.
pub fn client() -> Dlock {
    new_scope().dlock
}

fn new_scope() -> Scope {
    let store = Memory::new();
    let other = Dlock::builder().backend(store.another()).client_name("somebody else");
    let dlock = Dlock::builder().backend(store).client_name("test");
    match (dlock.connect_lazy(), other.connect_lazy()) {
        (Ok(dlock), Ok(other)) => Scope { dlock, other },
        (Err(error), _) | (_, Err(error)) => panic!("the embedded backend did not start: {error}"),
    }
}

/// Runs a future with an in-memory client of its own: inside it
/// [`global`], and so the attribute, uses that client.
///
/// Tasks spawned inside are outside; give them a clone of the client.
pub async fn scope<T>(future: impl Future<Output = T>) -> T {
    SCOPE.scope(new_scope(), future).await
}

pub(crate) fn scoped() -> Option<Dlock> {
    SCOPE.try_with(|scope| scope.dlock.clone()).ok()
}

fn other() -> Result<Dlock> {
    SCOPE.try_with(|scope| scope.other.clone()).map_err(|_| {
        Error::new(ErrorKind::NoClient, Operation::Configure)
            .saying("call this inside dlock::testing::scope(..)")
    })
}

/// Somebody else holds this key until the guard is dropped.
///
/// # Errors
/// `NoClient` outside [`scope`], `TimedOut` if the key is held already.
pub async fn force_busy(key: impl IntoKey) -> Result<Guard> {
    other()?.mutex(key).wait(std::time::Duration::ZERO).lock().await
}

/// Whoever holds this key has lost it.
///
/// # Errors
/// `NoClient` outside [`scope`], `Invalid` if nobody holds it.
pub async fn force_lost(key: impl IntoKey) -> Result<()> {
    let key = key.into_key()?;
    match other()?.break_lock(&key).await? {
        0 => Err(Error::new(ErrorKind::Invalid, Operation::Break)
            .on(&key)
            .saying("nobody holds it; force_lost needs a holder")),
        _ => Ok(()),
    }
}

/// Whether the running code is under a lock of this key: inside
/// [`Guard::run`](crate::Guard::run) or an annotated function, or else in a
/// process whose [`global`](crate::global) client holds it.
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
/// Takes a template, as [`key!`](crate::key!) does, or anything that makes a key.
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

/// A literal as a key. Without the feature `macros` it is the key's text.
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
