//! A backend whose calls can be made to fail.

use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError, Weak};
use std::time::Duration;

use dlock::backend::{AcquireOutcome, Claim, Release, RenewOutcome};
use dlock::backend::{Backend, Call, Capabilities, Cursor, KeyState, Listener, Page};
use dlock::{Error, ErrorKind, Holder, Key, Operation, ReleaseOutcome, Result};

/// What happens to calls.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Weather {
    /// They arrive and are answered.
    Fine,
    /// They fail before they are sent: `Unavailable`.
    Unreachable,
    /// They arrive, but the answers are lost: `Unknown`.
    AnswersLost,
    /// They are never answered, nor do they fail.
    Silent,
}

/// The switch of a [`Faulty`] backend.
#[derive(Clone, Debug)]
pub struct Switch {
    weather: Arc<Mutex<Weather>>,
    calls: Arc<AtomicU64>,
}

impl Switch {
    /// Changes what happens to calls from now on.
    pub fn set(&self, weather: Weather) {
        *self.weather.lock().unwrap_or_else(PoisonError::into_inner) = weather;
    }

    fn get(&self) -> Weather {
        *self.weather.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// How many calls there were so far.
    pub fn calls(&self) -> u64 {
        self.calls.load(Ordering::Relaxed)
    }
}

/// Another backend behind a switch.
#[derive(Debug)]
pub struct Faulty<B> {
    inner: B,
    switch: Switch,
    /// `Some`: pretends to be remote, so that the client runs its driver's
    /// thread, and takes this long for each call.
    latency: Option<Duration>,
}

impl<B: Backend> Faulty<B> {
    /// The backend and its switch.
    pub fn new(inner: B) -> (Self, Switch) {
        let switch = Switch { weather: Arc::new(Mutex::new(Weather::Fine)), calls: Arc::default() };
        (Faulty { inner, switch: switch.clone(), latency: None }, switch)
    }

    /// The same, as if it were on another machine.
    pub fn remote(inner: B, latency: Duration) -> (Self, Switch) {
        let (faulty, switch) = Self::new(inner);
        (Faulty { latency: Some(latency), ..faulty }, switch)
    }

    fn call<'a, T: Send + Unpin + 'a>(
        &'a self,
        operation: Operation,
        call: impl FnOnce() -> Call<'a, T> + Send + 'a,
        failed: impl Fn(Error) -> T + Send + 'a,
    ) -> Call<'a, T> {
        self.switch.calls.fetch_add(1, Ordering::Relaxed);
        let error = move |kind| Error::new(kind, operation).saying("as the test wants it");
        let weather = self.switch.get();
        let latency = self.latency.or(self.inner.capabilities().remote.then_some(Duration::ZERO));
        let Some(latency) = latency else {
            return match weather {
                Weather::Fine => call(),
                Weather::Unreachable => Call::answered(failed(error(ErrorKind::Unavailable))),
                Weather::AnswersLost => {
                    drop(call());
                    Call::answered(failed(error(ErrorKind::Unknown)))
                }
                Weather::Silent => Call::new(std::future::pending()),
            };
        };
        Call::new(async move {
            tokio::time::sleep(latency).await;
            match weather {
                Weather::Fine => call().await,
                Weather::Unreachable => failed(error(ErrorKind::Unavailable)),
                Weather::AnswersLost => {
                    call().await;
                    failed(error(ErrorKind::Unknown))
                }
                Weather::Silent => std::future::pending().await,
            }
        })
    }
}

impl<B: Backend> Backend for Faulty<B> {
    fn capabilities(&self) -> Capabilities {
        let mut capabilities = self.inner.capabilities();
        capabilities.remote |= self.latency.is_some();
        capabilities
    }

    fn open(&self, client: u64, listener: Weak<dyn Listener>) {
        self.inner.open(client, listener);
    }

    fn acquire<'a>(&'a self, claim: &'a Claim) -> Call<'a, Result<AcquireOutcome>> {
        self.call(Operation::Acquire, || self.inner.acquire(claim), Err)
    }

    fn renew<'a>(&'a self, leases: &'a [Arc<Claim>]) -> Call<'a, Vec<Result<RenewOutcome>>> {
        let failed = |error: Error| leases.iter().map(|_| Err(error.clone())).collect();
        self.call(Operation::Renew, || self.inner.renew(leases), failed)
    }

    fn release<'a>(&'a self, lease: &'a Claim, how: Release) -> Call<'a, Result<ReleaseOutcome>> {
        self.call(Operation::Release, move || self.inner.release(lease, how), Err)
    }

    fn inspect<'a>(&'a self, key: &'a Key) -> Call<'a, Result<KeyState>> {
        self.call(Operation::Inspect, || self.inner.inspect(key), Err)
    }

    fn list<'a>(&'a self, prefix: &'a str, cursor: Cursor) -> Call<'a, Result<Page>> {
        self.call(Operation::List, || self.inner.list(prefix, cursor), Err)
    }

    fn break_lock<'a>(
        &'a self,
        key: &'a Key,
        by: &'a Holder,
        delay: Duration,
    ) -> Call<'a, Result<usize>> {
        self.call(Operation::Break, move || self.inner.break_lock(key, by, delay), Err)
    }

    fn ping(&self) -> Call<'_, Result<()>> {
        self.call(Operation::Connect, || self.inner.ping(), Err)
    }
}
