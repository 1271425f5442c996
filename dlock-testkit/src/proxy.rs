//! A TCP proxy between clients and a Redis server that injects network faults: it
//! delays, stalls, cuts or silences connections, loses replies and duplicates
//! messages.
//!
//! It knows where messages end and which reply belongs to which request. So a client
//! only reads streams that a real network and server could produce: a reply is never
//! missing between two others. If a reply is lost, its connection is cut; a request
//! that was sent twice is answered once.
//!
//! What is not RESP, such as TLS or a stream of replication, is forwarded as it is.

mod forwarding;

use std::collections::BTreeSet;
use std::sync::atomic::{AtomicU16, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use tokio::net::TcpListener;
use tokio::sync::watch;
use tokio::task::JoinHandle;

/// The direction of a message through the proxy.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Way {
    /// Requests, from client to server.
    ToServer,
    /// Replies and push messages, from server to client.
    ToClient,
}

impl Way {
    const BOTH: [Way; 2] = [Way::ToServer, Way::ToClient];
}

/// A fault that happens once, to the next message that matches; see [`Proxy::once`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Once {
    /// A request is forwarded, and the connection is cut instead of its reply.
    LoseReply,
    /// A request is kept by the proxy, and its connection stays open without an answer;
    /// see [`Proxy::held`].
    HoldRequest,
    /// A request is forwarded twice, and answered once.
    DuplicateRequest,
    /// A push message is dropped.
    LosePush,
    /// A push message is delivered twice.
    DuplicatePush,
}

/// A proxy for one server, on a loopback port of its own.
#[derive(Debug)]
pub struct Proxy {
    port: u16,
    shared: Arc<Shared>,
    accepting: JoinHandle<()>,
}

#[derive(Debug)]
struct Shared {
    /// Whether the bytes are those of Redis. Else what arrives together is a message.
    is_resp: bool,
    /// Whether the server is called a single one, see [`Proxy::sharding`].
    disguises: bool,
    /// The port of the server that new connections lead to.
    server: AtomicU16,
    conditions: watch::Sender<Conditions>,
    state: Mutex<State>,
}

#[derive(Clone, Copy, Debug, Default)]
struct Conditions {
    delay: [Duration; 2],
    stalled: [bool; 2],
    /// New connections are accepted and never answered.
    silent: bool,
    /// There is no listener, so nobody can connect.
    refused: bool,
    /// Connections with a lower number are closed on the side of the client.
    hung_up_below: u64,
    /// Connections with a lower number are cut.
    cut_below: u64,
    /// The same, but only for connections that subscribed.
    subscribers_cut_below: u64,
    /// Connections with a lower number are kept open, and nothing is forwarded.
    frozen_below: u64,
    /// The connection with this number is frozen by itself.
    frozen: Option<u64>,
    /// The same as `frozen_below`, but only for connections that subscribed.
    subscribers_frozen_below: u64,
}

impl Conditions {
    /// Whether nothing is forwarded on the connection with this number.
    fn is_frozen(&self, number: u64, subscribes: bool) -> bool {
        number < self.frozen_below
            || self.frozen == Some(number)
            || (subscribes && number < self.subscribers_frozen_below)
    }

    fn is_cut(&self, number: u64, subscribes: bool) -> bool {
        number < self.cut_below || (subscribes && number < self.subscribers_cut_below)
    }
}

#[derive(Debug, Default)]
struct State {
    attempts: Vec<Instant>,
    open: usize,
    /// The numbers of the open connections on which a client of dlock subscribed.
    subscribers: BTreeSet<u64>,
    /// Each fault with a string that the message must contain.
    once: Vec<(Once, Vec<u8>)>,
    done: u64,
    /// The requests that arrived while they were held back.
    held_back: Vec<u8>,
    /// The replies for clients that were hung up on.
    unheard: Vec<u8>,
    /// The requests of [`Once::HoldRequest`].
    held: Vec<Vec<u8>>,
}

