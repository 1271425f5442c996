//! A store and the pure state machine agree: the same random batches, at the times that the
//! server reports, give the same answers and the same counts, and I2 holds after each.

use std::collections::BTreeMap;

use dlock::{Dlock, Key};
use dlock_testkit::redis::RedisServer;
use rand::rngs::StdRng;
use rand::{RngExt as _, SeedableRng as _};

use super::home::Home;
use super::redis::Redis;
use super::redis::codec::Batch;
use super::{
    Answer, Change, Counts, Cursor, Id, InventoryId, MAX_TOMBSTONES, MAX_UNITS, Record, Request,
    Settings, Status, Store, Terms, View,
};
use crate::planted_bug::PlantedBug;

/// A store that is compared with the machine.
pub(super) trait Compared: Store + Clone {
    fn of(dlock: &Dlock) -> Self;

    /// The indices of a batch in the order in which the store applies it.
    fn order(batch: &[Request]) -> Vec<usize>;

    /// The counts as they are, with expired reservations.
    fn counts_as_they_are(
        &self,
        inventory: &InventoryId,
    ) -> impl Future<Output = crate::Result<Vec<Counts>>> + Send;

    /// Whether its journal has the same entries under the same numbers.
    const SAME_JOURNAL: bool;
}

impl Compared for Redis {
    const SAME_JOURNAL: bool = false;

    fn of(dlock: &Dlock) -> Self {
        Redis::new(dlock.client_extension()).expect("Redis")
    }

    fn order(batch: &[Request]) -> Vec<usize> {
        Batch::new(batch).order()
    }

    async fn counts_as_they_are(&self, inventory: &InventoryId) -> crate::Result<Vec<Counts>> {
        self.counts_without_reclaim(inventory).await.map(|(_, counts)| counts)
    }
}

pub(super) struct Both<S> {
    dlock: Dlock,
    store: S,
    sale: InventoryId,
    home: Home,
    random: StdRng,
    /// What was sold under an id, for refunds that come after the retention.
    receipts: Vec<(Id, Record)>,
    /// What was sent to other homes, and received from them, as last heard.
    counters: [[u64; 3]; 2],
}

impl<S: Compared> Both<S> {
    pub(super) async fn new(dlock: &Dlock, seed: u64) -> Self {
        let mut random = StdRng::seed_from_u64(seed);
        let terms = Terms {
            stock: random.random_range(1..60),
            segments: if random.random_ratio(1, 8) { 600 } else { random.random_range(1..12) },
            per_buyer: if random.random() { random.random_range(1..6) } else { 0 },
            opens_at: 0,
            closes_at: 0,
            retention: [15, 200, 20_000, 3_600_000][random.random_range(0..4)],
            journal: if random.random() { 100_000 } else { 0 },
            directory: if random.random() { "some homes".into() } else { String::new() },
        };
        let key = Key::new(format!("agreement-{seed}")).expect("a key");
        Self::with(dlock, key, terms, random).await
    }

