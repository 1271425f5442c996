//! Rows of the list of faults on a real etcd.

use std::time::{Duration, Instant};

use dlock::{Dlock, LossReason, ReleaseOutcome, State};
use dlock_testkit::conformance::eventually;
use dlock_testkit::etcd::{EtcdCluster, EtcdServer};
use dlock_testkit::proxy::{Proxy, Way};
use dlock_testkit::session_faults;
use dlock_testkit::session_servers::SessionServer as _;

session_faults!(EtcdServer, EtcdCluster);

/// The ttl of the leases.
const TTL: Duration = Duration::from_secs(2);

/// A client has a lock when this time has passed since an election.
const GOES_ON_WITHIN: Duration = Duration::from_millis(1_500);

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

/// A client whose session outlives the silence of a connection, behind these proxies.
fn patient(ways: &[Proxy]) -> Dlock {
    let ports: Vec<u16> = ways.iter().map(Proxy::port).collect();
    let builder = Dlock::builder().url(&EtcdServer::url_at(&ports)).namespace("test");
    let builder = builder.ttl(Duration::from_secs(20)).wait(Duration::from_secs(30));
    builder.connect_lazy().expect("a client")
}

/// Connects a client, and answers the proxy that it uses.
async fn used_by<'a>(dlock: &Dlock, ways: &'a [Proxy]) -> &'a Proxy {
    drop(dlock.mutex("warm").lock().await.expect("the lock"));
    eventually("warm is free", async || is_free(dlock, "warm").await).await;
    eventually("it uses one way", async || ways.iter().filter(|way| way.open() > 0).count() == 1)
        .await;
    ways.iter().find(|way| way.open() > 0).expect("it is connected")
}

/// A client of a cluster that is connected to this member, and its proxies.
async fn connected_to(cluster: &EtcdCluster, member: usize) -> (Dlock, Vec<Proxy>) {
    let ways: Vec<Proxy> = cluster.ports().into_iter().map(Proxy::opaque).collect();
    let others = || ways.iter().enumerate().filter(|(at, _)| *at != member).map(|(_, way)| way);
    others().for_each(Proxy::go_silent);
    let ports: Vec<u16> = ways.iter().map(Proxy::port).collect();
    let builder = Dlock::builder().url(&cluster.url_at(&ports)).ttl(Duration::from_secs(3));
    let builder = builder.wait(Duration::from_secs(30));
    let dlock = builder.connect_lazy().expect("a client");
    drop(dlock.mutex(format!("warm{member}")).lock().await.expect("the lock"));
    others().for_each(Proxy::heal);
    assert!(ways[member].open() > 0, "it is connected to the member");
    (dlock, ways)
}

/// The lease of a key that stays taken for a second ends before the key is attached to it: it
/// gets another one, and the session of the client goes on.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_lease_of_a_taken_key_that_ends_early_ends_no_session() {
    let Some(server) = EtcdServer::start() else { return };
    let ways = [Proxy::opaque(server.port())];
    let dlock = patient(&ways);
    let other = dlock.mutex("other").lock().await.expect("the lock");
    let taken = dlock.mutex("taken").lock().await.expect("the lock");
    ways[0].delay(Way::ToServer, Duration::from_millis(1_800));
    let leases = server.leases().len();
    let releasing = tokio::spawn(taken.release_after(Duration::from_secs(1)));
    eventually("the lease is granted", async || server.leases().len() > leases).await;
    ways[0].heal(); // what is on its way stays slow
    eventually("the lease is over", async || server.leases().len() == leases).await;
    eventually("free", async || is_free(&dlock, "taken").await).await;
    assert_ne!(other.state(), State::Lost);
    assert_eq!(other.release().await.expect("an answer"), ReleaseOutcome::Released);
    drop(releasing.await);
}

