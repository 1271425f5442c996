//! Locks in the layout of Redisson: the conformance suite, what is stored and told, and
//! live Redisson programs on the same lock, checked from outside.
//!
//! The test with Redisson takes some seconds; `DLOCK_TEST_SECONDS=60` makes it longer.

use std::time::{Duration, Instant};

use dlock::backend::redis::Redisson;
use dlock::{Dlock, ErrorKind, LossReason, ReleaseOutcome};
use dlock_testkit::conformance::{Suite, eventually};
use dlock_testkit::interop::Peer;
use dlock_testkit::interop::contention::{
    Holders, Peers, exclude_each_other, overlap_without_a_common_lock,
};
use dlock_testkit::proxy::{Once, Proxy};
use dlock_testkit::redis::{RedisServer, client};

fn redisson(server: &RedisServer) -> Dlock {
    lazy(&format!("{}?layout=redisson", server.url()))
}

fn lazy(url: &str) -> Dlock {
    let builder = client(url).ttl(Duration::from_secs(2)).wait(Duration::from_secs(20));
    builder.connect_lazy().expect("a client")
}

/// Runs what blocks the thread beside the tasks of the test.
fn blocking<T>(what: impl FnOnce() -> T) -> T {
    tokio::task::block_in_place(what)
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn conformance() {
    let Some(server) = RedisServer::start() else { return };
    let url = server.url();
    Suite::new(move || Redisson::new(&url, "test").expect("a URL")).run().await;
    server.assert_nothing_left().await;
}

/// What `getLock` of Redisson would find, and what its programs would hear.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_lock_is_what_redisson_expects() {
    let Some(server) = RedisServer::start() else { return };
    let dlock = redisson(&server);
    let cli = |command: &[&str]| blocking(|| server.cli(command));
    let guard = dlock.mutex("order:7").lock().await.expect("the lock");
    let fields = cli(&["HGETALL", "test:order:7"]);
    let [field, count] = fields.lines().collect::<Vec<_>>()[..] else { panic!("{fields}") };
    assert_eq!(count, "1");
    let (uuid, number) = field.split_once(':').expect("an id and a number");
    assert_eq!(uuid.split('-').map(str::len).collect::<Vec<_>>(), [8, 4, 4, 4, 12], "{uuid}");
    assert_eq!(number, std::process::id().to_string());
    let left: u64 = cli(&["PTTL", "test:order:7"]).parse().expect("a number");
    assert!((1..=2_000).contains(&left), "{left}");
    // The channel has the braces of the name, or else its own.
    let pubsub = redis::Client::open(server.url()).expect("a URL");
    let mut connection = pubsub.get_connection().expect("a connection");
    let mut heard = connection.as_pubsub();
    heard.psubscribe("redisson_lock__channel:*").expect("a subscription");
    assert_eq!(guard.release().await.expect("an answer"), ReleaseOutcome::Released);
    let braces = dlock.mutex("{shop}:7").lock().await.expect("the lock");
    drop(braces.release().await);
    for channel in ["redisson_lock__channel:{test:order:7}", "redisson_lock__channel:test:{shop}:7"]
    {
        let message = blocking(|| heard.get_message()).expect("a message");
        let said: String = message.get_payload().expect("a string");
        assert_eq!((message.get_channel_name(), said.as_str()), (channel, "0"));
    }
    assert_eq!(cli(&["EXISTS", "test:order:7"]), "0");
    // The namespace `default` leaves names as they are.
    let bare = Dlock::builder().url(&format!("{}?layout=redisson", server.url()));
    let bare = bare.connect().await.expect("a client");
    let guard = bare.mutex("order:7").lock().await.expect("the lock");
    assert_eq!(cli(&["TYPE", "order:7"]), "hash");
    drop(guard);
}

/// A lock that a Redisson program holds: it is seen, waited for, and taken when it is told
/// that it is free. That program's field and its count are not touched.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_foreign_holder_is_seen_and_waited_for() {
    let Some(server) = RedisServer::start() else { return };
    let dlock = redisson(&server);
    let cli = |command: &[&str]| blocking(|| server.cli(command));
    let theirs = "8743c9c0-0795-4907-87fd-6c719a6b4586:31";
    cli(&["HSET", "test:a", theirs, "2"]);
    cli(&["PEXPIRE", "test:a", "60000"]);
    assert!(dlock.mutex("a").try_lock().await.expect("an answer").is_none());
    let state = dlock.inspect("a").await.expect("an answer");
    assert_eq!(state.holders.len(), 1);
    assert_eq!(state.holders[0].holder.name, theirs);
    assert_eq!(state.holders[0].token, None);
    assert!(state.holders[0].expires_in > Duration::from_secs(30));
    let wait = Duration::from_millis(100);
    let error = dlock.mutex("a").wait(wait).lock().await.map(drop).expect_err("it is taken");
    assert_eq!(error.kind(), ErrorKind::TimedOut, "{error}");
    assert!(error.to_string().contains(theirs), "{error}");
    let waiting = tokio::spawn({
        let lock = dlock.mutex("a");
        async move { lock.lock().await.map(|guard| (guard, Instant::now())) }
    });
    let channel = "redisson_lock__channel:{test:a}";
    eventually("it listens", async || cli(&["PUBSUB", "NUMSUB", channel]).ends_with('1')).await;
    assert_eq!(cli(&["HGET", "test:a", theirs]), "2");
    cli(&["DEL", "test:a"]);
    cli(&["PUBLISH", channel, "0"]);
    let (guard, _) = waiting.await.expect("the task").expect("the lock");
    let state = dlock.inspect("a").await.expect("an answer");
    assert_eq!(state.holders[0].token, Some(guard.token().get()));
    drop(guard);
    eventually("it is free", async || cli(&["EXISTS", "test:a"]) == "0").await;
}

