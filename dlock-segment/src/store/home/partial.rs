//! A home of which only a part is loaded: its head, and the records, reservations, buyers
//! and returns that the next batch can touch. The store that keeps the rest writes back
//! what the batch has changed.

use super::Home;
use super::ledger::{Ledger, Return, UnloadedHolds};
use super::moves::Moves;
use super::units::Units;
use crate::planted_bug::PlantedBug;
use crate::store::{Counts, Generations, Id, JournalEntry, Record, Terms};

/// A home without its records, reservations, buyers, returns and journal.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Head {
    pub(crate) birth: u64,
    pub(crate) terms: Terms,
    pub(crate) opens_at: u64,
    pub(crate) closes_at: u64,
    pub(crate) paused: bool,
    pub(crate) per_buyer: u64,
    pub(crate) restocked: u64,
    pub(crate) written_off: u64,
    pub(crate) sold_by_id: u64,
    pub(crate) changes: u64,
    pub(crate) version: u64,
    pub(crate) is_complete: bool,
    /// The units that ever became available after the start.
    pub(crate) inflow: u64,
    pub(crate) moves: Moves,
    /// The number of the last entry of the journal.
    pub(crate) journaled: u64,
    pub(crate) numbering: Generations,
    /// The generation that was written last, and the one before it.
    pub(crate) generations: [u64; 2],
    pub(crate) tombstones: u64,
    pub(crate) holds: u64,
    pub(crate) next_expiry: u64,
    pub(crate) segments: Vec<Counts>,
    pub(crate) sizes: Vec<u32>,
}

impl Head {
    /// The head of a new inventory.
    pub(crate) fn new(birth: u64, terms: Terms) -> Self {
        Home::new(birth, terms, PlantedBug::default()).head()
    }
}

impl Home {
    /// A home with this head, of which nothing else is loaded yet.
    pub(crate) fn partial(head: &Head) -> Self {
        let mut home = Home::new(head.birth, head.terms.clone(), PlantedBug::default());
        home.opens_at = head.opens_at;
        home.closes_at = head.closes_at;
        home.paused = head.paused;
        home.per_buyer = head.per_buyer;
        home.restocked = head.restocked;
        home.written_off = head.written_off;
        home.sold_by_id = head.sold_by_id;
        home.changes = head.changes;
        home.version = head.version;
        home.is_complete = head.is_complete;
        home.moves = head.moves.clone();
        home.written = head.journaled;
        home.units = Units::counted(head.segments.clone(), head.sizes.clone());
        home.units.inflow = head.inflow;
        home.ledger = Ledger::partial(head);
        home
    }

    pub(crate) fn head(&self) -> Head {
        Head {
            birth: self.birth,
            terms: self.terms.clone(),
            opens_at: self.opens_at,
            closes_at: self.closes_at,
            paused: self.paused,
            per_buyer: self.per_buyer,
            restocked: self.restocked,
            written_off: self.written_off,
            sold_by_id: self.sold_by_id,
            changes: self.changes,
            version: self.version,
            is_complete: self.is_complete,
            inflow: self.units.inflow,
            moves: self.moves.clone(),
            journaled: self.written,
            numbering: self.ledger.numbering,
            generations: self.ledger.generations(),
            tombstones: self.ledger.tombstones,
            holds: self.ledger.holds(),
            next_expiry: self.ledger.next_expiry(),
            segments: self.units.segments().to_vec(),
            sizes: self.units.sizes().to_vec(),
        }
    }

    /// The entries that were added to the journal since the home was loaded.
    pub(crate) fn new_entries(&self) -> impl Iterator<Item = &JournalEntry> {
        self.journal.iter()
    }
}

impl Ledger {
    fn partial(head: &Head) -> Self {
        let mut ledger = Ledger::new(head.birth, head.numbering.retention);
        ledger.numbering = head.numbering;
        ledger.tombstones = head.tombstones;
        ledger.written.0 = head.generations[0];
        ledger.before.0 = head.generations[1];
        ledger.unloaded = UnloadedHolds { count: head.holds, next_expiry: head.next_expiry };
        ledger
    }

    /// Adds a record of a generation. One of a generation that is not kept is not found.
    pub(crate) fn load_record(&mut self, id: Id, generation: u64, record: Record) {
        for (kept, records) in [&mut self.written, &mut self.before] {
            if *kept == generation {
                records.insert(id, record);
                return;
            }
        }
    }

    /// Adds an open reservation.
    pub(crate) fn load_hold(&mut self, id: Id, record: Record) {
        self.expiry.insert((record.expires, id.clone()));
        if self.holds.insert(id, record).is_none() {
            self.unloaded.count = self.unloaded.count.saturating_sub(1);
        }
    }

    /// The reservations that expire first are loaded: more of them than can be closed.
    pub(crate) fn has_first_holds(&mut self) {
        self.unloaded.next_expiry = 0;
    }

    /// Adds the next return of a purchase.
    pub(crate) fn load_return(&mut self, of: Id, at: u64, returned: Return) {
        self.returns.entry((of, at)).or_default().push(returned);
    }

    /// The open reservation with this id.
    pub(crate) fn hold(&self, id: &Id) -> Option<&Record> {
        self.holds.get(id)
    }

    /// The record with this id that was written last, with its generation.
    pub(crate) fn kept(&self, id: &Id) -> Option<(u64, &Record)> {
        let mut kept = [&self.written, &self.before].into_iter();
        kept.find_map(|(generation, records)| Some((*generation, records.get(id)?)))
    }

    /// The returns of all purchases that are loaded: id, time of the purchase, returns.
    pub(crate) fn all_returns(&self) -> impl Iterator<Item = (&Id, u64, &[Return])> {
        self.returns.iter().map(|((of, at), returns)| (of, *at, returns.as_slice()))
    }
}
