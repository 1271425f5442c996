//! The inventory is compared with what the shop's own records say, and corrected.
//!
//! Each order is looked up by its id. Then every record of the inventory is read, to find
//! sales that the shop does not know. An order that is not on record is missing, unless its
//! retention is over: the inventory forgets orders that are old, and still counts them. Only
//! the sum of those can be compared.

use futures_util::future::join_all;
use futures_util::{Stream, StreamExt as _};
use hashbrown::HashSet;
use serde::{Deserialize, Serialize};

use super::backing::read_failed;
use super::checks::{checked_id, checked_quantity};
use super::sharded::Hint;
use super::{Inventory, audit};
use crate::error::{Error, Result};
use crate::store::{Answer, Id, Record, Request, Status, View};

/// How many orders are looked up together.
const AT_ONCE: usize = 256;
/// How many differences are listed; the others are counted.
const LISTED: usize = 10_000;

/// An order as the shop's own records have it.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct ShopOrder {
    /// The operation id under which it was sent.
    pub operation: String,
    /// The units that are sold or reserved now, without those that were given back.
    pub quantity: u64,
    /// The state of the order.
    pub state: OrderState,
    /// The buyer, if one was named.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub buyer: Option<String>,
    /// When it was placed, in milliseconds of Unix time. Orders that are younger than the
    /// retention must be on record.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub at: Option<u64>,
}

/// The state of a [`ShopOrder`].
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
#[non_exhaustive]
pub enum OrderState {
    /// The units are sold.
    Sold,
    /// The units are reserved, and not paid for yet.
    Reserved,
    /// Nothing is sold: the order was cancelled, or everything was given back.
    Cancelled,
}

/// What does not agree.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
#[non_exhaustive]
pub enum DifferenceKind {
    /// The shop sold it, and the inventory has no record of it: the effect was lost.
    Missing,
    /// The shop sold it, and in the inventory it is only reserved.
    NotConfirmed,
    /// The inventory has more units of it sold or reserved than the shop.
    TooMany,
    /// The inventory has fewer units of it sold than the shop. Nothing can correct that under
    /// the same id.
    TooFew,
    /// The shop has it reserved, and the inventory does not. Nothing is corrected: a
    /// reservation ends by itself.
    NotReserved,
    /// The inventory sold it, and the shop does not know it. Nothing is corrected: the shop may
    /// write the order down a moment later.
    Unknown,
}

/// One order that does not agree.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[non_exhaustive]
pub struct Difference {
    /// The operation id.
    pub operation: String,
    /// What does not agree.
    pub kind: DifferenceKind,
    /// By how many units.
    pub units: u64,
    /// Whether it was corrected.
    pub corrected: bool,
    /// Why it could not be corrected, if it was tried.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub why_not: Option<String>,
}

/// The result of [`Inventory::reconcile`].
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[non_exhaustive]
pub struct Reconciliation {
    /// The number of orders that were compared.
    pub orders: u64,
    /// The number of them that agree.
    pub agree: u64,
    /// The number of differences, and how many of them were corrected.
    pub different: u64,
    /// The number of differences that were corrected.
    pub corrected: u64,
    /// The orders that do not agree; at most 10,000 of them.
    pub differences: Vec<Difference>,
    /// The orders that may be older than the retention, and their units. They are not on
    /// record.
    pub too_old: u64,
    /// The units of those orders.
    pub too_old_units: u64,
    /// The units that the inventory counts as sold under ids that it has forgotten. If it lost
    /// nothing, this is `too_old_units`.
    pub forgotten_units: u64,
}

impl Reconciliation {
    /// Whether the shop and the inventory agree, as far as that can be known.
    pub fn is_clean(&self) -> bool {
        self.different == self.corrected && self.too_old_units == self.forgotten_units
    }

    fn add(&mut self, difference: Difference) {
        self.different += 1;
        self.corrected += u64::from(difference.corrected);
        if self.differences.len() < LISTED {
            self.differences.push(difference);
        }
    }
}

/// A correction of one order.
enum Correction {
    None,
    Import,
    Confirm,
    Cancel,
    Refund(u64),
}

