//! [`Lock`]: the one type under every primitive, and how it is acquired.

use std::fmt;
use std::marker::PhantomData;
use std::sync::Arc;
use std::time::Duration;

use tracing::Instrument as _;

use super::acquire::{Acquire, Admission};
use super::hold::{Hold, lost};
use super::options::{Options, lock_options};
use crate::claim::{Holder, Mode, Release, Token};
use crate::client::Handle;
use crate::clock::Moment;
use crate::config::MAX_TTL;
use crate::error::{BodyStatus, Error, ErrorKind, Operation, Result};
use crate::key::Key;
use crate::machine::{LockRequest, QueueScope, Refusal, Wait};
use crate::observe::Event;
use crate::primitives::guard::{Guard, Permits};
use crate::primitives::reentry;

/// The guard that a [`Lock`] gives: a [`Guard`] or [`Permits`].
pub trait LockGuard: sealed::LockGuard {}

impl LockGuard for Guard {}
impl LockGuard for Permits {}

mod sealed {
    use super::{Hold, Token};

    pub trait LockGuard: Sized {
        #[doc(hidden)]
        #[allow(private_interfaces, reason = "sealed: nobody else names it")]
        fn from_hold(hold: Hold, token: Token) -> Self;

        #[doc(hidden)]
        #[allow(private_interfaces, reason = "sealed: nobody else names it")]
        fn into_hold(self) -> Hold;
    }
}

#[allow(private_interfaces, reason = "sealed: nobody else names it")]
impl sealed::LockGuard for Guard {
    fn from_hold(hold: Hold, token: Token) -> Self {
        Guard::new(hold, token)
    }

    fn into_hold(self) -> Hold {
        Guard::into_hold(self)
    }
}

#[allow(private_interfaces, reason = "sealed: nobody else names it")]
impl sealed::LockGuard for Permits {
    fn from_hold(hold: Hold, _: Token) -> Self {
        Permits::new(hold)
    }

    fn into_hold(self) -> Hold {
        Permits::into_hold(self)
    }
}

/// A lock that one task at a time holds: [`Dlock::mutex`](crate::Dlock::mutex).
pub type Mutex = Lock<Guard>;

/// A lock that can be acquired any number of times: a mutex, one side of a
/// read-write lock, or some permits of a semaphore.
///
/// ```
/// # #[tokio::main(flavor = "current_thread")] async fn main() -> dlock::Result<()> {
/// # use std::time::Duration;
/// # let dlock = dlock::Dlock::connect("memory://").await?;
/// let lock = dlock
///     .mutex("nightly-report")
///     .ttl(Duration::from_secs(60))
///     .wait(Duration::from_secs(2))
///     .tag("job", "report");
/// if let Some(guard) = lock.try_lock().await? {
///     // nobody else runs the report now
///     drop(guard);
/// }
/// # Ok(()) }
/// ```
#[must_use = "the lock is not acquired until lock() or try_lock() is awaited"]
pub struct Lock<G> {
    handle: Arc<Handle>,
    key: Result<Key>,
    mode: Mode,
    pub(super) options: Options,
    guard: PhantomData<fn() -> G>,
}

impl<G: LockGuard> Lock<G> {
    pub(crate) fn new(handle: Arc<Handle>, key: Result<Key>, mode: Mode) -> Self {
        let options = Options::new(&handle);
        Lock { handle, key, mode, options, guard: PhantomData }
    }

    lock_options!();

    /// Sets the name under which logs, errors and metrics show this lock, instead
    /// of the key's template.
    pub fn name(mut self, name: &'static str) -> Self {
        self.key = self.key.map(|key| key.named(name));
        self
    }

