//! `dlock ls`: the keys that are held or waited for.

use anyhow::Result;
use clap::Args;

use crate::output::{self, DIM, styled};
use crate::{Common, key_view};

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
            return keys.iter().try_for_each(output::print_json);
        }
        if keys.is_empty() {
            output::print(styled(DIM, "no key is held or waited for"));
            return Ok(());
        }
        output::print(key_view::table(&keys));
        Ok(())
    }
}
