//! The coordinator of a chaos run.

use std::collections::BTreeMap;
use std::process::{ExitCode, Stdio};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use rand::rngs::StdRng;
use rand::{RngExt as _, SeedableRng as _};
use tokio::io::{AsyncBufReadExt as _, AsyncWriteExt as _, BufReader};
use tokio::process::{Child, Command};

use super::Options;
use super::faults::{self, Fault};
use super::worker::{KEYS, TTL};
use crate::process::now;
use crate::proxy::{Once, Proxy, Way};
use crate::record_checker::{Record, RecordChecker};
use crate::redis::RedisServer;

/// How far the checker stays behind the present. No worker is paused for so long that a
/// record arrives later than this.
const CHECK_DELAY: Duration = Duration::from_secs(20);
/// How long a key that many want may go without a holder: about three times a fault, a
/// lease and a wait.
const STUCK: Duration = Duration::from_secs(25);

/// The results so far.
#[derive(Default)]
struct State {
    checker: RecordChecker,
    cycles: u64,
    errors: BTreeMap<String, u64>,
    faults: BTreeMap<String, u64>,
    recoveries: Vec<u64>,
    /// When each key was last acquired.
    entered: BTreeMap<String, u64>,
    violations: Vec<String>,
}

struct Run {
    state: Mutex<State>,
    /// The latest moment at which somebody held a lock.
    latest: AtomicU64,
    stop: AtomicBool,
}

impl Run {
    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn is_stopping(&self) -> bool {
        self.stop.load(Ordering::Relaxed)
    }

    /// Sleeps, but not beyond the end of the run.
    async fn sleep(&self, length: Duration) {
        let began = Instant::now();
        while !self.is_stopping() && began.elapsed() < length {
            tokio::time::sleep(length.min(Duration::from_millis(50))).await;
        }
    }

    fn report_violation(&self, what: String) {
        eprintln!("violation: {what}");
        self.state().violations.push(what);
        self.stop.store(true, Ordering::Relaxed);
    }

    fn count_fault(&self, fault: Fault) {
        *self.state().faults.entry(format!("{fault:?}")).or_default() += 1;
    }

    /// Handles a line that a worker printed.
    fn on_line(&self, line: &str) {
        let mut state = self.state();
        match line.split_at_checked(2) {
            Some(("R ", _)) => {
                for record in line.split(';') {
                    // The last line of a worker that was killed may be cut short.
                    let Ok(record) = record.parse::<Record>() else { return };
                    self.latest.fetch_max(record.from, Ordering::Relaxed);
                    let entered = state.entered.entry(record.key.clone()).or_default();
                    *entered = record.from.max(*entered);
                    state.checker.add(record);
                }
                state.cycles += 1;
            }
            Some(("E ", kind)) => *state.errors.entry(kind.to_owned()).or_default() += 1,
            Some(("V ", what)) => {
                drop(state);
                self.report_violation(what.to_owned());
            }
            _ => {}
        }
    }
}

pub(super) async fn run(options: &Options) -> ExitCode {
    // What was written survives a kill of the process.
    let lasting = ["--appendonly", "yes", "--appendfsync", "no"];
    let Some(server) = RedisServer::with(&lasting) else { return ExitCode::FAILURE };
    let mut proxies = Vec::new();
    for _ in 0..options.processes {
        proxies.push(Arc::new(Proxy::start(server.port()).await));
    }
    let run = Arc::new(Run {
        state: Mutex::default(),
        latest: AtomicU64::new(now()),
        stop: AtomicBool::new(false),
    });
    let began = Instant::now();
    let urls = proxies.iter().map(|proxy| proxy.url()).collect();
    let workers = Workers { options: options.clone(), urls, run: run.clone(), workers: Vec::new() };
    let server_faults = tokio::spawn(against_server(server, proxies, run.clone(), options.clone()));
    let worker_faults = tokio::spawn(workers.run());
    watch(&run, began, options.length).await;
    let server = server_faults.await;
    let workers = worker_faults.await;
    let (Ok(server), Ok(())) = (server, workers) else {
        run.report_violation("a task that injects faults panicked".into());
        return ExitCode::FAILURE;
    };
    let left = server.left_after(Duration::from_secs(15)).await;
    if !left.is_empty() {
        run.report_violation(format!("left behind: {left:?}"));
    }
    report(&run, options, began, left.len())
}

