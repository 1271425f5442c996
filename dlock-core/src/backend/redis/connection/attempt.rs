//! How a connection is made, and left for one to another server.

use std::sync::atomic::Ordering;
use std::sync::{Arc, Weak};
use std::time::{Duration, Instant};

use parking_lot::Mutex;
use rand::RngExt as _;
use redis::Cmd;
use tokio::sync::watch;

use super::super::connector::Connection;
use super::super::pipeline::Pipeline;
use super::super::{errors, sentinel, server_check};
use super::{Link, Live, State};
use crate::backend::Call;
use crate::backend::abort_on_drop::AbortOnDrop;
use crate::error::Operation;

/// How long a connection is not used before the server is asked whether it is still there.
/// Whatever forgets a connection on its way does so after half a minute or later.
const IDLE: Duration = Duration::from_secs(10);
/// How long a primary that is none any more has for the calls that are on their way to it.
const PROMPT: Duration = Duration::from_millis(100);

impl Link {
    /// Leaves a server that is not the primary any more, and looks for the new one at
    /// once.
    fn leave(self: &Arc<Self>) {
        let left = {
            let mut state = self.state.lock();
            match &mut *state {
                State::Up(live) => {
                    let (left, why) = (live.clone(), Some(errors::replica()));
                    *state = State::Down { next: Instant::now(), failures: 0, why };
                    self.up.send_replace(false);
                    Some(left)
                }
                State::Down { next, .. } => {
                    *next = Instant::now();
                    None
                }
                State::Connecting(_) => {
                    // The attempt ends, and the next one begins at once.
                    self.moved.store(true, Ordering::Relaxed);
                    self.left.send_modify(|left| *left += 1);
                    return;
                }
            }
        };
        self.left.send_modify(|left| *left += 1);
        if let Some(live) = left {
            live.connection.close();
        }
        let link = self.clone();
        tokio::spawn(async move { link.connected(Operation::Connect).await });
    }

    /// The server is not a primary any more. What it does not answer within `PROMPT` is not
    /// waited for: a host that stopped keeps its connections.
    pub(in super::super) fn demoted(self: &Arc<Self>) {
        self.left.send_modify(|left| *left += 1);
        let State::Up(live) = &*self.state.lock() else { return };
        let (link, live, since) = (self.clone(), live.clone(), Instant::now());
        tokio::spawn(async move {
            tokio::time::sleep(PROMPT).await;
            if !live.heard_since(since) {
                link.end_because(&live, errors::replica());
            }
        });
    }

    /// Listens to those who know where the primary is, from the first connection on.
    fn watch_primary(self: &Arc<Self>) {
        let Some(sentinels) = self.connector.sentinels() else { return };
        let mut watcher = self.watcher.lock();
        if watcher.as_ref().is_none_or(|watcher| watcher.0.is_finished()) {
            let link = Arc::downgrade(self);
            let watching = tokio::spawn(sentinel::watch(sentinels, move || {
                if let Some(link) = link.upgrade() {
                    link.leave();
                }
            }));
            *watcher = Some(AbortOnDrop(watching.abort_handle()));
        }
    }
}

/// Ends a connection that broke while nobody used it.
async fn watch(pipeline: Arc<Pipeline>, link: Weak<Link>, live: Weak<Live>) {
    pipeline.watch().await;
    if let (Some(link), Some(live)) = (link.upgrade(), live.upgrade()) {
        link.end(&live);
    }
}

/// Asks now and then, while nobody uses the connection, whether the server is still there.
/// Ends the connection when it is not.
async fn probe(link: Weak<Link>, live: Weak<Live>) {
    let mut pause = IDLE;
    loop {
        tokio::time::sleep(pause).await;
        let (Some(link), Some(live)) = (link.upgrade(), live.upgrade()) else { return };
        pause = IDLE.saturating_sub(live.last_received().elapsed());
        if !pause.is_zero() {
            continue;
        }
        pause = IDLE;
        if live.is_asked() {
            continue; // its callers find out
        }
        let ping = redis::cmd("PING");
        let asked = live.connection.send(&ping);
        match tokio::time::timeout(link.connect_timeout, asked).await {
            Ok(Ok(_)) => *live.last_received.lock() = Instant::now(),
            _ => return link.end(&live),
        }
    }
}

