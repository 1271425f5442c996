//! A batch is one transaction: lock the row of the inventory, load what the batch can
//! touch, let the same machine decide that decides for `memory://`, write what it has
//! changed.
//!
//! The number of statements does not grow with the batch: at most five that read, eight that
//! write (one on PostgreSQL), and three that delete what is over. What a batch cannot touch is
//! not read: a sale without reservations never asks for them.
//!
//! Invariants:
//! - *One at a time*: everything of an inventory is read and written under the lock of its
//!   row. So the entries of the journal are numbered in the order of the commits.
//! - *The first reservations*: if a batch can close or extend reservations, then more of
//!   those that expire first are loaded than it can close. So the machine always knows when
//!   the next one expires, and whether more have expired than were given back.

use std::collections::BTreeSet;

use dlock::extension::sql::{Dialect, Kind, Session, Statement, Value};
use hashbrown::{HashMap, HashSet};

use super::head::{self, HeadRow, Lock};
use super::write;
use crate::store::home::Home;
use crate::store::home::ledger::Return;
use crate::store::{
    Answer, Change, Id, MAX_RECLAIMED, Record, Request, Status, View, record_codec,
};

/// Whose transaction it is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Owned {
    /// One of our own, with READ COMMITTED. It also deletes what the retention is over for.
    ByUs,
    /// One of the caller, with any isolation.
    ByCaller,
}

/// What was loaded of an inventory.
pub(super) struct Loaded {
    pub(super) row: HeadRow,
    pub(super) home: Home,
    /// Everything that may change, as it was.
    pub(super) ids: BTreeSet<Id>,
    pub(super) records: HashMap<Id, (u64, Record)>,
    pub(super) holds: HashMap<Id, Record>,
    pub(super) buyers: HashMap<Id, u64>,
    pub(super) returns: HashMap<(Id, u64), usize>,
    /// Operations whose record cannot be read.
    unreadable: HashSet<Id>,
}

/// Applies a batch inside a transaction; `None` if the inventory is not there.
pub(super) async fn apply(
    session: &mut Session<'_>,
    id: &str,
    birth: u64,
    start: usize,
    batch: &[Request],
    owned: Owned,
) -> sqlx::Result<Option<(View, Vec<Answer>)>> {
    let Some(row) = lock(session, id, birth, owned).await? else { return Ok(None) };
    apply_to(session, id, row, start, batch, owned).await.map(Some)
}

/// Applies a batch to an inventory whose row is locked.
pub(super) async fn apply_to(
    session: &mut Session<'_>,
    id: &str,
    row: HeadRow,
    start: usize,
    batch: &[Request],
    owned: Owned,
) -> sqlx::Result<(View, Vec<Answer>)> {
    let now = row.now;
    let mut loaded = Loaded::load(session, row, batch, owned).await?;
    loaded.home.reclaim(now);
    let answers = batch.iter().map(|request| loaded.answer(start, request)).collect();
    let view = loaded.home.view(now);
    write::changes(session, id, loaded, owned).await?;
    Ok((view, answers))
}

/// Changes the inventory as a whole; `None` if it is not there.
pub(super) async fn change(
    session: &mut Session<'_>,
    id: &str,
    birth: u64,
    change: Change,
) -> sqlx::Result<Option<View>> {
    let Some(row) = lock(session, id, birth, Owned::ByUs).await? else { return Ok(None) };
    let mut loaded = Loaded::nothing(row);
    let now = loaded.row.now;
    loaded.home.change(now, change);
    let view = loaded.home.view(now);
    write::changes(session, id, loaded, Owned::ByUs).await?;
    Ok(Some(view))
}

/// Locks the row of an inventory, if it is the one with this birth.
async fn lock(
    session: &mut Session<'_>,
    id: &str,
    birth: u64,
    owned: Owned,
) -> sqlx::Result<Option<HeadRow>> {
    if owned == Owned::ByCaller {
        touch(session, id).await?;
    }
    let row = head::read(session, id, Lock::Wait).await?;
    Ok(row.filter(|row| row.is_of(birth)))
}

/// A write, so that a transaction of SQLite has the file for itself before it reads.
pub(super) async fn touch(session: &mut Session<'_>, id: &str) -> sqlx::Result<()> {
    #[cfg(feature = "sqlite")]
    if session.dialect() == Dialect::Sqlite {
        let touch = "UPDATE dlock_stock SET id = id WHERE id = ?";
        session.execute(Statement::new(touch).bind(id)).await?;
    }
    let _ = (session, id);
    Ok(())
}

