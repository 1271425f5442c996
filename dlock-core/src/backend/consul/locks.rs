//! What this client has in Consul: the locks of its session, and who waits for one.
//!
//! Consul has no queue, so a claim waits here. For each key that is waited for, one query
//! waits at the agent until the key changes ([`watch`](super::watch)).
//!
//! A claim is *in doubt* from when it is asked for until that is answered: it may have a
//! lock, or get one later. A claim in doubt is not asked for again before the earlier request
//! is outdated ([`fence`](super::fence)), so there is one such request at most. A removal is *owed* from when somebody gives a lock up until Consul says that it is
//! gone: the key would stay for as long as the session lives. Who asked for the removal may
//! not wait so long, so the session's keep-alive sees to it.

use std::collections::HashMap;

use super::fence::FenceState;
use super::permits::{HeldPermits, PermitSession};
use crate::backend::abort_on_drop::AbortOnDrop;
use crate::claim::{Owner, Token};
use crate::key::Key;

/// How many keys are watched at the same time. Each takes a connection, and an agent gives
/// an address 200 of them unless it is told otherwise. Claims on further keys ask about
/// once a second.
const WATCHED: usize = 32;
/// How many tokens one index of Consul has room for.
pub(super) const TOKENS: u32 = 1 << 10;

/// A lock that the session has.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct HeldLock {
    pub(super) path: String,
    /// The index of the write that granted it.
    pub(super) index: u64,
}

/// Whether this is the prefix of a semaphore and not the key of a lock.
pub(super) fn is_prefix(path: &str) -> bool {
    path.ends_with('/')
}

/// The first token of a grant, if it is below the largest one.
pub(super) fn first_token(index: u64) -> Option<u64> {
    let first = index.checked_mul(TOKENS.into())?;
    (first > 0 && first <= Token::MAX.get() - u64::from(TOKENS)).then_some(first)
}

/// Who waits for a key.
#[derive(Debug, Default)]
struct WaitedKey {
    claims: HashMap<Owner, Key>,
    watch: Option<AbortOnDrop>,
    /// Nobody gets it yet although it is free.
    is_delayed: bool,
}

/// The locks and the waiting claims of a client.
#[derive(Debug, Default)]
pub(super) struct Locks {
    held: HashMap<Owner, HeldLock>,
    owners: HashMap<String, Owner>,
    waited: HashMap<String, WaitedKey>,
    watched: usize,
    /// With the fence that the request was sent by.
    in_doubt: HashMap<Owner, FenceState>,
    permits: HashMap<Owner, HeldPermits>,
    /// The sessions that claims of permits have, or want to have them by.
    assigned: HashMap<Owner, Vec<PermitSession>>,
    /// The removals that are owed, and where.
    owed: HashMap<Owner, String>,
}

impl Locks {
    /// A lock is asked for by a request that this fence lets through.
    pub(super) fn ask(&mut self, owner: Owner, fence: FenceState) {
        self.in_doubt.insert(owner, fence);
    }

    /// The fence that lets the unanswered request of this owner through, if there is one.
    pub(super) fn in_doubt(&self, owner: Owner) -> Option<FenceState> {
        self.in_doubt.get(&owner).copied()
    }

    /// That was answered.
    pub(super) fn answered(&mut self, owner: Owner) {
        self.in_doubt.remove(&owner);
    }

    /// The lock of this owner, if it has one, is to be removed.
    pub(super) fn owe(&mut self, owner: Owner, path: &str) {
        self.owed.insert(owner, path.to_owned());
    }

    /// The removals that are owed.
    pub(super) fn owed(&self) -> Vec<(Owner, String)> {
        self.owed.iter().map(|(owner, path)| (*owner, path.clone())).collect()
    }

    /// The claim of this owner was granted by the write with this index.
    pub(super) fn granted(&mut self, owner: Owner, path: &str, index: u64) {
        self.answered(owner);
        if let Some(other) = self.owners.insert(path.to_owned(), owner)
            && other != owner
        {
            self.held.remove(&other);
        }
        self.held.insert(owner, HeldLock { path: path.to_owned(), index });
        self.stop_waiting(owner, path);
    }

