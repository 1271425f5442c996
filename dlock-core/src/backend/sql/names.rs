//! How the rows of locks are named: `namespace/l/key` for a lock, `namespace/p/key` for a
//! semaphore. A namespace has no slash, so the names of two namespaces never meet.

use crate::key::Key;

/// The names of the rows of one namespace.
#[derive(Clone, Debug)]
pub(super) struct Names {
    namespace: String,
}

/// A lock and the name of its row.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) struct LockId {
    pub(super) id: String,
    pub(super) permits: bool,
    pub(super) key: Key,
}

impl Names {
    pub(super) fn new(namespace: &str) -> Self {
        Names { namespace: namespace.to_owned() }
    }

    /// The start of the names of all locks, or all semaphores, with this prefix.
    pub(super) fn prefix(&self, prefix: &str, permits: bool) -> String {
        format!("{}/{}/{prefix}", self.namespace, if permits { 'p' } else { 'l' })
    }

    pub(super) fn lock(&self, key: &Key, permits: bool) -> LockId {
        LockId { id: self.prefix(key.as_str(), permits), permits, key: key.clone() }
    }

    /// A key as a lock and as a semaphore.
    pub(super) fn both(&self, key: &Key) -> [LockId; 2] {
        [self.lock(key, false), self.lock(key, true)]
    }

    /// The lock whose row has this name.
    pub(super) fn lock_of(&self, id: &str) -> Option<LockId> {
        let rest = id.strip_prefix(&self.namespace)?.strip_prefix('/')?;
        let (kind, key) = rest.split_once('/')?;
        let permits = match kind {
            "l" => false,
            "p" => true,
            _ => return None,
        };
        Some(LockId { id: id.to_owned(), permits, key: Key::new(key).ok()? })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_lead_back_to_their_keys() {
        let names = Names::new("shop");
        for text in ["a", "order:7", "a/b", "/", "l/x", "näme 🎉", "%_'\"\\"] {
            let key = Key::new(text).unwrap();
            for lock in names.both(&key) {
                assert_eq!(names.lock_of(&lock.id), Some(lock.clone()), "{}", lock.id);
            }
        }
        assert_eq!(names.lock(&Key::new("a").unwrap(), true).id, "shop/p/a");
        assert!(Names::new("sho").lock_of("shop/l/a").is_none());
    }
}