impl Loaded {
    fn nothing(row: HeadRow) -> Self {
        Loaded {
            home: Home::partial(&row.head),
            row,
            ids: BTreeSet::new(),
            records: HashMap::new(),
            holds: HashMap::new(),
            buyers: HashMap::new(),
            returns: HashMap::new(),
            unreadable: HashSet::new(),
        }
    }

    async fn load(
        session: &mut Session<'_>,
        row: HeadRow,
        batch: &[Request],
        owned: Owned,
    ) -> sqlx::Result<Self> {
        let mut loaded = Loaded::nothing(row);
        let needs = Needs::of(batch);
        // A snapshot of the caller may be older than the lock of the row. Rows that are
        // read for an update are always the newest.
        let newest = match session.dialect() {
            #[cfg(feature = "mysql")]
            Dialect::MySql if owned == Owned::ByCaller => head::for_update(Dialect::MySql),
            _ => "",
        };
        let _ = owned;
        loaded.load_records(session, &needs, newest).await?;
        loaded.load_holds(session, &needs, newest).await?;
        loaded.load_returns(session, &needs, newest).await?;
        loaded.load_buyers(session, needs, newest).await?;
        Ok(loaded)
    }

    async fn load_records(
        &mut self,
        session: &mut Session<'_>,
        needs: &Needs,
        newest: &str,
    ) -> sqlx::Result<()> {
        self.ids = needs.ids.clone();
        if needs.ids.is_empty() || self.row.head.generations[0] == 0 {
            return Ok(());
        }
        let sql = format!(
            "SELECT operation, generation, record FROM dlock_stock_record \
             WHERE home = ? AND operation @IN{newest}"
        );
        let statement = Statement::new(sql).bind(self.row.home).bind_list(texts(&needs.ids));
        let kinds = [Kind::Text, Kind::Int, Kind::Text];
        for row in session.fetch(statement, &kinds).await? {
            let [operation, generation, record] = cells(row)?;
            let (id, generation) = (id(operation)?, generation.count());
            if !self.row.head.generations.contains(&generation) {
                continue; // its retention is over
            }
            match record.text().as_deref().and_then(record_codec::read) {
                Some(record) => {
                    self.home.ledger.load_record(id.clone(), generation, record.clone());
                    self.records.insert(id, (generation, record));
                }
                None => {
                    self.unreadable.insert(id);
                }
            }
        }
        Ok(())
    }

    async fn load_holds(
        &mut self,
        session: &mut Session<'_>,
        needs: &Needs,
        newest: &str,
    ) -> sqlx::Result<()> {
        let head = &self.row.head;
        if head.holds == 0 {
            return Ok(());
        }
        let home = self.row.home;
        let columns = "SELECT operation, record FROM dlock_stock_hold WHERE home = ?";
        let mut statements = Vec::new();
        if !needs.ids.is_empty() {
            let sql = format!("{columns} AND operation @IN{newest}");
            statements.push(Statement::new(sql).bind(home).bind_list(texts(&needs.ids)));
        }
        // Each of the others can find that a reservation has expired, but none has.
        let expired = head.next_expiry != 0 && head.next_expiry <= self.row.now;
        let closed = match expired {
            true => MAX_RECLAIMED + needs.ids.len(),
            false => needs.closes,
        };
        if closed > 0 {
            let sql = format!("{columns} ORDER BY expires, operation LIMIT ?{newest}");
            statements.push(Statement::new(sql).bind(home).bind(closed as u64 + 1));
            self.home.ledger.has_first_holds();
        }
        for statement in statements {
            for row in session.fetch(statement, &[Kind::Text, Kind::Text]).await? {
                let [operation, record] = cells(row)?;
                let id = id(operation)?;
                let Some(record) = record.text().as_deref().and_then(record_codec::read) else {
                    self.unreadable.insert(id);
                    continue;
                };
                self.home.ledger.load_hold(id.clone(), record.clone());
                self.ids.insert(id.clone());
                self.holds.insert(id, record);
            }
        }
        Ok(())
    }