    pub(super) fn held(&self, owner: Owner) -> Option<&HeldLock> {
        self.held.get(&owner)
    }

    pub(super) fn all_held(&self) -> Vec<HeldLock> {
        self.held.values().cloned().collect()
    }

    /// The owner that has the lock at this path.
    pub(super) fn owner_at(&self, path: &str) -> Option<Owner> {
        self.owners.get(path).copied()
    }

    /// The owner has no lock any more.
    pub(super) fn released(&mut self, owner: Owner) {
        self.answered(owner);
        self.owed.remove(&owner);
        if let Some(HeldLock { path, .. }) = self.held.remove(&owner)
            && self.owners.get(&path) == Some(&owner)
        {
            self.owners.remove(&path);
        }
    }

    /// Everything went with the session.
    pub(super) fn session_ended(&mut self) {
        self.held.clear();
        self.owners.clear();
        // Permits have sessions of their own.
        self.in_doubt.retain(|owner, _| self.assigned.contains_key(owner));
        self.owed.retain(|_, path| is_prefix(path));
        let permits = std::mem::take(&mut self.permits);
        self.owed.extend(permits.into_iter().map(|(owner, held)| (owner, held.prefix)));
    }

    /// A claim waits. Answers whether the key must be watched from now on.
    pub(super) fn wait(&mut self, owner: Owner, path: &str, key: &Key) -> bool {
        let must_watch = self.must_watch(path);
        let waited = self.waited.entry(path.to_owned()).or_default();
        waited.claims.insert(owner, key.clone());
        must_watch
    }

    /// Whether the key is not watched yet and can be.
    pub(super) fn must_watch(&self, path: &str) -> bool {
        !self.is_watched(path) && self.watched < WATCHED
    }

    pub(super) fn watched_by(&mut self, path: &str, watch: AbortOnDrop) {
        self.waited.entry(path.to_owned()).or_default().watch = Some(watch);
        self.watched += 1;
    }

    /// Whether the lock-delay kept the last one who asked from this key.
    pub(super) fn set_delayed(&mut self, path: &str, is_delayed: bool) {
        if let Some(waited) = self.waited.get_mut(path) {
            waited.is_delayed = is_delayed;
        }
    }

    pub(super) fn is_delayed(&self, path: &str) -> bool {
        self.waited.get(path).is_some_and(|waited| waited.is_delayed)
    }

    pub(super) fn is_watched(&self, path: &str) -> bool {
        self.waited.get(path).is_some_and(|waited| waited.watch.is_some())
    }

    /// Whether this owner only waits for the key: it has nothing in Consul.
    pub(super) fn only_waits(&self, owner: Owner, path: &str) -> bool {
        let waits = self.waited.get(path).is_some_and(|it| it.claims.contains_key(&owner));
        waits && !self.in_doubt.contains_key(&owner)
    }

    pub(super) fn stop_waiting(&mut self, owner: Owner, path: &str) {
        let Some(waited) = self.waited.get_mut(path) else { return };
        waited.claims.remove(&owner);
        self.stop_watching(path);
    }

    /// Ends the watch of a key if nobody waits for it or has permits of it.
    fn stop_watching(&mut self, path: &str) {
        let Some(waited) = self.waited.get(path) else { return };
        if waited.claims.is_empty() && !self.permits.values().any(|held| held.prefix == path) {
            self.watched -= usize::from(waited.watch.is_some());
            self.waited.remove(path);
        }
    }

    /// These sessions are for the permits of this owner.
    pub(super) fn assign(&mut self, owner: Owner, sessions: Vec<PermitSession>) {
        self.assigned.insert(owner, sessions);
    }

    pub(super) fn assigned(&self, owner: Owner) -> Option<Vec<PermitSession>> {
        self.assigned.get(&owner).cloned()
    }

    pub(super) fn take_assigned(&mut self, owner: Owner) -> Option<Vec<PermitSession>> {
        self.assigned.remove(&owner)
    }

    /// The owner has permits, by the sessions that are assigned to it.
    pub(super) fn granted_permits(&mut self, owner: Owner, held: HeldPermits) {
        self.answered(owner);
        let prefix = held.prefix.clone();
        self.permits.insert(owner, held);
        self.stop_waiting(owner, &prefix);
    }

