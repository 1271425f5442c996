//! Hearing of hand-overs at the node that makes them (Redis 7 and newer).
//!
//! `PUBLISH` sends a message to every node of a cluster, `SPUBLISH` only to the node that
//! serves the slot of the channel. So a client whose claim waits subscribes to a channel of
//! that lock: the lock's name, which has its hash tag, and the client's own channel. The
//! script publishes there first, and to the client's own channel, at every node, only if
//! nobody at its node listens. So nothing depends on these subscriptions, and they may be
//! missing: while they are made, while a slot moves, and at a server without them.
//!
//! ```text
//!   a claim waits --> Wanted --SSUBSCRIBE--> Subscribed --not wanted for IDLE--> gone
//!                        |                       |                                ^
//!                        '-- refused, connection lost, slot moved ----------------'
//! ```
//!
//! A channel that is gone is subscribed to again when its claim asks again, which it does
//! about once a second; after a move of its slot at once.

use std::collections::HashMap;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Weak};
use std::time::{Duration, Instant};

use parking_lot::Mutex;
use redis::aio::MultiplexedConnection;
use redis::{Cmd, PushInfo, PushKind, RedisResult, Value, cmd};
use tokio::sync::mpsc::{UnboundedReceiver, UnboundedSender, unbounded_channel};

use super::super::codec::Names;
use super::super::connection::{CONNECT_TIMEOUT, pause};
use super::super::connector::settings;
use super::super::notices::deliver;
use super::Cluster;
use super::slots::{Node, slot_of};
use crate::backend::Listener;
use crate::backend::abort_on_drop::AbortOnDrop;

/// How long a channel is kept that nobody wants any more.
const IDLE: Duration = Duration::from_secs(10);
/// A channel that was wanted within this time is subscribed to again when its slot moved.
const RECENT: Duration = Duration::from_secs(3);
/// The pause before that: the map is asked for first.
const AFTER_MOVE: Duration = Duration::from_millis(200);
/// How often connections are probed while somebody waits, and how long an answer takes.
const PROBE: Duration = Duration::from_secs(1);
/// The most channels. Hand-overs of further locks are told by a broadcast.
const MOST: usize = 10_000;

/// The channels of locks that claims of this client wait for.
pub(in super::super) struct ShardNotices {
    channels: Arc<Channels>,
    events: UnboundedSender<Event>,
    /// Until the task takes it.
    receiver: Mutex<Option<UnboundedReceiver<Event>>>,
    task: Mutex<Option<AbortOnDrop>>,
}

#[derive(Default)]
struct Channels {
    /// By the name of the lock.
    wanted: Mutex<HashMap<String, Wanted>>,
    /// Whether the servers know no such channels, or the user may not use them.
    refused: AtomicBool,
}

struct Wanted {
    last: Instant,
    /// The connection on which it was subscribed to.
    connection: Option<u64>,
}

enum Event {
    /// A lock is waited for.
    Wanted(String),
    Connected(Node, u64, RedisResult<MultiplexedConnection>),
    Refused(String, String),
    Pushed(u64, PushInfo),
    /// A connection is of no use any more.
    Lost(u64),
}

impl ShardNotices {
    pub(in super::super) fn new() -> Arc<Self> {
        let (events, receiver) = unbounded_channel();
        let (channels, receiver) = (Arc::default(), Mutex::new(Some(receiver)));
        Arc::new(ShardNotices { channels, events, receiver, task: Mutex::new(None) })
    }

    /// A claim waits for the lock of this name.
    pub(in super::super) fn wait_for(&self, name: String) {
        if self.channels.refused.load(Ordering::Relaxed) {
            return;
        }
        let mut wanted = self.channels.wanted.lock();
        let last = Instant::now();
        if let Some(known) = wanted.get_mut(&name) {
            known.last = last;
        } else if wanted.len() < MOST {
            wanted.insert(name.clone(), Wanted { last, connection: None });
            drop(wanted);
            let _ = self.events.send(Event::Wanted(name)); // without a task nobody hears
        }
    }

