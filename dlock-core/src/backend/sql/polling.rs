//! Looking, where no messages come: on MariaDB and SQLite, and on PostgreSQL behind a
//! pooler of transactions.
//!
//! While claims of this client wait or are held, one task reads: a counter of broken
//! locks, and the rows of all keys that are waited for, in one statement and without
//! locking them. It looks quickly while these rows change, and more and more rarely while
//! they do not.

use std::collections::{BTreeMap, HashMap};
use std::sync::{Arc, Weak};
use std::time::Duration;

use parking_lot::Mutex;
use rand::RngExt as _;
use tokio::sync::Notify;

use super::database::{Database, LockRow, Meta};
use super::errors::Fault;
use super::names::LockId;
use super::transaction::{Store, load};
use crate::claim::{Answer, LossReason, Notice, Owner, RenewOutcome, Request};

/// The pause before the first look, and after one that saw a change.
const FIRST: Duration = Duration::from_millis(5);
/// The longest pause between two looks. A holder must hear of a break within
/// `break_delay`, which is 500 ms.
const LONGEST: Duration = Duration::from_millis(250);
/// How many rows one look reads.
const ROWS: usize = 500;

/// The claims of this client that wait or are held.
#[derive(Default)]
pub(super) struct Tracker {
    state: Mutex<State>,
    /// A claim has begun to wait.
    waits: Notify,
}

#[derive(Default)]
struct State {
    claims: HashMap<Owner, Tracked>,
    /// Whether a task looks.
    looking: bool,
}

struct Tracked {
    lock: LockId,
    waits: bool,
}

impl Tracker {
    /// What calls and their answers say about claims.
    pub(super) fn answered(&self, lock: &LockId, request: &Request, answer: &Answer) {
        let owner = request.claim().owner;
        let mut state = self.state.lock();
        match answer {
            Answer::Acquire(Ok(outcome)) => {
                if let Some(old) = request.claim().instead_of {
                    state.claims.remove(&old);
                }
                let waits = outcome.is_queued();
                if !waits && outcome.grant().is_none() {
                    return;
                }
                let before = state.claims.insert(owner, Tracked { lock: lock.clone(), waits });
                if waits && before.is_none() {
                    self.waits.notify_one();
                }
            }
            Answer::Renew(Ok(RenewOutcome::Lost)) | Answer::Release(_) => {
                state.claims.remove(&owner);
            }
            Answer::Acquire(Err(_)) | Answer::Renew(_) => {}
        }
    }

    /// What a notice says about a claim.
    pub(super) fn noticed(&self, owner: Owner, notice: &Notice) {
        let mut state = self.state.lock();
        match notice {
            Notice::Granted { .. } => {
                if let Some(tracked) = state.claims.get_mut(&owner) {
                    tracked.waits = false;
                }
            }
            Notice::Lost(_) => {
                state.claims.remove(&owner);
            }
            Notice::TryAgain => {}
        }
    }

    /// Whether no claim waits or is held.
    #[cfg_attr(not(feature = "postgres"), allow(dead_code, reason = "for those who listen"))]
    pub(super) fn is_empty(&self) -> bool {
        self.state.lock().claims.is_empty()
    }

    /// Whether a task must be started to look.
    fn start(&self) -> bool {
        let mut state = self.state.lock();
        !state.claims.is_empty() && !std::mem::replace(&mut state.looking, true)
    }

    /// Whether the task that looks may end, and has ended.
    fn end(&self, anyway: bool) -> bool {
        let mut state = self.state.lock();
        if anyway || state.claims.is_empty() {
            state.looking = false;
        }
        !state.looking
    }

    fn claims(&self, waits: bool) -> BTreeMap<LockId, Vec<Owner>> {
        let mut locks: BTreeMap<LockId, Vec<Owner>> = BTreeMap::new();
        for (owner, tracked) in &self.state.lock().claims {
            if tracked.waits == waits {
                locks.entry(tracked.lock.clone()).or_default().push(*owner);
            }
        }
        locks
    }
}

impl<D: Database> Store<D> {
    /// Looks from now on, if no messages come and there is something to look for.
    pub(super) fn look_if_needed(self: &Arc<Self>) {
        let messages_arrive = self.database.messages().is_some_and(|it| it.arrive());
        if !messages_arrive && self.tracker.start() {
            tokio::spawn(look(Ending(self.clone())));
        }
    }

    async fn read(&self, locks: &[LockId]) -> Result<(Meta, Vec<LockRow>), Fault> {
        let mut in_use = self.connections.take(&self.database).await?;
        let (database, conn) = (&self.database, in_use.conn());
        let ids: Vec<String> = locks.iter().map(|lock| lock.id.clone()).collect();
        let read = async {
            database.begin_read(conn).await?;
            // The counter first: rows are then at least as new.
            let meta = database.meta(conn).await?;
            let rows = match ids.is_empty() {
                true => Vec::new(),
                false => database.rows(conn, &ids, None).await?.rows,
            };
            database.end_read(conn).await?;
            Ok((meta, rows))
        };
        let read = read.await.map_err(|error| self.fault(error))?;
        in_use.give_back();
        Ok(read)
    }

