//! `dlock watch`: the holders and waiters, refreshed regularly.

use std::io::IsTerminal as _;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use anyhow::Result;
use clap::Args;
use serde::Serialize;
use tokio::time::MissedTickBehavior;

use crate::Common;
use crate::key_view::{self, InStore};
use crate::output::{self, DIM, styled};

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
        let store = dlock.store();
        let mut ticks = tokio::time::interval(self.every.max(Duration::from_millis(50)));
        ticks.set_missed_tick_behavior(MissedTickBehavior::Delay);
        let mut updates = 0;
        while self.count.is_none_or(|count| updates < count) && !output::is_closed() {
            ticks.tick().await;
            updates += 1;
            let keys = match key_view::keys_in_use(&dlock, &self.prefix).await {
                Ok(keys) => keys,
                // An operator watches because something is wrong; it may be over at the next look.
                Err(error) if is_temporary(&error) && self.count.is_none() => {
                    output::warn(format!("{error:#}; trying again"));
                    continue;
                }
                Err(error) => return Err(error),
            };
            if common.json {
                let at_ms = SystemTime::now().duration_since(UNIX_EPOCH)?.as_millis();
                let value = Snapshot { at_ms, keys: &keys };
                output::print_json(&InStore { store: &store.clone().into(), value })?;
                continue;
            }
            if std::io::stdout().is_terminal() {
                output::print_bytes(CLEAR.as_bytes());
            }
            let waiting: usize = keys.iter().map(|key| key.waiters.len()).sum();
            let held: usize = keys.iter().map(|key| key.holders.len()).sum();
            output::print(styled(DIM, format!("{held} held, {waiting} waiting in {store}")));
            output::print(key_view::table(&keys));
        }
        Ok(())
    }
}

fn is_temporary(error: &anyhow::Error) -> bool {
    error.downcast_ref::<dlock::Error>().is_some_and(|error| error.kind().is_retryable())
}
