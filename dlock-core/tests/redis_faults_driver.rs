//! Faults around the driver of a client on a real Redis: a server that is demoted or
//! stopped, connections that die silently, foreign code that blocks or panics, clients
//! that end.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use dlock::backend::{Claim, Moment, Owner};
use dlock::{Dlock, ErrorKind, Event, Holder, Key, Mode, State};
use dlock_testkit::SingleCalls as _;
use dlock_testkit::conformance::eventually;
use dlock_testkit::proxy::Proxy;
use dlock_testkit::redis::{RedisServer, client};

fn number(info: &str, field: &str) -> u64 {
    let line = info.lines().find_map(|line| line.strip_prefix(field)?.strip_prefix(':'));
    line.and_then(|value| value.trim().parse().ok()).expect("a number")
}

/// The commands that the server ran inside scripts since its counters were reset.
fn commands(server: &RedisServer) -> u64 {
    let calls = |line: &str| {
        let (name, rest) = line.split_once(":calls=")?;
        let inside = !["evalsha", "eval", "config", "info", "ping", "client"]
            .iter()
            .any(|outside| name.contains(outside));
        inside.then(|| rest.split(',').next()?.parse::<u64>().ok()).flatten()
    };
    server.cli(&["INFO", "commandstats"]).lines().filter_map(calls).sum()
}

/// A demoted primary keeps its connections and answers READONLY to each call of a batch.
/// The client leaves it and connects anew, health tells why, and the locks work again as
/// soon as there is a primary.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_demoted_primary_is_left() {
    let Some(server) = RedisServer::start() else { return };
    let client = server.client();
    drop(client.mutex("a").lock().await.expect("the lock"));
    let before = number(&server.cli(&["INFO", "stats"]), "total_connections_received");
    server.cli(&["REPLICAOF", "127.0.0.1", "1"]);
    let error = client.mutex("b").try_lock().await.expect_err("no primary");
    assert_eq!(error.kind(), ErrorKind::Unavailable, "{error}");
    assert!(error.to_string().contains("read-only replica"), "{error}");
    eventually("health says that it is a replica", async || {
        let problem = client.health().await.problem;
        problem.is_some_and(|problem| problem.to_string().contains("replica"))
    })
    .await;
    let stats = server.cli(&["INFO", "stats"]);
    // One of them asks for these figures.
    assert!(number(&stats, "total_connections_received") > before + 1, "it connected anew");
    server.cli(&["REPLICAOF", "NO", "ONE"]);
    let began = Instant::now();
    let lock = client.mutex("b").wait(Duration::from_secs(10));
    let guard = lock.lock().await.expect("the lock, once there is a primary");
    assert!(began.elapsed() < Duration::from_secs(3), "{:?}", began.elapsed());
    drop((guard, lock, client));
    server.assert_nothing_left().await;
}

/// A subscription that died silently is replaced within some seconds while somebody
/// waits, so that waiters hear of their turn at once again.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_half_open_notices_connection_is_replaced() {
    let Some(server) = RedisServer::start() else { return };
    let proxy = Proxy::start(server.port()).await;
    let waiter = client(&proxy.url()).connect().await.expect("a client");
    let holder = server.client();
    drop(waiter.mutex("other").lock().await.expect("the lock"));
    eventually("both connections are there", async || proxy.open() == 2).await;
    proxy.freeze_connection(1);
    // Somebody waits all the time, and the subscription is replaced.
    let guard = holder.mutex("a").lock().await.expect("the lock");
    let waiting = tokio::spawn({
        let lock = waiter.mutex("a").wait(Duration::from_secs(30));
        async move { lock.lock().await.map(|guard| (guard, Instant::now())) }
    });
    let began = Instant::now();
    eventually("it is replaced", async || proxy.attempts().len() >= 3).await;
    assert!(began.elapsed() < Duration::from_secs(3), "{:?}", began.elapsed());
    tokio::time::sleep(Duration::from_millis(300)).await; // subscribed by then, or not at all
    let released = Instant::now();
    drop(guard);
    let (guard, granted) = waiting.await.expect("the task").expect("the lock");
    assert!(granted - released < Duration::from_millis(400), "{:?}", granted - released);
    drop((guard, waiter, holder));
    proxy.heal();
    server.assert_nothing_left().await;
}

/// A server that cannot be used is left: the connection on which it was checked is closed
/// while the client lives.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_refused_server_keeps_no_connection() {
    let Some(server) = RedisServer::with(&["--maxmemory-policy", "allkeys-lru"]) else { return };
    let proxy = Proxy::start(server.port()).await;
    let client = client(&proxy.url()).connect_lazy().expect("a client");
    let error = client.mutex("a").try_lock().await.expect_err("it is refused");
    assert_eq!(error.kind(), ErrorKind::Config, "{error}");
    assert!(!proxy.attempts().is_empty());
    eventually("the connection is closed", async || proxy.open() == 0).await;
    drop(client);
    server.assert_nothing_left().await;
}