/// One attempt to connect.
pub(super) struct Attempt {
    pub(super) link: Arc<Link>,
    pub(super) failures: u32,
    /// Dropped when the attempt is over.
    pub(super) _over: watch::Sender<()>,
}

impl Attempt {
    pub(super) async fn run(self) {
        let link = &self.link;
        let since = Instant::now();
        let mut leaving = link.leaving();
        let connecting = async {
            let connection = link.connector.connection().await;
            let connection = connection.map_err(|why| link.connector.explained(why))?;
            // From here on it is closed when it is dropped, also if the time is over.
            let live = Live { connection, since, last_received: Mutex::new(since) };
            let first = !link.met.load(Ordering::Relaxed);
            let kind = link.connector.kind();
            server_check::check(&live.connection, kind, link.eviction, first).await?;
            link.connector.handshake(&live.connection).await?;
            if let Some(layout) = &link.layout {
                let connection = &live.connection;
                let ask = |command: Cmd| {
                    Call::new(async move {
                        let answer = connection.send(&command).await;
                        answer.map_err(|error| errors::unanswered(Operation::Connect, &error))
                    })
                };
                layout.check(ask).await?;
            }
            if link.connector.may_be_a_proxy() {
                let one_slot = server_check::wants_one_slot(&live.connection).await?;
                link.one_slot.store(one_slot, Ordering::Relaxed);
            }
            Ok(live)
        };
        let connecting = tokio::time::timeout(link.connect_timeout, connecting);
        let connected = tokio::select! {
            connected = connecting => connected.unwrap_or_else(|_| {
                Err(link.connector.explained(errors::silent(&link.shown)))
            }),
            _ = leaving.changed() => Err(errors::replica()),
        };
        match connected {
            Ok(live) => {
                let again = link.met.swap(true, Ordering::Relaxed);
                let live = Arc::new(live);
                if let Connection::Plain(pipeline) = &live.connection {
                    let (link, live) = (Arc::downgrade(link), Arc::downgrade(&live));
                    tokio::spawn(watch(pipeline.clone(), link, live));
                }
                if !matches!(live.connection, Connection::Managed(_)) {
                    tokio::spawn(probe(Arc::downgrade(link), Arc::downgrade(&live)));
                }
                *link.state.lock() = State::Up(live);
                link.up.send_replace(true);
                link.watch_primary();
                if link.moved.swap(false, Ordering::Relaxed) {
                    link.leave(); // it may be the old one
                }
                if again && let Some(listener) = link.listener.get().and_then(Weak::upgrade) {
                    listener.on_reconnected();
                }
            }
            Err(why) => {
                tracing::debug!(error = %why, failures = self.failures, "no connection");
                *link.state.lock() = State::Down {
                    next: Instant::now() + pause(self.failures),
                    failures: self.failures.saturating_add(1),
                    why: Some(why),
                };
                if link.moved.swap(false, Ordering::Relaxed) {
                    link.leave();
                }
            }
        }
    }
}

impl Drop for Attempt {
    /// The runtime may have ended under it.
    fn drop(&mut self) {
        let mut state = self.link.state.lock();
        if matches!(*state, State::Connecting(_)) {
            *state = State::Down { next: Instant::now(), failures: self.failures, why: None };
        }
    }
}

/// The pause before the next attempt: with jitter, since the clients of a server
/// that restarts all come back at once.
pub(in super::super) fn pause(failures: u32) -> Duration {
    let most = 100 * u64::from(failures.min(5) + 1);
    Duration::from_millis(500 + rand::rng().random_range(0..most))
}
