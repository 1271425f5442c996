//! Tasks that lock and release as fast as they can, or at a given rate.
//!
//! All tasks of all processes start at one moment. What happens before the
//! warm-up is over is checked but not counted. In its first half every lock is held
//! for a millisecond at least: an empty body is over too soon for two that are
//! inside together to be seen. With a rate, each operation has
//! the moment when it should begin, and its latency counts from then on, whether
//! the task was free by then or not: nothing is omitted because the load itself
//! was held up. Waits that the end of the run cuts off are not counted.

use std::sync::Arc;
use std::time::Duration;

use anyhow::{Result, bail};
use rand::RngExt as _;
use serde::{Deserialize, Serialize};

use crate::checker::{self, Checker};
use crate::clock;
use crate::contender::{Contender, Locks, Peer};
use crate::fleet::{Fleet, Job, Launcher, Report};
use crate::measure::{Latency, Measured, Recorder, rounded};
use crate::server;

/// How long a body lasts in the first half of the warm-up.
const SEEN_WELL: Duration = Duration::from_millis(1);

/// What to do.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct Plan {
    /// What is locked.
    pub locks: Locks,
    /// How many tasks each process runs.
    pub tasks: usize,
    /// How many keys there are. At least as many as tasks in all: each task has
    /// keys of its own. Fewer: each operation takes a random one.
    pub keys: usize,
    /// How many processes.
    pub processes: usize,
    /// How long each lock is held.
    pub hold: Duration,
    /// How long the load runs before it is counted.
    pub warmup: Duration,
    /// How long it is counted.
    pub duration: Duration,
    /// How many operations a second are wanted, over all processes.
    pub rate: Option<f64>,
    /// The number of this process.
    pub process: usize,
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
    fn check(&self) -> Result<()> {
        if self.tasks == 0 || self.keys == 0 || self.processes == 0 {
            bail!("tasks, keys and processes must be 1 at least");
        }
        if self.duration.is_zero() {
            bail!("the duration is zero; write for example --duration 5s");
        }
        if self.rate.is_some_and(|rate| !rate.is_finite() || rate <= 0.0) {
            bail!("the rate must be above zero");
        }
        if server::is_embedded(&self.locks.url) {
            if self.processes > 1 {
                bail!("memory:// is inside one process; several need a server, such as redis://");
            }
            if self.locks.peer.is_some() {
                bail!("the peers lock in Redis; give --url redis://...");
            }
        }
        Ok(())
    }

    fn outcome(self, parts: Vec<Measured>, violations: u64) -> Outcome {
        let per_process = parts.iter().map(|part| part.operations).collect();
        let mut all = Measured::default();
        for part in parts {
            all.add(part);
        }
        let seconds = self.duration.as_secs_f64();
        Outcome {
            workload: "lock".into(),
            peer: self.locks.peer,
            backend: server::backend(&self.locks.url).into(),
            tasks: self.tasks,
            keys: self.keys,
            processes: self.processes,
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
pub async fn run(plan: Plan, launcher: &Launcher) -> Result<Outcome> {
    plan.check()?;
    if plan.processes == 1 {
        let part = Part::prepare(plan.clone()).await?;
        let checker = part.checker.clone();
        let report = part.run(clock::now()).await;
        return Ok(plan.outcome(vec![report.measured], checker.violations()));
    }
    let job = |process| Job::Lock(Plan { process, ..plan.clone() });
    let jobs = (0..plan.processes).map(job).collect();
    let reports = Fleet::start(launcher, jobs).await?.run().await?;
    let (mut parts, mut intervals) = (Vec::new(), Vec::new());
    for report in reports {
        parts.push(report.measured);
        intervals.extend(report.intervals);
    }
    Ok(plan.outcome(parts, checker::violations(intervals)))
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
    pub async fn prepare(plan: Plan) -> Result<Self> {
        let contender = Contender::new(&plan.locks, plan.keys, plan.tasks).await?;
        let checker = Arc::new(Checker::new(plan.keys, plan.processes > 1));
        Ok(Part { contender: Arc::new(contender), checker, plan })
    }

    /// Runs from `start` on.
    pub async fn run(self, start: u64) -> Report {
        let Part { plan, contender, checker } = self;
        let counted = start + clock::nanos(plan.warmup);
        let end = counted + clock::nanos(plan.duration);
        let recorder = Arc::new(Recorder::default());
        let tasks = (0..plan.tasks).map(|number| Task {
            number,
            keys: Keys::of(&plan, number),
            pace: Pace::of(&plan, number, start),
            hold: plan.hold,
            seen_well: start + clock::nanos(plan.warmup) / 2,
            counted,
            end,
            contender: contender.clone(),
            checker: checker.clone(),
            recorder: recorder.clone(),
        });
        let running: Vec<_> = tasks
            .map(|task| {
                tokio::spawn(async move {
                    clock::sleep_until(start).await;
                    let left = Duration::from_nanos(end.saturating_sub(clock::now()));
                    let _ = tokio::time::timeout(left, task.run()).await;
                })
            })
            .collect();
        for task in running {
            let _ = task.await;
        }
        contender.close().await;
        let (measured, intervals) = (recorder.measured(), checker.intervals());
        Report { measured, intervals, ..Report::default() }
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
        let all = plan.tasks * plan.processes;
        if plan.keys < all {
            return Keys::Random { count: plan.keys };
        }
        let first = plan.process * plan.tasks + task;
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

/// When the operations of a task should begin.
#[derive(Debug)]
struct Pace {
    next: u64,
    /// Nanoseconds between two; `None`: as fast as it goes.
    every: Option<u64>,
}

impl Pace {
    fn of(plan: &Plan, task: usize, start: u64) -> Self {
        let all = plan.tasks * plan.processes;
        let every = plan.rate.map(|rate| ((all as f64 / rate) * 1e9).max(1.0) as u64);
        // Spread out, so that the tasks do not all come at once.
        let place = (plan.process * plan.tasks + task) as u64;
        let next = start + every.map_or(0, |every| every / all as u64 * place);
        Pace { next, every }
    }

    /// Waits for the next operation's moment and tells it.
    async fn next(&mut self) -> u64 {
        let Some(every) = self.every else { return clock::now() };
        let due = self.next;
        self.next += every;
        clock::sleep_until(due).await;
        due
    }
}

struct Task {
    number: usize,
    keys: Keys,
    pace: Pace,
    hold: Duration,
    /// Until when bodies last long enough for the checker.
    seen_well: u64,
    counted: u64,
    end: u64,
    contender: Arc<Contender>,
    checker: Arc<Checker>,
    recorder: Arc<Recorder>,
}

impl Task {
    /// Locks and releases until the end, or until it is dropped in a wait.
    async fn run(mut self) {
        while clock::now() < self.end {
            // A lock that is always free never lets go of the thread by itself.
            tokio::task::consume_budget().await;
            let due = self.pace.next().await;
            if let Err(error) = self.cycle(due).await {
                self.recorder.error(self.number, &error);
                tokio::time::sleep(Duration::from_millis(10)).await; // no busy loop on a dead server
            }
        }
    }

    async fn cycle(&mut self, due: u64) -> Result<()> {
        let key = self.keys.next();
        let held = self.contender.acquire(key).await?;
        let stay = self.checker.enter(key, held.token());
        let given = stay.from();
        let hold = if given < self.seen_well { self.hold.max(SEEN_WELL) } else { self.hold };
        if !hold.is_zero() {
            tokio::time::sleep(hold).await;
        }
        drop(stay);
        self.contender.release(key, held).await?;
        if given >= self.counted {
            self.recorder.operation(self.number, given.saturating_sub(due));
        }
        Ok(())
    }
}
