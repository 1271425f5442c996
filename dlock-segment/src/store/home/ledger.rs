//! The records of operations, in generations, and the open reservations.

use std::collections::BTreeSet;

use hashbrown::HashMap;

use crate::store::{Id, MAX_TOMBSTONES, Record, Status, generation};

#[derive(Debug)]
pub(crate) struct Ledger {
    birth: u64,
    /// The length of a generation, in milliseconds.
    retention: u64,
    /// The tombstones of the generation that was written last.
    tombstones: u64,
    /// The generation that was written last and the one before it.
    written: (u64, HashMap<Id, Record>),
    before: (u64, HashMap<Id, Record>),
    holds: HashMap<Id, Record>,
    expiry: BTreeSet<(u64, Id)>,
}

impl Ledger {
    pub(crate) fn new(birth: u64, retention: u64) -> Self {
        Ledger {
            birth,
            retention,
            tombstones: 0,
            written: Default::default(),
            before: Default::default(),
            holds: HashMap::new(),
            expiry: BTreeSet::new(),
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
        generation(self.birth, self.retention, now)
    }

    /// Whether one more tombstone can be written.
    pub(crate) fn has_room_for_tombstone(&self, now: u64) -> bool {
        self.generation(now) > self.written.0 || self.tombstones < MAX_TOMBSTONES
    }

    pub(crate) fn holds(&self) -> u64 {
        self.holds.len() as u64
    }

    /// The generations that are kept, the last one first; 0 means none.
    pub(crate) fn generations(&self) -> [u64; 2] {
        [self.written.0, self.before.0]
    }

    /// When the first reservation expires; 0 if there is none.
    pub(crate) fn next_expiry(&self) -> u64 {
        self.expiry.first().map_or(0, |(expires, _)| *expires)
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
