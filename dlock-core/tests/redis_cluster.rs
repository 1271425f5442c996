//! Locks in a Redis Cluster: conformance, failovers, slots that move, and errors that say
//! what to change.

use std::sync::Arc;
use std::time::{Duration, Instant};

use dlock::backend::redis::Redis;
use dlock::backend::{Cursor, ServerRole};
use dlock::{Dlock, ErrorKind, LossReason, ReleaseOutcome, State};
use dlock_testkit::conformance::{Suite, eventually};
use dlock_testkit::failover::{AFTER_PROMOTION, Load};
use dlock_testkit::process::now;
use dlock_testkit::proxy::Proxy;
use dlock_testkit::redis::{RedisServer, client};
use dlock_testkit::topology::{ClusterServers, block_replication};

/// A number from the environment, for longer runs.
fn setting(name: &str, usual: u64) -> u64 {
    std::env::var(name).ok().and_then(|it| it.parse().ok()).unwrap_or(usual)
}

const TTL: Duration = Duration::from_secs(5);

fn patient(url: &str) -> Dlock {
    let builder = client(url).ttl(TTL).wait(Duration::from_secs(30));
    builder.connect_lazy().expect("a client")
}

/// A cluster in which a busy machine is no reason for a failover.
fn without_failovers() -> Option<ClusterServers> {
    let options = ["--cluster-require-full-coverage", "no", "--cluster-node-timeout", "60000"];
    ClusterServers::with(3, 1, &options)
}

/// Runs what blocks the thread beside the tasks of the test.
fn blocking<T>(what: impl FnOnce() -> T) -> T {
    tokio::task::block_in_place(what)
}

/// The slot of a lock in the namespace of the tests.
fn slot_of(cluster: &ClusterServers, key: &str) -> u16 {
    blocking(|| cluster.slot_of(&format!("{{test:{key}}}")))
}

/// A key whose lock is at this node.
fn key_at(cluster: &ClusterServers, node: usize) -> String {
    keys_at(cluster, node, 1).remove(0)
}

