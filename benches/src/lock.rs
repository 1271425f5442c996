//! Tasks that lock and release as fast as they can, or at a given rate.
//!
//! In the first half of the warm-up every lock is held for a millisecond at least:
//! an empty body is over too soon for two that are inside together to be seen. The
//! checker looks at the warm-up too.

use std::sync::Arc;
use std::time::Duration;

use anyhow::Result;
use dlock::Config;
use rand::RngExt as _;
use serde::{Deserialize, Serialize};

use crate::checker::{self, Checker};
use crate::contender::{Contender, Locks, Peer};
use crate::fleet::{Fleet, Job, Launcher, Report};
use crate::interrupt::Interrupt;
use crate::load::{Load, Turn, Work};
use crate::measure::{Latency, Measured, Recorder, rounded};
use crate::{Wrong, clock, fleet, server};

/// How long a body lasts in the first half of the warm-up.
const SEEN_WELL: Duration = Duration::from_millis(1);

/// What to do.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct Plan {
    /// What is locked.
    pub locks: Locks,
    /// By how many, and for how long.
    pub load: Load,
    /// How many keys there are. At least as many as tasks in all: each task has
    /// keys of its own. Fewer: each operation takes a random one.
    pub keys: usize,
    /// How long each lock is held.
    pub hold: Duration,
}

/// What `--json` prints.
#[derive(Clone, Debug, Serialize, Deserialize)]
#[allow(missing_docs, reason = "the fields are named like what they hold; see schema.json")]
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
    pub latency: Latency,
    pub violations: u64,
    pub errors: u64,
    /// Operations of each process.
    pub per_process: Vec<u64>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub first_error: Option<String>,
}

impl Plan {
    fn check(&self, config: &Config) -> Result<()> {
        self.load.check(config)?;
        self.locks.check()?;
        if self.keys == 0 {
            return Err(Wrong::because("the keys must be 1 at least"));
        }
        if server::is_embedded(config) && self.locks.peer.is_some() {
            return Err(Wrong::because("the peers lock in Redis; give --url redis://..."));
        }
        Ok(())
    }

    fn outcome(self, config: &Config, parts: Vec<Measured>, violations: u64) -> Outcome {
        let per_process = parts.iter().map(|part| part.operations).collect();
        let all = Measured::of(parts);
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

/// Runs the load, in this process if it is one, else in as many as wanted.
///
/// # Errors
/// If the plan makes no sense or the backend cannot be reached.
pub async fn run(
    config: &Config,
    plan: Plan,
    launcher: &Launcher,
    interrupt: &Interrupt,
) -> Result<Outcome> {
    plan.check(config)?;
    if plan.load.processes == 1 {
        let part = Part::prepare(config, plan.clone()).await?;
        let report = interrupt.unless(async { Ok(part.run(fleet::soon()).await) }).await;
        part.close().await;
        return Ok(plan.outcome(config, vec![report?.measured], part.checker.violations()));
    }
    server::reach(config).await?;
    let job = |process| {
        let load = Load { process, ..plan.load.clone() };
        Job::Lock(Plan { load, ..plan.clone() })
    };
    let jobs = (0..plan.load.processes).map(job).collect();
    let running = async { Fleet::start(launcher, jobs).await?.run().await };
    let reports = interrupt.unless(running).await?;
    let (mut parts, mut intervals) = (Vec::new(), Vec::new());
    for report in reports {
        parts.push(report.measured);
        intervals.extend(report.intervals);
    }
    Ok(plan.outcome(config, parts, checker::violations(intervals)))
}

/// One process's part, ready to start.
#[derive(Debug)]
pub struct Part {
    plan: Plan,
    contender: Arc<Contender>,
    checker: Arc<Checker>,
}

impl Part {
    /// Connects.
    ///
    /// # Errors
    /// If the backend cannot be reached.
    pub async fn prepare(config: &Config, plan: Plan) -> Result<Self> {
        let contender = Contender::new(config, &plan.locks, plan.keys, plan.load.tasks).await?;
        let checker = Arc::new(Checker::new(plan.keys, plan.load.processes > 1));
        Ok(Part { contender: Arc::new(contender), checker, plan })
    }

    /// Runs from `start` on.
    pub async fn run(&self, start: u64) -> Report {
        let Part { plan, contender, checker } = self;
        let recorder = Arc::new(Recorder::default());
        let cycle = |number| Cycle {
            keys: Keys::of(plan, number),
            hold: plan.hold,
            seen_well: start + clock::nanos(plan.load.warmup) / 2,
            contender: contender.clone(),
            checker: checker.clone(),
        };
        plan.load.run(start, &recorder, cycle).await;
        let (measured, intervals) = (recorder.measured(), checker.intervals());
        Report { measured, intervals, ..Report::default() }
    }

    /// Gives back what is still held.
    pub async fn close(&self) {
        self.contender.close().await;
    }
}

/// Which keys a task takes.
#[derive(Debug)]
enum Keys {
    Own { first: usize, step: usize, count: usize, turn: usize },
    Random { count: usize },
}

impl Keys {
    fn of(plan: &Plan, task: usize) -> Self {
        let all = plan.load.all_tasks();
        if plan.keys < all {
            return Keys::Random { count: plan.keys };
        }
        let first = plan.load.place(task);
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

/// Locks and releases.
struct Cycle {
    keys: Keys,
    hold: Duration,
    /// Until when bodies last long enough for the checker.
    seen_well: u64,
    contender: Arc<Contender>,
    checker: Arc<Checker>,
}

impl Work for Cycle {
    async fn once(&mut self, turn: &mut Turn) -> Result<()> {
        let key = self.keys.next();
        let Some(held) = turn.wait(self.contender.acquire(key)).await else { return Ok(()) };
        let held = held?;
        let stay = self.checker.enter(key, held.token());
        let given = stay.from();
        turn.answered(given);
        let hold = if given < self.seen_well { self.hold.max(SEEN_WELL) } else { self.hold };
        if !hold.is_zero() {
            let _ = turn.wait(tokio::time::sleep(hold)).await; // the end of the run ends it too
        }
        drop(stay);
        self.contender.release(key, held).await
    }
}
