//! Random faults on real processes with a real Redis, for as long as one likes.
//!
//! A coordinator starts a server with persistence and workers, each with a
//! [proxy](crate::proxy) between it and the server: processes whose tasks lock a few keys in all ways there are.
//! Two lanes of faults run side by side, one against server and network, one
//! against the workers; both are drawn from the seed (when they hit what is the
//! machine's business, so a seed gives the same faults, not the same history).
//! The workers tell each stay, and the [judge](crate::records::Judge) sweeps over
//! all of them. At the end all workers leave in order, and nothing may be left
//! behind.
//!
//! A violation is: two at once, a token that does not rise, a key that nobody gets
//! any more although many want it, an error of a kind that no fault explains, a
//! worker that does not end, anything left behind.

mod faults;
mod run;
mod worker;

use std::process::ExitCode;
use std::time::Duration;

use dlock::machine::Bug;

/// What the command line says.
#[derive(Clone, Debug)]
struct Options {
    length: Duration,
    processes: usize,
    tasks: usize,
    seed: u64,
    faults_per_minute: u64,
    /// A bug planted in the clients, which must be found.
    plant: Option<Bug>,
    /// A worker of a run: the URL and the number.
    worker: Option<(String, usize)>,
}

const USAGE: &str = "usage: dlock-chaos --minutes N [--processes 8] [--tasks 16] [--seed N]
                   [--faults-per-minute 30] [--plant NAME]
       dlock-chaos --seconds N ...";

/// The command `dlock-chaos`.
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
            eprintln!("no runtime: {error}");
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
            let value = arguments.next().ok_or_else(|| format!("{name} wants a value"))?;
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
                    let names = || format!("no such plant; there are {:?}", Bug::ALL);
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
