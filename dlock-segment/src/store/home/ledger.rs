//! The records of operations, in generations, and the open reservations.

use std::collections::BTreeSet;

use hashbrown::HashMap;

use crate::store::{Generations, Id, MAX_TOMBSTONES, Record, Status};

#[derive(Debug)]
pub(crate) struct Ledger {
    pub(crate) numbering: Generations,
    /// The tombstones of the generation that was written last.
    pub(super) tombstones: u64,
    /// The generation that was written last and the one before it.
    pub(super) written: (u64, HashMap<Id, Record>),
    pub(super) before: (u64, HashMap<Id, Record>),
    pub(super) holds: HashMap<Id, Record>,
    pub(super) expiry: BTreeSet<(u64, Id)>,
    /// What was given back of each purchase: by its id and the time of its effect.
    pub(super) returns: HashMap<(Id, u64), Vec<Return>>,
    /// What is known of the reservations that are not in `holds`.
    pub(super) unloaded: UnloadedHolds,
}

/// The open reservations that a ledger does not have: only a store that loads a part of a
/// home has some.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct UnloadedHolds {
    pub(crate) count: u64,
    /// When the first of them expires, unless one that is loaded expires earlier; 0 if that
    /// is so.
    pub(crate) next_expiry: u64,
}

/// Units of a purchase that were given back.
#[derive(Clone, Debug)]
pub(crate) struct Return {
    pub(crate) id: Id,
    pub(crate) quantity: u64,
    pub(crate) at: u64,
    pub(crate) status: Status,
}

impl Ledger {
    pub(crate) fn new(birth: u64, retention: u64) -> Self {
        Ledger {
            numbering: Generations::new(birth, retention),
            tombstones: 0,
            written: Default::default(),
            before: Default::default(),
            holds: HashMap::new(),
            expiry: BTreeSet::new(),
            returns: HashMap::new(),
            unloaded: UnloadedHolds::default(),
        }
    }

    pub(crate) fn find(&self, now: u64, id: &str) -> Option<Record> {
        let oldest = self.generation(now).saturating_sub(1);
        let kept = [&self.written, &self.before].into_iter();
        let mut kept = kept.filter(|(generation, _)| *generation >= oldest);
        self.holds.get(id).or_else(|| kept.find_map(|(_, records)| records.get(id))).cloned()
    }

    /// Writes the record of an operation.
    pub(crate) fn put(&mut self, now: u64, id: &Id, record: Record) {
        if let Some(hold) = self.holds.remove(id) {
            self.expiry.remove(&(hold.expires, id.clone()));
        }
        if record.status == Status::Reserved {
            self.expiry.insert((record.expires, id.clone()));
            self.holds.insert(id.clone(), record);
            return;
        }
        let generation = self.generation(now);
        // After the clock was set back, the last generation is still written to.
        if generation > self.written.0 {
            self.before = std::mem::replace(&mut self.written, (generation, HashMap::new()));
            self.tombstones = 0;
        }
        self.tombstones += u64::from(record.status == Status::Tombstone);
        self.written.1.insert(id.clone(), record);
    }

    fn generation(&self, now: u64) -> u64 {
        self.numbering.at(now)
    }

    pub(crate) fn change_retention(&mut self, now: u64, retention: u64) {
        self.numbering = self.numbering.change(now, self.written.0, retention);
    }

    pub(crate) fn returns(&self, of: &Id, at: u64) -> &[Return] {
        self.returns.get(&(of.clone(), at)).map_or(&[], Vec::as_slice)
    }

    pub(crate) fn add_return(&mut self, of: &Id, at: u64, returned: Return) {
        self.returns.entry((of.clone(), at)).or_default().push(returned);
    }

    /// The tombstones of the present generation.
    pub(crate) fn tombstones(&self, now: u64) -> u64 {
        if self.generation(now) > self.written.0 { 0 } else { self.tombstones }
    }

    /// Whether one more tombstone can be written.
    pub(crate) fn has_room_for_tombstone(&self, now: u64) -> bool {
        self.tombstones(now) < MAX_TOMBSTONES
    }

    pub(crate) fn holds(&self) -> u64 {
        self.unloaded.count + self.holds.len() as u64
    }

    /// The generations that are kept, the last one first; 0 means none.
    pub(crate) fn generations(&self) -> [u64; 2] {
        [self.written.0, self.before.0]
    }

    /// When the first reservation expires; 0 if there is none.
    pub(crate) fn next_expiry(&self) -> u64 {
        let loaded = self.expiry.first().map_or(0, |(expires, _)| *expires);
        match (loaded, self.unloaded.next_expiry) {
            (0, next) | (next, 0) => next,
            (one, other) => one.min(other),
        }
    }

    /// The first reservation that expired, if one did.
    pub(crate) fn first_expired(&self, now: u64) -> Option<(Id, Record)> {
        let (expires, id) = self.expiry.first()?;
        (*expires <= now).then(|| self.holds.get(id).cloned().map(|hold| (id.clone(), hold)))?
    }

    /// All records, the newer ones first.
    pub(crate) fn all(&self, now: u64) -> impl Iterator<Item = (&Id, &Record)> {
        let oldest = self.generation(now).saturating_sub(1);
        let kept = [&self.written, &self.before].into_iter();
        let kept = kept.filter(move |(generation, _)| *generation >= oldest);
        self.holds.iter().chain(kept.flat_map(|(_, records)| records.iter()))
    }
}
