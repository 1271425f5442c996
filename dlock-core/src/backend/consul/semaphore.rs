//! A semaphore as Consul's own clients keep it. Pure.
//!
//! ```text
//!   P/.lock       {"Limit":3,"Holders":{"<session>":true,..}}, changed by compare and set
//!   P/<session>   a key that this session has: who holds a permit, or wants one
//! ```
//!
//! A holder whose session has no key any more is dead: its session ended without a release. Its
//! permit is free when the lock-delay of that session is over. Consul knows when that is: until
//! then it lets nobody take the key of the dead session. So whoever wants the permit takes that
//! key, removes it and leaves the holder out, in one transaction. (Consul's own clients leave the
//! dead out at once.) So a permit is a session, and a claim of several permits has as many.

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};

use super::wire::{Entry, Operation as Op, SEMAPHORE_FLAGS};
use crate::claim::Owner;

/// The value of `P/.lock`.
#[derive(Debug, Default, Serialize, Deserialize)]
#[serde(rename_all = "PascalCase")]
struct Value {
    limit: u32,
    holders: Option<BTreeMap<String, bool>>,
}

/// What is below the prefix of a semaphore.
#[derive(Debug, Default)]
pub(super) struct Semaphore {
    /// The prefix, with its slash.
    prefix: String,
    /// The last change of `P/.lock`; `None` if it is absent.
    pub(super) index: Option<u64>,
    /// How many permits there are, if somebody has said that.
    pub(super) limit: Option<u32>,
    /// The sessions in the value, the dead ones too.
    holders: Vec<String>,
    /// The keys of sessions: the session, and what is in it.
    contenders: Vec<Entry>,
}

/// How many operations leave one dead holder out.
pub(super) const BURIAL: usize = 2;
/// How many are left out at once: a transaction has 128 operations.
pub(super) const BURIED_AT_ONCE: usize = 60;

/// `P/.lock` has these flags, so it is something else.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct Foreign(pub(super) u64);

/// Where the value of a semaphore is.
pub(super) fn value_path(prefix: &str) -> String {
    format!("{prefix}.lock")
}

impl Semaphore {
    /// Reads a semaphore from the keys below its prefix.
    pub(super) fn read(prefix: &str, entries: &[Entry]) -> Result<Self, Foreign> {
        let mut semaphore = Semaphore { prefix: prefix.to_owned(), ..Semaphore::default() };
        let is_contender = |entry: &&Entry| {
            let session = entry.key.strip_prefix(prefix);
            entry.flags == SEMAPHORE_FLAGS && session.is_some() && session == entry.holder()
        };
        semaphore.contenders = entries.iter().filter(is_contender).cloned().collect();
        let Some(lock) = entries.iter().find(|entry| entry.key == value_path(prefix)) else {
            return Ok(semaphore);
        };
        if lock.flags != SEMAPHORE_FLAGS {
            return Err(Foreign(lock.flags));
        }
        semaphore.index = Some(lock.modify_index);
        if let Some(value) = lock.value::<Value>() {
            semaphore.limit = Some(value.limit);
            semaphore.holders = value.holders.unwrap_or_default().into_keys().collect();
        }
        Ok(semaphore)
    }

    /// How many permits are taken, those of the dead too.
    pub(super) fn taken(&self) -> usize {
        self.holders.len()
    }

    fn is_alive(&self, session: &str) -> bool {
        self.contenders.iter().any(|it| it.holder() == Some(session))
    }

    /// The holders whose sessions have ended without a release.
    pub(super) fn dead(&self) -> Vec<String> {
        self.holders.iter().filter(|holder| !self.is_alive(holder)).cloned().collect()
    }

    /// Whether there is a value although nobody holds a permit.
    pub(super) fn is_abandoned(&self) -> bool {
        self.index.is_some() && self.permits().next().is_none()
    }

    /// Whether somebody may get a permit, now or after a lock-delay.
    pub(super) fn has_room(&self) -> bool {
        self.limit.is_none_or(|limit| self.permits().count() < limit as usize)
    }

