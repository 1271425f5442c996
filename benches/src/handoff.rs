//! How long a lock takes from one process to another that waits for it.
//!
//! Two processes take turns on one key. While one holds it, it times a PING
//! through the same client and gives the other time to queue up; then it lets go.
//! A hand-over is the time from just before the release in one process until just
//! after the lock was given in the other, by the clock they share; it counts only
//! if the other had asked before the release.

use std::time::Duration;

use anyhow::{Result, bail};
use dlock::Config;
use serde::{Deserialize, Serialize};

use crate::checker::{self, Checker, Interval};
use crate::clock;
use crate::contender::{Contender, Locks, Peer};
use crate::fleet::{Fleet, Job, Launcher, Report};
use crate::interrupt::Interrupt;
use crate::measure::{Measured, Recorder};
use crate::{Wrong, server};

/// Turns that are not counted: connections and caches warm up.
const WARM_UP: usize = 10;
/// How long a turn lasts, so that the other has queued up.
const TURN: Duration = Duration::from_millis(2);

/// What to do.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct Plan {
    /// Of which the first is handed over.
    pub locks: Locks,
    /// How many hand-overs are wanted.
    pub rounds: usize,
}

/// What `--json` prints.
#[derive(Clone, Debug, Serialize, Deserialize)]
#[allow(missing_docs, reason = "the fields are named like what they hold; see schema.json")]
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
/// If the backend is not shared between processes or cannot be reached.
pub async fn run(
    config: &Config,
    plan: Plan,
    launcher: &Launcher,
    interrupt: &Interrupt,
) -> Result<Outcome> {
    if server::is_embedded(config) {
        return Err(Wrong::because(
            "memory:// is inside one process; a hand-over needs a server, such as redis://",
        ));
    }
    if plan.rounds == 0 {
        return Err(Wrong::because("the rounds must be 1 at least"));
    }
    plan.locks.check()?;
    server::reach(config).await?;
    let jobs = vec![Job::Handoff(plan.clone()), Job::Handoff(plan.clone())];
    let running = async { Fleet::start(launcher, jobs).await?.run().await };
    let reports = interrupt.unless(running).await?;
    let handovers = handovers(&reports);
    if handovers.is_empty() {
        bail!("no lock went from one process to the other while that waited for it");
    }
    let recorder = Recorder::default();
    for &took in handovers.iter().skip(WARM_UP) {
        recorder.operation(0, took);
    }
    let latency = recorder.measured().latency();
    let pings = Recorder::default();
    let (mut all, mut intervals) = (Measured::default(), Vec::new());
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
        rtt_p50_us: pings.measured().latency().p50_us,
        violations: checker::violations(intervals),
        errors: all.errors,
    })
}

/// The hand-overs from one process to another that had asked before, in order.
fn handovers(reports: &[Report]) -> Vec<u64> {
    let mut turns: Vec<(usize, u64, Interval)> = Vec::new();
    for (process, report) in reports.iter().enumerate() {
        let asked = report.asked.iter().copied();
        turns.extend(asked.zip(&report.intervals).map(|(asked, &it)| (process, asked, it)));
    }
    turns.sort_unstable_by_key(|(_, _, it)| it.from);
    let pairs = turns.windows(2).filter_map(|pair| {
        let [(giver, _, before), (taker, asked, after)] = pair else { return None };
        let waited = giver != taker && *asked < before.until;
        waited.then(|| after.from.saturating_sub(before.until))
    });
    pairs.collect()
}

/// One process's part, ready to start.
#[derive(Debug)]
pub struct Part {
    plan: Plan,
    contender: Contender,
}

impl Part {
    /// Connects.
    ///
    /// # Errors
    /// If the backend cannot be reached.
    pub async fn prepare(config: &Config, plan: Plan) -> Result<Self> {
        let contender = Contender::new(config, &plan.locks, 1, 1).await?;
        Ok(Part { contender, plan })
    }

    /// Takes its turns from `start` on.
    ///
    /// # Errors
    /// If the backend fails.
    pub async fn run(&self, start: u64) -> Result<Report> {
        let Part { plan, contender } = self;
        let checker = Checker::new(1, true);
        let mut report = Report::default();
        clock::sleep_until(start).await;
        for _ in 0..(plan.rounds + WARM_UP).div_ceil(2) + 1 {
            report.asked.push(clock::now());
            let held = contender.acquire(0).await?;
            let stay = checker.enter(0, held.token());
            report.pings.push(clock::nanos(contender.ping().await?));
            tokio::time::sleep(TURN).await;
            drop(stay);
            contender.release(0, held).await?;
        }
        report.intervals = checker.intervals();
        Ok(report)
    }

    /// Gives back what is still held.
    pub async fn close(&self) {
        self.contender.close().await;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_a_process_that_waited_counts() {
        let report = |stays: &[(u64, u64, u64)]| Report {
            asked: stays.iter().map(|it| it.0).collect(),
            intervals: stays
                .iter()
                .map(|&(_, from, until)| Interval { key: 0, token: 0, from, until })
                .collect(),
            ..Report::default()
        };
        let one = report(&[(0, 1, 10), (11, 30, 40), (41, 42, 50)]);
        let other = report(&[(2, 13, 25), (60, 70, 80)]);
        // 10 -> 13 and 25 -> 30 were waited for; 40 -> 42 stayed in one process;
        // 50 -> 70 was asked for only at 60.
        assert_eq!(handovers(&[one, other]), [3, 5]);
    }
}
