//! `dlock inventory NAME repair` and `remove`: they need no inventory that can be opened.

use anyhow::{Result, anyhow};
use clap::Args;
use dlock::Key;
use dlock_segment::{CreationId, Inventory};
use serde::Serialize;

use crate::Common;
use crate::output::{self, grouped};

/// Make homes again that are gone, because one of several servers lost its data
#[derive(Debug, Args)]
#[command(after_help = "\
The URL names all servers in the order of the creation. The other homes keep what they
have. A home that is made again has no units and none of its orders:
  1. dlock inventory NAME repair
  2. dlock inventory NAME pause
  3. dlock inventory NAME restock N --id REPAIR-1    (the units that are missing now)
  4. dlock inventory NAME reconcile --orders orders.csv --apply
  5. dlock inventory NAME resume, and start the services again, with the id that 1. printed

Example:
  dlock inventory phone repair --url redis://a,b,c")]
pub(super) struct Repair {}

#[derive(Serialize)]
struct Repaired<'a> {
    inventory: &'a str,
    homes: &'a [u32],
    creation_id: CreationId,
    units: u64,
}

impl Repair {
    pub(super) async fn run(&self, name: &str, common: &Common) -> Result<u8> {
        let key = Key::new(name)?;
        let clients = common.connect_all().await?;
        let repaired = Inventory::repair(&clients, key).await?;
        let stock = repaired.inventory.stock().await?;
        let (homes, creation_id) = (&repaired.homes, repaired.inventory.creation_id());
        let units = stock.initial + stock.restocked - stock.written_off;
        if common.json {
            output::print_json(&Repaired { inventory: name, homes, creation_id, units })?;
            return Ok(0);
        }
        if homes.is_empty() {
            output::print("no home is missing; nothing was changed");
        } else {
            let names: Vec<String> = homes.iter().map(u32::to_string).collect();
            output::print(format!(
                "made again, without units: home {}\nthe inventory has {} units now, sold and unsold: restock what is missing, and reconcile it with your orders",
                names.join(", "),
                grouped(units)
            ));
        }
        output::print(format!("creation id: {creation_id}"));
        Ok(0)
    }
}

/// Delete the inventory and all its records
#[derive(Debug, Args)]
#[command(after_help = "\
Without --confirm it only shows what would be deleted. It also deletes what is left of an
inventory whose homes are gone in part.

Example:
  dlock inventory phone remove --confirm phone")]
pub(super) struct Remove {
    /// The name of the inventory once more
    #[arg(long, value_name = "NAME")]
    confirm: Option<String>,
}

impl Remove {
    pub(super) async fn run(&self, name: &str, common: &Common) -> Result<u8> {
        let key = Key::new(name)?;
        let clients = common.connect_all().await?;
        if self.confirm.as_deref() != Some(name) {
            let there = match Inventory::open_on(&clients, key, None).await {
                Ok(inventory) => {
                    let stock = inventory.stock().await?;
                    format!(
                        "{} available, {} reserved, {} sold",
                        grouped(stock.available),
                        grouped(stock.reserved),
                        grouped(stock.sold)
                    )
                }
                Err(error) => error.to_string(),
            };
            return Err(anyhow!(
                "nothing was deleted: `{name}` has {there}; its records are gone for good once it is deleted, so say its name again: --confirm {name}"
            ));
        }
        if !Inventory::remove_by_name(&clients, key).await? {
            return Err(anyhow!("there is no inventory `{name}`"));
        }
        if common.json {
            output::print_json(&serde_json::json!({ "inventory": name, "removed": true }))?;
        } else {
            output::print(format!("{name}: removed"));
        }
        Ok(0)
    }
}