    /// Listens in this runtime from now on, when called first.
    pub(in super::super) fn listen(
        &self,
        cluster: &Arc<Cluster>,
        channel: &str,
        names: &Names,
        confirmed: bool,
        listener: &Weak<dyn Listener>,
    ) {
        let Some(events) = self.receiver.lock().take() else { return };
        let listening = Listening {
            cluster: cluster.clone(),
            suffix: format!(":{channel}"),
            names: names.clone(),
            confirmed,
            listener: listener.clone(),
            channels: self.channels.clone(),
            events: self.events.clone(),
            connections: HashMap::new(),
            failed: HashMap::new(),
            made: 0,
        };
        *self.task.lock() = Some(AbortOnDrop(tokio::spawn(listening.run(events)).abort_handle()));
    }
}

/// A connection to a node, or one that is being made.
struct Connection {
    number: u64,
    to: Option<MultiplexedConnection>,
    /// Names that wait for the connection.
    waiting: Vec<String>,
}

struct Listening {
    cluster: Arc<Cluster>,
    /// What the name of a lock is followed by in the name of its channel.
    suffix: String,
    names: Names,
    confirmed: bool,
    listener: Weak<dyn Listener>,
    channels: Arc<Channels>,
    events: UnboundedSender<Event>,
    connections: HashMap<Node, Connection>,
    /// The nodes to which no connection could be made.
    failed: HashMap<Node, Failed>,
    made: u64,
}

/// The attempts to connect that failed, and until when there is no other one.
struct Failed {
    failures: u32,
    until: Instant,
}

impl Listening {
    async fn run(mut self, mut events: UnboundedReceiver<Event>) {
        let mut probe = tokio::time::interval(PROBE);
        while self.listener.strong_count() > 0 {
            tokio::select! {
                event = events.recv() => match event {
                    Some(event) => self.on_event(event),
                    None => return,
                },
                _ = probe.tick() => self.tick(),
            }
        }
    }

    fn on_event(&mut self, event: Event) {
        match event {
            Event::Wanted(name) => self.subscribe(name),
            Event::Connected(node, number, made) => self.connected(&node, number, made),
            Event::Refused(name, why) => {
                self.channels.wanted.lock().remove(&name);
                if why.contains("unknown command") || why.contains("NOPERM") {
                    tracing::debug!(target: "dlock::redis", why, "no sharded channels");
                    self.channels.refused.store(true, Ordering::Relaxed);
                } else {
                    self.cluster.stale.notify_one();
                }
            }
            Event::Pushed(number, PushInfo { kind, data }) => match (kind, &*data) {
                (PushKind::SMessage, [_, Value::BulkString(message)]) => {
                    deliver(&self.listener, &self.names, self.confirmed, message);
                }
                (PushKind::SUnsubscribe, [Value::BulkString(channel), ..]) => {
                    let channel = String::from_utf8_lossy(channel);
                    if let Some(name) = channel.strip_suffix(&self.suffix) {
                        self.moved(name, number);
                    }
                }
                (PushKind::Disconnection, _) => self.lost(number),
                _ => {}
            },
            Event::Lost(number) => self.lost(number),
        }
    }

    fn subscribe(&mut self, name: String) {
        let node = self.cluster.map.read().owner(slot_of(&name)).cloned();
        let Some(node) = node else {
            self.channels.wanted.lock().remove(&name);
            return;
        };
        if let Some(connection) = self.connections.get_mut(&node) {
            let number = connection.number;
            match connection.to.clone() {
                Some(to) => self.subscribe_on(name, number, to),
                None => connection.waiting.push(name),
            }
            return;
        }
        if self.failed.get(&node).is_some_and(|failed| Instant::now() < failed.until) {
            self.channels.wanted.lock().remove(&name); // until then it is broadcast
            return;
        }
        self.made += 1;
        let (number, events) = (self.made, self.events.clone());
        let connection = Connection { number, to: None, waiting: vec![name] };
        self.connections.insert(node.clone(), connection);
        let endpoint = self.cluster.endpoint.at(&node.host, node.port).with_pushes();
        tokio::spawn(async move {
            let pushed = events.clone();
            let push = move |info| pushed.send(Event::Pushed(number, info));
            let connecting = async {
                let client = endpoint.client().await.map_err(std::io::Error::other)?;
                let config = settings().set_push_sender(push);
                client.get_multiplexed_async_connection_with_config(&config).await
            };
            let made = tokio::time::timeout(CONNECT_TIMEOUT, connecting).await;
            let made = made.unwrap_or_else(|late| Err(std::io::Error::from(late).into()));
            let _ = events.send(Event::Connected(node, number, made));
        });
    }

