//! What a batch has changed is written: one statement for each kind of row, and on PostgreSQL
//! all of them in one.

use dlock::extension::sql::{Dialect, Kind, Session, Statement, Value};

use super::batch::{Loaded, Owned};
use super::head::HeadRow;
use crate::store::{Id, record_codec};

/// How many rows of a generation whose retention is over a batch deletes.
const SWEPT: u64 = 256;
/// How many entries of the journal a batch deletes at most.
const TRIMMED: u64 = 4_096;

const HOME: (&str, Kind) = ("home", Kind::Int);

/// A table, the columns of its key, its columns and the rows that are written.
type Upsert<'a> = (&'a str, &'a [&'a str], &'a [(&'a str, Kind)], Vec<Vec<Value>>);

/// Rows that are written, and keys of rows that are deleted.
#[derive(Default)]
struct Changes {
    records: Vec<Vec<Value>>,
    holds: Vec<Vec<Value>>,
    closed: Vec<String>,
    buyers: Vec<Vec<Value>>,
    gone: Vec<String>,
    returns: Vec<Vec<Value>>,
    entries: Vec<Vec<Value>>,
}

/// Writes what differs from what was loaded.
pub(super) async fn changes(
    session: &mut Session<'_>,
    id: &str,
    mut loaded: Loaded,
    owned: Owned,
) -> sqlx::Result<()> {
    let mut statements = Changes::of(&loaded).statements(session.dialect(), loaded.row.home);
    // What this batch makes is not deleted by it.
    let is_tidied = owned == Owned::ByUs && tidy(session, &mut loaded.row).await?;
    let after = loaded.home.head();
    let is_changed = after != loaded.row.head;
    loaded.row.head = after;
    if is_changed || is_tidied {
        statements.push(loaded.row.update(id));
    }
    session.execute_all(statements).await
}

impl Changes {
    fn of(loaded: &Loaded) -> Self {
        let mut changes = Changes::default();
        let home = Value::from(loaded.row.home);
        let row = |cells: Vec<Value>| [vec![home.clone()], cells].concat();
        let ledger = &loaded.home.ledger;
        for id in &loaded.ids {
            let before = loaded.records.get(id).map(|(generation, record)| (*generation, record));
            if let Some((generation, record)) = ledger.kept(id)
                && before != Some((generation, record))
            {
                let record = record_codec::write(record);
                changes.records.push(row(vec![text(id), generation.into(), record.into()]));
            }
            match (loaded.holds.get(id), ledger.hold(id)) {
                (Some(_), None) => changes.closed.push(id.to_string()),
                (before, Some(hold)) if before != Some(hold) => {
                    let record = record_codec::write(hold);
                    changes.holds.push(row(vec![text(id), hold.expires.into(), record.into()]));
                }
                _ => {}
            }
        }
        for buyer in loaded.buyers.keys().filter(|it| !loaded.home.buyers.contains_key(*it)) {
            changes.gone.push(buyer.to_string());
        }
        for (buyer, units) in &loaded.home.buyers {
            if loaded.buyers.get(buyer) != Some(units) {
                changes.buyers.push(row(vec![text(buyer), (*units).into()]));
            }
        }
        for (of, bought, returns) in ledger.all_returns() {
            let known = loaded.returns.get(&(of.clone(), bought)).copied().unwrap_or(0);
            for (place, it) in returns.iter().enumerate().skip(known) {
                let damaged = u64::from(it.status == crate::store::Status::DamagedRefund);
                changes.returns.push(row(vec![
                    text(of),
                    bought.into(),
                    (place as u64).into(),
                    text(&it.id),
                    it.quantity.into(),
                    it.at.into(),
                    damaged.into(),
                ]));
            }
        }
        for entry in loaded.home.new_entries() {
            changes.entries.push(row(vec![
                entry.sequence.into(),
                entry.effect.name().into(),
                Value::Text(entry.operation.clone()),
                Value::Text(entry.whose.clone()),
                entry.quantity.into(),
                record_codec::write_parts(&entry.parts).into(),
                u64::from(entry.epoch).into(),
                entry.at.into(),
            ]));
        }
        changes
    }

