//! The load that the workloads share: tasks in one or several processes that repeat
//! an operation, as fast as they can or at a given rate.
//!
//! All tasks of all processes start at the same time. Operations that are answered
//! during the warm-up are not counted.
//!
//! With a rate, every operation has a due time, and its latency counts from then on,
//! even if the task was still busy. So a server that stalls cannot hide latency by
//! slowing the load down (no coordinated omission). Operations that were due in the warm-up
//! are not counted, whenever they are answered. An operation that is cut off by
//! the end of the run is not counted as an operation, but its waiting time is
//! recorded. The same is true for operations that were due and never began.

use std::future::{Future, poll_fn};
use std::pin::Pin;
use std::sync::Arc;
use std::task::Poll;
use std::time::Duration;

use anyhow::Result;
use dlock::Config;
use serde::{Deserialize, Serialize};
use tokio::task::JoinSet;
use tokio::time::Sleep;

use crate::measurement::Recorder;
use crate::{clock, server, usage_error};

/// The highest rate that can be asked for.
const MAX_RATE: f64 = 10_000_000.0;

/// How the work is spread over tasks, processes and time.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct Load {
    /// The number of tasks in each process.
    pub tasks: usize,
    /// The number of processes.
    pub processes: usize,
    /// How long the load runs before it is measured.
    pub warmup: Duration,
    /// How long the load is measured.
    pub duration: Duration,
    /// The wanted operations per second, over all processes; `None`: as fast as possible.
    pub rate: Option<f64>,
    /// The index of this process.
    pub process: usize,
}

/// What a task repeats.
pub(crate) trait Operation: Send + 'static {
    /// Runs the operation once. Futures that may take long are awaited through
    /// [`OperationContext::wait`].
    fn run_once(
        &mut self,
        context: &mut OperationContext,
    ) -> impl Future<Output = Result<()>> + Send;
}

/// What an operation knows about the run, and when it was answered.
#[derive(Debug)]
pub(crate) struct OperationContext {
    /// The end of the run, by [`clock::now`].
    end: u64,
    /// One timer for all waits of a task: to set one for each would be much of the load. It
    /// wakes the task once it was polled, so it is polled once.
    ended: Pin<Box<Sleep>>,
    is_set: bool,
    answered: Option<u64>,
}

impl OperationContext {
    /// Records the time when the operation was answered.
    pub(crate) fn answered(&mut self, at: u64) {
        self.answered = Some(at);
    }

    /// The end of the run, by [`clock::now`].
    pub(crate) fn end(&self) -> u64 {
        self.end
    }

    /// Waits for a future; `None` if the run ended first.
    pub(crate) async fn wait<T>(&mut self, future: impl Future<Output = T>) -> Option<T> {
        let mut future = std::pin::pin!(future);
        let OperationContext { ended, is_set, .. } = self;
        poll_fn(|cx| {
            if let Poll::Ready(output) = future.as_mut().poll(cx) {
                return Poll::Ready(Some(output));
            }
            if !std::mem::replace(is_set, true) {
                return ended.as_mut().poll(cx).map(|()| None);
            }
            if ended.is_elapsed() { Poll::Ready(None) } else { Poll::Pending }
        })
        .await
    }
}

impl Load {
    /// The number of tasks in all processes.
    pub(crate) fn total_tasks(&self) -> usize {
        self.tasks * self.processes
    }

    /// The index of a task of this process among the tasks of all processes.
    pub(crate) fn task_index(&self, task: usize) -> usize {
        self.process * self.tasks + task
    }

    /// The beginning and the end of the measured time of a run that starts at `start`.
    pub(crate) fn measured_time(&self, start: u64) -> (u64, u64) {
        let begins = start.saturating_add(clock::nanos(self.warmup));
        (begins, begins.saturating_add(clock::nanos(self.duration)))
    }

