//! `dlock sale`: one flash sale, played four ways.

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
use dlock_bench::workload::deduct;
use dlock_bench::workload::sale::{self, Outcome, Plan, Progress, SaleResult};
use indicatif::{ProgressBar, ProgressStyle};

use crate::output::{self, BAD, DIM, GOOD, grouped, latency, styled};
use crate::{Common, bench, report};

/// Play a flash sale four ways: one lock, segments, inventory, reservations
#[derive(Debug, Args)]
#[command(after_help = "\
Every buyer wants a few units at once, or what is left of them; when all buyers have
come, no more than the stock is sold, and all of it if they wanted as much. Locks guard a count that is read, thought about and written back; the inventory keeps the
count in the store.

Examples:
  dlock sale
  dlock sale --url redis://localhost --report sale.html
  dlock sale --stock 1000 --buyers 5000 --quantity 1 --json")]
pub(crate) struct Sale {
    /// Units for sale
    #[arg(long, default_value_t = 10_000, value_parser = clap::value_parser!(u64).range(1..=MOST_UNITS))]
    stock: u64,
    /// Buyers who come
    #[arg(long, default_value_t = 50_000, value_parser = clap::value_parser!(u64).range(1..))]
    buyers: u64,
    /// Segments of the stock
    #[arg(long, default_value_t = 20, value_parser = clap::value_parser!(u32).range(1..=4_096))]
    segments: u32,
    /// Units each buyer wants: a number, or a range such as 1..3 (both included)
    #[arg(long, default_value = "1..3", value_parser = quantity)]
    quantity: (u64, u64),
    /// How long an order takes to think about; under the lock where there is one
    #[arg(long, default_value = "1ms", value_parser = humantime::parse_duration)]
    think: Duration,
    /// Buyers served at the same time
    #[arg(long, default_value_t = 1_000, value_parser = bench::up_to(1_000_000))]
    at_once: usize,
    /// Write a report with pictures to this file
    #[arg(long)]
    report: Option<PathBuf>,
}

/// What an inventory can hold, but one.
const MOST_UNITS: u64 = u32::MAX as u64 - 1;
/// Whoever does not get as many takes fewer, one step at a time.
const MOST_WANTED: u64 = 1_000;

fn quantity(text: &str) -> Result<(u64, u64), String> {
    let fault =
        || format!("`{text}` is neither a number from 1 to {MOST_WANTED} nor a range such as 1..3");
    let number =
        |text: &str| text.parse::<u64>().ok().filter(|number| (1..=MOST_WANTED).contains(number));
    let (least, most) = match text.split_once("..") {
        Some((least, most)) => (number(least), number(most.trim_start_matches('='))),
        None => (number(text), number(text)),
    };
    match (least, most) {
        (Some(least), Some(most)) if least <= most => Ok((least, most)),
        _ => Err(fault()),
    }
}

/// With so many segments throughput is measured for the report.
const CURVE: [u32; 6] = [1, 2, 5, 10, 20, 40];
/// For so long for each number of them.
const CURVE_TIME: Duration = Duration::from_secs(1);

impl Sale {
    pub(crate) async fn run(self, common: &Common) -> Result<()> {
        let config = common.config_of_load()?;
        let report = self.report.as_deref().map(writable).transpose()?;
        let interrupt = Interrupt::listen()?;
        server::check_reachable(&config).await?;
        let plan = Plan {
            seller: SellerConfig {
                backend: config,
                key_prefix: format!("sale-{:016x}", rand::random::<u64>()),
                stock: self.stock,
                segments: self.segments,
                think: self.think,
                reserve_first: true,
                at_once: self.at_once,
            },
            buyers: self.buyers,
            quantity: self.quantity,
        };
        let mut played = Vec::new();
        for method in Method::ALL {
            let one = play(&plan, method, &interrupt).await?;
            if common.json {
                output::print_json(&one.outcome)?;
            }
            if output::is_over() {
                return Ok(());
            }
            played.push(one);
        }
        if !common.json {
            show(&played);
        }
        if let Some((path, mut file)) = report {
            let curve = curve(&plan, &bench::launcher(common)?, &interrupt).await?;
            let page = report::page(&plan, &played, &curve)?;
            let written = file.set_len(0).and_then(|()| file.write_all(page.as_bytes()));
            written.with_context(|| format!("cannot write {}", path.display()))?;
            if !common.json {
                output::print(format!("\nreport: {}", path.display()));
            }
        } else if !common.json {
            output::print(styled(DIM, "\npictures: add --report sale.html"));
        }
        let oversold: u64 = played.iter().map(|one| one.outcome.oversold).sum();
        anyhow::ensure!(oversold == 0, "{oversold} units were sold twice");
        Ok(())
    }
}