/// A connection dies silently under a lock with a short ttl: the renewal gives up early
/// enough for another one on a new connection.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_short_lease_outlives_a_silent_connection() {
    let Some(server) = RedisServer::start() else { return };
    let proxy = Proxy::start(server.port()).await;
    let client = client(&proxy.url()).connect().await.expect("a client");
    let ttl = Duration::from_secs(2);
    let guard = client.mutex("a").ttl(ttl).lock().await.expect("the lock");
    proxy.freeze(); // new connections work
    let lost = tokio::time::timeout(3 * ttl, guard.lost()).await;
    assert!(lost.is_err(), "{lost:?}");
    assert_eq!(guard.state(), State::Held);
    drop((guard, client));
    proxy.heal();
    server.assert_nothing_left().await;
}

/// A stopped server: who does not want to wait hears so within about a second, and a
/// release within the call's time-out.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_stopped_server_keeps_nobody_waiting() {
    let Some(server) = RedisServer::start() else { return };
    let client = server.client();
    let guard = client.mutex("held").ttl(Duration::from_secs(10)).lock().await.expect("the lock");
    server.pause();
    let began = Instant::now();
    let error = client.mutex("a").try_lock().await.expect_err("no answer");
    assert!(matches!(error.kind(), ErrorKind::Unavailable | ErrorKind::Unknown), "{error}");
    assert!(began.elapsed() < Duration::from_millis(1_500), "{:?}", began.elapsed());
    let began = Instant::now();
    let lock = client.mutex("b").wait(Duration::ZERO);
    lock.lock().await.expect_err("no answer");
    assert!(began.elapsed() < Duration::from_millis(1_500), "{:?}", began.elapsed());
    let began = Instant::now();
    guard.release().await.expect_err("no answer");
    assert!(began.elapsed() < Duration::from_millis(2_600), "{:?}", began.elapsed());
    server.resume();
    drop((lock, client));
    server.assert_nothing_left().await;
}

/// A hook that blocks does not stop renewals.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_hook_that_blocks_stops_no_renewal() {
    let Some(server) = RedisServer::start() else { return };
    let blocked = Arc::new(AtomicBool::new(false));
    let (entered, (release, waits)) = (blocked.clone(), std::sync::mpsc::channel::<()>());
    let waits = std::sync::Mutex::new(waits);
    let client = client(&server.url())
        .on_event(move |event| {
            if let Event::Renewed { .. } = event {
                entered.store(true, Ordering::Release);
                let _ = waits.lock().expect("the end").recv();
            }
        })
        .connect()
        .await
        .expect("a client");
    let ttl = Duration::from_secs(1);
    let guard = client.mutex("a").ttl(ttl).lock().await.expect("the lock");
    eventually("the hook blocks", async || blocked.load(Ordering::Acquire)).await;
    let lost = tokio::time::timeout(3 * ttl, guard.lost()).await;
    assert!(lost.is_err(), "{lost:?}");
    drop(release);
    drop((guard, client));
    server.assert_nothing_left().await;
}

/// A hook that panics at everything ends neither renewals nor waits.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_hook_that_panics_ends_nothing() {
    let Some(server) = RedisServer::start() else { return };
    let client =
        client(&server.url()).on_event(|_| panic!("on purpose")).connect().await.expect("a client");
    let ttl = Duration::from_secs(1);
    let guard = client.mutex("a").ttl(ttl).lock().await.expect("the lock");
    let other = server.client();
    let error = other.mutex("a").wait(3 * ttl).lock().await.expect_err("it is held");
    assert_eq!(error.kind(), ErrorKind::TimedOut, "{error}");
    assert_eq!(guard.state(), State::Held);
    let error = client.mutex("a").wait(ttl).lock().await.expect_err("it is held");
    assert_eq!(error.kind(), ErrorKind::TimedOut, "{error}");
    drop((guard, client, other));
    server.assert_nothing_left().await;
}

