//! Locks at the primary that Sentinels name: conformance, failovers, and errors that say
//! what to change.

use std::sync::Arc;
use std::time::{Duration, Instant};

use dlock::backend::ServerRole;
use dlock::backend::redis::Redis;
use dlock::{Dlock, ErrorKind, Guard, LossReason, ReleaseOutcome, State};
use dlock_testkit::conformance::{Suite, eventually};
use dlock_testkit::failover::{AFTER_PROMOTION, Load};
use dlock_testkit::process::now;
use dlock_testkit::proxy::Proxy;
use dlock_testkit::redis::{Clock, RedisServer, client};
use dlock_testkit::topology::{MASTER_NAME, SentinelServers, allow_replication, block_replication};

/// How many failovers in a row; `DLOCK_TEST_FAILOVERS=10` for more.
fn rounds() -> u64 {
    std::env::var("DLOCK_TEST_FAILOVERS").ok().and_then(|it| it.parse().ok()).unwrap_or(2)
}

/// A silence that Sentinels bear, and one that they do not.
const LONG: Duration = Duration::from_secs(60);
const SHORT: Duration = Duration::from_millis(500);
const TTL: Duration = Duration::from_secs(5);

fn patient(url: &str) -> Dlock {
    let builder = client(url).ttl(TTL).wait(Duration::from_secs(30));
    builder.connect_lazy().expect("a client")
}

/// Runs what blocks the thread beside the tasks of the test.
fn blocking<T>(what: impl FnOnce() -> T) -> T {
    tokio::task::block_in_place(what)
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn conformance() {
    let Some(topology) = SentinelServers::start() else { return };
    topology.set_down_after(LONG);
    let topology = Arc::new(topology);
    let url = topology.url();
    Suite::new(move || Redis::new(&url, "test").expect("a URL")).run().await;
    let primary = topology.primary();
    eventually("nothing is left", async || {
        topology.servers[primary].keys().iter().all(|key| key.ends_with("}:b"))
    })
    .await;
}

/// 200 tasks on 50 keys, and the primary is killed.
#[tokio::test(flavor = "multi_thread", worker_threads = 4)]
async fn row_03_the_primary_is_killed_under_load() {
    let Some(mut topology) = SentinelServers::start() else { return };
    let clients: Vec<_> = (0..4).map(|_| patient(&topology.url())).collect();
    let load = Load::start(&clients, 50, 50).watching(&topology);
    for round in 0..rounds() {
        load.keys_granted_since(now()).await;
        let from = now();
        let killed = blocking(|| topology.kill_primary());
        let promoted = blocking(|| {
            topology.await_failover(killed);
            now()
        });
        load.recovers(round, from, promoted, TTL).await;
        blocking(|| topology.rejoin(killed));
    }
    let report = load.stop().await;
    println!("{} locks held, {} overlaps", report.checked, report.excused);
    assert_eq!(report.violations, Vec::<String>::new());
    assert_eq!(report.errors, Vec::<String>::new());
    assert!(report.checked > 1_000, "{}", report.checked);
}

async fn held(client: &Dlock, key: &str) -> Guard {
    client.mutex(key).ttl(Duration::from_secs(30)).lock().await.expect("the lock")
}

/// A lease that the new primary does not know is lost within a second, not a third of its
/// ttl later; one that it knows is held on.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn leases_are_renewed_or_lost_within_a_second() {
    let Some(mut topology) = SentinelServers::start() else { return };
    let (one, two) = (patient(&topology.url()), patient(&topology.url()));
    let kept = held(&one, "kept").await;
    let replicated = blocking(|| topology.servers[0].cli(&["WAIT", "2", "5000"]));
    assert_eq!(replicated, "2");
    blocking(|| block_replication(&topology.servers[0]));
    let lost = held(&one, "lost").await;
    let waiting = tokio::spawn({
        let lock = two.mutex("kept");
        async move { lock.lock().await }
    });
    let killed = blocking(|| topology.kill_primary());
    blocking(|| topology.await_failover(killed));
    let promoted = Instant::now();
    assert_eq!(lost.lost().await, LossReason::Forgotten);
    assert!(promoted.elapsed() < AFTER_PROMOTION, "{:?}", promoted.elapsed());
    let next = two.mutex("lost").lock().await.expect("the lock");
    assert!(next.token() > lost.token(), "the fence rejects the older guard");
    eventually("the lease is renewed", async || kept.state() == State::Held).await;
    assert!(promoted.elapsed() < AFTER_PROMOTION, "{:?}", promoted.elapsed());
    assert!(!waiting.is_finished());
    assert_eq!(kept.release().await.expect("an answer"), ReleaseOutcome::Released);
    let released = Instant::now();
    let waited = waiting.await.expect("the task").expect("the lock");
    assert!(released.elapsed() < Duration::from_secs(1), "the waiter is in the queue");
    drop((waited, next));
}

