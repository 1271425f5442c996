//! `dlock health`: whether the backend answers.

use anyhow::Result;
use clap::Args;
use dlock::Dlock;
use serde::Serialize;

use crate::output::{self, GOOD, styled};
use crate::{Common, exit_status};

/// Check whether the backend answers, and how fast
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
}

impl Health {
    pub(crate) async fn run(self, common: &Common) -> Result<u8> {
        let dlock = Dlock::builder().config(common.config()?).connect_lazy()?;
        let first = dlock.health().await;
        // The first round trip includes the time to connect, so a second one is measured.
        let health = if first.is_ok() { dlock.health().await } else { first };
        let view = HealthView {
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
            let HealthView { backend, round_trip_us, .. } = view;
            output::print(format!(
                "{backend}: {}, a round trip takes {round_trip_us} µs",
                styled(GOOD, "ok")
            ));
        }
        Ok(health.problem.map_or(0, |problem| exit_status::of(&problem.into())))
    }
}
