//! Trials of cancellation: dropped futures and guards.

use std::future::Future;
use std::pin::Pin;
use std::task::{Context, Poll, Waker};
use std::time::Duration;

use dlock::{Dlock, Result};

use super::{Suite, eventually, is_free};

type Acquiring = Pin<Box<dyn Future<Output = Result<()>> + Send>>;

/// A future for each public way to acquire; it drops what it got when it is done.
fn acquires(client: &Dlock, key: &str) -> Vec<(&'static str, Acquiring)> {
    let capabilities = client.capabilities();
    let mutex = client.mutex(key);
    let (fair, attempt) = (mutex.clone().fair(), mutex.clone());
    let both = client.all_of([key, &format!("{key}:second")]);
    let try_both = both.clone();
    let nested = mutex.clone();
    let mut acquires: Vec<(&'static str, Acquiring)> = vec![
        ("lock", Box::pin(async move { mutex.lock().await.map(drop) })),
        ("try_lock", Box::pin(async move { attempt.try_lock().await.map(drop) })),
        ("all_of", Box::pin(async move { both.lock().await.map(drop) })),
        ("all_of try_lock", Box::pin(async move { try_both.try_lock().await.map(drop) })),
        (
            "nested, released",
            Box::pin(async move {
                let guard = nested.lock().await?;
                guard.run(async { nested.lock().await.map(drop) }).await??;
                guard.release().await.map(drop)
            }),
        ),
    ];
    if capabilities.fifo {
        acquires.push(("fair", Box::pin(async move { fair.lock().await.map(drop) })));
    }
    if capabilities.shared {
        let lock = client.rwlock(key);
        let (read, write) = (lock.read(), lock.write());
        acquires.push(("read", Box::pin(async move { read.lock().await.map(drop) })));
        acquires.push(("write", Box::pin(async move { write.lock().await.map(drop) })));
    }
    if capabilities.permits {
        let permits = client.semaphore(key, 2).permits(2);
        acquires.push(("permits", Box::pin(async move { permits.lock().await.map(drop) })));
    }
    acquires
}

/// Polls a future up to this many times; whether it is done.
async fn polled(future: &mut Acquiring, times: usize) -> bool {
    for _ in 0..times {
        if let Poll::Ready(outcome) = future.as_mut().poll(&mut Context::from_waker(Waker::noop()))
        {
            outcome.expect("it goes well");
            return true;
        }
        tokio::time::sleep(Duration::from_millis(2)).await;
    }
    false
}

/// Polls each acquire n times and drops it, for every n, while the lock is free,
/// while it is held, and while it is released in between.
pub(super) async fn dropped_at_any_poll(suite: &Suite) {
    let (one, other) = (suite.client(), suite.client());
    let kinds = acquires(&one, "unused").len();
    for kind in 0..kinds {
        for busy in [false, true] {
            for polls in 0..6 {
                let key = suite.key("cancel");
                let holder = match busy {
                    true => Some(other.mutex(key.as_str()).lock().await.expect("the lock")),
                    false => None,
                };
                let permits = match busy && one.capabilities().permits {
                    true => Some(other.semaphore(key.as_str(), 2).permits(1).lock().await),
                    false => None,
                };
                let (name, mut acquiring) = acquires(&one, &key).swap_remove(kind);
                let done = polled(&mut acquiring, polls).await;
                drop((holder, permits));
                if polls % 2 == 1 && !done {
                    polled(&mut acquiring, 1).await; // granted just before it is dropped
                }
                drop(acquiring);
                let second = format!("{key}:second");
                eventually(name, async || {
                    is_free(&other, &key).await && is_free(&other, &second).await
                })
                .await;
            }
        }
    }
    let state = one.local_state();
    assert!(state.held.is_empty() && state.waiting.is_empty(), "{state:?}");
}

pub(super) async fn dropped_guards_release(suite: &Suite) {
    let (one, two, key) = (suite.client(), suite.client(), suite.key("dropped"));
    let guard = one.mutex(key.as_str()).lock().await.expect("the lock");
    drop(one); // the guard alone keeps the client alive
    tokio::time::sleep(suite.ttl() * 2).await;
    assert!(two.mutex(key.as_str()).try_lock().await.expect("an answer").is_none());
    drop(guard);
    eventually("free", async || is_free(&two, &key).await).await;
}

pub(super) async fn a_panic_releases(suite: &Suite) {
    let (one, two, key) = (suite.client(), suite.client(), suite.key("panic"));
    let lock = one.mutex(key.as_str());
    let task = tokio::spawn(async move {
        let guard = lock.lock().await.expect("the lock");
        let body: Result<()> =
            guard.run(async { std::panic::resume_unwind(Box::new("on purpose")) }).await;
        body
    });
    assert!(task.await.expect_err("it panicked").is_panic());
    eventually("free", async || is_free(&two, &key).await).await;
}
