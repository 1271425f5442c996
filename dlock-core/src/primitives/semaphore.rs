//! A semaphore.

use std::sync::Arc;

use super::lock::Lock;
use crate::claim::Mode;
use crate::client::Handle;
use crate::error::{Error, ErrorKind, Operation, Result};
use crate::key::Key;
use crate::primitives::guard::Permits;

/// A semaphore: a number of permits that several tasks hold at the same time
/// ([`Dlock::semaphore`](crate::Dlock::semaphore)).
///
/// First come, first served: a request for many permits is not overtaken by requests
/// for few. Permits of a process that died are free again after their ttl.
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

    /// A lock on this many permits, all or none. With zero, or more than the
    /// semaphore has, `lock()` fails with `Invalid`.
    pub fn permits(&self, permits: u32) -> Lock<Permits> {
        let key = self.key.clone().and_then(|key| self.check(permits, key));
        let mode = Mode::Permits { count: permits, of: self.capacity };
        Lock::new(self.handle.clone(), key, mode)
    }

    fn check(&self, permits: u32, key: Key) -> Result<Key> {
        let fault = if permits == 0 {
            "the number of permits is zero; request at least one".to_owned()
        } else if permits > self.capacity {
            format!(
                "{permits} permits were requested, but the semaphore has {}; request fewer or raise the capacity",
                self.capacity
            )
        } else {
            return Ok(key);
        };
        Err(Error::new(ErrorKind::Invalid, Operation::Acquire).with_key(&key).with_message(fault))
    }
}
