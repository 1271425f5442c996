//! The keys that a session waits for: one watch for each prefix, all over one stream, and
//! one for the key of the session.

use std::collections::HashMap;
use std::sync::Arc;
use std::time::Duration;

use etcd_client::{Event, EventType, GetOptions, KeyValue, WatchOptions, WatchResponse};
use parking_lot::Mutex;
use tokio::sync::mpsc::{UnboundedReceiver, UnboundedSender, unbounded_channel};

use super::connection::Connection;
use super::errors::CallError;
use super::layout::{Place, is_direct};
use super::mirror::{Change, Mirror, QueueStatus};
use super::record::{Broken, mode_of, owner_in};
use super::session::{RETRY, Session};
use crate::claim::{LossReason, Notice, Owner};
use crate::clock::Moment;
use crate::key::Key;

/// The number of the watch on the key of the session.
const OF_SESSION: i64 = 1;
/// The number of a watch that the server did not create, for example because the token of the
/// user is too old.
const NOT_CREATED: i64 = -1;
/// A watch that nobody needs is kept for so long, since the next one may be needed soon.
const IDLE: Duration = Duration::from_secs(5);
/// How often watches that nobody needs are looked for.
const SWEEP: Duration = Duration::from_secs(1);

/// What the task with the stream is to do.
pub(super) enum Command {
    Open { id: i64, prefix: String },
}

/// A key that somebody waits for.
struct Queue {
    /// The number of its watch.
    id: i64,
    mirror: Mirror,
    waiters: HashMap<Owner, Waiter>,
    /// When somebody needed it last.
    used: Moment,
}

struct Waiter {
    key: Key,
    /// The create revision of its entry.
    revision: i64,
    is_notified: bool,
}

impl Queue {
    /// Those who need not wait any more and were not told yet.
    fn ready_waiters(&mut self) -> Vec<(Key, Owner)> {
        let mut ready = Vec::new();
        for (owner, waiter) in &mut self.waiters {
            let status = self.mirror.queue_status(waiter.revision);
            if !waiter.is_notified && matches!(status, QueueStatus::Holds | QueueStatus::Gone) {
                waiter.is_notified = true;
                ready.push((waiter.key.clone(), *owner));
            }
        }
        ready
    }
}

#[derive(Default)]
struct State {
    queues: HashMap<String, Queue>,
    prefixes: HashMap<i64, String>,
    last_id: i64,
}

impl State {
    fn next_id(&mut self, prefix: &str) -> i64 {
        self.last_id = self.last_id.max(OF_SESSION) + 1;
        self.prefixes.insert(self.last_id, prefix.to_owned());
        self.last_id
    }

    fn of_watch(&mut self, id: i64) -> Option<(&str, &mut Queue)> {
        let prefix = self.prefixes.get(&id)?;
        let queue = self.queues.get_mut(prefix)?;
        Some((prefix, queue))
    }
}

/// The keys that a session waits for.
pub(super) struct Queues {
    state: Mutex<State>,
    commands: UnboundedSender<Command>,
}

impl Queues {
    pub(super) fn new() -> (Self, UnboundedReceiver<Command>) {
        let (commands, received) = unbounded_channel();
        (Queues { state: Mutex::default(), commands }, received)
    }

    /// An owner waits, whose entry has this create revision; but not if it is known already
    /// that it holds the key, or that the entry is gone.
    pub(super) fn wait(&self, prefix: &str, key: &Key, owner: Owner, revision: i64) -> QueueStatus {
        let mut state = self.state.lock();
        if !state.queues.contains_key(prefix) {
            let id = state.next_id(prefix);
            let queue =
                Queue { id, mirror: Mirror::Opening, waiters: HashMap::new(), used: Moment::now() };
            state.queues.insert(prefix.to_owned(), queue);
            let _ = self.commands.send(Command::Open { id, prefix: prefix.to_owned() });
        }
        let Some(queue) = state.queues.get_mut(prefix) else { return QueueStatus::Unknown };
        queue.used = Moment::now();
        let status = queue.mirror.queue_status(revision);
        if matches!(status, QueueStatus::Holds | QueueStatus::Gone) {
            queue.waiters.remove(&owner);
        } else {
            queue.waiters.insert(owner, Waiter { key: key.clone(), revision, is_notified: false });
        }
        status
    }

    /// Whether it is known that a waiting owner holds its key by now.
    pub(super) fn holds(&self, prefix: &str, owner: Owner) -> bool {
        let state = self.state.lock();
        let Some(queue) = state.queues.get(prefix) else { return false };
        let Some(waiter) = queue.waiters.get(&owner) else { return false };
        queue.mirror.queue_status(waiter.revision) == QueueStatus::Holds
    }

