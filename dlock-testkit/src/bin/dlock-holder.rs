//! Holds locks in a process of its own, for tests that stop or kill it.
//!
//! ```text
//! dlock-holder URL
//! ```
//!
//! It reads commands from its standard input, one per line:
//! - `lock KEY TTL_MS [TASKS]`: each task acquires the lock and keeps it;
//! - `fair KEY TTL_MS [TASKS]`: the same, each with its own place in the server's queue;
//! - `release KEY`: the tasks that hold or want the lock release it;
//! - `cycle TTL_MS TIMES KEY..`: acquires and releases all the keys, again and again;
//! - `serve KEY TTL_MS TASKS`: tasks that work under the lock, again and again;
//! - `read KEY TTL_MS TASKS`: the same as readers of a read-write lock;
//! - `permits KEY TTL_MS TASKS`: the same under one of two permits of a semaphore;
//! - `shutdown GRACE_MS`: shuts the client down and exits;
//! - `return`: returns from main at once, with what is held;
//! - `exit KEY TTL_MS`: acquires the lock with a client of its own, drops guard and client,
//!   and calls `std::process::exit`.
//!
//! It prints events as lines of JSON: `event` is `ready`, `granted`, `lost`, `released`,
//! `failed`, `done` or `shutdown`; `at` is the time of `dlock_testkit::process::now`.
//! Lines that start with `R` are records of `dlock_testkit::record_checker`.

use std::collections::HashMap;
use std::io::{BufRead as _, Write as _};
use std::process::ExitCode;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use dlock::{Dlock, Error, ErrorKind, Guard, Mutex as Lock};
use dlock_testkit::interval::{HeldGuard, HeldInterval};
use dlock_testkit::process::now;
use serde_json::{Value, json};
use tokio::sync::mpsc;

#[tokio::main(flavor = "multi_thread", worker_threads = 2)]
async fn main() -> ExitCode {
    let Some(url) = std::env::args().nth(1) else {
        eprintln!("usage: dlock-holder URL");
        return ExitCode::from(2);
    };
    let client = Dlock::builder().url(&url).namespace("test").wait_unlimited().connect_lazy();
    let client = match client {
        Ok(client) => client,
        Err(error) => {
            eprintln!("{error}");
            return ExitCode::FAILURE;
        }
    };
    let (lines, mut input) = mpsc::unbounded_channel();
    std::thread::spawn(move || {
        for line in std::io::stdin().lock().lines().map_while(Result::ok) {
            let _ = lines.send(line);
        }
    });
    emit("ready", json!({ "pid": std::process::id() }));
    let mut commands = Commands { url, client, releases: Releases::default() };
    while let Some(line) = input.recv().await {
        let command: Vec<&str> = line.split_whitespace().collect();
        if commands.execute(&command).await {
            return ExitCode::SUCCESS;
        }
    }
    ExitCode::SUCCESS
}

fn print_line(line: &str) {
    let mut out = std::io::stdout().lock();
    let _ = writeln!(out, "{line}").and_then(|()| out.flush());
}

fn emit(event: &str, mut more: Value) {
    more["event"] = event.into();
    more["at"] = now().into();
    print_line(&more.to_string());
}

fn emit_failure(key: &str, error: &Error) {
    let (kind, text) = (format!("{:?}", error.kind()), error.to_string());
    emit("failed", json!({ "key": key, "kind": kind, "text": text }));
}

/// The tasks that wait for the command `release`, by key.
type Releases = Arc<Mutex<HashMap<String, Vec<mpsc::UnboundedSender<()>>>>>;

struct Commands {
    url: String,
    client: Dlock,
    releases: Releases,
}

