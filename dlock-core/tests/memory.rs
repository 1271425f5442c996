//! The conformance suite on the embedded backend.

use std::sync::Weak;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use dlock::backend::memory::Memory;
use dlock::backend::{AcquireOutcome, Answer, Grant, RenewOutcome, Request};
use dlock::backend::{Backend, Call, Capabilities, KeyState, Listener};
use dlock::{Key, ReleaseOutcome, Result};
use dlock_testkit::FaultyBackend;
use dlock_testkit::conformance::Suite;

/// Without a driver thread, with paused time.
#[tokio::test(start_paused = true)]
async fn embedded() {
    let store = Memory::new();
    Suite::new(move || store.another()).run().await;
}

/// On several threads, in real time.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn embedded_on_several_threads() {
    let store = Memory::new();
    Suite::new(move || store.another()).run().await;
}

/// As if the backend were remote: with the driver thread, in real time.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn behind_the_driver() {
    let store = Memory::new();
    Suite::new(move || FaultyBackend::remote(store.another(), Duration::from_micros(200)).0)
        .run()
        .await;
}

/// A suite that always passes would prove nothing: a backend that grants every request
/// must fail it.
#[test]
fn a_backend_that_always_grants_fails() {
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
    let tried = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| {
        let store = Memory::new();
        let suite = Suite::new(move || AlwaysGrants(store.another()));
        runtime.block_on(suite.run());
    }));
    let said = tried.expect_err("it must fail");
    let said = said.downcast_ref::<String>().expect("a message");
    assert!(said.contains("entered beside"), "{said}");
}

struct AlwaysGrants(Memory);

impl Backend for AlwaysGrants {
    fn capabilities(&self) -> Capabilities {
        let mut capabilities = self.0.capabilities();
        capabilities.operators = false; // it neither lists nor breaks locks
        capabilities
    }
    fn open(&self, client: u64, listener: Weak<dyn Listener>) {
        self.0.open(client, listener);
    }
    fn call<'a>(&'a self, requests: &'a [Request]) -> Call<'a, Vec<Answer>> {
        static NEXT: AtomicU64 = AtomicU64::new(1);
        let answer = |request: &Request| match request {
            Request::Acquire(claim) => {
                let first = NEXT.fetch_add(100, Ordering::Relaxed);
                let grant = Grant { first, count: claim.tokens };
                Answer::Acquire(Ok(AcquireOutcome::Granted(grant)))
            }
            Request::Renew(_) => Answer::Renew(Ok(RenewOutcome::Held { others_wait: false })),
            Request::Release(..) => Answer::Release(Ok(ReleaseOutcome::Released)),
        };
        Call::answered(requests.iter().map(answer).collect())
    }
    fn inspect<'a>(&'a self, key: &'a Key) -> Call<'a, Result<KeyState>> {
        self.0.inspect(key)
    }
    fn ping(&self) -> Call<'_, Result<()>> {
        self.0.ping()
    }
}
