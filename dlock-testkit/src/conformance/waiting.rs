//! Trials of waiting: wake-ups, order, time-outs and limits.

use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use dlock::{ErrorKind, Event, Guard, Lock};
use tokio::task::JoinHandle;
use tokio::time::Instant;

use super::{SOON, Suite, all, eventually, is_free, waiters};

/// The backend wakes the waiter, which otherwise asks again only after about a second.
pub(super) async fn a_waiter_is_woken(suite: &Suite) {
    let long = suite.nearest(Duration::from_secs(30));
    let one = suite.client_of(|builder| builder.ttl(long));
    let two = suite.client_of(|builder| builder.ttl(long));
    let key = suite.key("woken");
    let mut slowest = Duration::ZERO;
    for _ in 0..5 {
        let guard = one.mutex(key.as_str()).lock().await.expect("the lock");
        let waiting = tokio::spawn({
            let lock = two.mutex(key.as_str());
            async move {
                let guard = lock.lock().await.expect("the lock");
                (Instant::now(), guard.release().await)
            }
        });
        eventually("it waits", async || waiters(&two, &key).await == 1).await;
        let released = Instant::now();
        drop(guard);
        let (woken, outcome) = waiting.await.expect("the waiter");
        let _ = outcome.expect("an answer");
        slowest = slowest.max(woken - released);
    }
    assert!(slowest < SOON, "woken after {slowest:?}");
}

pub(super) async fn a_timeout_names_the_holder(suite: &Suite) {
    let one = suite.client_of(|builder| builder.client_name("the-holder"));
    let (two, key) = (suite.client(), suite.key("timeout"));
    let guard = one.mutex(key.as_str()).tag("job", "import").lock().await.expect("the lock");
    assert!(two.health().await.is_ok(), "it is connected");
    for client in [&two, &one] {
        let began = Instant::now();
        let lock = client.mutex(key.as_str()).wait(Duration::from_millis(250));
        let error = lock.lock().await.expect_err("busy");
        assert_eq!(error.kind(), ErrorKind::TimedOut);
        let text = error.to_string();
        assert!(text.contains("the-holder") && text.contains("job=import"), "{text}");
        let waited = began.elapsed();
        assert!(waited >= Duration::from_millis(250) && waited < SOON * 2, "{waited:?}");
    }
    drop(guard);
    eventually("rest", async || is_free(&two, &key).await).await;
}

/// The lock is granted in the order of the backend's queue, whichever client waits.
pub(super) async fn fair_is_first_come_first_served(suite: &Suite) {
    let clients = [suite.client(), suite.client()];
    let key = suite.key("fair");
    let guard = clients[0].mutex(key.as_str()).lock().await.expect("the lock");
    let order = Arc::new(Mutex::new(Vec::new()));
    let mut tasks = Vec::new();
    for n in 0..8 {
        let lock = clients[n % 2].mutex(key.as_str()).fair();
        let order = order.clone();
        tasks.push(tokio::spawn(async move {
            let guard = lock.lock().await.expect("the lock");
            order.lock().expect("the order").push(n);
            drop(guard);
        }));
        eventually("it waits", async || waiters(&clients[0], &key).await == n + 1).await;
    }
    drop(guard);
    all(tasks).await;
    assert_eq!(*order.lock().expect("the order"), (0..8).collect::<Vec<_>>());
}

/// Acquires and releases the lock again and again.
fn steady(lock: Lock<Guard>, starts_after: Duration, holds: Duration) -> JoinHandle<()> {
    tokio::spawn(async move {
        tokio::time::sleep(starts_after).await;
        loop {
            let guard = lock.lock().await.expect("the lock");
            tokio::time::sleep(holds).await;
            drop(guard);
        }
    })
}

/// Checks that each of these locks is granted while the steady tasks run.
async fn have_their_turns(steady: Vec<JoinHandle<()>>, locks: [Lock<Guard>; 2]) {
    tokio::time::sleep(Duration::from_millis(50)).await;
    for lock in locks {
        let began = Instant::now();
        drop(lock.lock().await.expect("its turn"));
        let waited = began.elapsed();
        assert!(waited < Duration::from_secs(2), "{lock:?} waited {waited:?}");
    }
    steady.iter().for_each(JoinHandle::abort);
}

