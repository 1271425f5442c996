//! Injects one fault after another.

use std::sync::Arc;
use std::time::{Duration, Instant};

use dlock::Dlock;
use rand::rngs::StdRng;
use rand::{RngExt as _, SeedableRng as _};

use super::Options;
use super::failover_faults::blocking;
use super::faults::{self, Fault};
use super::load::{KEYS, SLOW_KEYS, TTL};
use super::quorum_faults::NODES;
use super::recovery;
use super::run::{Run, nanos};
use super::servers::Servers;
use super::workers::Workers;
use crate::process::now;
use crate::proxy::{Once, Proxy, Way};
use crate::redis::RedisServer;

/// The delay of a break: the default of a client.
const BREAK_DELAY: Duration = Duration::from_millis(500);
/// How long a break may take.
const BREAK_TIMEOUT: Duration = Duration::from_secs(10);

/// Servers and network, and what goes wrong with them.
pub(super) struct Faults {
    pub(super) options: Options,
    pub(super) servers: Servers,
    pub(super) proxies: Vec<Arc<Proxy>>,
    pub(super) run: Arc<Run>,
}

impl Faults {
    /// Injects faults until the run ends. Each time everything must recover before the
    /// next fault.
    pub(super) async fn inject_all(&mut self, workers: &mut Workers) {
        let mut random = StdRng::seed_from_u64(self.options.seed);
        // A server and a worker fault at the same time in one of four cases.
        let mean = Duration::from_millis(75_000 / self.options.faults_per_minute.max(1));
        self.recovered(&[], "the start").await;
        while !self.run.is_stopping() {
            let began = Instant::now();
            let (of_server, of_worker) = self.options.faults.draw(&mut random);
            let faults: Vec<_> = of_server.into_iter().chain(of_worker).collect();
            let mut for_worker = StdRng::seed_from_u64(random.random());
            let server = async {
                let Some(fault) = of_server else { return };
                let lasts = faults::lasts(&mut random);
                self.inject(fault, lasts, &mut random).await;
            };
            let worker = async {
                let Some(fault) = of_worker else { return };
                let lasts = faults::lasts(&mut for_worker);
                workers.inject(fault, lasts, &mut for_worker).await;
            };
            tokio::join!(server, worker);
            let names: Vec<_> = faults.iter().map(|fault| format!("{fault:?}")).collect();
            self.recovered(&faults, &names.join(" and ")).await;
            self.proxies.iter().for_each(|proxy| proxy.heal());
            blocking(|| self.servers.repair());
            let period = mean.mul_f64(random.random_range(0.1..1.9));
            self.run.sleep(period.saturating_sub(began.elapsed())).await;
        }
        for proxy in &self.proxies {
            proxy.forget_once();
            proxy.heal();
        }
        blocking(|| self.servers.repair());
    }

    async fn recovered(&self, faults: &[Fault], after: &str) {
        let workers = self.options.processes;
        let is_listening = |worker: usize| match &self.servers {
            Servers::Single(_) => self.proxies[worker].subscribers() > 0,
            // Each worker listens to most nodes.
            Servers::Redlock(_) => self.subscribers() > workers * (NODES / 2),
            // It looks, if nobody tells it.
            Servers::Database(_) | Servers::Sessions(_) => true,
            // Nobody knows whose connection is whose.
            _ => self.subscribers() >= workers,
        };
        let took = recovery::recovered(&self.run, &self.options, is_listening, after).await;
        self.run.count_faults(faults, after, took);
    }

    fn subscribers(&self) -> usize {
        self.proxies.iter().map(|proxy| proxy.subscribers()).sum()
    }

    async fn inject(&mut self, fault: Fault, lasts: Duration, random: &mut StdRng) {
        let before = now();
        // One worker, half of them, or all are cut off from the others.
        let links = self.servers.links();
        let count = (self.proxies.len() / links).max(1);
        let share = [1, count.div_ceil(2), count][random.random_range(0..3)];
        let first = random.random_range(0..count);
        let targets = self.proxies.iter().cycle().skip(first * links);
        let targets: Vec<_> = targets.take(share * links).cloned().collect();
        let each = |what: &dyn Fn(&Proxy)| targets.iter().for_each(|proxy| what(proxy));
        match fault {
            Fault::BreakLocks => self.break_locks(random).await,
            Fault::Cut => each(&Proxy::cut),
            // A half-open connection is never closed by the network: it stays so until
            // everything works again without it.
            Fault::HalfOpen => each(&Proxy::freeze),
            Fault::HalfOpenNotices => each(&Proxy::freeze_subscribers),
            Fault::LoseReplies
            | Fault::DuplicateRequests
            | Fault::LoseNotices
            | Fault::DuplicateNotices => {
                let (what, text) = match fault {
                    Fault::LoseReplies => (Once::LoseReply, self.servers.text_of_writes()),
                    Fault::DuplicateRequests => (Once::DuplicateRequest, "EVAL"),
                    Fault::LoseNotices => (Once::LosePush, ""),
                    _ => (Once::DuplicatePush, ""),
                };
                let times = random.random_range(1..10);
                each(&|proxy| (0..times).for_each(|_| proxy.once(what, text)));
                tokio::time::sleep(lasts).await;
                each(&Proxy::forget_once);
            }
            Fault::StallReplies
            | Fault::StallRequests
            | Fault::StallBoth
            | Fault::Silence
            | Fault::Delay => {
                each(&|proxy| match fault {
                    Fault::StallReplies => proxy.stall(&[Way::ToClient]),
                    Fault::StallRequests => proxy.stall(&[Way::ToServer]),
                    Fault::StallBoth => proxy.stall(&[Way::ToServer, Way::ToClient]),
                    Fault::Silence => proxy.go_silent(),
                    _ => {
                        proxy.delay(Way::ToServer, lasts / 10);
                        proxy.delay(Way::ToClient, lasts / 10);
                    }
                });
                tokio::time::sleep(lasts).await;
                each(&Proxy::heal);
            }
            Fault::KillCommandConnections => {
                self.at_each_server(&["CLIENT", "KILL", "TYPE", "normal"]);
            }
            Fault::KillNoticeConnections => {
                self.at_each_server(&["CLIENT", "KILL", "TYPE", "pubsub"]);
            }
            Fault::ForgetScripts => self.at_each_server(&["SCRIPT", "FLUSH"]),
            _ => match &mut self.servers {
                Servers::Single(server) => of_server(server, &self.run, fault, lasts).await,
                Servers::Database(database) => database.inject(fault, lasts, random).await,
                Servers::Sessions(store) => {
                    let times = (lasts, self.options.slack);
                    store.inject(fault, times, &self.run, random).await;
                }
                _ => self.of_topology(fault, lasts, random).await,
            },
        }
        if matches!(fault, Fault::FlushAll | Fault::RestartEmpty) {
            self.run.state().checker.data_lost(before, TTL + Duration::from_secs(1));
        }
    }

