//! `dlock bench`: load tests of a backend.

use std::time::Duration;

use anyhow::{Context as _, Result};
use clap::builder::TypedValueParser;
use clap::{Args, Subcommand, ValueEnum};
use dlock_bench::interrupt::Interrupt;
use dlock_bench::load::Load;
use dlock_bench::lock_client::{LockKind, LockOptions, Peer};
use dlock_bench::processes;
use dlock_bench::processes::Launcher;
use dlock_bench::seller::Method;
use dlock_bench::spread::Spread;
use dlock_bench::usage_error;
use dlock_bench::workload::{deduct, handoff, held, lock};
use serde::Serialize;

use crate::{Common, output};

/// The ttl of the locks when neither the command line nor the configuration sets one.
const DEFAULT_TTL: Duration = Duration::from_secs(30);

/// Load-test a backend
#[derive(Debug, Args)]
#[command(after_help = "\
Examples:
  dlock bench lock --url redis://localhost --tasks 500                one contended key
  dlock bench lock --url redis://localhost --tasks 500 --peer rslock  another crate, same load
  dlock bench lock --url redis://localhost --tasks 16 --processes 8
  dlock bench lock --url redis://localhost --tasks 1200 --permits 200 --hold 50ms --bystander
  dlock bench lock --url redis://localhost --tasks 200 --shared --hold 50ms --rate 2000
  dlock bench lock --url redis+cluster://h1,h2,h3 --tasks 50 --keys 50
  dlock bench lock --url redis+sentinel://h1,h2,h3/mymaster --tasks 50 --keys 50
  dlock bench lock --url postgres://localhost/shop --tasks 50 --peer insert
  dlock bench handoff --url redis://localhost
  dlock bench deduct --url redis://localhost --tasks 1000 --mode inventory
  dlock bench deduct --url redis://localhost --processes 4 --rate 5000
  dlock bench deduct --url redis+cluster://a,b,c --homes 6
  dlock bench deduct --url 'redis://a,b,c?homes=6' --mode inventory-idempotent
  dlock bench deduct --url postgres://localhost/shop --tasks 64 --peer row
  dlock bench held --url redis://localhost --locks 100000 --json")]
pub(crate) struct Bench {
    #[command(subcommand)]
    workload: Workload,
}

#[derive(Debug, Subcommand)]
enum Workload {
    /// Lock and release, as fast as possible or at a given rate
    Lock(LockArguments),
    /// Measure how long a released lock takes to reach another process
    Handoff(HandoffArguments),
    /// Deduct units from a stock, one at a time
    Deduct(DeductArguments),
    /// Measure what it costs to hold many locks
    Held(HeldArguments),
    /// Run as a worker process of a bench
    #[command(hide = true)]
    Worker,
}

/// Parses a number from 1 to `max`.
pub(crate) fn up_to(max: usize) -> impl TypedValueParser<Value = usize> {
    let number = clap::value_parser!(u64).range(1..=max as u64);
    number.map(|number| usize::try_from(number).unwrap_or(usize::MAX))
}

#[derive(Clone, Copy, Debug, ValueEnum)]
enum PeerName {
    /// The crate rslock, at one Redis
    Rslock,
    /// SET NX PX and a compare-and-delete script, written by hand, at one Redis
    Raw,
    /// In SQL: a row inserted under a unique key, tried again every 100 ms
    Insert,
    /// In SQL: one transaction for each lock, which locks a row
    Row,
}

impl From<PeerName> for Peer {
    fn from(name: PeerName) -> Self {
        match name {
            PeerName::Rslock => Peer::Rslock,
            PeerName::Raw => Peer::Raw,
            PeerName::Insert => Peer::Insert,
            PeerName::Row => Peer::Row,
        }
    }
}

