//! Random faults on real processes with a real Redis, for any length of time.
//!
//! A coordinator starts a server with persistence, and worker processes, each with a
//! [proxy](crate::proxy) between it and the server. The tasks of a worker lock a few
//! keys with all primitives. Two sequences of faults run at the same time, one against
//! server and network, one against the workers. Both are drawn from the seed; their
//! timing depends on the machine, so a seed gives the same faults but not the same
//! history. The workers print a record each time they held a lock, and a
//! [checker](crate::record_checker) checks all records. At the end all workers shut
//! down, and nothing may be left behind.
//!
//! A violation is: two holders that exclude each other, a token that does not rise, a
//! key that nobody gets although many want it, an error of a kind that no fault
//! explains, a worker that does not exit, anything left behind.

mod faults;
mod run;
mod worker;

use std::process::ExitCode;
use std::time::Duration;

use dlock::machine::Bug;

/// The options of the command line.
#[derive(Clone, Debug)]
struct Options {
    length: Duration,
    processes: usize,
    tasks: usize,
    seed: u64,
    faults_per_minute: u64,
    /// A bug that is planted in the clients and must be found.
    plant: Option<Bug>,
    /// The URL and the number of a worker, if this process is one.
    worker: Option<(String, usize)>,
}

const USAGE: &str = "usage: dlock-chaos --minutes N [--processes 8] [--tasks 16] [--seed N]
                   [--faults-per-minute 30] [--plant NAME]
       dlock-chaos --seconds N ...";

/// Runs the command `dlock-chaos` with these arguments.
pub fn command(arguments: impl Iterator<Item = String>) -> ExitCode {
    let options = match Options::parse(arguments) {
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
            length: Duration::from_secs(60),
            processes: 8,
            tasks: 16,
            seed: rand::random::<u32>().into(),
            faults_per_minute: 30,
            plant: None,
            worker: None,
        };
        let (mut url, mut number) = (None, 0);
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
                "--plant" => {
                    let plant = Bug::ALL.into_iter().find(|plant| format!("{plant:?}") == value);
                    let names =
                        || format!("{value} is not a planted bug; use one of {:?}", Bug::ALL);
                    options.plant = Some(plant.ok_or_else(names)?);
                }
                "--url" => url = Some(value),
                "--number" => number = size()?,
                _ => return Err(format!("unknown option {name}")),
            }
        }
        options.worker = url.map(|url| (url, number));
        Ok(options)
    }
}
