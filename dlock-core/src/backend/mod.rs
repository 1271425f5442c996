//! The trait that a backend implements, and the types that it uses.

use std::future::Future;
use std::pin::Pin;
use std::sync::{Arc, Weak};
use std::task::{Context, Poll};
use std::time::Duration;

pub use crate::claim::{
    AcquireOutcome, Answer, Claim, Grant, Notice, Owner, Release, RenewOutcome, Request,
    SessionTerm,
};
use crate::claim::{Holder, Mode};
pub use crate::clock::Moment;
use crate::error::{Error, ErrorKind, Operation, Result};
use crate::key::Key;

#[cfg(any(feature = "consul", feature = "redis", feature = "zookeeper"))]
mod abort_on_drop;
mod capabilities;
#[cfg(feature = "consul")]
pub mod consul;
#[cfg(any(feature = "etcd", feature = "zookeeper"))]
mod current_session;
#[cfg(feature = "etcd")]
pub mod etcd;
#[cfg(any(feature = "consul", feature = "etcd", feature = "zookeeper"))]
mod holder_json;
pub mod memory;
#[cfg(any(feature = "redis", feature = "postgres"))]
mod notice_message;
#[cfg(any(feature = "redis", feature = "mysql", feature = "postgres", feature = "sqlite"))]
mod per_holder;
#[cfg(feature = "redis")]
pub mod redis;
#[cfg(any(feature = "etcd", feature = "zookeeper"))]
mod removals;
#[cfg(any(feature = "mysql", feature = "postgres", feature = "sqlite"))]
pub mod sql;
#[cfg(feature = "zookeeper")]
pub mod zookeeper;

pub use self::capabilities::{Capabilities, TtlSupport};

/// A call to a backend: under way, or answered already.
#[must_use = "a call does nothing unless it is awaited"]
pub struct Call<'a, T>(State<'a, T>);

enum State<'a, T> {
    Answered(Option<T>),
    UnderWay(Pin<Box<dyn Future<Output = T> + Send + 'a>>),
}

impl<'a, T> Call<'a, T> {
    /// A call that waits for something.
    pub fn new(future: impl Future<Output = T> + Send + 'a) -> Self {
        Call(State::UnderWay(Box::pin(future)))
    }

    /// A call that is already answered.
    pub fn answered(answer: T) -> Self {
        Call(State::Answered(Some(answer)))
    }

    /// The answer, if the call is already answered.
    pub(crate) fn now(self) -> Option<T> {
        match self.0 {
            State::Answered(answer) => answer,
            State::UnderWay(_) => None,
        }
    }
}

impl<T: Unpin> Future for Call<'_, T> {
    type Output = T;

    fn poll(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<T> {
        match &mut self.0 {
            State::Answered(answer) => answer.take().map_or(Poll::Pending, Poll::Ready),
            State::UnderWay(future) => future.as_mut().poll(cx),
        }
    }
}

impl<T> std::fmt::Debug for Call<'_, T> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("Call")
    }
}

/// Where a backend delivers its notices.
pub trait Listener: Send + Sync {
    /// Something happened to the claim of this owner on this key. Must not block.
    fn on_notice(&self, key: &Key, owner: Owner, notice: Notice);

    /// The connection to the store was restored. The store may have lost its latest writes:
    /// every lease is renewed and every waiting claim asks again now, not when it is due.
    /// Must not block.
    fn on_reconnected(&self) {}

    /// The client's session ended, and with it all locks and places in queues: every guard
    /// is notified at once ([`LossReason::SessionLost`](crate::LossReason::SessionLost)), and
    /// every waiting claim asks again. Must be called before a new session is used, and must
    /// not block.
    fn on_session_lost(&self) {}
}

/// Calls that leave together, and where their answers go. Dropping it means that no
/// answer came.
pub trait Batch: Send {
    /// The calls.
    fn requests(&self) -> &[Request];

    /// The time that is left before the answers are too late.
    fn time_left(&self) -> Duration;

    /// Takes one answer for each call, in order. A call whose answer is missing may or
    /// may not have been made. Must be called without a lock that a call needs.
    fn complete(self: Box<Self>, answers: Vec<Answer>);
}

