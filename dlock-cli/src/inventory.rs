//! `dlock inventory`: the segments of an inventory, and whether every unit is accounted for.

use anyhow::{Result, anyhow};
use clap::Args;
use dlock::Key;
use dlock_segment::Audit;
use serde::Serialize;

use crate::output::{self, BAD, BOLD, DIM, GOOD, grouped, styled};
use crate::{Common, exit_status};

/// Show the segments of an inventory and audit it
#[derive(Debug, Args)]
#[command(after_help = "\
Every unit is accounted for: initial + restocked = available + reserved + sold, in
each segment. Ends with status 1 and names the operations if something does not agree.

Example:
  dlock inventory phone --url redis://localhost")]
pub(crate) struct Inventory {
    /// The name of the inventory
    name: String,
}

#[derive(Serialize)]
struct Seen<'a> {
    inventory: &'a str,
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

impl Inventory {
    pub(crate) async fn run(self, common: &Common) -> Result<u8> {
        let key = Key::new(&self.name)?;
        let dlock = common.connect().await?;
        let inventory = match dlock_segment::Inventory::open(&dlock, key).await {
            Ok(inventory) => inventory,
            Err(dlock_segment::Error::NotFound(_)) => {
                return Err(anyhow!(
                    "there is no inventory `{}`; an application makes one with Inventory::builder",
                    self.name
                ));
            }
            Err(error) => return Err(error.into()),
        };
        let audit = inventory.audit().await?;
        if common.json {
            output::print_json(&Seen {
                inventory: &self.name,
                clean: audit.is_clean(),
                audit: &audit,
            })?;
        } else {
            self.show(&audit);
        }
        Ok(if audit.is_clean() { 0 } else { exit_status::FAILURE })
    }

    fn show(&self, audit: &Audit) {
        let Audit { initial, restocked, available, reserved, sold, .. } = *audit;
        output::print(format!(
            "{}: {} available, {} reserved, {} sold of {}",
            styled(BOLD, &self.name),
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
                output::print(format!("audit: {}{looked}", styled(BAD, "the counts do not agree")));
                for fault in faults {
                    let whose = fault.operation.as_deref().unwrap_or("the inventory");
                    output::print(format!("  {whose}: {}", fault.what));
                }
            }
        }
    }
}