    pub(super) fn permits(&self, owner: Owner) -> Option<&HeldPermits> {
        self.permits.get(&owner)
    }

    /// Who has permits of this semaphore.
    pub(super) fn permits_below(&self, prefix: &str) -> Vec<(Owner, HeldPermits)> {
        let held = self.permits.iter().filter(|(_, held)| held.prefix == prefix);
        held.map(|(owner, held)| (*owner, held.clone())).collect()
    }

    /// All claims of permits, with their prefixes: those that have them, and those that are
    /// to be removed.
    pub(super) fn all_permits(&self) -> Vec<(Owner, String)> {
        let held = self.permits.iter().map(|(owner, held)| (*owner, held.prefix.clone()));
        let owed = self.owed().into_iter().filter(|(_, path)| is_prefix(path));
        held.chain(owed).collect()
    }

    /// The owner does not have its permits any more; its sessions may have some.
    pub(super) fn lost_permits(&mut self, owner: Owner) {
        if let Some(held) = self.permits.remove(&owner) {
            self.stop_watching(&held.prefix);
        }
    }

    /// The owner has no permits. Answers its sessions, and whether it was in doubt.
    pub(super) fn released_permits(&mut self, owner: Owner) -> (Vec<PermitSession>, bool) {
        let in_doubt = self.in_doubt.contains_key(&owner);
        self.lost_permits(owner);
        self.released(owner);
        (self.take_assigned(owner).unwrap_or_default(), in_doubt)
    }

    /// The claims that wait for a key.
    pub(super) fn waiting(&self, path: &str) -> Vec<(Key, Owner)> {
        let waited = self.waited.get(path);
        let claims = waited.into_iter().flat_map(|waited| &waited.claims);
        claims.map(|(owner, key)| (key.clone(), *owner)).collect()
    }

    /// Nobody waits any more.
    pub(super) fn clear(&mut self) {
        self.session_ended();
        self.owed.clear();
        self.assigned.clear();
        self.waited.clear();
        self.watched = 0;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn owner(bits: u128) -> Owner {
        Owner::from_bits(bits)
    }

    #[test]
    fn a_key_has_one_owner() {
        let mut locks = Locks::default();
        locks.granted(owner(1), "a", 7);
        locks.granted(owner(2), "a", 9);
        assert_eq!(locks.held(owner(1)), None, "it was lost in between");
        locks.released(owner(1));
        assert_eq!(locks.owner_at("a"), Some(owner(2)));
        locks.released(owner(2));
        assert_eq!(locks.owner_at("a"), None);
        assert!(locks.all_held().is_empty());
    }

    #[test]
    fn a_grant_ends_the_wait() {
        let key = Key::new("a").expect("a key");
        let mut locks = Locks::default();
        assert!(locks.wait(owner(1), "a", &key));
        assert!(locks.only_waits(owner(1), "a"));
        locks.granted(owner(1), "a", 7);
        assert!(!locks.only_waits(owner(1), "a") && locks.waiting("a").is_empty());
    }

    #[test]
    fn a_claim_in_doubt_may_have_a_lock() {
        let key = Key::new("a").expect("a key");
        let mut locks = Locks::default();
        assert!(locks.wait(owner(1), "a", &key));
        locks.ask(owner(1), FenceState::default());
        assert!(!locks.only_waits(owner(1), "a"), "its lock may be there");
        locks.answered(owner(1));
        assert!(locks.only_waits(owner(1), "a"));
    }

    #[test]
    fn a_removal_is_owed_until_it_is_done_or_the_session_is_over() {
        let mut locks = Locks::default();
        locks.granted(owner(1), "a", 7);
        locks.owe(owner(1), "a");
        locks.owe(owner(2), "b");
        locks.released(owner(1));
        assert_eq!(locks.owed(), [(owner(2), "b".to_owned())]);
        locks.session_ended();
        assert!(locks.owed().is_empty());
    }

    #[test]
    fn tokens_have_room_and_an_end() {
        assert_eq!(first_token(1), Some(1 << 10));
        assert_eq!(first_token(0), None);
        assert!(first_token((1 << 43) - 2).is_some());
        assert_eq!(first_token(1 << 43), None);
    }
}
