//! The inventory is compared with what the shop's own records say, and corrected.
//!
//! ```text
//! read and look up every order ---> read every record ---> plan ---> apply, if it is asked for
//! ```
//! Nothing is changed before the whole input was read and checked, and a dry run makes the same
//! plan.
//!
//! An order that is not on record is missing, unless the inventory may have forgotten it: it
//! forgets old orders, and still counts them. Two things tell both apart, and both must agree
//! before an order is sold again:
//! - *when it was placed*: it is later than everything that its home may have forgotten. That
//!   is a matter of the records, and not of the retention of today, which may be longer than
//!   the one under which they were forgotten;
//! - *the sum*: the units that its home counts and has no record of are not more than those of
//!   the orders that are too old. A time may be wrong (of the last change of the order, of a
//!   clock that is ahead), and then this order may be one of those.

use std::collections::BTreeMap;

use futures_util::future::join_all;
use futures_util::{Stream, StreamExt as _};
use hashbrown::HashSet;
use serde::{Deserialize, Serialize};

use super::audit::hash;
use super::backing::read_failed;
use super::checks::{RECONCILED, checked_id, checked_quantity, unexpected};
use super::sharded::Hint;
use super::{Inventory, audit};
use crate::error::{Error, Result};
use crate::homes::{Routing, Site};
use crate::store::{Answer, Id, Record, Request, Status, View};

/// How many orders are looked up together.
const AT_ONCE: usize = 256;
/// How many differences are listed; the others are counted.
const LISTED: usize = 10_000;
/// How often the records of a home are read that changes meanwhile, if it matters.
const TRIES: usize = 5;

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
    /// When it was placed, in milliseconds of Unix time, and not when it was last changed. An
    /// order that is later than everything that may be forgotten must be on record.
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

/// What corrects a difference.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
#[non_exhaustive]
pub enum Correction {
    /// It is sold again under its id, past pause, opening times and limit.
    SellAgain,
    /// The reservation is confirmed.
    Confirm,
    /// The reservation is cancelled.
    Cancel,
    /// The units that the inventory has too many are given back.
    GiveBack,
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
    /// What corrects it. `None` means that a person must decide.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub correction: Option<Correction>,
    /// Whether it was corrected.
    pub corrected: bool,
    /// Why it cannot be corrected.
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
    /// The number of differences.
    pub different: u64,
    /// The number of differences that were corrected.
    pub corrected: u64,
    /// The orders that do not agree; at most 10,000 of them.
    pub differences: Vec<Difference>,
    /// The orders that the inventory may have forgotten because of their age. They are not on
    /// record.
    pub too_old: u64,
    /// The units of those orders.
    pub too_old_units: u64,
    /// The units that the inventory counts as sold under ids that it has forgotten. If it lost
    /// nothing, this is `too_old_units`. Forgotten lots of leased units are among them.
    pub forgotten_units: u64,
    /// The units that were sold from memory, out of leased lots that are on record. They have no
    /// operation ids, so they are not compared.
    #[serde(default)]
    pub leased_units: u64,
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

/// One order that does not agree, before it is corrected.
struct Planned {
    order: ShopOrder,
    home: usize,
    /// Whether nothing is on record that this order may have done.
    is_absent: bool,
    difference: Difference,
}

/// What a home can still say about orders.
#[derive(Clone, Debug, Default)]
struct Remembered {
    /// Orders that are later than this are not forgotten.
    since: u64,
    has_forgotten: bool,
    /// The units that it counts under ids that it has forgotten.
    forgotten: u64,
    /// Whether nothing changed while they were counted.
    is_exact: bool,
    /// The units of the orders that are too old to be on record.
    too_old: u64,
    available: u64,
}

impl Remembered {
    fn of(view: &View) -> Self {
        Remembered {
            since: view.remembers_since(),
            has_forgotten: !view.has_all_records(),
            available: view.available,
            ..Remembered::default()
        }
    }

    /// Whether it may have had this order and forgotten it.
    fn may_have_forgotten(&self, order: &ShopOrder) -> bool {
        self.has_forgotten && order.at.is_none_or(|at| at <= self.since)
    }

