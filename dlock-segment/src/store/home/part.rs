//! A reservation of which some units are sold, and the others are not.

use super::units::Kind;
use super::{Home, cut, is_reservation};
use crate::store::{Answer, Effect, Id, Record, Status};

impl Home {
    pub(super) fn confirm_part(&mut self, now: u64, id: &Id, quantity: u64) -> Answer {
        let hold = match self.look(now, id) {
            Some(hold) if hold.status == Status::Reserved => hold,
            Some(record) if is_reservation(&record) => return Answer::Found(record),
            Some(_) => return Answer::Conflict,
            None => return Answer::Absent,
        };
        if quantity > hold.quantity {
            return Answer::TooMuch { left: hold.quantity };
        }
        if quantity == 0 {
            return Answer::Found(self.close_hold(now, id, hold, Status::Cancelled));
        }
        let rest = hold.quantity - quantity;
        if rest > 0 {
            let parts = cut(&hold.parts, quantity, rest);
            self.units.convert(hold.epoch, &parts, Kind::Reserved, Kind::Available);
            if let Some(buyer) = &hold.whose {
                self.buyer_gives_back(&buyer.clone(), rest);
            }
            let back = Record { at: now, quantity: rest, parts, ..hold.clone() };
            self.add_entry(Effect::Cancelled, None, &back);
        }
        let parts = cut(&hold.parts, 0, quantity);
        let kept = Record { quantity, parts, ..hold };
        Answer::Found(self.close_hold(now, id, kept, Status::Confirmed))
    }
}
