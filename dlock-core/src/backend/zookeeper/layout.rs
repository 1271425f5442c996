//! Pure: the names of the nodes, their order and who is in whose way.
//!
//! ```text
//!   mutex    P/_c_<uuid>-lock-0000000007       Curator's InterProcessMutex
//!   rwlock   P/_c_<uuid>-__WRIT__0000000007    Curator's InterProcessReadWriteLock
//!            P/_c_<uuid>-__READ__0000000008
//!   kazoo    P/<32 hex>__lock__0000000007      kazoo's Lock, WriteLock and ReadLock
//!            P/<32 hex>__rlock__0000000008
//!   permits  P/locks/_c_<uuid>-lock-0000000007, P/leases/_c_<uuid>-lease-0000000008
//! ```
//!
//! Curator's mutex does not see the nodes of its read-write lock, nor the other way round,
//! while dlock has one exclusive claim for both. So a client has one layout for all its keys,
//! and readers only where everybody who uses that layout sees them.
//!
//! The uuid is the owner of the claim. It tells which node is whose after a create whose
//! answer was lost.

use crate::claim::{Grant, Mode, Owner};
use crate::error::{Error, ErrorKind, Operation, Result};

/// The name of the mutex that guards the permits of a semaphore, below its path.
pub(super) const PERMIT_LOCKS: &str = "locks";
/// The name of the node that has the permits of a semaphore, below its path.
pub(super) const PERMIT_LEASES: &str = "leases";
const LOCK: &str = "-lock-";
const LEASE: &str = "-lease-";
const WRITE: &str = "-__WRIT__";
const READ: &str = "-__READ__";
const KAZOO_LOCK: &str = "__lock__";
const KAZOO_READ: &str = "__rlock__";
/// A grant has this many tokens: the transaction's number is shifted by as many bits.
const TOKEN_BITS: u32 = 6;
/// From this epoch on a token would be 2^53 or more.
const MAX_EPOCH: i64 = 1 << 15;

/// The programs that locks are shared with.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Layout {
    /// Curator's `InterProcessMutex`: no readers.
    Mutex,
    /// Curator's `InterProcessReadWriteLock`.
    RwLock,
    /// kazoo's `Lock`, `WriteLock` and `ReadLock`: no semaphores.
    Kazoo,
}

impl Layout {
    /// The layout with this name, as in the URL.
    pub(super) fn named(name: Option<&str>) -> Result<Self> {
        match name {
            None | Some("mutex") => Ok(Layout::Mutex),
            Some("rwlock") => Ok(Layout::RwLock),
            Some("kazoo") => Ok(Layout::Kazoo),
            Some(_) => Err(Error::config(
                "`layout` of zookeeper:// must be `mutex` (Curator's InterProcessMutex, the default), `rwlock` (its InterProcessReadWriteLock) or `kazoo`",
            )),
        }
    }

    pub(super) fn has_readers(self) -> bool {
        self != Layout::Mutex
    }

    pub(super) fn has_permits(self) -> bool {
        self != Layout::Kazoo
    }

    /// The name of a node of this owner, without its sequence.
    pub(super) fn name(self, owner: Owner, mode: Mode) -> String {
        match (self, mode) {
            (Layout::Kazoo, Mode::Shared) => format!("{owner}{KAZOO_READ}"),
            (Layout::Kazoo, _) => format!("{owner}{KAZOO_LOCK}"),
            (Layout::RwLock, Mode::Shared) => format!("{}{READ}", protected(owner)),
            (Layout::RwLock, Mode::Exclusive) => format!("{}{WRITE}", protected(owner)),
            _ => mutex_name(owner),
        }
    }
}

/// The name of a mutex node of this owner, without its sequence.
pub(super) fn mutex_name(owner: Owner) -> String {
    format!("{}{LOCK}", protected(owner))
}

/// The name of a node for a permit of this owner, without its sequence.
pub(super) fn lease_name(owner: Owner) -> String {
    format!("{}{LEASE}", protected(owner))
}

