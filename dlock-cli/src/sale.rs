//! `dlock sale`: a simulated flash sale with each of four methods.

use std::fs::File;
use std::io::Write as _;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

use anyhow::{Context as _, Result};
use clap::Args;
use dlock_bench::interrupt::{Interrupt, Interrupted};
use dlock_bench::load::Load;
use dlock_bench::processes::Launcher;
use dlock_bench::seller::{Method, SellerConfig};
use dlock_bench::server;
use dlock_bench::spread::Spread;
use dlock_bench::workload::deduct;
use dlock_bench::workload::sale::{self, Outcome, Plan, Progress, SaleResult};
use indicatif::{ProgressBar, ProgressStyle};

use crate::output::{self, BAD, DIM, GOOD, grouped, latency, styled};
use crate::{Common, bench, sale_report};

/// Simulate a flash sale with four methods: one lock, segmented lock, inventory, reservations
#[derive(Debug, Args)]
#[command(after_help = "\
Each buyer places one order for a few units and takes fewer if there are not enough
left. No method may sell more units than the stock has. The methods with locks protect
a count that the client reads and writes back. The inventory keeps the count in the
store.

Examples:
  dlock sale
  dlock sale --url redis://localhost --report sale.html
  dlock sale --url 'redis://a,b,c?homes=6'
  dlock sale --stock 1000 --buyers 5000 --quantity 1 --json")]
pub(crate) struct Sale {
    /// The number of units for sale
    #[arg(long, default_value_t = 10_000, value_parser = clap::value_parser!(u64).range(1..=MAX_STOCK))]
    stock: u64,
    /// The number of buyers
    #[arg(long, default_value_t = 50_000, value_parser = clap::value_parser!(u64).range(1..))]
    buyers: u64,
    /// The number of segments of the stock
    #[arg(long, default_value_t = 20, value_parser = clap::value_parser!(u32).range(1..=4_096))]
    segments: u32,
    /// The number of homes of an inventory [default: as in the URL; two for each of several servers, six in a cluster]
    #[arg(long, value_parser = clap::value_parser!(u32).range(1..=128))]
    homes: Option<u32>,
    /// The units that each buyer wants: a number, or a range such as 1..3 (both included)
    #[arg(long, default_value = "1..3", value_parser = quantity)]
    quantity: (u64, u64),
    /// How long each order takes; methods with a lock hold it for this time
    #[arg(long, default_value = "1ms", value_parser = humantime::parse_duration)]
    think: Duration,
    /// The number of buyers served at the same time
    #[arg(long, default_value_t = 1_000, value_parser = bench::up_to(1_000_000))]
    at_once: usize,
    /// Write an HTML report with charts to this file
    #[arg(long)]
    report: Option<PathBuf>,
}

/// The most units that an inventory can have, minus one for the spare reservation.
const MAX_STOCK: u64 = u32::MAX as u64 - 1;
/// The most units in an order. An order that cannot be filled retries with one unit
/// less, so this bounds the number of retries.
const MAX_QUANTITY: u64 = 1_000;

fn quantity(text: &str) -> Result<(u64, u64), String> {
    let error = || {
        format!("`{text}` is neither a number from 1 to {MAX_QUANTITY} nor a range such as 1..3")
    };
    let number =
        |text: &str| text.parse::<u64>().ok().filter(|number| (1..=MAX_QUANTITY).contains(number));
    let (least, most) = match text.split_once("..") {
        Some((least, most)) => (number(least), number(most.trim_start_matches('='))),
        None => (number(text), number(text)),
    };
    match (least, most) {
        (Some(least), Some(most)) if least <= most => Ok((least, most)),
        _ => Err(error()),
    }
}

/// The numbers of segments that the report compares.
const COMPARED_SEGMENTS: [u32; 6] = [1, 2, 5, 10, 20, 40];
/// How long each number of segments is measured.
const COMPARED_TIME: Duration = Duration::from_secs(1);

impl Sale {
    pub(crate) async fn run(self, common: &Common) -> Result<()> {
        let config = common.load_config()?;
        let report = self.report.as_deref().map(open_report).transpose()?;
        let interrupt = Interrupt::listen()?;
        server::check_reachable(&config).await?;
        let spread = common.spread(self.homes)?;
        // The count that a client reads and writes back is on one server.
        let methods: Vec<Method> = match spread.is_several() {
            false => Method::ALL.to_vec(),
            true => vec![Method::Inventory, Method::InventoryIdempotent],
        };
        let plan = Plan {
            seller: SellerConfig {
                backend: config,
                key_prefix: format!("sale-{:016x}", rand::random::<u64>()),
                stock: self.stock,
                segments: self.segments,
                spread: spread.clone(),
                think: self.think,
                reserve_first: true,
                at_once: self.at_once,
            },
            buyers: self.buyers,
            quantity: self.quantity,
        };
        let mut results = Vec::new();
        for method in methods {
            let result = simulate(&plan, method, &interrupt).await?;
            if common.json {
                output::print_json(&result.outcome)?;
            }
            if output::is_closed() {
                return Ok(());
            }
            results.push(result);
        }
        if !common.json {
            print_results(&results);
        }
        if let Some((path, mut file)) = report {
            let by_segments = match spread.is_several() {
                false => {
                    throughput_by_segments(&plan, &bench::launcher(common)?, &interrupt).await?
                }
                true => Vec::new(), // segments with locks are on one server
            };
            let page = sale_report::page(&plan, &results, &by_segments)?;
            let written = file.set_len(0).and_then(|()| file.write_all(page.as_bytes()));
            written.with_context(|| format!("cannot write {}", path.display()))?;
            if !common.json {
                output::print(format!("\nreport: {}", path.display()));
            }
        } else if !common.json {
            output::print(styled(DIM, "\nfor charts, add --report sale.html"));
        }
        let oversold: u64 = results.iter().map(|result| result.outcome.oversold).sum();
        anyhow::ensure!(oversold == 0, "{oversold} more units were sold than the stock has");
        Ok(())
    }
}

