//! A clock that all processes of the machine share.

use std::future::Future;
use std::time::Duration;

/// The nanoseconds of CLOCK_MONOTONIC. All processes of a machine share this clock,
/// so the events of two processes can be put in order.
pub fn now() -> u64 {
    let time = rustix::time::clock_gettime(rustix::time::ClockId::Monotonic);
    let part = |part: i64| u64::try_from(part).unwrap_or(0);
    part(time.tv_sec) * 1_000_000_000 + part(time.tv_nsec)
}

/// Sleeps until [`now`] is `moment`.
pub async fn sleep_until(moment: u64) {
    let left = moment.saturating_sub(now());
    if left > 0 {
        tokio::time::sleep(Duration::from_nanos(left)).await;
    }
}

/// Waits for a future until [`now`] is `moment`; `None` if it was not ready by then.
pub async fn timeout_at<T>(moment: u64, future: impl Future<Output = T>) -> Option<T> {
    let left = Duration::from_nanos(moment.saturating_sub(now()));
    tokio::time::timeout(left, future).await.ok()
}

/// The duration in nanoseconds.
pub fn nanos(duration: Duration) -> u64 {
    u64::try_from(duration.as_nanos()).unwrap_or(u64::MAX)
}

/// The processor time that this process has used.
pub fn cpu_time() -> Duration {
    let time = rustix::time::clock_gettime(rustix::time::ClockId::ProcessCPUTime);
    let seconds = u64::try_from(time.tv_sec).unwrap_or(0);
    Duration::new(seconds, u32::try_from(time.tv_nsec).unwrap_or(0))
}
