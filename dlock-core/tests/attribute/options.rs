//! Every option except durations and clients.

use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use dlock::{
    Dlock, Error, ErrorKind, Event, Guard, Key, Mode, MultiGuard, Permits, Result,
    distributed_lock, key,
};
use dlock_testkit::History;
use tokio::sync::Barrier;
use tokio::task::JoinSet;

use crate::fixture::{LONG, until};
use crate::{Fixture, on_both};

on_both!(
    one_at_a_time,
    a_key_by_expression,
    several_keys,
    keys_by_expression,
    shared,
    permits,
    fair,
    when,
    on_busy_and_on_error,
    policy,
    names_and_values,
);

// -- key -------------------------------------------------------------------

#[distributed_lock(key = "order:{id}", client = dlock, guard = lock)]
async fn enter(dlock: Dlock, id: u64, history: Arc<History>) -> Result<()> {
    let entry = history.enter(lock);
    tokio::task::yield_now().await;
    drop(entry);
    Ok(())
}

async fn one_at_a_time(fixture: Fixture) {
    let histories = [Arc::new(History::default()), Arc::new(History::default())];
    let mut tasks = JoinSet::new();
    for round in 0..60 {
        let dlock = if round % 3 == 0 { fixture.other.clone() } else { fixture.dlock.clone() };
        let id = round % 2;
        tasks.spawn(enter(dlock, id, histories[id as usize].clone()));
    }
    for done in tasks.join_all().await {
        done.expect("the lock");
    }
    for history in &histories {
        history.assert_clean();
        assert_eq!(history.entries(), 30);
    }
    fixture.assert_free("order:0").await;
    fixture.assert_free("order:1").await;
}

#[distributed_lock(key = "user:{email}", name = "sign-up", crate = dlock, client = dlock, guard = lock)]
async fn sign_up(dlock: &Dlock, email: &str) -> Result<[String; 2]> {
    Ok([lock.key().as_str().to_owned(), lock.key().label().to_owned()])
}

async fn names_and_values(fixture: Fixture) {
    let values = [(":", "%3A"), ("{}", "%7B%7D"), ("%", "%25"), ("a\0\n", "a%00%0A"), ("🎉", "🎉")];
    for (value, escaped) in values {
        let [text, label] = sign_up(&fixture.dlock, value).await.expect("the lock");
        assert_eq!((text, label.as_str()), (format!("user:{escaped}"), "sign-up"));
        fixture.assert_free(&format!("user:{escaped}")).await;
    }
    let error = sign_up(&fixture.dlock, &"x".repeat(10 * 1024)).await.expect_err("too long");
    assert_eq!(error.kind(), ErrorKind::Invalid);
}

struct Order {
    id: u64,
}

impl Order {
    fn key(&self) -> Result<Key> {
        key!("order:{self.id}")
    }
}

#[distributed_lock(key = order.key(), client = dlock, guard = lock)]
async fn by_method(dlock: &Dlock, order: Order) -> Result<Key> {
    Ok(lock.key().clone())
}

#[distributed_lock(key = Key::new("plain"), client = dlock, guard = lock)]
async fn by_constructor(dlock: &Dlock) -> Result<Key> {
    Ok(lock.key().clone())
}

#[distributed_lock(key = key, client = dlock, guard = lock)]
async fn by_argument(dlock: &Dlock, key: &Key) -> Result<Key> {
    Ok(lock.key().clone())
}

async fn a_key_by_expression(fixture: Fixture) {
    let dlock = &fixture.dlock;
    assert_eq!(by_method(dlock, Order { id: 7 }).await.unwrap().as_str(), "order:7");
    assert_eq!(by_constructor(dlock).await.unwrap().as_str(), "plain");
    let key = Key::new("given").unwrap();
    assert_eq!(by_argument(dlock, &key).await.unwrap(), key);
}

// -- keys ------------------------------------------------------------------

#[distributed_lock(keys = ["account:{from}", "account:{to}"], client = dlock, guard = both)]
async fn transfer(dlock: Dlock, from: u32, to: u32, inside: Arc<[AtomicU32; 3]>) -> Result<usize> {
    let accounts = [from, to].map(|account| &inside[account as usize]);
    for account in accounts {
        assert_eq!(account.fetch_add(1, Ordering::SeqCst), 0, "alone on each account");
    }
    tokio::task::yield_now().await;
    for account in accounts {
        account.fetch_sub(1, Ordering::SeqCst);
    }
    let both: &MultiGuard = both;
    let (first, second) = (key!("account:{from}")?, key!("account:{to}")?);
    assert!(both.token(&first).is_some() && both.token(&second).is_some());
    Ok(both.tokens().count())
}

