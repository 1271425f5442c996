//! A worker process of a soak.

use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use dlock::Dlock;
use dlock_segment::{
    Confirmation, Deduction, Error, HoldState, Inventory, Refund, Reservation, ReservationHandle,
    Resolved,
};
use rand::rngs::StdRng;
use rand::{RngExt as _, SeedableRng as _};

use super::answers::Answers;
use super::{Mix, SALE, known, until_known};
use crate::proxy::{Once, Proxy};

/// How often a worker prints its progress, about.
const PROGRESS_REPORTS: u64 = 20;
const TASKS: u64 = 400;
/// How long a lot of leased units lasts.
const LOT_TIME: Duration = Duration::from_secs(3);
/// How long a reservation lasts.
const RESERVATION_TIME: Duration = Duration::from_millis(300);

pub(super) fn id(worker: u64, attempt: u64) -> String {
    format!("w{worker}-{attempt}")
}

/// The task of a worker.
#[derive(Clone, Debug)]
#[allow(missing_docs, reason = "the fields are named like what they hold")]
pub struct WorkerTask {
    /// The servers: a port, which is reached through a network that fails now and then, or a
    /// URL.
    pub servers: Vec<String>,
    pub seed: u64,
    pub mix: Mix,
    /// Whether a server may lose what it answered.
    pub may_lose: bool,
    pub buyers: u64,
    pub worker: u64,
    /// The first attempt; `until`: the end of its attempts.
    pub from: u64,
    pub until: u64,
    /// The file for the answers that it receives.
    pub answers: PathBuf,
}

impl WorkerTask {
    /// The task as command-line arguments.
    pub(super) fn to_arguments(&self) -> Vec<String> {
        let WorkerTask { servers, seed, mix, may_lose, buyers, worker, from, until, answers } =
            self;
        let numbers = [*seed, *mix as u64, (*may_lose).into(), *buyers, *worker, *from, *until];
        let numbers = numbers.iter().map(u64::to_string);
        let answers = answers.display().to_string();
        let first = ["worker".to_owned()].into_iter().chain(numbers).chain([answers]);
        first.chain(servers.iter().cloned()).collect()
    }

    /// The task from the command-line arguments after the first; `None` if they are not
    /// valid.
    pub fn from_arguments(arguments: &[String]) -> Option<Self> {
        let (numbers, rest) = arguments.split_at_checked(7)?;
        let numbers: Vec<u64> = numbers.iter().map_while(|number| number.parse().ok()).collect();
        let [seed, mix, may_lose, buyers, worker, from, until] = numbers[..] else { return None };
        let [answers, servers @ ..] = rest else { return None };
        Some(WorkerTask {
            servers: servers.to_vec(),
            seed,
            mix: *[Mix::Sale, Mix::Settling, Mix::SellOut, Mix::Leased].get(mix as usize)?,
            may_lose: may_lose == 1,
            buyers,
            worker,
            from,
            until,
            answers: answers.into(),
        })
    }

    /// In a large soak only one in so many attempts leaves a tombstone: a home keeps 100,000
    /// of them at most.
    fn thinned(&self) -> u32 {
        u32::try_from(self.until / 100_000).unwrap_or(u32::MAX).max(1)
    }
}

