//! The claims of a session that are being removed from the store.

use std::collections::HashSet;

use parking_lot::Mutex;

use crate::claim::Owner;

/// The owners whose entries are being removed. Each removal is made by one task at a time.
#[derive(Default)]
pub(super) struct Removals(Mutex<HashSet<Owner>>);

impl Removals {
    /// Begins to remove what this owner has; false if that is under way.
    pub(super) fn begin(&self, owner: Owner) -> bool {
        self.0.lock().insert(owner)
    }

    pub(super) fn is_under_way(&self, owner: Owner) -> bool {
        self.0.lock().contains(&owner)
    }

    pub(super) fn end(&self, owner: Owner) {
        self.0.lock().remove(&owner);
    }

    pub(super) fn clear(&self) {
        self.0.lock().clear();
    }
}
