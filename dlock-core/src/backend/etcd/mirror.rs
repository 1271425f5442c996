//! Pure: a copy of the entries below one prefix, kept by a watch.
//!
//! ```text
//!   opening --(the watch was created)--> loading --(all entries were read)--> live
//!      ^                                                                       |
//!      +------------------(the watch ended)------------------------------------+
//! ```
//!
//! The watch begins at the present, since one that begins at a past revision is served by a
//! loop of the server that runs every 100 ms only. The entries are read after the watch was
//! created, so no change falls between the two; changes that arrive before the read is
//! answered are kept, and those that the read has seen already are left out.

use super::layout::{Place, holders};

/// A change of an entry, and its revision.
#[derive(Clone, Debug)]
pub(super) enum Change {
    Put(Place, i64),
    Delete(String, i64),
}

/// Where an entry stands.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum QueueStatus {
    /// That is not known yet.
    Unknown,
    Waits,
    Holds,
    /// It was there, and is not any more.
    Gone,
}

/// A copy of the entries below a prefix.
#[derive(Debug, Default)]
pub(super) enum Mirror {
    #[default]
    Opening,
    Loading(Vec<Change>),
    Live {
        /// In the order of their create revisions.
        places: Vec<Place>,
        /// The revision as of which they were read.
        read_at: i64,
        /// The last revision that is known of.
        revision: i64,
    },
}

impl Mirror {
    /// The watch was created: the entries are to be read.
    pub(super) fn opened(&mut self) {
        *self = Mirror::Loading(Vec::new());
    }

    /// The entries as of a revision.
    pub(super) fn loaded(&mut self, mut places: Vec<Place>, revision: i64) {
        let Mirror::Loading(changes) = self else { return };
        let changes = std::mem::take(changes);
        places.sort_by_key(|place| place.revision);
        *self = Mirror::Live { places, read_at: revision, revision };
        changes.into_iter().for_each(|change| self.changed(change));
    }

    /// A change that the watch told of.
    pub(super) fn changed(&mut self, change: Change) {
        let places = match self {
            Mirror::Opening => return,
            Mirror::Loading(changes) => return changes.push(change),
            Mirror::Live { places, read_at, revision } => {
                let (Change::Put(_, at) | Change::Delete(_, at)) = &change;
                if *at <= *read_at {
                    return;
                }
                *revision = (*revision).max(*at);
                places
            }
        };
        match change {
            Change::Delete(entry, _) => places.retain(|place| place.entry != entry),
            Change::Put(place, _) => {
                places.retain(|other| other.entry != place.entry);
                let at = places.partition_point(|other| other.revision < place.revision);
                places.insert(at, place);
            }
        }
    }

    /// Where the entry with this create revision stands.
    pub(super) fn queue_status(&self, own: i64) -> QueueStatus {
        let Mirror::Live { places, revision, .. } = self else { return QueueStatus::Unknown };
        match places.iter().position(|place| place.revision == own) {
            Some(at) if at < holders(places) => QueueStatus::Holds,
            Some(_) => QueueStatus::Waits,
            None if *revision >= own => QueueStatus::Gone,
            None => QueueStatus::Unknown,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::claim::Mode;

    fn place(revision: i64) -> Place {
        Place { revision, entry: format!("a/{revision}"), mode: Mode::Exclusive }
    }

    fn gone(revision: i64, at: i64) -> Change {
        Change::Delete(format!("a/{revision}"), at)
    }

    #[test]
    fn nothing_is_known_before_the_entries_were_read() {
        let mut mirror = Mirror::default();
        mirror.changed(gone(3, 9));
        mirror.loaded(vec![place(3)], 5);
        assert_eq!(mirror.queue_status(3), QueueStatus::Unknown, "it was not asked for");
        mirror.opened();
        assert_eq!(mirror.queue_status(3), QueueStatus::Unknown);
        mirror.loaded(vec![place(5), place(3)], 5);
        assert_eq!(mirror.queue_status(3), QueueStatus::Holds);
        assert_eq!(mirror.queue_status(5), QueueStatus::Waits);
        assert_eq!(mirror.queue_status(6), QueueStatus::Unknown);
        assert_eq!(mirror.queue_status(4), QueueStatus::Gone);
    }

    /// A change may arrive before the answer to the read, whichever was first at the store.
    #[test]
    fn changes_while_it_is_read_count_once() {
        let mut mirror = Mirror::default();
        mirror.opened();
        mirror.changed(Change::Put(place(6), 6)); // the read has seen it
        mirror.changed(gone(3, 7)); // and not this
        mirror.loaded(vec![place(3), place(6)], 6);
        assert_eq!(mirror.queue_status(3), QueueStatus::Gone);
        assert_eq!(mirror.queue_status(6), QueueStatus::Holds);
        // A change that was overtaken by the read does not bring an entry back.
        let mut mirror = Mirror::default();
        mirror.opened();
        mirror.changed(Change::Put(place(6), 6));
        mirror.changed(gone(6, 7));
        mirror.loaded(vec![], 7);
        assert_eq!(mirror.queue_status(6), QueueStatus::Gone);
    }

    #[test]
    fn several_changes_of_one_transaction_count() {
        let mut mirror = Mirror::default();
        mirror.opened();
        mirror.loaded(vec![place(3), place(4)], 4);
        mirror.changed(gone(3, 9));
        mirror.changed(Change::Put(place(9), 9));
        assert_eq!(mirror.queue_status(4), QueueStatus::Holds);
        assert_eq!(mirror.queue_status(9), QueueStatus::Waits);
        let mut reader = place(4);
        reader.mode = Mode::Shared;
        mirror.changed(Change::Put(reader, 10)); // downgraded: its place is the same
        assert_eq!(mirror.queue_status(4), QueueStatus::Holds);
        mirror.opened();
        assert_eq!(mirror.queue_status(4), QueueStatus::Unknown, "the watch is another one");
    }
}
