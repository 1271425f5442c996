//! A flash sale from opening to sold out: more buyers than stock, all at once.

use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use anyhow::{Context as _, Result, bail};
use serde::{Deserialize, Serialize};

use crate::interrupt::Interrupt;
use crate::measure::{Latency, Measured, Recorder, rounded};
use crate::seller::{Method, Seller, Stall};
use crate::{Wrong, clock};

/// What to play.
#[derive(Clone, Debug)]
pub struct Plan {
    /// What is for sale and where.
    pub stall: Stall,
    /// How many buyers come, one order each.
    pub buyers: u64,
    /// How many units each wants: between these, drawn by the buyer's number, so
    /// that each method sees the same orders.
    pub quantity: (u64, u64),
}

/// What `--json` prints.
#[derive(Clone, Debug, Serialize, Deserialize)]
#[allow(missing_docs, reason = "the fields are named like what they hold; see schema.json")]
pub struct Outcome {
    pub method: Method,
    pub sold: u64,
    pub left: u64,
    pub oversold: u64,
    /// Orders a second, from the first until the stock was sold.
    pub ops_per_s: f64,
    #[serde(flatten)]
    pub latency: Latency,
    /// Requests to the server for each order that got something.
    pub round_trips: f64,
}

/// A sale that is over.
#[derive(Clone, Debug)]
pub struct Played {
    /// In short.
    pub outcome: Outcome,
    /// What the orders waited that got something.
    pub measured: Measured,
    /// What was left in each segment, over time.
    pub timeline: Timeline,
}

/// Seconds since the start, and what was left in each segment by then.
pub type Timeline = Vec<(f64, Vec<u64>)>;

/// How far a sale is.
#[derive(Debug, Default)]
pub struct Progress {
    /// How many buyers were served.
    pub served: AtomicU64,
    /// How many units were sold.
    pub sold: AtomicU64,
    next: AtomicU64,
    /// When the last unit was sold.
    last_sale: AtomicU64,
}

/// How often the segments are looked at.
const LOOK: Duration = Duration::from_millis(5);

/// Plays one sale; what it stores is removed, also when it is told to end.
///
/// # Errors
/// If the plan makes no sense, the store fails, or its audit finds a fault;
/// [`Interrupted`](crate::interrupt::Interrupted).
pub async fn play(
    plan: &Plan,
    method: Method,
    progress: Arc<Progress>,
    interrupt: &Interrupt,
) -> Result<Played> {
    let (least, most) = plan.quantity;
    if plan.buyers == 0 || least == 0 || most < least || plan.stall.at_once == 0 {
        return Err(Wrong::because("buyers, quantity and at-once must be 1 at least"));
    }
    let seller = Arc::new(Seller::open(plan.stall.clone(), method).await?);
    let played = interrupt.unless(sell_out(plan, method, &seller, progress)).await;
    seller.after(played).await
}

async fn sell_out(
    plan: &Plan,
    method: Method,
    seller: &Arc<Seller>,
    progress: Arc<Progress>,
) -> Result<Played> {
    let (least, most) = plan.quantity;
    let recorder = Arc::new(Recorder::default());
    let scripts = seller.scripts().await?;
    let start = clock::now();
    let timeline = Arc::new(Mutex::new(Vec::new()));
    // To look at the segments of a sale with ids is to read all of them.
    let looks = matches!(method, Method::SegmentedLock | Method::Inventory);
    let mut looking = tokio::task::JoinSet::new();
    if looks {
        looking.spawn(look(seller.clone(), start, timeline.clone()));
    }
    let mut serving = tokio::task::JoinSet::new();
    for task in 0..plan.stall.at_once {
        let (seller, recorder, progress) = (seller.clone(), recorder.clone(), progress.clone());
        let (buyers, span) = (plan.buyers, most - least + 1);
        serving.spawn(async move {
            loop {
                let buyer = progress.next.fetch_add(1, Ordering::Relaxed);
                if buyer >= buyers {
                    return;
                }
                tokio::task::consume_budget().await;
                let asked = clock::now();
                let want = least + spread(buyer) % span;
                match seller.sell(&format!("order-{buyer}"), want, u64::MAX).await {
                    Ok(None | Some(0)) => {}
                    Ok(Some(units)) => {
                        let now = clock::now();
                        recorder.operation(task, now - asked);
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
        served.context("a buyer was lost")?;
    }
    looking.shutdown().await;
    let last_sale = progress.last_sale.load(Ordering::Relaxed);
    let requests = seller.scripts().await?.saturating_sub(scripts) + seller.commands();
    let segments = seller.left().await?;
    let left = segments.iter().sum::<u64>();
    let mut timeline =
        std::mem::take(&mut *timeline.lock().unwrap_or_else(PoisonError::into_inner));
    timeline.retain(|(at, _)| *at < seconds(start, last_sale));
    timeline.push((seconds(start, last_sale), segments));
    let measured = recorder.measured();
    if let Some(error) = &measured.first_error {
        bail!("{} orders failed; the first: {error}", measured.errors);
    }
    let sold = progress.sold.load(Ordering::Relaxed);
    let orders = measured.operations as f64;
    let outcome = Outcome {
        method,
        sold,
        left,
        oversold: (sold + left).saturating_sub(plan.stall.stock),
        ops_per_s: rounded(orders / seconds(start, last_sale).max(1e-9)),
        latency: measured.latency(),
        round_trips: (requests as f64 / orders.max(1.0) * 1_000.0).round() / 1_000.0,
    };
    Ok(Played { outcome, measured, timeline })
}

/// Looks at the segments now and then, until it is ended.
async fn look(seller: Arc<Seller>, start: u64, seen: Arc<Mutex<Timeline>>) {
    let mut ticks = tokio::time::interval(LOOK);
    ticks.set_missed_tick_behavior(tokio::time::MissedTickBehavior::Delay);
    loop {
        ticks.tick().await;
        let Ok(left) = seller.left().await else { continue };
        let mut seen = seen.lock().unwrap_or_else(PoisonError::into_inner);
        seen.push((seconds(start, clock::now()), left));
    }
}

fn seconds(from: u64, until: u64) -> f64 {
    until.saturating_sub(from) as f64 / 1e9
}

/// A number that looks random and is the same for the same buyer.
fn spread(buyer: u64) -> u64 {
    (buyer + 1).wrapping_mul(0x9E37_79B9_7F4A_7C15) >> 33
}
