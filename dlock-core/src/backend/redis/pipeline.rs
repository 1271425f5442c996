//! A plain connection, TCP or unix socket, on which callers write by themselves.
//!
//! ```text
//!   caller ----- submit: writes -----> socket -----> server
//!   caller <---- reply: called <------ reader <----- server
//! ```
//!
//! No thread is woken on the way out: the thread that makes a call writes it to the
//! socket. Who reads what comes back is said in `reader.rs`.
//!
//! Invariants:
//! - There is one entry in `waiting` for each request whose answer was not read yet, in
//!   the order in which the requests are on the wire. An entry is added and its bytes
//!   are written, or put behind those that the socket did not take, under one lock.
//! - Every reply is called exactly once: with the answer, when its deadline has passed
//!   (the entry then stays, so that the answer finds its place), or when the connection
//!   ends. No lock is held meanwhile.
//! - After `close` nothing is added.

use std::collections::VecDeque;
use std::io;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use parking_lot::Mutex;
use redis::{Cmd, RedisResult, Value};
use tokio::sync::Notify;

use super::reader::{self, Readers};
use super::socket::Socket;

/// The pause before the socket is tried again when it was full.
const FULL: Duration = Duration::from_millis(1);
/// A request that was given up earlier than this says nothing about the connection.
const SILENCE: Duration = Duration::from_millis(100);

/// How a request ended.
pub(super) enum Outcome {
    Answered(Value),
    /// Its deadline passed. `silent`: nothing was heard from the server for as long as the
    /// most patient request in flight waits.
    Late {
        silent: bool,
    },
    /// The connection broke after it was sent.
    Broken,
    /// The connection had ended before, so it was not sent.
    NotSent,
}

pub(super) type Reply = Box<dyn FnOnce(Outcome) + Send>;
/// Called with each message of a subscription, in whatever thread has read it.
pub(super) type OnMessage = Box<dyn Fn(&[u8]) + Send + Sync>;

/// A connection that many callers write to.
pub(super) struct Pipeline {
    pub(super) socket: Socket,
    /// What the socket did not take yet.
    unsent: Mutex<Vec<u8>>,
    waiting: Mutex<Waiting>,
    pub(super) readers: Readers,
    /// Wakes the task that flushes and watches deadlines.
    watcher: Notify,
    start: Instant,
    /// When deadlines are looked at next, in nanoseconds since the start.
    looks: AtomicU64,
    /// When the server was last heard, in nanoseconds since the start.
    last_received: AtomicU64,
    on_message: Option<OnMessage>,
}

#[derive(Default)]
struct Waiting {
    entries: VecDeque<Entry>,
    /// How many there have been.
    count: u64,
    closed: bool,
}

struct Entry {
    /// `None` if it was given up.
    reply: Option<Reply>,
    sent: Duration,
    deadline: Option<Duration>,
}

impl Pipeline {
    /// A pipeline over a connection that is ready for commands. Answers are read in
    /// this runtime; [`watch`](Self::watch) must run in it too.
    pub(super) fn start(socket: Socket) -> Arc<Self> {
        Self::start_with(socket, None)
    }

    /// The same for a connection that subscribes to something.
    pub(super) fn of_subscriber(socket: Socket, on_message: OnMessage) -> Arc<Self> {
        Self::start_with(socket, Some(on_message))
    }

    fn start_with(socket: Socket, on_message: Option<OnMessage>) -> Arc<Self> {
        let pipeline = Arc::new(Pipeline {
            socket,
            unsent: Mutex::default(),
            waiting: Mutex::default(),
            readers: Readers::new(),
            watcher: Notify::new(),
            start: Instant::now(),
            looks: AtomicU64::new(u64::MAX),
            last_received: AtomicU64::new(0),
            on_message,
        });
        tokio::spawn(reader::read_for_driver(pipeline.clone()));
        pipeline
    }

    /// Sends a command and waits for the answer.
    pub(super) async fn send(self: &Arc<Self>, command: &Cmd) -> RedisResult<Value> {
        let (answer, answered) = tokio::sync::oneshot::channel();
        let reply = Box::new(move |outcome| {
            let _ = answer.send(outcome); // the caller may have given up
        });
        self.submit(&command.get_packed_command(), None, reply);
        Self::answer(answered).await
    }

