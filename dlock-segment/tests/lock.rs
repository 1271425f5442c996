//! The segmented lock, on the embedded backend under paused time, and on Redis.

#![allow(clippy::unwrap_used, reason = "a failed step fails the test")]

use std::collections::HashSet;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
use std::time::Duration;

use dlock::{Dlock, ErrorKind, Guard, State, testing};
use dlock_segment::{SegmentOutcome, SegmentedLock};
use dlock_testkit::redis::{RedisServer, TTL, client};

/// Two clients of one store, and its server.
struct Place {
    dlock: Dlock,
    another: Dlock,
    server: Option<RedisServer>,
}

impl Place {
    async fn memory() -> Self {
        static NUMBER: AtomicUsize = AtomicUsize::new(0);
        let url = format!("memory://segments-{}", NUMBER.fetch_add(1, Ordering::Relaxed));
        let connect = || Dlock::connect(&url);
        let (dlock, another) = (connect().await.unwrap(), connect().await.unwrap());
        Place { dlock, another, server: None }
    }

    async fn redis() -> Option<Self> {
        let server = RedisServer::start()?;
        // A busy machine must not make a lease end that is not to.
        let connect = || client(&server.url()).ttl(Duration::from_secs(10)).connect();
        let (dlock, another) = (connect().await.unwrap(), connect().await.unwrap());
        Some(Place { dlock, another, server: Some(server) })
    }

    /// The number of rounds: many on the embedded store, fewer where each costs round trips.
    fn rounds(&self, embedded: usize, remote: usize) -> usize {
        if self.server.is_some() { remote } else { embedded }
    }
}

macro_rules! on_both_backends {
    ($($test:ident),* $(,)?) => {
        mod on_memory {
            $(#[tokio::test(start_paused = true)]
            async fn $test() {
                super::$test(super::Place::memory().await).await;
            })*
        }
        mod on_redis {
            $(#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
            async fn $test() {
                let Some(place) = super::Place::redis().await else { return };
                super::$test(place).await;
            })*
        }
    };
}

on_both_backends!(
    each_segment_is_offered_once_from_a_random_start,
    a_busy_segment_is_passed_over_and_waited_for_last,
    whichever_becomes_free_is_taken,
    all_busy_ends_by_the_wait,
    what_is_dry_is_left_out_by_every_lock_of_the_key,
    sold_out_takes_no_lock_until_a_restock,
    guards_that_are_held_never_wait_for_each_other,
    the_closure_form_excludes_per_segment_and_can_be_spawned,
    loss_panic_and_cancellation_are_those_of_any_lock,
);

async fn visit_all(stock: &SegmentedLock) -> Vec<usize> {
    let mut segments = stock.pick();
    let mut seen = Vec::new();
    while let Some((segment, guard)) = segments.next().await.expect("a segment") {
        assert_eq!(guard.state(), State::Held);
        seen.push(segment.index());
        segments.dry();
    }
    seen
}

async fn each_segment_is_offered_once_from_a_random_start(place: Place) {
    let stock = SegmentedLock::new(&place.dlock, "stock", 20).dry_for(Duration::ZERO);
    let mut starts = HashSet::new();
    let rounds = place.rounds(200, 12);
    for _ in 0..rounds {
        let seen = visit_all(&stock).await;
        starts.insert(seen[0]);
        assert_eq!(seen.iter().collect::<HashSet<_>>().len(), 20);
        assert_eq!(seen.len(), 20);
    }
    assert!(starts.len() > if rounds > 100 { 10 } else { 3 }, "the start is random: {starts:?}");
}

async fn a_busy_segment_is_passed_over_and_waited_for_last(place: Place) {
    let stock = SegmentedLock::new(&place.dlock, "stock", 3);
    let mut holder = SegmentedLock::new(&place.another, "stock", 3).pick();
    let (held, guard) = holder.next().await.unwrap().unwrap();
    let mut segments = stock.pick();
    for _ in 0..2 {
        let (segment, _guard) = segments.next().await.unwrap().unwrap();
        assert_ne!(segment.index(), held.index());
        segments.dry();
    }
    let began = tokio::time::Instant::now();
    let release = async {
        tokio::time::sleep(Duration::from_millis(500)).await;
        drop(guard);
    };
    let (last, ()) = tokio::join!(segments.next(), release);
    assert_eq!(last.unwrap().unwrap().0.index(), held.index());
    assert!(began.elapsed() >= Duration::from_millis(500));
    assert!(segments.next().await.unwrap().is_none());
}