    /// Acquires the lock, runs a future while it is held, and releases it.
    ///
    /// When the lock is lost, the future is dropped at its next await. It can acquire the same
    /// lock again. The answer of the release is waited for, and a release without an answer is
    /// repeated in the background.
    ///
    /// ```
    /// # #[tokio::main(flavor = "current_thread")] async fn main() -> dlock::Result<()> {
    /// # let dlock = dlock::testing::client();
    /// let paid = dlock.mutex("order:7").run(async { "paid" }).await?;
    /// assert_eq!(paid, "paid");
    /// # Ok(()) }
    /// ```
    ///
    /// # Errors
    /// As [`lock`](Self::lock), and `Lost` if the lock was lost;
    /// [`Error::body_status`](crate::Error::body_status) tells whether the future had started.
    ///
    /// # Cancel safety
    /// Dropping this drops the future, and leaves neither a lock nor a place in a queue.
    pub async fn run<F: Future>(&self, future: F) -> Result<F::Output> {
        let hold = self.lock().await?.into_hold();
        let output = hold.run(future).await?;
        // The future has ended while the lock was held, so its output stands.
        let _ = hold.release(Release::Now).await;
        Ok(output)
    }

    /// Acquires the lock, waiting for it without polling.
    ///
    /// ```
    /// # #[tokio::main(flavor = "current_thread")] async fn main() -> dlock::Result<()> {
    /// # let dlock = dlock::testing::client();
    /// let guard = dlock.mutex("order:7").lock().await?;
    /// println!("write with token {}", guard.token());
    /// let _ = guard.release().await?;
    /// # Ok(()) }
    /// ```
    ///
    /// # Errors
    /// `TimedOut` if somebody else still holds the lock when the wait is over; the
    /// message names the holder if it is known. `Unavailable` if the backend could
    /// not be reached until then. `Lost` if the lock was granted, and lost before this
    /// task could run; nothing was done under it. At once: `Invalid`, `Unsupported`, `Overloaded`,
    /// `WouldDeadlock`, `Denied` and `ShuttingDown`.
    ///
    /// # Cancel safety
    /// Dropping the future leaves neither a lock nor a place in a queue.
    pub async fn lock(&self) -> Result<G> {
        self.lock_until(None).await
    }

    /// Acquires the lock and blocks the thread meanwhile: for threads without a runtime, such as
    /// those of `rayon` or `tokio::task::spawn_blocking`. In async code it would block the
    /// runtime; use [`lock`](Self::lock) there.
    ///
    /// ```
    /// # let runtime = tokio::runtime::Runtime::new().unwrap();
    /// # let dlock = runtime.block_on(dlock::Dlock::connect("memory://")).unwrap();
    /// std::thread::scope(|threads| {
    ///     threads.spawn(|| -> dlock::Result<()> {
    ///         let guard = dlock.mutex("order:7").lock_blocking()?;
    ///         println!("write with token {}", guard.token());
    ///         Ok(())
    ///     });
    /// });
    /// ```
    ///
    /// # Errors
    /// As [`lock`](Self::lock).
    pub fn lock_blocking(&self) -> Result<G> {
        block_on(self.lock())
    }

    /// Acquires the lock, waiting until a moment instead of for the lock's wait.
    pub(super) async fn lock_until(&self, until: Option<Moment>) -> Result<G> {
        match self.acquire(false, until).await {
            Ok(Ok(guard)) => Ok(guard),
            Ok(Err(busy)) => Err(busy),
            Err(error) => Err(error),
        }
    }

    /// Acquires the lock if it is free; returns `None` if somebody else holds it.
    ///
    /// ```
    /// # #[tokio::main(flavor = "current_thread")] async fn main() -> dlock::Result<()> {
    /// # let dlock = dlock::testing::client();
    /// let job = dlock.mutex("nightly-report");
    /// let guard = job.try_lock().await?;
    /// assert!(guard.is_some());
    /// assert!(job.try_lock().await?.is_none(), "it is held already");
    /// # Ok(()) }
    /// ```
    ///
    /// # Errors
    /// As [`lock`](Self::lock), but never `TimedOut`.
    ///
    /// # Cancel safety
    /// Dropping the future leaves neither a lock nor a place in a queue.
    pub async fn try_lock(&self) -> Result<Option<G>> {
        self.acquire(true, None).await.map(Result::ok)
    }

