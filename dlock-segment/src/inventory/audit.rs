//! The audit: everything is counted again.
//!
//! The counts are read, then every record, then the counts once more. If nothing changed
//! in between, all of them must agree exactly. Else the audit tries again. After [`TRIES`]
//! it says that it is not exact, and only checks what holds at any moment.

use hashbrown::HashMap;
use hashbrown::hash_map::Entry;
use serde::{Deserialize, Serialize};

use crate::error::Result;
use crate::homes::Site;
use crate::store::home::cut;
use crate::store::{Counts, Cursor, Id, Page, Record, Status, View};

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

/// Audits a home. `progress` is told how many records each page had.
pub(super) async fn of(site: &Site, progress: &(dyn Fn(u64) + Sync)) -> Result<Audit> {
    let counts = || async { site.call(|store, id| async move { store.counts(&id).await }).await };
    let mut tries = 0;
    loop {
        let (view, segments) = counts().await?;
        let sizes = site.call(|store, id| async move { store.sizes(&id).await }).await?;
        let mut count = Count::new(view, segments, sizes);
        each_page(site, |page| {
            progress(page.records.len() as u64);
            count.add(page);
        })
        .await?;
        let (after, _) = counts().await?;
        tries += 1;
        let seen = |view: &View| (view.changes, view.next_expiry, view.has_all_records());
        let exact = seen(&count.view) == seen(&after);
        if exact || tries == TRIES {
            return Ok(count.audit(exact));
        }
    }
}

/// A home that is being counted. It keeps some numbers for each record and each buyer, and not
/// the records: a sale may have millions.
struct Count {
    view: View,
    sizes: Vec<u32>,
    audit: Audit,
    /// What is wrong unless the inventory changed meanwhile.
    wrong_if_exact: Vec<Disagreement>,
    /// The records that were read, by the hash of their ids: some bits of the time of each.
    seen: HashMap<u64, u32>,
    /// By the hash of a buyer: what the operations say, and what is counted.
    buyers: HashMap<u64, (u64, u64)>,
    /// What the refunds of a purchase gave back: by its id and the time of its effect.
    refunds: HashMap<(Id, u64), u64>,
    /// What the purchases say that was given back of them, by the hash of the same.
    refunded: HashMap<u64, u64>,
}

impl Count {
    fn new(view: View, counts: Vec<Counts>, sizes: Vec<u32>) -> Self {
        let mut audit = Audit {
            initial: view.initial,
            restocked: view.restocked,
            available: view.available,
            reserved: view.reserved,
            sold: view.sold,
            written_off: view.written_off,
            segments: counts
                .iter()
                .map(|&counts| SegmentAudit { counts, held: 0, sold_by_id: 0 })
                .collect(),
            ..Audit::default()
        };
        check_counts(&view, &mut audit);
        Count {
            view,
            sizes,
            audit,
            wrong_if_exact: Vec::new(),
            seen: HashMap::new(),
            buyers: HashMap::new(),
            refunds: HashMap::new(),
            refunded: HashMap::new(),
        }
    }

    fn audit(mut self, exact: bool) -> Audit {
        self.audit.exact = exact;
        self.audit.operations = self.seen.len() as u64;
        if exact {
            self.audit.disagreements.append(&mut self.wrong_if_exact);
            self.check_refunds();
            self.check_sums();
        }
        self.audit
    }

    fn add(&mut self, page: Page) {
        for (id, record) in page.records {
            let at = record.as_ref().map_or(0, |record| record.at);
            let hashed = hash(&id);
            if let Entry::Vacant(place) = self.seen.entry(hashed) {
                place.insert(at as u32); // the newer one comes first
                self.add_record(&id, record);
            }
        }
        for (buyer, counted) in page.buyers {
            self.buyers.entry(hash(&buyer)).or_default().1 = counted;
        }
    }