    /// The same behind another command, with nothing in between. The answer to that one
    /// is not told.
    pub(super) async fn send_after(
        self: &Arc<Self>,
        first: &Cmd,
        command: &Cmd,
    ) -> RedisResult<Value> {
        let (answer, answered) = tokio::sync::oneshot::channel();
        let reply = Box::new(move |outcome| {
            let _ = answer.send(outcome); // the caller may have given up
        });
        let sent = self.start.elapsed();
        let before = Entry { reply: None, sent, deadline: None };
        let entry = Entry { reply: Some(reply), sent, deadline: None };
        let request = [first.get_packed_command(), command.get_packed_command()].concat();
        // Without a reply nobody is told, and the caller hears that the channel has ended.
        if let Ok(overlap) = self.write(&request, 2, [before, entry]) {
            Readers::expect_answer(self, overlap);
        }
        Self::answer(answered).await
    }

    async fn answer(answered: tokio::sync::oneshot::Receiver<Outcome>) -> RedisResult<Value> {
        match answered.await {
            Ok(Outcome::Answered(answer)) => Ok(answer),
            _ => Err(io::Error::from(io::ErrorKind::BrokenPipe).into()),
        }
    }

    /// Sends a request. Its reply may be called before this returns.
    pub(super) fn submit(
        self: &Arc<Self>,
        request: &[u8],
        timeout: Option<Duration>,
        reply: Reply,
    ) {
        self.submit_all(request, timeout, 1, [reply]);
    }

    /// Sends this many requests that follow each other, with a reply for each.
    pub(super) fn submit_all(
        self: &Arc<Self>,
        requests: &[u8],
        timeout: Option<Duration>,
        count: usize,
        replies: impl IntoIterator<Item = Reply>,
    ) {
        let sent = self.start.elapsed();
        let deadline = timeout.map(|timeout| sent + timeout);
        let entry = |reply| Entry { reply: Some(reply), sent, deadline };
        match self.write(requests, count, replies.into_iter().map(entry)) {
            Ok(overlap) => Readers::expect_answer(self, overlap),
            Err(entries) => {
                let replies = entries.filter_map(|entry| entry.reply);
                return replies.for_each(|reply| reply(Outcome::NotSent));
            }
        }
        if let Some(deadline) = deadline {
            let deadline = nanos(deadline);
            if deadline < self.looks.load(Ordering::Relaxed) {
                self.looks.fetch_min(deadline, Ordering::Relaxed);
                self.watcher.notify_one();
            }
        }
    }

    /// Writes this many requests, with an entry for each, and tells whether others have no
    /// answer yet. Gives the entries back if the connection has ended.
    fn write<E: IntoIterator<Item = Entry>>(
        &self,
        request: &[u8],
        count: usize,
        entries: E,
    ) -> Result<bool, E> {
        let mut unsent = self.unsent.lock();
        let overlap = {
            let mut waiting = self.waiting.lock();
            if waiting.closed {
                return Err(entries);
            }
            waiting.count += 1;
            waiting.entries.extend(entries);
            waiting.entries.len() > count
        };
        let taken = if unsent.is_empty() { self.socket.write(request) } else { Ok(0) };
        match taken {
            Ok(taken) if taken == request.len() => {}
            Ok(taken) => self.leave(&mut unsent, &request[taken..]),
            Err(error) if would_block(&error) => self.leave(&mut unsent, request),
            Err(_) => {
                drop(unsent);
                self.close();
            }
        }
        Ok(overlap)
    }

    fn leave(&self, unsent: &mut Vec<u8>, rest: &[u8]) {
        unsent.extend_from_slice(rest);
        self.watcher.notify_one();
    }

    /// Writes what the socket did not take at once. Tells whether all is written.
    fn flush(&self) -> bool {
        let mut unsent = self.unsent.lock();
        while !unsent.is_empty() {
            match self.socket.write(&unsent) {
                Ok(taken) => drop(unsent.drain(..taken)),
                Err(error) if would_block(&error) => return false,
                Err(_) => {
                    drop(unsent);
                    self.close();
                    return true;
                }
            }
        }
        true
    }

    /// Whether anything was heard from the server since then.
    pub(super) fn heard_since(&self, moment: Instant) -> bool {
        self.last_received() >= moment
    }

    /// When anything was last heard from the server.
    pub(super) fn last_received(&self) -> Instant {
        self.start + Duration::from_nanos(self.last_received.load(Ordering::Relaxed))
    }