/// The options of the load.
#[derive(Debug, Args)]
struct LoadArguments {
    /// The number of tasks in each process
    #[arg(long, default_value_t = 50, value_parser = up_to(1_000_000))]
    tasks: usize,
    /// The number of processes
    #[arg(long, default_value_t = 1, value_parser = up_to(256))]
    processes: usize,
    /// How long the load is measured
    #[arg(long, default_value = "5s", value_parser = humantime::parse_duration)]
    duration: Duration,
    /// How long the load runs before it is measured
    #[arg(long, default_value = "1s", value_parser = humantime::parse_duration)]
    warmup: Duration,
    /// Operations per second over all processes; latency then counts from the time when each was due [default: as fast as possible]
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
    /// The number of keys; with at least as many keys as tasks in all processes, each task has its own
    #[arg(long, default_value_t = 1, value_parser = up_to(10_000_000))]
    keys: usize,
    /// How long each lock is held
    #[arg(long, default_value = "0ms", value_parser = humantime::parse_duration)]
    hold: Duration,
    /// Lock semaphores with this many permits; each task takes one
    #[arg(long, value_parser = clap::value_parser!(u32).range(1..))]
    permits: Option<u32>,
    /// Lock for reading; in the first half of the warm-up some locks are for writing, as a check
    #[arg(long, conflicts_with = "permits")]
    shared: bool,
    /// Use fair locks: first come, first served over all processes
    #[arg(long)]
    fair: bool,
    /// Let another process hold a mutex with a ttl of 2s on another key and send PINGs meanwhile
    #[arg(long)]
    bystander: bool,
    /// The ttl of the locks [default: as configured, 30s]
    #[arg(long, value_parser = humantime::parse_duration)]
    ttl: Option<Duration>,
    /// Measure this instead of dlock, to compare
    #[arg(long)]
    peer: Option<PeerName>,
}

impl LockArguments {
    fn kind(&self) -> LockKind {
        match self.permits {
            Some(permits) => LockKind::Semaphore(permits),
            None if self.shared => LockKind::Shared,
            None => LockKind::Mutex,
        }
    }
}

#[derive(Debug, Args)]
struct HandoffArguments {
    /// The number of hand-overs to measure
    #[arg(long, default_value_t = 300, value_parser = up_to(10_000_000))]
    rounds: usize,
    /// The ttl of the lock [default: as configured, 30s]
    #[arg(long, value_parser = humantime::parse_duration)]
    ttl: Option<Duration>,
    /// Measure this instead of dlock, to compare
    #[arg(long)]
    peer: Option<PeerName>,
}

#[derive(Debug, Args)]
struct DeductArguments {
    #[command(flatten)]
    load: LoadArguments,
    /// The number of segments of the stock
    #[arg(long, default_value_t = 20, value_parser = clap::value_parser!(u32).range(1..=4_096))]
    segments: u32,
    /// The number of homes of an inventory [default: as in the URL; two for each of several servers, six in a cluster]
    #[arg(long, value_parser = clap::value_parser!(u32).range(1..=128))]
    homes: Option<u32>,
    /// How long each lock is held; only for the modes with a lock
    #[arg(long, default_value = "0ms", value_parser = humantime::parse_duration)]
    hold: Duration,
    /// How the stock is protected
    #[arg(long, default_value = "inventory")]
    mode: ModeName,
    /// Measure this instead of dlock, to compare
    #[arg(long, conflicts_with = "mode")]
    peer: Option<StockPeer>,
}

#[derive(Clone, Copy, Debug, ValueEnum)]
enum StockPeer {
    /// In SQL: `UPDATE ... WHERE units >= n` of one row, with a connection for each task, at most 64
    Row,
    /// In SQL: the same UPDATE, once for all requests in flight
    BatchedRow,
}

impl From<StockPeer> for Method {
    fn from(peer: StockPeer) -> Self {
        match peer {
            StockPeer::Row => Method::Row,
            StockPeer::BatchedRow => Method::BatchedRow,
        }
    }
}

#[derive(Clone, Copy, Debug, ValueEnum)]
enum ModeName {
    /// One lock around a count that the client reads and writes
    GlobalLock,
    /// The same count in segments, with a lock for each segment
    SegmentedLock,
    /// The inventory: the store keeps the count
    Inventory,
    /// The inventory, with an operation id for each deduction
    InventoryIdempotent,
    /// The inventory, from units that each process leases and sells from memory: a crash may return units that were promised
    Leased,
}

impl From<ModeName> for Method {
    fn from(name: ModeName) -> Self {
        match name {
            ModeName::GlobalLock => Method::GlobalLock,
            ModeName::SegmentedLock => Method::SegmentedLock,
            ModeName::Inventory => Method::Inventory,
            ModeName::InventoryIdempotent => Method::InventoryIdempotent,
            ModeName::Leased => Method::Leased,
        }
    }
}

