//! A task that ends with the value that needs it.

use tokio::task::AbortHandle;

/// A task, which is aborted when this value is dropped.
#[derive(Debug)]
pub(super) struct AbortOnDrop(pub(super) AbortHandle);

impl Drop for AbortOnDrop {
    fn drop(&mut self) {
        self.0.abort();
    }
}
