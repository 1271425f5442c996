//! Rows of the list of faults on a real etcd.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use dlock::{Dlock, ReleaseOutcome, State};
use dlock_testkit::History;
use dlock_testkit::conformance::eventually;
use dlock_testkit::etcd::{EtcdCluster, EtcdServer};
use dlock_testkit::holder::{HolderProcess, number};
use dlock_testkit::proxy::{Once, Proxy, Way};

/// The ttl of the leases.
const TTL: Duration = Duration::from_secs(2);

fn client(url: &str) -> Dlock {
    let builder = Dlock::builder().url(url).namespace("test").ttl(TTL);
    builder.wait(Duration::from_secs(30)).connect_lazy().expect("a client")
}

fn behind(proxy: &Proxy) -> Dlock {
    client(&format!("etcd://127.0.0.1:{}", proxy.port()))
}

async fn is_free(dlock: &Dlock, key: &str) -> bool {
    let state = dlock.inspect(key).await.expect("an inspection");
    state.holders.is_empty() && state.waiters.is_empty()
}

/// A holder in another process.
fn holder(url: &str) -> HolderProcess {
    HolderProcess::start(&format!("{url}?ttl={}ms", TTL.as_millis()))
}

/// The holder is paused for longer than its lease lasts.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn row_01_a_paused_holder_is_lost_and_its_successor_untouched() {
    let Some(server) = EtcdServer::start() else { return };
    let mut paused = holder(&server.url());
    paused.send(&format!("lock a {}", TTL.as_millis()));
    let old = number(&paused.wait_for("granted"), "token");
    paused.process.pause();
    let guard = client(&server.url()).mutex("a").lock().await.expect("free with the lease");
    assert!(guard.token().get() > old);
    paused.process.resume();
    paused.wait_for("lost");
    paused.send("release a");
    assert_eq!(paused.wait_for("released")["outcome"], "AlreadyLost");
    assert_eq!(guard.state(), State::Held);
    assert_eq!(guard.release().await.expect("an answer"), ReleaseOutcome::Released);
}

/// Rows 4 and 18: the entry is made, and the connection is cut instead of the answer. The
/// same owner finds its entry.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn row_04_an_entry_whose_answer_was_lost_is_found_again() {
    let Some(server) = EtcdServer::start() else { return };
    let proxy = Proxy::opaque(server.port());
    let (dlock, other) = (behind(&proxy), client(&server.url()));
    drop(dlock.mutex("warm").lock().await.expect("the lock"));
    proxy.once(Once::LoseReply, "test/lost/");
    let guard = dlock.mutex("lost").lock().await.expect("the lock");
    assert_eq!(proxy.done(), 1, "the fault happened");
    let state = other.inspect("lost").await.expect("an inspection");
    assert_eq!((state.holders.len(), state.waiters.len()), (1, 0), "{state:?}");
    assert_eq!(state.holders[0].token, Some(guard.token().get()));
    assert_eq!(guard.release().await.expect("an answer"), ReleaseOutcome::Released);
    assert!(is_free(&other, "lost").await);
}

/// Row 5: the same, and the caller gave up meanwhile.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn row_05_an_entry_that_nobody_wants_any_more_is_removed() {
    let Some(server) = EtcdServer::start() else { return };
    let proxy = Proxy::opaque(server.port());
    let (dlock, other) = (behind(&proxy), client(&server.url()));
    drop(dlock.mutex("warm").lock().await.expect("the lock"));
    for n in 0..5 {
        let key = format!("k{n}");
        proxy.once(Once::LoseReply, &format!("test/{key}/"));
        let lock = dlock.mutex(key.as_str());
        let given_up = tokio::time::timeout(Duration::from_millis(3 * n), lock.lock()).await;
        drop(given_up);
        eventually("free", async || is_free(&other, &key).await).await;
        proxy.forget_once();
    }
}

/// A request is stuck on its way while the same owner gets the lock over another connection
/// and gives it back. When it arrives, it must not make a lock that nobody holds.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn row_21_a_late_request_makes_no_ghost() {
    let Some(server) = EtcdServer::start() else { return };
    let ways = [Proxy::opaque(server.port()), Proxy::opaque(server.port())];
    let url = format!("etcd://127.0.0.1:{},127.0.0.1:{}", ways[0].port(), ways[1].port());
    // Long enough to outlive the silence on the first way.
    let builder = Dlock::builder().url(&url).namespace("test").ttl(Duration::from_secs(20));
    let dlock = builder.wait(Duration::from_secs(30)).connect_lazy().expect("a client");
    let other = client(&server.url());
    drop(dlock.mutex("warm").lock().await.expect("the lock"));
    eventually("warm is free", async || is_free(&other, "warm").await).await;
    let used = ways.iter().find(|way| way.open() > 0).expect("it is connected");
    used.stall(&[Way::ToServer]);
    let guard = dlock.mutex("late").lock().await.expect("the lock, the other way");
    assert_eq!(guard.release().await.expect("an answer"), ReleaseOutcome::Released);
    let before = server.revision();
    used.heal();
    // Whatever was stuck has arrived when the connection is closed.
    eventually("the stuck connection is closed", async || used.open() == 0).await;
    drop(dlock.mutex("after").lock().await.expect("the lock"));
    assert!(server.revision() > before, "the store was written to afterwards");
    assert!(is_free(&other, "late").await, "a ghost");
}

