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
use super::{Mix, SALE, until_known};
use crate::proxy::{Once, Proxy};

/// How often a worker prints its progress, about.
const PROGRESS_REPORTS: u64 = 20;
const TASKS: u64 = 400;
/// How long a reservation lasts.
const RESERVATION_TIME: Duration = Duration::from_millis(300);

pub(super) fn id(worker: u64, attempt: u64) -> String {
    format!("w{worker}-{attempt}")
}

/// The task of a worker.
#[derive(Clone, Debug)]
#[allow(missing_docs, reason = "the fields are named like what they hold")]
pub struct WorkerTask {
    /// The ports of the servers.
    pub ports: Vec<u16>,
    pub seed: u64,
    pub mix: Mix,
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
        let WorkerTask { ports, seed, mix, buyers, worker, from, until, answers } = self;
        let mix = *mix as u64;
        let numbers = [*seed, mix, *buyers, *worker, *from, *until];
        let ports = ports.iter().map(u16::to_string);
        let numbers = numbers.iter().map(u64::to_string).chain(ports);
        let answers = answers.display().to_string();
        ["worker".to_owned()].into_iter().chain(numbers).chain([answers]).collect()
    }

    /// The task from the command-line arguments after the first; `None` if they are not
    /// valid.
    pub fn from_arguments(arguments: &[String]) -> Option<Self> {
        let [numbers @ .., answers] = arguments else { return None };
        let numbers: Vec<u64> = numbers.iter().map_while(|number| number.parse().ok()).collect();
        let [seed, mix, buyers, worker, from, until, ref ports @ ..] = numbers[..] else {
            return None;
        };
        let mix = *[Mix::Sale, Mix::Settling, Mix::SellOut].get(mix as usize)?;
        let ports = ports.iter().map(|port| u16::try_from(*port).ok()).collect::<Option<_>>()?;
        Some(WorkerTask { ports, seed, mix, buyers, worker, from, until, answers: answers.into() })
    }
}

/// Makes the attempts of a worker and prints its progress.
///
/// # Panics
/// If a check fails.
pub async fn work(task: WorkerTask) {
    let (mut proxies, mut clients) = (Vec::new(), Vec::new());
    for port in &task.ports {
        let proxy = Proxy::start(*port).await;
        let url = proxy.url();
        let client = || Dlock::builder().url(&url).call_timeout(Duration::from_secs(2)).connect();
        clients.push(until_known("a client", async || client().await.map_err(Error::from)).await);
        proxies.push(proxy);
    }
    let sale = until_known("the sale", || Inventory::open_on(&clients, SALE, None)).await;
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
            let task = task.clone();
            tasks.spawn(async move {
                loop {
                    let number = next.fetch_add(1, Ordering::Relaxed);
                    if number >= end {
                        return;
                    }
                    Attempt::new(&task, &sale, &answers, number).make(task.mix).await;
                }
            });
        }
        while let Some(task) = tasks.join_next().await {
            task.expect("no attempt panics");
        }
        start = end;
        println!("done {start}");
    }
    faults.abort();
}

/// Injects network faults until it is aborted.
async fn faults(proxies: Vec<Proxy>, task: WorkerTask) {
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
}

impl<'a> Attempt<'a> {
    fn new(task: &WorkerTask, sale: &'a Inventory, answers: &'a Answers, number: u64) -> Self {
        let mut random = StdRng::seed_from_u64(task.seed ^ (task.worker << 48) ^ number);
        let buyer = format!("u{}", random.random_range(0..task.buyers));
        Attempt { sale, answers, id: id(task.worker, number), buyer, random }
    }

