//! Rows of the list of faults about holders that are paused, killed, blocked or
//! replaced, on a real Redis. Most tests start processes of their own.

use std::time::{Duration, Instant};

use dlock::{Access, Fence, Guard, ReleaseOutcome, State, Token};
use dlock_testkit::conformance::eventually;
use dlock_testkit::holder::{HolderProcess, number, rolling_restart};
use dlock_testkit::interval::HeldInterval;
use dlock_testkit::record_checker::RecordChecker;
use dlock_testkit::redis::{RedisServer, TTL};

fn holder(server: &RedisServer) -> HolderProcess {
    HolderProcess::start(&server.url())
}

fn add_own_records(checker: &mut RecordChecker, interval: Option<HeldInterval>, guard: &Guard) {
    let interval = interval.expect("it was held at the start");
    interval.end(guard, "test").into_iter().for_each(|record| checker.add(record));
}

/// The holder is paused for three times its ttl.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn row_01_a_paused_holder_is_lost_and_its_successor_untouched() {
    let Some(server) = RedisServer::start() else { return };
    let mut paused = holder(&server);
    paused.send(&format!("lock a {}", TTL.as_millis()));
    let old = number(&paused.wait_for("granted"), "token");
    paused.process.pause();
    let began = Instant::now();
    let here = server.client();
    let guard = here.mutex("a").lock().await.expect("free by ttl");
    let interval = HeldInterval::begin(&guard);
    tokio::time::sleep((TTL * 3).saturating_sub(began.elapsed())).await;
    paused.process.resume();
    let lost = paused.wait_for("lost");
    assert!(lost["reason"].as_str().is_some_and(|why| why.contains("deadline")), "{lost}");
    paused.send("release a");
    assert_eq!(paused.wait_for("released")["outcome"], "AlreadyLost");
    assert_eq!(guard.state(), State::Held);
    let mut checker = RecordChecker::default();
    add_own_records(&mut checker, interval, &guard);
    let mut fence = Fence::default();
    assert!(fence.pass(Access::Exclusive, guard.token()));
    assert!(!fence.pass(Access::Exclusive, Token::new(old).expect("a token")), "stale");
    assert_eq!(guard.release().await.expect("an answer"), ReleaseOutcome::Released);
    paused.add_records_to(&mut checker);
    checker.assert_clean(2);
    drop((here, paused));
    server.assert_nothing_left().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn row_11_a_killed_holder_frees_its_lock_by_ttl() {
    let Some(server) = RedisServer::start() else { return };
    let mut doomed = holder(&server);
    doomed.send(&format!("lock a {}", TTL.as_millis()));
    let old = number(&doomed.wait_for("granted"), "token");
    let here = server.client();
    assert!(here.mutex("a").try_lock().await.expect("an answer").is_none());
    doomed.process.kill();
    let began = Instant::now();
    let guard = here.mutex("a").lock().await.expect("the lock");
    assert!(began.elapsed() < TTL + Duration::from_secs(3), "{:?}", began.elapsed());
    assert!(guard.token().get() > old);
    drop((guard, here));
    server.assert_nothing_left().await;
}

/// The runtime of the user is dropped before the guard, or the body panics.
#[test]
fn row_11_a_dropped_runtime_or_a_panic_frees_the_lock() {
    let Some(server) = RedisServer::start() else { return };
    let runtime = || tokio::runtime::Runtime::new().expect("a runtime");
    let (first, second) = (runtime(), runtime());
    let (here, there) = (server.client(), server.client());
    let guard = first.block_on(here.mutex("a").lock()).expect("the lock");
    let waiting = first.spawn({
        let lock = here.mutex("b");
        async move { lock.lock().await?.run(std::future::pending::<()>()).await }
    });
    second.block_on(eventually("b is held", async || {
        !there.inspect("b").await.expect("an inspection").holders.is_empty()
    }));
    first.shutdown_background(); // with a body at work in it
    drop(waiting);
    let began = Instant::now();
    drop(guard);
    drop(here);
    assert!(began.elapsed() < Duration::from_millis(200), "drop blocks: {:?}", began.elapsed());
    second.block_on(async {
        for key in ["a", "b"] {
            let lock = there.mutex(key).wait(Duration::from_secs(5));
            drop(lock.lock().await.expect("it was given back"));
        }
        let lock = there.mutex("c").ttl(Duration::from_secs(60));
        let panicking = tokio::spawn(async move {
            let guard = lock.lock().await.expect("the lock");
            let body: dlock::Result<()> =
                guard.run(async { std::panic::resume_unwind(Box::new("on purpose")) }).await;
            body
        });
        assert!(panicking.await.expect_err("it panicked").is_panic());
        drop(there.mutex("c").lock().await.expect("a panic lets go"));
        drop(there);
        server.assert_nothing_left().await;
    });
}