/// Keys whose locks are at this node.
fn keys_at(cluster: &ClusterServers, node: usize, count: usize) -> Vec<String> {
    let keys = (0..1_000).map(|n| format!("key-{n}"));
    let there = keys.filter(|key| {
        let slot = slot_of(cluster, key);
        blocking(|| cluster.primary_of(slot)) == node
    });
    there.take(count).collect()
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn conformance_with_the_least_rights() {
    let Some(cluster) = without_failovers() else { return };
    let cluster = Arc::new(cluster);
    let rights =
        [include_str!("../../docs/redis.acl"), include_str!("../../docs/redis-cluster.acl")];
    let lines = rights.iter().flat_map(|it| it.lines()).filter(|line| !line.starts_with('#'));
    let rights: Vec<&str> = lines.flat_map(str::split_whitespace).collect();
    for node in &cluster.nodes {
        let command = [&["ACL", "SETUSER", "dlock", "reset", "on", ">secret"], &rights[..]];
        assert_eq!(blocking(|| node.cli(&command.concat())), "OK");
        blocking(|| node.cli(&["ACL", "SETUSER", "dlock", "+client|setinfo"])); // from 7.2 on
        // From 7.0 on; without them hand-overs are broadcast.
        let sharded = ["ACL", "SETUSER", "dlock", "+spublish", "+ssubscribe", "+sunsubscribe"];
        blocking(|| node.cli(&sharded));
    }
    let url = cluster.url().replace("://", "://dlock:secret@");
    Suite::new(move || Redis::new(&url, "test").expect("a URL")).run().await;
    for node in &cluster.nodes[..3] {
        eventually("nothing is left", async || {
            blocking(|| node.keys()).iter().all(|key| key.ends_with("}:b"))
        })
        .await;
        let denied = blocking(|| node.cli(&["ACL", "LOG"]));
        assert!(!denied.contains("dlock"), "{denied}");
    }
}

/// One node knows the marker of a namespace. It is asked before the first call, whichever
/// node the call is for.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_namespace_of_another_layout_is_refused() {
    const MARKER: &str = "dlock:layout:test";
    let Some(cluster) = without_failovers() else { return };
    let slot = blocking(|| cluster.slot_of(MARKER));
    let keeper = blocking(|| cluster.primary_of(slot));
    let other = (0..3).find(|node| *node != keeper).expect("another node");
    let key = key_at(&cluster, other);
    // Its seed does not know the marker either.
    let url = cluster.nodes[other].url().replace("redis://", "redis+cluster://");
    let client = patient(&url);
    let held = client.mutex(key.as_str()).lock().await.expect("the lock");
    let marker = |command: &[&str]| blocking(|| cluster.nodes[keeper].cli(command));
    assert_eq!(marker(&["GET", MARKER]), "2", "the first program writes it");
    marker(&["SET", MARKER, "3"]);
    let is_refused = |error: dlock::Error| {
        assert_eq!(error.kind(), ErrorKind::Config, "{error}");
        assert!(error.to_string().contains("kept in layout 3"), "{error}");
    };
    is_refused(dlock_testkit::redis::client(&url).connect().await.expect_err("refused"));
    is_refused(patient(&url).mutex(key.as_str()).try_lock().await.expect_err("refused"));
    is_refused(patient(&url).list("", Cursor::default()).await.expect_err("refused"));
    // A client that was connected is refused after its next connection to that node.
    marker(&["CLIENT", "KILL", "TYPE", "normal"]);
    let lost = tokio::time::timeout(TTL * 3, held.lost()).await;
    lost.expect("by its deadline");
    is_refused(client.mutex(key.as_str()).try_lock().await.expect_err("refused"));
    marker(&["DEL", MARKER]);
    // The slot of the marker moves, and is asked for where it is by then.
    blocking(|| cluster.move_slot(slot, other));
    eventually("locks are granted again", async || {
        client.mutex(key.as_str()).try_lock().await.is_ok_and(|guard| guard.is_some())
    })
    .await;
    assert_eq!(blocking(|| cluster.nodes[other].cli(&["GET", MARKER])), "2");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn locks_are_spread_over_the_primaries_and_listed() {
    let Some(cluster) = without_failovers() else { return };
    let client = patient(&cluster.url());
    let mut guards = Vec::new();
    for n in 0..60 {
        guards.push(client.mutex(format!("order:{n}")).lock().await.expect("the lock"));
    }
    for node in &cluster.nodes[..3] {
        assert_ne!(blocking(|| node.keys()), [""; 0]);
    }
    let mut keys = Vec::new();
    let mut cursor = Some(Cursor::default());
    while let Some(from) = cursor {
        let page = client.list("order:", from).await.expect("a page");
        keys.extend(page.keys.iter().map(|key| key.as_str().to_owned()));
        cursor = page.next;
    }
    keys.sort();
    keys.dedup();
    assert_eq!(keys.len(), 60);
    assert!(client.health().await.is_ok());
    let servers = client.servers().await.expect("the servers");
    let count = |role| servers.iter().filter(|it| it.role == role).count();
    assert_eq!((count(ServerRole::Primary), count(ServerRole::Replica)), (3, 3), "{servers:?}");
    assert!(servers.iter().all(|it| it.note.is_none()), "{servers:?}");
    for guard in guards {
        assert_eq!(guard.release().await.expect("an answer"), ReleaseOutcome::Released);
    }
}

/// A slot is held half-way while its locks are held and wanted: nobody notices.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_slot_half_way_changes_nothing() {
    let Some(cluster) = without_failovers() else { return };
    let (one, two) = (patient(&cluster.url()), patient(&cluster.url()));
    let key = "a";
    let slot = slot_of(&cluster, key);
    let from = blocking(|| cluster.primary_of(slot));
    let to = (from + 1) % 3;
    // Held before, and the key is still at the old node; and wanted.
    let held = one.mutex(key).lock().await.expect("the lock");
    let moving = blocking(|| cluster.begin_move(slot, to));
    let waiting = tokio::spawn({
        let lock = two.mutex(key).wait_unlimited();
        async move { lock.lock().await }
    });
    let began = Instant::now();
    let long = Duration::from_secs(setting("DLOCK_TEST_HALF_WAY_SECONDS", 6));
    let mut cycles = 0;
    while began.elapsed() < long {
        // A semaphore of that slot does not exist yet: it is made at the new node.
        let permit = two.semaphore(key, 2).permits(1).lock().await.expect("a permit");
        assert_eq!(permit.release().await.expect("an answer"), ReleaseOutcome::Released);
        let state = one.inspect(key).await.expect("an inspection");
        assert_eq!((state.holders.len(), state.waiters.len()), (1, 1), "{state:?}");
        assert_eq!(held.state(), State::Held);
        cycles += 1;
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
    assert!(cycles > 10 && !waiting.is_finished());
    blocking(|| moving.move_keys(usize::MAX));
    assert_eq!(one.inspect(key).await.expect("an inspection").holders.len(), 1);
    let token = held.token();
    assert_eq!(held.release().await.expect("an answer"), ReleaseOutcome::Released);
    let successor = waiting.await.expect("the task").expect("the lock");
    assert!(successor.token() > token);
    blocking(|| moving.finish());
    assert_eq!(successor.release().await.expect("an answer"), ReleaseOutcome::Released);
    let broken = one.mutex(key).lock().await.expect("the lock");
    assert_eq!(two.break_lock(key).await.expect("an answer"), 1);
    assert!(matches!(broken.lost().await, LossReason::Broken { .. }));
}

/// Slots move to and fro under load: no error reaches a caller, nothing is held twice.
/// With `DLOCK_TEST_RESHARD_SLOTS=1000 DLOCK_TEST_RESHARD_SECONDS=120` it is a soak.
#[tokio::test(flavor = "multi_thread", worker_threads = 4)]
async fn slots_move_under_load() {
    let Some(cluster) = without_failovers() else { return };
    let clients: Vec<_> = (0..2).map(|_| patient(&cluster.url())).collect();
    let count = setting("DLOCK_TEST_RESHARD_SLOTS", 20);
    let keys = usize::try_from(count.min(200)).expect("a number");
    let load = Load::start(&clients, 30, keys);
    load.keys_granted_since(now()).await;
    let mut slots: Vec<u16> = (0..keys).map(|n| slot_of(&cluster, &format!("load:{n}"))).collect();
    // Slots without keys move as well.
    slots.extend((0..u16::try_from(count).expect("a number")).skip(keys));
    slots.sort_unstable();
    slots.dedup();
    let long = Duration::from_secs(setting("DLOCK_TEST_RESHARD_SECONDS", 10));
    let (began, mut moved) = (Instant::now(), 0);
    while began.elapsed() < long {
        blocking(|| cluster.move_slots(&slots));
        moved += slots.len();
    }
    let report = load.stop().await;
    println!("{moved} slots moved, {} locks held", report.checked);
    assert_eq!(report.violations, Vec::<String>::new());
    assert_eq!(report.errors, Vec::<String>::new());
    assert!(moved > 20 && report.checked > 500, "{moved} {}", report.checked);
}

/// 200 tasks on 50 keys, and a primary is killed.
#[tokio::test(flavor = "multi_thread", worker_threads = 4)]
async fn row_03_a_primary_is_killed_under_load() {
    let Some(mut cluster) = ClusterServers::start() else { return };
    let clients: Vec<_> = (0..4).map(|_| patient(&cluster.url())).collect();
    let load = Load::start(&clients, 50, 50).watching(&cluster);
    for round in 0..setting("DLOCK_TEST_FAILOVERS", 2) {
        load.keys_granted_since(now()).await;
        let slot = slot_of(&cluster, "load:0");
        let killed = blocking(|| cluster.primary_of(slot));
        let from = now();
        blocking(|| cluster.nodes[killed].kill());
        blocking(|| cluster.await_failover(slot, killed));
        let promoted = now();
        load.recovers(round, from, promoted, TTL).await;
        blocking(|| cluster.nodes[killed].restart());
        blocking(|| cluster.settle());
    }
    let report = load.stop().await;
    println!("{} locks held, {} overlaps", report.checked, report.excused);
    assert_eq!(report.violations, Vec::<String>::new());
    assert_eq!(report.errors, Vec::<String>::new());
    assert!(report.checked > 1_000, "{}", report.checked);
}

/// A lease that the promoted replica does not know is lost within a second; leases at
/// other nodes are held on.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn leases_are_renewed_or_lost_within_a_second() {
    let Some(mut cluster) = ClusterServers::start() else { return };
    let client = patient(&cluster.url());
    let (here, there) = (key_at(&cluster, 0), key_at(&cluster, 1));
    let released = keys_at(&cluster, 0, 2).remove(1);
    let slot = slot_of(&cluster, &here);
    let ttl = Duration::from_secs(30);
    let other = client.mutex(there.as_str()).ttl(ttl).lock().await.expect("the lock");
    let before = client.mutex(released.as_str()).ttl(ttl).lock().await.expect("the lock");
    assert_eq!(blocking(|| cluster.nodes[0].cli(&["WAIT", "1", "5000"])), "1");
    blocking(|| block_replication(&cluster.nodes[0]));
    let lost = client.mutex(here.as_str()).ttl(ttl).lock().await.expect("the lock");
    assert_eq!(before.release().await.expect("an answer"), ReleaseOutcome::Released);
    blocking(|| cluster.nodes[0].kill());
    // Releases at other nodes go on meanwhile.
    let going_on = keys_at(&cluster, 1, 2).remove(1);
    let began = Instant::now();
    while began.elapsed() < Duration::from_millis(600) {
        let guard = client.mutex(going_on.as_str()).lock().await.expect("the lock");
        assert_eq!(guard.release().await.expect("an answer"), ReleaseOutcome::Released);
    }
    blocking(|| cluster.await_failover(slot, 0));
    let promoted = Instant::now();
    assert_eq!(lost.lost().await, LossReason::Forgotten);
    assert!(promoted.elapsed() < AFTER_PROMOTION, "{:?}", promoted.elapsed());
    drop(patient(&cluster.url()).mutex(released.as_str()).lock().await.expect("the lock"));
    assert!(promoted.elapsed() < AFTER_PROMOTION, "a lost release is made again");
    let next = client.mutex(here.as_str()).lock().await.expect("the lock");
    assert!(next.token() > lost.token(), "the fence rejects the older guard");
    assert_eq!(other.state(), State::Held);
    assert_eq!(other.release().await.expect("an answer"), ReleaseOutcome::Released);
}

