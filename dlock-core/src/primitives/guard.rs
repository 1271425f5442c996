//! Guards: what a task has while it holds a lock.

use std::fmt;
use std::future::Future;
use std::time::Duration;

use super::hold::Hold;
use crate::claim::{LossReason, Mode, Release, ReleaseOutcome, Token};
use crate::error::Result;
use crate::key::Key;

/// The state of a lock, as far as its holder can know it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum State {
    /// The lock is held, and the last renewal succeeded.
    Held,
    /// The lock is held until [`Guard::valid_for`] is over; a renewal failed and is
    /// tried again.
    Uncertain,
    /// The lock is no longer held, or is not known to be held.
    Lost,
}

/// Writes the methods that every guard has. Their examples acquire `$lock`.
macro_rules! guard_methods {
    ($lock:literal) => {
        /// The key that is held.
        pub fn key(&self) -> &Key {
            &self.hold.key
        }

        /// How long the lock is still held for certain if it is not renewed.
        pub fn valid_for(&self) -> Duration {
            self.hold.valid_for()
        }

        /// The state of the lock now.
        pub fn state(&self) -> State {
            self.hold.state()
        }

        /// Waits until the lock is lost, and returns the reason. It never returns
        /// while the lock is held.
        ///
        /// ```
        /// # #[tokio::main(flavor = "current_thread")] async fn main() -> dlock::Result<()> {
        /// # let dlock = dlock::testing::client();
        /// use std::time::Duration;
        /// use dlock::LossReason;
        ///
        #[doc = concat!("let guard = dlock.", $lock, ".max_hold(Duration::from_millis(1)).lock().await?;")]
        /// assert_eq!(guard.lost().await, LossReason::MaxHold);
        /// # Ok(()) }
        /// ```
        ///
        /// # Errors
        /// It returns none.
        ///
        /// # Cancel safety
        /// The future may be dropped and the method called again; several tasks may
        /// wait.
        pub async fn lost(&self) -> LossReason {
            self.hold.lost().await
        }

        /// Runs a future for as long as the lock is held; when the lock is lost, the
        /// future is dropped at its next await.
        ///
        /// Code inside it can acquire the same lock again (re-entry); parts of it that
        /// do so at the same time exclude each other. Permits are not re-entrant.
        ///
        /// ```
        /// # #[tokio::main(flavor = "current_thread")] async fn main() -> dlock::Result<()> {
        /// # let dlock = dlock::testing::client();
        #[doc = concat!("let guard = dlock.", $lock, ".lock().await?;")]
        /// let sum = guard.run(async { 1 + 1 }).await?;
        /// assert_eq!(sum, 2);
        /// # Ok(()) }
        /// ```
        ///
        /// # Errors
        /// `Lost` if the lock was lost. A write that the future had begun may or may
        /// not have happened; [`Error::body_status`](crate::Error::body_status) tells whether the
        /// future had started.
        ///
        /// # Cancel safety
        /// Dropping this drops the future; the guard stays held.
        pub fn run<F: Future>(&self, future: F) -> impl Future<Output = Result<F::Output>> {
            self.hold.run(future)
        }

        /// Runs a future to its end, even if the lock is lost meanwhile: for work that
        /// is worse half done than done late. Re-entry works as inside
        /// [`run`](Self::run).
        ///
        /// ```
        /// # #[tokio::main(flavor = "current_thread")] async fn main() -> dlock::Result<()> {
        /// # let dlock = dlock::testing::client();
        #[doc = concat!("let guard = dlock.", $lock, ".lock().await?;")]
        /// let sum = guard.run_to_end(async { 1 + 1 }).await;
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
            self.hold.run_to_end(future)
        }

        /// Runs a future to its end if the lock is held when the future starts; else
        /// the future does not start.
        #[doc(hidden)]
        pub fn run_if_held<F: Future>(&self, future: F) -> impl Future<Output = Result<F::Output>> {
            self.hold.run(future).once_begun()
        }

        /// Releases the lock, and tells whether it was held until now.
        ///
        /// Dropping the guard releases the lock too, in the background.
        ///
        /// ```
        /// # #[tokio::main(flavor = "current_thread")] async fn main() -> dlock::Result<()> {
        /// # let dlock = dlock::testing::client();
        /// use dlock::ReleaseOutcome;
        ///
        #[doc = concat!("let guard = dlock.", $lock, ".lock().await?;")]
        /// assert_eq!(guard.release().await?, ReleaseOutcome::Released);
        /// # Ok(()) }
        /// ```
        ///
        /// # Errors
        /// `Unknown` or `Unavailable` if the backend did not answer; the release is
        /// repeated in the background until the lease has expired.
        ///
        /// # Cancel safety
        /// The release continues in the background when the future is dropped.
        pub async fn release(self) -> Result<ReleaseOutcome> {
            self.hold.release(Release::Now).await
        }

        /// Ends the guard but keeps the key taken for `duration` more, on all machines:
        /// for jobs that must not run again too soon.
        ///
        /// ```
        /// # #[tokio::main(flavor = "current_thread")] async fn main() -> dlock::Result<()> {
        /// # let dlock = dlock::testing::client();
        /// use std::time::Duration;
        ///
        #[doc = concat!("let guard = dlock.", $lock, ".lock().await?;")]
        /// let _ = guard.release_after(Duration::from_secs(60)).await?;
        #[doc = concat!("assert!(dlock.", $lock, ".try_lock().await?.is_none(), \"taken for a minute\");")]
        /// # Ok(()) }
        /// ```
        ///
        /// # Errors
        /// As [`release`](Self::release). `Invalid` if `duration` is above
        /// [a day](crate::MAX_TTL), for a shared lock and for a nested guard, and
        /// `Unsupported` if the backend cannot do it: then the lock is released at
        /// once.
        ///
        /// # Cancel safety
        /// The release continues in the background when the future is dropped.
        pub async fn release_after(self, duration: Duration) -> Result<ReleaseOutcome> {
            self.hold.release_after(duration).await
        }
    };
}

