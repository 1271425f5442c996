//! The conformance suite on a real Redis, and what is Redis' own.

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use dlock_core::{Dlock, ErrorKind, Released, State};
use dlock_testkit::conformance::Suite;
use dlock_testkit::redis::RedisServer;

const TTL: Duration = Duration::from_millis(900);

fn client(server: &RedisServer) -> Dlock {
    let builder = Dlock::builder().url(&server.url()).namespace("test");
    builder.ttl(TTL).wait(Duration::from_secs(20)).connect_lazy().expect("a client")
}

async fn eventually(what: &str, mut condition: impl FnMut() -> bool) {
    let began = Instant::now();
    while !condition() {
        assert!(began.elapsed() < Duration::from_secs(20), "{what} never came true");
        tokio::time::sleep(Duration::from_millis(10)).await;
    }
}

/// I3: no key and no connection is left, once the counters' second has passed.
async fn nothing_left(server: &RedisServer) {
    eventually("no key is left", || server.cli(&["DBSIZE"]) == "0").await;
    eventually("no connection is left", || {
        server.cli(&["CLIENT", "LIST"]).lines().filter(|it| it.contains("cmd=")).count() <= 1
    })
    .await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn conformance() {
    let Some(server) = RedisServer::start() else { return };
    let server = Arc::new(server);
    let suite = Suite::new({
        let server = server.clone();
        move || server.backend()
    });
    suite.run().await;
    // Who broke a lock is remembered for an hour: the one thing that may stay.
    for name in server.cli(&["--scan", "--pattern", "*}:b"]).lines() {
        server.cli(&["DEL", name]);
    }
    nothing_left(&server).await;
}

/// Row 9: the scripts are forgotten while locks are taken.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn forgotten_scripts_are_sent_again() {
    let Some(server) = RedisServer::start() else { return };
    let (server, stop) = (Arc::new(server), Arc::new(AtomicBool::new(false)));
    let flushing = std::thread::spawn({
        let (server, stop) = (server.clone(), stop.clone());
        move || {
            while !stop.load(Ordering::Relaxed) {
                server.cli(&["SCRIPT", "FLUSH"]);
            }
        }
    });
    let last = Arc::new(Mutex::new(0));
    let tasks: Vec<_> = (0..4)
        .map(|_| {
            let (client, last) = (client(&server), last.clone());
            tokio::spawn(async move {
                for _ in 0..50 {
                    let guard = client.mutex("a").fair().lock().await.expect("the lock");
                    {
                        let mut last = last.lock().expect("the last token");
                        assert!(guard.token().get() > *last);
                        *last = guard.token().get();
                    }
                    assert_eq!(guard.release().await.expect("an answer"), Released::Released);
                }
            })
        })
        .collect();
    for task in tasks {
        task.await.expect("no task fails");
    }
    stop.store(true, Ordering::Relaxed);
    flushing.join().expect("the flushing thread");
    nothing_left(&server).await;
}

/// The server is killed with everything it knew, and comes back: holders learn
/// that they lost, waiters go on waiting, tokens rise.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_killed_server_is_survived() {
    let Some(mut server) = RedisServer::start() else { return };
    let (one, two) = (client(&server), client(&server));
    let guard = one.mutex("a").ttl(Duration::from_secs(3)).lock().await.expect("the lock");
    let token = guard.token();
    let waiting = tokio::spawn({
        let lock = two.mutex("b");
        async move { lock.lock().await }
    });
    drop(waiting.await.expect("the task").expect("the lock"));
    server.kill();
    let error = two.mutex("c").try_lock().await.expect_err("no server");
    assert!(matches!(error.kind(), ErrorKind::Unavailable | ErrorKind::Unknown), "{error}");
    let error = two.mutex("c").try_lock().await.expect_err("no server");
    assert_eq!(error.kind(), ErrorKind::Unavailable, "{error}");
    let waiting = tokio::spawn({
        let lock = two.mutex("a");
        async move { lock.lock().await }
    });
    tokio::time::sleep(Duration::from_millis(300)).await;
    assert!(!waiting.is_finished());
    server.restart();
    let successor = waiting.await.expect("the task").expect("the lock, once it is back");
    assert!(successor.token() > token);
    tokio::time::timeout(Duration::from_secs(5), guard.lost()).await.expect("told");
    assert_eq!(successor.state(), State::Held);
    assert_eq!(guard.release().await.expect("an answer"), Released::AlreadyLost);
    assert_eq!(successor.release().await.expect("an answer"), Released::Released);
    // Notices are heard again as well.
    let guard = one.mutex("d").ttl(Duration::from_secs(30)).lock().await.expect("the lock");
    tokio::time::sleep(Duration::from_secs(2)).await;
    two.break_lock("d").await.expect("broken");
    tokio::time::timeout(Duration::from_millis(500), guard.lost()).await.expect("told at once");
    drop((one, two, guard));
    server.cli(&["DEL", "dlock:1:{test:d}:b"]);
    nothing_left(&server).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn wrong_passwords_are_denied() {
    let Some(server) = RedisServer::with(&["--requirepass", "right-horse"]) else { return };
    let port = server.url().rsplit(':').next().expect("a port").to_owned();
    for user in ["", ":wrong-horse@", "nobody:wrong-horse@"] {
        let error = Dlock::connect(&format!("redis://{user}127.0.0.1:{port}")).await;
        let error = error.expect_err("denied");
        assert_eq!(error.kind(), ErrorKind::Denied, "{error}");
        assert!(!format!("{error} {error:?}").contains("horse"), "{error:?}");
        assert!(error.to_string().contains("password"), "{error}");
    }
    let client = Dlock::connect(&format!("redis://:right-horse@127.0.0.1:{port}/1")).await;
    drop(client.expect("let in").mutex("a").lock().await.expect("the lock"));
}