    async fn make(mut self, mix: Mix) {
        let chance = self.random.random_range(0..10_000);
        match mix {
            Mix::Sale | Mix::SellOut => match chance {
                0..6_000 => drop(self.buy(1).await),
                6_000..7_000 => {
                    // Without an operation id: its result is in the journal only.
                    let _ = self.sale.deduct(1).buyer(&self.buyer).send().await;
                }
                7_000..8_200 => self.reserve().await,
                8_200..8_700 => self.buy_and_refund().await,
                8_700..9_200 => self.give_up().await,
                9_200..9_400 => self.resolve_first().await,
                9_400..9_600 => self.cancel_first().await,
                9_600..9_900 => self.buy_twice().await,
                9_900..9_990 if mix == Mix::Sale => self.restock().await,
                9_900..9_990 => drop(self.buy(1).await),
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

    async fn deduct(&self, quantity: u64) -> Deduction {
        let deduct = || self.sale.deduct(quantity).operation(&self.id).buyer(&self.buyer).send();
        let answer = until_known(&self.id, deduct).await;
        // A process that was killed makes its last attempts again, so the units may have
        // been refunded before.
        if let Deduction::Taken(receipt) | Deduction::Refunded(receipt) = &answer {
            assert_eq!(receipt.quantity, quantity);
            self.answers.taken(&self.id, receipt);
        }
        answer
    }

    async fn buy(&self, quantity: u64) -> bool {
        match self.deduct(quantity).await {
            Deduction::Taken(_) | Deduction::Refunded(_) => true,
            Deduction::SoldOut { .. }
            | Deduction::NotEnough { .. }
            | Deduction::LimitReached
            | Deduction::Refused => false,
            other => panic!("{other:?}"),
        }
    }

    async fn buy_twice(&self) {
        let (one, two) = tokio::join!(self.deduct(1), self.deduct(1));
        if let (Deduction::Taken(one), Deduction::Taken(two)) = (one, two) {
            assert_eq!(one, two, "the same operation, the same receipt");
        }
    }

    /// Cancels a deduction at a random point; half of the time resolves it afterwards.
    async fn give_up(&mut self) {
        let patience = Duration::from_micros(self.random.random_range(0..3_000));
        let buying = self.sale.deduct(1).operation(&self.id).buyer(&self.buyer).send();
        let _ = tokio::time::timeout(patience, buying).await;
        if self.random.random() {
            let _ = self.resolve().await; // it is written down
        }
    }

    async fn resolve(&self) -> Resolved {
        let resolved = until_known(&self.id, || self.sale.resolve(&self.id)).await;
        self.answers.resolved(&self.id, &resolved);
        resolved
    }

    async fn resolve_first(&self) {
        assert_eq!(self.resolve().await, Resolved::NotApplied, "{}", self.id);
        assert_eq!(self.deduct(1).await, Deduction::Refused, "{}", self.id);
    }

    async fn cancel_first(&self) {
        let reservation = self.sale.reservation(&self.id);
        let cancelled = until_known(&self.id, || reservation.cancel()).await;
        assert_eq!(cancelled, HoldState::Refused, "{}", self.id);
        self.answers.not_applied(&self.id);
        let reserve = || self.sale.reserve(1).operation(&self.id).buyer(&self.buyer).send();
        assert_eq!(until_known(&self.id, reserve).await, Reservation::Refused, "{}", self.id);
    }

    async fn reserve(&mut self) {
        let quantity = self.random.random_range(1..3);
        let reserve = || {
            let reserve = self.sale.reserve(quantity).operation(&self.id).buyer(&self.buyer);
            reserve.expires_in(RESERVATION_TIME).send()
        };
        match until_known(&self.id, reserve).await {
            Reservation::Held(hold) | Reservation::Expired(hold) | Reservation::Cancelled(hold) => {
                self.answers.held(&self.id, &hold)
            }
            Reservation::Confirmed(receipt) | Reservation::Refunded(receipt) => {
                self.answers.confirmed(&self.id, &receipt);
            }
            _ => return,
        }
        let reservation = self.sale.reservation(&self.id);
        if self.random.random_ratio(1, 4) {
            let extend = || async { state_or(reservation.extend(2 * RESERVATION_TIME).await) };
            match until_known(&self.id, extend).await {
                Ok(hold) => self.answers.lasts_until(&self.id, &hold),
                Err(state) => self.answers.stands(&self.id, state),
            }
        }
        let settled = match self.random.random_range(0..10) {
            0..5 => self.confirm(&reservation).await,
            5..8 => until_known(&self.id, || reservation.cancel()).await,
            _ => return, // the reservation expires
        };
        assert_ne!(settled, HoldState::Open);
        self.answers.stands(&self.id, settled);
        let is_sold = matches!(settled, HoldState::Confirmed | HoldState::Refunded);
        if is_sold && self.random.random_ratio(1, 3) {
            self.refund(quantity).await;
        }
    }

    async fn confirm(&self, reservation: &ReservationHandle<'_>) -> HoldState {
        let confirm = || async { state_or(reservation.confirm().await) };
        match until_known(&self.id, confirm).await {
            Ok(Confirmation::Confirmed(_)) => HoldState::Confirmed,
            Ok(Confirmation::Refunded(_)) => HoldState::Refunded,
            Ok(other) => panic!("{}: {other:?}", self.id),
            Err(state) => state,
        }
    }

    async fn buy_and_refund(&mut self) {
        let quantity = self.random.random_range(1..4);
        if self.buy(quantity).await {
            self.refund(quantity).await;
        }
    }

    /// Refunds a part of what was bought, and sometimes the rest with another id.
    async fn refund(&mut self, quantity: u64) {
        let returned = self.random.random_range(1..=quantity);
        let id = format!("{}-refund", self.id);
        self.refund_under(&id, returned).await;
        if returned < quantity && self.random.random() {
            self.refund_under(&format!("{}-rest", self.id), quantity - returned).await;
        }
    }

    async fn refund_under(&self, id: &str, quantity: u64) {
        let refund = || self.sale.refund(&self.id).quantity(quantity).operation(id).send();
        match until_known(id, refund).await {
            Refund::Refunded(receipt) => {
                assert_eq!(receipt.quantity, quantity);
                self.answers.refunded(id, &receipt);
            }
            other => panic!("{id}: {other:?}"),
        }
    }

    async fn restock(&mut self) {
        let quantity = self.random.random_range(1..4);
        let restock = || self.sale.restock(quantity).operation(&self.id).send();
        let receipt = until_known(&self.id, restock).await;
        assert_eq!(receipt.quantity, quantity);
        self.answers.restocked(&self.id, &receipt);
    }

    async fn resize(&mut self) {
        let segments = self.random.random_range(1..=128);
        until_known("resize", || self.sale.resize(segments)).await;
    }

    async fn rebalance(&self) {
        until_known("rebalance", || self.sale.rebalance()).await;
    }
}

/// That a reservation is not open any more is an answer too.
fn state_or<T>(answer: Result<T, Error>) -> Result<Result<T, HoldState>, Error> {
    match answer {
        Err(Error::NotHeld(state)) => Ok(Err(state)),
        answer => answer.map(Ok),
    }
}
