//! The audit: everything is counted again.
//!
//! The counts are read, then every record, then the counts once more. If nothing changed
//! in between, all of them must agree exactly. Else the audit tries again. After [`TRIES`]
//! it says that it is not exact, and only checks what holds at any moment.

use hashbrown::HashMap;
use serde::{Deserialize, Serialize};

use crate::error::Result;
use crate::homes::Site;
use crate::store::home::cut;
use crate::store::{Counts, Cursor, Id, InventoryId, Page, Record, Status, Store, View};

/// How often an inventory that changes meanwhile is counted.
const TRIES: usize = 5;

/// The result of [`Inventory::audit`](crate::Inventory::audit).
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[non_exhaustive]
#[allow(missing_docs, reason = "the fields are named like what they hold")]
pub struct Audit {
    pub initial: u64,
    pub restocked: u64,
    pub available: u64,
    pub reserved: u64,
    pub sold: u64,
    pub written_off: u64,
    /// The units that are on their way from one home to another.
    pub in_transit: u64,
    /// The units that one home received and whose sending another home has lost: they exist
    /// twice. `initial + restocked + lost_sends` = `available + reserved + sold + written_off +
    /// in_transit`.
    #[serde(default)]
    pub lost_sends: u64,
    /// The units of leases that were sold from memory, reported too late, and not available
    /// any more. Each of these debts is on record for the retention, and is named in
    /// `disagreements`.
    #[serde(default)]
    pub owed: u64,
    /// The segments, one home after the other.
    pub segments: Vec<SegmentAudit>,
    /// The number of operation records that were read.
    pub operations: u64,
    /// Whether nothing changed during the audit, so that everything was checked.
    pub exact: bool,
    /// Everything that does not agree.
    pub disagreements: Vec<Disagreement>,
}

impl Audit {
    /// Whether everything was checked and agrees. It is false if the inventory changed
    /// during the audit: then [`exact`](Self::exact) is false, and `disagreements` only has
    /// what is wrong at any moment.
    pub fn is_clean(&self) -> bool {
        self.exact && self.disagreements.is_empty()
    }
}

/// The audit of one segment.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[non_exhaustive]
pub struct SegmentAudit {
    /// The counts of the segment: supplied = available + reserved + sold.
    pub counts: Counts,
    /// The units that open reservations hold in this segment.
    pub held: u64,
    /// The units of this segment that recorded operations bought and did not give back.
    /// The other sold units were sold without an id, or before the retention.
    pub sold_by_id: u64,
}

/// One thing that does not agree.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[non_exhaustive]
pub struct Disagreement {
    /// The id of the operation, if one is concerned.
    pub operation: Option<String>,
    /// A description of what is wrong.
    pub what: String,
}

/// The records of operations by their ids; `None` if one cannot be read.
pub(super) type Records = HashMap<Id, Option<Record>>;

/// Reads all records of a home, a page at a time.
pub(super) async fn each_page(site: &Site, mut each: impl FnMut(Page)) -> Result<()> {
    let mut from = Some(Cursor::default());
    while let Some(cursor) = from {
        let read = site.call(move |store, id| async move { store.records(&id, cursor).await });
        let mut page = read.await?;
        from = page.next.take();
        each(page);
    }
    Ok(())
}

/// Reads all records, and what each buyer has.
pub(super) async fn records(
    store: &dyn Store,
    inventory: &InventoryId,
) -> Result<(Records, HashMap<Id, u64>)> {
    let mut records: Records = HashMap::new();
    let mut buyers: HashMap<Id, u64> = HashMap::new();
    let mut from = Some(Cursor::default());
    while let Some(cursor) = from {
        let page = store.records(inventory, cursor).await?;
        for (id, record) in page.records {
            records.entry(id).or_insert(record); // the newer one comes first
        }
        buyers.extend(page.buyers);
        from = page.next;
    }
    Ok((records, buyers))
}

