//! The scripts and the pure state machine agree: the same random batches, at the times that
//! the server reports, give the same answers and the same counts, and I2 holds after each.

use dlock::{Dlock, Key};
use dlock_testkit::redis::RedisServer;
use rand::rngs::StdRng;
use rand::{RngExt as _, SeedableRng as _};

use super::home::Home;
use super::redis::Redis;
use super::redis::codec::Batch;
use super::{
    Answer, Change, Counts, Id, InventoryId, MAX_TOMBSTONES, MAX_UNITS, Request, Store as _, Terms,
    View,
};
use crate::planted_bug::PlantedBug;

struct Both {
    dlock: Dlock,
    redis: Redis,
    sale: InventoryId,
    home: Home,
    random: StdRng,
}

impl Both {
    async fn new(dlock: &Dlock, seed: u64) -> Self {
        let mut random = StdRng::seed_from_u64(seed);
        let terms = Terms {
            stock: random.random_range(1..60),
            segments: if random.random_ratio(1, 8) { 600 } else { random.random_range(1..12) },
            per_buyer: if random.random() { random.random_range(1..6) } else { 0 },
            opens_at: 0,
            closes_at: 0,
            retention: [15, 200, 20_000, 3_600_000][random.random_range(0..4)],
            journal: if random.random() { 100_000 } else { 0 },
        };
        let key = Key::new(format!("agreement-{seed}")).expect("a key");
        Self::with(dlock, key, terms, random).await
    }

    async fn with(dlock: &Dlock, key: Key, terms: Terms, random: StdRng) -> Self {
        let redis = Redis::new(dlock.client_extension()).expect("Redis");
        let (store, name, wanted) = (redis.clone(), key.clone(), terms.clone());
        let made = on_driver(dlock, async move { store.create(&name, &wanted).await }).await;
        let view = made.expect("a sale");
        let home = Home::new(view.birth, terms, PlantedBug::default());
        let sale = InventoryId { key, birth: view.birth };
        Both { dlock: dlock.clone(), redis, sale, home, random }
    }

    fn id(&mut self) -> Id {
        format!("o{}", self.random.random_range(0..12)).into()
    }

    fn buyer(&mut self) -> Option<Id> {
        let number = self.random.random_range(0..4);
        (number > 0).then(|| format!("u{number}").into())
    }

    fn request(&mut self) -> Request {
        let quantity = [1, 1, 1, 2, 3, 7, 20][self.random.random_range(0..7)];
        match self.random.random_range(0..14) {
            0 | 1 => Request::Deduct { quantity, operation: None, buyer: None },
            2 => Request::Deduct { quantity, operation: None, buyer: self.buyer() },
            3 | 4 => Request::Deduct { quantity, operation: Some(self.id()), buyer: self.buyer() },
            5 | 6 => {
                let expires_in = [5, 20, 100_000][self.random.random_range(0..3)];
                Request::Reserve { quantity, operation: self.id(), buyer: self.buyer(), expires_in }
            }
            7 => Request::Confirm { operation: self.id() },
            8 => Request::Cancel { operation: self.id() },
            9 => {
                let until = self.home_now() + self.random.random_range(0..200_000);
                Request::Extend { operation: self.id(), until }
            }
            10 | 11 => {
                let quantity = if self.random.random() { 0 } else { quantity };
                let number = self.random.random_range(0..20);
                Request::Refund { of: self.id(), quantity, operation: format!("f{number}").into() }
            }
            12 => {
                let operation = self.random.random_bool(0.5).then(|| self.id());
                Request::Restock { quantity, operation }
            }
            _ if self.random.random_bool(0.3) => Request::Resolve { operation: self.id() },
            _ => Request::Look { operation: self.id() },
        }
    }

