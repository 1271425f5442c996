//! Who reads the answers of a [`Pipeline`].
//!
//! Waking another thread costs more than all the rest of a lone call, so answers are
//! read where the callers are: by a task in the runtime of the first caller, which then
//! wakes tasks of its own runtime. But that runtime may be blocked, or end. So the
//! driver's thread is a second reader, which stands by:
//!
//! ```text
//!              calls come one by one, and a caller's runtime reads
//!   EAGER -------------------------------------------------------> STANDING BY
//!   reads      calls overlap, or an answer is due for PROMPT,      looks now and then
//!   as well    or the caller's reader has gone                     for what is due
//!     ^---------------------------------------------------------------'
//! ```
//!
//! When calls overlap, two threads are better than one: the workers of a runtime look
//! for what came in only when they have nothing else to do. Unless polling pays: then
//! the caller's reader looks often enough.
//!
//! Both may read at the same time: bytes are taken from the socket and put in order
//! under one lock. Replies are called without it, so those of two reads may overlap.
//!
//! Notices are read in the same way, by a runtime in which claims are queued. Since nobody
//! knows when one is due, the driver's thread looks for them ten times a second while it
//! stands by; and when nothing came for a while, it reads by itself again.
//!
//! Callers that go on as soon as they have their answers get the next ones sooner if the
//! worker does not sleep meanwhile: their reader polls busily (`busy_polls.rs`).

use std::future::poll_fn;
use std::panic::AssertUnwindSafe;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU8, Ordering};
use std::task::{Context, Poll};
use std::time::{Duration, Instant};

use parking_lot::Mutex;
use redis::Value;
use tokio::io::ReadBuf;
use tokio::runtime::{Handle, Id};
use tokio::sync::Notify;

use super::busy_polls::{self, BusyPolls};
use super::pipeline::{Outcome, Pipeline, Reply, would_block};
use super::resp::{Frame, FrameScanner};
use super::socket::Readable;

/// How long an answer may be due before the driver's thread reads too.
const PROMPT: Duration = Duration::from_millis(5);
/// For how long it does so then, at least.
const EAGER: Duration = Duration::from_secs(1);
/// How long a message may be there before the driver's thread reads it.
const UNREAD: Duration = Duration::from_millis(100);
/// A caller's runtime no longer reads messages when none came for this long: longer than the
/// time between two probes while somebody waits.
const QUIET: Duration = Duration::from_secs(3);
/// How much is read at once.
const READ: usize = 16 * 1024;
/// How much room is kept for answers between two of them.
const KEPT: usize = 256 * 1024;

/// The readers of one pipeline.
pub(super) struct Readers {
    reading: Mutex<Reading>,
    /// The runtime of the driver.
    driver: Id,
    callers: AtomicU8,
    /// Whether the driver's reader is to be woken by the next request.
    asleep: AtomicBool,
    /// Whether calls overlapped since the driver's reader looked last.
    overlap: AtomicBool,
    /// Whether a caller's reader gets its answers by polling.
    polling_pays: AtomicBool,
    wake: Notify,
    /// Ends the reader in a caller's runtime.
    dismiss: Notify,
}

/// Whether a caller's runtime reads.
const NOBODY: u8 = 0;
const READS: u8 = 1;
/// It has no IO.
const CANNOT: u8 = 2;

#[derive(Default)]
struct Reading {
    /// What was read, and room for more behind it.
    bytes: Vec<u8>,
    filled: usize,
    scanner: FrameScanner,
}

impl Readers {
    /// To be made in the driver's runtime.
    pub(super) fn new() -> Self {
        Readers {
            reading: Mutex::default(),
            driver: Handle::current().id(),
            callers: AtomicU8::new(NOBODY),
            asleep: AtomicBool::new(false),
            overlap: AtomicBool::new(false),
            polling_pays: AtomicBool::new(false),
            wake: Notify::new(),
            dismiss: Notify::new(),
        }
    }

    /// A request was sent, so somebody must read. `overlap`: others have no answer yet.
    pub(super) fn expect_answer(pipeline: &Arc<Pipeline>, overlap: bool) {
        let readers = &pipeline.readers;
        let read_by_driver = overlap && !readers.polling_pays.load(Ordering::Relaxed);
        if read_by_driver && !readers.overlap.load(Ordering::Relaxed) {
            readers.overlap.store(true, Ordering::Release);
            readers.wake.notify_one();
        }
        Self::read_here(pipeline);
        if readers.asleep.load(Ordering::Relaxed) && readers.asleep.swap(false, Ordering::AcqRel) {
            readers.wake.notify_one();
        }
    }

