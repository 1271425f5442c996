//! The load that the workloads share: tasks in one or several processes that do
//! something over and over, as fast as they can or at a given rate.
//!
//! All tasks of all processes start at one moment. What is answered before the
//! warm-up is over is not counted. With a rate, each operation has the moment when
//! it is due, and its latency counts from then on, whether the task was free by then
//! or not: nothing is omitted because the load itself was held up. What the end of
//! the run cuts off is no operation, but what it waited until then counts, and so do
//! the operations that were due and never began: a stall is seen even if it lasts.

use std::future::Future;
use std::sync::Arc;
use std::time::Duration;

use anyhow::Result;
use dlock::Config;
use serde::{Deserialize, Serialize};
use tokio::task::JoinSet;

use crate::measure::Recorder;
use crate::{Wrong, clock, server};

/// More than anything answers.
const MOST_RATE: f64 = 10_000_000.0;

/// How the work is spread over tasks, processes and time.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct Load {
    /// How many tasks each process runs.
    pub tasks: usize,
    /// How many processes.
    pub processes: usize,
    /// How long the load runs before it is counted.
    pub warmup: Duration,
    /// How long it is counted.
    pub duration: Duration,
    /// How many operations a second are wanted, over all processes.
    pub rate: Option<f64>,
    /// The number of this process.
    pub process: usize,
}

/// What a task does over and over.
pub(crate) trait Work: Send + 'static {
    /// Does it once. Whatever may take long is waited for by [`Turn::wait`].
    fn once(&mut self, turn: &mut Turn) -> impl Future<Output = Result<()>> + Send;
}

/// One operation of a task.
#[derive(Debug)]
pub(crate) struct Turn {
    /// When the run ends.
    end: u64,
    answered: Option<u64>,
}

impl Turn {
    /// What it was due for came at this moment.
    pub(crate) fn answered(&mut self, at: u64) {
        self.answered = Some(at);
    }

    /// When the run ends.
    pub(crate) fn end(&self) -> u64 {
        self.end
    }

    /// Waits until the end of the run; `None`: it was cut off.
    pub(crate) async fn wait<T>(&self, what: impl Future<Output = T>) -> Option<T> {
        clock::before(self.end, what).await
    }
}

impl Load {
    /// All tasks of all processes.
    pub(crate) fn all_tasks(&self) -> usize {
        self.tasks * self.processes
    }

    /// The number of a task of this process among all.
    pub(crate) fn place(&self, task: usize) -> usize {
        self.process * self.tasks + task
    }

    pub(crate) fn check(&self, config: &Config) -> Result<()> {
        if self.tasks == 0 || self.processes == 0 {
            return Err(Wrong::because("tasks and processes must be 1 at least"));
        }
        if self.duration.is_zero() {
            return Err(Wrong::because("the duration is zero; write for example --duration 5s"));
        }
        if self.rate.is_some_and(|rate| !(rate > 0.0 && rate <= MOST_RATE)) {
            return Err(Wrong::because(format!(
                "the rate must be above 0 and {MOST_RATE} at most"
            )));
        }
        if self.processes > 1 && server::is_embedded(config) {
            return Err(Wrong::because(
                "memory:// is inside one process; several need a server, such as redis://",
            ));
        }
        Ok(())
    }

    /// Runs the work in every task from `start` on, until the end.
    pub(crate) async fn run<W: Work>(
        &self,
        start: u64,
        recorder: &Arc<Recorder>,
        work: impl Fn(usize) -> W,
    ) {
        let counted = start.saturating_add(clock::nanos(self.warmup));
        let end = counted.saturating_add(clock::nanos(self.duration));
        let mut running = JoinSet::new();
        for number in 0..self.tasks {
            let pace = Pace::of(self, number, start);
            let task = Task { number, pace, counted, end, recorder: recorder.clone() };
            let work = work(number);
            running.spawn(async move {
                clock::sleep_until(start).await;
                task.run(work).await;
            });
        }
        while running.join_next().await.is_some() {}
    }
}

struct Task {
    number: usize,
    pace: Pace,
    counted: u64,
    end: u64,
    recorder: Arc<Recorder>,
}