    async fn with(dlock: &Dlock, key: Key, terms: Terms, random: StdRng) -> Self {
        let store = S::of(dlock);
        let (creating, name, wanted) = (store.clone(), key.clone(), terms.clone());
        let made = on_driver(dlock, async move { creating.create(&name, &wanted).await }).await;
        let view = made.expect("a sale");
        let home = Home::new(view.birth, terms, PlantedBug::default());
        let sale = InventoryId { key, birth: view.birth };
        Both {
            dlock: dlock.clone(),
            store,
            sale,
            home,
            random,
            receipts: Vec::new(),
            counters: [[0; 3]; 2],
        }
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
        match self.random.random_range(0..19) {
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
                let operation = format!("f{}", self.random.random_range(0..60)).into();
                let damaged = self.random.random_ratio(1, 4);
                let of = self.id();
                if self.receipts.is_empty() || self.random.random() {
                    return Request::Refund { of, quantity, operation, damaged, receipt: None };
                }
                let at = self.random.random_range(0..self.receipts.len());
                let (of, record) = self.receipts[at].clone();
                let receipt = Some(Box::new(record));
                Request::Refund { of, quantity, operation, damaged, receipt }
            }
            12 => {
                let operation = self.random.random_bool(0.5).then(|| self.id());
                Request::Restock { quantity, operation }
            }
            13 => Request::WriteOff { quantity, operation: self.id() },
            16 => {
                let (operation, buyer) = (self.id(), self.buyer());
                let or_debt = self.random.random_ratio(1, 3);
                Request::Import { quantity, operation, buyer, or_debt }
            }
            17 => {
                let quantity = self.random.random_range(0..4);
                Request::ConfirmPart { operation: self.id(), quantity }
            }
            // Both are given what may be the counter, so that some of them have an effect.
            14 => {
                let (to, after) = self.random_counter(0);
                Request::Send { to, quantity: quantity * self.random.random_range(0..2), after }
            }
            15 => {
                let (from, total) = self.random_counter(1);
                let total = total + quantity * self.random.random_range(0..2);
                Request::Receive { from, total, seen: self.random.random_range(0..100) }
            }
            _ if self.random.random_bool(0.3) => Request::Resolve { operation: self.id() },
            _ => Request::Look { operation: self.id() },
        }
    }

    /// One of three homes, and what may have been sent to it or received from it.
    fn random_counter(&mut self, kind: usize) -> (u32, u64) {
        let home = self.random.random_range(0..3);
        (home, self.counters[kind][home as usize])
    }

    fn home_now(&self) -> u64 {
        let since = std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH);
        u64::try_from(since.expect("after 1970").as_millis()).expect("small")
    }

    /// A request, some with the time at which they were placed.
    fn placed(&mut self) -> Request {
        let request = self.request();
        if request.makes().is_none() || self.random.random_ratio(2, 3) {
            return request;
        }
        let ago = [0, 5, 20, 100, 1_000, 100_000][self.random.random_range(0..6)];
        Request::Placed { at: self.home_now() - ago, request: Box::new(request) }
    }

    async fn batch(&mut self) {
        let most = if self.random.random_ratio(1, 20) { 256 } else { 8 };
        let batch: Vec<Request> =
            (0..self.random.random_range(0..=most)).map(|_| self.placed()).collect();
        self.apply(&batch).await;
    }

    /// On both; the answers, which are the same.
    async fn apply(&mut self, batch: &[Request]) -> Vec<Answer> {
        let start = self.random.random_range(0..20);
        let (store, sale, requests) = (self.store.clone(), self.sale.clone(), batch.to_vec());
        let applied =
            on_driver(&self.dlock, async move { store.apply_from(&sale, start, &requests).await });
        let (view, answers) = applied.await.expect("an answer");
        let order = S::order(batch);
        self.home.reclaim(view.now);
        let mut expected: Vec<Option<Answer>> = vec![None; batch.len()];
        for at in order {
            expected[at] = Some(self.home.apply(view.now, start as usize, &batch[at]));
        }
        let expected: Vec<Answer> = expected.into_iter().flatten().collect();
        assert_eq!(answers, expected, "{batch:#?}");
        for (request, answer) in batch.iter().zip(&answers) {
            match (request, answer) {
                (Request::Send { to, .. }, Answer::Moved { total, .. }) => {
                    self.counters[0][*to as usize] = *total;
                }
                (Request::Receive { from, .. }, Answer::Moved { total, .. }) => {
                    self.counters[1][*from as usize] = *total;
                }
                _ => {}
            }
            let (Request::Deduct { operation: Some(of), .. } | Request::Confirm { operation: of }) =
                request.what()
            else {
                continue;
            };
            if let Answer::Found(record) = answer
                && matches!(record.status, Status::Taken | Status::Confirmed)
            {
                let receipt = Record { refunded: 0, expires: 0, ..record.clone() };
                self.receipts.push((of.clone(), receipt));
            }
        }
        self.compare(&view).await;
        answers
    }

    async fn change(&mut self) {
        let change = match self.random.random_range(0..10) {
            0 => Change::Pause,
            1 | 2 => Change::Resume,
            3 => Change::PerBuyer(self.random.random_range(0..6)),
            4 => Change::Retention([15, 40, 20_000][self.random.random_range(0..3)]),
            6 => Change::Complete,
            9 => Change::CountFrom(self.random.random_range(0..100)),
            7 => Change::Settings(Settings {
                version: self.random.random_range(0..20),
                opens_at: self.random.random_range(0..2),
                closes_at: 0,
                paused: self.random.random_ratio(1, 4),
                per_buyer: self.random.random_range(0..6),
                retention: [15, 40, 20_000][self.random.random_range(0..3)],
            }),
            5 => Change::Resize([1, 2, 7, 11, 300][self.random.random_range(0..5)]),
            _ => Change::Rebalance,
        };
        let (store, sale) = (self.store.clone(), self.sale.clone());
        let changed = on_driver(&self.dlock, async move { store.change(&sale, change).await });
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
        let (store, sale) = (self.store.clone(), self.sale.clone());
        let counted = on_driver(&self.dlock, async move { store.counts_as_they_are(&sale).await });
        let counts = counted.await.expect("an answer");
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
        let counted = view.available + view.reserved + view.sold + view.written_off + view.sent;
        assert_eq!(view.initial + view.restocked + view.received, counted, "I2");
    }

    /// Random batches and changes.
    pub(super) async fn run(&mut self) {
        for _ in 0..150 {
            match self.random.random_range(0..12) {
                0 => self.change().await,
                1 if self.random.random_bool(0.3) => {
                    tokio::time::sleep(std::time::Duration::from_millis(8)).await;
                }
                _ => self.batch().await,
            }
        }
        self.compare_journals().await;
        self.compare_records().await;
    }

    /// Everything that is on record, and what each buyer has.
    async fn compare_records(&mut self) {
        let (store, sale) = (self.store.clone(), self.sale.clone());
        let read = on_driver(&self.dlock, async move {
            let view = store.apply_from(&sale, 0, &[]).await?.0;
            let (mut records, mut buyers) = (BTreeMap::new(), BTreeMap::new());
            let mut next = Some(Cursor::default());
            while let Some(from) = next {
                let page = store.records(&sale, from).await?;
                for (id, record) in page.records {
                    records.entry(id).or_insert(record);
                }
                buyers.extend(page.buyers);
                next = page.next;
            }
            Ok((view, store.view(&sale).await?, records, buyers))
        });
        let (before, after, records, buyers) = read.await.expect("the records");
        if before.found_generations() != after.found_generations()
            || before.changes != after.changes
        {
            return; // some were forgotten or given back meanwhile
        }
        self.home.reclaim(before.now);
        let mut expected = BTreeMap::new();
        for (id, record) in self.home.ledger.all(before.now) {
            expected.entry(id.clone()).or_insert_with(|| Some(record.clone()));
        }
        assert_eq!(records, expected);
        let expected: BTreeMap<Id, u64> = self.home.buyers.clone().into_iter().collect();
        assert_eq!(buyers, expected);
    }

    async fn compare_journals(&mut self) {
        let (store, sale) = (self.store.clone(), self.sale.clone());
        let read = on_driver(&self.dlock, async move { store.journal(&sale, 0, 100_000).await });
        let mut entries = read.await.expect("a journal");
        // To read the journal gives back what expired meanwhile.
        self.home.reclaim(entries.last().map_or(0, |entry| entry.at));
        let mut expected = self.home.entries(0, 100_000);
        if S::SAME_JOURNAL {
            assert_eq!(entries, expected);
        }
        // Anonymous deductions of a batch that are alike are one entry in Redis, and
        // what expires at one moment does so in any order.
        let sum = |entries: &mut Vec<super::JournalEntry>, effect| {
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
    agree(&Dlock::connect(&server.url()).await.expect("a client")).await;
}

/// There, all keys of a home exist at all times, and records are kept in a ring.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_scripts_and_the_machine_agree_in_a_cluster() {
    let Some(node) = RedisServer::with(&["--cluster-enabled", "yes"]) else { return };
    node.cli(&["CLUSTER", "ADDSLOTSRANGE", "0", "16383"]);
    let began = std::time::Instant::now();
    while !node.cli(&["CLUSTER", "INFO"]).contains("cluster_state:ok") {
        assert!(began.elapsed().as_secs() < 60, "the cluster never works");
        tokio::time::sleep(std::time::Duration::from_millis(20)).await;
    }
    let url = format!("redis+cluster://127.0.0.1:{}", node.port());
    let dlock = Dlock::connect(&url).await.expect("a client");
    agree(&dlock).await;
    // All keys of each home are still there.
    let names = node.cli(&["KEYS", "*"]);
    let homes: std::collections::BTreeSet<_> =
        names.lines().filter_map(|name| name.rsplit_once("}:i").map(|(tag, _)| tag)).collect();
    assert!(!homes.is_empty());
    for tag in homes {
        let count = names.lines().filter(|name| name.starts_with(&format!("{tag}}}:i"))).count();
        assert_eq!(count, 14, "{tag}");
    }
}

async fn agree(dlock: &Dlock) {
    let seeds = std::env::var("DLOCK_TEST_SEEDS").ok().and_then(|seeds| seeds.parse().ok());
    for seed in 0..seeds.unwrap_or(40) {
        Both::<Redis>::new(dlock, seed).await.run().await;
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
        directory: String::new(),
    };
    let key = Key::new("most").expect("a key");
    let mut both = Both::<Redis>::with(&dlock, key, terms, StdRng::seed_from_u64(0)).await;
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
        directory: String::new(),
    };
    let key = Key::new("strangers").expect("a key");
    let mut both = Both::<Redis>::with(&dlock, key, terms, StdRng::seed_from_u64(0)).await;
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
