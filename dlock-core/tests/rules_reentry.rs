//! Rule 15: asking again for a key inside its own guard.

use std::cell::Cell;
use std::time::Duration;

use dlock::{ErrorKind, ReleaseOutcome, State, global, testing};
use tokio::time::sleep;

#[tokio::test(start_paused = true)]
async fn nested_calls_go_through() {
    let dlock = testing::client();
    let lock = dlock.mutex("a");
    let outer = lock.lock().await.unwrap();
    let token = outer.token();
    outer
        .run(async {
            let inner = lock.lock().await.unwrap();
            assert_eq!(inner.token(), token, "the same grant");
            inner
                .run(async {
                    let innermost = dlock.rwlock("a").read().lock().await.unwrap();
                    assert_eq!(innermost.token(), token);
                })
                .await
                .unwrap();
            assert_eq!(inner.release().await.unwrap(), ReleaseOutcome::Released);
            drop(lock.try_lock().await.unwrap().expect("free again inside"));
        })
        .await
        .unwrap();
    assert_eq!(outer.state(), State::Held, "inner guards give back nothing of the outer one");
}

#[tokio::test(start_paused = true)]
async fn siblings_in_a_join_exclude_each_other() {
    let dlock = testing::client();
    let lock = dlock.mutex("a");
    let guard = lock.lock().await.unwrap();
    let (inside, most) = (Cell::new(0), Cell::new(0));
    let child = async || {
        for _ in 0..5 {
            let nested = lock.lock().await.unwrap();
            inside.set(inside.get() + 1);
            most.set(most.get().max(inside.get()));
            sleep(Duration::from_millis(3)).await;
            inside.set(inside.get() - 1);
            drop(nested);
        }
    };
    guard
        .run(async {
            tokio::join!(child(), child(), child());
        })
        .await
        .unwrap();
    assert_eq!(most.get(), 1, "siblings overlapped");
}

#[tokio::test(start_paused = true)]
async fn another_task_waits_outside() {
    let dlock = testing::client();
    let lock = dlock.mutex("a").wait(Duration::from_millis(50));
    let guard = lock.lock().await.unwrap();
    guard
        .run(async {
            let lock = lock.clone();
            let other = tokio::spawn(async move { lock.lock().await.map(drop) });
            let error = other.await.unwrap().unwrap_err();
            assert_eq!(error.kind(), ErrorKind::TimedOut);
        })
        .await
        .unwrap();
}

#[tokio::test(start_paused = true)]
async fn what_could_never_be_granted_is_refused_at_once() {
    let dlock = testing::client();
    let reading = dlock.rwlock("a").read().lock().await.unwrap();
    reading
        .run(async {
            drop(dlock.rwlock("a").read().lock().await.unwrap());
            let error = dlock.mutex("a").lock().await.unwrap_err();
            assert_eq!(error.kind(), ErrorKind::WouldDeadlock);
            assert!(error.to_string().contains("from the start"), "{error}");
        })
        .await
        .unwrap();
    let several = dlock.all_of(["m", "p"]).lock().await.unwrap();
    several
        .run(async {
            drop(dlock.mutex("m").lock().await.unwrap());
            drop(dlock.mutex("z").lock().await.unwrap());
            for key in ["a2", "n"] {
                let error = dlock.mutex(key).lock().await.unwrap_err();
                assert_eq!(error.kind(), ErrorKind::WouldDeadlock, "{key} comes before p");
            }
        })
        .await
        .unwrap();
}

/// A nested guard that outlives its frame keeps the lock from going to others.
#[tokio::test(start_paused = true)]
async fn a_nested_guard_keeps_the_lock() {
    let dlock = testing::client();
    let lock = dlock.mutex("a");
    let outer = lock.lock().await.unwrap();
    let nested = outer.run(async { lock.lock().await.unwrap() }).await.unwrap();
    drop(outer);
    assert!(lock.try_lock().await.unwrap().is_none());
    assert_eq!(nested.state(), State::Held);
    drop(nested);
    assert!(lock.try_lock().await.unwrap().is_some());
}

