//! Where an inventory is kept, and how it is called.

use std::sync::Arc;

use dlock::Dlock;
use dlock::extension::BatchLimits;

use super::combiner::Combiner;
use crate::error::{Error, Result};
use crate::store::memory::{Memory, SharedHome};
use crate::store::{InventoryId, Store};

pub(super) enum Backing {
    /// The embedded store, which answers at once.
    Memory(Memory, SharedHome),
    Remote(Arc<dyn Store>, Arc<Combiner>),
}

impl Backing {
    pub(super) fn new(dlock: &Dlock, inventory: &InventoryId, limits: BatchLimits) -> Result<Self> {
        if let Some(memory) = Memory::new(dlock.client_extension()) {
            let home = memory.home(inventory)?;
            return Ok(Backing::Memory(memory, home));
        }
        let store = store(dlock)?;
        let extension = dlock.client_extension();
        let combiner = Combiner::new(store.clone(), extension, inventory.clone(), limits);
        Ok(Backing::Remote(store, Arc::new(combiner)))
    }

    pub(super) fn store(&self, dlock: &Dlock) -> Result<Arc<dyn Store>> {
        match self {
            Backing::Memory(..) => store(dlock),
            Backing::Remote(store, _) => Ok(store.clone()),
        }
    }
}

/// The store of inventories that belongs to the lock store of this client.
pub(super) fn store(dlock: &Dlock) -> Result<Arc<dyn Store>> {
    if let Some(memory) = Memory::new(dlock.client_extension()) {
        return Ok(Arc::new(memory));
    }
    #[cfg(feature = "redis")]
    if let Some(redis) = crate::store::redis::Redis::new(dlock.client_extension()) {
        return Ok(Arc::new(redis));
    }
    #[cfg(any(feature = "mysql", feature = "postgres", feature = "sqlite"))]
    if let Some(sql) = crate::store::sql::Sql::new(dlock.client_extension()) {
        return Ok(Arc::new(sql));
    }
    let name = dlock.capabilities().name;
    Err(Error::Store(
        dlock::Error::new(dlock::ErrorKind::Unsupported, dlock::Operation::Inventory)
            .with_message(format!("{name}:// cannot keep an inventory, or dlock-segment was built without the feature for it; memory://, redis:// and SQL databases can")),
    ))
}

/// Runs a call on the driver, which has the connections. With the embedded store it runs
/// right here.
pub(crate) async fn on_driver<T, C, F>(dlock: &Dlock, store: Arc<dyn Store>, call: C) -> Result<T>
where
    T: Send + 'static,
    C: FnOnce(Arc<dyn Store>) -> F + Send + 'static,
    F: Future<Output = Result<T>> + Send + 'static,
{
    refuse_after_shutdown(dlock)?;
    if !dlock.capabilities().remote {
        return call(store).await;
    }
    let (answer, answered) = tokio::sync::oneshot::channel();
    dlock.client_extension().spawn(async move {
        let _ = answer.send(call(store).await);
    })?;
    answered.await.unwrap_or(Err(Error::Unknown(None)))
}

/// Refuses calls through a client that was shut down.
pub(super) fn refuse_after_shutdown(dlock: &Dlock) -> Result<()> {
    if !dlock.client_extension().is_shut_down() {
        return Ok(());
    }
    Err(Error::Store(
        dlock::Error::new(dlock::ErrorKind::ShuttingDown, dlock::Operation::Inventory)
            .with_message(
                "shutdown() was called on this client, and nothing was sent; make a new client",
            ),
    ))
}

/// The error of a call that only reads: it failed, and no outcome is unknown.
pub(super) fn read_failed(error: Error) -> Error {
    match error {
        Error::Unknown(_) => Error::Store(
            dlock::Error::new(dlock::ErrorKind::Unavailable, dlock::Operation::Inventory)
                .with_message("the store did not answer, or its answer cannot be read; try again"),
        ),
        error => error,
    }
}
