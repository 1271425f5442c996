//! The connection for commands: made when first needed, shared by all calls, and
//! made anew when it broke, one attempt at a time and at most two a second.
//!
//! A call that finds no connection fails at once while the next attempt is not
//! due, so a server that is down costs its clients nothing. `Unavailable` is said
//! only before the request was handed to the connection; from then on, an end
//! without an answer is `Unknown`.
//!
//! A connection can be dead without saying so: a call that its caller gave up on,
//! with nothing heard from the server since it was sent, ends the connection.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::{Duration, Instant};

use parking_lot::Mutex;
use rand::RngExt as _;
use redis::{Client, Cmd, ServerErrorKind, Value};
use tokio::sync::watch;

use super::connector::{Connection, Connector};
use super::scripts::Run;
use super::{errors, server_check};
use crate::config::{Eviction, Settings};
use crate::error::{Error, ErrorKind, Operation, Result};

/// How long reaching the server may take at most, greeting included.
pub(super) const CONNECT_TIMEOUT: Duration = Duration::from_millis(1_500);
/// A call given up earlier than this says nothing about the connection.
const SILENCE: Duration = Duration::from_millis(100);

/// A way to one server.
pub(super) struct Link {
    connector: Connector,
    shown: String,
    eviction: Eviction,
    /// Shorter than a call may take, so that its caller hears why there is none.
    connect_timeout: Duration,
    /// Whether there was a connection before.
    met: AtomicBool,
    state: Mutex<State>,
    /// Whether there is a connection, as far as known.
    up: watch::Sender<bool>,
    start: Instant,
}

enum State {
    Down {
        next: Instant,
        failures: u32,
        why: Option<Error>,
    },
    /// The sender goes when the attempt is over.
    Connecting(watch::Receiver<()>),
    Up(Arc<Live>),
}

struct Live {
    connection: Connection,
    since: Instant,
    /// When the server was last heard, in nanoseconds since the link's start.
    heard: AtomicU64,
}

impl Link {
    pub(super) fn new(connector: Connector, config: &Settings) -> Arc<Self> {
        let eviction = config.eviction;
        let connect_timeout = CONNECT_TIMEOUT.min(config.call_timeout * 3 / 4);
        let shown = connector.shown();
        let state = State::Down { next: Instant::now(), failures: 0, why: None };
        let (state, up) = (Mutex::new(state), watch::Sender::new(false));
        let met = AtomicBool::new(false);
        let start = Instant::now();
        Arc::new(Link { connector, shown, eviction, connect_timeout, met, state, up, start })
    }

    /// A client for connections beside this one.
    pub(super) async fn client(&self) -> Result<Client> {
        self.connector.client().await
    }

    /// Waits until there is a connection.
    pub(super) async fn is_up(&self) {
        let _ = self.up.subscribe().wait_for(|up| *up).await;
    }

    /// Sees to it that there is a connection.
    pub(super) async fn connected(self: &Arc<Self>, operation: Operation) -> Result<()> {
        self.live(operation).await.map(drop)
    }

    /// Runs a script; its text is sent if the server does not know its digest.
    pub(super) async fn run(self: &Arc<Self>, operation: Operation, run: &Run) -> Result<Value> {
        let live = self.live(operation).await?;
        let mut answer = self.send(&live, operation, run.by_digest()).await?;
        if is_unknown_script(&answer) {
            answer = self.send(&live, operation, &run.by_text()).await?;
        }
        self.checked(&live, operation, answer)
    }

    /// Sends one command.
    pub(super) async fn command(
        self: &Arc<Self>,
        operation: Operation,
        command: &Cmd,
    ) -> Result<Value> {
        let live = self.live(operation).await?;
        let answer = self.send(&live, operation, command).await?;
        self.checked(&live, operation, answer)
    }

    fn checked(&self, live: &Arc<Live>, operation: Operation, answer: Value) -> Result<Value> {
        if errors::is_not_primary(&answer) {
            // Another server may answer at the same address by now.
            self.end_because(live, errors::replica());
        }
        match answer {
            Value::ServerError(error) => Err(errors::refused(operation, &error)),
            answer => Ok(answer),
        }
    }

