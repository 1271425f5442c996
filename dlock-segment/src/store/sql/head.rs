//! The row of an inventory in `dlock_stock`: totals for people, and everything else of its
//! head as numbers in one text.

use dlock::extension::sql::{Dialect, Kind, Session, Statement, Value};

use crate::store::home::moves::Moves;
use crate::store::home::partial::Head;
use crate::store::{Counts, Generations, Terms};

/// The layout of the text.
const LAYOUT: u64 = 1;
const COLUMNS: &str = "id, home, birth, terms, state";
const KINDS: [Kind; 6] = [Kind::Text, Kind::Int, Kind::Int, Kind::Text, Kind::Text, Kind::Int];

/// A row of `dlock_stock`, and the time at which it was read.
#[derive(Clone, Debug)]
pub(super) struct HeadRow {
    /// The number of the inventory in the other tables.
    pub(super) home: u64,
    pub(super) head: Head,
    /// Records of generations before this one were deleted.
    pub(super) swept: u64,
    /// Entries of the journal up to this one were deleted.
    pub(super) trimmed: u64,
    /// Milliseconds since 1970.
    pub(super) now: u64,
}

/// Whether a row is locked when it is read.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Lock {
    No,
    Wait,
}

/// The time in microseconds since 1970, in the words of each database.
pub(super) fn now(dialect: Dialect) -> &'static str {
    match dialect {
        #[cfg(feature = "mysql")]
        Dialect::MySql => {
            "TIMESTAMPDIFF(MICROSECOND, TIMESTAMP'1970-01-01 00:00:00', UTC_TIMESTAMP(6))"
        }
        #[cfg(feature = "postgres")]
        Dialect::Postgres => "(extract(epoch FROM clock_timestamp()) * 1000000)::bigint",
        #[cfg(feature = "sqlite")]
        Dialect::Sqlite => "CAST(unixepoch('now', 'subsec') * 1000000 AS INTEGER)",
    }
}

/// The end of a statement that locks the rows it reads. SQLite locks the whole file.
pub(super) fn for_update(dialect: Dialect) -> &'static str {
    match dialect {
        #[cfg(feature = "mysql")]
        Dialect::MySql => " FOR UPDATE",
        #[cfg(feature = "postgres")]
        Dialect::Postgres => " FOR UPDATE",
        #[cfg(feature = "sqlite")]
        Dialect::Sqlite => "",
    }
}

/// Reads the row of an inventory.
pub(super) async fn read(
    session: &mut Session<'_>,
    id: &str,
    lock: Lock,
) -> sqlx::Result<Option<HeadRow>> {
    let dialect = session.dialect();
    let lock = if lock == Lock::Wait { for_update(dialect) } else { "" };
    let sql = select(dialect, &format!("id = ?{lock}"));
    let rows = session.fetch(Statement::new(sql).bind(id), &KINDS).await?;
    let row = rows.into_iter().next().map(|row| HeadRow::of(row).ok_or_else(unreadable));
    Ok(row.transpose()?.map(|(_, row)| row))
}

/// Locks the row of one of these inventories that nobody else has locked and that has so many
/// units available, and answers its id with it.
pub(super) async fn lock_free(
    session: &mut Session<'_>,
    ids: Vec<String>,
    quantity: u64,
) -> sqlx::Result<Option<(String, HeadRow)>> {
    let dialect = session.dialect();
    let end = match dialect {
        // The rows are sorted before the first one is locked.
        #[cfg(feature = "postgres")]
        Dialect::Postgres => "ORDER BY random() LIMIT 1 FOR UPDATE SKIP LOCKED",
        // All rows would be locked before they are sorted.
        #[cfg(feature = "mysql")]
        Dialect::MySql => "LIMIT 1 FOR UPDATE SKIP LOCKED",
        #[cfg(feature = "sqlite")]
        Dialect::Sqlite => "ORDER BY random() LIMIT 1",
    };
    let sql = select(dialect, &format!("id @IN AND available >= ? {end}"));
    let rows = session.fetch(Statement::new(sql).bind_list(ids).bind(quantity), &KINDS).await?;
    rows.into_iter().next().map(|row| HeadRow::of(row).ok_or_else(unreadable)).transpose()
}

fn select(dialect: Dialect, which: &str) -> String {
    format!("SELECT {COLUMNS}, {} FROM dlock_stock WHERE {which}", now(dialect))
}

/// The error for something that this version cannot read.
pub(super) fn unreadable() -> sqlx::Error {
    sqlx::Error::Decode("a row of dlock_stock has another layout; do all processes use compatible versions of dlock?".into())
}

