//! One batch is one transaction: lock the rows in the order of their ids, load them into
//! an empty [`LockTable`], let it decide, write what has changed, commit.
//!
//! Invariants:
//! - *Rows of somebody else*: a transaction that has locked a row waits for no other one that
//!   is not of dlock: see `stuck.rs`.
//! - *Order*: every transaction locks its rows in the order of their ids, so two of them
//!   do not wait for each other. (Rows that are made at the same time can still collide;
//!   then one of the two is rolled back and tried again.)
//! - *Time*: the time is read in the transaction, so after the calls were sent. A time from
//!   before the rows were locked does no harm: it ends leases early, never late.
//! - *Tokens*: a row that is new starts above the floor, which is read after its absence
//!   was seen; the sweep raises the floor when it removes a row.
//! - *Messages*: other clients hear of a change with its commit, this one after it.

use std::collections::{BTreeMap, BTreeSet};
use std::future::Future;
use std::sync::{Arc, OnceLock, Weak};
use std::time::Duration;

use rand::RngExt as _;
use tokio::time::Instant;

use super::connections::{Connections, InUse, UseFor};
use super::database::{Conn, Database, LockRow, Messages, OnLocked, RowWrite, Rows, Time};
use super::errors::{Cause, Fault, Found};
use super::names::{LockId, Names};
use super::polling::Tracker;
use super::stuck::Stuck;
use super::{messages, sweep};
use crate::backend::Listener;
use crate::backend::memory::lock_table::row::UnloadedLock;
use crate::backend::memory::lock_table::{LockTable, SentNotice};
use crate::backend::per_holder::PerHolder;
use crate::claim::{Holder, LossReason, Notice};
use crate::clock::Moment;
use crate::error::{Error, ErrorKind, Operation, Result};

/// For how long it is remembered who broke a lock, in microseconds.
const BREAKS_KEPT_US: u64 = 3_600_000_000;
/// The first pause before a transaction is tried again; it doubles some times.
const FIRST_PAUSE: Duration = Duration::from_micros(200);
/// How often a broken connection is replaced within one call.
const RECONNECTS: u32 = 2;
/// How often a brief wait for a row fits into the time of a call. PostgreSQL gives up before.
const BRIEF_WAITS: u32 = 6;
/// The longest text for people in a row.
const MAX_TEXT: usize = 1_000;

/// What was decided about the locks of a transaction.
pub(super) struct Decision<T> {
    pub(super) value: T,
    /// Whether somebody relies on it from now on. What only frees a lock or a place in a
    /// queue may be lost when the server crashes: the lock is then free after its ttl, and a
    /// waiter asks again.
    pub(super) relied_upon: bool,
}

/// The code that decides about the locks of a transaction: with the ids of the rows that were
/// left out, since somebody else has locked them.
pub(super) trait Decide<T>:
    Fn(&mut LockTable, Moment, &BTreeSet<String>, &mut Vec<SentNotice>) -> Decision<T> + Sync
{
}

impl<T, F> Decide<T> for F where
    F: Fn(&mut LockTable, Moment, &BTreeSet<String>, &mut Vec<SentNotice>) -> Decision<T> + Sync
{
}

/// What the calls of one client share.
pub struct Store<D: Database> {
    pub(super) database: D,
    pub(super) connections: Connections<D>,
    pub(super) extension_connections: Connections<D>,
    pub(super) names: Names,
    /// The number of this client in the rows, where that of the process means nothing.
    pub(super) client: u64,
    pub(super) listener: OnceLock<Weak<dyn Listener>>,
    pub(super) tracker: Tracker,
    pub(super) sweeper: sweep::Schedule,
    pub(super) stuck: Stuck,
    pub(super) call_timeout: Duration,
    /// The holder of a claim with the number of the rows.
    holder: PerHolder<Arc<Holder>>,
}

