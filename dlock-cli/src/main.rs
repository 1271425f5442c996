//! The `dlock` command.
//!
//! Each subcommand is a module with its arguments and a `run` function that returns
//! the exit status. They share the options for the backend ([`Common`]), the exit
//! statuses ([`exit_status`]) and the way to print ([`output`]).

mod bench;
mod break_lock;
mod exit_status;
mod health;
mod inventory;
mod key_view;
mod ls;
mod output;
mod run;
mod sale;
mod sale_report;
mod schema;
mod show;
mod watch;

use std::collections::BTreeMap;
use std::ffi::OsString;
use std::process::ExitCode;

use anyhow::Result;
use clap::{CommandFactory as _, Parser, Subcommand};
use dlock::{Config, Dlock};
use dlock_bench::spread::Spread;
use dlock_bench::usage_error;

const EXAMPLES: &str = "\
Examples:
  dlock sale
  dlock run --url redis://localhost nightly-report -- ./report.sh
  dlock run --local nightly-report -- ./report.sh
  dlock ls --url redis://localhost order:
  dlock bench lock --url redis://localhost --tasks 500";

/// The store of `--local`: a file of the user's own, made when it is first used.
const LOCAL_URL: &str = "sqlite://?migrate=true";

/// Use and inspect distributed locks from the command line
#[derive(Debug, Parser)]
#[command(
    name = "dlock",
    version,
    arg_required_else_help = true,
    after_long_help = format!("{EXAMPLES}\n\n{}", exit_status::HELP),
    after_help = EXAMPLES,
)]
struct Arguments {
    #[command(flatten)]
    common: Common,
    #[command(subcommand)]
    command: Command,
}

/// The options that all subcommands have.
#[derive(Clone, Debug, clap::Args)]
struct Common {
    /// Where the locks are kept: sqlite:///path, redis://host:port, rediss://, redis+unix:///path,
    /// redis+sentinel://, redis+cluster://, redlock://, postgres://, mysql://, zookeeper://, etcd://, consul://, memory://; for an inventory also
    /// several servers, redis://a,b,c, and the number of its homes, ?homes=6 [default: DLOCK_URL; sale and bench: memory://]
    #[arg(long, global = true)]
    url: Option<String>,
    /// Keep the locks in a file of yours, for your processes on this machine; another machine or user does not see them
    #[arg(long, global = true, conflicts_with = "url")]
    local: bool,
    /// The namespace, which keeps the keys of applications apart [default: default]
    #[arg(long, global = true, env = "DLOCK_NAMESPACE")]
    namespace: Option<String>,
    /// Print JSON, one line per result
    #[arg(long, global = true)]
    json: bool,
}

#[derive(Debug, Subcommand)]
enum Command {
    Sale(sale::Sale),
    Run(run::Run),
    Ls(ls::Ls),
    Show(show::Show),
    Break(break_lock::Break),
    #[command(visible_alias = "stock")]
    Inventory(inventory::Inventory),
    Watch(watch::Watch),
    Health(health::Health),
    Bench(bench::Bench),
    Schema(schema::Schema),
    /// Print shell completions: dlock completions bash > /etc/bash_completion.d/dlock
    Completions {
        /// The shell to print completions for
        shell: clap_complete::Shell,
    },
}

impl Common {
    /// Finds out which store is meant. There is no default: a command that does not know the
    /// store must not run a program twice, nor say that a lock is free.
    fn with_store(mut self) -> Self {
        self.url = match self.local {
            true => Some(LOCAL_URL.to_owned()),
            false => self.url.or_else(|| std::env::var("DLOCK_URL").ok()),
        };
        self
    }