/// Makes the attempts of a worker and prints its progress.
///
/// # Panics
/// If a check fails.
pub async fn work(task: WorkerTask) {
    let (mut proxies, mut clients) = (Vec::new(), Vec::new());
    for server in &task.servers {
        let url = match server.parse() {
            Err(_) => server.clone(),
            Ok(port) => {
                proxies.push(Proxy::start(port).await);
                proxies[proxies.len() - 1].url()
            }
        };
        let client = || Dlock::builder().url(&url).call_timeout(Duration::from_secs(2)).connect();
        clients.push(until_known("a client", async || client().await.map_err(Error::from)).await);
    }
    let sale = until_known("the sale", || Inventory::open_on(&clients, SALE, None)).await;
    let lease = || sale.lease_units().lot(20, 2_000).ttl(LOT_TIME).start();
    let leased = match task.mix {
        Mix::Leased => Some(Arc::new(until_known("a lease", lease).await)),
        _ => None,
    };
    let answers = Arc::new(Answers::append_to(&task.answers));
    let faults = tokio::spawn(faults(proxies, task.clone()));
    let chunk = (task.until / PROGRESS_REPORTS).clamp(50, 5_000);
    let mut start = task.from;
    while start < task.until {
        let end = task.until.min(start + chunk);
        let next = Arc::new(AtomicU64::new(start));
        let mut tasks = tokio::task::JoinSet::new();
        for _ in 0..TASKS.min(end - start) {
            let (sale, answers, next) = (sale.clone(), answers.clone(), next.clone());
            let leased = leased.clone();
            let task = task.clone();
            tasks.spawn(async move {
                loop {
                    let number = next.fetch_add(1, Ordering::Relaxed);
                    if number >= end {
                        return;
                    }
                    let mut attempt = Attempt::new(&task, &sale, &answers, number);
                    if let Some(leased) = &leased
                        && attempt.random.random()
                    {
                        let _ = leased.deduct_or_wait(1).await; // the counts show it
                        continue;
                    }
                    let made = attempt.make(&task).await;
                    assert!(task.may_lose || made.is_ok(), "{}: {made:?}", attempt.id);
                }
            });
        }
        while let Some(task) = tasks.join_next().await {
            task.expect("no attempt panics");
        }
        start = end;
        println!("done {start}");
    }
    if let Some(leased) = leased {
        let totals = leased.stop().await;
        println!("leased {totals:?}");
    }
    faults.abort();
}

/// Injects network faults until it is aborted.
async fn faults(proxies: Vec<Proxy>, task: WorkerTask) {
    if proxies.is_empty() {
        return;
    }
    let often = Duration::from_millis(if task.until < 100_000 { 400 } else { 2_000 });
    let mut random = StdRng::seed_from_u64(task.seed ^ task.from);
    loop {
        tokio::time::sleep(often.mul_f64(random.random_range(0.2..1.8))).await;
        let proxy = &proxies[random.random_range(0..proxies.len())];
        match random.random_range(0..4) {
            0 => proxy.cut(),
            1 => proxy.once(Once::DuplicateRequest, "EVALSHA"),
            _ => proxy.once(Once::LoseReply, "EVALSHA"),
        }
    }
}

struct Attempt<'a> {
    sale: &'a Inventory,
    answers: &'a Answers,
    id: String,
    buyer: String,
    random: StdRng,
    may_lose: bool,
}

/// An error is one that no repetition changes: the sale has lost what this attempt began, or
/// something is wrong.
type Made<T> = Result<T, Error>;

impl<'a> Attempt<'a> {
    fn new(task: &WorkerTask, sale: &'a Inventory, answers: &'a Answers, number: u64) -> Self {
        let mut random = StdRng::seed_from_u64(task.seed ^ (task.worker << 48) ^ number);
        let buyer = format!("u{}", random.random_range(0..task.buyers));
        let id = id(task.worker, number);
        Attempt { sale, answers, id, buyer, random, may_lose: task.may_lose }
    }

    async fn make(&mut self, task: &WorkerTask) -> Made<()> {
        let chance = self.random.random_range(0..10_000);
        let thinned = !self.random.random_ratio(1, task.thinned());
        match task.mix {
            Mix::Sale | Mix::SellOut | Mix::Leased => match chance {
                8_700..9_600 if thinned => self.buy(1).await.map(drop),
                0..6_000 => self.buy(1).await.map(drop),
                6_000..7_000 => {
                    // Without an operation id: its result is in the journal only.
                    let _ = self.sale.deduct(1).buyer(&self.buyer).send().await;
                    Ok(())
                }
                7_000..8_200 => self.reserve().await,
                8_200..8_700 => self.buy_and_refund().await,
                8_700..9_200 => self.give_up().await,
                9_200..9_400 => self.resolve_first().await,
                9_400..9_600 => self.cancel_first().await,
                9_600..9_900 => self.buy_twice().await,
                9_900..9_990 if task.mix == Mix::Sale => self.restock().await,
                9_900..9_990 => self.buy(1).await.map(drop),
                9_990..9_999 => self.rebalance().await,
                _ => self.resize().await,
            },
            Mix::Settling => match chance {
                0..5_000 => self.reserve().await,
                5_000..8_000 => self.buy_and_refund().await,
                8_000..9_400 => self.restock().await,
                9_400..9_500 => self.cancel_first().await,
                9_500..9_900 => self.rebalance().await,
                _ => self.resize().await,
            },
        }
    }

