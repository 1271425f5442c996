//! `dlock schema`: makes the tables of a SQL database, or prepares the nodes of a quorum.

use anyhow::Result;
use clap::Args;
use dlock::Config;
use dlock::backend::redis::RedLock;
#[cfg(not(any(feature = "mysql", feature = "postgres", feature = "sqlite")))]
use dlock_bench::usage_error;

use crate::output::{self, GOOD, styled};
use crate::{Common, exit_status};

/// Create the tables in a SQL database (or print the SQL), or prepare new RedLock nodes
#[derive(Debug, Args)]
#[command(after_help = "\
Tables that are there already are left as they are. The user needs the right to make
tables; the programs that lock need less, see docs/sql.md.

Examples:
  dlock schema --url postgres://owner@localhost/shop
  dlock schema --url mysql://localhost/shop --print | mariadb shop
  dlock schema --url sqlite:///var/lib/shop/locks.db

With redlock://, it lets new nodes vote immediately instead of after max_ttl. Use it before
the first program locks. If one of the nodes was used before, nothing is changed, and nodes
that were emptied since then vote after max_ttl:
  dlock schema --url redlock://r1,r2,r3,r4,r5")]
pub(crate) struct Schema {
    /// Print the statements and do not connect
    #[arg(long)]
    print: bool,
}

impl Schema {
    pub(crate) async fn run(self, common: &Common) -> Result<u8> {
        let config = common.config()?;
        let is_quorum = config.url.as_deref().is_some_and(|url| url.starts_with("redlock"));
        if is_quorum && self.print {
            output::warn("redlock:// has no tables to print; leave --print out");
            return Ok(exit_status::USAGE);
        }
        if is_quorum {
            let prepared = RedLock::prepare_new_nodes(&config).await;
            let votes_in =
                prepared.as_ref().map_or(0, |votes_in| votes_in.as_millis().div_ceil(1000));
            let what = match votes_in {
                0 => "the nodes are prepared: all of them vote".to_owned(),
                seconds => format!(
                    "nothing was changed: some nodes were used before, and some were started, emptied or met by a program since then; the last of these votes in {seconds} s"
                ),
            };
            return Ok(done(prepared.map(drop), &what));
        }
        self.tables(&config).await
    }

    #[cfg(any(feature = "mysql", feature = "postgres", feature = "sqlite"))]
    async fn tables(&self, config: &Config) -> Result<u8> {
        if self.print {
            output::print(dlock::backend::sql::schema(config)?.trim_end());
            return Ok(0);
        }
        Ok(done(dlock::backend::sql::make_tables(config).await, "the tables are there"))
    }

    #[cfg(not(any(feature = "mysql", feature = "postgres", feature = "sqlite")))]
    async fn tables(&self, _: &Config) -> Result<u8> {
        Err(usage_error(
            "this build knows no SQL database; build with --features postgres, mysql or sqlite",
        ))
    }
}

/// Tells what came of it, and returns the exit status.
fn done(outcome: dlock::Result<()>, what: &str) -> u8 {
    match outcome {
        Ok(()) => {
            output::print(styled(GOOD, what));
            0
        }
        Err(error) => {
            output::warn(&error);
            exit_status::of(&error.into())
        }
    }
}