    /// The rows of these locks, in a table.
    pub(super) async fn table_of(
        &self,
        locks: &[LockId],
    ) -> Result<(Meta, crate::backend::memory::lock_table::LockTable), Fault> {
        let (meta, rows) = self.read(locks).await?;
        let mut table = meta.time.table();
        for row in &rows {
            if let Some(lock) = locks.iter().find(|lock| lock.id == row.id) {
                load(&mut table, lock, row, meta.time)?;
            }
        }
        Ok((meta, table))
    }

    /// Tells waiting claims to ask again whose turn it may be. Whether a row has changed.
    async fn look_at_waiting(&self, seen: &mut Seen) -> Result<bool, Fault> {
        let waiting = self.tracker.claims(true);
        let mut changed = false;
        let mut versions = HashMap::new();
        let locks: Vec<&LockId> = waiting.keys().collect();
        let mut chunks = locks.chunks(ROWS);
        let mut chunk = chunks.next().unwrap_or_default();
        loop {
            let some: Vec<LockId> = chunk.iter().map(|&lock| lock.clone()).collect();
            let (meta, rows) = self.read(&some).await?;
            seen.breaks = Some(meta.breaks);
            let rows: HashMap<&str, &LockRow> = rows.iter().map(|row| (&*row.id, row)).collect();
            for lock in &some {
                let row = rows.get(lock.id.as_str());
                let version = row.map_or(0, |row| row.version);
                changed |= seen.versions.get(&lock.id) != Some(&version);
                versions.insert(lock.id.clone(), version);
                let mut table = meta.time.table();
                if let Some(row) = row {
                    load(&mut table, lock, row, meta.time)?;
                }
                let free = table.has_no_holder(meta.time.now(), &lock.key, lock.permits);
                for owner in &waiting[lock] {
                    if free || table.is_held_by(&lock.key, lock.permits, *owner) {
                        self.notice(&lock.key, *owner, Notice::TryAgain);
                    }
                }
            }
            match chunks.next() {
                Some(next) => chunk = next,
                None => break,
            }
        }
        seen.versions = versions;
        Ok(changed)
    }

    /// Tells the claims whose lock was broken.
    async fn look_at_held(&self) -> Result<(), Fault> {
        let held = self.tracker.claims(false);
        let locks: Vec<&LockId> = held.keys().collect();
        for chunk in locks.chunks(ROWS) {
            let some: Vec<LockId> = chunk.iter().map(|&lock| lock.clone()).collect();
            let (meta, rows) = self.read(&some).await?;
            for row in &rows {
                let Some(lock) = some.iter().find(|lock| lock.id == row.id) else { continue };
                let mut table = meta.time.table();
                load(&mut table, lock, row, meta.time)?;
                let by = row.broken_by.clone().unwrap_or_default();
                for owner in &held[lock] {
                    if !by.is_empty() && !table.is_held_by(&lock.key, lock.permits, *owner) {
                        let reason = LossReason::Broken { by: by.clone() };
                        self.notice(&lock.key, *owner, Notice::Lost(reason));
                    }
                }
            }
        }
        Ok(())
    }
}

/// What the last look saw.
#[derive(Default)]
struct Seen {
    versions: HashMap<String, i64>,
    breaks: Option<i64>,
}

/// Says that nobody looks any more, also when the task panics or its runtime ends.
struct Ending<D: Database>(Arc<Store<D>>);

impl<D: Database> Drop for Ending<D> {
    fn drop(&mut self) {
        self.0.tracker.end(true);
    }
}

async fn look<D: Database>(running: Ending<D>) {
    let store = &running.0;
    let mut pause = FIRST;
    let (mut seen, mut breaks) = (Seen::default(), None);
    loop {
        let jittered = pause.mul_f64(rand::rng().random_range(0.75..1.0));
        if tokio::time::timeout(jittered, store.tracker.waits.notified()).await.is_ok() {
            pause = FIRST;
            continue;
        }
        let heard = store.listener.get().is_some_and(|it| Weak::strong_count(it) > 0);
        let messages_arrive = store.database.messages().is_some_and(|it| it.arrive());
        if store.tracker.end(!heard || messages_arrive) {
            return;
        }
        let looked = async {
            let changed = store.look_at_waiting(&mut seen).await?;
            if seen.breaks != breaks {
                store.look_at_held().await?;
                breaks = seen.breaks;
            }
            Ok::<_, Fault>(changed)
        };
        pause = match store.in_time(looked).await {
            Ok(true) => FIRST,
            Ok(false) => (pause * 3 / 2).min(LONGEST),
            Err(_) => LONGEST, // the calls tell of it
        };
    }
}
