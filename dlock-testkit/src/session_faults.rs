//! Rows of the list of faults (docs/faults.md) for stores whose locks live by a
//! session. Each is written once, and [`session_faults!`](macro@crate::session_faults) makes tests
//! of them for one store.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use dlock::{Dlock, LossReason, ReleaseOutcome, State};
use tokio::time::timeout;

use crate::History;
use crate::conformance::eventually;
use crate::holder::{HolderProcess, number, rolling_restart};
use crate::proxy::{Once, Proxy};
use crate::session_servers::{Member, Members, SessionServer};

/// The ttl of most sessions.
const TTL: Duration = Duration::from_secs(2);
/// How often a session is ended from outside. A busy machine may delay one or another.
const ENDED_SESSIONS: usize = 3;
/// All guards of a session that was ended from outside know it within a second; here twice
/// that, for a busy machine.
const TOLD_WITHIN: Duration = Duration::from_secs(2);

/// Makes a test of each row on one kind of server and on one kind of cluster. It skips itself
/// if they are not installed.
///
/// ```ignore
/// dlock_testkit::session_faults!(EtcdServer, EtcdCluster);
/// ```
#[macro_export]
macro_rules! session_faults {
    ($server:ty, $cluster:ty) => {
        $crate::session_faults! { rows of $server:
            row_01_a_paused_holder_is_lost_and_its_successor_untouched
            row_04_an_entry_whose_answer_was_lost_is_found_again
            row_05_an_entry_that_nobody_wants_any_more_is_removed
            row_07_a_half_open_connection_is_left
            row_11_and_23_a_killed_process_holds_nobody_up
            row_12_a_blocked_executor_loses_no_lock
            row_18_a_session_ended_from_outside_is_told_to_all_guards
            row_18_a_session_that_expires_is_lost_by_its_deadline
            row_25_a_rolling_restart_never_has_two_holders
            a_waiter_survives_the_end_of_its_session
        }

        #[tokio::test(flavor = "multi_thread", worker_threads = 2)]
        async fn the_leader_is_killed_under_load() {
            $crate::session_faults::the_leader_is_killed_under_load(<$cluster>::start()).await;
        }
    };
    (rows of $server:ty: $($row:ident)*) => {$(
        #[tokio::test(flavor = "multi_thread", worker_threads = 2)]
        async fn $row() {
            $crate::session_faults::$row::<$server>().await;
        }
    )*};
}

fn client<S: SessionServer>(port: u16, ttl: Duration) -> Dlock {
    let builder = Dlock::builder().url(&S::url_at(&[port])).namespace("test").ttl(ttl);
    builder.wait(Duration::from_secs(30)).connect_lazy().expect("a client")
}

/// A process that holds locks.
fn holder<S: SessionServer>(server: &S, ttl: Duration) -> HolderProcess {
    let url = S::url_at(&[server.port()]);
    let separator = if url.contains('?') { '&' } else { '?' };
    let start = || HolderProcess::start(&format!("{url}{separator}ttl={}ms", ttl.as_millis()));
    tokio::task::block_in_place(start)
}

async fn is_free(dlock: &Dlock, key: &str) -> bool {
    let state = dlock.inspect(key).await.expect("an inspection");
    state.holders.is_empty() && state.waiters.is_empty()
}

async fn nothing_is_left<S: SessionServer>(server: &S) {
    let is_empty = async || tokio::task::block_in_place(|| server.left().is_empty());
    eventually("nothing is left", is_empty).await;
}

/// The holder is paused for longer than its session lasts.
///
/// # Panics
/// If the row does not hold; so do all others.
pub async fn row_01_a_paused_holder_is_lost_and_its_successor_untouched<S: SessionServer>() {
    let Some(server) = S::start() else { return };
    let mut paused = holder(&server, TTL);
    paused.send(&format!("lock a {}", TTL.as_millis()));
    let old = number(&paused.wait_for("granted"), "token");
    paused.process.pause();
    let next = client::<S>(server.port(), S::LONG_TTL);
    let guard = next.mutex("a").lock().await.expect("free with the session");
    assert!(guard.token().get() > old);
    paused.process.resume();
    paused.wait_for("lost");
    paused.send("release a");
    assert_eq!(paused.wait_for("released")["outcome"], "AlreadyLost");
    assert_eq!(guard.state(), State::Held);
    assert_eq!(guard.release().await.expect("an answer"), ReleaseOutcome::Released);
}