    fn at_each_server(&self, command: &[&str]) {
        blocking(|| self.servers.all().iter().for_each(|server| drop(server.cli(command))));
    }

    /// Breaks some of the keys, as an operator does, and waits until their delay is over.
    async fn break_locks(&self, random: &mut StdRng) {
        let delay = BREAK_DELAY + self.options.slack;
        let operator = Dlock::builder().url(&self.servers.url()).namespace("chaos").ttl(TTL);
        // A person who breaks a lock waits for its row, however much it is wanted.
        let operator = operator.break_delay(delay).call_timeout(BREAK_TIMEOUT);
        let operator = operator.client_name("operator").connect().await;
        let operator = match operator {
            Ok(operator) => operator,
            Err(error) => return self.run.report_violation(format!("no operator: {error}")),
        };
        let keys: Vec<_> = KEYS.into_iter().chain(SLOW_KEYS).collect();
        for _ in 0..random.random_range(1..4) {
            let key = keys[random.random_range(0..keys.len())];
            let from = now();
            // The key may be that of a lock or of a semaphore.
            let lock = operator.break_lock(key).await;
            let permits = operator.break_permits(key).await;
            match lock.and_then(|lock| Ok(lock + permits?)) {
                Ok(holders) => {
                    let over = now();
                    let mut state = self.run.state();
                    state.broken += holders as u64;
                    let until = over + nanos(TTL + Duration::from_secs(1));
                    state.checker.broken(key, from, over + nanos(delay), until);
                }
                Err(error) => self.run.report_violation(format!("a break failed: {error}")),
            }
        }
        operator.shutdown(Duration::ZERO).await;
        drop(operator);
        tokio::time::sleep(delay).await;
    }
}

/// A fault of the only server.
async fn of_server(server: &mut RedisServer, run: &Run, fault: Fault, lasts: Duration) {
    let cli = |server: &RedisServer, arguments: &[&str]| blocking(|| server.cli(arguments));
    match fault {
        Fault::PauseClients => {
            cli(server, &["CLIENT", "PAUSE", &lasts.as_millis().to_string(), "ALL"]);
            tokio::time::sleep(lasts).await;
        }
        Fault::OutOfMemory => {
            cli(server, &["CONFIG", "SET", "maxmemory", "1"]);
            tokio::time::sleep(lasts).await;
            cli(server, &["CONFIG", "SET", "maxmemory", "0"]);
        }
        Fault::DemotePrimary => {
            // There is no server at that port, so the data stay as they are. A server
            // that becomes a replica closes none of its connections.
            cli(server, &["REPLICAOF", "127.0.0.1", "1"]);
            if !cli(server, &["ROLE"]).starts_with("slave") {
                run.report_violation("the server was not demoted".into());
            }
            tokio::time::sleep(lasts).await;
            cli(server, &["REPLICAOF", "NO", "ONE"]);
        }
        Fault::PauseServer => {
            server.pause();
            tokio::time::sleep(lasts).await;
            server.resume();
        }
        Fault::FlushAll => {
            cli(server, &["FLUSHALL"]);
        }
        Fault::RestartServer | Fault::RestartEmpty => {
            server.kill();
            if fault == Fault::RestartEmpty {
                let _ = std::fs::remove_dir_all(server.directory().join("appendonlydir"));
            } else {
                tokio::time::sleep(lasts).await;
            }
            blocking(|| server.restart());
            // It accepts connections while it still reads its data.
            while cli(server, &["PING"]) != "PONG" && !run.is_stopping() {
                tokio::time::sleep(Duration::from_millis(5)).await;
            }
        }
        _ => {}
    }
}
