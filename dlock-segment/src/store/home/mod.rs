//! One inventory as a pure state machine: time and randomness are arguments. The scripts
//! of the Redis store do the same, and a test compares both.

pub(crate) mod ledger;
pub(crate) mod moves;
mod part;
#[cfg(any(feature = "mysql", feature = "postgres", feature = "sqlite"))]
pub(crate) mod partial;
mod returns;
pub(crate) mod units;

use std::collections::VecDeque;

use hashbrown::HashMap;

use self::ledger::Ledger;
use self::moves::Moves;
use self::returns::Refund;
use self::units::{Kind, Units};
use super::{
    Answer, Change, Effect, Id, JournalEntry, MAX_RECLAIMED, MAX_UNITS, Parts, Record, Request,
    Settings, Status, Terms, View,
};
use crate::planted_bug::{Bug, PlantedBug};

#[derive(Debug)]
pub(crate) struct Home {
    birth: u64,
    /// A removed home may still be referenced, and must not be used.
    pub(crate) is_removed: bool,
    pub(crate) terms: Terms,
    /// The terms that may change while the inventory is in use.
    opens_at: u64,
    closes_at: u64,
    paused: bool,
    per_buyer: u64,
    restocked: u64,
    written_off: u64,
    sold_by_id: u64,
    changes: u64,
    /// The version of the settings that all homes of a sale share.
    version: u64,
    /// All homes of the sale were made.
    is_complete: bool,
    moves: Moves,
    pub(crate) units: Units,
    pub(crate) ledger: Ledger,
    pub(crate) buyers: HashMap<Id, u64>,
    journal: VecDeque<JournalEntry>,
    written: u64,
    planted: PlantedBug,
}

impl Home {
    pub(crate) fn new(birth: u64, terms: Terms, planted: PlantedBug) -> Self {
        let Terms { stock, segments, per_buyer, opens_at, closes_at, retention, .. } = terms;
        Home {
            birth,
            is_removed: false,
            terms,
            opens_at,
            closes_at,
            paused: false,
            per_buyer,
            restocked: 0,
            written_off: 0,
            sold_by_id: 0,
            changes: 0,
            version: 0,
            is_complete: false,
            moves: Moves::default(),
            units: Units::new(stock, segments),
            ledger: Ledger::new(birth, retention),
            buyers: HashMap::new(),
            journal: VecDeque::new(),
            written: 0,
            planted,
        }
    }

    pub(crate) fn birth(&self) -> u64 {
        self.birth
    }

    pub(crate) fn view(&self, now: u64) -> View {
        let total = self.units.total;
        View {
            now,
            birth: self.birth,
            epoch: self.units.epoch(),
            segments: self.units.segments().len() as u32,
            available: total.available,
            reserved: total.reserved,
            sold: total.sold,
            initial: self.terms.stock,
            restocked: self.restocked,
            written_off: self.written_off,
            opens_at: self.opens_at,
            closes_at: self.closes_at,
            paused: self.paused,
            per_buyer: self.per_buyer,
            numbering: self.ledger.numbering,
            journal: self.terms.journal,
            holds: self.ledger.holds(),
            next_expiry: self.ledger.next_expiry(),
            sold_by_id: self.sold_by_id,
            changes: self.changes,
            sent: self.moves.all_sent(),
            received: self.moves.all_received(),
            inflow: self.units.inflow,
            leased: 0,
            version: self.version,
            is_one_of_several: !self.terms.directory.is_empty(),
            is_complete: self.is_complete,
            generations: self.ledger.generations(),
            tombstones: self.ledger.tombstones(now),
        }
    }

    pub(crate) fn entries(&self, after: u64, limit: usize) -> Vec<JournalEntry> {
        self.journal.iter().filter(|entry| entry.sequence > after).take(limit).cloned().collect()
    }

    /// Gives back some expired reservations.
    pub(crate) fn reclaim(&mut self, now: u64) {
        for _ in 0..MAX_RECLAIMED {
            let Some((id, hold)) = self.ledger.first_expired(now) else { return };
            self.close_hold(now, &id, hold, Status::Expired);
        }
    }

    /// Applies a batch. `start` is the segment to begin with.
    pub(crate) fn apply_batch(
        &mut self,
        now: u64,
        start: usize,
        batch: &[Request],
    ) -> (View, Vec<Answer>) {
        self.reclaim(now);
        let answers = batch.iter().map(|request| self.apply(now, start, request)).collect();
        (self.view(now), answers)
    }

