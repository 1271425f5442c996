//! Breaking a lock, and hearing that one's own was broken.
//!
//! The operator's client takes the key out of the holder's hands by a session whose
//! lock-delay is the break delay, and ends that session: Consul itself keeps everybody from
//! the key for that time. In the same transaction it leaves a message that lives by the
//! holder's session. Who broke the lock is kept in a key that lives by a session of the
//! operator, which is not renewed.
//!
//! `consul lock` needs no message: it watches its key.

use std::sync::{Arc, Weak};
use std::time::Duration;

use rand::RngExt as _;

use super::calls::remove;
use super::layout::{broken, escaped, notices};
use super::locks::first_token;
use super::session::{BlockingQuery, PAUSE, Session};
use super::wire::{BreakNotice, Entry, LOCK_FLAGS, LockValue, Operation as Op};
use super::{LOCK_DELAY_MAX, Shared};
use crate::backend::{Break, BreakTarget};
use crate::claim::{Holder, LossReason, Notice};
use crate::error::{Error, ErrorKind, Operation, Result};
use crate::key::Key;

/// How often a key that changes all the time is looked at.
const ATTEMPTS: usize = 8;

impl Shared {
    /// Takes a lock, or permits, from whoever has it and is meant. Answers how many had it.
    pub(super) async fn break_lock(self: &Arc<Self>, key: &Key, how: &Break) -> Result<usize> {
        let Break { by, target, delay } = how;
        let delay = (*delay).min(LOCK_DELAY_MAX);
        match target {
            BreakTarget::Permits if !self.layout.has_permits() => Ok(0),
            BreakTarget::Permits => self.break_permits(key, by, delay).await,
            _ => self.break_mutex(key, by, *target, delay).await,
        }
    }

    async fn break_mutex(
        &self,
        key: &Key,
        by: &Holder,
        target: BreakTarget,
        delay: Duration,
    ) -> Result<usize> {
        let path = self.layout.path(key)?;
        let entry = self.read(Operation::Break, &path).await?;
        if !entry.is_some_and(|entry| is_meant(&entry, target)) {
            return Ok(0);
        }
        let name = format!("dlock break: {by}");
        let taking = self.make_session(&name, self.ttl, delay).await?;
        let record = self.make_session(&name, self.ttl, Duration::ZERO).await?;
        let taken = self.take_from_holder(&path, by, target, [&taking, &record]).await;
        // Its end starts the delay; should this fail, its time ends it.
        let ended = self.destroy_session(&taking).await;
        match taken {
            Ok(true) => ended.map(|()| 1),
            Ok(false) => self.destroy_session(&record).await.map(|()| 0),
            Err(error) => Err(error),
        }
    }

    async fn take_from_holder(
        &self,
        path: &str,
        by: &Holder,
        target: BreakTarget,
        [taking, record]: [&str; 2],
    ) -> Result<bool> {
        for _ in 0..ATTEMPTS {
            let entry = self.read(Operation::Break, path).await?;
            // The transaction below fails if the entry has changed since then.
            let entry = entry.filter(|entry| is_meant(entry, target));
            let Some(entry) = entry else { return Ok(false) };
            let notice = BreakNotice::new(path, by, entry.value());
            let notice = serde_json::to_string(&notice).unwrap_or_default();
            let mut operations = remove(path, entry.modify_index);
            operations.push(Op::lock(path, taking, &notice, LOCK_FLAGS));
            operations.push(Op::lock(&broken(path), record, &notice, 0));
            operations.extend(notice_of_break(path, by, &entry));
            match self.transact(Operation::Break, &operations).await? {
                Ok(_) => return Ok(true),
                Err(errors) if errors.iter().any(|error| error.is_denied()) => {
                    return Err(super::errors::denied(Operation::Break, &self.http.address()));
                }
                // Somebody else broke it before, and that is still recorded.
                Err(_) => {
                    let _ = self.transact(Operation::Break, &[Op::delete(&broken(path))]).await?;
                }
            }
        }
        Err(Error::new(ErrorKind::Unavailable, Operation::Break)
            .with_message("the key changes all the time; try again"))
    }

    /// Tells the client of dlock that has this key of a broken lock, if one has.
    pub(super) async fn send_break_notice(
        &self,
        path: &str,
        by: &Holder,
        entry: &Entry,
    ) -> Result<()> {
        if let Some(operation) = notice_of_break(path, by, entry) {
            let _ = self.transact(Operation::Break, &[operation]).await?;
        }
        Ok(())
    }

    /// Who broke the lock at this path last, if that is still known.
    pub(super) async fn broken_by(&self, path: &str) -> Option<String> {
        let entry = self.read(Operation::Inspect, &broken(path)).await.ok()??;
        entry.value::<BreakNotice>().map(|notice| notice.by)
    }

    /// A lock of this client was broken.
    fn on_break_notice(&self, notice: BreakNotice) {
        let owner = notice.owner();
        let (Some(owner), Some(key)) = (owner, self.layout.key(&notice.path)) else { return };
        let by = notice.by;
        self.locks.lock().released(owner);
        if let Some(listener) = self.listener() {
            listener.on_notice(&key, owner, Notice::Lost(LossReason::Broken { by }));
        }
    }
}

fn is_meant(entry: &Entry, target: BreakTarget) -> bool {
    let is_held = entry.flags == LOCK_FLAGS && entry.holder().is_some();
    is_held && target.includes(first_token(entry.modify_index))
}

/// A message to the client of dlock that has this key; it lives by the client's session.
fn notice_of_break(path: &str, by: &Holder, entry: &Entry) -> Option<Op> {
    let value = entry.value::<LockValue>()?;
    let session = value.session.clone().or_else(|| entry.holder().map(str::to_owned))?;
    let notice = BreakNotice::new(path, by, Some(value));
    let notice = serde_json::to_string(&notice).unwrap_or_default();
    let number: u64 = rand::rng().random();
    Some(Op::lock(&format!("{}{number:016x}", notices(&session)), &session, &notice, 0))
}

/// Waits for messages to the client that has this session.
pub(super) async fn await_notices(shared: Weak<Shared>, session: Arc<Session>) {
    let folder = notices(&session.id);
    let mut query = BlockingQuery::new(format!("/v1/kv/{}?recurse", escaped(&folder)));
    loop {
        let Some(shared) = shared.upgrade() else { return };
        match query.next(&shared).await {
            Ok(body) => {
                let found = serde_json::from_slice::<Vec<Entry>>(&body).unwrap_or_default();
                let read: Vec<_> = found.iter().map(|entry| Op::delete(&entry.key)).collect();
                for notice in found.iter().filter_map(Entry::value) {
                    shared.on_break_notice(notice);
                }
                for some in read.chunks(super::COMBINED) {
                    let _ = shared.transact(Operation::Inspect, some).await;
                }
            }
            Err(error) if error.kind() == ErrorKind::Denied => {
                tracing::warn!(
                    "the token may not read {folder}: a broken lock is noticed at its renewal only"
                );
                return;
            }
            Err(error) => {
                tracing::debug!(why = %error, "a query of messages failed");
                tokio::time::sleep(PAUSE).await;
            }
        }
    }
}