    /// Ends the connection. What waits for an answer is told.
    pub(super) fn close(&self) {
        let entries = {
            let mut waiting = self.waiting.lock();
            waiting.closed = true;
            std::mem::take(&mut waiting.entries)
        };
        self.socket.shutdown();
        self.watcher.notify_one();
        self.readers.wake_driver();
        for reply in entries.into_iter().filter_map(|entry| entry.reply) {
            reply(Outcome::Broken);
        }
    }

    pub(super) fn is_subscriber(&self) -> bool {
        self.on_message.is_some()
    }

    pub(super) fn pass_on(&self, message: &[u8]) {
        if let Some(on_message) = &self.on_message {
            on_message(message);
        }
    }

    pub(super) fn is_closed(&self) -> bool {
        self.waiting.lock().closed
    }

    /// How many requests there have been, and for how long the oldest of those without
    /// an answer has waited.
    pub(super) fn oldest_wait(&self) -> (u64, Option<Duration>) {
        let waiting = self.waiting.lock();
        let now = self.start.elapsed();
        let oldest = waiting.entries.front().map(|entry| now.saturating_sub(entry.sent));
        (waiting.count, oldest)
    }

    /// Finds the replies that answers belong to. False: there are more answers than
    /// requests.
    pub(super) fn match_answers(
        &self,
        answers: impl Iterator<Item = Value>,
        replies: &mut Vec<(Reply, Value)>,
    ) -> bool {
        self.last_received.store(nanos(self.start.elapsed()), Ordering::Relaxed);
        let mut waiting = self.waiting.lock();
        for answer in answers {
            let Some(entry) = waiting.entries.pop_front() else { return false };
            if let Some(reply) = entry.reply {
                replies.push((reply, answer));
            }
        }
        true
    }

    /// Writes what the socket did not take at once, and ends what is late. Returns when
    /// the connection has ended.
    pub(super) async fn watch(&self) {
        while !self.is_closed() {
            let mut next = self.end_late_requests();
            if !self.flush() {
                next = Some(next.unwrap_or(FULL).min(FULL));
            }
            match next {
                Some(next) => drop(tokio::time::timeout(next, self.watcher.notified()).await),
                None => self.watcher.notified().await,
            }
        }
    }

    /// Ends the requests whose deadline has passed, and tells how long there is until
    /// the next deadline. Between two requests the watcher stays where it is: so a
    /// lone caller does not wake it with every request.
    fn end_late_requests(&self) -> Option<Duration> {
        let now = self.start.elapsed();
        if nanos(now) < self.looks.load(Ordering::Relaxed) {
            let looks = self.looks.load(Ordering::Relaxed);
            return (looks < u64::MAX).then(|| Duration::from_nanos(looks).saturating_sub(now));
        }
        // Whoever adds an earlier deadline from here on says so.
        self.looks.store(u64::MAX, Ordering::Relaxed);
        let last_received = Duration::from_nanos(self.last_received.load(Ordering::Relaxed));
        let mut next = None;
        let mut late = Vec::new();
        let mut patience = SILENCE;
        let mut waiting = self.waiting.lock();
        let oldest = waiting.entries.front().map_or(now, |entry| entry.sent);
        let silence = now.saturating_sub(last_received.max(oldest));
        for entry in &mut waiting.entries {
            let Some(deadline) = entry.deadline else { continue };
            patience = patience.max(deadline.saturating_sub(entry.sent));
            if entry.reply.is_none() {
                continue;
            }
            if deadline > now {
                next = Some(next.map_or(deadline, |next: Duration| next.min(deadline)));
            } else if let Some(reply) = entry.reply.take() {
                late.push(reply);
            }
        }
        drop(waiting);
        if let Some(next) = next {
            self.looks.fetch_min(nanos(next), Ordering::Relaxed);
        }
        let silent = silence >= patience;
        late.into_iter().for_each(|reply| reply(Outcome::Late { silent }));
        next.map(|next| next.saturating_sub(now))
    }
}

/// Whether the socket can do nothing now, but later.
pub(super) fn would_block(error: &io::Error) -> bool {
    matches!(error.kind(), io::ErrorKind::WouldBlock | io::ErrorKind::Interrupted)
}

fn nanos(duration: Duration) -> u64 {
    u64::try_from(duration.as_nanos()).unwrap_or(u64::MAX)
}

