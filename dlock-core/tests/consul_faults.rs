//! What happens to locks in Consul when something fails: real servers, a proxy that loses
//! replies, sessions that end.

use std::time::{Duration, Instant};

use dlock::{Dlock, ErrorKind, LossReason, ReleaseOutcome, State};
use dlock_testkit::conformance::eventually;
use dlock_testkit::consul::{ConsulCluster, ConsulServer, url};
use dlock_testkit::proxy::{Once, Proxy, Way};
use dlock_testkit::session_faults;
use dlock_testkit::session_servers::SessionServer as _;
use tokio::time::timeout;

session_faults!(ConsulServer, ConsulCluster);

fn client(url: &str) -> Dlock {
    Dlock::builder().url(url).wait(Duration::from_secs(30)).connect_lazy().expect("a client")
}

/// A server, a proxy in front of it, and a client behind the proxy.
fn with_proxy(ttl: &str) -> Option<(ConsulServer, Proxy, Dlock)> {
    let server = ConsulServer::start()?;
    let proxy = Proxy::opaque(server.port());
    let client = client(&format!("{}&ttl={ttl}", url(proxy.port())));
    Some((server, proxy, client))
}

/// The acquire is applied and its reply is lost: the retry is the same claim.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_lost_reply_is_no_second_grant() {
    let Some((server, proxy, dlock)) = with_proxy("20s") else { return };
    drop(dlock.mutex("warm").lock().await.expect("the lock"));
    eventually("released", async || server.lock_keys().is_empty()).await;
    for cancelled in [false, true] {
        proxy.stall(&[Way::ToClient]);
        let lock = dlock.mutex("lost-reply");
        let acquiring = tokio::spawn(async move { lock.lock().await });
        eventually("it is applied", async || server.lock_keys() == ["lost-reply/.lock"]).await;
        if cancelled {
            acquiring.abort();
            let _ = acquiring.await;
            proxy.cut();
            proxy.heal();
        } else {
            proxy.cut();
            proxy.heal();
            let guard = timeout(Duration::from_secs(30), acquiring).await.expect("in time");
            let guard = guard.expect("the task").expect("the lock, by the retry");
            assert_eq!(guard.state(), State::Held);
            assert_eq!(guard.release().await.expect("an answer"), ReleaseOutcome::Released);
        }
        eventually("nothing is left", async || server.lock_keys().is_empty()).await;
    }
}

/// A release whose reply is lost is repeated, and never takes the lock of the next holder.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_lost_release_does_not_touch_a_successor() {
    let Some((server, proxy, one)) = with_proxy("20s") else { return };
    let two = client(&format!("{}&ttl=20s", server.url()));
    let guard = one.mutex("a").lock().await.expect("the lock");
    proxy.stall(&[Way::ToClient]);
    drop(guard);
    let next = two.mutex("a").lock().await.expect("the release was applied");
    proxy.cut();
    proxy.heal();
    // The calls that were under way when the connections were cut may fail; then it goes on.
    let is_busy = async || matches!(one.mutex("a").try_lock().await, Ok(None));
    eventually("it answers again, and the lock is taken", is_busy).await;
    assert_eq!(next.state(), State::Held);
    assert_eq!(next.release().await.expect("an answer"), ReleaseOutcome::Released);
}

/// The server is killed and comes back with its data: the lock is uncertain and held again.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_server_that_comes_back_knows_its_locks() {
    let Some(mut server) = ConsulServer::start() else { return };
    let dlock = client(&format!("{}&ttl=15s", server.url()));
    let guard = dlock.mutex("a").lock().await.expect("the lock");
    server.kill();
    eventually("uncertain", async || guard.state() == State::Uncertain).await;
    server.restart();
    eventually("held again", async || guard.state() == State::Held).await;
    assert!(dlock.mutex("a").try_lock().await.expect("an answer").is_none());
    let token = guard.token();
    assert_eq!(guard.release().await.expect("an answer"), ReleaseOutcome::Released);
    assert!(dlock.mutex("a").lock().await.expect("the lock").token() > token);
}

