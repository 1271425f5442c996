//! `dlock bench`: a load on a backend.

use std::time::Duration;

use anyhow::{Context as _, Result};
use clap::builder::TypedValueParser;
use clap::{Args, Subcommand, ValueEnum};
use dlock_bench::interrupt::Interrupt;
use dlock_bench::load::Load;
use dlock_bench::lock_client::{LockOptions, Peer};
use dlock_bench::processes;
use dlock_bench::processes::Launcher;
use dlock_bench::seller::Method;
use dlock_bench::workload::{deduct, handoff, held, lock};
use serde::Serialize;

use crate::{Common, output};

/// Put a load on a backend and measure it
#[derive(Debug, Args)]
#[command(after_help = "\
Examples:
  dlock bench lock --url redis://localhost --tasks 500                one hot key
  dlock bench lock --url redis://localhost --tasks 500 --peer rslock  another crate, same load
  dlock bench lock --url redis://localhost --tasks 16 --processes 8
  dlock bench handoff --url redis://localhost
  dlock bench deduct --url redis://localhost --tasks 1000 --mode inventory
  dlock bench deduct --url redis://localhost --processes 4 --rate 5000
  dlock bench held --url redis://localhost --locks 100000 --json")]
pub(crate) struct Bench {
    #[command(subcommand)]
    workload: Workload,
}

#[derive(Debug, Subcommand)]
enum Workload {
    /// Lock and release as fast as it goes, or at a rate
    Lock(LockArguments),
    /// How long a lock takes from one process to another
    Handoff(HandoffArguments),
    /// Take units from a stock, one at a time
    Deduct(DeductArguments),
    /// What it costs to hold many locks
    Held(HeldArguments),
    /// A process of a bench with several of them
    #[command(hide = true)]
    Worker,
}

/// From 1 up to so many.
pub(crate) fn up_to(most: usize) -> impl TypedValueParser<Value = usize> {
    let number = clap::value_parser!(u64).range(1..=most as u64);
    number.map(|number| usize::try_from(number).unwrap_or(usize::MAX))
}

#[derive(Clone, Copy, Debug, ValueEnum)]
enum PeerName {
    /// The crate rslock
    Rslock,
    /// SET NX PX and a compare-and-delete script, written by hand
    Raw,
}

impl From<PeerName> for Peer {
    fn from(name: PeerName) -> Self {
        match name {
            PeerName::Rslock => Peer::Rslock,
            PeerName::Raw => Peer::Raw,
        }
    }
}

/// By how many, and for how long.
#[derive(Debug, Args)]
struct LoadArguments {
    /// Tasks in each process
    #[arg(long, default_value_t = 50, value_parser = up_to(1_000_000))]
    tasks: usize,
    /// Processes
    #[arg(long, default_value_t = 1, value_parser = up_to(256))]
    processes: usize,
    /// How long the load is measured
    #[arg(long, default_value = "5s", value_parser = humantime::parse_duration)]
    duration: Duration,
    /// How long it runs before that
    #[arg(long, default_value = "1s", value_parser = humantime::parse_duration)]
    warmup: Duration,
    /// Operations wanted each second, over all processes; latency then counts from when each was due
    #[arg(long)]
    rate: Option<f64>,
}

impl From<LoadArguments> for Load {
    fn from(it: LoadArguments) -> Self {
        let LoadArguments { tasks, processes, duration, warmup, rate } = it;
        Load { tasks, processes, warmup, duration, rate, process: 0 }
    }
}

#[derive(Debug, Args)]
struct LockArguments {
    #[command(flatten)]
    load: LoadArguments,
    /// Keys; with as many keys as tasks in all, each task has its own
    #[arg(long, default_value_t = 1, value_parser = up_to(10_000_000))]
    keys: usize,
    /// How long each lock is held
    #[arg(long, default_value = "0ms", value_parser = humantime::parse_duration)]
    hold: Duration,
    /// Ttl of the locks [default: as configured, 30s]
    #[arg(long, value_parser = humantime::parse_duration)]
    ttl: Option<Duration>,
    /// Measure another way to lock instead of dlock
    #[arg(long)]
    peer: Option<PeerName>,
}

#[derive(Debug, Args)]
struct HandoffArguments {
    /// Hand-overs to measure
    #[arg(long, default_value_t = 300, value_parser = up_to(10_000_000))]
    rounds: usize,
    /// Ttl of the lock [default: as configured, 30s]
    #[arg(long, value_parser = humantime::parse_duration)]
    ttl: Option<Duration>,
    /// Measure another way to lock instead of dlock
    #[arg(long)]
    peer: Option<PeerName>,
}