/// The leader stops, and its connections stay open. Whichever member a client is connected
/// to, it goes on soon after the election.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn row_07_a_stopped_leader_holds_no_client_up() {
    let Some(cluster) = EtcdCluster::start() else { return };
    let mut clients = Vec::new();
    for member in 0..3 {
        clients.push(connected_to(&cluster, member).await);
    }
    let leader = tokio::task::block_in_place(|| cluster.leader());
    cluster.pause(leader);
    let stopped = Instant::now();
    let mut locking = Vec::new();
    for (member, (dlock, _)) in clients.iter().enumerate() {
        let lock = dlock.mutex(format!("k{member}"));
        locking.push(tokio::spawn(async move {
            lock.lock().await.map(|guard| (guard, Instant::now()))
        }));
    }
    tokio::task::block_in_place(|| cluster.next_leader(leader));
    let elected = Instant::now();
    println!("elected after {:?}", elected - stopped);
    for (member, locking) in locking.into_iter().enumerate() {
        let (_guard, locked) = locking.await.expect("the task").expect("the lock");
        let after = locked.saturating_duration_since(elected);
        println!("member {member} (leader {leader}): locked {after:?} later");
        assert!(after < GOES_ON_WITHIN, "{after:?}");
    }
}

/// A request is stuck on its way while the same owner gets the lock over another connection
/// and gives it back. When it arrives, it must not make a lock that nobody holds.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn row_21_a_late_request_makes_no_ghost() {
    let Some(server) = EtcdServer::start() else { return };
    let ways = [Proxy::opaque(server.port()), Proxy::opaque(server.port())];
    let (dlock, other) = (patient(&ways), client(&server.url()));
    let used = used_by(&dlock, &ways).await;
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

/// The same, when the owner did not hear that its first request was lost, because the second
/// was made at once, and when its lease was replaced by another one of this process.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn row_21_a_late_request_of_a_replaced_owner_makes_no_ghost() {
    let Some(server) = EtcdServer::start() else { return };
    let ways = [Proxy::opaque(server.port()), Proxy::opaque(server.port())];
    let (dlock, other) = (patient(&ways), client(&server.url()));
    let used = used_by(&dlock, &ways).await;
    used.stall(&[Way::ToServer]);
    let lock = dlock.rwlock("late");
    let writing = tokio::spawn(async move { lock.write().lock().await });
    eventually("it is on its way", async || used.holds_back("test/late/")).await;
    used.hang_up();
    let writer = writing.await.expect("the task").expect("the lock, the other way");
    let lock = dlock.rwlock("late");
    let reading = tokio::spawn(async move { lock.read().lock().await });
    eventually("it waits", async || !dlock.local_state().waiting.is_empty()).await;
    drop(writer); // a reader needs another lease, which replaces this one
    let reader = reading.await.expect("the task").expect("the lock");
    assert_eq!(reader.release().await.expect("an answer"), ReleaseOutcome::Released);
    // What was replaced may be removed by now, or soon.
    eventually("free", async || is_free(&other, "late").await).await;
    drop(dlock.mutex("after").lock().await.expect("the lock"));
    used.heal();
    eventually("the late request was answered", async || used.has_unheard("test/")).await;
    eventually("no ghost is left", async || is_free(&other, "late").await).await;
}

/// The first request is stuck on its way, the next one cannot be sent, and the caller gives up.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn row_21_a_late_request_after_a_failed_one_makes_no_ghost() {
    let Some(server) = EtcdServer::start() else { return };
    let ways = [Proxy::opaque(server.port())];
    let (dlock, other) = (patient(&ways), client(&server.url()));
    let used = used_by(&dlock, &ways).await;
    used.stall(&[Way::ToServer]);
    let lock = dlock.mutex("late").wait(Duration::from_secs(1));
    let locking = tokio::spawn(async move { lock.lock().await.map(drop) });
    eventually("it is on its way", async || used.holds_back("test/late/")).await;
    used.refuse().await;
    used.hang_up();
    locking.await.expect("the task").expect_err("there is no way");
    used.heal();
    eventually("the late request was answered", async || used.has_unheard("test/")).await;
    eventually("no ghost is left", async || is_free(&other, "late").await).await;
}