    /// What a lost change may break, and nothing else.
    fn check(&self, is_so: bool, what: impl std::fmt::Debug) {
        assert!(is_so || self.may_lose, "{}: {what:?}", self.id);
    }

    async fn deduct(&self, quantity: u64) -> Made<Deduction> {
        let deduct = || self.sale.deduct(quantity).operation(&self.id).buyer(&self.buyer).send();
        let answer = known(&self.id, deduct).await?;
        // A process that was killed makes its last attempts again, so the units may have
        // been refunded before.
        if let Deduction::Taken(receipt) | Deduction::Refunded(receipt) = &answer {
            assert_eq!(receipt.quantity, quantity);
            self.answers.taken(&self.id, receipt);
        }
        Ok(answer)
    }

    async fn buy(&self, quantity: u64) -> Made<bool> {
        match self.deduct(quantity).await? {
            Deduction::Taken(_) | Deduction::Refunded(_) => Ok(true),
            Deduction::SoldOut { .. }
            | Deduction::NotEnough { .. }
            | Deduction::LimitReached
            | Deduction::Refused => Ok(false),
            other => panic!("{other:?}"),
        }
    }

    async fn buy_twice(&self) -> Made<()> {
        let (one, two) = tokio::join!(self.deduct(1), self.deduct(1));
        if let (Deduction::Taken(one), Deduction::Taken(two)) = (one?, two?) {
            self.check(one == two, "the same operation, the same receipt");
        }
        Ok(())
    }

    /// Cancels a deduction at a random point; half of the time resolves it afterwards.
    async fn give_up(&mut self) -> Made<()> {
        let patience = Duration::from_micros(self.random.random_range(0..3_000));
        let buying = self.sale.deduct(1).operation(&self.id).buyer(&self.buyer).send();
        let _ = tokio::time::timeout(patience, buying).await;
        if self.random.random() {
            let _ = self.resolve().await?; // it is written down
        }
        Ok(())
    }

    async fn resolve(&self) -> Made<Resolved> {
        let resolved = known(&self.id, || self.sale.resolve(&self.id)).await?;
        self.answers.resolved(&self.id, &resolved);
        Ok(resolved)
    }

    async fn resolve_first(&self) -> Made<()> {
        let resolved = self.resolve().await?;
        self.check(resolved == Resolved::NotApplied, &resolved);
        let refused = self.deduct(1).await?;
        self.check(refused == Deduction::Refused, &refused);
        Ok(())
    }

    async fn cancel_first(&self) -> Made<()> {
        let reservation = self.sale.reservation(&self.id);
        let cancelled = known(&self.id, || reservation.cancel()).await?;
        self.check(cancelled == HoldState::Refused, cancelled);
        self.answers.not_applied(&self.id);
        // It is accepted if a failover lost the cancellation, and must not last for long then.
        let reserve = || {
            let reserve = self.sale.reserve(1).operation(&self.id).buyer(&self.buyer);
            reserve.expires_in(RESERVATION_TIME).send()
        };
        let refused = known(&self.id, reserve).await?;
        self.check(refused == Reservation::Refused, &refused);
        Ok(())
    }

