//! The connections of a [`Proxy`](super::Proxy).
//!
//! For each of the two directions of a connection, one task reads whole messages and
//! decides what happens to them. Another task writes them when they are due and the
//! direction is not stalled.

use std::collections::VecDeque;
use std::io;
use std::net::Ipv4Addr;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::tcp::{OwnedReadHalf, OwnedWriteHalf};
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::{mpsc, watch};

use super::{Conditions, Once, Shared, Way};
use crate::resp;

/// Serves every connection until the proxy is dropped.
pub(super) async fn accept(mut listener: TcpListener, shared: Arc<Shared>) {
    let Ok(address) = listener.local_addr() else { return };
    let mut conditions = shared.conditions.subscribe();
    loop {
        let accepted = tokio::select! {
            accepted = listener.accept() => Some(accepted),
            () = async { drop(conditions.wait_for(|now| now.refused).await) } => None,
        };
        let Some(accepted) = accepted else {
            drop(listener);
            let _ = conditions.wait_for(|now| !now.refused).await;
            listener = TcpListener::bind(address).await.expect("the same port");
            continue;
        };
        let Ok((client, _)) = accepted else { return };
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
                let is_cut = |now: &Conditions| now.is_cut(number, shared.subscribes(number));
                let _ = conditions.wait_for(is_cut).await;
            };
            tokio::select! {
                _ = serve(client, number, &shared) => {}
                () = cut => {}
            }
            let mut state = shared.state();
            state.open -= 1;
            state.subscribers.remove(&number);
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

/// What a proxy that shards asks instead of `INFO`, so that the answer is that of one server.
const ONE_SERVER: &[u8] =
    b"*2\r\n$4\r\nECHO\r\n$57\r\nredis_version:7.0.0\r\nredis_mode:standalone\r\nrole:master\r\n\r\n";

async fn serve(client: TcpStream, number: u64, shared: &Arc<Shared>) -> io::Result<()> {
    let mut conditions = shared.conditions.subscribe();
    if conditions.borrow_and_update().silent {
        let _ = conditions.wait_for(|conditions| !conditions.silent).await;
        return Ok(());
    }
    let server = shared.server.load(Ordering::Relaxed);
    let server = TcpStream::connect((Ipv4Addr::LOCALHOST, server)).await?;
    client.set_nodelay(true)?;
    server.set_nodelay(true)?;
    let (from_client, to_client) = client.into_split();
    let (from_server, to_server) = server.into_split();
    let actions = ReplyActions::default();
    let unreadable = AtomicBool::new(false);
    let requests = {
        let (shared, actions, unreadable) = (shared.clone(), actions.clone(), &unreadable);
        move |message: &[u8], out: &mut Vec<u8>| {
            let is = |name: &[u8]| {
                resp::first_word(message).is_some_and(|it| it.eq_ignore_ascii_case(name))
            };
            let is_of_dlock = || message.windows(6).any(|at| at == b"dlock:");
            if (is(b"SUBSCRIBE") || is(b"SSUBSCRIBE")) && is_of_dlock() {
                shared.state().subscribers.insert(number);
            }
            if is(b"PSYNC") {
                unreadable.store(true, Ordering::Relaxed); // replication follows
            }
            if shared.disguises && is(b"INFO") {
                return request(&shared, &actions, ONE_SERVER, out);
            }
            request(&shared, &actions, message, out)
        }
    };
    let replies = {
        let shared = shared.clone();
        move |message: &[u8], out: &mut Vec<u8>| reply(&shared, &actions, message, out)
    };
    // The direction that ends first ends the connection.
    tokio::select! {
        ended = forward((Way::ToServer, number), shared, from_client, to_server, &unreadable, requests) => ended,
        ended = forward((Way::ToClient, number), shared, from_server, to_client, &unreadable, replies) => ended,
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
    if shared.take_fault(Once::HoldRequest, message) {
        shared.state().held.push(message.to_vec());
        return Ok(());
    }
    out.extend_from_slice(message);
    if !shared.is_resp {
        if shared.conditions.borrow().stalled[Way::ToServer as usize] {
            shared.state().held_back.extend_from_slice(message);
        }
        if shared.take_fault(Once::LoseReply, message) {
            actions.push_back(ReplyAction::Cut);
        }
        return Ok(());
    }
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
    if shared.is_resp && resp::is_push(message) {
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
    (way, number): (Way, u64),
    shared: &Arc<Shared>,
    from: OwnedReadHalf,
    mut to: OwnedWriteHalf,
    unreadable: &AtomicBool,
    handle: impl FnMut(&[u8], &mut Vec<u8>) -> Result<(), ConnectionCut> + Send,
) -> io::Result<()> {
    let (delayed, mut arrived) = mpsc::unbounded_channel();
    let conditions = shared.conditions.subscribe();
    let delay = {
        let conditions = conditions.clone();
        move || conditions.borrow().delay[way as usize]
    };
    let frames = Frames { is_resp: shared.is_resp, unreadable };
    let reading = read(from, delayed, delay, frames, handle);
    let mut hung_up = conditions.clone();
    let is_open = |conditions: &Conditions| {
        !conditions.stalled[way as usize]
            && !conditions.is_frozen(number, shared.subscribes(number))
    };
    let writing = async {
        if way == Way::ToServer {
            let written = write(&mut to, &mut arrived, conditions, is_open).await;
            if number < hung_up.borrow().hung_up_below {
                // The server would give up what it was asked for.
                std::future::pending::<()>().await;
            }
            return written;
        }
        tokio::select! {
            written = write(&mut to, &mut arrived, conditions, is_open) => return written,
            Ok(_) = hung_up.wait_for(|now| number < now.hung_up_below) => {}
        }
        drop(to);
        while let Some((_, bytes)) = arrived.recv().await {
            shared.state().unheard.extend(bytes);
        }
        Ok(())
    };
    let (read, written) = tokio::join!(reading, writing);
    read.and(written)
}

/// How a connection is cut into messages.
#[derive(Clone, Copy)]
struct Frames<'a> {
    /// Whether the server speaks the protocol of Redis.
    is_resp: bool,
    /// Set when what follows is no protocol.
    unreadable: &'a AtomicBool,
}

async fn read(
    mut from: OwnedReadHalf,
    delayed: mpsc::UnboundedSender<DelayedBytes>,
    delay: impl Fn() -> Duration,
    frames: Frames<'_>,
    mut handle: impl FnMut(&[u8], &mut Vec<u8>) -> Result<(), ConnectionCut>,
) -> io::Result<()> {
    let mut bytes = Vec::with_capacity(16 * 1024);
    loop {
        let mut whole = 0;
        let mut out = Vec::new();
        let is_cut = loop {
            let length = match frames {
                Frames { is_resp: false, .. } => {
                    Ok(Some(bytes.len() - whole).filter(|length| *length > 0))
                }
                Frames { unreadable, .. } if unreadable.load(Ordering::Relaxed) => {
                    Err(resp::Malformed)
                }
                _ => resp::length(&bytes[whole..]),
            };
            match length {
                Ok(Some(length)) => {
                    let message = &bytes[whole..whole + length];
                    whole += length;
                    if handle(message, &mut out).is_err() {
                        break true;
                    }
                }
                Ok(None) => break false,
                Err(resp::Malformed) => {
                    // Another protocol: forwarded unchanged.
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
    to: &mut OwnedWriteHalf,
    delayed: &mut mpsc::UnboundedReceiver<DelayedBytes>,
    mut conditions: watch::Receiver<Conditions>,
    mut is_open: impl FnMut(&Conditions) -> bool,
) -> io::Result<()> {
    while let Some((due, bytes)) = delayed.recv().await {
        if due > Instant::now() {
            tokio::time::sleep_until(due.into()).await;
        }
        if conditions.wait_for(&mut is_open).await.is_err() {
            return Ok(()); // the proxy is gone
        }
        to.write_all(&bytes).await?;
    }
    Ok(())
}
