//! Several processes that do one thing together.
//!
//! The [`Fleet`] starts copies of a program that calls [`work`]. Each is given its
//! [`Job`] on its standard input, connects, says `ready`; when all are, each is
//! told the moment to start; in the end each sends one line of JSON, which tells
//! how many [`Interval`]s follow as bytes. URLs travel on standard input because
//! the list of processes is for everybody to read and a URL may hold a password.

use std::ffi::OsString;
use std::path::PathBuf;
use std::process::Stdio;
use std::time::Duration;

use anyhow::{Context as _, Result, bail};
use serde::{Deserialize, Serialize};
use tokio::io::{AsyncBufReadExt as _, AsyncReadExt as _, AsyncWriteExt as _, BufReader, Stdin};
use tokio::process::{Child, ChildStdin, ChildStdout, Command};

use crate::checker::Interval;
use crate::measure::Measured;
use crate::{clock, handoff, lock};

/// How a copy of the program is started so that it calls [`work`].
#[derive(Clone, Debug)]
pub struct Launcher {
    /// The program.
    pub program: PathBuf,
    /// What makes it call [`work`].
    pub arguments: Vec<OsString>,
}

/// What a process of the fleet does.
#[derive(Clone, Debug, Serialize, Deserialize)]
#[allow(missing_docs, reason = "each is its workload's plan")]
pub enum Job {
    Lock(lock::Plan),
    Handoff(handoff::Plan),
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
}

#[derive(Serialize, Deserialize)]
struct Header {
    measured: Measured,
    intervals: usize,
    asked: Vec<u64>,
    pings: Vec<u64>,
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
                .stdin(Stdio::piped())
                .stdout(Stdio::piped())
                .kill_on_drop(true)
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
        let start = clock::now() + clock::nanos(NOTICE);
        for worker in &mut self.workers {
            worker.input.write_all(format!("{start}\n").as_bytes()).await?;
        }
        let mut reports = Vec::new();
        for worker in &mut self.workers {
            reports.push(worker.report().await.context("a process of the bench gave no report")?);
        }
        for worker in &mut self.workers {
            worker.process.wait().await?;
        }
        Ok(reports)
    }
}

impl Worker {
    async fn report(&mut self) -> Result<Report> {
        let mut line = String::new();
        self.output.read_line(&mut line).await?;
        let Header { measured, intervals, asked, pings } = serde_json::from_str(&line)?;
        let mut bytes = vec![0; intervals * Interval::BYTES];
        self.output.read_exact(&mut bytes).await?;
        let intervals =
            bytes.chunks_exact(Interval::BYTES).filter_map(Interval::from_bytes).collect();
        Ok(Report { measured, intervals, asked, pings })
    }
}

/// What a process of the fleet runs: the job on its standard input.
///
/// # Errors
/// If the job cannot be read or its backend cannot be reached.
pub async fn work() -> Result<()> {
    let mut input = BufReader::new(tokio::io::stdin());
    let job: Job = serde_json::from_str(&line(&mut input).await?)?;
    let report = match job {
        Job::Lock(plan) => {
            let part = lock::Part::prepare(plan).await?;
            part.run(starting(&mut input).await?).await
        }
        Job::Handoff(plan) => {
            let part = handoff::Part::prepare(plan).await?;
            part.run(starting(&mut input).await?).await?
        }
    };
    let Report { measured, intervals, asked, pings } = report;
    let header = Header { measured, intervals: intervals.len(), asked, pings };
    let mut bytes = format!("{}\n", serde_json::to_string(&header)?).into_bytes();
    bytes.extend(intervals.into_iter().flat_map(Interval::to_bytes));
    let mut output = tokio::io::stdout();
    output.write_all(&bytes).await?;
    output.flush().await?;
    Ok(())
}

/// Says that this process is ready and hears when to start.
async fn starting(input: &mut BufReader<Stdin>) -> Result<u64> {
    let mut output = tokio::io::stdout();
    output.write_all(b"ready\n").await?;
    output.flush().await?;
    let start = line(input).await?;
    start.parse().context("the start is no number")
}

async fn line(input: &mut BufReader<Stdin>) -> Result<String> {
    let mut line = String::new();
    if input.read_line(&mut line).await? == 0 {
        bail!("nobody is there to tell what to do");
    }
    Ok(line.trim_end().to_owned())
}
