//! Compares the Lua scripts with the lock table that the simulation uses as the model of
//! a server: the same random operations on both must give the same answers and notices.
//!
//! The model's time stands still while a block of operations runs, and moves by
//! more than the short ttls between blocks. A block that took the real
//! server too long is not compared any further. `DLOCK_TEST_SEED` replays a round,
//! `DLOCK_TEST_ROUNDS` sets the number of rounds.

use std::panic::{AssertUnwindSafe, resume_unwind};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use dlock::backend::memory::lock_table::{LockTable, SentNotice};
use dlock::backend::redis::Redis;
use dlock::backend::{
    AcquireOutcome, Answer, Break, BreakTarget, Claim, Moment, Notice, Owner, Release,
    RenewOutcome, Request,
};
use dlock::backend::{Backend as _, KeyState, Listener};
use dlock::machine::PlantedBug;
use dlock::{Holder, Key, Mode};
use dlock_testkit::SingleCalls as _;
use dlock_testkit::redis::RedisServer;
use dlock_testkit::topology::ClusterServers;
use futures_util::FutureExt as _;
use rand::rngs::StdRng;
use rand::{RngExt as _, SeedableRng as _};

const SHORT: Duration = Duration::from_millis(400);
const LONG: Duration = Duration::from_secs(60);
/// The time between blocks: longer than the short ttl.
const STEP: Duration = Duration::from_millis(450);
/// A block must take less time, or a short ttl may end in it.
const BLOCK: Duration = Duration::from_millis(250);
const BLOCKS: usize = 4;
const OPERATIONS: usize = 25;
const OWNERS: u128 = 8;
/// In one of four rounds: more than a call looks at, or lets in.
const MANY_OWNERS: u128 = 40;
/// A seed that once found a disagreement: after a break, a sweep of ended holders took
/// their old ends for the new ones, so permits stayed taken.
const FOUND: u64 = 2_724_348_760;

/// Collects notices in the order of their arrival.
#[derive(Default)]
struct Heard(Mutex<Vec<(Owner, Notice)>>);

impl Listener for Heard {
    fn on_notice(&self, _: &Key, owner: Owner, notice: Notice) {
        self.0.lock().unwrap_or_else(PoisonError::into_inner).push((owner, notice));
    }
}

struct Round {
    random: StdRng,
    model: LockTable,
    now: Moment,
    sent: Vec<SentNotice>,
    redis: Redis,
    heard: Arc<Heard>,
    key: Key,
    modes: Vec<Mode>,
    /// The first token of a grant in the model, and of the same grant at the server.
    tokens: Vec<(u64, u64)>,
    /// Whether all notices of an owner come through one channel, and so in their order.
    in_order: bool,
}

impl Round {
    fn new(url: &str, seed: u64) -> Self {
        let mut random = StdRng::seed_from_u64(seed);
        let redis = Redis::new(url, "test").expect("a URL");
        let heard = Arc::new(Heard::default());
        let listener: Arc<dyn Listener> = heard.clone();
        redis.open(0, Arc::downgrade(&listener));
        let owners = if seed.is_multiple_of(4) { MANY_OWNERS } else { OWNERS };
        let modes: Vec<Mode> = (0..owners)
            .map(|_| match random.random_range(0..5) {
                0 | 1 => Mode::Exclusive,
                2 => Mode::Shared,
                _ => Mode::Permits {
                    count: random.random_range(1..4),
                    of: random.random_range(3..5),
                },
            })
            .collect();
        Round {
            random,
            model: LockTable::new(1_000_000_000, PlantedBug::default()),
            now: Moment::from_nanos(1_000_000_000),
            sent: Vec::new(),
            redis,
            heard,
            key: Key::new(format!("agreement:{{{seed}}}%")).expect("a key"),
            modes,
            tokens: Vec::new(),
            in_order: !url.contains("cluster"),
        }
    }

    fn holder(&self, name: String) -> Holder {
        Holder { client: 0, name, host: "h\t\n\"".into(), pid: 7, tags: vec![] }
    }

