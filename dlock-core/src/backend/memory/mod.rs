//! The embedded backend: locks between the tasks and clients of one process.
//!
//! Nothing leaves the process and nothing outlives it. Calls are answered at
//! once, so a client on it needs no thread. Tokens rise as long as the process
//! lives.

pub mod lock_table;

use std::sync::{Arc, OnceLock, Weak};
use std::time::{SystemTime, UNIX_EPOCH};

use hashbrown::HashMap;
use parking_lot::Mutex;

use self::lock_table::{LockTable, SentNotice};
use super::{Backend, Break, Call, Capabilities, Cursor, KeyState, Listener, Page};
use crate::claim::{Answer, Request};
use crate::clock::{Clock, Moment};
use crate::error::Result;
use crate::extension::ExtensionMap;
use crate::key::Key;
use crate::planted_bug::PlantedBug;

/// A store of locks inside this process, seen by one client.
#[derive(Debug)]
pub struct Memory {
    store: Arc<Store>,
    /// The client's number, once it opened the store.
    client: OnceLock<u64>,
}

/// By name and namespace.
type Stores = Mutex<HashMap<(String, String), Arc<Store>>>;

struct Store {
    table: Mutex<LockTable>,
    listeners: Mutex<HashMap<u64, Weak<dyn Listener>>>,
    clock: Clock,
    extensions: ExtensionMap,
}

impl std::fmt::Debug for Store {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("Store")
    }
}

impl Memory {
    /// A store of its own.
    pub fn new() -> Self {
        Memory { store: Arc::new(Store::new()), client: OnceLock::new() }
    }

    /// The store of this name and namespace, one for the whole process.
    pub fn shared(name: &str, namespace: &str) -> Self {
        static STORES: OnceLock<Stores> = OnceLock::new();
        let mut stores = STORES.get_or_init(Mutex::default).lock();
        let store = stores
            .entry((name.to_owned(), namespace.to_owned()))
            .or_insert_with(|| Arc::new(Store::new()));
        Memory { store: store.clone(), client: OnceLock::new() }
    }

    /// The same store, for another client.
    pub fn another(&self) -> Self {
        Memory { store: self.store.clone(), client: OnceLock::new() }
    }

    /// What crates beside the lock keep for all clients of the store.
    pub(crate) fn extensions(&self) -> &ExtensionMap {
        &self.store.extensions
    }

    /// Runs one operation on the queue and delivers the notices it makes.
    fn run<T>(
        &self,
        operation: impl FnOnce(&mut LockTable, Moment, &mut Vec<SentNotice>) -> T,
    ) -> T {
        self.run_at(self.store.clock.now(), operation)
    }

    fn run_at<T>(
        &self,
        now: Moment,
        operation: impl FnOnce(&mut LockTable, Moment, &mut Vec<SentNotice>) -> T,
    ) -> T {
        let mut sent = Vec::new();
        let result = operation(&mut self.store.table.lock(), now, &mut sent);
        for SentNotice { client, key, owner, notice } in sent {
            let listener = self.store.listeners.lock().get(&client).cloned();
            if let Some(listener) = listener.and_then(|listener| listener.upgrade()) {
                listener.on_notice(&key, owner, notice);
            }
        }
        result
    }
}

impl Default for Memory {
    fn default() -> Self {
        Self::new()
    }
}

impl Drop for Memory {
    fn drop(&mut self) {
        if let Some(client) = self.client.get() {
            self.store.listeners.lock().remove(client);
        }
    }
}

impl Store {
    fn new() -> Self {
        let clock = Clock::tokio();
        let since_epoch = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
        let micros = u64::try_from(since_epoch.as_micros()).unwrap_or(0);
        let epoch = micros.saturating_sub(clock.now().as_micros());
        Store {
            table: Mutex::new(LockTable::new(epoch, PlantedBug::default())),
            listeners: Mutex::default(),
            clock,
            extensions: ExtensionMap::default(),
        }
    }
}

impl Backend for Memory {
    fn capabilities(&self) -> Capabilities {
        Capabilities { remote: false, ..Capabilities::all("memory") }
    }

    fn open(&self, client: u64, listener: Weak<dyn Listener>) {
        let _ = self.client.set(client);
        self.store.listeners.lock().insert(client, listener);
    }

    fn call<'a>(&'a self, requests: &'a [Request]) -> Call<'a, Vec<Answer>> {
        let now = self.store.clock.now();
        Call::answered(requests.iter().map(|request| self.call_now(request, now)).collect())
    }

    fn call_now(&self, request: &Request, now: Moment) -> Answer {
        self.run_at(now, |table, now, sent| match request {
            Request::Acquire(claim) => Answer::Acquire(Ok(table.acquire(now, claim, sent))),
            Request::Renew(lease) => Answer::Renew(Ok(table.renew(now, lease, sent))),
            Request::Release(lease, how) => {
                Answer::Release(Ok(table.release(now, lease, *how, sent)))
            }
        })
    }

    fn inspect<'a>(&'a self, key: &'a Key) -> Call<'a, Result<KeyState>> {
        Call::answered(Ok(self.run(|table, now, _| table.inspect(now, key))))
    }

    fn list<'a>(&'a self, prefix: &'a str, cursor: Cursor) -> Call<'a, Result<Page>> {
        Call::answered(Ok(self.run(|table, now, _| table.list(now, prefix, &cursor))))
    }

    fn break_lock<'a>(&'a self, key: &'a Key, how: &'a Break) -> Call<'a, Result<usize>> {
        Call::answered(Ok(self.run(|table, now, sent| table.break_lock(now, key, how, sent))))
    }

    fn ping(&self) -> Call<'_, Result<()>> {
        Call::answered(Ok(()))
    }

    fn as_any(&self) -> Option<&dyn std::any::Any> {
        Some(self)
    }
}
