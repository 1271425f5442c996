//! What operators see: who has a lock, which locks there are, which servers.

use std::time::Duration;

use hyper::Method;

use super::Shared;
use super::layout::escaped;
use super::semaphore::{Semaphore, by_owner};
use super::wire::{Entry, LOCK_FLAGS, LockValue, SEMAPHORE_FLAGS};
use crate::backend::{HolderState, KeyState, Page, ServerRole, ServerState};
use crate::claim::Mode;
use crate::clock::Moment;
use crate::error::{Error, ErrorKind, Operation, Result};
use crate::key::Key;

impl Shared {
    /// Who has the lock of a key. Consul does not know who waits.
    pub(super) async fn inspect(&self, key: &Key) -> Result<KeyState> {
        let path = self.layout.path(key)?;
        let mut state = KeyState::default();
        let entry = self.read(Operation::Inspect, &path).await?;
        let entry = entry.filter(|entry| entry.flags == LOCK_FLAGS);
        if let Some(entry) = &entry
            && let Some(session) = entry.holder()
        {
            let value = entry.value::<LockValue>();
            let held_for = value.as_ref().map_or(Duration::ZERO, LockValue::held_for);
            let expires_in = self.expires_in(session).await?;
            if let Some(holder) = self.holder_of(value, session).await {
                state.holders.push(HolderState {
                    holder,
                    mode: Mode::Exclusive,
                    token: super::locks::first_token(entry.modify_index),
                    held_for,
                    expires_in,
                    is_over: false,
                });
            }
        }
        if self.layout.has_permits() {
            state.holders.extend(self.holders_of_permits(key).await?);
        }
        state.broken_by = self.broken_by(&path).await;
        Ok(state)
    }

    /// Who has permits of the semaphore of a key.
    async fn holders_of_permits(&self, key: &Key) -> Result<Vec<HolderState>> {
        let prefix = self.layout.permits(key)?;
        let semaphore = self.semaphore_if_any(Operation::Inspect, &prefix).await?;
        let of = semaphore.limit.unwrap_or_default();
        let mut holders = Vec::new();
        for (entry, count) in by_owner(semaphore.permits()) {
            let Some(session) = entry.holder() else { continue };
            let value = entry.value::<LockValue>();
            let held_for = value.as_ref().map_or(Duration::ZERO, LockValue::held_for);
            let expires_in = self.expires_in(session).await?;
            if let Some(holder) = self.holder_of(value, session).await {
                let mode = Mode::Permits { count, of };
                let (token, is_over) = (None, false);
                holders.push(HolderState { holder, mode, token, held_for, expires_in, is_over });
            }
        }
        Ok(holders)
    }

    /// How long a session is certain to live: for that of somebody else, its TTL.
    async fn expires_in(&self, session: &str) -> Result<Duration> {
        if let Some(current) = self.current.get().filter(|current| current.id == session) {
            let term = current.term(self.ttl);
            return Ok((term.as_of + term.term).since(Moment::now()));
        }
        let info = self.session_info(session).await?;
        let ttl = info.and_then(|info| humantime::parse_duration(&info.ttl).ok());
        Ok(ttl.unwrap_or_default())
    }

    /// The locks that are held and whose keys start with `prefix`.
    pub(super) async fn list(&self, prefix: &str) -> Result<Page> {
        let path = format!("/v1/kv/{}?recurse&", escaped(&self.layout.prefix(prefix)));
        let found = self.json_or_absent(Operation::List, Method::GET, &path).await?;
        let found: Vec<Entry> = found.unwrap_or_default();
        let held = found.iter().filter(|it| it.flags == LOCK_FLAGS && it.holder().is_some());
        let mut keys: Vec<Key> = held.filter_map(|entry| self.layout.key(&entry.key)).collect();
        if self.layout.has_permits() {
            let values = found.iter().filter(|it| it.flags == SEMAPHORE_FLAGS);
            let prefixes = values.filter_map(|it| it.key.strip_suffix(".lock"));
            let is_held = |prefix: &&str| {
                Semaphore::read(prefix, &found)
                    .is_ok_and(|semaphore| semaphore.permits().next().is_some())
            };
            keys.extend(prefixes.filter(is_held).filter_map(|prefix| self.layout.key(prefix)));
        }
        keys.sort();
        keys.dedup();
        Ok(Page { keys, next: None })
    }

    /// The servers of the cluster; the first of them leads.
    pub(super) async fn servers(&self) -> Result<Vec<ServerState>> {
        let leader: String =
            self.json(Operation::Connect, Method::GET, "/v1/status/leader?", Vec::new()).await?;
        if leader.is_empty() {
            return Err(Error::new(ErrorKind::Unavailable, Operation::Connect)
                .with_message("the cluster of Consul has no leader at the moment"));
        }
        let peers: Vec<String> =
            self.json(Operation::Connect, Method::GET, "/v1/status/peers?", Vec::new()).await?;
        let state = |address: &String, role| ServerState {
            address: address.clone(),
            role,
            behind: None,
            note: None,
        };
        let others = peers.iter().filter(|peer| **peer != leader);
        let others = others.map(|peer| state(peer, ServerRole::Replica));
        Ok(std::iter::once(state(&leader, ServerRole::Primary)).chain(others).collect())
    }
}