impl Task {
    async fn run(mut self, mut work: impl Work) {
        while clock::now() < self.end {
            // What is always ready never lets go of the thread by itself.
            tokio::task::consume_budget().await;
            let Some(due) = self.pace.next(self.end).await else { return };
            let mut turn = Turn { end: self.end, answered: None };
            let done = work.once(&mut turn).await;
            if let Err(error) = done {
                self.recorder.error(self.number, &format!("{error:#}"));
                tokio::time::sleep(Duration::from_millis(10)).await; // no busy loop on a dead server
                continue;
            }
            let waited = turn.answered.unwrap_or(self.end).saturating_sub(due);
            match turn.answered {
                Some(at) if at < self.counted => {}
                Some(at) if at < self.end => self.recorder.operation(self.number, waited),
                _ => self.recorder.waited(self.number, waited),
            }
        }
        if let Some(every) = self.pace.every.filter(|_| self.pace.next < self.end) {
            self.recorder.waited_every(self.number, self.end - self.pace.next, every);
        }
    }
}

/// When the operations of a task should begin.
#[derive(Debug)]
struct Pace {
    next: u64,
    /// Nanoseconds between two; `None`: as fast as it goes.
    every: Option<u64>,
}

impl Pace {
    fn of(load: &Load, task: usize, start: u64) -> Self {
        let all = load.all_tasks();
        let every = load.rate.map(|rate| ((all as f64 / rate) * 1e9).max(1.0) as u64);
        // Spread out, so that the tasks do not all come at once.
        let next = start + every.map_or(0, |every| every / all as u64 * load.place(task) as u64);
        Pace { next, every }
    }

    /// Waits for the next operation's moment and tells it; `None` if none is due
    /// before the end.
    async fn next(&mut self, end: u64) -> Option<u64> {
        let Some(every) = self.every else { return Some(clock::now()) };
        if self.next >= end {
            clock::sleep_until(end).await;
            return None;
        }
        let due = self.next;
        self.next = self.next.saturating_add(every);
        clock::sleep_until(due).await;
        Some(due)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Answers at once, but once with this delay.
    struct Stalls(Option<Duration>);

    impl Work for Stalls {
        async fn once(&mut self, turn: &mut Turn) -> Result<()> {
            if let Some(stall) = self.0.take()
                && turn.wait(tokio::time::sleep(stall)).await.is_none()
            {
                return Ok(());
            }
            turn.answered(clock::now());
            Ok(())
        }
    }

    /// Tells when it began.
    struct Begins(Arc<std::sync::Mutex<Vec<u64>>>);

    impl Work for Begins {
        async fn once(&mut self, turn: &mut Turn) -> Result<()> {
            self.0.lock().unwrap().push(clock::now());
            let _ = turn.wait(std::future::pending::<()>()).await;
            Ok(())
        }
    }

    #[tokio::test]
    async fn all_begin_at_one_moment() {
        let (warmup, duration) = (Duration::ZERO, Duration::from_millis(100));
        let load = Load { tasks: 200, processes: 1, warmup, duration, rate: None, process: 0 };
        let (began, start) = (Arc::default(), clock::now() + 50_000_000);
        load.run(start, &Arc::default(), |_| Begins(Arc::clone(&began))).await;
        let began = began.lock().unwrap();
        assert_eq!(began.len(), 200);
        assert!(began.iter().all(|at| *at >= start), "{start} {began:?}");
    }

    /// One task for 400 ms, whose first operation takes `stall`.
    async fn with_stall(stall: Duration, rate: Option<f64>) -> crate::measure::Measured {
        let duration = Duration::from_millis(400);
        let (warmup, process) = (Duration::ZERO, 0);
        let load = Load { tasks: 1, processes: 1, warmup, duration, rate, process };
        let recorder = Arc::new(Recorder::default());
        load.run(clock::now(), &recorder, |_| Stalls(Some(stall))).await;
        recorder.measured()
    }

    #[tokio::test]
    async fn what_was_due_during_a_stall_waited_for_its_end() {
        // A tenth of a second of 0.4: a quarter of all operations was held up.
        let measured = with_stall(Duration::from_millis(100), Some(1_000.0)).await;
        let waited: u64 = measured.latencies.iter().map(|it| it.1).sum();
        assert_eq!(waited, 400, "every operation that was due");
        let held_up = measured.latencies.iter().filter(|it| it.0 > 50_000_000).map(|it| it.1);
        assert!(held_up.sum::<u64>() >= 50, "{measured:?}");
    }

    #[tokio::test]
    async fn what_never_ends_is_counted() {
        let measured = with_stall(Duration::from_secs(3_600), None).await;
        assert_eq!(measured.operations, 0);
        assert!(measured.latency().max_us > 390_000.0, "{measured:?}");
        let measured = with_stall(Duration::from_secs(3_600), Some(100.0)).await;
        assert_eq!(measured.operations, 0);
        assert_eq!(measured.latencies.iter().map(|it| it.1).sum::<u64>(), 40, "{measured:?}");
        assert!((190_000.0..210_000.0).contains(&measured.latency().p50_us), "{measured:?}");
    }
}
