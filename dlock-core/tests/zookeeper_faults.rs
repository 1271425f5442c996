//! Rows of the list of faults on a real ZooKeeper.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use dlock::{Dlock, ReleaseOutcome, State};
use dlock_testkit::History;
use dlock_testkit::conformance::eventually;
use dlock_testkit::holder::{HolderProcess, number};
use dlock_testkit::proxy::{Once, Proxy};
use dlock_testkit::zookeeper::{ZooKeeperEnsemble, ZooKeeperServer};

/// The time-out of the sessions.
const TTL: Duration = Duration::from_secs(2);

fn client(url: &str) -> Dlock {
    client_with(url, TTL)
}

fn client_with(url: &str, ttl: Duration) -> Dlock {
    let builder = Dlock::builder().url(url).namespace("test").ttl(ttl);
    builder.wait(Duration::from_secs(30)).connect_lazy().expect("a client")
}

fn behind(proxy: &Proxy) -> Dlock {
    client(&format!("zookeeper://127.0.0.1:{}", proxy.port()))
}

async fn is_free(dlock: &Dlock, key: &str) -> bool {
    let state = dlock.inspect(key).await.expect("an inspection");
    state.holders.is_empty() && state.waiters.is_empty()
}

/// A holder in another process.
fn holder(url: &str) -> HolderProcess {
    HolderProcess::start(&format!("{url}?ttl={}ms", TTL.as_millis()))
}

/// The holder is paused for longer than its session lasts.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn row_01_a_paused_holder_is_lost_and_its_successor_untouched() {
    let Some(server) = ZooKeeperServer::start() else { return };
    let mut paused = holder(&server.url());
    paused.send(&format!("lock a {}", TTL.as_millis()));
    let old = number(&paused.wait_for("granted"), "token");
    paused.process.pause();
    let guard = client(&server.url()).mutex("a").lock().await.expect("free with the session");
    assert!(guard.token().get() > old);
    paused.process.resume();
    paused.wait_for("lost");
    paused.send("release a");
    assert_eq!(paused.wait_for("released")["outcome"], "AlreadyLost");
    assert_eq!(guard.state(), State::Held);
    assert_eq!(guard.release().await.expect("an answer"), ReleaseOutcome::Released);
}

/// Rows 4 and 18: the node is made, and the connection is cut instead of the answer. The
/// node is found again by its owner.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn row_18_a_node_whose_answer_was_lost_is_found_again() {
    let Some(server) = ZooKeeperServer::start() else { return };
    let proxy = Proxy::opaque(server.port());
    let (dlock, other) = (behind(&proxy), client(&server.url()));
    drop(dlock.mutex("warm").lock().await.expect("the lock"));
    proxy.once(Once::LoseReply, "-lock-");
    let guard = dlock.mutex("a").lock().await.expect("the lock");
    assert_eq!(proxy.done(), 1, "the fault happened");
    let state = other.inspect("a").await.expect("an inspection");
    assert_eq!((state.holders.len(), state.waiters.len()), (1, 0), "{state:?}");
    assert_eq!(state.holders[0].token, Some(guard.token().get()));
    assert_eq!(guard.release().await.expect("an answer"), ReleaseOutcome::Released);
    assert!(is_free(&other, "a").await);
}

/// Rows 5 and 18: the same, and the caller gave up meanwhile.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn row_18_a_node_that_nobody_wants_any_more_is_removed() {
    let Some(server) = ZooKeeperServer::start() else { return };
    let proxy = Proxy::opaque(server.port());
    let (dlock, other) = (behind(&proxy), client(&server.url()));
    drop(dlock.mutex("warm").lock().await.expect("the lock"));
    for n in 0..5 {
        let key = format!("k{n}");
        proxy.once(Once::LoseReply, "-lock-");
        let lock = dlock.mutex(key.as_str());
        let given_up = tokio::time::timeout(Duration::from_millis(3 * n), lock.lock()).await;
        drop(given_up);
        eventually("free", async || is_free(&other, &key).await).await;
        proxy.forget_once();
    }
}

