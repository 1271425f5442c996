//! A backend that panics, as one with a bug does: the client of a remote backend survives.

use std::time::{Duration, Instant};

use dlock::backend::memory::Memory;
use dlock::{Dlock, State};
use dlock_testkit::conformance::eventually;
use dlock_testkit::{FaultMode, FaultyBackend};

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_panic_in_combined_calls_ends_nothing() {
    a_panic_ends_nothing(16).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_panic_in_single_calls_ends_nothing() {
    a_panic_ends_nothing(1).await;
}

/// Waits end by their own deadline while each call panics, a lock that is held is renewed
/// again afterwards, and the next lock works.
async fn a_panic_ends_nothing(max_batch: usize) {
    let (backend, faults) = FaultyBackend::remote(Memory::new(), Duration::from_micros(100));
    let client = Dlock::builder()
        .backend(backend.with_max_batch(max_batch))
        .ttl(Duration::from_secs(2))
        .call_timeout(Duration::from_millis(300))
        .connect_lazy()
        .expect("a client");
    let held = client.mutex("held").lock().await.expect("the lock");
    let other = client.mutex("other").lock().await.expect("the lock");
    faults.set(FaultMode::Panic);
    let began = Instant::now();
    let wait = Duration::from_millis(400);
    client.mutex("a").wait(wait).lock().await.expect_err("no answer");
    let took = began.elapsed();
    assert!(took >= wait && took < Duration::from_millis(1_500), "{took:?} ({max_batch})");
    let began = Instant::now();
    client.mutex("b").try_lock().await.expect_err("no answer");
    assert!(began.elapsed() < Duration::from_millis(2_000), "{:?}", began.elapsed());
    drop(other); // its release panics, too, and is repeated
    faults.set(FaultMode::Healthy);
    let began = Instant::now();
    for key in ["a", "b", "other"] {
        let lock = client.mutex(key).wait(Duration::from_secs(10));
        drop(lock.lock().await.expect("the next lock works"));
    }
    assert!(began.elapsed() < Duration::from_secs(5), "{:?} ({max_batch})", began.elapsed());
    assert!(held.state() != State::Lost);
    eventually("the held lock is certain again", async || held.state() == State::Held).await;
    let lost = tokio::time::timeout(Duration::from_secs(3), held.lost()).await;
    assert!(lost.is_err(), "{lost:?} ({max_batch})");
}
