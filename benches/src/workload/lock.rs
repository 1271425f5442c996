//! Tasks that lock and release as fast as they can, or at a given rate.
//!
//! In the first half of the warm-up every lock is held for at least a millisecond. An
//! empty critical section is over too soon for the checker to see two tasks inside.
//! The checker is on during the warm-up too. With read locks, some of the locks are
//! acquired for writing then: readers alone exclude nobody. One task of a process at a
//! time does so: many writers in the queue, each of which waits until all readers have
//! left, would still be waiting when the measurement begins.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use anyhow::{Result, anyhow};
use dlock::{Config, Dlock};
use rand::RngExt as _;
use serde::{Deserialize, Serialize};

use crate::exclusion_checker::{self, ExclusionChecker};
use crate::interrupt::Interrupt;
use crate::load::{Load, Operation, OperationContext};
use crate::lock_client::{LockClient, LockKind, LockOptions, Peer};
use crate::measurement::{LatencySummary, Measurement, Recorder, rounded};
use crate::processes::{Job, Launcher, Report, Workers};
use crate::workload::bystander;
use crate::{clock, cpu, processes, server, usage_error};

/// How long each lock is held, at least, in the first half of the warm-up.
const CHECKED_HOLD: Duration = Duration::from_millis(1);

/// How long a lock is tried for after a run in which nobody got one.
const TRIED: Duration = Duration::from_secs(2);

/// One of this many read locks is acquired for writing in the first half of the warm-up.
const CHECKED_WRITES: u32 = 16;

/// What the lock workload does.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct Plan {
    /// The options of the locks.
    pub locks: LockOptions,
    /// The tasks, processes and duration.
    pub load: Load,
    /// The number of keys. With at least as many keys as tasks in all processes, each
    /// task has its own keys. With fewer, each operation takes a random key.
    pub keys: usize,
    /// How long each lock is held.
    pub hold: Duration,
    /// Whether a bystander measures what the load does to others.
    pub bystander: bool,
}

/// The result, as `--json` prints it.
#[derive(Clone, Debug, Serialize, Deserialize)]
#[allow(missing_docs, reason = "schema.json describes the fields")]
pub struct Outcome {
    pub workload: String,
    pub peer: Option<Peer>,
    pub backend: String,
    pub tasks: usize,
    pub keys: usize,
    /// The permits of each semaphore; `None` if the locks are not semaphores.
    pub permits: Option<u32>,
    pub shared: bool,
    pub fair: bool,
    pub hold_ms: f64,
    pub processes: usize,
    pub seconds: f64,
    pub operations: u64,
    pub ops_per_s: f64,
    #[serde(flatten)]
    pub latency: LatencySummary,
    pub server_cpu: Option<f64>,
    pub client_cpu: f64,
    #[serde(flatten)]
    pub bystander: Option<bystander::Outcome>,
    pub violations: u64,
    pub errors: u64,
    /// The operations of each process.
    pub per_process: Vec<u64>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub first_error: Option<String>,
}

impl Plan {
    fn check(&self, config: &Config) -> Result<()> {
        self.load.check(config)?;
        self.locks.check(config)?;
        if self.keys == 0 {
            return Err(usage_error("keys must be at least 1"));
        }
        if server::is_embedded(config) && self.locks.peer.is_some() {
            return Err(usage_error(
                "the peers need a server; give --url redis://host:port, or that of a SQL database for `insert` and `row`",
            ));
        }
        if server::is_embedded(config) && self.bystander {
            return Err(usage_error(
                "a bystander needs a server that it shares with the load; give --url redis://host:port",
            ));
        }
        Ok(())
    }

    /// The jobs of the processes; the bystander's is the last one.
    fn jobs(&self) -> Vec<Job> {
        let share = |process| {
            let load = Load { process, ..self.load.clone() };
            Job::Lock(Plan { load, ..self.clone() })
        };
        let key_prefix = self.locks.key_prefix.clone();
        let bystander = bystander::Plan { key_prefix, load: self.load.clone() };
        let bystander = self.bystander.then_some(Job::Bystander(bystander));
        (0..self.load.processes).map(share).chain(bystander).collect()
    }