/// A release that was answered and not replicated is made again at the new primary:
/// otherwise the key would be taken by nobody until the end of a ttl.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_release_that_a_failover_lost_is_made_again() {
    let Some(mut topology) = SentinelServers::start() else { return };
    let (one, two) = (patient(&topology.url()), patient(&topology.url()));
    let held = one.mutex("a").ttl(Duration::from_secs(60)).lock().await.expect("the lock");
    let replicated = blocking(|| topology.servers[0].cli(&["WAIT", "2", "5000"]));
    assert_eq!(replicated, "2");
    blocking(|| block_replication(&topology.servers[0]));
    assert_eq!(held.release().await.expect("an answer"), ReleaseOutcome::Released);
    let killed = blocking(|| topology.kill_primary());
    blocking(|| topology.await_failover(killed));
    let promoted = Instant::now();
    drop(two.mutex("a").lock().await.expect("the lock"));
    assert!(promoted.elapsed() < AFTER_PROMOTION, "{:?}", promoted.elapsed());
}

/// The primary is demoted while it lives, and every client leaves it, although its
/// connection is fine.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_demoted_primary_is_left_at_once() {
    let Some(topology) = SentinelServers::start() else { return };
    let client = patient(&topology.url());
    let guard = held(&client, "held").await;
    let replicated = blocking(|| topology.servers[0].cli(&["WAIT", "2", "5000"]));
    assert_eq!(replicated, "2");
    let primary = blocking(|| topology.force_failover());
    let promoted = Instant::now();
    let name = "lib-name=dlock";
    let old = |server: usize| topology.servers[server].cli(&["CLIENT", "LIST"]);
    let clients = |server: usize| old(server).lines().filter(|it| it.contains(name)).count();
    if blocking(|| topology.servers[0].cli(&["INFO", "server"])).contains("redis_version:7.2") {
        eventually("the old primary is left", async || blocking(|| clients(0)) == 0).await;
    }
    drop(client.mutex("other").lock().await.expect("the lock"));
    assert!(promoted.elapsed() < AFTER_PROMOTION, "{:?}", promoted.elapsed());
    let keys = blocking(|| topology.servers[primary].cli(&["--scan"]));
    assert!(keys.contains("{test:held}"), "{keys}");
    assert_eq!(guard.state(), State::Held);
    assert_eq!(guard.release().await.expect("an answer"), ReleaseOutcome::Released);
}

/// The marker of a namespace goes with the failover.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_namespace_of_another_layout_is_refused() {
    const MARKER: &str = "dlock:layout:test";
    let Some(topology) = SentinelServers::start() else { return };
    let client = patient(&topology.url());
    drop(client.mutex("a").lock().await.expect("the lock"));
    let primary = &topology.servers[blocking(|| topology.primary())];
    assert_eq!(blocking(|| primary.cli(&["GET", MARKER])), "2", "the first program writes it");
    blocking(|| primary.cli(&["SET", MARKER, "3"]));
    blocking(|| primary.cli(&["WAIT", "1", "10000"]));
    blocking(|| topology.force_failover());
    let is_refused = |error: &dlock::Error| {
        error.kind() == ErrorKind::Config && error.to_string().contains("kept in layout 3")
    };
    eventually("the client is refused at the new primary", async || {
        client.mutex("a").try_lock().await.as_ref().is_err_and(is_refused)
    })
    .await;
    let fresh = patient(&topology.url()).mutex("a").try_lock().await;
    assert!(fresh.as_ref().is_err_and(is_refused), "{fresh:?}");
}

