//! Rows of the list of faults about a real Redis server: the typed error, its message,
//! and the recovery.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use dlock::{Dlock, Error, ErrorKind, Guard, LossReason, ReleaseOutcome, State};
use dlock_testkit::conformance::eventually;
use dlock_testkit::holder::HolderProcess;
use dlock_testkit::proxy::Proxy;
use dlock_testkit::redis::{Clock, RedisServer, TTL, client};

const CALL: Duration = Duration::from_secs(1);
const SECRET: &str = "right-horse";

fn impatient(url: &str) -> Dlock {
    client(url).call_timeout(CALL).connect_lazy().expect("a client")
}

/// Checks that a lock fails fast with an error of this kind, which says what to do and
/// contains no secret.
async fn refused(client: &Dlock, kind: ErrorKind, advice: &str) -> Error {
    let began = Instant::now();
    let error = client.mutex("refused").try_lock().await.expect_err("refused");
    assert!(began.elapsed() < CALL + Duration::from_secs(2), "{:?}: {error}", began.elapsed());
    told(&error, kind, advice);
    error
}

fn told(error: &Error, kind: ErrorKind, advice: &str) {
    assert_eq!(error.kind(), kind, "{error}");
    assert!(error.to_string().contains(advice), "no {advice:?} in: {error}");
    assert!(!format!("{error} {error:?}").contains("horse"), "a secret: {error:?}");
}

/// Waits until locks are granted again.
async fn recovered(client: &Dlock) {
    eventually("locks are granted again", async || {
        client.mutex("recovered").try_lock().await.is_ok_and(|guard| guard.is_some())
    })
    .await;
}

/// A client that holds a lock for long enough to survive the fault.
async fn holding(server: &RedisServer) -> (Dlock, Guard) {
    let client = impatient(&server.url());
    let guard = client.mutex("held").ttl(Duration::from_secs(10)).lock().await.expect("the lock");
    (client, guard)
}

/// Checks the recovery: locks are granted, renewals go on, and nothing is left.
async fn goes_on(server: &RedisServer, client: Dlock, guard: Guard) {
    recovered(&client).await;
    eventually("renewals go on", async || guard.state() == State::Held).await;
    assert_eq!(guard.release().await.expect("an answer"), ReleaseOutcome::Released);
    drop(client);
    server.assert_nothing_left().await;
}

/// The server loses its scripts again and again.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn row_09_forgotten_scripts_are_sent_again() {
    let Some(mut server) = RedisServer::start() else { return };
    let stop = AtomicBool::new(false);
    let (one, two) = (server.client(), server.client());
    let cycles = |client: Dlock, stop: &AtomicBool| {
        let mut last = 0;
        let mut times = 0;
        tokio::runtime::Handle::current().block_on(async {
            while !stop.load(Ordering::Relaxed) {
                let guard = client.mutex("a").fair().lock().await.expect("the lock");
                assert!(guard.token().get() > last);
                last = guard.token().get();
                assert_eq!(guard.release().await.expect("an answer"), ReleaseOutcome::Released);
                times += 1;
            }
        });
        times
    };
    let runtime = tokio::runtime::Handle::current();
    let times = tokio::task::block_in_place(|| {
        std::thread::scope(|scope| {
            let tasks = [one.clone(), two.clone()].map(|client| {
                let (runtime, stop) = (runtime.clone(), &stop);
                scope.spawn(move || {
                    let _inside = runtime.enter();
                    cycles(client, stop)
                })
            });
            for _ in 0..150 {
                server.cli(&["SCRIPT", "FLUSH"]);
            }
            stop.store(true, Ordering::Relaxed);
            tasks.map(|task| task.join().expect("no cycle fails"))
        })
    });
    assert!(times.iter().all(|times| *times > 10), "{times:?}");
    // A release is the first thing that a restarted server hears.
    let guard = one.mutex("b").ttl(Duration::from_secs(20)).lock().await.expect("the lock");
    server.restart();
    eventually("the server answers", async || one.health().await.is_ok()).await;
    assert_eq!(guard.release().await.expect("an answer"), ReleaseOutcome::AlreadyLost);
    drop((one, two));
    server.assert_nothing_left().await;
}

