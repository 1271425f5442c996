//! The coordinator of a chaos run.

use std::collections::BTreeMap;
use std::process::ExitCode;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use super::Options;
use super::faults::Fault;
use super::inject::Faults;
use super::load::{self, SLOW_KEYS};
use super::recovery::Recovery;
use super::servers::Servers;
use super::workers::Workers;
use crate::failover::AFTER_PROMOTION;
use crate::process::now;
use crate::record_checker::{Record, RecordChecker};

/// How far the checker stays behind the present. No worker is paused for so long that a
/// record arrives later than this.
const CHECK_DELAY: Duration = Duration::from_secs(20);
/// How long a key that many want may go without a holder, also while there are faults:
/// about three times a fault, a lease and a wait.
const STUCK: Duration = Duration::from_secs(25);

/// The results so far.
#[derive(Default)]
pub(super) struct State {
    pub(super) checker: RecordChecker,
    pub(super) recovery: Recovery,
    cycles: u64,
    errors: BTreeMap<String, u64>,
    faults: BTreeMap<String, FaultCount>,
    /// How long each recovery took, in milliseconds.
    recoveries: Vec<u64>,
    /// The slowest recovery, and what was the last to recover after which fault.
    slowest: (u64, String),
    /// How many holders of broken locks there were.
    pub(super) broken: u64,
    /// How many failovers there were, wanted or not.
    failovers: u64,
    /// When each key was last acquired.
    entered: BTreeMap<String, u64>,
    violations: Vec<String>,
}

/// How often a fault was injected, and how long the recoveries took.
#[derive(Default)]
struct FaultCount {
    times: u64,
    recoveries: Vec<u64>,
}

/// What the tasks of the coordinator share.
pub(super) struct Run {
    state: Mutex<State>,
    stop: AtomicBool,
}

impl Run {
    pub(super) fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub(super) fn is_stopping(&self) -> bool {
        self.stop.load(Ordering::Relaxed)
    }

    /// Sleeps, but not beyond the end of the run.
    pub(super) async fn sleep(&self, length: Duration) {
        let began = Instant::now();
        while !self.is_stopping() && began.elapsed() < length {
            tokio::time::sleep(length.min(Duration::from_millis(50))).await;
        }
    }

    pub(super) fn report_violation(&self, what: String) {
        eprintln!("violation: {what}");
        self.state().violations.push(what);
        self.stop.store(true, Ordering::Relaxed);
    }

    /// Counts faults that happened at the same time, and how long the recovery took if
    /// the run did not end before.
    pub(super) fn count_faults(
        &self,
        faults: &[Fault],
        after: &str,
        recovery: Option<(u64, String)>,
    ) {
        let mut state = self.state();
        let recovery = recovery.filter(|_| !faults.is_empty()).map(|(took, last)| {
            if took >= state.slowest.0 {
                state.slowest = (took, format!("{last} after {after}"));
            }
            took
        });
        for fault in faults {
            let count = state.faults.entry(format!("{fault:?}")).or_default();
            count.times += 1;
            count.recoveries.extend(recovery);
        }
        state.recoveries.extend(recovery);
    }

    /// Another server became the primary at or after `from`. Whoever lost a lock by it
    /// must know at `told_by`.
    pub(super) fn on_failover(&self, from: u64, told_by: u64) {
        let mut state = self.state();
        state.failovers += 1;
        state.checker.failed_over(from, told_by);
    }

