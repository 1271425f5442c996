//! `dlock inventory NAME pause`, `resume`, `window`, `limit`, `retention` and `resize`.

use std::time::Duration;

use anyhow::{Result, anyhow};
use clap::Args;
use dlock_segment::{Inventory, Stock};

use super::times::{self, Bound};
use crate::Common;
use crate::output::{self, grouped};

/// Change when the inventory sells
#[derive(Debug, Args)]
#[command(after_help = "\
What is not given stays as it is; none means no bound. The store's clock decides.

Example:
  dlock inventory phone window --opens-at 2026-11-11T20:00:00+08:00 --closes-at none")]
#[group(required = true, multiple = true)]
pub(super) struct Window {
    /// When it starts to sell: a time with its offset, or none
    #[arg(long, value_parser = times::parse_bound)]
    opens_at: Option<Bound>,
    /// When it stops selling: a time with its offset, or none
    #[arg(long, value_parser = times::parse_bound)]
    closes_at: Option<Bound>,
}

impl Window {
    pub(super) async fn run(&self, inventory: &Inventory, common: &Common) -> Result<u8> {
        let stock = inventory.stock().await?;
        let is = |millis: Option<u64>| millis.map(times::of_millis);
        let opens = self.opens_at.map_or(is(stock.opens_at), |bound| bound.0);
        let closes = self.closes_at.map_or(is(stock.closes_at), |bound| bound.0);
        print(common, &inventory.window(opens, closes).await?)
    }
}

/// Change how many units a buyer may have
#[derive(Debug, Args)]
#[command(after_help = "\
The units that buyers have already count.

Example:
  dlock inventory phone limit 2")]
pub(super) struct Limit {
    /// How many units, or none
    #[arg(value_parser = units_or_none)]
    units: UnitsOrNone,
}

#[derive(Clone, Copy, Debug)]
struct UnitsOrNone(Option<u64>);

fn units_or_none(text: &str) -> Result<UnitsOrNone> {
    match text {
        "none" => Ok(UnitsOrNone(None)),
        text => text
            .parse()
            .map(|units| UnitsOrNone(Some(units)))
            .map_err(|_| anyhow!("give a number, or none")),
    }
}

impl Limit {
    pub(super) async fn run(&self, inventory: &Inventory, common: &Common) -> Result<u8> {
        print(common, &inventory.limit_per_buyer(self.units.0).await?)
    }
}

/// Change for how long operation ids are remembered
#[derive(Debug, Args)]
#[command(after_help = "\
The new retention begins now, also for what is on record: nothing is forgotten at once.

Example:
  dlock inventory phone retention 2592000")]
pub(super) struct Retention {
    /// For how many seconds an operation id is remembered at least
    seconds: u64,
}

impl Retention {
    pub(super) async fn run(&self, inventory: &Inventory, common: &Common) -> Result<u8> {
        print(common, &inventory.retention(Duration::from_secs(self.seconds)).await?)
    }
}

/// Distribute the units over another number of segments, while the inventory is in use
#[derive(Debug, Args)]
#[command(after_help = "\
Example:
  dlock inventory phone resize 32")]
pub(super) struct Resize {
    /// How many segments each home has from now on
    segments: u32,
}

impl Resize {
    pub(super) async fn run(&self, inventory: &Inventory, common: &Common) -> Result<u8> {
        print(common, &inventory.resize(self.segments).await?)
    }
}

/// Prints the terms of an inventory that may be changed.
pub(super) fn print(common: &Common, stock: &Stock) -> Result<u8> {
    if common.json {
        output::print_json(stock)?;
    } else {
        output::print(terms(stock));
    }
    Ok(0)
}

/// The terms of an inventory that may be changed, in words.
pub(super) fn terms(stock: &Stock) -> String {
    let mut words = Vec::new();
    let is_open = stock.opens_at.is_none_or(|at| at <= stock.now);
    let is_over = stock.closes_at.is_some_and(|at| at <= stock.now);
    words.push(match (stock.paused, is_over, is_open) {
        (true, _, _) => "paused: nothing is sold until `resume`".to_owned(),
        (_, true, _) => "closed".to_owned(),
        (_, _, true) => "selling".to_owned(),
        _ => "not open yet".to_owned(),
    });
    words.extend(stock.opens_at.map(|at| format!("opens at {}", times::shown(at))));
    words.extend(stock.closes_at.map(|at| format!("closes at {}", times::shown(at))));
    words.extend(stock.per_buyer.map(|limit| format!("{} for each buyer at most", grouped(limit))));
    let retention = Duration::from_millis(stock.retention);
    words.push(format!("ids are remembered for {}", output::short(retention)));
    words.push(format!("{} segments", grouped(stock.segments.into())));
    words.join("; ")
}
