//! Latencies and counts that many tasks record, merged afterwards.

use std::sync::{Mutex, PoisonError};

use hdrhistogram::Histogram;
use serde::{Deserialize, Serialize};

/// The number of histograms that the tasks of a process share.
const SHARDS: usize = 16;

/// Records the operations of the tasks of one process.
#[derive(Debug)]
pub struct Recorder {
    shards: Vec<Mutex<Shard>>,
}

#[derive(Debug)]
struct Shard {
    latencies: Histogram<u64>,
    operations: u64,
    errors: u64,
    first_error: Option<String>,
}

/// A histogram of up to one hour, in nanoseconds, with three significant digits.
fn histogram() -> Histogram<u64> {
    Histogram::new_with_max(3_600_000_000_000, 3).expect("the bounds are valid")
}

impl Default for Recorder {
    fn default() -> Self {
        let shard =
            || Shard { latencies: histogram(), operations: 0, errors: 0, first_error: None };
        Recorder { shards: (0..SHARDS).map(|_| Mutex::new(shard())).collect() }
    }
}

impl Recorder {
    fn shard(&self, task: usize) -> std::sync::MutexGuard<'_, Shard> {
        self.shards[task % SHARDS].lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Records an operation of this task that took `waited` nanoseconds.
    pub fn operation(&self, task: usize, waited: u64) {
        let mut shard = self.shard(task);
        shard.operations += 1;
        shard.latencies.saturating_record(waited);
    }

    /// Records the waiting time of an operation that did not complete, in nanoseconds.
    pub fn incomplete(&self, task: usize, waited: u64) {
        self.shard(task).latencies.saturating_record(waited);
    }

    /// Records operations that never began: one was due every `every` nanoseconds, and
    /// the first waited for `first` nanoseconds.
    pub fn never_began(&self, task: usize, first: u64, every: u64) {
        let mut shard = self.shard(task);
        let mut left = Some(first).filter(|first| *first > 0);
        while let Some(waited) = left {
            shard.latencies.saturating_record(waited);
            left = waited.checked_sub(every).filter(|left| *left > 0);
        }
    }

    /// Records that an operation of this task failed.
    pub fn error(&self, task: usize, error: &impl std::fmt::Display) {
        let mut shard = self.shard(task);
        shard.errors += 1;
        shard.first_error.get_or_insert_with(|| error.to_string());
    }

    /// Everything that was recorded so far.
    pub fn measurement(&self) -> Measurement {
        let mut all = Measurement::default();
        for shard in 0..SHARDS {
            let shard = self.shard(shard);
            let latencies = shard.latencies.iter_recorded();
            all.add(Measurement {
                operations: shard.operations,
                errors: shard.errors,
                first_error: shard.first_error.clone(),
                latencies: latencies
                    .map(|it| (it.value_iterated_to(), it.count_since_last_iteration()))
                    .collect(),
            });
        }
        all
    }
}

/// What was measured, in a form that processes can send to each other.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Measurement {
    /// The number of operations that succeeded.
    pub operations: u64,
    /// The number of operations that failed.
    pub errors: u64,
    /// The message of the first error.
    pub first_error: Option<String>,
    /// Pairs of a latency in nanoseconds and the number of operations that had it.
    pub latencies: Vec<(u64, u64)>,
}

impl Measurement {
    /// Merges several measurements.
    pub fn merge(parts: Vec<Measurement>) -> Self {
        let mut all = Measurement::default();
        for part in parts {
            all.add(part);
        }
        all
    }

    /// Adds another measurement to this one.
    pub fn add(&mut self, other: Measurement) {
        self.operations += other.operations;
        self.errors += other.errors;
        self.first_error = self.first_error.take().or(other.first_error);
        self.latencies.extend(other.latencies);
    }

    /// The summary of the latencies.
    pub fn latency(&self) -> LatencySummary {
        let mut all = histogram();
        for &(value, count) in &self.latencies {
            all.saturating_record_n(value, count);
        }
        LatencySummary {
            p50_us: micros(all.value_at_quantile(0.5)),
            p99_us: micros(all.value_at_quantile(0.99)),
            max_us: micros(all.max()),
        }
    }
}

/// A summary of latencies, in microseconds.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize)]
#[allow(missing_docs, reason = "the fields are named like what they hold")]
pub struct LatencySummary {
    pub p50_us: f64,
    pub p99_us: f64,
    pub max_us: f64,
}

/// Converts nanoseconds to microseconds, with one decimal digit.
pub fn micros(nanos: u64) -> f64 {
    rounded(nanos as f64 / 1_000.0)
}

/// Rounds to one decimal digit.
pub fn rounded(number: f64) -> f64 {
    (number * 10.0).round() / 10.0
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn measurements_are_merged() {
        let (one, other) = (Recorder::default(), Recorder::default());
        for waited in 1..=99 {
            one.operation(waited as usize, waited * 1_000);
        }
        other.operation(0, 5_000_000);
        other.error(0, &"no");
        let mut all = one.measurement();
        all.add(other.measurement());
        assert_eq!((all.operations, all.errors, all.first_error.as_deref()), (100, 1, Some("no")));
        let LatencySummary { p50_us, p99_us, max_us } = all.latency();
        assert!((49.0..52.0).contains(&p50_us), "{p50_us}");
        assert!((98.0..101.0).contains(&p99_us), "{p99_us}");
        assert!((4_990.0..5_010.0).contains(&max_us), "{max_us}");
    }
}
