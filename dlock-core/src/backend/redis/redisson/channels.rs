//! Waiting in the layout of Redisson: a message on the channel of a lock says that it is
//! free, and whoever waits for it tries again.
//!
//! ```text
//!   queued --> channel wanted --> subscribed --> look again --> message --> look again
//!                                    ^               |
//!                                    '-- connection made anew
//! ```
//!
//! A message between a look and the subscription would be missed, so everybody looks again
//! when a channel was subscribed to. A message while a request is under way makes its answer
//! old: [`Channels::queued`] then says so, and it is asked again at once. What is missed
//! nevertheless costs a second, as with every backend.

use std::collections::{HashMap, HashSet};
use std::sync::{Arc, Weak};
use std::time::{Duration, Instant};

use parking_lot::Mutex;
use rand::RngExt as _;
use redis::RedisError;
use redis::aio::{PubSubSink, PubSubStream};
use tokio::runtime::Handle;
use tokio::sync::Notify;

use super::super::connection::{CONNECT_TIMEOUT, Link, pause};
use super::super::errors;
use super::super::notices::next;
use crate::backend::abort_on_drop::AbortOnDrop;
use crate::backend::{Listener, Notice};
use crate::claim::Owner;
use crate::error::{Operation, Result};
use crate::key::Key;

/// How often it is looked whether the connection lives and which channels are not needed.
const TICK: Duration = Duration::from_secs(1);
/// How long a channel stays subscribed to when nobody waits for its lock any more.
const KEPT: Duration = Duration::from_secs(10);
/// The longest random pause between a message and the next try. There is no queue, so the
/// quickest gets the lock: without a pause that would seldom be a Java program.
const PAUSE: Duration = Duration::from_millis(5);

/// The channels of the locks that this client waits for.
pub(super) struct Channels {
    shared: Arc<Shared>,
    task: Mutex<Option<AbortOnDrop>>,
}

struct Shared {
    link: Arc<Link>,
    listener: Mutex<Option<Weak<dyn Listener>>>,
    channels: Mutex<HashMap<String, Channel>>,
    /// A channel is wanted that is not subscribed to.
    wanted: Notify,
}

struct Channel {
    key: Key,
    waiters: HashSet<Owner>,
    subscribed: bool,
    /// When a message came last.
    last_message: Option<Instant>,
    /// Since when nobody waits.
    idle: Instant,
}

impl Channels {
    pub(super) fn new(link: Arc<Link>) -> Self {
        let shared = Shared {
            link,
            listener: Mutex::default(),
            channels: Mutex::default(),
            wanted: Notify::new(),
        };
        Channels { shared: Arc::new(shared), task: Mutex::new(None) }
    }

    pub(super) fn set_listener(&self, listener: Weak<dyn Listener>) {
        *self.shared.listener.lock() = Some(listener);
    }

    /// How many subscribers of a channel this client is.
    pub(super) fn subscribers(&self, channel: &str) -> usize {
        let channels = self.shared.channels.lock();
        usize::from(channels.get(channel).is_some_and(|it| it.subscribed))
    }

    /// A request that was sent then was answered: somebody else has the lock. Whether it was
    /// told meanwhile that the lock is free.
    pub(super) fn queued(
        &self,
        runtime: &Handle,
        name: String,
        key: &Key,
        owner: Owner,
        sent: Instant,
    ) -> bool {
        let is_free = {
            let mut channels = self.shared.channels.lock();
            let channel = channels.entry(name).or_insert_with(|| Channel {
                key: key.clone(),
                waiters: HashSet::new(),
                subscribed: false,
                last_message: None,
                idle: sent,
            });
            channel.waiters.insert(owner);
            if !channel.subscribed {
                self.shared.wanted.notify_one();
            }
            channel.last_message.is_some_and(|at| at >= sent)
        };
        let mut task = self.task.lock();
        if task.as_ref().is_none_or(|task| task.0.is_finished()) {
            let listening = runtime.spawn(listen(Arc::downgrade(&self.shared)));
            *task = Some(AbortOnDrop(listening.abort_handle()));
        }
        is_free
    }

    /// An owner does not wait any more.
    pub(super) fn forget(&self, name: &str, owner: Owner) {
        if let Some(channel) = self.shared.channels.lock().get_mut(name)
            && channel.waiters.remove(&owner)
        {
            channel.idle = Instant::now();
        }
    }
}

