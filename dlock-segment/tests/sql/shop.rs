//! The tables of a shop, and its transactions on each database.

use dlock::sql::InTransaction;
use dlock_segment::Error;
use sqlx::{MySql, MySqlPool, PgPool, Postgres, Sqlite, SqlitePool, Transaction};

/// A pool of a database with the tables `orders` and `product`.
pub(crate) trait Shop: Clone + Send + Sync + 'static {
    type Tx: InTransaction + 'static;
    /// Whether two transactions can write at the same time.
    const LOCKS_ROWS: bool;

    fn open(url: &str) -> impl Future<Output = Self> + Send;
    fn begin(&self) -> impl Future<Output = Self::Tx> + Send;
    fn commit(tx: Self::Tx) -> impl Future<Output = Result<(), sqlx::Error>> + Send;
    fn roll_back(tx: Self::Tx) -> impl Future<Output = ()> + Send;
    /// Commits a purchase, or rolls back if nothing was bought. Answers how many it bought.
    fn finish(tx: Self::Tx, bought: Result<bool, Error>) -> impl Future<Output = i64> + Send {
        async move {
            let is_bought = match bought {
                Ok(is_bought) => is_bought,
                Err(Error::Store(_)) => false,
                Err(other) => panic!("{other}"),
            };
            match is_bought {
                true => Self::commit(tx).await.expect("a commit"),
                false => Self::roll_back(tx).await,
            }
            i64::from(is_bought)
        }
    }
    fn run(tx: &mut Self::Tx, sql: &'static str) -> impl Future<Output = ()> + Send;
    /// A number that a statement reads, outside of transactions.
    fn number(&self, sql: &'static str) -> impl Future<Output = i64> + Send;
}

const TABLES: &str = "CREATE TABLE orders (units BIGINT NOT NULL); \
     CREATE TABLE product (id BIGINT PRIMARY KEY, stock BIGINT NOT NULL); \
     CREATE TABLE part (code VARCHAR(20) PRIMARY KEY, stock BIGINT NOT NULL);";

macro_rules! shop {
    ($pool:ty, $database:ty, $locks_rows:literal, $begin:literal) => {
        impl Shop for $pool {
            type Tx = Transaction<'static, $database>;
            const LOCKS_ROWS: bool = $locks_rows;

            async fn open(url: &str) -> Self {
                let pool = <$pool>::connect(url).await.expect("a pool");
                sqlx::raw_sql(TABLES).execute(&pool).await.expect("the tables");
                pool
            }

            async fn begin(&self) -> Self::Tx {
                self.begin_with($begin).await.expect("a transaction")
            }

            async fn commit(tx: Self::Tx) -> Result<(), sqlx::Error> {
                tx.commit().await
            }

            async fn roll_back(tx: Self::Tx) {
                tx.rollback().await.expect("a rollback");
            }

            async fn run(tx: &mut Self::Tx, sql: &'static str) {
                sqlx::raw_sql(sql).execute(&mut **tx).await.expect("it runs");
            }

            async fn number(&self, sql: &'static str) -> i64 {
                sqlx::query_scalar(sql).fetch_one(self).await.expect("a number")
            }
        }
    };
}

shop!(PgPool, Postgres, true, "BEGIN");
// The usual isolation of MariaDB: REPEATABLE READ.
shop!(MySqlPool, MySql, true, "START TRANSACTION");
shop!(SqlitePool, Sqlite, false, "BEGIN IMMEDIATE");
