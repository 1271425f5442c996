//! What a session has at the store, by owner. It is forgotten with the session.

use std::collections::HashMap;

use parking_lot::Mutex;
use tokio::task::AbortHandle;

use crate::backend::abort_on_drop::AbortOnDrop;
use crate::backend::removals::Removals;
use crate::claim::Owner;
use crate::clock::Moment;
use crate::key::Key;

/// A node of ours.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Node {
    pub(super) path: String,
    /// The number of the transaction that made it.
    pub(super) czxid: i64,
}

impl Node {
    /// Its name below its parent.
    pub(super) fn name(&self) -> &str {
        self.path.rsplit('/').next().unwrap_or("")
    }
}

/// What one owner has.
pub(super) struct Entry {
    key: Key,
    /// Whether a node may be there that is not known: a create was sent, and its answer was
    /// not seen yet.
    is_doubtful: bool,
    /// The node in the queue of the key or, of a semaphore, of its mutex.
    place: Option<Node>,
    /// The permits of a semaphore.
    leases: Vec<Node>,
    held_since: Option<Moment>,
    /// Waits for the node in front.
    waits: Option<Watch>,
    /// Waits for the end of a node of ours that is held.
    watches_own: Option<Watch>,
}

/// A task that waits for a change of a node, and ends with this value.
pub(super) struct Watch {
    path: String,
    task: AbortOnDrop,
}

impl Watch {
    pub(super) fn new(path: String, task: AbortHandle) -> Self {
        Watch { path, task: AbortOnDrop(task) }
    }
}

/// What is known of an owner.
#[derive(Clone, Debug, Default)]
pub(super) struct Known {
    pub(super) is_doubtful: bool,
    pub(super) place: Option<Node>,
    pub(super) leases: Vec<Node>,
}

/// What a session has at the store.
#[derive(Default)]
pub(super) struct Claims {
    entries: Mutex<HashMap<Owner, Entry>>,
    pub(super) removals: Removals,
}

impl Claims {
    pub(super) fn get(&self, owner: Owner) -> Option<Known> {
        let claims = self.entries.lock();
        let entry = claims.get(&owner)?;
        let (place, leases) = (entry.place.clone(), entry.leases.clone());
        Some(Known { is_doubtful: entry.is_doubtful, place, leases })
    }

    fn change<T>(&self, owner: Owner, key: &Key, change: impl FnOnce(&mut Entry) -> T) -> T {
        let mut claims = self.entries.lock();
        change(claims.entry(owner).or_insert_with(|| Entry {
            key: key.clone(),
            is_doubtful: false,
            place: None,
            leases: Vec::new(),
            held_since: None,
            waits: None,
            watches_own: None,
        }))
    }

    /// A create of this owner is about to be sent.
    pub(super) fn doubt(&self, owner: Owner, key: &Key) {
        self.change(owner, key, |entry| entry.is_doubtful = true);
    }

    /// The same for an owner that has a node already; false if it is gone or being removed.
    pub(super) fn doubt_if_there(&self, owner: Owner) -> bool {
        if self.removals.is_under_way(owner) {
            return false;
        }
        let mut claims = self.entries.lock();
        claims.get_mut(&owner).map(|entry| entry.is_doubtful = true).is_some()
    }

    /// All that was sent for this owner was answered.
    pub(super) fn settled(&self, owner: Owner) {
        if let Some(entry) = self.entries.lock().get_mut(&owner) {
            entry.is_doubtful = false;
        }
    }

    /// The server refused the create that was sent last: nothing came of it.
    pub(super) fn refused(&self, owner: Owner) {
        let mut claims = self.entries.lock();
        let Some(entry) = claims.get_mut(&owner) else { return };
        entry.is_doubtful = false;
        let has_nothing = entry.place.is_none() && entry.leases.is_empty();
        let forgotten = if has_nothing { claims.remove(&owner) } else { None };
        drop(claims);
        drop(forgotten); // without the lock
    }

    /// A removal of what this owner has is about to be sent.
    pub(super) fn doubt_again(&self, owner: Owner) {
        let mut watches = (None, None);
        if let Some(entry) = self.entries.lock().get_mut(&owner) {
            entry.is_doubtful = true;
            entry.held_since = None;
            watches = (entry.waits.take(), entry.watches_own.take());
        }
        drop(watches); // without the lock
    }

    /// It is known what this owner has.
    pub(super) fn set(&self, owner: Owner, key: &Key, place: Option<Node>, leases: Vec<Node>) {
        self.change(owner, key, |entry| {
            entry.is_doubtful = false;
            entry.place = place;
            entry.leases = leases;
        });
    }

    /// This owner holds the key.
    pub(super) fn hold(&self, owner: Owner, key: &Key) {
        self.change(owner, key, |entry| {
            entry.waits = None;
            entry.held_since.get_or_insert_with(Moment::now);
        });
    }

    /// Whether this owner waits for this node already.
    pub(super) fn waits_for(&self, owner: Owner, path: &str) -> bool {
        let claims = self.entries.lock();
        let waits = claims.get(&owner).and_then(|entry| entry.waits.as_ref());
        waits.is_some_and(|watch| watch.path == path && !watch.task.0.is_finished())
    }

    pub(super) fn wait(&self, owner: Owner, key: &Key, watch: Watch) {
        let before = self.change(owner, key, |entry| entry.waits.replace(watch));
        drop(before); // without the lock
    }

    /// The owners that hold a node for longer than this without watching it.
    pub(super) fn unwatched(&self, since: Moment) -> Vec<(Owner, Key, String)> {
        let claims = self.entries.lock();
        let is_due = |entry: &Entry| {
            entry.watches_own.is_none() && entry.held_since.is_some_and(|held| held <= since)
        };
        let unwatched = claims.iter().filter(|(_, entry)| is_due(entry));
        let node = |entry: &Entry| entry.leases.first().or(entry.place.as_ref()).cloned();
        unwatched
            .filter_map(|(owner, entry)| Some((*owner, entry.key.clone(), node(entry)?.path)))
            .collect()
    }

    pub(super) fn watch_own(&self, owner: Owner, watch: Watch) {
        if let Some(entry) = self.entries.lock().get_mut(&owner) {
            entry.watches_own = Some(watch);
        }
    }

    /// The node of this owner got another name.
    pub(super) fn renamed(&self, owner: Owner, node: Node) {
        let watch = self.entries.lock().get_mut(&owner).and_then(|entry| {
            entry.place = Some(node);
            entry.watches_own.take()
        });
        drop(watch);
    }

    /// This owner has nothing any more; what it had.
    pub(super) fn remove(&self, owner: Owner) -> Option<Known> {
        let entry = self.entries.lock().remove(&owner)?;
        let Entry { is_doubtful, place, leases, .. } = entry;
        Some(Known { is_doubtful, place, leases })
    }

    pub(super) fn clear(&self) {
        let entries = std::mem::take(&mut *self.entries.lock());
        drop(entries);
        self.removals.clear();
    }
}
