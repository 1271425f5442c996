//! The connection for notices: one channel for the whole client, which nobody
//! else listens to. A notice that gets lost costs little: waiters ask again about
//! once a second, and holders hear of their loss at the next renewal.

use std::future::poll_fn;
use std::pin::Pin;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Weak};
use std::time::{Duration, Instant};

use futures_core::Stream as _;
use parking_lot::Mutex;
use redis::aio::{PubSubSink, PubSubStream};
use redis::{RedisError, Value};
use tokio::sync::watch;

use super::codec::Names;
use super::connection::{CONNECT_TIMEOUT, Link, pause};
use super::errors;
use super::pipeline::Pipeline;
use super::reader::Readers;
use super::route::Route;
use super::socket::Socket;
use crate::backend::abort_on_drop::AbortOnDrop;
use crate::backend::{Listener, Notice};
use crate::error::{Operation, Result};

/// How long a first claim waits for the subscription.
const PATIENCE: Duration = Duration::from_millis(500);
/// How often the server is asked whether it is still there while somebody waits for a
/// lock, and how long it has for the answer.
const PROBE: Duration = Duration::from_secs(1);
/// The same while nobody waits, as a multiple of that.
const IDLE_PROBES: u32 = 10;

/// What a client hears.
pub(super) struct Notices {
    pub(super) channel: String,
    pub(super) names: Names,
    /// Whether a lock that was handed over counts only when it was confirmed.
    pub(super) confirmed: bool,
    phase: watch::Sender<Phase>,
    task: Mutex<Option<AbortOnDrop>>,
    pub(super) waits: Arc<Waits>,
}

/// Who waits for a notice, and where it is read.
#[derive(Default)]
pub(super) struct Waits {
    /// Whether a claim was queued since the last probe: its notice must not be missed.
    queued: AtomicBool,
    /// The connection, without TLS.
    pipeline: Mutex<Option<Arc<Pipeline>>>,
}

impl Waits {
    /// A claim was queued. Its task is told soonest if its own runtime reads the notice, so
    /// this is to be called there.
    pub(super) fn on_queued(&self) {
        self.queued.store(true, Ordering::Relaxed);
        if let Some(pipeline) = &*self.pipeline.lock() {
            Readers::read_here(pipeline);
        }
    }
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum Phase {
    First,
    Listening,
    Deaf,
}

impl Notices {
    pub(super) fn new(channel: String, names: Names, confirmed: bool) -> Self {
        let (phase, task) = (watch::Sender::new(Phase::First), Mutex::new(None));
        Notices { channel, names, confirmed, phase, task, waits: Arc::default() }
    }

    /// Whether what happens to a claim that is sent now is heard.
    pub(super) fn is_listening(&self) -> bool {
        *self.phase.borrow() == Phase::Listening
    }

    /// Subscribes when called first. Waits for that, so that what happens to the
    /// claim sent next is heard; but not for long, since it is not needed.
    pub(super) async fn subscribed(&self, route: &Route, listener: &Weak<dyn Listener>) {
        if self.is_listening() {
            return;
        }
        {
            let mut task = self.task.lock();
            if task.as_ref().is_none_or(|task| task.0.is_finished()) {
                let listening = Listening {
                    route: route.clone(),
                    listener: listener.clone(),
                    channel: self.channel.clone(),
                    names: self.names.clone(),
                    confirmed: self.confirmed,
                    phase: self.phase.clone(),
                    waits: self.waits.clone(),
                };
                *task = Some(AbortOnDrop(tokio::spawn(listening.run()).abort_handle()));
            }
        }
        let mut phase = self.phase.subscribe();
        let _ =
            tokio::time::timeout(PATIENCE, phase.wait_for(|phase| *phase != Phase::First)).await;
    }
}

struct Listening {
    route: Route,
    listener: Weak<dyn Listener>,
    channel: String,
    names: Names,
    confirmed: bool,
    phase: watch::Sender<Phase>,
    waits: Arc<Waits>,
}

impl Listening {
    async fn run(self) {
        let (mut failures, mut again) = (0, false);
        while self.listener.strong_count() > 0 {
            // A server that is down is tried by the other connection only.
            let link = self.route.is_up().await;
            let leaving = link.leaving();
            match tokio::time::timeout(CONNECT_TIMEOUT, self.subscribe(&link)).await {
                Ok(Ok(subscription)) => {
                    failures = 0;
                    self.phase.send_replace(Phase::Listening);
                    // What was told meanwhile was not heard.
                    if std::mem::replace(&mut again, true)
                        && let Some(listener) = self.listener.upgrade()
                    {
                        listener.on_reconnected();
                    }
                    let since = Instant::now();
                    self.receive(subscription, leaving).await;
                    self.phase.send_replace(Phase::Deaf);
                    if since.elapsed() > PROBE {
                        continue; // at once: it was good until now
                    }
                }
                failed => {
                    let why = match failed {
                        Ok(Err(error)) => error.to_string(),
                        _ => "no answer in time".to_owned(),
                    };
                    tracing::warn!(
                        why,
                        "the subscription for wake-ups in Redis failed; waiting tasks poll once a second until it works"
                    );
                    failures += 1;
                }
            }
            self.phase.send_replace(Phase::Deaf);
            tokio::time::sleep(pause(failures)).await;
        }
    }