impl Commands {
    /// Executes a command; whether it was the last.
    async fn execute(&mut self, command: &[&str]) -> bool {
        let number = |at: usize| command.get(at).and_then(|word| word.parse::<u64>().ok());
        let millis = |at: usize| Duration::from_millis(number(at).unwrap_or(1_000));
        match command {
            ["lock", key, ..] => {
                let lock = self.client.mutex(*key).ttl(millis(2));
                self.spawn_holders(key, &lock, number(3).unwrap_or(1));
            }
            ["fair", key, ..] => {
                let lock = self.client.mutex(*key).ttl(millis(2)).fair();
                self.spawn_holders(key, &lock, number(3).unwrap_or(1));
            }
            ["release", key] => {
                let mut releases = self.releases.lock().unwrap_or_else(PoisonError::into_inner);
                releases.remove(*key).into_iter().flatten().for_each(|release| {
                    let _ = release.send(());
                });
            }
            ["cycle", _, _, keys @ ..] => {
                let keys: Vec<String> = keys.iter().map(|&key| key.to_owned()).collect();
                tokio::spawn(cycle(self.client.clone(), millis(1), number(2).unwrap_or(1), keys));
            }
            ["serve", key, ..] => {
                for _ in 0..number(3).unwrap_or(1) {
                    tokio::spawn(serve(self.client.mutex(*key).ttl(millis(2))));
                }
            }
            ["read", key, ..] => {
                for _ in 0..number(3).unwrap_or(1) {
                    tokio::spawn(serve(self.client.rwlock(*key).read().ttl(millis(2))));
                }
            }
            ["permits", key, ..] => {
                for _ in 0..number(3).unwrap_or(1) {
                    let permits = self.client.semaphore(*key, 2).permits(1);
                    tokio::spawn(serve_permits(permits.ttl(millis(2))));
                }
            }
            ["shutdown", ..] => {
                let left = self.client.shutdown(millis(1)).await;
                emit("shutdown", json!({ "left": left }));
                return true;
            }
            ["return"] => return true,
            ["exit", key, ..] => {
                let client = Dlock::builder().url(&self.url).namespace("test").connect_lazy();
                if let Ok(client) = client {
                    drop(client.mutex(*key).ttl(millis(2)).lock().await);
                    drop(client);
                }
                std::process::exit(0);
            }
            _ => emit("failed", json!({ "text": "unknown command" })),
        }
        false
    }

    fn spawn_holders(&self, key: &str, lock: &Lock, tasks: u64) {
        for _ in 0..tasks {
            let (release, released) = mpsc::unbounded_channel();
            let mut releases = self.releases.lock().unwrap_or_else(PoisonError::into_inner);
            releases.entry(key.to_owned()).or_default().push(release);
            tokio::spawn(hold(lock.clone(), key.to_owned(), released));
        }
    }
}

fn print_records(interval: Option<HeldInterval>, guard: &impl HeldGuard) {
    for record in interval.into_iter().flat_map(|interval| interval.end(guard, &pid())) {
        print_line(&record.to_string());
    }
}

fn pid() -> String {
    std::process::id().to_string()
}

/// Acquires a lock and keeps it until the command `release`.
async fn hold(lock: Lock, key: String, mut release: mpsc::UnboundedReceiver<()>) {
    let guard: Guard = match lock.lock().await {
        Ok(guard) => guard,
        Err(error) => return emit_failure(&key, &error),
    };
    let interval = HeldInterval::begin(&guard);
    let token = guard.token().get();
    emit("granted", json!({ "key": key, "token": token }));
    tokio::select! {
        reason = guard.lost() => {
            emit("lost", json!({ "key": key, "token": token, "reason": reason.to_string() }));
            print_records(interval, &guard);
            release.recv().await;
        }
        _ = release.recv() => print_records(interval, &guard),
    }
    match guard.release().await {
        Ok(outcome) => {
            let outcome = format!("{outcome:?}");
            emit("released", json!({ "key": key, "token": token, "outcome": outcome }));
        }
        Err(error) => emit_failure(&key, &error),
    }
}

async fn cycle(client: Dlock, ttl: Duration, times: u64, keys: Vec<String>) {
    for _ in 0..times {
        match client.all_of(keys.iter().map(String::as_str)).ttl(ttl).lock().await {
            Ok(guard) => {
                let interval = HeldInterval::begin(&guard);
                tokio::task::yield_now().await;
                print_records(interval, &guard);
            }
            Err(error) => emit_failure(&keys.join(" "), &error),
        }
    }
    emit("done", json!({ "times": times }));
}

/// Works under the lock until the client is shut down.
async fn serve(lock: Lock) {
    loop {
        match lock.lock().await {
            Ok(guard) => {
                let interval = HeldInterval::begin(&guard);
                let _ = guard.run(tokio::time::sleep(Duration::from_millis(30))).await;
                print_records(interval, &guard);
            }
            Err(error) if error.kind() == ErrorKind::ShuttingDown => return,
            Err(error) => emit_failure("serve", &error),
        }
    }
}

/// The same under one permit.
async fn serve_permits(permits: dlock::Lock<dlock::Permits>) {
    loop {
        match permits.lock().await {
            Ok(permits) => {
                let held = (permits, 2);
                let interval = HeldInterval::begin(&held);
                let _ = held.0.run(tokio::time::sleep(Duration::from_millis(30))).await;
                print_records(interval, &held);
            }
            Err(error) if error.kind() == ErrorKind::ShuttingDown => return,
            Err(error) => emit_failure("permits", &error),
        }
    }
}
