//! What a session has at the store, by owner. It is forgotten with the session.

use std::collections::HashMap;

use parking_lot::Mutex;

use crate::backend::removals::Removals;
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
    /// The version of the session for which requests that make the entry were sent last.
    sent_for: i64,
    /// How many of those have not been answered. One of them may yet be applied; one that was
    /// sent for an earlier version may not.
    unanswered: u32,
    /// Whether a request that removes the entry was sent.
    is_removal_sent: bool,
}

impl Entry {
    /// The version of the session that has to be outdated before the entry is removed: a
    /// request that is on its way may make it yet, or again. `None` if none is.
    pub(super) fn doubtful_version(&self, current: i64) -> Option<i64> {
        (self.unanswered > 0 && self.sent_for >= current).then_some(self.sent_for)
    }

    /// The create revision, if no other request may have made the entry anew.
    pub(super) fn certain_revision(&self) -> Option<i64> {
        self.revision.filter(|_| self.unanswered == 0)
    }
}

/// What a session has at the store.
#[derive(Default)]
pub(super) struct Claims {
    entries: Mutex<HashMap<Owner, Entry>>,
    pub(super) removals: Removals,
}

impl Claims {
    pub(super) fn get(&self, owner: Owner) -> Option<Entry> {
        self.entries.lock().get(&owner).cloned()
    }

    pub(super) fn has(&self, owner: Owner) -> bool {
        self.entries.lock().contains_key(&owner)
    }

    /// A request that makes an entry of this owner is about to be sent, for this version of the
    /// session.
    pub(super) fn sending(&self, owner: Owner, key: &Key, prefix: &str, version: i64) {
        let mut entries = self.entries.lock();
        let entry = entries.entry(owner).or_insert_with(|| Entry {
            key: key.clone(),
            prefix: prefix.to_owned(),
            revision: None,
            sent_for: version,
            unanswered: 0,
            is_removal_sent: false,
        });
        if entry.sent_for < version {
            (entry.sent_for, entry.unanswered) = (version, 0);
        }
        entry.unanswered += 1;
    }

    /// One of those requests was answered, or will surely not be applied.
    pub(super) fn answered(&self, owner: Owner, version: i64, revision: Option<i64>) {
        let mut entries = self.entries.lock();
        let Some(entry) = entries.get_mut(&owner) else { return };
        if entry.sent_for == version {
            entry.unanswered = entry.unanswered.saturating_sub(1);
        }
        entry.revision = revision.max(entry.revision); // a late answer may be about an older one
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

    pub(super) fn clear(&self) {
        self.entries.lock().clear();
        self.removals.clear();
    }
}
