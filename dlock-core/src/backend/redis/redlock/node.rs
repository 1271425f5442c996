//! The way to one node: its connection, and the line of requests that wait for it.
//!
//! A request is written to the connection at once, by the thread that makes it. When there is
//! no connection yet, or one with TLS, it goes into the line, and a task sends the line one
//! after the other. Nothing is written past the line, so the requests of one owner keep
//! their order. While a node is down, requests to it fail at once, and a connection is tried
//! in the background.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use parking_lot::Mutex;
use redis::Value;
use tokio::runtime::Handle;
use tokio::sync::mpsc;

use super::super::connection::{Link, OnAnswer, Submitted};
use super::super::notices::Notices;
use super::super::scripts::PackedRun;
use super::pending_releases::PendingReleases;
use super::voter::Voter;
use crate::backend::abort_on_drop::AbortOnDrop;
use crate::error::{Error, ErrorKind, Operation, Result};

/// How often a connection to a node that is down is tried, at most.
const RECONNECT: Duration = Duration::from_millis(100);

/// One node, seen by one client.
pub(super) struct Node {
    pub(super) link: Arc<Link>,
    pub(super) voter: Arc<Voter>,
    pub(super) notices: Notices,
    pub(super) pending_releases: Mutex<PendingReleases>,
    /// Whether a task sends the pending releases.
    pub(super) collecting: AtomicBool,
    line: Arc<Line>,
    sender: mpsc::UnboundedSender<Job>,
    receiver: Mutex<Option<mpsc::UnboundedReceiver<Job>>>,
    worker: Mutex<Option<AbortOnDrop>>,
    reconnected: Mutex<Instant>,
}

/// What the requests in the line and the task that sends them share.
struct Line {
    /// How many requests are in the line.
    queued: AtomicUsize,
    /// Whether a connection was tried.
    tried: AtomicBool,
    /// Why there is no connection.
    why: Mutex<Option<Error>>,
}

struct Job {
    run: Arc<PackedRun>,
    on_reply: OnReply,
}

/// What is to be done with the answer of a node.
pub(super) struct OnReply {
    pub(super) operation: Operation,
    /// When the answer is too late.
    pub(super) until: Instant,
    /// Called once, or dropped; with `None` if no answer came in time.
    pub(super) done: Box<dyn FnOnce(Option<Result<Value>>) + Send>,
}

impl OnReply {
    fn submitted(self) -> OnAnswer {
        let OnReply { operation, until, done } = self;
        let done = Box::new(move |Submitted { link, live, answer, .. }: Submitted| {
            done(answer.map(|it| it.and_then(|it| link.checked(&live, operation, it))));
        });
        OnAnswer { operation, until, done }
    }
}

impl Node {
    pub(super) fn new(link: Arc<Link>, voter: Arc<Voter>, notices: Notices) -> Arc<Self> {
        let (sender, receiver) = mpsc::unbounded_channel();
        Arc::new(Node {
            link,
            voter,
            notices,
            pending_releases: Mutex::default(),
            collecting: AtomicBool::new(false),
            line: Arc::new(Line {
                queued: AtomicUsize::new(0),
                tried: AtomicBool::new(false),
                why: Mutex::new(None),
            }),
            sender,
            receiver: Mutex::new(Some(receiver)),
            worker: Mutex::new(None),
            reconnected: Mutex::new(Instant::now()),
        })
    }

    /// Starts the task that sends the line.
    pub(super) fn open(&self, runtime: &Handle) {
        if let Some(receiver) = self.receiver.lock().take() {
            let work = send_line(self.link.clone(), self.line.clone(), receiver);
            *self.worker.lock() = Some(AbortOnDrop(runtime.spawn(work).abort_handle()));
        }
    }

    /// Runs a script, without waiting.
    ///
    /// # Errors
    /// Why the node cannot be reached, and what was to be done with the answer.
    pub(super) fn send(
        &self,
        runtime: &Handle,
        run: Arc<PackedRun>,
        on_reply: OnReply,
    ) -> std::result::Result<(), (OnReply, Error)> {
        if self.line.queued.load(Ordering::Acquire) == 0 {
            if let Some(live) = self.link.plain() {
                self.link.submit_packed(live, &run, on_reply.submitted());
                return Ok(());
            }
            if !self.link.has_connection() && self.line.tried.load(Ordering::Relaxed) {
                self.reconnect(runtime);
                return Err((on_reply, self.why()));
            }
        }
        self.line.queued.fetch_add(1, Ordering::AcqRel);
        self.sender.send(Job { run, on_reply }).map_err(|job| {
            self.line.queued.fetch_sub(1, Ordering::AcqRel);
            (job.0.on_reply, self.why())
        })
    }

    fn why(&self) -> Error {
        self.line.why.lock().clone().unwrap_or_else(|| {
            Error::new(ErrorKind::Unavailable, Operation::Connect)
                .with_message(format!("the connection to Redis at {} broke", self.link.shown()))
        })
    }

    /// Tries to connect in the background.
    pub(super) fn reconnect(&self, runtime: &Handle) {
        {
            let mut last = self.reconnected.lock();
            if last.elapsed() < RECONNECT {
                return;
            }
            *last = Instant::now();
        }
        let (link, line) = (self.link.clone(), self.line.clone());
        runtime.spawn(async move {
            let connected = link.connected(Operation::Connect).await;
            *line.why.lock() = connected.err();
        });
    }
}

async fn send_line(link: Arc<Link>, line: Arc<Line>, mut jobs: mpsc::UnboundedReceiver<Job>) {
    while let Some(Job { run, on_reply: OnReply { operation, until, done } }) = jobs.recv().await {
        let answer = if Instant::now() >= until {
            Some(Err(Error::new(ErrorKind::Unavailable, operation).with_message(format!(
                "Redis at {} was too slow, so this was not sent to it in time",
                link.shown()
            ))))
        } else {
            let running = tokio::time::timeout_at(until.into(), link.run(operation, run.run()));
            running.await.ok()
        };
        if let Some(Err(error)) = &answer
            && error.kind() != ErrorKind::Unknown
        {
            *line.why.lock() = Some(error.clone());
        }
        line.tried.store(true, Ordering::Relaxed);
        line.queued.fetch_sub(1, Ordering::AcqRel);
        done(answer);
    }
}
