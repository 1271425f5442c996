//! A run with several processes.
//!
//! [`Workers`] starts copies of a program that calls [`run_worker`]:
//!
//! 1. Each worker reads its [`Job`] from standard input, connects and prints `ready`.
//! 2. When all workers are ready, each is sent the time to start.
//! 3. At the end each worker prints a line of JSON, which says how many
//!    [`HeldInterval`]s follow as bytes.
//!
//! The URL is passed in the environment and not as an argument, because every user
//! can read the list of processes and a URL may contain a password. A worker ends
//! when its standard input is closed, so no worker outlives the parent process.

use std::ffi::OsString;
use std::path::PathBuf;
use std::process::Stdio;
use std::time::Duration;

use anyhow::{Context as _, Result, bail};
use dlock::Config;
use serde::{Deserialize, Serialize};
use tokio::io::{AsyncBufReadExt as _, AsyncReadExt as _, AsyncWriteExt as _, BufReader, Stdin};
use tokio::process::{Child, ChildStdin, ChildStdout, Command};

use crate::clock;
use crate::exclusion_checker::HeldInterval;
use crate::measurement::Measurement;
use crate::workload::{bystander, deduct, handoff, lock};

/// How to start a copy of the program that calls [`run_worker`].
#[derive(Clone, Debug)]
pub struct Launcher {
    /// The path of the program.
    pub program: PathBuf,
    /// The arguments that make it call [`run_worker`].
    pub arguments: Vec<OsString>,
    /// The variables to add to the environment: where the backend is.
    pub environment: Vec<(OsString, OsString)>,
}

/// The work of one worker.
#[derive(Clone, Debug, Serialize, Deserialize)]
#[allow(missing_docs, reason = "each variant is the plan of its workload")]
pub enum Job {
    Lock(lock::Plan),
    Handoff(handoff::Plan),
    Deduct(deduct::Plan),
    Bystander(bystander::Plan),
}

/// The result of one worker.
#[derive(Clone, Debug, Default, Serialize, Deserialize)]
pub struct Report {
    /// Counts and latencies.
    pub measured: Measurement,
    /// The times when locks were held. They follow the line of JSON as bytes.
    #[serde(skip)]
    pub intervals: Vec<HeldInterval>,
    /// The time of the request for each interval, if the workload needs it.
    pub requested: Vec<u64>,
    /// The round trips of PING in nanoseconds, if the workload measures them.
    pub pings: Vec<u64>,
    /// What the worker sold, if the workload sells.
    pub sold: SaleCounts,
    /// The share of one core that the process used in the measured time, if the
    /// workload measures it.
    pub cpu: f64,
    /// How many locks were lost, if the workload counts them.
    pub lost: u64,
}

/// What one worker sold.
#[derive(Clone, Copy, Debug, Default, Serialize, Deserialize)]
pub struct SaleCounts {
    /// The number of units.
    pub units: u64,
    /// The number of commands sent to sell them, without script calls.
    pub commands: u64,
    /// How often units were brought from one home to another.
    #[serde(default)]
    pub moves: u64,
}

#[derive(Serialize, Deserialize)]
struct ReportHeader {
    report: Report,
    intervals: usize,
}

/// Worker processes that are ready to start.
#[derive(Debug)]
pub struct Workers {
    workers: Vec<Worker>,
}

#[derive(Debug)]
struct Worker {
    process: Child,
    input: ChildStdin,
    output: BufReader<ChildStdout>,
}

/// The time between the start command and the start, so that no worker is late.
const START_DELAY: Duration = Duration::from_millis(50);

/// The time at which a run should start that is announced now.
pub(crate) fn start_soon() -> u64 {
    clock::now() + clock::nanos(START_DELAY)
}

impl Workers {
    /// Starts a worker for each job and waits until all are ready.
    ///
    /// # Errors
    /// Fails if a worker cannot be started or is not ready within 30 seconds. The
    /// worker's own error is on standard error.
    pub async fn start(launcher: &Launcher, jobs: Vec<Job>) -> Result<Self> {
        let mut started = Workers { workers: Vec::new() };
        for job in jobs {
            let mut process = Command::new(&launcher.program)
                .args(&launcher.arguments)
                .process_group(0) // Ctrl-C goes to the parent only, which ends the workers
                .stdin(Stdio::piped())
                .stdout(Stdio::piped())
                .envs(launcher.environment.iter().map(|(name, value)| (name, value)))
                .spawn()
                .with_context(|| format!("cannot start {}", launcher.program.display()))?;
            let (Some(mut input), Some(output)) = (process.stdin.take(), process.stdout.take())
            else {
                bail!("a worker process has no pipes");
            };
            let line = format!("{}\n", serde_json::to_string(&job)?);
            input.write_all(line.as_bytes()).await?;
            started.workers.push(Worker { process, input, output: BufReader::new(output) });
        }
        for worker in &mut started.workers {
            let mut line = String::new();
            let reading = worker.output.read_line(&mut line);
            tokio::time::timeout(Duration::from_secs(30), reading)
                .await
                .context("a worker process was not ready within 30 s")??;
            if line.trim_end() != "ready" {
                bail!("a worker process ended before it was ready; its error is above");
            }
        }
        Ok(started)
    }

