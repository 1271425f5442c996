//! Waiting: a node tells the first who waits there that a lock is free, without giving it to
//! anybody. Whoever most nodes tell tries at once, others after a random pause, so that
//! votes are seldom divided. What is not heard is found by looking again within a second.

use std::collections::HashMap;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, OnceLock, Weak};
use std::time::Duration;

use parking_lot::Mutex;
use rand::RngExt as _;

use super::super::route::Route;
use super::Shared;
use crate::backend::{Listener, Notice};
use crate::claim::Owner;
use crate::error::Operation;
use crate::key::Key;

/// How long a first claim waits until it would hear of a free lock.
const PATIENCE: Duration = Duration::from_millis(500);

/// What the nodes said to those who wait.
#[derive(Default)]
pub(super) struct Wakeups {
    listener: OnceLock<Weak<dyn Listener>>,
    /// The wake-ups of an owner that have come so far.
    pending: Mutex<HashMap<Owner, Wakeup>>,
    /// One for each node; they live as long as the backend.
    listeners: OnceLock<Vec<Arc<dyn Listener>>>,
    listened: AtomicBool,
}

impl Wakeups {
    pub(super) fn set_listener(&self, listener: Weak<dyn Listener>) {
        let _ = self.listener.set(listener);
    }

    /// The time for the other nodes to tell the same is over.
    fn end(&self, key: &Key, owner: Owner, number: u64) {
        let passed_on = {
            let mut pending = self.pending.lock();
            match pending.get(&owner) {
                Some(it) if it.number == number => {
                    pending.remove(&owner).is_some_and(|it| it.passed_on)
                }
                _ => return,
            }
        };
        if !passed_on {
            self.pass_on(key, owner);
        }
    }

    fn pass_on(&self, key: &Key, owner: Owner) {
        if let Some(listener) = self.listener.get().and_then(Weak::upgrade) {
            listener.on_notice(key, owner, Notice::TryAgain);
        }
    }
}

/// The wake-ups for one release.
#[derive(Default)]
struct Wakeup {
    /// The nodes that sent one. When one of them sends again, it is about another release.
    by: Vec<usize>,
    passed_on: bool,
    number: u64,
}

/// Hears one node.
struct NodeListener {
    shared: Weak<Shared>,
    place: usize,
}

impl Listener for NodeListener {
    fn on_notice(&self, key: &Key, owner: Owner, _: Notice) {
        if let Some(shared) = self.shared.upgrade() {
            shared.woken(key, owner, self.place);
        }
    }
}

impl Shared {
    /// Whether the nodes were subscribed to, or it was tried for long enough.
    pub(super) fn has_listened(&self) -> bool {
        self.wakeups.listened.load(Ordering::Acquire)
    }

    /// Subscribes at all nodes when called first. Waits for most of them, but not for long,
    /// since it is not needed.
    pub(super) async fn listening(self: &Arc<Self>) {
        if self.has_listened() {
            return;
        }
        let listeners = self.wakeups.listeners.get_or_init(|| {
            let listener = |place| {
                let shared = Arc::downgrade(self);
                Arc::new(NodeListener { shared, place }) as Arc<dyn Listener>
            };
            (0..self.nodes.len()).map(listener).collect()
        });
        for (node, listener) in self.nodes.iter().zip(listeners) {
            let (node, listener) = (node.clone(), Arc::downgrade(listener));
            tokio::spawn(async move {
                let _ = node.link.connected(Operation::Connect).await; // it is tried again there
                node.notices.subscribed(&Route::Server(node.link.clone()), &listener).await;
            });
        }
        let most = async {
            while self.nodes.iter().filter(|it| it.notices.is_listening()).count()
                < self.quorum.majority
            {
                tokio::time::sleep(Duration::from_millis(2)).await;
            }
        };
        let _ = tokio::time::timeout(PATIENCE, most).await;
        self.wakeups.listened.store(true, Ordering::Release);
    }

    /// Somebody waits, so what the nodes say must not be missed.
    pub(super) fn waits(&self) {
        for node in &self.nodes {
            node.notices.waits.on_queued();
        }
    }

    /// A node told this owner that the lock is free there.
    fn woken(self: &Arc<Self>, key: &Key, owner: Owner, place: usize) {
        match self.claims.lock().get_mut(&owner) {
            Some(claim) => claim.wake(self.clock.now()),
            None => return, // it waits no more
        }
        let (first, now) = {
            let mut pending = self.wakeups.pending.lock();
            let wakeup = pending.entry(owner).or_default();
            if wakeup.by.contains(&place) {
                *wakeup = Wakeup { number: wakeup.number + 1, ..Wakeup::default() };
            }
            wakeup.by.push(place);
            let enough = wakeup.by.len() >= self.quorum.majority;
            let now = enough && !std::mem::replace(&mut wakeup.passed_on, true);
            ((wakeup.by.len() == 1).then_some(wakeup.number), now)
        };
        if now {
            self.wakeups.pass_on(key, owner);
        }
        if let (Some(number), Some(runtime)) = (first, self.runtime.get()) {
            let (shared, key) = (Arc::downgrade(self), key.clone());
            let pause = Duration::from_millis(rand::rng().random_range(3..15));
            runtime.spawn(async move {
                tokio::time::sleep(pause).await;
                if let Some(shared) = shared.upgrade() {
                    shared.wakeups.end(&key, owner, number);
                }
            });
        }
    }
}