/// How Curator marks whose node it is.
fn protected(owner: Owner) -> String {
    let hex = owner.to_string();
    let (a, b, c, d, e) = (&hex[..8], &hex[8..12], &hex[12..16], &hex[16..20], &hex[20..]);
    format!("_c_{a}-{b}-{c}-{d}-{e}")
}

/// Whether a node is of this owner.
pub(super) fn is_of(name: &str, owner: Owner) -> bool {
    name.starts_with(&protected(owner)) || name.starts_with(&owner.to_string())
}

/// How a node holds or wants the key.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) enum Kind {
    Exclusive,
    Shared,
}

/// A node that holds the key or waits for it.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) struct Place {
    pub(super) sequence: i64,
    pub(super) kind: Kind,
    pub(super) name: String,
}

impl Place {
    /// Whose node it is: one claim may have several.
    pub(super) fn claim(&self) -> &str {
        let end = self.name.find("-l").or_else(|| self.name.find("__")).unwrap_or(0);
        &self.name[..end]
    }
}

/// The places of a key in their order. When Curator turns a writer into a reader, both have
/// the same sequence for a moment; the writer counts first.
pub(super) fn places(layout: Layout, children: &[String]) -> Vec<Place> {
    let kinds: &[(&str, Kind)] = match layout {
        Layout::Mutex => &[(LOCK, Kind::Exclusive)],
        Layout::RwLock => &[(WRITE, Kind::Exclusive), (READ, Kind::Shared)],
        Layout::Kazoo => &[(KAZOO_LOCK, Kind::Exclusive), (KAZOO_READ, Kind::Shared)],
    };
    sorted(kinds, children)
}

/// The permits that are taken.
pub(super) fn leases(children: &[String]) -> Vec<Place> {
    sorted(&[(LEASE, Kind::Shared)], children)
}

fn sorted(kinds: &[(&str, Kind)], children: &[String]) -> Vec<Place> {
    let place = |name: &String| {
        kinds.iter().find_map(|(marker, kind)| {
            let (_, sequence) = name.rsplit_once(marker)?;
            let sequence = sequence.parse().ok()?;
            Some(Place { sequence, kind: *kind, name: name.clone() })
        })
    };
    let mut places: Vec<Place> = children.iter().filter_map(place).collect();
    places.sort();
    places
}

/// Where a claim stands.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct QueueStatus<'a> {
    /// The last node that must go before it holds the key; `None`: it holds the key.
    pub(super) behind: Option<&'a Place>,
    /// Whether somebody else waits for the key.
    pub(super) others_wait: bool,
}

/// Where the node of this name stands; `None` if it is not there.
pub(super) fn queue_status<'a>(places: &'a [Place], name: &str) -> Option<QueueStatus<'a>> {
    let own = places.iter().position(|place| place.name == name)?;
    let blocks =
        |place: &&Place| place.kind == Kind::Exclusive || places[own].kind == Kind::Exclusive;
    let behind = places[..own].iter().rfind(blocks);
    Some(QueueStatus { behind, others_wait: places[own + 1..].iter().any(|place| blocks(&place)) })
}

/// How many of the places hold the key: the first, or all readers before a writer.
pub(super) fn holders(places: &[Place]) -> usize {
    match places.first() {
        None => 0,
        Some(Place { kind: Kind::Exclusive, .. }) => 1,
        Some(_) => places.iter().take_while(|place| place.kind == Kind::Shared).count(),
    }
}

/// The tokens of a node, by the number of the transaction that made it.
pub(super) fn grant(czxid: i64, wanted: u32) -> Result<Grant> {
    if czxid >> 32 >= MAX_EPOCH || czxid <= 0 {
        return Err(Error::new(ErrorKind::Unsupported, Operation::Acquire).with_message(
            "the ensemble has had 32768 elections or more, so its transaction numbers make no fencing tokens below 2^53; move the locks to a new ensemble",
        ));
    }
    let first = czxid.unsigned_abs() << TOKEN_BITS;
    Ok(Grant { first, count: wanted.clamp(1, 1 << TOKEN_BITS) })
}

#[cfg(test)]
mod tests {
    use super::*;

    const OWNER: u128 = 0x0123_4567_89ab_cdef_0123_4567_89ab_cdef;

