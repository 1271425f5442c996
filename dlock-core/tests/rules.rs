//! Tests of rules that neither the simulation nor the conformance suite
//! covers: re-entry, bad input, names, scopes, observation.

use std::future::Future as _;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use dlock::backend::memory::Memory;
use dlock::{
    BodyStatus, Config, Dlock, ErrorKind, Event, Key, ReleaseOutcome, State, assert_locked, global,
    key, testing,
};
use dlock_testkit::History;
use tokio::time::{sleep, timeout};

// -- rule 16: shutdown ------------------------------------------------------

/// `release_after` holds when the client is shut down.
#[tokio::test(start_paused = true)]
async fn shutdown_keeps_a_key_taken_that_is_to_stay_so() {
    let store = Memory::new();
    let client = || Dlock::builder().backend(store.another()).connect_lazy().expect("a client");
    let (one, two) = (client(), client());
    let hour = Duration::from_secs(3_600);
    let guard = one.mutex("job").hold_at_least(hour).lock().await.expect("the lock");
    assert_eq!(one.shutdown(Duration::from_millis(10)).await, 1);
    assert_eq!(guard.state(), State::Lost);
    drop(guard);
    assert!(two.mutex("job").try_lock().await.expect("an answer").is_none());
    tokio::time::advance(hour).await;
    assert!(two.mutex("job").try_lock().await.expect("an answer").is_some());
}

/// A task that was given the lock and has not been polled since holds it too.
#[tokio::test(start_paused = true)]
async fn shutdown_waits_for_who_was_just_let_in() {
    let dlock = testing::client();
    let lock = dlock.mutex("a");
    let guard = lock.lock().await.unwrap();
    let waiting = tokio::spawn({
        let lock = lock.clone();
        async move {
            let guard = lock.lock().await.unwrap();
            guard.run(sleep(Duration::from_secs(60))).await
        }
    });
    sleep(Duration::from_millis(1)).await;
    drop(guard); // the waiter is admitted, and not polled before shutdown starts
    assert_eq!(dlock.shutdown(Duration::from_millis(100)).await, 0);
    assert_eq!(waiting.await.unwrap().unwrap_err().kind(), ErrorKind::Lost);
}

/// A body that runs during the grace time may still lock what it holds.
#[tokio::test(start_paused = true)]
async fn reentry_goes_on_during_the_grace() {
    let dlock = testing::client();
    let lock = dlock.mutex("a");
    let guard = lock.lock().await.unwrap();
    let (left, nested) = tokio::join!(dlock.shutdown(Duration::from_secs(5)), async {
        sleep(Duration::from_secs(1)).await;
        let nested = guard.run(async { lock.lock().await.map(drop) }).await.unwrap();
        drop(guard);
        nested
    });
    assert_eq!(left, 0);
    nested.unwrap();
}

// -- rule 13 and bad input --------------------------------------------------

#[tokio::test]
async fn bad_input_is_a_typed_error() {
    let dlock = testing::client();
    let day = Duration::from_secs(86_400);
    let invalid = [
        dlock.mutex("").lock().await.unwrap_err(),
        dlock.mutex("x".repeat(513)).lock().await.unwrap_err(),
        dlock.mutex("a\u{7}b").lock().await.unwrap_err(),
        dlock.mutex("a").ttl(Duration::ZERO).lock().await.unwrap_err(),
        dlock.mutex("a").ttl(Duration::from_micros(999)).lock().await.unwrap_err(),
        dlock.mutex("a").ttl(day + Duration::from_millis(1)).lock().await.unwrap_err(),
        dlock.mutex("a").max_hold(Duration::ZERO).lock().await.unwrap_err(),
        dlock.mutex("a").tag("name", "x".repeat(300)).lock().await.unwrap_err(),
        dlock.semaphore("a", 3).permits(0).lock().await.unwrap_err(),
        dlock.semaphore("a", 3).permits(4).lock().await.unwrap_err(),
        dlock.semaphore("a", 0).permits(1).lock().await.unwrap_err(),
        dlock.all_of(Vec::<String>::new()).lock().await.unwrap_err(),
        dlock.all_of(["a", ""]).lock().await.unwrap_err(),
        dlock.inspect("").await.unwrap_err(),
        dlock.break_lock("a\nb").await.unwrap_err(),
    ];
    for error in invalid {
        assert_eq!(error.kind(), ErrorKind::Invalid, "{error}");
        assert!(error.to_string().len() > 40, "it says what to change: {error}");
    }
    drop(dlock.mutex("x".repeat(512)).ttl(day).lock().await.unwrap());
    drop(dlock.semaphore("a", u32::MAX).permits(u32::MAX).lock().await.unwrap());
    for url in ["", "memory", "ftp://x", "memory://?x=1", "memory://u:p@x", "memory://x/y"] {
        let error = Dlock::connect(url).await.unwrap_err();
        assert_eq!(error.kind(), ErrorKind::Config, "{url}: {error}");
    }
    let error = Dlock::builder().ttl(Duration::ZERO).connect_lazy().unwrap_err();
    assert!(error.to_string().contains("`ttl`"), "{error}");
    let huge = Duration::MAX;
    let guard = dlock.mutex("huge").wait(huge).max_hold(huge).lock().await.unwrap();
    assert_eq!(guard.state(), State::Held);
}