    fn claim(&mut self) -> Claim {
        let owners = self.modes.len() as u128;
        let owner = self.random.random_range(0..owners);
        let other = self.random.random_range(0..owners);
        let replaces = other != owner && self.random.random_bool(0.15);
        Claim {
            key: self.key.clone(),
            owner: Owner::from_bits(owner + 1),
            mode: self.modes[owner as usize],
            ttl: if self.random.random_bool(0.4) { SHORT } else { LONG },
            queue: self.random.random_bool(0.8),
            instead_of: replaces.then(|| Owner::from_bits(other + 1)),
            tokens: self.random.random_range(0..5),
            holder: Arc::new(self.holder(format!("owner-{owner}"))),
            sent: Moment::from_nanos(self.random.random()),
        }
    }

    /// Renews a lease; that of every other owner behind one on the same terms that is lost,
    /// since the terms are written once then.
    async fn renew(&self, lease: Claim) -> RenewOutcome {
        let behind = lease.owner.bits().is_multiple_of(2);
        let key = Key::new(format!("{}:beside", self.key.as_str())).expect("a key");
        let beside = behind.then(|| Claim { key, ..lease.clone() });
        let leases: Vec<_> = beside.into_iter().chain([lease]).map(Arc::new).collect();
        let mut answers = self.redis.renew(&leases).await;
        let renewed = answers.pop().expect("one for each").expect("an answer");
        for lost in answers {
            assert_eq!(lost.expect("an answer"), RenewOutcome::Lost);
        }
        renewed
    }

    async fn operation(&mut self) {
        let claim = self.claim();
        match self.random.random_range(0..20) {
            0..10 => {
                let ours = self.model.acquire(self.now, &claim, &mut self.sent);
                let theirs = self.redis.acquire(&claim).await.expect("an answer");
                self.compare_acquired(&claim, &ours, &theirs);
            }
            10..14 => {
                let mut lease = claim;
                if lease.mode == Mode::Exclusive && self.random.random_bool(0.4) {
                    lease.mode = Mode::Shared;
                }
                let ours = self.model.renew(self.now, &lease, &mut self.sent);
                let theirs = self.renew(lease).await;
                self.compare_renewed(ours, theirs);
            }
            14..19 => {
                let how = match self.random.random_range(0..8) {
                    0 => Release::After(SHORT),
                    1 => Release::After(LONG),
                    _ => Release::Now,
                };
                let ours = self.model.release(self.now, &claim, how, &mut self.sent);
                let theirs = self.redis.release(&claim, how).await.expect("an answer");
                assert_eq!(ours, theirs);
            }
            _ => {
                let by = self.holder("operator".into());
                let delay = if self.random.random() { SHORT } else { Duration::ZERO };
                let (our, their) = self.target().await;
                let by = Arc::new(by);
                let our = Break { by: by.clone(), target: our, delay };
                let their = Break { by, target: their, delay };
                let ours = self.model.break_lock(self.now, &self.key, &our, &mut self.sent);
                let theirs = self.redis.break_lock(&self.key, &their).await.expect("an answer");
                assert_eq!(ours, theirs, "{our:?}");
            }
        }
    }

    /// What is broken: in the model, and the same at the server.
    async fn target(&mut self) -> (BreakTarget, BreakTarget) {
        let fixed = [BreakTarget::Lock, BreakTarget::Permits, BreakTarget::Holder { token: 1 }];
        if self.random.random() {
            let target = fixed[self.random.random_range(0..fixed.len())];
            return (target, target);
        }
        let tokens = |state: KeyState| {
            let mut tokens: Vec<u64> = state.holders.iter().filter_map(|it| it.token).collect();
            tokens.sort_unstable();
            tokens
        };
        let ours = tokens(self.model.inspect(self.now, &self.key));
        let theirs = tokens(self.redis.inspect(&self.key).await.expect("a look"));
        assert_eq!(ours.len(), theirs.len());
        if ours.is_empty() {
            return (fixed[0], fixed[0]);
        }
        let at = self.random.random_range(0..ours.len());
        let holder = |tokens: &[u64]| BreakTarget::Holder { token: tokens[at] };
        (holder(&ours), holder(&theirs))
    }