    fn statements(self, dialect: Dialect, home: u64) -> Vec<Statement> {
        use Kind::{Int, Text};
        let mut statements = Vec::new();
        let upserts: [Upsert<'_>; 5] = [
            (
                "dlock_stock_record",
                &["home", "operation"],
                &[HOME, ("operation", Text), ("generation", Int), ("record", Text)],
                self.records,
            ),
            (
                "dlock_stock_hold",
                &["home", "operation"],
                &[HOME, ("operation", Text), ("expires", Int), ("record", Text)],
                self.holds,
            ),
            (
                "dlock_stock_buyer",
                &["home", "buyer"],
                &[HOME, ("buyer", Text), ("units", Int)],
                self.buyers,
            ),
            (
                "dlock_stock_return",
                &["home", "purchase", "bought", "place"],
                &[
                    HOME,
                    ("purchase", Text),
                    ("bought", Int),
                    ("place", Int),
                    ("operation", Text),
                    ("quantity", Int),
                    ("at", Int),
                    ("damaged", Int),
                ],
                self.returns,
            ),
            (
                "dlock_stock_journal",
                &["home", "sequence"],
                &[
                    HOME,
                    ("sequence", Int),
                    ("effect", Text),
                    ("operation", Text),
                    ("whose", Text),
                    ("quantity", Int),
                    ("parts", Text),
                    ("epoch", Int),
                    ("at", Int),
                ],
                self.entries,
            ),
        ];
        for (table, key, columns, rows) in upserts {
            if !rows.is_empty() {
                statements.push(Statement::upsert(dialect, table, key, columns, rows));
            }
        }
        for (table, key, gone) in [
            ("dlock_stock_hold", "operation", self.closed),
            ("dlock_stock_buyer", "buyer", self.gone),
        ] {
            if !gone.is_empty() {
                let sql = format!("DELETE FROM {table} WHERE home = ? AND {key} @IN");
                statements.push(Statement::new(sql).bind(home).bind_list(gone));
            }
        }
        statements
    }
}

fn text(id: &Id) -> Value {
    Value::from(&**id)
}

/// Deletes some rows whose time is over. Answers whether the head must remember it.
async fn tidy(session: &mut Session<'_>, row: &mut HeadRow) -> sqlx::Result<bool> {
    let (swept, trimmed) = (row.swept, row.trimmed);
    let oldest = row.head.generations[1];
    if oldest > row.swept {
        let which = "home = ? AND generation < ?";
        let delete = delete_some(session.dialect(), "dlock_stock_record", "operation", which);
        let statement = Statement::new(delete).bind(row.home).bind(oldest).bind(SWEPT);
        if session.execute(statement).await? < SWEPT {
            row.swept = oldest;
        }
    }
    let kept = row.head.terms.journal;
    let slack = (kept / 8).clamp(64, TRIMMED / 2);
    if kept > 0 && row.head.journaled > row.trimmed + kept + slack {
        let readers = "SELECT COALESCE(MIN(done), ?) FROM dlock_stock_reader WHERE home = ?";
        let statement = Statement::new(readers).bind(row.head.journaled).bind(row.home);
        let done = session.fetch(statement, &[Kind::Int]).await?;
        let done = done.first().and_then(|row| row.first()).map_or(0, Value::count);
        let until = (row.head.journaled - kept).min(row.trimmed + TRIMMED).min(done);
        if until > row.trimmed {
            let delete = "DELETE FROM dlock_stock_journal WHERE home = ? AND sequence <= ?";
            session.execute(Statement::new(delete).bind(row.home).bind(until)).await?;
            row.trimmed = until;
        }
    }
    Ok((row.swept, row.trimmed) != (swept, trimmed))
}

/// A statement that deletes some of the rows; the last value is how many.
pub(super) fn delete_some(dialect: Dialect, table: &str, key: &str, which: &str) -> String {
    match dialect {
        #[cfg(feature = "mysql")]
        Dialect::MySql => format!("DELETE FROM {table} WHERE {which} LIMIT ?"),
        #[allow(unreachable_patterns, reason = "there may be only one database")]
        _ => format!(
            "DELETE FROM {table} WHERE (home, {key}) IN \
             (SELECT home, {key} FROM {table} WHERE {which} LIMIT ?)"
        ),
    }
}
