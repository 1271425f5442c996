//! The sweep removes rows that nobody has used for a while, so that keys that come only
//! once do not fill the table.
//!
//! It walks through the table in the order of the ids, some rows at a time, each step in a
//! transaction of its own, which also raises the floor of the tokens. A row that somebody
//! has locked is left alone. One client sweeps for all, about once a minute, while it is in
//! use.

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
