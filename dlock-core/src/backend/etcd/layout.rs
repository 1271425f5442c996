//! Pure: where the entries of a lock are, their order, and who holds the lock.
//!
//! ```text
//!   <root><key>/<lease in hex>                     an entry of Go's concurrency package
//!   <root><key>/<lease in hex>-<number>            an entry of dlock
//!   <root><key>;permits/<lease in hex>-<number>    permits of a semaphore, dlock's alone
//!   <root>;dlock/sessions/<lease in hex>           the session of a client
//!   <root>;dlock/sessions/<lease in hex>/<owner>   a message to it: this lock was broken
//!   <root>;dlock/broken/<key>                      who broke the lock last, for some minutes
//! ```
//!
//! The entry with the lowest create revision holds the lock. Entries of dlock have a value
//! (`record.rs`) that other programs do not read: it says whose entry it is, and whether it
//! is a reader. To a program that does not know of readers a reader is one more entry that
//! has to go first, which is right.
//!
//! Those who hold a key are always the first of its entries, and an entry that holds goes on
//! holding when one before it goes. So what was once true stays true, and may be concluded
//! from a copy of the entries that is not the newest.
//!
//! A lock `a` has the prefix `a/`, below which are the entries of a lock `a/b` too. They are
//! not direct children of `a`, and so do not count here.

use crate::claim::{Grant, Mode};
use crate::error::{Error, ErrorKind, Operation, Result};
use crate::key::Key;

const PERMITS: &str = ";permits";
const OWN: &str = ";dlock";
/// A grant has 2^10 tokens: the revision is shifted by as many bits.
const TOKEN_BITS: u32 = 10;
/// From this revision on a token would be 2^53 or more.
const MAX_REVISION: i64 = 1 << (53 - TOKEN_BITS);

/// The ids of leases that a server made have as many digits, or more. A date has fewer.
const SHORTEST_LEASE: usize = 12;

/// What all keys of a client begin with: empty, or it ends in `/`.
#[derive(Clone, Debug)]
pub(super) struct Root(String);

impl Root {
    /// The root for the path of a URL.
    pub(super) fn new(path: &str, namespace: &str) -> Self {
        let path = path.strip_prefix('/').unwrap_or(path).trim_end_matches('/');
        let mut root = if path.is_empty() { String::new() } else { format!("{path}/") };
        if namespace != "default" {
            root.push_str(namespace);
            root.push('/');
        }
        Root(root)
    }

    pub(super) fn as_str(&self) -> &str {
        &self.0
    }

    /// What the entries of a key begin with.
    pub(super) fn prefix(&self, key: &Key, mode: Mode) -> Result<String> {
        let name = key.as_str();
        if name.ends_with(PERMITS) || name == OWN || name.starts_with(&format!("{OWN}/")) {
            return Err(Error::new(ErrorKind::Invalid, Operation::Acquire).with_key(key).with_message(
                "a key on etcd:// must not end in `;permits` or begin with `;dlock/`, where dlock keeps its own entries; choose another key",
            ));
        }
        let kind = if mode.is_permits() { PERMITS } else { "" };
        Ok(format!("{}{name}{kind}/", self.0))
    }

    /// The key of a session. Its id has a fixed width, so that none is the prefix of another.
    pub(super) fn session(&self, lease: i64) -> String {
        format!("{}{OWN}/sessions/{lease:016x}", self.0)
    }

    /// Where it is kept who broke the lock of a key.
    pub(super) fn broken(&self, key: &Key) -> String {
        format!("{}{OWN}/broken/{}", self.0, key.as_str())
    }

    /// A key that is never there.
    pub(super) fn nothing(&self) -> String {
        format!("{}{OWN}/nothing", self.0)
    }

