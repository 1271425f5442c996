//! The soak test of a sale. Several processes buy, reserve, confirm, cancel, extend,
//! refund, restock, resize and rebalance, through networks that lose and duplicate
//! messages. They cancel futures, and are killed and restarted; so is the server, if
//! the options say so. At the end exactly the stock is sold, the audit is clean, and
//! the records of the sale agree with all answers that the workers received
//! ([`answers`]) and with the journal ([`replay`]).
//!
//! A worker makes its attempts in order, each with its own operation id, and prints its
//! progress. A worker that was killed is restarted from there, so some attempts are
//! made twice, by two processes.

mod answers;
mod replay;
mod worker;

use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use dlock::Dlock;
use dlock_segment::{Deduction, Error, Inventory, Resolved, Routing};
use rand::rngs::StdRng;
use rand::{RngExt as _, SeedableRng as _};

pub use self::worker::{WorkerTask, work};
use crate::process::ChildProcess;
use crate::redis::RedisServer;

/// The soak has failed if there is no progress for this long.
const STUCK: Duration = Duration::from_secs(120);
/// How long the output of a worker that exited may take to arrive.
const EXIT_GRACE: Duration = Duration::from_secs(10);

/// The name of the sale under test.
const SALE: &str = "soak";
/// The buyer of what is left at the end, when there is no limit any more.
const REST: &str = "the rest";
/// The limit of units per buyer.
const PER_BUYER: u64 = 3;

/// The mix of operations of a soak.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Mix {
    /// Mostly deductions, and some of everything else.
    Sale,
    /// Operations that must not lose a unit when they are killed: confirm, cancel,
    /// extend, refund, restock, resize, rebalance, and what these need.
    Settling,
    /// As [`Mix::Sale`] without restocks: exactly the initial stock is sold.
    SellOut,
}

/// The size and the options of a soak.
#[derive(Clone, Copy, Debug)]
#[allow(missing_docs, reason = "the fields are named like what they hold")]
pub struct Soak {
    pub units: u64,
    pub attempts: u64,
    pub segments: u32,
    /// How many independent servers there are, and how many homes the sale has.
    pub servers: u32,
    pub homes: u32,
    pub processes: u64,
    /// How often a worker process is killed; `server_kills`: how often the server is.
    pub kills: u64,
    pub server_kills: u64,
    /// How many entries of the journal are kept. It is checked if all are kept.
    pub journal: u64,
    pub mix: Mix,
    pub seed: u64,
}

/// The result of a soak.
#[derive(Clone, Copy, Debug)]
#[allow(missing_docs, reason = "the fields are named like what they hold")]
pub struct Report {
    pub sold: u64,
    pub restocked: u64,
    pub attempts: u64,
    pub operations: u64,
    /// How many answers were compared; `entries`: how many journal entries were replayed.
    pub answers: u64,
    pub entries: u64,
    pub kills: u64,
    pub server_kills: u64,
    pub resizes: u32,
    pub took: Duration,
}

struct Worker {
    process: ChildProcess,
    number: u64,
    done: u64,
    until: u64,
    gone_since: Option<Instant>,
}

/// A running soak.
struct Run<'a> {
    program: &'a Path,
    soak: Soak,
    servers: Vec<RedisServer>,
    workers: Vec<Worker>,
    random: StdRng,
    kills: u64,
    server_kills: u64,
}

impl Run<'_> {
    fn answers(&self, worker: u64) -> PathBuf {
        self.servers[0].directory().join(format!("answers-{worker}"))
    }

    fn start(&self, number: u64, from: u64) -> Worker {
        let until = self.soak.attempts / self.soak.processes;
        let task = WorkerTask {
            ports: self.servers.iter().map(RedisServer::port).collect(),
            seed: self.soak.seed,
            mix: self.soak.mix,
            // More than what can be sold to them, so that some hear "limit reached".
            buyers: (self.soak.units / 2).max(1),
            worker: number,
            from,
            until,
            answers: self.answers(number),
        };
        let arguments = task.to_arguments();
        let arguments: Vec<&str> = arguments.iter().map(String::as_str).collect();
        let process = ChildProcess::start(self.program, &arguments);
        Worker { process, number, done: from, until, gone_since: None }
    }

    /// Runs until all attempts are made, with the kills spread over them. Returns the
    /// number of attempts.
    async fn until_done(&mut self) -> u64 {
        let total: u64 = self.workers.iter().map(|worker| worker.until).sum();
        let mut progress = (0, Instant::now());
        loop {
            tokio::time::sleep(Duration::from_millis(10)).await;
            self.workers.iter_mut().for_each(Worker::listen);
            let done: u64 = self.workers.iter().map(|worker| worker.done).sum();
            if self.workers.iter().all(Worker::is_done) {
                return total;
            }
            // Over the first four fifths: a worker that is done cannot be killed.
            let is_due =
                |kills: u64, of: u64| kills < of && done * (of + of / 4 + 1) >= total * kills;
            if is_due(self.kills, self.soak.kills) {
                self.kills += 1;
                self.any_moment().await;
                self.kill_one();
            }
            if is_due(self.server_kills, self.soak.server_kills) {
                self.server_kills += 1;
                self.any_moment().await;
                let at = self.random.random_range(0..self.servers.len());
                tokio::task::block_in_place(|| self.servers[at].restart());
            }
            if done > progress.0 {
                progress = (done, Instant::now());
            }
            assert!(
                progress.1.elapsed() < STUCK,
                "no worker makes progress: stuck at {done} of {total}"
            );
        }
    }

    /// Sleeps a random time, so that a worker is not always killed while it prints.
    async fn any_moment(&mut self) {
        tokio::time::sleep(Duration::from_micros(self.random.random_range(0..60_000))).await;
    }

    fn kill_one(&mut self) {
        let busy = self.workers.iter().enumerate().filter(|(_, worker)| !worker.is_done());
        let busy: Vec<usize> = busy.map(|(at, _)| at).collect();
        let at = busy[self.random.random_range(0..busy.len())];
        self.workers[at].process.kill();
        let Worker { number, done, .. } = self.workers[at];
        self.workers[at] = self.start(number, done);
    }
}