/// The old primary comes back while it still takes itself for one: nobody goes there.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_old_primary_that_returns_is_not_used() {
    let Some(mut topology) = SentinelServers::start() else { return };
    let client = patient(&topology.url());
    let guard = held(&client, "held").await;
    let killed = blocking(|| topology.kill_primary());
    let primary = blocking(|| topology.await_failover(killed));
    blocking(|| topology.servers[killed].restart());
    assert!(blocking(|| topology.servers[killed].cli(&["ROLE"])).starts_with("master"));
    let fresh = patient(&topology.url());
    drop(fresh.mutex("other").lock().await.expect("the lock"));
    let _ = guard.release().await;
    assert_eq!(blocking(|| topology.servers[killed].cli(&["DBSIZE"])), "0");
    let said = blocking(|| topology.servers[primary].cli(&["INFO", "commandstats"]));
    assert!(said.contains("cmdstat_evalsha"), "{said}");
}

/// A Sentinel that is cut off with the old primary answers first; the others know better.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_highest_epoch_is_believed() {
    let Some(old) = SentinelServers::with(1, 1) else { return };
    let Some(new) = SentinelServers::with(2, 2) else { return };
    let primary = blocking(|| new.force_failover());
    let hosts = |topology: &SentinelServers| {
        let hosts = topology.sentinels.iter().map(|it| format!("127.0.0.1:{}", it.port()));
        hosts.collect::<Vec<_>>().join(",")
    };
    let url = format!("redis+sentinel://{},{}/{MASTER_NAME}", hosts(&old), hosts(&new));
    let client = patient(&url);
    let guard = held(&client, "a").await;
    assert_eq!(blocking(|| old.servers[0].cli(&["DBSIZE"])), "0");
    assert_eq!(blocking(|| new.servers[primary].keys()).len(), 1);
    drop(guard);
}

/// One of three addresses leads to a Sentinel of other servers, which knows a primary of the
/// same name and has seen more failovers: the two that agree are believed.
#[tokio::test(flavor = "multi_thread", worker_threads = 4)]
async fn a_sentinel_of_other_servers_is_not_believed() {
    let Some(mut topology) = SentinelServers::start() else { return };
    let Some(other) = SentinelServers::with(2, 1) else { return };
    let elsewhere = blocking(|| other.force_failover());
    let own_epoch = blocking(|| {
        topology.sentinels[0].cli(&["SENTINEL", "MASTER", MASTER_NAME]).contains("config-epoch\n0")
    });
    assert!(own_epoch, "the other one has seen more failovers");
    let proxy = Proxy::listen(topology.sentinels[2].port());
    let mut hosts: Vec<_> = topology.sentinels[..2].iter().map(RedisServer::port).collect();
    hosts.push(proxy.port());
    let hosts: Vec<_> = hosts.iter().map(|port| format!("127.0.0.1:{port}")).collect();
    let url = format!("redis+sentinel://{}/{MASTER_NAME}", hosts.join(","));
    let client = patient(&url);
    let guard = held(&client, "held").await;
    proxy.redirect(other.sentinels[0].port());
    // Connections are made anew, by this client and by one that knows nothing yet.
    let fresh = patient(&url);
    drop(fresh.mutex("fresh").lock().await.expect("the lock"));
    blocking(|| topology.servers[0].cli(&["CLIENT", "KILL", "TYPE", "normal"]));
    drop(client.mutex("again").lock().await.expect("the lock"));
    // While the two that agree are away, the third is not believed either.
    blocking(|| (topology.sentinels[0].kill(), topology.sentinels[1].kill()));
    blocking(|| topology.servers[0].cli(&["CLIENT", "KILL", "TYPE", "normal"]));
    let error = client.mutex("alone").wait(Duration::from_secs(2)).lock().await;
    assert_eq!(error.expect_err("nobody to believe").kind(), ErrorKind::Unavailable);
    for server in &other.servers {
        assert_eq!(blocking(|| server.cli(&["DBSIZE"])), "0");
    }
    assert!(elsewhere < other.servers.len());
    blocking(|| {
        topology.sentinels[0].restart();
        topology.sentinels[1].restart();
    });
    drop(client.mutex("alone").lock().await.expect("the lock"));
    assert_ne!(guard.state(), State::Lost);
}