#[cfg(test)]
mod tests {
    use std::io::{Read as _, Write as _};
    use std::os::unix::net::UnixStream;
    use std::sync::mpsc::{Receiver, channel};

    use super::*;

    /// A pipeline, and the other end of its socket.
    fn pipeline() -> (Arc<Pipeline>, UnixStream) {
        let (ours, theirs) = UnixStream::pair().unwrap();
        ours.set_nonblocking(true).unwrap();
        let pipeline = Pipeline::start(Socket::Unix(ours));
        let watched = pipeline.clone();
        tokio::spawn(async move { watched.watch().await });
        (pipeline, theirs)
    }

    fn submit(pipeline: &Arc<Pipeline>, request: &[u8], timeout: Duration) -> Receiver<String> {
        let (told, outcome) = channel();
        let reply = Box::new(move |outcome| {
            let outcome = match outcome {
                Outcome::Answered(answer) => format!("{answer:?}"),
                Outcome::Late { silent } => format!("late, silent {silent}"),
                Outcome::Broken => "broken".into(),
                Outcome::NotSent => "not sent".into(),
            };
            told.send(outcome).unwrap();
        });
        pipeline.submit(request, Some(timeout), reply);
        outcome
    }

    async fn outcome(told: Receiver<String>) -> String {
        tokio::task::spawn_blocking(move || told.recv().unwrap()).await.unwrap()
    }

    const LONG: Duration = Duration::from_secs(30);

    #[tokio::test]
    async fn what_a_full_socket_does_not_take_is_sent_later_and_in_order() {
        let (pipeline, mut server) = pipeline();
        let requests: Vec<Vec<u8>> = (0..8_u8).map(|n| vec![n; 100_000]).collect();
        let told: Vec<_> = requests.iter().map(|it| submit(&pipeline, it, LONG)).collect();
        let sent = requests.concat();
        let reading = tokio::task::spawn_blocking(move || {
            let mut read = vec![0; sent.len()];
            server.read_exact(&mut read).unwrap();
            assert!(read == sent, "other bytes, or another order");
            for n in 0..8 {
                server.write_all(format!(":{n}\r\n").as_bytes()).unwrap();
            }
            server
        });
        for (n, told) in told.into_iter().enumerate() {
            assert_eq!(outcome(told).await, format!("int({n})"));
        }
        reading.await.unwrap();
    }

    #[tokio::test]
    async fn a_late_answer_finds_its_place_and_nobody_else_gets_it() {
        let (pipeline, mut server) = pipeline();
        let late = submit(&pipeline, b"one", Duration::from_millis(20));
        let next = submit(&pipeline, b"two", LONG);
        assert_eq!(outcome(late).await, "late, silent false", "too early to be a silence");
        let impatient = submit(&pipeline, b"three", Duration::from_millis(150));
        assert_eq!(outcome(impatient).await, "late, silent false", "another one waits longer");
        server.write_all(b":1\r\n>1\r\n+push\r\n:2\r\n").unwrap();
        assert_eq!(outcome(next).await, "int(2)");
    }

    /// A stream of new requests does not keep a connection that says nothing.
    #[tokio::test]
    async fn a_connection_is_silent_when_its_most_patient_request_is_late() {
        let (pipeline, _server) = pipeline();
        let patient = submit(&pipeline, b"one", Duration::from_millis(300));
        for _ in 0..4 {
            let impatient = submit(&pipeline, b"two", Duration::from_millis(50));
            assert_eq!(outcome(impatient).await, "late, silent false");
        }
        let _later = submit(&pipeline, b"three", Duration::from_millis(300));
        assert_eq!(outcome(patient).await, "late, silent true");
    }

    #[tokio::test]
    async fn who_waits_is_told_of_the_end() {
        for nonsense in [&b""[..], b"HTTP/1.1 200\r\n", b":1\r\n:2\r\n"] {
            let (pipeline, mut server) = pipeline();
            let told = [submit(&pipeline, b"one", LONG)];
            server.write_all(nonsense).unwrap();
            let expected = if nonsense.starts_with(b":1") { "int(1)" } else { "broken" };
            if nonsense.is_empty() {
                drop(server);
            }
            for told in told {
                assert_eq!(outcome(told).await, expected);
            }
            while !pipeline.is_closed() {
                tokio::time::sleep(Duration::from_millis(1)).await;
            }
            assert_eq!(outcome(submit(&pipeline, b"two", LONG)).await, "not sent");
        }
    }
}