/// A replica without the newest locks is promoted while the old primary lives, so no
/// connection breaks and nobody tells clients. Who lost a lock hears it within a second.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_loser_is_told_although_its_connection_lives() {
    let Some(cluster) = ClusterServers::start() else { return };
    let client = patient(&cluster.url());
    let key = key_at(&cluster, 0);
    blocking(|| block_replication(&cluster.nodes[0]));
    let ttl = Duration::from_secs(60);
    let lost = client.mutex(key.as_str()).ttl(ttl).lock().await.expect("the lock");
    blocking(|| cluster.force_lossy_failover(0));
    let promoted = Instant::now();
    assert_eq!(lost.lost().await, LossReason::Forgotten);
    assert!(promoted.elapsed() < AFTER_PROMOTION, "{:?}", promoted.elapsed());
    let next = client.mutex(key.as_str()).lock().await.expect("the lock");
    assert!(next.token() > lost.token(), "the fence rejects the older guard");
}

/// A primary dies, and its address is given to a node of another cluster, which serves the
/// same slots and has seen more failovers. No lock gets there, and the client stays with its
/// cluster.
#[tokio::test(flavor = "multi_thread", worker_threads = 4)]
async fn an_address_that_another_cluster_was_given_is_left_alone() {
    let mut proxies = Vec::new();
    let started = blocking(|| {
        ClusterServers::behind(|port| {
            proxies.push(Proxy::listen(port));
            proxies[proxies.len() - 1].port()
        })
    });
    let Some(mut cluster) = started else { return };
    let Some(other) = blocking(|| ClusterServers::with(3, 0, &[])) else { return };
    blocking(|| other.raise_epoch(20));
    let client = patient(&cluster.url());
    let (moved, stays) = (key_at(&cluster, 0), key_at(&cluster, 1));
    let ttl = Duration::from_secs(30);
    let held = client.mutex(stays.as_str()).ttl(ttl).lock().await.expect("the lock");
    drop(client.mutex(moved.as_str()).lock().await.expect("the lock"));
    let slot = slot_of(&cluster, &moved);
    assert_eq!(blocking(|| other.primary_of(slot)), 0, "it serves the same slots");
    blocking(|| cluster.nodes[0].kill());
    proxies[0].redirect(other.nodes[0].port());
    let began = Instant::now();
    for n in 0.. {
        let key = if n % 2 == 0 { moved.as_str() } else { "anything" };
        let guard = client.mutex(key).lock().await.expect("the lock, after the failover");
        let _ = guard.release().await;
        if began.elapsed() > Duration::from_secs(8) {
            break;
        }
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
    assert_eq!(held.state(), State::Held);
    assert_eq!(held.release().await.expect("an answer"), ReleaseOutcome::Released);
    for node in &other.nodes {
        assert_eq!(blocking(|| node.cli(&["DBSIZE"])), "0");
        let said = blocking(|| node.cli(&["INFO", "commandstats"]));
        assert!(!said.contains("cmdstat_eval"), "{said}");
    }
}

/// A replica was removed from the cluster and still runs, as it does when an operator replaces
/// it: it has the epoch of the others and an empty map. It is in the URL, before all others.
#[tokio::test(flavor = "multi_thread", worker_threads = 4)]
async fn a_node_that_was_removed_is_not_believed() {
    let Some(cluster) = without_failovers() else { return };
    let client = patient(&cluster.url_of_all());
    let load = Load::start(std::slice::from_ref(&client), 20, 20);
    load.keys_granted_since(now()).await;
    let removed = cluster.nodes.len() - 1;
    blocking(|| cluster.remove_replica(removed));
    let state = blocking(|| cluster.nodes[removed].cli(&["CLUSTER", "INFO"]));
    assert!(state.contains("cluster_state:fail"), "{state}");
    let looks = || -> u64 {
        let said = blocking(|| cluster.nodes[0].cli(&["INFO", "commandstats"]));
        let line = said.lines().find_map(|line| line.strip_prefix("cmdstat_cluster|slots:calls="));
        line.map_or(0, |line| line.split(',').next().and_then(|it| it.parse().ok()).expect("it"))
    };
    for node in &cluster.nodes[..3] {
        // The map is asked for now.
        blocking(|| node.cli(&["CLIENT", "KILL", "TYPE", "normal"]));
    }
    load.keys_granted_since(now()).await;
    tokio::time::sleep(Duration::from_secs(2)).await;
    let before = looks();
    let long = Duration::from_secs(setting("DLOCK_TEST_REMOVED_SECONDS", 6));
    tokio::time::sleep(long).await;
    let often = looks() - before;
    assert!(often <= 1 + long.as_secs() / 10, "{often} looks at the map in {long:?}");
    let report = load.stop().await;
    assert_eq!(report.violations, Vec::<String>::new());
    assert_eq!(report.errors, Vec::<String>::new());
    assert!(report.checked > 200, "{}", report.checked);
}

/// The primary stops with renewals on their way to it, and its host keeps the connections.
/// Who lost a lock by the failover hears it within a second of the promotion, and not when
/// the renewal is given up.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_loser_is_told_although_its_renewal_is_unanswered() {
    let Some(cluster) = ClusterServers::start() else { return };
    let builder = client(&cluster.url()).ttl(Duration::from_secs(30)).wait(TTL);
    let client = builder.call_timeout(Duration::from_secs(10)).connect_lazy().expect("a client");
    let keys = keys_at(&cluster, 0, 30);
    let slot = slot_of(&cluster, &keys[0]);
    blocking(|| block_replication(&cluster.nodes[0]));
    let mut guards = Vec::new();
    for key in &keys {
        guards.push(client.mutex(key.as_str()).lock().await.expect("the lock"));
    }
    // Renewals are spread out over some seconds, the last of them after ten.
    let calls = || {
        let said = blocking(|| cluster.nodes[0].cli(&["INFO", "commandstats"]));
        let line = said.lines().find_map(|line| line.strip_prefix("cmdstat_evalsha:calls="));
        line.and_then(|line| line.split(',').next()?.parse::<u64>().ok()).unwrap_or(0)
    };
    let before = calls();
    eventually("the renewals have begun", async || calls() > before).await;
    cluster.nodes[0].pause();
    blocking(|| cluster.await_failover(slot, 0));
    let promoted = Instant::now();
    for guard in &guards {
        assert_eq!(guard.lost().await, LossReason::Forgotten);
    }
    println!("all of them are told {:?} after the promotion", promoted.elapsed());
    assert!(promoted.elapsed() < AFTER_PROMOTION, "{:?}", promoted.elapsed());
    cluster.nodes[0].resume();
}