impl Inventory {
    /// Compares the inventory with the orders that the shop's own database has, and reports
    /// every difference. With `apply`, it corrects what can be corrected: what is missing is
    /// sold again under its id, past pause, opening times and limit; what the shop sold and
    /// the inventory only reserved is confirmed; what the shop does not have any more is given
    /// back. It may be repeated: what agrees is left alone.
    ///
    /// After the store lost everything, create the inventory again and reconcile it with all
    /// orders, before anybody buys.
    ///
    /// ```
    /// # #[tokio::main(flavor = "current_thread")] async fn main() -> dlock_segment::Result<()> {
    /// # let dlock = dlock::Dlock::connect("memory://").await?;
    /// use dlock_segment::{DifferenceKind, Inventory, OrderState, ShopOrder};
    ///
    /// let sale = Inventory::builder(&dlock, "phone").stock(10).create().await?;
    /// let order = |id: &str, quantity| ShopOrder {
    ///     operation: id.into(), quantity, state: OrderState::Sold, buyer: None, at: None,
    /// };
    /// let orders = futures_util::stream::iter([order("order-1", 2), order("order-2", 1)]);
    /// let report = sale.reconcile(orders, true).await?;
    /// assert_eq!(report.differences[0].kind, DifferenceKind::Missing);
    /// assert_eq!((report.corrected, sale.stock().await?.sold), (2, 3));
    /// # Ok(()) }
    /// ```
    ///
    /// # Errors
    /// `Invalid` if an order has an id or a quantity that is not valid. `OutOfReach` or `Store`
    /// if the store cannot be used; what was corrected so far stays.
    ///
    /// # Cancel safety
    /// Some orders may have been corrected when it is dropped; call it again.
    pub async fn reconcile(
        &self,
        orders: impl Stream<Item = ShopOrder>,
        apply: bool,
    ) -> Result<Reconciliation> {
        let mut report = Reconciliation::default();
        let mut known = HashSet::new();
        let stock = self.stock().await?;
        let youngest = stock.now.saturating_sub(stock.retention);
        let has_all = self.has_all_records().await?;
        let mut chunks = std::pin::pin!(orders.chunks(AT_ONCE));
        while let Some(chunk) = chunks.next().await {
            let looked = join_all(chunk.iter().map(|order| self.look_up(order))).await;
            for (order, found) in chunk.iter().zip(looked) {
                report.orders += 1;
                known.insert(hash(&order.operation));
                let found = found?;
                let is_absent = found.is_none();
                let must_be_there = has_all || order.at.is_some_and(|at| at > youngest);
                if is_absent && !must_be_there && order.state == OrderState::Sold {
                    report.too_old += 1;
                    report.too_old_units += order.quantity;
                    continue;
                }
                match compare(order, found.as_ref()) {
                    None => report.agree += 1,
                    Some((kind, units, correction)) => {
                        let corrected = match apply {
                            true => self.correct(order, found.as_ref(), &correction).await,
                            false => Ok(false),
                        };
                        let operation = order.operation.clone();
                        let (corrected, why_not) = match corrected {
                            Ok(corrected) => (corrected, None),
                            Err(error) if error.is_retryable() => return Err(error),
                            Err(error) => (false, Some(error.to_string())),
                        };
                        report.add(Difference { operation, kind, units, corrected, why_not });
                    }
                }
            }
        }
        self.find_unknown(&known, &mut report).await?;
        Ok(report)
    }

    fn hint(&self, order: &ShopOrder) -> Result<Hint> {
        let buyer = match &order.buyer {
            Some(buyer) => Some(checked_id("buyer's id", buyer)?),
            None => None,
        };
        Ok(Hint { buyer, home: None })
    }

    async fn look_up(&self, order: &ShopOrder) -> Result<Option<Record>> {
        let id = checked_id("operation id", &order.operation)?;
        let (look, hint) = (Request::Look { operation: id.clone() }, self.hint(order)?);
        match self.send_to(look, &hint, Some(&id), self.deadline(None)?).await? {
            (_, Answer::Found(record)) => Ok(Some(record)),
            _ => Ok(None),
        }
    }

    async fn correct(
        &self,
        order: &ShopOrder,
        found: Option<&Record>,
        correction: &Correction,
    ) -> Result<bool> {
        let id: Id = checked_id("operation id", &order.operation)?;
        let hint = self.hint(order)?;
        let request = match correction {
            Correction::None => return Ok(false),
            Correction::Import => {
                let quantity = checked_quantity("the quantity", order.quantity)?;
                let (operation, buyer) = (id.clone(), hint.buyer.clone());
                Request::Import { quantity, operation, buyer, or_debt: false }
            }
            Correction::Confirm => Request::Confirm { operation: id.clone() },
            Correction::Cancel => Request::Cancel { operation: id.clone() },
            Correction::Refund(quantity) => {
                // The same correction again is the same refund.
                let left = found.map_or(0, Record::sold);
                let operation: Id = format!("reconcile:{left}:{id}").into();
                let (of, quantity) = (id.clone(), *quantity);
                Request::Refund { of, quantity, operation, damaged: false, receipt: None }
            }
        };
        let own = match &request {
            Request::Refund { operation, .. } => operation.clone(),
            _ => id,
        };
        match self.send_to(request, &hint, Some(&own), self.deadline(None)?).await? {
            (_, Answer::Found(record)) => Ok(record.status != Status::Tombstone),
            (_, Answer::SoldOut { available }) => Err(Error::Conflict(format!(
                "only {available} units are available: more were sold than there are"
            ))),
            (_, other) => Err(super::checks::unexpected(&other)),
        }
    }

