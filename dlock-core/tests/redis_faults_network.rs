//! Rows of the list of faults about the network, between clients and a real Redis. The
//! proxy injects the faults.

use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use dlock::backend::Cursor;
use dlock::machine::Bug;
use dlock::{Dlock, ErrorKind, Event, ReleaseOutcome, Result, State};
use dlock_testkit::conformance::eventually;
use dlock_testkit::interval::HeldInterval;
use dlock_testkit::proxy::{Once, Proxy, Way};
use dlock_testkit::record_checker::RecordChecker;
use dlock_testkit::redis::{RedisServer, TTL, client};
use tokio::task::JoinHandle;

const LONG: Duration = Duration::from_secs(30);
/// The stall of row 22 lasts for two of these, and ends before the client gives up its
/// stalled connection for notices.
const SHORT: Duration = Duration::from_millis(300);
const CALL: Duration = Duration::from_millis(700);

/// A client through a proxy, with the call time-out [`CALL`].
async fn proxied(server: &RedisServer) -> (Proxy, Dlock) {
    let proxy = Proxy::start(server.port()).await;
    let client = client(&proxy.url()).call_timeout(CALL).connect_lazy().expect("a client");
    (proxy, client)
}

/// A client through a proxy, and one that is connected directly.
struct Scene {
    server: RedisServer,
    proxy: Proxy,
    one: Dlock,
    two: Dlock,
}

impl Scene {
    async fn start() -> Option<Self> {
        let server = RedisServer::start()?;
        let (proxy, one) = proxied(&server).await;
        let two = server.client();
        Some(Scene { server, proxy, one, two })
    }

    /// Checks that nothing is left when both clients are gone.
    async fn end(self) {
        drop((self.one, self.two));
        self.server.assert_nothing_left().await;
    }
}

/// Waits until the server has a waiter for "a".
async fn somebody_waits(client: &Dlock) {
    eventually("it waits", async || {
        client.inspect("a").await.expect("an inspection").waiters.len() == 1
    })
    .await;
}

/// Starts a task that waits for "a", and waits until another client sees it.
async fn waiting(waiter: &Dlock, seen_by: &Dlock) -> JoinHandle<Result<()>> {
    let lock = waiter.mutex("a").ttl(LONG);
    let waiting = tokio::spawn(async move { lock.lock().await.map(drop) });
    somebody_waits(seen_by).await;
    waiting
}

async fn is_free(client: &Dlock, key: &str) -> bool {
    let state = client.inspect(key).await.expect("an inspection");
    state.holders.is_empty() && state.waiters.is_empty()
}

/// Counts the events of a client about its leases.
#[derive(Default)]
struct Seen {
    renewed: AtomicU32,
    uncertain: AtomicU32,
    lost: AtomicU32,
}

impl Seen {
    fn by(seen: &Arc<Self>) -> impl Fn(&Event<'_>) + Send + Sync + 'static {
        let seen = seen.clone();
        move |event| {
            let count = match event {
                Event::Renewed { .. } => &seen.renewed,
                Event::Uncertain { .. } => &seen.uncertain,
                Event::Lost { .. } => &seen.lost,
                _ => return,
            };
            count.fetch_add(1, Ordering::Relaxed);
        }
    }

    fn counts(&self) -> [u32; 3] {
        [&self.renewed, &self.uncertain, &self.lost].map(|count| count.load(Ordering::Relaxed))
    }
}

/// The answer of a renewal is lost, then connections are killed: the lease is
/// uncertain, the renewal is repeated, and the lease is held. Others do not notice.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn row_02_a_failed_renewal_is_tried_again() {
    let Some(server) = RedisServer::start() else { return };
    let proxy = Proxy::start(server.port()).await;
    let (here, there) = (Arc::new(Seen::default()), Arc::new(Seen::default()));
    let ttl = Duration::from_secs(3);
    let one = client(&proxy.url()).ttl(ttl).call_timeout(CALL).on_event(Seen::by(&here));
    let one = one.connect_lazy().expect("a client");
    let two = client(&server.url()).ttl(ttl).on_event(Seen::by(&there));
    let two = two.connect_lazy().expect("a client");
    let guard = one.mutex("a").lock().await.expect("the lock");
    let other = two.mutex("b").lock().await.expect("the lock");
    proxy.once(Once::LoseReply, "test:a}");
    eventually("the renewal fails", async || here.counts()[1] > 0).await;
    assert_ne!(guard.state(), State::Lost);
    eventually("it is held again", async || here.counts()[0] > 0 && guard.state() == State::Held)
        .await;
    assert_eq!(proxy.done(), 1);
    for _ in 0..3 {
        server.cli(&["CLIENT", "KILL", "TYPE", "normal"]);
        tokio::time::sleep(Duration::from_millis(700)).await;
        assert_ne!(guard.state(), State::Lost);
    }
    let renewed = here.counts()[0];
    eventually("renewals go on", async || here.counts()[0] > renewed).await;
    assert_eq!((here.counts()[2], there.counts()[2]), (0, 0), "nothing was lost");
    assert_eq!(guard.release().await.expect("an answer"), ReleaseOutcome::Released);
    assert_eq!(other.release().await.expect("an answer"), ReleaseOutcome::Released);
    drop((one, two));
    server.assert_nothing_left().await;
}