/// The first node of the URL is removed from the cluster and still runs. It hears of nothing
/// any more, so notices are heard elsewhere.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn notices_are_heard_although_a_node_was_removed() {
    let Some(cluster) = without_failovers() else { return };
    let (holder, operator) = (patient(&cluster.url_of_all()), patient(&cluster.url()));
    let ttl = Duration::from_secs(60);
    let (before, after) = (holder.mutex("before").ttl(ttl), holder.mutex("after").ttl(ttl));
    let before = before.lock().await.expect("the lock");
    blocking(|| cluster.remove_replica(cluster.nodes.len() - 1));
    let after = after.lock().await.expect("the lock");
    for (key, guard) in [("before", before), ("after", after)] {
        let began = Instant::now();
        assert_eq!(operator.break_lock(key).await.expect("broken"), 1);
        assert!(matches!(guard.lost().await, LossReason::Broken { .. }));
        assert!(began.elapsed() < Duration::from_millis(500), "{:?}", began.elapsed());
    }
}

/// A hand-over is told at the node that makes it, and not to every node.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn hand_overs_are_told_at_one_node() {
    let Some(cluster) = without_failovers() else { return };
    let messages = |name: &str| -> u64 {
        let sent = |node: &RedisServer| -> u64 {
            let info = node.cli(&["CLUSTER", "INFO"]);
            let line = info.lines().find_map(|line| line.trim().strip_prefix(name));
            line.and_then(|rest| rest.trim_start_matches(':').parse().ok()).unwrap_or(0)
        };
        blocking(|| cluster.nodes.iter().map(sent).sum())
    };
    let clients = [patient(&cluster.url()), patient(&cluster.url())];
    let cycles = async |count: usize| {
        let taking = clients.clone().map(|client| {
            tokio::spawn(async move {
                for _ in 0..count {
                    let guard = client.mutex("hot").fair().lock().await.expect("the lock");
                    tokio::time::sleep(Duration::from_millis(1)).await;
                    let _ = guard.release().await.expect("an answer");
                }
            })
        });
        for task in taking {
            task.await.expect("the task");
        }
    };
    cycles(50).await; // they are subscribed by now
    let is_new =
        blocking(|| cluster.nodes[0].cli(&["COMMAND", "INFO", "SPUBLISH"])).contains("spublish");
    let before = messages("cluster_stats_messages_publish_sent");
    let began = Instant::now();
    cycles(100).await;
    let sent = messages("cluster_stats_messages_publish_sent") - before;
    println!("{sent} broadcasts for 200 hand-overs, in {:?}", began.elapsed());
    if is_new {
        assert!(sent < 50, "{sent} messages to all nodes for 200 hand-overs");
        assert!(messages("cluster_stats_messages_publishshard_sent") > 100);
    }
    // A slot that moves takes its channels along.
    let slot = slot_of(&cluster, "hot");
    let to = (blocking(|| cluster.primary_of(slot)) + 1) % 3;
    blocking(|| cluster.move_slot(slot, to));
    cycles(200).await;
    let before = messages("cluster_stats_messages_publish_sent");
    cycles(100).await;
    let sent = messages("cluster_stats_messages_publish_sent") - before;
    assert!(!is_new || sent < 50, "{sent} messages after the move");
    assert!(began.elapsed() < Duration::from_secs(15), "no hand-over waits for a second");
}