/// A nested guard does not end the outer one by its `max_hold` or `release_after`, and
/// the outer one cannot be downgraded meanwhile.
#[tokio::test(start_paused = true)]
async fn a_nested_guard_cannot_end_the_outer_one() {
    let dlock = testing::client();
    let lock = dlock.mutex("a").ttl(Duration::from_secs(3));
    let outer = lock.lock().await.unwrap();
    let brief = lock.clone().max_hold(Duration::from_secs(1));
    let nested = outer.run(async { brief.lock().await.unwrap() }).await.unwrap();
    nested.lost().await;
    assert_eq!(outer.state(), State::Held);
    sleep(Duration::from_secs(10)).await;
    assert_eq!(outer.state(), State::Held, "still renewed");
    let outer = outer.downgrade();
    assert_eq!(outer.mode(), dlock::Mode::Exclusive, "something exclusive is nested in it");
    drop(nested);
    let nested = outer.run(async { lock.lock().await.unwrap() }).await.unwrap();
    let error = nested.release_after(Duration::from_secs(60)).await.unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Invalid);
    assert_eq!(outer.state(), State::Held);
    assert_eq!(outer.release().await.unwrap(), ReleaseOutcome::Released);
    assert!(lock.try_lock().await.unwrap().is_some());
}

#[tokio::test(start_paused = true)]
async fn nested_tasks_hear_of_the_loss() {
    testing::scope(async {
        let dlock = global().unwrap();
        let lock = dlock.mutex("a");
        let outer = lock.lock().await.unwrap();
        let nested = outer.run(async { lock.lock().await.unwrap() }).await.unwrap();
        let waiting = outer.run(async { lock.lock().await });
        let (waiting, ()) = tokio::join!(waiting, async {
            sleep(Duration::from_millis(10)).await;
            testing::force_lost("a").await.unwrap();
        });
        assert_eq!(waiting.unwrap_err().kind(), ErrorKind::Lost);
        assert_eq!(nested.state(), State::Lost);
        assert_eq!(nested.release().await.unwrap(), ReleaseOutcome::AlreadyLost);
    })
    .await;
}

/// `all_of` inside one of its keys still locks in the order of the keys.
#[tokio::test(start_paused = true)]
async fn an_all_of_inside_one_of_its_keys_keeps_the_order() {
    let dlock = testing::client();
    let middle = dlock.mutex("m").lock().await.unwrap();
    middle
        .run(async {
            let error = dlock.all_of(["a", "m"]).lock().await.unwrap_err();
            assert_eq!(error.kind(), ErrorKind::WouldDeadlock);
            assert_eq!(dlock.all_of(["m", "z"]).lock().await.unwrap().tokens().count(), 2);
        })
        .await
        .unwrap();
}

#[tokio::test(start_paused = true)]
async fn max_hold_of_an_all_of_counts_when_all_are_held() {
    let dlock = testing::client();
    let busy = dlock.mutex("b").lock().await.unwrap();
    let both = dlock.all_of(["a", "b"]).max_hold(Duration::from_millis(100));
    let both = tokio::spawn(async move { both.lock().await.unwrap() });
    sleep(Duration::from_millis(500)).await;
    drop(busy);
    let both = both.await.unwrap();
    assert_eq!(both.state(), State::Held);
    assert_eq!(both.valid_for(), Duration::from_millis(100));
    sleep(Duration::from_millis(101)).await;
    assert_eq!(both.state(), State::Lost);
}

/// A reader whose `max_hold` is over does not keep the lease when it is alone.
#[tokio::test(start_paused = true)]
async fn a_revoked_reader_does_not_keep_writers_out() {
    let dlock = testing::client();
    let read = dlock.rwlock("a").read().ttl(Duration::from_secs(1));
    let revoked = read.clone().max_hold(Duration::from_millis(50)).lock().await.unwrap();
    let other = read.lock().await.unwrap();
    revoked.lost().await;
    assert_eq!(other.state(), State::Held);
    drop(other);
    let writer = dlock.mutex("a").lock().await.expect("when the ttl is over");
    assert_eq!(revoked.state(), State::Lost);
    drop(writer);
}