    /// Applies one request of a batch, after [`reclaim`](Self::reclaim). `start` is the
    /// segment to begin with.
    pub(crate) fn apply(&mut self, now: u64, start: usize, request: &Request) -> Answer {
        match request {
            Request::Deduct { quantity, operation, buyer } => {
                self.deduct(now, start, *quantity, operation.as_ref(), buyer.as_ref())
            }
            Request::Reserve { quantity, operation, buyer, expires_in } => {
                self.reserve(now, start, *quantity, operation, buyer.as_ref(), *expires_in)
            }
            Request::Confirm { operation } => self.close(now, operation, Status::Confirmed),
            Request::ConfirmPart { operation, quantity } => {
                self.confirm_part(now, operation, *quantity)
            }
            Request::Cancel { operation } => self.close(now, operation, Status::Cancelled),
            Request::Extend { operation, until } => self.extend(now, operation, *until),
            Request::Refund { of, quantity, operation, damaged, receipt } => {
                let status = if *damaged { Status::DamagedRefund } else { Status::Refund };
                let receipt = receipt.as_deref();
                self.refund(
                    now,
                    of,
                    receipt,
                    &Refund { id: operation, quantity: *quantity, status },
                )
            }
            Request::Restock { quantity, operation } => {
                self.restock(now, start, *quantity, operation.as_ref())
            }
            Request::WriteOff { quantity, operation } => {
                self.write_off(now, start, *quantity, operation)
            }
            Request::Resolve { operation } => match self.look(now, operation) {
                Some(record) => Answer::Found(record),
                None => self.put_tombstone(now, operation),
            },
            Request::Look { operation } => {
                self.look(now, operation).map_or(Answer::Absent, Answer::Found)
            }
            Request::Import { quantity, operation, buyer, or_debt } => {
                match self.import(now, start, *quantity, operation, buyer.as_ref()) {
                    Answer::SoldOut { .. } if *or_debt => {
                        self.owe(now, *quantity, operation, buyer.as_ref())
                    }
                    answer => answer,
                }
            }
            Request::Placed { at, request } => {
                let is_known = request.makes().is_none_or(|id| self.look(now, id).is_some());
                if !is_known && *at < self.ledger.numbering.remembered_since(now) {
                    return Answer::TooOld;
                }
                self.apply(now, start, request)
            }
            Request::Send { to, quantity, after } => {
                self.send_units(now, start, *to, *quantity, *after)
            }
            Request::Receive { from, total, seen } => {
                self.receive_units(now, start, *from, *total, *seen)
            }
        }
    }

    fn deduct(
        &mut self,
        now: u64,
        start: usize,
        quantity: u64,
        operation: Option<&Id>,
        buyer: Option<&Id>,
    ) -> Answer {
        if self.planted.is(Bug::IdCheckedAfterStock)
            && let Some(answer) = self.refusal(now, quantity, buyer)
        {
            return answer;
        }
        if let Some(record) = operation.and_then(|id| self.look(now, id)) {
            return again(record, &[Status::Taken], quantity, buyer);
        }
        if let Some(answer) = self.refusal(now, quantity, buyer) {
            if let Some(id) = operation
                && self.planted.is(Bug::RememberedRefusal)
            {
                self.ledger.put(now, id, Record::tombstone(now));
            }
            return answer;
        }
        let record = self.take_units(now, start, quantity, buyer, Status::Taken);
        if let Some(id) = operation {
            self.sold_by_id += quantity;
            if !self.planted.is(Bug::NoOperationId) {
                self.ledger.put(now, id, record.clone());
            }
        }
        self.add_entry(Effect::Taken, operation, &record);
        Answer::Found(record)
    }

    fn reserve(
        &mut self,
        now: u64,
        start: usize,
        quantity: u64,
        operation: &Id,
        buyer: Option<&Id>,
        expires_in: u64,
    ) -> Answer {
        const STATUSES: [Status; 4] =
            [Status::Reserved, Status::Confirmed, Status::Cancelled, Status::Expired];
        if let Some(record) = self.look(now, operation) {
            return again(record, &STATUSES, quantity, buyer);
        }
        if let Some(answer) = self.refusal(now, quantity, buyer) {
            return answer;
        }
        let mut record = self.take_units(now, start, quantity, buyer, Status::Reserved);
        record.expires = now + expires_in;
        self.ledger.put(now, operation, record.clone());
        self.add_entry(Effect::Reserved, Some(operation), &record);
        Answer::Found(record)
    }