    /// Reads in this runtime, if no caller's runtime does.
    pub(super) fn read_here(pipeline: &Arc<Pipeline>) {
        if pipeline.readers.callers.load(Ordering::Relaxed) == NOBODY {
            pipeline.readers.read_in_this_runtime(pipeline);
        }
    }

    pub(super) fn wake_driver(&self) {
        self.wake.notify_one();
    }

    fn read_in_this_runtime(&self, pipeline: &Arc<Pipeline>) {
        let Ok(runtime) = Handle::try_current() else { return };
        let claimed =
            || self.callers.compare_exchange(NOBODY, READS, Ordering::AcqRel, Ordering::Relaxed);
        if runtime.id() == self.driver || claimed().is_err() {
            return;
        }
        let reader = CallersReader(pipeline.clone());
        // tokio panics in a runtime without IO, and there is no way to ask.
        let socket = std::panic::catch_unwind(AssertUnwindSafe(|| pipeline.socket.readable()));
        if let Ok(Ok(socket)) = socket {
            runtime.spawn(reader.run(socket));
            self.wake_driver();
        } else {
            drop(reader);
            self.callers.store(CANNOT, Ordering::Release);
        }
    }

    fn callers_read(&self) -> bool {
        self.callers.load(Ordering::Acquire) == READS
    }
}

/// Reads in a caller's runtime.
struct CallersReader(Arc<Pipeline>);

impl CallersReader {
    async fn run(self, mut socket: Readable) {
        let mut polls = BusyPolls::default();
        loop {
            let polled = self.read_busily(&mut polls).await;
            self.0.readers.polling_pays.store(polls.pay(), Ordering::Relaxed);
            let goes_on = match polled {
                Some(goes_on) => goes_on,
                None => tokio::select! {
                    biased;
                    goes_on = read(&self.0, &mut socket) => goes_on,
                    () = self.0.readers.dismiss.notified() => return,
                },
            };
            if !goes_on {
                return self.0.close();
            }
        }
    }

    /// As [`read`], but without sleeping; `None` if nothing was to be read in time.
    async fn read_busily(&self, polls: &mut BusyPolls) -> Option<bool> {
        if self.0.is_subscriber() {
            return None; // nobody knows when a message comes
        }
        let polling = polls.start()?;
        let answered = Instant::now();
        // The callers that were just answered run now, and may send their next requests.
        tokio::task::yield_now().await;
        let mut polled = Instant::now();
        if busy_polls::is_busy(polled - answered) {
            return None;
        }
        while let Some(waited) = self.0.oldest_wait().1 {
            // Other tasks have their turn between two of these.
            while polled.elapsed() < busy_polls::WITHOUT_YIELD {
                if let Some(goes_on) = read_now(&self.0) {
                    polling.succeeded();
                    return Some(goes_on);
                }
            }
            tokio::task::yield_now().await;
            let now = Instant::now();
            if busy_polls::is_too_long(waited, now - polled) {
                break;
            }
            polled = now;
        }
        None
    }
}

impl Drop for CallersReader {
    /// The runtime may have ended, or a reply may have panicked.
    fn drop(&mut self) {
        self.0.readers.polling_pays.store(false, Ordering::Relaxed);
        self.0.readers.callers.store(NOBODY, Ordering::Release);
        self.0.readers.wake_driver();
    }
}

/// Reads in the driver's runtime, until the connection ends.
pub(super) async fn read_for_driver(pipeline: Arc<Pipeline>) {
    /// Should a reply panic, or the runtime end, nobody would read.
    struct EndsWith(Arc<Pipeline>);
    impl Drop for EndsWith {
        fn drop(&mut self) {
            self.0.close();
        }
    }
    let ends = EndsWith(pipeline);
    let pipeline = &ends.0;
    let mut eager = Duration::ZERO;
    while !pipeline.is_closed() {
        let overlap = pipeline.readers.overlap.swap(false, Ordering::AcqRel);
        if pipeline.readers.callers_read() && eager.is_zero() && !overlap {
            stand_by(pipeline).await;
            eager = EAGER;
        }
        // Registered for as long as it reads: else each answer would wake this thread.
        let Ok(mut socket) = pipeline.socket.readable() else { return };
        let reading = async {
            while read(pipeline, &mut socket).await {}
            pipeline.close();
        };
        let until = async {
            if eager.is_zero() {
                return pipeline.readers.wake.notified().await;
            }
            tokio::time::sleep(eager).await;
            while pipeline.readers.overlap.swap(false, Ordering::AcqRel) {
                tokio::time::sleep(EAGER).await;
            }
        };
        tokio::select! {
            () = reading => return,
            () = until => eager = Duration::ZERO,
        }
    }
}