/// Checks records, looks for keys that are stuck, and prints progress each minute.
async fn watch(run: &Run, began: Instant, length: Duration) {
    let mut printed = Instant::now();
    let first = now();
    while !run.is_stopping() && began.elapsed() < length {
        tokio::time::sleep(Duration::from_millis(500)).await;
        let at = now();
        let mut found = Vec::new();
        {
            let mut state = run.state();
            state.checker.sweep(at - nanos(CHECK_DELAY).min(at));
            found.append(&mut state.checker.violations);
            for key in KEYS {
                let entered = state.entered.get(key).copied().unwrap_or(first);
                if at.saturating_sub(entered) > nanos(STUCK) {
                    found.push(format!("nobody got {key} for {STUCK:?}"));
                }
            }
        }
        found.into_iter().for_each(|what| run.report_violation(what));
        if printed.elapsed() >= Duration::from_secs(60) {
            printed = Instant::now();
            let state = run.state();
            let faults: u64 = state.faults.values().sum();
            eprintln!(
                "{:?}: {} cycles, {faults} faults, {} waiting to be checked",
                began.elapsed(),
                state.cycles,
                state.checker.waiting()
            );
        }
    }
    run.stop.store(true, Ordering::Relaxed);
}

fn report(run: &Run, options: &Options, began: Instant, left: usize) -> ExitCode {
    let mut state = run.state();
    state.checker.sweep(u64::MAX);
    let State { checker, cycles, errors, faults, recoveries, violations, .. } = &mut *state;
    violations.append(&mut checker.violations);
    recoveries.sort_unstable();
    let worst = |part: f64| {
        let place = (recoveries.len() as f64 * part) as usize;
        recoveries.get(place.min(recoveries.len().saturating_sub(1))).copied()
    };
    println!(
        "{}",
        serde_json::json!({
            "seed": options.seed,
            "seconds": began.elapsed().as_secs(),
            "processes": options.processes,
            "tasks": options.tasks,
            "cycles": cycles,
            "faults": faults.values().sum::<u64>(),
            "faults_by_kind": faults,
            "recoveries": recoveries.len(),
            "recovery_ms": { "median": worst(0.5), "p99": worst(0.99), "max": worst(1.0) },
            "errors": errors,
            "stale_writes": { "tried": checker.stale.0, "rejected": checker.stale.1 },
            "checked": checker.checked,
            "late": checker.late,
            "excused_by_data_loss": checker.excused,
            "left_behind": left,
            "violations": violations,
        })
    );
    if violations.is_empty() {
        return ExitCode::SUCCESS;
    }
    eprintln!("replay: dlock-chaos --seed {}", options.seed);
    ExitCode::FAILURE
}

fn nanos(duration: Duration) -> u64 {
    u64::try_from(duration.as_nanos()).unwrap_or(u64::MAX)
}

/// Injects one fault after another into server and network; returns the server.
async fn against_server(
    mut server: RedisServer,
    proxies: Vec<Arc<Proxy>>,
    run: Arc<Run>,
    options: Options,
) -> RedisServer {
    let mut random = StdRng::seed_from_u64(options.seed);
    while !run.is_stopping() {
        run.sleep(faults::quiet(&mut random, options.faults_per_minute)).await;
        if run.is_stopping() {
            break;
        }
        let fault = Fault::of_server(&mut random);
        let lasts = fault.lasts(&mut random);
        let before = now();
        // One worker, half of them, or all are cut off from the others.
        let share = [1, proxies.len().div_ceil(2), proxies.len()][random.random_range(0..3)];
        let targets = proxies.iter().cycle().skip(random.random_range(0..proxies.len()));
        let targets: Vec<_> = targets.take(share).cloned().collect();
        inject(fault, lasts, &mut server, &targets, &mut random).await;
        run.count_fault(fault);
        if matches!(fault, Fault::FlushAll | Fault::RestartEmpty) {
            run.state().checker.data_lost(before, TTL + Duration::from_secs(1));
        }
        recovered(&run).await;
    }
    for proxy in &proxies {
        proxy.forget_once();
        proxy.heal();
    }
    server
}

