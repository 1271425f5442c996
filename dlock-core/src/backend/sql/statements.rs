//! Statements that all databases understand.
//!
//! A statement is written once. `?` is a value, and `@IN` is "one of this list". What
//! differs between the databases is added when it runs: PostgreSQL numbers its values and
//! takes a list as one array; the others take a list as one value for each element. There a
//! list is padded to the next power of two by repeating its last value, so that there are
//! few different statements, and each is prepared once for each connection.

use super::session::Dialect;

/// The type of a column.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[allow(missing_docs, reason = "they are named like what they hold")]
pub enum Kind {
    Int,
    Text,
}

/// A value that is sent or received.
#[derive(Clone, Debug, PartialEq, Eq)]
#[allow(missing_docs, reason = "they are named like what they hold")]
pub enum Value {
    Int(i64),
    Text(Option<String>),
}

/// A list that PostgreSQL takes as one value.
#[derive(Clone, Debug)]
pub(super) enum List {
    #[cfg(feature = "postgres")]
    Ints(Vec<i64>),
    Texts(Vec<Option<String>>),
}

#[cfg(feature = "postgres")]
impl List {
    fn of(kind: Kind, values: impl Iterator<Item = Value>) -> Self {
        match kind {
            Kind::Int => List::Ints(values.map(|value| value.int()).collect()),
            Kind::Text => List::Texts(values.map(Value::text).collect()),
        }
    }
}

impl Value {
    /// The number; 0 if it is text.
    pub fn int(&self) -> i64 {
        match self {
            Value::Int(number) => *number,
            Value::Text(_) => 0,
        }
    }

    /// The number, where it cannot be negative.
    pub fn count(&self) -> u64 {
        u64::try_from(self.int()).unwrap_or(0)
    }

    /// The text, unless it is NULL or a number.
    pub fn text(self) -> Option<String> {
        match self {
            Value::Int(_) => None,
            Value::Text(text) => text,
        }
    }
}

impl From<u64> for Value {
    fn from(number: u64) -> Self {
        Value::Int(i64::try_from(number).unwrap_or(i64::MAX))
    }
}

impl From<&str> for Value {
    fn from(text: &str) -> Self {
        Value::Text(Some(text.to_owned()))
    }
}

impl From<String> for Value {
    fn from(text: String) -> Self {
        Value::Text(Some(text))
    }
}

/// What a `?` or an `@IN` stands for.
#[derive(Clone, Debug)]
pub(super) enum Part {
    One(Value),
    Many(List),
}

/// A statement and its values.
#[derive(Clone, Debug)]
pub struct Statement {
    sql: String,
    pub(super) parts: Vec<Part>,
}

impl Statement {
    /// A statement with these words.
    pub fn new(sql: impl Into<String>) -> Self {
        Statement { sql: sql.into(), parts: Vec::new() }
    }

    /// Gives the next `?` its value.
    #[must_use]
    pub fn bind(mut self, value: impl Into<Value>) -> Self {
        self.parts.push(Part::One(value.into()));
        self
    }

    /// Gives the next `@IN` its list of texts. It must not be empty.
    #[must_use]
    pub fn bind_list(mut self, texts: impl IntoIterator<Item = String>) -> Self {
        self.parts.push(Part::Many(List::Texts(texts.into_iter().map(Some).collect())));
        self
    }

    /// Writes rows, and replaces those with the same key. No two rows have the same key,
    /// and there is at least one.
    pub fn upsert(
        dialect: Dialect,
        table: &str,
        key: &[&str],
        columns: &[(&str, Kind)],
        rows: Vec<Vec<Value>>,
    ) -> Self {
        let names: Vec<&str> = columns.iter().map(|(name, _)| *name).collect();
        let others = names.iter().filter(|name| !key.contains(name));
        let list = names.join(", ");
        let set = |new: fn(&str) -> String| {
            let set: Vec<String> =
                others.clone().map(|name| format!("{name} = {}", new(name))).collect();
            set.join(", ")
        };
        #[cfg(any(feature = "postgres", feature = "sqlite"))]
        let on_conflict = || {
            let set = set(|name| format!("excluded.{name}"));
            format!("ON CONFLICT ({}) DO UPDATE SET {set}", key.join(", "))
        };
        match dialect {
            #[cfg(feature = "postgres")]
            Dialect::Postgres => {
                let arrays = columns.iter().map(|(_, kind)| match kind {
                    Kind::Int => "?::bigint[]",
                    Kind::Text => "?::text[]",
                });
                let arrays: Vec<&str> = arrays.collect();
                let sql = format!(
                    "INSERT INTO {table} ({list}) SELECT * FROM UNNEST({}) {}",
                    arrays.join(", "),
                    on_conflict()
                );
                let mut statement = Statement::new(sql);
                for (place, (_, kind)) in columns.iter().enumerate() {
                    let column = rows.iter().filter_map(|row| row.get(place).cloned());
                    statement.parts.push(Part::Many(List::of(*kind, column)));
                }
                statement
            }
            #[cfg(feature = "mysql")]
            Dialect::MySql => {
                let end =
                    format!("ON DUPLICATE KEY UPDATE {}", set(|name| format!("VALUES({name})")));
                Self::values(table, &list, columns.len(), rows, &end)
            }
            #[cfg(feature = "sqlite")]
            Dialect::Sqlite => Self::values(table, &list, columns.len(), rows, &on_conflict()),
        }
    }