pub(super) async fn of(store: &dyn Store, inventory: &InventoryId) -> Result<Audit> {
    let mut tries = 0;
    loop {
        let (before, counts) = store.counts(inventory).await?;
        let (records, buyers) = records(store, inventory).await?;
        let sizes = store.sizes(inventory).await?;
        let (after, _) = store.counts(inventory).await?;
        tries += 1;
        let seen = |view: &View| (view.changes, view.next_expiry, view.has_all_records());
        let exact = seen(&before) == seen(&after);
        if exact || tries == TRIES {
            return Ok(Count { view: before, counts, records, buyers, sizes, exact }.audit());
        }
    }
}

struct Count {
    view: View,
    counts: Vec<Counts>,
    records: HashMap<Id, Option<Record>>,
    buyers: HashMap<Id, u64>,
    sizes: Vec<u32>,
    exact: bool,
}

impl Count {
    fn audit(self) -> Audit {
        let view = &self.view;
        let mut audit = Audit {
            initial: view.initial,
            restocked: view.restocked,
            available: view.available,
            reserved: view.reserved,
            sold: view.sold,
            written_off: view.written_off,
            in_transit: 0,
            lost_sends: 0,
            owed: 0,
            segments: self
                .counts
                .iter()
                .map(|&counts| SegmentAudit { counts, held: 0, sold_by_id: 0 })
                .collect(),
            operations: self.records.len() as u64,
            exact: self.exact,
            disagreements: Vec::new(),
        };
        self.check_counts(&mut audit);
        let has = self.check_records(&mut audit);
        if self.exact {
            self.check_refunds(&mut audit);
            self.check_sums(&mut audit, &has);
        }
        audit
    }

    fn check_counts(&self, audit: &mut Audit) {
        let View { initial, restocked, available, reserved, sold, written_off, .. } = self.view;
        let View { received, sent, .. } = self.view;
        if initial + restocked + received != available + reserved + sold + written_off + sent {
            let moved = match self.view.is_one_of_several {
                true => format!(", with {received} received from other homes and {sent} sent"),
                false => String::new(),
            };
            audit.wrong(None, format!(
                "initial {initial} + restocked {restocked} is not available {available} + reserved {reserved} + sold {sold} + written off {written_off}{moved}"
            ));
        }
        let mut sum = Counts::default();
        for (at, counts) in self.counts.iter().enumerate() {
            let Counts { available, reserved, sold, supplied } = *counts;
            if supplied != available + reserved + sold {
                audit.wrong(None, format!(
                    "segment {at}: supplied {supplied} is not available {available} + reserved {reserved} + sold {sold}"
                ));
            }
            sum.available += available;
            sum.reserved += reserved;
            sum.sold += sold;
        }
        if (sum.available, sum.reserved, sum.sold) != (available, reserved, sold) {
            audit.wrong(None, format!("the segments together have {sum:?}, not the totals"));
        }
    }

    /// Sums the records up by segment. Returns what each buyer should have.
    fn check_records(&self, audit: &mut Audit) -> HashMap<Id, u64> {
        let mut has: HashMap<Id, u64> = HashMap::new();
        for (id, record) in &self.records {
            let Some(record) = record else {
                audit.wrong(Some(id), "its record cannot be read".into());
                continue;
            };
            if record.status == Status::Debt {
                audit.owed += record.quantity;
                audit.wrong(Some(id), format!(
                    "a debt: {} leased units were sold, reported too late, and are not available any more; restock, or cancel as many orders",
                    record.quantity
                ));
                continue;
            }
            let total: u64 = record.parts.iter().map(|(_, quantity)| quantity).sum();
            let has_parts = !matches!(record.status, Status::Restock | Status::Tombstone);
            if has_parts && total != record.quantity {
                audit.wrong(
                    Some(id),
                    format!("its parts sum up to {total}, not {}", record.quantity),
                );
            }
            let held = record.status == Status::Reserved;
            let quantity = if held { record.quantity } else { record.sold() };
            if quantity == 0 {
                continue;
            }
            if let Some(buyer) = &record.whose {
                *has.entry(buyer.clone()).or_default() += quantity;
            }
            for (segment, quantity) in cut(&record.parts, record.refunded, quantity) {
                let Some(at) = self.place(record.epoch, segment) else {
                    // A resize that came meanwhile has another number of segments.
                    if self.exact {
                        let epoch = record.epoch;
                        audit.wrong(Some(id), format!("epoch {epoch} has no segment {segment}"));
                    }
                    continue;
                };
                let sums = &mut audit.segments[at];
                *(if held { &mut sums.held } else { &mut sums.sold_by_id }) += quantity;
            }
        }
        has
    }