/// Opens the report before the sale, so that a wrong path is found early.
fn open_report(path: &Path) -> Result<(&Path, File)> {
    let file = File::options().append(true).create(true).open(path);
    Ok((path, file.with_context(|| format!("cannot write {}", path.display()))?))
}

/// Simulates one sale, with a progress bar on a terminal.
async fn simulate(plan: &Plan, method: Method, interrupt: &Interrupt) -> Result<SaleResult> {
    let progress = Arc::new(Progress::default());
    // Drawn on standard error, and only if that is a terminal.
    let bar = ProgressBar::new(plan.seller.stock);
    let style = "{prefix:>20} {bar:40} {pos}/{len} sold, {msg}";
    bar.set_style(ProgressStyle::with_template(style)?);
    bar.set_prefix(method.name());
    let running = sale::run(plan, method, progress.clone(), interrupt);
    tokio::pin!(running);
    let mut ticks = tokio::time::interval(Duration::from_millis(50));
    let result = loop {
        tokio::select! {
            result = &mut running => break result,
            _ = ticks.tick() => {
                bar.set_position(progress.sold.load(Ordering::Relaxed));
                let served = progress.served.load(Ordering::Relaxed);
                bar.set_message(format!("{} of {} buyers served", grouped(served), grouped(plan.buyers)));
            }
        }
    };
    bar.finish_and_clear();
    result.map_err(|error| match error.is::<Interrupted>() {
        true => error,
        false => error.context(format!("the sale with {} failed", method.name())),
    })
}

/// The throughput of the segmented lock for several numbers of segments. The stock never
/// runs out, so that the slow end of a sale does not count.
async fn throughput_by_segments(
    plan: &Plan,
    launcher: &Launcher,
    interrupt: &Interrupt,
) -> Result<Vec<(u32, f64)>> {
    let mut points = Vec::new();
    for segments in COMPARED_SEGMENTS {
        let load = Load {
            tasks: plan.seller.at_once,
            processes: 1,
            warmup: COMPARED_TIME / 4,
            duration: COMPARED_TIME,
            rate: None,
            process: 0,
        };
        let point = deduct::Plan {
            mode: Method::SegmentedLock,
            load,
            segments,
            spread: Spread::default(),
            hold: plan.seller.think,
            key_prefix: format!("{}-{segments}", plan.seller.key_prefix),
        };
        let outcome = deduct::run(&plan.seller.backend, point, launcher, interrupt).await?;
        points.push((segments, outcome.ops_per_s));
    }
    Ok(points)
}

/// The table cells of a sale: sold, left, oversold, orders per second, p50, p99, max and
/// round trips.
pub(crate) fn cells(outcome: &Outcome) -> [String; 8] {
    [
        grouped(outcome.sold),
        grouped(outcome.left),
        outcome.oversold.to_string(),
        grouped(outcome.ops_per_s as u64),
        latency(outcome.latency.p50_us),
        latency(outcome.latency.p99_us),
        latency(outcome.latency.max_us),
        format!("{:.2}", outcome.round_trips),
    ]
}

fn print_results(results: &[SaleResult]) {
    let headers =
        ["METHOD", "SOLD", "LEFT", "OVERSOLD", "ORDERS/S", "P50", "P99", "MAX", "ROUND TRIPS"];
    let mut table = output::table(&headers, &headers[1..]);
    for SaleResult { outcome, .. } in results {
        let name = outcome.method.name().to_owned();
        table.add_row(std::iter::once(name).chain(cells(outcome)));
    }
    output::print(table);
    let exact = results.iter().all(|result| result.outcome.oversold == 0);
    let verdict = match exact {
        true => styled(GOOD, "no unit was sold twice"),
        false => styled(BAD, "units were sold twice"),
    };
    output::print(format!(
        "\n{verdict}\nORDERS/S counts until the stock was sold out. P50, P99 and MAX are the times from order\nto answer. ROUND TRIPS are the requests to the server per order."
    ));
}

#[cfg(test)]
mod tests {
    use super::quantity;

    #[test]
    fn quantities() {
        assert_eq!(quantity("2"), Ok((2, 2)));
        assert_eq!(quantity("1..3"), Ok((1, 3)));
        assert_eq!(quantity("1..=3"), Ok((1, 3)));
        for bad in ["0", "3..1", "x", "0..2", "..", ""] {
            assert!(quantity(bad).is_err(), "{bad}");
        }
    }
}
