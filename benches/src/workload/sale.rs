//! A simulated flash sale: more buyers than units, until the stock is sold out.

use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use anyhow::{Context as _, Result, bail};
use serde::{Deserialize, Serialize};

use crate::interrupt::Interrupt;
use crate::measurement::{LatencySummary, Measurement, Recorder, rounded};
use crate::seller::{Method, Seller, SellerConfig};
use crate::{clock, cpu, usage_error};

/// The flash sale to simulate.
#[derive(Clone, Debug)]
pub struct Plan {
    /// The stock.
    pub seller: SellerConfig,
    /// The number of buyers. Each places one order.
    pub buyers: u64,
    /// The smallest and the largest number of units in an order. The number depends on
    /// the buyer only, so every method gets the same orders.
    pub quantity: (u64, u64),
}

/// The result, as `--json` prints it.
#[derive(Clone, Debug, Serialize, Deserialize)]
#[allow(missing_docs, reason = "schema.json describes the fields")]
pub struct Outcome {
    pub method: Method,
    pub sold: u64,
    pub left: u64,
    pub oversold: u64,
    /// The orders per second, from the first until the stock was sold.
    pub ops_per_s: f64,
    #[serde(flatten)]
    pub latency: LatencySummary,
    /// The requests to the server for each order that got units.
    pub round_trips: f64,
    pub homes: u32,
    /// How often units were brought from one home to another.
    pub moves: u64,
    /// The share of one core that each server used, from the first order to the last.
    pub server_cpu: Vec<Option<f64>>,
}

/// The result of a sale, with the details for the report.
#[derive(Clone, Debug)]
pub struct SaleResult {
    /// The summary.
    pub outcome: Outcome,
    /// The latencies of the orders that got units.
    pub measured: Measurement,
    /// The units left in each segment over time.
    pub timeline: Timeline,
}

/// Pairs of the seconds since the start and the units left in each segment.
pub type Timeline = Vec<(f64, Vec<u64>)>;

/// The progress of a sale.
#[derive(Debug, Default)]
pub struct Progress {
    /// The number of buyers that were served.
    pub served: AtomicU64,
    /// The number of units that were sold.
    pub sold: AtomicU64,
    next_buyer: AtomicU64,
    /// The time when the last unit was sold, by [`clock::now`].
    last_sale: AtomicU64,
}

/// How often the stock of each segment is sampled.
const SAMPLE_INTERVAL: Duration = Duration::from_millis(5);

/// Simulates one sale. The stock is removed at the end, also when a signal ends the run.
///
/// # Errors
/// Fails if the plan is not valid, the store fails, or its audit finds a fault, and with
/// [`Interrupted`](crate::interrupt::Interrupted) if a signal ends it.
pub async fn run(
    plan: &Plan,
    method: Method,
    progress: Arc<Progress>,
    interrupt: &Interrupt,
) -> Result<SaleResult> {
    let (least, most) = plan.quantity;
    if plan.buyers == 0 || least == 0 || most < least || plan.seller.at_once == 0 {
        return Err(usage_error("buyers, quantity and at-once must be at least 1"));
    }
    let seller = Arc::new(Seller::create(plan.seller.clone(), method).await?);
    let result = interrupt.run_until_signal(sell_out(plan, method, &seller, progress)).await;
    seller.close_after(result).await
}

async fn sell_out(
    plan: &Plan,
    method: Method,
    seller: &Arc<Seller>,
    progress: Arc<Progress>,
) -> Result<SaleResult> {
    let (least, most) = plan.quantity;
    let recorder = Arc::new(Recorder::default());
    let scripts_before = seller.script_calls().await?;
    let servers = plan.seller.spread.servers(&plan.seller.backend).await?;
    let cpu_before = cpu::usage_now(&servers).await;
    let start = clock::now();
    let timeline = Arc::new(Mutex::new(Vec::new()));
    // With operation ids a sample would read all ids, so these sales are not sampled.
    let samples = matches!(method, Method::SegmentedLock | Method::Inventory);
    let mut sampling = tokio::task::JoinSet::new();
    if samples {
        sampling.spawn(sample_segments(seller.clone(), start, timeline.clone()));
    }
    let mut serving = tokio::task::JoinSet::new();
    for task in 0..plan.seller.at_once {
        let (seller, recorder, progress) = (seller.clone(), recorder.clone(), progress.clone());
        let (buyers, span) = (plan.buyers, most - least + 1);
        serving.spawn(async move {
            loop {
                let buyer = progress.next_buyer.fetch_add(1, Ordering::Relaxed);
                if buyer >= buyers {
                    return;
                }
                tokio::task::consume_budget().await;
                let requested = clock::now();
                let want = least + pseudo_random(buyer) % span;
                match seller.sell(&format!("order-{buyer}"), want, u64::MAX).await {
                    Ok(None | Some(0)) => {}
                    Ok(Some(units)) => {
                        let now = clock::now();
                        recorder.operation(task, now - requested);
                        progress.sold.fetch_add(units, Ordering::Relaxed);
                        progress.last_sale.fetch_max(now, Ordering::Relaxed);
                    }
                    Err(error) => recorder.error(task, &format!("{error:#}")),
                }
                progress.served.fetch_add(1, Ordering::Relaxed);
            }
        });
    }
    while let Some(served) = serving.join_next().await {
        served.context("a buyer task panicked")?;
    }
    sampling.shutdown().await;
    let last_sale = progress.last_sale.load(Ordering::Relaxed);
    let requests = seller.script_calls().await?.saturating_sub(scripts_before) + seller.commands();
    let segments = seller.left().await?;
    let left = segments.iter().sum::<u64>();
    let mut timeline =
        std::mem::take(&mut *timeline.lock().unwrap_or_else(PoisonError::into_inner));
    timeline.retain(|(at, _)| *at < seconds(start, last_sale));
    timeline.push((seconds(start, last_sale), segments));
    let measured = recorder.measurement();
    if let Some(error) = &measured.first_error {
        bail!("{} orders failed; the first error: {error}", measured.errors);
    }
    let sold = progress.sold.load(Ordering::Relaxed);
    let orders = measured.operations as f64;
    let outcome = Outcome {
        method,
        sold,
        left,
        oversold: (sold + left).saturating_sub(plan.seller.stock),
        ops_per_s: rounded(orders / seconds(start, last_sale).max(1e-9)),
        latency: measured.latency(),
        round_trips: (requests as f64 / orders.max(1.0) * 1_000.0).round() / 1_000.0,
        homes: plan.seller.spread.homes,
        moves: seller.moves(),
        server_cpu: cpu::shares_since(&cpu_before).await,
    };
    Ok(SaleResult { outcome, measured, timeline })
}

/// Samples the stock of each segment until it is cancelled.
async fn sample_segments(seller: Arc<Seller>, start: u64, timeline: Arc<Mutex<Timeline>>) {
    let mut ticks = tokio::time::interval(SAMPLE_INTERVAL);
    ticks.set_missed_tick_behavior(tokio::time::MissedTickBehavior::Delay);
    loop {
        ticks.tick().await;
        let Ok(left) = seller.left().await else { continue };
        let mut timeline = timeline.lock().unwrap_or_else(PoisonError::into_inner);
        timeline.push((seconds(start, clock::now()), left));
    }
}

fn seconds(from: u64, until: u64) -> f64 {
    until.saturating_sub(from) as f64 / 1e9
}

/// A number that looks random and is always the same for the same buyer.
fn pseudo_random(buyer: u64) -> u64 {
    (buyer + 1).wrapping_mul(0x9E37_79B9_7F4A_7C15) >> 33
}
