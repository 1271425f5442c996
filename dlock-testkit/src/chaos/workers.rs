//! The worker processes, and the faults against them.

use std::process::Stdio;
use std::sync::Arc;
use std::time::Duration;

use rand::RngExt as _;
use rand::rngs::StdRng;
use tokio::io::{AsyncBufReadExt as _, AsyncWriteExt as _, BufReader};
use tokio::process::{Child, Command};

use super::Options;
use super::faults::Fault;
use super::run::Run;
use crate::process::now;

/// How long a worker that shuts down may take: a wait, and some time for the rest.
const EXIT: Duration = Duration::from_secs(25);

/// The worker processes.
pub(super) struct Workers {
    options: Options,
    /// The URL of each worker's own proxy.
    urls: Vec<String>,
    run: Arc<Run>,
    workers: Vec<Child>,
}

impl Workers {
    /// Starts all workers.
    pub(super) fn start(options: &Options, urls: Vec<String>, run: &Arc<Run>) -> Self {
        let (options, run) = (options.clone(), run.clone());
        let mut workers = Workers { options, urls, run, workers: Vec::new() };
        for number in 0..workers.urls.len() {
            match workers.spawn(number) {
                Ok(worker) => workers.workers.push(worker),
                Err(error) => {
                    let what = format!("a worker cannot be started: {error}");
                    workers.run.report_violation(what);
                    break;
                }
            }
        }
        workers
    }

    fn spawn(&self, number: usize) -> std::io::Result<Child> {
        let mut worker = Command::new(std::env::current_exe()?)
            .args(["--url", &self.urls[number], "--number", &number.to_string()])
            .args(["--topology", self.options.topology.name()])
            .args(["--tasks", &self.options.tasks.to_string()])
            .args(["--seed", &self.options.seed.to_string()])
            .args(self.options.plant.iter().flat_map(|bug| ["--plant".into(), format!("{bug:?}")]))
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .kill_on_drop(true)
            .spawn()?;
        if let Some(output) = worker.stdout.take() {
            let (run, id) = (self.run.clone(), worker.id().unwrap_or(0));
            tokio::spawn(async move {
                let mut lines = BufReader::with_capacity(1 << 16, output).lines();
                while let Ok(Some(line)) = lines.next_line().await {
                    run.on_line(&line);
                }
                run.state().recovery.worker_is_gone(id);
            });
        }
        Ok(worker)
    }

    /// Injects a fault into one of the workers, and returns when it is over.
    pub(super) async fn inject(&mut self, fault: Fault, lasts: Duration, random: &mut StdRng) {
        let number = random.random_range(0..self.workers.len());
        match fault {
            Fault::PauseWorker => {
                let Some(id) = self.workers[number].id() else { return };
                let from = now();
                crate::process::pause(id);
                tokio::time::sleep(lasts).await;
                crate::process::resume(id);
                self.run.state().checker.paused(&format!("{number}."), from, now());
                return;
            }
            Fault::PanicInHooks => {
                if let Some(input) = &mut self.workers[number].stdin {
                    let line = format!("panic {}\n", lasts.as_millis());
                    let _ = input.write_all(line.as_bytes()).await;
                }
                return tokio::time::sleep(lasts).await;
            }
            Fault::KillWorker => {
                let _ = self.workers[number].kill().await;
            }
            _ => {
                self.ask_to_stop(number).await;
                self.wait_for_exit(number).await;
            }
        }
        match self.spawn(number) {
            Ok(worker) => self.workers[number] = worker,
            Err(error) => self.run.report_violation(format!("a worker cannot be started: {error}")),
        }
    }

    /// Shuts all workers down.
    pub(super) async fn stop(mut self) {
        for number in 0..self.workers.len() {
            self.ask_to_stop(number).await;
        }
        for number in 0..self.workers.len() {
            self.wait_for_exit(number).await;
        }
    }

    async fn ask_to_stop(&mut self, number: usize) {
        if let Some(mut input) = self.workers[number].stdin.take() {
            let _ = input.write_all(b"stop\n").await;
        }
    }

    async fn wait_for_exit(&mut self, number: usize) {
        let worker = &mut self.workers[number];
        match tokio::time::timeout(EXIT, worker.wait()).await {
            Ok(Ok(status)) if status.success() => {}
            ended => {
                self.run.report_violation(format!("worker {number} did not end well: {ended:?}"))
            }
        }
    }
}