/// Rows 11 and 23: a process with a lock and many waiters is killed.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn row_11_and_23_a_killed_process_holds_nobody_up() {
    let Some(server) = ZooKeeperServer::start() else { return };
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
    assert!(began.elapsed() < TTL * 2 + Duration::from_secs(1), "{:?}", began.elapsed());
}

/// A half-open connection: the client leaves it, and keeps session and lock.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn row_07_a_half_open_connection_is_left() {
    let Some(server) = ZooKeeperServer::start() else { return };
    let proxy = Proxy::opaque(server.port());
    let dlock = behind(&proxy);
    let guard = dlock.mutex("a").lock().await.expect("the lock");
    proxy.freeze();
    let began = Instant::now();
    while began.elapsed() < TTL * 2 {
        assert_ne!(guard.state(), State::Lost, "after {:?}", began.elapsed());
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
    assert!(proxy.attempts().len() >= 2, "it connected again");
    assert_eq!(guard.release().await.expect("an answer"), ReleaseOutcome::Released);
}

/// The executor of the program is blocked: the session is kept by the client's own thread.
#[test]
fn row_12_a_blocked_executor_loses_no_lock() {
    let Some(server) = ZooKeeperServer::start() else { return };
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build();
    runtime.expect("a runtime").block_on(async {
        let dlock = client_with(&server.url(), TTL * 2);
        let guard = dlock.mutex("a").lock().await.expect("the lock");
        std::thread::sleep(Duration::from_secs(9));
        assert_eq!(guard.state(), State::Held);
        assert_eq!(guard.release().await.expect("an answer"), ReleaseOutcome::Released);
    });
}

/// The leader is killed under load: the others go on, and nobody overlaps.
/// `DLOCK_TEST_KILLS=10` kills it ten times.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_leader_is_killed_under_load() {
    let Some(mut ensemble) = ZooKeeperEnsemble::start() else { return };
    let kills = std::env::var("DLOCK_TEST_KILLS").ok().and_then(|kills| kills.parse().ok());
    let (history, stop) = (Arc::new(History::default()), Arc::new(AtomicBool::new(false)));
    let mut tasks = Vec::new();
    for _ in 0..2 {
        let url = ensemble.url();
        let builder = Dlock::builder().url(&url).ttl(Duration::from_secs(4));
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
        let leader = tokio::task::block_in_place(|| ensemble.leader());
        ensemble.servers[leader].kill();
        let new = tokio::task::block_in_place(|| ensemble.leader());
        let (elected, before) = (Instant::now(), history.entries());
        eventually("progress", async || history.entries() > before + 5).await;
        let stalled = elected.elapsed();
        println!("server {new} leads; {stalled:?} later the locks go on");
        assert!(stalled < Duration::from_secs(4), "{stalled:?}");
        tokio::task::block_in_place(|| ensemble.servers[leader].restart());
    }
    stop.store(true, Ordering::Relaxed);
    for task in tasks {
        task.await.expect("the task");
    }
    history.assert_clean();
}

/// A follower that is cut off answers reads while the leader lets the session expire: the
/// guard is lost before its successor is granted.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_holder_on_a_cut_off_follower_is_lost_in_time() {
    let Some((ensemble, link)) = ZooKeeperEnsemble::start_with_link() else { return };
    let cut_off = client(&ensemble.servers[2].url());
    let other = client(&ensemble.servers[ensemble.leader()].url());
    let guard = cut_off.mutex("a").lock().await.expect("the lock");
    let token = guard.token();
    let successor = tokio::spawn(async move {
        let guard = other.mutex("a").lock().await.expect("the lock");
        (Instant::now(), guard)
    });
    tokio::time::sleep(Duration::from_millis(300)).await;
    assert_eq!(guard.state(), State::Held);
    link.iter().for_each(Proxy::go_silent);
    guard.lost().await;
    let lost = Instant::now();
    let (granted, successor) = successor.await.expect("the task");
    assert!(granted >= lost, "granted {:?} before the loss", lost.duration_since(granted));
    assert!(successor.token() > token);
}