impl<D: Database> Store<D> {
    pub(super) fn new(database: D, namespace: &str, call_timeout: Duration) -> Self {
        Store {
            database,
            connections: Connections::new(UseFor::Locks),
            extension_connections: Connections::new(UseFor::Jobs),
            names: Names::new(namespace),
            client: rand::random(),
            listener: OnceLock::new(),
            tracker: Tracker::default(),
            sweeper: sweep::Schedule::default(),
            stuck: Stuck::default(),
            call_timeout,
            holder: PerHolder::new(),
        }
    }

    /// A holder as it is written in rows.
    pub(super) fn holder(&self, holder: &Arc<Holder>) -> Arc<Holder> {
        let written = || Arc::new(Holder { client: self.client, ..(**holder).clone() });
        self.holder.get(holder, written)
    }

    /// Lets a table with these locks decide, and writes what has changed. Faults that
    /// pass are tried again for most of the time that a call has.
    pub(super) async fn transact<T: Send>(
        &self,
        locks: &[LockId],
        on_locked: OnLocked,
        decide: impl Decide<T>,
    ) -> Result<T, Fault> {
        let mut retry = Retry::new(self.call_timeout);
        loop {
            match self.attempt(locks, on_locked, &decide).await {
                Ok((value, sent)) => {
                    self.deliver(sent);
                    return Ok(value);
                }
                Err(fault) => {
                    retry.pause(fault, false, || self.connections.close_idle()).await?;
                }
            }
        }
    }

    async fn attempt<T: Send>(
        &self,
        locks: &[LockId],
        on_locked: OnLocked,
        decide: &impl Decide<T>,
    ) -> Result<(T, Vec<SentNotice>), Fault> {
        let mut in_use = self.connections.take(&self.database).await?;
        let conn = in_use.conn();
        if let Err(error) = self.database.begin(conn).await {
            let fault = self.fault(error);
            if fault.cause == Cause::Conflict {
                in_use.give_back(); // the file is busy, the connection is well
            }
            return Err(fault);
        }
        let (decision, sent) = match self.decide(conn, locks, on_locked, decide).await {
            Ok(decided) => decided,
            Err(fault) => return Err(self.roll_back(in_use, fault).await),
        };
        self.commit(in_use, decision.relied_upon || !sent.is_empty()).await?;
        Ok((decision.value, sent))
    }

    /// Ends a transaction after this fault.
    pub(super) async fn roll_back(&self, mut in_use: InUse<'_, D>, fault: Fault) -> Fault {
        if !fault.leaves_server() && self.database.roll_back(in_use.conn()).await.is_ok() {
            in_use.give_back();
        }
        fault
    }

    /// Commits a transaction. What nobody relies upon need not reach the disk.
    pub(super) async fn commit(
        &self,
        mut in_use: InUse<'_, D>,
        relied_upon: bool,
    ) -> Result<(), Fault> {
        let committed = match relied_upon {
            true => self.database.commit(in_use.conn()).await,
            false => self.database.commit_soon(in_use.conn()).await,
        };
        match committed {
            Ok(()) => {
                in_use.give_back();
                Ok(())
            }
            Err(error) => match self.database.cause(&error) {
                // The database says that it has not committed.
                cause @ (Cause::Conflict | Cause::Refused(_) | Cause::ReadOnly) => {
                    Err(Fault::before_commit(cause, error, self.database.address()))
                }
                _ => Err(Fault::in_commit(error)),
            },
        }
    }

