//! Random faults on real processes with a real server, for any length of time.
//!
//! A coordinator starts a server with persistence, and worker processes, each with a
//! [proxy](crate::proxy) between it and the server; or a primary with replicas and
//! Sentinels, a cluster, or a quorum, each server behind a proxy; or a database; or three
//! members of ZooKeeper, etcd or Consul (`--topology`). The tasks of a worker lock a few keys
//! with all primitives; on one semaphore and one read-write lock there are many holders at a
//! time. Faults come one after another, and sometimes one of the server or
//! the network together with one of a worker. They are drawn from the seed; their timing
//! depends on the machine, so a seed gives the same faults but not the same history.
//! The workers print a record each time they held a lock, and a
//! [checker](crate::record_checker) checks all records. At the end all workers shut
//! down, and nothing may be left behind.
//!
//! A violation is:
//!
//! - two holders that exclude each other, or a token that does not rise. Only across a
//!   failover may guards overlap, at most until a second after the promotion, and the
//!   fence must reject the older one. The same goes for sessions that were ended from
//!   outside, and their holders must know it within that second. At Consul nothing may
//!   overlap then, since there is a lock-delay;
//! - a holder that is not told of a break before its delay is over, unless its process
//!   was paused;
//! - a key that nobody holds, a worker that gets no lock, or a worker that does not
//!   listen to notices, when a ttl and three seconds have passed since the end of a
//!   fault (two ttls and the lock-delay at Consul, which ends sessions that late). A half-open
//!   connection never ends: it counts from the moment at which it goes silent;
//! - an error of a kind that no fault explains, a worker that does not exit, anything
//!   left behind.
//!
//! `--slack MILLISECONDS` makes the time limits longer, for a machine that is busy with
//! other work. It is zero unless it is given, and the result tells it.

mod databases;
mod failover_faults;
mod faults;
mod foreign;
mod inject;
mod load;
mod quorum_faults;
mod recovery;
mod run;
mod servers;
mod sessions;
mod worker;
mod workers;

use std::process::ExitCode;
use std::time::Duration;

use dlock::machine::Bug;

/// The options of the command line.
#[derive(Clone, Debug)]
struct Options {
    topology: servers::Topology,
    length: Duration,
    processes: usize,
    tasks: usize,
    seed: u64,
    faults_per_minute: u64,
    faults: faults::Choice,
    /// Added to each time limit, for a machine that is busy with other work.
    slack: Duration,
    /// A bug that is planted in the clients and must be found.
    plant: Option<Bug>,
    /// The URL and the number of a worker, if this process is one.
    worker: Option<(String, usize)>,
}

const USAGE: &str = "usage: dlock-chaos --minutes N [--topology NAME]
                   [--processes 8] [--tasks 16] [--seed N] [--faults-per-minute 30]
                   [--faults NAME,NAME,...] [--slack MILLISECONDS] [--plant NAME]
       dlock-chaos --seconds N ...
       dlock-chaos --list-faults
The topologies are single, sentinel, cluster, redlock, postgres, mariadb, sqlite,
zookeeper, etcd and consul.";

/// Runs the command `dlock-chaos` with these arguments.
pub fn command(arguments: impl Iterator<Item = String>) -> ExitCode {
    let arguments: Vec<_> = arguments.collect();
    if arguments == ["--list-faults"] {
        faults::list();
        return ExitCode::SUCCESS;
    }
    let options = match Options::parse(arguments.into_iter()) {
        Ok(options) => options,
        Err(fault) => {
            eprintln!("{fault}\n{USAGE}");
            return ExitCode::from(2);
        }
    };
    let mut runtime = tokio::runtime::Builder::new_multi_thread();
    let runtime = match runtime.worker_threads(2).enable_all().build() {
        Ok(runtime) => runtime,
        Err(error) => {
            eprintln!("the runtime cannot be started: {error}");
            return ExitCode::FAILURE;
        }
    };
    match &options.worker {
        Some((url, number)) => runtime.block_on(worker::work(url, *number, &options)),
        None => runtime.block_on(run::run(&options)),
    }
}

impl Options {
    fn parse(mut arguments: impl Iterator<Item = String>) -> Result<Self, String> {
        let mut options = Options {
            topology: servers::Topology::Single,
            length: Duration::from_secs(60),
            processes: 8,
            tasks: 16,
            seed: rand::random::<u32>().into(),
            faults_per_minute: 30,
            faults: faults::Choice::all(servers::Topology::Single),
            slack: Duration::ZERO,
            plant: None,
            worker: None,
        };
        let (mut url, mut number, mut faults) = (None, 0, None);
        while let Some(name) = arguments.next() {
            let value =
                arguments.next().ok_or_else(|| format!("the option {name} needs a value"))?;
            let count = || value.parse::<u64>().map_err(|error| format!("{name} {value}: {error}"));
            let size = || count().map(|count| usize::try_from(count.clamp(1, 1_000)).unwrap_or(1));
            match name.as_str() {
                "--minutes" => options.length = Duration::from_secs(60 * count()?),
                "--seconds" => options.length = Duration::from_secs(count()?),
                "--processes" => options.processes = size()?,
                "--tasks" => options.tasks = size()?,
                "--seed" => options.seed = count()?,
                "--faults-per-minute" => options.faults_per_minute = count()?,
                "--topology" => options.topology = servers::Topology::parse(&value)?,
                "--faults" => faults = Some(value),
                "--slack" => options.slack = Duration::from_millis(count()?),
                "--plant" => {
                    let plant = Bug::ALL.into_iter().find(|plant| format!("{plant:?}") == value);
                    let names =
                        || format!("{value} is not a planted bug; use one of {:?}", Bug::ALL);
                    options.plant = Some(plant.ok_or_else(names)?);
                }
                "--url" => url = Some(value),
                "--number" => number = usize::try_from(count()?).unwrap_or(0),
                _ => return Err(format!("unknown option {name}")),
            }
        }
        options.faults = match faults {
            Some(names) => faults::Choice::parse(&names, options.topology)?,
            None => faults::Choice::all(options.topology),
        };
        options.worker = url.map(|url| (url, number));
        Ok(options)
    }
}