    /// Whether this session holds a permit.
    pub(super) fn is_held_by(&self, session: &str) -> bool {
        self.holders.iter().any(|holder| holder == session) && self.is_alive(session)
    }

    /// The keys of those that hold permits.
    pub(super) fn permits(&self) -> impl Iterator<Item = &Entry> {
        self.contenders.iter().filter(|it| it.holder().is_some_and(|id| self.is_held_by(id)))
    }

    /// The sessions that have a key in the name of this owner.
    pub(super) fn sessions_of(&self, owner: Owner) -> Vec<String> {
        let own = self.contenders.iter().filter(|entry| entry.owner() == Some(owner));
        own.filter_map(|entry| entry.holder().map(str::to_owned)).collect()
    }

    /// Gives a permit to each of these sessions, if nothing has changed.
    pub(super) fn add(&self, sessions: &[String], limit: u32, content: &str) -> Vec<Op> {
        let mut holders = self.holders.clone();
        holders.extend(sessions.iter().cloned());
        let mut operations = self.replace(holders, limit);
        operations.extend(sessions.iter().map(|session| {
            Op::lock(&format!("{}{session}", self.prefix), session, content, SEMAPHORE_FLAGS)
        }));
        operations
    }

    /// Takes the permits of these sessions, if nothing has changed. The last one removes
    /// the semaphore.
    pub(super) fn remove(&self, sessions: &[String]) -> Vec<Op> {
        let mut operations = self.leave_out(sessions);
        let keys = sessions.iter().map(|session| format!("{}{session}", self.prefix));
        operations.extend(keys.map(|key| Op::delete(&key)));
        operations
    }

    /// Leaves the dead out whose lock-delay is over, if nothing has changed: for that, this
    /// session takes their keys for a moment. The operations of each are [`BURIAL`] ones, and
    /// come first.
    pub(super) fn bury(&self, dead: &[String], session: &str) -> Vec<Op> {
        let keys = dead.iter().map(|dead| format!("{}{dead}", self.prefix));
        let take = |key: String| [Op::lock(&key, session, "", SEMAPHORE_FLAGS), Op::delete(&key)];
        keys.flat_map(take).chain(self.leave_out(dead)).collect()
    }

    fn leave_out(&self, sessions: &[String]) -> Vec<Op> {
        let holders: Vec<_> =
            self.holders.iter().filter(|it| !sessions.contains(it)).cloned().collect();
        match (self.index, holders.is_empty()) {
            (None, _) => Vec::new(),
            (Some(index), true) => super::calls::remove(&value_path(&self.prefix), index),
            (Some(_), false) => self.replace(holders, self.limit.unwrap_or_default()),
        }
    }

    fn replace(&self, holders: Vec<String>, limit: u32) -> Vec<Op> {
        let path = value_path(&self.prefix);
        let check = match self.index {
            None => Op::check_absent(&path),
            Some(index) => Op::check_index(&path, index),
        };
        let holders = holders.into_iter().map(|session| (session, true)).collect();
        let value = serde_json::to_string(&Value { limit, holders: Some(holders) });
        vec![check, Op::set(&path, &value.unwrap_or_default(), SEMAPHORE_FLAGS)]
    }
}

/// The number of permits of each owner or session, with the key of the first: those of a
/// claim of dlock belong together.
pub(super) fn by_owner<'a>(permits: impl Iterator<Item = &'a Entry>) -> Vec<(&'a Entry, u32)> {
    let mut found: Vec<(&Entry, u32)> = Vec::new();
    for entry in permits {
        let owner = entry.owner();
        let known = found.iter_mut().find(|(it, _)| owner.is_some() && it.owner() == owner);
        match known {
            Some((_, count)) => *count += 1,
            None => found.push((entry, 1)),
        }
    }
    found
}

#[cfg(test)]
mod tests {
    use super::*;

    const FLAGS: u64 = SEMAPHORE_FLAGS;

    fn entries(json: &str) -> Vec<Entry> {
        serde_json::from_str(json).expect("entries")
    }