    async fn decide<T: Send>(
        &self,
        conn: &mut Conn<D>,
        locks: &[LockId],
        on_locked: OnLocked,
        decide: &impl Decide<T>,
    ) -> Result<(Decision<T>, Vec<SentNotice>), Fault> {
        let ids: Vec<String> = locks.iter().map(|lock| lock.id.clone()).collect();
        let rows = self.database.rows(conn, &ids, Some(on_locked));
        let rows = match on_locked {
            // Where the server cannot give up so soon, the connection is given up.
            OnLocked::WaitBriefly => {
                let brief = self.call_timeout / BRIEF_WAITS;
                tokio::time::timeout(brief, rows).await.unwrap_or_else(|_| {
                    Err(Found::error(Cause::StillWaiting, "the row stayed locked"))
                })
            }
            _ => rows.await,
        };
        let Rows { rows, time } = rows.map_err(|error| self.fault(error))?;
        let mut skipped = BTreeSet::new();
        let (time, floor) = match time {
            Some(time) if rows.len() == locks.len() => (time, 0),
            _ => {
                if on_locked == OnLocked::Skip && D::LOCKS_ROWS {
                    let mut missing = ids;
                    missing.retain(|id| rows.iter().all(|row| row.id != *id));
                    let present = self.database.present(conn, &missing).await;
                    skipped = present.map_err(|error| self.fault(error))?;
                }
                let meta = self.database.meta(conn).await.map_err(|error| self.fault(error))?;
                (meta.time, meta.floor)
            }
        };
        let mut table = time.table();
        table.raise_floor(floor);
        let rows: BTreeMap<&str, &LockRow> =
            rows.iter().map(|row| (row.id.as_str(), row)).collect();
        for lock in locks {
            if let Some(row) = rows.get(lock.id.as_str()) {
                load(&mut table, lock, row, time)?;
            }
        }
        let mut sent = Vec::new();
        let decision = decide(&mut table, time.now(), &skipped, &mut sent);
        let mut writes = Vec::new();
        for lock in locks.iter().filter(|lock| !skipped.contains(&lock.id)) {
            let unloaded = table.unload(&lock.key, lock.permits);
            let row = rows.get(lock.id.as_str()).copied();
            writes.extend(row_write(lock, unloaded, row, time, floor));
        }
        self.write(conn, writes, &sent).await?;
        Ok((decision, sent))
    }

    /// Writes rows and what others are to hear of.
    async fn write(
        &self,
        conn: &mut Conn<D>,
        writes: Vec<RowWrite>,
        sent: &[SentNotice],
    ) -> Result<(), Fault> {
        let fault = |error| self.fault(error);
        if !writes.is_empty() && !self.database.write(conn, writes).await.map_err(fault)? {
            let error = Error::new(ErrorKind::Unavailable, Operation::Connect)
                .with_message("others made the same rows at the same time; nothing was changed");
            return Err(Fault { cause: Cause::Conflict, error });
        }
        let others: Vec<&SentNotice> =
            sent.iter().filter(|sent| sent.client != self.client).collect();
        let broken =
            |sent: &&SentNotice| matches!(sent.notice, Notice::Lost(LossReason::Broken { .. }));
        if others.iter().any(broken) {
            self.database.count_break(conn).await.map_err(fault)?;
        }
        if let Some(ways) = self.database.messages().filter(|ways| ways.are_taken())
            && !others.is_empty()
            && let Err(error) =
                self.database.send(conn, messages::write(&self.names, &others)).await
        {
            let fault = self.fault_of_message(ways, error);
            return Err(fault);
        }
        Ok(())
    }

    /// A message that the server refuses is left out of the next attempt: others ask again by
    /// themselves.
    fn fault_of_message(&self, ways: &dyn Messages, error: sqlx::Error) -> Fault {
        let cause = match self.database.cause(&error) {
            cause @ (Cause::Conflict | Cause::Disconnected | Cause::ReadOnly) => cause,
            _ => {
                ways.were_refused();
                Cause::Conflict
            }
        };
        Fault::before_commit(cause, error, self.database.address())
    }

    /// Tells this client what happened to its claims.
    fn deliver(&self, sent: Vec<SentNotice>) {
        let ours = sent.into_iter().filter(|sent| sent.client == self.client);
        for SentNotice { key, owner, notice, .. } in ours {
            self.notice(&key, owner, notice);
        }
    }

    pub(super) fn notice(&self, key: &crate::Key, owner: crate::claim::Owner, notice: Notice) {
        self.tracker.noticed(owner, &notice);
        if let Some(listener) = self.listener.get().and_then(Weak::upgrade) {
            listener.on_notice(key, owner, notice);
        }
    }

    /// What nobody waits for is given up after the time of a call, too: it would keep a
    /// connection that does not answer.
    pub(super) async fn in_time<T>(
        &self,
        work: impl Future<Output = Result<T, Fault>> + Send,
    ) -> Result<T, Fault> {
        tokio::time::timeout(self.call_timeout, work).await.unwrap_or_else(|_| {
            let late = sqlx::Error::Io(std::io::ErrorKind::TimedOut.into());
            Err(self.fault(late))
        })
    }