    /// An owner does not wait any more.
    pub(super) fn leave(&self, prefix: &str, owner: Owner) {
        if let Some(queue) = self.state.lock().queues.get_mut(prefix) {
            queue.waiters.remove(&owner);
            queue.used = Moment::now();
        }
    }

    /// All watches, with new numbers, for a new stream.
    fn reopen(&self) -> Vec<(i64, String)> {
        let mut state = self.state.lock();
        state.prefixes.clear();
        let prefixes: Vec<String> = state.queues.keys().cloned().collect();
        let mut opened = Vec::new();
        for prefix in prefixes {
            let id = state.next_id(&prefix);
            if let Some(queue) = state.queues.get_mut(&prefix) {
                (queue.id, queue.mirror) = (id, Mirror::Opening);
            }
            opened.push((id, prefix));
        }
        opened
    }

    /// The numbers of watches that nobody needs any more.
    fn sweep(&self) -> Vec<i64> {
        let mut state = self.state.lock();
        let old = Moment::now() - IDLE;
        let mut idle = Vec::new();
        state.queues.retain(|_, queue| {
            let is_idle = queue.waiters.is_empty() && queue.used < old;
            if is_idle {
                idle.push(queue.id);
            }
            !is_idle
        });
        idle.iter().for_each(|id| drop(state.prefixes.remove(id)));
        idle
    }

    /// The watch was created; the prefix whose entries are to be read.
    fn opened(&self, id: i64) -> Option<String> {
        let mut state = self.state.lock();
        let (prefix, queue) = state.of_watch(id)?;
        queue.mirror.opened();
        Some(prefix.to_owned())
    }

    /// Changes one queue, and answers who need not wait any more.
    fn change(&self, id: i64, change: impl FnOnce(&str, &mut Mirror)) -> Vec<(Key, Owner)> {
        let mut state = self.state.lock();
        let Some((prefix, queue)) = state.of_watch(id) else { return Vec::new() };
        change(prefix, &mut queue.mirror);
        queue.ready_waiters()
    }

    /// A watch ended; the same prefix needs another one.
    fn ended(&self, id: i64) {
        let mut state = self.state.lock();
        let Some(prefix) = state.prefixes.remove(&id) else { return };
        let next = state.next_id(&prefix);
        if let Some(queue) = state.queues.get_mut(&prefix) {
            (queue.id, queue.mirror) = (next, Mirror::Opening);
            let _ = self.commands.send(Command::Open { id: next, prefix });
        }
    }
}

/// The place of an entry, if it is one below this prefix.
pub(super) fn place(prefix: &str, entry: &KeyValue) -> Option<Place> {
    let name = entry.key_str().ok().filter(|name| is_direct(prefix, name))?;
    let (revision, mode) = (entry.create_revision(), mode_of(entry.value()));
    Some(Place { revision, entry: name.to_owned(), mode })
}

fn change(prefix: &str, event: &Event) -> Option<Change> {
    let entry = event.kv()?;
    let at = entry.mod_revision();
    match event.event_type() {
        EventType::Put => Some(Change::Put(place(prefix, entry)?, at)),
        EventType::Delete => Some(Change::Delete(entry.key_str().ok()?.to_owned(), at)),
    }
}

fn notify(session: &Session, owners: Vec<(Key, Owner)>) {
    if let Some(listener) = session.listener.upgrade() {
        for (key, owner) in owners {
            listener.on_notice(&key, owner, Notice::TryAgain);
        }
    }
}

/// Watches the keys that a session waits for, and its own, until it is over.
pub(super) async fn watch(session: Arc<Session>, mut commands: UnboundedReceiver<Command>) {
    while !session.is_over() {
        tokio::select! {
            watched = watch_over_one(&session, &mut commands) => match watched {
                Err(CallError::SessionOver) => session.end(),
                _ => tokio::time::sleep(RETRY).await,
            },
            () = session.ended() => return,
        }
    }
}

