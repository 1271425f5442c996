//! Tasks that take one unit at a time from a stock that does not end.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use anyhow::{Result, bail};
use serde::{Deserialize, Serialize};

use crate::measure::{Latency, Recorder, rounded};
use crate::seller::{Method, Seller, Stall};
use crate::{clock, server};

/// More than a bench can sell.
const STOCK: u64 = 4_000_000_000;

/// What to do.
#[derive(Clone, Debug)]
pub struct Plan {
    /// Where the stock is.
    pub url: String,
    /// How it is kept.
    pub mode: Method,
    /// How many tasks.
    pub tasks: usize,
    /// In how many segments the stock is.
    pub segments: u32,
    /// How long a locked body takes; without a lock nothing waits.
    pub hold: Duration,
    /// How long the load runs before it is counted.
    pub warmup: Duration,
    /// How long it is counted.
    pub duration: Duration,
    /// What the keys of this run start with.
    pub run: String,
}

/// What `--json` prints.
#[derive(Clone, Debug, Serialize, Deserialize)]
#[allow(missing_docs, reason = "the fields are named like what they hold; see schema.json")]
pub struct Outcome {
    pub workload: String,
    pub mode: Method,
    pub backend: String,
    pub tasks: usize,
    pub segments: u32,
    pub seconds: f64,
    pub operations: u64,
    pub ops_per_s: f64,
    #[serde(flatten)]
    pub latency: Latency,
    pub oversold: u64,
    /// Requests to the server for each unit.
    pub round_trips: f64,
    pub errors: u64,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub first_error: Option<String>,
}

/// Runs the load.
///
/// # Errors
/// If the plan makes no sense or the store cannot be reached.
pub async fn run(plan: Plan) -> Result<Outcome> {
    if plan.tasks == 0 || plan.duration.is_zero() {
        bail!("tasks and duration must be above zero");
    }
    let locked = matches!(plan.mode, Method::GlobalLock | Method::SegmentedLock);
    let stall = Stall {
        url: plan.url.clone(),
        run: plan.run.clone(),
        stock: STOCK,
        segments: plan.segments,
        think: if locked { plan.hold } else { Duration::ZERO },
        reserves: false,
        at_once: plan.tasks,
    };
    let seller = Arc::new(Seller::open(stall, plan.mode).await?);
    let recorder = Arc::new(Recorder::default());
    let sold = Arc::new(AtomicU64::new(0));
    let requests = seller.requests().await?;
    let counted = clock::now() + clock::nanos(plan.warmup);
    let end = counted + clock::nanos(plan.duration);
    let mut running = tokio::task::JoinSet::new();
    for task in 0..plan.tasks {
        let (seller, recorder, sold) = (seller.clone(), recorder.clone(), sold.clone());
        running.spawn(async move {
            let mut order = 0_u64;
            while clock::now() < end {
                tokio::task::consume_budget().await;
                order += 1;
                let asked = clock::now();
                match seller.sell(&format!("{task}-{order}"), 1).await {
                    Ok(units) => {
                        sold.fetch_add(units, Ordering::Relaxed);
                        let now = clock::now();
                        if asked >= counted && now < end {
                            recorder.operation(task, now - asked);
                        }
                    }
                    Err(error) => {
                        recorder.error(task, &format!("{error:#}"));
                        tokio::time::sleep(Duration::from_millis(10)).await;
                    }
                }
            }
        });
    }
    while running.join_next().await.is_some() {}
    let sold = sold.load(Ordering::Relaxed);
    let requests = seller.requests().await?.saturating_sub(requests);
    let left = seller.total_left().await?;
    seller.close().await?;

    let measured = recorder.measured();
    let seconds = plan.duration.as_secs_f64();
    Ok(Outcome {
        workload: "deduct".into(),
        mode: plan.mode,
        backend: server::backend(&plan.url).into(),
        tasks: plan.tasks,
        segments: plan.segments,
        seconds,
        operations: measured.operations,
        ops_per_s: rounded(measured.operations as f64 / seconds),
        latency: measured.latency(),
        oversold: (sold + left).saturating_sub(STOCK),
        round_trips: (requests as f64 / sold.max(1) as f64 * 10_000.0).round() / 10_000.0,
        errors: measured.errors,
        first_error: measured.first_error,
    })
}
