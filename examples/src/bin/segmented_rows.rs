//! A segmented lock over a table of your own: twenty rows of stock, and a lock for each
//! row.
//!
//! Run it with `cargo run -p examples --bin segmented_rows`. 600 buyers come at once
//! for 500 units in twenty rows of an SQLite database. Each buyer locks a free row at
//! random, and tries the next row if it is empty. The row stores the fencing token and
//! rejects the write of a buyer with an older token.

use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use anyhow::{Result, ensure};
use dlock::{Token, key};
use dlock_segment::SegmentedLock;
use rusqlite::{Connection, params};
use tokio::sync::Mutex;

const ROWS: u32 = 20;
const UNITS_PER_ROW: i64 = 25;
const BUYERS: usize = 600;

/// The database of the shop. dlock does not access it.
struct Shop(Mutex<Connection>);

impl Shop {
    fn new(path: &Path) -> Result<Self> {
        let database = Connection::open(path)?;
        database.pragma_update(None, "journal_mode", "WAL")?;
        database.pragma_update(None, "synchronous", "OFF")?; // fast, but only good for an example
        database.execute(
            "CREATE TABLE stock (segment INTEGER PRIMARY KEY, units INTEGER NOT NULL CHECK (units >= 0), fence INTEGER NOT NULL)",
            [],
        )?;
        for segment in 0..ROWS {
            database
                .execute("INSERT INTO stock VALUES (?1, ?2, 0)", params![segment, UNITS_PER_ROW])?;
        }
        Ok(Shop(Mutex::new(database)))
    }

    async fn units(&self, segment: usize) -> Result<i64> {
        let segment = i64::try_from(segment)?;
        let query = "SELECT units FROM stock WHERE segment = ?1";
        Ok(self.0.lock().await.query_row(query, [segment], |row| row.get(0))?)
    }

    /// Writes the units of a row; returns false if the row has seen a newer token.
    async fn write(&self, segment: usize, units: i64, token: Token) -> Result<bool> {
        let (segment, token) = (i64::try_from(segment)?, i64::try_from(token.get())?);
        let update = "UPDATE stock SET units = ?2, fence = ?3 WHERE segment = ?1 AND fence <= ?3";
        let rows = self.0.lock().await.execute(update, params![segment, units, token])?;
        Ok(rows == 1)
    }

    async fn left(&self) -> Result<i64> {
        let query = "SELECT SUM(units) FROM stock";
        Ok(self.0.lock().await.query_row(query, [], |row| row.get(0))?)
    }
}

/// Buys one unit from any row; returns false if all rows are empty.
async fn buy(stock: &SegmentedLock, shop: &Shop) -> Result<bool> {
    let mut segments = stock.pick(); // starts with a random row, then tries every other row once
    while let Some((segment, guard)) = segments.next().await? {
        let units = shop.units(segment.index()).await?;
        if units > 0 {
            // Between read and write only the lock of this row keeps other buyers out.
            tokio::time::sleep(Duration::from_millis(1)).await;
            ensure!(
                shop.write(segment.index(), units - 1, guard.token()).await?,
                "another buyer has written with a newer token"
            );
            return Ok(true);
        }
        segments.dry(); // remembers for a while that this row is empty
    }
    Ok(false)
}

#[tokio::main]
async fn main() -> Result<()> {
    let dlock = examples::connect().await?;
    let path = std::env::temp_dir().join(format!("dlock-rows-{}.sqlite", std::process::id()));
    let shop = Arc::new(Shop::new(&path)?);
    let sku = format!("phone-{}", std::process::id());
    let stock = SegmentedLock::new(&dlock, key!("stock:{sku}"), ROWS).wait_unlimited();

    let mut buyers = tokio::task::JoinSet::new();
    for _ in 0..BUYERS {
        let (stock, shop) = (stock.clone(), shop.clone());
        buyers.spawn(async move { buy(&stock, &shop).await });
    }
    let (mut sold, mut too_late) = (0, 0);
    while let Some(bought) = buyers.join_next().await {
        match bought?? {
            true => sold += 1,
            false => too_late += 1,
        }
    }
    let left = shop.left().await?;
    println!("{sold} sold, {left} left, {too_late} buyers too late");
    ensure!(sold + left == i64::from(ROWS) * UNITS_PER_ROW, "a unit was lost or sold twice");
    drop(shop);
    for suffix in ["", "-wal", "-shm"] {
        let _ = std::fs::remove_file(format!("{}{suffix}", path.display()));
    }
    Ok(())
}
