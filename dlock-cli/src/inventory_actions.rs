//! The actions of `dlock inventory NAME`, besides showing and auditing it.

use std::io::Read as _;
use std::time::{Duration, SystemTime};

use anyhow::{Context as _, Result, anyhow};
use clap::{Args, Subcommand, ValueEnum};
use dlock::Key;
use dlock_segment::{CreationId, Inventory, Receipt, Refund, Routing, WriteOff};
use serde::Serialize;

use super::orders::{Cancel, Journal, Lookup};
use super::repair::{Remove, Repair};
use super::settings::{self, Limit, Resize, Retention, Window};
use super::times;
use crate::Common;
use crate::output::{self, grouped};

#[derive(Debug, Subcommand)]
pub(super) enum Action {
    Create(Create),
    /// Stop selling until `resume`; reservations can still be confirmed and cancelled
    Pause,
    /// Start selling again after `pause`
    Resume,
    Window(Window),
    Limit(Limit),
    Restock(RestockArgs),
    WriteOff(WriteOffArgs),
    Refund(RefundArgs),
    Lookup(Lookup),
    Cancel(Cancel),
    Journal(Journal),
    Audit(super::audit::AuditArgs),
    Reconcile(super::reconcile::Reconcile),
    Repair(Repair),
    Retention(Retention),
    Resize(Resize),
    Remove(Remove),
}

impl Action {
    pub(super) async fn run(&self, name: &str, common: &Common) -> Result<u8> {
        match self {
            Action::Create(create) => return create.run(name, common).await,
            Action::Repair(repair) => return repair.run(name, common).await,
            Action::Remove(remove) => return remove.run(name, common).await,
            _ => {}
        }
        let (_clients, inventory) = super::open(common, name).await?;
        match self {
            Action::Create(_) | Action::Repair(_) | Action::Remove(_) => Ok(0),
            Action::Pause => settings::print(common, &inventory.pause().await?),
            Action::Resume => settings::print(common, &inventory.resume().await?),
            Action::Window(window) => window.run(&inventory, common).await,
            Action::Limit(limit) => limit.run(&inventory, common).await,
            Action::Restock(restock) => restock.run(&inventory, common).await,
            Action::WriteOff(write_off) => write_off.run(&inventory, common).await,
            Action::Refund(refund) => refund.run(&inventory, common).await,
            Action::Lookup(lookup) => lookup.run(&inventory, common).await,
            Action::Cancel(cancel) => cancel.run(&inventory, common).await,
            Action::Journal(journal) => journal.run(&inventory, common).await,
            Action::Audit(audit) => audit.run(name, &inventory, common).await,
            Action::Reconcile(reconcile) => reconcile.run(&inventory, common).await,
            Action::Retention(retention) => retention.run(&inventory, common).await,
            Action::Resize(resize) => resize.run(&inventory, common).await,
        }
    }
}

/// Create the inventory and print its creation id (services need this id to open it)
#[derive(Debug, Args)]
#[command(after_help = "\
Creating it again with the same terms changes nothing and prints the same id. After the
store lost its data, it makes a new inventory with the whole stock: restore it from your
orders before anybody buys.

Example:
  dlock inventory phone create --stock 1000 --segments 16 --per-buyer 2")]
pub(super) struct Create {
    /// How many units there are at first; 0 if they come with a restock
    #[arg(long)]
    stock: u64,
    /// In how many segments the units are counted
    #[arg(long, default_value_t = 1)]
    segments: u32,
    /// In how many homes it is kept, spread over the primaries of a cluster or over several
    /// servers [default: 1; two for each of several servers]
    #[arg(long, value_parser = clap::value_parser!(u32).range(1..=128))]
    homes: Option<u32>,
    /// What decides in which home a request is answered
    #[arg(long, default_value = "operation")]
    routed_by: RoutedBy,
    /// How many units a buyer may have; with several homes it needs --routed-by buyer
    #[arg(long)]
    per_buyer: Option<u64>,
    /// When it starts to sell: a time with its offset, such as 2026-11-11T20:00:00+08:00
    #[arg(long, value_parser = times::parse)]
    opens_at: Option<SystemTime>,
    /// When it stops selling: a time with its offset
    #[arg(long, value_parser = times::parse)]
    closes_at: Option<SystemTime>,
    /// For how many seconds an operation id is remembered at least [default: a day]
    #[arg(long)]
    retention: Option<u64>,
    /// Keep a journal of at least this many effects
    #[arg(long)]
    journal: Option<u64>,
}

