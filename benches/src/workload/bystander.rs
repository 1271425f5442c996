//! What a load does to somebody who has nothing to do with it.
//!
//! A process of its own holds one mutex with a short ttl on a key that nobody else
//! wants, and sends a PING every few milliseconds. If the load saturates the server,
//! the mutex cannot be renewed in time, and the round trips grow.

use std::time::Duration;

use anyhow::Result;
use dlock::{Config, Dlock};
use redis::aio::MultiplexedConnection;
use serde::{Deserialize, Serialize};

use crate::clock;
use crate::load::Load;
use crate::measurement::Recorder;
use crate::processes::Report;
use crate::server;

/// The ttl of the mutex.
pub const TTL: Duration = Duration::from_secs(2);
/// The pause between two PINGs, and after an error.
const PAUSE: Duration = Duration::from_millis(5);

/// What the bystander does.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct Plan {
    /// The prefix of the keys of the run.
    pub key_prefix: String,
    /// The load that the bystander stands beside.
    pub load: Load,
}

/// What the bystander saw, as `--json` prints it.
#[derive(Clone, Copy, Debug, Serialize, Deserialize)]
#[allow(missing_docs, reason = "schema.json describes the fields")]
pub struct Outcome {
    pub bystander_lost: u64,
    pub ping_p50_us: f64,
    pub ping_p99_us: f64,
}

impl Outcome {
    pub(crate) fn new(report: &Report) -> Self {
        let pings = Recorder::default();
        report.pings.iter().for_each(|ping| pings.operation(0, *ping));
        let latency = pings.measurement().latency();
        Outcome {
            bystander_lost: report.lost,
            ping_p50_us: latency.p50_us,
            ping_p99_us: latency.p99_us,
        }
    }
}

/// The bystander, ready to start.
#[derive(Debug)]
pub struct ProcessRun {
    plan: Plan,
    dlock: Dlock,
    connection: MultiplexedConnection,
}

impl ProcessRun {
    /// Connects to the backend.
    ///
    /// # Errors
    /// Fails if the backend cannot be reached.
    pub async fn prepare(config: &Config, plan: Plan) -> Result<Self> {
        let dlock = Dlock::builder().config(config.clone()).connect().await?;
        let connection = server::connect(config).await?;
        Ok(ProcessRun { plan, dlock, connection })
    }

    /// Holds the mutex and sends PINGs, from now until the load ends. Losses count from
    /// the start of the warm-up, PINGs only in the measured time.
    ///
    /// # Errors
    /// Fails if the mutex cannot be acquired before the load starts.
    pub async fn run(&self, start: u64) -> Result<Report> {
        let measured = start.saturating_add(clock::nanos(self.plan.load.warmup));
        let end = measured.saturating_add(clock::nanos(self.plan.load.duration));
        let (lost, pings) = tokio::join!(self.hold(end), self.ping(measured, end));
        Ok(Report { lost: lost?, pings, ..Report::default() })
    }

    /// Holds the mutex until the end; returns how often it was lost.
    async fn hold(&self, end: u64) -> Result<u64> {
        let key = format!("{}:bystander", self.plan.key_prefix);
        let mutex = self.dlock.mutex(key).ttl(TTL).wait_unlimited();
        let mut guard = mutex.lock().await?;
        let mut lost = 0;
        while clock::timeout_at(end, guard.lost()).await.is_some() {
            lost += 1;
            let again = async {
                loop {
                    match mutex.lock().await {
                        Ok(guard) => return guard,
                        Err(_) => tokio::time::sleep(PAUSE).await,
                    }
                }
            };
            let Some(acquired) = clock::timeout_at(end, again).await else { break };
            guard = acquired;
        }
        Ok(lost)
    }

    /// The round trips in nanoseconds, one due every [`PAUSE`]. One that the end of the run cuts off counts
    /// until then.
    async fn ping(&self, measured: u64, end: u64) -> Vec<u64> {
        let mut pings = Vec::new();
        clock::sleep_until(measured).await;
        while clock::now() < end {
            let began = clock::now();
            let mut connection = self.connection.clone();
            let ping = redis::cmd("PING");
            let answer = clock::timeout_at(end, ping.exec_async(&mut connection)).await;
            if !matches!(answer, Some(Err(_))) {
                // Those that were due meanwhile waited too, so that one long stall is not
                // a single slow PING among hundreds.
                let mut waited = clock::now() - began;
                while waited > 0 {
                    pings.push(waited);
                    waited = waited.saturating_sub(clock::nanos(PAUSE));
                }
            }
            tokio::time::sleep(PAUSE).await;
        }
        pings
    }

    /// Releases the mutex and disconnects.
    pub async fn close(&self) {
        self.dlock.shutdown(Duration::from_secs(1)).await;
    }
}