    /// Why an order that should be on record is not sold again.
    fn why_not_sold_again(&self) -> Option<String> {
        if !self.has_forgotten {
            return None;
        }
        if !self.is_exact {
            return Some("the inventory changed all the time, so it is not known whether it has sold and forgotten this order; pause it, and reconcile again".into());
        }
        let Remembered { forgotten, too_old, .. } = *self;
        (forgotten > too_old).then(|| format!(
            "it may be sold already and be forgotten: the inventory counts {forgotten} units of orders that it has forgotten, and the orders that are too old to be on record have {too_old}; give all orders, each with the time at which it was placed"
        ))
    }
}

/// The orders of the shop, so that none is compared twice.
struct Known {
    ids: HashSet<u64>,
    /// An operation is known by its id and its buyer.
    by_buyer: bool,
}

impl Known {
    fn name(&self, id: &str, buyer: Option<&str>) -> u64 {
        hash(&(id, buyer.filter(|_| self.by_buyer)))
    }

    fn contains(&self, id: &Id, record: &Record) -> bool {
        self.ids.contains(&self.name(id, record.whose.as_deref()))
    }

    fn add(&mut self, order: &ShopOrder) -> Result<()> {
        let id = &order.operation;
        checked_id("operation id", id)?;
        if order.quantity != 0 {
            checked_quantity(&format!("the quantity of the order `{id}`"), order.quantity)?;
        }
        if let Some(buyer) = &order.buyer {
            checked_id("buyer's id", buyer)?;
        } else if self.by_buyer {
            return Err(Error::Invalid(format!(
                "the order `{id}` has no buyer, and the inventory is routed by buyer; nothing was changed"
            )));
        }
        if !self.ids.insert(self.name(id, order.buyer.as_deref())) {
            return Err(Error::Invalid(format!(
                "the order `{id}` comes twice; give one row for each order, with the sum of its units; nothing was changed"
            )));
        }
        Ok(())
    }
}

impl Inventory {
    /// Compares the inventory with the orders that the shop's own database has, and reports
    /// every difference. With `apply`, it corrects what can be corrected: what is missing is
    /// sold again under its id, past pause, opening times and limit; what the shop sold and
    /// the inventory only reserved is confirmed; what the shop does not have any more is given
    /// back. It may be repeated: what agrees is left alone.
    ///
    /// Nothing is changed before all orders were read. Without `apply`, it reports what it would
    /// do with it.
    ///
    /// After the store lost everything, create the inventory again and reconcile it with all
    /// orders, before anybody buys.
    ///
    /// ```
    /// # #[tokio::main(flavor = "current_thread")] async fn main() -> dlock_segment::Result<()> {
    /// # let dlock = dlock::Dlock::connect("memory://").await?;
    /// use dlock_segment::{DifferenceKind, Error, Inventory, OrderState, ShopOrder};
    ///
    /// let sale = Inventory::builder(&dlock, "phone").stock(10).create().await?;
    /// let order = |id: &str, quantity| ShopOrder {
    ///     operation: id.into(), quantity, state: OrderState::Sold, buyer: None, at: None,
    /// };
    /// let orders = [Ok::<_, Error>(order("order-1", 2)), Ok(order("order-2", 1))];
    /// let report = sale.reconcile(futures_util::stream::iter(orders), true).await?;
    /// assert_eq!(report.differences[0].kind, DifferenceKind::Missing);
    /// assert_eq!((report.corrected, sale.stock().await?.sold), (2, 3));
    /// # Ok(()) }
    /// ```
    ///
    /// # Errors
    /// The first error among the orders, as it is. `Invalid` if an order comes twice, or has an
    /// id or a quantity that is not valid. In both cases nothing was changed. `OutOfReach` or
    /// `Store` if the store cannot be used; what was corrected so far stays.
    ///
    /// # Cancel safety
    /// Some orders may have been corrected when it is dropped; call it again.
    pub async fn reconcile<E: From<Error>>(
        &self,
        orders: impl Stream<Item = Result<ShopOrder, E>>,
        apply: bool,
    ) -> Result<Reconciliation, E> {
        let mut report = Reconciliation::default();
        let mut known =
            Known { ids: HashSet::new(), by_buyer: self.routing() == Some(Routing::Buyer) };
        let views = self.all_views().await?;
        let mut homes: Vec<Remembered> = views.iter().map(Remembered::of).collect();
        let mut plan = Vec::new();
        let mut chunks = std::pin::pin!(orders.chunks(AT_ONCE));
        while let Some(chunk) = chunks.next().await {
            let chunk: Vec<ShopOrder> = chunk.into_iter().collect::<Result<_, E>>()?;
            chunk.iter().try_for_each(|order| known.add(order))?;
            report.orders += chunk.len() as u64;
            let looked = join_all(chunk.iter().map(|order| self.look_up(order))).await;
            for (order, found) in chunk.into_iter().zip(looked) {
                let (home, found) = (self.home_of(&order), found?);
                let Some(difference) = compare(&order, found.as_ref()) else {
                    report.agree += 1;
                    continue;
                };
                // A tombstone may have come after the record was forgotten.
                let is_absent = found.is_none_or(|found| found.status == Status::Tombstone);
                let planned = Planned { order, home, is_absent, difference };
                report.plan(planned, &mut homes, &mut plan);
            }
        }
        Ok(self.reconcile_planned(&known, plan, homes, report, apply).await?)
    }

