//! Guards: what a task has while it holds a lock.

use std::fmt;
use std::future::Future;
use std::sync::Arc;
use std::task::Poll;
use std::time::Duration;

use crate::claim::{LossReason, Mode, Release, ReleaseOutcome, Token};
use crate::client::Handle;
use crate::clock::Moment;
use crate::config::MAX_TTL;
use crate::driver::{Core, TicketRef, wake_only};
use crate::error::{Body, Error, ErrorKind, Operation, Result};
use crate::key::Key;
use crate::machine::LeaseStatus;
use crate::observe::Event;
use crate::primitives::reentry::{Frame, Inside};
use crate::primitives::run::{Run, Watch};

/// How a lock stands, as far as its holder can know.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum State {
    /// Held.
    Held,
    /// A renewal failed; held until [`Guard::valid_for`] is over, and tried again.
    Uncertain,
    /// No longer held, or not known to be.
    Lost,
}

/// Lets go when dropped, in the background.
pub(crate) struct Hold {
    handle: Arc<Handle>,
    ticket_ref: TicketRef,
    key: Key,
    mode: Mode,
    /// However it ends, the key stays taken until then.
    taken_until: Moment,
    /// Inside another guard of the same key.
    nested: bool,
    let_go: bool,
    /// It was released, and what came of it is known: the ticket is void.
    over: bool,
}

impl Hold {
    pub(crate) fn new(
        handle: Arc<Handle>,
        ticket_ref: TicketRef,
        key: Key,
        mode: Mode,
        nested: bool,
    ) -> Self {
        let taken_until = Moment::default();
        Hold { handle, ticket_ref, key, mode, taken_until, nested, let_go: false, over: false }
    }

    /// However it ends, the key stays taken until then. What is nested gives nothing
    /// back, so nothing stays taken after it either.
    pub(crate) fn taken_until(mut self, moment: Moment) -> Self {
        if !self.nested {
            self.taken_until = moment;
        }
        self
    }

    pub(crate) fn core(&self) -> &Core {
        &self.handle.core
    }

    pub(crate) fn ticket_ref(&self) -> TicketRef {
        self.ticket_ref
    }

    pub(crate) fn frame(&self) -> Frame {
        Frame::new(self.handle.client(), self.key.clone(), self.mode, self.ticket_ref)
    }

    pub(crate) fn status(&self) -> LeaseStatus {
        let TicketRef { shard, ticket } = self.ticket_ref;
        let now = self.handle.core.now();
        self.handle.core.look(shard, |machine| machine.status(now, ticket))
    }

    fn state(&self) -> State {
        match self.status() {
            LeaseStatus::Held { certain: true, .. } => State::Held,
            LeaseStatus::Held { certain: false, .. } => State::Uncertain,
            LeaseStatus::Lost(_) => State::Lost,
        }
    }

    /// It may be held for this much longer.
    pub(crate) fn limit(&self, hold: Duration) {
        let TicketRef { shard, ticket } = self.ticket_ref;
        self.handle.core.step(shard, |machine, now, _| machine.limit_hold(now, ticket, hold));
    }

    fn valid_for(&self) -> Duration {
        match self.status() {
            LeaseStatus::Held { until, .. } => until.since(self.handle.core.now()),
            LeaseStatus::Lost(_) => Duration::ZERO,
        }
    }

    async fn lost(&self) -> LossReason {
        let mut watch = Watch::new(self);
        std::future::poll_fn(|cx| watch.poll(cx)).await
    }