/// The rights that docs/redis-sentinel.acl and docs/redis.acl name are enough.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_least_rights_are_enough() {
    let Some(topology) = SentinelServers::with(1, 1) else { return };
    let grant = |server: &RedisServer, rights: &str| {
        let lines = rights.lines().filter(|line| !line.starts_with('#'));
        let rights: Vec<&str> = lines.flat_map(str::split_whitespace).collect();
        let command = [&["ACL", "SETUSER", "dlock", "reset", "on", ">secret"], &rights[..]];
        assert_eq!(blocking(|| server.cli(&command.concat())), "OK");
        blocking(|| server.cli(&["ACL", "SETUSER", "dlock", "+client|setinfo"])); // from 7.2 on
    };
    let (server, sentinel) = (&topology.servers[0], &topology.sentinels[0]);
    grant(server, include_str!("../../docs/redis.acl"));
    grant(sentinel, include_str!("../../docs/redis-sentinel.acl"));
    let port = sentinel.port();
    let url = format!("redis+sentinel://dlock:secret@127.0.0.1:{port}/{MASTER_NAME}");
    let url = format!("{url}?sentinel.user=dlock&sentinel.password=secret");
    let client = Dlock::connect(&url).await.expect("a client");
    let guard = client.mutex("a").lock().await.expect("the lock");
    eventually("the watch is subscribed", async || {
        let clients = blocking(|| sentinel.cli(&["CLIENT", "LIST"]));
        clients.lines().any(|it| it.contains(" sub=1 ") && it.contains("user=dlock"))
    })
    .await;
    assert_eq!(guard.release().await.expect("an answer"), ReleaseOutcome::Released);
    let unknown = client.servers().await.expect("the servers");
    assert_eq!(unknown.len(), 2, "{unknown:?}");
    for server in [server, sentinel] {
        let denied = blocking(|| server.cli(&["ACL", "LOG"]));
        assert!(!denied.contains("dlock"), "{denied}");
    }
}

/// Row 14: the newest grants are not replicated, the replica's clock is 2 s ahead or
/// behind, and it is promoted within 200 ms: tokens rise, at the latest when the failover
/// took longer than the clock is behind.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn tokens_rise_up_to_the_documented_skew() {
    let skew = Duration::from_secs(2);
    for (old_ahead, new_ahead) in [(Duration::ZERO, skew), (skew, Duration::ZERO)] {
        let Some((old, old_clock)) = Clock::of_a_server() else { return };
        let Some((new, new_clock)) = Clock::of_a_server() else { return };
        old_clock.ahead(old_ahead);
        new_clock.ahead(new_ahead);
        let port = old.port().to_string();
        blocking(|| new.cli(&["REPLICAOF", "127.0.0.1", &port]));
        let client = old.client();
        blocking(|| old.cli(&["SET", "written", "1"]));
        let copied = || blocking(|| new.cli(&["GET", "written"])) == "1";
        eventually("it is replicated", async || copied()).await;
        // From here on nothing is, and the replica is a primary.
        blocking(|| new.cli(&["REPLICAOF", "NO", "ONE"]));
        let granted = Instant::now();
        let token = client.mutex("a").lock().await.expect("the lock").token();
        let next = async || new.client().mutex("a").lock().await.expect("the lock").token();
        let soon = next().await;
        assert!(granted.elapsed() < skew, "the machine is too busy for this test");
        if new_ahead > old_ahead {
            assert!(soon > token);
        } else {
            assert!(soon < token, "the promotion took no time, and the clock is behind");
            // The token is from after `granted`, so the whole skew from now on will do.
            tokio::time::sleep(skew + Duration::from_millis(100)).await;
            assert!(next().await > token, "a failover that takes that long is safe");
        }
    }
}

