//! Latencies and counts, gathered by many tasks and put together afterwards.

use std::sync::{Mutex, PoisonError};

use hdrhistogram::Histogram;
use serde::{Deserialize, Serialize};

/// Tasks of a process share so many histograms.
const SHARDS: usize = 16;

/// What the tasks of one process measured.
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

/// Up to an hour, in nanoseconds, with three digits.
fn histogram() -> Histogram<u64> {
    Histogram::new_with_max(3_600_000_000_000, 3).expect("the bounds are right")
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

    /// This task did an operation and waited so many nanoseconds for it.
    pub fn operation(&self, task: usize, waited: u64) {
        let mut shard = self.shard(task);
        shard.operations += 1;
        shard.latencies.saturating_record(waited);
    }

    /// This task waited so many nanoseconds for an operation that it did not complete.
    pub fn waited(&self, task: usize, waited: u64) {
        self.shard(task).latencies.saturating_record(waited);
    }

    /// The same of operations that were due one after the other, each `every`
    /// nanoseconds after the one before; the first waited so long.
    pub fn waited_every(&self, task: usize, first: u64, every: u64) {
        let mut shard = self.shard(task);
        let mut left = Some(first).filter(|first| *first > 0);
        while let Some(waited) = left {
            shard.latencies.saturating_record(waited);
            left = waited.checked_sub(every).filter(|left| *left > 0);
        }
    }

    /// An operation of this task failed.
    pub fn error(&self, task: usize, error: &impl std::fmt::Display) {
        let mut shard = self.shard(task);
        shard.errors += 1;
        shard.first_error.get_or_insert_with(|| error.to_string());
    }

    /// All of it.
    pub fn measured(&self) -> Measured {
        let mut all = Measured::default();
        for shard in 0..SHARDS {
            let shard = self.shard(shard);
            let latencies = shard.latencies.iter_recorded();
            all.add(Measured {
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

/// What was measured, in a form that travels between processes.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Measured {
    /// How many operations succeeded.
    pub operations: u64,
    /// How many failed.
    pub errors: u64,
    /// What the first of them said.
    pub first_error: Option<String>,
    /// Nanoseconds, and how many operations waited so long.
    pub latencies: Vec<(u64, u64)>,
}

impl Measured {
    /// What several measured.
    pub fn of(parts: Vec<Measured>) -> Self {
        let mut all = Measured::default();
        for part in parts {
            all.add(part);
        }
        all
    }

    /// Adds what somebody else measured.
    pub fn add(&mut self, other: Measured) {
        self.operations += other.operations;
        self.errors += other.errors;
        self.first_error = self.first_error.take().or(other.first_error);
        self.latencies.extend(other.latencies);
    }

    /// The latencies in short.
    pub fn latency(&self) -> Latency {
        let mut all = histogram();
        for &(value, count) in &self.latencies {
            all.saturating_record_n(value, count);
        }
        Latency {
            p50_us: micros(all.value_at_quantile(0.5)),
            p99_us: micros(all.value_at_quantile(0.99)),
            max_us: micros(all.max()),
        }
    }
}

/// The latencies in short, in microseconds.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize)]
#[allow(missing_docs, reason = "the fields are named like what they hold")]
pub struct Latency {
    pub p50_us: f64,
    pub p99_us: f64,
    pub max_us: f64,
}

/// Nanoseconds in microseconds, with one digit after the point.
pub fn micros(nanos: u64) -> f64 {
    rounded(nanos as f64 / 1_000.0)
}

/// With one digit after the point.
pub fn rounded(number: f64) -> f64 {
    (number * 10.0).round() / 10.0
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_several_measured_is_put_together() {
        let (one, other) = (Recorder::default(), Recorder::default());
        for waited in 1..=99 {
            one.operation(waited as usize, waited * 1_000);
        }
        other.operation(0, 5_000_000);
        other.error(0, &"no");
        let mut all = one.measured();
        all.add(other.measured());
        assert_eq!((all.operations, all.errors, all.first_error.as_deref()), (100, 1, Some("no")));
        let Latency { p50_us, p99_us, max_us } = all.latency();
        assert!((49.0..52.0).contains(&p50_us), "{p50_us}");
        assert!((98.0..101.0).contains(&p99_us), "{p99_us}");
        assert!((4_990.0..5_010.0).contains(&max_us), "{max_us}");
    }
}
