//! Holds locks in a process of its own, for tests that stop or kill it.
//!
//! ```text
//! dlock-holder URL
//! ```
//!
//! It does what its input says, one line each:
//! - `lock KEY TTL_MS [TASKS]`: each task takes the lock and keeps it;
//! - `fair KEY TTL_MS [TASKS]`: the same, each with a place in the server's queue;
//! - `release KEY`: a task that has it lets go;
//! - `cycle TTL_MS TIMES KEY..`: takes all the keys and lets go, over and over;
//! - `serve KEY TTL_MS TASKS`: tasks that work under the lock, over and over;
//! - `shutdown GRACE_MS`: shuts the client down and ends.
//!
//! What happens is told in lines of JSON: `event` is `ready`, `granted`, `lost`,
//! `released`, `failed`, `done` or `shutdown`; `at` is the clock of
//! `dlock_testkit::process::now`. Lines with `R` are records of stays.

use std::collections::HashMap;
use std::io::{BufRead as _, Write as _};
use std::process::ExitCode;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use dlock::{Dlock, Error, ErrorKind, Guard, Mutex as Lock};
use dlock_testkit::holds::{Stay, Tells};
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
    let (lines, mut told) = mpsc::unbounded_channel();
    std::thread::spawn(move || {
        for line in std::io::stdin().lock().lines().map_while(Result::ok) {
            let _ = lines.send(line);
        }
    });
    tell("ready", json!({ "pid": std::process::id() }));
    let mut troupe = Troupe { client, releases: Releases::default() };
    while let Some(line) = told.recv().await {
        let words: Vec<&str> = line.split_whitespace().collect();
        if troupe.obey(&words).await {
            return ExitCode::SUCCESS;
        }
    }
    ExitCode::SUCCESS
}

fn say(line: &str) {
    let mut out = std::io::stdout().lock();
    let _ = writeln!(out, "{line}").and_then(|()| out.flush());
}

fn tell(event: &str, mut more: Value) {
    more["event"] = event.into();
    more["at"] = now().into();
    say(&more.to_string());
}

fn tell_failed(key: &str, error: &Error) {
    let (kind, text) = (format!("{:?}", error.kind()), error.to_string());
    tell("failed", json!({ "key": key, "kind": kind, "text": text }));
}

/// Those who wait to be told to let go, by key.
type Releases = Arc<Mutex<HashMap<String, Vec<mpsc::UnboundedSender<()>>>>>;

struct Troupe {
    client: Dlock,
    releases: Releases,
}

impl Troupe {
    /// Does what a line says; whether that was the last.
    async fn obey(&mut self, words: &[&str]) -> bool {
        let number = |at: usize| words.get(at).and_then(|word| word.parse::<u64>().ok());
        let millis = |at: usize| Duration::from_millis(number(at).unwrap_or(1_000));
        match words {
            ["lock", key, ..] => {
                let lock = self.client.mutex(*key).ttl(millis(2));
                self.keepers(key, &lock, number(3).unwrap_or(1));
            }
            ["fair", key, ..] => {
                let lock = self.client.mutex(*key).ttl(millis(2)).fair();
                self.keepers(key, &lock, number(3).unwrap_or(1));
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
            ["shutdown", ..] => {
                let left = self.client.shutdown(millis(1)).await;
                tell("shutdown", json!({ "left": left }));
                return true;
            }
            _ => tell("failed", json!({ "text": "unknown words" })),
        }
        false
    }

    fn keepers(&self, key: &str, lock: &Lock, tasks: u64) {
        for _ in 0..tasks {
            let (release, released) = mpsc::unbounded_channel();
            let mut releases = self.releases.lock().unwrap_or_else(PoisonError::into_inner);
            releases.entry(key.to_owned()).or_default().push(release);
            tokio::spawn(keep(lock.clone(), key.to_owned(), released));
        }
    }
}

fn end(stay: Option<Stay>, guard: &impl Tells) {
    for record in stay.into_iter().flat_map(|stay| stay.end(guard, &pid())) {
        say(&record.to_string());
    }
}

fn pid() -> String {
    std::process::id().to_string()
}

/// Takes a lock and keeps it until told to let go.
async fn keep(lock: Lock, key: String, mut release: mpsc::UnboundedReceiver<()>) {
    let guard: Guard = match lock.lock().await {
        Ok(guard) => guard,
        Err(error) => return tell_failed(&key, &error),
    };
    let stay = Stay::begin(&guard);
    let token = guard.token().get();
    tell("granted", json!({ "key": key, "token": token }));
    tokio::select! {
        reason = guard.lost() => {
            tell("lost", json!({ "key": key, "token": token, "reason": reason.to_string() }));
            end(stay, &guard);
            release.recv().await;
        }
        _ = release.recv() => end(stay, &guard),
    }
    match guard.release().await {
        Ok(outcome) => {
            let outcome = format!("{outcome:?}");
            tell("released", json!({ "key": key, "token": token, "outcome": outcome }));
        }
        Err(error) => tell_failed(&key, &error),
    }
}

async fn cycle(client: Dlock, ttl: Duration, times: u64, keys: Vec<String>) {
    for _ in 0..times {
        match client.all_of(keys.iter().map(String::as_str)).ttl(ttl).lock().await {
            Ok(guard) => {
                let stay = Stay::begin(&guard);
                tokio::task::yield_now().await;
                end(stay, &guard);
            }
            Err(error) => tell_failed(&keys.join(" "), &error),
        }
    }
    tell("done", json!({ "times": times }));
}

/// Works under the lock until the client is shut down.
async fn serve(lock: Lock) {
    loop {
        match lock.lock().await {
            Ok(guard) => {
                let stay = Stay::begin(&guard);
                let _ = guard.run(tokio::time::sleep(Duration::from_millis(30))).await;
                end(stay, &guard);
            }
            Err(error) if error.kind() == ErrorKind::ShuttingDown => return,
            Err(error) => tell_failed("serve", &error),
        }
    }
}