impl HeadRow {
    /// The id of an inventory, and its row.
    fn of(row: Vec<Value>) -> Option<(String, Self)> {
        let [id, home, birth, terms, state, now] = <[Value; 6]>::try_from(row).ok()?;
        let terms = Terms::from_comparable(&terms.text()?)?;
        let state = state.text()?;
        let mut numbers = state.split(' ').map(str::parse::<u64>);
        let mut next = || numbers.next()?.ok();
        if next()? != LAYOUT {
            return None;
        }
        let (swept, trimmed) = (next()?, next()?);
        let mut head = Head {
            birth: birth.count(),
            terms,
            opens_at: next()?,
            closes_at: next()?,
            paused: next()? != 0,
            per_buyer: next()?,
            restocked: next()?,
            written_off: next()?,
            sold_by_id: next()?,
            changes: next()?,
            version: next()?,
            is_complete: next()? != 0,
            inflow: next()?,
            moves: Moves::default(),
            journaled: next()?,
            numbering: Generations { since: next()?, number: next()?, retention: next()? },
            generations: [next()?, next()?],
            tombstones: next()?,
            holds: next()?,
            next_expiry: next()?,
            segments: Vec::new(),
            sizes: Vec::new(),
        };
        for _ in 0..next()? {
            head.moves.sent.insert(u32::try_from(next()?).ok()?, next()?);
        }
        for _ in 0..next()? {
            head.moves.received.insert(u32::try_from(next()?).ok()?, (next()?, next()?));
        }
        for _ in 0..next()? {
            head.sizes.push(u32::try_from(next()?).ok()?);
        }
        for _ in 0..*head.sizes.last()? {
            let (available, reserved, sold) = (next()?, next()?, next()?);
            let supplied = available + reserved + sold;
            head.segments.push(Counts { available, reserved, sold, supplied });
        }
        let (home, now) = (home.count(), now.count() / 1_000);
        Some((id.text()?, HeadRow { home, head, swept, trimmed, now }))
    }

    /// Whether it is the inventory with this birth; any is if that is not known.
    pub(super) fn is_of(&self, birth: u64) -> bool {
        birth == 0 || birth == self.head.birth
    }

    fn state(&self) -> String {
        let head = &self.head;
        let Generations { since, number, retention } = head.numbering;
        let mut numbers = vec![
            LAYOUT,
            self.swept,
            self.trimmed,
            head.opens_at,
            head.closes_at,
            head.paused.into(),
            head.per_buyer,
            head.restocked,
            head.written_off,
            head.sold_by_id,
            head.changes,
            head.version,
            head.is_complete.into(),
            head.inflow,
            head.journaled,
            since,
            number,
            retention,
            head.generations[0],
            head.generations[1],
            head.tombstones,
            head.holds,
            head.next_expiry,
        ];
        let Moves { sent, received } = &head.moves;
        numbers.push(sent.len() as u64);
        sent.iter().for_each(|(home, total)| numbers.extend([u64::from(*home), *total]));
        numbers.push(received.len() as u64);
        for (home, (total, seen)) in received {
            numbers.extend([u64::from(*home), *total, *seen]);
        }
        numbers.push(head.sizes.len() as u64);
        numbers.extend(head.sizes.iter().map(|size| u64::from(*size)));
        for Counts { available, reserved, sold, .. } in &head.segments {
            numbers.extend([available, reserved, sold]);
        }
        let numbers: Vec<String> = numbers.iter().map(u64::to_string).collect();
        numbers.join(" ")
    }

    /// Bound in the order in which both statements name them.
    fn bind(&self, statement: Statement) -> Statement {
        let sum = |count: fn(&Counts) -> u64| self.head.segments.iter().map(count).sum::<u64>();
        statement
            .bind(sum(|it| it.available))
            .bind(sum(|it| it.reserved))
            .bind(sum(|it| it.sold))
            .bind(self.state())
    }

    /// Writes the row of a new inventory.
    pub(super) async fn insert(&self, session: &mut Session<'_>, id: &str) -> sqlx::Result<()> {
        let sql = "INSERT INTO dlock_stock (available, reserved, sold, state, id, home, birth, terms) \
             VALUES (?, ?, ?, ?, ?, ?, ?, ?)";
        let statement = self.bind(Statement::new(sql)).bind(id).bind(self.home);
        let statement = statement.bind(self.head.birth).bind(self.head.terms.to_comparable());
        session.execute(statement).await.map(drop)
    }

    /// Writes the row of an inventory that is locked.
    pub(super) fn update(&self, id: &str) -> Statement {
        let sql = "UPDATE dlock_stock SET available = ?, reserved = ?, sold = ?, state = ? \
             WHERE id = ?";
        self.bind(Statement::new(sql)).bind(id)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_head_is_read_as_it_was_written() {
        let terms = Terms {
            stock: 1_000,
            segments: 7,
            per_buyer: 2,
            opens_at: 3,
            closes_at: 4,
            retention: 5_000,
            journal: 6,
            directory: "two homes".into(),
        };
        let mut head = Head::new(1_763_000_000_000_123, terms);
        head.paused = true;
        head.is_complete = true;
        head.moves.sent.insert(3, 17);
        head.moves.received.insert(1, (5, 6));
        head.generations = [9, 8];
        head.segments[3] = Counts { available: 1, reserved: 2, sold: 3, supplied: 6 };
        head.sizes.insert(0, 12);
        let row = HeadRow { home: 77, head, swept: 7, trimmed: 5, now: 1_763_000_000_000 };
        let cells = vec![
            Value::from("default:sale"),
            Value::from(row.home),
            Value::from(row.head.birth),
            Value::from(row.head.terms.to_comparable()),
            Value::from(row.state()),
            Value::from(row.now * 1_000 + 7),
        ];
        let (id, read) = HeadRow::of(cells).expect("it can be read");
        assert_eq!(id, "default:sale");
        assert_eq!(read.head, row.head);
        assert_eq!((read.home, read.swept, read.trimmed, read.now), (77, 7, 5, row.now));
        let state = row.state().replacen("1 ", "2 ", 1);
        let one = || Value::from(1_u64);
        let other =
            vec![Value::from("a"), one(), one(), Value::from("1 1 0 0 0 1 0"), state.into(), one()];
        assert!(HeadRow::of(other).is_none());
    }
}
