//! A read-write lock.

use std::sync::Arc;

use super::lock::Lock;
use crate::claim::Mode;
use crate::client::Handle;
use crate::error::Result;
use crate::key::Key;
use crate::primitives::guard::Guard;

/// A read-write lock: [`Dlock::rwlock`](crate::Dlock::rwlock).
///
/// First come, first served: a writer waits for the readers before it, and readers
/// after it wait for the writer, so neither side starves. The write side and a mutex
/// of the same key are the same lock.
///
/// ```
/// # #[tokio::main(flavor = "current_thread")] async fn main() -> dlock::Result<()> {
/// # let dlock = dlock::Dlock::connect("memory://").await?;
/// let prices = dlock.rwlock("prices");
/// let writing = prices.write().lock().await?;
/// let reading = writing.downgrade(); // nobody wrote in between
/// let also = prices.read().lock().await?;
/// # Ok(()) }
/// ```
#[derive(Clone, Debug)]
pub struct RwLock {
    handle: Arc<Handle>,
    key: Result<Key>,
}

impl RwLock {
    pub(crate) fn new(handle: Arc<Handle>, key: Result<Key>) -> Self {
        RwLock { handle, key }
    }

    /// The read side: a lock that is shared with other readers.
    pub fn read(&self) -> Lock<Guard> {
        Lock::new(self.handle.clone(), self.key.clone(), Mode::Shared)
    }

    /// The write side: an exclusive lock.
    pub fn write(&self) -> Lock<Guard> {
        Lock::new(self.handle.clone(), self.key.clone(), Mode::Exclusive)
    }
}
