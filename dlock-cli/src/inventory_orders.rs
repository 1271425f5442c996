//! `dlock inventory NAME lookup`, `cancel` and `journal`: what became of orders.

use anyhow::{Result, anyhow};
use clap::Args;
use dlock_segment::{HoldState, Inventory, JournalCursor, Receipt, Resolved};
use serde::Serialize;

use super::times;
use crate::Common;
use crate::output::{self, grouped};

/// Show what is on record of an order; nothing is changed
#[derive(Debug, Args)]
#[command(after_help = "\
Ends with status 1 if nothing is on record: the order did not come yet, was refused, or
is older than the retention.

Example:
  dlock inventory phone lookup order-981")]
pub(super) struct Lookup {
    /// The operation id of the order
    order: String,
    /// The buyer, if several buyers have an order with this id
    #[arg(long)]
    buyer: Option<String>,
}

#[derive(Serialize)]
struct Seen<'a> {
    operation: &'a str,
    state: &'a str,
    #[serde(skip_serializing_if = "Option::is_none")]
    expires_at: Option<u64>,
    #[serde(skip_serializing_if = "Option::is_none")]
    receipt: Option<&'a Receipt>,
}

impl Lookup {
    pub(super) async fn run(&self, inventory: &Inventory, common: &Common) -> Result<u8> {
        let found = look_up(inventory, &self.order, self.buyer.as_deref()).await?;
        let (state, receipt, expires_at) = match &found {
            Resolved::Taken(receipt) => ("sold", Some(receipt), None),
            Resolved::Confirmed(receipt) => ("sold, confirmed", Some(receipt), None),
            Resolved::Refunded(receipt) => {
                ("sold, given back in part or whole", Some(receipt), None)
            }
            Resolved::Held(hold) => ("reserved", Some(&hold.receipt), Some(hold.expires_at)),
            Resolved::Expired(hold) => ("expired", Some(&hold.receipt), Some(hold.expires_at)),
            Resolved::Cancelled(hold) => ("cancelled", Some(&hold.receipt), None),
            Resolved::RefundDone(receipt) => ("a refund", Some(receipt), None),
            Resolved::Restocked(receipt) => ("a restock", Some(receipt), None),
            Resolved::WrittenOff(receipt) => ("a write-off", Some(receipt), None),
            _ => ("refused for good", None, None),
        };
        if common.json {
            let operation = &self.order;
            output::print_json(&Seen { operation, state, expires_at, receipt })?;
            return Ok(0);
        }
        let mut words = vec![format!("{}: {state}", self.order)];
        if let Some(receipt) = receipt {
            words.push(format!("{} units", grouped(receipt.quantity)));
            if receipt.left != receipt.quantity {
                words.push(format!("{} of them left", grouped(receipt.left)));
            }
            words.extend(receipt.buyer.as_ref().map(|buyer| format!("buyer {buyer}")));
            words.push(format!("at {}", times::shown(receipt.at)));
        }
        words.extend(expires_at.map(|at| format!("until {}", times::shown(at))));
        output::print(words.join(", "));
        Ok(0)
    }
}

async fn look_up(inventory: &Inventory, order: &str, buyer: Option<&str>) -> Result<Resolved> {
    let found = match buyer {
        Some(buyer) => inventory.lookup_for(order, buyer).await?,
        None => inventory.lookup(order).await?,
    };
    found.ok_or_else(|| anyhow!("nothing is on record of `{order}`: it did not come yet, was refused, or is older than the retention"))
}

/// Cancel the reservation of an order that was not paid for
#[derive(Debug, Args)]
#[command(after_help = "\
An order that is sold is not cancelled: use refund.

Example:
  dlock inventory phone cancel order-981")]
pub(super) struct Cancel {
    /// The operation id of the order
    order: String,
    /// The buyer, if several buyers have an order with this id
    #[arg(long)]
    buyer: Option<String>,
}

impl Cancel {
    pub(super) async fn run(&self, inventory: &Inventory, common: &Common) -> Result<u8> {
        let order = &self.order;
        // An id that is mistyped must not be refused for good.
        match look_up(inventory, order, self.buyer.as_deref()).await? {
            Resolved::Held(_) => {}
            Resolved::Taken(_) | Resolved::Confirmed(_) | Resolved::Refunded(_) => {
                return Err(sold(order));
            }
            other => {
                return Err(anyhow!("nothing was changed: `{order}` is not reserved: {other:?}"));
            }
        }
        let mut reservation = inventory.reservation(order);
        if let Some(buyer) = &self.buyer {
            reservation = reservation.buyer(buyer);
        }
        match reservation.cancel().await? {
            HoldState::Confirmed | HoldState::Refunded => Err(sold(order)),
            state if common.json => output::print_json(&state).map(|()| 0),
            state => {
                output::print(format!("{order}: {}", format!("{state:?}").to_lowercase()));
                Ok(0)
            }
        }
    }
}

fn sold(order: &str) -> anyhow::Error {
    anyhow!(
        "nothing was changed: `{order}` is sold; give it back with `dlock inventory NAME refund {order}`"
    )
}

/// Print the entries of the journal, one line each
#[derive(Debug, Args)]
#[command(after_help = "\
It ends with the last entry that there is now. With several homes, each has its own numbers.

Example:
  dlock inventory phone journal --after 1200 --json")]
pub(super) struct Journal {
    /// Only entries after this number
    #[arg(long, default_value_t = 0)]
    after: u64,
    /// At most so many entries
    #[arg(long, default_value_t = u64::MAX, hide_default_value = true)]
    limit: u64,
}

impl Journal {
    pub(super) async fn run(&self, inventory: &Inventory, common: &Common) -> Result<u8> {
        let (mut cursor, mut printed) = (JournalCursor::default(), 0);
        if inventory.routing().is_none() {
            cursor = JournalCursor::from(self.after);
        }
        loop {
            let entries = inventory.journal(&cursor).await?;
            if entries.is_empty() {
                return Ok(0);
            }
            for entry in entries {
                cursor.advance(&entry);
                if entry.sequence <= self.after {
                    continue;
                }
                if printed == self.limit || output::is_closed() {
                    return Ok(0);
                }
                printed += 1;
                if common.json {
                    output::print_json(&entry)?;
                    continue;
                }
                let of = [entry.operation.as_deref(), entry.whose.as_deref()];
                let of: Vec<&str> = of.into_iter().flatten().collect();
                let number = match inventory.routing() {
                    Some(_) => format!("{}/{}", entry.home, entry.sequence),
                    None => entry.sequence.to_string(),
                };
                output::print(format!(
                    "{number} {} {} {} {}",
                    times::shown(entry.at),
                    entry.effect.name(),
                    grouped(entry.quantity),
                    of.join(" ")
                ));
            }
        }
    }
}
