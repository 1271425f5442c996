//! Records, buyers and journal, read some rows at a time.

use dlock::extension::sql::{Job, Kind, Session, Statement};

use super::batch::{cells, id};
use super::head;
use crate::store::{Cursor, Effect, JournalEntry, Page, record_codec};

/// How many rows a page has.
const ROWS: u64 = 1_000;

/// Reads some of the records: the open reservations, then the records of operations, then
/// the buyers, each in the order of their ids.
pub(super) struct Records {
    pub(super) home: u64,
    /// The generations whose records are found.
    pub(super) generations: [u64; 2],
    pub(super) from: Cursor,
}

impl Job for Records {
    type Output = Page;
    const WRITES: bool = false;

    async fn run(&self, session: &mut Session<'_>) -> sqlx::Result<Page> {
        let (stage, after) = self.from.0.split_once(' ').unwrap_or(("0", ""));
        let columns = ["operation", "operation", "buyer"];
        let stage: usize = stage.parse().unwrap_or(columns.len());
        let Some(key) = columns.get(stage) else { return Ok(Page::default()) };
        let sql = match stage {
            0 => "SELECT operation, record, expires FROM dlock_stock_hold",
            1 => "SELECT operation, record, generation FROM dlock_stock_record",
            _ => "SELECT buyer, NULL, units FROM dlock_stock_buyer",
        };
        let sql = format!("{sql} WHERE home = ? AND {key} > ? ORDER BY {key} LIMIT ?");
        let statement = Statement::new(sql).bind(self.home).bind(after).bind(ROWS);
        let rows = session.fetch(statement, &[Kind::Text, Kind::Text, Kind::Int]).await?;
        let (mut page, is_whole) = (Page::default(), (rows.len() as u64) < ROWS);
        let mut last = None;
        for row in rows {
            let [key, record, number] = cells(row)?;
            let (key, number) = (id(key)?, number.count());
            last = Some(key.clone());
            match stage {
                0 => {
                    page.records.push((key, record.text().as_deref().and_then(record_codec::read)))
                }
                1 if !self.generations.contains(&number) => {}
                1 => {
                    page.records.push((key, record.text().as_deref().and_then(record_codec::read)))
                }
                _ => page.buyers.push((key, number)),
            }
        }
        page.next = match (is_whole, last) {
            (false, Some(last)) => Some(Cursor(format!("{stage} {last}"))),
            _ if stage + 1 < columns.len() => Some(Cursor(format!("{} ", stage + 1))),
            _ => None,
        };
        Ok(page)
    }
}

/// Reads entries of the journal after a number.
pub(super) struct Journal {
    pub(super) home: u64,
    pub(super) after: u64,
    pub(super) limit: usize,
}

impl Job for Journal {
    type Output = Vec<JournalEntry>;
    const WRITES: bool = false;

    async fn run(&self, session: &mut Session<'_>) -> sqlx::Result<Vec<JournalEntry>> {
        entries(session, self.home, self.after, self.limit).await
    }
}

/// The entries of the journal after a number, in order.
pub(super) async fn entries(
    session: &mut Session<'_>,
    home: u64,
    after: u64,
    limit: usize,
) -> sqlx::Result<Vec<JournalEntry>> {
    use Kind::{Int, Text};
    let sql = "SELECT sequence, effect, operation, whose, quantity, parts, epoch, at \
         FROM dlock_stock_journal WHERE home = ? AND sequence > ? ORDER BY sequence LIMIT ?";
    let statement = Statement::new(sql).bind(home).bind(after).bind(limit as u64);
    let kinds = [Int, Text, Text, Text, Int, Text, Int, Int];
    let mut entries = Vec::new();
    for row in session.fetch(statement, &kinds).await? {
        let [sequence, effect, operation, whose, quantity, parts, epoch, at] = cells(row)?;
        let effect = effect.text().and_then(|name| {
            Effect::ALL.iter().map(|(effect, _)| *effect).find(|effect| effect.name() == name)
        });
        let parts = parts.text().as_deref().and_then(record_codec::read_parts);
        let (Some(effect), Some(parts)) = (effect, parts) else { return Err(head::unreadable()) };
        entries.push(JournalEntry {
            home: 0,
            sequence: sequence.count(),
            effect,
            operation: operation.text(),
            whose: whose.text(),
            quantity: quantity.count(),
            parts: parts.to_vec(),
            epoch: u32::try_from(epoch.int()).unwrap_or(0),
            at: at.count(),
        });
    }
    Ok(entries)
}