/// Steady readers in one process, a writer in another.
pub(super) async fn writers_are_not_starved(suite: &Suite) {
    let (one, two, key) = (suite.client(), suite.client(), suite.key("starve-w"));
    let reader = |n: u64| {
        let lock = one.rwlock(key.as_str()).read();
        steady(lock, Duration::from_millis(3 * n), Duration::from_millis(10))
    };
    let writers = [&two, &one].map(|client| client.rwlock(key.as_str()).write());
    have_their_turns((0..4).map(reader).collect(), writers).await;
}

/// Steady writers in one process, a reader in another.
pub(super) async fn readers_are_not_starved(suite: &Suite) {
    let (one, two, key) = (suite.client(), suite.client(), suite.key("starve-r"));
    let writer = |_| steady(one.mutex(key.as_str()), Duration::ZERO, Duration::from_millis(2));
    let readers = [&two, &one].map(|client| client.rwlock(key.as_str()).read());
    have_their_turns((0..4).map(writer).collect(), readers).await;
}

pub(super) async fn many_permits_are_not_starved(suite: &Suite) {
    let (one, two, key) = (suite.client(), suite.client(), suite.key("starve-p"));
    let held = one.semaphore(key.as_str(), 4).permits(2).lock().await.expect("permits");
    let many = two.semaphore(key.as_str(), 4).permits(4);
    let many = tokio::spawn(async move { many.lock().await.map(drop) });
    eventually("it waits", async || waiters(&one, &key).await == 1).await;
    let few = one.semaphore(key.as_str(), 4).permits(1);
    assert!(few.try_lock().await.expect("an answer").is_none(), "nobody overtakes a waiter");
    drop(held);
    many.await.expect("the task").expect("all permits");
}

/// Tasks of one process hand the lock over without asking the backend each time.
pub(super) async fn hand_over_stays_inside_the_process(suite: &Suite) {
    let handed_over = Arc::new(AtomicU64::new(0));
    let client = suite.client_of(|builder| {
        let handed_over = handed_over.clone();
        builder.handovers(64, Duration::from_secs(60)).on_event(move |event| {
            if let Event::Acquired { handed_over: true, .. } = event {
                handed_over.fetch_add(1, Ordering::Relaxed);
            }
        })
    });
    let key = suite.key("local");
    let guard = client.mutex(key.as_str()).lock().await.expect("the lock");
    let mut tasks = Vec::new();
    for _ in 0..20 {
        let lock = client.mutex(key.as_str());
        tasks.push(tokio::spawn(async move { drop(lock.lock().await.expect("the lock")) }));
    }
    eventually("all wait", async || client.local_state().waiting.len() == 20).await;
    drop(guard);
    all(tasks).await;
    let count = handed_over.load(Ordering::Relaxed);
    assert!(count >= 18, "{count} of 20 were handed over");
}

pub(super) async fn waiters_are_bounded(suite: &Suite) {
    let client = suite.client_of(|builder| builder.max_waiters(3));
    let key = suite.key("bounded");
    let guard = client.mutex(key.as_str()).lock().await.expect("the lock");
    for fair in [false, true] {
        if fair && !client.capabilities().fifo {
            continue;
        }
        let lock = client.mutex(key.as_str());
        let lock = if fair { lock.fair() } else { lock };
        let tasks: Vec<_> = (0..3)
            .map(|_| {
                let lock = lock.clone();
                tokio::spawn(async move { lock.lock().await.map(drop) })
            })
            .collect();
        eventually("three wait", async || client.local_state().waiting.len() == 3).await;
        let error = lock.lock().await.expect_err("too many");
        assert_eq!(error.kind(), ErrorKind::Overloaded);
        assert!(error.to_string().contains("max_waiters"), "{error}");
        tasks.iter().for_each(JoinHandle::abort);
        eventually("they are gone", async || client.local_state().waiting.is_empty()).await;
    }
    drop(guard);
}

pub(super) async fn a_zero_wait_tries_once(suite: &Suite) {
    let (one, two, key) = (suite.client(), suite.client(), suite.key("zero"));
    let lock = two.mutex(key.as_str()).wait(Duration::ZERO);
    drop(lock.lock().await.expect("a free lock"));
    let guard = one.mutex(key.as_str()).lock().await.expect("the lock");
    assert_eq!(lock.lock().await.expect_err("busy").kind(), ErrorKind::TimedOut);
    drop(guard);
}
