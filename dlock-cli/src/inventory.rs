//! `dlock inventory`: makes an inventory, or shows its segments and whether every unit is
//! accounted for.

use std::time::{Duration, SystemTime};

use anyhow::{Result, anyhow};
use clap::{Args, Subcommand};
use dlock::Key;
use dlock_segment::Audit;
use serde::Serialize;

use crate::output::{self, BAD, BOLD, DIM, GOOD, grouped, styled};
use crate::{Common, exit_status};

/// Create an inventory, or show its segments and audit it
#[derive(Debug, Args)]
#[command(after_help = "\
Every unit is accounted for: initial + restocked = available + reserved + sold, in
each segment. Ends with status 1 and names the operations if something does not agree, and
with status 75 if the inventory changed all the time, so that the audit is not exact.

Examples:
  dlock inventory phone create --stock 1000 --per-buyer 2 --url redis://localhost
  dlock inventory phone --url redis://localhost")]
pub(crate) struct Inventory {
    /// The name of the inventory
    name: String,
    #[command(subcommand)]
    action: Option<Action>,
}

#[derive(Debug, Subcommand)]
enum Action {
    Create(Create),
}

/// Create the inventory and print its creation id, which services open it by
#[derive(Debug, Args)]
#[command(after_help = "\
Creating it again with the same terms changes nothing and prints the same id. After the
store lost its data, it makes a new inventory with the whole stock: restore it from your
orders before anybody buys.

Example:
  dlock inventory phone create --stock 1000 --segments 16 --per-buyer 2")]
struct Create {
    /// How many units there are at first; 0 if they come with a restock
    #[arg(long)]
    stock: u64,
    /// In how many segments the units are counted
    #[arg(long, default_value_t = 1)]
    segments: u32,
    /// How many units a buyer may have
    #[arg(long)]
    per_buyer: Option<u64>,
    /// When it starts to sell, in milliseconds of Unix time
    #[arg(long)]
    opens_at: Option<u64>,
    /// When it stops selling, in milliseconds of Unix time
    #[arg(long)]
    closes_at: Option<u64>,
    /// For how many seconds an operation id is remembered at least [default: a day]
    #[arg(long)]
    retention: Option<u64>,
    /// Keep a journal of at least so many effects
    #[arg(long)]
    journal: Option<u64>,
}

impl Create {
    async fn run(&self, name: &str, common: &Common) -> Result<u8> {
        let dlock = common.connect().await?;
        let mut builder = dlock_segment::Inventory::builder(&dlock, Key::new(name)?)
            .stock(self.stock)
            .segments(self.segments);
        let time = |millis| SystemTime::UNIX_EPOCH + Duration::from_millis(millis);
        if let Some(limit) = self.per_buyer {
            builder = builder.per_buyer(limit);
        }
        if let Some(opens_at) = self.opens_at {
            builder = builder.opens_at(time(opens_at));
        }
        if let Some(closes_at) = self.closes_at {
            builder = builder.closes_at(time(closes_at));
        }
        if let Some(seconds) = self.retention {
            builder = builder.retention(Duration::from_secs(seconds));
        }
        if let Some(entries) = self.journal {
            builder = builder.journal(entries);
        }
        let id = builder.create().await?.creation_id();
        if common.json {
            output::print_json(&Created { inventory: name, creation_id: id })?;
        } else {
            output::print(format!("{id}"));
        }
        Ok(0)
    }
}

#[derive(Serialize)]
struct Created<'a> {
    inventory: &'a str,
    creation_id: dlock_segment::CreationId,
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
        if let Some(Action::Create(create)) = &self.action {
            return create.run(&self.name, common).await;
        }
        let key = Key::new(&self.name)?;
        let dlock = common.connect().await?;
        let inventory = match dlock_segment::Inventory::open(&dlock, key).await {
            Ok(inventory) => inventory,
            Err(dlock_segment::Error::NotFound(_)) => {
                return Err(anyhow!(
                    "there is no inventory `{}`; if it is new, make it with `dlock inventory NAME create`; if it was there before, the store lost it",
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
        Ok(match (audit.disagreements.is_empty(), audit.exact) {
            (false, _) => exit_status::FAILURE,
            (true, false) => exit_status::BUSY,
            (true, true) => 0,
        })
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
