//! `dlock break`: takes a lock away from its holder.

use std::io::{IsTerminal as _, Write as _};

use anyhow::{Result, bail};
use clap::Args;
use dlock::Key;
use serde::Serialize;

use crate::key_view::InStore;
use crate::{Common, output};

/// Take a lock away from its holder
#[derive(Debug, Args)]
#[command(after_help = "\
The holder is told at once and its guard is lost. `dlock show` tells for an hour who
broke the lock. What the holder was doing may be half done.

Examples:
  dlock break order:7          asks for confirmation
  dlock break order:7 --yes    does not ask")]
pub(crate) struct Break {
    /// The key to break
    key: String,
    /// Do not ask for confirmation
    #[arg(long, short)]
    yes: bool,
}

#[derive(Serialize)]
struct Broken<'a> {
    key: &'a str,
    holders: usize,
}

impl Break {
    pub(crate) async fn run(self, common: &Common) -> Result<u8> {
        let key = Key::new(&self.key)?;
        let dlock = common.connect().await?;
        let store = dlock.store();
        if !self.yes {
            let holders = dlock.inspect(&key).await?.holders;
            if !holders.is_empty() && !std::io::stdin().is_terminal() {
                bail!(
                    "`{}` is held ({} holders) and there is no terminal to ask for confirmation; give --yes to break it",
                    self.key,
                    holders.len()
                );
            }
            for it in &holders {
                output::warn(format!("`{}` is held by {} in {store}", self.key, it.holder));
            }
            if !holders.is_empty() && !confirmed()? {
                output::warn(format!("`{}` was not broken", self.key));
                return Ok(1);
            }
        }
        let holders = dlock.break_lock(&key).await?;
        match (common.json, holders) {
            (true, _) => {
                let value = Broken { key: &self.key, holders };
                output::print_json(&InStore { store: &store.into(), value })?;
            }
            (false, 0) => output::print(format!("nobody holds `{}` in {store}", self.key)),
            (false, 1) => {
                output::print(format!("`{}` was taken away from its holder in {store}", self.key))
            }
            (false, _) => output::print(format!(
                "`{}` was taken away from {holders} holders in {store}",
                self.key
            )),
        }
        Ok(0)
    }
}

fn confirmed() -> Result<bool> {
    eprint!("Break the lock? The work of its holder may be left half done. [y/N] ");
    std::io::stderr().flush()?;
    let mut answer = String::new();
    std::io::stdin().read_line(&mut answer)?;
    Ok(matches!(answer.trim(), "y" | "Y" | "yes"))
}
