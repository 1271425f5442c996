//! `dlock break`: takes a lock from whoever holds it.

use std::io::{IsTerminal as _, Write as _};

use anyhow::{Result, bail};
use clap::Args;
use dlock::Key;
use serde::Serialize;

use crate::{Common, output};

/// Take a lock away from whoever holds it
#[derive(Debug, Args)]
#[command(after_help = "\
The holder hears of it at once, its guard is lost, and who broke the lock is kept
for an hour. Whatever the holder was doing may or may not have happened.

Examples:
  dlock break order:7          asks first
  dlock break order:7 --yes    does not")]
pub(crate) struct Break {
    /// The key
    key: String,
    /// Do not ask
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
        if !self.yes {
            let holders = dlock.inspect(&key).await?.holders;
            if !holders.is_empty() && !std::io::stdin().is_terminal() {
                bail!(
                    "`{}` has {} holders; give --yes to break it without being asked",
                    self.key,
                    holders.len()
                );
            }
            for it in &holders {
                output::warn(format!("`{}` is held by {}", self.key, it.holder));
            }
            if !holders.is_empty() && !confirmed()? {
                output::warn("nothing was done");
                return Ok(1);
            }
        }
        let holders = dlock.break_lock(&key).await?;
        match (common.json, holders) {
            (true, _) => output::print_json(&Broken { key: &self.key, holders })?,
            (false, 0) => output::print(format!("nobody holds `{}`", self.key)),
            (false, 1) => output::print(format!("`{}` was taken from its holder", self.key)),
            (false, _) => output::print(format!("`{}` was taken from {holders} holders", self.key)),
        }
        Ok(0)
    }
}

fn confirmed() -> Result<bool> {
    eprint!("Break it? What they are doing under it may be left half done. [y/N] ");
    std::io::stderr().flush()?;
    let mut answer = String::new();
    std::io::stdin().read_line(&mut answer)?;
    Ok(matches!(answer.trim(), "y" | "Y" | "yes"))
}