#[tokio::test]
async fn values_of_keys_are_not_shown() {
    let dlock = testing::client();
    let email = "secret@example.org";
    let guard = dlock.mutex(key!("user:{email}")).lock().await.unwrap();
    let lock = dlock.mutex(key!("user:{email}")).wait(Duration::from_millis(1));
    let error = lock.lock().await.unwrap_err();
    let shown = format!("{guard:?} {lock:?} {error} {error:?}");
    assert!(!shown.contains("secret"), "{shown}");
    assert!(shown.contains("user:{email}"), "{shown}");
    assert_eq!(error.key().map(Key::as_str), Some("user:secret@example.org"));
}

#[tokio::test]
async fn namespaces_and_names_keep_stores_apart() {
    let connect = |url: &'static str| Dlock::connect(url);
    let one = connect("memory://apart?namespace=one").await.unwrap();
    let same = connect("memory://apart?namespace=one").await.unwrap();
    let two = connect("memory://apart?namespace=two").await.unwrap();
    let named = connect("memory://elsewhere?namespace=one").await.unwrap();
    let _guard = one.mutex("a").lock().await.unwrap();
    assert!(same.mutex("a").try_lock().await.unwrap().is_none());
    assert!(two.mutex("a").try_lock().await.unwrap().is_some());
    assert!(named.mutex("a").try_lock().await.unwrap().is_some());
}

// -- clients and scopes -----------------------------------------------------

#[tokio::test]
async fn names_and_globals() {
    let config: Config = serde_json::from_str(r#"{ "client_name": "api-1" }"#).unwrap();
    let error = Dlock::builder().config(config.clone()).connect().await.unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Config, "no backend is chosen silently: {error}");
    let dlock = Dlock::builder().url("memory://").config(config).connect().await.unwrap();
    assert_eq!(dlock.name(), "api-1");
    let unnamed = Dlock::connect_lazy("memory://").unwrap();
    assert!(unnamed.name().ends_with(&format!("-{}", std::process::id())), "{}", unnamed.name());
    assert_eq!(global().unwrap_err().kind(), ErrorKind::NoClient);
    dlock::init(dlock.clone()).unwrap();
    assert_eq!(global().unwrap().name(), "api-1");
    assert_eq!(dlock::init(dlock).unwrap_err().kind(), ErrorKind::Config);
    testing::scope(async { assert_eq!(global().unwrap().name(), "test") }).await;
}

#[tokio::test]
async fn scopes_do_not_share_locks() {
    let one = testing::scope(async { global().unwrap().mutex("a").lock().await.unwrap() });
    let two = testing::scope(async { global().unwrap().mutex("a").try_lock().await.unwrap() });
    let (one, two) = tokio::join!(one, two);
    assert!(two.is_some());
    drop(one);
    let error = testing::force_busy("a").await.unwrap_err();
    assert_eq!(error.kind(), ErrorKind::NoClient);
    testing::scope(async {
        let error = testing::force_lost("nobody-holds-it").await.unwrap_err();
        assert_eq!(error.kind(), ErrorKind::Invalid);
    })
    .await;
}