    /// Several statements that write different rows, as one; `None` if there are none.
    #[cfg(feature = "postgres")]
    pub(super) fn together(mut statements: Vec<Statement>) -> Option<Self> {
        let last = statements.pop()?;
        if statements.is_empty() {
            return Some(last);
        }
        let first = |(place, it): (usize, &Statement)| format!("part{place} AS ({})", it.sql);
        let first: Vec<String> = statements.iter().enumerate().map(first).collect();
        let mut together = Statement::new(format!("WITH {} {}", first.join(", "), last.sql));
        together.parts = statements.into_iter().chain([last]).flat_map(|it| it.parts).collect();
        Some(together)
    }

    /// Writes rows as `VALUES`. The last one is repeated, so that there are few statements.
    #[cfg(any(feature = "mysql", feature = "sqlite"))]
    fn values(
        table: &str,
        names: &str,
        columns: usize,
        mut rows: Vec<Vec<Value>>,
        end: &str,
    ) -> Self {
        let count = padded(rows.len());
        if let Some(last) = rows.last().cloned() {
            rows.resize(count, last);
        }
        let row = format!("({})", placeholders(columns));
        let values = vec![row.as_str(); count].join(",");
        let mut statement =
            Statement::new(format!("INSERT INTO {table} ({names}) VALUES {values} {end}"));
        statement.parts = rows.into_iter().flatten().map(Part::One).collect();
        statement
    }

    /// The words with numbered values.
    #[cfg(feature = "postgres")]
    pub(super) fn numbered(&self) -> String {
        let mut sql = String::with_capacity(self.sql.len() + 16);
        let mut number = 0;
        let words = self.sql.replace("@IN", "= ANY(?)");
        for letter in words.chars() {
            if letter == '?' {
                number += 1;
                sql.push_str(&format!("${number}"));
            } else {
                sql.push(letter);
            }
        }
        sql
    }

    /// The words with a value for each element of a list, and all values.
    #[cfg(any(feature = "mysql", feature = "sqlite"))]
    pub(super) fn flattened(self) -> (String, Vec<Value>) {
        let mut words = self.sql.split("@IN");
        let mut sql = words.next().unwrap_or_default().to_owned();
        let mut values = Vec::with_capacity(self.parts.len());
        for part in self.parts {
            let mut list: Vec<Value> = match part {
                Part::One(value) => {
                    values.push(value);
                    continue;
                }
                #[cfg(feature = "postgres")]
                Part::Many(List::Ints(list)) => list.into_iter().map(Value::Int).collect(),
                Part::Many(List::Texts(list)) => list.into_iter().map(Value::Text).collect(),
            };
            if let Some(last) = list.last().cloned() {
                list.resize(padded(list.len()), last);
            }
            sql.push_str(&format!("IN ({})", placeholders(list.len())));
            sql.push_str(words.next().unwrap_or_default());
            values.append(&mut list);
        }
        (sql, values)
    }
}

/// How many values a list of so many is padded to.
#[cfg(any(feature = "mysql", feature = "sqlite"))]
pub(super) fn padded(count: usize) -> usize {
    count.max(1).next_power_of_two()
}

/// So many question marks.
#[cfg(any(feature = "mysql", feature = "sqlite"))]
pub(super) fn placeholders(count: usize) -> String {
    let mut marks = "?,".repeat(count);
    marks.pop();
    marks
}

#[cfg(test)]
mod tests {
    use super::*;

    #[cfg(feature = "postgres")]
    #[test]
    fn statements_are_made_together() {
        let statement = |sql: &str, value: u64| Statement::new(sql).bind(value);
        assert!(Statement::together(Vec::new()).is_none());
        let one = Statement::together(vec![statement("DELETE FROM a WHERE id = ?", 1)]);
        assert_eq!(one.unwrap().numbered(), "DELETE FROM a WHERE id = $1");
        let two = vec![
            statement("DELETE FROM a WHERE id = ?", 1),
            statement("UPDATE b SET n = ? WHERE m @IN", 2).bind_list(["x".to_owned()]),
        ];
        let two = Statement::together(two).unwrap();
        assert_eq!(
            two.numbered(),
            "WITH part0 AS (DELETE FROM a WHERE id = $1) UPDATE b SET n = $2 WHERE m = ANY($3)"
        );
        assert_eq!(two.parts.len(), 3);
    }

    #[cfg(any(feature = "mysql", feature = "sqlite"))]
    #[test]
    fn lists_have_few_lengths() {
        assert_eq!([0, 1, 2, 3, 5, 500].map(padded), [1, 1, 2, 4, 8, 512]);
        assert_eq!(placeholders(3), "?,?,?");
    }
}