/// A server that may evict locks is refused, unless the user allows it.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn row_10_a_server_that_evicts_is_refused() {
    let small = ["--maxmemory", "3mb", "--maxmemory-policy", "allkeys-lru"];
    let Some(server) = RedisServer::with(&small) else { return };
    let error = Dlock::connect(&server.url()).await.expect_err("refused");
    told(&error, ErrorKind::Config, "noeviction");
    let lazy = impatient(&server.url());
    refused(&lazy, ErrorKind::Config, "noeviction").await;
    let warned = impatient(&format!("{}?eviction=warn", server.url()));
    drop(warned.mutex("a").lock().await.expect("the lock"));
    drop((lazy, warned));
    server.assert_nothing_left().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn row_10_out_of_memory_is_told_and_what_is_held_goes_on() {
    let Some(server) = RedisServer::start() else { return };
    let client = impatient(&server.url());
    let guard = client.mutex("held").lock().await.expect("the lock");
    let (read, again) = (client.rwlock("r").read(), client.rwlock("r").read().fair());
    let readers = [read.lock().await.expect("a reader"), again.lock().await.expect("a reader")];
    server.cli(&["CONFIG", "SET", "maxmemory", "1"]);
    refused(&client, ErrorKind::Unavailable, "maxmemory").await;
    tokio::time::sleep(TTL * 2).await;
    assert_eq!(guard.state(), State::Held, "renewals get through");
    for held in readers.into_iter().chain([guard]) {
        assert_eq!(held.state(), State::Held);
        assert_eq!(held.release().await.expect("an answer"), ReleaseOutcome::Released);
    }
    server.cli(&["CONFIG", "SET", "maxmemory", "0"]);
    recovered(&client).await;
    drop((client, read, again));
    server.assert_nothing_left().await;
}

/// The processor time that a process has used so far.
fn processor_time(pid: u64) -> Duration {
    let stat = std::fs::read_to_string(format!("/proc/{pid}/stat")).expect("its statistics");
    let fields: Vec<&str> = stat.rsplit(')').next().expect("fields").split_whitespace().collect();
    let ticks: u64 = [11, 12].iter().map(|&at| fields[at].parse::<u64>().expect("ticks")).sum();
    Duration::from_millis(ticks * 10)
}

/// A process with many waiters while the server is down.
async fn waiters_without_a_server(waiters: usize, down: Duration) {
    let Some(mut server) = RedisServer::start() else { return };
    let proxy = Proxy::start(server.port()).await;
    let mut process = HolderProcess::start(&proxy.url());
    let here = server.client();
    let guard = here.mutex("a").ttl(Duration::from_secs(300)).lock().await.expect("the lock");
    process.send(&format!("lock a 5000 {}", waiters / 2));
    process.send(&format!("fair a 5000 {}", waiters - waiters / 2));
    let queued = waiters - waiters / 2 + 1;
    eventually("they wait", async || {
        here.inspect("a").await.expect("an inspection").waiters.len() == queued
    })
    .await;
    let pid = process.pid();
    server.kill();
    tokio::time::sleep(Duration::from_secs(1)).await; // they notice
    let (attempts, used, began) = (proxy.attempts().len(), processor_time(pid), Instant::now());
    tokio::time::sleep(down).await;
    let attempts = proxy.attempts().len() - attempts;
    let (used, took) = (processor_time(pid) - used, began.elapsed());
    println!("{waiters} waiters, {took:?} without a server: {used:?} used, {attempts} attempts");
    assert!(used < took / 20, "{used:?} of {took:?} is more than 5 % of a core");
    assert!(attempts as f64 <= 2.0 * took.as_secs_f64() + 1.0, "{attempts} in {took:?}");
    server.restart();
    process.wait_for("granted");
    drop((guard, here, process, proxy));
    server.assert_nothing_left().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn row_13_waiters_without_a_server_cost_little() {
    waiters_without_a_server(200, Duration::from_secs(4)).await;
}

/// The full form, in an optimised build: `cargo test --release -p dlock-core --test redis_faults_server -- --ignored`
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
#[ignore = "takes more than a minute"]
async fn row_13_a_thousand_waiters_for_a_minute() {
    waiters_without_a_server(1_000, Duration::from_secs(60)).await;
}

/// The clock of the server jumps forward and back: a holder may lose its lock to another
/// too early, but tokens rise.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn row_14_tokens_rise_when_the_servers_clock_jumps() {
    let Some((server, clock)) = Clock::of_a_server() else { return };
    let (one, two) = (server.client(), server.client());
    let time = || server.cli(&["TIME"]).lines().next().and_then(|it| it.parse::<u64>().ok());
    let before = time().expect("a time");
    let first = one.mutex("a").lock().await.expect("the lock");
    clock.ahead(Duration::from_secs(600));
    assert!(time().expect("a time") >= before + 600, "the clock did not jump");
    let second = two.mutex("a").lock().await.expect("expired by the server's clock");
    assert!(second.token() > first.token());
    let lost = tokio::time::timeout(TTL * 2, first.lost()).await.expect("told");
    assert!(matches!(lost, LossReason::Forgotten | LossReason::Deadline), "{lost}");
    assert_eq!(first.release().await.expect("an answer"), ReleaseOutcome::AlreadyLost);
    // Back: what is held seems to last for longer, and the counter goes on.
    clock.ahead(Duration::ZERO);
    tokio::time::sleep(TTL * 2).await;
    assert_eq!(second.state(), State::Held, "by its own clock, and renewed");
    let token = second.token();
    assert_eq!(second.release().await.expect("an answer"), ReleaseOutcome::Released);
    let third = one.mutex("a").lock().await.expect("the lock");
    assert!(third.token() > token, "{:?} after {token:?}", third.token());
    drop((third, one, two));
    clock.ahead(Duration::from_secs(601)); // the counter lasts for a second of the clock that was
    server.assert_nothing_left().await;
}