/// The answers of an acquire and of a release are lost, and requests are duplicated.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn row_04_a_lost_answer_gives_the_same_grant() {
    let Some(scene) = Scene::start().await else { return };
    let Scene { proxy, one, two, .. } = &scene;
    let warm = one.mutex("warm").lock().await.expect("the lock");
    drop(warm);
    let mut last = 0;
    for (round, what) in [Once::LoseReply, Once::DuplicateRequest].into_iter().enumerate() {
        proxy.once(what, "test:a}");
        let guard = one.mutex("a").ttl(LONG).lock().await.expect("the lock, asked for twice");
        assert_eq!(proxy.done(), 2 * round as u64 + 1, "it did happen");
        let state = two.inspect("a").await.expect("an inspection");
        assert_eq!(state.holders.len(), 1, "{state:?}");
        assert_eq!(state.holders[0].token, Some(guard.token().get()), "the one grant");
        assert!(guard.token().get() > last);
        last = guard.token().get();
        proxy.once(what, "test:a}");
        match guard.release().await {
            Ok(outcome) => assert_eq!(outcome, ReleaseOutcome::Released),
            Err(error) => assert_eq!(error.kind(), ErrorKind::Unknown, "{error}"),
        }
        eventually("it is free", async || is_free(two, "a").await).await;
    }
    assert_eq!(proxy.done(), 4);
    scene.end().await;
}

/// Futures are dropped after any number of polls, on a network slow enough to
/// catch each of them in every state.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn row_05_whatever_is_dropped_leaves_nothing() {
    use std::task::{Context, Waker};
    let Some(scene) = Scene::start().await else { return };
    let Scene { proxy, one, two, .. } = &scene;
    proxy.delay(Way::ToServer, Duration::from_millis(4));
    proxy.delay(Way::ToClient, Duration::from_millis(4));
    for busy in [false, true] {
        for polls in 0..8 {
            let held = match busy {
                true => Some(two.mutex("a").ttl(LONG).lock().await.expect("the lock")),
                false => None,
            };
            let (lock, read) = (one.mutex("a").ttl(LONG), one.rwlock("a").read().ttl(LONG));
            let both = one.all_of(["a", "b"]).ttl(LONG);
            let permits = one.semaphore("a", 2).permits(2).ttl(LONG);
            let mut futures = [
                Box::pin(async { lock.lock().await.map(drop) })
                    as futures_util::future::BoxFuture<'_, _>,
                Box::pin(async { read.lock().await.map(drop) }),
                Box::pin(async { both.lock().await.map(drop) }),
                Box::pin(async { permits.lock().await.map(drop) }),
            ];
            let mut done = [false; 4];
            for _ in 0..polls {
                for (future, done) in futures.iter_mut().zip(&mut done).filter(|(_, done)| !**done)
                {
                    let polled = future.as_mut().poll(&mut Context::from_waker(Waker::noop()));
                    *done = polled.is_ready();
                }
                tokio::time::sleep(Duration::from_millis(3)).await;
            }
            drop(futures);
            drop(held);
            let began = Instant::now();
            eventually("all of it is free", async || {
                is_free(two, "a").await && is_free(two, "b").await
            })
            .await;
            assert!(began.elapsed() < Duration::from_secs(3), "{:?}", began.elapsed());
        }
    }
    scene.end().await;
}

