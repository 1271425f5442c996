//! What operators see and do. To look needs no session.

use std::collections::HashMap;
use std::collections::hash_map::Entry as MapEntry;
use std::time::Duration;

use etcd_client::{
    Compare, CompareOp, GetOptions, KeyValue, PutOptions, Txn, TxnOp, TxnOpResponse,
};

use super::Inner;
use super::connection::Connection;
use super::errors::CallError;
use super::layout::{Place, grant, holders, is_kept};
use super::record::{Broken, Record, holder_of};
use super::step::{delete, sorted};
use crate::backend::{
    Break, Cursor, HolderState, KeyState, Page, ServerRole, ServerState, WaiterState,
};
use crate::claim::Mode;
use crate::error::{Operation, Result};
use crate::key::Key;

/// The keys of one page of a listing.
const PAGE: i64 = 1_000;
/// For how long it is known who broke a lock, in seconds.
const REMEMBERED: i64 = 300;
/// How long `break_lock` waits for its own removal of the entries at most.
const MAX_WAIT: Duration = Duration::from_secs(1);
const PERMITS: Mode = Mode::Permits { count: 1, of: 1 };

/// An entry, and what is written there.
type Found = (Place, KeyValue);

/// The entries of a key, in their order.
struct Entries {
    locks: Vec<Found>,
    permits: Vec<Found>,
    broken_by: Option<String>,
}

impl Entries {
    /// Those who hold the key, and those who wait.
    fn split(self) -> (Vec<Found>, Vec<Found>, Option<String>) {
        let (mut held, mut waiting) = (Vec::new(), Vec::new());
        for mut entries in [self.locks, self.permits] {
            let places: Vec<Place> = entries.iter().map(|(place, _)| place.clone()).collect();
            let rest = entries.split_off(holders(&places));
            held.extend(entries);
            waiting.extend(rest);
        }
        (held, waiting, self.broken_by)
    }
}

impl Inner {
    async fn entries_of(
        &self,
        connection: &Connection,
        key: &Key,
        [locks, permits]: &[String; 2],
    ) -> Result<Entries, CallError> {
        let below = || Some(GetOptions::new().with_prefix());
        let looks = [
            TxnOp::get(locks.as_str(), below()),
            TxnOp::get(permits.as_str(), below()),
            TxnOp::get(self.root.broken(key), None),
        ];
        let answer = connection.call(connection.kv().txn(Txn::new().and_then(looks))).await?;
        let mut found = answer.op_responses().into_iter().map(|answer| match answer {
            TxnOpResponse::Get(mut look) => look.take_kvs(),
            _ => Vec::new(),
        });
        let mut next = || found.next().unwrap_or_default();
        let (of_locks, of_permits, broken) = (next(), next(), next());
        let broken = broken.first().and_then(|record| Broken::decode(record.value()));
        Ok(Entries {
            locks: sorted(locks, of_locks),
            permits: sorted(permits, of_permits),
            broken_by: broken.map(|broken| broken.by),
        })
    }

    fn prefixes(&self, key: &Key, operation: Operation) -> Result<[String; 2]> {
        let prefix =
            |mode| self.root.prefix(key, mode).map_err(|error| error.with_operation(operation));
        Ok([prefix(Mode::Exclusive)?, prefix(PERMITS)?])
    }

    pub(super) async fn state_of(&self, key: &Key) -> Result<KeyState> {
        let prefixes = self.prefixes(key, Operation::Inspect)?;
        let failed = |error: CallError| error.read(Operation::Inspect).with_key(key);
        let connection = self.sessions.connections.get().await.map_err(failed)?;
        let entries = self.entries_of(&connection, key, &prefixes).await.map_err(failed)?;
        let (held, waiting, broken_by) = entries.split();
        let mut left = HashMap::new();
        for (_, entry) in &held {
            if let MapEntry::Vacant(unknown) = left.entry(entry.lease()) {
                unknown.insert(time_left(&connection, entry.lease()).await);
            }
        }
        let mut state = KeyState { broken_by, ..KeyState::default() };
        for (place, entry) in held {
            state.holders.push(HolderState {
                holder: holder_of(entry.value(), entry.lease()),
                token: token_of(&place),
                mode: place.mode,
                held_for: age(&entry),
                expires_in: left.get(&entry.lease()).copied().unwrap_or_default(),
                is_over: is_kept(&place.entry, entry.lease()),
            });
        }
        for (place, entry) in waiting {
            let holder = holder_of(entry.value(), entry.lease());
            state.waiters.push(WaiterState { holder, mode: place.mode, waiting_for: age(&entry) });
        }
        Ok(state)
    }

    /// Some of the keys in use with this prefix.
    pub(super) async fn keys_with(&self, prefix: &str, cursor: Cursor) -> Result<Page> {
        let failed = |error: CallError| error.read(Operation::List);
        let connection = self.sessions.connections.get().await.map_err(failed)?;
        let begin = format!("{}{prefix}", self.root.as_str());
        let from = if cursor.0.is_empty() { begin.clone() } else { format!("{}\0", cursor.0) };
        let options = GetOptions::new().with_keys_only().with_limit(PAGE);
        let options = match after(&begin) {
            Some(end) if from.as_bytes() < end.as_slice() => options.with_range(end),
            Some(_) => return Ok(Page::default()),
            None if from.is_empty() => options.with_all_keys(),
            None => options.with_from_key(),
        };
        let found = connection.call(connection.kv().get(from, Some(options))).await;
        let found = found.map_err(failed)?;
        let key = |entry: &KeyValue| {
            let name = entry.key_str().ok()?;
            self.root.key_of(name, entry.lease())
        };
        let mut keys: Vec<Key> = found.kvs().iter().filter_map(key).collect();
        keys.retain(|key| key.as_str().starts_with(prefix));
        keys.dedup();
        let last = found.kvs().last().filter(|_| found.more());
        let next = last.and_then(|last| last.key_str().ok()).map(|key| Cursor(key.to_owned()));
        Ok(Page { keys, next })
    }