async fn inject(
    fault: Fault,
    lasts: Duration,
    server: &mut RedisServer,
    targets: &[Arc<Proxy>],
    random: &mut StdRng,
) {
    let times = random.random_range(1..10);
    let each = |what: &dyn Fn(&Proxy)| targets.iter().for_each(|proxy| what(proxy));
    let once = |what, text| each(&|proxy| (0..times).for_each(|_| proxy.once(what, text)));
    let cli = |arguments: &[&str]| {
        tokio::task::block_in_place(|| server.cli(arguments));
    };
    match fault {
        Fault::KillCommandConnections => cli(&["CLIENT", "KILL", "TYPE", "normal"]),
        Fault::KillNoticeConnections => cli(&["CLIENT", "KILL", "TYPE", "pubsub"]),
        Fault::ForgetScripts => cli(&["SCRIPT", "FLUSH"]),
        Fault::PauseClients => {
            cli(&["CLIENT", "PAUSE", &lasts.as_millis().to_string(), "ALL"]);
            tokio::time::sleep(lasts).await;
        }
        Fault::OutOfMemory => {
            cli(&["CONFIG", "SET", "maxmemory", "1"]);
            tokio::time::sleep(lasts).await;
            cli(&["CONFIG", "SET", "maxmemory", "0"]);
        }
        Fault::ReadOnly => {
            cli(&["REPLICAOF", "127.0.0.1", "1"]); // no server is there
            tokio::time::sleep(lasts).await;
            cli(&["REPLICAOF", "NO", "ONE"]);
        }
        Fault::Cut => each(&Proxy::cut),
        Fault::StallReplies => each(&|proxy| proxy.stall(&[Way::ToClient])),
        Fault::StallRequests => each(&|proxy| proxy.stall(&[Way::ToServer])),
        Fault::StallBoth => each(&|proxy| proxy.stall(&[Way::ToServer, Way::ToClient])),
        Fault::LoseReplies => once(Once::LoseReply, "EVAL"),
        Fault::DuplicateRequests => once(Once::DuplicateRequest, "EVAL"),
        Fault::LoseNotices => once(Once::LosePush, ""),
        Fault::DuplicateNotices => once(Once::DuplicatePush, ""),
        Fault::HalfOpen => each(&Proxy::freeze),
        Fault::Silence => each(&Proxy::go_silent),
        Fault::Delay => each(&|proxy| {
            proxy.delay(Way::ToServer, lasts / 10);
            proxy.delay(Way::ToClient, lasts / 10);
        }),
        Fault::PauseServer => {
            server.pause();
            tokio::time::sleep(lasts).await;
            server.resume();
        }
        Fault::RestartServer => {
            server.kill();
            tokio::time::sleep(lasts).await;
            tokio::task::block_in_place(|| server.restart());
        }
        Fault::FlushAll => cli(&["FLUSHALL"]),
        Fault::RestartEmpty => {
            server.kill();
            let _ = std::fs::remove_dir_all(server.directory().join("appendonlydir"));
            tokio::task::block_in_place(|| server.restart());
        }
        Fault::PauseWorker | Fault::KillWorker | Fault::ReplaceWorker => {}
    }
    let heals = matches!(
        fault,
        Fault::StallReplies
            | Fault::StallRequests
            | Fault::StallBoth
            | Fault::HalfOpen
            | Fault::Silence
            | Fault::Delay
    );
    if heals {
        tokio::time::sleep(lasts).await;
        each(&Proxy::heal);
    }
}