    /// Adds a record to the sums of its segments and of its buyer.
    fn add_record(&mut self, id: &Id, record: Option<Record>) {
        let audit = &mut self.audit;
        let Some(record) = record else {
            return audit.wrong(Some(id), "its record cannot be read".into());
        };
        if record.status == Status::Debt {
            audit.owed += record.quantity;
            return audit.wrong(Some(id), format!(
                "a debt: {} leased units were sold, reported too late, and are not available any more; restock, or cancel as many orders",
                record.quantity
            ));
        }
        let total: u64 = record.parts.iter().map(|(_, quantity)| quantity).sum();
        let has_parts = !matches!(record.status, Status::Restock | Status::Tombstone);
        if has_parts && total != record.quantity {
            audit.wrong(Some(id), format!("its parts sum up to {total}, not {}", record.quantity));
        }
        if matches!(record.status, Status::Refund | Status::DamagedRefund) {
            // A refund names the time of the purchase, because an id may be used again.
            if let Some(of) = &record.whose {
                *self.refunds.entry((of.clone(), record.expires)).or_default() += record.quantity;
            }
            return;
        }
        if record.refunded > 0 {
            self.refunded.insert(hash(&(id, record.at)), record.refunded);
        }
        let held = record.status == Status::Reserved;
        let quantity = if held { record.quantity } else { record.sold() };
        if quantity == 0 {
            return;
        }
        if let Some(buyer) = &record.whose {
            self.buyers.entry(hash(buyer)).or_default().0 += quantity;
        }
        for (segment, quantity) in cut(&record.parts, record.refunded, quantity) {
            let Some(at) = self.place(record.epoch, segment) else {
                // A resize that came meanwhile has another number of segments.
                let what = format!("epoch {} has no segment {segment}", record.epoch);
                self.wrong_if_exact.push(Disagreement { operation: Some(id.to_string()), what });
                continue;
            };
            let sums = &mut self.audit.segments[at];
            *(if held { &mut sums.held } else { &mut sums.sold_by_id }) += quantity;
        }
    }

    /// Checks that each operation says what its refunds gave back. A refund writes both
    /// records at once, but pages that are read before and after it have one of each.
    fn check_refunds(&mut self) {
        for ((of, at), given_back) in &self.refunds {
            let is_on_record = self.seen.get(&hash(of)) == Some(&(*at as u32));
            let says = self.refunded.get(&hash(&(of, *at))).copied().unwrap_or(0);
            if is_on_record && *given_back > says {
                let what = format!("refunds of {given_back} are on record, it says {says}");
                self.audit.wrong(Some(of), what);
            }
        }
    }

    /// Checks what must agree if nothing changed meanwhile.
    fn check_sums(&mut self) {
        let audit = &mut self.audit;
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
        let is_all_by_id = self.view.sold == self.view.sold_by_id;
        for &(has, counted) in self.buyers.values().filter(|(has, _)| *has > 0) {
            if has > counted || (has_all && is_all_by_id && has != counted) {
                audit.wrong(None, format!("a buyer has {counted}, operations say {has}"));
            }
        }
    }

    fn place(&self, epoch: u32, segment: u32) -> Option<usize> {
        (segment < *self.sizes.get(epoch as usize)?).then_some(())?;
        let later = self.sizes.iter().skip(epoch as usize + 1);
        let at = later.fold(segment, |segment, &size| segment % size) as usize;
        (at < self.audit.segments.len()).then_some(at)
    }
}

fn check_counts(view: &View, audit: &mut Audit) {
    let View { initial, restocked, available, reserved, sold, written_off, .. } = *view;
    let View { received, sent, .. } = *view;
    if initial + restocked + received != available + reserved + sold + written_off + sent {
        let moved = match view.is_one_of_several {
            true => format!(", with {received} received from other homes and {sent} sent"),
            false => String::new(),
        };
        audit.wrong(None, format!(
            "initial {initial} + restocked {restocked} is not available {available} + reserved {reserved} + sold {sold} + written off {written_off}{moved}"
        ));
    }
    let mut sum = Counts::default();
    for at in 0..audit.segments.len() {
        let Counts { available, reserved, sold, supplied } = audit.segments[at].counts;
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

/// A number for an id, another one in each process. That two of ten million ids have the same
/// happens once in 300,000 audits, and makes that one find a disagreement.
pub(super) fn hash(of: &impl std::hash::Hash) -> u64 {
    use std::hash::BuildHasher as _;
    static SEED: std::sync::OnceLock<std::hash::RandomState> = std::sync::OnceLock::new();
    SEED.get_or_init(Default::default).hash_one(of)
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