    pub(crate) fn check(&self, config: &Config) -> Result<()> {
        if self.tasks == 0 || self.processes == 0 {
            return Err(usage_error("tasks and processes must be at least 1"));
        }
        if self.duration.is_zero() {
            return Err(usage_error("the duration is zero; give for example --duration 5s"));
        }
        if self.rate.is_some_and(|rate| !(rate > 0.0 && rate <= MAX_RATE)) {
            return Err(usage_error(format!("the rate must be above 0 and at most {MAX_RATE}")));
        }
        if self.processes > 1 && server::is_embedded(config) {
            return Err(usage_error(
                "memory:// exists only inside one process; several processes need a server, such as redis://",
            ));
        }
        Ok(())
    }

    /// Runs the operation in every task, from `start` until the end of the run.
    pub(crate) async fn run<O: Operation>(
        &self,
        start: u64,
        recorder: &Arc<Recorder>,
        operation: impl Fn(usize) -> O,
    ) {
        let (counted, end) = self.measured_time(start);
        let mut running = JoinSet::new();
        for number in 0..self.tasks {
            let schedule = Schedule::new(self, number, start, counted);
            let task = Task { number, schedule, counted, end, recorder: recorder.clone() };
            let operation = operation(number);
            running.spawn(async move {
                clock::sleep_until(start).await;
                task.run(operation).await;
            });
        }
        while running.join_next().await.is_some() {}
    }
}

struct Task {
    number: usize,
    schedule: Schedule,
    counted: u64,
    end: u64,
    recorder: Arc<Recorder>,
}

impl Task {
    async fn run(mut self, mut operation: impl Operation) {
        let left = Duration::from_nanos(self.end.saturating_sub(clock::now()));
        let ended = Box::pin(tokio::time::sleep(left));
        let mut context = OperationContext { end: self.end, ended, is_set: false, answered: None };
        loop {
            let now = clock::now();
            if now >= self.end {
                break;
            }
            // An operation that is always ready would never yield to other tasks.
            tokio::task::consume_budget().await;
            let Some(due) = self.schedule.next(now, self.end).await else { return };
            context.answered = None;
            let done = operation.run_once(&mut context).await;
            if let Err(error) = done {
                self.recorder.error(self.number, &format!("{error:#}"));
                if clock::now() >= self.end {
                    // It failed after the end, so the end had cut it off before.
                    self.recorder.incomplete(self.number, self.end.saturating_sub(due));
                }
                tokio::time::sleep(Duration::from_millis(10)).await; // no busy loop on a dead server
                continue;
            }
            if self.schedule.is_of_warmup(due) {
                continue;
            }
            let waited = context.answered.unwrap_or(self.end).saturating_sub(due);
            match context.answered {
                Some(at) if at < self.counted => {}
                Some(at) if at < self.end => self.recorder.operation(self.number, waited),
                _ => self.recorder.incomplete(self.number, waited),
            }
        }
        self.schedule.skip_warmup(self.end);
        if let Some(every) = self.schedule.every.filter(|_| self.schedule.next < self.end) {
            self.recorder.never_began(self.number, self.end - self.schedule.next, every);
        }
    }
}

/// The due times of a task's operations.
#[derive(Debug)]
struct Schedule {
    next: u64,
    /// The nanoseconds between two operations; `None`: as fast as possible.
    every: Option<u64>,
    /// The beginning of the measured time.
    counted: u64,
}

impl Schedule {
    fn new(load: &Load, task: usize, start: u64, counted: u64) -> Self {
        let all = load.total_tasks();
        let every = load.rate.map(|rate| ((all as f64 / rate) * 1e9).max(1.0) as u64);
        // Spread out, so that the tasks do not all start at once.
        let next =
            start + every.map_or(0, |every| every / all as u64 * load.task_index(task) as u64);
        Schedule { next, every, counted }
    }

    /// Waits until the next operation is due and returns that time; `None` if no
    /// operation is due before the end.
    async fn next(&mut self, now: u64, end: u64) -> Option<u64> {
        let Some(every) = self.every else { return Some(now) };
        if self.next >= end {
            clock::sleep_until(end).await;
            return None;
        }
        self.skip_warmup(now);
        let due = self.next;
        self.next = self.next.saturating_add(every);
        clock::sleep_until(due).await;
        Some(due)
    }