#[tokio::test]
async fn assert_locked_knows() {
    testing::scope(async {
        let dlock = global().unwrap();
        let id = 7;
        let guard = dlock.mutex(key!("order:{id}")).lock().await.unwrap();
        assert_locked!(key!("order:{id}"));
        guard.run(async { assert_locked!("order:7") }).await.unwrap();
        drop(guard);
        let panicked = std::panic::catch_unwind(|| assert_locked!("order:7"));
        assert!(panicked.is_err());
    })
    .await;
}

// -- seeing it --------------------------------------------------------------

#[tokio::test(start_paused = true)]
async fn events_are_told() {
    let told = Arc::new(Mutex::new(Vec::new()));
    let hear = told.clone();
    let dlock = Dlock::builder()
        .url("memory://events")
        .ttl(Duration::from_secs(3))
        .on_event(move |event| {
            let name = match event {
                Event::Acquired { token: Some(_), .. } => "acquired",
                Event::Refused { .. } => "refused",
                Event::Released { held, .. } if *held >= Duration::from_secs(4) => "released",
                Event::Renewed { .. } => "renewed",
                Event::Lost { .. } => "lost",
                _ => "other",
            };
            hear.lock().unwrap().push(name);
        })
        .connect()
        .await
        .unwrap();
    let guard = dlock.mutex("a").lock().await.unwrap();
    assert!(dlock.mutex("a").try_lock().await.unwrap().is_none());
    sleep(Duration::from_secs(4)).await;
    drop(guard);
    let told = told.lock().unwrap().clone();
    assert_eq!(told.first(), Some(&"acquired"));
    assert_eq!(told.last(), Some(&"released"));
    assert!(told.contains(&"refused"));
    assert!(told.iter().filter(|name| **name == "renewed").count() >= 3, "{told:?}");
}

/// Watching a guard from many tasks leaves nothing behind, and a panic in an event hook
/// does no harm.
#[tokio::test]
async fn watchers_and_hooks_do_no_harm() {
    struct Counted(std::sync::atomic::AtomicUsize);
    impl std::task::Wake for Counted {
        fn wake(self: Arc<Self>) {}
    }
    let dlock = Dlock::builder().url("memory://watched").on_event(|_| panic!("on purpose"));
    let dlock = dlock.connect().await.unwrap();
    let guard = dlock.mutex("a").lock().await.unwrap();
    let counted = Arc::new(Counted(0.into()));
    for _ in 0..100 {
        let waker = Arc::new(Counted(0.into())).into();
        let other = counted.clone().into();
        let mut lost = Box::pin(guard.lost());
        for waker in [&waker, &other] {
            let mut context = std::task::Context::from_waker(waker);
            assert!(lost.as_mut().poll(&mut context).is_pending());
        }
    }
    assert_eq!(Arc::strong_count(&counted), 1, "no waker is kept");
    assert_eq!(counted.0.load(std::sync::atomic::Ordering::Relaxed), 0);
    assert_eq!(guard.release().await.unwrap(), ReleaseOutcome::Released);
}

// -- rule 7: the last client ------------------------------------------------

#[tokio::test(start_paused = true)]
async fn waiting_is_unlimited_on_request_and_ten_seconds_else() {
    let dlock = testing::client();
    let guard = dlock.mutex("a").lock().await.unwrap();
    let began = tokio::time::Instant::now();
    assert_eq!(dlock.mutex("a").lock().await.unwrap_err().kind(), ErrorKind::TimedOut);
    assert_eq!(began.elapsed().as_secs(), 10);
    let unlimited = dlock.mutex("a").wait_unlimited();
    assert!(timeout(Duration::from_secs(86_400), unlimited.lock()).await.is_err());
    drop(guard);
    drop(unlimited.lock().await.unwrap());
}

#[tokio::test]
async fn guards_are_owned_and_send() {
    fn check<T: Send + 'static>(value: T) -> T {
        value
    }
    let dlock = testing::client();
    let history = Arc::new(History::default());
    let guard = check(dlock.mutex("a").lock().await.unwrap());
    let permits = check(dlock.semaphore("a", 1).permits(1).lock().await.unwrap());
    let both = check(dlock.all_of(["b", "c"]).lock().await.unwrap());
    let moved = history.clone();
    tokio::spawn(async move {
        drop(moved.enter(&guard));
        drop((guard, permits, both));
    })
    .await
    .unwrap();
    history.assert_clean();
}

