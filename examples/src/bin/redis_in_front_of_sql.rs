//! Redis in front of SQL: the stock is sold from Redis, and a worker copies each effect to a
//! PostgreSQL database, where the orders are. It can be killed at any time, and so can both
//! servers.
//!
//! ```text
//! export DLOCK_URL=redis://localhost SHOP_URL=postgres://localhost/shop
//! cargo run -p examples --features sql --bin redis_in_front_of_sql -- create
//! cargo run -p examples --features sql --bin redis_in_front_of_sql -- sell 1000
//! cargo run -p examples --features sql --bin redis_in_front_of_sql -- copy       # the worker
//! cargo run -p examples --features sql --bin redis_in_front_of_sql -- reconcile
//! ```
//!
//! Redis must keep what it answered (`appendonly yes`, `appendfsync always`): else a crash
//! loses sales, and the copy has orders that Redis forgot.
//!
//! The recipe:
//! 1. The sale keeps a journal that is longer than the worker is ever behind.
//! 2. The worker takes a lock, so that only one copies at a time.
//! 3. It reads how far the copy is from the database itself, not from a file of its own.
//! 4. It writes the entries and, with the same commit, how far it is. An entry has the key
//!    (creation id, sequence), so that one which comes twice is written once.
//! 5. A gap in the numbers means that it was too slow: stop, and reconcile by hand.

use std::time::Duration;

use anyhow::{Context as _, Result, bail, ensure};
use dlock::{Config, Dlock};
use dlock_segment::{Deduction, Effect, Inventory, JournalEntry};
use sqlx::PgPool;

const STOCK: u64 = 100_000;
/// More entries than are ever written while the worker is down.
const JOURNAL: u64 = 1_000_000;

const TABLES: &str = "
    CREATE TABLE IF NOT EXISTS sale_copy (
        creation bigint PRIMARY KEY,
        sequence bigint NOT NULL       -- the last entry that is copied
    );
    CREATE TABLE IF NOT EXISTS sale_entry (
        creation  bigint NOT NULL,
        sequence  bigint NOT NULL,
        effect    text NOT NULL,
        operation text,
        units     bigint NOT NULL,
        PRIMARY KEY (creation, sequence)
    );";

fn number(number: u64) -> Result<i64> {
    Ok(i64::try_from(number)?)
}

/// What an entry adds to the units that are sold.
fn sold(entry: &JournalEntry) -> Result<i64> {
    let units = number(entry.quantity)?;
    Ok(match entry.effect {
        Effect::Taken | Effect::Confirmed => units,
        Effect::Refunded | Effect::RefundedDamaged => -units,
        _ => 0,
    })
}

/// Copies entries until there are none left for now. Returns how many.
async fn copy(sale: &Inventory, shop: &PgPool) -> Result<usize> {
    let creation: i64 = sale.creation_id().to_string().parse()?;
    let mut copied = 0;
    loop {
        let done = "SELECT sequence FROM sale_copy WHERE creation = $1";
        let done: Option<i64> =
            sqlx::query_scalar(done).bind(creation).fetch_optional(shop).await?;
        let done = u64::try_from(done.unwrap_or(0))?;
        let entries = sale.journal(done).await?;
        let (Some(first), Some(last)) = (entries.first(), entries.last()) else {
            return Ok(copied);
        };
        ensure!(first.sequence == done + 1, "entries after {done} are gone from the journal");
        let mut tx = shop.begin().await?;
        for entry in &entries {
            let insert = "INSERT INTO sale_entry (creation, sequence, effect, operation, units)
                 VALUES ($1, $2, $3, $4, $5) ON CONFLICT DO NOTHING";
            let insert = sqlx::query(insert).bind(creation).bind(number(entry.sequence)?);
            let insert = insert.bind(entry.effect.name()).bind(&entry.operation);
            insert.bind(sold(entry)?).execute(&mut *tx).await?;
        }
        let place = "INSERT INTO sale_copy (creation, sequence) VALUES ($1, $2)
             ON CONFLICT (creation) DO UPDATE SET sequence = excluded.sequence";
        let place = sqlx::query(place).bind(creation).bind(number(last.sequence)?);
        place.execute(&mut *tx).await?;
        tx.commit().await?;
        copied += entries.len();
    }
}

/// The worker: it copies under a lock, and goes on after any failure.
async fn work(dlock: &Dlock, sale: &Inventory, shop: &PgPool) {
    loop {
        let pass = async {
            let guard = dlock.mutex("copy:phone").lock().await?;
            // The body is stopped if the lock is lost: another worker has it then.
            guard.run(copy(sale, shop)).await?
        };
        if let Err(error) = pass.await {
            eprintln!("copying goes on in a moment: {error:#}");
        }
        tokio::time::sleep(Duration::from_millis(50)).await;
    }
}

/// Sells one unit to each order. The id of the order makes it safe to ask again.
async fn sell(sale: &Inventory, orders: u64) -> Result<u64> {
    let mut sold = 0;
    for order in 0..orders {
        let id = format!("order-{}-{order}", std::process::id());
        loop {
            match sale.deduct(1).operation(&id).send().await {
                Ok(Deduction::Taken(_)) => sold += 1,
                Ok(other) => println!("{id}: {other:?}"),
                Err(error) if error.is_retryable() => {
                    tokio::time::sleep(Duration::from_millis(50)).await;
                    continue;
                }
                Err(error) => return Err(error.into()),
            }
            break;
        }
    }
    Ok(sold)
}

/// Compares what Redis counts with what the database has.
async fn reconcile(sale: &Inventory, shop: &PgPool) -> Result<()> {
    let creation: i64 = sale.creation_id().to_string().parse()?;
    let sum = "SELECT COALESCE(SUM(units), 0)::bigint FROM sale_entry WHERE creation = $1";
    let copied: i64 = sqlx::query_scalar(sum).bind(creation).fetch_one(shop).await?;
    let counted = number(sale.stock().await?.sold)?;
    println!("{counted} sold by Redis, {copied} in the database");
    ensure!(copied == counted, "they differ: is the worker behind, or did one of them lose data?");
    Ok(())
}

#[tokio::main]
async fn main() -> Result<()> {
    let dlock = Dlock::builder().config(Config::from_env("DLOCK_")?).connect().await?;
    let shop = std::env::var("SHOP_URL").context("set SHOP_URL to the URL of the database")?;
    let shop = PgPool::connect(&shop).await?;
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let arguments: Vec<&str> = arguments.iter().map(String::as_str).collect();
    if arguments == ["create"] {
        sqlx::raw_sql(TABLES).execute(&shop).await?;
        let sale = Inventory::builder(&dlock, "phone").stock(STOCK).journal(JOURNAL);
        println!("{}", sale.create().await?.creation_id());
        return Ok(());
    }
    let sale = Inventory::open(&dlock, "phone").await?;
    match arguments[..] {
        ["sell", orders] => println!("{} sold", sell(&sale, orders.parse()?).await?),
        ["copy"] => work(&dlock, &sale, &shop).await,
        ["copy-once"] => println!("{} copied", copy(&sale, &shop).await?),
        ["reconcile"] => reconcile(&sale, &shop).await?,
        _ => bail!("say create, sell N, copy, copy-once or reconcile"),
    }
    Ok(())
}
