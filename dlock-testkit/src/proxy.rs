//! A proxy between clients and a Redis server that does to their connections
//! what networks do: slow, cut, stall, go silent, lose an answer, say it twice.
//!
//! It knows where messages end and which reply belongs to which request, so that
//! whatever it does, what a client reads is a stream that a network and a server
//! could have given it: a reply is never just missing between two others. A lost
//! reply takes its connection with it; a request that was sent twice is answered
//! once.
//!
//! Each connection has two ways. On each, one task reads whole messages and
//! decides their fate, another writes them when they are due and the way is open.

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

/// One of the two ways through the proxy.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Way {
    /// Requests.
    ToServer,
    /// Replies and pushes.
    ToClient,
}

impl Way {
    const BOTH: [Way; 2] = [Way::ToServer, Way::ToClient];
}

/// What happens once, to the next message it fits.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Once {
    /// A request is forwarded; instead of its reply the connection is cut.
    LoseReply,
    /// A request is forwarded twice, and answered once.
    DuplicateRequest,
    /// A push message is left out.
    LosePush,
    /// A push message is delivered twice.
    DuplicatePush,
}

/// A proxy on a loopback port of its own, for one server.
#[derive(Debug)]
pub struct Proxy {
    port: u16,
    shared: Arc<Shared>,
    accepting: JoinHandle<()>,
}

#[derive(Debug)]
struct Shared {
    weather: watch::Sender<Weather>,
    book: Mutex<Book>,
}

#[derive(Clone, Copy, Debug, Default)]
struct Weather {
    delay: [Duration; 2],
    stalled: [bool; 2],
    /// New connections are accepted and never answered.
    mute: bool,
    /// Connections with a lower number are cut.
    cut_below: u64,
    /// Connections with a lower number are kept open, and nothing is forwarded.
    frozen_below: u64,
}

#[derive(Debug, Default)]
struct Book {
    attempts: Vec<Instant>,
    open: usize,
    /// Each with a text that the request must contain.
    once: Vec<(Once, Vec<u8>)>,
    done: u64,
}

impl Shared {
    fn book(&self) -> MutexGuard<'_, Book> {
        self.book.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Whether this is to happen now, to this message.
    fn takes(&self, what: Once, message: &[u8]) -> bool {
        let mut book = self.book();
        let place = book.once.iter().position(|(once, text)| {
            *once == what && (text.is_empty() || message.windows(text.len()).any(|at| at == text))
        });
        let Some(place) = place else { return false };
        book.once.remove(place);
        book.done += 1;
        true
    }
}

impl Proxy {
    /// A proxy for the server at this port of the loopback interface.
    ///
    /// # Panics
    /// If no port is free.
    pub async fn start(server: u16) -> Self {
        let listener = TcpListener::bind(("127.0.0.1", 0)).await.expect("a free port");
        let port = listener.local_addr().expect("its address").port();
        let shared = Arc::new(Shared {
            weather: watch::Sender::new(Weather::default()),
            book: Mutex::default(),
        });
        let server = SocketAddr::from(([127, 0, 0, 1], server));
        let accepting = tokio::spawn(accept(listener, server, shared.clone()));
        Proxy { port, shared, accepting }
    }

    /// Where clients connect to.
    pub fn port(&self) -> u16 {
        self.port
    }

    /// The URL that clients use instead of the server's.
    pub fn url(&self) -> String {
        format!("redis://127.0.0.1:{}", self.port)
    }

    fn change(&self, change: impl FnOnce(&mut Weather)) {
        self.shared.weather.send_modify(change);
    }

    /// From now on messages take this much longer.
    pub fn delay(&self, way: Way, delay: Duration) {
        self.change(|weather| weather.delay[way as usize] = delay);
    }

    /// Messages are held back until [`Proxy::heal`].
    pub fn stall(&self, ways: &[Way]) {
        self.change(|weather| ways.iter().for_each(|way| weather.stalled[*way as usize] = true));
    }

