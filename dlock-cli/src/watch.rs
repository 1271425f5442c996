//! `dlock watch`: the holders and waiters, refreshed regularly.

use std::io::IsTerminal as _;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use anyhow::Result;
use clap::Args;
use serde::Serialize;

use crate::output::{self, DIM, styled};
use crate::{Common, key_view};

/// Watch live who holds keys and who waits for them
#[derive(Debug, Args)]
#[command(after_help = "\
Examples:
  dlock watch                       all keys, every second, until Ctrl-C
  dlock watch order: --every 200ms
  dlock watch --json | jq '.keys | length'")]
pub(crate) struct Watch {
    /// Watch only keys that start with this prefix
    #[arg(default_value = "")]
    prefix: String,
    /// The time between two updates
    #[arg(long, default_value = "1s", value_parser = humantime::parse_duration)]
    every: Duration,
    /// The number of updates [default: until Ctrl-C]
    #[arg(long)]
    count: Option<u64>,
}

#[derive(Serialize)]
struct Snapshot<'a> {
    at_ms: u128,
    keys: &'a [key_view::KeyView],
}

/// The escape sequence that clears a terminal and goes to its first line.
const CLEAR: &str = "\x1b[2J\x1b[H";

impl Watch {
    pub(crate) async fn run(self, common: &Common) -> Result<()> {
        let dlock = common.connect().await?;
        let mut ticks = tokio::time::interval(self.every.max(Duration::from_millis(50)));
        let mut updates = 0;
        while self.count.is_none_or(|count| updates < count) && !output::is_closed() {
            ticks.tick().await;
            updates += 1;
            let keys = key_view::keys_in_use(&dlock, &self.prefix).await?;
            if common.json {
                let at_ms = SystemTime::now().duration_since(UNIX_EPOCH)?.as_millis();
                output::print_json(&Snapshot { at_ms, keys: &keys })?;
                continue;
            }
            if std::io::stdout().is_terminal() {
                output::print_bytes(CLEAR.as_bytes());
            }
            let waiting: usize = keys.iter().map(|key| key.waiters.len()).sum();
            let held: usize = keys.iter().map(|key| key.holders.len()).sum();
            output::print(styled(DIM, format!("{held} held, {waiting} waiting")));
            output::print(key_view::table(&keys));
        }
        Ok(())
    }
}
