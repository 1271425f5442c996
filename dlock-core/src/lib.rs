//! Distributed locks: one API over the store you already run.
//!
//! ```
//! use dlock::{Dlock, key};
//!
//! # #[tokio::main(flavor = "current_thread")] async fn main() -> dlock::Result<()> {
//! let dlock = Dlock::connect("memory://").await?;
//! let id = 7;
//! let guard = dlock.mutex(key!("order:{id}")).lock().await?; // waits without polling, renews by itself
//! println!("write with token {}", guard.token()); // rising for this key
//! guard.release().await?; // or drop it
//! # Ok(()) }
//! ```
//!
//! # What is promised
//!
//! - While a guard is [`State::Held`] or [`State::Uncertain`] nobody else's guard
//!   of that key is, as long as the backend neither loses data nor has its clock
//!   set.
//! - A guard knows when its lock is lost, by its own clock, whatever the network
//!   does: [`Guard::state`], [`Guard::lost`], [`Guard::run`].
//! - Every guard of a lock has a [`Token`], higher than those before it, so that
//!   the resource can reject a holder that was overtaken: [`Fence`].
//! - Whatever is dropped, at whatever await, leaves no lock and no place in a
//!   queue behind.
//!
//! # What is not
//!
//! - No lock service can stop a process that was paused while it held a lock and
//!   wakes up after it went to somebody else. Send the token along.
//! - `memory://` locks between the tasks and clients of one process only.

#[allow(unused_extern_crates, reason = "expanded macros name the crate so, inside it too")]
extern crate self as dlock;

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
pub mod testing;

pub use attribute::Fallible;
pub use backend::{Backend, Capabilities};
pub use claim::{Holder, LossReason, Mode, ReleaseOutcome, Token};
pub use client::{Dlock, DlockBuilder, Health, LocalHold, LocalState, LocalWait, global, init};
pub use config::{Config, Eviction, MAX_TTL, Policy};
pub use error::{Body, Error, ErrorKind, Operation, Result};
pub use fence::{Access, Fence};
pub use key::{IntoKey, Key, MAX_KEY_BYTES};
pub use observe::Event;
pub use primitives::guard::{Guard, Permits, State};
pub use primitives::{Lock, LockGuard, MultiGuard, MultiLock, Mutex, RwLock, Semaphore};

#[cfg(feature = "macros")]
pub use dlock_macros::{distributed_lock, key};

/// What expanded macros use.
#[doc(hidden)]
pub mod __private {
    pub use crate::attribute::handled;
    pub use crate::key::KeyWriter;
}

/// The examples of `docs/` compile and run; those of the README do in `examples`.
#[cfg(doctest)]
mod documents {
    #[doc = include_str!("../../docs/fencing.md")]
    struct Fencing;
    #[doc = include_str!("../../docs/redis.md")]
    struct Redis;
    #[doc = include_str!("../../docs/attribute.md")]
    struct Attribute;
}