async fn whichever_becomes_free_is_taken(place: Place) {
    let stock = SegmentedLock::new(&place.dlock, "stock", 20);
    let elsewhere = SegmentedLock::new(&place.another, "stock", 20);
    for _ in 0..place.rounds(20, 3) {
        let mut holder = elsewhere.pick();
        let mut guards = Vec::new();
        while let Some((segment, guard)) = holder.next().await.unwrap() {
            guards.push((segment.index(), guard));
        }
        let (freed, guard) = guards.swap_remove(7);
        let mut segments = stock.pick();
        let release = async {
            tokio::time::sleep(Duration::from_millis(500)).await;
            drop(guard);
        };
        let (got, ()) = tokio::join!(segments.next(), release);
        assert_eq!(got.unwrap().unwrap().0.index(), freed);
    }
}

async fn all_busy_ends_by_the_wait(place: Place) {
    let stock = SegmentedLock::new(&place.dlock, "stock", 2).wait(Duration::from_millis(300));
    let mut holder = SegmentedLock::new(&place.another, "stock", 2).pick();
    let _one = holder.next().await.unwrap().unwrap();
    let _two = holder.next().await.unwrap().unwrap();
    let error = stock.pick().next().await.unwrap_err();
    assert_eq!(error.kind(), ErrorKind::TimedOut);
}

async fn what_is_dry_is_left_out_by_every_lock_of_the_key(place: Place) {
    for round in 0..place.rounds(50, 10) {
        let key = format!("stock-{round}");
        let a_minute = Duration::from_secs(60);
        let first = SegmentedLock::new(&place.dlock, key.clone(), 5).dry_for(a_minute);
        let mut segments = first.pick();
        let (dry, guard) = segments.next().await.unwrap().unwrap();
        segments.dry();
        drop(guard);
        let another = SegmentedLock::new(&place.dlock, key, 5).dry_for(Duration::ZERO);
        let seen = visit_all(&another).await;
        assert!(seen.len() == 4 && !seen.contains(&dry.index()), "{seen:?}");
    }
}

/// Asks every segment that is offered, and finds it dry. Returns how often it asked.
async fn ask_dry_segments(stock: &SegmentedLock) -> usize {
    let asked = AtomicUsize::new(0);
    let body = |_, _| {
        asked.fetch_add(1, Ordering::SeqCst);
        async { Ok::<_, dlock::Error>(SegmentOutcome::<()>::Dry) }
    };
    assert_eq!(stock.run(body).await.unwrap(), None);
    asked.into_inner()
}

async fn sold_out_takes_no_lock_until_a_restock(place: Place) {
    let a_minute = Duration::from_secs(60);
    let stock = SegmentedLock::new(&place.dlock, "stock", 20).dry_for(a_minute);
    assert_eq!(ask_dry_segments(&stock).await, 20);
    for _ in 0..place.rounds(1_000, 100) {
        assert_eq!(ask_dry_segments(&stock).await, 0);
    }
    stock.restocked();
    assert_eq!(ask_dry_segments(&stock).await, 20);
    // A body that began before the restock does not hide it.
    stock.restocked();
    let mut segments = stock.pick();
    let (_segment, guard) = segments.next().await.unwrap().unwrap();
    stock.restocked();
    segments.dry();
    drop(guard);
    assert_eq!(ask_dry_segments(&stock).await, 20);
    if place.server.is_none() {
        tokio::time::advance(a_minute).await;
        assert_eq!(ask_dry_segments(&stock).await, 20, "believed for a minute at most");
    }
}

/// After the end of a sale, with many requests, each looks at one segment at most.
#[tokio::test(start_paused = true)]
async fn a_sold_out_request_looks_at_few_segments_again() {
    let dlock = testing::client();
    let stock = SegmentedLock::new(&dlock, "stock", 20);
    assert_eq!(ask_dry_segments(&stock).await, 20);
    let (mut asked, mut most) = (0, 0);
    for _ in 0..10_000 {
        tokio::time::advance(Duration::from_millis(1)).await;
        let now = ask_dry_segments(&stock).await;
        asked += now;
        most = most.max(now);
    }
    assert!((200..=400).contains(&asked), "20 segments, once or twice a second: {asked}");
    assert!(most <= 5, "spread over the requests: {most}");
}

