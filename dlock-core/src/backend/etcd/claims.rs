//! What a session has at the store, by owner. It is forgotten with the session.

use std::collections::HashMap;
use std::sync::Arc;

use parking_lot::Mutex;

use super::names::{Name, Names};
use crate::backend::removals::Removals;
use crate::claim::Owner;
use crate::key::Key;

/// What one owner has.
#[derive(Clone, Debug)]
pub(super) struct Entry {
    pub(super) key: Key,
    pub(super) name: Arc<Name>,
    /// The create revision of the entry, once it is known.
    pub(super) revision: Option<i64>,
    /// The version of the session for which requests that make the entry were sent last.
    sent_for: i64,
    /// How many of those have not been answered. One of them may yet be applied; one that was
    /// sent for an earlier version may not.
    unanswered: u32,
    /// Whether one that was sent for an earlier version was not answered: it was applied, or
    /// never will be.
    is_uncertain: bool,
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
        self.revision.filter(|_| !self.may_be_made())
    }

    /// Whether a request whose answer is not known makes the entry, or made it.
    fn may_be_made(&self) -> bool {
        self.unanswered > 0 || self.is_uncertain
    }
}

/// What a session has at the store.
#[derive(Default)]
pub(super) struct Claims {
    entries: Mutex<HashMap<Owner, Entry>>,
    pub(super) names: Names,
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
    /// session. Answers the name to use: the one that the owner has already, or else this one.
    pub(super) fn sending(
        &self,
        owner: Owner,
        key: &Key,
        name: &Arc<Name>,
        version: i64,
    ) -> Arc<Name> {
        let mut entries = self.entries.lock();
        let entry = entries.entry(owner).or_insert_with(|| Entry {
            key: key.clone(),
            name: name.clone(),
            revision: None,
            sent_for: version,
            unanswered: 0,
            is_uncertain: false,
            is_removal_sent: false,
        });
        if entry.sent_for < version {
            entry.is_uncertain |= entry.unanswered > 0;
            (entry.sent_for, entry.unanswered) = (version, 0);
        }
        entry.unanswered += 1;
        entry.name.clone()
    }

    /// One of those requests was answered: the entry has this create revision, or is not there.
    pub(super) fn answered(&self, owner: Owner, version: i64, revision: Option<i64>) {
        self.settle(owner, version, |entry, is_latest| {
            // It was carried out after all that were sent for an earlier version.
            entry.is_uncertain &= !is_latest;
            // A late answer may be about an older one.
            entry.revision = revision.max(entry.revision);
        });
    }

    /// One of those requests will surely not be applied.
    pub(super) fn not_applied(&self, owner: Owner, version: i64) {
        self.settle(owner, version, |_, _| {});
    }

    fn settle(&self, owner: Owner, version: i64, learn: impl FnOnce(&mut Entry, bool)) {
        let mut entries = self.entries.lock();
        let Some(entry) = entries.get_mut(&owner) else { return };
        let is_latest = entry.sent_for == version;
        if is_latest {
            entry.unanswered = entry.unanswered.saturating_sub(1);
        }
        learn(entry, is_latest);
        if entry.revision.is_none() && !entry.may_be_made() {
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

#[cfg(test)]
mod tests {
    use super::*;

    const OWNER: Owner = Owner::from_bits(7);

    fn claims() -> (Claims, Key, Arc<Name>) {
        let claims = Claims::default();
        let name = claims.names.take("a/", 5);
        (claims, Key::new("a").unwrap(), name)
    }

    #[test]
    fn an_entry_that_was_not_made_is_forgotten() {
        let (claims, key, name) = claims();
        claims.sending(OWNER, &key, &name, 1);
        assert_eq!(claims.get(OWNER).unwrap().doubtful_version(1), Some(1));
        claims.answered(OWNER, 1, None);
        assert!(!claims.has(OWNER));
        claims.sending(OWNER, &key, &name, 1);
        claims.not_applied(OWNER, 1);
        assert!(!claims.has(OWNER));
    }

    #[test]
    fn a_request_of_an_earlier_version_may_have_made_the_entry() {
        let (claims, key, name) = claims();
        claims.sending(OWNER, &key, &name, 1); // not answered
        claims.sending(OWNER, &key, &name, 2);
        claims.not_applied(OWNER, 2);
        let known = claims.get(OWNER).expect("the first one may have been applied");
        assert_eq!((known.doubtful_version(2), known.certain_revision()), (None, None));
        claims.sending(OWNER, &key, &name, 2);
        claims.answered(OWNER, 2, Some(9));
        assert_eq!(claims.get(OWNER).unwrap().certain_revision(), Some(9));
        claims.sending(OWNER, &key, &name, 2);
        assert_eq!(claims.get(OWNER).unwrap().certain_revision(), None, "it may be made anew");
    }

    #[test]
    fn an_owner_has_one_name() {
        let (claims, key, name) = claims();
        let other = claims.names.take("a/", 5);
        claims.sending(OWNER, &key, &name, 1);
        assert_eq!(claims.sending(OWNER, &key, &other, 1).entry, name.entry);
    }
}
