//! Tasks that take one unit at a time from a stock that does not end.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use anyhow::Result;
use dlock::Config;
use serde::{Deserialize, Serialize};

use crate::fleet::{Fleet, Job, Launcher, Report, Sold};
use crate::interrupt::Interrupt;
use crate::load::{Load, Turn, Work};
use crate::measure::{Latency, Measured, Recorder, rounded};
use crate::seller::{Method, Seller, Stall};
use crate::{Wrong, clock, fleet, server};

/// More than a bench can sell.
const STOCK: u64 = 4_000_000_000;

/// What to do.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct Plan {
    /// How the stock is kept.
    pub mode: Method,
    /// By how many it is taken, and for how long.
    pub load: Load,
    /// In how many segments the stock is.
    pub segments: u32,
    /// How long a locked body takes; without a lock nothing waits.
    pub hold: Duration,
    /// What the keys of this run start with.
    pub run: String,
}

/// What `--json` prints.
#[derive(Clone, Debug, Serialize, Deserialize)]
#[allow(missing_docs, reason = "the fields are named like what they hold; see schema.json")]
pub struct Outcome {
    pub workload: String,
    pub mode: Method,
    pub backend: String,
    pub tasks: usize,
    pub processes: usize,
    pub segments: u32,
    pub seconds: f64,
    pub operations: u64,
    pub ops_per_s: f64,
    #[serde(flatten)]
    pub latency: Latency,
    pub oversold: u64,
    /// Requests to the server for each unit.
    pub round_trips: f64,
    pub errors: u64,
    /// Operations of each process.
    pub per_process: Vec<u64>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub first_error: Option<String>,
}

impl Plan {
    fn stall(&self, config: &Config) -> Stall {
        let locked = matches!(self.mode, Method::GlobalLock | Method::SegmentedLock);
        Stall {
            config: config.clone(),
            run: self.run.clone(),
            stock: STOCK,
            segments: self.segments,
            think: if locked { self.hold } else { Duration::ZERO },
            reserves: false,
            at_once: self.load.tasks,
        }
    }
}

/// Runs the load, in this process if it is one, else in as many as wanted; what it
/// stores is removed, also when it is told to end.
///
/// # Errors
/// If the plan makes no sense or the store cannot be reached;
/// [`Interrupted`](crate::interrupt::Interrupted).
pub async fn run(
    config: &Config,
    plan: Plan,
    launcher: &Launcher,
    interrupt: &Interrupt,
) -> Result<Outcome> {
    plan.load.check(config)?;
    if plan.segments == 0 {
        return Err(Wrong::because("the segments must be 1 at least"));
    }
    let seller = Arc::new(Seller::open(plan.stall(config), plan.mode).await?);
    let taken = interrupt.unless(take(config, plan, launcher, &seller)).await;
    seller.after(taken).await
}

async fn take(
    config: &Config,
    plan: Plan,
    launcher: &Launcher,
    seller: &Arc<Seller>,
) -> Result<Outcome> {
    let scripts = seller.scripts().await?;
    let reports = if plan.load.processes == 1 {
        let part = Part { plan: plan.clone(), seller: seller.clone() };
        vec![part.run(fleet::soon()).await]
    } else {
        let job = |process| {
            let load = Load { process, ..plan.load.clone() };
            Job::Deduct(Plan { load, ..plan.clone() })
        };
        let jobs = (0..plan.load.processes).map(job).collect();
        Fleet::start(launcher, jobs).await?.run().await?
    };
    let sold: u64 = reports.iter().map(|report| report.sold.units).sum();
    let commands: u64 = reports.iter().map(|report| report.sold.commands).sum();
    let requests = seller.scripts().await?.saturating_sub(scripts) + commands;
    let left = seller.total_left().await?;

    let per_process = reports.iter().map(|report| report.measured.operations).collect();
    let measured = Measured::of(reports.into_iter().map(|report| report.measured).collect());
    let seconds = plan.load.duration.as_secs_f64();
    Ok(Outcome {
        workload: "deduct".into(),
        mode: plan.mode,
        backend: server::backend(config).into(),
        tasks: plan.load.tasks,
        processes: plan.load.processes,
        segments: plan.segments,
        seconds,
        operations: measured.operations,
        ops_per_s: rounded(measured.operations as f64 / seconds),
        latency: measured.latency(),
        oversold: (sold + left).saturating_sub(STOCK),
        round_trips: (requests as f64 / sold.max(1) as f64 * 10_000.0).round() / 10_000.0,
        errors: measured.errors,
        per_process,
        first_error: measured.first_error,
    })
}

/// One process's part, ready to start.
#[derive(Debug)]
pub struct Part {
    plan: Plan,
    seller: Arc<Seller>,
}

impl Part {
    /// Connects to a stock that was put up.
    ///
    /// # Errors
    /// If the store cannot be reached.
    pub async fn prepare(config: &Config, plan: Plan) -> Result<Self> {
        let seller = Arc::new(Seller::join(plan.stall(config), plan.mode).await?);
        Ok(Part { plan, seller })
    }

    /// Runs from `start` on.
    pub async fn run(&self, start: u64) -> Report {
        let Part { plan, seller } = self;
        let recorder = Arc::new(Recorder::default());
        let sold = Arc::new(AtomicU64::new(0));
        let taking = |task| Taking {
            who: plan.load.place(task),
            orders: 0,
            seller: seller.clone(),
            sold: sold.clone(),
        };
        plan.load.run(start, &recorder, taking).await;
        let sold = Sold { units: sold.load(Ordering::Relaxed), commands: seller.commands() };
        Report { measured: recorder.measured(), sold, ..Report::default() }
    }

    /// Gives back what is still held.
    pub async fn close(&self) {
        self.seller.leave().await;
    }
}

/// Takes one unit.
struct Taking {
    who: usize,
    orders: u64,
    seller: Arc<Seller>,
    sold: Arc<AtomicU64>,
}

impl Work for Taking {
    async fn once(&mut self, turn: &mut Turn) -> Result<()> {
        self.orders += 1;
        let order = format!("{}-{}", self.who, self.orders);
        if let Some(units) = self.seller.sell(&order, 1, turn.end()).await? {
            turn.answered(clock::now());
            self.sold.fetch_add(units, Ordering::Relaxed);
        }
        Ok(())
    }
}