    fn connected(&mut self, node: &Node, number: u64, made: RedisResult<MultiplexedConnection>) {
        let known = self.connections.get_mut(node).filter(|known| known.number == number);
        let Some(known) = known else { return };
        let waiting = std::mem::take(&mut known.waiting);
        match made {
            Ok(to) => {
                known.to = Some(to.clone());
                self.failed.remove(node);
                waiting.into_iter().for_each(|name| self.subscribe_on(name, number, to.clone()));
            }
            Err(_) => {
                self.connections.remove(node);
                let failures = self.failed.get(node).map_or(0, |failed| failed.failures);
                let failed =
                    Failed { failures: failures + 1, until: Instant::now() + pause(failures) };
                self.failed.insert(node.clone(), failed);
                self.channels.wanted.lock().retain(|name, _| !waiting.contains(name));
            }
        }
    }

    fn subscribe_on(&self, name: String, number: u64, to: MultiplexedConnection) {
        if let Some(wanted) = self.channels.wanted.lock().get_mut(&name) {
            wanted.connection = Some(number);
        }
        let mut subscribe = cmd("SSUBSCRIBE");
        subscribe.arg(format!("{name}{}", self.suffix));
        let events = self.events.clone();
        tokio::spawn(async move {
            if let Err(why) = answered(to, &subscribe).await {
                let _ = events.send(Event::Refused(name, why));
            }
        });
    }

    /// The server ended a subscription: the slot has moved.
    fn moved(&mut self, name: &str, number: u64) {
        let mut wanted = self.channels.wanted.lock();
        let known = wanted.get_mut(name).filter(|known| known.connection == Some(number));
        let Some(known) = known else { return };
        self.cluster.stale.notify_one();
        if known.last.elapsed() > RECENT {
            wanted.remove(name);
            return;
        }
        known.connection = None;
        let (events, name) = (self.events.clone(), name.to_owned());
        tokio::spawn(async move {
            tokio::time::sleep(AFTER_MOVE).await;
            let _ = events.send(Event::Wanted(name));
        });
    }

    fn lost(&mut self, number: u64) {
        let mut gone = Vec::new();
        self.connections.retain(|_, known| {
            if known.number == number {
                gone.append(&mut known.waiting);
            }
            known.number != number
        });
        let mut wanted = self.channels.wanted.lock();
        wanted.retain(|name, known| known.connection != Some(number) && !gone.contains(name));
    }

    /// Drops what nobody wants any more, and finds connections that went silent.
    fn tick(&mut self) {
        let mut idle: HashMap<u64, Vec<String>> = HashMap::new();
        let mut used: HashMap<u64, bool> = HashMap::new();
        self.channels.wanted.lock().retain(|name, known| {
            let unused = known.last.elapsed();
            let Some(number) = known.connection else { return unused <= IDLE };
            if unused > IDLE {
                idle.entry(number).or_default().push(format!("{name}{}", self.suffix));
                return false;
            }
            *used.entry(number).or_default() |= unused < 2 * PROBE;
            true
        });
        self.connections.retain(|_, known| known.to.is_none() || used.contains_key(&known.number));
        for Connection { number, to, .. } in self.connections.values() {
            let Some(to) = to else { continue };
            let mut commands = Vec::new();
            for channel in idle.remove(number).unwrap_or_default() {
                let mut unsubscribe = cmd("SUNSUBSCRIBE");
                unsubscribe.arg(channel);
                commands.push(unsubscribe);
            }
            if used.get(number) == Some(&true) {
                commands.push(cmd("PING"));
            }
            for command in commands {
                let (to, events, number) = (to.clone(), self.events.clone(), *number);
                tokio::spawn(async move {
                    if answered(to, &command).await.is_err() {
                        let _ = events.send(Event::Lost(number));
                    }
                });
            }
        }
    }
}

/// Sends a command, and says why there is no answer in time, or what the refusal is.
async fn answered(mut to: MultiplexedConnection, command: &Cmd) -> Result<(), String> {
    match tokio::time::timeout(PROBE, to.send_packed_command(command)).await {
        Ok(Ok(Value::ServerError(error))) => Err(format!("{error:?}")),
        Ok(Ok(_)) => Ok(()),
        Ok(Err(error)) => Err(error.to_string()),
        Err(_) => Err("no answer in time".to_owned()),
    }
}
