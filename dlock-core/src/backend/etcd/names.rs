//! Pure: the names of a session's entries, which are used again.
//!
//! etcd keeps the name of a deleted key until it is compacted, and visits it whenever the
//! entries of its lock are read. So an entry has the lowest number that no other entry of the
//! session has below its prefix: a lock has as many names as a client has claims of it at once.
//!
//! A name is taken for as long as somebody has it. It must not be let go before it is certain
//! that its entry is not there and that no request makes it. A request that removes an entry
//! compares the create revision, so one that is late does nothing to the next entry of that name.

use std::cmp::Reverse;
use std::collections::{BinaryHeap, HashMap};
use std::fmt;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use parking_lot::Mutex;

use super::layout;

/// The numbers of the entries below one prefix.
#[derive(Default)]
struct Numbers {
    /// None from this one on was ever taken.
    next: u32,
    free: BinaryHeap<Reverse<u32>>,
}

impl Numbers {
    fn take(&mut self) -> u32 {
        if let Some(Reverse(number)) = self.free.pop() {
            return number;
        }
        self.next += 1;
        self.next - 1
    }

    fn are_all_free(&self) -> bool {
        usize::try_from(self.next) == Ok(self.free.len())
    }
}

type ByPrefix = Mutex<HashMap<String, Numbers>>;

/// The names of a session's entries.
#[derive(Default)]
pub(super) struct Names(Arc<ByPrefix>);

impl Names {
    /// A name below this prefix that no entry of the session has.
    pub(super) fn take(&self, prefix: &str, lease: i64) -> Arc<Name> {
        let mut by_prefix = self.0.lock();
        let number = match by_prefix.get_mut(prefix) {
            Some(numbers) => numbers.take(),
            None => by_prefix.entry(prefix.to_owned()).or_default().take(),
        };
        Arc::new(Name {
            prefix: prefix.to_owned(),
            entry: layout::entry(prefix, lease, number),
            number,
            is_abandoned: AtomicBool::new(false),
            names: self.0.clone(),
        })
    }
}

/// The name of an entry. It can be taken again when it is dropped.
pub(super) struct Name {
    /// What the entries of its key begin with.
    pub(super) prefix: String,
    pub(super) entry: String,
    number: u32,
    is_abandoned: AtomicBool,
    names: Arc<ByPrefix>,
}

impl Name {
    /// The entry may be there for as long as the session lives: no other gets this name.
    pub(super) fn abandon(&self) {
        self.is_abandoned.store(true, Ordering::Relaxed);
    }
}

impl Drop for Name {
    fn drop(&mut self) {
        if self.is_abandoned.load(Ordering::Relaxed) {
            return;
        }
        let mut by_prefix = self.names.lock();
        let Some(numbers) = by_prefix.get_mut(&self.prefix) else { return };
        numbers.free.push(Reverse(self.number));
        if numbers.are_all_free() {
            by_prefix.remove(&self.prefix);
        }
    }
}

impl fmt::Debug for Name {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.entry)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_name_is_used_again_when_nobody_has_it() {
        let names = Names::default();
        let take = || names.take("a/", 0x5e);
        let (first, second, third) = (take(), take(), take());
        assert_eq!(
            [&first, &second, &third].map(|name| name.entry.as_str()),
            ["a/5e-0", "a/5e-1", "a/5e-2"]
        );
        assert_eq!(names.take("b/", 0x5e).entry, "b/5e-0", "each prefix has numbers of its own");
        let other = second.clone();
        drop((third, second));
        assert_eq!(take().entry, "a/5e-2", "somebody has the second yet");
        drop(other);
        assert_eq!(take().entry, "a/5e-1");
        drop(first);
        assert!(names.0.lock().is_empty(), "nothing is kept of a key that nobody claims");
        assert_eq!(take().entry, "a/5e-0");
    }

    #[test]
    fn an_abandoned_name_is_not_used_again() {
        let names = Names::default();
        let first = names.take("a/", 0x5e);
        first.abandon();
        drop(first);
        assert_eq!(names.take("a/", 0x5e).entry, "a/5e-1");
        assert_eq!(names.take("a/", 0x5e).entry, "a/5e-1");
    }
}
