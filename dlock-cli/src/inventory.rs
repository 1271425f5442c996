//! `dlock inventory`: shows the counts of an inventory, and makes, changes, audits or repairs it.

#[path = "inventory_actions.rs"]
mod actions;
#[path = "inventory_audit.rs"]
mod audit;
#[path = "inventory_orders.rs"]
mod orders;
#[path = "inventory_reconcile.rs"]
mod reconcile;
#[path = "inventory_repair.rs"]
mod repair;
#[path = "inventory_settings.rs"]
mod settings;
#[path = "inventory_times.rs"]
mod times;

use std::fmt;

use anyhow::{Result, anyhow};
use clap::Args;
use dlock::{Dlock, Key};
use dlock_segment::{Counts, CreationId, Stock};
use serde::Serialize;

use self::actions::Action;
use crate::Common;
use crate::output::{self, BOLD, DIM, GOOD, grouped, styled};

/// Show the counts of an inventory, or create, change, audit or repair it
#[derive(Debug, Args)]
#[command(after_help = "\
Without a word after the name it shows the counts, in one round trip. `audit` reads every
record.

Examples:
  dlock inventory phone create --stock 1000 --per-buyer 2 --url redis://localhost
  dlock inventory phone --url redis://localhost
  dlock inventory phone pause
  dlock inventory phone lookup order-981
  dlock inventory phone create --stock 1000000 --homes 6 --url redis+cluster://a,b,c
  dlock inventory phone audit --url redis://a,b,c")]
pub(crate) struct Inventory {
    /// The name of the inventory
    name: String,
    #[command(subcommand)]
    action: Option<Action>,
}

#[derive(Serialize)]
struct Seen<'a> {
    inventory: &'a str,
    creation_id: CreationId,
    #[serde(flatten)]
    stock: &'a Stock,
    /// The counts of the segments, one home after the other.
    by_segment: &'a [Counts],
}

/// An error of the library, in the words of the command.
#[derive(Debug)]
pub(crate) struct Reworded {
    text: String,
    pub(crate) error: dlock_segment::Error,
}

/// What the library says, and what the command says.
const WORDS: [(&str, &str); 11] = [
    (".receipt(&receipt)", "--receipt FILE"),
    (".buyer(id)", "--buyer ID"),
    (".operation(id)", "--id ID"),
    (".journal(entries)", "`create --journal N`"),
    (".routed_by(Routing::Buyer)", "`create --routed-by buyer`"),
    ("give it a longer .deadline(..)", "when the servers are less busy"),
    ("open() it to use it as it is", "use it as it is"),
    (
        "call resolve() with the operation id, or send the same request again",
        "run the same command again",
    ),
    (" or Inventory::repair()", ""),
    (" or Inventory::remove_by_name()", ""),
    (" or create()", ""),
];

impl Reworded {
    fn of(error: anyhow::Error) -> anyhow::Error {
        match error.downcast::<dlock_segment::Error>() {
            Ok(error) => {
                let text = WORDS
                    .iter()
                    .fold(error.to_string(), |text, (theirs, ours)| text.replace(theirs, ours));
                Reworded { text, error }.into()
            }
            Err(error) => error,
        }
    }
}

impl fmt::Display for Reworded {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.text)
    }
}

impl std::error::Error for Reworded {
    fn source(&self) -> Option<&(dyn std::error::Error + 'static)> {
        std::error::Error::source(&self.error)
    }
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
        let ran = match &self.action {
            Some(action) => action.run(&self.name, common).await,
            None => self.show(common).await,
        };
        ran.map_err(Reworded::of)
    }

    async fn show(&self, common: &Common) -> Result<u8> {
        let (_clients, inventory) = open(common, &self.name).await?;
        let (stock, by_segment) = inventory.segments().await?;
        if common.json {
            output::print_json(&Seen {
                inventory: &self.name,
                creation_id: inventory.creation_id(),
                stock: &stock,
                by_segment: &by_segment,
            })?;
            return Ok(0);
        }
        print_counts(&self.name, &stock, &by_segment);
        output::print(settings::terms(&stock));
        Ok(0)
    }
}

/// Prints the counts, and a bar for each segment.
fn print_counts(name: &str, stock: &Stock, by_segment: &[Counts]) {
    let Stock { initial, restocked, available, reserved, sold, written_off, .. } = *stock;
    let mut lost = match written_off {
        0 => String::new(),
        units => format!(", {} written off", grouped(units)),
    };
    if stock.in_transit > 0 {
        lost += &format!(", {} on their way between homes", grouped(stock.in_transit));
    }
    let homes = stock.homes as usize;
    let each = (by_segment.len() / homes.max(1)).max(1);
    output::print(format!(
        "{}: {} available, {} reserved, {} sold{lost} of {}",
        styled(BOLD, name),
        grouped(available),
        grouped(reserved),
        grouped(sold),
        grouped(initial + restocked),
    ));
    let most = by_segment.iter().map(|counts| counts.available + counts.reserved);
    let (most, width) = (most.max().unwrap_or(0).max(1), width());
    for (number, counts) in by_segment.iter().enumerate() {
        let length = |units: u64| usize::try_from((units * width).div_ceil(most)).unwrap_or(0);
        if homes > 1 && number % each == 0 {
            output::print(styled(DIM, format!("home {}", number / each)));
        }
        let bar = "█".repeat(length(counts.available)) + &"░".repeat(length(counts.reserved));
        output::print(format!(
            "{:>5} {} {}",
            number % each,
            styled(GOOD, bar),
            styled(
                DIM,
                format!(
                    "{} + {} reserved, {} sold",
                    grouped(counts.available),
                    grouped(counts.reserved),
                    grouped(counts.sold)
                )
            ),
        ));
    }
}
