//! The one builder under every primitive.

use std::fmt;
use std::marker::PhantomData;
use std::sync::Arc;
use std::time::Duration;

use tracing::Instrument as _;

use super::acquire::{Acquire, Admission};
use crate::claim::{Holder, Mode, Token};
use crate::client::Handle;
use crate::clock::Moment;
use crate::config::{MAX_TTL, Policy};
use crate::error::{Error, ErrorKind, Operation, Result};
use crate::key::Key;
use crate::machine::{Lane, LockRequest, Refusal, Wait};
use crate::observe::Event;
use crate::primitives::guard::{Guard, Hold, Permits};
use crate::primitives::reentry;

/// What a [`Lock`] gives: a [`Guard`] or [`Permits`].
pub trait Held: sealed::Held {}

impl Held for Guard {}
impl Held for Permits {}

mod sealed {
    use super::{Hold, Token};

    pub trait Held: Sized {
        #[doc(hidden)]
        #[allow(private_interfaces, reason = "sealed: nobody else names it")]
        fn held(hold: Hold, token: Token) -> Self;
    }
}

#[allow(private_interfaces, reason = "sealed: nobody else names it")]
impl sealed::Held for Guard {
    fn held(hold: Hold, token: Token) -> Self {
        Guard::new(hold, token)
    }
}

#[allow(private_interfaces, reason = "sealed: nobody else names it")]
impl sealed::Held for Permits {
    fn held(hold: Hold, _: Token) -> Self {
        Permits::new(hold)
    }
}

/// An exclusive lock: [`Dlock::mutex`](crate::Dlock::mutex).
pub type Mutex = Lock<Guard>;

/// A lock that can be taken, as often as wanted: a mutex, one side of a
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
#[must_use = "it is not taken until lock() or try_lock() is awaited"]
pub struct Lock<G> {
    handle: Arc<Handle>,
    key: Result<Key>,
    mode: Mode,
    pub(super) options: Options,
    guard: PhantomData<fn() -> G>,
}

/// How a lock is taken.
#[derive(Clone)]
pub(super) struct Options {
    ttl: Duration,
    wait: Option<Duration>,
    pub(super) max_hold: Option<Duration>,
    hold_at_least: Option<Duration>,
    fair: bool,
    tags: Vec<(String, String)>,
}

/// More tags than this, or longer ones, are refused.
const MAX_TAGS: usize = 16;
const MAX_TAG_BYTES: usize = 256;

/// Writes the options that every lock has, for a type with the field `options`.
macro_rules! lock_options {
    () => {
        /// How long the lock outlives its process. Renewed every third of it, so
        /// it bounds the recovery from a crash, not the work.
        pub fn ttl(mut self, ttl: Duration) -> Self {
            self.options.set_ttl(ttl);
            self
        }

        /// How long `lock()` waits. Zero: it tries once.
        pub fn wait(mut self, wait: Duration) -> Self {
            self.options.set_wait(Some(wait));
            self
        }

        /// `lock()` waits for as long as it takes.
        pub fn wait_unlimited(mut self) -> Self {
            self.options.set_wait(None);
            self
        }

        /// The guard is lost after this time, however long its work takes.
        pub fn max_hold(mut self, max_hold: Duration) -> Self {
            self.options.set_max_hold(max_hold);
            self
        }

        /// However soon and in whatever way the guard ends, the key stays taken until
        /// this long after it was taken, on any machine: for jobs that must not run
        /// again too soon. Needs an exclusive lock or permits, at most a day; of a
        /// nested guard the outermost one decides.
        pub fn hold_at_least(mut self, duration: Duration) -> Self {
            self.options.set_hold_at_least(duration);
            self
        }

        /// Takes ttl and wait from the client's configuration, as far as that has a
        /// policy of this name: `policy.payments.ttl`, `policy.payments.wait`. It
        /// overrides what was said before it, and not what is said after it.
        pub fn policy(mut self, name: &str) -> Self {
            self.options.follow(self.handle.config.policy(name));
            self
        }

        /// First come, first served over all processes: no hand-over inside this
        /// one. Slower under contention.
        pub fn fair(mut self) -> Self {
            self.options.set_fair();
            self
        }

        /// Something for operators to see beside the holder. Not for secrets.
        pub fn tag(mut self, name: impl Into<String>, value: impl ToString) -> Self {
            self.options.add_tag(name.into(), value.to_string());
            self
        }
    };
}
pub(super) use lock_options;

impl<G: Held> Lock<G> {
    pub(crate) fn new(handle: Arc<Handle>, key: Result<Key>, mode: Mode) -> Self {
        let options = Options::new(&handle);
        Lock { handle, key, mode, options, guard: PhantomData }
    }

    lock_options!();

