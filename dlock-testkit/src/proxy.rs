//! A TCP proxy between clients and a Redis server that injects network faults: it
//! delays, stalls, cuts or silences connections, loses replies and duplicates
//! messages.
//!
//! It knows where messages end and which reply belongs to which request. So a client
//! only reads streams that a real network and server could produce: a reply is never
//! missing between two others. If a reply is lost, its connection is cut; a request
//! that was sent twice is answered once.
//!
//! For each of the two directions of a connection, one task reads whole messages and
//! decides what happens to them. Another task writes them when they are due and the
//! direction is not stalled.

use std::collections::VecDeque;
use std::io;
use std::net::SocketAddr;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::tcp::{OwnedReadHalf, OwnedWriteHalf};
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::{mpsc, watch};
use tokio::task::JoinHandle;

use crate::resp;

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
    conditions: watch::Sender<Conditions>,
    state: Mutex<State>,
}

#[derive(Clone, Copy, Debug, Default)]
struct Conditions {
    delay: [Duration; 2],
    stalled: [bool; 2],
    /// New connections are accepted and never answered.
    silent: bool,
    /// Connections with a lower number are cut.
    cut_below: u64,
    /// Connections with a lower number are kept open, and nothing is forwarded.
    frozen_below: u64,
    /// The connection with this number is frozen by itself.
    frozen: Option<u64>,
}

#[derive(Debug, Default)]
struct State {
    attempts: Vec<Instant>,
    open: usize,
    /// Each fault with a string that the message must contain.
    once: Vec<(Once, Vec<u8>)>,
    done: u64,
}

impl Shared {
    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
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
        let listener = TcpListener::bind(("127.0.0.1", 0)).await.expect("a free port");
        let port = listener.local_addr().expect("its address").port();
        let shared = Arc::new(Shared {
            conditions: watch::Sender::new(Conditions::default()),
            state: Mutex::default(),
        });
        let server = SocketAddr::from(([127, 0, 0, 1], server));
        let accepting = tokio::spawn(accept(listener, server, shared.clone()));
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
            *conditions = Conditions { cut_below, ..Conditions::default() };
        });
    }

    /// Cuts all open connections.
    pub fn cut(&self) {
        let next = self.shared.state().attempts.len() as u64;
        self.change(|conditions| conditions.cut_below = next);
    }

    /// Leaves all open connections half open: they are not closed, but nothing is
    /// forwarded, until [`Proxy::heal`] cuts them. New connections work.
    pub fn freeze(&self) {
        let next = self.shared.state().attempts.len() as u64;
        self.change(|conditions| conditions.frozen_below = next);
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

async fn accept(listener: TcpListener, server: SocketAddr, shared: Arc<Shared>) {
    while let Ok((client, _)) = listener.accept().await {
        let number = {
            let mut state = shared.state();
            state.attempts.push(Instant::now());
            state.open += 1;
            state.attempts.len() as u64 - 1
        };
        let shared = shared.clone();
        tokio::spawn(async move {
            let conditions = shared.conditions.subscribe();
            let cut = async {
                let mut conditions = conditions.clone();
                let _ = conditions.wait_for(|conditions| number < conditions.cut_below).await;
            };
            tokio::select! {
                _ = serve(client, server, number, &shared) => {}
                () = cut => {}
            }
            shared.state().open -= 1;
        });
    }
}

/// What to do with the reply to a request; a queue has one for each open request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum ReplyAction {
    Deliver,
    Swallow,
    Cut,
}

type ReplyActions = Arc<Mutex<VecDeque<ReplyAction>>>;

async fn serve(
    client: TcpStream,
    server: SocketAddr,
    number: u64,
    shared: &Arc<Shared>,
) -> io::Result<()> {
    let mut conditions = shared.conditions.subscribe();
    if conditions.borrow_and_update().silent {
        let _ = conditions.wait_for(|conditions| !conditions.silent).await;
        return Ok(());
    }
    let server = TcpStream::connect(server).await?;
    client.set_nodelay(true)?;
    server.set_nodelay(true)?;
    let (from_client, to_client) = client.into_split();
    let (from_server, to_server) = server.into_split();
    let actions = ReplyActions::default();
    let requests = {
        let (shared, actions) = (shared.clone(), actions.clone());
        move |message: &[u8], out: &mut Vec<u8>| request(&shared, &actions, message, out)
    };
    let replies = {
        let shared = shared.clone();
        move |message: &[u8], out: &mut Vec<u8>| reply(&shared, &actions, message, out)
    };
    // The direction that ends first ends the connection.
    tokio::select! {
        ended = forward(Way::ToServer, number, shared, from_client, to_server, requests) => ended,
        ended = forward(Way::ToClient, number, shared, from_server, to_client, replies) => ended,
    }
}

