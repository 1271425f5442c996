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
use tokio::task::JoinHandle;

use super::codec::Names;
use super::connection::{CONNECT_TIMEOUT, Link, pause};
use super::errors;
use crate::backend::Listener;
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
    names: Names,
    phase: watch::Sender<Phase>,
    task: Mutex<Option<JoinHandle<()>>>,
    /// Whether a claim was queued since the last probe.
    waiting: Arc<AtomicBool>,
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum Phase {
    First,
    Listening,
    Deaf,
}

impl Notices {
    pub(super) fn new(channel: String, names: Names) -> Self {
        let (phase, task) = (watch::Sender::new(Phase::First), Mutex::new(None));
        Notices { channel, names, phase, task, waiting: Arc::default() }
    }

    /// A claim was queued, or is still: its notice must not be missed.
    pub(super) fn set_waiting(&self) {
        self.waiting.store(true, Ordering::Relaxed);
    }

    /// Subscribes when called first. Waits for that, so that what happens to the
    /// claim sent next is heard; but not for long, since it is not needed.
    pub(super) async fn subscribed(&self, link: &Arc<Link>, listener: &Weak<dyn Listener>) {
        if *self.phase.borrow() == Phase::Listening {
            return;
        }
        {
            let mut task = self.task.lock();
            if task.as_ref().is_none_or(JoinHandle::is_finished) {
                let listening = Listening {
                    link: link.clone(),
                    listener: listener.clone(),
                    channel: self.channel.clone(),
                    names: self.names.clone(),
                    phase: self.phase.clone(),
                    waiting: self.waiting.clone(),
                };
                *task = Some(tokio::spawn(listening.run()));
            }
        }
        let mut phase = self.phase.subscribe();
        let _ =
            tokio::time::timeout(PATIENCE, phase.wait_for(|phase| *phase != Phase::First)).await;
    }
}

impl Drop for Notices {
    fn drop(&mut self) {
        if let Some(task) = self.task.get_mut() {
            task.abort();
        }
    }
}

struct Listening {
    link: Arc<Link>,
    listener: Weak<dyn Listener>,
    channel: String,
    names: Names,
    phase: watch::Sender<Phase>,
    waiting: Arc<AtomicBool>,
}

impl Listening {
    async fn run(self) {
        let mut failures = 0;
        while self.listener.strong_count() > 0 {
            // A server that is down is tried by the other connection only.
            self.link.is_up().await;
            match tokio::time::timeout(CONNECT_TIMEOUT, self.subscribe()).await {
                Ok(Ok((sink, stream))) => {
                    failures = 0;
                    self.phase.send_replace(Phase::Listening);
                    let since = Instant::now();
                    self.hear(sink, stream).await;
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
                        "no subscription to notices of Redis; waiters look once a second"
                    );
                    failures += 1;
                }
            }
            self.phase.send_replace(Phase::Deaf);
            tokio::time::sleep(pause(failures)).await;
        }
    }

    async fn subscribe(&self) -> Result<(PubSubSink, PubSubStream)> {
        let told = |error: RedisError| errors::unanswered(Operation::Connect, &error);
        let client = self.link.client().await?;
        let (mut sink, stream) = client.get_async_pubsub().await.map_err(told)?.split();
        sink.subscribe(&self.channel).await.map_err(told)?;
        Ok((sink, stream))
    }

    /// Passes notices on until the connection ends or goes silent.
    async fn hear(&self, mut sink: PubSubSink, mut stream: PubSubStream) {
        let mut probe = tokio::time::interval(PROBE);
        probe.reset();
        let mut idle = 0;
        loop {
            tokio::select! {
                message = next(&mut stream) => {
                    let Some(message) = message else { return };
                    let Some(listener) = self.listener.upgrade() else { return };
                    let text = std::str::from_utf8(message.get_payload_bytes()).unwrap_or("");
                    if let Some((key, owner, notice)) = self.names.notice(text) {
                        listener.notice(&key, owner, notice);
                    }
                }
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

async fn next(stream: &mut PubSubStream) -> Option<redis::Msg> {
    poll_fn(|cx| Pin::new(&mut *stream).poll_next(cx)).await
}