/// A script of another user runs forever.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn row_15_a_busy_server_is_told() {
    let Some(server) = RedisServer::with(&["--lua-time-limit", "100"]) else { return };
    let server = Arc::new(server);
    let (client, guard) = holding(&server).await;
    let busy = std::thread::spawn({
        let server = server.clone();
        move || server.cli(&["EVAL", "while true do end", "0"])
    });
    tokio::time::sleep(Duration::from_millis(500)).await;
    refused(&client, ErrorKind::Unavailable, "SCRIPT KILL").await;
    server.cli(&["SCRIPT", "KILL"]);
    busy.join().expect("it was killed");
    goes_on(&server, client, guard).await;
}

/// The server cannot write its snapshot, as with a full disk.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn row_15_a_full_disk_is_told() {
    let Some(server) = RedisServer::start() else { return };
    server.cli(&["CONFIG", "SET", "save", "3600 1"]);
    let (client, guard) = holding(&server).await;
    let in_the_way = server.directory().join("dump.rdb");
    std::fs::create_dir_all(in_the_way.join("full")).expect("a directory");
    server.cli(&["BGSAVE"]);
    eventually("the snapshot fails", async || {
        server.cli(&["INFO", "persistence"]).contains("rdb_last_bgsave_status:err")
    })
    .await;
    refused(&client, ErrorKind::Unavailable, "disk").await;
    eventually("renewals fail", async || guard.state() == State::Uncertain).await;
    std::fs::remove_dir_all(in_the_way).expect("room");
    server.cli(&["BGSAVE"]);
    goes_on(&server, client, guard).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn row_15_a_read_only_server_is_told() {
    let Some(server) = RedisServer::start() else { return };
    let (client, guard) = holding(&server).await;
    server.cli(&["REPLICAOF", "127.0.0.1", "1"]);
    refused(&client, ErrorKind::Unavailable, "primary").await;
    server.cli(&["REPLICAOF", "NO", "ONE"]);
    goes_on(&server, client, guard).await;
}

