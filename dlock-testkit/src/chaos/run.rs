//! The coordinator of a run.

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
use crate::records::{Judge, Record};
use crate::redis::RedisServer;

/// How far the judge stays behind: no worker is stopped for so long that a record
/// comes later than this.
const BEHIND: Duration = Duration::from_secs(20);
/// How long a key that many want may go without a holder: a fault, a lease and a
/// wait, thrice.
const STUCK: Duration = Duration::from_secs(25);

/// What is known so far.
#[derive(Default)]
struct Book {
    judge: Judge,
    cycles: u64,
    errors: BTreeMap<String, u64>,
    faults: BTreeMap<String, u64>,
    recoveries: Vec<u64>,
    /// When each key was last entered.
    entered: BTreeMap<String, u64>,
    violations: Vec<String>,
}

struct Run {
    book: Mutex<Book>,
    /// The latest moment at which somebody held a lock.
    latest: AtomicU64,
    stop: AtomicBool,
}

impl Run {
    fn book(&self) -> MutexGuard<'_, Book> {
        self.book.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn stops(&self) -> bool {
        self.stop.load(Ordering::Relaxed)
    }

    /// Waits, but not beyond the end of the run.
    async fn quiet(&self, length: Duration) {
        let began = Instant::now();
        while !self.stops() && began.elapsed() < length {
            tokio::time::sleep(length.min(Duration::from_millis(50))).await;
        }
    }

    fn violated(&self, what: String) {
        eprintln!("violation: {what}");
        self.book().violations.push(what);
        self.stop.store(true, Ordering::Relaxed);
    }

    fn happened(&self, fault: Fault) {
        *self.book().faults.entry(format!("{fault:?}")).or_default() += 1;
    }

    /// A line of a worker.
    fn heard(&self, line: &str) {
        let mut book = self.book();
        match line.split_at_checked(2) {
            Some(("R ", _)) => {
                for record in line.split(';') {
                    // The last line of a worker that was killed may be cut short.
                    let Ok(record) = record.parse::<Record>() else { return };
                    self.latest.fetch_max(record.from, Ordering::Relaxed);
                    let entered = book.entered.entry(record.key.clone()).or_default();
                    *entered = record.from.max(*entered);
                    book.judge.add(record);
                }
                book.cycles += 1;
            }
            Some(("E ", kind)) => *book.errors.entry(kind.to_owned()).or_default() += 1,
            Some(("V ", what)) => {
                drop(book);
                self.violated(what.to_owned());
            }
            _ => {}
        }
    }
}

pub(super) async fn run(options: &Options) -> ExitCode {
    // What was written survives the process, if not the machine.
    let lasting = ["--appendonly", "yes", "--appendfsync", "no"];
    let Some(server) = RedisServer::with(&lasting) else { return ExitCode::FAILURE };
    let mut proxies = Vec::new();
    for _ in 0..options.processes {
        proxies.push(Arc::new(Proxy::start(server.port()).await));
    }
    let run = Arc::new(Run {
        book: Mutex::default(),
        latest: AtomicU64::new(now()),
        stop: AtomicBool::new(false),
    });
    let began = Instant::now();
    let urls = proxies.iter().map(|proxy| proxy.url()).collect();
    let crew = Crew { options: options.clone(), urls, run: run.clone(), workers: Vec::new() };
    let server_lane = tokio::spawn(against_server(server, proxies, run.clone(), options.clone()));
    let worker_lane = tokio::spawn(crew.work());
    watch(&run, began, options.length).await;
    let server = server_lane.await;
    let crew = worker_lane.await;
    let (Ok(server), Ok(())) = (server, crew) else {
        run.violated("a lane of faults panicked".into());
        return ExitCode::FAILURE;
    };
    let left = server.left_after(Duration::from_secs(15)).await;
    if !left.is_empty() {
        run.violated(format!("left behind: {left:?}"));
    }
    conclude(&run, options, began, left.len())
}

/// Sweeps, looks for keys that are stuck, and says now and then how it goes.
async fn watch(run: &Run, began: Instant, length: Duration) {
    let mut told = Instant::now();
    let first = now();
    while !run.stops() && began.elapsed() < length {
        tokio::time::sleep(Duration::from_millis(500)).await;
        let at = now();
        let mut found = Vec::new();
        {
            let mut book = run.book();
            book.judge.sweep(at - nanos(BEHIND).min(at));
            found.append(&mut book.judge.violations);
            for key in KEYS {
                let entered = book.entered.get(key).copied().unwrap_or(first);
                if at.saturating_sub(entered) > nanos(STUCK) {
                    found.push(format!("nobody got {key} for {STUCK:?}"));
                }
            }
        }
        found.into_iter().for_each(|what| run.violated(what));
        if told.elapsed() >= Duration::from_secs(60) {
            told = Instant::now();
            let book = run.book();
            let faults: u64 = book.faults.values().sum();
            eprintln!(
                "{:?}: {} cycles, {faults} faults, {} waiting to be judged",
                began.elapsed(),
                book.cycles,
                book.judge.waiting()
            );
        }
    }
    run.stop.store(true, Ordering::Relaxed);
}