    /// Completes the plan by what the records say, and carries it out if it is asked for.
    async fn reconcile_planned(
        &self,
        known: &Known,
        plan: Vec<Planned>,
        mut homes: Vec<Remembered>,
        mut report: Reconciliation,
        apply: bool,
    ) -> Result<Reconciliation> {
        let mut unknown = Vec::new();
        for (home, site) in self.sites()?.iter().enumerate() {
            let matters = plan.iter().any(|it| it.home == home && it.is_missing());
            let too_old = homes[home].too_old;
            let (read, not_known) = self.read_home(site, known, matters, &mut report).await?;
            homes[home] = Remembered { too_old, ..read };
            unknown.extend(not_known);
        }
        // The records of a generation may have been forgotten since the first look.
        let mut kept = Vec::new();
        for planned in plan {
            report.plan(planned, &mut homes, &mut kept);
        }
        report.forgotten_units = homes.iter().map(|home| home.forgotten).sum();
        refuse_what_cannot_be_sold_again(&mut kept, &homes);
        if apply {
            self.carry_out(&mut kept).await?;
        }
        kept.into_iter().for_each(|planned| report.add(planned.difference));
        for (id, units) in unknown {
            report.add(Difference::new(id.to_string(), DifferenceKind::Unknown, units, None));
        }
        Ok(report)
    }

    /// The home in which an order is, or would be.
    fn home_of(&self, order: &ShopOrder) -> usize {
        self.shared
            .sharded
            .as_ref()
            .map_or(0, |sharded| sharded.home_of_purchase(&order.operation, order.buyer.as_deref()))
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
            (_, Answer::Absent) => Ok(None),
            (_, other) => Err(unexpected(&other)),
        }
    }

    /// Corrects all that can be corrected: first what brings units, and last what needs them.
    async fn carry_out(&self, plan: &mut [Planned]) -> Result<()> {
        let mut in_turn: BTreeMap<u8, Vec<&mut Planned>> = BTreeMap::new();
        for planned in plan {
            let turn = match planned.difference.correction {
                Some(Correction::GiveBack | Correction::Cancel) => 0,
                Some(Correction::Confirm) => 1,
                Some(Correction::SellAgain) => 2,
                None => continue,
            };
            in_turn.entry(turn).or_default().push(planned);
        }
        for mut planned in in_turn.into_values() {
            for chunk in planned.chunks_mut(AT_ONCE) {
                let corrected = join_all(chunk.iter().map(|planned| self.correct(planned))).await;
                for (planned, corrected) in chunk.iter_mut().zip(corrected) {
                    match corrected {
                        Ok(()) => planned.difference.corrected = true,
                        Err(error) if error.is_retryable() => return Err(error),
                        Err(error) => planned.difference.why_not = Some(error.to_string()),
                    }
                }
            }
        }
        Ok(())
    }