#[derive(Debug, Args)]
struct HeldArguments {
    /// The number of locks
    #[arg(long, default_value_t = 1_000, value_parser = up_to(10_000_000))]
    locks: usize,
    /// The ttl of the locks [default: as configured, 30s]
    #[arg(long, value_parser = humantime::parse_duration)]
    ttl: Option<Duration>,
    /// How long the locks are held
    #[arg(long, default_value = "60s", value_parser = humantime::parse_duration)]
    duration: Duration,
}

impl Bench {
    pub(crate) async fn run(self, common: &Common) -> Result<()> {
        let config = common.load_config()?;
        if let Workload::Worker = self.workload {
            return processes::run_worker(&config).await;
        }
        let is_stock = matches!(self.workload, Workload::Deduct(_));
        if !is_stock && !common.spread(None)?.further.is_empty() {
            return Err(usage_error(
                "only `bench deduct` uses several servers; name one in the URL",
            ));
        }
        let (interrupt, launcher) = (Interrupt::listen()?, launcher(common)?);
        let key_prefix = format!("bench-{:016x}", rand::random::<u64>());
        match self.workload {
            Workload::Worker => Ok(()),
            Workload::Lock(arguments) => {
                let kind = arguments.kind();
                let LockArguments { load, keys, hold, fair, bystander, ttl, peer, .. } = arguments;
                let ttl = ttl.or(config.ttl).unwrap_or(DEFAULT_TTL);
                let peer = peer.map(Peer::from);
                let locks = LockOptions { peer, kind, fair, key_prefix, ttl };
                let plan = lock::Plan { locks, load: load.into(), keys, hold, bystander };
                print_outcome(common, &lock::run(&config, plan, &launcher, &interrupt).await?)
            }
            Workload::Handoff(HandoffArguments { rounds, ttl, peer }) => {
                let ttl = ttl.or(config.ttl).unwrap_or(DEFAULT_TTL);
                let (peer, kind, fair) = (peer.map(Peer::from), LockKind::Mutex, false);
                let locks = LockOptions { peer, kind, fair, key_prefix, ttl };
                let plan = handoff::Plan { locks, rounds };
                print_outcome(common, &handoff::run(&config, plan, &launcher, &interrupt).await?)
            }
            Workload::Deduct(DeductArguments { load, segments, homes, hold, mode, peer }) => {
                let (mode, load) = (peer.map_or_else(|| mode.into(), Method::from), load.into());
                let spread = common.spread(homes)?;
                let plan = deduct::Plan { mode, load, segments, spread, hold, key_prefix };
                print_outcome(common, &deduct::run(&config, plan, &launcher, &interrupt).await?)
            }
            Workload::Held(HeldArguments { locks, ttl, duration }) => {
                let ttl = ttl.or(config.ttl).unwrap_or(DEFAULT_TTL);
                let plan = held::Plan { locks, ttl, duration, key_prefix };
                print_outcome(common, &held::run(&config, plan, &interrupt).await?)
            }
        }
    }
}

/// Starts this program again as a worker process on the same backend.
pub(crate) fn launcher(common: &Common) -> Result<Launcher> {
    let program = std::env::current_exe().context("the path of this program cannot be found")?;
    let url = common.url.as_deref().map(Spread::parse).transpose()?.map(|(first, _)| first);
    let variables = [("DLOCK_URL", &url), ("DLOCK_NAMESPACE", &common.namespace)];
    let environment = variables
        .into_iter()
        .filter_map(|(name, value)| Some((name.into(), value.as_ref()?.into())))
        .collect();
    Ok(Launcher { program, arguments: vec!["bench".into(), "worker".into()], environment })
}

fn print_outcome(common: &Common, outcome: &impl Serialize) -> Result<()> {
    if common.json {
        return output::print_json(outcome);
    }
    for (name, value) in output::fields(outcome)? {
        let shown = match value.as_f64() {
            Some(micros) if name.ends_with("_us") => output::latency(micros),
            Some(share) if name.ends_with("_cpu") => format!("{:.1} % of a core", share * 100.0),
            _ if value.is_null() => "-".to_owned(),
            _ => value.as_str().map_or_else(|| value.to_string(), ToOwned::to_owned),
        };
        let name = output::styled(output::DIM, format!("{:>22}", name.trim_end_matches("_us")));
        output::print(format!("{name}  {shown}"));
    }
    Ok(())
}