/// Also row 18: the entry is made, and the connection is cut instead of the answer. The same
/// owner finds its entry.
///
/// # Panics
/// If the row does not hold.
pub async fn row_04_an_entry_whose_answer_was_lost_is_found_again<S: SessionServer>() {
    let Some(server) = S::start() else { return };
    let proxy = Proxy::opaque(server.port());
    let dlock = client::<S>(proxy.port(), S::LONG_TTL);
    let other = client::<S>(server.port(), TTL);
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

/// Also row 18: the same, and the caller gave up meanwhile.
///
/// # Panics
/// If the row does not hold.
pub async fn row_05_an_entry_that_nobody_wants_any_more_is_removed<S: SessionServer>() {
    let Some(server) = S::start() else { return };
    let proxy = Proxy::opaque(server.port());
    let dlock = client::<S>(proxy.port(), S::LONG_TTL);
    let other = client::<S>(server.port(), TTL);
    drop(dlock.mutex("warm").lock().await.expect("the lock"));
    for n in 0..5 {
        let key = format!("k{n}");
        proxy.once(Once::LoseReply, &format!("test/{key}/"));
        let lock = dlock.mutex(key.as_str());
        let given_up = timeout(Duration::from_millis(3 * n), lock.lock()).await;
        drop(given_up);
        eventually("free", async || is_free(&other, &key).await).await;
        proxy.forget_once();
    }
}

/// A half-open connection: the client leaves it, and keeps session and lock.
///
/// # Panics
/// If the row does not hold.
pub async fn row_07_a_half_open_connection_is_left<S: SessionServer>() {
    let Some(server) = S::start() else { return };
    let proxy = Proxy::opaque(server.port());
    // There is time for two silences before the session ends, on a busy machine too.
    let ttl = S::LONG_TTL.min(Duration::from_secs(12));
    let dlock = client::<S>(proxy.port(), ttl);
    let guard = dlock.mutex("a").lock().await.expect("the lock");
    proxy.freeze();
    let began = Instant::now();
    while began.elapsed() < ttl + Duration::from_secs(2) {
        assert_ne!(guard.state(), State::Lost, "after {:?}", began.elapsed());
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
    assert!(proxy.attempts().len() >= 2, "it connected again");
    assert_eq!(guard.release().await.expect("an answer"), ReleaseOutcome::Released);
}

/// A process with a lock and many waiters is killed.
///
/// # Panics
/// If the row does not hold.
pub async fn row_11_and_23_a_killed_process_holds_nobody_up<S: SessionServer>() {
    let Some(server) = S::start() else { return };
    let dlock = client::<S>(server.port(), TTL);
    let mut killed = holder(&server, TTL);
    killed.send(&format!("lock a {}", TTL.as_millis()));
    killed.wait_for("granted");
    if dlock.capabilities().fifo {
        killed.send(&format!("fair a {} 50", TTL.as_millis()));
        let waiters = async || dlock.inspect("a").await.expect("a look").waiters.len();
        eventually("all wait", async || waiters().await == 50).await;
    } else {
        killed.send(&format!("lock a {} 500", TTL.as_millis()));
    }
    let began = Instant::now();
    killed.process.kill();
    drop(dlock.mutex("a").lock().await.expect("the lock"));
    // One session, and not one for each waiter.
    assert!(began.elapsed() < S::FREED_WITHIN, "{:?}", began.elapsed());
    drop(dlock);
    nothing_is_left(&server).await;
}

/// The executor of the program is blocked for longer than the session lasts: it is kept by
/// the client's own thread.
///
/// # Panics
/// If the row does not hold.
pub async fn row_12_a_blocked_executor_loses_no_lock<S: SessionServer>() {
    let Some(server) = S::start() else { return };
    let port = server.port();
    let program = std::thread::spawn(move || {
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build();
        runtime.expect("a runtime").block_on(async {
            let dlock = client::<S>(port, TTL * 2);
            let guard = dlock.mutex("a").lock().await.expect("the lock");
            std::thread::sleep(Duration::from_secs(9)); // the only worker
            assert_eq!(guard.state(), State::Held);
            assert_eq!(guard.release().await.expect("an answer"), ReleaseOutcome::Released);
        });
    });
    tokio::task::block_in_place(|| program.join()).expect("the row holds");
}

/// A session is ended from outside some times, and its client is connected: all guards know it
/// before the keep-alive of the session would tell. No release touches a successor.
///
/// # Panics
/// If the row does not hold.
pub async fn row_18_a_session_ended_from_outside_is_told_to_all_guards<S: SessionServer>() {
    let Some(server) = S::start() else { return };
    let dlock = client::<S>(server.port(), S::LONG_TTL);
    let mut shortest = Duration::MAX;
    for _ in 0..ENDED_SESSIONS {
        let mut guards = Vec::new();
        for n in 0..20 {
            guards.push(dlock.mutex(format!("k{n}")).lock().await.expect("the lock"));
        }
        let last = guards[19].token();
        tokio::task::block_in_place(|| server.end_sessions());
        let ended = Instant::now();
        for guard in &guards {
            let reason = timeout(Duration::from_secs(60), guard.lost()).await.expect("it is told");
            assert_eq!(reason, LossReason::SessionLost);
            assert_eq!(guard.state(), State::Lost);
        }
        println!("all know it after {:?}", ended.elapsed());
        shortest = shortest.min(ended.elapsed());
        let again = dlock.mutex("k19").lock().await.expect("the lock, by a new session");
        assert!(again.token() > last);
        for guard in guards {
            assert_eq!(guard.release().await.expect("an answer"), ReleaseOutcome::AlreadyLost);
        }
        assert_eq!(again.state(), State::Held, "no release touches the successor");
        assert_eq!(again.release().await.expect("an answer"), ReleaseOutcome::Released);
    }
    assert!(shortest < TOLD_WITHIN, "{shortest:?}");
}

/// The store lets a session expire while its client cannot hear of it.
///
/// # Panics
/// If the row does not hold.
pub async fn row_18_a_session_that_expires_is_lost_by_its_deadline<S: SessionServer>() {
    let Some(server) = S::start() else { return };
    let proxy = Proxy::opaque(server.port());
    let dlock = client::<S>(proxy.port(), TTL);
    let mut guards = Vec::new();
    for n in 0..20 {
        guards.push(dlock.mutex(format!("k{n}")).lock().await.expect("the lock"));
    }
    proxy.go_silent();
    nothing_is_left(&server).await;
    assert!(guards.iter().all(|guard| guard.state() == State::Lost), "lost by their deadline");
    proxy.heal();
    drop(guards);
    let guard = dlock.mutex("k0").lock().await.expect("the lock, in a new session");
    assert_eq!(guard.state(), State::Held);
}

/// Who waits when the session ends asks again by the next one.
///
/// # Panics
/// If it does not.
pub async fn a_waiter_survives_the_end_of_its_session<S: SessionServer>() {
    let Some(server) = S::start() else { return };
    let [one, two] = [(); 2].map(|()| client::<S>(server.port(), S::LONG_TTL));
    // With a lock of its own it surely has a session.
    let own = two.mutex("own").lock().await.expect("the lock");
    let guard = one.mutex("a").lock().await.expect("the lock");
    let lock = two.mutex("a");
    let waiting = tokio::spawn(async move { lock.lock().await });
    eventually("it waits", async || two.local_state().waiting.len() == 1).await;
    tokio::task::block_in_place(|| server.end_sessions());
    for guard in [&own, &guard] {
        let reason = timeout(Duration::from_secs(10), guard.lost()).await.expect("it is told");
        assert_eq!(reason, LossReason::SessionLost);
    }
    let next = timeout(Duration::from_secs(30), waiting).await.expect("in time").expect("the task");
    assert!(next.expect("the lock").token() > guard.token());
}

/// Processes that work under one lock are shut down and replaced, one by one.
///
/// # Panics
/// If the row does not hold.
pub async fn row_25_a_rolling_restart_never_has_two_holders<S: SessionServer>() {
    let Some(server) = S::start() else { return };
    let ttl = S::LONG_TTL;
    let start = || holder(&server, ttl);
    rolling_restart(start, ttl, Duration::from_secs(20)).await.assert_clean(30);
    nothing_is_left(&server).await;
}

/// The leader of a cluster is killed under load: the others go on, and nobody overlaps.
/// `DLOCK_TEST_KILLS=10` kills it ten times.
///
/// # Panics
/// If there is no progress soon after an election, or an overlap.
#[expect(private_bounds, reason = "only servers of this crate can be members")]
pub async fn the_leader_is_killed_under_load<S: Member>(cluster: Option<Members<S>>) {
    let Some(mut cluster) = cluster else { return };
    let kills = std::env::var("DLOCK_TEST_KILLS").ok().and_then(|kills| kills.parse().ok());
    let (history, stop) = (Arc::new(History::default()), Arc::new(AtomicBool::new(false)));
    let (mut tasks, ttl) = (Vec::new(), S::LONG_TTL.min(Duration::from_secs(15)));
    for _ in 0..2 {
        let builder = Dlock::builder().url(&cluster.url()).ttl(ttl);
        let dlock = builder.wait(Duration::from_secs(120)).connect_lazy().expect("a client");
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
        cluster.kill(leader);
        let new = tokio::task::block_in_place(|| cluster.next_leader(leader));
        let (elected, before) = (Instant::now(), history.entries());
        eventually("progress", async || history.entries() > before + 5).await;
        let stalled = elected.elapsed();
        println!("member {new} leads; {stalled:?} later the locks go on");
        assert!(stalled < S::PROGRESS_WITHIN, "{stalled:?}");
        tokio::task::block_in_place(|| cluster.repair());
    }
    stop.store(true, Ordering::Relaxed);
    for task in tasks {
        task.await.expect("the task");
    }
    history.assert_clean();
}
