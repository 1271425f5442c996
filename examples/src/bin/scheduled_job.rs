//! A scheduled job that all machines start and only one runs.
//!
//! Run it with `cargo run -p examples --bin scheduled_job`. Three nodes start the job at
//! the same time, as cron does. With `DLOCK_URL=redis://localhost` they are three
//! processes. Otherwise they are three clients inside this process.

use std::process::{Command, ExitCode};
use std::time::Duration;

use dlock::{Dlock, Result, key};

/// The lock stays held for this time after the job, so that a node with a late clock
/// does not run it again.
const HOLD_AFTER_JOB: Duration = Duration::from_secs(5);

async fn nightly_report(node: &str, dlock: &Dlock, night: &str) -> Result<()> {
    let Some(guard) = dlock.mutex(key!("job:report:{night}")).tag("node", node).try_lock().await?
    else {
        println!("{node}: another node runs it");
        return Ok(());
    };
    println!("{node}: RUNS the report, token {}", guard.token());
    tokio::time::sleep(Duration::from_millis(100)).await; // stands for the report
    let _ = guard.release_after(HOLD_AFTER_JOB).await?;
    Ok(())
}

#[tokio::main]
async fn main() -> ExitCode {
    let night = std::env::var("NIGHT").unwrap_or_else(|_| std::process::id().to_string());
    let done = match std::env::args().nth(1) {
        Some(node) => one_node(&node, &night).await,
        None => three_nodes(&night).await,
    };
    match done {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("{error:#}");
            ExitCode::FAILURE
        }
    }
}

async fn one_node(node: &str, night: &str) -> anyhow::Result<()> {
    let dlock = examples::connect().await?;
    nightly_report(node, &dlock, night).await?;
    dlock.shutdown(Duration::from_secs(1)).await;
    Ok(())
}

async fn three_nodes(night: &str) -> anyhow::Result<()> {
    let nodes = ["node-1", "node-2", "node-3"];
    if examples::is_embedded(&examples::connect().await?) {
        for node in nodes {
            one_node(node, night).await?;
        }
        return Ok(());
    }
    let mut running = Vec::new();
    for node in nodes {
        running.push(Command::new(std::env::current_exe()?).arg(node).env("NIGHT", night).spawn()?);
    }
    for mut node in running {
        anyhow::ensure!(node.wait()?.success(), "a node failed");
    }
    Ok(())
}
