//! A lock that many tasks wait for, for the criterion benches.

use std::future::Future;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

/// Runs `cycle` in `tasks` tasks, `cycles` times in all, and returns how long it took.
///
/// `first` is the guard that all tasks wait behind. It is dropped once they are
/// queued, so that every cycle gets the lock from the cycle before it.
pub async fn run_contended<G, F, C>(tasks: usize, cycles: u64, first: G, cycle: C) -> Duration
where
    C: Fn() -> F + Send + Sync + 'static,
    F: Future<Output = ()> + Send,
{
    let left = Arc::new(AtomicU64::new(cycles));
    let cycle = Arc::new(cycle);
    let mut running = Vec::new();
    for _ in 0..tasks {
        let (left, cycle) = (left.clone(), cycle.clone());
        running.push(tokio::spawn(async move {
            let decrement = |left: u64| left.checked_sub(1);
            while left.fetch_update(Ordering::Relaxed, Ordering::Relaxed, decrement).is_ok() {
                cycle().await;
            }
        }));
    }
    tokio::time::sleep(Duration::from_millis(20)).await; // until all tasks wait
    let began = Instant::now();
    drop(first);
    for task in running {
        task.await.expect("a task of the bench panicked");
    }
    began.elapsed()
}
