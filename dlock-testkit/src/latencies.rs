//! How long calls took in a test that holds something for long.

use std::fmt;
use std::time::{Duration, Instant};

/// How long such a test holds it: 4 s, or `DLOCK_TEST_HELD_SECONDS`.
///
/// # Panics
/// If the variable is not a number.
pub fn held_for() -> Duration {
    let seconds = std::env::var("DLOCK_TEST_HELD_SECONDS");
    Duration::from_secs(seconds.map_or(4, |it| it.parse().expect("a number of seconds")))
}

/// How long calls took since [`began`](Self::began).
#[derive(Clone, Debug)]
pub struct Latencies {
    /// When the first call began.
    pub began: Instant,
    took: Vec<Duration>,
}

impl Default for Latencies {
    fn default() -> Self {
        Latencies { began: Instant::now(), took: Vec::new() }
    }
}

impl Latencies {
    /// Adds a call.
    pub fn add(&mut self, took: Duration) {
        self.took.push(took);
    }

    /// The longest call; zero if there was none.
    pub fn slowest(&self) -> Duration {
        self.took.iter().max().copied().unwrap_or_default()
    }

    fn percentile(&self, percent: usize) -> Duration {
        let mut sorted = self.took.clone();
        sorted.sort_unstable();
        sorted.get(sorted.len() * percent / 100).copied().unwrap_or_default()
    }
}

impl fmt::Display for Latencies {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (count, half, most) = (self.took.len(), self.percentile(50), self.percentile(99));
        write!(f, "{count} calls, p50 {half:?}, p99 {most:?}, max {:?}", self.slowest())
    }
}
