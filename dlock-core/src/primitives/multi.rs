//! Locks on several keys at once.
//!
//! The keys are sorted and acquired one after the other, so that two processes that
//! want the same keys in another order never wait for each other in a circle.

use std::fmt;
use std::future::{Future, poll_fn};
use std::pin::pin;
use std::sync::Arc;
use std::task::Poll;
use std::time::Duration;

use super::lock::Lock;
use super::options::{Options, lock_options};
use crate::claim::{LossReason, Mode, ReleaseOutcome, Token};
use crate::client::Handle;
use crate::clock::Moment;
use crate::error::{BodyStatus, Error, ErrorKind, Operation, Result};
use crate::key::Key;
use crate::primitives::guard::{Guard, State};
use crate::primitives::reentry::{self, Frame, Inside};
use crate::primitives::run::{Run, Watch};

/// A lock on several keys, all exclusive: [`Dlock::all_of`](crate::Dlock::all_of).
///
/// ```
/// # #[tokio::main(flavor = "current_thread")] async fn main() -> dlock::Result<()> {
/// # let dlock = dlock::Dlock::connect("memory://").await?;
/// let both = dlock.all_of(["account:7", "account:3"]).lock().await?;
/// for (key, token) in both.tokens() {
///     println!("{}: {token}", key.as_str());
/// }
/// # Ok(()) }
/// ```
#[must_use = "the keys are not acquired until lock() or try_lock() is awaited"]
#[derive(Clone)]
pub struct MultiLock {
    handle: Arc<Handle>,
    keys: Result<Vec<Key>>,
    options: Options,
}

impl MultiLock {
    pub(crate) fn new(handle: Arc<Handle>, keys: Result<Vec<Key>>) -> Self {
        let keys = keys.and_then(|mut keys| {
            keys.sort_unstable();
            keys.dedup();
            if keys.is_empty() {
                return Err(Error::new(ErrorKind::Invalid, Operation::Acquire)
                    .with_message("all_of was given no keys; give it at least one"));
            }
            Ok(keys)
        });
        let options = Options::new(&handle);
        MultiLock { handle, keys, options }
    }

    lock_options!();

    /// Sets the name under which logs, errors and metrics show these locks, instead
    /// of the keys' templates.
    pub fn name(mut self, name: &'static str) -> Self {
        self.keys = self.keys.map(|keys| keys.into_iter().map(|key| key.named(name)).collect());
        self
    }

    /// Acquires all keys; the wait is for all of them together.
    ///
    /// ```
    /// # #[tokio::main(flavor = "current_thread")] async fn main() -> dlock::Result<()> {
    /// # let dlock = dlock::testing::client();
    /// let both = dlock.all_of(["account:7", "account:3"]).lock().await?;
    /// assert_eq!(both.tokens().count(), 2);
    /// # Ok(()) }
    /// ```
    ///
    /// # Errors
    /// As [`Lock::lock`], for the first key that could not be acquired; the keys
    /// acquired before it are released. `Lost` if one of them is lost while the next
    /// ones are waited for.
    ///
    /// # Cancel safety
    /// Dropping the future leaves neither a lock nor a place in a queue.
    pub async fn lock(&self) -> Result<MultiGuard> {
        let mut in_order = self.in_order()?;
        let mut guards = Vec::new();
        // On failure the guards are dropped, and so released.
        while let Some(guard) = while_held(&guards, in_order.next()).await? {
            guards.push(guard);
        }
        Ok(self.held(guards))
    }

    /// Acquires all keys if all are free; returns `None` if somebody else holds one.
    ///
    /// ```
    /// # #[tokio::main(flavor = "current_thread")] async fn main() -> dlock::Result<()> {
    /// # let dlock = dlock::testing::client();
    /// let one = dlock.mutex("account:3").lock().await?;
    /// assert!(dlock.all_of(["account:7", "account:3"]).try_lock().await?.is_none());
    /// # drop(one);
    /// # Ok(()) }
    /// ```
    ///
    /// # Errors
    /// As [`Lock::try_lock`], for the first key that could not be acquired; the keys
    /// acquired before it are released.
    ///
    /// # Cancel safety
    /// Dropping the future leaves neither a lock nor a place in a queue.
    pub async fn try_lock(&self) -> Result<Option<MultiGuard>> {
        let mut guards = Vec::new();
        for lock in self.locks()? {
            let Some(guard) = while_held(&guards, lock.try_lock()).await? else {
                return Ok(None);
            };
            guards.push(guard);
        }
        Ok(Some(self.held(guards)))
    }

