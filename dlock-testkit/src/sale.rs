//! The soak test of a sale. Several processes buy, reserve, confirm, cancel, extend,
//! refund, restock, resize and rebalance, through networks that lose and duplicate
//! messages. They cancel futures, and are killed and restarted; so are the servers, if
//! the options say so. At the end exactly the stock is sold, the audit is clean, and
//! the records of the sale agree with all answers that the workers received
//! ([`answers`]) and with the journal ([`replay`]).
//!
//! If a server may lose what it answered (a replica takes over), some answers have no record
//! any more. They are counted. Everything else holds all the same: every home is sound, the
//! journal leads to the counts, and the units add up to the stock, but for those that a home
//! sent and forgot, which the audit names.
//!
//! A worker makes its attempts in order, each with its own operation id, and prints its
//! progress. A worker that was killed is restarted from there, so some attempts are
//! made twice, by two processes.

mod answers;
mod replay;
mod servers;
mod worker;

use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use dlock_segment::{Audit, Deduction, Error, Inventory, Resolved, Routing};
use rand::rngs::StdRng;
use rand::{RngExt as _, SeedableRng as _};

use self::servers::{ServerFault, Servers};
pub use self::worker::{WorkerTask, work};
use crate::process::ChildProcess;

/// The soak has failed if there is no progress for this long.
const STUCK: Duration = Duration::from_secs(120);
/// How often half as many attempts again are made, until all faults were injected.
const MAX_ROUNDS: u32 = 8;
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
    /// As [`Mix::SellOut`], and half of it is sold from leased units. The sale is routed by
    /// operation and has no limit for each buyer.
    Leased,
}

/// The size and the options of a soak.
#[derive(Clone, Copy, Debug)]
#[allow(missing_docs, reason = "the fields are named like what they hold")]
pub struct Soak {
    pub units: u64,
    pub attempts: u64,
    pub segments: u32,
    /// How many independent servers there are; with `cluster`, a Cluster of three primaries
    /// with a replica each instead. `homes`: how many homes the sale has.
    pub servers: u32,
    pub cluster: bool,
    pub homes: u32,
    pub processes: u64,
    /// How often a worker process is killed.
    pub kills: u64,
    /// How often a server is killed: to be restarted with its data, to be replaced by its
    /// replica, and to be replaced after replication was blocked.
    pub server_kills: u64,
    pub failovers: u64,
    pub lossy_failovers: u64,
    /// How many entries of the journal are kept. It is checked if all are kept.
    pub journal: u64,
    pub mix: Mix,
    pub seed: u64,
}

impl Soak {
    /// Whether a server may lose what it answered.
    fn may_lose(&self) -> bool {
        self.failovers + self.lossy_failovers > 0
    }
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
    pub failovers: u64,
    pub lossy_failovers: u64,
    /// How many answers had no record any more.
    pub lost_answers: u64,
    /// How many units exist twice, because a home sent them and forgot it.
    pub lost_sends: u64,
    /// How many leased units were sold from memory and were not available any more.
    pub owed: u64,
    /// How many resizes were answered.
    pub resizes: u64,
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
    servers: Servers,
    workers: Vec<Worker>,
    random: StdRng,
    kills: u64,
    /// How often each fault was injected.
    struck: [u64; 3],
    /// How many attempts were made when the last fault of a server was over.
    done_at_strike: Option<u64>,
    /// How often the workers were faster than the faults.
    rounds: u32,
}