    /// Messages of both ways are held back, and new connections get no answer
    /// either, until [`Proxy::heal`].
    pub fn go_silent(&self) {
        self.stall(&Way::BOTH);
        self.change(|weather| weather.mute = true);
    }

    /// Ends delays, stalls and silence: what was held back is delivered. Those
    /// who connected to silence, and frozen connections, are cut.
    pub fn heal(&self) {
        self.change(|weather| {
            let cut_below = weather.cut_below.max(weather.frozen_below);
            *weather = Weather { cut_below, ..Weather::default() };
        });
    }

    /// Cuts every connection there is.
    pub fn cut(&self) {
        let next = self.shared.book().attempts.len() as u64;
        self.change(|weather| weather.cut_below = next);
    }

    /// Leaves every connection there is half open: not closed, but nothing is
    /// forwarded any more, until [`Proxy::heal`] cuts it. New ones work.
    pub fn freeze(&self) {
        let next = self.shared.book().attempts.len() as u64;
        self.change(|weather| weather.frozen_below = next);
    }

    /// Does this to the next message that fits; a request fits if it contains
    /// the text.
    pub fn once(&self, what: Once, containing: &str) {
        self.shared.book().once.push((what, containing.as_bytes().to_vec()));
    }

    /// Forgets what was to be done once and was not yet.
    pub fn forget_once(&self) {
        self.shared.book().once.clear();
    }

    /// How often something was done that was to be done once.
    pub fn done(&self) -> u64 {
        self.shared.book().done
    }

    /// When connections were asked for, since the start.
    pub fn attempts(&self) -> Vec<Instant> {
        self.shared.book().attempts.clone()
    }

    /// How many connections are open now.
    pub fn open(&self) -> usize {
        self.shared.book().open
    }
}

impl Drop for Proxy {
    fn drop(&mut self) {
        self.accepting.abort();
        self.change(|weather| weather.cut_below = u64::MAX);
    }
}

async fn accept(listener: TcpListener, server: SocketAddr, shared: Arc<Shared>) {
    while let Ok((client, _)) = listener.accept().await {
        let number = {
            let mut book = shared.book();
            book.attempts.push(Instant::now());
            book.open += 1;
            book.attempts.len() as u64 - 1
        };
        let shared = shared.clone();
        tokio::spawn(async move {
            let weather = shared.weather.subscribe();
            let cut = async {
                let mut weather = weather.clone();
                let _ = weather.wait_for(|weather| number < weather.cut_below).await;
            };
            tokio::select! {
                _ = serve(client, server, number, &shared) => {}
                () = cut => {}
            }
            shared.book().open -= 1;
        });
    }
}

/// What becomes of the replies to the requests that are under way, in order.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Fate {
    Deliver,
    Swallow,
    Cut,
}

type Fates = Arc<Mutex<VecDeque<Fate>>>;

async fn serve(
    client: TcpStream,
    server: SocketAddr,
    number: u64,
    shared: &Arc<Shared>,
) -> io::Result<()> {
    let mut weather = shared.weather.subscribe();
    if weather.borrow_and_update().mute {
        let _ = weather.wait_for(|weather| !weather.mute).await;
        return Ok(());
    }
    let server = TcpStream::connect(server).await?;
    client.set_nodelay(true)?;
    server.set_nodelay(true)?;
    let (from_client, to_client) = client.into_split();
    let (from_server, to_server) = server.into_split();
    let fates = Fates::default();
    let requests = {
        let (shared, fates) = (shared.clone(), fates.clone());
        move |message: &[u8], out: &mut Vec<u8>| request(&shared, &fates, message, out)
    };
    let replies = {
        let shared = shared.clone();
        move |message: &[u8], out: &mut Vec<u8>| reply(&shared, &fates, message, out)
    };
    // Whichever ends first ends the connection.
    tokio::select! {
        ended = pass(Way::ToServer, number, shared, from_client, to_server, requests) => ended,
        ended = pass(Way::ToClient, number, shared, from_server, to_client, replies) => ended,
    }
}

/// The connection is to be cut here.
struct Severed;