    /// The guard; or the error that says who holds the lock; or any other error.
    async fn acquire(&self, attempt: bool, until: Option<Moment>) -> Result<Result<G, Error>> {
        let key = self.key.as_ref().map_err(Clone::clone)?;
        let span = tracing::debug_span!(target: "dlock::lock", "acquire", key = key.label());
        #[cfg(feature = "metrics")]
        let _waiting = crate::observe::metrics::Waiting::new(key);
        let acquiring = self.acquire_key(key, attempt, until);
        let result =
            if span.is_disabled() { acquiring.await } else { acquiring.instrument(span).await };
        if let Err(error) | Ok(Err(error)) = &result {
            self.handle.core.observer.emit(&Event::Refused { key, error });
        }
        result
    }

    async fn acquire_key(
        &self,
        key: &Key,
        attempt: bool,
        until: Option<Moment>,
    ) -> Result<Result<G, Error>> {
        self.options.check(key)?;
        if self.options.fair && !self.handle.is_fifo() {
            return Err(Error::new(ErrorKind::Unsupported, Operation::Acquire)
                .with_key(key)
                .with_message(
                    "the backend does not keep an order over all processes; remove .fair()",
                ));
        }
        if !self.handle.supports(self.mode) {
            return Err(Error::new(ErrorKind::Unsupported, Operation::Acquire)
                .with_key(key)
                .with_message(self.unsupported()));
        }
        self.check_hold_at_least(key)?;
        let ttl =
            self.handle.honoured_ttl(self.options.ttl).map_err(|error| error.with_key(key))?;
        let wait = match (attempt, until, self.options.wait) {
            (false, Some(until), _) => Wait::Until(until),
            (true, ..) | (_, _, Some(Duration::ZERO)) => Wait::Try,
            (_, _, Some(wait)) => Wait::For(wait),
            (_, _, None) => Wait::Until(Moment::NEVER),
        };
        let scope = match reentry::nesting(self.handle.client(), key, self.mode)? {
            Some(ticket_ref) => QueueScope::Nested(ticket_ref.ticket),
            None if self.options.fair || self.mode.is_permits() => QueueScope::Separate,
            None => QueueScope::Shared,
        };
        let nested = matches!(scope, QueueScope::Nested(_));
        let request = LockRequest {
            key,
            mode: self.mode,
            ttl,
            wait,
            scope,
            max_hold: self.options.max_hold,
            holder: self.options.holder(&self.handle.holder),
        };
        match Acquire::new(&self.handle, request).await {
            Ok(Admission { ticket_ref, token, handed_over, queued, waited, since }) => {
                let handle = self.handle.clone();
                let mut hold = Hold::new(handle, ticket_ref, key.clone(), self.mode, nested);
                if let Some(at_least) = self.options.hold_at_least {
                    hold.keep_taken_until(since + at_least);
                }
                let shown = (!self.mode.is_permits()).then_some(token);
                self.handle.core.observer.emit(&Event::Acquired {
                    key,
                    token: shown,
                    waited,
                    queued,
                    handed_over,
                });
                let token = Token::new(token).ok_or_else(|| {
                    Error::new(ErrorKind::Unsupported, Operation::Acquire)
                        .with_key(key)
                        .with_message("the backend gave a token of 2^53 or more, which is not exact everywhere; check its data")
                })?;
                Ok(Ok(G::from_hold(hold, token)))
            }
            Err(refusal) => self.refused(key, refusal, wait),
        }
    }

    fn unsupported(&self) -> String {
        let hint = self.handle.core.backend().unsupported_hint(self.mode);
        let hint = hint.map(|hint| format!("; {hint}")).unwrap_or_default();
        format!("the backend does not support {}{hint}", plural(self.mode))
    }

    pub(super) fn check_hold_at_least(&self, key: &Key) -> Result<()> {
        let Some(duration) = self.options.hold_at_least else { return Ok(()) };
        let (kind, fault) = if duration > MAX_TTL {
            (ErrorKind::Invalid, "hold_at_least is above a day; set it to a day at most")
        } else if self.mode == Mode::Shared {
            (
                ErrorKind::Invalid,
                "hold_at_least does not work with a shared lock; use an exclusive lock or permits",
            )
        } else if !self.handle.can_release_after() {
            (
                ErrorKind::Unsupported,
                "the backend cannot keep a key taken after a release; remove hold_at_least",
            )
        } else {
            return Ok(());
        };
        Err(Error::new(kind, Operation::Acquire).with_key(key).with_message(fault))
    }