    /// The key that an entry with this lease is of; `None` if it is not an entry.
    pub(super) fn key_of(&self, entry: &str, lease: i64) -> Option<Key> {
        let (name, last) = entry.strip_prefix(&self.0)?.rsplit_once('/')?;
        // An entry of dlock has another lease while it is kept after its release.
        let is_named = match last.split_once('-') {
            Some((lease, number)) => {
                lease.len() >= SHORTEST_LEASE
                    && lease.bytes().all(is_hex)
                    && number.parse::<u32>().is_ok_and(|it| it.to_string() == number)
            }
            None => last == format!("{lease:x}"),
        };
        if lease == 0 || !is_named {
            return None;
        }
        if name == OWN || name.starts_with(&format!("{OWN}/")) {
            return None;
        }
        Key::new(name.strip_suffix(PERMITS).unwrap_or(name)).ok()
    }
}

/// Whether an entry has another lease than that of the session that made it: it is kept after
/// its release.
pub(super) fn is_kept(entry: &str, lease: i64) -> bool {
    let last = entry.rsplit('/').next().unwrap_or_default();
    last.split_once('-').is_some_and(|(session, _)| session != format!("{lease:x}"))
}

fn is_hex(byte: u8) -> bool {
    byte.is_ascii_digit() || (b'a'..=b'f').contains(&byte)
}

/// The entry with this number below a prefix.
pub(super) fn entry(prefix: &str, lease: i64, number: u32) -> String {
    format!("{prefix}{lease:x}-{number}")
}

/// Whether an entry is directly below a prefix, and not of a lock that is nested in it.
pub(super) fn is_direct(prefix: &str, entry: &str) -> bool {
    entry.strip_prefix(prefix).is_some_and(|name| !name.is_empty() && !name.contains('/'))
}

/// An entry that holds a key or waits for it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Place {
    /// The create revision.
    pub(super) revision: i64,
    pub(super) entry: String,
    pub(super) mode: Mode,
}

/// The first entries that hold the key, of all in their order.
pub(super) fn holders(places: &[Place]) -> usize {
    let mut taken = 0_u64;
    for (at, place) in places.iter().enumerate() {
        let before = at.checked_sub(1).map(|before| places[before].mode);
        let holds = match place.mode {
            Mode::Shared => before.is_none_or(|mode| mode == Mode::Shared),
            Mode::Permits { count, of } => {
                taken += u64::from(count);
                taken <= u64::from(of) && before.is_none_or(Mode::is_permits)
            }
            _ => at == 0,
        };
        if !holds {
            return at;
        }
    }
    places.len()
}

/// Whether an entry that is made now would hold the key.
pub(super) fn has_room(places: &[Place], mode: Mode) -> bool {
    let next = Place { revision: i64::MAX, entry: String::new(), mode };
    let with: Vec<Place> = places.iter().cloned().chain([next]).collect();
    holders(&with) == with.len()
}

