//! A queue of tasks behind one lock, for the criterion benches.

use std::future::Future;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

/// Lets `tasks` tasks queue up behind `first`, then drops that and runs `cycle` in
/// all of them until there were `cycles`; tells how long that took.
///
/// Once everybody waits, each cycle gets the lock from the one before it.
pub async fn convoy<G, F, C>(tasks: usize, cycles: u64, first: G, cycle: C) -> Duration
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
            let take = |left: u64| left.checked_sub(1);
            while left.fetch_update(Ordering::Relaxed, Ordering::Relaxed, take).is_ok() {
                cycle().await;
            }
        }));
    }
    tokio::time::sleep(Duration::from_millis(20)).await; // everybody has queued up
    let began = Instant::now();
    drop(first);
    for task in running {
        task.await.expect("a task of the bench");
    }
    began.elapsed()
}