/// The server lost its data: its indexes start again, and so do the queries that wait.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_server_without_its_data_ends_the_session() {
    let Some(mut server) = ConsulServer::start() else { return };
    let (one, two) = (client(&server.url()), client(&server.url()));
    for n in 0..30 {
        drop(two.mutex(format!("warm-{n}")).lock().await.expect("the lock"));
    }
    let guard = one.mutex("a").lock().await.expect("the lock");
    server.restart_empty();
    timeout(Duration::from_secs(20), guard.lost()).await.expect("the loss is reported");
    let next = timeout(Duration::from_secs(30), one.mutex("a").lock()).await.expect("in time");
    let next = next.expect("the lock");
    let lock = two.mutex("a");
    let waiting = tokio::spawn(async move { lock.lock().await.map(drop) });
    eventually("it waits", async || two.local_state().waiting.len() == 1).await;
    drop(next);
    timeout(Duration::from_secs(30), waiting)
        .await
        .expect("woken")
        .expect("the task")
        .expect("the lock");
}

/// The session of a holder ends without a release: nobody gets the lock for its lock-delay,
/// and the error says why.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_lock_delay_is_honoured_and_told() {
    let Some(server) = ConsulServer::start() else { return };
    let one = client(&format!("{}&consul.lock_delay=3s", server.url()));
    let two = client(&server.url());
    let guard = one.mutex("a").lock().await.expect("the lock");
    let ended = Instant::now();
    server.end_sessions();
    timeout(Duration::from_secs(10), guard.lost()).await.expect("it is told");
    assert!(two.mutex("a").try_lock().await.expect("an answer").is_none());
    let error = two.mutex("a").wait(Duration::from_millis(300)).lock().await.expect_err("delayed");
    assert_eq!(error.kind(), ErrorKind::TimedOut);
    assert!(error.to_string().contains("lock-delay"), "{error}");
    drop(two.mutex("a").lock().await.expect("the lock, after the delay"));
    let waited = ended.elapsed();
    let range = Duration::from_secs(3)..Duration::from_secs(14);
    assert!(range.contains(&waited), "{waited:?}");
}

/// The same for permits: those of sessions that ended without a release stay taken for the
/// lock-delay, also when another permit is given back meanwhile.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_lock_delay_of_permits_is_honoured_and_told() {
    let Some(server) = ConsulServer::start() else { return };
    let one = client(&format!("{}&layout=lock-key&ttl=20s&consul.lock_delay=4s", server.url()));
    let two = client(&format!("{}&layout=lock-key&ttl=20s", server.url()));
    let (lost, other) = (one.semaphore("pool", 3).permits(2), one.semaphore("pool", 3).permits(1));
    let lost = lost.lock().await.expect("permits");
    let value = server.run(&["kv", "get", "pool/.lock"]).expect("the semaphore");
    let value: serde_json::Value = serde_json::from_str(&value).expect("JSON");
    let sessions: Vec<_> = value["Holders"].as_object().expect("holders").keys().collect();
    let other = other.lock().await.expect("a permit");
    let ended = Instant::now();
    for session in sessions {
        server.http("PUT", &format!("/v1/session/destroy/{session}"));
    }
    timeout(Duration::from_secs(10), lost.lost()).await.expect("it is told");
    assert!(two.semaphore("pool", 3).permits(1).try_lock().await.expect("an answer").is_none());
    assert_eq!(other.release().await.expect("an answer"), ReleaseOutcome::Released);
    let free = two.semaphore("pool", 3).permits(1).try_lock().await.expect("an answer");
    assert!(free.is_some(), "the permit that was given back");
    let three = two.semaphore("pool", 3).permits(2).wait(Duration::from_millis(500));
    let error = three.lock().await.expect_err("delayed");
    assert_eq!(error.kind(), ErrorKind::TimedOut);
    assert!(error.to_string().contains("lock-delay"), "{error}");
    let all = two.semaphore("pool", 3).permits(2).lock().await.expect("the permits");
    let waited = ended.elapsed();
    let range = Duration::from_secs(4)..Duration::from_secs(14);
    assert!(range.contains(&waited), "{waited:?}");
    drop((free, all, lost));
    eventually("nothing is left", async || server.lock_keys().is_empty()).await;
}

