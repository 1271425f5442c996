//! Pure: what operators ask of the table: who holds what, and taking it away.

use std::time::Duration;

use super::{BREAKS_KEPT, Held, LockTable, PAGE, Parked, SentNotice};
use crate::backend::{Break, Cursor, HolderState, KeyState, Page, WaiterState};
use crate::claim::{LossReason, Notice};
use crate::clock::Moment;
use crate::key::Key;
use crate::planted_bug::Bug;

impl LockTable {
    /// See [`Backend::break_lock`](crate::Backend::break_lock).
    pub fn break_lock(
        &mut self,
        now: Moment,
        key: &Key,
        how: &Break,
        out: &mut Vec<SentNotice>,
    ) -> usize {
        let minting = self.minting(now);
        let Break { by, target, delay } = how;
        let planted = self.planted.is(Bug::BreakWithoutDelay);
        let delay = if planted { Duration::ZERO } else { *delay };
        let space = if target.is_permits() { &mut self.semaphores } else { &mut self.locks };
        let Some(lock) = space.get_mut(key) else { return 0 };
        lock.expire(now);
        let is_meant = |held: &Held| target.includes(Some(held.grant.first));
        let count = lock.holders.iter().filter(|held| is_meant(held)).count();
        // Nobody holds what was released. What was broken stays as it is: a second break
        // must not cut the delay of the first one short.
        lock.holders.retain(|held| !is_meant(held) || held.parked != Some(Parked::Released));
        for held in lock.holders.iter_mut().filter(|held| is_meant(held)) {
            if held.parked.is_none() {
                out.push(SentNotice {
                    client: held.holder.client,
                    key: key.clone(),
                    owner: held.owner,
                    notice: Notice::Lost(LossReason::Broken { by: by.to_string() }),
                });
            }
            held.parked = Some(Parked::Broken);
            held.expires = held.expires.min(now + delay);
        }
        lock.holders.retain(|held| held.expires > now);
        lock.count_soonest();
        lock.settle(minting, key, out);
        if count > 0 {
            self.broken.retain(|(broken, _)| broken != key);
            self.broken.push_back((key.clone(), by.to_string()));
            if self.broken.len() > BREAKS_KEPT {
                self.broken.pop_front();
            }
        }
        count
    }

    /// See [`Backend::inspect`](crate::Backend::inspect).
    pub fn inspect(&self, now: Moment, key: &Key) -> KeyState {
        let mut state = KeyState::default();
        for lock in [&self.locks, &self.semaphores].iter().filter_map(|space| space.get(key)) {
            state.holders.extend(lock.holders.iter().filter(|held| held.expires > now).map(
                |held| HolderState {
                    holder: held.holder.clone(),
                    mode: held.mode,
                    token: (!held.mode.is_permits()).then_some(held.grant.first),
                    held_for: now.since(held.since),
                    expires_in: held.expires.since(now),
                    is_over: held.parked.is_some(),
                },
            ));
            state.waiters.extend(lock.waiters.iter().filter(|waiter| waiter.is_alive(now)).map(
                |waiter| WaiterState {
                    holder: waiter.holder.clone(),
                    mode: waiter.mode,
                    waiting_for: now.since(waiter.since),
                },
            ));
        }
        state.broken_by =
            self.broken.iter().find(|(broken, _)| broken == key).map(|(_, by)| by.clone());
        state
    }

    /// See [`Backend::list`](crate::Backend::list).
    pub fn list(&self, now: Moment, prefix: &str, cursor: &Cursor) -> Page {
        let mut keys: Vec<&Key> = [&self.locks, &self.semaphores]
            .into_iter()
            .flatten()
            .filter(|(key, lock)| {
                let text = key.as_str();
                text.starts_with(prefix) && text > cursor.0.as_str() && lock.in_use(now)
            })
            .map(|(key, _)| key)
            .collect();
        keys.sort_unstable();
        keys.dedup();
        let next = (keys.len() > PAGE).then(|| Cursor(keys[PAGE - 1].as_str().to_owned()));
        keys.truncate(PAGE);
        Page { keys: keys.into_iter().cloned().collect(), next }
    }

    /// The number of keys with a live holder or waiter.
    pub fn in_use(&self, now: Moment) -> usize {
        self.locks.values().chain(self.semaphores.values()).filter(|lock| lock.in_use(now)).count()
    }

    /// The number of keys that are kept, in use or not.
    pub fn keys(&self) -> usize {
        self.locks.len() + self.semaphores.len()
    }

    /// Whether this key could be taken exclusively right now.
    pub fn is_free(&self, now: Moment, key: &Key) -> bool {
        self.locks.get(key).is_none_or(|lock| lock.holders.iter().all(|held| held.expires <= now))
    }
}