/// A half-open connection: the client leaves it, and keeps lease and lock.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn row_07_a_half_open_connection_is_left() {
    let Some(server) = EtcdServer::start() else { return };
    let proxy = Proxy::opaque(server.port());
    let url = format!("etcd://127.0.0.1:{}", proxy.port());
    // There is time for two silences before the lease ends, on a busy machine too.
    let ttl = Duration::from_secs(8);
    let dlock = Dlock::builder().url(&url).ttl(ttl).connect_lazy().expect("a client");
    let guard = dlock.mutex("a").lock().await.expect("the lock");
    proxy.freeze();
    let began = Instant::now();
    while began.elapsed() < ttl + Duration::from_secs(2) {
        assert_ne!(guard.state(), State::Lost, "after {:?}", began.elapsed());
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
    assert_eq!(guard.release().await.expect("an answer"), ReleaseOutcome::Released);
}

/// Rows 11 and 23: a process with a lock and many waiters is killed.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn row_11_and_23_a_killed_process_holds_nobody_up() {
    let Some(server) = EtcdServer::start() else { return };
    let dlock = client(&server.url());
    let mut killed = holder(&server.url());
    killed.send(&format!("lock a {}", TTL.as_millis()));
    killed.wait_for("granted");
    killed.send(&format!("fair a {} 50", TTL.as_millis()));
    let waiters = async || dlock.inspect("a").await.expect("a look").waiters.len();
    eventually("all wait", async || waiters().await == 50).await;
    let began = Instant::now();
    killed.process.kill();
    drop(dlock.mutex("a").lock().await.expect("the lock"));
    // One lease, and not one for each waiter.
    assert!(began.elapsed() < TTL * 5, "{:?}", began.elapsed());
}

/// Row 12: the executor is blocked for longer than the lease lasts.
#[tokio::test]
async fn row_12_a_blocked_executor_loses_no_lock() {
    let Some(server) = EtcdServer::start() else { return };
    let dlock = client(&server.url());
    let guard = dlock.mutex("a").lock().await.expect("the lock");
    std::thread::sleep(TTL * 2); // the only worker
    assert_eq!(guard.state(), State::Held);
    assert_eq!(guard.release().await.expect("an answer"), ReleaseOutcome::Released);
}

/// The history is compacted while somebody waits, and the watch has to begin anew.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_waiter_survives_a_compaction_and_a_cut() {
    let Some(server) = EtcdServer::start() else { return };
    let proxy = Proxy::opaque(server.port());
    let (dlock, other) = (behind(&proxy), client(&server.url()));
    let held = other.mutex("a").lock().await.expect("the lock");
    let lock = dlock.mutex("a");
    let waiting = tokio::spawn(async move { lock.lock().await.map(|guard| guard.token()) });
    let waiters = async || other.inspect("a").await.expect("a look").waiters.len();
    eventually("it waits", async || waiters().await == 1).await;
    tokio::task::block_in_place(|| server.compact());
    proxy.cut();
    let token = held.token();
    drop(held);
    let began = Instant::now();
    assert!(waiting.await.expect("the task").expect("the lock") > token);
    // Without a watch it would look again after 7 seconds or more.
    assert!(began.elapsed() < Duration::from_secs(6), "{:?}", began.elapsed());
}

/// The leader is killed under load: the others go on, and nobody overlaps.
/// `DLOCK_TEST_KILLS=10` kills it ten times.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_leader_is_killed_under_load() {
    let Some(mut cluster) = EtcdCluster::start() else { return };
    let kills = std::env::var("DLOCK_TEST_KILLS").ok().and_then(|kills| kills.parse().ok());
    let (history, stop) = (Arc::new(History::default()), Arc::new(AtomicBool::new(false)));
    let mut tasks = Vec::new();
    for _ in 0..2 {
        let builder = Dlock::builder().url(&cluster.url()).ttl(Duration::from_secs(4));
        let dlock = builder.wait(Duration::from_secs(60)).connect_lazy().expect("a client");
        for _ in 0..3 {
            let (lock, history, stop) = (dlock.mutex("hot"), history.clone(), stop.clone());
            tasks.push(tokio::spawn(async move {
                while !stop.load(Ordering::Relaxed) {
                    let guard = lock.lock().await.expect("the lock");
                    let entry = history.enter(&guard);
                    let _ = guard.run(tokio::time::sleep(Duration::from_millis(1))).await;
                    drop(entry);
                }
            }));
        }
    }
    eventually("work", async || history.entries() > 20).await;
    for _ in 0..kills.unwrap_or(2) {
        let leader = tokio::task::block_in_place(|| cluster.leader());
        cluster.servers[leader].kill();
        let new = tokio::task::block_in_place(|| cluster.leader());
        let (elected, before) = (Instant::now(), history.entries());
        eventually("progress", async || history.entries() > before + 5).await;
        println!("member {new} leads; {:?} later the locks go on", elected.elapsed());
        tokio::task::block_in_place(|| cluster.servers[leader].restart());
    }
    stop.store(true, Ordering::Relaxed);
    for task in tasks {
        task.await.expect("the task");
    }
    history.assert_clean();
}