    /// Several calls on the key at once: they are answered as if made one by one.
    async fn combined(&mut self) {
        let calls = self.random.random_range(2..12);
        let requests: Vec<Request> = (0..calls)
            .map(|_| {
                let claim = Arc::new(self.claim());
                match self.random.random_range(0..4) {
                    0 | 1 => Request::Acquire(claim),
                    2 => Request::Renew(claim),
                    _ => Request::Release(claim, Release::Now),
                }
            })
            .collect();
        let theirs = self.redis.call(&requests).await;
        assert_eq!(theirs.len(), requests.len());
        for (request, theirs) in requests.iter().zip(theirs) {
            match (request, theirs) {
                (Request::Acquire(claim), Answer::Acquire(theirs)) => {
                    let ours = self.model.acquire(self.now, claim, &mut self.sent);
                    self.compare_acquired(claim, &ours, &theirs.expect("an answer"));
                }
                (Request::Renew(lease), Answer::Renew(theirs)) => {
                    let ours = self.model.renew(self.now, lease, &mut self.sent);
                    self.compare_renewed(ours, theirs.expect("an answer"));
                }
                (Request::Release(lease, how), Answer::Release(theirs)) => {
                    let ours = self.model.release(self.now, lease, *how, &mut self.sent);
                    assert_eq!(ours, theirs.expect("an answer"));
                }
                (request, theirs) => panic!("{request:?} is answered with {theirs:?}"),
            }
        }
    }

    fn compare_acquired(&mut self, claim: &Claim, ours: &AcquireOutcome, theirs: &AcquireOutcome) {
        match (ours, theirs) {
            (AcquireOutcome::Granted(our), AcquireOutcome::Granted(their)) => {
                self.tokens.push((our.first, their.first));
            }
            (AcquireOutcome::Busy { holder: our }, AcquireOutcome::Busy { holder: their }) => {
                self.compare_holders(our, their);
            }
            (
                AcquireOutcome::Queued { holder: our, free_in: our_in },
                AcquireOutcome::Queued { holder: their, free_in: their_in },
            ) => {
                self.compare_holders(our, their);
                assert_eq!(our_in.is_some(), their_in.is_some());
            }
            _ => panic!("{claim:?}: {ours:?}, but the server says {theirs:?}"),
        }
    }

    fn compare_renewed(&mut self, ours: RenewOutcome, theirs: RenewOutcome) {
        match (ours, theirs) {
            (RenewOutcome::Extended(our), RenewOutcome::Extended(their)) => {
                self.tokens.push((our.first, their.first));
            }
            (ours, theirs) => assert_eq!(ours, theirs),
        }
    }

    /// Of several holders either may name another one, and a script may find none among many
    /// waiters.
    fn compare_holders(&self, our: &Option<Arc<Holder>>, their: &Option<Arc<Holder>>) {
        if self.modes.len() > OWNERS as usize {
            return;
        }
        assert_eq!(our.is_some(), their.is_some());
        if self.model.inspect(self.now, &self.key).holders.len() == 1 {
            assert_eq!(name(our), name(their));
        }
    }

    /// Compares the state of the keys and the notices.
    async fn compare(&mut self) {
        let ours = self.model.inspect(self.now, &self.key);
        let theirs = self.redis.inspect(&self.key).await.expect("a look");
        assert_eq!(shape(&ours), shape(&theirs));
        let began = Instant::now();
        while self.heard.0.lock().expect("notices").len() < self.sent.len() {
            assert!(began.elapsed() < Duration::from_secs(5), "a notice is missing");
            tokio::time::sleep(Duration::from_millis(1)).await;
        }
        let heard = std::mem::take(&mut *self.heard.0.lock().expect("notices"));
        assert_eq!(heard.len(), self.sent.len());
        // Who is told first of those whose lock is broken does not matter.
        let mut heard = heard;
        let in_order = self.in_order;
        let order = |notice: &Notice| match notice {
            _ if in_order => None,
            Notice::Granted { sent, .. } => Some(*sent),
            _ => Some(Moment::NEVER),
        };
        heard.sort_by_key(|(owner, notice)| (*owner, order(notice)));
        self.sent.sort_by_key(|sent| (sent.owner, order(&sent.notice)));
        for (our, (owner, their)) in self.sent.drain(..).zip(heard) {
            assert_eq!(our.owner, owner);
            match (our.notice, their) {
                (
                    Notice::Granted { grant: our, sent: our_sent },
                    Notice::Granted { grant: their, sent: their_sent },
                ) => {
                    assert_eq!(our_sent, their_sent);
                    self.tokens.push((our.first, their.first));
                }
                (our, their) => assert_eq!(our, their),
            }
        }
        // The same order of grants, by either's tokens.
        self.tokens.sort_unstable();
        assert!(self.tokens.is_sorted_by_key(|(_, theirs)| *theirs), "{:?}", self.tokens);
    }