async fn guards_that_are_held_never_wait_for_each_other(place: Place) {
    let [mut here, mut there] = [&place.dlock, &place.another]
        .map(|dlock| SegmentedLock::new(dlock, "stock", 2).wait_unlimited().pick());
    let (_, one) = here.next().await.unwrap().unwrap();
    let (_, two) = there.next().await.unwrap().unwrap();
    let both = async { tokio::join!(here.next(), there.next()) };
    let (here_next, there_next) = tokio::time::timeout(Duration::from_secs(20), both)
        .await
        .expect("they do not wait for each other");
    assert_eq!(here_next.unwrap_err().kind(), ErrorKind::WouldDeadlock);
    assert_eq!(there_next.unwrap_err().kind(), ErrorKind::WouldDeadlock);
    drop(one);
    let (next, ()) = tokio::join!(here.next(), async { drop(two) });
    assert!(next.unwrap().is_some(), "without a guard it waits");
}

#[tokio::test(start_paused = true)]
async fn dry_for_ever() {
    let dlock = testing::client();
    let stock = SegmentedLock::new(&dlock, "stock", 2).dry_for(Duration::MAX);
    let mut segments = stock.pick();
    let (dry, guard) = segments.next().await.unwrap().unwrap();
    segments.dry();
    drop(guard);
    tokio::time::advance(Duration::from_secs(24 * 60 * 60)).await;
    assert_eq!(visit_all(&stock).await, [1 - dry.index()]);
}

#[tokio::test(start_paused = true)]
async fn weights_and_preference() {
    let dlock = testing::client();
    let stock = SegmentedLock::named(&dlock, "stock", [("eu", 900), ("us", 100), ("off", 0)])
        .dry_for(Duration::ZERO);
    let mut firsts = [0; 3];
    for _ in 0..1_000 {
        let (segment, _guard) = stock.pick().next().await.unwrap().unwrap();
        firsts[segment.index()] += 1;
    }
    assert!((800..980).contains(&firsts[0]) && firsts[2] == 0, "{firsts:?}");
    let preferring = stock.clone().prefer("us");
    for _ in 0..50 {
        let (segment, _guard) = preferring.pick().next().await.unwrap().unwrap();
        assert_eq!(segment.name(), Some("us"));
    }
    let (_us, _held) = preferring.pick().next().await.unwrap().unwrap();
    let (other, _guard) = preferring.pick().next().await.unwrap().unwrap();
    assert_ne!(other.name(), Some("us"), "busy: passed over");
}

#[tokio::test(start_paused = true)]
async fn bad_input_is_told_and_nothing_is_locked() {
    let dlock = testing::client();
    let kind = |lock: SegmentedLock| async move { lock.pick().next().await.unwrap_err().kind() };
    for lock in [
        SegmentedLock::new(&dlock, "stock", 0),
        SegmentedLock::new(&dlock, "stock", 4_097),
        SegmentedLock::new(&dlock, "stock", u32::MAX),
        SegmentedLock::new(&dlock, "", 4),
        SegmentedLock::new(&dlock, "x".repeat(512), 4),
        SegmentedLock::named(&dlock, "stock", [("a", 1), ("a", 1)]),
        SegmentedLock::named(&dlock, "stock", [("a", 0)]),
        SegmentedLock::named(&dlock, "stock", [("", 1)]),
        SegmentedLock::named(&dlock, "stock", [("x".repeat(600), 1)]),
        SegmentedLock::new(&dlock, "stock", 4).prefer(4),
        SegmentedLock::named(&dlock, "stock", [("eu", 1)]).prefer("us"),
        SegmentedLock::new(&dlock, "stock", 4).max_hold(Duration::ZERO),
        SegmentedLock::new(&dlock, "stock", 4).ttl(Duration::ZERO),
    ] {
        assert_eq!(kind(lock).await, ErrorKind::Invalid);
    }
    assert!(dlock.local_state().held.is_empty());
}

async fn the_closure_form_excludes_per_segment_and_can_be_spawned(place: Place) {
    let here = SegmentedLock::new(&place.dlock, "stock", 4);
    let there = SegmentedLock::new(&place.another, "stock", 4);
    let inside: Arc<[AtomicUsize; 4]> = Arc::default();
    let left = Arc::new(AtomicUsize::new(100));
    let tasks: Vec<_> = (0..150)
        .map(|number| {
            let stock = if number % 2 == 0 { &here } else { &there };
            let (stock, inside, left) = (stock.clone(), inside.clone(), left.clone());
            tokio::spawn(async move {
                stock
                    .run(|segment, _guard| {
                        let (inside, left) = (inside.clone(), left.clone());
                        async move {
                            let here = &inside[segment.index()];
                            assert_eq!(here.fetch_add(1, Ordering::SeqCst), 0, "overlap");
                            tokio::task::yield_now().await;
                            let took = left.fetch_update(Ordering::SeqCst, Ordering::SeqCst, |n| {
                                n.checked_sub(1)
                            });
                            here.fetch_sub(1, Ordering::SeqCst);
                            Ok::<_, dlock::Error>(
                                took.map_or(SegmentOutcome::Dry, SegmentOutcome::Done),
                            )
                        }
                    })
                    .await
                    .expect("no fault")
            })
        })
        .collect();
    let mut sold = 0;
    for task in tasks {
        sold += usize::from(task.await.expect("no panic").is_some());
    }
    assert_eq!(sold, 100);
}

