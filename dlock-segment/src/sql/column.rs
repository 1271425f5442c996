//! A column of a table that the shop already has.

use dlock::extension::sql::{Dialect, Statement, Value, failed_in_transaction};
use dlock::sql::InTransaction;

use crate::error::{Error, Result};

/// The longest name of a table or a column that all databases take.
const MAX_NAME: usize = 63;

/// The value that tells the rows of a table apart: a number or a string.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum ColumnKey {
    /// For a key that is a whole number.
    Number(i64),
    /// For a key that is a string.
    Text(String),
}

impl From<i64> for ColumnKey {
    fn from(number: i64) -> Self {
        ColumnKey::Number(number)
    }
}

impl From<&str> for ColumnKey {
    fn from(text: &str) -> Self {
        ColumnKey::Text(text.to_owned())
    }
}

/// A column with the stock of each row, in a table of your own: the units are taken by one
/// statement that never goes below zero,
/// `UPDATE product SET stock = stock - n WHERE id = ? AND stock >= n`.
///
/// Nothing is kept beside the column: no ids, no limits, no journal. All buyers of a row wait
/// for each other until the transaction of each ends. Split the stock over several columns
/// or rows and use a [`SegmentedLock`](crate::SegmentedLock) if that is too slow; the example
/// `segmented_columns` shows it.
///
/// ```
/// # #[cfg(feature = "postgres")]
/// # async fn example(pool: sqlx::PgPool) -> Result<(), Box<dyn std::error::Error>> {
/// use dlock_segment::sql::StockColumn;
///
/// let stock = StockColumn::new("product", "stock", "id")?;
/// let mut tx = pool.begin().await?;
/// sqlx::query("INSERT INTO orders (id, units) VALUES (981, 2)").execute(&mut *tx).await?;
/// match stock.deduct_in(&mut tx, 7, 2).await? {
///     true => tx.commit().await?,
///     false => tx.rollback().await?, // fewer than 2 are left
/// }
/// # Ok(()) }
/// ```
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct StockColumn {
    /// The parts of the table's name: `shop.product` has two.
    table: Vec<String>,
    column: String,
    key: String,
}

impl StockColumn {
    /// The column `column` of a table whose rows `key` tells apart. The table may have a
    /// schema before it: `shop.product`.
    ///
    /// ```
    /// use dlock_segment::sql::StockColumn;
    ///
    /// assert!(StockColumn::new("shop.product", "stock_07", "id").is_ok());
    /// assert!(StockColumn::new("product", "stock; DROP TABLE product", "id").is_err());
    /// ```
    ///
    /// # Errors
    /// `Invalid` if a name is not one that every database takes: 1 to 63 letters, digits and
    /// underscores, and no digit first.
    pub fn new(table: &str, column: &str, key: &str) -> Result<Self> {
        let table: Vec<&str> = table.split('.').collect();
        if table.len() > 2 {
            return Err(Error::Invalid("the table's name has more than one dot".into()));
        }
        for name in table.iter().chain([&column, &key]) {
            check_name(name)?;
        }
        Ok(StockColumn {
            table: table.into_iter().map(str::to_owned).collect(),
            column: column.to_owned(),
            key: key.to_owned(),
        })
    }

    /// Takes units of a row inside a transaction of yours. Answers whether it did: `false`
    /// if there is no such row, or fewer units are left.
    ///
    /// ```
    /// # #[cfg(feature = "postgres")]
    /// # async fn example(pool: sqlx::PgPool) -> Result<(), Box<dyn std::error::Error>> {
    /// use dlock_segment::sql::StockColumn;
    ///
    /// let mut tx = pool.begin().await?;
    /// if StockColumn::new("product", "stock", "id")?.deduct_in(&mut tx, 7, 2).await? {
    ///     tx.commit().await?;
    /// }
    /// # Ok(()) }
    /// ```
    ///
    /// # Errors
    /// `Invalid` if the quantity is 0 or above `i64::MAX`. `Store` if the database failed,
    /// found a deadlock or gave up waiting: roll back, and try it again if that makes sense.
    ///
    /// # Cancel safety
    /// Dropping the future leaves the transaction with or without the deduction; roll it
    /// back.
    pub async fn deduct_in<T: InTransaction>(
        &self,
        tx: &mut T,
        key: impl Into<ColumnKey>,
        quantity: u64,
    ) -> Result<bool> {
        self.update(tx, key.into(), quantity, "-", true).await
    }