    /// What the warm-up could not do is not done in the measured time.
    fn skip_warmup(&mut self, now: u64) {
        let Some(every) = self.every else { return };
        if self.next < self.counted && now >= self.counted {
            self.next += (self.counted - self.next).div_ceil(every) * every;
        }
    }

    fn is_of_warmup(&self, due: u64) -> bool {
        self.every.is_some() && due < self.counted
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::measurement::Measurement;

    /// Answers at once, except for the first time.
    struct Stalls(Option<Duration>);

    impl Operation for Stalls {
        async fn run_once(&mut self, context: &mut OperationContext) -> Result<()> {
            if let Some(stall) = self.0.take()
                && context.wait(tokio::time::sleep(stall)).await.is_none()
            {
                return Ok(());
            }
            context.answered(clock::now());
            Ok(())
        }
    }

    /// Records when it began.
    struct Begins(Arc<std::sync::Mutex<Vec<u64>>>);

    impl Operation for Begins {
        async fn run_once(&mut self, context: &mut OperationContext) -> Result<()> {
            self.0.lock().unwrap().push(clock::now());
            let _ = context.wait(std::future::pending::<()>()).await;
            Ok(())
        }
    }

    #[tokio::test]
    async fn all_tasks_begin_at_the_same_time() {
        let (warmup, duration) = (Duration::ZERO, Duration::from_millis(100));
        let load = Load { tasks: 200, processes: 1, warmup, duration, rate: None, process: 0 };
        let (began, start) = (Arc::default(), clock::now() + 50_000_000);
        load.run(start, &Arc::default(), |_| Begins(Arc::clone(&began))).await;
        let began = began.lock().unwrap();
        assert_eq!(began.len(), 200);
        assert!(began.iter().all(|at| *at >= start), "{start} {began:?}");
    }

    /// One task for 400 ms, whose first operation takes `stall`.
    async fn with_stall(stall: Duration, rate: Option<f64>) -> Measurement {
        stall_of(Duration::ZERO, stall, rate).await
    }

    async fn stall_of(warmup: Duration, stall: Duration, rate: Option<f64>) -> Measurement {
        let duration = Duration::from_millis(400);
        let load = Load { tasks: 1, processes: 1, warmup, duration, rate, process: 0 };
        let recorder = Arc::new(Recorder::default());
        load.run(clock::now(), &recorder, |_| Stalls(Some(stall))).await;
        recorder.measurement()
    }

    #[tokio::test]
    async fn operations_due_during_a_stall_count_from_their_due_time() {
        // 0.1 s of 0.4 s: a quarter of all operations was delayed.
        let measured = with_stall(Duration::from_millis(100), Some(1_000.0)).await;
        let waited: u64 = measured.latencies.iter().map(|it| it.1).sum();
        assert_eq!(waited, 400, "every operation that was due");
        let delayed = measured.latencies.iter().filter(|it| it.0 > 50_000_000).map(|it| it.1);
        assert!(delayed.sum::<u64>() >= 50, "{measured:?}");
    }

    #[tokio::test]
    async fn a_stall_of_the_warm_up_is_not_counted() {
        let (warmup, stall) = (Duration::from_millis(100), Duration::from_millis(120));
        let measured = stall_of(warmup, stall, Some(1_000.0)).await;
        let waited: u64 = measured.latencies.iter().map(|it| it.1).sum();
        assert_eq!(waited, 400, "every operation that was due in the measured time");
        assert!(measured.latency().max_us < 90_000.0, "{measured:?}");
    }

    #[tokio::test]
    async fn operations_that_never_end_are_recorded() {
        let measured = with_stall(Duration::from_secs(3_600), None).await;
        assert_eq!(measured.operations, 0);
        assert!(measured.latency().max_us > 390_000.0, "{measured:?}");
        let measured = with_stall(Duration::from_secs(3_600), Some(100.0)).await;
        assert_eq!(measured.operations, 0);
        assert_eq!(measured.latencies.iter().map(|it| it.1).sum::<u64>(), 40, "{measured:?}");
        assert!((190_000.0..210_000.0).contains(&measured.latency().p50_us), "{measured:?}");
    }
}
