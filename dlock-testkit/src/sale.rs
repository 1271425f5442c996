//! The soak of a sale: several processes buy, reserve, confirm, cancel and refund
//! through networks that lose replies, drop futures on the way, and are killed and
//! started again; meanwhile the sale is resized and evened out. In the end exactly
//! what there was is sold, and the audit is clean.
//!
//! A worker goes through its attempts in order, each under an id of its own, and
//! tells how far it is; one that was killed starts again there, so that some
//! attempts are made twice, by two processes.

mod worker;

use std::path::Path;
use std::time::{Duration, Instant};

use dlock_core::Dlock;
use dlock_segment::{Deduction, Inventory};
use rand::rngs::StdRng;
use rand::{RngExt as _, SeedableRng as _};

pub use self::worker::work;
use crate::process::Puppet;
use crate::redis::RedisServer;

/// Without any progress for so long, something has failed.
const STUCK: Duration = Duration::from_secs(120);

/// The name of the sale.
const SALE: &str = "soak";

/// How large a soak is.
#[derive(Clone, Copy, Debug)]
#[allow(missing_docs, reason = "the fields are named like what they hold")]
pub struct Soak {
    pub units: u64,
    pub attempts: u64,
    pub segments: u32,
    pub processes: u64,
    pub kills: u64,
    pub seed: u64,
}

/// What came of it.
#[derive(Clone, Copy, Debug)]
#[allow(missing_docs, reason = "the fields are named like what they hold")]
pub struct Report {
    pub sold: u64,
    pub attempts: u64,
    pub operations: u64,
    pub kills: u64,
    pub resizes: u32,
    pub took: Duration,
}

struct Worker {
    puppet: Puppet,
    number: u64,
    done: u64,
    until: u64,
}

impl Worker {
    fn start(program: &Path, server: &RedisServer, soak: Soak, number: u64, from: u64) -> Self {
        let until = soak.attempts / soak.processes;
        let numbers = [server.port().into(), soak.seed, number, from, until];
        let numbers = numbers.map(|number: u64| number.to_string());
        let mut arguments = vec!["worker"];
        arguments.extend(numbers.iter().map(String::as_str));
        let puppet = Puppet::start(program, &arguments);
        Worker { puppet, number, done: from, until }
    }

    /// Hears how far it is.
    fn listen(&mut self) {
        for line in self.puppet.rest() {
            let done = line.strip_prefix("done ").and_then(|done| done.parse().ok());
            self.done = self.done.max(done.unwrap_or(0));
        }
    }
}

/// Runs a soak whose workers are processes of this program.
///
/// # Panics
/// If anything is not as it must be.
pub async fn soak(program: &Path, soak: Soak) -> Option<Report> {
    let server = RedisServer::start()?;
    let dlock = Dlock::connect(&server.url()).await.expect("a client");
    let sale = Inventory::builder(&dlock, SALE).stock(soak.units).segments(soak.segments);
    let sale = sale.create().await.expect("a sale");
    let began = Instant::now();
    let mut random = StdRng::seed_from_u64(soak.seed);
    let mut workers: Vec<Worker> = (0..soak.processes)
        .map(|number| Worker::start(program, &server, soak, number, 0))
        .collect();
    let (mut kills, mut resizes) = (0, 0);
    let mut progress = (0, Instant::now());
    // Kills are spread over the run, by how far it is.
    let total = workers.iter().map(|worker| worker.until).sum::<u64>();
    loop {
        tokio::time::sleep(Duration::from_millis(20)).await;
        workers.iter_mut().for_each(Worker::listen);
        let done: u64 = workers.iter().map(|worker| worker.done).sum();
        if workers.iter().all(|worker| worker.done >= worker.until) {
            break;
        }
        if kills < soak.kills && done * (soak.kills + 1) >= total * kills {
            kills += 1;
            let busy: Vec<usize> =
                (0..workers.len()).filter(|at| workers[*at].done < workers[*at].until).collect();
            let at = busy[random.random_range(0..busy.len())];
            let Worker { number, done, .. } = workers[at];
            workers[at].puppet.kill();
            workers[at] = Worker::start(program, &server, soak, number, done);
            if random.random() {
                let segments = random.random_range(1..=soak.segments * 2);
                sale.resize(segments).await.expect("resized");
                resizes += 1;
            } else {
                sale.rebalance().await.expect("evened out");
            }
        }
        if done > progress.0 {
            progress = (done, Instant::now());
        }
        assert!(progress.1.elapsed() < STUCK, "no worker gets on: stuck at {done} of {total}");
    }
    drop(workers);
    let operations = settle(&sale, soak).await;
    let (attempts, took) = (total, began.elapsed());
    Some(Report { sold: soak.units, attempts, operations, kills, resizes, took })
}

/// Sells the rest, and counts everything.
async fn settle(sale: &Inventory, soak: Soak) -> u64 {
    loop {
        match sale.deduct(1).send().await.expect("an answer") {
            Deduction::Taken(_) => {}
            Deduction::SoldOut { reserved: 0, .. } => break,
            Deduction::SoldOut { .. } => tokio::time::sleep(Duration::from_millis(50)).await,
            other => panic!("{other:?}"),
        }
    }
    let audit = sale.audit().await.expect("an audit");
    assert!(audit.is_clean() && audit.exact, "{:#?}", audit.disagreements);
    assert_eq!((audit.sold, audit.available, audit.reserved), (soak.units, 0, 0));
    // Whoever asks once more takes nothing.
    for number in (0..soak.attempts / soak.processes).rev().take(1_000) {
        let _ = sale.deduct(1).operation(worker::id(0, number)).send().await;
    }
    let stock = sale.stock().await.expect("the stock");
    assert_eq!((stock.sold, stock.available), (soak.units, 0));
    audit.operations
}