    /// Tells the holders that their lock is broken, and removes their entries later.
    pub(super) async fn break_holders(&self, key: &Key, how: &Break) -> Result<usize> {
        let Break { by, target, delay } = how.clone();
        let prefixes = self.prefixes(key, Operation::Break)?;
        let failed = |error: CallError| error.written(Operation::Break, key);
        let connection = self.sessions.connections.get().await.map_err(failed)?;
        let entries = self.entries_of(&connection, key, &prefixes).await.map_err(failed)?;
        let (mut held, ..) = entries.split();
        held.retain(|(place, _)| {
            target.is_permits() == place.mode.is_permits() && target.includes(token_of(place))
        });
        if held.is_empty() {
            return Ok(0);
        }
        let delay_ms = u64::try_from(delay.as_millis()).unwrap_or(u64::MAX);
        let broken = |entry: &str, revision| Broken {
            by: by.to_string(),
            entry: entry.to_owned(),
            revision,
            delay_ms,
        };
        let mut deletes = Vec::new();
        let mut told = Vec::new();
        for (Place { entry: name, revision, .. }, entry) in &held {
            deletes.push(TxnOp::txn(delete(name, *revision)));
            let mut messages = Vec::new();
            if let Some(owner) = Record::decode(entry.value()).and_then(|record| record.owner()) {
                let message = format!("{}/{owner}", self.root.session(entry.lease()));
                let options = PutOptions::new().with_lease(entry.lease());
                let value = broken(name, *revision).encode();
                messages.push(TxnOp::put(message.as_str(), value, Some(options)));
                deletes.push(TxnOp::delete(message, None));
            }
            // Somebody who has left in the meantime is not broken.
            let is_there = Compare::create_revision(name.as_str(), CompareOp::Equal, *revision);
            told.push(TxnOp::txn(Txn::new().when([is_there]).and_then(messages)));
        }
        let told = connection.call(connection.kv().txn(Txn::new().and_then(told))).await;
        let told = told.map_err(failed)?.op_responses();
        let is_broken =
            |it: &&TxnOpResponse| matches!(it, TxnOpResponse::Txn(it) if it.succeeded());
        let count = told.iter().filter(is_broken).count();
        if count == 0 {
            return Ok(0);
        }
        let mut leases = connection.client().lease_client();
        // It is for people only, and the lock is broken already.
        if let Ok(lease) = connection.call(leases.grant(REMEMBERED, None)).await {
            let options = PutOptions::new().with_lease(lease.id());
            let record = broken("", 0).encode();
            let mut kv = connection.kv();
            let _ = connection.call(kv.put(self.root.broken(key), record, Some(options))).await;
        }
        let removing = tokio::spawn(async move {
            tokio::time::sleep(delay).await;
            connection.call(connection.kv().txn(Txn::new().and_then(deletes))).await.map(drop)
        });
        // A command that breaks a lock ends after this call.
        let _ = tokio::time::timeout(MAX_WAIT, removing).await;
        Ok(count)
    }

    /// The members of the cluster that the URL names.
    pub(super) async fn members(&self) -> Result<Vec<ServerState>> {
        let connections = &self.sessions.connections;
        let mut states = Vec::new();
        for member @ (host, port) in connections.members() {
            let status = async {
                let mut client = connections.connect(member).await?;
                let status = tokio::time::timeout(MAX_WAIT, client.status()).await;
                let silent = |_| CallError::Lost(None).read(Operation::Inspect);
                let failed = |error| CallError::of(error).read(Operation::Inspect);
                status.map_err(silent)?.map_err(failed)
            };
            let (role, note) = match status.await {
                Ok(status) => {
                    let id = status.header().map_or(0, etcd_client::ResponseHeader::member_id);
                    let leads = status.leader() == id;
                    let alone = (status.leader() == 0).then(|| "it has no leader".to_owned());
                    (if leads { ServerRole::Primary } else { ServerRole::Replica }, alone)
                }
                Err(error) => (ServerRole::Replica, Some(error.to_string())),
            };
            let address = format!("{host}:{port}");
            states.push(ServerState { address, role, behind: None, note });
        }
        Ok(states)
    }
}

/// How long a lease lasts if it is not kept alive. etcd tells whole seconds.
async fn time_left(connection: &Connection, lease: i64) -> Duration {
    let mut leases = connection.client().lease_client();
    let left = connection.call(leases.time_to_live(lease, None)).await;
    let seconds = left.map_or(0, |left| left.ttl());
    Duration::from_secs(u64::try_from(seconds).unwrap_or(0)).max(Duration::from_millis(500))
}

fn token_of(place: &Place) -> Option<u64> {
    let grant = grant(place.mode, place.revision, 1).ok();
    grant.filter(|_| !place.mode.is_permits()).map(|grant| grant.first)
}

fn age(entry: &KeyValue) -> Duration {
    Record::decode(entry.value()).map_or(Duration::ZERO, |record| record.age())
}

/// The first key after all that begin with this prefix; `None` if there is none.
fn after(prefix: &str) -> Option<Vec<u8>> {
    let mut end = prefix.as_bytes().to_vec();
    while let Some(last) = end.pop() {
        if last < u8::MAX {
            end.push(last + 1);
            return Some(end);
        }
    }
    None
}
