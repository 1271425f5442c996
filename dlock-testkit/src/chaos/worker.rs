//! A worker process of a run: its tasks acquire locks and print a line for each.
//!
//! `A key who` says that a lock was acquired that will be held for some time, `R ...` are
//! the records of one acquisition, `E kind` is an error that faults explain, `V ...` is
//! one that they do not. The process shuts down when it reads `stop` or the end of its
//! input; `panic N` makes its foreign code panic for so many milliseconds.

use std::io::{BufRead as _, Write as _};
use std::process::ExitCode;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use dlock::Dlock;
use rand::SeedableRng as _;
use rand::rngs::StdRng;

use super::load::{self, Load};
use super::{Options, foreign};

/// What the process prints, and whether it is asked to stop.
#[derive(Default)]
pub(super) struct Output {
    lines: Mutex<String>,
    stop: AtomicBool,
}

impl Output {
    pub(super) fn write_line(&self, line: std::fmt::Arguments<'_>) {
        use std::fmt::Write as _;
        let mut lines = self.lines.lock().unwrap_or_else(PoisonError::into_inner);
        let _ = writeln!(lines, "{line}");
    }

    fn flush(&self) -> std::io::Result<()> {
        let lines = std::mem::take(&mut *self.lines.lock().unwrap_or_else(PoisonError::into_inner));
        let mut out = std::io::stdout().lock();
        out.write_all(lines.as_bytes())?;
        out.flush()
    }

    pub(super) fn is_stopping(&self) -> bool {
        self.stop.load(Ordering::Relaxed)
    }
}

pub(super) async fn work(url: &str, number: usize, options: &Options) -> ExitCode {
    foreign::install();
    let output = Arc::new(Output::default());
    let client = Dlock::builder()
        .url(url)
        .namespace("chaos")
        .ttl(load::short_ttl(options.topology))
        .wait(Duration::from_secs(8))
        .call_timeout(Duration::from_secs(1))
        .client_name(format!("worker-{number}"))
        .on_event(foreign::hook);
    let client = match options.plant {
        Some(bug) => client.plant(bug),
        None => client,
    };
    let client = match client.connect_lazy() {
        Ok(client) => client,
        Err(error) => {
            eprintln!("{error}");
            return ExitCode::FAILURE;
        }
    };
    std::thread::spawn({
        let output = output.clone();
        move || {
            for line in std::io::stdin().lock().lines().map_while(Result::ok) {
                match line.strip_prefix("panic ") {
                    Some(millis) => {
                        let millis = millis.parse().unwrap_or(0);
                        foreign::panic_for(Duration::from_millis(millis));
                    }
                    None => break,
                }
            }
            output.stop.store(true, Ordering::Relaxed);
        }
    });
    std::thread::spawn({
        let output = output.clone();
        move || {
            // The coordinator is gone: there is nothing left to do.
            while output.flush().is_ok() {
                std::thread::sleep(Duration::from_millis(20));
            }
            std::process::exit(1);
        }
    });
    let loads = load::loads(options.topology).iter().copied();
    let loads = loads.chain(std::iter::repeat_n(Load::Quick, options.tasks.saturating_sub(1)));
    let tasks: Vec<_> = loads
        .enumerate()
        .map(|(number_of_task, load)| {
            let who = format!("{number}.{}.{number_of_task}", std::process::id());
            let seed = options.seed ^ u64::from(std::process::id()) << 20 ^ number_of_task as u64;
            let random = StdRng::seed_from_u64(seed);
            let (client, output) = (client.clone(), output.clone());
            let topology = options.topology;
            let task = load::Task { client, topology, output, random, number, who };
            tokio::spawn(task.run(load))
        })
        .collect();
    while !output.is_stopping() {
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
    // The tasks are still at work, as in a rolling restart.
    client.shutdown(Duration::from_millis(300)).await;
    for task in tasks {
        if let Err(error) = task.await {
            output.write_line(format_args!("V a task panicked: {error}"));
        }
    }
    client.shutdown(Duration::ZERO).await; // releases that are still to be sent
    drop(client);
    tokio::time::sleep(Duration::from_millis(150)).await;
    let _ = output.flush();
    ExitCode::SUCCESS
}
