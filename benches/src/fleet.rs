//! Several processes that do one thing together.
//!
//! The [`Fleet`] starts copies of a program that calls [`work`]. Each is given its
//! [`Job`] on its standard input, connects, says `ready`; when all are, each is
//! told the moment to start; in the end each sends one line of JSON, which tells
//! how many [`Interval`]s follow as bytes. A URL travels in the environment because
//! the list of processes is for everybody to read and a URL may hold a password.
//! A process ends when its standard input does: however the first one ends, none of
//! them stays.

use std::ffi::OsString;
use std::path::PathBuf;
use std::process::Stdio;
use std::time::Duration;

use anyhow::{Context as _, Result, bail};
use dlock::Config;
use serde::{Deserialize, Serialize};
use tokio::io::{AsyncBufReadExt as _, AsyncReadExt as _, AsyncWriteExt as _, BufReader, Stdin};
use tokio::process::{Child, ChildStdin, ChildStdout, Command};

use crate::checker::Interval;
use crate::measure::Measured;
use crate::{clock, deduct, handoff, lock};

/// How a copy of the program is started so that it calls [`work`].
#[derive(Clone, Debug)]
pub struct Launcher {
    /// The program.
    pub program: PathBuf,
    /// What makes it call [`work`].
    pub arguments: Vec<OsString>,
    /// What its environment has beside that of this process: where the backend is.
    pub environment: Vec<(OsString, OsString)>,
}

/// What a process of the fleet does.
#[derive(Clone, Debug, Serialize, Deserialize)]
#[allow(missing_docs, reason = "each is its workload's plan")]
pub enum Job {
    Lock(lock::Plan),
    Handoff(handoff::Plan),
    Deduct(deduct::Plan),
}

/// What came of it.
#[derive(Clone, Debug, Default)]
pub struct Report {
    /// Counts and latencies.
    pub measured: Measured,
    /// When the locks were held.
    pub intervals: Vec<Interval>,
    /// When they were asked for, where that matters: one for each interval.
    pub asked: Vec<u64>,
    /// Round trips of a PING, in nanoseconds, where they were measured.
    pub pings: Vec<u64>,
    /// Units sold, and commands sent for that beside scripts, where it sells.
    pub sold: Sold,
}

/// What a process sold.
#[derive(Clone, Copy, Debug, Default, Serialize, Deserialize)]
pub struct Sold {
    /// How many units.
    pub units: u64,
    /// How many commands that were no scripts it sent for that.
    pub commands: u64,
}

#[derive(Serialize, Deserialize)]
struct Header {
    measured: Measured,
    intervals: usize,
    asked: Vec<u64>,
    pings: Vec<u64>,
    sold: Sold,
}

/// Processes that are ready to start.
#[derive(Debug)]
pub struct Fleet {
    workers: Vec<Worker>,
}

#[derive(Debug)]
struct Worker {
    process: Child,
    input: ChildStdin,
    output: BufReader<ChildStdout>,
}

/// How long after the word the processes start, so that all have heard it.
const NOTICE: Duration = Duration::from_millis(50);

/// A moment that nobody has missed by the time they hear of it.
pub(crate) fn soon() -> u64 {
    clock::now() + clock::nanos(NOTICE)
}

impl Fleet {
    /// Starts a process for each job and waits until all are ready.
    ///
    /// # Errors
    /// If one cannot be started or is not ready within half a minute; its own
    /// words are on standard error.
    pub async fn start(launcher: &Launcher, jobs: Vec<Job>) -> Result<Self> {
        let mut fleet = Fleet { workers: Vec::new() };
        for job in jobs {
            let mut process = Command::new(&launcher.program)
                .args(&launcher.arguments)
                .process_group(0) // Ctrl-C is for the first one, which ends the others
                .stdin(Stdio::piped())
                .stdout(Stdio::piped())
                .envs(launcher.environment.iter().map(|(name, value)| (name, value)))
                .spawn()
                .with_context(|| format!("cannot start {}", launcher.program.display()))?;
            let (Some(mut input), Some(output)) = (process.stdin.take(), process.stdout.take())
            else {
                bail!("a process of the bench has no pipes");
            };
            let line = format!("{}\n", serde_json::to_string(&job)?);
            input.write_all(line.as_bytes()).await?;
            fleet.workers.push(Worker { process, input, output: BufReader::new(output) });
        }
        for worker in &mut fleet.workers {
            let mut line = String::new();
            let reading = worker.output.read_line(&mut line);
            tokio::time::timeout(Duration::from_secs(30), reading)
                .await
                .context("a process of the bench did not get ready in 30 s")??;
            if line.trim_end() != "ready" {
                bail!("a process of the bench ended before it was ready; see above");
            }
        }
        Ok(fleet)
    }

