//! Runs seeds of the simulation.
//!
//! ```text
//! dlock-sim --seeds 1000000 [--from 0] [--plant NAME] [--jobs 2]
//! dlock-sim --seed 4711 [--plant NAME]      replay one, with its log
//! ```

use std::process::ExitCode;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Mutex, PoisonError};
use std::time::Instant;

use dlock::machine::{Bug, Coverage, Transition};
use dlock_testkit::sim;

const USAGE: &str = "\
usage: dlock-sim --seeds N [--from N] [--jobs N] [--plant NAME]
       dlock-sim --seed N [--plant NAME]     replay one seed with its log";

fn main() -> ExitCode {
    match Command::parse(std::env::args().skip(1)) {
        Ok(Command { seed: Some(seed), plant, .. }) => replay(seed, plant),
        Ok(command) => play(&command),
        Err(fault) => {
            eprintln!("{fault}\n{USAGE}");
            ExitCode::from(2)
        }
    }
}

struct Command {
    seed: Option<u64>,
    seeds: u64,
    from: u64,
    jobs: usize,
    plant: Option<Bug>,
}

impl Command {
    fn parse(mut args: impl Iterator<Item = String>) -> Result<Self, String> {
        let mut command = Command { seed: None, seeds: 2_000, from: 0, jobs: 2, plant: None };
        while let Some(name) = args.next() {
            let value = args.next().ok_or_else(|| format!("the option {name} needs a value"))?;
            let number =
                || value.parse::<u64>().map_err(|error| format!("{name} {value}: {error}"));
            match name.as_str() {
                "--seed" => command.seed = Some(number()?),
                "--seeds" => command.seeds = number()?,
                "--from" => command.from = number()?,
                "--jobs" => command.jobs = usize::try_from(number()?.clamp(1, 64)).unwrap_or(1),
                "--plant" => {
                    let plant = Bug::ALL.into_iter().find(|plant| format!("{plant:?}") == value);
                    let names =
                        || format!("{value} is not a planted bug; use one of {:?}", Bug::ALL);
                    command.plant = Some(plant.ok_or_else(names)?);
                }
                _ => return Err(format!("unknown option {name}")),
            }
        }
        Ok(command)
    }
}

fn replay(seed: u64, plant: Option<Bug>) -> ExitCode {
    let report = sim::run(seed, &sim::Options { plant, log: true });
    print!("{}", report.log);
    match report.violation {
        Some(violation) => {
            println!("seed {seed}: {violation}");
            ExitCode::FAILURE
        }
        None => {
            println!("seed {seed}: no violation, {} admissions", report.admissions);
            ExitCode::SUCCESS
        }
    }
}

fn play(command: &Command) -> ExitCode {
    let start = Instant::now();
    let next = AtomicU64::new(command.from);
    let end = command.from.saturating_add(command.seeds);
    let found = AtomicBool::new(false);
    let totals: [AtomicU64; 5] = Default::default();
    let coverage = Mutex::new(Coverage::default());
    std::thread::scope(|scope| {
        for _ in 0..command.jobs {
            scope.spawn(|| {
                while !found.load(Ordering::Relaxed) {
                    let seed = next.fetch_add(1, Ordering::Relaxed);
                    if seed >= end {
                        return;
                    }
                    let report = sim::run(seed, &sim::Options { plant: command.plant, log: false });
                    let counts = [
                        report.admissions,
                        report.handovers,
                        report.losses,
                        report.faults,
                        report.message_faults,
                    ];
                    for (total, count) in totals.iter().zip(counts) {
                        total.fetch_add(count, Ordering::Relaxed);
                    }
                    let mut covered = coverage.lock().unwrap_or_else(PoisonError::into_inner);
                    covered.add(&report.coverage);
                    drop(covered);
                    if let Some(violation) = report.violation {
                        found.store(true, Ordering::Relaxed);
                        println!("seed {seed}: {violation}");
                        println!("replay: {}", sim::replay_command(seed, command.plant));
                    }
                }
            });
        }
    });
    let played = next.load(Ordering::Relaxed).min(end) - command.from;
    let [admissions, handovers, losses, faults, messages] = totals.map(AtomicU64::into_inner);
    println!(
        "{played} seeds in {:.1?}: {admissions} admissions ({handovers} handed over), {losses} lost, \
         {faults} faults, {messages} messages dropped, late or doubled",
        start.elapsed()
    );
    let coverage = coverage.into_inner().unwrap_or_else(PoisonError::into_inner);
    for transition in Transition::ALL {
        println!("{:>12} {transition:?}", coverage.of(*transition));
    }
    if found.into_inner() { ExitCode::FAILURE } else { ExitCode::SUCCESS }
}