/// A store of locks. One value serves one client.
///
/// A call may fail with `Unavailable` (nothing was applied), `Unknown` (it may
/// have been, or may yet be, applied) or a kind that a retry does not cure. The
/// client puts a time-out around each call and turns it into `Unknown`. For one
/// owner there is never more than one acquire or release under way, and a
/// release is not sent while an acquire is unanswered.
pub trait Backend: Send + Sync + 'static {
    /// What this backend can do.
    fn capabilities(&self) -> Capabilities;

    /// What to change so that the backend supports claims of this mode, if that can be done.
    fn unsupported_hint(&self, _mode: Mode) -> Option<&'static str> {
        None
    }

    /// Called once, before any other call: the number of the client (as in
    /// [`Holder::client`]) and where its notices go.
    fn open(&self, client: u64, listener: Weak<dyn Listener>);

    /// Makes calls that are due at the same time, at most
    /// [`Capabilities::max_batch`] of them. Returns one answer for each call, in
    /// order. The failure of one call does not affect the others. A [`Request`] says what each
    /// call must do. To a backend that does not combine, an acquire or a release comes alone,
    /// and renewals come together.
    fn call<'a>(&'a self, requests: &'a [Request]) -> Call<'a, Vec<Answer>>;

    /// Sends calls at once, from the thread that makes them, and without waiting. A
    /// backend that can do so takes the batch and completes it later, once, from any
    /// thread. One that cannot, or cannot just now, gives it back; then
    /// [`call`](Self::call) is called on the driver's thread.
    ///
    /// # Errors
    /// The batch, which was not sent.
    fn submit(&self, batch: Box<dyn Batch>) -> std::result::Result<(), Box<dyn Batch>> {
        Err(batch)
    }

    /// How many partitions there are for combined calls, for example one for each server:
    /// calls of different partitions do not wait for each other, nor share a time-out.
    fn partitions(&self) -> usize {
        1
    }

    /// The partition of a call.
    fn partition_of(&self, _request: &Request) -> usize {
        0
    }

    /// The answer of a backend that is not [remote](Capabilities::remote): at once.
    /// The moment is now, by tokio's clock.
    #[doc(hidden)]
    fn call_now(&self, request: &Request, _now: Moment) -> Answer {
        let answers = self.call(std::slice::from_ref(request)).now();
        let answer = answers.and_then(|answers| answers.into_iter().next());
        answer.unwrap_or_else(|| request.unanswered())
    }

    /// Who holds this key and who waits for it, as a lock or as a semaphore.
    fn inspect<'a>(&'a self, key: &'a Key) -> Call<'a, Result<KeyState>>;

    /// Some of the keys in use that start with `prefix`, from `cursor` on.
    ///
    /// Optional: without it the answer is `Unsupported`, and
    /// [`Capabilities::operators`] must be false.
    fn list<'a>(&'a self, _prefix: &'a str, _cursor: Cursor) -> Call<'a, Result<Page>> {
        Call::answered(Err(unsupported(self.capabilities().name, Operation::List)))
    }

    /// Takes a lock, or the permits of a semaphore, from those who hold it at this moment and
    /// are [meant](Break::target), and notifies them. Answers how many there were.
    ///
    /// Whether a holder is meant must be decided together with the break: a holder that comes
    /// in the meantime is not broken in the place of another one.
    ///
    /// Optional: without it the answer is `Unsupported`, and
    /// [`Capabilities::operators`] must be false.
    fn break_lock<'a>(&'a self, key: &'a Key, _how: &'a Break) -> Call<'a, Result<usize>> {
        let name = self.capabilities().name;
        Call::answered(Err(unsupported(name, Operation::Break).with_key(key)))
    }

    /// Whether the backend answers.
    fn ping(&self) -> Call<'_, Result<()>>;

    /// The servers behind the backend, for operators. The default returns none.
    fn servers(&self) -> Call<'_, Result<Vec<ServerState>>> {
        Call::answered(Ok(Vec::new()))
    }

    /// Called at the end of `shutdown()` if no guard is held, and when the last client was
    /// dropped and its releases were sent. A backend with a session ends the session here,
    /// instead of leaving it until it expires. It must return quickly (100 ms).
    fn close(&self) -> Call<'_, ()> {
        Call::answered(())
    }

    /// This backend as `Any`, so that extension crates such as `dlock-segment` can downcast
    /// it.
    #[doc(hidden)]
    fn as_any(&self) -> Option<&dyn std::any::Any> {
        None
    }
}

/// The error of a backend that does not have an optional ability.
pub(crate) fn unsupported(backend: &str, operation: Operation) -> Error {
    let ability = match operation {
        Operation::List => "list keys",
        Operation::Break => "break locks",
        _ => "do this",
    };
    Error::new(ErrorKind::Unsupported, operation)
        .with_message(format!("the backend {backend}:// cannot {ability}"))
}

/// A backend whose type is not known, or need not be.
impl<B: Backend + ?Sized> Backend for Box<B> {
    fn capabilities(&self) -> Capabilities {
        (**self).capabilities()
    }