/// Operators see which server is what.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_topology_is_told() {
    let Some(mut topology) = SentinelServers::start() else { return };
    let client = Dlock::connect(&topology.url()).await.expect("a client");
    blocking(|| topology.sentinels[2].kill());
    let servers = client.servers().await.expect("the servers");
    let of = |role| servers.iter().filter(|it| it.role == role).collect::<Vec<_>>();
    let [primary] = of(ServerRole::Primary)[..] else { panic!("{servers:?}") };
    assert_eq!(primary.address, format!("127.0.0.1:{}", topology.servers[0].port()));
    let replicas = of(ServerRole::Replica);
    assert!(replicas.len() == 2 && replicas.iter().all(|it| it.behind.is_some()), "{replicas:?}");
    let sentinels = of(ServerRole::Sentinel);
    assert_eq!(sentinels.len(), 3);
    assert_eq!(sentinels.iter().filter(|it| it.note.is_some()).count(), 1, "{sentinels:?}");
}

/// Checks that no client is made, and why.
async fn refused(url: &str, kind: ErrorKind, advice: &str) {
    let error = Dlock::connect(url).await.expect_err("refused");
    assert_eq!(error.kind(), kind, "{error}");
    assert!(error.to_string().contains(advice), "no {advice:?} in: {error}");
    assert!(!format!("{error} {error:?}").contains("horse"), "a secret: {error:?}");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn bad_input_says_what_to_change() {
    let Some(topology) = SentinelServers::with(1, 1) else { return };
    let (server, sentinel) = (topology.servers[0].port(), topology.sentinels[0].port());
    let url = format!("redis+sentinel://127.0.0.1:{sentinel}/nobody");
    refused(&url, ErrorKind::Config, "it knows `mymaster`").await;
    let url = format!("redis+sentinel://127.0.0.1:{server}/mymaster");
    refused(&url, ErrorKind::Config, "is not a Sentinel").await;
    refused(&format!("redis://127.0.0.1:{sentinel}"), ErrorKind::Config, "redis+sentinel://").await;
    refused("redis+sentinel://127.0.0.1:1/mymaster", ErrorKind::Unavailable, "Sentinels").await;
    // One wrong host among three does no harm.
    let url =
        format!("redis+sentinel://127.0.0.1:1,127.0.0.1:{server},127.0.0.1:{sentinel}/mymaster/0");
    drop(Dlock::connect(&url).await.expect("a client").mutex("a").lock().await.expect("the lock"));
}

/// Sentinels and servers have passwords of their own.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn sentinels_have_their_own_password() {
    let started = SentinelServers::with_passwords("right-horse", "stable-horse");
    let Some(topology) = started else { return };
    let port = topology.sentinels[0].port();
    let url = format!("redis+sentinel://:right-horse@127.0.0.1:{port}/mymaster");
    refused(&url, ErrorKind::Denied, "sentinel.password_file").await;
    let directory = tempfile::tempdir().expect("a directory");
    let file = directory.path().join("password");
    std::fs::write(&file, "stable-horse\n").expect("a file");
    let both = format!("{url}?sentinel.password_file={}", file.display());
    drop(Dlock::connect(&both).await.expect("a client").mutex("a").lock().await.expect("it"));
    let wrong = format!(
        "redis+sentinel://:wrong-horse@127.0.0.1:{port}/mymaster?sentinel.password=stable-horse"
    );
    refused(&wrong, ErrorKind::Denied, "`password_file`").await;
}