    /// Starts all workers at `start`, by [`clock::now`], and collects their reports.
    ///
    /// # Errors
    /// Fails if a worker ends without a report.
    pub async fn run(mut self, start: u64) -> Result<Vec<Report>> {
        for worker in &mut self.workers {
            worker.input.write_all(format!("{start}\n").as_bytes()).await?;
        }
        let mut reports = Vec::new();
        for worker in &mut self.workers {
            reports.push(
                worker
                    .report()
                    .await
                    .context("a worker process ended without a report; its error may be above")?,
            );
        }
        for Worker { mut process, input, .. } in self.workers {
            drop(input);
            process.wait().await?;
        }
        Ok(reports)
    }
}

impl Worker {
    async fn report(&mut self) -> Result<Report> {
        let mut line = String::new();
        self.output.read_line(&mut line).await?;
        let ReportHeader { report, intervals } = serde_json::from_str(&line)?;
        let mut bytes = vec![0; intervals * HeldInterval::BYTES];
        self.output.read_exact(&mut bytes).await?;
        let intervals =
            bytes.chunks_exact(HeldInterval::BYTES).filter_map(HeldInterval::from_bytes).collect();
        Ok(Report { intervals, ..report })
    }
}

/// Runs as a worker: reads a job from standard input and prints its report.
///
/// # Errors
/// Fails if the job cannot be read or the backend cannot be reached.
pub async fn run_worker(config: &Config) -> Result<()> {
    let mut input = BufReader::new(tokio::io::stdin());
    let Some(job) = read_line(&mut input).await? else { return Ok(()) };
    let run = JobRun::prepare(config, serde_json::from_str(&job)?).await?;
    write_stdout(b"ready\n").await?;
    let Some(start) = read_line(&mut input).await? else { return Ok(()) };
    let start = start.parse().context("the start time is not a number")?;
    let report = tokio::select! {
        report = run.run(start) => Some(report),
        _ = read_line(&mut input) => None,
    };
    run.close().await;
    let Some(mut report) = report.transpose()? else { return Ok(()) };
    let intervals = std::mem::take(&mut report.intervals);
    let header = ReportHeader { report, intervals: intervals.len() };
    let mut bytes = format!("{}\n", serde_json::to_string(&header)?).into_bytes();
    bytes.extend(intervals.into_iter().flat_map(HeldInterval::to_bytes));
    write_stdout(&bytes).await
}

/// A job that is ready to start.
enum JobRun {
    Lock(lock::ProcessRun),
    Handoff(handoff::ProcessRun),
    Deduct(deduct::ProcessRun),
    Bystander(bystander::ProcessRun),
}

impl JobRun {
    async fn prepare(config: &Config, job: Job) -> Result<Self> {
        Ok(match job {
            Job::Lock(plan) => JobRun::Lock(lock::ProcessRun::prepare(config, plan).await?),
            Job::Handoff(plan) => {
                JobRun::Handoff(handoff::ProcessRun::prepare(config, plan).await?)
            }
            Job::Deduct(plan) => JobRun::Deduct(deduct::ProcessRun::prepare(config, plan).await?),
            Job::Bystander(plan) => {
                JobRun::Bystander(bystander::ProcessRun::prepare(config, plan).await?)
            }
        })
    }

    async fn run(&self, start: u64) -> Result<Report> {
        match self {
            JobRun::Lock(run) => Ok(run.run(start).await),
            JobRun::Handoff(run) => run.run(start).await,
            JobRun::Deduct(run) => Ok(run.run(start).await),
            JobRun::Bystander(run) => run.run(start).await,
        }
    }

    async fn close(&self) {
        match self {
            JobRun::Lock(run) => run.close().await,
            JobRun::Handoff(run) => run.close().await,
            JobRun::Deduct(run) => run.close().await,
            JobRun::Bystander(run) => run.close().await,
        }
    }
}

async fn write_stdout(bytes: &[u8]) -> Result<()> {
    let mut output = tokio::io::stdout();
    output.write_all(bytes).await?;
    Ok(output.flush().await?)
}

/// Reads a line; `None` if the parent has closed the pipe.
async fn read_line(input: &mut BufReader<Stdin>) -> Result<Option<String>> {
    let mut line = String::new();
    let read = input.read_line(&mut line).await?;
    Ok((read > 0).then(|| line.trim_end().to_owned()))
}
