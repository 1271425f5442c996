//! What a holder can truthfully say of the time it held a lock.

use std::future::Future;
use std::pin::pin;
use std::task::{Context, Poll, Waker};
use std::time::Duration;

use dlock::{Guard, LossReason, Mode, MultiGuard, Permits, State};

use crate::process::now;
use crate::records::Record;

/// What all guards can tell.
pub trait Tells {
    /// As [`Guard::state`].
    fn state(&self) -> State;
    /// As [`Guard::valid_for`].
    fn valid_for(&self) -> Duration;
    /// Why it is lost, if it is.
    fn loss(&self) -> Option<LossReason>;
    /// Each key with mode and token.
    fn keys(&self) -> Vec<(String, Mode, u64)>;
}

impl Tells for Guard {
    fn state(&self) -> State {
        Guard::state(self)
    }
    fn valid_for(&self) -> Duration {
        Guard::valid_for(self)
    }
    fn loss(&self) -> Option<LossReason> {
        now_or_never(self.lost())
    }
    fn keys(&self) -> Vec<(String, Mode, u64)> {
        vec![(self.key().as_str().to_owned(), self.mode(), self.token().get())]
    }
}

impl Tells for MultiGuard {
    fn state(&self) -> State {
        MultiGuard::state(self)
    }
    fn valid_for(&self) -> Duration {
        MultiGuard::valid_for(self)
    }
    fn loss(&self) -> Option<LossReason> {
        now_or_never(self.lost()).map(|(_, reason)| reason)
    }
    fn keys(&self) -> Vec<(String, Mode, u64)> {
        let tokens = self.tokens();
        tokens.map(|(key, token)| (key.as_str().to_owned(), Mode::Exclusive, token.get())).collect()
    }
}

/// Permits do not tell of how many they are.
impl Tells for (Permits, u32) {
    fn state(&self) -> State {
        self.0.state()
    }
    fn valid_for(&self) -> Duration {
        self.0.valid_for()
    }
    fn loss(&self) -> Option<LossReason> {
        now_or_never(self.0.lost())
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

/// A stay under a guard, from when it was seen to be held.
#[derive(Clone, Copy, Debug)]
pub struct Stay {
    from: u64,
    /// Held until then, unless it is renewed or taken away.
    deadline: u64,
}

impl Stay {
    /// Begins, if the lock is held.
    pub fn begin(guard: &impl Tells) -> Option<Self> {
        let from = now();
        let valid = guard.valid_for();
        // The clock was read before the guard was asked, so the sum is not too late.
        let deadline = from + u64::try_from(valid.as_nanos()).unwrap_or(u64::MAX / 2);
        (!valid.is_zero() && guard.state() != State::Lost).then_some(Stay { from, deadline })
    }

    /// Ends it before the lock is let go; says so for each key.
    ///
    /// If the lock was lost, the reason tells how far it can be claimed: up to the
    /// deadline that was known, unless it was taken away before that.
    pub fn end(self, guard: &impl Tells, who: &str) -> Vec<Record> {
        let at = now();
        let (until, stale) = match guard.loss() {
            None => (at, None),
            // After a shutdown it is kept until its holder lets go.
            Some(LossReason::Deadline | LossReason::Shutdown) => (self.deadline.min(at), Some(at)),
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
