//! Deductions inside a transaction of the caller: the units are taken if, and only if, the
//! caller commits.

use dlock::Key;
use dlock::extension::sql::{Dialect, Kind, Session, Statement, failed_in_transaction};
use rand::RngExt as _;

use super::batch::{self, Owned};
use super::{Sql, batch::id as text_of};
use crate::error::{Error, Result};
use crate::store::{Answer, Id, InventoryId, Request, View, missing};

impl Sql {
    /// Applies one request inside a transaction of the caller.
    pub(crate) async fn apply_in(
        &self,
        session: &mut Session<'_>,
        inventory: &InventoryId,
        request: &Request,
    ) -> Result<(View, Answer)> {
        self.check_dialect(session)?;
        let (id, birth) = (self.id(&inventory.key), inventory.birth);
        let request = std::slice::from_ref(request);
        loop {
            let start = rand::rng().random_range(0..crate::MAX_SEGMENTS) as usize;
            let applied = batch::apply(session, &id, birth, start, request, Owned::ByCaller).await;
            let applied = applied.map_err(|error| failed(session, &inventory.key, error))?;
            let Some((view, answers)) = applied else { return Err(missing(inventory, false)) };
            match answers.into_iter().next() {
                Some(Answer::Again) => {} // some more expired reservations are given back
                Some(answer) => return Ok((view, answer)),
                None => return Err(Error::Unknown(None)),
            }
        }
    }

    /// Locks one of these inventories that nobody else has locked and that has so many
    /// units available. `None` if there is none: those that are locked may have them.
    pub(crate) async fn lock_free_in(
        &self,
        session: &mut Session<'_>,
        keys: &[Key],
        quantity: u64,
    ) -> Result<Option<usize>> {
        self.check_dialect(session)?;
        let [first, ..] = keys else { return Ok(None) };
        let ids: Vec<String> = keys.iter().map(|key| self.id(key)).collect();
        let sql = "SELECT id FROM dlock_stock WHERE id @IN AND available >= ?";
        let end = match self.dialect {
            // The rows are sorted before the first one is locked.
            #[cfg(feature = "postgres")]
            Dialect::Postgres => " ORDER BY random() LIMIT 1 FOR UPDATE SKIP LOCKED",
            // All rows would be locked before they are sorted.
            #[cfg(feature = "mysql")]
            Dialect::MySql => " LIMIT 1 FOR UPDATE SKIP LOCKED",
            #[cfg(feature = "sqlite")]
            Dialect::Sqlite => " ORDER BY random() LIMIT 1",
        };
        let statement = Statement::new(format!("{sql}{end}"));
        let statement = statement.bind_list(ids.clone()).bind(quantity);
        let rows = session.fetch(statement, &[Kind::Text]).await;
        let rows = rows.map_err(|error| failed(session, first, error))?;
        let Some(cell) = rows.into_iter().flatten().next() else { return Ok(None) };
        let id: Id = text_of(cell).map_err(|error| failed(session, first, error))?;
        Ok(ids.iter().position(|it| **it == *id))
    }

    /// The transaction must be one of the database that keeps the inventory.
    pub(super) fn check_dialect(&self, session: &Session<'_>) -> Result<()> {
        if session.dialect() == self.dialect {
            return Ok(());
        }
        Err(Error::Invalid(
            "the transaction is one of another database than that of the inventory".into(),
        ))
    }
}

pub(super) fn failed(session: &Session<'_>, key: &Key, error: sqlx::Error) -> Error {
    Error::Store(failed_in_transaction(session.dialect(), error).with_key(key))
}