/// The server loads its data for some seconds.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn row_15_a_loading_server_is_told() {
    let Some(mut server) = RedisServer::start() else { return };
    let fill = "for i = 1, 3000 do redis.call('SET', 'filler:' .. i, string.rep('x', 900)) end";
    server.cli(&["EVAL", fill, "0"]);
    server.cli(&["SAVE"]);
    let slowly = ["--key-load-delay", "1000", "--loading-process-events-interval-bytes", "1024"];
    server.restart_with(&slowly);
    let client = impatient(&server.url());
    refused(&client, ErrorKind::Unavailable, "loading").await;
    recovered(&client).await;
    server.cli(&["FLUSHALL"]);
    drop(client);
    server.assert_nothing_left().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn row_15_wrong_passwords_are_denied() {
    let Some(server) = RedisServer::with(&["--requirepass", SECRET]) else { return };
    let at = format!("127.0.0.1:{}", server.port());
    for user in ["", ":wrong-horse@", "nobody:wrong-horse@"] {
        let began = Instant::now();
        let error = Dlock::connect(&format!("redis://{user}{at}")).await.expect_err("denied");
        assert!(began.elapsed() < Duration::from_secs(3), "{:?}", began.elapsed());
        told(&error, ErrorKind::Denied, "password");
        let lazy = impatient(&format!("redis://{user}{at}"));
        refused(&lazy, ErrorKind::Denied, "password").await;
        let error = lazy.mutex("a").lock().await.expect_err("waiting does not help");
        told(&error, ErrorKind::Denied, "password");
        assert!(!format!("{lazy:?}").contains("horse"), "{lazy:?}");
    }
    let client = Dlock::connect(&format!("redis://:{SECRET}@{at}/1")).await.expect("let in");
    drop(client.mutex("a").lock().await.expect("the lock"));
    // A password that is changed while the client is at work.
    server.cli(&["CONFIG", "SET", "requirepass", "another-horse"]);
    server.cli(&["-a", "another-horse", "CLIENT", "KILL", "TYPE", "normal"]);
    let error = client.mutex("a").lock().await.expect_err("denied from now on");
    told(&error, ErrorKind::Denied, "password");
    server.cli(&["-a", "another-horse", "CONFIG", "SET", "requirepass", SECRET]);
    eventually("let in again", async || client.mutex("a").try_lock().await.is_ok()).await;
    drop(client);
    server.assert_nothing_left().await;
}

/// TLS with a server that has none: there is no fallback, and no secret is sent.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn row_15_a_tls_mismatch_is_told() {
    let Some(server) = RedisServer::start() else { return };
    let client = impatient(&format!("rediss://:{SECRET}@127.0.0.1:{}", server.port()));
    for _ in 0..2 {
        let error = refused(&client, ErrorKind::Unavailable, "TLS").await;
        assert!(error.to_string().contains("check"), "what to do: {error}");
    }
    drop(client);
    server.assert_nothing_left().await;
}

/// A user without any rights.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn row_15_missing_rights_are_told() {
    let Some(server) = RedisServer::start() else { return };
    server.cli(&["ACL", "SETUSER", "poor", "on", &format!(">{SECRET}"), "~none:*", "+@all"]);
    let poor = impatient(&format!("redis://poor:{SECRET}@127.0.0.1:{}", server.port()));
    refused(&poor, ErrorKind::Denied, "rights").await;
    drop(poor);
    server.assert_nothing_left().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn row_15_an_unreachable_server_is_told() {
    let Some(mut server) = RedisServer::start() else { return };
    let client = impatient(&server.url());
    server.kill();
    let error = refused(&client, ErrorKind::Unavailable, "check that it runs").await;
    assert!(error.to_string().contains(&server.port().to_string()), "where: {error}");
    server.restart();
    recovered(&client).await;
    drop(client);
    server.assert_nothing_left().await;
}

/// Another value is stored under the key of a lock.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn keys_of_another_type_or_layout_are_told() {
    let Some(server) = RedisServer::start() else { return };
    let client = impatient(&server.url());
    server.cli(&["LPUSH", "dlock:2:{test:refused}:l", "x"]);
    refused(&client, ErrorKind::Config, "another namespace").await;
    server.cli(&["DEL", "dlock:2:{test:refused}:l"]);
    server.cli(&["SET", "dlock:2:{test:refused}:l", "x"]);
    refused(&client, ErrorKind::Config, "version").await;
    let error = client.inspect("refused").await.expect_err("unreadable");
    told(&error, ErrorKind::Config, "version");
    server.cli(&["DEL", "dlock:2:{test:refused}:l"]);
    recovered(&client).await;
    drop(client);
    server.assert_nothing_left().await;
}