    async fn reserve(&mut self) -> Made<()> {
        let quantity = self.random.random_range(1..3);
        let reserve = || {
            let reserve = self.sale.reserve(quantity).operation(&self.id).buyer(&self.buyer);
            reserve.expires_in(RESERVATION_TIME).send()
        };
        match known(&self.id, reserve).await? {
            Reservation::Held(hold) | Reservation::Expired(hold) | Reservation::Cancelled(hold) => {
                self.answers.held(&self.id, &hold)
            }
            Reservation::Confirmed(receipt) | Reservation::Refunded(receipt) => {
                self.answers.confirmed(&self.id, &receipt);
            }
            _ => return Ok(()),
        }
        let reservation = self.sale.reservation(&self.id);
        if self.random.random_ratio(1, 4) {
            let extend = || async { state_or(reservation.extend(2 * RESERVATION_TIME).await) };
            match known(&self.id, extend).await? {
                Ok(hold) => self.answers.lasts_until(&self.id, &hold),
                Err(state) => self.answers.stands(&self.id, state),
            }
        }
        let settled = match self.random.random_range(0..10) {
            0..5 => self.confirm(&reservation).await?,
            5..8 => known(&self.id, || reservation.cancel()).await?,
            _ => return Ok(()), // the reservation expires
        };
        assert_ne!(settled, HoldState::Open);
        self.answers.stands(&self.id, settled);
        let is_sold = matches!(settled, HoldState::Confirmed | HoldState::Refunded);
        if is_sold && self.random.random_ratio(1, 3) {
            self.refund(quantity).await?;
        }
        Ok(())
    }

    async fn confirm(&self, reservation: &ReservationHandle<'_>) -> Made<HoldState> {
        let confirm = || async { state_or(reservation.confirm().await) };
        Ok(match known(&self.id, confirm).await? {
            Ok(Confirmation::Confirmed(_)) => HoldState::Confirmed,
            Ok(Confirmation::Refunded(_)) => HoldState::Refunded,
            Ok(other) => panic!("{}: {other:?}", self.id),
            Err(state) => state,
        })
    }

    async fn buy_and_refund(&mut self) -> Made<()> {
        let quantity = self.random.random_range(1..4);
        if self.buy(quantity).await? {
            self.refund(quantity).await?;
        }
        Ok(())
    }

    /// Refunds a part of what was bought, and sometimes the rest with another id.
    async fn refund(&mut self, quantity: u64) -> Made<()> {
        let returned = self.random.random_range(1..=quantity);
        let id = format!("{}-refund", self.id);
        self.refund_under(&id, returned).await?;
        if returned < quantity && self.random.random() {
            self.refund_under(&format!("{}-rest", self.id), quantity - returned).await?;
        }
        Ok(())
    }

    async fn refund_under(&self, id: &str, quantity: u64) -> Made<()> {
        let refund = || self.sale.refund(&self.id).quantity(quantity).operation(id).send();
        match known(id, refund).await? {
            Refund::Refunded(receipt) => {
                assert_eq!(receipt.quantity, quantity);
                self.answers.refunded(id, &receipt);
            }
            other => self.check(false, &other),
        }
        Ok(())
    }

    async fn restock(&mut self) -> Made<()> {
        let quantity = self.random.random_range(1..4);
        let restock = || self.sale.restock(quantity).operation(&self.id).send();
        let receipt = known(&self.id, restock).await?;
        assert_eq!(receipt.quantity, quantity);
        self.answers.restocked(&self.id, &receipt);
        Ok(())
    }

    async fn resize(&mut self) -> Made<()> {
        let segments = self.random.random_range(1..=128);
        if for_a_while(known("resize", || self.sale.resize(segments))).await?.is_some() {
            self.answers.resized(&self.id, segments);
        }
        Ok(())
    }

    async fn rebalance(&self) -> Made<()> {
        for_a_while(known("rebalance", || self.sale.rebalance())).await.map(drop)
    }
}

/// Gives up after a while what needs all homes at the same time: the next one does it.
async fn for_a_while<T>(done: impl Future<Output = Made<T>>) -> Made<Option<T>> {
    match tokio::time::timeout(Duration::from_secs(10), done).await {
        Ok(done) => done.map(Some),
        Err(_) => Ok(None),
    }
}

/// That a reservation is not open any more is an answer too.
fn state_or<T>(answer: Result<T, Error>) -> Result<Result<T, HoldState>, Error> {
    match answer {
        Err(Error::NotHeld(state)) => Ok(Err(state)),
        answer => answer.map(Ok),
    }
}
