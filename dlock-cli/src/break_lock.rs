//! `dlock break`: takes a lock away from its holder.

use std::io::{IsTerminal as _, Write as _};

use anyhow::{Result, bail};
use clap::Args;
use dlock::backend::HolderState;
use dlock::{Dlock, Key, Store};
use serde::Serialize;

use crate::key_view::InStore;
use crate::{Common, exit_status, output};

/// Take a lock away from its holder
#[derive(Debug, Args)]
#[command(after_help = "\
The holder is told at once and its guard is lost. `dlock show` tells for an hour who
broke the lock. What the holder was doing may be half done.

Only the holders that are shown lose the lock. If it has changed hands before you answer,
nothing is broken, and the status is 75. The lock and the semaphore of a key are separate:
without --permits, permits are taken away only if nobody holds the lock.

Examples:
  dlock break order:7                 shows the holder, asks, and breaks that holder
  dlock break order:7 --token 4711    breaks the holder with this token, as `dlock show` prints it
  dlock break order:7 --yes           breaks whoever holds it now
  dlock break exports --permits       takes the permits of the semaphore away")]
pub(crate) struct Break {
    /// The key to break
    key: String,
    /// Do not ask for confirmation, and break whoever holds the key now
    #[arg(long, short)]
    yes: bool,
    /// Break the holder with this token, or nobody, and do not ask
    #[arg(long, conflicts_with_all = ["permits", "yes"])]
    token: Option<u64>,
    /// Take away the permits of the semaphore, not the lock
    #[arg(long)]
    permits: bool,
}

/// Who loses the lock.
enum Target {
    /// Whoever holds it, or if nobody does, who has permits of the semaphore.
    Anybody,
    /// The holders with these tokens.
    Holders(Vec<u64>),
    /// Whoever has permits of the semaphore.
    Permits,
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
        let target = match self.token {
            Some(token) => Target::Holders(vec![token]),
            None if self.yes && self.permits => Target::Permits,
            None if self.yes => Target::Anybody,
            None => {
                let holders = self.shown(dlock.inspect(&key).await?.holders, &store)?;
                if !holders.is_empty() && !confirmed()? {
                    output::warn(format!("`{}` was not broken", self.key));
                    return Ok(exit_status::FAILURE);
                }
                self.target(&holders)?
            }
        };
        let holders = target.take_away(&dlock, &key).await?;
        if common.json {
            let value = Broken { key: &self.key, holders };
            output::print_json(&InStore { store: &store.clone().into(), value })?;
        }
        match (&target, holders) {
            (Target::Holders(tokens), 0) if !tokens.is_empty() => {
                output::warn(format!(
                    "`{}` has changed hands or was released meanwhile; nothing was broken in {store}",
                    self.key
                ));
                return Ok(exit_status::BUSY);
            }
            _ if common.json => {}
            (_, 0) => output::print(format!("nobody holds `{}` in {store}", self.key)),
            (_, 1) => {
                output::print(format!("`{}` was taken away from its holder in {store}", self.key))
            }
            _ => output::print(format!(
                "`{}` was taken away from {holders} holders in {store}",
                self.key
            )),
        }
        Ok(0)
    }

    /// Shows the holders that are meant.
    fn shown(&self, holders: Vec<HolderState>, store: &Store) -> Result<Vec<HolderState>> {
        let (permits, locks): (Vec<_>, Vec<_>) =
            holders.into_iter().partition(|it| it.mode.is_permits());
        let (shown, others) = match self.permits || locks.is_empty() {
            true => (permits, Vec::new()),
            false => (locks, permits),
        };
        if !shown.is_empty() && !std::io::stdin().is_terminal() {
            bail!(
                "`{}` is held ({} holders) and there is no terminal to ask for confirmation; give --token with the token that `dlock show` prints, or --yes to break whoever holds it",
                self.key,
                shown.len()
            );
        }
        for HolderState { holder, mode, token, .. } in &shown {
            let what = if mode.is_permits() { "permits of " } else { "" };
            let token = token.map_or_else(String::new, |token| format!(", token {token}"));
            output::warn(format!("{what}`{}` held by {holder}{token} in {store}", self.key));
        }
        if !others.is_empty() {
            output::warn(format!(
                "the semaphore `{}` is left alone; --permits takes its permits away",
                self.key
            ));
        }
        Ok(shown)
    }

    fn target(&self, shown: &[HolderState]) -> Result<Target> {
        if shown.iter().any(|it| it.mode.is_permits()) {
            return Ok(Target::Permits);
        }
        let tokens: Option<Vec<u64>> = shown.iter().map(|it| it.token).collect();
        let Some(mut tokens) = tokens else {
            bail!(
                "a holder of `{}` has no token to tell it from the next one; nothing was broken; --yes breaks whoever holds it",
                self.key
            );
        };
        tokens.dedup();
        Ok(Target::Holders(tokens))
    }
}

impl Target {
    /// Breaks the lock, and answers how many lost it.
    async fn take_away(&self, dlock: &Dlock, key: &Key) -> Result<usize> {
        Ok(match self {
            Target::Permits => dlock.break_permits(key).await?,
            Target::Anybody => match dlock.break_lock(key).await? {
                0 => dlock.break_permits(key).await?,
                holders => holders,
            },
            Target::Holders(tokens) => {
                let mut broken = 0;
                for token in tokens {
                    broken += usize::from(dlock.break_holder(key, *token).await?);
                }
                broken
            }
        })
    }
}

fn confirmed() -> Result<bool> {
    eprint!("Break the lock? The work of its holder may be left half done. [y/N] ");
    std::io::stderr().flush()?;
    let mut answer = String::new();
    std::io::stdin().read_line(&mut answer)?;
    Ok(matches!(answer.trim(), "y" | "Y" | "yes"))
}
