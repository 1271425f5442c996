//! The connections of one client: few, its own, and closed after a call that was given
//! up.
//!
//! A connection is in use by one call at a time. When the call is done it gives the
//! connection back; when the call fails or its future is dropped, the connection is
//! closed, since an answer may still be on its way.

use std::time::Duration;

use parking_lot::Mutex;
use tokio::sync::{Notify, Semaphore, SemaphorePermit};

use super::database::{Conn, Database};
use super::errors::{Cause, Fault};

/// How long connecting may take.
const CONNECT_TIMEOUT: Duration = Duration::from_secs(5);

pub(super) struct Connections<D: Database> {
    idle: Mutex<Vec<Conn<D>>>,
    free: Semaphore,
    use_for: UseFor,
    /// A connection was closed after a call that failed or was given up.
    pub(super) lost: Notify,
}

/// What connections are used for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum UseFor {
    /// The calls of locks, which may be lost when the machine loses power.
    Locks,
    /// The jobs of crates beside the lock, which may not.
    Jobs,
}

impl<D: Database> Connections<D> {
    pub(super) fn new(use_for: UseFor) -> Self {
        let count = match use_for {
            UseFor::Locks => D::CONNECTIONS,
            UseFor::Jobs => D::JOB_CONNECTIONS,
        };
        let (idle, free) = (Mutex::default(), Semaphore::new(count));
        Connections { idle, free, use_for, lost: Notify::new() }
    }

    /// A connection, made if there is none.
    pub(super) async fn take(&self, database: &D) -> Result<InUse<'_, D>, Fault> {
        // The semaphore is never closed.
        let permit = self.free.acquire().await.ok();
        let idle = self.idle.lock().pop();
        let conn = match idle {
            Some(conn) => conn,
            None => connect(database, self.use_for).await?,
        };
        Ok(InUse { home: self, conn: Some(conn), _permit: permit })
    }

    /// Closes the connections that nobody uses: one of them was found broken.
    pub(super) fn close_idle(&self) {
        let idle = std::mem::take(&mut *self.idle.lock());
        drop(idle);
    }
}

/// Makes a connection.
pub(super) async fn connect<D: Database>(database: &D, use_for: UseFor) -> Result<Conn<D>, Fault> {
    let options = database.options().map_err(Fault::of)?;
    let connecting = async {
        let mut conn = database.connect(options).await?;
        database.set_up(&mut conn).await?;
        if use_for == UseFor::Jobs {
            database.set_up_for_jobs(&mut conn).await?;
        }
        Ok(conn)
    };
    let made = tokio::time::timeout(CONNECT_TIMEOUT, connecting).await;
    let made =
        made.unwrap_or_else(|_| Err(std::io::Error::from(std::io::ErrorKind::TimedOut).into()));
    made.map_err(|error: sqlx::Error| {
        let mut fault = Fault::before_commit(database.cause(&error), error, database.address());
        if fault.cause == Cause::Disconnected {
            fault.cause = Cause::Refused("no connection"); // another attempt at once is of no use
        }
        fault
    })
}

/// A connection that a call uses.
pub(super) struct InUse<'a, D: Database> {
    home: &'a Connections<D>,
    conn: Option<Conn<D>>,
    _permit: Option<SemaphorePermit<'a>>,
}

impl<D: Database> InUse<'_, D> {
    pub(super) fn conn(&mut self) -> &mut Conn<D> {
        self.conn.as_mut().expect("it is there until it is given back")
    }

    /// The call is done, and no answer is outstanding.
    pub(super) fn give_back(mut self) {
        if let Some(conn) = self.conn.take() {
            self.home.idle.lock().push(conn);
        }
    }
}

impl<D: Database> Drop for InUse<'_, D> {
    fn drop(&mut self) {
        if self.conn.is_some() {
            self.home.lost.notify_one();
        }
    }
}
