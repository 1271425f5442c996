//! `dlock health`: whether the backend answers, and which servers are behind it.

use anyhow::Result;
use clap::Args;
use dlock::Dlock;
use dlock::backend::{ServerRole, ServerState};
use serde::Serialize;

use crate::output::{self, GOOD, styled};
use crate::{Common, exit_status};

/// Check whether the backend answers, how fast, and which servers are behind it
#[derive(Debug, Args)]
#[command(after_help = "\
The exit status is 69 when the backend does not answer, so this can be a probe:
  dlock health --url redis://localhost || echo down")]
pub(crate) struct Health {}

/// The health as `--json` prints it.
#[derive(Serialize)]
struct HealthView {
    backend: &'static str,
    ok: bool,
    round_trip_us: u128,
    problem: Option<String>,
    servers: Vec<ServerView>,
}

/// A server as `--json` prints it.
#[derive(Serialize)]
struct ServerView {
    address: String,
    role: &'static str,
    /// The bytes that a failover to this replica would lose at most.
    behind: Option<u64>,
    note: Option<String>,
}

impl From<ServerState> for ServerView {
    fn from(state: ServerState) -> Self {
        let role = match state.role {
            ServerRole::Primary => "primary",
            ServerRole::Replica => "replica",
            ServerRole::Sentinel => "sentinel",
            _ => "server",
        };
        ServerView { address: state.address, role, behind: state.behind, note: state.note }
    }
}

impl std::fmt::Display for ServerView {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{:8} {}", self.role, self.address)?;
        if let Some(behind) = self.behind {
            write!(f, ", a failover to it loses {behind} bytes at most")?;
        }
        match &self.note {
            Some(note) => write!(f, ": {note}"),
            None => Ok(()),
        }
    }
}

impl Health {
    pub(crate) async fn run(self, common: &Common) -> Result<u8> {
        let dlock = Dlock::builder().config(common.config()?).connect_lazy()?;
        let first = dlock.health().await;
        // The first round trip includes the time to connect, so a second one is measured.
        let health = if first.is_ok() { dlock.health().await } else { first };
        // A user without the right to ask has a healthy backend all the same.
        let servers = if health.is_ok() { dlock.servers().await } else { Ok(Vec::new()) };
        let servers = servers.unwrap_or_default().into_iter().map(ServerView::from).collect();
        let view = HealthView {
            servers,
            backend: health.backend,
            ok: health.is_ok(),
            round_trip_us: health.round_trip.as_micros(),
            problem: health.problem.as_ref().map(ToString::to_string),
        };
        if common.json {
            output::print_json(&view)?;
        } else if let Some(problem) = &view.problem {
            output::warn(problem);
        } else {
            let HealthView { backend, round_trip_us, .. } = &view;
            output::print(format!(
                "{backend}: {}, a round trip takes {round_trip_us} µs",
                styled(GOOD, "ok")
            ));
            for server in &view.servers {
                output::print(format!("  {server}"));
            }
        }
        Ok(health.problem.map_or(0, |problem| exit_status::of(&problem.into())))
    }
}
