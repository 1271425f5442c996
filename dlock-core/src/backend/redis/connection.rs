//! The connection for commands: made when first needed, shared by all calls, and
//! made anew when it broke, one attempt at a time and at most two a second.
//!
//! A call that finds no connection fails at once while the next attempt is not
//! due, so a server that is down costs its clients nothing. `Unavailable` is said
//! only before the request was handed to the connection; from then on, an end
//! without an answer is `Unknown`.
//!
//! A connection can be dead without saying so: a call that its caller gave up on,
//! with nothing heard from the server since it was sent, ends the connection. One that
//! nobody uses is asked now and then, since what lies between may forget it: the next call
//! would pay for that.

mod attempt;
mod submit;

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, OnceLock, Weak};
use std::time::{Duration, Instant};

use parking_lot::Mutex;
use redis::{Client, Cmd, ServerErrorKind, Value};
use tokio::sync::watch;

use self::attempt::Attempt;
pub(super) use self::attempt::pause;
pub(super) use self::submit::{OnAnswer, Submitted, SubmittedRun};
use super::connector::{Connection, Connector};
use super::errors;
use super::layout_marker::LayoutMarker;
use super::scripts::Run;
use crate::backend::abort_on_drop::AbortOnDrop;
use crate::backend::{Listener, ServerState};
use crate::config::{Eviction, Settings};
use crate::error::{Error, ErrorKind, Operation, Result};

/// How long reaching the server may take at most, greeting included.
pub(super) const CONNECT_TIMEOUT: Duration = Duration::from_millis(1_500);
/// A call given up earlier than this says nothing about the connection.
const SILENCE: Duration = Duration::from_millis(100);

/// A way to one server.
pub(super) struct Link {
    connector: Connector,
    /// Read on each new connection.
    layout: Option<Arc<LayoutMarker>>,
    shown: String,
    eviction: Eviction,
    /// Shorter than a call may take, so that its caller hears why there is none.
    connect_timeout: Duration,
    /// Whether the server wants the keys of one call in one slot, as proxies do.
    one_slot: AtomicBool,
    /// Whether there was a connection before.
    met: AtomicBool,
    state: Mutex<State>,
    /// Whether there is a connection, as far as known.
    up: watch::Sender<bool>,
    /// Told when a connection was made again.
    listener: OnceLock<Weak<dyn Listener>>,
    /// Hears that another server is the primary.
    watcher: Mutex<Option<AbortOnDrop>>,
    /// How often a server was left for another one.
    left: watch::Sender<u64>,
    /// Whether that was heard while a connection was being made.
    moved: AtomicBool,
    /// Called when the connection ends.
    lost: OnceLock<Box<dyn Fn() + Send + Sync>>,
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

pub(super) struct Live {
    connection: Connection,
    since: Instant,
    /// When a command was last answered.
    last_received: Mutex<Instant>,
}

impl Live {
    fn heard_since(&self, moment: Instant) -> bool {
        self.last_received() >= moment
    }

    fn last_received(&self) -> Instant {
        match &self.connection {
            Connection::Plain(pipeline) => pipeline.last_received(),
            _ => *self.last_received.lock(),
        }
    }

    /// Whether a request has no answer yet, as far as known.
    fn is_asked(&self) -> bool {
        match &self.connection {
            Connection::Plain(pipeline) => pipeline.oldest_wait().1.is_some(),
            _ => false,
        }
    }
}

impl Drop for Live {
    fn drop(&mut self) {
        self.connection.close();
    }
}

impl Link {
    /// `layout`: the marker of its namespace, unless the layout is somebody else's.
    pub(super) fn new(
        connector: Connector,
        layout: Option<Arc<LayoutMarker>>,
        config: &Settings,
    ) -> Arc<Self> {
        let eviction = config.eviction;
        let connect_timeout = CONNECT_TIMEOUT.min(config.call_timeout * 3 / 4);
        let shown = connector.shown();
        let state = State::Down { next: Instant::now(), failures: 0, why: None };
        let (state, up) = (Mutex::new(state), watch::Sender::new(false));
        let met = AtomicBool::new(false);
        let (listener, watcher) = (OnceLock::new(), Mutex::new(None));
        Arc::new(Link {
            connector,
            layout,
            shown,
            eviction,
            connect_timeout,
            one_slot: AtomicBool::new(false),
            met,
            state,
            up,
            listener,
            watcher,
            left: watch::Sender::new(0),
            moved: AtomicBool::new(false),
            lost: OnceLock::new(),
        })
    }

    /// What is called when the connection ends. Must not block.
    pub(super) fn on_loss(&self, lost: impl Fn() + Send + Sync + 'static) {
        let _ = self.lost.set(Box::new(lost));
    }

    /// How the server is called in messages.
    pub(super) fn shown(&self) -> &str {
        &self.shown
    }

    /// The address of the server, if it is not in the URL.
    pub(super) fn peer(&self) -> Option<String> {
        self.connector.sentinels()?.believed()
    }

    /// What the Sentinels of the server say.
    pub(super) async fn sentinel_states(&self) -> Vec<ServerState> {
        match self.connector.sentinels() {
            Some(sentinels) => sentinels.states().await,
            None => Vec::new(),
        }
    }

