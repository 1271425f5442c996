//! Pure: what is written into entries, for operators and for readers. Other programs leave
//! the value empty, and ignore ours.

use std::sync::Arc;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use serde::{Deserialize, Serialize};

use crate::backend::holder_json::{HolderJson, foreign_holder};
use crate::claim::{Claim, Holder, Mode, Owner};

/// The layout version.
const VERSION: u32 = 1;

/// The value of an entry of dlock.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct Record {
    dlock: u32,
    /// Whose entry it is, in hex.
    #[serde(default)]
    owner: String,
    #[serde(flatten, with = "HolderJson")]
    holder: Holder,
    /// When it was made, in milliseconds since 1970, by the clock of its maker.
    #[serde(default)]
    at: u64,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    shared: Option<bool>,
    /// How many permits of how many.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    permits: Option<(u32, u32)>,
}

impl Record {
    pub(super) fn of(claim: &Claim) -> Self {
        let holder = Holder::clone(&claim.holder);
        let permits = match claim.mode {
            Mode::Permits { count, of } => Some((count, of)),
            _ => None,
        };
        let shared = (claim.mode == Mode::Shared).then_some(true);
        let owner = claim.owner.to_string();
        Record { dlock: VERSION, owner, holder, at: millis(), shared, permits }
    }

    /// Whose entry it is.
    pub(super) fn owner(&self) -> Option<Owner> {
        owner_in(&self.owner)
    }

    pub(super) fn encode(&self) -> Vec<u8> {
        serde_json::to_vec(self).unwrap_or_default()
    }

    /// The record in a value; `None` if another program made the entry.
    pub(super) fn decode(value: &[u8]) -> Option<Self> {
        serde_json::from_slice(value).ok()
    }

    /// The same, held together with other readers.
    pub(super) fn downgraded(self) -> Self {
        Record { shared: Some(true), ..self }
    }

    pub(super) fn mode(&self) -> Mode {
        match (self.shared, self.permits) {
            (_, Some((count, of))) => Mode::Permits { count, of },
            (Some(true), None) => Mode::Shared,
            _ => Mode::Exclusive,
        }
    }

    /// How long ago the entry was made, by the clocks of both sides.
    pub(super) fn age(&self) -> Duration {
        Duration::from_millis(millis().saturating_sub(self.at))
    }

    pub(super) fn holder(self) -> Arc<Holder> {
        Arc::new(self.holder)
    }
}

/// The owner that these digits stand for.
pub(super) fn owner_in(hex: &str) -> Option<Owner> {
    u128::from_str_radix(hex, 16).ok().filter(|_| hex.len() == 32).map(Owner::from_bits)
}

fn millis() -> u64 {
    let since = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
    u64::try_from(since.as_millis()).unwrap_or(u64::MAX)
}

/// The mode of an entry with this value: those of other programs are exclusive.
pub(super) fn mode_of(value: &[u8]) -> Mode {
    if value.is_empty() {
        return Mode::Exclusive;
    }
    Record::decode(value).map_or(Mode::Exclusive, |record| record.mode())
}

/// The maker of an entry with this value.
pub(super) fn holder_of(value: &[u8], lease: i64) -> Arc<Holder> {
    Record::decode(value).map_or_else(
        || foreign_holder(format!("a program without dlock (lease {lease:x})"), "?"),
        Record::holder,
    )
}

/// What an operator who breaks a lock writes for its holder, and for operators.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct Broken {
    pub(super) by: String,
    /// The entry that is removed.
    pub(super) entry: String,
    /// The create revision of that entry: a later one of the same name stays.
    pub(super) revision: i64,
    /// It is removed after this many milliseconds.
    pub(super) delay_ms: u64,
}

impl Broken {
    pub(super) fn encode(&self) -> Vec<u8> {
        serde_json::to_vec(self).unwrap_or_default()
    }

    pub(super) fn decode(value: &[u8]) -> Option<Self> {
        serde_json::from_slice(value).ok()
    }

    pub(super) fn delay(&self) -> Duration {
        Duration::from_millis(self.delay_ms)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn record(shared: Option<bool>, permits: Option<(u32, u32)>) -> Record {
        let tags = vec![("order".into(), "7".into())];
        let holder = Holder { client: 3, name: "a".into(), host: "b".into(), pid: 4, tags };
        let owner = Owner::from_bits(7).to_string();
        Record { dlock: VERSION, owner, holder, at: 0, shared, permits }
    }

    #[test]
    fn what_is_written_is_read() {
        for (shared, permits, mode) in [
            (None, None, Mode::Exclusive),
            (Some(true), None, Mode::Shared),
            (None, Some((2, 5)), Mode::Permits { count: 2, of: 5 }),
        ] {
            let record = record(shared, permits);
            assert_eq!(Record::decode(&record.encode()), Some(record.clone()));
            assert_eq!(mode_of(&record.encode()), mode);
        }
        assert_eq!(record(None, None).owner(), Some(Owner::from_bits(7)));
        assert_eq!(owner_in("7"), None);
        assert_eq!(record(None, None).downgraded().mode(), Mode::Shared);
        assert_eq!(holder_of(&record(None, None).encode(), 1).tags.len(), 1);
        let broken =
            Broken { by: "operator".into(), entry: "a/1".into(), revision: 4, delay_ms: 500 };
        assert_eq!(Broken::decode(&broken.encode()), Some(broken));
    }

    #[test]
    fn entries_of_other_programs_are_exclusive() {
        for value in [&b""[..], b"\xff", b"x"] {
            assert_eq!(mode_of(value), Mode::Exclusive);
            assert!(holder_of(value, 0x1f).name.contains("lease 1f"));
        }
    }
}