/// A node takes no more connections. The subscriptions for the locks that are waited for
/// there are not tried again and again: their hand-overs are broadcast meanwhile.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_node_that_takes_no_connections_is_not_besieged() {
    let mut proxies = Vec::new();
    let started = blocking(|| {
        ClusterServers::behind(|port| {
            proxies.push(Proxy::listen(port));
            proxies[proxies.len() - 1].port()
        })
    });
    let Some(cluster) = started else { return };
    let (holder, waiter) = (patient(&cluster.url()), patient(&cluster.url()));
    let keys = keys_at(&cluster, 0, 60);
    let mut guards = Vec::new();
    for key in &keys {
        let lock = holder.mutex(key.as_str()).ttl(Duration::from_secs(60));
        guards.push(lock.lock().await.expect("the lock"));
    }
    let connected = key_at(&cluster, 1);
    drop(waiter.mutex(format!("{}-free", keys[0])).lock().await.expect("the lock"));
    drop(waiter.mutex(connected).lock().await.expect("the lock"));
    assert!(waiter.mutex(keys[0].as_str()).try_lock().await.expect("an answer").is_none());
    let full = blocking(|| {
        let info = cluster.nodes[0].cli(&["INFO", "clients"]);
        let number = |name: &str| -> u64 {
            let line = info.lines().find_map(|line| line.trim().strip_prefix(name));
            line.and_then(|it| it.parse().ok()).unwrap_or(0)
        };
        let now = number("connected_clients:") + number("cluster_connections:") - 1;
        cluster.nodes[0].cli(&["CONFIG", "SET", "maxclients", &now.to_string()])
    });
    assert_eq!(full, "OK");
    let before = proxies[0].attempts().len();
    let waiting: Vec<_> = keys
        .iter()
        .map(|key| {
            let lock = waiter.mutex(key.as_str());
            tokio::spawn(async move { lock.lock().await.map(drop) })
        })
        .collect();
    let long = Duration::from_secs(4);
    tokio::time::sleep(long).await;
    let attempts = proxies[0].attempts().len() - before;
    assert!(attempts <= 3 * 4, "{attempts} attempts to connect in {long:?}");
    drop(guards);
    for task in waiting {
        task.await.expect("the task").expect("the lock, told by a broadcast");
    }
}

