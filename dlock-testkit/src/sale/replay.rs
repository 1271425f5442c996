//! Replays the journal of a soak from its first entry and checks it: no count goes below
//! zero (if there is one home), the counts at the end are those of the sale, no buyer is ever above the limit,
//! each operation id has its effects once, and the record of an id agrees with its last
//! effect.

use std::collections::HashMap;

use dlock_segment::{Audit, Effect, Inventory, JournalCursor, JournalEntry, Resolved};

use super::{Mix, PER_BUYER, REST, Soak};

/// About how many ids are compared with their records.
const COMPARED: usize = 200_000;

#[derive(Debug)]
struct LastEffect {
    effect: Effect,
    buyer: Option<String>,
}

#[derive(Debug, Default)]
struct Ledger {
    homes: u32,
    /// The most that a buyer may have.
    limit: u64,
    available: u64,
    /// What all homes sent, less what they received. The journals are read one after the other,
    /// so it may be below zero in between; and at the end, if a home lost what it sent.
    in_transit: i64,
    reserved: u64,
    sold: u64,
    has: HashMap<String, u64>,
    effects: HashMap<String, LastEffect>,
}

/// Replays the journal. Returns the number of entries; 0 if the first are gone.
pub(super) async fn replay(sale: &Inventory, soak: Soak, audit: &Audit) -> u64 {
    // The journals of homes are read one after the other: one may sell what another one was
    // delivered, so only the end is compared.
    let ahead = if soak.homes > 1 { 1 << 40 } else { 0 };
    let available = soak.units + ahead;
    let limit = if soak.mix == Mix::Leased { u64::MAX } else { PER_BUYER };
    let mut ledger = Ledger { homes: soak.homes, limit, available, ..Ledger::default() };
    let mut cursor = JournalCursor::default();
    let mut count = 0;
    loop {
        let entries = sale.journal(&cursor).await.expect("the journal");
        if entries.is_empty() {
            break;
        }
        for entry in entries {
            let last = cursor.sequence(entry.home);
            if last == 0 && entry.sequence != 1 {
                return 0;
            }
            assert_eq!(entry.sequence, last + 1, "no entry is missing or comes twice");
            cursor.advance(&entry);
            count += 1;
            ledger.enter(entry);
        }
    }
    assert_eq!(
        ledger.in_transit,
        audit.in_transit as i64 - audit.lost_sends as i64,
        "what was sent was received, but for what the audit says: {audit:?}"
    );
    let stock = sale.stock().await.expect("the stock");
    assert_eq!(
        (ledger.available - ahead, ledger.reserved, ledger.sold),
        (stock.available, stock.reserved, stock.sold),
        "the journal leads to the counts"
    );
    ledger.compare(sale).await;
    count
}

impl Ledger {
    fn enter(&mut self, entry: JournalEntry) {
        let what = format!("{entry:?}");
        let JournalEntry { effect, operation, whose, quantity, .. } = entry;
        match effect {
            Effect::Sent => self.in_transit += quantity as i64,
            Effect::Received => self.in_transit -= quantity as i64,
            _ => {}
        }
        let (from, to) = match effect {
            Effect::Taken => (Some(&mut self.available), Some(&mut self.sold)),
            Effect::Reserved => (Some(&mut self.available), Some(&mut self.reserved)),
            Effect::Confirmed => (Some(&mut self.reserved), Some(&mut self.sold)),
            Effect::Cancelled | Effect::Expired => {
                (Some(&mut self.reserved), Some(&mut self.available))
            }
            Effect::Refunded => (Some(&mut self.sold), Some(&mut self.available)),
            Effect::RefundedDamaged => (Some(&mut self.sold), None),
            Effect::Restocked | Effect::Received => (None, Some(&mut self.available)),
            Effect::WrittenOff | Effect::Sent => (Some(&mut self.available), None),
            _ => (None, None),
        };
        if let Some(from) = from {
            *from = from.checked_sub(quantity).unwrap_or_else(|| panic!("below zero: {what}"));
        }
        if let Some(to) = to {
            *to += quantity;
        }
        let buyer = match effect {
            Effect::Refunded | Effect::RefundedDamaged => {
                let of = whose.as_ref().and_then(|of| self.effects.get(of));
                of.unwrap_or_else(|| panic!("a refund of nothing: {what}")).buyer.clone()
            }
            Effect::Sent | Effect::Received => None, // the other home
            _ => whose,
        };
        if let Some(buyer) = &buyer {
            let has = self.has.entry(buyer.clone()).or_default();
            match effect {
                Effect::Taken | Effect::Reserved => *has += quantity,
                Effect::Cancelled
                | Effect::Expired
                | Effect::Refunded
                | Effect::RefundedDamaged => *has -= quantity,
                _ => {}
            }
            assert!(*has <= self.limit || buyer == REST, "above the limit: {what}");
        }
        if let Some(id) = operation {
            self.record_effect(id, effect, buyer, &what);
        }
    }

    /// Records an effect of an id, and checks that it may follow the one before.
    fn record_effect(&mut self, id: String, effect: Effect, buyer: Option<String>, what: &str) {
        let mut before = self.effects.get(&id).map(|last| last.effect);
        if self.homes > 1 {
            // A bare id is settled in all homes; what another home has of it counts.
            match (before, effect) {
                (Some(_), Effect::Settled) => return,
                (Some(Effect::Settled), _) => before = None,
                _ => {}
            }
        }
        let follows = match effect {
            Effect::Confirmed | Effect::Cancelled | Effect::Expired | Effect::Extended => {
                matches!(before, Some(Effect::Reserved | Effect::Extended))
            }
            _ => before.is_none(),
        };
        assert!(follows, "this effect must not follow {before:?}: {what}");
        self.effects.insert(id, LastEffect { effect, buyer });
    }

    /// Compares the last effects with the records of the sale.
    async fn compare(&self, sale: &Inventory) {
        let step = self.effects.len() / COMPARED + 1;
        let effects = self.effects.iter().step_by(step).map(|(id, last)| (id.clone(), last.effect));
        let compared = super::with_records(sale, effects, |id, effect, resolved| {
            let differs = !agrees(*effect, resolved);
            Vec::from_iter(differs.then(|| format!("{id}: {effect:?}, but {resolved:?}")))
        });
        assert_eq!(compared.await, 0, "the last effect of an id is its record");
    }
}

/// Whether the record of an id agrees with the last effect under this id. A refund has an
/// id of its own, so what it refunds keeps its effect.
fn agrees(last: Effect, resolved: &Resolved) -> bool {
    match resolved {
        Resolved::Taken(_) => last == Effect::Taken,
        Resolved::Held(_) => matches!(last, Effect::Reserved | Effect::Extended),
        Resolved::Confirmed(_) => last == Effect::Confirmed,
        Resolved::Refunded(_) => matches!(last, Effect::Taken | Effect::Confirmed),
        Resolved::Expired(_) => last == Effect::Expired,
        Resolved::Cancelled(_) => last == Effect::Cancelled,
        Resolved::RefundDone(_) => {
            matches!(last, Effect::Refunded | Effect::RefundedDamaged)
        }
        Resolved::WrittenOff(_) => last == Effect::WrittenOff,
        Resolved::Restocked(_) => last == Effect::Restocked,
        Resolved::NotApplied => matches!(last, Effect::Settled | Effect::Owed),
        other => panic!("{other:?}"),
    }
}