impl Shared {
    /// A message says that the lock of this channel is free.
    fn on_release_message(self: &Arc<Self>, name: &str) {
        if let Some(channel) = self.channels.lock().get_mut(name) {
            channel.last_message = Some(Instant::now());
        }
        let (shared, name) = (Arc::downgrade(self), name.to_owned());
        let pause = rand::rng().random_range(Duration::ZERO..PAUSE);
        tokio::spawn(async move {
            tokio::time::sleep(pause).await;
            if let Some(shared) = shared.upgrade() {
                shared.wake(&name);
            }
        });
    }

    /// Lets those who wait for the lock of this channel try again.
    fn wake(&self, name: &str) {
        let (key, waiters) = {
            let channels = self.channels.lock();
            let Some(channel) = channels.get(name) else { return };
            (channel.key.clone(), channel.waiters.iter().copied().collect::<Vec<_>>())
        };
        let listener = self.listener.lock().clone();
        if let Some(listener) = listener.as_ref().and_then(Weak::upgrade) {
            for owner in waiters {
                listener.on_notice(&key, owner, Notice::TryAgain);
            }
        }
    }

    /// Subscribes to what is wanted, and lets those who wait look again.
    async fn subscribe_wanted(&self, sink: &mut PubSubSink) -> std::result::Result<(), RedisError> {
        let wanted: Vec<String> = {
            let channels = self.channels.lock();
            let is_new = channels.iter().filter(|(_, channel)| !channel.subscribed);
            is_new.map(|(name, _)| name.clone()).collect()
        };
        for name in wanted {
            sink.subscribe(&name).await?;
            if let Some(channel) = self.channels.lock().get_mut(&name) {
                channel.subscribed = true;
            }
            self.wake(&name);
        }
        Ok(())
    }

    /// Leaves channels that nobody has needed for some time. Whether somebody waits.
    async fn leave_idle(&self, sink: &mut PubSubSink) -> std::result::Result<bool, RedisError> {
        let idle: Vec<String> = {
            let mut channels = self.channels.lock();
            let is_idle =
                |channel: &Channel| channel.waiters.is_empty() && channel.idle.elapsed() >= KEPT;
            let idle = channels.extract_if(|_, channel| is_idle(channel));
            idle.map(|(name, _)| name).collect()
        };
        for name in idle {
            sink.unsubscribe(&name).await?;
        }
        Ok(self.channels.lock().values().any(|channel| !channel.waiters.is_empty()))
    }

    async fn connect(&self) -> Result<(PubSubSink, PubSubStream)> {
        let client = self.link.client().await?;
        let connected = client.get_async_pubsub().await;
        Ok(connected.map_err(|error| errors::unanswered(Operation::Connect, &error))?.split())
    }

    /// Hears messages until the connection ends or goes silent, or its server is left for
    /// another one.
    async fn receive_loop(self: &Arc<Self>, mut sink: PubSubSink, mut stream: PubSubStream) {
        let mut leaving = self.link.leaving();
        let mut tick = tokio::time::interval(TICK);
        tick.reset();
        if self.subscribe_wanted(&mut sink).await.is_err() {
            return;
        }
        loop {
            tokio::select! {
                message = next(&mut stream) => {
                    let Some(message) = message else { return };
                    self.on_release_message(message.get_channel_name());
                }
                () = self.wanted.notified() => {
                    let subscribed = tokio::time::timeout(TICK, self.subscribe_wanted(&mut sink));
                    if !matches!(subscribed.await, Ok(Ok(()))) {
                        return;
                    }
                }
                _ = leaving.changed() => return,
                _ = tick.tick() => {
                    let left = tokio::time::timeout(TICK, self.leave_idle(&mut sink)).await;
                    let Ok(Ok(somebody_waits)) = left else { return };
                    if somebody_waits {
                        let asked = tokio::time::timeout(TICK, sink.ping::<redis::Value>());
                        if !matches!(asked.await, Ok(Ok(_))) {
                            return;
                        }
                    }
                }
            }
        }
    }
}

/// Hears the channels for as long as the backend lives.
async fn listen(shared: Weak<Shared>) {
    let mut failures = 0;
    while let Some(shared) = shared.upgrade() {
        shared.link.is_up().await;
        match tokio::time::timeout(CONNECT_TIMEOUT, shared.connect()).await {
            Ok(Ok((sink, stream))) => {
                failures = 0;
                shared.receive_loop(sink, stream).await;
            }
            _ => {
                tracing::warn!(
                    "the subscription for wake-ups in Redis failed; waiting tasks poll once a second until it works"
                );
                failures += 1;
            }
        }
        for channel in shared.channels.lock().values_mut() {
            channel.subscribed = false;
        }
        tokio::time::sleep(pause(failures)).await;
    }
}
