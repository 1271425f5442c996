//! The time during which a process held a lock, as its own guard proves it.

use std::future::Future;
use std::pin::pin;
use std::task::{Context, Poll, Waker};
use std::time::Duration;

use dlock::{Guard, LossReason, Mode, MultiGuard, Permits, State};

use crate::process::now;
use crate::record_checker::Record;

/// A guard of any primitive that can say whether it is still held.
pub trait HeldGuard {
    /// As [`Guard::state`].
    fn state(&self) -> State;
    /// As [`Guard::valid_for`].
    fn valid_for(&self) -> Duration;
    /// The reason for which the lock was lost, if it was.
    fn loss(&self) -> Option<LossReason>;
    /// Waits until the lock is lost.
    fn wait_for_loss(&self) -> impl Future<Output = ()> + Send;
    /// The keys that are held, each with its mode and token.
    fn keys(&self) -> Vec<(String, Mode, u64)>;
}

impl HeldGuard for Guard {
    fn state(&self) -> State {
        Guard::state(self)
    }
    fn valid_for(&self) -> Duration {
        Guard::valid_for(self)
    }
    fn loss(&self) -> Option<LossReason> {
        now_or_never(self.lost())
    }
    async fn wait_for_loss(&self) {
        self.lost().await;
    }
    fn keys(&self) -> Vec<(String, Mode, u64)> {
        vec![(self.key().as_str().to_owned(), self.mode(), self.token().get())]
    }
}

impl HeldGuard for MultiGuard {
    fn state(&self) -> State {
        MultiGuard::state(self)
    }
    fn valid_for(&self) -> Duration {
        MultiGuard::valid_for(self)
    }
    fn loss(&self) -> Option<LossReason> {
        now_or_never(self.lost()).map(|(_, reason)| reason)
    }
    async fn wait_for_loss(&self) {
        self.lost().await;
    }
    fn keys(&self) -> Vec<(String, Mode, u64)> {
        let tokens = self.tokens();
        tokens.map(|(key, token)| (key.as_str().to_owned(), Mode::Exclusive, token.get())).collect()
    }
}

/// Permits and the capacity of their semaphore, which [`Permits`] does not know.
impl HeldGuard for (Permits, u32) {
    fn state(&self) -> State {
        self.0.state()
    }
    fn valid_for(&self) -> Duration {
        self.0.valid_for()
    }
    fn loss(&self) -> Option<LossReason> {
        now_or_never(self.0.lost())
    }
    async fn wait_for_loss(&self) {
        self.0.lost().await;
    }
    fn keys(&self) -> Vec<(String, Mode, u64)> {
        let mode = Mode::Permits { count: self.0.count(), of: self.1 };
        vec![(self.0.key().as_str().to_owned(), mode, 0)]
    }
}

fn now_or_never<T>(future: impl Future<Output = T>) -> Option<T> {
    match pin!(future).poll(&mut Context::from_waker(Waker::noop())) {
        Poll::Ready(value) => Some(value),
        Poll::Pending => None,
    }
}

/// An interval during which a lock is held. It starts when the guard is seen to be
/// held.
#[derive(Clone, Copy, Debug)]
pub struct HeldInterval {
    from: u64,
    /// The lock is held until then, unless it is renewed or lost before.
    deadline: u64,
    /// When the guard told that the lock is lost, if somebody waited for that.
    told: Option<u64>,
}

impl HeldInterval {
    /// Starts an interval; `None` if the lock is not held.
    pub fn begin(guard: &impl HeldGuard) -> Option<Self> {
        let from = now();
        let valid = guard.valid_for();
        // The clock was read before `valid_for`, so the deadline is not too late.
        let deadline = from + u64::try_from(valid.as_nanos()).unwrap_or(u64::MAX / 2);
        (!valid.is_zero() && guard.state() != State::Lost).then_some(HeldInterval {
            from,
            deadline,
            told: None,
        })
    }

    /// Waits for this work, and notes when the guard tells of a loss meanwhile.
    pub async fn during<T>(&mut self, guard: &impl HeldGuard, work: impl Future<Output = T>) -> T {
        let mut work = pin!(work);
        tokio::select! {
            biased;
            () = guard.wait_for_loss() => self.told = Some(now()),
            done = &mut work => return done,
        }
        work.await
    }

    /// Ends the interval and returns a record for each key. Call it before the lock is
    /// released.
    ///
    /// If the lock was lost by its deadline or by a shutdown, the interval ends at
    /// the deadline that was known. If the server forgot it or ended the session, the
    /// interval ends when the guard told so. For any other reason it ends where it began.
    pub fn end(self, guard: &impl HeldGuard, who: &str) -> Vec<Record> {
        let at = now();
        let (until, stale) = match guard.loss() {
            None => (at, None),
            // After a shutdown the lock is kept until its holder releases it.
            Some(LossReason::Deadline | LossReason::Shutdown) => (self.deadline.min(at), Some(at)),
            Some(LossReason::Forgotten | LossReason::SessionLost) => {
                (self.told.unwrap_or(self.from), Some(at))
            }
            Some(_) => (self.from, Some(at)),
        };
        let keys = guard.keys().into_iter();
        let record = |(key, mode, token)| Record {
            key,
            mode,
            token,
            from: self.from,
            until: until.max(self.from),
            stale,
            who: who.to_owned(),
        };
        keys.map(record).collect()
    }
}
