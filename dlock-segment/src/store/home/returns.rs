//! Units that come back from a buyer, and units that leave the inventory unsold.

use super::ledger::Return;
use super::units::Kind;
use super::{Home, again, cut};
use crate::planted_bug::Bug;
use crate::store::{Answer, Effect, Id, Parts, Record, Status};

/// A refund that is asked for. A quantity of 0 means all that are left.
pub(super) struct Refund<'a> {
    pub(super) id: &'a Id,
    pub(super) quantity: u64,
    pub(super) status: Status,
}

impl Home {
    pub(super) fn refund(
        &mut self,
        now: u64,
        of: &Id,
        receipt: Option<&Record>,
        refund: &Refund<'_>,
    ) -> Answer {
        let before = self.look(now, refund.id);
        let recorded = self.look(now, of);
        // The receipt of an earlier purchase under the same id is not that of this record.
        let is_late = match (&recorded, receipt) {
            (_, None) => false,
            (None, Some(_)) => true,
            (Some(record), Some(receipt)) => record.at != receipt.at,
        };
        // The id of a purchase that is forgotten is free for its record again.
        let is_recorded = !is_late || recorded.is_none();
        let bought = if is_late { receipt.cloned() } else { recorded };
        let repeats = self.planted.is(Bug::DoubleRefund);
        if let Some(before) = before
            && !repeats
        {
            return refund.again(before, of, bought.map(|bought| bought.at));
        }
        let Some(mut bought) = bought else { return Answer::Absent };
        match bought.status {
            Status::Taken | Status::Confirmed => {}
            Status::Cancelled | Status::Expired | Status::Tombstone => {
                return Answer::TooMuch { left: 0 };
            }
            _ => return Answer::Conflict,
        }
        let mut given = 0;
        for earlier in self.ledger.returns(of, bought.at) {
            if earlier.id == *refund.id && !repeats {
                let parts = cut(&bought.parts, given, earlier.quantity);
                let Return { quantity, at, status, .. } = *earlier;
                let whose = Some(of.clone());
                let (epoch, expires) = (bought.epoch, bought.at);
                let record =
                    Record { status, quantity, refunded: 0, epoch, parts, at, expires, whose };
                return refund.again(record, of, None);
            }
            given += earlier.quantity;
        }
        let given = given.max(bought.refunded);
        let left = bought.quantity.saturating_sub(given);
        let quantity = if refund.quantity == 0 { left } else { refund.quantity };
        if left == 0 || quantity > left {
            return Answer::TooMuch { left };
        }
        let parts = cut(&bought.parts, given, quantity);
        if is_late && (self.sold_by_id < quantity || !self.units.are_sold(bought.epoch, &parts)) {
            return Answer::NotSold;
        }
        let effect = if refund.status == Status::DamagedRefund {
            self.units.write_off(bought.epoch, &parts);
            self.written_off += quantity;
            Effect::RefundedDamaged
        } else {
            self.units.convert(bought.epoch, &parts, Kind::Sold, Kind::Available);
            Effect::Refunded
        };
        self.sold_by_id -= quantity;
        if let Some(buyer) = &bought.whose {
            self.buyer_gives_back(&buyer.clone(), quantity);
        }
        let record = Record {
            status: refund.status,
            quantity,
            refunded: 0,
            epoch: bought.epoch,
            parts,
            at: now,
            expires: bought.at,
            whose: Some(of.clone()),
        };
        let id = refund.id.clone();
        let returned = Return { id, quantity, at: now, status: refund.status };
        self.ledger.add_return(of, bought.at, returned);
        if is_recorded {
            bought.refunded = given + quantity;
            self.ledger.put(now, of, bought);
        }
        self.ledger.put(now, refund.id, record.clone());
        self.changes += 1;
        self.add_entry(effect, Some(refund.id), &record);
        Answer::Found(record)
    }

    pub(super) fn buyer_gives_back(&mut self, buyer: &Id, quantity: u64) {
        if let Some(has) = self.buyers.get_mut(buyer) {
            *has = has.saturating_sub(quantity);
            if *has == 0 {
                self.buyers.remove(buyer);
            }
        }
    }

    pub(super) fn import(
        &mut self,
        now: u64,
        start: usize,
        quantity: u64,
        id: &Id,
        buyer: Option<&Id>,
    ) -> Answer {
        match self.look(now, id) {
            Some(record) if matches!(record.status, Status::Taken | Status::Confirmed) => {
                return Answer::Found(record);
            }
            Some(Record {
                status: Status::Cancelled | Status::Expired | Status::Tombstone | Status::Debt,
                ..
            })
            | None => {}
            Some(_) => return Answer::Conflict,
        }
        if let Some(answer) = self.shortage(now, quantity) {
            return answer;
        }
        let record = self.take_units(now, start, quantity, buyer, Status::Taken);
        self.sold_by_id += quantity;
        self.ledger.put(now, id, record.clone());
        self.add_entry(Effect::Taken, Some(id), &record);
        Answer::Found(record)
    }

    /// Records units that were sold elsewhere and are not available any more.
    pub(super) fn owe(&mut self, now: u64, quantity: u64, id: &Id, buyer: Option<&Id>) -> Answer {
        if let Some(record) = self.look(now, id)
            && record.status == Status::Debt
        {
            return Answer::Found(record);
        }
        let epoch = self.units.epoch();
        let whose = buyer.cloned();
        let (status, parts) = (Status::Debt, Parts::new());
        let record =
            Record { status, quantity, refunded: 0, epoch, parts, at: now, expires: 0, whose };
        self.changes += 1;
        self.ledger.put(now, id, record.clone());
        self.add_entry(Effect::Owed, Some(id), &record);
        Answer::Found(record)
    }

    pub(super) fn write_off(&mut self, now: u64, start: usize, quantity: u64, id: &Id) -> Answer {
        if let Some(record) = self.look(now, id) {
            return again(record, &[Status::WriteOff], quantity, None);
        }
        if let Some(answer) = self.shortage(now, quantity) {
            return answer;
        }
        let record = self.take_units(now, start, quantity, None, Status::WriteOff);
        self.units.write_off(record.epoch, &record.parts);
        self.written_off += quantity;
        self.ledger.put(now, id, record.clone());
        self.add_entry(Effect::WrittenOff, Some(id), &record);
        Answer::Found(record)
    }
}

impl Refund<'_> {
    /// The answer if there is a record under the id of the refund. It must be of the same
    /// purchase, if that is known.
    fn again(&self, record: Record, of: &Id, bought_at: Option<u64>) -> Answer {
        let is_other = bought_at.is_some_and(|at| at != record.expires);
        if is_other && record.status == self.status {
            return Answer::Conflict;
        }
        let quantity = if self.quantity == 0 { record.quantity } else { self.quantity };
        again(record, &[self.status], quantity, Some(of))
    }
}
