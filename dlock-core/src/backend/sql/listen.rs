//! How a client of PostgreSQL hears that a lock was handed to it or broken: `LISTEN` on a
//! connection of its own.
//!
//! ```text
//!   Silent --a session of its own, and a message of its own has arrived--> Session
//!     ^                                                                      |
//!     +-----------the connection broke, or the message did not come----------+
//! ```
//!
//! `LISTEN` must not reach a pooler of transactions: the session that listens would be used
//! by others, and they would get messages that they do not expect. So the connection sets an
//! option of the session when it starts. A pooler refuses such an option, or its sessions do
//! not have it.
//!
//! The message to itself is sent on another connection. Behind a pooler of transactions it
//! never arrives, because the session that listens belongs to nobody between transactions.
//! So a message that arrives proves two things: notices will come, and connections to this
//! address are sessions. Until then the client looks, and prepares no statements by name.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::{Duration, Instant};

use parking_lot::Mutex;
use rand::RngExt as _;
use sqlx::postgres::{PgListener, PgPoolOptions};
use sqlx::{AssertSqlSafe, Row as _, raw_sql};
use tokio::sync::watch;
use tokio::task::JoinHandle;

use super::database::{Database as _, Messages};
use super::errors::Fault;
use super::messages;
use super::postgres::PostgresDatabase;
use super::transaction::Store;
use crate::error::{Error, ErrorKind, Operation};

/// How long the first claim waits for the message to itself.
const PATIENCE: Duration = Duration::from_millis(500);
/// How long a message to itself may take.
const ARRIVAL: Duration = Duration::from_secs(1);
/// How often a client that waits or holds sends a message to itself.
const PROBE: Duration = Duration::from_secs(10);
/// The pause before another attempt to listen. Behind a pooler all of them fail.
const RETRY: Duration = Duration::from_secs(30);
/// The pause before another attempt where messages have come before; it doubles some times.
const RECONNECT: Duration = Duration::from_millis(200);
/// How long a connection that listens may take to be made.
const CONNECT_TIMEOUT: Duration = Duration::from_secs(5);
/// For how long no messages are sent after the server refused one.
const REFUSED: Duration = Duration::from_secs(30);
/// The start of a message to itself.
const HELLO: &str = "hello ";

/// Whether messages arrive.
#[derive(Debug, Default)]
pub(super) struct Listening {
    session: AtomicBool,
    tried: watch::Sender<bool>,
    task: Mutex<Option<JoinHandle<()>>>,
    hellos: AtomicU64,
    /// Until when no messages are sent, since the server refused one.
    refused_until: Mutex<Option<Instant>>,
}

impl Listening {
    /// Whether connections are sessions of the server.
    pub(super) fn is_session(&self) -> bool {
        self.session.load(Ordering::Acquire)
    }

    /// Stops to listen for good.
    pub(super) fn stop(&self) {
        if let Some(task) = &*self.task.lock() {
            task.abort();
        }
    }

    /// A connection turned out not to be a session.
    pub(super) fn is_not_session(&self) {
        self.session.store(false, Ordering::Release);
    }
}

impl Messages for Listening {
    fn arrive(&self) -> bool {
        self.is_session()
    }

    fn are_taken(&self) -> bool {
        self.refused_until.lock().is_none_or(|until| until <= Instant::now())
    }

    fn were_refused(&self) {
        let mut until = self.refused_until.lock();
        if until.is_none() {
            tracing::warn!(
                "PostgreSQL refuses NOTIFY messages (is EXECUTE on pg_notify revoked, or their queue full?); waiting tasks of other processes hear of a release up to a second later"
            );
        }
        *until = Some(Instant::now() + REFUSED);
    }
}

/// Starts to listen when called first. Waits until that has worked or failed, so that what
/// happens to the claim sent next is heard; but not for long, since it is not needed.
pub(super) async fn ensure(store: &Arc<Store<PostgresDatabase>>) {
    let listening = &store.database.listening;
    if listening.is_session() || *listening.tried.borrow() {
        return;
    }
    {
        let mut task = listening.task.lock();
        if task.as_ref().is_none_or(JoinHandle::is_finished) {
            *task = Some(tokio::spawn(listen(store.clone())));
        }
    }
    let mut tried = listening.tried.subscribe();
    let _ = tokio::time::timeout(PATIENCE, tried.wait_for(|tried| *tried)).await;
}

