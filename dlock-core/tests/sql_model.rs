//! Random batches on each database and on the table of `memory://`, which is the model:
//! both must give the same answers and end in the same state.
//!
//! All ttls are long, so that time plays no part; what the table does over time is compared
//! where rows are written and read (`row.rs`). `DLOCK_TEST_SEED` replays a round.

use std::sync::Arc;
use std::time::Duration;

use dlock::backend::memory::lock_table::LockTable;
use dlock::backend::sql::{MySql, Postgres, Sqlite};
use dlock::backend::{
    AcquireOutcome, Answer, Backend, Break, BreakTarget, Claim, HolderState, KeyState, Moment,
    Owner, Release, RenewOutcome, Request,
};
use dlock::machine::PlantedBug;
use dlock::{ErrorKind, Holder, Key, Mode};
use dlock_testkit::database_servers::{MariaDbServer, PostgresServer};
use rand::rngs::StdRng;
use rand::{RngExt as _, SeedableRng as _};

const OWNERS: u128 = 8;
const BATCHES: usize = 30;

fn claim(random: &mut StdRng, key: &Key) -> Arc<Claim> {
    let owner = random.random_range(0..OWNERS);
    let mode = match owner {
        0 | 1 => Mode::Exclusive,
        2 | 3 => Mode::Shared,
        _ => Mode::Permits { count: random.random_range(1..4), of: 4 },
    };
    let other = random.random_range(0..OWNERS);
    let replaces = other != owner && random.random_bool(0.15);
    let tags = vec![("näme\t'\"\\".to_owned(), "🎉".to_owned())];
    Arc::new(Claim {
        key: key.clone(),
        owner: Owner::from_bits(owner + 1),
        mode,
        ttl: Duration::from_secs(600),
        queue: random.random_bool(0.7),
        instead_of: replaces.then(|| Owner::from_bits(other + 1)),
        tokens: random.random_range(1..5),
        holder: Arc::new(Holder {
            client: 0,
            name: format!("owner-{owner}"),
            host: "h".into(),
            pid: 7,
            tags,
        }),
        sent: Moment::from_nanos(random.random()),
    })
}

fn request(random: &mut StdRng, keys: &[Key]) -> Request {
    let key = &keys[random.random_range(0..keys.len())];
    let claim = claim(random, key);
    match random.random_range(0..10) {
        0..5 => Request::Acquire(claim),
        5..7 => Request::Renew(claim),
        7 => Request::Release(claim, Release::After(Duration::from_secs(300))),
        _ => Request::Release(claim, Release::Now),
    }
}

fn model_answer(model: &mut LockTable, now: Moment, request: &Request) -> Answer {
    let out = &mut Vec::new();
    match request {
        Request::Acquire(claim) => Answer::Acquire(Ok(model.acquire(now, claim, out))),
        Request::Renew(lease) => Answer::Renew(Ok(model.renew(now, lease, out))),
        Request::Release(lease, how) => Answer::Release(Ok(model.release(now, lease, *how, out))),
    }
}

/// An answer without its tokens and times, which differ.
fn shape(answer: &Answer) -> String {
    match answer {
        Answer::Acquire(Ok(AcquireOutcome::Granted(grant))) => format!("granted {}", grant.count),
        Answer::Acquire(Ok(AcquireOutcome::Queued { holder, free_in })) => {
            format!("queued {:?} {}", name(holder), free_in.is_some())
        }
        Answer::Acquire(Ok(AcquireOutcome::Busy { holder })) => format!("busy {:?}", name(holder)),
        Answer::Renew(Ok(RenewOutcome::Extended(grant))) => format!("extended {}", grant.count),
        other => format!("{other:?}"),
    }
}

fn name(holder: &Option<Arc<Holder>>) -> Option<&str> {
    holder.as_ref().map(|holder| holder.name.as_str())
}

fn state(state: &KeyState) -> String {
    let holders: Vec<_> = state.holders.iter().map(|it| (&it.holder.name, it.mode)).collect();
    let waiters: Vec<_> = state.waiters.iter().map(|it| (&it.holder.name, it.mode)).collect();
    format!("{holders:?} {waiters:?} {}", state.broken_by.is_some())
}

/// What may be broken: in the model, and the same in the store.
fn targets(ours: &KeyState, theirs: &KeyState) -> Vec<(BreakTarget, BreakTarget)> {
    let token = |held: &HolderState| held.token.map(|token| BreakTarget::Holder { token });
    let pairs = ours.holders.iter().zip(&theirs.holders);
    let holders = pairs.filter_map(|(our, their)| token(our).zip(token(their)));
    let nobody = BreakTarget::Holder { token: 1 };
    let fixed = [BreakTarget::Lock, BreakTarget::Permits, nobody].map(|it| (it, it));
    fixed.into_iter().chain(holders).collect()
}

