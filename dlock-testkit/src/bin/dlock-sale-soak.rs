//! Runs the soak test of a sale, at any size:
//!
//! ```text
//! cargo run --release -p dlock-testkit --bin dlock-sale-soak
//! cargo run --release -p dlock-testkit --bin dlock-sale-soak -- --units 10000 --attempts 100000
//! ```
//!
//! Options, each with a number: `--units`, `--attempts`, `--segments`, `--servers`, `--homes`,
//! `--processes`, `--kills`, `--server-kills`, `--journal`, `--seed`. With
//! `--restock 1` units are delivered too. With `--settling 1` the workers use only the
//! operations that must not lose a unit when they are killed. With `--leased 1` half of the
//! units are sold from leases.
//!
//! With `--cluster 1` the servers are a Cluster of three primaries with a replica each, and
//! `--failovers` and `--lossy-failovers` say how often a primary is killed and its replica
//! takes over, with and without what was answered last.

use dlock_testkit::sale::{Mix, Soak, WorkerTask, soak, work};

#[tokio::main(worker_threads = 2)]
async fn main() {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let number = |text: &String| text.parse::<u64>().unwrap_or_else(|_| usage());
    if arguments.first().is_some_and(|first| first == "worker") {
        work(WorkerTask::from_arguments(&arguments[1..]).unwrap_or_else(|| usage())).await;
        return;
    }
    let mut wanted = Soak {
        units: 1_000_000,
        attempts: 10_000_000,
        segments: 64,
        servers: 1,
        cluster: false,
        homes: 1,
        processes: 4,
        kills: 40,
        server_kills: 0,
        failovers: 0,
        lossy_failovers: 0,
        journal: 8_000_000,
        mix: Mix::SellOut,
        seed: 1,
    };
    for pair in arguments.chunks(2) {
        let [name, value] = pair else { usage() };
        let value = number(value);
        match name.as_str() {
            "--units" => wanted.units = value,
            "--attempts" => wanted.attempts = value,
            "--segments" => wanted.segments = u32::try_from(value).unwrap_or_else(|_| usage()),
            "--servers" => wanted.servers = u32::try_from(value.max(1)).unwrap_or_else(|_| usage()),
            "--homes" => wanted.homes = u32::try_from(value.max(1)).unwrap_or_else(|_| usage()),
            "--processes" => wanted.processes = value.max(1),
            "--kills" => wanted.kills = value,
            "--server-kills" => wanted.server_kills = value,
            "--cluster" => wanted.cluster = value == 1,
            "--failovers" => wanted.failovers = value,
            "--lossy-failovers" => wanted.lossy_failovers = value,
            "--journal" => wanted.journal = value.max(1),
            "--restock" if value == 1 => wanted.mix = Mix::Sale,
            "--settling" if value == 1 => wanted.mix = Mix::Settling,
            "--leased" if value == 1 => wanted.mix = Mix::Leased,
            "--seed" => wanted.seed = value,
            _ => usage(),
        }
    }
    if !wanted.cluster && wanted.failovers + wanted.lossy_failovers > 0 {
        usage(); // only a primary of a Cluster has a replica
    }
    let program = std::env::current_exe().expect("this program");
    match soak(&program, wanted).await {
        Some(report) => println!("{wanted:?}\n{report:?}\nthe units add up, and all was checked"),
        None => std::process::exit(1),
    }
}

fn usage() -> ! {
    eprintln!(
        "usage: dlock-sale-soak [--OPTION NUMBER]..; the top of dlock-sale-soak.rs lists the options"
    );
    std::process::exit(2);
}