/// The file, before the sale is played for nothing.
fn writable(path: &Path) -> Result<(&Path, File)> {
    let file = File::options().append(true).create(true).open(path);
    Ok((path, file.with_context(|| format!("cannot write {}", path.display()))?))
}

/// Plays one sale, with a bar on a terminal.
async fn play(plan: &Plan, method: Method, interrupt: &Interrupt) -> Result<SaleResult> {
    let progress = Arc::new(Progress::default());
    // Drawn on standard error, and not at all if that is no terminal.
    let bar = ProgressBar::new(plan.seller.stock);
    let style = "{prefix:>20} {bar:40} {pos}/{len} sold, {msg}";
    bar.set_style(ProgressStyle::with_template(style)?);
    bar.set_prefix(method.name());
    let playing = sale::run(plan, method, progress.clone(), interrupt);
    tokio::pin!(playing);
    let mut ticks = tokio::time::interval(Duration::from_millis(50));
    let played = loop {
        tokio::select! {
            played = &mut playing => break played,
            _ = ticks.tick() => {
                bar.set_position(progress.sold.load(Ordering::Relaxed));
                let served = progress.served.load(Ordering::Relaxed);
                bar.set_message(format!("{} of {} buyers served", grouped(served), grouped(plan.buyers)));
            }
        }
    };
    bar.finish_and_clear();
    played.map_err(|error| match error.is::<Interrupted>() {
        true => error,
        false => error.context(format!("the sale by {} failed", method.name())),
    })
}

/// Throughput of the segmented lock over the number of segments, from a stock that
/// does not end, so that the last units of a sale do not count.
async fn curve(plan: &Plan, launcher: &Launcher, interrupt: &Interrupt) -> Result<Vec<(u32, f64)>> {
    let mut points = Vec::new();
    for segments in CURVE {
        let load = Load {
            tasks: plan.seller.at_once,
            processes: 1,
            warmup: CURVE_TIME / 4,
            duration: CURVE_TIME,
            rate: None,
            process: 0,
        };
        let point = deduct::Plan {
            mode: Method::SegmentedLock,
            load,
            segments,
            hold: plan.seller.think,
            key_prefix: format!("{}-{segments}", plan.seller.key_prefix),
        };
        let measured = deduct::run(&plan.seller.backend, point, launcher, interrupt).await?;
        points.push((segments, measured.ops_per_s));
    }
    Ok(points)
}

/// What the tables say of a sale: sold, left, oversold, orders a second, times,
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

fn show(played: &[SaleResult]) {
    let heads =
        ["METHOD", "SOLD", "LEFT", "OVERSOLD", "ORDERS/S", "P50", "P99", "MAX", "ROUND TRIPS"];
    let mut table = output::table(&heads, &heads[1..]);
    for SaleResult { outcome, .. } in played {
        let name = outcome.method.name().to_owned();
        table.add_row(std::iter::once(name).chain(cells(outcome)));
    }
    output::print(table);
    let exact = played.iter().all(|one| one.outcome.oversold == 0);
    let verdict = match exact {
        true => styled(GOOD, "nothing was sold twice"),
        false => styled(BAD, "units were sold twice"),
    };
    output::print(format!(
        "\n{verdict}; orders a second until the stock was gone, time from asking to answer"
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