/// With `min_replicas` a lock that too few replicas have is given back, and one that was
/// granted survives the failover.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn min_replicas_covers_grants_renewals_and_hand_overs() {
    let Some(mut topology) = SentinelServers::start() else { return };
    topology.set_down_after(LONG);
    let url = format!("{}?min_replicas=2", topology.url());
    let (one, two) = (patient(&url), patient(&url));
    let first = one.mutex("a").lock().await.expect("the lock");
    let waiting = tokio::spawn({
        let lock = two.mutex("a");
        async move { lock.lock().await }
    });
    eventually("somebody waits", async || {
        one.inspect("a").await.is_ok_and(|state| state.waiters.len() == 1)
    })
    .await;
    let short = one.mutex("short").ttl(Duration::from_secs(3)).lock().await.expect("the lock");
    blocking(|| block_replication(&topology.servers[0]));
    eventually("the error says why", async || {
        let error = one.mutex("b").try_lock().await.expect_err("too few replicas");
        assert_eq!(error.kind(), ErrorKind::Unavailable, "{error}");
        error.to_string().contains("`min_replicas` wants 2")
    })
    .await;
    // While a call waits for replicas, operators do not wait for it.
    let trying = tokio::spawn({
        let lock = one.mutex("c");
        async move { lock.try_lock().await.map(drop) }
    });
    let (began, mut looks) = (Instant::now(), 0);
    while !trying.is_finished() {
        one.inspect("a").await.expect("an inspection");
        looks += 1;
    }
    let patience = Duration::from_millis(400); // a quarter of the call time-out, nearly
    assert!(began.elapsed() > patience && looks > 3, "{looks} in {:?}", began.elapsed());
    assert!(trying.await.expect("the task").is_err());
    let left = || blocking(|| topology.servers[0].cli(&["EXISTS", "dlock:2:{test:b}:l"]));
    eventually("it is given back", async || left() == "0").await;
    // A hand-over that no replica has is no grant.
    let token = first.token();
    let _ = first.release().await;
    assert_eq!(short.lost().await, LossReason::Deadline, "renewals do not count either");
    assert!(!waiting.is_finished());
    blocking(|| allow_replication(&topology.servers[0]));
    let guard = waiting.await.expect("the task").expect("the lock, once they are back");
    assert!(guard.token() > token);
    topology.set_down_after(SHORT);
    let killed = blocking(|| topology.kill_primary());
    blocking(|| topology.await_failover(killed));
    eventually("the lock is renewed at the new primary", async || {
        two.inspect("a").await.is_ok_and(|state| state.holders.len() == 1)
    })
    .await;
    assert_ne!(guard.state(), State::Lost);
}

/// A client of the driver crate that knows the Sentinels.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_sentinel_client_of_the_redis_crate_will_do() {
    use redis::sentinel::{SentinelClient, SentinelServerType};
    let Some(mut topology) = SentinelServers::start() else { return };
    let hosts: Vec<_> = topology.sentinels.iter().map(|it| it.url()).collect();
    let name = MASTER_NAME.to_owned();
    let given = SentinelClient::build(hosts, name, None, SentinelServerType::Master);
    let builder = Dlock::builder().redis_sentinel(given.expect("a client"));
    let client = builder.wait(Duration::from_secs(30)).connect().await.expect("a client");
    drop(client.mutex("a").lock().await.expect("the lock"));
    let killed = blocking(|| topology.kill_primary());
    drop(client.mutex("b").lock().await.expect("the lock, after the failover"));
    blocking(|| topology.await_failover(killed)); // the other Sentinels may learn of it later
}

/// The primary that the Sentinels name cannot be reached.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_unreachable_primary_is_named() {
    let Some(mut topology) = SentinelServers::with(1, 1) else { return };
    let port = topology.servers[0].port();
    topology.servers[0].kill();
    let url = topology.url();
    refused(&url, ErrorKind::Unavailable, &format!("127.0.0.1:{port}, where the Sentinels")).await;
    refused(&url, ErrorKind::Unavailable, "announce-ip").await;
}
