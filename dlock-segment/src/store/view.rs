//! What a home shows of itself.

use super::generations::{FIRST, Generations};

/// An inventory at one moment.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
#[allow(missing_docs, reason = "the fields are named like what they hold")]
pub struct View {
    pub now: u64,
    pub birth: u64,
    pub epoch: u32,
    pub segments: u32,
    pub available: u64,
    pub reserved: u64,
    pub sold: u64,
    pub initial: u64,
    pub restocked: u64,
    pub written_off: u64,
    pub opens_at: u64,
    pub closes_at: u64,
    pub paused: bool,
    pub per_buyer: u64,
    pub numbering: Generations,
    pub journal: u64,
    /// The number of open reservations; `next_expiry` is when the first of them expires,
    /// or 0.
    pub holds: u64,
    pub next_expiry: u64,
    /// The units that were sold under an operation id and not given back.
    pub sold_by_id: u64,
    /// Rises with every change.
    pub changes: u64,
    /// The units that were ever sent to other homes, and received from them.
    pub sent: u64,
    pub received: u64,
    /// The units that ever became available: by a restock, a return, an expiry, a move.
    pub inflow: u64,
    /// The units that processes sell from memory.
    pub leased: u64,
    /// The version of the settings; see [`Settings`].
    pub version: u64,
    /// Whether it is one of several homes, and whether all of them were made.
    pub is_one_of_several: bool,
    pub is_complete: bool,
    /// The generation of records that was written last, and the one before it; 0 means
    /// none. The last may be ahead of the clock, if the clock was set back.
    pub generations: [u64; 2],
    /// The tombstones of the present generation.
    pub tombstones: u64,
}

impl View {
    /// The generations whose records are still found; 0 replaces one that is not found.
    pub(crate) fn found_generations(&self) -> [u64; 2] {
        let oldest = self.numbering.at(self.now) - 1;
        self.generations.map(|of| if of >= oldest { of } else { 0 })
    }

    /// Every effect under an id after this moment is on record. It is a retention ago, or later
    /// if the retention became longer since: that brings nothing back.
    pub(crate) fn remembers_since(&self) -> u64 {
        let Generations { since, number, retention } = self.numbering;
        // The generation that was written last may be ahead of a clock that was set back, and
        // then the one before it is the oldest that is kept.
        let oldest = self.numbering.at(self.now).saturating_sub(1).max(self.generations[1]);
        let began = since + oldest.saturating_sub(number) * retention;
        began.max(self.now.saturating_sub(retention))
    }

    /// Whether no record was deleted yet because its retention was over.
    pub(crate) fn has_all_records(&self) -> bool {
        let [last, before] = self.generations;
        let kept_all = before == 0 || [last, before] == [FIRST + 1, FIRST];
        let oldest = if before == 0 { last } else { before };
        kept_all && (oldest == 0 || self.numbering.at(self.now) <= oldest + 1)
    }
}

/// What each answer says about the inventory: the part of a [`View`] that requests use.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Snapshot {
    pub(crate) now: u64,
    pub(crate) available: u64,
    pub(crate) reserved: u64,
    pub(crate) next_expiry: u64,
    pub(crate) opens_at: u64,
    pub(crate) closes_at: u64,
    pub(crate) paused: bool,
    pub(crate) changes: u64,
    pub(crate) tombstones: u64,
    /// The home that answered.
    pub(crate) home: u32,
}

impl From<&View> for Snapshot {
    fn from(view: &View) -> Self {
        Snapshot {
            now: view.now,
            available: view.available,
            reserved: view.reserved,
            next_expiry: view.next_expiry,
            opens_at: view.opens_at,
            closes_at: view.closes_at,
            paused: view.paused,
            changes: view.changes,
            tombstones: view.tombstones,
            home: 0,
        }
    }
}

/// The settings that all homes of a sale share. The highest version wins.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[allow(missing_docs, reason = "the fields are named like what they hold")]
pub struct Settings {
    pub version: u64,
    pub opens_at: u64,
    pub closes_at: u64,
    pub paused: bool,
    pub per_buyer: u64,
    /// In milliseconds.
    pub retention: u64,
}

impl View {
    pub(crate) fn settings(&self) -> Settings {
        Settings {
            version: self.version,
            opens_at: self.opens_at,
            closes_at: self.closes_at,
            paused: self.paused,
            per_buyer: self.per_buyer,
            retention: self.numbering.retention,
        }
    }
}
