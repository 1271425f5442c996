//! Deductions inside a transaction of the caller: the units are taken if, and only if, the
//! caller commits.

use dlock::Key;
use dlock::extension::sql::{Session, failed_in_transaction};
use rand::RngExt as _;

use super::batch::{self, Owned};
use super::{Sql, head};
use crate::error::{Error, Result};
use crate::store::{Answer, InventoryId, Request, View, missing};

/// A free inventory is looked for among so many first, because a query on all of them reads
/// all their rows.
const SAMPLED: usize = 4;

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
            let start = random_start();
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

    /// Applies a request to one of these inventories that nobody else has locked and that has
    /// so many units available, inside a transaction of the caller. `None` if there is none:
    /// those that are locked may have them.
    pub(crate) async fn apply_to_free_in(
        &self,
        session: &mut Session<'_>,
        inventories: &[&InventoryId],
        quantity: u64,
        request: &Request,
    ) -> Result<Option<(usize, View, Answer)>> {
        self.check_dialect(session)?;
        let [first, ..] = inventories else { return Ok(None) };
        let ids: Vec<String> = inventories.iter().map(|it| self.id(&it.key)).collect();
        let locked = async {
            batch::touch(session, &ids[0]).await?;
            let first = rand::rng().random_range(0..ids.len());
            let some = ids.iter().cycle().skip(first).take(SAMPLED.min(ids.len())).cloned();
            match head::lock_free(session, some.collect(), quantity).await? {
                None if ids.len() > SAMPLED => {
                    head::lock_free(session, ids.clone(), quantity).await
                }
                locked => Ok(locked),
            }
        };
        let locked = locked.await.map_err(|error| failed(session, &first.key, error))?;
        let Some((id, row)) = locked else { return Ok(None) };
        let Some(place) = ids.iter().position(|it| *it == id) else { return Ok(None) };
        let inventory = inventories[place];
        if !row.is_of(inventory.birth) {
            return Err(missing(inventory, false));
        }
        let (start, requests) = (random_start(), std::slice::from_ref(request));
        let applied = batch::apply_to(session, &id, row, start, requests, Owned::ByCaller).await;
        let (view, answers) = applied.map_err(|error| failed(session, &inventory.key, error))?;
        match answers.into_iter().next() {
            Some(Answer::Again) | None => {
                let (view, answer) = self.apply_in(session, inventory, request).await?;
                Ok(Some((place, view, answer)))
            }
            Some(answer) => Ok(Some((place, view, answer))),
        }
    }

    /// The answer of an inventory that does not sell, which it gives without being locked.
    pub(crate) async fn halted_in(
        &self,
        session: &mut Session<'_>,
        inventory: &InventoryId,
    ) -> Result<Option<(View, Answer)>> {
        let id = self.id(&inventory.key);
        let row = head::read(session, &id, head::Lock::No).await;
        let row = row.map_err(|error| failed(session, &inventory.key, error))?;
        let Some(row) = row.filter(|row| row.is_of(inventory.birth)) else {
            return Err(missing(inventory, false));
        };
        let view = super::view(&row);
        let answer = if view.paused {
            Answer::Paused
        } else if view.now < view.opens_at {
            Answer::NotStarted
        } else if view.closes_at != 0 && view.now >= view.closes_at {
            Answer::Ended
        } else {
            return Ok(None);
        };
        Ok(Some((view, answer)))
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

/// The segment that is tried first.
fn random_start() -> usize {
    rand::rng().random_range(0..crate::MAX_SEGMENTS) as usize
}

pub(super) fn failed(session: &Session<'_>, key: &Key, error: sqlx::Error) -> Error {
    Error::Store(failed_in_transaction(session.dialect(), error).with_key(key))
}