    fn outcome(self, config: &Config, run: RunReport, violations: u64) -> Outcome {
        let RunReport { reports, server_cpu, bystander } = run;
        let client_cpu = reports.iter().map(|report| report.cpu).sum();
        let parts: Vec<_> = reports.into_iter().map(|report| report.measured).collect();
        let per_process = parts.iter().map(|part| part.operations).collect();
        let all = Measurement::merge(parts);
        let seconds = self.load.duration.as_secs_f64();
        Outcome {
            workload: "lock".into(),
            peer: self.locks.peer,
            backend: server::backend(config).into(),
            tasks: self.load.tasks,
            keys: self.keys,
            permits: match self.locks.kind {
                LockKind::Semaphore(permits) => Some(permits),
                _ => None,
            },
            shared: self.locks.kind == LockKind::Shared,
            fair: self.locks.fair,
            hold_ms: self.hold.as_secs_f64() * 1_000.0,
            processes: self.load.processes,
            seconds,
            operations: all.operations,
            ops_per_s: rounded(all.operations as f64 / seconds),
            latency: all.latency(),
            server_cpu,
            client_cpu,
            bystander: bystander.as_ref().map(bystander::Outcome::new),
            violations,
            errors: all.errors,
            per_process,
            first_error: all.first_error,
        }
    }
}

/// Runs the load in this process, or in as many processes as the plan says.
///
/// # Errors
/// Fails if the plan is not valid or the backend cannot be reached.
pub async fn run(
    config: &Config,
    plan: Plan,
    launcher: &Launcher,
    interrupt: &Interrupt,
) -> Result<Outcome> {
    plan.check(config)?;
    let run = match plan.load.processes {
        1 => Some(ProcessRun::prepare(config, plan.clone()).await?),
        _ => None,
    };
    if run.is_none() {
        server::check_reachable(config).await?;
    }
    let mut jobs = plan.jobs();
    if run.is_some() {
        jobs.retain(|job| matches!(job, Job::Bystander(_)));
    }
    let running = run_all(config, &plan, run.as_ref(), launcher, jobs);
    let report = interrupt.run_until_signal(running).await;
    if let Some(run) = &run {
        run.close().await;
    }
    let mut report = report?;
    let violations = match &run {
        Some(run) => run.checker.violations(),
        None => {
            let intervals = report.reports.iter_mut().map(|it| std::mem::take(&mut it.intervals));
            exclusion_checker::violations(intervals.flatten().collect())
        }
    };
    let outcome = plan.clone().outcome(config, report, violations);
    if outcome.operations == 0 && outcome.errors == 0 {
        return Err(no_lock(config, &plan).await);
    }
    Ok(outcome)
}

/// Why nobody got a lock: the tasks wait without a limit, so they have no error to show.
async fn no_lock(config: &Config, plan: &Plan) -> anyhow::Error {
    let what = "no lock was acquired and released while it was measured";
    if plan.locks.peer.is_some() {
        return anyhow!("{what}; give a longer --duration, and look at the server");
    }
    let tried = async {
        let dlock = Dlock::builder().config(config.clone()).connect().await?;
        dlock.mutex(format!("{}:tried", plan.locks.key_prefix)).wait(TRIED).lock().await
    };
    match tried.await {
        Ok(_) => anyhow!("{what}, but one is free now; give a longer --duration"),
        Err(error) => anyhow::Error::new(error).context(what),
    }
}

/// What all processes reported.
struct RunReport {
    reports: Vec<Report>,
    server_cpu: Option<f64>,
    bystander: Option<Report>,
}

/// Starts the jobs and, if there is one, the run of this process, all at the same time.
async fn run_all(
    config: &Config,
    plan: &Plan,
    run: Option<&ProcessRun>,
    launcher: &Launcher,
    jobs: Vec<Job>,
) -> Result<RunReport> {
    let workers = Workers::start(launcher, jobs).await?;
    let start = processes::start_soon();
    let (measured, end) = plan.load.measured_time(start);
    let own = async {
        match run {
            Some(run) => Some(run.run(start).await),
            None => None,
        }
    };
    let server_cpu = cpu::server_share(config, measured, end);
    let (own, reports, server_cpu) = tokio::join!(own, workers.run(start), server_cpu);
    let mut reports = reports?;
    let bystander = if plan.bystander { reports.pop() } else { None };
    reports.extend(own);
    Ok(RunReport { reports, server_cpu, bystander })
}

/// The share of one process, ready to start.
#[derive(Debug)]
pub struct ProcessRun {
    plan: Plan,
    client: Arc<LockClient>,
    checker: Arc<ExclusionChecker>,
}

impl ProcessRun {
    /// Connects to the backend.
    ///
    /// # Errors
    /// Fails if the backend cannot be reached.
    pub async fn prepare(config: &Config, plan: Plan) -> Result<Self> {
        let client = LockClient::new(config, &plan.locks, plan.keys, plan.load.tasks).await?;
        let checker = Arc::new(ExclusionChecker::new(plan.keys, plan.load.processes > 1));
        Ok(ProcessRun { client: Arc::new(client), checker, plan })
    }

