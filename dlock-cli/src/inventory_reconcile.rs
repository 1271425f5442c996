//! `dlock inventory NAME reconcile`: compares it with the orders of the shop.

use std::io::{BufRead, BufReader, Read};

use anyhow::{Context as _, Result, anyhow, bail};
use clap::Args;
use dlock_segment::{Inventory, OrderState, Reconciliation, ShopOrder};
use futures_util::stream;

use crate::output::{self, BAD, GOOD, grouped, styled};
use crate::{Common, exit_status};

/// Compare the inventory with the orders of the shop, and correct it
#[derive(Debug, Args)]
#[command(after_help = "\
The file has a line for each order, as JSON:
  {\"operation\":\"order-981\",\"quantity\":2,\"state\":\"sold\",\"buyer\":\"u-7\"}
or as CSV, with a first line that names the columns (at is optional, in milliseconds):
  operation,quantity,state,buyer,at
The states are sold, reserved and cancelled (also for an order that was given back). The
quantity is what is sold now.

With --apply, orders that the inventory lost are sold again under their ids, even if the
sale is paused or closed, or the limit per buyer is reached; what the shop does not have
any more is given back. It can be repeated.
After the store lost everything: create the inventory again, and apply all orders before
anybody buys. Ends with status 1 if differences are left.

Example:
  dlock inventory phone reconcile --orders orders.csv --apply")]
pub(super) struct Reconcile {
    /// The file with the orders: .csv or .jsonl; `-` is the standard input, as JSON
    #[arg(long)]
    orders: String,
    /// Correct the differences, instead of only showing them
    #[arg(long)]
    apply: bool,
}

impl Reconcile {
    pub(super) async fn run(&self, inventory: &Inventory, common: &Common) -> Result<u8> {
        let orders = self.read()?;
        let report = inventory.reconcile(stream::iter(orders), self.apply).await?;
        if common.json {
            output::print_json(&report)?;
        } else {
            self.show(&report);
        }
        Ok(if report.is_clean() { 0 } else { exit_status::FAILURE })
    }

    fn show(&self, report: &Reconciliation) {
        for difference in &report.differences {
            let done = match (difference.corrected, &difference.why_not) {
                (true, _) => styled(GOOD, "corrected"),
                (false, Some(why)) => styled(BAD, why),
                (false, None) => String::new(),
            };
            output::print(format!(
                "{}: {:?} by {} {done}",
                difference.operation,
                difference.kind,
                grouped(difference.units)
            ));
        }
        output::print(format!(
            "{} orders, {} agree, {} differences, {} corrected",
            grouped(report.orders),
            grouped(report.agree),
            grouped(report.different),
            grouped(report.corrected)
        ));
        if report.too_old > 0 || report.forgotten_units > 0 {
            output::print(format!(
                "{} orders of {} units may be older than the retention; the inventory counts {} units of forgotten orders",
                grouped(report.too_old),
                grouped(report.too_old_units),
                grouped(report.forgotten_units)
            ));
        }
    }

    fn read(&self) -> Result<Vec<ShopOrder>> {
        let source: Box<dyn Read> = match &*self.orders {
            "-" => Box::new(std::io::stdin()),
            file => Box::new(
                std::fs::File::open(file).with_context(|| format!("cannot read `{file}`"))?,
            ),
        };
        let is_csv = self.orders.ends_with(".csv");
        orders(BufReader::new(source), is_csv).with_context(|| format!("in `{}`", self.orders))
    }
}

fn orders(lines: impl BufRead, is_csv: bool) -> Result<Vec<ShopOrder>> {
    let mut columns: Option<Vec<String>> = None;
    let mut orders = Vec::new();
    for (number, line) in lines.lines().enumerate() {
        let line = line?;
        if line.trim().is_empty() {
            continue;
        }
        let order = match (is_csv, &columns) {
            (true, None) => {
                columns = Some(fields(&line).map_err(|error| anyhow!("line 1: {error}"))?);
                continue;
            }
            (true, Some(columns)) => of_csv(columns, &line),
            (false, _) => serde_json::from_str(&line).map_err(Into::into),
        };
        orders.push(order.with_context(|| format!("line {}", number + 1))?);
    }
    Ok(orders)
}

fn of_csv(columns: &[String], line: &str) -> Result<ShopOrder> {
    let fields = fields(line)?;
    let field = |name: &str| {
        let at = columns.iter().position(|column| column.trim() == name)?;
        fields.get(at).map(|field| field.trim()).filter(|field| !field.is_empty())
    };
    let required = |name: &str| field(name).ok_or_else(|| anyhow!("there is no `{name}`"));
    let state = match required("state")? {
        "sold" => OrderState::Sold,
        "reserved" => OrderState::Reserved,
        "cancelled" => OrderState::Cancelled,
        other => bail!("the state `{other}` is none of sold, reserved, cancelled"),
    };
    let quantity = required("quantity")?;
    let at = match field("at") {
        Some(at) => Some(at.parse().context("`at` is a number of milliseconds")?),
        None => None,
    };
    Ok(ShopOrder {
        operation: required("operation")?.to_owned(),
        quantity: quantity.parse().with_context(|| format!("`{quantity}` is not a number"))?,
        state,
        buyer: field("buyer").map(ToOwned::to_owned),
        at,
    })
}

/// The fields of a line of CSV. A field in quotes may have commas, and quotes twice.
fn fields(line: &str) -> Result<Vec<String>> {
    let mut fields = vec![String::new()];
    let (mut quoted, mut letters) = (false, line.chars().peekable());
    while let Some(letter) = letters.next() {
        let field = fields.last_mut().ok_or_else(|| anyhow!("there is no field"))?;
        match letter {
            '"' if quoted && letters.peek() == Some(&'"') => {
                letters.next();
                field.push('"');
            }
            '"' => quoted = !quoted,
            ',' if !quoted => fields.push(String::new()),
            '\r' if letters.peek().is_none() => {}
            other => field.push(other),
        }
    }
    if quoted {
        bail!("a quote is not closed");
    }
    Ok(fields)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn orders_are_read_from_both_formats() {
        let csv = "operation,quantity,state,buyer,at\no-1,2,sold,u-7,\n\"o,\"\"2\"\"\",1,cancelled,,5\r\n";
        let json = r#"{"operation":"o-1","quantity":2,"state":"sold","buyer":"u-7"}
{"operation":"o,\"2\"","quantity":1,"state":"cancelled","at":5}"#;
        let of_csv = orders(csv.as_bytes(), true).unwrap();
        assert_eq!(of_csv, orders(json.as_bytes(), false).unwrap());
        assert_eq!((of_csv.len(), &*of_csv[1].operation), (2, "o,\"2\""));
        for bad in
            ["operation,quantity,state\no,1,gone", "operation,quantity,state\no,x,sold", "a\n\"b"]
        {
            assert!(orders(bad.as_bytes(), true).is_err(), "{bad}");
        }
    }
}
