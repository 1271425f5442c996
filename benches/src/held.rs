//! Many locks that are held and nothing else: what renewal costs.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use anyhow::{Context as _, Result};
use dlock::{Config, Dlock, Event, Guard, State};
use serde::{Deserialize, Serialize};

use crate::interrupt::Interrupt;
use crate::measure::rounded;
use crate::{Wrong, clock, server};

/// How many locks are asked for at the same time.
const AT_ONCE: usize = 256;

/// What to do.
#[derive(Clone, Debug)]
pub struct Plan {
    /// How many are held.
    pub locks: usize,
    /// Their ttl: each is renewed every third of it.
    pub ttl: Duration,
    /// How long they are held once all are taken.
    pub duration: Duration,
    /// What the keys of this run start with.
    pub run: String,
}

/// What `--json` prints.
#[derive(Clone, Debug, Serialize, Deserialize)]
#[allow(missing_docs, reason = "the fields are named like what they hold; see schema.json")]
pub struct Outcome {
    pub workload: String,
    pub backend: String,
    pub locks: usize,
    pub ttl_ms: u64,
    pub seconds: f64,
    pub lost: u64,
    pub renewed: u64,
    pub client_cpu_percent: f64,
    /// `None` where there is no server.
    pub server_cpu_percent: Option<f64>,
    pub server_commands_per_s: Option<f64>,
    pub client_bytes_per_lock: u64,
}

/// Takes the locks, holds them, and tells what that cost.
///
/// # Errors
/// If the backend cannot be reached, or not all locks are free.
pub async fn run(config: &Config, plan: Plan, interrupt: &Interrupt) -> Result<Outcome> {
    if plan.locks == 0 || plan.duration.is_zero() {
        return Err(Wrong::because("locks and duration must be above zero"));
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
    let outcome = interrupt.unless(hold(config, &plan, &dlock, &lost, &renewed)).await;
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
    let mut server = match server::is_embedded(config) {
        true => None,
        false => Some(server::connect(config).await?),
    };

    let before = resident()?;
    let guards = take(dlock, plan).await?;
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
    // A guard that was lost without anybody being told would be a lie as well.
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

async fn take(dlock: &Dlock, plan: &Plan) -> Result<Vec<Guard>> {
    let mut guards = Vec::with_capacity(plan.locks);
    let mut next = 0;
    let mut taking = tokio::task::JoinSet::new();
    while guards.len() < plan.locks {
        while next < plan.locks && taking.len() < AT_ONCE {
            let lock = dlock.mutex(format!("{}:{next}", plan.run)).ttl(plan.ttl);
            taking.spawn(async move { lock.lock().await });
            next += 1;
        }
        let taken = taking.join_next().await.context("a task of the bench is missing")??;
        guards.push(taken.context("a lock could not be taken")?);
    }
    Ok(guards)
}

/// With two digits after the point.
fn percent(share: f64) -> f64 {
    (share * 10_000.0).round() / 100.0
}

/// How much memory this process has, in bytes.
fn resident() -> Result<u64> {
    let status = std::fs::read_to_string("/proc/self/status")
        .context("the memory of a process is read from /proc, which only Linux has")?;
    let line = status.lines().find_map(|line| line.strip_prefix("VmRSS:"));
    let kilobytes: u64 = line
        .and_then(|rest| rest.trim().strip_suffix("kB"))
        .and_then(|number| number.trim().parse().ok())
        .context("/proc/self/status tells no VmRSS")?;
    Ok(kilobytes * 1024)
}