    /// What Go's package writes: two holders, one of them dead, and one who only waits.
    fn of_go() -> Vec<Entry> {
        use base64::Engine as _;
        let value = r#"{"Limit":2,"Holders":{"s1":true,"s2":true}}"#;
        let value = base64::prelude::BASE64_STANDARD.encode(value);
        entries(&format!(
            r#"[{{"Key":"p/.lock","Flags":{FLAGS},"Value":"{value}","ModifyIndex":9}},
                {{"Key":"p/s1","Flags":{FLAGS},"Session":"s1","ModifyIndex":7}},
                {{"Key":"p/s3","Flags":{FLAGS},"Session":"s3","ModifyIndex":8}}]"#
        ))
    }

    fn written(operations: &[Op]) -> String {
        serde_json::to_string(operations).expect("JSON")
    }

    #[test]
    fn the_dead_hold_nothing_and_have_their_permits_until_they_are_buried() {
        let semaphore = Semaphore::read("p/", &of_go()).expect("a semaphore");
        assert_eq!((semaphore.taken(), semaphore.limit), (2, Some(2)));
        assert_eq!(semaphore.dead(), ["s2"]);
        assert!(semaphore.is_held_by("s1") && !semaphore.is_held_by("s2"));
        assert!(!semaphore.is_held_by("s3") && semaphore.has_room());
    }

    #[test]
    fn what_is_written_depends_on_the_last_change() {
        let semaphore = Semaphore::read("p/", &of_go()).expect("a semaphore");
        let added = written(&semaphore.add(&["s4".to_owned()], 2, "{}"));
        assert!(added.contains("check-index") && added.contains(r#""Index":9"#), "{added}");
        assert!(added.contains(r#""Key":"p/s4""#), "{added}");
        let removed = written(&semaphore.remove(&["s1".to_owned()]));
        assert!(removed.contains(r#""set","Key":"p/.lock""#), "s2 is not the last: {removed}");
        assert!(removed.contains(r#""delete","Key":"p/s1""#), "{removed}");
    }

    #[test]
    fn the_dead_are_left_out_when_their_keys_can_be_taken() {
        let entries: Vec<_> = of_go().into_iter().filter(|it| it.key != "p/s1").collect();
        let semaphore = Semaphore::read("p/", &entries).expect("a semaphore");
        assert_eq!(semaphore.dead(), ["s1", "s2"]);
        let one = semaphore.bury(&["s2".to_owned()], "me");
        assert_eq!(one.len(), BURIAL + 2);
        let one = written(&one);
        assert!(one.starts_with(r#"[{"KV":{"Verb":"lock","Key":"p/s2""#), "{one}");
        assert!(one.contains(r#""Session":"me""#) && one.contains(r#""check-index""#), "{one}");
        let all = written(&semaphore.bury(&semaphore.dead(), "me"));
        assert!(all.contains(r#""delete","Key":"p/.lock""#), "the last one: {all}");
    }

    #[test]
    fn nobody_is_left_when_all_holders_are_dead() {
        assert!(!Semaphore::read("p/", &of_go()).expect("a semaphore").is_abandoned());
        assert!(!Semaphore::read("p/", &[]).expect("nothing there").is_abandoned());
        let without_s1: Vec<_> = of_go().into_iter().filter(|it| it.key != "p/s1").collect();
        let semaphore = Semaphore::read("p/", &without_s1).expect("a semaphore");
        assert!(semaphore.is_abandoned());
    }

    #[test]
    fn something_else_is_not_touched() {
        let other = entries(r#"[{"Key":"p/.lock","Flags":1,"ModifyIndex":9}]"#);
        assert_eq!(Semaphore::read("p/", &other).expect_err("foreign"), Foreign(1));
        let empty = Semaphore::read("p/", &[]).expect("nothing there");
        assert!(empty.has_room() && empty.limit.is_none());
        assert!(written(&empty.add(&["s".to_owned()], 3, "{}")).contains("check-not-exists"));
    }
}