fn contains(bytes: &[u8], text: &str) -> bool {
    bytes.windows(text.len()).any(|at| at == text.as_bytes())
}

impl Shared {
    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn subscribes(&self, number: u64) -> bool {
        self.state().subscribers.contains(&number)
    }

    /// Removes this fault from the list if it matches the message; whether it did.
    fn take_fault(&self, what: Once, message: &[u8]) -> bool {
        let mut state = self.state();
        let place = state.once.iter().position(|(once, text)| {
            *once == what && (text.is_empty() || message.windows(text.len()).any(|at| at == text))
        });
        let Some(place) = place else { return false };
        state.once.remove(place);
        state.done += 1;
        true
    }
}

impl Proxy {
    /// Starts a proxy for the server at this loopback port.
    ///
    /// # Panics
    /// If no port is free.
    pub async fn start(server: u16) -> Self {
        Self::listen(server)
    }

    /// The same from a thread of a runtime that does not await.
    ///
    /// # Panics
    /// If no port is free, or outside a runtime.
    pub fn listen(server: u16) -> Self {
        Self::on(server, true, false)
    }

    /// Starts a proxy that shards, as those of managed services do: it calls itself one server,
    /// and refuses a script whose keys are in several slots. The server at this port is the
    /// only node of a cluster.
    ///
    /// # Panics
    /// If no port is free, or outside a runtime.
    pub fn sharding(server: u16) -> Self {
        Self::on(server, true, true)
    }

    /// Starts a proxy for a server of another protocol than Redis's. Of the faults of
    /// [`Proxy::once`] it knows [`Once::LoseReply`] only.
    ///
    /// # Panics
    /// If no port is free, or outside a runtime.
    pub fn opaque(server: u16) -> Self {
        Self::on(server, false, false)
    }

    fn on(server: u16, is_resp: bool, disguises: bool) -> Self {
        let listener = std::net::TcpListener::bind(("127.0.0.1", 0)).expect("a free port");
        listener.set_nonblocking(true).expect("a socket of tokio");
        let listener = TcpListener::from_std(listener).expect("a socket of tokio");
        let port = listener.local_addr().expect("its address").port();
        let shared = Arc::new(Shared {
            is_resp,
            disguises,
            server: AtomicU16::new(server),
            conditions: watch::Sender::new(Conditions::default()),
            state: Mutex::default(),
        });
        let accepting = tokio::spawn(forwarding::accept(listener, shared.clone()));
        Proxy { port, shared, accepting }
    }

    /// The port that clients connect to.
    pub fn port(&self) -> u16 {
        self.port
    }

    /// The URL that clients use instead of the server's.
    pub fn url(&self) -> String {
        format!("redis://127.0.0.1:{}", self.port)
    }

    fn change(&self, change: impl FnOnce(&mut Conditions)) {
        self.shared.conditions.send_modify(change);
    }

    /// Leads to the server at this port from now on, as if its address had been given to
    /// another one: open connections are cut.
    pub fn redirect(&self, server: u16) {
        self.shared.server.store(server, Ordering::Relaxed);
        self.cut();
    }

    /// Delays messages in this direction from now on.
    pub fn delay(&self, way: Way, delay: Duration) {
        self.change(|conditions| conditions.delay[way as usize] = delay);
    }

    /// Holds messages back until [`Proxy::heal`].
    pub fn stall(&self, ways: &[Way]) {
        self.change(|conditions| {
            ways.iter().for_each(|way| conditions.stalled[*way as usize] = true)
        });
    }

    /// Holds messages of both directions back, and accepts new connections without
    /// answering them, until [`Proxy::heal`].
    pub fn go_silent(&self) {
        self.stall(&Way::BOTH);
        self.change(|conditions| conditions.silent = true);
    }

