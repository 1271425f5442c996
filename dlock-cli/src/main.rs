//! The `dlock` command: a program under a lock, who holds what, load and sales.
//!
//! Each command is a module with its arguments and a `run` that answers the exit
//! status. What they share is the way to the backend ([`Common`]), the exit
//! statuses ([`status`]) and how things are shown ([`output`]).

mod bench;
mod breaking;
mod inventory;
mod keys;
mod output;
mod report;
mod run;
mod sale;
mod status;
mod watch;

use std::collections::BTreeMap;
use std::ffi::OsString;
use std::process::ExitCode;

use anyhow::Result;
use clap::{CommandFactory as _, Parser, Subcommand};
use dlock::{Config, Dlock};

const EXAMPLES: &str = "\
Examples:
  dlock sale
  dlock run --url redis://localhost nightly-report -- ./report.sh
  dlock ls --url redis://localhost order:
  dlock bench lock --url redis://localhost --tasks 500";

/// Distributed locks on the command line.
#[derive(Debug, Parser)]
#[command(
    name = "dlock",
    version,
    arg_required_else_help = true,
    after_long_help = format!("{EXAMPLES}\n\n{}", status::HELP),
    after_help = EXAMPLES,
)]
struct Arguments {
    #[command(flatten)]
    common: Common,
    #[command(subcommand)]
    command: Command,
}

/// What every command knows.
#[derive(Clone, Debug, clap::Args)]
struct Common {
    /// Where the locks are kept: memory://, redis://host:port, rediss://, redis+unix:///path
    #[arg(long, global = true, env = "DLOCK_URL", hide_env_values = true)]
    url: Option<String>,
    /// Keeps the keys of one application apart from others' [default: default]
    #[arg(long, global = true, env = "DLOCK_NAMESPACE")]
    namespace: Option<String>,
    /// Print JSON, one line for each result
    #[arg(long, global = true)]
    json: bool,
}

#[derive(Debug, Subcommand)]
enum Command {
    Sale(sale::Sale),
    Run(run::Run),
    Ls(keys::Ls),
    Show(keys::Show),
    Break(breaking::Break),
    #[command(visible_alias = "stock")]
    Inventory(inventory::Inventory),
    Watch(watch::Watch),
    Health(keys::Health),
    Bench(bench::Bench),
    /// Print the completions of a shell: dlock completions bash > /etc/bash_completion.d/dlock
    Completions {
        /// For which shell
        shell: clap_complete::Shell,
    },
}

impl Common {
    /// The configuration: the environment, and over it the command line.
    fn config(&self) -> Result<Config> {
        let Some(url) = &self.url else {
            return Err(benches::Wrong::because(
                "where are the locks? give --url redis://host:port, or set DLOCK_URL",
            ));
        };
        Config::from_url(url)?; // its faults are not those of a variable
        let given = [("DLOCK_URL", Some(url)), ("DLOCK_NAMESPACE", self.namespace.as_ref())];
        let given = given.into_iter().filter_map(|(name, value)| Some((name, value?.clone())));
        let text = |(name, value): (OsString, OsString)| {
            Some((name.into_string().ok()?, value.to_string_lossy().into_owned()))
        };
        let mut vars: BTreeMap<String, String> = std::env::vars_os().filter_map(text).collect();
        vars.extend(given.map(|(name, value)| (name.to_owned(), value)));
        Ok(Config::from_vars("DLOCK_", vars)?)
    }

    /// The same for loads, which may as well run inside this process.
    fn config_of_load(&self) -> Result<Config> {
        let url = self.url.clone().unwrap_or_else(|| "memory://".into());
        let mut config = Common { url: Some(url), ..self.clone() }.config()?;
        config.client_name.get_or_insert_with(|| "dlock load".into());
        Ok(config)
    }

    /// A client, once the backend answers.
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
            Command::Completions { shell } => {
                let mut command = Arguments::command();
                let mut text = Vec::new();
                clap_complete::generate(shell, &mut command, "dlock", &mut text);
                output::print_bytes(&text);
                Ok(0)
            }
        }
    }
}

#[tokio::main]
async fn main() -> ExitCode {
    let Arguments { common, command } = Arguments::parse();
    let done = command.run(&common).await.and_then(|status| match output::lost_output() {
        Some(error) => Err(anyhow::Error::new(error).context("the output cannot be written")),
        None => Ok(status),
    });
    match done {
        Ok(status) => ExitCode::from(status),
        Err(error) => {
            output::warn(format!("{error:#}"));
            ExitCode::from(status::of(&error))
        }
    }
}