    fn home_now(&self) -> u64 {
        let since = std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH);
        u64::try_from(since.expect("after 1970").as_millis()).expect("small")
    }

    async fn batch(&mut self) {
        let most = if self.random.random_ratio(1, 20) { 256 } else { 8 };
        let batch: Vec<Request> =
            (0..self.random.random_range(0..=most)).map(|_| self.request()).collect();
        self.apply(&batch).await;
    }

    /// On both; the answers, which are the same.
    async fn apply(&mut self, batch: &[Request]) -> Vec<Answer> {
        let start = self.random.random_range(0..20);
        let (redis, sale, requests) = (self.redis.clone(), self.sale.clone(), batch.to_vec());
        let applied =
            on_driver(&self.dlock, async move { redis.apply_from(&sale, start, &requests).await });
        let (view, answers) = applied.await.expect("an answer");
        let order = Batch::new(batch).order();
        self.home.reclaim(view.now);
        let mut expected: Vec<Option<Answer>> = vec![None; batch.len()];
        for at in order {
            expected[at] = Some(self.home.apply(view.now, start as usize, &batch[at]));
        }
        let expected: Vec<Answer> = expected.into_iter().flatten().collect();
        assert_eq!(answers, expected, "{batch:#?}");
        self.compare(&view).await;
        answers
    }

    async fn change(&mut self) {
        let change = match self.random.random_range(0..6) {
            0 => Change::Pause,
            1 | 2 => Change::Resume,
            3 => Change::PerBuyer(self.random.random_range(0..6)),
            4 => Change::Resize([1, 2, 7, 11, 300][self.random.random_range(0..5)]),
            _ => Change::Rebalance,
        };
        let (redis, sale) = (self.redis.clone(), self.sale.clone());
        let changed = on_driver(&self.dlock, async move { redis.change(&sale, change).await });
        let view = changed.await.expect("an answer");
        self.home.change(view.now, change);
        self.compare(&view).await;
    }

    async fn compare(&mut self, view: &View) {
        let shown = |mut view: View| {
            view.changes = 0; // one for each batch, or one for each effect
            view
        };
        assert_eq!(shown(view.clone()), shown(self.home.view(view.now)));
        let (redis, sale) = (self.redis.clone(), self.sale.clone());
        let counted =
            on_driver(&self.dlock, async move { redis.counts_without_reclaim(&sale).await });
        let (_, counts) = counted.await.expect("an answer");
        assert_eq!(counts, self.home.units.segments());
        let mut sum = Counts::default();
        for counts in counts {
            assert_eq!(counts.supplied, counts.available + counts.reserved + counts.sold, "I2");
            sum.available += counts.available;
            sum.reserved += counts.reserved;
            sum.sold += counts.sold;
        }
        assert_eq!(
            (sum.available, sum.reserved, sum.sold),
            (view.available, view.reserved, view.sold)
        );
        assert_eq!(view.initial + view.restocked, view.available + view.reserved + view.sold, "I2");
    }

    async fn compare_journals(&mut self) {
        let (redis, sale) = (self.redis.clone(), self.sale.clone());
        let read = on_driver(&self.dlock, async move { redis.journal(&sale, 0, 100_000).await });
        let mut entries = read.await.expect("a journal");
        let mut expected = self.home.entries(0, 100_000);
        // Anonymous deductions of a batch that are alike are one entry in Redis, and
        // what expires at one moment does so in any order.
        let sum = |entries: &mut Vec<super::Entry>, effect| {
            let of = entries.extract_if(.., |entry| {
                entry.effect == effect
                    && (entry.operation.is_none() || effect == super::Effect::Expired)
            });
            of.map(|entry| entry.quantity).sum::<u64>()
        };
        for effect in [super::Effect::Taken, super::Effect::Expired] {
            assert_eq!(sum(&mut entries, effect), sum(&mut expected, effect));
        }
        for entry in entries.iter_mut().chain(&mut expected) {
            entry.sequence = 0;
        }
        assert_eq!(entries, expected);
    }
}

