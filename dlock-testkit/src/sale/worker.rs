//! One process of the soak.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use dlock_core::Dlock;
use dlock_segment::{Deduction, Error, HoldState, Inventory, Refund, Reservation, Resolved};
use rand::rngs::StdRng;
use rand::{RngExt as _, SeedableRng as _};

use super::SALE;
use crate::proxy::{Once, Proxy};

/// Attempts between two tellings of how far it is.
const CHUNK: u64 = 5_000;
const TASKS: u64 = 400;
/// A network fault about this often.
const FAULTS: Duration = Duration::from_secs(2);
/// How long a reservation lasts.
const LASTS: Duration = Duration::from_millis(300);

pub(super) fn id(worker: u64, attempt: u64) -> String {
    format!("w{worker}-{attempt}")
}

/// Makes the attempts `from..until` of a worker and tells how far it is.
///
/// # Panics
/// If anything is not as it must be.
pub async fn work(port: u16, seed: u64, worker: u64, from: u64, until: u64) {
    let proxy = Proxy::start(port).await;
    let client = Dlock::builder().url(&proxy.url()).call_timeout(Duration::from_secs(2));
    let dlock = client.connect().await.expect("a client");
    let sale = Inventory::open(&dlock, SALE).await.expect("the sale");
    let faults = tokio::spawn(async move {
        let mut random = StdRng::seed_from_u64(seed ^ from);
        loop {
            tokio::time::sleep(FAULTS.mul_f64(random.random_range(0.2..1.8))).await;
            match random.random_range(0..4) {
                0 => proxy.cut(),
                1 => proxy.once(Once::DuplicateRequest, "EVALSHA"),
                _ => proxy.once(Once::LoseReply, "EVALSHA"),
            }
        }
    });
    let mut start = from;
    while start < until {
        let end = until.min(start + CHUNK);
        let next = Arc::new(AtomicU64::new(start));
        let mut tasks = tokio::task::JoinSet::new();
        for _ in 0..TASKS.min(end - start) {
            let (sale, next) = (sale.clone(), next.clone());
            tasks.spawn(async move {
                loop {
                    let number = next.fetch_add(1, Ordering::Relaxed);
                    if number >= end {
                        return;
                    }
                    let buyer = Attempt {
                        sale: &sale,
                        id: id(worker, number),
                        random: StdRng::seed_from_u64(seed ^ (worker << 48) ^ number),
                    };
                    buyer.make().await;
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

struct Attempt<'a> {
    sale: &'a Inventory,
    id: String,
    random: StdRng,
}

impl Attempt<'_> {
    async fn make(mut self) {
        match self.random.random_range(0..100) {
            0..70 => {
                self.buy(1).await;
            }
            70..80 => {
                // Without an id: whatever comes of it is counted by the sale alone.
                let _ = self.sale.deduct(1).send().await;
            }
            80..88 => self.reserve().await,
            88..92 => {
                let quantity = self.random.random_range(1..4);
                if self.buy(quantity).await {
                    self.refund(quantity).await;
                }
            }
            92..96 => {
                let patience = Duration::from_micros(self.random.random_range(0..3_000));
                let buying = self.sale.deduct(1).operation(&self.id).send();
                let _ = tokio::time::timeout(patience, buying).await;
            }
            96..98 => {
                let resolved = self.until_known(|| self.sale.resolve(&self.id)).await;
                if resolved == Resolved::NotApplied {
                    let late = self.deduct(1).await;
                    assert_eq!(late, Deduction::Refused, "{}", self.id);
                }
            }
            _ => {
                let (one, two) = tokio::join!(self.deduct(1), self.deduct(1));
                if let (Deduction::Taken(one), Deduction::Taken(two)) = (one, two) {
                    assert_eq!(one, two, "the same operation, the same receipt");
                }
            }
        }
    }

    async fn deduct(&self, quantity: u64) -> Deduction {
        self.until_known(|| self.sale.deduct(quantity).operation(&self.id).send()).await
    }

    async fn buy(&self, quantity: u64) -> bool {
        match self.deduct(quantity).await {
            Deduction::Taken(receipt) => {
                assert_eq!(receipt.quantity, quantity);
                true
            }
            Deduction::SoldOut { .. } | Deduction::Refused => false,
            other => panic!("{other:?}"),
        }
    }

    async fn reserve(&mut self) {
        let reserve = || self.sale.reserve(1).operation(&self.id).expires_in(LASTS).send();
        let Reservation::Held(_) = self.until_known(reserve).await else { return };
        let reservation = self.sale.reservation(&self.id);
        let settled = match self.random.random_range(0..10) {
            0..5 => self.until_known(|| reservation.confirm()).await,
            5..8 => self.until_known(|| reservation.cancel()).await,
            _ => return, // left to expire
        };
        assert_ne!(settled, HoldState::Open);
    }

    async fn refund(&mut self, quantity: u64) {
        let part = self.random.random_range(1..=quantity);
        let refund = format!("{}-refund", self.id);
        let refunded = self
            .until_known(|| self.sale.refund(&self.id).quantity(part).operation(&refund).send())
            .await;
        assert!(matches!(refunded, Refund::Refunded(_)), "{refunded:?}");
    }

    /// Asks until the answer is known: the network comes back.
    async fn until_known<T, F>(&self, ask: impl Fn() -> F) -> T
    where
        F: Future<Output = Result<T, Error>>,
    {
        for _ in 0..600 {
            match ask().await {
                Ok(answer) => return answer,
                Err(error) if error.is_retryable() => {
                    tokio::time::sleep(Duration::from_millis(100)).await;
                }
                Err(error) => panic!("{}: {error:?}", self.id),
            }
        }
        panic!("{}: never answered", self.id);
    }
}
