//! `dlock stock`: the segments of a sale, and whether its books agree.

use anyhow::{Result, anyhow};
use clap::Args;
use dlock::Key;
use dlock_segment::{Audit, Inventory};
use serde::Serialize;

use crate::output::{self, BAD, BOLD, DIM, GOOD, grouped, styled};
use crate::{Common, status};

/// Show the segments of a sale and audit it
#[derive(Debug, Args)]
#[command(after_help = "\
Every unit is accounted for: initial + restocked = available + reserved + sold, in
each segment. Ends with status 1 and names the operations if something does not agree.

Example:
  dlock stock phone --url redis://localhost")]
pub(crate) struct Stock {
    /// The sale
    sale: String,
}

#[derive(Serialize)]
struct Seen<'a> {
    sale: &'a str,
    clean: bool,
    #[serde(flatten)]
    audit: &'a Audit,
}

/// How wide a full segment is drawn, at most.
const WIDTH: u64 = 40;
/// What stands beside it in a line.
const BESIDE: u64 = 40;

/// How wide it is drawn on this terminal.
fn width() -> u64 {
    let columns = terminal_size::terminal_size().map(|(width, _)| u64::from(width.0));
    columns.map_or(WIDTH, |columns| columns.saturating_sub(BESIDE).clamp(4, WIDTH))
}

impl Stock {
    pub(crate) async fn run(self, common: &Common) -> Result<u8> {
        let key = Key::new(&self.sale)?;
        let dlock = common.connect().await?;
        let sale = match Inventory::open(&dlock, key).await {
            Ok(sale) => sale,
            Err(dlock_segment::Error::NotFound(_)) => {
                return Err(anyhow!(
                    "there is no sale `{}`; dlock never makes one by accident",
                    self.sale
                ));
            }
            Err(error) => return Err(error.into()),
        };
        let audit = sale.audit().await?;
        if common.json {
            output::print_json(&Seen { sale: &self.sale, clean: audit.is_clean(), audit: &audit })?;
        } else {
            self.show(&audit);
        }
        Ok(if audit.is_clean() { 0 } else { status::FAILURE })
    }

    fn show(&self, audit: &Audit) {
        let Audit { initial, restocked, available, reserved, sold, .. } = *audit;
        output::print(format!(
            "{}: {} available, {} reserved, {} sold of {}",
            styled(BOLD, &self.sale),
            grouped(available),
            grouped(reserved),
            grouped(sold),
            grouped(initial + restocked),
        ));
        let most = audit.segments.iter().map(|it| it.counts.available + it.counts.reserved);
        let (most, width) = (most.max().unwrap_or(0).max(1), width());
        for (number, segment) in audit.segments.iter().enumerate() {
            let (available, reserved) = (segment.counts.available, segment.counts.reserved);
            let length = |units: u64| usize::try_from((units * width).div_ceil(most)).unwrap_or(0);
            let bar = "█".repeat(length(available)) + &"░".repeat(length(reserved));
            output::print(format!(
                "{number:>5} {} {}",
                styled(GOOD, bar),
                styled(
                    DIM,
                    format!(
                        "{} + {} reserved, {} sold",
                        grouped(available),
                        grouped(reserved),
                        grouped(segment.counts.sold)
                    )
                ),
            ));
        }
        let looked =
            if audit.exact { "" } else { " (it was moving, so not everything was checked)" };
        match audit.disagreements.as_slice() {
            [] => output::print(format!(
                "audit: {}{looked}",
                styled(GOOD, "every unit is accounted for")
            )),
            faults => {
                output::print(format!("audit: {}{looked}", styled(BAD, "the books do not agree")));
                for fault in faults {
                    let whose = fault.operation.as_deref().unwrap_or("the sale");
                    output::print(format!("  {whose}: {}", fault.what));
                }
            }
        }
    }
}