    /// Checks that each operation says what its refunds gave back. A refund writes both
    /// records at once, but pages that are read before and after it have one of each. A
    /// refund names the time of the purchase, because an id may be used again.
    fn check_refunds(&self, audit: &mut Audit) {
        let mut refunds: HashMap<(&Id, u64), u64> = HashMap::new();
        for record in self.records.values().flatten() {
            if matches!(record.status, Status::Refund | Status::DamagedRefund)
                && let Some(of) = &record.whose
            {
                *refunds.entry((of, record.expires)).or_default() += record.quantity;
            }
        }
        for ((of, at), refunded) in refunds {
            if let Some(Some(record)) = self.records.get(of)
                && record.at == at
                && refunded > record.refunded
            {
                let what =
                    format!("refunds of {refunded} are on record, it says {}", record.refunded);
                audit.wrong(Some(of), what);
            }
        }
    }

    /// Checks what must agree if nothing changed meanwhile.
    fn check_sums(&self, audit: &mut Audit, has: &HashMap<Id, u64>) {
        for at in 0..audit.segments.len() {
            let SegmentAudit { counts, held, sold_by_id } = audit.segments[at];
            if held != counts.reserved {
                let reserved = counts.reserved;
                audit.wrong(
                    None,
                    format!("segment {at}: {reserved} reserved, reservations have {held}"),
                );
            }
            if sold_by_id > counts.sold {
                let sold = counts.sold;
                audit.wrong(
                    None,
                    format!("segment {at}: {sold} sold, operations bought {sold_by_id}"),
                );
            }
        }
        // Older records may have been deleted, with what they bought.
        let has_all = self.view.has_all_records();
        let sold: u64 = audit.segments.iter().map(|segment| segment.sold_by_id).sum();
        let counted = self.view.sold_by_id;
        if sold > counted || (has_all && sold != counted) {
            audit.wrong(None, format!("{counted} sold under an id, operations bought {sold}"));
        }
        for (buyer, has) in has {
            let counted = self.buyers.get(buyer).copied().unwrap_or(0);
            if *has > counted || (has_all && self.is_all_by_id() && *has != counted) {
                audit.wrong(None, format!("a buyer has {counted}, operations say {has}"));
            }
        }
    }

    fn is_all_by_id(&self) -> bool {
        self.view.sold == self.view.sold_by_id
    }

    fn place(&self, epoch: u32, segment: u32) -> Option<usize> {
        (segment < *self.sizes.get(epoch as usize)?).then_some(())?;
        let later = self.sizes.iter().skip(epoch as usize + 1);
        let at = later.fold(segment, |segment, &size| segment % size) as usize;
        (at < self.counts.len()).then_some(at)
    }
}

impl Audit {
    /// Adds the audit of one home to that of the whole.
    pub(super) fn add(&mut self, home: usize, audit: Audit) {
        self.initial += audit.initial;
        self.restocked += audit.restocked;
        self.available += audit.available;
        self.reserved += audit.reserved;
        self.sold += audit.sold;
        self.written_off += audit.written_off;
        self.owed += audit.owed;
        self.segments.extend(audit.segments);
        self.operations += audit.operations;
        self.exact &= audit.exact;
        let named = audit.disagreements.into_iter().map(|Disagreement { operation, what }| {
            Disagreement { operation, what: format!("home {home}: {what}") }
        });
        self.disagreements.extend(named);
    }

    fn wrong(&mut self, operation: Option<&Id>, what: String) {
        let operation = operation.map(|id| id.to_string());
        self.disagreements.push(Disagreement { operation, what });
    }
}