    fn refused(&self, key: &Key, refusal: Refusal, wait: Wait) -> Result<Result<G, Error>> {
        let error = |kind| Error::new(kind, Operation::Acquire).with_key(key);
        let waited = match wait {
            Wait::Try => self.handle.config.attempt(),
            _ => self.options.wait.unwrap_or_default(),
        };
        match refusal {
            Refusal::Busy(holder) => {
                let message = self.held_by(holder, Duration::ZERO);
                Ok(Err(error(ErrorKind::TimedOut).with_message(message)))
            }
            Refusal::TimedOut { trouble: Some(trouble), .. } => Err(error(ErrorKind::Unavailable)
                .with_message(format!(
                    "{} (it was tried for {})",
                    trouble.detail(),
                    humantime::format_duration(waited.max(self.handle.config.attempt()))
                ))
                .with_source(trouble)),
            Refusal::TimedOut { holder, trouble: None } => {
                let message = self.held_by(holder, waited);
                Ok(Err(error(ErrorKind::TimedOut).with_message(message)))
            }
            Refusal::Failed(failure) => Err(failure.with_key(key)),
            Refusal::LostEarly(reason) => Err(lost(key, &reason, BodyStatus::NotRun)),
            Refusal::Lost => {
                // The body of the outer lock had begun.
                Err(error(ErrorKind::Lost).with_body_status(BodyStatus::Cancelled).with_message("the lock that this one is nested in was lost; stop, and start again from the outer lock"))
            }
            Refusal::Overloaded => Err(error(ErrorKind::Overloaded).with_message(format!(
                "{} tasks of this process already wait for this key; accept fewer requests, or raise max_waiters",
                self.handle.config.max_waiters
            ))),
            Refusal::ShuttingDown => {
                Err(error(ErrorKind::ShuttingDown).with_message("shutdown() was called on this client; make a new client"))
            }
        }
    }

    /// The message that the lock is held.
    fn held_by(&self, holder: Option<Arc<Holder>>, waited: Duration) -> String {
        let waited = humantime::format_duration(waited);
        let Some(holder) = holder else {
            return format!(
                "still held by somebody else after {waited}; try again, or raise .wait(..)"
            );
        };
        let own = &self.handle.holder;
        if (holder.client, holder.pid, &holder.host) == (own.client, own.pid, &own.host) {
            return format!(
                "still held by this very client ({holder}) after {waited}; if it is the same task, lock inside guard.run(..), else try again, or raise .wait(..)"
            );
        }
        format!("still held by {holder} after {waited}; try again, or raise .wait(..)")
    }
}

/// Runs a future on a thread that has no runtime.
fn block_on<F: Future>(future: F) -> F::Output {
    struct Unpark(std::thread::Thread);

    impl std::task::Wake for Unpark {
        fn wake(self: Arc<Self>) {
            self.0.unpark();
        }
    }

    let waker = Arc::new(Unpark(std::thread::current())).into();
    let mut context = std::task::Context::from_waker(&waker);
    let mut future = std::pin::pin!(future);
    loop {
        match future.as_mut().poll(&mut context) {
            std::task::Poll::Ready(output) => return output,
            std::task::Poll::Pending => std::thread::park(),
        }
    }
}

/// The locks of this mode, for messages.
fn plural(mode: Mode) -> &'static str {
    match mode {
        Mode::Exclusive => "exclusive locks",
        Mode::Shared => "shared locks",
        Mode::Permits { .. } => "semaphores",
    }
}

impl<G> Clone for Lock<G> {
    fn clone(&self) -> Self {
        Lock {
            handle: self.handle.clone(),
            key: self.key.clone(),
            mode: self.mode,
            options: self.options.clone(),
            guard: PhantomData,
        }
    }
}

impl<G> fmt::Debug for Lock<G> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Lock").field("key", &self.key).field("mode", &self.mode).finish()
    }
}
