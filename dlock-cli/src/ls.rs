//! `dlock ls`: the keys that are held or waited for.

use anyhow::Result;
use clap::Args;

use crate::Common;
use crate::key_view::{self, InStore};
use crate::output::{self, DIM, styled};

/// List the keys that are held or waited for
#[derive(Debug, Args)]
#[command(after_help = "\
Examples:
  dlock ls                     all keys
  dlock ls order:              the keys that start with `order:`
  dlock ls --json | jq .key    for programs")]
pub(crate) struct Ls {
    /// List only keys that start with this prefix
    #[arg(default_value = "")]
    prefix: String,
}

impl Ls {
    pub(crate) async fn run(self, common: &Common) -> Result<()> {
        let dlock = common.connect().await?;
        let keys = key_view::keys_in_use(&dlock, &self.prefix).await?;
        if common.json {
            let store = &dlock.store().into();
            let mut lines = keys.iter().map(|value| InStore { store, value });
            return lines.try_for_each(|line| output::print_json(&line));
        }
        if keys.is_empty() {
            let which = match self.prefix.as_str() {
                "" => "no key".to_owned(),
                prefix => format!("no key that starts with `{prefix}`"),
            };
            let store = dlock.store();
            output::print(styled(DIM, format!("{which} is held or waited for in {store}")));
            return Ok(());
        }
        output::print(styled(DIM, dlock.store()));
        output::print(key_view::table(&keys));
        Ok(())
    }
}