    /// Ends delays, stalls and silence, and delivers what was held back. Frozen
    /// connections, and those accepted during the silence, are cut.
    pub fn heal(&self) {
        self.change(|conditions| {
            let cut_below = conditions.cut_below.max(conditions.frozen_below);
            let subscribers_cut_below =
                conditions.subscribers_cut_below.max(conditions.subscribers_frozen_below);
            let hung_up_below = conditions.hung_up_below;
            *conditions = Conditions {
                cut_below,
                subscribers_cut_below,
                hung_up_below,
                ..Conditions::default()
            };
        });
        self.shared.state().held_back.clear();
    }

    /// Cuts all open connections.
    pub fn cut(&self) {
        let next = self.shared.state().attempts.len() as u64;
        self.change(|conditions| conditions.cut_below = next);
    }

    /// Closes all open connections on the side of the client only. The server gets what is
    /// held back for it, after [`Proxy::heal`], and its replies reach nobody.
    pub fn hang_up(&self) {
        let next = self.shared.state().attempts.len() as u64;
        self.change(|conditions| conditions.hung_up_below = next);
    }

    /// Refuses new connections until [`Proxy::heal`]; open ones go on.
    pub async fn refuse(&self) {
        self.change(|conditions| conditions.refused = true);
        while tokio::net::TcpStream::connect(("127.0.0.1", self.port)).await.is_ok() {
            tokio::time::sleep(Duration::from_millis(1)).await;
        }
    }

    /// Whether a request that contains this string is held back, for a server of another
    /// protocol than Redis's.
    pub fn holds_back(&self, containing: &str) -> bool {
        contains(&self.shared.state().held_back, containing)
    }

    /// Whether the server sent a reply that contains this string to a client that was hung
    /// up on.
    pub fn has_unheard(&self, containing: &str) -> bool {
        contains(&self.shared.state().unheard, containing)
    }

    /// Leaves all open connections half open: they are not closed, but nothing is
    /// forwarded, until [`Proxy::heal`] cuts them. New connections work.
    pub fn freeze(&self) {
        let next = self.shared.state().attempts.len() as u64;
        self.change(|conditions| conditions.frozen_below = next);
    }

    /// The same as [`Proxy::freeze`] for the connections on which the client listens to
    /// messages; the connections for commands work on.
    pub fn freeze_subscribers(&self) {
        let next = self.shared.state().attempts.len() as u64;
        self.change(|conditions| conditions.subscribers_frozen_below = next);
    }

    /// How many connections there are on which the client listens to messages and that
    /// are not frozen.
    pub fn subscribers(&self) -> usize {
        let conditions = *self.shared.conditions.borrow();
        let state = self.shared.state();
        state.subscribers.iter().filter(|number| !conditions.is_frozen(**number, true)).count()
    }

    /// Freezes one connection, by its number in the order of connecting: it stays open,
    /// and nothing is forwarded any more.
    pub fn freeze_connection(&self, number: u64) {
        self.change(|conditions| conditions.frozen = Some(number));
    }

    /// Injects this fault once, into the next message that contains this string.
    pub fn once(&self, what: Once, containing: &str) {
        self.shared.state().once.push((what, containing.as_bytes().to_vec()));
    }

    /// Removes all faults of [`Proxy::once`] that have not happened yet.
    pub fn forget_once(&self) {
        self.shared.state().once.clear();
    }

    /// How many faults of [`Proxy::once`] have happened.
    pub fn done(&self) -> u64 {
        self.shared.state().done
    }

    /// The requests that were kept by [`Once::HoldRequest`], as they were sent.
    pub fn held(&self) -> Vec<Vec<u8>> {
        self.shared.state().held.clone()
    }

    /// The times of all connection attempts since the start.
    pub fn attempts(&self) -> Vec<Instant> {
        self.shared.state().attempts.clone()
    }

    /// The number of connections that are open now.
    pub fn open(&self) -> usize {
        self.shared.state().open
    }
}

impl Drop for Proxy {
    fn drop(&mut self) {
        self.accepting.abort();
        self.change(|conditions| conditions.cut_below = u64::MAX);
    }
}
