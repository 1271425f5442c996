//! The conformance suite on the embedded backend.

use std::time::Duration;

use dlock_core::backend::memory::Memory;
use dlock_testkit::Faulty;
use dlock_testkit::conformance::Suite;

/// In place, without a thread, under paused time.
#[tokio::test(start_paused = true)]
async fn embedded() {
    let store = Memory::new();
    Suite::new(move || store.another()).run().await;
}

/// The same on several threads, in real time.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn embedded_on_several_threads() {
    let store = Memory::new();
    Suite::new(move || store.another()).run().await;
}

/// As if it were remote: with the driver's thread, in real time.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn behind_the_driver() {
    let store = Memory::new();
    Suite::new(move || Faulty::remote(store.another(), Duration::from_micros(200)).0).run().await;
}