impl Create {
    async fn run(&self, name: &str, common: &Common) -> Result<u8> {
        let key = Key::new(name)?;
        let clients = common.connect_all().await?;
        let spread = common.spread(self.homes)?;
        let homes = match (self.homes, clients.len()) {
            (None, 1) if !common.names_homes() => 1,
            _ => spread.homes,
        };
        let builder =
            Inventory::builder(&clients[0], key).stock(self.stock).segments(self.segments);
        let routing = match self.routed_by {
            RoutedBy::Operation => Routing::Operation,
            RoutedBy::Buyer => Routing::Buyer,
        };
        let mut builder =
            builder.homes(homes).servers(clients[1..].iter().cloned()).routed_by(routing);
        if let Some(limit) = self.per_buyer {
            builder = builder.per_buyer(limit);
        }
        if let Some(opens_at) = self.opens_at {
            builder = builder.opens_at(opens_at);
        }
        if let Some(closes_at) = self.closes_at {
            builder = builder.closes_at(closes_at);
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

#[derive(Clone, Copy, Debug, ValueEnum)]
enum RoutedBy {
    /// The operation id
    Operation,
    /// The buyer: a limit per buyer is exact, and every order names its buyer
    Buyer,
}

#[derive(Serialize)]
struct Created<'a> {
    inventory: &'a str,
    creation_id: CreationId,
}

/// Give units of an order back, also after the retention
#[derive(Debug, Args)]
#[command(after_help = "\
The same refund again changes nothing, however late it comes. After the retention the
inventory has forgotten the order: then its receipt is needed, as JSON, from where you
stored it with the order.

Examples:
  dlock inventory phone refund order-981
  dlock inventory phone refund order-981 --quantity 1 --id return-17 --receipt order-981.json")]
pub(super) struct RefundArgs {
    /// The operation id of the order
    order: String,
    /// How many units come back [default: all that are left]
    #[arg(long, requires = "id")]
    quantity: Option<u64>,
    /// The id of this refund, under which it happens once; needed for a part
    #[arg(long)]
    id: Option<String>,
    /// A file with the receipt of the order; `-` is the standard input
    #[arg(long)]
    receipt: Option<String>,
    /// The buyer, if several buyers have an order with this id
    #[arg(long)]
    buyer: Option<String>,
    /// The units are damaged: do not sell them again
    #[arg(long)]
    damaged: bool,
}

impl RefundArgs {
    async fn run(&self, inventory: &Inventory, common: &Common) -> Result<u8> {
        let mut request = inventory.refund(&self.order);
        if let Some(quantity) = self.quantity {
            request = request.quantity(quantity);
        }
        if let Some(id) = &self.id {
            request = request.operation(id);
        }
        if let Some(file) = &self.receipt {
            request = request.receipt(&read_receipt(file)?);
        }
        if let Some(buyer) = &self.buyer {
            request = request.buyer(buyer);
        }
        if self.damaged {
            request = request.damaged();
        }
        match request.send().await? {
            Refund::Refunded(receipt) => {
                let how = if self.damaged { " as damaged" } else { "" };
                print(common, &receipt, &format!("gave back{how}"))
            }
            Refund::TooMuch { left } => Err(anyhow!(
                "nothing was given back: `{}` has {} left to give back",
                self.order,
                grouped(left)
            )),
            other => Err(anyhow!("nothing was given back: {other:?}; use another --id")),
        }
    }
}

fn read_receipt(file: &str) -> Result<Receipt> {
    let mut json = String::new();
    if file == "-" {
        std::io::stdin().read_to_string(&mut json).context("cannot read the standard input")?;
    } else {
        json = std::fs::read_to_string(file).with_context(|| format!("cannot read `{file}`"))?;
    }
    serde_json::from_str(&json)
        .with_context(|| format!("`{file}` is not a receipt of an inventory, as JSON"))
}

/// Take units out of stock without selling them
#[derive(Debug, Args)]
#[command(after_help = "\
Only available units can be written off, all of them or none. The same id again changes
nothing.

Example:
  dlock inventory phone write-off 3 --id damage-2026-07")]
pub(super) struct WriteOffArgs {
    /// How many units
    quantity: u64,
    /// The id of this write-off, under which it happens once
    #[arg(long)]
    id: String,
}

impl WriteOffArgs {
    async fn run(&self, inventory: &Inventory, common: &Common) -> Result<u8> {
        match inventory.write_off(self.quantity).operation(&self.id).send().await? {
            WriteOff::WrittenOff(receipt) => print(common, &receipt, "wrote off"),
            WriteOff::NotEnough { available, reserved } => Err(anyhow!(
                "nothing was written off: {} available ({} more are reserved)",
                grouped(available),
                grouped(reserved)
            )),
            other => Err(anyhow!("nothing was written off: {other:?}; use another --id")),
        }
    }
}

/// Add units
#[derive(Debug, Args)]
#[command(after_help = "\
The same id again changes nothing.

Example:
  dlock inventory phone restock 500 --id delivery-3")]
pub(super) struct RestockArgs {
    /// How many units
    quantity: u64,
    /// The id of this restock, under which it happens once
    #[arg(long)]
    id: String,
}

impl RestockArgs {
    async fn run(&self, inventory: &Inventory, common: &Common) -> Result<u8> {
        let receipt = inventory.restock(self.quantity).operation(&self.id).send().await?;
        print(common, &receipt, "added")
    }
}

fn print(common: &Common, receipt: &Receipt, what: &str) -> Result<u8> {
    if common.json {
        output::print_json(receipt)?;
    } else {
        output::print(format!("{what} {}", grouped(receipt.quantity)));
    }
    Ok(0)
}