    /// The name under which logs, errors and metrics show this lock, instead of
    /// the key's template.
    pub fn name(mut self, name: &'static str) -> Self {
        self.key = self.key.map(|key| key.named(name));
        self
    }

    /// Takes the lock, waiting for it without polling.
    ///
    /// # Errors
    /// `TimedOut` when the wait is over, naming the holder if it is known;
    /// `Unavailable` when it is over and the backend was not to be reached;
    /// `Invalid`, `Unsupported`, `Overloaded`, `WouldDeadlock`, `Denied`,
    /// `ShuttingDown`, each at once.
    ///
    /// # Cancel safety
    /// Dropping it leaves neither a lock nor a place in a queue.
    pub async fn lock(&self) -> Result<G> {
        self.lock_until(None).await
    }

    /// As [`lock`](Self::lock), but until a moment instead of for the wait.
    pub(super) async fn lock_until(&self, until: Option<Moment>) -> Result<G> {
        match self.acquire(false, until).await {
            Ok(Ok(guard)) => Ok(guard),
            Ok(Err(busy)) => Err(busy),
            Err(error) => Err(error),
        }
    }

    /// Takes the lock if it is free; `None` if somebody else holds it.
    ///
    /// # Errors
    /// As [`lock`](Self::lock), but never `TimedOut`.
    ///
    /// # Cancel safety
    /// As [`lock`](Self::lock).
    pub async fn try_lock(&self) -> Result<Option<G>> {
        self.acquire(true, None).await.map(Result::ok)
    }

    /// The guard; or who is in the way; or what went wrong.
    async fn acquire(&self, attempt: bool, until: Option<Moment>) -> Result<Result<G, Error>> {
        let key = self.key.as_ref().map_err(Clone::clone)?;
        let span = tracing::debug_span!(target: "dlock::lock", "acquire", key = key.label());
        let acquiring = self.acquire_key(key, attempt, until);
        let result =
            if span.is_disabled() { acquiring.await } else { acquiring.instrument(span).await };
        if let Err(error) | Ok(Err(error)) = &result {
            self.handle.core.observer.tell(&Event::Refused { key, error });
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
                .on(key)
                .saying("the backend keeps no order over processes; leave out .fair()"));
        }
        if !self.handle.supports(self.mode) {
            return Err(Error::new(ErrorKind::Unsupported, Operation::Acquire)
                .on(key)
                .saying(format!("the backend has no {}", mode_words(self.mode))));
        }
        self.check_hold_at_least(key)?;
        let wait = match (attempt, until, self.options.wait) {
            (false, Some(until), _) => Wait::Until(until),
            (true, ..) | (_, _, Some(Duration::ZERO)) => Wait::Try,
            (_, _, Some(wait)) => Wait::For(wait),
            (_, _, None) => Wait::Until(Moment::NEVER),
        };
        let lane = match reentry::nesting(self.handle.client(), key, self.mode)? {
            Some(ticket_ref) => Lane::Nested(ticket_ref.ticket),
            None if self.options.fair || self.mode.is_permits() => Lane::Separate,
            None => Lane::Shared,
        };
        let nested = matches!(lane, Lane::Nested(_));
        let ask = LockRequest {
            key,
            mode: self.mode,
            ttl: self.options.ttl,
            wait,
            lane,
            max_hold: self.options.max_hold,
            holder: self.options.holder(&self.handle.holder),
        };
        match Acquire::new(&self.handle, ask).await {
            Ok(Admission { ticket_ref, token, handed_over, waited, since }) => {
                let handle = self.handle.clone();
                let stays = self.options.hold_at_least.unwrap_or_default();
                let hold = Hold::new(handle, ticket_ref, key.clone(), self.mode, nested)
                    .taken_until(since + stays);
                let shown = (!self.mode.is_permits()).then_some(token);
                self.handle.core.observer.tell(&Event::Acquired {
                    key,
                    token: shown,
                    waited,
                    handed_over,
                });
                let token = Token::new(token).ok_or_else(|| {
                    Error::new(ErrorKind::Unsupported, Operation::Acquire)
                        .on(key)
                        .saying("the backend gave a token of 2^53 or more")
                })?;
                Ok(Ok(G::held(hold, token)))
            }
            Err(refusal) => self.refused(key, refusal),
        }
    }

    fn check_hold_at_least(&self, key: &Key) -> Result<()> {
        let Some(duration) = self.options.hold_at_least else { return Ok(()) };
        let (kind, fault) = if duration > MAX_TTL {
            (ErrorKind::Invalid, "hold_at_least takes at most a day")
        } else if self.mode == Mode::Shared {
            (ErrorKind::Invalid, "hold_at_least needs an exclusive lock or permits")
        } else if !self.handle.can_release_after() {
            (ErrorKind::Unsupported, "the backend cannot keep a key taken; leave out hold_at_least")
        } else {
            return Ok(());
        };
        Err(Error::new(kind, Operation::Acquire).on(key).saying(fault))
    }

    fn refused(&self, key: &Key, refusal: Refusal) -> Result<Result<G, Error>> {
        let error = |kind| Error::new(kind, Operation::Acquire).on(key);
        let waited = self.options.wait.unwrap_or_default();
        match refusal {
            Refusal::Busy(holder) => {
                Ok(Err(error(ErrorKind::TimedOut).saying(held_by(holder, Duration::ZERO))))
            }
            Refusal::TimedOut { trouble: Some(trouble), .. } => Err(error(ErrorKind::Unavailable)
                .saying(format!(
                    "the backend could not be reached for {}; it is tried again with the next call",
                    humantime::format_duration(waited)
                ))
                .because(trouble)),
            Refusal::TimedOut { holder, trouble: None } => {
                Ok(Err(error(ErrorKind::TimedOut).saying(held_by(holder, waited))))
            }
            Refusal::Failed(failure) => Err(failure.on(key)),
            Refusal::Lost => {
                Err(error(ErrorKind::Lost).saying("the lock that this one is nested in was lost"))
            }
            Refusal::Overloaded => Err(error(ErrorKind::Overloaded).saying(format!(
                "{} tasks of this process wait for it already; shed load, or raise max_waiters",
                self.handle.config.max_waiters
            ))),
            Refusal::ShuttingDown => {
                Err(error(ErrorKind::ShuttingDown).saying("shutdown() was called on this client"))
            }
        }
    }
}

