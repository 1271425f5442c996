//! Many locks that are only held: what renewal costs.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use anyhow::{Context as _, Result};
use dlock::{Config, Dlock, Event, Guard, State};
use serde::{Deserialize, Serialize};

use crate::interrupt::Interrupt;
use crate::measurement::rounded;
use crate::{clock, server, usage_error};

/// How many locks are acquired at the same time.
const CONCURRENT_ACQUIRES: usize = 256;

/// What the held workload does.
#[derive(Clone, Debug)]
pub struct Plan {
    /// The number of locks.
    pub locks: usize,
    /// The ttl of the locks. Each is renewed after a third of it.
    pub ttl: Duration,
    /// How long all locks are held.
    pub duration: Duration,
    /// The prefix of the keys of this run.
    pub key_prefix: String,
}

/// The result, as `--json` prints it.
#[derive(Clone, Debug, Serialize, Deserialize)]
#[allow(missing_docs, reason = "schema.json describes the fields")]
pub struct Outcome {
    pub workload: String,
    pub backend: String,
    pub locks: usize,
    pub ttl_ms: u64,
    pub seconds: f64,
    pub lost: u64,
    pub renewed: u64,
    pub client_cpu_percent: f64,
    /// `None` without a server.
    pub server_cpu_percent: Option<f64>,
    pub server_commands_per_s: Option<f64>,
    pub client_bytes_per_lock: u64,
}

/// Acquires the locks, holds them, and measures what that costs.
///
/// # Errors
/// Fails if the backend cannot be reached, or if a lock cannot be acquired.
pub async fn run(config: &Config, plan: Plan, interrupt: &Interrupt) -> Result<Outcome> {
    if plan.locks == 0 || plan.duration.is_zero() {
        return Err(usage_error("locks and duration must be above 0"));
    }
    let (lost, renewed) = (Arc::new(AtomicU64::new(0)), Arc::new(AtomicU64::new(0)));
    let (lost_seen, renewed_seen) = (lost.clone(), renewed.clone());
    let hook = move |event: &Event<'_>| {
        let counter = match event {
            Event::Lost { .. } => &lost_seen,
            Event::Renewed { .. } => &renewed_seen,
            _ => return,
        };
        counter.fetch_add(1, Ordering::Relaxed);
    };
    let client = Dlock::builder().config(config.clone()).on_event(hook);
    let dlock = client.connect().await?;
    let outcome = interrupt.run_until_signal(hold(config, &plan, &dlock, &lost, &renewed)).await;
    dlock.shutdown(Duration::from_secs(10)).await;
    outcome
}

async fn hold(
    config: &Config,
    plan: &Plan,
    dlock: &Dlock,
    lost: &AtomicU64,
    renewed: &AtomicU64,
) -> Result<Outcome> {
    let mut server = match server::is_embedded(config) || server::is_cluster(config) {
        true => None,
        false => Some(server::connect(config).await?),
    };

    let before = resident()?;
    let guards = acquire_all(dlock, plan).await?;
    let grown = resident()?.saturating_sub(before);

    renewed.store(0, Ordering::Relaxed);
    let (began, cpu) = (Instant::now(), clock::cpu_time());
    let used = match &mut server {
        Some(server) => server::usage(server).await?,
        None => server::Usage::default(),
    };
    tokio::time::sleep(plan.duration).await;
    let seconds = began.elapsed().as_secs_f64();
    let cpu = clock::cpu_time().saturating_sub(cpu).as_secs_f64();
    let (server_cpu_percent, server_commands_per_s) = match &mut server {
        Some(server) => {
            let now = server::usage(server).await?;
            let busy = now.cpu.saturating_sub(used.cpu).as_secs_f64();
            let commands = now.commands.saturating_sub(used.commands);
            (Some(percent(busy / seconds)), Some(rounded(commands as f64 / seconds)))
        }
        None => (None, None),
    };
    let renewed = renewed.load(Ordering::Relaxed);
    // A guard that was lost without an event must be counted too.
    let gone = guards.iter().filter(|guard| guard.state() == State::Lost).count() as u64;
    Ok(Outcome {
        workload: "held".into(),
        backend: server::backend(config).into(),
        locks: plan.locks,
        ttl_ms: u64::try_from(plan.ttl.as_millis()).unwrap_or(u64::MAX),
        seconds: rounded(seconds),
        lost: lost.load(Ordering::Relaxed).max(gone),
        renewed,
        client_cpu_percent: percent(cpu / seconds),
        server_cpu_percent,
        server_commands_per_s,
        client_bytes_per_lock: grown / plan.locks as u64,
    })
}

async fn acquire_all(dlock: &Dlock, plan: &Plan) -> Result<Vec<Guard>> {
    let mut guards = Vec::with_capacity(plan.locks);
    let mut next = 0;
    let mut acquiring = tokio::task::JoinSet::new();
    while guards.len() < plan.locks {
        while next < plan.locks && acquiring.len() < CONCURRENT_ACQUIRES {
            let lock = dlock.mutex(format!("{}:{next}", plan.key_prefix)).ttl(plan.ttl);
            acquiring.spawn(async move { lock.lock().await });
            next += 1;
        }
        let acquired = acquiring.join_next().await.context("a task of the bench is missing")??;
        guards.push(acquired.context("a lock could not be acquired")?);
    }
    Ok(guards)
}

/// A share in percent, with two decimal digits.
fn percent(share: f64) -> f64 {
    (share * 10_000.0).round() / 100.0
}

/// The resident memory of this process, in bytes.
fn resident() -> Result<u64> {
    let status = std::fs::read_to_string("/proc/self/status")
        .context("cannot read /proc/self/status; this workload needs Linux")?;
    let line = status.lines().find_map(|line| line.strip_prefix("VmRSS:"));
    let kilobytes: u64 = line
        .and_then(|rest| rest.trim().strip_suffix("kB"))
        .and_then(|number| number.trim().parse().ok())
        .context("/proc/self/status has no valid VmRSS")?;
    Ok(kilobytes * 1024)
}