    fn names(names: &[&str]) -> Vec<String> {
        names.iter().map(|name| (*name).to_owned()).collect()
    }

    #[test]
    fn names_are_those_of_curator_and_kazoo() {
        let owner = Owner::from_bits(OWNER);
        let uuid = "01234567-89ab-cdef-0123-456789abcdef";
        assert_eq!(Layout::Mutex.name(owner, Mode::Exclusive), format!("_c_{uuid}-lock-"));
        assert_eq!(Layout::RwLock.name(owner, Mode::Exclusive), format!("_c_{uuid}-__WRIT__"));
        assert_eq!(Layout::RwLock.name(owner, Mode::Shared), format!("_c_{uuid}-__READ__"));
        let hex = "0123456789abcdef0123456789abcdef";
        assert_eq!(Layout::Kazoo.name(owner, Mode::Exclusive), format!("{hex}__lock__"));
        assert_eq!(Layout::Kazoo.name(owner, Mode::Shared), format!("{hex}__rlock__"));
        assert!(is_of(&lease_name(owner), owner));
        assert!(!is_of(&lease_name(owner), Owner::from_bits(OWNER + 1)));
    }

    #[test]
    fn the_order_is_that_of_the_sequence() {
        let children = names(&["_c_b-lock-0000000010", "_c_a-lock-0000000002", "locks", "x-1"]);
        let places = places(Layout::Mutex, &children);
        assert_eq!(places.iter().map(|place| place.sequence).collect::<Vec<_>>(), [2, 10]);
        assert_eq!(queue_status(&places, "_c_a-lock-0000000002").unwrap().behind, None);
        let second = queue_status(&places, "_c_b-lock-0000000010").unwrap();
        assert_eq!(second.behind, Some(&places[0]));
        assert!(queue_status(&places, "_c_c-lock-0000000003").is_none());
        assert_eq!(holders(&places), 1);
    }

    #[test]
    fn readers_wait_for_writers_only() {
        let children = names(&[
            "_c_a-__READ__0000000001",
            "_c_b-__READ__0000000002",
            "_c_c-__WRIT__0000000003",
            "_c_d-__READ__0000000004",
            "_c_e-lock-0000000000",
        ]);
        let places = places(Layout::RwLock, &children);
        assert_eq!(holders(&places), 2);
        let behind =
            |name: &str| queue_status(&places, name).unwrap().behind.map(|place| place.sequence);
        assert_eq!(behind("_c_b-__READ__0000000002"), None);
        assert_eq!(behind("_c_c-__WRIT__0000000003"), Some(2));
        assert_eq!(behind("_c_d-__READ__0000000004"), Some(3));
        assert!(queue_status(&places, "_c_a-__READ__0000000001").unwrap().others_wait);
        assert!(!queue_status(&places, "_c_d-__READ__0000000004").unwrap().others_wait);
    }

    /// Curator's downgrade makes a reader with the sequence of its writer.
    #[test]
    fn a_writer_and_the_reader_that_it_becomes_tie() {
        let children = names(&[
            "_c_a-__READ__0000000001",
            "_c_z-__WRIT__0000000001",
            "_c_b-__READ__0000000002",
        ]);
        let places = places(Layout::RwLock, &children);
        assert_eq!(places[0].kind, Kind::Exclusive);
        let waiting = queue_status(&places, "_c_b-__READ__0000000002").unwrap();
        assert_eq!(waiting.behind, Some(&places[0]));
    }

    #[test]
    fn tokens_are_below_2_to_the_53() {
        assert_eq!(grant(0x1_0000_0002, 7).unwrap(), Grant { first: 0x1_0000_0002 << 6, count: 7 });
        assert_eq!(grant(5, 1_000).unwrap().count, 64);
        let last = ((MAX_EPOCH - 1) << 32) | 0xffff_ffff;
        let Grant { first, .. } = grant(last, 64).unwrap();
        assert!(first + 63 < 1 << 53);
        assert_eq!(grant(MAX_EPOCH << 32, 1).unwrap_err().kind(), ErrorKind::Unsupported);
    }
}