    /// Acquires the keys one after the other, in order; the wait starts now, and is for
    /// all of them together. For code that decides after each key whether it needs more.
    #[doc(hidden)]
    pub fn in_order(&self) -> Result<InOrder> {
        let until = self.options.wait_end(self.handle.core.now());
        let until = (!self.options.tries_once()).then_some(until);
        Ok(InOrder { locks: Box::new(self.locks()?), until })
    }

    /// The guard of the keys of these guards. `max_hold` and `hold_at_least` count from
    /// now on.
    #[doc(hidden)]
    pub fn held(&self, mut guards: Vec<Guard>) -> MultiGuard {
        guards.sort_by(|one, other| one.key().cmp(other.key()));
        if let Some(hold) = self.options.max_hold {
            guards.iter().for_each(|guard| guard.hold().limit(hold));
        }
        if let Some(at_least) = self.options.hold_at_least {
            let until = self.handle.core.now() + at_least;
            guards.iter_mut().for_each(|guard| guard.hold_mut().keep_taken_until(until));
        }
        MultiGuard { guards }
    }

    /// The locks of the keys, in order.
    fn locks(&self) -> Result<impl Iterator<Item = Lock<Guard>> + Send + use<>> {
        let MultiLock { handle, keys, options } = self.clone();
        let keys = keys?;
        reentry::in_order(handle.client(), &keys)?;
        options.check(&keys[0])?;
        let lock_of = move |key| {
            let mut lock = Lock::new(handle.clone(), Ok(key), Mode::Exclusive);
            lock.options = options.clone();
            lock
        };
        lock_of(keys[0].clone()).check_hold_at_least(&keys[0])?;
        Ok(keys.into_iter().map(move |key| {
            let mut lock = lock_of(key);
            // Both count from when all keys are held.
            lock.options.max_hold = None;
            lock.options.hold_at_least = None;
            lock
        }))
    }
}

/// Acquires the next key for as long as those before it are held.
async fn while_held<T>(guards: &[Guard], next: impl Future<Output = Result<T>>) -> Result<T> {
    let mut watches: Vec<_> = guards.iter().map(|guard| Watch::new(guard.hold())).collect();
    let mut next = pin!(next);
    poll_fn(|cx| {
        let acquired = next.as_mut().poll(cx);
        // Also when the next one is there: the keys are held together or not at all.
        for (guard, watch) in guards.iter().zip(&mut watches) {
            if let Poll::Ready(reason) = watch.poll(cx) {
                let lost = guard.hold().lost_error(&reason, BodyStatus::NotRun);
                return Poll::Ready(Err(lost));
            }
        }
        acquired
    })
    .await
}

impl fmt::Debug for MultiLock {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("MultiLock").field("keys", &self.keys).finish()
    }
}

/// The keys of a [`MultiLock`] that are not acquired yet.
#[doc(hidden)]
pub struct InOrder {
    locks: Box<dyn Iterator<Item = Lock<Guard>> + Send>,
    until: Option<Moment>,
}

impl InOrder {
    /// Acquires the next key. Returns `None` after the last one.
    #[doc(hidden)]
    pub async fn next(&mut self) -> Result<Option<Guard>> {
        match self.locks.next() {
            Some(lock) => lock.lock_until(self.until).await.map(Some),
            None => Ok(None),
        }
    }
}

impl fmt::Debug for InOrder {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("InOrder").finish_non_exhaustive()
    }
}

/// A guard of several held keys. Dropping it releases all of them in the background.
#[must_use = "the keys are released as soon as the guard is dropped"]
#[derive(Debug)]
pub struct MultiGuard {
    guards: Vec<Guard>,
}

impl MultiGuard {
    /// Each key with its fencing token, in the order of the keys.
    pub fn tokens(&self) -> impl Iterator<Item = (&Key, Token)> {
        self.guards.iter().map(|guard| (guard.key(), guard.token()))
    }

    /// The fencing token of one of the keys; `None` if the guard does not hold it.
    pub fn token(&self, key: &Key) -> Option<Token> {
        self.tokens().find(|(held, _)| *held == key).map(|(_, token)| token)
    }

    /// How long all keys are still held for certain if they are not renewed.
    pub fn valid_for(&self) -> Duration {
        self.guards.iter().map(Guard::valid_for).min().unwrap_or_default()
    }

    /// The state of the keys now: the worst state of any of them.
    pub fn state(&self) -> State {
        let worst = |state: &State| match state {
            State::Held => 0,
            State::Uncertain => 1,
            State::Lost => 2,
        };
        self.guards.iter().map(Guard::state).max_by_key(worst).unwrap_or(State::Lost)
    }