async fn several_keys(fixture: Fixture) {
    let inside = Arc::new([const { AtomicU32::new(0) }; 3]);
    let mut tasks = JoinSet::new();
    for round in 0..30 {
        let dlock = if round % 2 == 0 { fixture.other.clone() } else { fixture.dlock.clone() };
        let (from, to) = [(0, 1), (1, 0), (1, 2), (2, 0), (2, 1), (0, 2)][round % 6];
        tasks.spawn(transfer(dlock, from, to, inside.clone()));
    }
    let all = tokio::time::timeout(LONG, tasks.join_all()).await.expect("no deadlock");
    assert!(all.into_iter().all(|tokens| tokens.unwrap() == 2));
    fixture.assert_free("account:1").await;
}

#[distributed_lock(keys = ids.iter().map(|id| key!("item:{id}")), client = dlock, guard = all)]
async fn pack(dlock: &Dlock, ids: Vec<u32>) -> Result<(usize, usize)> {
    Ok((ids.len(), all.tokens().count()))
}

async fn keys_by_expression(fixture: Fixture) {
    assert_eq!(pack(&fixture.dlock, vec![3, 1, 2, 3]).await.unwrap(), (4, 3));
    assert_eq!(pack(&fixture.dlock, vec![]).await.unwrap_err().kind(), ErrorKind::Invalid);
}

// -- mode, permits, fair -----------------------------------------------------

#[distributed_lock(key = "prices", mode = "shared", client = dlock, guard = lock)]
async fn read(dlock: Dlock, together: Arc<Barrier>) -> Result<Mode> {
    together.wait().await; // ends when two are inside
    Ok(lock.mode())
}

#[distributed_lock(key = "prices", mode = "exclusive", wait = "0s", client = dlock, guard = lock)]
async fn write(dlock: &Dlock) -> Result<Mode> {
    Ok(lock.mode())
}

async fn shared(fixture: Fixture) {
    let together = Arc::new(Barrier::new(3));
    let readers = [&fixture.dlock, &fixture.other]
        .map(|dlock| tokio::spawn(read(dlock.clone(), together.clone())));
    until(async || fixture.other.inspect("prices").await.unwrap().holders.len() == 2).await;
    assert_eq!(write(&fixture.dlock).await.unwrap_err().kind(), ErrorKind::TimedOut);
    together.wait().await;
    for reader in readers {
        assert_eq!(reader.await.unwrap().unwrap(), Mode::Shared);
    }
    fixture.assert_free("prices").await;
    assert_eq!(write(&fixture.dlock).await.unwrap(), Mode::Exclusive);
}

#[distributed_lock(key = "exports", permits = wanted, of = 3, client = dlock, guard = permits)]
async fn export(dlock: Dlock, wanted: u32, inside: Arc<AtomicU32>) -> Result<u32> {
    let permits: &Permits = permits;
    let others = inside.fetch_add(wanted, Ordering::SeqCst);
    assert!(others + wanted <= 3, "{others} were inside");
    tokio::task::yield_now().await;
    inside.fetch_sub(wanted, Ordering::SeqCst);
    Ok(permits.count())
}

async fn permits(fixture: Fixture) {
    let inside = Arc::new(AtomicU32::new(0));
    let mut tasks = JoinSet::new();
    for round in 0..30 {
        let dlock = if round % 2 == 0 { fixture.other.clone() } else { fixture.dlock.clone() };
        tasks.spawn(export(dlock, 1 + round % 3, inside.clone()));
    }
    let counts: u32 = tasks.join_all().await.into_iter().map(|count| count.unwrap()).sum();
    assert_eq!(counts, 60);
    let error = export(fixture.dlock.clone(), 4, inside).await.unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Invalid);
}

#[distributed_lock(key = "fair", fair, client = dlock)]
async fn queue_up(dlock: Dlock, number: u32, order: Arc<Mutex<Vec<u32>>>) -> Result<()> {
    order.lock().unwrap().push(number);
    Ok(())
}

async fn fair(fixture: Fixture) {
    let order = Arc::new(Mutex::new(Vec::new()));
    let busy = fixture.busy("fair").await;
    let mut tasks = Vec::new();
    for number in 0..6 {
        let dlock = if number % 2 == 0 { &fixture.other } else { &fixture.dlock };
        tasks.push(tokio::spawn(queue_up(dlock.clone(), number, order.clone())));
        let waiters = number as usize + 1;
        until(async || fixture.other.inspect("fair").await.unwrap().waiters.len() == waiters).await;
    }
    drop(busy);
    for task in tasks {
        task.await.unwrap().unwrap();
    }
    assert_eq!(*order.lock().unwrap(), [0, 1, 2, 3, 4, 5]);
}

// -- guard, when, handlers -----------------------------------------------------

#[distributed_lock(
    key = "when", when = amount > 10, wait = "0s", client = dlock, guard = lock,
)]
async fn big(dlock: &Dlock, amount: u32) -> Result<bool> {
    let lock: Option<&Guard> = lock;
    Ok(lock.is_some())
}