/// Watches over one connection, until that ends.
async fn watch_over_one(
    session: &Arc<Session>,
    commands: &mut UnboundedReceiver<Command>,
) -> Result<(), CallError> {
    let connection = session.connections.get().await?;
    let of_session = WatchOptions::new().with_prefix().with_watch_id(OF_SESSION);
    let mut watches = connection.client().watch_client();
    let opened = connection.call(watches.watch(session.key.as_str(), Some(of_session))).await?;
    let (mut requests, mut responses) = opened.split();
    while commands.try_recv().is_ok() {} // what was asked for is opened now
    for (id, prefix) in session.queues.reopen() {
        let options = WatchOptions::new().with_prefix().with_watch_id(id);
        connection.send(requests.watch(prefix, Some(options))).await?;
    }
    let mut sweep = tokio::time::interval(SWEEP);
    loop {
        tokio::select! {
            response = responses.message() => match response {
                Ok(Some(response)) if response.watch_id() == NOT_CREATED && response.canceled() => {
                    // It is not said which one: all are created anew, after a while.
                    tokio::time::sleep(RETRY * 4).await;
                    return Ok(());
                }
                Ok(Some(response)) => on_response(session, &connection, &response),
                lost => {
                    connection.give_up();
                    return Err(CallError::Lost(lost.err()));
                }
            },
            Some(Command::Open { id, prefix }) = commands.recv() => {
                let options = WatchOptions::new().with_prefix().with_watch_id(id);
                connection.send(requests.watch(prefix, Some(options))).await?;
            }
            _ = sweep.tick() => {
                for id in session.queues.sweep() {
                    connection.send(requests.cancel(id)).await?;
                }
            }
            () = connection.ended() => return Ok(()),
        }
    }
}

fn on_response(session: &Arc<Session>, connection: &Arc<Connection>, response: &WatchResponse) {
    let id = response.watch_id();
    if response.created() {
        if id == OF_SESSION {
            tokio::spawn(look_at_session(session.clone(), connection.clone()));
        } else if let Some(prefix) = session.queues.opened(id) {
            tokio::spawn(load(session.clone(), connection.clone(), id, prefix));
        }
    }
    if response.canceled() {
        match id {
            OF_SESSION => connection.give_up(), // a new stream has a new watch
            id => session.queues.ended(id),
        }
        return;
    }
    if id == OF_SESSION {
        response.events().iter().for_each(|event| on_session_event(session, event));
    } else if !response.events().is_empty() {
        let owners = session.queues.change(id, |prefix, mirror| {
            let changes = response.events().iter().filter_map(|event| change(prefix, event));
            changes.for_each(|change| mirror.changed(change));
        });
        notify(session, owners);
    }
}

/// Reads the entries below a prefix, after its watch was created.
async fn load(session: Arc<Session>, connection: Arc<Connection>, id: i64, prefix: String) {
    let options = GetOptions::new().with_prefix();
    let read = connection.call(connection.kv().get(prefix.as_str(), Some(options))).await;
    let Ok(read) = read else {
        // Another stream reads them again; this one does after a while.
        tokio::time::sleep(RETRY * 4).await;
        return session.queues.ended(id);
    };
    let places = read.kvs().iter().filter_map(|entry| place(&prefix, entry)).collect();
    let revision = read.header().map_or(0, etcd_client::ResponseHeader::revision);
    let owners = session.queues.change(id, |_, mirror| mirror.loaded(places, revision));
    notify(&session, owners);
}

/// The lease may have been revoked, or a lock broken, before the watch was there.
async fn look_at_session(session: Arc<Session>, connection: Arc<Connection>) {
    let below = Some(GetOptions::new().with_prefix());
    let read = connection.call(connection.kv().get(session.key.as_str(), below)).await;
    let Ok(read) = read else { return };
    let is_own = |entry: &KeyValue| entry.key() == session.key.as_bytes();
    if !read.kvs().iter().any(is_own) {
        return session.end();
    }
    read.kvs().iter().for_each(|entry| on_message(&session, entry));
}

/// The key of the session was deleted with its lease, or an operator broke a lock.
fn on_session_event(session: &Arc<Session>, event: &Event) {
    let Some(entry) = event.kv() else { return };
    match event.event_type() {
        EventType::Delete if entry.key() == session.key.as_bytes() => session.end(),
        EventType::Delete => {}
        EventType::Put => on_message(session, entry),
    }
}

/// An operator broke a lock, if this entry below the key of the session says so.
fn on_message(session: &Arc<Session>, entry: &KeyValue) {
    let Ok(message) = entry.key_str().map(str::to_owned) else { return };
    let owner = message.rsplit_once('/').and_then(|(_, owner)| owner_in(owner));
    let (Some(owner), Some(broken)) = (owner, Broken::decode(entry.value())) else { return };
    let (session, delay) = (session.clone(), broken.delay());
    let known = session.claims.forget(owner);
    if let (Some(known), Some(listener)) = (&known, session.listener.upgrade()) {
        let reason = LossReason::Broken { by: broken.by.clone() };
        listener.on_notice(&known.key, owner, Notice::Lost(reason));
    }
    tokio::spawn(async move {
        tokio::time::sleep(delay).await;
        session.remove_broken(known, broken, message).await;
    });
}