    fn unsupported_hint(&self, mode: Mode) -> Option<&'static str> {
        (**self).unsupported_hint(mode)
    }

    fn open(&self, client: u64, listener: Weak<dyn Listener>) {
        (**self).open(client, listener);
    }

    fn call<'a>(&'a self, requests: &'a [Request]) -> Call<'a, Vec<Answer>> {
        (**self).call(requests)
    }

    fn submit(&self, batch: Box<dyn Batch>) -> std::result::Result<(), Box<dyn Batch>> {
        (**self).submit(batch)
    }

    fn partitions(&self) -> usize {
        (**self).partitions()
    }

    fn partition_of(&self, request: &Request) -> usize {
        (**self).partition_of(request)
    }

    fn call_now(&self, request: &Request, now: Moment) -> Answer {
        (**self).call_now(request, now)
    }

    fn inspect<'a>(&'a self, key: &'a Key) -> Call<'a, Result<KeyState>> {
        (**self).inspect(key)
    }

    fn list<'a>(&'a self, prefix: &'a str, cursor: Cursor) -> Call<'a, Result<Page>> {
        (**self).list(prefix, cursor)
    }

    fn break_lock<'a>(&'a self, key: &'a Key, how: &'a Break) -> Call<'a, Result<usize>> {
        (**self).break_lock(key, how)
    }

    fn ping(&self) -> Call<'_, Result<()>> {
        (**self).ping()
    }

    fn servers(&self) -> Call<'_, Result<Vec<ServerState>>> {
        (**self).servers()
    }

    fn close(&self) -> Call<'_, ()> {
        (**self).close()
    }

    fn as_any(&self) -> Option<&dyn std::any::Any> {
        (**self).as_any()
    }
}

/// How an operator breaks a lock.
#[derive(Clone, Debug)]
pub struct Break {
    /// Who breaks it, for those who lose it.
    pub by: Arc<Holder>,
    /// Who loses it.
    pub target: BreakTarget,
    /// For how long the key stays taken, so that its holders hear of it before somebody
    /// else is let in.
    pub delay: Duration,
}

/// Who loses a lock that is broken. The lock and the semaphore of a key are separate.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum BreakTarget {
    /// Whoever holds the lock.
    Lock,
    /// The holder of the lock with this token, as [`HolderState::token`] shows it; nobody, if
    /// the lock has changed hands.
    Holder {
        /// The token.
        token: u64,
    },
    /// Whoever has permits of the semaphore.
    Permits,
}

impl BreakTarget {
    /// Whether it is the semaphore of the key.
    pub fn is_permits(self) -> bool {
        self == BreakTarget::Permits
    }

    /// Whether this target includes a holder, of the lock or of the semaphore as the target
    /// says, with this token.
    pub fn includes(self, token: Option<u64>) -> bool {
        match self {
            BreakTarget::Holder { token: meant } => token == Some(meant),
            BreakTarget::Lock | BreakTarget::Permits => true,
        }
    }
}

/// A place in a listing; start with the default.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Cursor(pub String);

/// A part of a listing.
#[derive(Clone, Debug, Default)]
pub struct Page {
    /// Keys in use. A key may come twice; one that was there all along comes once at least.
    pub keys: Vec<Key>,
    /// Where to go on; `None` at the end.
    pub next: Option<Cursor>,
}

/// What a backend knows of a key.
#[derive(Clone, Debug, Default)]
#[non_exhaustive]
pub struct KeyState {
    /// Who holds it, locks first, then permits.
    pub holders: Vec<HolderState>,
    /// Who waits, in order, locks first, then permits.
    pub waiters: Vec<WaiterState>,
    /// Who broke it last, if that is still known.
    pub broken_by: Option<String>,
}

/// A server behind a backend.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct ServerState {
    /// The address of the server, as this client or its primary knows it.
    pub address: String,
    /// The role of the server.
    pub role: ServerRole,
    /// How many bytes of its primary's writes a replica has not confirmed yet: what a
    /// failover to it would lose at most. `None` if that is not known.
    pub behind: Option<u64>,
    /// What is wrong with the server, or dangerous about its settings.
    pub note: Option<String>,
}

/// The role of a server behind a backend.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum ServerRole {
    /// Locks are kept here.
    Primary,
    /// It has a copy, and may become a primary.
    Replica,
    /// It knows which server is the primary.
    Sentinel,
}

/// One holder of a key.
#[derive(Clone, Debug)]
pub struct HolderState {
    /// The client that holds the key.
    pub holder: Arc<Holder>,
    /// How the key is held.
    pub mode: Mode,
    /// The first token of its grant; `None` for permits. The tasks of one process that hand
    /// the lock to each other share a grant.
    pub token: Option<u64>,
    /// How long the key has been held.
    pub held_for: Duration,
    /// The time until the lease expires if it is not renewed.
    pub expires_in: Duration,
    /// Whether the holder is done: it released the key (`hold_at_least`, `release_after`) or the
    /// lock was broken, and the key only stays taken for [`expires_in`](Self::expires_in).
    pub is_over: bool,
}

/// One waiter for a key.
#[derive(Clone, Debug)]
pub struct WaiterState {
    /// The client that waits.
    pub holder: Arc<Holder>,
    /// How it wants to hold the key.
    pub mode: Mode,
    /// How long it has waited.
    pub waiting_for: Duration,
}