/// The agent of a holder stops, and `serfHealth` ends its sessions. The holder does not hear of
/// it, so nobody gets what it had before it knows by its own clock.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn node_checks_and_the_lock_delay_let_nobody_overlap() {
    let Some(cluster) = ConsulCluster::start() else { return };
    let agent = cluster.agent.as_ref().expect("an agent");
    let options = "&layout=lock-key&ttl=8s&consul.lock_delay=8s&consul.node_checks=yes";
    let holder = client(&format!("{}{options}", agent.url()));
    let other = client(&format!("{}{options}", cluster.servers[0].url()));
    let mutex = holder.mutex("a").lock().await.expect("the lock");
    let permits = holder.semaphore("pool", 3).permits(3).lock().await.expect("permits");
    agent.pause();
    let (lock, semaphore) = (other.mutex("a"), other.semaphore("pool", 3).permits(3));
    let next_mutex = tokio::spawn(async move {
        let guard = lock.lock().await.expect("the lock");
        (Instant::now(), guard)
    });
    let next_permits = tokio::spawn(async move {
        let guard = semaphore.lock().await.expect("permits");
        (Instant::now(), guard)
    });
    mutex.lost().await;
    let mutex_lost = Instant::now();
    permits.lost().await;
    let permits_lost = Instant::now();
    let (mutex_granted, _next) = next_mutex.await.expect("the task");
    let (permits_granted, _next) = next_permits.await.expect("the task");
    for (lost, granted) in [(mutex_lost, mutex_granted), (permits_lost, permits_granted)] {
        assert!(granted >= lost, "granted {:?} before the loss", lost - granted);
    }
}

/// A release comes before the end of the session, so there is no lock-delay.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_client_that_leaves_causes_no_delay() {
    let Some(server) = ConsulServer::start() else { return };
    let one = client(&format!("{}&consul.lock_delay=30s", server.url()));
    let two = client(&server.url());
    let guard = one.mutex("a").lock().await.expect("the lock");
    drop((guard, one));
    let next = timeout(Duration::from_secs(15), two.mutex("a").lock()).await;
    drop(next.expect("without a delay").expect("the lock"));
}

/// Somebody removes the key of a held lock: the guard knows at the next renewal.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_removed_key_is_noticed() {
    let Some(server) = ConsulServer::start() else { return };
    let dlock = client(&server.url());
    let guard = dlock.mutex("a").lock().await.expect("the lock");
    server.run(&["kv", "delete", "a/.lock"]).expect("removed");
    let reason = timeout(Duration::from_secs(20), guard.lost()).await.expect("it is told");
    assert_eq!(reason, LossReason::Forgotten);
}

/// One renewal is not answered: it is made again, and nothing is lost.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn row_02_a_failed_renewal_is_tried_again() {
    let Some((_server, proxy, dlock)) = with_proxy("9s") else { return };
    let guard = dlock.mutex("a").lock().await.expect("the lock");
    proxy.once(Once::LoseReply, "/v1/session/renew/");
    eventually("the renewal fails", async || proxy.done() == 1).await;
    let renewed = |before: Duration| guard.valid_for() > before;
    eventually("it is renewed", async || renewed(Duration::from_secs(7))).await;
    assert_eq!(guard.state(), State::Held);
    assert_eq!(guard.release().await.expect("an answer"), ReleaseOutcome::Released);
}