impl Run<'_> {
    fn answers(&self, worker: u64) -> PathBuf {
        self.servers.directory().join(format!("answers-{worker}"))
    }

    fn start(&self, number: u64, from: u64) -> Worker {
        let until = self.soak.attempts / self.soak.processes;
        let task = WorkerTask {
            servers: self.servers.addresses(),
            seed: self.soak.seed,
            mix: self.soak.mix,
            may_lose: self.soak.may_lose(),
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

    /// Runs until all attempts are made and all faults of servers were injected, with the kills
    /// spread over them. Returns the number of attempts.
    async fn until_done(&mut self) -> u64 {
        let mut progress = (0, Instant::now());
        loop {
            tokio::time::sleep(Duration::from_millis(10)).await;
            let total: u64 = self.workers.iter().map(|worker| worker.until).sum();
            self.workers.iter_mut().for_each(Worker::listen);
            let done: u64 = self.workers.iter().map(|worker| worker.done).sum();
            if self.workers.iter().all(Worker::is_done) {
                if self.struck == self.wanted_faults() {
                    return total;
                }
                self.go_on();
                continue;
            }
            // Over the first four fifths: a worker that is done cannot be killed.
            let is_due =
                |kills: u64, of: u64| kills < of && done * (of + of / 4 + 1) >= total * kills;
            if is_due(self.kills, self.soak.kills) {
                self.kills += 1;
                self.any_moment().await;
                self.kill_one();
            }
            let kinds = [ServerFault::Restart, ServerFault::Failover, ServerFault::LossyFailover];
            let faults = kinds.into_iter().zip(self.wanted_faults());
            // One at a time, and only when the sale goes on after the last one.
            let mut due = faults.enumerate().filter(|&(at, (_, of))| is_due(self.struck[at], of));
            if self.done_at_strike.is_none_or(|before| done > before)
                && let Some((at, (fault, _))) = due.next()
            {
                drop(due);
                self.struck[at] += 1;
                self.any_moment().await;
                self.servers.strike(fault, &mut self.random).await;
                self.workers.iter_mut().for_each(Worker::listen);
                let done = self.workers.iter().map(|worker| worker.done).sum();
                self.done_at_strike = Some(done);
                progress = (done, Instant::now());
            } else if done > progress.0 {
                progress = (done, Instant::now());
            }
            assert!(
                progress.1.elapsed() < STUCK,
                "no worker makes progress: stuck at {done} of {total}"
            );
        }
    }

    /// How often each fault is to be injected.
    fn wanted_faults(&self) -> [u64; 3] {
        let Soak { server_kills, failovers, lossy_failovers, .. } = self.soak;
        [server_kills, failovers, lossy_failovers]
    }

    /// Makes half as many attempts again: the workers were faster than the faults.
    fn go_on(&mut self) {
        self.rounds += 1;
        assert!(self.rounds <= MAX_ROUNDS, "{:?} of {:?} faults", self.struck, self.soak);
        self.soak.attempts += (self.soak.attempts / 2).max(self.soak.processes);
        self.workers = self.workers.iter().map(|it| self.start(it.number, it.done)).collect();
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
    let servers = Servers::start(&soak)?;
    let clients = servers.clients().await;
    let sale = Inventory::builder(&clients[0], SALE).stock(soak.units).segments(soak.segments);
    let sale = sale.homes(soak.homes).servers(clients[1..].iter().cloned()).journal(soak.journal);
    let sale = match soak.mix {
        Mix::Leased => sale,
        _ => sale.routed_by(Routing::Buyer).per_buyer(PER_BUYER),
    };
    let sale = sale.create().await.expect("a sale");
    let began = Instant::now();
    let random = StdRng::seed_from_u64(soak.seed);
    let mut run = Run {
        program,
        soak,
        servers,
        workers: vec![],
        random,
        kills: 0,
        struck: [0; 3],
        done_at_strike: None,
        rounds: 0,
    };
    run.workers = (0..soak.processes).map(|number| run.start(number, 0)).collect();
    let attempts = run.until_done().await;
    run.workers.clear();

    let sold = sell_the_rest(&sale, soak).await;
    let audit = checked_audit(&sale, soak).await;
    assert_eq!((audit.sold, audit.available, audit.reserved), (sold, 0, 0), "{audit:?}");
    let mut received = answers::ReceivedAnswers::default();
    for worker in 0..soak.processes {
        received.compare(&sale, &run.answers(worker)).await;
    }
    let lost_answers = received.lost();
    assert!(soak.may_lose() || lost_answers == 0, "{lost_answers} answers have no such record");
    let restocked = received.restocked();
    assert!(audit.restocked == restocked || lost_answers > 0, "each delivery once");
    let entries = replay::replay(&sale, soak, &audit).await;
    // Repeating an operation takes nothing.
    for number in (0..run.soak.attempts / soak.processes).rev().take(1_000) {
        let id = worker::id(0, number);
        if soak.homes == 1 {
            let _ = sale.deduct(1).operation(id).send().await;
        } else {
            let _ = sale.resolve(id).await; // its buyer, and so its home, is not known here
        }
    }
    let stock = sale.stock().await.expect("the stock");
    assert_eq!((stock.sold, stock.available), (sold, 0));
    let [server_kills, failovers, lossy_failovers] = run.struck;
    Some(Report {
        sold,
        restocked: audit.restocked,
        attempts,
        operations: audit.operations,
        answers: received.count(),
        entries,
        kills: run.kills,
        server_kills,
        failovers,
        lossy_failovers,
        lost_answers,
        lost_sends: audit.lost_sends,
        owed: audit.owed,
        resizes: received.resizes(),
        took: began.elapsed(),
    })
}

/// Audits the sale and checks that its units add up to what was supplied.
async fn checked_audit(sale: &Inventory, soak: Soak) -> Audit {
    let audit = until_known("the audit", || sale.audit()).await;
    // What a home lost is named, and so are leased units that were reported too late; anything
    // else is wrong.
    let is_loss = |what: &str| what.contains("lost data: it") || what.contains("lost the sending");
    let is_debt = |what: &str| what.starts_with("a debt") || what.contains(": a debt");
    let is_named = |what: &str| match soak.mix {
        Mix::Leased if is_debt(what) => true,
        _ => soak.may_lose() && is_loss(what),
    };
    let wrong = audit.disagreements.iter().filter(|it| !is_named(&it.what));
    let wrong: Vec<_> = wrong.collect();
    assert!(wrong.is_empty() && audit.exact, "{wrong:#?}");
    assert_eq!(audit.initial, soak.units);
    assert_eq!(
        audit.sold + audit.available + audit.reserved + audit.written_off + audit.in_transit,
        soak.units + audit.restocked + audit.lost_sends,
        "{audit:?}"
    );
    audit
}

/// Waits for the end of all reservations and sells what is left. Returns the number of
/// units sold in total.
async fn sell_the_rest(sale: &Inventory, soak: Soak) -> u64 {
    until_known("the limit", || sale.limit_per_buyer(None)).await;
    let began = Instant::now();
    for number in 0.. {
        // What is in transit arrives, and what a home sent and forgot is taken out, as soon as
        // the home has as many units again.
        until_known("rebalance", || sale.rebalance()).await;
        let stock = until_known("the stock", || sale.stock()).await;
        let audit = || until_known("the audit", || sale.audit());
        if stock.available > 0 {
            let rest = stock.available.min(dlock_segment::MAX_QUANTITY);
            let id = format!("rest-{number}");
            let buy = || sale.deduct(rest).operation(&id).buyer(REST).send();
            let sold = until_known(&id, buy).await;
            // A reservation of a home that sent and forgot units may have ended meanwhile.
            if !matches!(sold, Deduction::Taken(_)) && !soak.may_lose() {
                panic!("{stock:?} was counted, then {sold:?}, then {:?}", audit().await);
            }
        } else if stock.reserved == 0 && audit().await.in_transit == 0 {
            return stock.sold;
        }
        if began.elapsed() > STUCK {
            panic!("the rest is not sold: {stock:?}, {:?}", audit().await);
        }
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
    unreachable!("the numbers do not end")
}

/// Compares each of these values with the record that the sale has of its id. Returns how many
/// do not agree, after a line about each of the first.
async fn with_records<T: Send + 'static>(
    sale: &Inventory,
    ids: impl IntoIterator<Item = (String, T)>,
    compare: fn(&str, &T, &Resolved) -> Vec<String>,
) -> u64 {
    let mut differ = 0;
    let mut add = |found: Vec<String>| {
        for what in &found {
            differ += 1;
            if differ <= 10 {
                eprintln!("{what}");
            }
        }
    };
    let mut asked = tokio::task::JoinSet::new();
    for (id, value) in ids {
        let sale = sale.clone();
        asked.spawn(async move {
            let resolved = until_known(&id, || sale.resolve(&id)).await;
            compare(&id, &value, &resolved)
        });
        if asked.len() >= 1_000 {
            add(asked.join_next().await.expect("some are asked").expect("an answer"));
        }
    }
    while let Some(asked) = asked.join_next().await {
        add(asked.expect("an answer"));
    }
    differ
}

/// Repeats a request until there is an answer: the network and the server recover.
async fn until_known<T, F>(what: &str, ask: impl Fn() -> F) -> T
where
    F: Future<Output = Result<T, Error>>,
{
    known(what, ask).await.unwrap_or_else(|error| panic!("{what}: {error:?}"))
}

/// The same; an error that no repetition changes is returned.
async fn known<T, F>(what: &str, ask: impl Fn() -> F) -> Result<T, Error>
where
    F: Future<Output = Result<T, Error>>,
{
    let began = Instant::now();
    loop {
        match ask().await {
            Err(error) if error.is_retryable() => {
                assert!(began.elapsed() < STUCK, "{what}: never answered: {error:?}");
                tokio::time::sleep(Duration::from_millis(100)).await;
            }
            answered => return answered,
        }
    }
}
