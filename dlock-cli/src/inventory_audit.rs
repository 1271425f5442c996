//! `dlock inventory NAME audit`: everything is counted again.

use std::io::IsTerminal as _;
use std::time::Duration;

use anyhow::Result;
use clap::Args;
use dlock_segment::{Audit, Counts, Inventory};
use indicatif::{ProgressBar, ProgressStyle};
use serde::Serialize;

use crate::output::{self, BAD, GOOD, styled};
use crate::{Common, exit_status};

/// Count everything again from the records of all orders
#[derive(Debug, Args)]
#[command(after_help = "\
Every unit is accounted for: initial + restocked = available + reserved + sold + written
off. Ends with status 1 and names the operations if something does not agree, and with
status 75 if the inventory changed all the time, so that the audit is not exact: pause it,
or try again when it is quiet.
It reads every record, up to five times while the inventory sells, and needs up to 70 bytes of
memory for each order.

Example:
  dlock inventory phone audit")]
pub(super) struct AuditArgs {}

#[derive(Serialize)]
struct Seen<'a> {
    inventory: &'a str,
    clean: bool,
    homes: u32,
    #[serde(flatten)]
    audit: &'a Audit,
}

impl AuditArgs {
    pub(super) async fn run(
        &self,
        name: &str,
        inventory: &Inventory,
        common: &Common,
    ) -> Result<u8> {
        let is_watched = std::io::stderr().is_terminal();
        let bar = if is_watched { ProgressBar::new_spinner() } else { ProgressBar::hidden() };
        bar.set_style(ProgressStyle::with_template("{spinner} {human_pos} records, {per_sec}")?);
        bar.enable_steady_tick(Duration::from_millis(200));
        let audit = inventory.audit_with_progress(|records| bar.set_position(records)).await;
        bar.finish_and_clear();
        let (audit, stock) = (audit?, inventory.stock().await?);
        if common.json {
            output::print_json(&Seen {
                inventory: name,
                clean: audit.is_clean(),
                homes: stock.homes,
                audit: &audit,
            })?;
        } else {
            let counts: Vec<Counts> = audit.segments.iter().map(|segment| segment.counts).collect();
            super::print_counts(name, &stock, &counts);
            show(&audit);
        }
        Ok(match (audit.disagreements.is_empty(), audit.exact) {
            (false, _) => exit_status::FAILURE,
            (true, false) => exit_status::BUSY,
            (true, true) => 0,
        })
    }
}

fn show(audit: &Audit) {
    let looked = if audit.exact { "" } else { " (not exact: it changed meanwhile)" };
    match audit.disagreements.as_slice() {
        [] if !audit.exact => output::print(
            "audit: not exact: the inventory changed meanwhile, so not everything was checked; try again when it is quiet",
        ),
        [] => {
            output::print(format!("audit: {}{looked}", styled(GOOD, "every unit is accounted for")))
        }
        faults => {
            output::print(format!("audit: {}{looked}", styled(BAD, "the counts do not agree")));
            for fault in faults {
                let whose = fault.operation.as_deref().unwrap_or("the inventory");
                output::print(format!("  {whose}: {}", fault.what));
            }
        }
    }
}
