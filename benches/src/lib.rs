//! Workloads that the benches and load tests share.

use std::future::Future;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use tokio::sync::Barrier;

/// Runs `cycle` in `tasks` tasks at the same time until there were `cycles` of
/// them, and tells how long that took.
pub async fn contend<F, C>(tasks: usize, cycles: u64, cycle: C) -> Duration
where
    C: Fn() -> F + Send + Sync + 'static,
    F: Future<Output = ()> + Send,
{
    let left = Arc::new(AtomicU64::new(cycles));
    let start = Arc::new(Barrier::new(tasks + 1));
    let cycle = Arc::new(cycle);
    let mut running = Vec::new();
    for _ in 0..tasks {
        let (left, start, cycle) = (left.clone(), start.clone(), cycle.clone());
        running.push(tokio::spawn(async move {
            start.wait().await;
            let take = |left: u64| left.checked_sub(1);
            while left.fetch_update(Ordering::Relaxed, Ordering::Relaxed, take).is_ok() {
                cycle().await;
            }
        }));
    }
    let began = Instant::now(); // before anybody can start
    start.wait().await;
    for task in running {
        task.await.expect("a task of the bench");
    }
    began.elapsed()
}