/// The connection must be cut at this message.
struct ConnectionCut;

fn request(
    shared: &Shared,
    actions: &Mutex<VecDeque<ReplyAction>>,
    message: &[u8],
    out: &mut Vec<u8>,
) -> Result<(), ConnectionCut> {
    let mut actions = actions.lock().unwrap_or_else(PoisonError::into_inner);
    out.extend_from_slice(message);
    if shared.take_fault(Once::LoseReply, message) {
        actions.push_back(ReplyAction::Cut);
        return Ok(());
    }
    actions.push_back(ReplyAction::Deliver);
    if shared.take_fault(Once::DuplicateRequest, message) {
        out.extend_from_slice(message);
        actions.push_back(ReplyAction::Swallow);
    }
    Ok(())
}

fn reply(
    shared: &Shared,
    actions: &Mutex<VecDeque<ReplyAction>>,
    message: &[u8],
    out: &mut Vec<u8>,
) -> Result<(), ConnectionCut> {
    if resp::is_push(message) {
        if shared.take_fault(Once::LosePush, message) {
            return Ok(());
        }
        if shared.take_fault(Once::DuplicatePush, message) {
            out.extend_from_slice(message);
        }
        out.extend_from_slice(message);
        return Ok(());
    }
    let action = actions.lock().unwrap_or_else(PoisonError::into_inner).pop_front();
    match action {
        Some(ReplyAction::Swallow) => Ok(()),
        Some(ReplyAction::Cut) => Err(ConnectionCut),
        Some(ReplyAction::Deliver) | None => {
            out.extend_from_slice(message);
            Ok(())
        }
    }
}

/// Bytes to write, and when to write them.
type DelayedBytes = (Instant, Vec<u8>);

/// Forwards one direction until it ends.
async fn forward(
    way: Way,
    number: u64,
    shared: &Arc<Shared>,
    from: OwnedReadHalf,
    to: OwnedWriteHalf,
    handle: impl FnMut(&[u8], &mut Vec<u8>) -> Result<(), ConnectionCut> + Send,
) -> io::Result<()> {
    let (delayed, arrived) = mpsc::unbounded_channel();
    let conditions = shared.conditions.subscribe();
    let delay = {
        let conditions = conditions.clone();
        move || conditions.borrow().delay[way as usize]
    };
    let reading = read(from, delayed, delay, handle);
    let writing = write(to, arrived, conditions, way, number);
    let (read, written) = tokio::join!(reading, writing);
    read.and(written)
}

async fn read(
    mut from: OwnedReadHalf,
    delayed: mpsc::UnboundedSender<DelayedBytes>,
    delay: impl Fn() -> Duration,
    mut handle: impl FnMut(&[u8], &mut Vec<u8>) -> Result<(), ConnectionCut>,
) -> io::Result<()> {
    let mut bytes = Vec::with_capacity(16 * 1024);
    loop {
        let mut whole = 0;
        let mut out = Vec::new();
        let is_cut = loop {
            match resp::length(&bytes[whole..]) {
                Ok(Some(length)) => {
                    let message = &bytes[whole..whole + length];
                    whole += length;
                    if handle(message, &mut out).is_err() {
                        break true;
                    }
                }
                Ok(None) => break false,
                Err(resp::Malformed) => {
                    // Another protocol, TLS for example: forwarded unchanged.
                    out.extend_from_slice(&bytes[whole..]);
                    whole = bytes.len();
                    break false;
                }
            }
        };
        bytes.drain(..whole);
        if !out.is_empty() {
            let _ = delayed.send((Instant::now() + delay(), out));
        }
        if is_cut || from.read_buf(&mut bytes).await? == 0 {
            return Ok(()); // the writer ends when it has written the rest
        }
    }
}

async fn write(
    mut to: OwnedWriteHalf,
    mut delayed: mpsc::UnboundedReceiver<DelayedBytes>,
    mut conditions: watch::Receiver<Conditions>,
    way: Way,
    number: u64,
) -> io::Result<()> {
    while let Some((due, bytes)) = delayed.recv().await {
        if due > Instant::now() {
            tokio::time::sleep_until(due.into()).await;
        }
        let open = |conditions: &Conditions| {
            !conditions.stalled[way as usize]
                && number >= conditions.frozen_below
                && conditions.frozen != Some(number)
        };
        if conditions.wait_for(open).await.is_err() {
            return Ok(()); // the proxy is gone
        }
        to.write_all(&bytes).await?;
    }
    Ok(())
}
