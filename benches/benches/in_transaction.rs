//! An order and its units in one commit of PostgreSQL, by 64 callers: the guarded UPDATE of
//! one row, the same of one of 32 rows (the most that this driver can do), one inventory
//! (`deduct_in`), and one of 32 inventories (`deduct_first_free_in`).
//!
//! ```sh
//! DLOCK_URL=postgres://user@host/database \
//!   cargo bench -p dlock-bench --features postgres --bench in_transaction
//! ```
//!
//! It makes two tables of its own, `dlock_bench_order` and `dlock_bench_product`, and removes
//! them at the end.

#[cfg(feature = "postgres")]
mod postgres {
    use std::sync::Arc;
    use std::sync::atomic::{AtomicU64, Ordering};
    use std::time::{Duration, Instant};

    use anyhow::Result;
    use dlock::Dlock;
    use dlock_segment::sql::{deduct_first_free_in, deduct_in};
    use dlock_segment::{Deduction, Inventory};
    use sqlx::PgPool;
    use sqlx::postgres::PgPoolOptions;

    const CALLERS: u32 = 64;
    const PARTS: usize = 32;
    const TAKE: &str =
        "UPDATE dlock_bench_product SET stock = stock - 1 WHERE id = $1 AND stock >= 1";
    const STOCK: u64 = 1_000_000_000;
    const MEASURED: Duration = Duration::from_secs(3);
    const ORDER: &str = "INSERT INTO dlock_bench_order (units) VALUES (1)";
    const MAKE: &str = "CREATE TABLE IF NOT EXISTS dlock_bench_order \
         (id BIGINT GENERATED ALWAYS AS IDENTITY PRIMARY KEY, units BIGINT NOT NULL); \
         CREATE TABLE IF NOT EXISTS dlock_bench_product \
         (id BIGINT PRIMARY KEY, stock BIGINT NOT NULL) WITH (fillfactor = 50); \
         INSERT INTO dlock_bench_product SELECT id, 1000000000 FROM generate_series(1, 32) AS id \
         ON CONFLICT DO NOTHING;";
    const REMOVE: &str = "DROP TABLE dlock_bench_order; DROP TABLE dlock_bench_product;";

    /// Where the units come from.
    #[derive(Clone, Copy, Debug)]
    enum From {
        Rows(i64),
        Inventory,
        FirstFree,
    }

    async fn order(pool: &PgPool, sales: &[Inventory], from: From) -> Result<bool> {
        let mut tx = pool.begin().await?;
        sqlx::query(ORDER).execute(&mut *tx).await?;
        let is_taken = match from {
            From::Rows(count) => {
                let row = rand::random_range(1..=count);
                sqlx::query(TAKE).bind(row).execute(&mut *tx).await?.rows_affected() == 1
            }
            From::Inventory => {
                matches!(deduct_in(&mut tx, &sales[0], 1).await?, Deduction::Taken(_))
            }
            From::FirstFree => {
                matches!(deduct_first_free_in(&mut tx, sales, 1).await?, Deduction::Taken(_))
            }
        };
        tx.commit().await?;
        Ok(is_taken)
    }

    /// The orders per second.
    async fn measure(pool: &PgPool, sales: &Arc<[Inventory]>, from: From) -> Result<f64> {
        let orders = Arc::new(AtomicU64::new(0));
        let began = Instant::now();
        let mut callers = tokio::task::JoinSet::new();
        for _ in 0..CALLERS {
            let (pool, sales, orders) = (pool.clone(), sales.clone(), orders.clone());
            callers.spawn(async move {
                while began.elapsed() < MEASURED {
                    if order(&pool, &sales, from).await? {
                        orders.fetch_add(1, Ordering::Relaxed);
                    }
                }
                anyhow::Ok(())
            });
        }
        while let Some(ended) = callers.join_next().await {
            ended??;
        }
        Ok(orders.load(Ordering::Relaxed) as f64 / began.elapsed().as_secs_f64())
    }

    pub(super) async fn run(url: &str) -> Result<()> {
        let dlock = Dlock::builder().url(url).migrate(true).connect().await?;
        let pool = PgPoolOptions::new().max_connections(CALLERS).connect(url).await?;
        sqlx::raw_sql(MAKE).execute(&pool).await?;
        let mut sales = Vec::new();
        for part in 0..PARTS {
            let sale = Inventory::builder(&dlock, format!("dlock-bench-{part}"));
            sales.push(sale.stock(STOCK).create().await?);
        }
        let sales: Arc<[Inventory]> = sales.into();
        for round in 1..=3 {
            let row = measure(&pool, &sales, From::Rows(1)).await?;
            let rows = measure(&pool, &sales, From::Rows(PARTS as i64)).await?;
            let one = measure(&pool, &sales, From::Inventory).await?;
            let free = measure(&pool, &sales, From::FirstFree).await?;
            println!(
                "round {round}: one row {row:.0}/s, {PARTS} rows {rows:.0}/s ({:.1} x), \
                 one inventory {one:.0}/s ({:.1} x), first free of {PARTS} {free:.0}/s ({:.1} x)",
                rows / row,
                one / row,
                free / row
            );
        }
        for sale in sales.iter() {
            sale.remove().await?;
        }
        sqlx::raw_sql(REMOVE).execute(&pool).await?;
        dlock.shutdown(Duration::from_secs(1)).await;
        Ok(())
    }
}

#[cfg(feature = "postgres")]
fn main() -> anyhow::Result<()> {
    let Ok(url) = std::env::var("DLOCK_URL") else {
        println!("set DLOCK_URL to a PostgreSQL database");
        return Ok(());
    };
    tokio::runtime::Runtime::new()?.block_on(postgres::run(&url))
}

#[cfg(not(feature = "postgres"))]
fn main() {
    println!("build it with --features postgres");
}