#[tokio::test]
async fn spawned_tasks_are_in_the_scope_of_their_runtime() {
    let name = || async { dlock::global().map(|dlock| dlock.name().to_owned()) };
    let spawned = |name: &'static str| async move {
        testing::scope(async {
            let guard = dlock::global()?.mutex(name).lock().await?;
            let locked = async move { dlock::global()?.mutex(name).try_lock().await };
            let busy = tokio::spawn(locked).await.expect("the task")?;
            assert!(busy.is_none(), "the spawned task uses the same client");
            drop(guard);
            let busy = tokio::spawn(async move { testing::force_busy(name).await });
            drop(busy.await.expect("the task")?);
            Ok::<_, dlock::Error>(())
        })
        .await
    };
    spawned("order:7").await.unwrap();
    let two = async {
        let spawned = testing::scope(async { tokio::spawn(name()).await.expect("the task") }).await;
        spawned.map_err(|error| error.kind())
    };
    // Another test may have called `init`, so only the clients of scopes are looked for.
    let (_, found) =
        tokio::join!(testing::scope(tokio::time::sleep(Duration::from_millis(50))), two);
    assert_ne!(found.as_deref(), Ok("test"), "which of the two scopes is not known");
    assert_ne!(name().await.ok().as_deref(), Some("test"), "the scopes are over");
}

// -- rules 7 and 11: a lock that fails leaves nothing ------------------------

/// The keys of an `all_of` that came to nothing are free, whatever `hold_at_least` says:
/// nothing ran under them.
#[tokio::test(start_paused = true)]
async fn keys_of_a_failed_all_of_are_not_kept_taken() {
    let dlock = testing::client();
    let hour = Duration::from_secs(3_600);
    let busy = dlock.mutex("b").lock().await.unwrap();
    let both = dlock.all_of(["a", "b"]).hold_at_least(hour);
    assert!(both.try_lock().await.unwrap().is_none());
    assert_free(&dlock, "a").await;

    let timed_out = both.clone().wait(Duration::from_millis(1)).lock().await.unwrap_err();
    assert_eq!(timed_out.kind(), ErrorKind::TimedOut);
    assert_free(&dlock, "a").await;

    assert!(timeout(Duration::from_millis(1), both.lock()).await.is_err(), "it was dropped");
    assert_free(&dlock, "a").await;

    drop(busy);
    drop(both.lock().await.unwrap());
    for key in ["a", "b"] {
        assert!(dlock.mutex(key).try_lock().await.unwrap().is_none(), "{key} stays taken");
    }
}

async fn assert_free(dlock: &Dlock, key: &str) {
    let guard = dlock.mutex(key).try_lock().await.expect("an answer");
    assert!(guard.is_some(), "{key} is free");
}

/// A first key that is lost while the next one is waited for ends the wait.
#[tokio::test(start_paused = true)]
async fn all_of_watches_the_keys_that_it_has() {
    let dlock = testing::client();
    let busy = dlock.mutex("b").lock().await.unwrap();
    let both = dlock.all_of(["a", "b"]).wait_unlimited().hold_at_least(Duration::from_secs(3_600));
    let (refused, ()) = tokio::join!(both.lock(), async {
        while dlock.inspect("a").await.unwrap().holders.is_empty() {
            sleep(Duration::from_millis(1)).await;
        }
        dlock.break_lock("a").await.unwrap();
    });
    let error = refused.unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Lost);
    assert_eq!(error.body_status(), BodyStatus::NotRun);
    assert_eq!(error.key().map(Key::as_str), Some("a"));
    drop(busy);
    assert_free(&dlock, "b").await;
}

/// A lock that ended before its task could run is not given to it.
#[tokio::test(start_paused = true)]
async fn a_lock_that_is_lost_already_is_refused() {
    let dlock = testing::client();
    for by_break in [true, false] {
        let lock = dlock.mutex("a").ttl(Duration::from_secs(30));
        let guard = lock.lock().await.unwrap();
        let mut waiting = std::pin::pin!(lock.lock());
        let mut cx = std::task::Context::from_waker(std::task::Waker::noop());
        assert!(waiting.as_mut().poll(&mut cx).is_pending());
        drop(guard); // the waiter is let in, and is not polled for some time
        if by_break {
            dlock.break_lock("a").await.unwrap();
        } else {
            dlock.shutdown(Duration::ZERO).await;
        }
        let error = waiting.await.unwrap_err();
        assert_eq!(error.kind(), ErrorKind::Lost);
        assert_eq!(error.body_status(), BodyStatus::NotRun);
    }
}

