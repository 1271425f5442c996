//! `dlock inventory`: makes or changes an inventory, or shows its segments and whether every
//! unit is accounted for.

#[path = "inventory_actions.rs"]
mod actions;
#[path = "inventory_reconcile.rs"]
mod reconcile;

use anyhow::{Result, anyhow};
use clap::Args;
use dlock::{Dlock, Key};
use dlock_segment::Audit;
use serde::Serialize;

use self::actions::Action;
use crate::output::{self, BAD, BOLD, DIM, GOOD, grouped, styled};
use crate::{Common, exit_status};

/// Create or change an inventory, or show its segments and audit it
#[derive(Debug, Args)]
#[command(after_help = "\
Every unit is accounted for: initial + restocked = available + reserved + sold + written
off. Ends with status 1 and names the operations if something does not agree, and
with status 75 if the inventory changed all the time, so that the audit is not exact.

Examples:
  dlock inventory phone create --stock 1000 --per-buyer 2 --url redis://localhost
  dlock inventory phone --url redis://localhost
  dlock inventory phone create --stock 1000000 --homes 6 --url redis+cluster://a,b,c
  dlock inventory phone --url redis://a,b,c")]
pub(crate) struct Inventory {
    /// The name of the inventory
    name: String,
    #[command(subcommand)]
    action: Option<Action>,
}

#[derive(Serialize)]
struct Seen<'a> {
    inventory: &'a str,
    clean: bool,
    homes: u32,
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

/// Opens the inventory. A name that is not valid is told before anything is asked.
async fn open(common: &Common, name: &str) -> Result<(Vec<Dlock>, dlock_segment::Inventory)> {
    let key = Key::new(name)?;
    let clients = common.connect_all().await?;
    let opened = dlock_segment::Inventory::open_on(&clients, key, None).await;
    let opened = opened.map_err(|error| match error {
        dlock_segment::Error::NotFound(_) => anyhow!(
            "there is no inventory `{name}`; if it is new, make it with `dlock inventory NAME create`; if it was there before, the store lost it"
        ),
        error => error.into(),
    })?;
    Ok((clients, opened))
}

impl Inventory {
    pub(crate) async fn run(self, common: &Common) -> Result<u8> {
        if let Some(action) = &self.action {
            return action.run(&self.name, common).await;
        }
        let (_clients, inventory) = open(common, &self.name).await?;
        let audit = inventory.audit().await?;
        let stock = inventory.stock().await?;
        if common.json {
            output::print_json(&Seen {
                inventory: &self.name,
                clean: audit.is_clean(),
                homes: stock.homes,
                audit: &audit,
            })?;
        } else {
            self.show(&audit, stock.homes as usize);
        }
        Ok(match (audit.disagreements.is_empty(), audit.exact) {
            (false, _) => exit_status::FAILURE,
            (true, false) => exit_status::BUSY,
            (true, true) => 0,
        })
    }

    fn show(&self, audit: &Audit, homes: usize) {
        let Audit { initial, restocked, available, reserved, sold, written_off, .. } = *audit;
        let mut lost = match written_off {
            0 => String::new(),
            units => format!(", {} written off", grouped(units)),
        };
        if audit.in_transit > 0 {
            lost += &format!(", {} on their way between homes", grouped(audit.in_transit));
        }
        let each = (audit.segments.len() / homes.max(1)).max(1);
        output::print(format!(
            "{}: {} available, {} reserved, {} sold{lost} of {}",
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
            if homes > 1 && number % each == 0 {
                output::print(styled(DIM, format!("home {}", number / each)));
            }
            let bar = "█".repeat(length(available)) + &"░".repeat(length(reserved));
            output::print(format!(
                "{:>5} {} {}",
                number % each,
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
        let looked = if audit.exact { "" } else { " (not exact: it changed meanwhile)" };
        match audit.disagreements.as_slice() {
            [] if !audit.exact => output::print(
                "audit: not exact: the inventory changed meanwhile, so not everything was checked; try again when it is quiet",
            ),
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
