use std::sync::Arc;

use super::lock::Lock;
use crate::claim::Mode;
use crate::client::Handle;
use crate::error::Result;
use crate::key::Key;
use crate::primitives::guard::Guard;

/// A read-write lock: [`Dlock::rwlock`](crate::Dlock::rwlock).
///
/// First come, first served: a writer waits for the readers before it and holds
/// back those after it, so neither side starves. Its writing side and a mutex of
/// the same key are the same thing.
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

    /// The reading side.
    pub fn read(&self) -> Lock<Guard> {
        Lock::new(self.handle.clone(), self.key.clone(), Mode::Shared)
    }

    /// The writing side.
    pub fn write(&self) -> Lock<Guard> {
        Lock::new(self.handle.clone(), self.key.clone(), Mode::Exclusive)
    }
}
