//! A connection of any of the databases, which runs the statements of `statements.rs`: one
//! of the client's own, or that of a transaction of the caller.

use sqlx::{AssertSqlSafe, ColumnIndex, Decode, Type, raw_sql};

use super::errors::{self, Cause};
use super::statements::{Kind, Statement, Value};
#[cfg(feature = "postgres")]
use super::statements::{List, Part};

/// Which words of SQL a connection understands.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[allow(missing_docs, reason = "they are named like the databases")]
pub enum Dialect {
    #[cfg(feature = "mysql")]
    MySql,
    #[cfg(feature = "postgres")]
    Postgres,
    #[cfg(feature = "sqlite")]
    Sqlite,
}

impl Dialect {
    /// What an error of this database means.
    pub(super) fn cause(self, error: &sqlx::Error) -> Cause {
        let error = match errors::of_the_driver(error) {
            Ok(error) => error,
            Err(cause) => return cause,
        };
        match self {
            #[cfg(feature = "mysql")]
            Dialect::MySql => super::mysql::cause(error),
            #[cfg(feature = "postgres")]
            Dialect::Postgres => super::postgres::cause(error),
            #[cfg(feature = "sqlite")]
            Dialect::Sqlite => super::sqlite::cause(error),
        }
    }
}

/// A connection inside a transaction.
#[derive(Debug)]
#[allow(missing_docs, reason = "they are named like the databases")]
pub enum Session<'a> {
    #[cfg(feature = "mysql")]
    MySql(&'a mut sqlx::MySqlConnection),
    /// With whether statements may be prepared under a name.
    #[cfg(feature = "postgres")]
    Postgres(&'a mut sqlx::PgConnection, bool),
    #[cfg(feature = "sqlite")]
    Sqlite(&'a mut sqlx::SqliteConnection),
}

/// Makes the query of a statement for a database without lists.
#[cfg(any(feature = "mysql", feature = "sqlite"))]
macro_rules! flat_query {
    ($statement:ident, |$text:ident| $bound:expr) => {{
        let (sql, values) = $statement.flattened();
        values.into_iter().fold(sqlx::query(AssertSqlSafe(sql)), |query, value| match value {
            Value::Int(number) => query.bind(number),
            Value::Text($text) => query.bind($bound),
        })
    }};
}

/// Makes the query of a statement for the database of a session, and does something with
/// it.
macro_rules! with_query {
    ($session:expr, $statement:ident, |$query:ident, $conn:ident| $do:expr) => {
        match $session {
            #[cfg(feature = "mysql")]
            Session::MySql($conn) => {
                let $query = flat_query!($statement, |text| text.map(String::into_bytes));
                $do
            }
            #[cfg(feature = "postgres")]
            Session::Postgres($conn, persistent) => {
                let sql = $statement.numbered();
                let mut $query = sqlx::query(AssertSqlSafe(sql)).persistent(*persistent);
                for part in $statement.parts {
                    $query = match part {
                        Part::One(Value::Int(number)) => $query.bind(number),
                        Part::One(Value::Text(text)) => $query.bind(text),
                        Part::Many(List::Ints(list)) => $query.bind(list),
                        Part::Many(List::Texts(list)) => $query.bind(list),
                    };
                }
                $do
            }
            #[cfg(feature = "sqlite")]
            Session::Sqlite($conn) => {
                let $query = flat_query!($statement, |text| text);
                $do
            }
        }
    };
}

impl Session<'_> {
    /// The words of SQL that the connection understands.
    pub fn dialect(&self) -> Dialect {
        match self {
            #[cfg(feature = "mysql")]
            Session::MySql(_) => Dialect::MySql,
            #[cfg(feature = "postgres")]
            Session::Postgres(..) => Dialect::Postgres,
            #[cfg(feature = "sqlite")]
            Session::Sqlite(_) => Dialect::Sqlite,
        }
    }

    /// Runs a statement and reads its rows, which have columns of these types.
    ///
    /// # Errors
    /// That of the driver.
    pub async fn fetch(
        &mut self,
        statement: Statement,
        kinds: &[Kind],
    ) -> sqlx::Result<Vec<Vec<Value>>> {
        self.fetch_as(statement, |row| cells(row, kinds)).await
    }

    /// Runs a statement and reads each of its rows.
    pub(super) async fn fetch_as<T>(
        &mut self,
        statement: Statement,
        read: impl Fn(&dyn Cells) -> sqlx::Result<T>,
    ) -> sqlx::Result<Vec<T>> {
        with_query!(self, statement, |query, conn| {
            let rows = query.fetch_all(&mut **conn).await?;
            rows.iter().map(|row| read(row)).collect()
        })
    }

    /// Runs a statement. Answers how many rows it has changed.
    ///
    /// # Errors
    /// That of the driver.
    pub async fn execute(&mut self, statement: Statement) -> sqlx::Result<u64> {
        with_query!(self, statement, |query, conn| {
            Ok(query.execute(&mut **conn).await?.rows_affected())
        })
    }

    /// Runs statements that write different rows, on PostgreSQL in one round trip. Each is one
    /// `INSERT`, `UPDATE` or `DELETE` without a `WITH`. They have no order there, and none sees
    /// what another one has written.
    ///
    /// # Errors
    /// That of the driver.
    pub async fn execute_all(&mut self, statements: Vec<Statement>) -> sqlx::Result<()> {
        #[cfg(feature = "postgres")]
        if let Session::Postgres(..) = self {
            return match Statement::together(statements) {
                Some(together) => self.execute(together).await.map(drop),
                None => Ok(()),
            };
        }
        for statement in statements {
            self.execute(statement).await?;
        }
        Ok(())
    }

    /// Sends statements without values. They are not prepared.
    pub(super) async fn send(&mut self, sql: &'static str) -> sqlx::Result<()> {
        match self {
            #[cfg(feature = "mysql")]
            Session::MySql(conn) => raw_sql(sql).execute(&mut **conn).await.map(drop),
            #[cfg(feature = "postgres")]
            Session::Postgres(conn, _) => raw_sql(sql).execute(&mut **conn).await.map(drop),
            #[cfg(feature = "sqlite")]
            Session::Sqlite(conn) => raw_sql(sql).execute(&mut **conn).await.map(drop),
        }
    }
}

/// A row of a driver.
pub(super) trait Cells {
    fn bytes(&self, place: usize) -> sqlx::Result<Vec<u8>>;
    fn int(&self, place: usize) -> sqlx::Result<i64>;
    fn text(&self, place: usize) -> sqlx::Result<Option<String>>;
}

fn cells(row: &dyn Cells, kinds: &[Kind]) -> sqlx::Result<Vec<Value>> {
    let cell = |(place, kind): (usize, &Kind)| match kind {
        Kind::Int => row.int(place).map(Value::Int),
        Kind::Text => row.text(place).map(Value::Text),
    };
    kinds.iter().enumerate().map(cell).collect()
}

impl<R> Cells for R
where
    R: sqlx::Row,
    usize: ColumnIndex<R>,
    for<'a> i64: Decode<'a, R::Database> + Type<R::Database>,
    for<'a> String: Decode<'a, R::Database> + Type<R::Database>,
    for<'a> Vec<u8>: Decode<'a, R::Database> + Type<R::Database>,
{
    fn bytes(&self, place: usize) -> sqlx::Result<Vec<u8>> {
        self.try_get(place)
    }

    fn int(&self, place: usize) -> sqlx::Result<i64> {
        self.try_get(place)
    }

    fn text(&self, place: usize) -> sqlx::Result<Option<String>> {
        self.try_get_unchecked(place) // MariaDB has bytes, which a collation does not change
    }
}