/// The first request is stuck on its way, and the second one is told that the key is busy. The
/// key is free when the first one arrives, and must stay so.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn row_21_a_late_request_of_a_busy_owner_makes_no_ghost() {
    let Some(server) = EtcdServer::start() else { return };
    let ways = [Proxy::opaque(server.port()), Proxy::opaque(server.port())];
    let (dlock, other) = (patient(&ways), client(&server.url()));
    let used = used_by(&dlock, &ways).await;
    let holder = other.mutex("late").lock().await.expect("the lock");
    used.stall(&[Way::ToServer]);
    let lock = dlock.mutex("late");
    let trying = tokio::spawn(async move { lock.try_lock().await });
    eventually("it is on its way", async || used.holds_back("test/late/")).await;
    used.hang_up();
    assert!(trying.await.expect("the task").expect("an answer").is_none(), "it is held");
    assert_eq!(holder.release().await.expect("an answer"), ReleaseOutcome::Released);
    used.heal();
    eventually("the late request did nothing", async || used.has_unheard("test/")).await;
    assert!(is_free(&other, "late").await, "a ghost");
}

/// A release is stuck on its way and made again over another connection. The next entry of the
/// client has the same name; when the first request arrives, it must not remove that one.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn row_21_a_late_release_does_not_touch_the_next_entry() {
    let Some(server) = EtcdServer::start() else { return };
    let ways = [Proxy::opaque(server.port()), Proxy::opaque(server.port())];
    let (dlock, other) = (patient(&ways), client(&server.url()));
    let used = used_by(&dlock, &ways).await;
    let names = || -> Vec<String> {
        let keys = tokio::task::block_in_place(|| server.keys());
        keys.into_iter().filter(|key| key.starts_with("test/late/")).collect()
    };
    let guard = dlock.mutex("late").lock().await.expect("the lock");
    let before = names();
    used.stall(&[Way::ToServer]);
    drop(guard);
    eventually("it is released, the other way", async || is_free(&other, "late").await).await;
    let guard = dlock.mutex("late").lock().await.expect("the lock");
    assert_eq!(names(), before, "the name is used again");
    used.heal();
    // Whatever was stuck has arrived when the connection is closed.
    eventually("the stuck connection is closed", async || used.open() == 0).await;
    drop(dlock.mutex("after").lock().await.expect("the lock"));
    assert_eq!(names(), before, "the late release removed another entry");
    assert!(!is_free(&other, "late").await);
    assert_eq!(guard.release().await.expect("an answer"), ReleaseOutcome::Released);
}

/// The caller gives up while its session is being made, which takes longer than its call is
/// waited for. What was not sent by then is not sent any more.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn row_05_a_call_that_was_given_up_sends_nothing() {
    let Some(server) = EtcdServer::start() else { return };
    let ways = [Proxy::opaque(server.port())];
    let (dlock, other) = (patient(&ways), client(&server.url()));
    assert!(is_free(&dlock, "late").await, "it is connected");
    // The lease and the key of the session take 3 s.
    ways[0].delay(Way::ToServer, Duration::from_millis(1_500));
    let lock = dlock.mutex("late");
    let given_up = tokio::time::timeout(Duration::from_millis(10), lock.lock());
    given_up.await.expect_err("it takes longer");
    let has_session = || server.keys().iter().any(|key| key.contains(";dlock/sessions/"));
    eventually("a session", async || tokio::task::block_in_place(has_session)).await;
    ways[0].heal();
    // Over the same connection, after what the first call may have sent.
    drop(dlock.mutex("after").lock().await.expect("the lock"));
    eventually("after is free", async || is_free(&other, "after").await).await;
    assert!(is_free(&other, "late").await, "a ghost");
}

/// An operator breaks a lock and goes. The holder removes the entry, also if its first request
/// to do so is lost.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_broken_lock_is_removed_though_a_request_is_lost() {
    let Some(server) = EtcdServer::start() else { return };
    let ways = [Proxy::opaque(server.port())];
    let (dlock, other) = (patient(&ways), client(&server.url()));
    let guard = dlock.mutex("a").lock().await.expect("the lock");
    let operator = Dlock::builder().url(&server.url()).namespace("test").ttl(TTL);
    let operator = operator.break_delay(Duration::from_secs(3)).connect_lazy().expect("a client");
    assert_eq!(operator.break_lock("a").await.expect("broken"), 1);
    operator.shutdown(Duration::ZERO).await;
    drop(operator);
    assert!(matches!(guard.lost().await, LossReason::Broken { .. }));
    ways[0].stall(&[Way::ToServer]);
    eventually("the removal is on its way", async || ways[0].holds_back("test/a/")).await;
    ways[0].cut();
    ways[0].heal();
    eventually("it is removed", async || is_free(&other, "a").await).await;
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