/// Waits until somebody holds a lock again.
async fn recovered(run: &Run) {
    let (over, began) = (now(), Instant::now());
    while run.latest.load(Ordering::Relaxed) <= over {
        if run.is_stopping() {
            return; // the workers are shutting down
        }
        if began.elapsed() > STUCK {
            return run.report_violation(format!("nobody got any lock {STUCK:?} after a fault"));
        }
        tokio::time::sleep(Duration::from_millis(5)).await;
    }
    run.state().recoveries.push(u64::try_from(began.elapsed().as_millis()).unwrap_or(u64::MAX));
}

/// The worker processes.
struct Workers {
    options: Options,
    /// The URL of each worker's own proxy.
    urls: Vec<String>,
    run: Arc<Run>,
    workers: Vec<Child>,
}

impl Workers {
    /// Injects one fault after another into the workers, then shuts all of them down.
    async fn run(mut self) {
        let mut random = StdRng::seed_from_u64(!self.options.seed);
        for number in 0..self.options.processes {
            match self.spawn(number) {
                Ok(worker) => self.workers.push(worker),
                Err(error) => {
                    return self
                        .run
                        .report_violation(format!("a worker cannot be started: {error}"));
                }
            }
        }
        while !self.run.is_stopping() {
            let quiet = faults::quiet(&mut random, self.options.faults_per_minute);
            self.run.sleep(quiet).await;
            if self.run.is_stopping() {
                break;
            }
            let number = random.random_range(0..self.workers.len());
            let fault = Fault::of_worker(&mut random);
            let lasts = fault.lasts(&mut random);
            self.inject(fault, number, lasts).await;
            self.run.count_fault(fault);
        }
        for number in 0..self.workers.len() {
            self.ask_to_stop(number).await;
        }
        for number in 0..self.workers.len() {
            self.wait_for_exit(number).await;
        }
    }

    fn spawn(&self, number: usize) -> std::io::Result<Child> {
        let mut worker = Command::new(std::env::current_exe()?)
            .args(["--url", &self.urls[number], "--number", &number.to_string()])
            .args(["--tasks", &self.options.tasks.to_string()])
            .args(["--seed", &self.options.seed.to_string()])
            .args(self.options.plant.iter().flat_map(|bug| ["--plant".into(), format!("{bug:?}")]))
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .kill_on_drop(true)
            .spawn()?;
        if let Some(output) = worker.stdout.take() {
            let run = self.run.clone();
            tokio::spawn(async move {
                let mut lines = BufReader::with_capacity(1 << 16, output).lines();
                while let Ok(Some(line)) = lines.next_line().await {
                    run.on_line(&line);
                }
            });
        }
        Ok(worker)
    }

    async fn inject(&mut self, fault: Fault, number: usize, lasts: Duration) {
        match fault {
            Fault::PauseWorker => {
                let Some(id) = self.workers[number].id() else { return };
                crate::process::pause(id);
                tokio::time::sleep(lasts).await;
                crate::process::resume(id);
                return;
            }
            Fault::KillWorker => {
                let _ = self.workers[number].kill().await;
            }
            _ => {
                self.ask_to_stop(number).await;
                self.wait_for_exit(number).await;
            }
        }
        match self.spawn(number) {
            Ok(worker) => self.workers[number] = worker,
            Err(error) => self.run.report_violation(format!("a worker cannot be started: {error}")),
        }
    }

    async fn ask_to_stop(&mut self, number: usize) {
        if let Some(mut input) = self.workers[number].stdin.take() {
            let _ = input.write_all(b"stop\n").await;
        }
    }

    async fn wait_for_exit(&mut self, number: usize) {
        let worker = &mut self.workers[number];
        match tokio::time::timeout(STUCK, worker.wait()).await {
            Ok(Ok(status)) if status.success() => {}
            ended => {
                self.run.report_violation(format!("worker {number} did not end well: {ended:?}"))
            }
        }
    }
}