/// All connections are half open: they are left, and new ones are made in time.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn row_07_half_open_connections_are_left() {
    let Some((server, proxy, one)) = with_proxy("20s") else { return };
    let two = client(&format!("{}&ttl=20s", server.url()));
    let other = two.mutex("b").lock().await.expect("the lock");
    let guard = one.mutex("a").lock().await.expect("the lock");
    let lock = one.mutex("b");
    let waiting = tokio::spawn(async move { lock.lock().await.map(drop) });
    eventually("it waits", async || one.local_state().waiting.len() == 1).await;
    proxy.freeze();
    let before = proxy.attempts().len();
    eventually("it connects again", async || proxy.attempts().len() > before).await;
    let valid_for = |seconds| guard.valid_for() > Duration::from_secs(seconds);
    eventually("a renewal fails", async || !valid_for(12)).await;
    eventually("the session goes on", async || valid_for(15)).await;
    assert_eq!(guard.state(), State::Held, "it was held all the time");
    // The query that waits for the other key has left its connection too: it is woken long
    // before the ten seconds after which a waiter looks by itself.
    eventually("its query is made again", async || proxy.attempts().len() >= before + 3).await;
    let released = Instant::now();
    drop(other);
    waiting.await.expect("the task").expect("the lock");
    assert!(released.elapsed() < Duration::from_secs(5), "{:?}", released.elapsed());
    assert_eq!(guard.release().await.expect("an answer"), ReleaseOutcome::Released);
}

/// Somebody waits; the lock becomes free, and the answer to the question for it is lost.
/// Then nobody wants it any more: it is removed at once, and not when the ttl has passed.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_waiter_that_gives_up_in_doubt_leaves_nothing() {
    let Some((server, proxy, one)) = with_proxy("60s") else { return };
    let two = client(&format!("{}&ttl=60s", server.url()));
    let guard = two.mutex("a").lock().await.expect("the lock");
    let lock = one.mutex("a");
    let waiting = tokio::spawn(async move { lock.lock().await.map(drop) });
    eventually("it has a session", async || server.sessions().len() == 2).await;
    eventually("it waits", async || one.local_state().waiting.len() == 1).await;
    tokio::time::sleep(Duration::from_millis(100)).await;
    proxy.once(Once::LoseReply, "\"lock\"");
    drop(guard);
    eventually("the answer is lost", async || proxy.done() == 1).await;
    waiting.abort();
    let _ = waiting.await;
    let began = Instant::now();
    eventually("nothing is left", async || server.lock_keys().is_empty()).await;
    assert!(began.elapsed() < Duration::from_secs(20), "{:?}", began.elapsed());
}

/// A release cannot be made for longer than the ttl, and the session lives on: it is made
/// when Consul answers again.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_release_is_made_however_late() {
    let Some((server, proxy, dlock)) = with_proxy("4s") else { return };
    let guard = dlock.mutex("a").lock().await.expect("the lock");
    let session = server.sessions();
    proxy.go_silent();
    drop(guard);
    // Somebody else keeps the session alive: it would be over before the release is given up.
    let began = Instant::now();
    while began.elapsed() < Duration::from_secs(7) {
        server.http("PUT", &format!("/v1/session/renew/{}", session[0]));
        tokio::time::sleep(Duration::from_millis(200)).await;
    }
    assert_eq!(server.lock_keys(), ["a/.lock"], "it could not be released");
    proxy.cut(); // what it held back is not delivered
    proxy.heal();
    eventually("it is released", async || server.lock_keys().is_empty()).await;
    assert_eq!(server.sessions(), session, "by the session that had it");
}