fn request(
    shared: &Shared,
    fates: &Mutex<VecDeque<Fate>>,
    message: &[u8],
    out: &mut Vec<u8>,
) -> Result<(), Severed> {
    let mut fates = fates.lock().unwrap_or_else(PoisonError::into_inner);
    out.extend_from_slice(message);
    if shared.takes(Once::LoseReply, message) {
        fates.push_back(Fate::Cut);
        return Ok(());
    }
    fates.push_back(Fate::Deliver);
    if shared.takes(Once::DuplicateRequest, message) {
        out.extend_from_slice(message);
        fates.push_back(Fate::Swallow);
    }
    Ok(())
}

fn reply(
    shared: &Shared,
    fates: &Mutex<VecDeque<Fate>>,
    message: &[u8],
    out: &mut Vec<u8>,
) -> Result<(), Severed> {
    if resp::is_push(message) {
        if shared.takes(Once::LosePush, message) {
            return Ok(());
        }
        if shared.takes(Once::DuplicatePush, message) {
            out.extend_from_slice(message);
        }
        out.extend_from_slice(message);
        return Ok(());
    }
    let fate = fates.lock().unwrap_or_else(PoisonError::into_inner).pop_front();
    match fate {
        Some(Fate::Swallow) => Ok(()),
        Some(Fate::Cut) => Err(Severed),
        Some(Fate::Deliver) | None => {
            out.extend_from_slice(message);
            Ok(())
        }
    }
}

/// Bytes, and when they are due.
type Parcel = (Instant, Vec<u8>);

/// Forwards one way until it ends.
async fn pass(
    way: Way,
    number: u64,
    shared: &Arc<Shared>,
    from: OwnedReadHalf,
    to: OwnedWriteHalf,
    judge: impl FnMut(&[u8], &mut Vec<u8>) -> Result<(), Severed> + Send,
) -> io::Result<()> {
    let (parcels, arrived) = mpsc::unbounded_channel();
    let weather = shared.weather.subscribe();
    let delay = {
        let weather = weather.clone();
        move || weather.borrow().delay[way as usize]
    };
    let reading = read(from, parcels, delay, judge);
    let writing = write(to, arrived, weather, way, number);
    let (read, written) = tokio::join!(reading, writing);
    read.and(written)
}

async fn read(
    mut from: OwnedReadHalf,
    parcels: mpsc::UnboundedSender<Parcel>,
    delay: impl Fn() -> Duration,
    mut judge: impl FnMut(&[u8], &mut Vec<u8>) -> Result<(), Severed>,
) -> io::Result<()> {
    let mut bytes = Vec::with_capacity(16 * 1024);
    loop {
        let mut whole = 0;
        let mut out = Vec::new();
        let severed = loop {
            match resp::length(&bytes[whole..]) {
                Ok(Some(length)) => {
                    let message = &bytes[whole..whole + length];
                    whole += length;
                    if judge(message, &mut out).is_err() {
                        break true;
                    }
                }
                Ok(None) => break false,
                Err(resp::Malformed) => {
                    // Not ours to understand: as it is.
                    out.extend_from_slice(&bytes[whole..]);
                    whole = bytes.len();
                    break false;
                }
            }
        };
        bytes.drain(..whole);
        if !out.is_empty() {
            let _ = parcels.send((Instant::now() + delay(), out));
        }
        if severed || from.read_buf(&mut bytes).await? == 0 {
            return Ok(()); // the writer ends when it has written the rest
        }
    }
}

async fn write(
    mut to: OwnedWriteHalf,
    mut parcels: mpsc::UnboundedReceiver<Parcel>,
    mut weather: watch::Receiver<Weather>,
    way: Way,
    number: u64,
) -> io::Result<()> {
    while let Some((due, bytes)) = parcels.recv().await {
        if due > Instant::now() {
            tokio::time::sleep_until(due.into()).await;
        }
        let open =
            |weather: &Weather| !weather.stalled[way as usize] && number >= weather.frozen_below;
        if weather.wait_for(open).await.is_err() {
            return Ok(()); // the proxy is gone
        }
        to.write_all(&bytes).await?;
    }
    Ok(())
}
