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
//! operations that must not lose a unit when they are killed.

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
        homes: 1,
        processes: 4,
        kills: 40,
        server_kills: 0,
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
            "--journal" => wanted.journal = value.max(1),
            "--restock" if value == 1 => wanted.mix = Mix::Sale,
            "--settling" if value == 1 => wanted.mix = Mix::Settling,
            "--seed" => wanted.seed = value,
            _ => usage(),
        }
    }
    let program = std::env::current_exe().expect("this program");
    match soak(&program, wanted).await {
        Some(report) => {
            println!("{wanted:?}\n{report:?}\nsold exactly {}, audit clean", report.sold)
        }
        None => std::process::exit(1),
    }
}

fn usage() -> ! {
    eprintln!(
        "usage: dlock-sale-soak [--OPTION NUMBER]..; the top of dlock-sale-soak.rs lists the options"
    );
    std::process::exit(2);
}