/// The tokens of an entry, by its create revision.
pub(super) fn grant(mode: Mode, revision: i64, wanted: u32) -> Result<Grant> {
    if mode.is_permits() {
        return Ok(Grant { first: 0, count: 0 });
    }
    if !(1..MAX_REVISION).contains(&revision) {
        return Err(Error::new(ErrorKind::Unsupported, Operation::Acquire).with_message(
            "the revision of etcd is 2^43 or more, so it makes no fencing tokens below 2^53; move the locks to a new cluster",
        ));
    }
    let first = revision.unsigned_abs() << TOKEN_BITS;
    Ok(Grant { first, count: wanted.clamp(1, 1 << TOKEN_BITS) })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn places(modes: &[Mode]) -> Vec<Place> {
        let place = |(at, mode): (usize, &Mode)| Place {
            revision: at as i64 + 1,
            entry: format!("a/{at}"),
            mode: *mode,
        };
        modes.iter().enumerate().map(place).collect()
    }

    #[test]
    fn names_are_those_of_the_concurrency_package() {
        let (root, key) = (Root::new("/", "default"), Key::new("orders/7").unwrap());
        let prefix = root.prefix(&key, Mode::Exclusive).unwrap();
        assert_eq!(prefix, "orders/7/");
        let name = entry(&prefix, 0x694d_1234_5678, 12);
        assert_eq!(name, "orders/7/694d12345678-12");
        assert_eq!(root.key_of(&name, 0x694d_1234_5678), Some(key.clone()));
        assert_eq!(root.key_of("orders/7/694d12345678", 0x694d_1234_5678), Some(key.clone()));
        assert_eq!(root.key_of(&name, 0x694d), Some(key.clone()), "it is kept after its release");
        assert_eq!(root.key_of("orders/7/694d12345678", 0x694d), None, "it is of another lease");
        assert_eq!(root.key_of(&root.session(5), 5), None);
        for foreign in
            ["orders/7/694d12345678-", "orders/7/694d12345678-012", "orders/7/20240131-1"]
        {
            assert_eq!(root.key_of(foreign, 5), None, "{foreign}");
        }
        let root = Root::new("/shop/", "eu");
        let permits = root.prefix(&key, Mode::Permits { count: 1, of: 2 }).unwrap();
        assert_eq!(permits, "shop/eu/orders/7;permits/");
        assert_eq!(root.key_of(&entry(&permits, 0x694d_1234_5678, 0), 5), Some(key));
    }

    #[test]
    fn nested_locks_and_own_entries_are_kept_apart() {
        assert!(is_direct("a/", "a/5"));
        assert!(!is_direct("a/", "a/b/5"));
        assert!(!is_direct("a/", "a/"));
        let root = Root::new("", "default");
        for bad in ["a;permits", ";dlock", ";dlock/sessions"] {
            assert!(root.prefix(&Key::new(bad).unwrap(), Mode::Exclusive).is_err(), "{bad}");
        }
    }

    #[test]
    fn the_first_hold() {
        use Mode::{Exclusive, Shared};
        assert_eq!(holders(&[]), 0);
        assert_eq!(holders(&places(&[Exclusive, Exclusive])), 1);
        assert_eq!(holders(&places(&[Exclusive, Shared])), 1);
        assert_eq!(holders(&places(&[Shared, Shared, Exclusive, Shared])), 2);
        assert!(has_room(&places(&[Shared]), Shared));
        assert!(!has_room(&places(&[Shared]), Exclusive));
        assert!(!has_room(&places(&[Shared, Exclusive]), Shared), "nobody is overtaken");
    }

    #[test]
    fn permits_are_given_in_order() {
        let permits = |count| Mode::Permits { count, of: 3 };
        assert_eq!(holders(&places(&[permits(1), permits(1), permits(1), permits(1)])), 3);
        // Who wants many is not overtaken by one who would fit.
        assert_eq!(holders(&places(&[permits(2), permits(2), permits(1)])), 1);
        assert!(has_room(&places(&[permits(2)]), permits(1)));
        assert!(!has_room(&places(&[permits(2)]), permits(2)));
    }

    /// An entry that holds the key holds it when any before it goes.
    #[test]
    fn what_holds_goes_on_holding() {
        let permits = |count, of| Mode::Permits { count, of };
        let cases = [
            places(&[Mode::Shared, Mode::Shared, Mode::Exclusive, Mode::Shared]),
            places(&[permits(1, 2), permits(1, 2), permits(2, 9), permits(1, 1)]),
        ];
        for case in cases {
            let held = holders(&case);
            for gone in 0..case.len() {
                let mut rest = case.clone();
                rest.remove(gone);
                let still = held - usize::from(gone < held);
                assert!(holders(&rest) >= still, "{rest:?}");
            }
        }
    }

    #[test]
    fn tokens_are_below_2_to_the_53() {
        let tokens = grant(Mode::Exclusive, 5, 7).unwrap();
        assert_eq!(tokens, Grant { first: 5 << 10, count: 7 });
        let Grant { first, count } = grant(Mode::Shared, MAX_REVISION - 1, 10_000).unwrap();
        assert!(first + u64::from(count) <= 1 << 53);
        let error = grant(Mode::Exclusive, MAX_REVISION, 1).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::Unsupported);
    }
}