/// Returns when answers are not read in time, or nobody else reads.
async fn stand_by(pipeline: &Pipeline) {
    let readers = &pipeline.readers;
    let (mut seen, since) = (u64::MAX, Instant::now());
    let overlap = || readers.overlap.load(Ordering::Acquire);
    while readers.callers_read() && !overlap() && !pipeline.is_closed() {
        let (count, oldest) = pipeline.oldest_wait();
        if oldest.is_some_and(|waited| waited >= PROMPT) {
            readers.polling_pays.store(false, Ordering::Relaxed);
            return;
        }
        if pipeline.is_subscriber() {
            let _ = tokio::time::timeout(UNREAD, readers.wake.notified()).await;
            if read_now(pipeline) == Some(false) {
                return pipeline.close();
            }
            let quiet = Instant::now().checked_sub(QUIET);
            if quiet.is_some_and(|quiet| since < quiet && !pipeline.heard_since(quiet)) {
                readers.dismiss.notify_one();
            }
        } else if oldest.is_none() && count == seen {
            // Nothing happened for a while. The next request wakes this again.
            readers.asleep.store(true, Ordering::Release);
            if pipeline.oldest_wait().0 == count {
                readers.wake.notified().await;
            }
            readers.asleep.store(false, Ordering::Release);
        } else {
            let _ = tokio::time::timeout(PROMPT, readers.wake.notified()).await;
        }
        seen = count;
    }
}

/// As [`read`], but does not wait; `None` if there is nothing to read.
fn read_now(pipeline: &Pipeline) -> Option<bool> {
    let mut received = Received::default();
    let readable = {
        let mut reading = pipeline.readers.reading.lock();
        let read = match pipeline.socket.read(reading.room()) {
            Err(error) if would_block(&error) => return None,
            read => read.unwrap_or(0),
        };
        reading.filled += read;
        read > 0 && reading.take(pipeline, &mut received)
    };
    received.pass_on(pipeline);
    Some(readable)
}

/// Reads once and passes on what is complete. False when the connection has ended, or makes
/// no sense any more.
async fn read(pipeline: &Pipeline, socket: &mut Readable) -> bool {
    let mut received = Received::default();
    let read = poll_fn(|cx| {
        let mut reading = pipeline.readers.reading.lock();
        let read = std::task::ready!(reading.poll_read(cx, socket));
        let readable = read && reading.take(pipeline, &mut received);
        Poll::Ready(readable)
    });
    let readable = read.await;
    received.pass_on(pipeline);
    readable
}

/// What was read, to be passed on without the lock.
#[derive(Default)]
struct Received {
    replies: Vec<(Reply, Value)>,
    messages: Vec<Vec<u8>>,
}

impl Received {
    fn pass_on(self, pipeline: &Pipeline) {
        for (reply, answer) in self.replies {
            reply(Outcome::Answered(answer));
        }
        for message in self.messages {
            pipeline.pass_on(&message);
        }
    }
}

impl Reading {
    /// Where the next bytes go.
    fn room(&mut self) -> &mut [u8] {
        if self.bytes.len() < self.filled + READ {
            self.bytes.resize(self.filled + READ, 0);
        }
        &mut self.bytes[self.filled..]
    }

    /// Reads some bytes; false at the end.
    fn poll_read(&mut self, cx: &mut Context<'_>, socket: &mut Readable) -> Poll<bool> {
        let mut buffer = ReadBuf::new(self.room());
        let read = std::task::ready!(socket.poll_read(cx, &mut buffer));
        let taken = buffer.filled().len();
        self.filled += taken;
        Poll::Ready(read.is_ok() && taken > 0)
    }

    /// Takes out what is complete. False if it makes no sense.
    fn take(&mut self, pipeline: &Pipeline, received: &mut Received) -> bool {
        let Received { replies, messages } = received;
        let Reading { bytes, filled, scanner } = self;
        let (mut start, mut sense) = (0, true);
        let answers = std::iter::from_fn(|| {
            loop {
                let end = scanner.frame_end(&bytes[..*filled], start)?;
                let answer = redis::parse_redis_value(&bytes[start..end]);
                start = end;
                let Ok(answer) = answer else {
                    sense = false;
                    return None;
                };
                match Frame::of(answer, pipeline.is_subscriber()) {
                    Frame::Answer(answer) => return Some(answer),
                    Frame::Message(message) => messages.push(message),
                    Frame::Other => {}
                }
            }
        });
        let expected = pipeline.match_answers(answers, replies);
        bytes.copy_within(start..*filled, 0);
        *filled -= start;
        scanner.rebase(start);
        if *filled == 0 && bytes.len() > KEPT {
            *bytes = Vec::new();
        }
        sense && expected && !scanner.is_broken()
    }
}