/// After a downgrade others read under the same lease: the first reader takes it from nobody.
#[tokio::test(start_paused = true)]
async fn a_downgraded_lock_keeps_nothing_taken() {
    let dlock = testing::client();
    let lock = dlock.rwlock("a");
    let writer = lock.write().hold_at_least(Duration::from_secs(60)).lock().await.unwrap();
    let read = lock.read();
    let mut reading = std::pin::pin!(read.lock());
    let mut cx = std::task::Context::from_waker(std::task::Waker::noop());
    assert!(reading.as_mut().poll(&mut cx).is_pending());
    let first = writer.downgrade();
    let second = reading.await.unwrap();
    drop(first);
    assert_eq!(second.state(), State::Held);
    drop(second);
    assert!(lock.write().try_lock().await.unwrap().is_some(), "nothing is kept taken");
}

#[tokio::test(start_paused = true)]
async fn a_one_shot_run_locks_and_releases() {
    let dlock = Dlock::connect("memory://").await.unwrap();
    let order = dlock.mutex("order:7");
    let inner = order.clone();
    let value = order
        .run(async {
            assert!(dlock.mutex("order:7").try_lock().await.unwrap().is_some(), "re-entry");
            let other = tokio::spawn(async move { inner.try_lock().await.unwrap().is_none() });
            assert!(other.await.unwrap(), "another task is kept out");
            7
        })
        .await;
    assert_eq!(value.unwrap(), 7);
    assert!(order.try_lock().await.unwrap().is_some(), "released, not only dropped");
    let permits = dlock.semaphore("exports", 1).permits(1).run(async { 1 }).await;
    assert_eq!(permits.unwrap(), 1);

    let lost = order.run(async {
        dlock.break_lock("order:7").await.unwrap();
        std::future::pending::<()>().await;
    });
    let error = lost.await.unwrap_err();
    assert_eq!((error.kind(), error.body_status()), (ErrorKind::Lost, BodyStatus::Cancelled));
}

#[tokio::test(start_paused = true)]
async fn who_waits_for_itself_is_told() {
    let dlock = Dlock::connect("memory://itself").await.unwrap();
    let _guard = dlock.mutex("order:7").tag("job", "pay").lock().await.unwrap();
    let second = dlock.mutex("order:7").wait(Duration::from_millis(10)).lock().await.unwrap_err();
    let told = second.to_string();
    assert!(told.contains("this very client") && told.contains("job=pay"), "{told}");
    let other = Dlock::connect("memory://itself").await.unwrap();
    let told = other.mutex("order:7").wait(Duration::from_millis(10)).lock().await.unwrap_err();
    assert!(!told.to_string().contains("this very client"), "{told}");
}

/// Threads without a runtime wait for tasks, and tasks for them.
#[test]
fn threads_without_a_runtime_lock_too() {
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
    let dlock = runtime.block_on(Dlock::connect("memory://")).unwrap();
    let inside = std::sync::atomic::AtomicBool::new(false);
    let enter = || {
        let alone = !inside.swap(true, std::sync::atomic::Ordering::SeqCst);
        std::thread::yield_now();
        inside.store(false, std::sync::atomic::Ordering::SeqCst);
        assert!(alone, "two are inside");
    };
    std::thread::scope(|threads| {
        for _ in 0..4 {
            threads.spawn(|| {
                for _ in 0..200 {
                    let guard = dlock.mutex("order:7").lock_blocking().unwrap();
                    enter();
                    drop(guard);
                }
            });
        }
        runtime.block_on(async {
            for _ in 0..200 {
                let guard = dlock.mutex("order:7").lock().await.unwrap();
                enter();
                let _ = guard.release().await.unwrap();
            }
        });
    });
    drop(runtime); // nobody drove its timer any more
    let held = dlock.mutex("order:7").lock_blocking().unwrap();
    let busy = dlock.mutex("order:7").wait(Duration::from_millis(20)).lock_blocking();
    assert_eq!(busy.unwrap_err().kind(), ErrorKind::TimedOut);
    drop(held);
}