/// Programs of two layouts never meet at a key, so each connection reads the marker of the
/// namespace.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_namespace_of_another_layout_is_refused() {
    const MARKER: &str = "dlock:layout:test";
    let Some(server) = RedisServer::start() else { return };
    let client = impatient(&server.url());
    let held = client.mutex("held").lock().await.expect("the lock");
    assert_eq!(server.cli(&["GET", MARKER]), "2", "the first program writes it");
    assert_eq!(server.cli(&["TTL", MARKER]), "-1");
    server.cli(&["SET", MARKER, "3"]);
    let advice = "are kept in layout 3, and this program writes layout 2";
    let connected = dlock_testkit::redis::client(&server.url()).connect().await;
    told(&connected.expect_err("refused"), ErrorKind::Config, advice);
    refused(&impatient(&server.url()), ErrorKind::Config, advice).await;
    // Another namespace is free to use.
    let elsewhere = client_of(&server, "elsewhere");
    drop(elsewhere.mutex("held").try_lock().await.expect("an answer").expect("the lock"));
    // A client that was connected is refused at its next connection, and its guard ends.
    server.cli(&["CLIENT", "KILL", "TYPE", "normal"]);
    let lost = tokio::time::timeout(TTL * 3, held.lost()).await;
    lost.expect("by its deadline");
    refused(&client, ErrorKind::Config, advice).await;
    assert_eq!(server.cli(&["GET", MARKER]), "3", "it is not written again");
    // What cannot be read is not told: it could be a secret.
    server.cli(&["SET", MARKER, SECRET]);
    server.cli(&["CLIENT", "KILL", "TYPE", "normal"]);
    eventually("it was read again", async || {
        let error = client.mutex("refused").try_lock().await.expect_err("refused");
        error.to_string().contains("an unknown layout") && !format!("{error:?}").contains("horse")
    })
    .await;
    server.cli(&["DEL", MARKER]);
    recovered(&client).await;
    drop((held, elsewhere, client));
    server.assert_nothing_left().await;
}

fn client_of(server: &RedisServer, namespace: &str) -> Dlock {
    client(&server.url()).namespace(namespace).connect_lazy().expect("a client")
}

/// What keeps the marker from being written does not keep clients from connecting.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_marker_that_cannot_be_written_is_no_reason_to_refuse() {
    let Some(server) = RedisServer::start() else { return };
    // The rights of a user before there was a marker.
    let rights = include_str!("../../docs/redis.acl");
    let lines = rights.lines().filter(|line| !line.starts_with('#'));
    let words = lines.flat_map(str::split_whitespace).filter(|word| *word != "~dlock:layout:*");
    let rights: Vec<&str> = words.collect();
    let command = [&["ACL", "SETUSER", "dlock", "reset", "on", ">secret"], &rights[..]].concat();
    assert_eq!(server.cli(&command), "OK");
    let url = server.url().replace("redis://", "redis://dlock:secret@");
    drop(impatient(&url).mutex("a").try_lock().await.expect("an answer").expect("the lock"));
    // Out of memory: the client connects, and the lock says why there is none.
    server.cli(&["CONFIG", "SET", "maxmemory", "1"]);
    refused(&impatient(&server.url()), ErrorKind::Unavailable, "out of memory").await;
    server.cli(&["CONFIG", "SET", "maxmemory", "0"]);
    assert_eq!(server.keys(), [""; 0]);
    assert_eq!(server.cli(&["EXISTS", "dlock:layout:test"]), "0");
    recovered(&impatient(&server.url())).await;
    assert_eq!(server.cli(&["GET", "dlock:layout:test"]), "2");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn row_16_a_flush_is_learned_at_the_next_renewal() {
    let Some(server) = RedisServer::start() else { return };
    let (one, two) = (server.client(), server.client());
    let guard = one.mutex("a").ttl(Duration::from_secs(6)).lock().await.expect("the lock");
    server.cli(&["FLUSHALL"]);
    let successor = two.mutex("a").lock().await.expect("nobody's, as far as is known");
    assert!(successor.token() > guard.token(), "tokens rise nevertheless");
    let reason = tokio::time::timeout(Duration::from_secs(4), guard.lost()).await;
    assert_eq!(reason.expect("told by the renewal"), LossReason::Forgotten);
    assert_eq!(guard.release().await.expect("an answer"), ReleaseOutcome::AlreadyLost);
    assert_eq!(successor.state(), State::Held, "untouched");
    drop((successor, one, two));
    server.assert_nothing_left().await;
}