    /// Whether there is a connection, as far as known.
    pub(super) fn has_connection(&self) -> bool {
        *self.up.borrow()
    }

    /// Whether there was a connection, and there is none.
    pub(super) fn is_lost(&self) -> bool {
        self.met.load(Ordering::Relaxed) && !self.has_connection()
    }

    /// Who is told when a connection was made again.
    pub(super) fn set_listener(&self, listener: Weak<dyn Listener>) {
        let _ = self.listener.set(listener);
    }

    /// Whether each call must be on one key.
    pub(super) fn wants_one_slot(&self) -> bool {
        self.one_slot.load(Ordering::Relaxed)
    }

    /// Tells when the server is left for another one.
    pub(super) fn leaving(&self) -> watch::Receiver<u64> {
        self.left.subscribe()
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
        let (live, answer) = self.run_behind(None, operation, run).await?;
        self.checked(&live, operation, answer)
    }

    /// The same on this connection and no other.
    pub(super) async fn run_on(
        &self,
        live: &Arc<Live>,
        operation: Operation,
        run: &Run,
    ) -> Result<Value> {
        self.command_on(live, operation, &run.by_text()).await
    }

    /// Sends one command on this connection and no other.
    pub(super) async fn command_on(
        &self,
        live: &Arc<Live>,
        operation: Operation,
        command: &Cmd,
    ) -> Result<Value> {
        let answer = self.send(live, operation, None, command).await?;
        self.checked(live, operation, answer)
    }

    /// The same, each time directly behind another command. The server's refusal is an
    /// answer.
    pub(super) async fn run_behind(
        self: &Arc<Self>,
        first: Option<&Cmd>,
        operation: Operation,
        run: &Run,
    ) -> Result<(Arc<Live>, Value)> {
        let live = self.live(operation).await?;
        let mut answer = self.send(&live, operation, first, run.by_digest()).await?;
        if is_unknown_script(&answer) {
            answer = self.send(&live, operation, first, &run.by_text()).await?;
        }
        Ok((live, answer))
    }

    /// Sends one command.
    pub(super) async fn command(
        self: &Arc<Self>,
        operation: Operation,
        command: &Cmd,
    ) -> Result<Value> {
        let (live, answer) = self.command_behind(None, operation, command).await?;
        self.checked(&live, operation, answer)
    }

    /// The same, directly behind another command. The server's refusal is an answer.
    pub(super) async fn command_behind(
        self: &Arc<Self>,
        first: Option<&Cmd>,
        operation: Operation,
        command: &Cmd,
    ) -> Result<(Arc<Live>, Value)> {
        let live = self.live(operation).await?;
        let answer = self.send(&live, operation, first, command).await?;
        Ok((live, answer))
    }

    pub(super) fn checked(
        &self,
        live: &Arc<Live>,
        operation: Operation,
        answer: Value,
    ) -> Result<Value> {
        if errors::is_not_primary(&answer) {
            // Another server may answer at the same address by now.
            self.end_because(live, errors::replica());
        }
        match answer {
            answer if self.connector.may_be_a_proxy() && errors::is_of_several_slots(&answer) => {
                self.one_slot.store(true, Ordering::Relaxed);
                Err(errors::several_slots(operation))
            }
            Value::ServerError(error) => Err(errors::refused(operation, &error)),
            answer => Ok(answer),
        }
    }

    /// The connection, if there is one on which callers write by themselves.
    pub(super) fn plain(&self) -> Option<Arc<Live>> {
        match &*self.state.lock() {
            State::Up(live) if matches!(live.connection, Connection::Plain(_)) => {
                Some(live.clone())
            }
            _ => None,
        }
    }

    async fn send(
        &self,
        live: &Arc<Live>,
        operation: Operation,
        first: Option<&Cmd>,
        command: &Cmd,
    ) -> Result<Value> {
        let mut pending = Pending { link: self, live, sent: Instant::now(), answered: false };
        let answer = match first {
            Some(first) => live.connection.send_after(first, command).await,
            None => live.connection.send(command).await,
        };
        pending.answered = true;
        match answer {
            Ok(value) => {
                *live.last_received.lock() = Instant::now();
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
                    return Err(why.clone().with_operation(operation));
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
        self.end_because(live, self.broke());
    }

    fn broke(&self) -> Error {
        Error::new(ErrorKind::Unavailable, Operation::Connect)
            .with_message(format!("the connection to Redis at {} broke", self.shown))
    }

    /// Ends a connection that is of no use any more.
    fn end_because(&self, live: &Arc<Live>, why: Error) {
        {
            let mut state = self.state.lock();
            if !matches!(&*state, State::Up(current) if Arc::ptr_eq(current, live)) {
                return;
            }
            *state = State::Down { next: live.since + pause(0), failures: 0, why: Some(why) };
            self.up.send_replace(false);
        }
        live.connection.close();
        if let Some(lost) = self.lost.get() {
            lost();
        }
    }
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
        if !self.live.heard_since(self.sent) {
            self.link.end(self.live);
        }
    }
}

fn is_unknown_script(answer: &Value) -> bool {
    matches!(answer, Value::ServerError(error) if error.kind() == Some(ServerErrorKind::NoScript))
}