fn held_by(holder: Option<Arc<Holder>>, waited: Duration) -> String {
    let waited = humantime::format_duration(waited);
    match holder {
        Some(holder) => {
            format!("still held by {holder} after {waited}; try again, or raise .wait(..)")
        }
        None => {
            format!("still held by somebody else after {waited}; try again, or raise .wait(..)")
        }
    }
}

fn mode_words(mode: Mode) -> &'static str {
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

impl Options {
    pub(super) fn new(handle: &Handle) -> Self {
        Options {
            ttl: handle.config.ttl,
            wait: handle.config.wait,
            max_hold: None,
            hold_at_least: None,
            fair: false,
            tags: Vec::new(),
        }
    }

    pub(super) fn set_ttl(&mut self, ttl: Duration) {
        self.ttl = ttl;
    }
    pub(super) fn set_wait(&mut self, wait: Option<Duration>) {
        self.wait = wait;
    }
    pub(super) fn set_max_hold(&mut self, max_hold: Duration) {
        self.max_hold = Some(max_hold);
    }
    pub(super) fn set_hold_at_least(&mut self, duration: Duration) {
        self.hold_at_least = Some(duration).filter(|duration| !duration.is_zero());
    }
    pub(super) fn follow(&mut self, policy: Policy) {
        self.ttl = policy.ttl.unwrap_or(self.ttl);
        self.wait = policy.wait.unwrap_or(self.wait);
    }
    pub(super) fn set_fair(&mut self) {
        self.fair = true;
    }
    pub(super) fn add_tag(&mut self, name: String, value: String) {
        self.tags.push((name, value));
    }

    pub(super) fn tries_once(&self) -> bool {
        self.wait == Some(Duration::ZERO)
    }

    /// When a wait that starts now is over.
    pub(super) fn until(&self, now: Moment) -> Moment {
        self.wait.map_or(Moment::NEVER, |wait| now + wait)
    }

    pub(super) fn check(&self, key: &Key) -> Result<()> {
        let fault = |what: &str| {
            Err(Error::new(ErrorKind::Invalid, Operation::Acquire).on(key).saying(what))
        };
        if self.ttl < Duration::from_millis(1) {
            return fault("the ttl is below a millisecond; give the lock one of some seconds");
        }
        if self.ttl > MAX_TTL {
            return fault(
                "the ttl is above a day; a lock is renewed while it is held, so a short ttl will do",
            );
        }
        if self.max_hold.is_some_and(|hold| hold.is_zero()) {
            return fault("max_hold is zero; leave it out to hold without limit");
        }
        let fits =
            |text: &String| text.len() <= MAX_TAG_BYTES && !text.chars().any(char::is_control);
        if self.tags.len() > MAX_TAGS
            || !self.tags.iter().all(|(name, value)| fits(name) && fits(value))
        {
            return fault("at most 16 tags, of at most 256 bytes, without control characters");
        }
        Ok(())
    }

    fn holder(&self, client: &Arc<Holder>) -> Arc<Holder> {
        if self.tags.is_empty() {
            return client.clone();
        }
        Arc::new(Holder { tags: self.tags.clone(), ..Holder::clone(client) })
    }
}
