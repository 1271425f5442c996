//! The way of a call to Redis and back: callers write to the socket, and answers are read
//! in the runtime of the first caller, which may be blocked, end, or have no IO.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use dlock::{Dlock, State};
use dlock_testkit::proxy::{Proxy, Way};
use dlock_testkit::redis::{RedisServer, client};
use tokio::runtime::{Builder, Runtime};

const TTL: Duration = Duration::from_secs(1);

fn runtime() -> Runtime {
    Builder::new_current_thread().enable_all().build().expect("a runtime")
}

fn short(url: &str) -> Dlock {
    client(url).ttl(TTL).connect_lazy().expect("a client")
}

/// The median time of some cycles.
async fn cycle(client: &Dlock) -> Duration {
    let lock = client.mutex("other").wait(Duration::from_secs(5));
    let mut times = Vec::new();
    for _ in 0..15 {
        let began = Instant::now();
        let _ = lock.lock().await.expect("the lock").release().await.expect("an answer");
        times.push(began.elapsed());
    }
    times.sort_unstable();
    times[7]
}

/// Rule 8: the runtime whose task reads the answers is blocked. Its locks are renewed, and
/// others who use the same client get their answers.
#[test]
fn a_blocked_runtime_that_reads_delays_nobody_for_long() {
    let Some(server) = RedisServer::start() else { return };
    let client = short(&server.url());
    let (one, two) = (runtime(), runtime());
    let guard = one.block_on(client.mutex("a").lock()).expect("the lock");
    // From here on nothing runs in the first runtime.
    let median = two.block_on(cycle(&client));
    assert!(median < Duration::from_millis(100), "{median:?}: answers are hardly read");
    std::thread::sleep(TTL * 2);
    assert_eq!(guard.state(), State::Held);
    let _ = one.block_on(guard.release()).expect("an answer");
    drop(one);
    two.block_on(cycle(&client));
}

/// The runtime that reads ends with answers on their way.
#[test]
fn a_runtime_that_reads_may_end() {
    let Some(server) = RedisServer::start() else { return };
    let client = short(&server.url());
    let two = runtime();
    for round in 0..20 {
        let one = runtime();
        one.block_on(cycle(&client));
        let held = client.mutex(format!("held-{round}"));
        let started = Arc::new(AtomicBool::new(false));
        let task = {
            let started = started.clone();
            async move {
                started.store(true, Ordering::Release);
                let _guard = held.lock().await;
                std::future::pending::<()>().await;
            }
        };
        one.spawn(task);
        while !started.load(Ordering::Acquire) {
            one.block_on(tokio::task::yield_now());
        }
        drop(one); // the lock may be granted, or on its way
        two.block_on(async {
            cycle(&client).await;
            let lock = client.mutex(format!("held-{round}")).wait(Duration::from_secs(5));
            let guard = lock.lock().await.expect("it was given back");
            let _ = guard.release().await.expect("an answer");
        });
    }
    drop(client);
    two.block_on(server.assert_nothing_left());
}

/// Thousands of requests meet a server that takes none for a while.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_stalled_way_loses_nothing() {
    let Some(server) = RedisServer::start() else { return };
    let proxy = Proxy::start(server.port()).await;
    let client = client(&proxy.url()).connect_lazy().expect("a client");
    drop(client.mutex("first").lock().await.expect("the lock"));
    proxy.stall(&[Way::ToServer]);
    let wait = Duration::from_secs(20);
    let tasks: Vec<_> = (0..5_000)
        .map(|n| {
            let lock = client.mutex(format!("{n}-{}", "k".repeat(400))).wait(wait);
            tokio::spawn(async move { lock.lock().await?.release().await })
        })
        .collect();
    tokio::time::sleep(Duration::from_millis(300)).await;
    proxy.heal();
    for task in tasks {
        let _ = task.await.expect("no panic").expect("the lock, and its release");
    }
    drop(client);
    server.assert_nothing_left().await;
}

/// A hot key: 500 tasks of one process hand the lock over among themselves, and its lease
/// is extended meanwhile. Another process that wants it once gets its turn as soon as
/// before: after 64 hand-overs or 5 ms.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_hot_lock_is_shared_with_other_processes() {
    let Some(server) = RedisServer::start() else { return };
    let (many, one) = (server.client(), server.client());
    let done = Arc::new(AtomicBool::new(false));
    let tasks: Vec<_> = (0..500)
        .map(|_| {
            let (lock, done) = (many.mutex("hot").wait(Duration::from_secs(60)), done.clone());
            tokio::spawn(async move {
                let mut cycles = 0_u64;
                while !done.load(Ordering::Acquire) {
                    drop(lock.lock().await.expect("the lock"));
                    cycles += 1;
                }
                cycles
            })
        })
        .collect();
    let lock = one.mutex("hot").wait(Duration::from_secs(60));
    let mut waits = Vec::new();
    for _ in 0..40 {
        tokio::time::sleep(Duration::from_millis(20)).await; // the hot process is alone
        let began = Instant::now();
        let _ = lock.lock().await.expect("the lock").release().await.expect("an answer");
        waits.push(began.elapsed());
    }
    done.store(true, Ordering::Release);
    let mut cycles = 0;
    for task in tasks {
        cycles += task.await.expect("no panic");
    }
    waits.sort_unstable();
    assert!(cycles > 5_000, "{cycles} cycles: it was not hot");
    assert!(waits[20] < Duration::from_millis(25), "half of the waits took {:?}", waits[20]);
    drop((many, one, lock));
    server.assert_nothing_left().await;
}
