//! `dlock inventory NAME reconcile`: compares it with the orders of the shop.

use std::io::{BufRead, BufReader, Read};

use anyhow::{Context as _, Result, anyhow, bail};
use clap::Args;
use dlock_segment::{
    Correction, Difference, DifferenceKind, Inventory, OrderState, Reconciliation, ShopOrder,
};
use futures_util::stream;

use super::times;
use crate::output::{self, BAD, GOOD, grouped, styled};
use crate::{Common, exit_status};

/// Compare the inventory with the orders of the shop, and correct it
#[derive(Debug, Args)]
#[command(after_help = "\
The file has a line for each order, as JSON:
  {\"operation\":\"order-981\",\"quantity\":2,\"state\":\"sold\",\"buyer\":\"u-7\"}
or as CSV, with a first line that names the columns (at is optional: when the order was
placed, as a time with its offset or in milliseconds of Unix time):
  operation,quantity,state,buyer,at
The states are sold, reserved and cancelled (also for an order that was given back). The
quantity is what is sold now. Give all orders, one line for each.

Without --apply it shows what that would do. With it, orders that the inventory lost are sold again under their ids, even if the
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
        let orders =
            self.read()?.map(|order| order.with_context(|| format!("in `{}`", self.orders)));
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
            let Difference { operation, kind, units, .. } = difference;
            let what = format!("{operation}: {} by {}", words(*kind), grouped(*units));
            output::print(format!("{what}: {}", done(difference)));
        }
        if report.differences.len() as u64 != report.different {
            output::print(format!(
                "and {} more",
                grouped(report.different - report.differences.len() as u64)
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
                "{} orders of {} units are too old to be on record; the inventory counts {} units of forgotten orders",
                grouped(report.too_old),
                grouped(report.too_old_units),
                grouped(report.forgotten_units)
            ));
        }
        if report.leased_units > 0 {
            output::print(format!(
                "{} units were sold from memory, without ids to compare",
                grouped(report.leased_units)
            ));
        }
        if !self.apply && report.differences.iter().any(|it| it.correction.is_some()) {
            output::print("nothing was changed; --apply does what is shown");
        }
    }

    fn read(&self) -> Result<impl Iterator<Item = Result<ShopOrder>> + use<>> {
        let source: Box<dyn Read> = match &*self.orders {
            "-" => Box::new(std::io::stdin()),
            file => Box::new(
                std::fs::File::open(file).with_context(|| format!("cannot read `{file}`"))?,
            ),
        };
        let is_csv = self.orders.to_lowercase().ends_with(".csv");
        Ok(orders(BufReader::new(source), is_csv))
    }
}

fn words(kind: DifferenceKind) -> &'static str {
    match kind {
        DifferenceKind::Missing => "missing",
        DifferenceKind::NotConfirmed => "not confirmed",
        DifferenceKind::TooMany => "too many",
        DifferenceKind::TooFew => "too few",
        DifferenceKind::NotReserved => "not reserved",
        DifferenceKind::Unknown => "not among the orders",
        _ => "different",
    }
}

/// What was done about a difference, or is done with `--apply`.
fn done(difference: &Difference) -> String {
    let Difference { correction, corrected, why_not, .. } = difference;
    let (would, did) = match (correction, why_not) {
        (_, Some(why)) => return styled(BAD, why),
        (None, None) => return styled(BAD, "decide yourself"),
        (Some(Correction::SellAgain), None) => ("sell it again", "sold again"),
        (Some(Correction::Confirm), None) => ("confirm it", "confirmed"),
        (Some(Correction::Cancel), None) => ("cancel it", "cancelled"),
        (Some(Correction::GiveBack), None) => ("give it back", "given back"),
        (Some(_), None) => ("correct it", "corrected"),
    };
    if *corrected { styled(GOOD, did) } else { would.to_owned() }
}

fn orders(lines: impl BufRead, is_csv: bool) -> impl Iterator<Item = Result<ShopOrder>> {
    let mut columns: Option<Vec<String>> = None;
    lines.lines().enumerate().filter_map(move |(number, line)| {
        let order = line.map_err(Into::into).and_then(|line| match (is_csv, &columns) {
            _ if line.trim().is_empty() => Ok(None),
            (true, None) => {
                columns = Some(fields(&line)?);
                Ok(None)
            }
            (true, Some(columns)) => of_csv(columns, &line).map(Some),
            (false, _) => Ok(Some(serde_json::from_str(&line)?)),
        });
        order.with_context(|| format!("line {}", number + 1)).transpose()
    })
}

fn of_csv(columns: &[String], line: &str) -> Result<ShopOrder> {
    let fields = fields(line)?;
    let field = |name: &str| {
        let at = columns.iter().position(|column| column.trim() == name)?;
        fields.get(at).map(String::as_str).filter(|field| !field.is_empty())
    };
    let required = |name: &str| field(name).ok_or_else(|| anyhow!("there is no `{name}`"));
    let state = match required("state")?.trim() {
        "sold" => OrderState::Sold,
        "reserved" => OrderState::Reserved,
        "cancelled" => OrderState::Cancelled,
        other => bail!("the state `{other}` is none of sold, reserved, cancelled"),
    };
    let quantity = required("quantity")?.trim();
    let at = match field("at").map(str::trim) {
        Some(at) => Some(at.parse().or_else(|_| times::parse(at).map(times::millis))?),
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
        let orders = |text: &'static str, is_csv| {
            orders(text.as_bytes(), is_csv).collect::<Result<Vec<ShopOrder>>>()
        };
        let of_csv = orders(csv, true).unwrap();
        assert_eq!(of_csv, orders(json, false).unwrap());
        assert_eq!((of_csv.len(), &*of_csv[1].operation), (2, "o,\"2\""));
        for bad in
            ["operation,quantity,state\no,1,gone", "operation,quantity,state\no,x,sold", "a\n\"b"]
        {
            assert!(orders(bad, true).is_err(), "{bad}");
        }
    }
}