/// Row 6: the connection for notices is cut again and again.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn lost_notices_cost_about_a_second() {
    let Some(server) = RedisServer::start() else { return };
    let (one, two) = (client(&server), client(&server));
    for _ in 0..3 {
        let guard = one.mutex("a").lock().await.expect("the lock");
        let waiting = tokio::spawn({
            let lock = two.mutex("a");
            async move { lock.lock().await.map(drop) }
        });
        tokio::time::sleep(Duration::from_millis(200)).await;
        server.cli(&["CLIENT", "KILL", "TYPE", "pubsub"]);
        let released = Instant::now();
        drop(guard);
        waiting.await.expect("the task").expect("the lock");
        assert!(released.elapsed() < Duration::from_millis(1_800), "{:?}", released.elapsed());
    }
}

/// Row 15 and a key of the wrong type: typed errors that say what to do.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_server_in_trouble_is_told() {
    let Some(server) = RedisServer::start() else { return };
    let client = client(&server);
    server.cli(&["LPUSH", "dlock:1:{test:list}:l", "x"]);
    let error = client.mutex("list").try_lock().await.expect_err("the wrong type");
    assert_eq!(error.kind(), ErrorKind::Config, "{error}");
    server.cli(&["SET", "dlock:1:{test:odd}:l", "x"]);
    let error = client.mutex("odd").try_lock().await.expect_err("another layout");
    assert_eq!(error.kind(), ErrorKind::Config, "{error}");

    let guard = client.mutex("held").lock().await.expect("the lock");
    let (read, again) = (client.rwlock("r").read(), client.rwlock("r").read().fair());
    let readers = (read.lock().await.expect("a reader"), again.lock().await.expect("a reader"));
    server.cli(&["CONFIG", "SET", "maxmemory", "1"]);
    let error = client.mutex("new").try_lock().await.expect_err("out of memory");
    assert_eq!(error.kind(), ErrorKind::Unavailable, "{error}");
    assert!(error.to_string().contains("maxmemory"), "{error}");
    tokio::time::sleep(TTL * 2).await;
    assert_eq!(guard.state(), State::Held, "renewals get through");
    assert_eq!(guard.release().await.expect("an answer"), Released::Released);
    for reader in [readers.0, readers.1] {
        assert_eq!(reader.state(), State::Held);
        assert_eq!(reader.release().await.expect("an answer"), Released::Released);
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_unix_socket_will_do() {
    let Some(server) = RedisServer::start() else { return };
    let url = format!("redis+unix://{}?database=2", server.socket().display());
    let client = Dlock::connect(&url).await.expect("a client");
    let _guard = client.mutex("a").lock().await.expect("the lock");
    assert_eq!(server.cli(&["-n", "2", "EXISTS", "dlock:1:{default:a}:l"]), "1");
}

/// What an undisputed lock costs the server, counted by itself.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_undisputed_lock_takes_few_server_calls() {
    let Some(server) = RedisServer::start() else { return };
    let client = client(&server);
    let lock = client.mutex("a");
    let _ = lock.lock().await.expect("the lock").release().await.expect("an answer");
    server.cli(&["CONFIG", "RESETSTAT"]);
    let _ = lock.lock().await.expect("the lock").release().await.expect("an answer");
    let statistics = server.cli(&["INFO", "commandstats"]);
    let calls = |name: &str| {
        let line = statistics.lines().find(|line| line.starts_with(&format!("cmdstat_{name}:")))?;
        line.split("calls=").nth(1)?.split(',').next()?.parse::<u32>().ok()
    };
    assert_eq!(calls("evalsha"), Some(2), "{statistics}");
    let inside = ["time", "incrby", "set", "getrange", "del"].map(|name| calls(name).unwrap_or(0));
    assert_eq!(inside, [1; 5], "three to take it, two to give it back: {statistics}");
    assert_eq!(statistics.lines().filter(|line| line.starts_with("cmdstat_")).count(), 7);
}
