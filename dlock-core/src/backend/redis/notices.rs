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
use redis::RedisError;
use redis::aio::{PubSubSink, PubSubStream};
use tokio::sync::watch;

use super::codec::Names;
use super::connection::{CONNECT_TIMEOUT, Link, pause};
use super::errors;
use super::route::Route;
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
    /// Whether a claim was queued since the last probe: its notice must not be missed.
    pub(super) waiting: Arc<AtomicBool>,
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
        Notices { channel, names, confirmed, phase, task, waiting: Arc::default() }
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
                    waiting: self.waiting.clone(),
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
    waiting: Arc<AtomicBool>,
}

impl Listening {
    async fn run(self) {
        let (mut failures, mut again) = (0, false);
        while self.listener.strong_count() > 0 {
            // A server that is down is tried by the other connection only.
            let link = self.route.is_up().await;
            let leaving = link.leaving();
            match tokio::time::timeout(CONNECT_TIMEOUT, self.subscribe(&link)).await {
                Ok(Ok((sink, stream))) => {
                    failures = 0;
                    self.phase.send_replace(Phase::Listening);
                    // What was told meanwhile was not heard.
                    if std::mem::replace(&mut again, true)
                        && let Some(listener) = self.listener.upgrade()
                    {
                        listener.on_reconnected();
                    }
                    let since = Instant::now();
                    self.receive_loop(sink, stream, leaving).await;
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

    async fn subscribe(&self, link: &Link) -> Result<(PubSubSink, PubSubStream)> {
        let failed = |error: RedisError| errors::unanswered(Operation::Connect, &error);
        let client = link.client().await?;
        let (mut sink, stream) = client.get_async_pubsub().await.map_err(failed)?.split();
        sink.subscribe(&self.channel).await.map_err(failed)?;
        Ok((sink, stream))
    }

    /// Passes notices on until the connection ends or goes silent, or its server is
    /// left for another one.
    async fn receive_loop(
        &self,
        mut sink: PubSubSink,
        mut stream: PubSubStream,
        mut leaving: watch::Receiver<u64>,
    ) {
        let mut probe = tokio::time::interval(PROBE);
        probe.reset();
        let mut idle = 0;
        loop {
            tokio::select! {
                message = next(&mut stream) => {
                    let Some(message) = message else { return };
                    let text = message.get_payload_bytes();
                    deliver(&self.listener, &self.names, self.confirmed, text);
                }
                _ = leaving.changed() => return,
                _ = probe.tick() => {
                    idle += 1;
                    if !self.waiting.swap(false, Ordering::Relaxed) && idle < IDLE_PROBES {
                        continue;
                    }
                    idle = 0;
                    let asked = tokio::time::timeout(PROBE, sink.ping::<redis::Value>());
                    if !matches!(asked.await, Ok(Ok(_))) {
                        return;
                    }
                }
            }
        }
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