/// A held lock: exclusive, or shared with other readers.
///
/// Dropping the guard releases the lock in the background. A guard borrows nothing:
/// it may be sent to other threads and kept in structures.
///
/// No lock service can stop a process that was paused while it held a lock and
/// wakes up after somebody else acquired it. But the guard of such a process is
/// [`State::Lost`], and its [token](Guard::token) is lower than its successor's, so
/// that the resource can reject it (see [`Fence`](crate::Fence)).
#[must_use = "the lock is released as soon as the guard is dropped"]
pub struct Guard {
    hold: Hold,
    token: Token,
}

impl Guard {
    pub(crate) fn new(hold: Hold, token: Token) -> Self {
        Guard { hold, token }
    }

    pub(crate) fn hold(&self) -> &Hold {
        &self.hold
    }

    pub(super) fn into_hold(self) -> Hold {
        self.hold
    }

    pub(crate) fn hold_mut(&mut self) -> &mut Hold {
        &mut self.hold
    }

    /// The fencing token: higher than that of every earlier holder of this key.
    ///
    /// Readers that hold the lock at the same time may have the same token. A nested
    /// guard has the token of the guard it is nested in.
    pub fn token(&self) -> Token {
        self.token
    }

    /// Whether the lock is exclusive or shared.
    pub fn mode(&self) -> Mode {
        self.hold.mode
    }

    /// Makes an exclusive guard a shared one, without a moment in which somebody else
    /// could write. Others may read from now on.
    ///
    /// The guard has a new token. A guard that is shared already, nested or lost is
    /// returned unchanged.
    pub fn downgrade(mut self) -> Guard {
        self.token = self.hold.downgrade().unwrap_or(self.token);
        self
    }

    guard_methods!(r#"mutex("order:7")"#);
}

impl fmt::Debug for Guard {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Guard")
            .field("key", &self.hold.key)
            .field("mode", &self.hold.mode)
            .field("token", &self.token)
            .field("state", &self.state())
            .finish()
    }
}

/// Held permits of a semaphore. Dropping them releases them in the background.
///
/// Permits have no token: several tasks hold permits at the same time, so a resource
/// could not recognise a stale holder by its number.
#[must_use = "the permits are released as soon as this is dropped"]
pub struct Permits {
    hold: Hold,
}

impl Permits {
    pub(crate) fn new(hold: Hold) -> Self {
        Permits { hold }
    }

    pub(super) fn into_hold(self) -> Hold {
        self.hold
    }

    /// The number of permits that are held.
    pub fn count(&self) -> u32 {
        match self.hold.mode {
            Mode::Permits { count, .. } => count,
            _ => 0,
        }
    }

    guard_methods!(r#"semaphore("exports", 3).permits(3)"#);
}

impl fmt::Debug for Permits {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Permits")
            .field("key", &self.hold.key)
            .field("count", &self.count())
            .field("state", &self.state())
            .finish()
    }
}
