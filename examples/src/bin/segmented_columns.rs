//! A table that the shop already has, with its stock in twenty columns: `stock_01` to
//! `stock_20`. Each column has a lock of its own, and is never changed without the guard
//! `stock_nn >= n`.
//!
//! Run it with `cargo run -p examples --features sql --bin segmented_columns`, which uses a
//! file of SQLite, or with `DLOCK_URL=postgres://...` or `mysql://...`. 600 buyers come at
//! once for 500 units. Each locks a free column at random and tries the next one if it is
//! empty. Locks and stock are in the same database.

use std::sync::Arc;

use anyhow::{Result, ensure};
use dlock::{Config, Dlock};
use dlock_segment::sql::StockColumn;
use dlock_segment::{SegmentOutcome, segmented_lock};
use sqlx::{AssertSqlSafe, MySqlPool, PgPool, SqlitePool};

const COLUMNS: usize = 20;
const UNITS_PER_COLUMN: i64 = 25;
const BUYERS: usize = 600;

/// The database of the shop.
enum Shop {
    Postgres(PgPool),
    MySql(MySqlPool),
    Sqlite(SqlitePool),
}

/// Does the same on any database.
macro_rules! on_shop {
    ($shop:expr, $pool:ident => $do:expr) => {
        match $shop {
            Shop::Postgres($pool) => $do,
            Shop::MySql($pool) => $do,
            Shop::Sqlite($pool) => $do,
        }
    };
}

impl Shop {
    async fn open(url: &str) -> Result<Self> {
        let shop = match url.split(':').next() {
            Some("postgres" | "postgresql") => Shop::Postgres(PgPool::connect(url).await?),
            Some("mysql" | "mariadb") => Shop::MySql(MySqlPool::connect(url).await?),
            _ => Shop::Sqlite(SqlitePool::connect(url).await?),
        };
        let columns: Vec<String> =
            (0..COLUMNS).map(|at| format!("{} BIGINT NOT NULL", column(at))).collect();
        let units = vec![UNITS_PER_COLUMN.to_string(); COLUMNS].join(", ");
        for sql in [
            "DROP TABLE IF EXISTS product".to_owned(),
            format!("CREATE TABLE product (id BIGINT PRIMARY KEY, {})", columns.join(", ")),
            format!("INSERT INTO product VALUES (7, {units})"),
        ] {
            on_shop!(&shop, pool => sqlx::query(AssertSqlSafe(sql)).execute(pool).await.map(drop))?;
        }
        Ok(shop)
    }

    /// Takes one unit of a column, in a transaction that an order would be part of.
    async fn take(&self, at: usize, product: i64) -> Result<bool> {
        let stock = StockColumn::new("product", &column(at), "id")?;
        on_shop!(self, pool => {
            let mut tx = pool.begin().await?;
            let taken = stock.deduct_in(&mut tx, product, 1).await?;
            // INSERT INTO orders ... belongs here: it is committed with the unit, or not.
            tx.commit().await?;
            Ok(taken)
        })
    }

    async fn left(&self) -> Result<i64> {
        let columns: Vec<String> = (0..COLUMNS).map(column).collect();
        let sql = format!("SELECT {} FROM product WHERE id = 7", columns.join(" + "));
        Ok(on_shop!(self, pool => sqlx::query_scalar(AssertSqlSafe(sql)).fetch_one(pool).await)?)
    }
}

fn column(at: usize) -> String {
    format!("stock_{:02}", at + 1)
}

/// Buys one unit from any column. The body runs under the lock of one column after the
/// other, until one is not empty.
#[segmented_lock(key = "stock:{product}", segments = 20, wait = "60s")]
async fn buy(shop: &Shop, product: i64) -> Result<SegmentOutcome<()>> {
    Ok(match shop.take(segment.index(), product).await? {
        true => SegmentOutcome::Done(()),
        false => SegmentOutcome::Dry,
    })
}

#[tokio::main]
async fn main() -> Result<()> {
    let config = Config::from_env("DLOCK_")?;
    let file = std::env::temp_dir().join(format!("dlock-columns-{}.db", std::process::id()));
    let url = config.url.clone().unwrap_or_else(|| format!("sqlite://{}", file.display()));
    let dlock = Dlock::builder().url(&url).config(config).migrate(true).connect().await?;
    dlock::init(dlock)?;
    let shop = Arc::new(Shop::open(&url).await?);

    let mut buyers = tokio::task::JoinSet::new();
    for _ in 0..BUYERS {
        let shop = shop.clone();
        buyers.spawn(async move { buy(&shop, 7).await });
    }
    let (mut sold, mut too_late) = (0, 0);
    while let Some(bought) = buyers.join_next().await {
        match bought?? {
            SegmentOutcome::Done(()) => sold += 1,
            SegmentOutcome::Dry => too_late += 1,
        }
    }
    let left = shop.left().await?;
    println!("{sold} sold, {left} left, {too_late} buyers too late");
    ensure!(sold + left == UNITS_PER_COLUMN * 20, "a unit was lost or sold twice");
    for suffix in ["", "-wal", "-shm"] {
        let _ = std::fs::remove_file(format!("{}{suffix}", file.display()));
    }
    Ok(())
}
