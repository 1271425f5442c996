//! The conformance suite on a real Redis, and tests of what only Redis does.

use std::sync::Arc;
use std::time::Duration;

use dlock::{Dlock, ErrorKind, ReleaseOutcome, State};
use dlock_testkit::conformance::Suite;
use dlock_testkit::redis::RedisServer;

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn conformance() {
    let Some(server) = RedisServer::start() else { return };
    let server = Arc::new(server);
    let suite = Suite::new({
        let server = server.clone();
        move || server.backend()
    });
    suite.run().await;
    server.assert_nothing_left().await;
}

/// The server is killed with its data and restarted: holders learn that their locks are
/// lost, waiters go on waiting, and tokens rise.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_killed_server_is_survived() {
    let Some(mut server) = RedisServer::start() else { return };
    let (one, two) = (server.client(), server.client());
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
    assert_eq!(guard.release().await.expect("an answer"), ReleaseOutcome::AlreadyLost);
    assert_eq!(successor.release().await.expect("an answer"), ReleaseOutcome::Released);
    // Notices are heard again as well.
    let guard = one.mutex("d").ttl(Duration::from_secs(30)).lock().await.expect("the lock");
    tokio::time::sleep(Duration::from_secs(2)).await;
    two.break_lock("d").await.expect("broken");
    tokio::time::timeout(Duration::from_millis(500), guard.lost()).await.expect("told at once");
    drop((one, two, guard));
    server.assert_nothing_left().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_unix_socket_will_do() {
    let Some(server) = RedisServer::start() else { return };
    let url = format!("redis+unix://{}?database=2", server.socket().display());
    let client = Dlock::connect(&url).await.expect("a client");
    let guard = client.mutex("a").lock().await.expect("the lock");
    assert_eq!(server.cli(&["-n", "2", "EXISTS", "dlock:2:{default:a}:l"]), "1");
    drop((guard, client));
    server.assert_nothing_left().await;
}

/// The commands that an uncontended lock costs, counted by the server.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_undisputed_lock_takes_few_server_calls() {
    let Some(server) = RedisServer::start() else { return };
    let client = server.client();
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
    let inside = ["time", "set", "getrange", "del"].map(|name| calls(name).unwrap_or(0));
    assert_eq!(inside, [2, 1, 1, 1], "two to take it, three to give it back: {statistics}");
    assert_eq!(statistics.lines().filter(|line| line.starts_with("cmdstat_")).count(), 6);
    drop((lock, client));
    server.assert_nothing_left().await;
}