/// Every worker of the user's runtime is blocked for twice the ttl.
#[test]
fn row_12_a_blocked_executor_loses_no_lock() {
    let Some(server) = RedisServer::start() else { return };
    let blocked = tokio::runtime::Builder::new_multi_thread()
        .worker_threads(2)
        .enable_all()
        .build()
        .expect("a runtime");
    let here = server.client();
    let guard = blocked.block_on(here.mutex("a").lock()).expect("the lock");
    let sleeps: Vec<_> =
        (0..2).map(|_| blocked.spawn(async { std::thread::sleep(TTL * 2) })).collect();
    let other = tokio::runtime::Runtime::new().expect("a runtime");
    other.block_on(async {
        let there = server.client();
        let began = Instant::now();
        while began.elapsed() < TTL * 2 {
            let taken = there.mutex("a").try_lock().await.expect("an answer");
            assert!(taken.is_none(), "lost after {:?}", began.elapsed());
            tokio::time::sleep(Duration::from_millis(50)).await;
        }
    });
    assert_eq!(guard.state(), State::Held);
    blocked.block_on(async {
        for sleep in sleeps {
            sleep.await.expect("it slept");
        }
        assert_eq!(guard.release().await.expect("an answer"), ReleaseOutcome::Released);
    });
    drop(here);
    other.block_on(server.assert_nothing_left());
}

/// Two processes lock {a, b} and {b, a}, again and again.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn row_20_opposite_orders_never_deadlock() {
    let Some(server) = RedisServer::start() else { return };
    let (mut one, mut two) = (holder(&server), holder(&server));
    one.send("cycle 10000 300 a b");
    two.send("cycle 10000 300 b a");
    let mut checker = RecordChecker::default();
    for holder in [&mut one, &mut two] {
        holder.wait_for("done");
        holder.add_records_to(&mut checker);
    }
    checker.assert_clean(1_200);
    drop((one, two));
    server.assert_nothing_left().await;
}

/// A process with 500 places in the queue is killed while another waits behind.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn row_23_the_queue_of_a_killed_process_goes_on_at_once() {
    let Some(server) = RedisServer::start() else { return };
    let here = server.client();
    let ttl = Duration::from_secs(2);
    let guard = here.mutex("a").ttl(ttl).lock().await.expect("the lock");
    let mut doomed = holder(&server);
    doomed.send(&format!("fair a {} 500", ttl.as_millis()));
    eventually("500 wait", async || {
        here.inspect("a").await.expect("an inspection").waiters.len() == 500
    })
    .await;
    let there = server.client();
    let behind = tokio::spawn({
        let lock = there.mutex("a").ttl(ttl);
        async move { lock.lock().await }
    });
    eventually("one more waits", async || {
        here.inspect("a").await.expect("an inspection").waiters.len() == 501
    })
    .await;
    doomed.process.kill();
    let began = Instant::now();
    drop(guard);
    let next = behind.await.expect("the task").expect("the lock");
    assert!(began.elapsed() < ttl + Duration::from_secs(3), "{:?}", began.elapsed());
    drop((next, here, there));
    server.assert_nothing_left().await;
}

/// Readers of one process keep coming; a writer elsewhere gets its turn.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn row_24_steady_readers_let_a_writer_in() {
    let Some(server) = RedisServer::start() else { return };
    let (readers, writer) = (server.client(), server.client());
    let until = Instant::now() + Duration::from_secs(6);
    let tasks: Vec<_> = (0..8)
        .map(|n| {
            let lock = readers.rwlock("a").read();
            tokio::spawn(async move {
                tokio::time::sleep(Duration::from_millis(5 * n)).await;
                let mut times = 0;
                while Instant::now() < until {
                    let guard = lock.lock().await.expect("a reader");
                    tokio::time::sleep(Duration::from_millis(40)).await;
                    drop(guard);
                    times += 1;
                }
                times
            })
        })
        .collect();
    let mut turns = 0;
    while Instant::now() + Duration::from_secs(3) < until {
        tokio::time::sleep(Duration::from_millis(200)).await;
        let began = Instant::now();
        drop(writer.rwlock("a").write().lock().await.expect("a writer"));
        assert!(began.elapsed() < Duration::from_secs(3), "{:?}", began.elapsed());
        turns += 1;
    }
    assert!(turns > 1, "the writer had {turns} turns");
    for task in tasks {
        assert!(task.await.expect("the reader") > 1, "readers have their turns too");
    }
    drop((readers, writer));
    server.assert_nothing_left().await;
}

/// Processes that work under one lock are shut down and replaced, one by one.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn row_25_a_rolling_restart_never_has_two_holders() {
    let Some(server) = RedisServer::start() else { return };
    let start = || holder(&server);
    rolling_restart(start, TTL, Duration::from_secs(10)).await.assert_clean(50);
    server.assert_nothing_left().await;
}

/// A test of the checker: it finds the overlaps of processes that lock in different
/// databases and so do not exclude each other.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn control_processes_without_a_common_lock_are_found_out() {
    let Some(server) = RedisServer::start() else { return };
    let mut checker = RecordChecker::default();
    let mut fleet = [0, 1].map(|database| {
        let mut process = HolderProcess::start(&format!("{}/{database}", server.url()));
        process.send("serve a 900 2");
        process
    });
    tokio::time::sleep(Duration::from_millis(500)).await;
    for process in &mut fleet {
        process.send("shutdown 500");
        process.wait_for("shutdown");
        process.add_records_to(&mut checker);
    }
    checker.sweep(u64::MAX);
    assert!(checker.violations.iter().any(|what| what.contains("held twice")), "found nothing");
}