    fn run<F: Future>(&self, future: F) -> Run<'_, F> {
        Run::new([self], [self.frame()], future)
    }

    fn run_to_end<F: Future>(&self, future: F) -> Inside<F> {
        Inside::new([self.frame()], future)
    }

    pub(crate) fn lost_error(&self, reason: &LossReason, body: Body) -> Error {
        let advice = match body {
            Body::NotRun => "nothing was done under it, so it may be tried again",
            Body::Cancelled => {
                "what was under way may or may not have happened, check it by its token before trying again"
            }
        };
        let error = Error::new(ErrorKind::Lost, Operation::Hold).on(&self.key);
        error.saying(format!("{reason}; {advice}")).with_body(body)
    }

    async fn release(mut self, how: Release) -> Result<ReleaseOutcome> {
        let TicketRef { shard, ticket } = self.ticket_ref;
        let taken_until = self.taken_until;
        let (held, answered) = self.handle.core.step_then(
            shard,
            |machine, now, actions| {
                let held = machine.held_for(now, ticket);
                machine.release(now, ticket, at_least(how, taken_until.since(now)), actions);
                held
            },
            |machine, held| (held, machine.released(ticket)),
        );
        self.told_released(held);
        let outcome = match answered {
            Some(outcome) => outcome,
            None => self.released().await,
        };
        self.over = true;
        outcome.map_err(|error| error.on(&self.key))
    }

    /// Waits for the answer to a release. If this future is dropped, `Hold::drop`
    /// forgets the ticket and the release goes on without it.
    async fn released(&self) -> Result<ReleaseOutcome> {
        let TicketRef { shard, ticket } = self.ticket_ref;
        std::future::poll_fn(|cx| {
            let (outcome, before) = self.handle.core.look(shard, |machine| {
                let outcome = machine.released(ticket);
                let wakers = machine.payload_mut(ticket);
                (outcome, wakers.map(|wakers| wake_only(wakers, cx.waker())))
            });
            drop(before); // here, where no lock is held
            outcome.map_or(Poll::Pending, Poll::Ready)
        })
        .await
    }

    async fn release_after(self, duration: Duration) -> Result<ReleaseOutcome> {
        let fault = if duration > MAX_TTL {
            Some("release_after takes at most a day")
        } else if self.mode == Mode::Shared {
            Some("release_after needs an exclusive lock or permits")
        } else if self.nested {
            Some("release_after needs the outermost guard of the key")
        } else {
            None
        };
        let (kind, fault) = match fault {
            Some(fault) => (ErrorKind::Invalid, fault),
            None if self.handle.can_release_after() => {
                return self.release(Release::After(duration)).await;
            }
            None => (ErrorKind::Unsupported, "the backend has no release_after"),
        };
        let error = Error::new(kind, Operation::Release)
            .on(&self.key)
            .saying(format!("{fault}; the lock was released at once"));
        let _ = self.release(Release::Now).await?;
        Err(error)
    }

    fn told_released(&mut self, held: Duration) {
        if self.let_go {
            return;
        }
        self.let_go = true;
        self.handle.core.observer.tell(&Event::Released { key: &self.key, held });
    }
}

impl Drop for Hold {
    fn drop(&mut self) {
        if self.over {
            return;
        }
        let TicketRef { shard, ticket } = self.ticket_ref;
        let (taken_until, let_go) = (self.taken_until, self.let_go);
        let (held, wakers) = self.handle.core.step(shard, |machine, now, actions| {
            let held = machine.held_for(now, ticket);
            if !let_go && now < taken_until {
                machine.release(now, ticket, Release::After(taken_until.since(now)), actions);
            }
            (held, machine.forget(now, ticket, actions))
        });
        drop(wakers); // here, where no lock is held
        self.told_released(held);
    }
}

/// As wanted, but the key stays taken for `rest` at least.
fn at_least(how: Release, rest: Duration) -> Release {
    match how {
        _ if rest.is_zero() => how,
        Release::Now => Release::After(rest),
        Release::After(duration) => Release::After(duration.max(rest)),
    }
}