    /// Waits until one of the keys is lost, and returns that key and the reason. It
    /// never returns while all keys are held.
    ///
    /// ```
    /// # #[tokio::main(flavor = "current_thread")] async fn main() -> dlock::Result<()> {
    /// # let dlock = dlock::testing::client();
    /// let both = dlock.all_of(["account:7", "account:3"]).lock().await?;
    /// dlock.break_lock("account:3").await?;
    /// let (key, reason) = both.lost().await;
    /// assert_eq!(key.as_str(), "account:3");
    /// println!("{reason}");
    /// # Ok(()) }
    /// ```
    ///
    /// # Errors
    /// It returns none.
    ///
    /// # Cancel safety
    /// The future may be dropped and the method called again; several tasks may wait.
    pub async fn lost(&self) -> (&Key, LossReason) {
        let mut watches: Vec<_> =
            self.guards.iter().map(|guard| (guard.key(), Watch::new(guard.hold()))).collect();
        poll_fn(|cx| {
            for (key, watch) in &mut watches {
                if let Poll::Ready(reason) = watch.poll(cx) {
                    return Poll::Ready((*key, reason));
                }
            }
            Poll::Pending
        })
        .await
    }

    /// Runs a future for as long as all keys are held; when one is lost, the future
    /// is dropped at its next await. See [`Guard::run`].
    ///
    /// ```
    /// # #[tokio::main(flavor = "current_thread")] async fn main() -> dlock::Result<()> {
    /// # let dlock = dlock::testing::client();
    /// let both = dlock.all_of(["account:7", "account:3"]).lock().await?;
    /// let sum = both.run(async { 1 + 1 }).await?;
    /// assert_eq!(sum, 2);
    /// # Ok(()) }
    /// ```
    ///
    /// # Errors
    /// `Lost`, with the key that was lost.
    ///
    /// # Cancel safety
    /// Dropping this drops the future; the guard stays held.
    pub fn run<F: Future>(&self, future: F) -> impl Future<Output = Result<F::Output>> {
        Run::new(self.guards.iter().map(Guard::hold), self.frames(), future)
    }

    /// Runs a future to its end, even if one of the keys is lost meanwhile. See
    /// [`Guard::run_to_end`].
    ///
    /// ```
    /// # #[tokio::main(flavor = "current_thread")] async fn main() -> dlock::Result<()> {
    /// # let dlock = dlock::testing::client();
    /// let both = dlock.all_of(["account:7", "account:3"]).lock().await?;
    /// let sum = both.run_to_end(async { 1 + 1 }).await;
    /// assert_eq!(sum, 2);
    /// # Ok(()) }
    /// ```
    ///
    /// # Errors
    /// It returns none of its own; check [`state`](Self::state) afterwards.
    ///
    /// # Cancel safety
    /// Dropping this drops the future; the guard stays held.
    pub fn run_to_end<F: Future>(&self, future: F) -> impl Future<Output = F::Output> {
        Inside::new(self.frames(), future)
    }

    /// Runs a future to its end if all keys are held when the future starts; else
    /// the future does not start.
    #[doc(hidden)]
    pub fn run_if_held<F: Future>(&self, future: F) -> impl Future<Output = Result<F::Output>> {
        Run::new(self.guards.iter().map(Guard::hold), self.frames(), future).once_begun()
    }

    /// The frames of the keys, for re-entry.
    fn frames(&self) -> impl Iterator<Item = Frame> {
        let last = self.guards.last().map(Guard::key);
        self.guards.iter().map(move |guard| guard.hold().frame().among(last))
    }

    /// Releases all keys, even if one release fails. Returns `AlreadyLost` if one of
    /// the keys had been lost.
    ///
    /// ```
    /// # #[tokio::main(flavor = "current_thread")] async fn main() -> dlock::Result<()> {
    /// # let dlock = dlock::testing::client();
    /// use dlock::ReleaseOutcome;
    ///
    /// let both = dlock.all_of(["account:7", "account:3"]).lock().await?;
    /// assert_eq!(both.release().await?, ReleaseOutcome::Released);
    /// # Ok(()) }
    /// ```
    ///
    /// # Errors
    /// The first failure, as of [`Guard::release`]; the other keys are released too.
    ///
    /// # Cancel safety
    /// The releases continue in the background when the future is dropped.
    pub async fn release(self) -> Result<ReleaseOutcome> {
        let mut outcome = Ok(ReleaseOutcome::Released);
        for guard in self.guards {
            match (guard.release().await, &outcome) {
                (Err(error), Ok(_)) => outcome = Err(error),
                (Ok(ReleaseOutcome::AlreadyLost), Ok(_)) => {
                    outcome = Ok(ReleaseOutcome::AlreadyLost)
                }
                _ => {}
            }
        }
        outcome
    }
}