    /// Lets all start at the same moment and gathers what came of it.
    ///
    /// # Errors
    /// If one of them ends without a report.
    pub async fn run(mut self) -> Result<Vec<Report>> {
        let start = soon();
        for worker in &mut self.workers {
            worker.input.write_all(format!("{start}\n").as_bytes()).await?;
        }
        let mut reports = Vec::new();
        for worker in &mut self.workers {
            reports.push(worker.report().await.context("a process of the bench gave no report")?);
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
        let Header { measured, intervals, asked, pings, sold } = serde_json::from_str(&line)?;
        let mut bytes = vec![0; intervals * Interval::BYTES];
        self.output.read_exact(&mut bytes).await?;
        let intervals =
            bytes.chunks_exact(Interval::BYTES).filter_map(Interval::from_bytes).collect();
        Ok(Report { measured, intervals, asked, pings, sold })
    }
}

/// What a process of the fleet runs: the job on its standard input.
///
/// # Errors
/// If the job cannot be read or its backend cannot be reached.
pub async fn work(config: &Config) -> Result<()> {
    let mut input = BufReader::new(tokio::io::stdin());
    let Some(job) = line(&mut input).await? else { return Ok(()) };
    let part = Part::prepare(config, serde_json::from_str(&job)?).await?;
    say(b"ready\n").await?;
    let Some(start) = line(&mut input).await? else { return Ok(()) };
    let start = start.parse().context("the start is no number")?;
    let report = tokio::select! {
        report = part.run(start) => Some(report),
        _ = line(&mut input) => None,
    };
    part.close().await;
    let Some(report) = report.transpose()? else { return Ok(()) };
    let Report { measured, intervals, asked, pings, sold } = report;
    let header = Header { measured, intervals: intervals.len(), asked, pings, sold };
    let mut bytes = format!("{}\n", serde_json::to_string(&header)?).into_bytes();
    bytes.extend(intervals.into_iter().flat_map(Interval::to_bytes));
    say(&bytes).await
}

/// A job that is ready to start.
enum Part {
    Lock(lock::Part),
    Handoff(handoff::Part),
    Deduct(deduct::Part),
}

impl Part {
    async fn prepare(config: &Config, job: Job) -> Result<Self> {
        Ok(match job {
            Job::Lock(plan) => Part::Lock(lock::Part::prepare(config, plan).await?),
            Job::Handoff(plan) => Part::Handoff(handoff::Part::prepare(config, plan).await?),
            Job::Deduct(plan) => Part::Deduct(deduct::Part::prepare(config, plan).await?),
        })
    }

    async fn run(&self, start: u64) -> Result<Report> {
        match self {
            Part::Lock(part) => Ok(part.run(start).await),
            Part::Handoff(part) => part.run(start).await,
            Part::Deduct(part) => Ok(part.run(start).await),
        }
    }

    async fn close(&self) {
        match self {
            Part::Lock(part) => part.close().await,
            Part::Handoff(part) => part.close().await,
            Part::Deduct(part) => part.close().await,
        }
    }
}

async fn say(bytes: &[u8]) -> Result<()> {
    let mut output = tokio::io::stdout();
    output.write_all(bytes).await?;
    Ok(output.flush().await?)
}

/// A line; `None` if nobody is there any more to write one.
async fn line(input: &mut BufReader<Stdin>) -> Result<Option<String>> {
    let mut line = String::new();
    let read = input.read_line(&mut line).await?;
    Ok((read > 0).then(|| line.trim_end().to_owned()))
}
