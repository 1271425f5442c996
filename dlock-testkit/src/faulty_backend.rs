//! A backend whose calls a test can make fail.

use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError, Weak};
use std::time::Duration;

use dlock::backend::{Answer, Break, Request};
use dlock::backend::{Backend, Call, Capabilities, Cursor, KeyState, Listener, Page};
use dlock::{Error, ErrorKind, Key, Operation, Result};

/// What happens to the calls of a [`FaultyBackend`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum FaultMode {
    /// Calls arrive and are answered.
    Healthy,
    /// Calls fail with `Unavailable` and never arrive.
    Unreachable,
    /// Calls arrive, but their answers are lost: they fail with `Unknown`.
    AnswersLost,
    /// Calls neither succeed nor fail: they never return.
    NoAnswer,
    /// Calls panic, as a bug in a backend does.
    Panic,
}

/// Sets the [`FaultMode`] of a [`FaultyBackend`] and counts its calls.
#[derive(Clone)]
pub struct FaultControl {
    mode: Arc<Mutex<FaultMode>>,
    calls: Arc<AtomicU64>,
    link: Option<Arc<dyn Fn(bool) + Send + Sync>>,
}

impl std::fmt::Debug for FaultControl {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("FaultControl").field("mode", &self.get()).finish_non_exhaustive()
    }
}

impl FaultControl {
    /// Changes what happens to calls from now on.
    pub fn set(&self, mode: FaultMode) {
        if let Some(link) = &self.link {
            link(mode == FaultMode::Unreachable);
        }
        *self.mode.lock().unwrap_or_else(PoisonError::into_inner) = mode;
    }

    /// While calls are unreachable this way to the store is cut as well.
    #[must_use]
    pub fn with_link(mut self, link: impl Fn(bool) + Send + Sync + 'static) -> Self {
        self.link = Some(Arc::new(link));
        self
    }

    fn get(&self) -> FaultMode {
        *self.mode.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The number of calls so far.
    pub fn calls(&self) -> u64 {
        self.calls.load(Ordering::Relaxed)
    }
}

/// A wrapper of a backend that fails on demand.
#[derive(Debug)]
pub struct FaultyBackend<B> {
    inner: B,
    control: FaultControl,
    /// With `Some` the backend claims to be remote, so that the client runs its
    /// driver thread, and each call takes this long.
    latency: Option<Duration>,
    /// How many calls share a round trip.
    max_batch: usize,
}

impl<B: Backend> FaultyBackend<B> {
    /// Wraps a backend; the second value controls the faults.
    pub fn new(inner: B) -> (Self, FaultControl) {
        let mode = Arc::new(Mutex::new(FaultMode::Healthy));
        let control = FaultControl { mode, calls: Arc::default(), link: None };
        let max_batch = inner.capabilities().max_batch;
        (FaultyBackend { inner, control: control.clone(), latency: None, max_batch }, control)
    }

    /// Wraps a backend as if it were on another machine, with this latency.
    pub fn remote(inner: B, latency: Duration) -> (Self, FaultControl) {
        let (faulty, control) = Self::new(inner);
        (FaultyBackend { latency: Some(latency), ..faulty }, control)
    }

    /// Lets so many calls share a round trip.
    pub fn with_max_batch(self, max_batch: usize) -> Self {
        FaultyBackend { max_batch, ..self }
    }

    fn faulty<'a, T: Send + Unpin + 'a>(
        &'a self,
        operation: Operation,
        call: impl FnOnce() -> Call<'a, T> + Send + 'a,
        failed: impl Fn(Error) -> T + Send + 'a,
    ) -> Call<'a, T> {
        self.control.calls.fetch_add(1, Ordering::Relaxed);
        let error = move |kind| Error::new(kind, operation).with_message("injected by the test");
        let mode = self.control.get();
        let latency = self.latency.or(self.inner.capabilities().remote.then_some(Duration::ZERO));
        let Some(latency) = latency else {
            return match mode {
                FaultMode::Healthy => call(),
                FaultMode::Unreachable => Call::answered(failed(error(ErrorKind::Unavailable))),
                FaultMode::AnswersLost => {
                    drop(call());
                    Call::answered(failed(error(ErrorKind::Unknown)))
                }
                FaultMode::NoAnswer => Call::new(std::future::pending()),
                FaultMode::Panic => panic!("injected by the test"),
            };
        };
        Call::new(async move {
            tokio::time::sleep(latency).await;
            match mode {
                FaultMode::Healthy => call().await,
                FaultMode::Unreachable => failed(error(ErrorKind::Unavailable)),
                FaultMode::AnswersLost => {
                    call().await;
                    failed(error(ErrorKind::Unknown))
                }
                FaultMode::NoAnswer => std::future::pending().await,
                FaultMode::Panic => panic!("injected by the test"),
            }
        })
    }
}

impl<B: Backend> Backend for FaultyBackend<B> {
    fn capabilities(&self) -> Capabilities {
        let mut capabilities = self.inner.capabilities();
        capabilities.remote |= self.latency.is_some();
        capabilities.max_batch = self.max_batch;
        capabilities
    }

    fn open(&self, client: u64, listener: Weak<dyn Listener>) {
        self.inner.open(client, listener);
    }

    fn call<'a>(&'a self, requests: &'a [Request]) -> Call<'a, Vec<Answer>> {
        let Some(first) = requests.first() else { return Call::answered(Vec::new()) };
        let failed = |error: Error| requests.iter().map(|it| it.failed(error.clone())).collect();
        self.faulty(first.operation(), || self.inner.call(requests), failed)
    }

    fn inspect<'a>(&'a self, key: &'a Key) -> Call<'a, Result<KeyState>> {
        self.faulty(Operation::Inspect, || self.inner.inspect(key), Err)
    }

    fn list<'a>(&'a self, prefix: &'a str, cursor: Cursor) -> Call<'a, Result<Page>> {
        self.faulty(Operation::List, || self.inner.list(prefix, cursor), Err)
    }

    fn break_lock<'a>(&'a self, key: &'a Key, how: &'a Break) -> Call<'a, Result<usize>> {
        self.faulty(Operation::Break, move || self.inner.break_lock(key, how), Err)
    }

    fn ping(&self) -> Call<'_, Result<()>> {
        self.faulty(Operation::Connect, || self.inner.ping(), Err)
    }

    fn close(&self) -> Call<'_, ()> {
        self.inner.close()
    }
}