    async fn send(&self, live: &Arc<Live>, operation: Operation, command: &Cmd) -> Result<Value> {
        let mut pending = Pending { link: self, live, sent: Instant::now(), answered: false };
        let answer = live.connection.send(command).await;
        pending.answered = true;
        match answer {
            Ok(value) => {
                let now = u64::try_from(self.start.elapsed().as_nanos()).unwrap_or(u64::MAX);
                live.heard.store(now, Ordering::Relaxed);
                Ok(value)
            }
            Err(error) => {
                self.end(live);
                Err(errors::unanswered(operation, &error))
            }
        }
    }

    /// The connection, made if there is none and an attempt is due.
    async fn live(self: &Arc<Self>, operation: Operation) -> Result<Arc<Live>> {
        loop {
            let mut attempt = match &mut *self.state.lock() {
                State::Up(live) => return Ok(live.clone()),
                State::Connecting(attempt) => attempt.clone(),
                State::Down { next, why: Some(why), .. } if Instant::now() < *next => {
                    return Err(why.clone().during(operation));
                }
                state => {
                    let (over, attempt) = watch::channel(());
                    let failures = match state {
                        State::Down { failures, .. } => *failures,
                        _ => 0,
                    };
                    *state = State::Connecting(attempt.clone());
                    // A task of its own: its first caller may give up on it.
                    let attempting = Attempt { link: self.clone(), failures, _over: over };
                    tokio::spawn(attempting.run());
                    attempt
                }
            };
            let _ = attempt.changed().await; // the sender is gone: look again
        }
    }

    /// Ends a connection that broke.
    fn end(&self, live: &Arc<Live>) {
        let why = Error::new(ErrorKind::Unavailable, Operation::Connect)
            .saying(format!("the connection to Redis at {} broke", self.shown));
        self.end_because(live, why);
    }

    /// Ends a connection that is of no use any more.
    fn end_because(&self, live: &Arc<Live>, why: Error) {
        let mut state = self.state.lock();
        if matches!(&*state, State::Up(current) if Arc::ptr_eq(current, live)) {
            *state = State::Down { next: live.since + pause(0), failures: 0, why: Some(why) };
            self.up.send_replace(false);
        }
    }
}

/// One attempt to connect.
struct Attempt {
    link: Arc<Link>,
    failures: u32,
    _over: watch::Sender<()>,
}

impl Attempt {
    async fn run(self) {
        let link = &self.link;
        let since = Instant::now();
        let connecting = async {
            let connection = link.connector.connection().await?;
            server_check::check(&connection, link.eviction, !link.met.load(Ordering::Relaxed))
                .await?;
            Ok(connection)
        };
        let connected = match tokio::time::timeout(link.connect_timeout, connecting).await {
            Ok(connected) => connected,
            Err(_) => Err(errors::silent(&link.shown)),
        };
        match connected {
            Ok(connection) => {
                link.met.store(true, Ordering::Relaxed);
                let live = Live { connection, since, heard: AtomicU64::new(0) };
                *link.state.lock() = State::Up(Arc::new(live));
                link.up.send_replace(true);
            }
            Err(why) => {
                tracing::debug!(error = %why, failures = self.failures, "no connection");
                *link.state.lock() = State::Down {
                    next: Instant::now() + pause(self.failures),
                    failures: self.failures.saturating_add(1),
                    why: Some(why),
                };
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
pub(super) fn pause(failures: u32) -> Duration {
    let most = 100 * u64::from(failures.min(5) + 1);
    Duration::from_millis(500 + rand::rng().random_range(0..most))
}

/// A request without an answer yet.
struct Pending<'a> {
    link: &'a Link,
    live: &'a Arc<Live>,
    sent: Instant,
    answered: bool,
}

impl Drop for Pending<'_> {
    fn drop(&mut self) {
        if self.answered || self.sent.elapsed() < SILENCE {
            return;
        }
        let heard = Duration::from_nanos(self.live.heard.load(Ordering::Relaxed));
        if self.link.start + heard < self.sent {
            self.link.end(self.live);
        }
    }
}

fn is_unknown_script(answer: &Value) -> bool {
    matches!(answer, Value::ServerError(error) if error.kind() == Some(ServerErrorKind::NoScript))
}