/// One primary is stopped: the keys of the others keep their rate. A measurement on a
/// quiet machine, in turns: `DLOCK_TEST_RATE_SECONDS=5 DLOCK_TEST_RATE_ROUNDS=4
/// DLOCK_TEST_RATE_PERCENT=90`.
#[tokio::test(flavor = "multi_thread", worker_threads = 4)]
async fn a_stopped_node_delays_only_its_own_keys() {
    let started = ClusterServers::with(3, 0, &["--cluster-require-full-coverage", "no"]);
    let Some(cluster) = started else { return };
    let client = patient(&cluster.url());
    let (stopped, mut keys) = (key_at(&cluster, 2), keys_at(&cluster, 0, 4));
    keys.extend(keys_at(&cluster, 1, 4));
    let kept = keys_at(&cluster, 1, 5).remove(4);
    let long = Duration::from_secs(setting("DLOCK_TEST_RATE_SECONDS", 2));
    // Cycles at the first two nodes, by several tasks.
    let rate = async || {
        let tasks = keys.iter().map(|key| {
            let lock = client.mutex(key.as_str());
            tokio::spawn(async move {
                let (began, mut cycles) = (Instant::now(), 0_u32);
                while began.elapsed() < long {
                    let guard = lock.clone().lock().await.expect("the lock");
                    let _ = guard.release().await.expect("an answer");
                    cycles += 1;
                }
                cycles
            })
        });
        let mut cycles = 0;
        for task in tasks.collect::<Vec<_>>() {
            cycles += task.await.expect("the task");
        }
        cycles
    };
    rate().await; // connected
    let kept = client.mutex(kept.as_str()).lock().await.expect("the lock");
    let (mut before, mut after) = (0, 0);
    for _ in 0..setting("DLOCK_TEST_RATE_ROUNDS", 1) {
        before += rate().await;
        cluster.nodes[2].pause();
        let wanting = tokio::spawn({
            let lock = client.mutex(stopped.as_str());
            async move { lock.lock().await }
        });
        after += rate().await;
        tokio::time::sleep(Duration::from_secs(6)).await; // more than the ttl
        assert_eq!(kept.state(), State::Held, "renewals at other nodes go on");
        cluster.nodes[2].resume();
        drop(wanting.await.expect("the task").expect("the lock, once it is back"));
    }
    println!("{before} cycles before, {after} while a node is stopped");
    // If the others waited for the stopped node, it would be close to none.
    let least = setting("DLOCK_TEST_RATE_PERCENT", 25);
    assert!(u64::from(after) * 100 > u64::from(before) * least, "{before} and {after}");
}