#[distributed_lock(key = "when", when = amount > 10, wait = "0s", client = dlock, on_lost = "finish")]
async fn big_to_the_end(dlock: &Dlock, amount: u32) -> Result<u32> {
    Ok(amount)
}

async fn when(fixture: Fixture) {
    assert!(big(&fixture.dlock, 11).await.unwrap());
    let busy = fixture.busy("when").await;
    assert!(!big(&fixture.dlock, 10).await.unwrap());
    assert_eq!(big(&fixture.dlock, 11).await.unwrap_err().kind(), ErrorKind::TimedOut);
    assert_eq!(big_to_the_end(&fixture.dlock, 10).await.unwrap(), 10);
    big_to_the_end(&fixture.dlock, 11).await.unwrap_err();
    drop(busy);
}

fn words(error: Error) -> String {
    format!("{:?}", error.kind())
}

#[distributed_lock(
    key = "handlers", wait = "0s", client = dlock,
    on_busy = |busy| format!("{name} is busy: {:?}", busy.kind()), on_error = words,
)]
async fn both_handlers(dlock: &Dlock, name: String) -> String {
    std::future::ready(name).await
}

#[distributed_lock(key = "handlers", wait = "0s", client = dlock, on_error = |error| error.kind().is_busy())]
async fn one_handler(dlock: &Dlock) -> bool {
    std::future::pending().await
}

#[distributed_lock(key = "handlers", wait = "0s", client = dlock, on_error = |error| {
    assert!(error.kind().is_busy(), "{error}");
})]
async fn nothing_to_return(dlock: &Dlock, ran: &AtomicU32) {
    ran.fetch_add(1, Ordering::SeqCst);
}

async fn on_busy_and_on_error(mut fixture: Fixture) {
    let dlock = fixture.dlock.clone();
    let ran = AtomicU32::new(0);
    assert_eq!(both_handlers(&dlock, "x".into()).await, "x");
    nothing_to_return(&dlock, &ran).await;
    assert_eq!(ran.load(Ordering::SeqCst), 1);

    let busy = fixture.busy("handlers").await;
    assert_eq!(both_handlers(&dlock, "x".into()).await, "x is busy: TimedOut");
    assert!(one_handler(&dlock).await, "busy is an error where there is no on_busy");
    nothing_to_return(&dlock, &ran).await;
    assert_eq!(ran.load(Ordering::SeqCst), 1, "the body did not run");
    drop(busy);
    fixture.assert_free("handlers").await;

    let running = tokio::spawn({
        let dlock = dlock.clone();
        async move { one_handler(&dlock).await }
    });
    until(async || !dlock.local_state().held.is_empty()).await;
    fixture.break_lock("handlers").await;
    assert!(!running.await.unwrap(), "lost is told to on_error");

    fixture.end_backend();
    let said = both_handlers(&dlock, "x".into()).await;
    assert!(said == "Unavailable" || said == "Unknown", "{said}");
}

// -- policy, name -------------------------------------------------

#[distributed_lock(key = "p", ttl = "7s", wait = "20s", policy = "payments", client = dlock, guard = lock)]
async fn tuned(dlock: &Dlock) -> Result<Duration> {
    Ok(lock.valid_for())
}

async fn policy(fixture: Fixture) {
    assert!(tuned(&fixture.dlock).await.unwrap() > Duration::from_secs(5), "as the code says");
    // The operators' say, without a new build.
    let operated = fixture.client("policy.payments.ttl=2s&policy.payments.wait=0s", |it| it);
    assert!(tuned(&operated).await.unwrap() <= Duration::from_secs(2));
    let busy = fixture.busy("p").await;
    assert_eq!(tuned(&operated).await.unwrap_err().kind(), ErrorKind::TimedOut);
    drop(busy);
}

#[distributed_lock(key = "user:{email}", client = dlock)]
async fn unnamed(dlock: &Dlock, email: &str) -> Result<()> {
    Ok(())
}

#[distributed_lock(key = "user:{email}", name = "sign-up", client = dlock)]
async fn named(dlock: &Dlock, email: &str) -> Result<()> {
    Ok(())
}

#[distributed_lock(keys = ["user:{email}", "mail:{email}"], name = "both", client = dlock)]
async fn both_named(dlock: &Dlock, email: &str) -> Result<()> {
    Ok(())
}

#[tokio::test]
async fn name() {
    let seen: Arc<Mutex<Vec<String>>> = Arc::default();
    let client = Fixture::memory().client("", |builder| {
        let seen = seen.clone();
        builder.on_event(move |event| {
            if let Event::Acquired { key, .. } = event {
                seen.lock().unwrap().push(key.label().to_owned());
            }
        })
    });
    unnamed(&client, "a@example.org").await.unwrap();
    named(&client, "a@example.org").await.unwrap();
    both_named(&client, "a@example.org").await.unwrap();
    assert_eq!(*seen.lock().unwrap(), ["user:{email}", "sign-up", "both", "both"]);
}