    /// Gives units back to a row inside a transaction of yours. Answers whether there is
    /// such a row.
    ///
    /// ```
    /// # #[cfg(feature = "postgres")]
    /// # async fn example(pool: sqlx::PgPool) -> Result<(), Box<dyn std::error::Error>> {
    /// use dlock_segment::sql::StockColumn;
    ///
    /// let mut tx = pool.begin().await?;
    /// if StockColumn::new("product", "stock", "id")?.give_back_in(&mut tx, 7, 2).await? {
    ///     tx.commit().await?;
    /// }
    /// # Ok(()) }
    /// ```
    ///
    /// # Errors
    /// As [`deduct_in`](Self::deduct_in).
    ///
    /// # Cancel safety
    /// As [`deduct_in`](Self::deduct_in).
    pub async fn give_back_in<T: InTransaction>(
        &self,
        tx: &mut T,
        key: impl Into<ColumnKey>,
        quantity: u64,
    ) -> Result<bool> {
        self.update(tx, key.into(), quantity, "+", false).await
    }

    async fn update<T: InTransaction>(
        &self,
        tx: &mut T,
        key: ColumnKey,
        quantity: u64,
        sign: &str,
        is_bounded: bool,
    ) -> Result<bool> {
        if quantity == 0 || i64::try_from(quantity).is_err() {
            return Err(Error::Invalid("the quantity must be 1 or more, and an i64".into()));
        }
        let mut session = tx.session();
        let dialect = session.dialect();
        let statement = Statement::new(self.statement(dialect, sign, is_bounded)).bind(quantity);
        let mut statement = statement.bind(match key {
            ColumnKey::Number(number) => Value::Int(number),
            ColumnKey::Text(text) => Value::Text(Some(text)),
        });
        if is_bounded {
            statement = statement.bind(quantity);
        }
        let updated = session.execute(statement).await;
        let updated =
            updated.map_err(|error| Error::Store(failed_in_transaction(dialect, error)))?;
        Ok(updated > 0)
    }

    fn statement(&self, dialect: Dialect, sign: &str, is_bounded: bool) -> String {
        let quoted = |name: &String| quote(dialect, name);
        let table = self.table.iter().map(quoted).collect::<Vec<_>>().join(".");
        let (column, key) = (quoted(&self.column), quoted(&self.key));
        let bound = if is_bounded { format!(" AND {column} >= ?") } else { String::new() };
        format!("UPDATE {table} SET {column} = {column} {sign} ? WHERE {key} = ?{bound}")
    }
}

/// A name in the quotes of a database. Names were checked: they have no quotes themselves.
fn quote(dialect: Dialect, name: &str) -> String {
    match dialect {
        #[cfg(feature = "mysql")]
        Dialect::MySql => format!("`{name}`"),
        #[allow(unreachable_patterns, reason = "there may be only one database")]
        _ => format!("\"{name}\""),
    }
}

fn check_name(name: &str) -> Result<()> {
    let mut letters = name.chars();
    let starts_well =
        letters.next().is_some_and(|first| first.is_ascii_alphabetic() || first == '_');
    if starts_well
        && name.len() <= MAX_NAME
        && letters.all(|letter| letter.is_ascii_alphanumeric() || letter == '_')
    {
        return Ok(());
    }
    Err(Error::Invalid(format!(
        "a table or column must be named with 1 to {MAX_NAME} letters, digits and underscores, and no digit first"
    )))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_are_checked() {
        for good in ["stock", "_a", "Stock_01", &"x".repeat(63)] {
            assert!(StockColumn::new("product", good, "id").is_ok(), "{good}");
        }
        for bad in ["", "1a", "a b", "a\"b", "a`b", "a;b", "größe", "a.b", &"x".repeat(64)] {
            assert!(StockColumn::new("product", bad, "id").is_err(), "{bad}");
            assert!(StockColumn::new("product", "stock", bad).is_err(), "{bad}");
        }
        assert!(StockColumn::new("a.b.c", "stock", "id").is_err());
        assert!(StockColumn::new("a.", "stock", "id").is_err());
    }
}
