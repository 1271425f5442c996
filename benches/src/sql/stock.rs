//! Rows with a number of units each, in a table of the bench: for the methods that lock, and
//! for the usual guarded UPDATE that dlock is compared with.

use anyhow::Result;
use dlock::Config;
use sqlx::AssertSqlSafe;
use tokio::sync::{mpsc, oneshot};

use super::peer::{Pool, on_pool};

/// Rows of `dlock_bench_stock`.
pub(crate) struct SqlStock {
    pool: Pool,
    ids: Vec<String>,
}

impl std::fmt::Debug for SqlStock {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "SqlStock({} rows)", self.ids.len())
    }
}

/// Runs a statement with values, and answers how many rows it has changed.
macro_rules! execute {
    ($pool:expr, $sql:expr $(, $value:expr)*) => {{
        let sql = $pool.statement($sql);
        on_pool!(&$pool, pool => {
            sqlx::query(AssertSqlSafe(sql))$(.bind($value))*.execute(pool).await?.rows_affected()
        })
    }};
}

impl SqlStock {
    /// Connects as many times as there are tasks, at most 64 times, and makes the table.
    pub(crate) async fn open(
        config: &Config,
        key_prefix: &str,
        rows: usize,
        tasks: usize,
    ) -> Result<Self> {
        let pool = Pool::open(config, tasks).await?;
        let make = "CREATE TABLE IF NOT EXISTS dlock_bench_stock \
             (id VARCHAR(200) PRIMARY KEY, units BIGINT NOT NULL)";
        // Several processes may make it at the same time; then the rows fail if it is missing.
        let _ = on_pool!(&pool, pool => sqlx::query(make).execute(pool).await.map(drop));
        let ids = (0..rows).map(|row| format!("{key_prefix}:{row}")).collect();
        Ok(SqlStock { pool, ids })
    }

    pub(crate) fn count(&self) -> usize {
        self.ids.len()
    }

    /// Makes the rows with these units.
    pub(crate) async fn fill(&self, units: &[u64]) -> Result<()> {
        for (id, units) in self.ids.iter().zip(units) {
            let sql = "INSERT INTO dlock_bench_stock (id, units) VALUES (?, ?)";
            execute!(self.pool, sql, id, i64::try_from(*units)?);
        }
        Ok(())
    }

    pub(crate) async fn read(&self, row: usize) -> Result<Option<u64>> {
        let sql = self.pool.statement("SELECT units FROM dlock_bench_stock WHERE id = ?");
        let units: Option<i64> = on_pool!(&self.pool, pool => {
            sqlx::query_scalar(AssertSqlSafe(sql)).bind(&self.ids[row]).fetch_optional(pool).await?
        });
        Ok(units.map(|units| u64::try_from(units).unwrap_or(0)))
    }

    pub(crate) async fn write(&self, row: usize, units: u64) -> Result<()> {
        let sql = "UPDATE dlock_bench_stock SET units = ? WHERE id = ?";
        execute!(self.pool, sql, i64::try_from(units)?, &self.ids[row]);
        Ok(())
    }

    /// The guarded UPDATE of one row. Answers whether there were enough units.
    pub(crate) async fn deduct(&self, row: usize, units: u64) -> Result<bool> {
        let units = i64::try_from(units)?;
        let sql = "UPDATE dlock_bench_stock SET units = units - ? WHERE id = ? AND units >= ?";
        Ok(execute!(self.pool, sql, units, &self.ids[row], units) > 0)
    }

    pub(crate) async fn left(&self) -> Result<Vec<Option<u64>>> {
        let mut left = Vec::new();
        for row in 0..self.ids.len() {
            left.push(self.read(row).await?);
        }
        Ok(left)
    }

    pub(crate) async fn remove(&self) -> Result<()> {
        for id in &self.ids {
            execute!(self.pool, "DELETE FROM dlock_bench_stock WHERE id = ?", id);
        }
        Ok(())
    }
}

type Waiting = (u64, oneshot::Sender<bool>);

/// Guarded UPDATEs of one row where requests that are in flight together share one
/// statement: what is the least that a batch costs.
#[derive(Debug)]
pub(crate) struct BatchedRow {
    pub(crate) stock: std::sync::Arc<SqlStock>,
    queue: mpsc::UnboundedSender<Waiting>,
}

impl BatchedRow {
    /// Two statements are in flight at a time, as with the inventory.
    pub(crate) fn new(stock: SqlStock) -> Self {
        let stock = std::sync::Arc::new(stock);
        let (queue, waiting) = mpsc::unbounded_channel::<Waiting>();
        let waiting = std::sync::Arc::new(tokio::sync::Mutex::new(waiting));
        for _ in 0..2 {
            let (stock, waiting) = (stock.clone(), waiting.clone());
            tokio::spawn(async move {
                loop {
                    let mut batch = Vec::new();
                    if waiting.lock().await.recv_many(&mut batch, 512).await == 0 {
                        return;
                    }
                    let units = batch.iter().map(|(units, _)| units).sum();
                    // Without an answer the requests fail.
                    let Ok(done) = stock.deduct(0, units).await else { continue };
                    for (_, answer) in batch {
                        let _ = answer.send(done);
                    }
                }
            });
        }
        BatchedRow { stock, queue }
    }

    pub(crate) async fn deduct(&self, units: u64) -> Result<bool> {
        let (answer, answered) = oneshot::channel();
        let _ = self.queue.send((units, answer));
        Ok(answered.await?)
    }
}