/// Without a message it is looked again: when the lease of somebody who died is over.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_dead_holders_lock_is_taken_when_its_lease_ends() {
    let Some(server) = RedisServer::start() else { return };
    let dlock = redisson(&server);
    blocking(|| server.cli(&["HSET", "test:a", "8743c9c0-0795-4907-87fd-6c719a6b4586:1", "1"]));
    blocking(|| server.cli(&["PEXPIRE", "test:a", "700"]));
    let guard = dlock.mutex("a").lock().await.expect("the lock");
    // Redisson's forceUnlock, or an operator: the holder hears of it at its next renewal.
    blocking(|| server.cli(&["DEL", "test:a"]));
    assert_eq!(guard.lost().await, LossReason::Forgotten);
    assert_eq!(guard.release().await.expect("an answer"), ReleaseOutcome::AlreadyLost);
}

/// The answer to an acquire is lost and it is made again: the count stays 1, so that one
/// release frees it.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_retry_is_not_a_reentry() {
    let Some(server) = RedisServer::start() else { return };
    let proxy = Proxy::start(server.port()).await;
    let dlock = lazy(&format!("{}?layout=redisson", proxy.url()));
    drop(dlock.mutex("warm").lock().await.expect("the lock"));
    for (fault, key) in [(Once::LoseReply, "a"), (Once::DuplicateRequest, "b")] {
        proxy.once(fault, "EVAL");
        let guard = dlock.mutex(key).lock().await.expect("the lock");
        let counts = blocking(|| server.cli(&["HVALS", &format!("test:{key}")]));
        assert_eq!(counts, "1", "{fault:?}");
        assert_eq!(guard.release().await.expect("an answer"), ReleaseOutcome::Released);
        assert_eq!(blocking(|| server.cli(&["EXISTS", &format!("test:{key}")])), "0");
    }
}

/// Tokens rise from one holder to the next, also when nothing of the one before is left.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn tokens_rise() {
    let Some(server) = RedisServer::start() else { return };
    let (one, two) = (redisson(&server), redisson(&server));
    let mut last = 0;
    for round in 0..200 {
        let dlock = if round % 2 == 0 { &one } else { &two };
        let guard = dlock.mutex("a").lock().await.expect("the lock");
        assert!(guard.token().get() > last, "round {round}");
        last = guard.token().get();
        let _ = guard.release().await.expect("an answer");
        if round % 50 == 49 {
            blocking(|| server.cli(&["FLUSHALL"]));
        }
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn what_the_layout_cannot_do_is_refused() {
    let refused = |url: &'static str, advice: &'static str| async move {
        let error = client(url).connect().await.expect_err("refused");
        assert_eq!(error.kind(), ErrorKind::Config, "{error}");
        assert!(error.to_string().contains(advice), "no {advice:?} in: {error}");
    };
    refused("redis://h?layout=jedis", "`redisson`").await;
    refused("redis+cluster://h?layout=redisson", "not for a cluster").await;
    refused("redis://h?layout=redisson&min_replicas=1", "`min_replicas`").await;
    refused("redlock://a,b,c?layout=redisson", "`layout`").await;
    refused("memory://?layout=redisson", "`layout`").await;
    let Some(server) = RedisServer::start() else { return };
    let dlock = redisson(&server);
    let sent = || blocking(|| server.cli(&["INFO", "commandstats"])).contains("evalsha");
    for unsupported in [
        dlock.mutex("a").fair().lock().await.map(drop).expect_err("fair"),
        dlock.rwlock("a").read().lock().await.map(drop).expect_err("shared"),
        dlock.semaphore("a", 2).permits(1).lock().await.map(drop).expect_err("permits"),
        dlock.break_lock("a").await.map(drop).expect_err("break"),
    ] {
        assert_eq!(unsupported.kind(), ErrorKind::Unsupported, "{unsupported}");
    }
    assert!(!sent(), "nothing was sent");
    // Another type of value under the name: it is told, and not touched.
    blocking(|| server.cli(&["SET", "test:text", "hello"]));
    let error = dlock.mutex("text").try_lock().await.map(drop).expect_err("not a lock");
    assert!(error.to_string().contains("text"), "{error}");
    assert_eq!(blocking(|| server.cli(&["GET", "test:text"])), "hello");
}

/// Four processes of each side on one lock, and the negative control: on a lock each.
#[test]
fn redissons_lock() {
    let Some(server) = RedisServer::start() else { return };
    let host = format!("127.0.0.1:{}", server.port());
    let theirs = |name: &str| {
        Peers::start(&[""], |_, most| Peer::redisson(&host, &format!("test:{name}"), most))
    };
    let url = format!("{}?layout=redisson", server.url());
    let ours = |name: &str| Holders::start(&url, 2, &["serve"], name);
    let Some(together) = theirs("shared") else { return };
    exclude_each_other(together, ours("shared"));
    let Some(apart) = theirs("theirs") else { return };
    overlap_without_a_common_lock(apart, ours("ours"));
}