    async fn load_returns(
        &mut self,
        session: &mut Session<'_>,
        needs: &Needs,
        newest: &str,
    ) -> sqlx::Result<()> {
        if needs.purchases.is_empty() {
            return Ok(());
        }
        let sql = format!(
            "SELECT purchase, bought, operation, quantity, at, damaged FROM dlock_stock_return \
             WHERE home = ? AND purchase @IN ORDER BY purchase, bought, place{newest}"
        );
        let statement = Statement::new(sql).bind(self.row.home).bind_list(texts(&needs.purchases));
        let kinds = [Kind::Text, Kind::Int, Kind::Text, Kind::Int, Kind::Int, Kind::Int];
        for row in session.fetch(statement, &kinds).await? {
            let [purchase, bought, operation, quantity, at, damaged] = cells(row)?;
            let (of, bought) = (id(purchase)?, bought.count());
            let status = if damaged.int() == 0 { Status::Refund } else { Status::DamagedRefund };
            let returned =
                Return { id: id(operation)?, quantity: quantity.count(), at: at.count(), status };
            self.home.ledger.load_return(of.clone(), bought, returned);
            *self.returns.entry((of, bought)).or_default() += 1;
        }
        Ok(())
    }

    /// The buyers that the batch names, and those of the records that it finds.
    async fn load_buyers(
        &mut self,
        session: &mut Session<'_>,
        needs: Needs,
        newest: &str,
    ) -> sqlx::Result<()> {
        let mut buyers = needs.buyers;
        let found = self.records.values().map(|(_, record)| record).chain(self.holds.values());
        for record in found {
            let is_sale =
                matches!(record.status, Status::Taken | Status::Confirmed | Status::Reserved);
            buyers.extend(record.whose.iter().filter(|_| is_sale).cloned());
        }
        if buyers.is_empty() {
            return Ok(());
        }
        let sql = format!(
            "SELECT buyer, units FROM dlock_stock_buyer WHERE home = ? AND buyer @IN{newest}"
        );
        let statement = Statement::new(sql).bind(self.row.home).bind_list(texts(&buyers));
        for row in session.fetch(statement, &[Kind::Text, Kind::Int]).await? {
            let [buyer, units] = cells(row)?;
            self.home.buyers.insert(id(buyer)?, units.count());
        }
        self.buyers = self.home.buyers.clone();
        Ok(())
    }

    fn answer(&mut self, start: usize, request: &Request) -> Answer {
        let mut needs = Needs::default();
        if !self.unreadable.is_empty() {
            needs.add(request);
        }
        if needs.ids.iter().any(|id| self.unreadable.contains(id)) {
            return Answer::Unreadable;
        }
        self.home.apply(self.row.now, start, request)
    }
}

/// What a batch can touch.
#[derive(Clone, Debug, Default)]
struct Needs {
    ids: BTreeSet<Id>,
    buyers: BTreeSet<Id>,
    /// The purchases that are refunded.
    purchases: BTreeSet<Id>,
    /// How many reservations it can close or extend, apart from those that have expired.
    closes: usize,
}

impl Needs {
    fn of(batch: &[Request]) -> Self {
        let mut needs = Needs::default();
        batch.iter().for_each(|request| needs.add(request));
        needs
    }

    fn add(&mut self, request: &Request) {
        match request {
            Request::Placed { request, .. } => self.add(request),
            Request::Deduct { operation, buyer, .. } => {
                self.ids.extend(operation.clone());
                self.buyers.extend(buyer.clone());
            }
            Request::Reserve { operation, buyer, .. }
            | Request::Import { operation, buyer, .. } => {
                self.ids.insert(operation.clone());
                self.buyers.extend(buyer.clone());
            }
            Request::Confirm { operation }
            | Request::ConfirmPart { operation, .. }
            | Request::Cancel { operation }
            | Request::Extend { operation, .. } => {
                self.ids.insert(operation.clone());
                self.closes += 1;
            }
            Request::Refund { of, operation, receipt, .. } => {
                self.ids.extend([of.clone(), operation.clone()]);
                self.purchases.insert(of.clone());
                self.buyers.extend(receipt.iter().filter_map(|receipt| receipt.whose.clone()));
            }
            Request::Restock { operation, .. } => self.ids.extend(operation.clone()),
            Request::WriteOff { operation, .. }
            | Request::Resolve { operation }
            | Request::Look { operation } => {
                self.ids.insert(operation.clone());
            }
            Request::Send { .. } | Request::Receive { .. } => {} // of the head
        }
    }
}

fn texts(ids: &BTreeSet<Id>) -> impl Iterator<Item = String> {
    ids.iter().map(|id| id.to_string())
}

/// The columns of a row.
pub(super) fn cells<const N: usize>(row: Vec<Value>) -> sqlx::Result<[Value; N]> {
    row.try_into().map_err(|_| head::unreadable())
}

pub(super) fn id(value: Value) -> sqlx::Result<Id> {
    value.text().map(Id::from).ok_or_else(head::unreadable)
}