    /// Finds what the inventory sold and the shop does not know.
    async fn find_unknown(&self, known: &HashSet<u64>, report: &mut Reconciliation) -> Result<()> {
        let mut recorded = 0;
        for records in self.all_records().await? {
            for (id, record) in records {
                let Some(record) = record else { continue };
                recorded += record.sold();
                let units = record.sold();
                if units > 0 && !known.contains(&hash(&id)) {
                    report.add(Difference {
                        operation: id.to_string(),
                        kind: DifferenceKind::Unknown,
                        units,
                        corrected: false,
                        why_not: None,
                    });
                }
            }
        }
        let counted = self.sold_by_id().await?;
        report.forgotten_units = counted.saturating_sub(recorded);
        Ok(())
    }

    /// The records of each home.
    async fn all_records(&self) -> Result<Vec<audit::Records>> {
        match &self.shared.sharded {
            Some(sharded) => sharded.all_records().await,
            None => {
                let inventory = self.shared.inventory.clone();
                let read = move |store: std::sync::Arc<dyn crate::store::Store>| async move {
                    audit::records(&*store, &inventory).await.map(|(records, _)| vec![records])
                };
                self.call(read).await
            }
        }
        .map_err(read_failed)
    }
}

impl Inventory {
    async fn all_views(&self) -> Result<Vec<View>> {
        if let Some(sharded) = &self.shared.sharded {
            return sharded.all_views().await.map_err(read_failed);
        }
        let inventory = self.shared.inventory.clone();
        let view = self.call(move |store| async move { store.view(&inventory).await }).await;
        Ok(vec![view.map_err(read_failed)?])
    }

    /// Whether no home has forgotten a record because of its age.
    async fn has_all_records(&self) -> Result<bool> {
        Ok(self.all_views().await?.iter().all(View::has_all_records))
    }

    /// The units that were sold under an id and not given back.
    async fn sold_by_id(&self) -> Result<u64> {
        Ok(self.all_views().await?.iter().map(|view| view.sold_by_id).sum())
    }
}

/// What does not agree, by how many units, and what corrects it.
fn compare(order: &ShopOrder, found: Option<&Record>) -> Option<(DifferenceKind, u64, Correction)> {
    use DifferenceKind::{Missing, NotConfirmed, NotReserved, TooFew, TooMany};
    let wanted = order.quantity;
    let is_held = found.is_some_and(|record| record.status == Status::Reserved);
    let held = if is_held { found.map_or(0, |record| record.quantity) } else { 0 };
    let is_sale = |record: &&Record| matches!(record.status, Status::Taken | Status::Confirmed);
    let sold = found.filter(is_sale).map(Record::sold);
    match (order.state, sold) {
        (OrderState::Sold, None) if is_held && held == wanted => {
            Some((NotConfirmed, wanted, Correction::Confirm))
        }
        (OrderState::Sold, None) if is_held => {
            Some((TooFew, wanted.abs_diff(held), Correction::None))
        }
        (OrderState::Sold, None) => (wanted > 0).then_some((Missing, wanted, Correction::Import)),
        (OrderState::Sold, Some(sold)) if sold > wanted => {
            Some((TooMany, sold - wanted, Correction::Refund(sold - wanted)))
        }
        (OrderState::Sold, Some(sold)) if sold < wanted => {
            Some((TooFew, wanted - sold, Correction::None))
        }
        (OrderState::Reserved, Some(sold)) if sold > 0 => Some((TooMany, sold, Correction::None)),
        (OrderState::Reserved, _) if !is_held => Some((NotReserved, wanted, Correction::None)),
        (OrderState::Cancelled, _) if is_held => Some((TooMany, held, Correction::Cancel)),
        (OrderState::Cancelled, Some(sold)) if sold > 0 => {
            Some((TooMany, sold, Correction::Refund(sold)))
        }
        _ => None,
    }
}

fn hash(id: &str) -> u64 {
    use std::hash::BuildHasher as _;
    static SEED: std::sync::OnceLock<std::hash::RandomState> = std::sync::OnceLock::new();
    SEED.get_or_init(Default::default).hash_one(id)
}