    /// The configuration: the `DLOCK_` variables, overridden by the command line.
    fn config(&self) -> Result<Config> {
        let Some(url) = &self.url else {
            return Err(usage_error(
                "no store is named, and none is assumed; give --url redis://host:port or set DLOCK_URL, or give --local for the processes of this machine",
            ));
        };
        if self.local && !cfg!(feature = "sqlite") {
            return Err(usage_error("--local is not in this build; build with --features sqlite"));
        }
        Config::from_url(url)?; // an error here should not name a variable
        let given = [("DLOCK_URL", Some(url)), ("DLOCK_NAMESPACE", self.namespace.as_ref())];
        let given = given.into_iter().filter_map(|(name, value)| Some((name, value?.clone())));
        let utf8 = |(name, value): (OsString, OsString)| {
            Some((name.into_string().ok()?, value.to_string_lossy().into_owned()))
        };
        let mut vars: BTreeMap<String, String> = std::env::vars_os().filter_map(utf8).collect();
        vars.extend(given.map(|(name, value)| (name.to_owned(), value)));
        Ok(Config::from_vars("DLOCK_", vars)?)
    }

    /// The homes of an inventory and further servers, as the URL says.
    fn spread(&self, homes: Option<u32>) -> Result<Spread> {
        let (_, mut spread) = Spread::parse(self.url.as_deref().unwrap_or_default())?;
        spread.homes = homes.unwrap_or(spread.homes);
        Ok(spread)
    }

    /// Whether the URL says in how many homes an inventory is kept.
    fn names_homes(&self) -> bool {
        self.url.as_deref().is_some_and(|url| url.contains("homes="))
    }

    /// The same options with the first server of the URL only.
    fn first(&self) -> Result<Common> {
        let url = self.url.as_deref().map(Spread::parse).transpose()?.map(|(first, _)| first);
        Ok(Common { url, ..self.clone() })
    }

    /// Clients of all servers of an inventory, which the URL may name: redis://a,b,c.
    async fn connect_all(&self) -> Result<Vec<Dlock>> {
        self.spread(None)?.connect(&self.first()?.config()?).await
    }

    /// The configuration of `bench` and `sale`, which use memory:// by default.
    fn load_config(&self) -> Result<Config> {
        let url = self.first()?.url.unwrap_or_else(|| "memory://".into());
        let mut config = Common { url: Some(url), ..self.clone() }.config()?;
        config.client_name.get_or_insert_with(|| "dlock load".into());
        Ok(config)
    }

    /// Connects a client; fails if the backend does not answer.
    async fn connect(&self) -> Result<Dlock> {
        Ok(Dlock::builder().config(self.config()?).connect().await?)
    }
}

impl Command {
    async fn run(self, common: &Common) -> Result<u8> {
        match self {
            Command::Sale(sale) => sale.run(common).await.map(|()| 0),
            Command::Inventory(inventory) => inventory.run(common).await,
            Command::Run(run) => run.run(common).await,
            Command::Ls(ls) => ls.run(common).await.map(|()| 0),
            Command::Show(show) => show.run(common).await.map(|()| 0),
            Command::Break(it) => it.run(common).await,
            Command::Watch(watch) => watch.run(common).await.map(|()| 0),
            Command::Health(health) => health.run(common).await,
            Command::Bench(bench) => bench.run(common).await.map(|()| 0),
            Command::Schema(schema) => schema.run(common).await,
            Command::Completions { shell } => {
                let mut command = Arguments::command();
                let mut script = Vec::new();
                clap_complete::generate(shell, &mut command, "dlock", &mut script);
                output::print_bytes(&script);
                Ok(0)
            }
        }
    }
}

#[tokio::main]
async fn main() -> ExitCode {
    let Arguments { common, command } = Arguments::parse();
    let common = common.with_store();
    let done = command.run(&common).await.and_then(|status| match output::write_error() {
        Some(error) => Err(anyhow::Error::new(error).context("the output cannot be written")),
        None => Ok(status),
    });
    match done {
        Ok(status) => ExitCode::from(status),
        Err(error) => {
            output::warn(format!("{error:#}"));
            ExitCode::from(exit_status::of(&error))
        }
    }
}