async fn on_driver<T: Send + 'static>(
    dlock: &Dlock,
    call: impl Future<Output = crate::Result<T>> + Send + 'static,
) -> crate::Result<T> {
    let (answer, answered) = tokio::sync::oneshot::channel();
    dlock
        .client_extension()
        .spawn(async move {
            let _ = answer.send(call.await);
        })
        .expect("a driver");
    answered.await.expect("an answer")
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_scripts_and_the_machine_agree() {
    let Some(server) = RedisServer::start() else { return };
    let dlock = Dlock::connect(&server.url()).await.expect("a client");
    let seeds = std::env::var("DLOCK_TEST_SEEDS").ok().and_then(|seeds| seeds.parse().ok());
    for seed in 0..seeds.unwrap_or(40) {
        let mut both = Both::new(&dlock, seed).await;
        for _ in 0..150 {
            match both.random.random_range(0..12) {
                0 => both.change().await,
                1 if both.random.random_bool(0.3) => {
                    tokio::time::sleep(std::time::Duration::from_millis(8)).await;
                }
                _ => both.batch().await,
            }
        }
        both.compare_journals().await;
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn counts_are_exact_below_the_most_and_refused_from_there() {
    let Some(server) = RedisServer::start() else { return };
    let dlock = Dlock::connect(&server.url()).await.expect("a client");
    let terms = Terms {
        stock: MAX_UNITS - 6,
        segments: 3,
        per_buyer: 0,
        opens_at: 0,
        closes_at: 0,
        retention: 3_600_000,
        journal: 100,
    };
    let key = Key::new("most").expect("a key");
    let mut both = Both::with(&dlock, key, terms, StdRng::seed_from_u64(0)).await;
    let restock =
        |quantity| Request::Restock { quantity, operation: Some(format!("d{quantity}").into()) };
    let deduct = |quantity| Request::Deduct { quantity, operation: None, buyer: None };
    assert_eq!(both.apply(&[restock(6)]).await, [Answer::Overflow]);
    let answers = both.apply(&[restock(5), deduct(3)]).await;
    assert!(answers.iter().all(|answer| matches!(answer, Answer::Found(_))), "{answers:?}");
    assert_eq!(both.apply(&[restock(1)]).await, [Answer::Overflow]);
    both.apply(&[deduct(u64::from(u32::MAX))]).await;
    both.compare_journals().await;
}

/// Strangers who cancel and resolve ids that never came cannot fill the store.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn tombstones_are_bounded() {
    let Some(server) = RedisServer::start() else { return };
    let dlock = Dlock::connect(&server.url()).await.expect("a client");
    let terms = Terms {
        stock: 5,
        segments: 1,
        per_buyer: 0,
        opens_at: 0,
        closes_at: 0,
        retention: 3_600_000 * 24 * 365,
        journal: 0,
    };
    let key = Key::new("strangers").expect("a key");
    let mut both = Both::with(&dlock, key, terms, StdRng::seed_from_u64(0)).await;
    let each = 2_500;
    for from in 0..MAX_TOMBSTONES / each {
        let batch: Vec<Request> = (0..each)
            .map(|at| {
                let operation = format!("stranger-{from}-{at}").into();
                if at % 2 == 0 {
                    Request::Resolve { operation }
                } else {
                    Request::Cancel { operation }
                }
            })
            .collect();
        let answers = both.apply(&batch).await;
        assert!(answers.iter().all(|answer| matches!(answer, Answer::Found(_))));
    }
    let refused = both
        .apply(&[
            Request::Resolve { operation: "one-more".into() },
            Request::Cancel { operation: "another".into() },
            Request::Resolve { operation: "stranger-0-0".into() },
            Request::Deduct { quantity: 1, operation: Some("order".into()), buyer: None },
        ])
        .await;
    assert_eq!(refused[..2], [Answer::Full, Answer::Full]);
    assert!(refused[2..].iter().all(|answer| matches!(answer, Answer::Found(_))), "{refused:?}");
}

/// The records of sales that are made together do not end together.
#[test]
fn each_sale_has_a_phase() {
    let (day, birth) = (24 * 3_600_000, 1_763_000_000_000_000);
    let ends = |birth| {
        let now = birth / 1_000;
        let number = super::generation(birth, day, now);
        (now..).step_by(60_000).find(|now| super::generation(birth, day, *now) > number)
    };
    let ends: std::collections::BTreeSet<_> = (0..100).map(|at| ends(birth + at * 150)).collect();
    assert!(ends.len() > 90, "{ends:?}");
}