async fn agree(backend: impl Backend, rounds: u64) {
    let start = std::env::var("DLOCK_TEST_SEED")
        .map_or_else(|_| rand::random::<u32>().into(), |seed| seed.parse().expect("a number"));
    for seed in start..start + rounds {
        let mut random = StdRng::seed_from_u64(seed);
        let mut model = LockTable::new(1_000_000, PlantedBug::default());
        let now = Moment::from_nanos(1_000_000_000);
        let key = |n| Key::new(format!("agreement:{seed}:{n}:'\"%_\\")).expect("a key");
        let keys: Vec<Key> = (0..3).map(key).collect();
        let mut tokens: Vec<(u64, u64)> = Vec::new();
        for _ in 0..BATCHES {
            let count = random.random_range(1..20);
            let requests: Vec<_> = (0..count).map(|_| request(&mut random, &keys)).collect();
            let theirs = backend.call(&requests).await;
            assert_eq!(theirs.len(), requests.len());
            for (request, theirs) in requests.iter().zip(&theirs) {
                let ours = model_answer(&mut model, now, request);
                let again = format!("again with DLOCK_TEST_SEED={seed}: {request:?}");
                assert_eq!(shape(&ours), shape(theirs), "{again}");
                if let (
                    Answer::Acquire(Ok(AcquireOutcome::Granted(our))),
                    Answer::Acquire(Ok(AcquireOutcome::Granted(their))),
                ) = (&ours, theirs)
                    && request.claim().key == keys[0]
                    && !request.claim().mode.is_permits()
                {
                    tokens.push((our.first, their.first));
                }
            }
            if random.random_bool(0.1) {
                let by = claim(&mut random, &keys[0]).holder.clone();
                let delay = Duration::from_secs(60);
                let shown = backend.inspect(&keys[1]).await.expect("a look");
                let targets = targets(&model.inspect(now, &keys[1]), &shown);
                let (our, their) = targets[random.random_range(0..targets.len())];
                let our = Break { by: by.clone(), target: our, delay };
                let their = Break { by, target: their, delay };
                let ours = model.break_lock(now, &keys[1], &our, &mut Vec::new());
                let theirs = backend.break_lock(&keys[1], &their).await.expect("an answer");
                assert_eq!(ours, theirs, "{our:?}, again with DLOCK_TEST_SEED={seed}");
            }
            for key in &keys {
                let theirs = backend.inspect(key).await.expect("a look");
                let ours = model.inspect(now, key);
                assert_eq!(state(&ours), state(&theirs), "again with DLOCK_TEST_SEED={seed}");
            }
        }
        // The same order of grants, by either's tokens.
        tokens.sort_unstable();
        assert!(tokens.is_sorted_by_key(|(_, theirs)| *theirs), "{seed}: {tokens:?}");
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn sqlite_does_what_the_model_does() {
    let directory = tempfile::TempDir::new().expect("a directory");
    let url = format!("sqlite://{}/locks.db?migrate=true", directory.path().display());
    agree(Sqlite::new(&url, "test").expect("a backend"), 30).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn postgres_does_what_the_model_does() {
    let Some(server) = PostgresServer::start() else { return };
    let url = format!("{}?migrate=true", server.url());
    agree(Postgres::new(&url, "test").expect("a backend"), 20).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn mariadb_does_what_the_model_does() {
    let Some(server) = MariaDbServer::start() else { return };
    let url = format!("{}?migrate=true", server.url());
    agree(MySql::new(&url, "test").expect("a backend"), 20).await;
}

/// Two calls share a batch, and the row of one of them is locked by somebody else: only
/// that call fails.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_locked_row_fails_its_own_call_only() {
    let Some(server) = PostgresServer::start() else { return };
    let url = format!("{}?migrate=true", server.url());
    let backend = Postgres::new(&url, "test").expect("a backend");
    let mut random = StdRng::seed_from_u64(1);
    let mut acquire = |name: &str| {
        let claim = claim(&mut random, &Key::new(name).expect("a key"));
        Request::Acquire(Arc::new(Claim { mode: Mode::Exclusive, ..(*claim).clone() }))
    };
    let stuck = acquire("stuck");
    let made = backend.call(std::slice::from_ref(&stuck)).await;
    assert!(shape(&made[0]).starts_with("granted"), "{made:?}");
    let pool = sqlx::PgPool::connect(&server.url()).await.expect("a pool");
    let mut tx = pool.begin().await.expect("a transaction");
    let sql = "SELECT 1 FROM dlock_lock WHERE id = 'test/l/stuck' FOR UPDATE";
    sqlx::query(sql).fetch_one(&mut *tx).await.expect("the row");
    let answers = backend.call(&[stuck.clone(), acquire("free")]).await;
    let Answer::Acquire(Err(error)) = &answers[0] else { panic!("{answers:?}") };
    assert_eq!(error.kind(), ErrorKind::Unavailable);
    assert!(error.to_string().contains("locked the row"), "{error}");
    assert!(shape(&answers[1]).starts_with("granted"), "{answers:?}");
    tx.rollback().await.expect("a rollback");
    let again = backend.call(&[stuck]).await;
    assert!(shape(&again[0]).starts_with("granted"), "{again:?}");
}