    pub(super) fn fault(&self, error: sqlx::Error) -> Fault {
        Fault::before_commit(self.database.cause(&error), error, self.database.address())
    }
}

/// Adds the lock of a row to a table.
pub(super) fn load(
    table: &mut LockTable,
    lock: &LockId,
    row: &LockRow,
    time: Time,
) -> Result<(), Fault> {
    let broken_us = u64::try_from(row.broken_us).unwrap_or(0);
    let broken_by = row.broken_by.as_deref().filter(|_| time.now_us < broken_us + BREAKS_KEPT_US);
    table
        .load(&lock.key, lock.permits, row.token, broken_by, &row.state)
        .map_err(|_| Fault::unknown_layout())
}

/// What is written of a lock; `None` if it is as it was.
fn row_write(
    lock: &LockId,
    unloaded: UnloadedLock,
    row: Option<&LockRow>,
    time: Time,
    floor: u64,
) -> Option<RowWrite> {
    let is_free = unloaded.holders == 0 && unloaded.waiters == 0;
    let is_same = match row {
        None => is_free && unloaded.last <= floor,
        Some(row) => {
            unloaded.state == row.state
                && unloaded.last == row.token
                && unloaded.broken_by.is_none() == row.broken_by.is_none()
        }
    };
    if is_same {
        return None;
    }
    let UnloadedLock { last, state, holders, waiters, holder, until, broken_by } = unloaded;
    let broken_by = broken_by.map(shortened);
    let broken_us = match (&broken_by, row) {
        (None, _) => 0,
        (Some(_), Some(row)) if row.broken_by == broken_by => row.broken_us,
        (Some(_), _) => signed(time.now_us),
    };
    let until_us = signed(until.as_nanos().div_ceil(1_000));
    let remembered = if broken_us > 0 { broken_us + signed(BREAKS_KEPT_US) } else { 0 };
    Some(RowWrite {
        id: lock.id.clone(),
        version: row.map_or(0, |row| row.version) + 1,
        token: signed(last),
        holders: i32::try_from(holders).unwrap_or(i32::MAX),
        waiters: i32::try_from(waiters).unwrap_or(i32::MAX),
        holder: holder.map(shortened),
        until_us,
        keep_us: until_us.max(signed(time.now_us)).max(remembered),
        broken_by,
        broken_us,
        state,
    })
}

pub(super) fn signed(number: u64) -> i64 {
    i64::try_from(number).unwrap_or(i64::MAX)
}

fn shortened(mut text: String) -> String {
    if text.len() > MAX_TEXT {
        let end = (0..=MAX_TEXT).rev().find(|end| text.is_char_boundary(*end)).unwrap_or(0);
        text.truncate(end);
    }
    text
}

/// How often, and for how long, a transaction is tried again.
pub(super) struct Retry {
    until: Instant,
    tries: u32,
    reconnects: u32,
}

impl Retry {
    pub(super) fn new(call_timeout: Duration) -> Self {
        Retry { until: Instant::now() + call_timeout * 3 / 4, tries: 0, reconnects: 0 }
    }

    /// Waits before the next attempt. The fault is the result if there is none: it will not
    /// pass (unless the caller knows better), or the time is over.
    pub(super) async fn pause(
        &mut self,
        fault: Fault,
        is_passing: bool,
        close_idle: impl FnOnce(),
    ) -> Result<(), Fault> {
        if fault.leaves_server() {
            close_idle();
            self.reconnects += 1;
        }
        let is_passing = is_passing || fault.is_passing();
        if !is_passing || self.reconnects > RECONNECTS || Instant::now() >= self.until {
            return Err(fault);
        }
        self.tries += 1;
        let pause = FIRST_PAUSE * (1 << self.tries.min(4));
        let spread = rand::rng().random_range(0.5..1.5);
        tokio::time::sleep(pause.mul_f64(spread)).await;
        Ok(())
    }
}