    /// Why this quantity cannot be taken for this buyer, if so.
    fn refusal(&self, now: u64, quantity: u64, buyer: Option<&Id>) -> Option<Answer> {
        if self.paused {
            return Some(Answer::Paused);
        }
        if now < self.opens_at {
            return Some(Answer::NotStarted);
        }
        if self.closes_at != 0 && now >= self.closes_at {
            return Some(Answer::Ended);
        }
        if self.per_buyer != 0 {
            let Some(buyer) = buyer else { return Some(Answer::BuyerMissing) };
            let has = self.buyers.get(buyer).copied().unwrap_or(0);
            if has + quantity > self.per_buyer {
                let again = self.more_expired(now) && quantity <= self.per_buyer;
                return Some(if again { Answer::Again } else { Answer::LimitReached });
            }
        }
        self.shortage(now, quantity)
    }

    /// The answer if fewer units than this are available.
    fn shortage(&self, now: u64, quantity: u64) -> Option<Answer> {
        let available = self.units.total.available;
        let again = self.more_expired(now);
        let short = if again { Answer::Again } else { Answer::SoldOut { available } };
        (available < quantity).then_some(short)
    }

    fn more_expired(&self, now: u64) -> bool {
        let next = self.ledger.next_expiry();
        next != 0 && next <= now
    }

    fn take_units(
        &mut self,
        now: u64,
        start: usize,
        quantity: u64,
        buyer: Option<&Id>,
        status: Status,
    ) -> Record {
        let kind = if status == Status::Reserved { Kind::Reserved } else { Kind::Sold };
        let parts = self.units.take(quantity, start, kind);
        if let Some(buyer) = buyer {
            *self.buyers.entry(buyer.clone()).or_default() += quantity;
        }
        self.changes += 1;
        let epoch = self.units.epoch();
        let whose = buyer.cloned();
        Record { status, quantity, refunded: 0, epoch, parts, at: now, expires: 0, whose }
    }

    /// The record of an operation. A reservation whose time is over expires first.
    fn look(&mut self, now: u64, id: &Id) -> Option<Record> {
        let record = self.ledger.find(now, id)?;
        if record.status == Status::Reserved && record.expires <= now {
            return Some(self.close_hold(now, id, record, Status::Expired));
        }
        Some(record)
    }

    /// Confirms or cancels a reservation.
    fn close(&mut self, now: u64, id: &Id, status: Status) -> Answer {
        match self.look(now, id) {
            Some(hold) if hold.status == Status::Reserved => {
                Answer::Found(self.close_hold(now, id, hold, status))
            }
            Some(record) if is_reservation(&record) => Answer::Found(record),
            Some(_) => Answer::Conflict,
            None if status == Status::Cancelled => self.put_tombstone(now, id),
            None => Answer::Absent,
        }
    }

    fn close_hold(&mut self, now: u64, id: &Id, mut hold: Record, status: Status) -> Record {
        let (to, effect) = match status {
            Status::Confirmed => (Kind::Sold, Effect::Confirmed),
            Status::Cancelled => (Kind::Available, Effect::Cancelled),
            _ => (Kind::Available, Effect::Expired),
        };
        self.units.convert(hold.epoch, &hold.parts, Kind::Reserved, to);
        if to == Kind::Sold {
            self.sold_by_id += hold.quantity;
        } else if let Some(buyer) = &hold.whose {
            self.buyer_gives_back(&buyer.clone(), hold.quantity);
        }
        hold.status = status;
        self.ledger.put(now, id, hold.clone());
        self.changes += 1;
        self.add_entry(effect, Some(id), &Record { at: now, ..hold.clone() });
        hold
    }

    fn extend(&mut self, now: u64, id: &Id, until: u64) -> Answer {
        match self.look(now, id) {
            Some(mut hold) if hold.status == Status::Reserved => {
                if until > hold.expires {
                    hold.expires = until;
                    self.ledger.put(now, id, hold.clone());
                    self.changes += 1;
                    self.add_entry(Effect::Extended, Some(id), &Record { at: now, ..hold.clone() });
                }
                Answer::Found(hold)
            }
            Some(record) if is_reservation(&record) => Answer::Found(record),
            Some(_) => Answer::Conflict,
            None => Answer::Absent,
        }
    }