/// The lock of a program that ends right after it dropped guard and client is free.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_last_client_takes_its_releases_along() {
    let Some(server) = RedisServer::start() else { return };
    for round in 0..20 {
        let client = server.client();
        let guard = client.mutex("a").lock().await.expect("the lock");
        drop(guard);
        drop(client);
        assert_eq!(server.cli(&["EXISTS", "dlock:2:{test:a}:l"]), "0", "round {round}");
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn shutdown_ends_when_its_grace_is_over() {
    let Some(server) = RedisServer::start() else { return };
    let client = server.client();
    let guard = client.mutex("a").lock().await.expect("the lock");
    let began = Instant::now();
    assert_eq!(client.shutdown(Duration::from_millis(300)).await, 1, "one guard is held");
    let took = began.elapsed();
    assert!(took >= Duration::from_millis(290) && took < Duration::from_millis(600), "{took:?}");
    assert_eq!(guard.state(), State::Lost);
    drop((guard, client));
    server.assert_nothing_left().await;
}

/// A cycle takes as many commands on the server whether one holds permits or thousands.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_cost_of_a_permit_does_not_grow_with_holders() {
    let Some(server) = RedisServer::start() else { return };
    let client = server.client();
    let semaphore = client.semaphore("a", 100_000);
    let long = Duration::from_secs(600); // nothing is renewed meanwhile
    let cycle = async || {
        server.cli(&["CONFIG", "RESETSTAT"]);
        for _ in 0..10 {
            let permits = semaphore.permits(1).lock().await.expect("a permit");
            let _ = permits.release().await.expect("an answer");
        }
        commands(&server)
    };
    let mut held = Vec::new();
    let mut counts = Vec::new();
    for holders in [2, 2_000] {
        while held.len() < holders {
            held.push(semaphore.permits(1).ttl(long).lock().await.expect("a permit"));
        }
        counts.push(cycle().await);
    }
    assert!(counts[1] <= counts[0] + 2, "{counts:?}");
    for permits in held {
        let _ = permits.release().await.expect("an answer"); // their ttl is long
    }
    drop((semaphore, client));
    server.assert_nothing_left().await;
}

/// Waiters of processes that died are dropped behind one that lives, too.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn dead_waiters_behind_a_live_one_are_dropped() {
    let Some(server) = RedisServer::start() else { return };
    let redis = server.backend();
    let mut owner = 0;
    let mut claim = |ttl: u64| {
        owner += 1;
        Claim {
            key: Key::new("a").expect("a key"),
            owner: Owner::from_bits(owner),
            mode: Mode::Exclusive,
            ttl: Duration::from_millis(ttl),
            queue: true,
            instead_of: None,
            tokens: 1,
            holder: Arc::new(Holder {
                client: 0,
                name: "h".into(),
                host: "h".into(),
                pid: 1,
                tags: vec![],
            }),
            sent: Moment::from_nanos(1),
        }
    };
    let (held, first) = (claim(60_000), claim(3_000));
    redis.acquire(&held).await.expect("an answer");
    redis.acquire(&first).await.expect("an answer");
    for round in 0..30 {
        redis.acquire(&first).await.expect("it lives");
        for _ in 0..20 {
            redis.acquire(&claim(5)).await.expect("an answer");
        }
        tokio::time::sleep(Duration::from_millis(10)).await; // they are dead by then
        let fields: u64 = server.cli(&["HLEN", "dlock:2:{test:a}:l"]).parse().expect("a number");
        assert!(fields < 200, "{fields} fields in round {round}");
    }
}

/// The one who broke a lock is not followed by a holder that the old one does not know of.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_broken_lock_is_not_granted_before_its_holder_knows() {
    let Some(server) = RedisServer::start() else { return };
    let (one, two): (Dlock, Dlock) = (server.client(), server.client());
    let guard = one.mutex("a").lock().await.expect("the lock");
    let waiting = tokio::spawn({
        let lock = two.mutex("a").wait(Duration::from_secs(10));
        async move { lock.lock().await.map(|guard| (guard, Instant::now())) }
    });
    eventually("it waits", async || {
        two.inspect("a").await.expect("an inspection").waiters.len() == 1
    })
    .await;
    let broken = Instant::now();
    assert_eq!(two.break_lock("a").await.expect("broken"), 1);
    guard.lost().await;
    let told = Instant::now();
    let (next, granted) = waiting.await.expect("the task").expect("the lock");
    assert!(told < granted, "the holder is told first");
    assert!(granted - broken >= Duration::from_millis(490), "{:?}", granted - broken);
    assert!(granted - broken < Duration::from_secs(2), "{:?}", granted - broken);
    drop((next, guard, one, two));
    server.assert_nothing_left().await;
}

