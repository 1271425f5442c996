//! Tasks that lock and release as fast as they can, or at a given rate.
//!
//! In the first half of the warm-up every lock is held for at least a millisecond. An
//! empty critical section is over too soon for the checker to see two tasks inside.
//! The checker is on during the warm-up too.

use std::sync::Arc;
use std::time::Duration;

use anyhow::Result;
use dlock::Config;
use rand::RngExt as _;
use serde::{Deserialize, Serialize};

use crate::exclusion_checker::{self, ExclusionChecker};
use crate::interrupt::Interrupt;
use crate::load::{Load, Operation, OperationContext};
use crate::lock_client::{LockClient, LockOptions, Peer};
use crate::measurement::{LatencySummary, Measurement, Recorder, rounded};
use crate::processes::{Job, Launcher, Report, Workers};
use crate::{clock, processes, server, usage_error};

/// How long each lock is held, at least, in the first half of the warm-up.
const CHECKED_HOLD: Duration = Duration::from_millis(1);

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
    pub processes: usize,
    pub seconds: f64,
    pub operations: u64,
    pub ops_per_s: f64,
    #[serde(flatten)]
    pub latency: LatencySummary,
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
        self.locks.check()?;
        if self.keys == 0 {
            return Err(usage_error("keys must be at least 1"));
        }
        if server::is_embedded(config) && self.locks.peer.is_some() {
            return Err(usage_error("the peers need Redis; give --url redis://host:port"));
        }
        Ok(())
    }

    fn outcome(self, config: &Config, parts: Vec<Measurement>, violations: u64) -> Outcome {
        let per_process = parts.iter().map(|part| part.operations).collect();
        let all = Measurement::merge(parts);
        let seconds = self.load.duration.as_secs_f64();
        Outcome {
            workload: "lock".into(),
            peer: self.locks.peer,
            backend: server::backend(config).into(),
            tasks: self.load.tasks,
            keys: self.keys,
            processes: self.load.processes,
            seconds,
            operations: all.operations,
            ops_per_s: rounded(all.operations as f64 / seconds),
            latency: all.latency(),
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
    if plan.load.processes == 1 {
        let run = ProcessRun::prepare(config, plan.clone()).await?;
        let report =
            interrupt.run_until_signal(async { Ok(run.run(processes::start_soon()).await) }).await;
        run.close().await;
        return Ok(plan.outcome(config, vec![report?.measured], run.checker.violations()));
    }
    server::check_reachable(config).await?;
    let job = |process| {
        let load = Load { process, ..plan.load.clone() };
        Job::Lock(Plan { load, ..plan.clone() })
    };
    let jobs = (0..plan.load.processes).map(job).collect();
    let running = async { Workers::start(launcher, jobs).await?.run().await };
    let reports = interrupt.run_until_signal(running).await?;
    let (mut parts, mut intervals) = (Vec::new(), Vec::new());
    for report in reports {
        parts.push(report.measured);
        intervals.extend(report.intervals);
    }
    Ok(plan.outcome(config, parts, exclusion_checker::violations(intervals)))
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
        let cycle = |number| Cycle {
            keys: Keys::new(plan, number),
            hold: plan.hold,
            longer_until: start + clock::nanos(plan.load.warmup) / 2,
            client: client.clone(),
            checker: checker.clone(),
        };
        plan.load.run(start, &recorder, cycle).await;
        let (measured, intervals) = (recorder.measurement(), checker.intervals());
        Report { measured, intervals, ..Report::default() }
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

/// The operation: acquire and release a lock.
struct Cycle {
    keys: Keys,
    hold: Duration,
    /// Until when a lock is held for at least [`CHECKED_HOLD`].
    longer_until: u64,
    client: Arc<LockClient>,
    checker: Arc<ExclusionChecker>,
}

impl Operation for Cycle {
    async fn run_once(&mut self, context: &mut OperationContext) -> Result<()> {
        let key = self.keys.next();
        let Some(held) = context.wait(self.client.acquire(key)).await else { return Ok(()) };
        let held = held?;
        let section = self.checker.enter(key, held.token());
        let acquired = section.from();
        context.answered(acquired);
        let hold =
            if acquired < self.longer_until { self.hold.max(CHECKED_HOLD) } else { self.hold };
        if !hold.is_zero() {
            let _ = context.wait(tokio::time::sleep(hold)).await; // cut short by the end of the run
        }
        drop(section);
        self.client.release(key, held).await
    }
}