    async fn subscribe(&self, link: &Link) -> Result<Subscription> {
        let failed = |error: RedisError| errors::unanswered(Operation::Connect, &error);
        let client = link.client().await?;
        let socket = Socket::connect(client.get_connection_info()).await.map_err(failed)?;
        let Some(socket) = socket else {
            let (mut sink, stream) = client.get_async_pubsub().await.map_err(failed)?.split();
            sink.subscribe(&self.channel).await.map_err(failed)?;
            return Ok(Subscription::Tls(sink, stream));
        };
        let (listener, names) = (self.listener.clone(), self.names.clone());
        let confirmed = self.confirmed;
        let on_message =
            Box::new(move |message: &[u8]| deliver(&listener, &names, confirmed, message));
        let subscriber = Subscriber(Pipeline::of_subscriber(socket, on_message));
        let mut subscribe = redis::cmd("SUBSCRIBE");
        match subscriber.0.send(subscribe.arg(&self.channel)).await.map_err(failed)? {
            Value::ServerError(error) => Err(errors::refused(Operation::Connect, &error)),
            _ => Ok(Subscription::Plain(subscriber)),
        }
    }

    /// Passes notices on until the connection ends or goes silent, or its server is
    /// left for another one.
    async fn receive(&self, subscription: Subscription, mut leaving: watch::Receiver<u64>) {
        match subscription {
            Subscription::Plain(subscriber) => {
                let pipeline = &subscriber.0;
                *self.waits.pipeline.lock() = Some(pipeline.clone());
                tokio::select! {
                    () = pipeline.watch() => {}
                    () = self.probe(Probe::Plain(pipeline)) => {}
                    _ = leaving.changed() => {}
                }
                *self.waits.pipeline.lock() = None;
            }
            Subscription::Tls(mut sink, mut stream) => {
                let hear = async {
                    while let Some(message) = next(&mut stream).await {
                        let text = message.get_payload_bytes();
                        deliver(&self.listener, &self.names, self.confirmed, text);
                    }
                };
                tokio::select! {
                    () = hear => {}
                    () = self.probe(Probe::Tls(&mut sink)) => {}
                    _ = leaving.changed() => {}
                }
            }
        }
    }

    /// Asks now and then whether the server is still there. Returns when it is not.
    async fn probe(&self, mut probe: Probe<'_>) {
        let mut interval = tokio::time::interval(PROBE);
        interval.reset();
        let mut idle = 0;
        loop {
            interval.tick().await;
            idle += 1;
            if !self.waits.queued.swap(false, Ordering::Relaxed) && idle < IDLE_PROBES {
                continue;
            }
            idle = 0;
            if !matches!(tokio::time::timeout(PROBE, probe.is_answered()).await, Ok(true)) {
                return;
            }
        }
    }
}

/// A connection that is subscribed.
enum Subscription {
    Plain(Subscriber),
    Tls(PubSubSink, PubSubStream),
}

/// The way of a question whether the server is still there.
enum Probe<'a> {
    Plain(&'a Arc<Pipeline>),
    Tls(&'a mut PubSubSink),
}

impl Probe<'_> {
    async fn is_answered(&mut self) -> bool {
        match self {
            Probe::Plain(pipeline) => pipeline.send(&redis::cmd("PING")).await.is_ok(),
            Probe::Tls(sink) => sink.ping::<Value>().await.is_ok(),
        }
    }
}

/// Ends the connection when it is dropped.
struct Subscriber(Arc<Pipeline>);

impl Drop for Subscriber {
    fn drop(&mut self) {
        self.0.close();
    }
}

/// Passes a notice on. `confirmed`: a lock that was handed over counts only when it was
/// asked for once more.
pub(super) fn deliver(
    listener: &Weak<dyn Listener>,
    names: &Names,
    confirmed: bool,
    message: &[u8],
) {
    let Some(listener) = listener.upgrade() else { return };
    let text = std::str::from_utf8(message).unwrap_or("");
    if let Some((key, owner, notice)) = names.notice(text) {
        let ask = confirmed && matches!(notice, Notice::Granted { .. });
        listener.on_notice(&key, owner, if ask { Notice::TryAgain } else { notice });
    }
}

/// The next message; `None` at the end of the connection.
pub(super) async fn next(stream: &mut PubSubStream) -> Option<redis::Msg> {
    poll_fn(|cx| Pin::new(&mut *stream).poll_next(cx)).await
}