async fn loss_panic_and_cancellation_are_those_of_any_lock(place: Place) {
    let Place { dlock, another, server } = place;
    let stock = SegmentedLock::new(&dlock, "stock", 1);
    let elsewhere = SegmentedLock::new(&another, "stock", 1);
    let token = AtomicU64::new(0);
    let for_ever = |_, guard: Arc<Guard>| {
        let before = token.swap(guard.token().get(), Ordering::SeqCst);
        assert!(guard.token().get() > before, "a stale holder is told by its token");
        async {
            std::future::pending::<()>().await;
            Ok::<_, dlock::Error>(SegmentOutcome::Done(()))
        }
    };
    let breaking = async {
        while another.break_lock("stock:0").await.unwrap() == 0 {
            tokio::time::sleep(Duration::from_millis(10)).await;
        }
    };
    let (lost, ()) = tokio::join!(stock.run(for_ever), breaking);
    assert_eq!(lost.unwrap_err().kind(), ErrorKind::Lost);

    if let Some(server) = &server {
        // The lease ends by this process's own clock, while the server says nothing.
        let silence = async {
            while dlock.local_state().held.is_empty() {
                tokio::time::sleep(Duration::from_millis(5)).await;
            }
            server.pause();
        };
        let brief = stock.clone().ttl(TTL);
        let (lost, ()) = tokio::join!(brief.run(for_ever), silence);
        assert_eq!(lost.unwrap_err().kind(), ErrorKind::Lost);
        server.resume();
    }

    let panicking = stock.clone();
    let panicked = tokio::spawn(async move {
        let body = |_, _| async { panic!("in the body") };
        panicking.run::<(), dlock::Error, _, _>(body).await
    });
    assert!(panicked.await.unwrap_err().is_panic());
    for millis in [0, 1, 5, 50] {
        let patience = Duration::from_millis(millis);
        assert!(tokio::time::timeout(patience, stock.run(for_ever)).await.is_err());
        // And one that waits for another.
        let held = elsewhere.pick().next().await.unwrap().expect("it is free again");
        assert!(tokio::time::timeout(patience, stock.run(for_ever)).await.is_err());
        drop(held);
    }
    let held = elsewhere.pick().next().await.unwrap();
    assert!(held.is_some(), "nothing is left");
    drop(held);
    while !dlock.local_state().held.is_empty() || !dlock.local_state().waiting.is_empty() {
        tokio::time::sleep(Duration::from_millis(10)).await;
    }
    drop((dlock, another, stock, elsewhere));
    if let Some(server) = server {
        server.assert_nothing_left().await;
    }
}

/// How many seconds a lock waits whose only segment is held, by a paused clock.
async fn waited(lock: SegmentedLock) -> u64 {
    let start = tokio::time::Instant::now();
    let error = lock.pick().next().await.unwrap_err();
    assert_eq!(error.kind(), ErrorKind::TimedOut);
    start.elapsed().as_secs()
}

#[tokio::test(start_paused = true)]
async fn a_policy_overrides_what_was_said_before_it_and_not_what_is_said_after_it() {
    let dlock = Dlock::connect("memory://?policy.hot.wait=3s&policy.cold.ttl=9s").await.unwrap();
    let lock = || SegmentedLock::new(&dlock, "ordered", 1);
    let _held = dlock.mutex("ordered:0").lock().await.unwrap();
    let (one, three) = (Duration::from_secs(1), Duration::from_secs(3));
    assert_eq!(waited(lock().wait(one).policy("hot")).await, 3);
    assert_eq!(waited(lock().policy("hot").wait(one)).await, 1);
    // A policy does not change what it does not set, in any order of calls.
    assert_eq!(waited(lock().wait(one).policy("cold")).await, 1);
    assert_eq!(waited(lock().policy("hot").policy("cold")).await, 3);
    assert_eq!(waited(lock().policy("cold").wait(one).policy("hot")).await, 3);
    assert_eq!(waited(lock().policy("hot").ttl(three)).await, 3);
}
