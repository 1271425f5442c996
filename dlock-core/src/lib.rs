//! Distributed locks for Rust services: a mutex, a read-write lock or a semaphore that
//! tasks on many machines share, kept in the store that you already run.
//!
//! ```
//! use dlock::{Dlock, key};
//!
//! # #[tokio::main(flavor = "current_thread")] async fn main() -> dlock::Result<()> {
//! let dlock = Dlock::connect("memory://").await?; // or redis://localhost
//! let id = 7;
//! let guard = dlock.mutex(key!("order:{id}")).lock().await?; // waits without polling
//! println!("write with token {}", guard.token()); // it rises with every holder
//! let _ = guard.release().await?; // or drop the guard
//! # Ok(()) }
//! ```
//!
//! The guard renews its lock in the background. If the process dies, the lock is free
//! again after its ttl, which is 30 s by default.
//!
//! # What is promised
//!
//! - **Exclusion.** While a guard is [`State::Held`] or [`State::Uncertain`], nobody
//!   else's guard of that key is, as long as the backend does not lose data and its
//!   clock is not set.
//! - **Loss is noticed.** A guard knows by its own clock when its lock is lost, also
//!   when the network is down: [`Guard::state`], [`Guard::lost`], [`Guard::run`].
//! - **Fencing.** Every guard has a [`Token`] that is higher than those of earlier
//!   holders, so that the resource can reject a holder that lost its lock: [`Fence`].
//! - **Cancel safety.** A future or guard that is dropped, at any await, leaves neither
//!   a lock nor a place in a queue behind.
//!
//! # What is not promised
//!
//! - No lock service can stop a process that was paused while it held a lock and wakes
//!   up after somebody else acquired it. Send the token with every write.
//! - A backend that loses data, by a restart without persistence for example, loses
//!   locks.
//! - `memory://` locks only between the tasks and clients of one process.
//!
//! # Where to look next
//!
//! | you want | look at |
//! |---|---|
//! | to connect and configure | [`Dlock`], [`DlockBuilder`], [`Config`] |
//! | to lock | [`Dlock::mutex`], [`Dlock::rwlock`], [`Dlock::semaphore`], [`Dlock::all_of`], and their options in [`Lock`] |
//! | to run a whole function under a lock | `#[distributed_lock]` (feature `macros`) |
//! | to work under a lock and stop when it is lost | [`Guard::run`], [`Guard::lost`] |
//! | to handle errors | [`ErrorKind`], [`Error`] |
//! | to test code that locks | [`testing`] |
//! | logs, metrics, events | [`observe`] |
//! | to see or break locks | [`Dlock::inspect`], [`Dlock::list`], [`Dlock::break_holder`], [`Dlock::break_lock`] |
//! | a lock inside a transaction of your own | `sql` (features `postgres`, `mysql`, `sqlite`) |
//! | to write a backend | [`Backend`], [`backend`] |

#[allow(unused_extern_crates, reason = "expanded macros name the crate `dlock`, also inside it")]
extern crate self as dlock;

#[cfg(not(unix))]
compile_error!(
    "dlock builds on Unix only (Linux, macOS, BSD): it needs a clock that counts suspended time"
);

mod attribute;
#[cfg(feature = "axum")]
mod axum;
pub mod backend;
mod batch_queue;
mod claim;
mod client;
mod clock;
mod collections;
mod config;
mod driver;
mod error;
#[doc(hidden)]
pub mod extension;
mod fence;
mod key;
#[doc(hidden)]
pub mod machine;
pub mod observe;
mod planted_bug;
mod primitives;
#[cfg(any(feature = "mysql", feature = "postgres", feature = "sqlite"))]
pub mod sql;
pub mod testing;

pub use attribute::Fallible;
pub use backend::{Backend, Capabilities};
pub use claim::{Holder, LossReason, Mode, ReleaseOutcome, Token};
pub use client::{
    Dlock, DlockBuilder, Health, LocalHold, LocalState, LocalWait, Store, global, init,
};
pub use config::{Config, ConsulConfig, Eviction, MAX_TTL, Policy, SentinelConfig, SslMode};
pub use error::{BodyStatus, Error, ErrorKind, Operation, Result};
pub use fence::{Access, Fence};
pub use key::{IntoKey, Key, MAX_KEY_BYTES};
pub use observe::Event;
pub use primitives::guard::{Guard, Permits, State};
pub use primitives::{Lock, LockGuard, MultiGuard, MultiLock, Mutex, RwLock, Semaphore};

#[cfg(feature = "macros")]
pub use dlock_macros::{distributed_lock, key};

/// The items that expanded macros use.
#[doc(hidden)]
pub mod __private {
    pub use crate::attribute::handled;
    pub use crate::key::KeyWriter;
}

/// Compiles and runs the examples of `docs/`. Those of the README run in `examples`.
#[cfg(doctest)]
mod documents {
    #[doc = include_str!("../../docs/fencing.md")]
    struct Fencing;
    #[doc = include_str!("../../docs/redis.md")]
    struct Redis;
    #[doc = include_str!("../../docs/attribute.md")]
    struct Attribute;
}
