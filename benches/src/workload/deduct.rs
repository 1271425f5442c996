//! Tasks that deduct one unit at a time from a stock that never runs out.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use anyhow::Result;
use dlock::Config;
use futures_util::future::join_all;
use serde::{Deserialize, Serialize};

use crate::interrupt::Interrupt;
use crate::load::{Load, Operation, OperationContext};
use crate::measurement::{LatencySummary, Measurement, Recorder, rounded};
use crate::processes::{Job, Launcher, Report, SaleCounts, Workers};
use crate::seller::{Method, Seller, SellerConfig};
use crate::spread::Spread;
use crate::{clock, cpu, processes, server, usage_error};

/// The units in stock: more than a run can sell.
const STOCK: u64 = 4_000_000_000;

/// What the deduct workload does.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct Plan {
    /// The method to sell.
    pub mode: Method,
    /// The tasks, processes and duration.
    pub load: Load,
    /// The number of segments of the stock.
    pub segments: u32,
    /// The homes of the stock, and further servers.
    pub spread: Spread,
    /// How long a lock is held; not used by the methods without a lock.
    pub hold: Duration,
    /// The prefix of the keys of this run.
    pub key_prefix: String,
}

/// The result, as `--json` prints it.
#[derive(Clone, Debug, Serialize, Deserialize)]
#[allow(missing_docs, reason = "schema.json describes the fields")]
pub struct Outcome {
    pub workload: String,
    pub mode: Method,
    pub backend: String,
    pub tasks: usize,
    pub processes: usize,
    pub segments: u32,
    pub homes: u32,
    /// How often units were brought from one home to another.
    pub moves: u64,
    /// The share of one core that each server used in the measured time.
    pub server_cpu: Vec<Option<f64>>,
    pub seconds: f64,
    pub operations: u64,
    pub ops_per_s: f64,
    #[serde(flatten)]
    pub latency: LatencySummary,
    pub oversold: u64,
    /// The requests to the server for each unit.
    pub round_trips: f64,
    pub errors: u64,
    /// The operations of each process.
    pub per_process: Vec<u64>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub first_error: Option<String>,
}

impl Plan {
    fn seller_config(&self, config: &Config) -> SellerConfig {
        let locked = matches!(self.mode, Method::GlobalLock | Method::SegmentedLock);
        SellerConfig {
            backend: config.clone(),
            key_prefix: self.key_prefix.clone(),
            stock: STOCK,
            segments: self.segments,
            spread: self.spread.clone(),
            think: if locked { self.hold } else { Duration::ZERO },
            reserve_first: false,
            at_once: self.load.tasks,
        }
    }
}

/// Runs the load in this process, or in as many processes as the plan says. The stock
/// is removed at the end, also when a signal ends the run.
///
/// # Errors
/// Fails if the plan is not valid or the store cannot be reached, and with
/// [`Interrupted`](crate::interrupt::Interrupted) if a signal ends it.
pub async fn run(
    config: &Config,
    plan: Plan,
    launcher: &Launcher,
    interrupt: &Interrupt,
) -> Result<Outcome> {
    plan.load.check(config)?;
    let by_lock = matches!(plan.mode, Method::GlobalLock | Method::SegmentedLock);
    if by_lock && (server::is_cluster(config) || plan.spread.is_several()) {
        return Err(usage_error(
            "the stock of a lock is kept at one server; give --url redis://host:port, or --mode inventory, inventory-idempotent or leased, which use all of them",
        ));
    }
    if plan.segments == 0 {
        return Err(usage_error("segments must be at least 1"));
    }
    let seller = Arc::new(Seller::create(plan.seller_config(config), plan.mode).await?);
    let outcome = interrupt.run_until_signal(deduct(config, plan, launcher, &seller)).await;
    seller.close_after(outcome).await
}

async fn deduct(
    config: &Config,
    plan: Plan,
    launcher: &Launcher,
    seller: &Arc<Seller>,
) -> Result<Outcome> {
    let scripts_before = seller.script_calls().await?;
    let servers = plan.spread.servers(config).await?;
    let workers = match plan.load.processes {
        1 => None,
        processes => {
            let job = |process| {
                let load = Load { process, ..plan.load.clone() };
                Job::Deduct(Plan { load, ..plan.clone() })
            };
            Some(Workers::start(launcher, (0..processes).map(job).collect()).await?)
        }
    };
    let start = processes::start_soon();
    let (from, until) = plan.load.measured_time(start);
    let shares = servers.iter().map(|server| cpu::server_share(server, from, until));
    let running = async {
        match workers {
            Some(workers) => workers.run(start).await,
            None => {
                let run = ProcessRun { plan: plan.clone(), seller: seller.clone() };
                Ok(vec![run.run(start).await])
            }
        }
    };
    let (reports, server_cpu) = tokio::join!(running, join_all(shares));
    let reports = reports?;
    let sold: u64 = reports.iter().map(|report| report.sold.units).sum();
    let commands: u64 = reports.iter().map(|report| report.sold.commands).sum();
    let moves = reports.iter().map(|report| report.sold.moves).sum();
    let requests = seller.script_calls().await?.saturating_sub(scripts_before) + commands;
    let left = seller.total_left().await?;

    let per_process = reports.iter().map(|report| report.measured.operations).collect();
    let measured = Measurement::merge(reports.into_iter().map(|report| report.measured).collect());
    let seconds = plan.load.duration.as_secs_f64();
    Ok(Outcome {
        workload: "deduct".into(),
        mode: plan.mode,
        backend: server::backend(config).into(),
        tasks: plan.load.tasks,
        processes: plan.load.processes,
        segments: plan.segments,
        homes: plan.spread.homes,
        moves,
        server_cpu,
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

/// The share of one process, ready to start.
#[derive(Debug)]
pub struct ProcessRun {
    plan: Plan,
    seller: Arc<Seller>,
}

impl ProcessRun {
    /// Opens the stock that the parent process has created.
    ///
    /// # Errors
    /// Fails if the store cannot be reached.
    pub async fn prepare(config: &Config, plan: Plan) -> Result<Self> {
        let seller = Arc::new(Seller::open(plan.seller_config(config), plan.mode).await?);
        Ok(ProcessRun { plan, seller })
    }

    /// Runs the load from `start` on, by [`clock::now`].
    pub async fn run(&self, start: u64) -> Report {
        let ProcessRun { plan, seller } = self;
        let recorder = Arc::new(Recorder::default());
        let sold = Arc::new(AtomicU64::new(0));
        let operation = |task| DeductOne {
            task: plan.load.task_index(task),
            orders: 0,
            seller: seller.clone(),
            sold: sold.clone(),
        };
        plan.load.run(start, &recorder, operation).await;
        let (units, commands) = (sold.load(Ordering::Relaxed), seller.commands());
        let sold = SaleCounts { units, commands, moves: seller.moves() };
        Report { measured: recorder.measurement(), sold, ..Report::default() }
    }

    /// Releases what is still held and disconnects.
    pub async fn close(&self) {
        self.seller.disconnect().await;
    }
}

/// The operation: deduct one unit.
struct DeductOne {
    task: usize,
    orders: u64,
    seller: Arc<Seller>,
    sold: Arc<AtomicU64>,
}

impl Operation for DeductOne {
    async fn run_once(&mut self, context: &mut OperationContext) -> Result<()> {
        self.orders += 1;
        let order = format!("{}-{}", self.task, self.orders);
        if let Some(units) = self.seller.sell(&order, 1, context.end()).await? {
            context.answered(clock::now());
            self.sold.fetch_add(units, Ordering::Relaxed);
        }
        Ok(())
    }
}
