//! Transactions of crates beside the lock, on connections of their own: a job that waits
//! for a row must not keep a lock from being renewed.

use std::future::Future;
use std::pin::Pin;
use std::time::Duration;

use super::Sql;
use super::connections::InUse;
use super::database::Database;
use super::errors::{Cause, Fault};
pub use super::session::{Dialect, Session};
pub use super::statements::{Kind, Statement, Value};
use super::transaction::{Retry, Store};
use crate::error::{Error, ErrorKind, Operation, Result};

type Boxed<'a, T> = Pin<Box<dyn Future<Output = T> + Send + 'a>>;

/// Work that is done in one transaction. It may be done again from the start, after the
/// transaction was rolled back.
pub trait Job: Sync {
    /// What the work results in.
    type Output: Send;

    /// Whether it changes anything. A job that does not is never `Unknown`.
    const WRITES: bool;

    /// Does the work.
    fn run(
        &self,
        session: &mut Session<'_>,
    ) -> impl Future<Output = sqlx::Result<Self::Output>> + Send;
}

/// A database, whichever it is.
pub(crate) trait SqlDatabase: Send + Sync {
    fn dialect(&self) -> Dialect;
    fn call_timeout(&self) -> Duration;
    fn begin(&self) -> Boxed<'_, Result<Box<dyn OpenTransaction + '_>, Fault>>;
    fn close_idle(&self);
}

/// A transaction that was begun.
pub(crate) trait OpenTransaction: Send {
    fn session(&mut self) -> Session<'_>;
    fn commit<'a>(self: Box<Self>) -> Boxed<'a, Result<(), Fault>>
    where
        Self: 'a;
    /// Ends it after this error.
    fn roll_back<'a>(self: Box<Self>, error: sqlx::Error) -> Boxed<'a, Fault>
    where
        Self: 'a;
}

struct Open<'a, D: Database> {
    store: &'a Store<D>,
    in_use: InUse<'a, D>,
}

impl<D: Database> SqlDatabase for Sql<D> {
    fn dialect(&self) -> Dialect {
        D::DIALECT
    }

    fn call_timeout(&self) -> Duration {
        self.store.call_timeout
    }

    fn begin(&self) -> Boxed<'_, Result<Box<dyn OpenTransaction + '_>, Fault>> {
        Box::pin(async move {
            self.ready().await?;
            D::listen(&self.store).await; // whether statements may have names
            let store = &*self.store;
            let mut in_use = store.extension_connections.take(&store.database).await?;
            if let Err(error) = store.database.begin(in_use.conn()).await {
                let fault = store.fault(error);
                if fault.cause == Cause::Conflict {
                    in_use.give_back();
                }
                return Err(fault);
            }
            let open: Box<dyn OpenTransaction + '_> = Box::new(Open { store, in_use });
            Ok(open)
        })
    }

    fn close_idle(&self) {
        self.store.extension_connections.close_idle();
    }
}

impl<D: Database> OpenTransaction for Open<'_, D> {
    fn session(&mut self) -> Session<'_> {
        self.store.database.session(self.in_use.conn())
    }

    fn commit<'a>(self: Box<Self>) -> Boxed<'a, Result<(), Fault>>
    where
        Self: 'a,
    {
        Box::pin(async move {
            let Open { store, in_use } = *self;
            store.commit(in_use, true).await
        })
    }

    fn roll_back<'a>(self: Box<Self>, error: sqlx::Error) -> Boxed<'a, Fault>
    where
        Self: 'a,
    {
        Box::pin(async move {
            let Open { store, in_use } = *self;
            store.roll_back(in_use, store.fault(error)).await
        })
    }
}

/// Does a job in a transaction of its own. Faults that pass are tried again for most of
/// the time that a call has, and so is a row that somebody else has locked.
pub(crate) async fn run<J: Job>(database: &dyn SqlDatabase, job: &J) -> Result<J::Output> {
    let mut retry = Retry::new(database.call_timeout());
    loop {
        let fault = match attempt(database, job).await {
            Ok(done) => return Ok(done),
            Err(fault) => fault,
        };
        let is_locked = fault.cause == Cause::Locked;
        let close_idle = || database.close_idle();
        retry
            .pause(fault, is_locked, close_idle)
            .await
            .map_err(|fault| fault.error.with_operation(Operation::Inventory))?;
    }
}

async fn attempt<J: Job>(database: &dyn SqlDatabase, job: &J) -> Result<J::Output, Fault> {
    let limit = database.call_timeout();
    let work = async {
        let mut open = database.begin().await?;
        let done = job.run(&mut open.session()).await;
        match done {
            Ok(done) => Ok((open, done)),
            Err(error) => Err(open.roll_back(error).await),
        }
    };
    let worked = tokio::time::timeout(limit, work).await;
    let (open, done) = worked.unwrap_or_else(|_| {
        let what = format!("no answer within {limit:?}; nothing was changed");
        Err(Fault::of(Error::new(ErrorKind::Unavailable, Operation::Inventory).with_message(what)))
    })?;
    match tokio::time::timeout(limit, open.commit()).await {
        Ok(Ok(())) => Ok(done),
        Ok(Err(_)) | Err(_) if !J::WRITES => Ok(done),
        Ok(Err(fault)) => Err(fault),
        Err(_) => {
            let what = format!("the commit was not confirmed within {limit:?}");
            Err(Fault::of(Error::new(ErrorKind::Unknown, Operation::Inventory).with_message(what)))
        }
    }
}

/// The error for a failed statement in a transaction of the caller.
pub fn failed_in_transaction(dialect: Dialect, error: sqlx::Error) -> Error {
    let fault = Fault::before_commit(dialect.cause(&error), error, "this connection");
    fault.error.with_operation(Operation::Inventory)
}