/// The message that hands the lock over is lost, or its connection killed.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn row_06_a_lost_wake_up_costs_about_a_second() {
    let Some(scene) = Scene::start().await else { return };
    let Scene { server, proxy, one: waiter, two: holder } = &scene;
    drop(waiter.mutex("warm").lock().await.expect("the lock"));
    for round in 0..4 {
        let guard = holder.mutex("a").ttl(LONG).lock().await.expect("the lock");
        let waiting = waiting(waiter, holder).await;
        if round % 2 == 0 {
            proxy.once(Once::LosePush, "");
        } else {
            server.cli(&["CLIENT", "KILL", "TYPE", "pubsub"]);
        }
        let began = Instant::now();
        drop(guard);
        waiting.await.expect("the task").expect("the lock");
        assert!(began.elapsed() < Duration::from_millis(2_500), "{:?}", began.elapsed());
    }
    assert_eq!(proxy.done(), 2, "two messages were lost");
    scene.end().await;
}

/// The same with a client that never asks again.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn control_a_waiter_that_only_listens_is_found() {
    let Some(server) = RedisServer::start() else { return };
    let proxy = Proxy::start(server.port()).await;
    let waiter = client(&proxy.url()).plant(Bug::LostWakeup).connect_lazy().expect("a client");
    let holder = server.client();
    drop(waiter.mutex("warm").lock().await.expect("the lock"));
    let guard = holder.mutex("a").ttl(LONG).lock().await.expect("the lock");
    let waiting = waiting(&waiter, &holder).await;
    proxy.once(Once::LosePush, "");
    drop(guard);
    tokio::time::sleep(Duration::from_millis(2_500)).await;
    assert!(!waiting.is_finished(), "it looked again, the bug is not there");
    waiting.abort();
}

/// Connections that are open and dead: first the existing ones, then new ones too.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn row_07_half_open_connections_end_by_the_time_out() {
    let Some(server) = RedisServer::start() else { return };
    let (proxy, client) = proxied(&server).await;
    let guard = client.mutex("a").ttl(Duration::from_secs(10)).lock().await.expect("the lock");
    for silent in [false, true] {
        if silent {
            proxy.go_silent();
        } else {
            proxy.freeze();
        }
        let began = Instant::now();
        let error = client.mutex("b").try_lock().await.expect_err("no answer");
        assert!(began.elapsed() < CALL + Duration::from_secs(2), "{:?}", began.elapsed());
        let kind = error.kind();
        assert!(matches!(kind, ErrorKind::Unknown | ErrorKind::Unavailable), "{error}");
        let problem = client.health().await.problem;
        if silent {
            assert!(problem.is_some(), "nobody answers");
            proxy.heal();
        }
        eventually("calls are answered again", async || {
            client.mutex("b").try_lock().await.is_ok_and(|guard| guard.is_some())
        })
        .await;
        eventually("renewals go on", async || guard.state() == State::Held).await;
    }
    assert_eq!(guard.release().await.expect("an answer"), ReleaseOutcome::Released);
    proxy.heal();
    drop(client);
    server.assert_nothing_left().await;
}

/// Something between client and server forgets the connection while nobody uses it, and tells
/// nobody. The next call finds another one.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn row_07_a_connection_that_was_forgotten_costs_no_call() {
    let Some(server) = RedisServer::start() else { return };
    let (proxy, client) = proxied(&server).await;
    drop(client.mutex("a").lock().await.expect("the lock"));
    proxy.freeze();
    tokio::time::sleep(Duration::from_secs(13)).await;
    let began = Instant::now();
    let guard = client.mutex("a").try_lock().await.expect("no error").expect("the lock");
    assert!(began.elapsed() < CALL, "{:?}", began.elapsed());
    assert_eq!(guard.release().await.expect("an answer"), ReleaseOutcome::Released);
    // While the server answers, the connection is kept.
    let attempts = proxy.attempts().len();
    tokio::time::sleep(Duration::from_secs(12)).await;
    drop(client.mutex("a").lock().await.expect("the lock"));
    assert_eq!(proxy.attempts().len(), attempts);
}