    /// Runs the load from `start` on, by [`clock::now`].
    pub async fn run(&self, start: u64) -> Report {
        let ProcessRun { plan, client, checker } = self;
        let recorder = Arc::new(Recorder::default());
        let writer = Arc::new(AtomicBool::new(false));
        let cycle = |number| Cycle {
            keys: Keys::new(plan, number),
            hold: plan.hold,
            checked_until: start + clock::nanos(plan.load.warmup) / 2,
            writer: writer.clone(),
            client: client.clone(),
            checker: checker.clone(),
        };
        let (measured, end) = plan.load.measured_time(start);
        let running = plan.load.run(start, &recorder, cycle);
        let ((), cpu) = tokio::join!(running, cpu::client_share(measured, end));
        let (measured, intervals) = (recorder.measurement(), checker.intervals());
        Report { measured, intervals, cpu, ..Report::default() }
    }

    /// Releases what is still held and disconnects.
    pub async fn close(&self) {
        self.client.close().await;
    }
}

/// The keys that a task takes.
#[derive(Debug)]
enum Keys {
    Own { first: usize, step: usize, count: usize, turn: usize },
    Random { count: usize },
}

impl Keys {
    fn new(plan: &Plan, task: usize) -> Self {
        let all = plan.load.total_tasks();
        if plan.keys < all {
            return Keys::Random { count: plan.keys };
        }
        let first = plan.load.task_index(task);
        Keys::Own { first, step: all, count: (plan.keys - first).div_ceil(all), turn: 0 }
    }

    fn next(&mut self) -> usize {
        match self {
            Keys::Own { first, step, count, turn } => {
                *turn = (*turn + 1) % *count;
                *first + *turn * *step
            }
            Keys::Random { count: 1 } => 0,
            Keys::Random { count } => rand::rng().random_range(0..*count),
        }
    }
}

/// While it exists, no other task of the process writes.
struct OnlyWriter<'a>(&'a AtomicBool);

impl<'a> OnlyWriter<'a> {
    fn new(writer: &'a AtomicBool) -> Option<Self> {
        (!writer.swap(true, Ordering::AcqRel)).then(|| OnlyWriter(writer))
    }
}

impl Drop for OnlyWriter<'_> {
    fn drop(&mut self) {
        self.0.store(false, Ordering::Release);
    }
}

/// The operation: acquire and release a lock.
struct Cycle {
    keys: Keys,
    hold: Duration,
    /// Until when a lock is held for at least [`CHECKED_HOLD`], and some read locks are
    /// acquired for writing.
    checked_until: u64,
    /// Whether a task of this process acquires a read-write lock for writing.
    writer: Arc<AtomicBool>,
    client: Arc<LockClient>,
    checker: Arc<ExclusionChecker>,
}

impl Operation for Cycle {
    async fn run_once(&mut self, context: &mut OperationContext) -> Result<()> {
        let key = self.keys.next();
        if self.checked_until > 0 && clock::now() >= self.checked_until {
            self.checked_until = 0;
        }
        let checks = self.checked_until > 0 && rand::rng().random_ratio(1, CHECKED_WRITES);
        let writer = if checks { OnlyWriter::new(&self.writer) } else { None };
        let acquiring = async {
            if writer.is_some() {
                return Box::pin(self.client.acquire_for_writing(key)).await;
            }
            self.client.acquire(key).await
        };
        let Some(held) = context.wait(acquiring).await else { return Ok(()) };
        let held = held?;
        let section = self.checker.enter(key, held.mode(), held.token());
        let acquired = section.from();
        context.answered(acquired);
        let hold =
            if acquired < self.checked_until { self.hold.max(CHECKED_HOLD) } else { self.hold };
        if !hold.is_zero() {
            let _ = context.wait(tokio::time::sleep(hold)).await; // cut short by the end of the run
        }
        drop(section);
        self.client.release(key, held).await
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn one_task_writes_at_a_time() {
        let writer = AtomicBool::new(false);
        let first = OnlyWriter::new(&writer);
        assert!(first.is_some());
        assert!(OnlyWriter::new(&writer).is_none());
        assert!(OnlyWriter::new(&writer).is_none(), "who came in vain ends nothing");
        drop(first);
        assert!(OnlyWriter::new(&writer).is_some());
    }
}