#[derive(Debug, Args)]
struct DeductArguments {
    #[command(flatten)]
    load: LoadArguments,
    /// Segments of the stock
    #[arg(long, default_value_t = 20, value_parser = clap::value_parser!(u32).range(1..=4_096))]
    segments: u32,
    /// How long a locked body takes
    #[arg(long, default_value = "0ms", value_parser = humantime::parse_duration)]
    hold: Duration,
    /// How the stock is kept
    #[arg(long, default_value = "inventory")]
    mode: ModeName,
}

#[derive(Clone, Copy, Debug, ValueEnum)]
enum ModeName {
    /// One lock around a count of one's own
    GlobalLock,
    /// A lock for each segment of it
    SegmentedLock,
    /// The store keeps the count
    Inventory,
    /// The same, each under an operation id
    InventoryIdempotent,
}

impl From<ModeName> for Method {
    fn from(name: ModeName) -> Self {
        match name {
            ModeName::GlobalLock => Method::GlobalLock,
            ModeName::SegmentedLock => Method::SegmentedLock,
            ModeName::Inventory => Method::Inventory,
            ModeName::InventoryIdempotent => Method::InventoryIdempotent,
        }
    }
}

#[derive(Debug, Args)]
struct HeldArguments {
    /// How many locks are held
    #[arg(long, default_value_t = 1_000, value_parser = up_to(10_000_000))]
    locks: usize,
    /// Their ttl [default: as configured, 30s]
    #[arg(long, value_parser = humantime::parse_duration)]
    ttl: Option<Duration>,
    /// How long they are held
    #[arg(long, default_value = "60s", value_parser = humantime::parse_duration)]
    duration: Duration,
}

impl Bench {
    pub(crate) async fn run(self, common: &Common) -> Result<()> {
        let config = common.config_of_load()?;
        if let Workload::Worker = self.workload {
            return processes::run_worker(&config).await;
        }
        let (interrupt, launcher) = (Interrupt::listen()?, launcher(common)?);
        let key_prefix = format!("bench-{:016x}", rand::random::<u64>());
        match self.workload {
            Workload::Worker => Ok(()),
            Workload::Lock(LockArguments { load, keys, hold, ttl, peer }) => {
                let ttl = ttl.unwrap_or(config.ttl);
                let locks = LockOptions { key_prefix, peer: peer.map(Peer::from), ttl };
                let plan = lock::Plan { locks, load: load.into(), keys, hold };
                show(common, &lock::run(&config, plan, &launcher, &interrupt).await?)
            }
            Workload::Handoff(HandoffArguments { rounds, ttl, peer }) => {
                let ttl = ttl.unwrap_or(config.ttl);
                let locks = LockOptions { key_prefix, peer: peer.map(Peer::from), ttl };
                let plan = handoff::Plan { locks, rounds };
                show(common, &handoff::run(&config, plan, &launcher, &interrupt).await?)
            }
            Workload::Deduct(DeductArguments { load, segments, hold, mode }) => {
                let (mode, load) = (mode.into(), load.into());
                let plan = deduct::Plan { mode, load, segments, hold, key_prefix };
                show(common, &deduct::run(&config, plan, &launcher, &interrupt).await?)
            }
            Workload::Held(HeldArguments { locks, ttl, duration }) => {
                let ttl = ttl.unwrap_or(config.ttl);
                let plan = held::Plan { locks, ttl, duration, key_prefix };
                show(common, &held::run(&config, plan, &interrupt).await?)
            }
        }
    }
}

/// How this program is started again as a part of a bench, on the same backend.
pub(crate) fn launcher(common: &Common) -> Result<Launcher> {
    let program = std::env::current_exe().context("this program cannot be found again")?;
    let given = [("DLOCK_URL", &common.url), ("DLOCK_NAMESPACE", &common.namespace)];
    let environment = given
        .into_iter()
        .filter_map(|(name, value)| Some((name.into(), value.as_ref()?.into())))
        .collect();
    Ok(Launcher { program, arguments: vec!["bench".into(), "worker".into()], environment })
}

fn show(common: &Common, outcome: &impl Serialize) -> Result<()> {
    if common.json {
        return output::print_json(outcome);
    }
    for (name, value) in output::fields(outcome)? {
        let shown = match value.as_f64().filter(|_| name.ends_with("_us")) {
            Some(micros) => output::latency(micros),
            None => value.as_str().map_or_else(|| value.to_string(), ToOwned::to_owned),
        };
        let name = output::styled(output::DIM, format!("{:>22}", name.trim_end_matches("_us")));
        output::print(format!("{name}  {shown}"));
    }
    Ok(())
}