/// An address leads to another server after a failover, as that of a managed service does. A
/// release that the new server has not heard of is made again.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_release_is_made_again_where_an_address_fails_over() {
    let Some(old) = RedisServer::start() else { return };
    let Some(new) = RedisServer::start() else { return };
    let (proxy, client) = proxied(&old).await;
    let port = old.port().to_string();
    new.cli(&["REPLICAOF", "127.0.0.1", &port]);
    let guard = client.mutex("a").ttl(LONG).lock().await.expect("the lock");
    let copied = || new.cli(&["--scan"]).contains("{test:a}");
    eventually("the lock is replicated", async || copied()).await;
    new.cli(&["REPLICAOF", "NO", "ONE"]);
    assert_eq!(guard.release().await.expect("an answer"), ReleaseOutcome::Released);
    assert!(copied(), "the release is not replicated");
    proxy.redirect(new.port());
    eventually("the client is there", async || client.mutex("b").try_lock().await.is_ok()).await;
    eventually("the key is free", async || {
        new.client().mutex("a").try_lock().await.is_ok_and(|guard| guard.is_some())
    })
    .await;
}

/// A claim is cancelled while the server is paused, or its request is held back. When
/// the request arrives late, it leaves no lock behind. (The ttl is far longer than the
/// test.)
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn row_21_a_late_acquire_leaves_no_ghost() {
    let Some(scene) = Scene::start().await else { return };
    let Scene { server, proxy, one: client, two: other } = &scene;
    drop(client.mutex("warm").lock().await.expect("the lock"));
    for round in 0..10_u32 {
        let key = format!("ghost-{round}");
        let stalls = round % 2 == 1;
        if stalls {
            proxy.stall(&[Way::ToServer])
        } else {
            server.pause()
        }
        let lock = client.mutex(key.as_str()).ttl(LONG);
        // Given up before, during and after the time of a call.
        let patience = Duration::from_millis(30 + 250 * u64::from(round / 2));
        let given_up = tokio::time::timeout(patience, lock.lock()).await;
        assert!(given_up.is_err(), "no server, no lock");
        if stalls {
            proxy.heal()
        } else {
            server.resume()
        }
        // Nobody's by the time the server has answered whatever was sent.
        eventually("the claim is gone", async || client.local_state().waiting.is_empty()).await;
        let began = Instant::now();
        let free = other.mutex(key.as_str()).wait(Duration::from_secs(10)).lock().await;
        drop(free.expect("no ghost"));
        assert!(began.elapsed() < Duration::from_secs(5), "{:?}", began.elapsed());
        // Whatever was held back has arrived, and if it took the lock that is undone.
        eventually("old connections have ended", async || proxy.open() <= 2).await;
        eventually("it stays free", async || is_free(other, &key).await).await;
    }
    // A client that is gone undoes nothing, so it stays until there is nothing to undo.
    eventually("no lock is left", async || {
        other.list("ghost", Cursor::default()).await.is_ok_and(|page| page.keys.is_empty())
    })
    .await;
    scene.end().await;
}