async fn listen(store: Arc<Store<PostgresDatabase>>) {
    let listening = &store.database.listening;
    // Where messages have come before, there is no pooler: the server is away.
    let (mut has_worked, mut failed) = (false, 0_u32);
    loop {
        let received = store.receive_loop().await;
        let had_worked = listening.session.swap(false, Ordering::AcqRel);
        listening.tried.send_replace(true);
        has_worked |= had_worked;
        failed = if had_worked { 0 } else { failed + 1 };
        if let Err(error) = received
            && !has_worked
        {
            tracing::info!(
                why = %error,
                "PostgreSQL delivers no NOTIFY messages, probably because of a pooler; waiting tasks poll the database instead"
            );
        }
        let spread = rand::rng().random_range(0.75..1.25);
        let pause = if has_worked { RECONNECT * (1 << failed.min(3)) } else { RETRY };
        tokio::time::sleep(pause.mul_f64(spread)).await;
    }
}

/// Whether the session has the option that the connection started with.
async fn is_own_session(listener: &mut PgListener, mark: &str) -> sqlx::Result<bool> {
    const SESSION: &str = "SELECT current_setting('dlock.session', true)";
    let found: Option<String> = raw_sql(SESSION).fetch_one(listener).await?.try_get(0)?;
    Ok(found.as_deref() == Some(mark))
}

impl Store<PostgresDatabase> {
    /// Makes a connection that listens, in a session of its own.
    async fn listener(&self) -> Result<PgListener, Error> {
        let fault = |error| self.fault(error).error;
        let mark = format!("{:016x}", rand::rng().random::<u64>());
        let options = self.database.options()?.options([("dlock.session", &mark)]);
        let pool = PgPoolOptions::new()
            .max_connections(1)
            .idle_timeout(None)
            .max_lifetime(None)
            .connect_lazy_with(options);
        let mut listener = PgListener::connect_with(&pool).await.map_err(fault)?;
        listener.eager_reconnect(false);
        if !is_own_session(&mut listener, &mark).await.map_err(fault)? {
            return Err(Error::new(ErrorKind::Unsupported, Operation::Connect).with_message(
                "the session is not the connection's own; there is a pooler in between",
            ));
        }
        listener.listen(&messages::channel(self.client)).await.map_err(fault)?;
        Ok(listener)
    }

    /// Passes notices on until messages no longer come.
    async fn receive_loop(&self) -> Result<(), Error> {
        let fault = |error| self.fault(error).error;
        let connecting = tokio::time::timeout(CONNECT_TIMEOUT, self.listener()).await;
        let late = |_| Err(fault(std::io::Error::from(std::io::ErrorKind::TimedOut).into()));
        let mut listener = connecting.unwrap_or_else(late)?;
        let listening = &self.database.listening;
        let mut expected = Some(self.say_hello().await.map_err(|fault| fault.error)?);
        let mut wait = ARRIVAL;
        loop {
            let message = tokio::time::timeout(wait, listener.try_recv());
            let message = tokio::select! {
                message = message => message,
                // If a call was not answered, messages may not come either.
                () = self.connections.lost.notified(), if expected.is_none() => {
                    expected = Some(self.say_hello().await.map_err(|fault| fault.error)?);
                    wait = ARRIVAL;
                    continue;
                }
            };
            match message {
                Ok(Ok(Some(message))) => match message.payload().strip_prefix(HELLO) {
                    Some(number) => {
                        if number.parse() == Ok(expected.unwrap_or_default()) {
                            expected = None;
                            wait = PROBE;
                            listening.session.store(true, Ordering::Release);
                            listening.tried.send_replace(true);
                        }
                    }
                    None => {
                        for (key, owner, notice) in messages::read(&self.names, message.payload()) {
                            self.notice(&key, owner, notice);
                        }
                    }
                },
                Ok(Ok(None)) => return Ok(()), // the connection broke
                Ok(Err(error)) => return Err(fault(error)),
                Err(_) if expected.is_some() => {
                    // The hello did not come. It is not waited for an UNLISTEN, which a drop
                    // sends: a connection that is cut off would never answer.
                    return Ok(());
                }
                Err(_) if self.tracker.is_empty() => {}
                Err(_) => {
                    expected = Some(self.say_hello().await.map_err(|fault| fault.error)?);
                    wait = ARRIVAL;
                }
            }
        }
    }

    /// Sends a message to itself, on another connection.
    async fn say_hello(&self) -> Result<u64, Fault> {
        self.in_time(self.try_hello()).await
    }

    async fn try_hello(&self) -> Result<u64, Fault> {
        let number = self.database.listening.hellos.fetch_add(1, Ordering::Relaxed) + 1;
        let channel = messages::channel(self.client);
        let mut in_use = self.connections.take(&self.database).await?;
        // Both are digits and letters of our own making.
        let statement = AssertSqlSafe(format!("NOTIFY {channel}, '{HELLO}{number}'"));
        let executed = raw_sql(statement).execute(in_use.conn()).await;
        executed.map_err(|error| self.fault(error))?;
        in_use.give_back();
        Ok(number)
    }
}