/// The map is asked for when one node breaks its connections. Another one that is slow then
/// keeps its connection, and the calls that are under way on it.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_look_at_the_map_spares_slow_nodes() {
    let Some(cluster) = without_failovers() else { return };
    let client = patient(&cluster.url());
    let (at_first, at_slow) = (key_at(&cluster, 0), key_at(&cluster, 1));
    drop(client.mutex(at_first.as_str()).lock().await.expect("the lock"));
    let guard = client.mutex(at_slow.as_str()).lock().await.expect("the lock");
    // The connections of the client; this listing itself has another one.
    let connections = || {
        let listed = blocking(|| cluster.nodes[1].cli(&["CLIENT", "LIST", "TYPE", "normal"]));
        let ids = listed.lines().filter(|line| !line.contains("cmd=client"));
        ids.map(|line| line.split(' ').next().unwrap_or_default().to_owned()).collect::<Vec<_>>()
    };
    let before = connections();
    cluster.nodes[1].pause();
    let released = tokio::spawn(guard.release());
    blocking(|| cluster.nodes[0].cli(&["CLIENT", "KILL", "TYPE", "normal"]));
    tokio::time::sleep(Duration::from_millis(600)).await; // some looks at the map
    cluster.nodes[1].resume();
    let released = released.await.expect("the task").expect("an answer");
    assert_eq!(released, ReleaseOutcome::Released);
    assert_eq!(connections(), before, "a new connection was made");
}