    /// Corrects one order, unless it has changed since it was compared.
    async fn correct(&self, Planned { order, difference, .. }: &Planned) -> Result<()> {
        let id: Id = checked_id("operation id", &order.operation)?;
        let hint = self.hint(order)?;
        let found = self.look_up(order).await?;
        if compare(order, found.as_ref()).as_ref() != Some(difference) {
            return Err(Error::Conflict("it changed meanwhile; reconcile again".into()));
        }
        let request = match difference.correction {
            None => return Ok(()),
            Some(Correction::SellAgain) => {
                let (quantity, buyer) = (order.quantity, hint.buyer.clone());
                Request::Import { quantity, operation: id.clone(), buyer, or_debt: false }
            }
            Some(Correction::Confirm) => Request::Confirm { operation: id.clone() },
            Some(Correction::Cancel) => Request::Cancel { operation: id.clone() },
            Some(Correction::GiveBack) => {
                // The same correction again is the same refund.
                let left = found.as_ref().map_or(0, Record::sold);
                let operation: Id = format!("{id}{RECONCILED}{left}").into();
                let (of, quantity) = (id.clone(), difference.units);
                Request::Refund { of, quantity, operation, damaged: false, receipt: None }
            }
        };
        let own = match &request {
            Request::Refund { operation, .. } => operation.clone(),
            _ => id,
        };
        match self.send_to(request, &hint, Some(&own), self.deadline(None)?).await? {
            (_, Answer::Found(record)) if record.status != Status::Tombstone => Ok(()),
            (_, Answer::Found(_)) => Err(Error::Conflict("its id is refused for good".into())),
            (_, Answer::SoldOut { available }) => Err(Error::Conflict(too_few(available))),
            (_, other) => Err(unexpected(&other)),
        }
    }

    /// Reads every record of a home: what it has forgotten, and what it sold that the shop does
    /// not know. If it `matters`, it is read again while it changes.
    async fn read_home(
        &self,
        site: &Site,
        known: &Known,
        matters: bool,
        report: &mut Reconciliation,
    ) -> Result<(Remembered, Vec<(Id, u64)>)> {
        let view = || async {
            let view = site.call(|store, id| async move { store.view(&id).await });
            view.await.map_err(read_failed)
        };
        for tried in 1.. {
            let before = view().await?;
            let (mut seen, mut unknown) = (HashSet::new(), Vec::new());
            let (mut recorded, mut leased) = (0, 0);
            let read = audit::each_page(site, |page| {
                for (id, record) in page.records {
                    let Some(record) = record.filter(|_| seen.insert(hash(&id))) else { continue };
                    let units = record.sold();
                    recorded += units;
                    if units == 0 || known.contains(&id, &record) {
                    } else if is_lot(&id) {
                        leased += units;
                    } else {
                        unknown.push((id, units));
                    }
                }
            });
            read.await.map_err(read_failed)?;
            let after = view().await?;
            let is_exact = before.changes == after.changes;
            if is_exact || !matters || tried == TRIES {
                report.leased_units += leased;
                // Too many rather than too few: what may be forgotten is not sold again.
                let counted = before.sold_by_id.max(after.sold_by_id);
                let forgotten = counted.saturating_sub(recorded);
                return Ok((Remembered { forgotten, is_exact, ..Remembered::of(&after) }, unknown));
            }
        }
        Err(Error::Unknown(None))
    }

    async fn all_views(&self) -> Result<Vec<View>> {
        if let Some(sharded) = &self.shared.sharded {
            return sharded.all_views().await.map_err(read_failed);
        }
        let inventory = self.shared.inventory.clone();
        let view = self.call(move |store| async move { store.view(&inventory).await }).await;
        Ok(vec![view.map_err(read_failed)?])
    }
}