fn conclude(run: &Run, options: &Options, began: Instant, left: usize) -> ExitCode {
    let mut book = run.book();
    book.judge.sweep(u64::MAX);
    let Book { judge, cycles, errors, faults, recoveries, violations, .. } = &mut *book;
    violations.append(&mut judge.violations);
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
            "stale_writes": { "tried": judge.stale.0, "rejected": judge.stale.1 },
            "judged": judge.judged,
            "late": judge.late,
            "excused_by_data_loss": judge.excused,
            "left_behind": left,
            "violations": violations,
        })
    );
    if violations.is_empty() {
        return ExitCode::SUCCESS;
    }
    eprintln!("again with: dlock-chaos --seed {}", options.seed);
    ExitCode::FAILURE
}

fn nanos(duration: Duration) -> u64 {
    u64::try_from(duration.as_nanos()).unwrap_or(u64::MAX)
}

/// One fault after the other against server and network; gives the server back.
async fn against_server(
    mut server: RedisServer,
    proxies: Vec<Arc<Proxy>>,
    run: Arc<Run>,
    options: Options,
) -> RedisServer {
    let mut random = StdRng::seed_from_u64(options.seed);
    while !run.stops() {
        run.quiet(faults::quiet(&mut random, options.faults_per_minute)).await;
        if run.stops() {
            break;
        }
        let fault = Fault::of_server(&mut random);
        let lasts = fault.lasts(&mut random);
        let before = now();
        // One worker, half of them, or all are cut off from the others.
        let share = [1, proxies.len().div_ceil(2), proxies.len()][random.random_range(0..3)];
        let hit = proxies.iter().cycle().skip(random.random_range(0..proxies.len()));
        let hit: Vec<_> = hit.take(share).cloned().collect();
        inflict(fault, lasts, &mut server, &hit, &mut random).await;
        run.happened(fault);
        if matches!(fault, Fault::FlushAll | Fault::RestartEmpty) {
            run.book().judge.data_lost(before, TTL + Duration::from_secs(1));
        }
        recovered(&run).await;
    }
    for proxy in &proxies {
        proxy.forget_once();
        proxy.heal();
    }
    server
}

async fn inflict(
    fault: Fault,
    lasts: Duration,
    server: &mut RedisServer,
    hit: &[Arc<Proxy>],
    random: &mut StdRng,
) {
    let times = random.random_range(1..10);
    let each = |what: &dyn Fn(&Proxy)| hit.iter().for_each(|proxy| what(proxy));
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
            cli(&["REPLICAOF", "127.0.0.1", "1"]); // nobody there
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
        if run.stops() {
            return; // the workers are leaving
        }
        if began.elapsed() > STUCK {
            return run.violated(format!("nobody got any lock {STUCK:?} after a fault"));
        }
        tokio::time::sleep(Duration::from_millis(5)).await;
    }
    run.book().recoveries.push(u64::try_from(began.elapsed().as_millis()).unwrap_or(u64::MAX));
}

/// The workers.
struct Crew {
    options: Options,
    /// Each worker has a way to the server of its own.
    urls: Vec<String>,
    run: Arc<Run>,
    workers: Vec<Child>,
}

impl Crew {
    /// One fault after the other against workers; then all of them leave.
    async fn work(mut self) {
        let mut random = StdRng::seed_from_u64(!self.options.seed);
        for number in 0..self.options.processes {
            match self.hire(number) {
                Ok(worker) => self.workers.push(worker),
                Err(error) => return self.run.violated(format!("no worker: {error}")),
            }
        }
        while !self.run.stops() {
            let quiet = faults::quiet(&mut random, self.options.faults_per_minute);
            self.run.quiet(quiet).await;
            if self.run.stops() {
                break;
            }
            let number = random.random_range(0..self.workers.len());
            let fault = Fault::of_worker(&mut random);
            let lasts = fault.lasts(&mut random);
            self.hit(fault, number, lasts).await;
            self.run.happened(fault);
        }
        for number in 0..self.workers.len() {
            self.dismiss(number).await;
        }
        for number in 0..self.workers.len() {
            self.leaves(number).await;
        }
    }

    fn hire(&self, number: usize) -> std::io::Result<Child> {
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
                    run.heard(&line);
                }
            });
        }
        Ok(worker)
    }

    async fn hit(&mut self, fault: Fault, number: usize, lasts: Duration) {
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
                self.dismiss(number).await;
                self.leaves(number).await;
            }
        }
        match self.hire(number) {
            Ok(worker) => self.workers[number] = worker,
            Err(error) => self.run.violated(format!("no worker: {error}")),
        }
    }

    async fn dismiss(&mut self, number: usize) {
        if let Some(mut input) = self.workers[number].stdin.take() {
            let _ = input.write_all(b"stop\n").await;
        }
    }

    async fn leaves(&mut self, number: usize) {
        let worker = &mut self.workers[number];
        match tokio::time::timeout(STUCK, worker.wait()).await {
            Ok(Ok(status)) if status.success() => {}
            ended => self.run.violated(format!("worker {number} did not end well: {ended:?}")),
        }
    }
}
