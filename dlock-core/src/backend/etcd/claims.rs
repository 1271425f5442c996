//! What a session has at the store, by owner. It is forgotten with the session.

use std::collections::{HashMap, HashSet};

use parking_lot::Mutex;

use crate::claim::Owner;
use crate::key::Key;

/// What one owner has.
#[derive(Clone, Debug)]
pub(super) struct Entry {
    pub(super) key: Key,
    /// What the entries of its key begin with.
    pub(super) prefix: String,
    /// The create revision of the entry, once it is known.
    pub(super) revision: Option<i64>,
    /// How many requests that make the entry have not been answered. One of them may yet be
    /// applied.
    unanswered: u32,
    /// Whether a request that removes the entry was sent.
    is_removal_sent: bool,
}

impl Entry {
    /// Whether the entry may be made yet, or again, by a request that is on its way.
    pub(super) fn is_doubtful(&self) -> bool {
        self.unanswered > 0
    }
}

/// What a session has at the store.
#[derive(Default)]
pub(super) struct Claims {
    entries: Mutex<HashMap<Owner, Entry>>,
    /// The owners whose entries are being removed.
    leaving: Mutex<HashSet<Owner>>,
}

impl Claims {
    pub(super) fn get(&self, owner: Owner) -> Option<Entry> {
        self.entries.lock().get(&owner).cloned()
    }

    pub(super) fn has(&self, owner: Owner) -> bool {
        self.entries.lock().contains_key(&owner)
    }

    /// A request that makes an entry of this owner is about to be sent.
    pub(super) fn sending(&self, owner: Owner, key: &Key, prefix: &str) {
        let mut entries = self.entries.lock();
        let entry = entries.entry(owner).or_insert_with(|| Entry {
            key: key.clone(),
            prefix: prefix.to_owned(),
            revision: None,
            unanswered: 0,
            is_removal_sent: false,
        });
        entry.unanswered += 1;
    }

    /// One of those requests was answered, or will surely not be applied.
    pub(super) fn answered(&self, owner: Owner, revision: Option<i64>) {
        let mut entries = self.entries.lock();
        let Some(entry) = entries.get_mut(&owner) else { return };
        entry.unanswered = entry.unanswered.saturating_sub(1);
        entry.revision = revision.or(entry.revision);
        if entry.revision.is_none() && entry.unanswered == 0 {
            entries.remove(&owner);
        }
    }

    /// A request that removes the entry is about to be sent. True if one was sent before: if
    /// the entry is gone then, it is that one's doing.
    pub(super) fn removing(&self, owner: Owner) -> bool {
        let mut entries = self.entries.lock();
        let entry = entries.get_mut(&owner);
        entry.is_some_and(|entry| std::mem::replace(&mut entry.is_removal_sent, true))
    }

    /// This owner has nothing any more.
    pub(super) fn forget(&self, owner: Owner) -> Option<Entry> {
        self.entries.lock().remove(&owner)
    }

    /// What this owner has is to be removed; false if that is under way.
    pub(super) fn leave(&self, owner: Owner) -> bool {
        self.leaving.lock().insert(owner)
    }

    pub(super) fn is_leaving(&self, owner: Owner) -> bool {
        self.leaving.lock().contains(&owner)
    }

    pub(super) fn left(&self, owner: Owner) {
        self.leaving.lock().remove(&owner);
    }

    pub(super) fn clear(&self) {
        self.entries.lock().clear();
        self.leaving.lock().clear();
    }
}