/// Writes what every guard can do.
macro_rules! guard_methods {
    () => {
        /// What is held.
        pub fn key(&self) -> &Key {
            &self.hold.key
        }

        /// How long the lock is held for certain, unless renewed meanwhile.
        pub fn valid_for(&self) -> Duration {
            self.hold.valid_for()
        }

        /// How the lock stands.
        pub fn state(&self) -> State {
            self.hold.state()
        }

        /// Resolves when the lock is lost, with the reason. Never, if it is not.
        ///
        /// # Cancel safety
        /// May be dropped and called again; several tasks may wait.
        pub async fn lost(&self) -> LossReason {
            self.hold.lost().await
        }

        /// Runs a future for as long as the lock is held: when it is lost the
        /// future is dropped at its next await.
        ///
        /// Inside it, asking for the same key again goes through (re-entry), and
        /// sub-tasks of it that do so at the same time exclude each other.
        ///
        /// # Errors
        /// `Lost`. What the future was doing may or may not have happened.
        ///
        /// # Cancel safety
        /// Dropping it drops the future; the guard goes on.
        pub fn run<F: Future>(&self, future: F) -> impl Future<Output = Result<F::Output>> {
            self.hold.run(future)
        }

        /// Runs a future to its end, also when the lock is lost meanwhile: for
        /// work that is worse half done than done late. Re-entry is as inside
        /// [`run`](Self::run).
        ///
        /// ```
        /// # #[tokio::main(flavor = "current_thread")] async fn main() -> dlock::Result<()> {
        /// # let dlock = dlock::testing::client();
        /// # let lock = dlock.mutex("order:7");
        /// let guard = lock.lock().await?;
        /// let sum = guard.run_to_end(async { 1 + 1 }).await;
        /// # assert_eq!(sum, 2);
        /// # Ok(()) }
        /// ```
        ///
        /// # Cancel safety
        /// Dropping it drops the future; the guard goes on.
        pub fn run_to_end<F: Future>(&self, future: F) -> impl Future<Output = F::Output> {
            self.hold.run_to_end(future)
        }

        /// As [`run_to_end`](Self::run_to_end), but a future that has not begun when
        /// the lock is lost does not begin.
        #[doc(hidden)]
        pub fn run_if_held<F: Future>(&self, future: F) -> impl Future<Output = Result<F::Output>> {
            self.hold.run(future).once_begun()
        }

        /// Releases the lock and says what came of it.
        ///
        /// Dropping the guard releases it too, in the background.
        ///
        /// # Errors
        /// `Unknown` or `Unavailable` if the backend did not answer; the release
        /// is repeated in the background until the lease has ended.
        ///
        /// # Cancel safety
        /// The release goes on when this is dropped.
        pub async fn release(self) -> Result<ReleaseOutcome> {
            self.hold.release(Release::Now).await
        }

        /// Lets go but keeps the key taken for `duration` more: for jobs that must
        /// not run again too soon, on any machine.
        ///
        /// # Errors
        /// As [`release`](Self::release), and `Invalid` above a day, for a shared
        /// lock and for a nested guard: then the lock is released at once.
        ///
        /// # Cancel safety
        /// As [`release`](Self::release).
        pub async fn release_after(self, duration: Duration) -> Result<ReleaseOutcome> {
            self.hold.release_after(duration).await
        }
    };
}

/// A held lock: exclusive, or shared with other readers.
///
/// Dropping it releases the lock in the background. It may be sent to other
/// threads and kept in structures; it borrows nothing.
///
/// No lock service stops a process that was paused while it held a lock and
/// wakes up after the lock went to somebody else. What is promised instead: such
/// a holder's guard is [`State::Lost`] and its [token](Guard::token) is older
/// than its successor's, so that the resource can reject it (see
/// [`Fence`](crate::Fence)).
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

    /// The fencing token: higher than that of every earlier holder of this key.
    ///
    /// Readers inside at the same time may have the same. A nested guard has
    /// that of the guard it is nested in.
    pub fn token(&self) -> Token {
        self.token
    }

    /// What the lock is held for.
    pub fn mode(&self) -> Mode {
        self.hold.mode
    }

    /// Goes on as a reader: others may read from now on, nobody wrote in between.
    ///
    /// The guard has a new token. A guard that is shared already, nested or lost
    /// is returned as it is.
    pub fn downgrade(mut self) -> Guard {
        let TicketRef { shard, ticket } = self.hold.ticket_ref;
        let token = self
            .hold
            .handle
            .core
            .step(shard, |machine, now, actions| machine.downgrade(now, ticket, actions));
        if let Some(token) = token.and_then(Token::new) {
            self.token = token;
            self.hold.mode = Mode::Shared;
        }
        self
    }

    guard_methods!();
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

/// Permits of a semaphore. They carry no token: several holders are inside, so
/// no resource could tell a stale one by its number.
#[must_use = "the permits go back as soon as this is dropped"]
pub struct Permits {
    hold: Hold,
}

impl Permits {
    pub(crate) fn new(hold: Hold) -> Self {
        Permits { hold }
    }

    /// How many.
    pub fn count(&self) -> u32 {
        match self.hold.mode {
            Mode::Permits { count, .. } => count,
            _ => 0,
        }
    }

    guard_methods!();
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
