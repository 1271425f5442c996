use std::sync::Arc;

use super::lock::Lock;
use crate::claim::Mode;
use crate::client::Handle;
use crate::error::{Error, ErrorKind, Operation, Result};
use crate::key::Key;
use crate::primitives::guard::Permits;

/// A number of permits: [`Dlock::semaphore`](crate::Dlock::semaphore).
///
/// First come, first served: who wants many is not overtaken for ever by those
/// who want few. Permits of a process that died come back after their ttl.
///
/// ```
/// # #[tokio::main(flavor = "current_thread")] async fn main() -> dlock::Result<()> {
/// # let dlock = dlock::Dlock::connect("memory://").await?;
/// let exports = dlock.semaphore("exports", 10);
/// let permits = exports.permits(3).lock().await?;
/// assert_eq!(permits.count(), 3);
/// # Ok(()) }
/// ```
#[derive(Clone, Debug)]
pub struct Semaphore {
    handle: Arc<Handle>,
    key: Result<Key>,
    capacity: u32,
}

impl Semaphore {
    pub(crate) fn new(handle: Arc<Handle>, key: Result<Key>, capacity: u32) -> Self {
        Semaphore { handle, key, capacity }
    }

    /// This many permits, all or none. None, or more than there are, is told by
    /// `lock()` as `Invalid`.
    pub fn permits(&self, permits: u32) -> Lock<Permits> {
        let key = self.key.clone().and_then(|key| self.check(permits, key));
        let mode = Mode::Permits { count: permits, of: self.capacity };
        Lock::new(self.handle.clone(), key, mode)
    }

    fn check(&self, permits: u32, key: Key) -> Result<Key> {
        let fault = if permits == 0 {
            "asked for no permits; take at least one".to_owned()
        } else if permits > self.capacity {
            format!(
                "asked for {permits} permits of {}, which can never be; take fewer or raise the capacity",
                self.capacity
            )
        } else {
            return Ok(key);
        };
        Err(Error::new(ErrorKind::Invalid, Operation::Acquire).on(&key).saying(fault))
    }
}
