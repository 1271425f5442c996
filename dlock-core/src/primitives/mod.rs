//! What a user asks for. Each builds a claim and goes through the gate; none
//! knows which backend there is.

mod acquire;
pub(crate) mod guard;
mod lock;
mod multi;
pub(crate) mod reentry;
pub(crate) mod run;
mod rwlock;
mod semaphore;

pub use lock::{Held, Lock, Mutex};
pub use multi::{MultiGuard, MultiLock};
pub use rwlock::RwLock;
pub use semaphore::Semaphore;