impl Planned {
    fn is_missing(&self) -> bool {
        self.difference.kind == DifferenceKind::Missing
    }
}

impl Reconciliation {
    /// Adds a difference to the plan, unless the order may be forgotten because of its age.
    fn plan(&mut self, planned: Planned, homes: &mut [Remembered], plan: &mut Vec<Planned>) {
        let home = &mut homes[planned.home];
        let may_be_forgotten = planned.is_absent && home.may_have_forgotten(&planned.order);
        if planned.is_missing() && may_be_forgotten {
            self.too_old += 1;
            self.too_old_units += planned.order.quantity;
            home.too_old += planned.order.quantity;
        } else {
            plan.push(planned);
        }
    }
}

/// Takes out of the plan what may be sold already, and what there are no units for.
fn refuse_what_cannot_be_sold_again(plan: &mut [Planned], homes: &[Remembered]) {
    let given_back = plan.iter().map(|planned| match planned.difference.correction {
        Some(Correction::GiveBack | Correction::Cancel) => planned.difference.units,
        _ => 0,
    });
    let mut available =
        homes.iter().map(|home| home.available).sum::<u64>() + given_back.sum::<u64>();
    for planned in plan.iter_mut().filter(|planned| planned.is_missing()) {
        let why_not = homes[planned.home].why_not_sold_again();
        match (why_not, available.checked_sub(planned.order.quantity)) {
            (None, Some(left)) => available = left,
            (why_not, _) => {
                planned.difference.correction = None;
                planned.difference.why_not = Some(why_not.unwrap_or_else(|| too_few(available)));
            }
        }
    }
}

fn too_few(available: u64) -> String {
    format!("only {available} units are available: more were sold than there are")
}

/// Whether an id is that of a lot of leased units.
fn is_lot(id: &str) -> bool {
    let number = id.strip_prefix("lease:");
    number.is_some_and(|it| it.len() == 32 && it.bytes().all(|byte| byte.is_ascii_hexdigit()))
}

impl Difference {
    fn new(
        operation: String,
        kind: DifferenceKind,
        units: u64,
        correction: Option<Correction>,
    ) -> Self {
        Difference { operation, kind, units, correction, corrected: false, why_not: None }
    }
}

/// What does not agree, by how many units, and what corrects it.
fn compare(order: &ShopOrder, found: Option<&Record>) -> Option<Difference> {
    use DifferenceKind::{Missing, NotConfirmed, NotReserved, TooFew, TooMany};
    let wanted = order.quantity;
    let is_held = found.is_some_and(|record| record.status == Status::Reserved);
    let held = if is_held { found.map_or(0, |record| record.quantity) } else { 0 };
    let is_sale = |record: &&Record| matches!(record.status, Status::Taken | Status::Confirmed);
    let sold = found.filter(is_sale).map(Record::sold);
    let (kind, units, correction) = match (order.state, sold) {
        (OrderState::Sold, None) if is_held && held == wanted => {
            (NotConfirmed, wanted, Some(Correction::Confirm))
        }
        (OrderState::Sold, None) if is_held => (TooFew, wanted.abs_diff(held), None),
        (OrderState::Sold, None) if wanted > 0 => (Missing, wanted, Some(Correction::SellAgain)),
        (OrderState::Sold, Some(sold)) if sold > wanted => {
            (TooMany, sold - wanted, Some(Correction::GiveBack))
        }
        (OrderState::Sold, Some(sold)) if sold < wanted => (TooFew, wanted - sold, None),
        (OrderState::Reserved, Some(sold)) if sold > 0 => (TooMany, sold, None),
        (OrderState::Reserved, _) if !is_held => (NotReserved, wanted, None),
        (OrderState::Cancelled, _) if is_held => (TooMany, held, Some(Correction::Cancel)),
        (OrderState::Cancelled, Some(sold)) if sold > 0 => {
            (TooMany, sold, Some(Correction::GiveBack))
        }
        _ => return None,
    };
    Some(Difference::new(order.operation.clone(), kind, units, correction))
}