/// A request for a lock is stuck on its way. The client asks again, gets the lock and gives it
/// back, or gives up. When the first request arrives after that, it takes nothing.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn row_21_a_late_request_takes_no_lock() {
    let Some(server) = ConsulServer::start() else { return };
    let proxy = Proxy::opaque(server.port());
    let one = client(&format!("{}&ttl=60s", url(proxy.port())));
    let two = client(&format!("{}&ttl=60s", server.url()));
    drop(one.mutex("warm").lock().await.expect("the lock"));
    eventually("released", async || server.lock_keys().is_empty()).await;
    // The second request is granted.
    proxy.once(Once::HoldRequest, "\"lock\"");
    let guard = one.mutex("a").lock().await.expect("the lock");
    assert_eq!(guard.release().await.expect("an answer"), ReleaseOutcome::Released);
    // The second request finds that somebody else was faster, and waits.
    proxy.once(Once::HoldRequest, "\"lock\"");
    let lock = one.mutex("b").wait(Duration::from_secs(6));
    let waiting = tokio::spawn(async move { lock.lock().await.map(drop) });
    eventually("the request is stuck", async || proxy.done() == 2).await;
    let other = two.mutex("b").lock().await.expect("the lock");
    let error = waiting.await.expect("the task").expect_err("it is held");
    assert_eq!(error.kind(), ErrorKind::TimedOut, "{error}");
    assert_eq!(other.release().await.expect("an answer"), ReleaseOutcome::Released);
    for (late, key) in proxy.held().iter().zip(["a", "b"]) {
        let answer = tokio::task::block_in_place(|| server.deliver(late));
        assert!(answer.contains("409 Conflict"), "{key}: {answer}");
        let next = two.mutex(key).wait(Duration::from_secs(5)).lock().await;
        drop(next.expect("nobody has it"));
    }
}

/// The same for permits, whose sessions have ended by then.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn row_21_a_late_request_takes_no_permits() {
    let Some(server) = ConsulServer::start() else { return };
    let proxy = Proxy::opaque(server.port());
    let one = client(&format!("{}&layout=lock-key&ttl=60s", url(proxy.port())));
    let two = client(&format!("{}&layout=lock-key&ttl=60s", server.url()));
    proxy.once(Once::HoldRequest, "\"lock\"");
    let guard = one.semaphore("pool", 2).permits(2).lock().await.expect("permits");
    assert_eq!(proxy.done(), 1, "the first request is stuck");
    assert_eq!(guard.release().await.expect("an answer"), ReleaseOutcome::Released);
    let answer = tokio::task::block_in_place(|| server.deliver(&proxy.held()[0]));
    assert!(answer.contains("409 Conflict"), "{answer}");
    let all = two.semaphore("pool", 2).permits(2).wait(Duration::from_secs(5)).lock().await;
    drop(all.expect("nobody has them"));
}

/// A claim of more permits than sessions can be made in the time of one call gets them.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn many_permits_are_had_over_a_slow_network() {
    let Some(server) = ConsulServer::start() else { return };
    let proxy = Proxy::opaque(server.port());
    let dlock = client(&format!("{}&layout=lock-key&ttl=60s", url(proxy.port())));
    proxy.delay(Way::ToServer, Duration::from_millis(60));
    let guard = dlock.semaphore("pool", 60).permits(60).lock().await.expect("permits");
    assert_eq!(guard.release().await.expect("an answer"), ReleaseOutcome::Released);
}

/// The sessions of all permits are ended from outside: the client that had them removes the
/// semaphore all the same, with its next session.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn lost_permits_leave_nothing() {
    let Some(server) = ConsulServer::start() else { return };
    let dlock = client(&format!("{}&layout=lock-key", server.url()));
    let guard = dlock.semaphore("pool", 2).permits(2).lock().await.expect("permits");
    assert!(server.keys().contains(&"pool/.lock".to_owned()));
    server.end_sessions();
    timeout(Duration::from_secs(20), guard.lost()).await.expect("it is told");
    drop(guard);
    let other = dlock.mutex("other").lock().await.expect("a lock of the next session");
    eventually("the semaphore is removed", async || server.lock_keys() == ["other"]).await;
    drop(other);
}