/// Delays the hand-over of row 22. The records show whether the waiter believes that it
/// holds the lock while a third client has it.
async fn stalled_handover(waiter: Dlock, proxy: &Proxy, server: &RedisServer) -> RecordChecker {
    let checker = Arc::new(Mutex::new(RecordChecker::default()));
    let (holder, third) = (server.client(), server.client());
    drop(waiter.mutex("warm").lock().await.expect("the lock"));
    let guard = holder.mutex("a").lock().await.expect("the lock");
    let (told, mut granted) = tokio::sync::mpsc::unbounded_channel();
    let waiting = tokio::spawn({
        let (lock, checker) = (waiter.mutex("a").ttl(SHORT), checker.clone());
        async move {
            let guard = lock.lock().await.expect("the lock, in the end");
            let interval = HeldInterval::begin(&guard);
            let _ = told.send(());
            tokio::time::sleep(Duration::from_millis(100)).await;
            let mut checker = checker.lock().expect("the checker");
            let records = interval.map(|interval| interval.end(&guard, "waiter"));
            records.into_iter().flatten().for_each(|record| checker.add(record));
        }
    });
    somebody_waits(&holder).await;
    proxy.stall(&[Way::ToClient]);
    assert_eq!(guard.release().await.expect("an answer"), ReleaseOutcome::Released);
    // The lock is the waiter's, who does not know; when that has ended, a third's.
    let guard = third.mutex("a").ttl(LONG).lock().await.expect("the lock");
    let interval = HeldInterval::begin(&guard).expect("it is held");
    tokio::time::sleep(SHORT).await;
    proxy.heal();
    let early = tokio::time::timeout(Duration::from_millis(1_500), granted.recv()).await;
    for record in interval.end(&guard, "third") {
        checker.lock().expect("the checker").add(record);
    }
    assert_eq!(guard.release().await.expect("an answer"), ReleaseOutcome::Released);
    if early.is_err() {
        granted.recv().await.expect("it gets the lock after the third");
    }
    waiting.await.expect("the waiter");
    drop((waiter, holder, third));
    let mut checker =
        Arc::into_inner(checker).expect("all are gone").into_inner().expect("the checker");
    checker.sweep(u64::MAX);
    checker
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn row_22_a_stalled_hand_over_is_not_counted_from_its_receipt() {
    let Some(server) = RedisServer::start() else { return };
    let (proxy, waiter) = proxied(&server).await;
    let checker = stalled_handover(waiter, &proxy, &server).await;
    assert_eq!((checker.checked, checker.violations), (2, Vec::new()));
    server.assert_nothing_left().await;
}

/// Checks that two holders overlap. Whether the bug shows depends on which of the
/// delayed messages arrives first, so it is tried more than once.
async fn assert_held_twice(
    bug: Bug,
    look: impl AsyncFn(Dlock, &Proxy, &RedisServer) -> RecordChecker,
) {
    let mut checkers = Vec::new();
    for _ in 0..10 {
        let Some(server) = RedisServer::start() else { return };
        let proxy = Proxy::start(server.port()).await;
        let client = client(&proxy.url()).call_timeout(LONG).plant(bug);
        let checker = look(client.connect_lazy().expect("a client"), &proxy, &server).await;
        if checker.violations.iter().any(|what| what.contains("held twice")) {
            return;
        }
        checkers.push(checker);
    }
    panic!("the bug is not found: {checkers:#?}");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn control_a_hand_over_counted_from_its_receipt_is_found() {
    assert_held_twice(Bug::HandoverCountedFromReceipt, stalled_handover).await;
}

/// A lease that counts from the reply is too long by the delay of the reply. It shows
/// when the holder is cut off right after.
async fn slow_reply(one: Dlock, proxy: &Proxy, server: &RedisServer) -> RecordChecker {
    let (other, ttl) = (server.client(), TTL * 3);
    drop(one.mutex("warm").lock().await.expect("the lock"));
    proxy.delay(Way::ToClient, ttl * 2 / 3);
    let guard = one.mutex("a").ttl(ttl).lock().await.expect("the lock");
    proxy.go_silent();
    let interval = HeldInterval::begin(&guard).expect("it is held");
    let next = tokio::spawn(async move {
        let guard = other.mutex("a").lock().await.expect("free by ttl");
        let interval = HeldInterval::begin(&guard).expect("it is held");
        tokio::time::sleep(ttl).await;
        interval.end(&guard, "next")
    });
    guard.lost().await;
    let mut checker = RecordChecker::default();
    interval.end(&guard, "first").into_iter().for_each(|record| checker.add(record));
    next.await.expect("the next").into_iter().for_each(|record| checker.add(record));
    checker.sweep(u64::MAX);
    checker
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_lease_counts_from_before_its_request() {
    let Some(server) = RedisServer::start() else { return };
    let proxy = Proxy::start(server.port()).await;
    let one = client(&proxy.url()).call_timeout(LONG).connect_lazy().expect("a client");
    let checker = slow_reply(one, &proxy, &server).await;
    assert_eq!((checker.checked, checker.violations), (2, Vec::new()));
    drop(proxy);
    server.assert_nothing_left().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn control_a_lease_counted_from_the_reply_is_found() {
    assert_held_twice(Bug::LeaseCountedFromReply, slow_reply).await;
}