    /// Handles a line that a worker printed.
    pub(super) fn on_line(&self, line: &str) {
        let mut state = self.state();
        match line.split_at_checked(2) {
            Some(("R ", _)) => {
                for record in line.split(';') {
                    // The last line of a worker that was killed may be cut short.
                    let Ok(record) = record.parse::<Record>() else { return };
                    state.recovery.on_record(&record);
                    let entered = state.entered.entry(record.key.clone()).or_default();
                    *entered = record.from.max(*entered);
                    state.checker.add(record);
                }
                state.cycles += 1;
            }
            Some(("A ", key_and_who)) => {
                if let Some((key, who)) = key_and_who.split_once(' ') {
                    state.recovery.on_acquired(key, who);
                }
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
    let started = tokio::task::block_in_place(|| Servers::start(options));
    let Some((servers, proxies)) = started else { return ExitCode::FAILURE };
    let run = Arc::new(Run { state: Mutex::default(), stop: AtomicBool::new(false) });
    let began = Instant::now();
    let mut watching = servers.watch({
        let (run, after) = (run.clone(), nanos(AFTER_PROMOTION + options.slack));
        Arc::new(move |from, promoted| run.on_failover(from, promoted + after))
    });
    let urls = (0..options.processes).map(|worker| servers.url_of(worker, &proxies)).collect();
    let mut workers = Workers::start(options, urls, &run);
    let mut faults = Faults { options: options.clone(), servers, proxies, run: run.clone() };
    let injecting = tokio::spawn(async move {
        faults.inject_all(&mut workers).await;
        workers.stop().await;
        faults.servers
    });
    watch(&run, began, options).await;
    let ended = injecting.await;
    watching.shutdown().await;
    let Ok(servers) = ended else {
        run.report_violation("the task that injects faults panicked".into());
        return ExitCode::FAILURE;
    };
    let left = servers.left_after(Duration::from_secs(15)).await;
    if !left.is_empty() {
        run.report_violation(format!("left behind: {left:?}"));
    }
    report(&run, options, began, left.len())
}

/// Checks records, looks for keys that are stuck, and prints progress each minute.
async fn watch(run: &Run, began: Instant, options: &Options) {
    let mut printed = Instant::now();
    let first = now();
    while !run.is_stopping() && began.elapsed() < options.length {
        tokio::time::sleep(Duration::from_millis(500)).await;
        let at = now();
        let mut found = Vec::new();
        {
            let mut state = run.state();
            state.checker.sweep(at - nanos(CHECK_DELAY).min(at));
            found.append(&mut state.checker.violations);
            let slow = SLOW_KEYS.into_iter().take(options.processes);
            for key in load::keys(options.topology).iter().copied().chain(slow) {
                let entered = state.entered.get(key).copied().unwrap_or(first);
                let stuck = STUCK + options.slack;
                if at.saturating_sub(entered) > nanos(stuck) {
                    found.push(format!("nobody got {key} for {stuck:?}"));
                }
            }
        }
        found.into_iter().for_each(|what| run.report_violation(what));
        if printed.elapsed() >= Duration::from_secs(60) {
            printed = Instant::now();
            let state = run.state();
            let faults: u64 = state.faults.values().map(|count| count.times).sum();
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
    let (broken, failovers) = (state.broken, state.failovers);
    let State { checker, cycles, errors, faults, recoveries, slowest, violations, .. } =
        &mut *state;
    violations.append(&mut checker.violations);
    let by_kind: serde_json::Map<_, _> = faults
        .iter_mut()
        .map(|(name, count)| {
            let recovery = summary(&mut count.recoveries);
            (name.clone(), serde_json::json!({ "times": count.times, "recovery_ms": recovery }))
        })
        .collect();
    println!(
        "{}",
        serde_json::json!({
            "topology": options.topology.name(),
            "seed": options.seed,
            "seconds": began.elapsed().as_secs(),
            "processes": options.processes,
            "tasks": options.tasks,
            "cycles": cycles,
            "slack_ms": options.slack.as_millis(),
            "faults": faults.values().map(|count| count.times).sum::<u64>(),
            "kinds": by_kind.len(),
            "faults_by_kind": by_kind,
            "recoveries": recoveries.len(),
            "recovery_ms": summary(recoveries),
            "slowest_recovery": slowest.1,
            "broken": broken,
            "excused_by_pause": checker.excused_by_pause,
            "errors": errors,
            "stale_writes": { "tried": checker.stale.0, "rejected": checker.stale.1 },
            "checked": checker.checked,
            "late": checker.late,
            "failovers": failovers,
            "excused_by_data_loss": checker.excused,
            "left_behind": left,
            "violations": violations,
        })
    );
    if violations.is_empty() {
        return ExitCode::SUCCESS;
    }
    let topology = options.topology.name();
    eprintln!("replay: dlock-chaos --topology {topology} --seed {}", options.seed);
    ExitCode::FAILURE
}

/// The median, the 99th percentile and the longest.
fn summary(recoveries: &mut [u64]) -> serde_json::Value {
    recoveries.sort_unstable();
    let worst = |part: f64| {
        let place = (recoveries.len() as f64 * part) as usize;
        recoveries.get(place.min(recoveries.len().saturating_sub(1))).copied()
    };
    serde_json::json!({ "median": worst(0.5), "p99": worst(0.99), "max": worst(1.0) })
}

/// The nanoseconds of a duration, as [`now`] counts them.
pub(super) fn nanos(duration: Duration) -> u64 {
    u64::try_from(duration.as_nanos()).unwrap_or(u64::MAX)
}
