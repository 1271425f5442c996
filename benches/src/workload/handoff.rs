//! How long it takes until a released lock reaches another process that waits for it.
//!
//! Two processes take turns on one key. While a process holds the lock, it gives the other
//! process time to queue up, measures a PING through the same client, and pauses once more.
//! Then it releases: so the PING and the release both follow a pause of the same length. The
//! hand-over time is from just before the release in one process until just after the
//! acquire in the other, by the clock that they share. It counts only if the other process
//! had asked for the lock before the release.

use std::sync::Arc;
use std::time::Duration;

use anyhow::{Result, bail};
use dlock::Config;
use serde::{Deserialize, Serialize};

use crate::clock;
use crate::exclusion_checker::{self, ExclusionChecker, HeldInterval};
use crate::interrupt::Interrupt;
use crate::lock_client::{LockClient, LockOptions, Peer};
use crate::measurement::{Measurement, Recorder};
use crate::processes::{Job, Launcher, Report, Workers};
use crate::{processes, server, usage_error};

/// The number of hand-overs that are not counted: connections and caches warm up.
const WARM_UP: usize = 10;
/// How long a process pauses while it holds the lock, so that the other one has queued up.
const TURN: Duration = Duration::from_millis(2);

/// Each process takes part for this long at least: on a busy machine one of the two may begin
/// when a short run of the other is over.
const LEAST_TIME: Duration = Duration::from_millis(500);

/// What the handoff workload does.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct Plan {
    /// The options of the lock.
    pub locks: LockOptions,
    /// The number of hand-overs to measure.
    pub rounds: usize,
}

/// The result, as `--json` prints it.
#[derive(Clone, Debug, Serialize, Deserialize)]
#[allow(missing_docs, reason = "schema.json describes the fields")]
pub struct Outcome {
    pub workload: String,
    pub peer: Option<Peer>,
    pub backend: String,
    pub processes: usize,
    pub rounds: usize,
    pub p50_us: f64,
    pub p99_us: f64,
    pub max_us: f64,
    pub rtt_p50_us: f64,
    pub violations: u64,
    pub errors: u64,
}

/// Runs two processes that hand a lock to each other.
///
/// # Errors
/// Fails if the backend is not shared between processes or cannot be reached.
pub async fn run(
    config: &Config,
    plan: Plan,
    launcher: &Launcher,
    interrupt: &Interrupt,
) -> Result<Outcome> {
    if server::is_embedded(config) {
        return Err(usage_error(
            "memory:// exists only inside one process; handoff needs a server, such as redis://",
        ));
    }
    if plan.rounds == 0 {
        return Err(usage_error("rounds must be at least 1"));
    }
    plan.locks.check(config)?;
    server::check_reachable(config).await?;
    let jobs = vec![Job::Handoff(plan.clone()), Job::Handoff(plan.clone())];
    let running =
        async { Workers::start(launcher, jobs).await?.run(processes::start_soon()).await };
    let reports = interrupt.run_until_signal(running).await?;
    let handovers = handovers(&reports);
    if handovers.is_empty() {
        bail!(
            "no process ever waited for the lock of the other, so nothing was measured; give more --rounds"
        );
    }
    let recorder = Recorder::default();
    for &took in handovers.iter().skip(WARM_UP) {
        recorder.operation(0, took);
    }
    let latency = recorder.measurement().latency();
    let pings = Recorder::default();
    let (mut all, mut intervals) = (Measurement::default(), Vec::new());
    for report in reports {
        for ping in report.pings {
            pings.operation(0, ping);
        }
        intervals.extend(report.intervals);
        all.add(report.measured);
    }
    Ok(Outcome {
        workload: "handoff".into(),
        peer: plan.locks.peer,
        backend: server::backend(config).into(),
        processes: 2,
        rounds: handovers.len().saturating_sub(WARM_UP),
        p50_us: latency.p50_us,
        p99_us: latency.p99_us,
        max_us: latency.max_us,
        rtt_p50_us: pings.measurement().latency().p50_us,
        violations: exclusion_checker::violations(intervals),
        errors: all.errors,
    })
}

/// The times of the hand-overs to a process that was waiting, in order.
fn handovers(reports: &[Report]) -> Vec<u64> {
    let mut turns: Vec<(usize, u64, HeldInterval)> = Vec::new();
    for (process, report) in reports.iter().enumerate() {
        let requested = report.requested.iter().copied();
        turns.extend(requested.zip(&report.intervals).map(|(at, &it)| (process, at, it)));
    }
    turns.sort_unstable_by_key(|(_, _, it)| it.from);
    let pairs = turns.windows(2).filter_map(|pair| {
        let [(releaser, _, before), (acquirer, requested, after)] = pair else { return None };
        let waited = releaser != acquirer && *requested < before.until;
        waited.then(|| after.from.saturating_sub(before.until))
    });
    pairs.collect()
}

/// The share of one process, ready to start.
#[derive(Debug)]
pub struct ProcessRun {
    plan: Plan,
    client: Arc<LockClient>,
}

impl ProcessRun {
    /// Connects to the backend.
    ///
    /// # Errors
    /// Fails if the backend cannot be reached.
    pub async fn prepare(config: &Config, plan: Plan) -> Result<Self> {
        let client = LockClient::new(config, &plan.locks, 1, 1).await?;
        Ok(ProcessRun { client: Arc::new(client), plan })
    }

    /// Acquires and releases the lock from `start` on, by [`clock::now`], in a task, as a
    /// handler of a server would.
    ///
    /// # Errors
    /// Fails if the backend fails.
    pub async fn run(&self, start: u64) -> Result<Report> {
        tokio::spawn(Self::take_turns(self.client.clone(), self.plan.rounds, start)).await?
    }

    async fn take_turns(client: Arc<LockClient>, rounds: usize, start: u64) -> Result<Report> {
        let checker = ExclusionChecker::new(1, true);
        let mut report = Report::default();
        clock::sleep_until(start).await;
        let turns = (rounds + WARM_UP).div_ceil(2) + 1;
        let least = start + clock::nanos(LEAST_TIME);
        while report.requested.len() < turns || clock::now() < least {
            report.requested.push(clock::now());
            let held = client.acquire(0).await?;
            let section = checker.enter(0, held.mode(), held.token());
            tokio::time::sleep(TURN).await;
            report.pings.push(clock::nanos(client.ping().await?));
            tokio::time::sleep(TURN).await;
            drop(section);
            client.release(0, held).await?;
        }
        report.intervals = checker.intervals();
        Ok(report)
    }

    /// Releases what is still held and disconnects.
    pub async fn close(&self) {
        self.client.close().await;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_a_hand_over_to_a_waiting_process_counts() {
        let report = |turns: &[(u64, u64, u64)]| Report {
            requested: turns.iter().map(|it| it.0).collect(),
            intervals: turns
                .iter()
                .map(|&(_, from, until)| HeldInterval {
                    key: 0,
                    mode: dlock::Mode::Exclusive,
                    token: 0,
                    from,
                    until,
                })
                .collect(),
            ..Report::default()
        };
        let one = report(&[(0, 1, 10), (11, 30, 40), (41, 42, 50)]);
        let other = report(&[(2, 13, 25), (60, 70, 80)]);
        // 10 -> 13 and 25 -> 30 were waited for; 40 -> 42 stayed in one process;
        // 50 -> 70 was requested only at 60.
        assert_eq!(handovers(&[one, other]), [3, 5]);
    }
}
