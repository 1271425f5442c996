//! What a backend writes about the holder of a claim, made once: the claims of a client
//! nearly always have the same holder.

use std::sync::Arc;

use parking_lot::Mutex;

use crate::claim::Holder;

/// The latest holder, and what was made of it.
pub(super) struct PerHolder<T>(Mutex<Option<(Arc<Holder>, T)>>);

impl<T: Clone> PerHolder<T> {
    pub(super) const fn new() -> Self {
        PerHolder(Mutex::new(None))
    }

    /// What is made of this holder, unless it is known already.
    pub(super) fn get(&self, holder: &Arc<Holder>, make: impl FnOnce() -> T) -> T {
        let mut latest = self.0.lock();
        match &*latest {
            Some((whose, made)) if Arc::ptr_eq(whose, holder) => made.clone(),
            _ => {
                let made = make();
                *latest = Some((holder.clone(), made.clone()));
                made
            }
        }
    }
}