impl Worker {
    /// Reads the progress of the worker.
    fn listen(&mut self) {
        if !self.process.is_running() {
            let since = *self.gone_since.get_or_insert_with(Instant::now);
            let failed = !self.is_done() && since.elapsed() > EXIT_GRACE;
            assert!(!failed, "worker {} failed at {}", self.number, self.done);
        }
        for line in self.process.take_lines() {
            let done = line.strip_prefix("done ").and_then(|done| done.parse().ok());
            self.done = self.done.max(done.unwrap_or(0));
        }
    }

    fn is_done(&self) -> bool {
        self.done >= self.until
    }
}

/// Runs a soak whose workers are processes of this program; `None` if there is no
/// Redis server.
///
/// # Panics
/// If a check fails.
pub async fn soak(program: &Path, soak: Soak) -> Option<Report> {
    let durable = ["--appendonly", "yes", "--appendfsync", "always"];
    let options: &[&str] = if soak.server_kills > 0 { &durable } else { &[] };
    let servers: Option<Vec<_>> = (0..soak.servers).map(|_| RedisServer::with(options)).collect();
    let servers = servers?;
    let mut clients = Vec::new();
    for server in &servers {
        clients.push(Dlock::connect(&server.url()).await.expect("a client"));
    }
    let sale = Inventory::builder(&clients[0], SALE).stock(soak.units).segments(soak.segments);
    let sale = sale.homes(soak.homes).servers(clients[1..].iter().cloned());
    let sale = sale.routed_by(Routing::Buyer).per_buyer(PER_BUYER).journal(soak.journal);
    let sale = sale.create().await.expect("a sale");
    let began = Instant::now();
    let random = StdRng::seed_from_u64(soak.seed);
    let mut run =
        Run { program, soak, servers, workers: Vec::new(), random, kills: 0, server_kills: 0 };
    run.workers = (0..soak.processes).map(|number| run.start(number, 0)).collect();
    let attempts = run.until_done().await;
    run.workers.clear();

    let sold = sell_the_rest(&sale).await;
    let audit = sale.audit().await.expect("an audit");
    assert!(audit.is_clean() && audit.exact, "{:#?}", audit.disagreements);
    assert_eq!((audit.sold, audit.available, audit.reserved), (sold, 0, 0));
    let mut received = answers::ReceivedAnswers::default();
    for worker in 0..soak.processes {
        received.compare(&sale, &run.answers(worker)).await;
    }
    let restocked = received.restocked();
    assert_eq!((audit.initial, audit.restocked), (soak.units, restocked), "each delivery once");
    assert_eq!(sold, soak.units + restocked, "sold exactly what there was");
    let entries = replay::replay(&sale, soak).await;
    // Repeating an operation takes nothing.
    for number in (0..soak.attempts / soak.processes).rev().take(1_000) {
        let id = worker::id(0, number);
        if soak.homes == 1 {
            let _ = sale.deduct(1).operation(id).send().await;
        } else {
            let _ = sale.resolve(id).await; // its buyer, and so its home, is not known here
        }
    }
    let stock = sale.stock().await.expect("the stock");
    assert_eq!((stock.sold, stock.available), (sold, 0));
    Some(Report {
        sold,
        restocked,
        attempts,
        operations: audit.operations,
        answers: received.count(),
        entries,
        kills: run.kills,
        server_kills: run.server_kills,
        resizes: stock.epoch,
        took: began.elapsed(),
    })
}

/// Waits for the end of all reservations and sells what is left. Returns the number of
/// units sold in total.
async fn sell_the_rest(sale: &Inventory) -> u64 {
    until_known("the limit", || sale.limit_per_buyer(None)).await;
    loop {
        let stock = until_known("the stock", || sale.stock()).await;
        if stock.available > 0 {
            let rest = stock.available.min(dlock_segment::MAX_QUANTITY);
            let sold = sale.deduct(rest).buyer(REST).send().await.expect("an answer");
            assert!(matches!(sold, Deduction::Taken(_)), "{sold:?}");
        } else if stock.reserved == 0 {
            return stock.sold;
        }
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
}

/// Compares each of these values with the record that the sale has of its id.
async fn with_records<T: Send + 'static>(
    sale: &Inventory,
    ids: impl IntoIterator<Item = (String, T)>,
    compare: fn(&str, &T, &Resolved),
) {
    let mut asked = tokio::task::JoinSet::new();
    for (id, value) in ids {
        let sale = sale.clone();
        asked.spawn(async move {
            let resolved = until_known(&id, || sale.resolve(&id)).await;
            compare(&id, &value, &resolved);
        });
        if asked.len() >= 1_000 {
            asked.join_next().await.expect("some are asked").expect("all agrees");
        }
    }
    while let Some(asked) = asked.join_next().await {
        asked.expect("all agrees");
    }
}

/// Repeats a request until there is an answer: the network and the server recover.
async fn until_known<T, F>(what: &str, ask: impl Fn() -> F) -> T
where
    F: Future<Output = Result<T, Error>>,
{
    for _ in 0..600 {
        match ask().await {
            Ok(answer) => return answer,
            Err(error) if error.is_retryable() => {
                tokio::time::sleep(Duration::from_millis(100)).await;
            }
            Err(error) => panic!("{what}: {error:?}"),
        }
    }
    panic!("{what}: never answered");
}