/// Answers and notices are read in the runtime that used the client first. While it is
/// blocked, tasks of another runtime get their turn soon, and at once when it has ended.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn notices_arrive_without_the_runtime_that_read_them() {
    let Some(server) = RedisServer::start() else { return };
    let holder = server.client();
    let guard = holder.mutex("a").lock().await.expect("the lock");
    let (used, is_used) = tokio::sync::oneshot::channel();
    let (done, is_done) = std::sync::mpsc::channel::<()>();
    let waiter = client(&server.url());
    let reader = std::thread::spawn(move || {
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build();
        runtime.expect("a runtime").block_on(async {
            let waiter = waiter.connect().await.expect("a client");
            // The first calls connect, in the driver's runtime.
            for _ in 0..2 {
                let lock = waiter.mutex("a").wait(Duration::from_millis(300));
                let error = lock.lock().await.expect_err("it is held");
                assert_eq!(error.kind(), ErrorKind::TimedOut, "{error}");
            }
            used.send(waiter).expect("it is waited for");
            let _ = is_done.recv(); // this blocks
        });
    });
    let waiter = is_used.await.expect("a client");
    let turn = async || {
        let guard = holder.mutex("b").lock().await.expect("the lock");
        let lock = waiter.mutex("b").wait(Duration::from_secs(30));
        let waiting = tokio::spawn(async move { lock.lock().await.map(|_| Instant::now()) });
        eventually("somebody waits", async || {
            holder.inspect("b").await.expect("an inspection").waiters.len() == 1
        })
        .await;
        let released = Instant::now();
        drop(guard);
        waiting.await.expect("no panic").expect("its turn") - released
    };
    for _ in 0..3 {
        let took = turn().await;
        assert!(took < Duration::from_millis(500), "{took:?} while it is blocked");
    }
    done.send(()).expect("it is blocked until now");
    tokio::task::spawn_blocking(move || reader.join()).await.expect("joined").expect("no panic");
    let took = turn().await;
    assert!(took < Duration::from_millis(500), "{took:?} when it has ended");
    drop(guard);
}

/// A runtime that polled for the answers of its tasks is blocked. Tasks of another one get
/// theirs nevertheless.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn answers_arrive_while_the_runtime_that_polled_is_blocked() {
    let Some(server) = RedisServer::start() else { return };
    let (used, is_used) = tokio::sync::oneshot::channel();
    let (done, is_done) = std::sync::mpsc::channel::<()>();
    let new_client = client(&server.url());
    let polling = std::thread::spawn(move || {
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build();
        runtime.expect("a runtime").block_on(async {
            let client = new_client.connect().await.expect("a client");
            let mut tasks = tokio::task::JoinSet::new();
            for task in 0..4 {
                let lock = client.mutex(format!("busy:{task}"));
                tasks.spawn(async move {
                    for _ in 0..300 {
                        drop(lock.lock().await.expect("the lock"));
                    }
                });
            }
            // Blocked between two answers of these tasks.
            tasks.join_next().await.expect("a task").expect("no panic");
            used.send(client).expect("it is waited for");
            let _ = is_done.recv();
            while tasks.join_next().await.is_some() {}
        });
    });
    let client = is_used.await.expect("a client");
    let began = Instant::now();
    for _ in 0..20 {
        drop(client.mutex("other").lock().await.expect("the lock"));
    }
    assert!(began.elapsed() < Duration::from_secs(1), "{:?}", began.elapsed());
    done.send(()).expect("it is blocked until now");
    tokio::task::spawn_blocking(move || polling.join()).await.expect("joined").expect("no panic");
    drop(client);
    server.assert_nothing_left().await;
}

/// A holder whose runtime is blocked, and has read notices before, hears that its lock was
/// broken before somebody else is let in.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_blocked_holder_hears_that_its_lock_was_broken() {
    let Some(server) = RedisServer::start() else { return };
    let other = server.client();
    let new_client = client(&server.url()).ttl(Duration::from_secs(30));
    let first = other.mutex("a").lock().await.expect("the lock");
    let (held, is_held) = tokio::sync::oneshot::channel();
    let holding = std::thread::spawn(move || {
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build();
        runtime.expect("a runtime").block_on(async {
            let client = new_client.connect().await.expect("a client");
            // The first calls connect; then answers are read in this runtime.
            for _ in 0..20 {
                drop(client.mutex("b").lock().await.expect("the lock"));
                tokio::time::sleep(Duration::from_millis(1)).await;
            }
            let guard = client.mutex("a").lock().await.expect("its turn");
            held.send(()).expect("it is waited for");
            while guard.state() == State::Held {
                std::thread::sleep(Duration::from_millis(1));
            }
            Instant::now()
        })
    });
    eventually("it waits", async || {
        other.inspect("a").await.expect("an inspection").waiters.len() == 1
    })
    .await;
    drop(first);
    is_held.await.expect("it holds the lock");
    // It is confirmed by then, so that no renewal finds out soon.
    tokio::time::sleep(Duration::from_millis(300)).await;
    assert_eq!(other.break_lock("a").await.expect("broken"), 1);
    let next = other.mutex("a").wait(Duration::from_secs(10)).lock().await.expect("the lock");
    let granted = Instant::now();
    let lost = tokio::task::spawn_blocking(move || holding.join()).await.expect("joined");
    assert!(lost.expect("no panic") < granted, "the holder is told first");
    drop(next);
}
