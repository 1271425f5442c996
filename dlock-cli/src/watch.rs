//! `dlock watch`: holders and waiters as they come and go.

use std::io::IsTerminal as _;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use anyhow::Result;
use clap::Args;
use serde::Serialize;

use crate::output::{self, DIM, styled};
use crate::{Common, keys};

/// Watch who holds and who waits, live
#[derive(Debug, Args)]
#[command(after_help = "\
Examples:
  dlock watch                       every key, each second, until Ctrl-C
  dlock watch order: --every 200ms
  dlock watch --json | jq '.keys | length'")]
pub(crate) struct Watch {
    /// Only keys that start so
    #[arg(default_value = "")]
    prefix: String,
    /// How often to look
    #[arg(long, default_value = "1s", value_parser = humantime::parse_duration)]
    every: Duration,
    /// How often in all; else until Ctrl-C
    #[arg(long)]
    count: Option<u64>,
}

#[derive(Serialize)]
struct Look<'a> {
    at_ms: u128,
    keys: &'a [keys::Seen],
}

/// Clears a terminal and goes to its first line.
const CLEAR: &str = "\x1b[2J\x1b[H";

impl Watch {
    pub(crate) async fn run(self, common: &Common) -> Result<()> {
        let dlock = common.connect().await?;
        let mut ticks = tokio::time::interval(self.every.max(Duration::from_millis(50)));
        let mut looks = 0;
        while self.count.is_none_or(|count| looks < count) && !output::is_over() {
            ticks.tick().await;
            looks += 1;
            let seen = keys::in_use(&dlock, &self.prefix).await?;
            if common.json {
                let at_ms = SystemTime::now().duration_since(UNIX_EPOCH)?.as_millis();
                output::print_json(&Look { at_ms, keys: &seen })?;
                continue;
            }
            if std::io::stdout().is_terminal() {
                output::print_bytes(CLEAR.as_bytes());
            }
            let waiting: usize = seen.iter().map(|key| key.waiters.len()).sum();
            let held: usize = seen.iter().map(|key| key.holders.len()).sum();
            output::print(styled(DIM, format!("{held} held, {waiting} waiting")));
            output::print(keys::overview(&seen));
        }
        Ok(())
    }
}