    /// Refuses everything under this id from now on.
    fn put_tombstone(&mut self, now: u64, id: &Id) -> Answer {
        if !self.ledger.has_room_for_tombstone(now) {
            return Answer::Full;
        }
        let record = Record::tombstone(now);
        self.ledger.put(now, id, record.clone());
        self.changes += 1;
        self.add_entry(Effect::Settled, Some(id), &record);
        Answer::Found(record)
    }

    fn restock(&mut self, now: u64, start: usize, quantity: u64, id: Option<&Id>) -> Answer {
        if let Some(record) = id.and_then(|id| self.look(now, id)) {
            return again(record, &[Status::Restock], quantity, None);
        }
        if self.terms.stock + self.restocked + quantity >= MAX_UNITS {
            return Answer::Overflow;
        }
        let start = start % self.units.segments().len();
        let parts = self.units.restock(start, quantity);
        self.restocked += quantity;
        self.changes += 1;
        let (status, epoch) = (Status::Restock, self.units.epoch());
        let record = Record {
            status,
            quantity,
            refunded: 0,
            epoch,
            parts: Parts::new(),
            at: now,
            expires: 0,
            whose: None,
        };
        if let Some(id) = id {
            self.ledger.put(now, id, record.clone());
        }
        self.add_entry(Effect::Restocked, id, &Record { parts, ..record.clone() });
        Answer::Found(record)
    }

    pub(crate) fn change(&mut self, now: u64, change: Change) {
        if matches!(change, Change::Settings(settings) if settings.version <= self.version) {
            return;
        }
        self.changes += 1;
        let mut whole = Record::tombstone(now);
        match change {
            Change::Window { opens_at, closes_at } => {
                (self.opens_at, self.closes_at) = (opens_at, closes_at);
            }
            Change::Pause => self.paused = true,
            Change::Resume => self.paused = false,
            Change::PerBuyer(limit) => self.per_buyer = limit,
            Change::Retention(retention) => self.ledger.change_retention(now, retention),
            Change::Resize(segments) => {
                self.units.resize(segments);
                (whole.quantity, whole.epoch) = (segments.into(), self.units.epoch());
                self.add_entry(Effect::Resized, None, &whole);
            }
            Change::Rebalance => {
                self.units.rebalance();
                whole.epoch = self.units.epoch();
                self.add_entry(Effect::Rebalanced, None, &whole);
            }
            Change::Settings(settings) => {
                let Settings { version, opens_at, closes_at, paused, per_buyer, retention } =
                    settings;
                self.version = version;
                (self.opens_at, self.closes_at) = (opens_at, closes_at);
                (self.paused, self.per_buyer) = (paused, per_buyer);
                if retention != self.ledger.numbering.retention {
                    self.ledger.change_retention(now, retention);
                }
            }
            Change::Complete => self.is_complete = true,
            Change::CountFrom(changes) => self.changes = self.changes.max(changes + 1),
        }
    }

    fn add_entry(&mut self, effect: Effect, operation: Option<&Id>, record: &Record) {
        if self.terms.journal == 0 {
            return;
        }
        self.written += 1;
        self.journal.push_back(JournalEntry {
            home: 0,
            sequence: self.written,
            effect,
            operation: operation.map(|id| id.to_string()),
            whose: record.whose.as_ref().map(|id| id.to_string()),
            quantity: record.quantity,
            parts: record.parts.to_vec(),
            epoch: record.epoch,
            at: record.at,
        });
        while self.journal.len() as u64 > self.terms.journal {
            self.journal.pop_front();
        }
    }
}

/// The answer to a request under an id that has a record.
fn again(record: Record, statuses: &[Status], quantity: u64, whose: Option<&Id>) -> Answer {
    if record.status == Status::Tombstone || record.is_same(statuses, quantity, whose) {
        return Answer::Found(record);
    }
    Answer::Conflict
}

fn is_reservation(record: &Record) -> bool {
    use Status::{Cancelled, Confirmed, Expired, Reserved, Tombstone};
    matches!(record.status, Reserved | Confirmed | Cancelled | Expired | Tombstone)
}

/// The parts of `quantity` units, after the first `skip` units.
pub(crate) fn cut(parts: &[(u32, u64)], mut skip: u64, mut quantity: u64) -> Parts {
    let mut cut = Parts::new();
    for &(segment, count) in parts {
        let here = count.saturating_sub(skip).min(quantity);
        skip = skip.saturating_sub(count);
        if here > 0 {
            cut.push((segment, here));
            quantity -= here;
        }
    }
    cut
}
