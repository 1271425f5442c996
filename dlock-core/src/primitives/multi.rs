//! Several keys at once.
//!
//! Keys are sorted and taken one after the other, so that two processes that
//! want the same keys in another order never wait for each other in a circle.

use std::fmt;
use std::future::Future;
use std::sync::Arc;
use std::task::Poll;
use std::time::Duration;

use super::lock::Lock;
use super::options::{Options, lock_options};
use crate::claim::{LossReason, Mode, ReleaseOutcome, Token};
use crate::client::Handle;
use crate::error::{Error, ErrorKind, Operation, Result};
use crate::key::Key;
use crate::primitives::guard::{Guard, State};
use crate::primitives::reentry::{self, Frame, Inside};
use crate::primitives::run::{Run, Watch};

/// Several keys, exclusively: [`Dlock::all_of`](crate::Dlock::all_of).
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
#[must_use = "it is not taken until lock() or try_lock() is awaited"]
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
                    .saying("all_of was given no keys; give it one at least"));
            }
            Ok(keys)
        });
        let options = Options::new(&handle);
        MultiLock { handle, keys, options }
    }

    lock_options!();

    /// The name under which logs, errors and metrics show these locks, instead of
    /// the keys' templates.
    pub fn name(mut self, name: &'static str) -> Self {
        self.keys = self.keys.map(|keys| keys.into_iter().map(|key| key.named(name)).collect());
        self
    }

    /// Takes all of the keys, within one wait.
    ///
    /// # Errors
    /// As [`Lock::lock`], for the first key that could not be had; what was
    /// taken before it is released.
    ///
    /// # Cancel safety
    /// As [`Lock::lock`].
    pub async fn lock(&self) -> Result<MultiGuard> {
        let until = self.options.wait_end(self.handle.core.now());
        let mut guards = Vec::new();
        for lock in self.locks()? {
            let until = (!self.options.tries_once()).then_some(until);
            guards.push(lock.lock_until(until).await?); // on failure the guards go, and so the locks
        }
        Ok(self.held(guards))
    }

    /// Takes all of the keys if all are free; `None` if one is not.
    ///
    /// # Errors
    /// As [`Lock::try_lock`]; what was taken is released.
    ///
    /// # Cancel safety
    /// As [`Lock::lock`].
    pub async fn try_lock(&self) -> Result<Option<MultiGuard>> {
        let mut guards = Vec::new();
        for lock in self.locks()? {
            let Some(guard) = lock.try_lock().await? else { return Ok(None) };
            guards.push(guard);
        }
        Ok(Some(self.held(guards)))
    }

    /// All of them are held: from now on `max_hold` counts.
    fn held(&self, guards: Vec<Guard>) -> MultiGuard {
        if let Some(hold) = self.options.max_hold {
            guards.iter().for_each(|guard| guard.hold().limit(hold));
        }
        MultiGuard { guards }
    }

    fn locks(&self) -> Result<impl Iterator<Item = Lock<Guard>> + use<>> {
        let MultiLock { handle, keys, options } = self.clone();
        let keys = keys?;
        reentry::in_order(handle.client(), &keys)?;
        options.check(&keys[0])?;
        Ok(keys.into_iter().map(move |key| {
            let mut lock = Lock::new(handle.clone(), Ok(key), Mode::Exclusive);
            lock.options = options.clone();
            lock.options.max_hold = None; // counts when all of them are held
            lock
        }))
    }
}

impl fmt::Debug for MultiLock {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("MultiLock").field("keys", &self.keys).finish()
    }
}

/// Several held locks. Dropping it releases them all in the background.
#[must_use = "the locks are released as soon as the guard is dropped"]
#[derive(Debug)]
pub struct MultiGuard {
    guards: Vec<Guard>,
}

impl MultiGuard {
    /// Each key with its token, in the order of the keys.
    pub fn tokens(&self) -> impl Iterator<Item = (&Key, Token)> {
        self.guards.iter().map(|guard| (guard.key(), guard.token()))
    }

    /// The token of one of the keys.
    pub fn token(&self, key: &Key) -> Option<Token> {
        self.tokens().find(|(held, _)| *held == key).map(|(_, token)| token)
    }

    /// How long all of them are held for certain, unless renewed meanwhile.
    pub fn valid_for(&self) -> Duration {
        self.guards.iter().map(Guard::valid_for).min().unwrap_or_default()
    }

    /// How they stand: as the worst of them.
    pub fn state(&self) -> State {
        let worst = |state: &State| match state {
            State::Held => 0,
            State::Uncertain => 1,
            State::Lost => 2,
        };
        self.guards.iter().map(Guard::state).max_by_key(worst).unwrap_or(State::Lost)
    }

    /// Resolves when one of them is lost, with that key and the reason.
    ///
    /// # Cancel safety
    /// May be dropped and called again.
    pub async fn lost(&self) -> (&Key, LossReason) {
        let mut watches: Vec<_> =
            self.guards.iter().map(|guard| (guard.key(), Watch::new(guard.hold()))).collect();
        std::future::poll_fn(|cx| {
            for (key, watch) in &mut watches {
                if let Poll::Ready(reason) = watch.poll(cx) {
                    return Poll::Ready((*key, reason));
                }
            }
            Poll::Pending
        })
        .await
    }

    /// Runs a future for as long as all of them are held: see [`Guard::run`].
    ///
    /// # Errors
    /// `Lost`, naming the key.
    ///
    /// # Cancel safety
    /// Dropping it drops the future; the guard goes on.
    pub fn run<F: Future>(&self, future: F) -> impl Future<Output = Result<F::Output>> {
        Run::new(self.guards.iter().map(Guard::hold), self.frames(), future)
    }

    /// Runs a future to its end, also when one of them is lost meanwhile: see
    /// [`Guard::run_to_end`].
    ///
    /// # Cancel safety
    /// Dropping it drops the future; the guard goes on.
    pub fn run_to_end<F: Future>(&self, future: F) -> impl Future<Output = F::Output> {
        Inside::new(self.frames(), future)
    }

    /// As [`run_to_end`](Self::run_to_end), but a future that has not begun when one
    /// of them is lost does not begin.
    #[doc(hidden)]
    pub fn run_if_held<F: Future>(&self, future: F) -> impl Future<Output = Result<F::Output>> {
        Run::new(self.guards.iter().map(Guard::hold), self.frames(), future).once_begun()
    }

    fn frames(&self) -> impl Iterator<Item = Frame> {
        let last = self.guards.last().map(Guard::key);
        self.guards.iter().map(move |guard| guard.hold().frame().among(last))
    }

    /// Releases all of them, even when one release fails. `AlreadyLost` if one
    /// of them was.
    ///
    /// # Errors
    /// The first failure; the others were released all the same.
    ///
    /// # Cancel safety
    /// The releases go on when this is dropped.
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
