//! Units that move between the homes of a sale; the rules are in `store/mod.rs`.

use std::collections::BTreeMap;

use super::Home;
use super::units::Kind;
use crate::planted_bug::Bug;
use crate::store::{Answer, Effect, MAX_UNITS, Parts, Record, Status};

/// What was ever sent to each other home, and what was received from it with the latest
/// change of it that was named.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct Moves {
    pub(crate) sent: BTreeMap<u32, u64>,
    pub(crate) received: BTreeMap<u32, (u64, u64)>,
}

impl Moves {
    pub(crate) fn all_sent(&self) -> u64 {
        self.sent.values().sum()
    }

    pub(crate) fn all_received(&self) -> u64 {
        self.received.values().map(|(total, _)| total).sum()
    }
}

impl Home {
    pub(super) fn send_units(
        &mut self,
        now: u64,
        start: usize,
        to: u32,
        quantity: u64,
        after: u64,
    ) -> Answer {
        let sent = self.moves.sent.get(&to).copied().unwrap_or(0);
        let quantity = quantity.min(self.units.total.available);
        if sent != after || quantity == 0 {
            return Answer::Moved { total: sent, seen: 0 };
        }
        let parts = self.units.take(quantity, start, Kind::Sold);
        self.units.write_off(self.units.epoch(), &parts);
        self.moves.sent.insert(to, sent + quantity);
        self.changes += 1;
        self.add_move(now, Effect::Sent, to, quantity, parts);
        Answer::Moved { total: sent + quantity, seen: 0 }
    }

    pub(super) fn receive_units(
        &mut self,
        now: u64,
        start: usize,
        from: u32,
        total: u64,
        seen: u64,
    ) -> Answer {
        let (received, latest) = self.moves.received.get(&from).copied().unwrap_or((0, 0));
        let repeats = self.planted.is(Bug::MoveTwice) && total > 0;
        if total <= received && !repeats {
            return Answer::Moved { total: received, seen: latest };
        }
        if total >= MAX_UNITS {
            return Answer::Overflow;
        }
        let quantity = if repeats { total } else { total - received };
        let start = start % self.units.segments().len();
        let parts = match self.planted.is(Bug::MoveLost) {
            true => Parts::new(),
            false => self.units.restock(start, quantity),
        };
        let latest = latest.max(seen);
        self.moves.received.insert(from, (total, latest));
        self.changes += 1;
        self.add_move(now, Effect::Received, from, quantity, parts);
        Answer::Moved { total, seen: latest }
    }

    fn add_move(&mut self, now: u64, effect: Effect, other: u32, quantity: u64, parts: Parts) {
        let epoch = self.units.epoch();
        let whose = Some(other.to_string().into());
        let (status, refunded) = (Status::Restock, 0);
        let entry = Record { status, quantity, refunded, epoch, parts, at: now, expires: 0, whose };
        self.add_entry(effect, None, &entry);
    }
}