    async fn block(&mut self) {
        for _ in 0..OPERATIONS {
            if self.random.random_bool(0.2) {
                self.combined().await;
            } else {
                self.operation().await;
            }
        }
        self.compare().await;
    }

    /// Connects and subscribes. In a cluster calls that leave together are separate runs,
    /// and those that wait for a connection would be overtaken by others.
    async fn connect(&mut self) {
        self.redis.inspect(&self.key).await.expect("a look");
        let key = Key::new(format!("other:{}", self.key.as_str())).expect("a key");
        let claim = Claim { key, instead_of: None, ..self.claim() };
        self.redis.acquire(&claim).await.expect("an answer");
        let _ = self.redis.release(&claim, Release::Now).await.expect("an answer");
    }

    /// Whether all blocks could be compared. A disagreement counts only in a
    /// block that was quick.
    async fn run(mut self) -> bool {
        self.connect().await;
        for block in 0..BLOCKS {
            let began = Instant::now();
            let outcome = AssertUnwindSafe(self.block()).catch_unwind().await;
            if began.elapsed() > BLOCK {
                return false;
            }
            if let Err(disagreement) = outcome {
                resume_unwind(disagreement);
            }
            if block + 1 < BLOCKS {
                tokio::time::sleep(STEP).await;
                self.now = self.now + STEP;
            }
        }
        true
    }
}

fn name(holder: &Option<Arc<Holder>>) -> Option<&str> {
    holder.as_ref().map(|holder| holder.name.as_str())
}

type Shape<'a> = (Vec<(&'a str, Mode)>, Vec<(&'a str, Mode)>, Option<&'a str>);

fn shape(state: &KeyState) -> Shape<'_> {
    let mut holders: Vec<_> =
        state.holders.iter().map(|held| (held.holder.name.as_str(), held.mode)).collect();
    holders.sort_by_key(|(name, mode)| (mode.is_permits(), *name));
    (
        holders,
        state.waiters.iter().map(|waiter| (waiter.holder.name.as_str(), waiter.mode)).collect(),
        state.broken_by.as_deref(),
    )
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_scripts_do_what_the_model_does() {
    let Some(server) = RedisServer::start() else { return };
    compare_rounds(&server.url()).await;
}

/// In a cluster a lock is always a hash.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_scripts_of_a_cluster_do_what_the_model_does() {
    let Some(cluster) = ClusterServers::with(3, 0, &[]) else { return };
    compare_rounds(&cluster.url()).await;
}

async fn compare_rounds(url: &str) {
    let start = std::env::var("DLOCK_TEST_SEED")
        .map_or_else(|_| rand::random::<u32>(), |seed| seed.parse().expect("a whole number"));
    let wanted = std::env::var("DLOCK_TEST_ROUNDS")
        .map_or(80, |rounds| rounds.parse().expect("a whole number"));
    Round::new(url, FOUND).run().await;
    let (mut compared, mut tried) = (0, 0);
    while compared < wanted {
        assert!(tried < 4 * wanted, "only {compared} of {tried} rounds were quick enough");
        let rounds: Vec<_> = (0..8)
            .map(|n| {
                let seed = u64::from(start) + tried + n;
                let round = Round::new(url, seed);
                (seed, tokio::spawn(round.run()))
            })
            .collect();
        tried += rounds.len() as u64;
        for (seed, round) in rounds {
            match round.await {
                Ok(done) => compared += u64::from(done),
                Err(_) => panic!("it disagrees; again with DLOCK_TEST_SEED={seed}"),
            }
        }
    }
    println!("{compared} of {tried} rounds were quick enough to be compared");
}
