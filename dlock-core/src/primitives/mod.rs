//! The lock primitives and their guards. Each makes a [`LockRequest`] for the
//! driver; none knows which backend there is.
//!
//! [`LockRequest`]: crate::machine::LockRequest

mod acquire;
pub(crate) mod guard;
mod hold;
mod lock;
mod multi;
mod options;
pub(crate) mod reentry;
pub(crate) mod run;
mod rwlock;
mod semaphore;

pub use lock::{Lock, LockGuard, Mutex};
pub use multi::{MultiGuard, MultiLock};
pub use rwlock::RwLock;
pub use semaphore::Semaphore;
