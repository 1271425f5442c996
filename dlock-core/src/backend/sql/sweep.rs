//! The sweep removes rows that nobody has used for a while, so that keys that come only
//! once do not fill the table.
//!
//! It walks through the table in the order of the ids, some rows at a time, each step in a
//! transaction of its own, which also raises the floor of the tokens. A row that somebody
//! has locked is left alone. One client sweeps for all, about once a minute, while it is in
//! use. It also removes rows of `lock_in` where there are many: they have no time of their last
//! use, so any that nobody has locked.

use std::sync::Arc;
use std::time::Duration;

use parking_lot::Mutex;
use rand::RngExt as _;
use tokio::time::Instant;

use super::database::{Database, IdleRow};
use super::errors::Fault;
use super::transaction::{Store, signed};

/// How often one client sweeps.
const EVERY: Duration = Duration::from_secs(60);
/// How long a row is kept after its last use.
pub(super) const KEPT: Duration = Duration::from_secs(60);
/// How many rows one step looks at.
const ROWS: i64 = 500;
/// From how many rows of `lock_in` on some are removed: those of few keys are kept for ever.
const ROW_LOCKS_KEPT: i64 = 10_000;
/// How many of them one step removes. It has them locked for about a millisecond, in which
/// `try_lock_in` finds them taken.
const ROW_LOCKS: i64 = 50;
/// How many steps are made before it is counted again whether there are still too many.
const ROW_LOCK_STEPS: usize = 40;
/// The pause between two steps.
const PAUSE: Duration = Duration::from_millis(20);

/// When this client looks next whether it is to sweep.
#[derive(Default)]
pub(super) struct Schedule(Mutex<Option<Instant>>);

impl Schedule {
    fn is_due(&self) -> bool {
        let mut next = self.0.lock();
        let now = Instant::now();
        let due = next.is_some_and(|next| now >= next);
        if due || next.is_none() {
            *next = Some(now + EVERY.mul_f64(rand::rng().random_range(0.5..1.5)));
        }
        due
    }
}

impl<D: Database> Store<D> {
    /// Sweeps in the background, if it is time.
    pub(super) fn sweep_if_due(self: &Arc<Self>) {
        if self.sweeper.is_due() {
            let store = self.clone();
            tokio::spawn(async move {
                // What fails here fails for the calls as well, which tell of it.
                let _ = store.sweep(EVERY, KEPT).await;
            });
        }
    }

    /// Removes the rows that were not used for this long, unless somebody has swept
    /// since `every`. Answers how many rows were removed.
    pub(super) async fn sweep(&self, every: Duration, kept: Duration) -> Result<usize, Fault> {
        let claimed = self.in_time(self.claim_sweep(every)).await?;
        let (mut removed, mut from) = (0, Some(String::new()));
        while let Some(id) = from.filter(|_| claimed) {
            let (some, next) = self.in_time(self.sweep_from(&id, kept)).await?;
            removed += some;
            from = next;
            tokio::time::sleep(PAUSE).await;
        }
        if claimed {
            // A user that may not delete them leaves these rows.
            let _ = self.sweep_row_locks().await;
        }
        Ok(removed)
    }

    /// Removes rows of `lock_in` while there are many.
    async fn sweep_row_locks(&self) -> Result<(), Fault> {
        while self.in_time(self.has_many_row_locks()).await? {
            for _ in 0..ROW_LOCK_STEPS {
                if self.in_time(self.remove_row_locks()).await? == 0 {
                    return Ok(());
                }
                tokio::time::sleep(PAUSE).await;
            }
        }
        Ok(())
    }

    async fn has_many_row_locks(&self) -> Result<bool, Fault> {
        let mut in_use = self.connections.take(&self.database).await?;
        let (database, conn) = (&self.database, in_use.conn());
        let look = async {
            database.begin_read(conn).await?;
            let has_many = database.has_more_row_locks(conn, ROW_LOCKS_KEPT).await?;
            database.end_read(conn).await?;
            Ok(has_many)
        };
        let has_many = look.await.map_err(|error| self.fault(error))?;
        in_use.give_back();
        Ok(has_many)
    }

    async fn remove_row_locks(&self) -> Result<usize, Fault> {
        let mut in_use = self.connections.take(&self.database).await?;
        let (database, conn) = (&self.database, in_use.conn());
        let step = async {
            database.begin(conn).await?;
            let removed = database.remove_row_locks(conn, ROW_LOCKS).await?;
            database.commit_soon(conn).await?;
            Ok(removed)
        };
        let removed = step.await.map_err(|error| self.fault(error))?;
        in_use.give_back();
        Ok(removed)
    }

    /// Whether this client is the one to sweep.
    async fn claim_sweep(&self, every: Duration) -> Result<bool, Fault> {
        let mut in_use = self.connections.take(&self.database).await?;
        let (database, conn) = (&self.database, in_use.conn());
        let claimed = async {
            database.begin(conn).await?;
            let now_us = database.meta(conn).await?.time.now_us;
            let since = now_us.saturating_sub(micros(every));
            let claimed = database.claim_sweep(conn, signed(now_us), signed(since)).await?;
            database.commit(conn).await?;
            Ok(claimed)
        };
        let claimed = claimed.await.map_err(|error| self.fault(error))?;
        in_use.give_back();
        Ok(claimed)
    }

    /// One step: how many rows were removed, and where to go on.
    async fn sweep_from(&self, id: &str, kept: Duration) -> Result<(usize, Option<String>), Fault> {
        let mut in_use = self.connections.take(&self.database).await?;
        let (database, conn) = (&self.database, in_use.conn());
        let step = async {
            database.begin(conn).await?;
            let rows = database.rows_from(conn, id, ROWS).await?;
            let now_us = database.meta(conn).await?.time.now_us;
            let before = signed(now_us.saturating_sub(micros(kept)));
            let is_idle = |row: &IdleRow| row.keep_us < before;
            let next = match i64::try_from(rows.len()) {
                Ok(count) if count == ROWS => rows.last().map(|row| format!("{}\u{1}", row.id)),
                _ => None,
            };
            let mut ids: Vec<String> = rows.into_iter().filter(is_idle).map(|row| row.id).collect();
            if !ids.is_empty() {
                let mut locked = database.lock_idle(conn, &ids).await?;
                locked.retain(is_idle);
                ids = locked.iter().map(|row| row.id.clone()).collect();
                if let Some(floor) = locked.iter().map(|row| row.token).max() {
                    database.remove(conn, &ids, floor).await?;
                }
            }
            database.commit(conn).await?;
            Ok((ids.len(), next))
        };
        let done = step.await.map_err(|error| self.fault(error))?;
        in_use.give_back();
        Ok(done)
    }
}

fn micros(duration: Duration) -> u64 {
    u64::try_from(duration.as_micros()).unwrap_or(u64::MAX)
}