/// Checks that no client is made, and why.
async fn refused(url: &str, kind: ErrorKind, advice: &str) {
    let error = Dlock::connect(url).await.expect_err("refused");
    assert_eq!(error.kind(), kind, "{error}");
    assert!(error.to_string().contains(advice), "no {advice:?} in: {error}");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn bad_input_says_what_to_change() {
    let Some(server) = RedisServer::start() else { return };
    let Some(cluster) = ClusterServers::with(3, 0, &[]) else { return };
    let url = format!("redis+cluster://127.0.0.1:{}", server.port());
    refused(&url, ErrorKind::Config, "write redis://").await;
    refused(&cluster.nodes[0].url(), ErrorKind::Config, "write redis+cluster://").await;
    refused("redis+cluster://127.0.0.1:1", ErrorKind::Unavailable, "127.0.0.1:1").await;
    refused(&format!("{}/3", cluster.url()), ErrorKind::Config, "database 0 only").await;
    // One wrong host among three does no harm.
    let url = format!("redis+cluster://127.0.0.1:1,127.0.0.1:{}", cluster.nodes[0].port());
    let client = Dlock::connect(&url).await.expect("a client");
    drop(client.mutex("a").lock().await.expect("the lock"));
    // Nor does a server that is no node.
    let (plain, node) = (server.port(), cluster.nodes[1].port());
    let url = format!("redis+cluster://127.0.0.1:{plain},127.0.0.1:{node}");
    drop(Dlock::connect(&url).await.expect("a client").mutex("a").lock().await.expect("the lock"));
    let servers = client.servers().await.expect("the servers");
    let warned = |note: &str| note.contains("cluster-require-full-coverage");
    assert!(servers.iter().all(|it| it.note.as_deref().is_some_and(warned)), "{servers:?}");
}

/// The nodes announce an address that leads nowhere.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_announced_address_that_is_wrong_is_named() {
    let Some(cluster) = ClusterServers::with(3, 0, &[]) else { return };
    blocking(|| cluster.nodes[2].cli(&["CONFIG", "SET", "cluster-announce-port", "1"]));
    let first = &cluster.nodes[0];
    eventually("it is known", async || {
        blocking(|| first.cli(&["CLUSTER", "NODES"])).contains(":1@")
    })
    .await;
    let url = format!("redis+cluster://127.0.0.1:{}", first.port());
    refused(&url, ErrorKind::Unavailable, "127.0.0.1:1").await;
    refused(&url, ErrorKind::Unavailable, "`cluster-announce-port`").await;
}

/// Row 10 at the nodes of a cluster.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn row_10_a_node_that_evicts_is_refused() {
    let options = ["--maxmemory", "100mb", "--maxmemory-policy", "allkeys-lru"];
    let Some(cluster) = ClusterServers::with(3, 0, &options) else { return };
    refused(&cluster.url(), ErrorKind::Config, "`noeviction`").await;
    drop(Dlock::connect(&format!("{}?eviction=warn", cluster.url())).await.expect("a client"));
}
