//! Trials of lost locks: failed renewals, crashes, shutdown.

use std::sync::Arc;
use std::time::Duration;

use dlock::{ErrorKind, LossReason, ReleaseOutcome, State};
use tokio::time::{Instant, sleep, timeout};

use super::{LONG_WAIT, SOON, Suite, all, eventually, is_free, waiters};
use crate::faulty_backend::FaultMode;
use crate::history::History;

pub(super) async fn renewed_for_as_long_as_held(suite: &Suite) {
    let (one, two, key) = (suite.client(), suite.client(), suite.key("renewed"));
    let guard = one.mutex(key.as_str()).lock().await.expect("the lock");
    let ttl = suite.ttl();
    let until = Instant::now() + ttl * 3;
    while Instant::now() < until {
        assert_eq!(guard.state(), State::Held);
        assert!(guard.valid_for() <= ttl);
        assert!(two.mutex(key.as_str()).try_lock().await.expect("an answer").is_none());
        sleep(ttl / 5).await;
    }
    assert_eq!(guard.release().await.expect("an answer"), ReleaseOutcome::Released);
}

/// The lock is uncertain, and held again when the backend answers.
pub(super) async fn one_failed_renewal_is_survived(suite: &Suite) {
    let (client, faults) = suite.faulty();
    let key = suite.key("uncertain");
    let guard = client.mutex(key.as_str()).lock().await.expect("the lock");
    faults.set(FaultMode::Unreachable);
    eventually("uncertain", async || guard.state() == State::Uncertain).await;
    assert!(guard.valid_for() > Duration::ZERO, "uncertain is not lost");
    faults.set(FaultMode::Healthy);
    eventually("held again", async || guard.state() != State::Uncertain).await;
    assert_eq!(guard.state(), State::Held);
    assert_eq!(guard.release().await.expect("an answer"), ReleaseOutcome::Released);
}

pub(super) async fn one_failing_lease_does_not_stop_others(suite: &Suite) {
    let (one, two) = (suite.client(), suite.client());
    let (bad, good) = (suite.key("bad"), suite.key("good"));
    let bad_guard = one.mutex(bad.as_str()).lock().await.expect("the lock");
    let good_guard = one.mutex(good.as_str()).lock().await.expect("the lock");
    if two.capabilities().operators {
        two.break_lock(bad.as_str()).await.expect("broken");
        assert!(timeout(LONG_WAIT, bad_guard.lost()).await.is_ok());
    }
    sleep(suite.ttl() * 2).await;
    assert_eq!(good_guard.state(), State::Held);
}

/// The guard reports the loss by itself before anybody else gets the lock.
pub(super) async fn a_cut_off_holder_loses_in_time(suite: &Suite) {
    let (cut_off, faults) = suite.faulty();
    let (other, key) = (suite.client(), suite.key("cut-off"));
    let guard = cut_off.mutex(key.as_str()).lock().await.expect("the lock");
    let token = guard.token();
    faults.set(FaultMode::Unreachable);
    let began = Instant::now();
    let lock = other.mutex(key.as_str());
    let successor = tokio::spawn(async move { (lock.lock().await, Instant::now()) });
    let reason = timeout(LONG_WAIT, guard.lost()).await.expect("the loss is reported");
    let lost = Instant::now();
    assert_eq!(reason, LossReason::Deadline);
    assert_eq!(guard.state(), State::Lost);
    assert_eq!(guard.valid_for(), Duration::ZERO);
    let (successor, got_in) = successor.await.expect("the task");
    let successor = successor.expect("the lock");
    assert!(got_in >= lost - Duration::from_millis(20), "nobody got in before it was lost");
    assert!(
        got_in - began < suite.ttl() + suite.expiry_slack() + SOON * 3,
        "recovery took {:?}",
        got_in - began
    );
    assert!(successor.token() > token);
    faults.set(FaultMode::Healthy);
    assert_eq!(guard.release().await.expect("an answer"), ReleaseOutcome::AlreadyLost);
    assert_eq!(successor.state(), State::Held);
    assert!(cut_off.mutex(key.as_str()).try_lock().await.expect("an answer").is_none());
    assert_eq!(successor.release().await.expect("an answer"), ReleaseOutcome::Released);
}

pub(super) async fn permits_come_back_after_a_crash(suite: &Suite) {
    let (crashed, faults) = suite.faulty();
    let (other, key) = (suite.client(), suite.key("crash"));
    let permits = crashed.semaphore(key.as_str(), 3).permits(2).lock().await.expect("permits");
    faults.set(FaultMode::Unreachable);
    let all = other.semaphore(key.as_str(), 3).permits(3);
    assert!(all.try_lock().await.expect("an answer").is_none());
    drop(all.lock().await.expect("all permits, once the ttl is over"));
    assert_eq!(permits.state(), State::Lost);
}

/// Waiters of a dead process are dropped all at once, not a ttl each.
pub(super) async fn dead_waiters_do_not_hold_up_the_queue(suite: &Suite) {
    let (dead, faults) = suite.faulty();
    let (one, two, key) = (suite.client(), suite.client(), suite.key("dead"));
    let guard = one.mutex(key.as_str()).lock().await.expect("the lock");
    let waiting: Vec<_> = (0..20)
        .map(|_| {
            let lock = dead.mutex(key.as_str());
            let lock = if dead.capabilities().fifo { lock.fair() } else { lock };
            tokio::spawn(async move { lock.lock().await.map(drop) })
        })
        .collect();
    eventually("all wait", async || waiters(&dead, &key).await == 20).await;
    faults.set(FaultMode::Unreachable);
    let last = two.mutex(key.as_str());
    let last = tokio::spawn(async move { last.lock().await.map(drop) });
    eventually("it waits", async || waiters(&two, &key).await >= 1).await;
    let began = Instant::now();
    drop(guard);
    last.await.expect("the task").expect("the lock");
    let waited = began.elapsed();
    assert!(waited < suite.ttl() * 3 + SOON, "held up for {waited:?}");
    waiting.iter().for_each(tokio::task::JoinHandle::abort);
}

/// Acquires whose answers are lost and that are cancelled leave no lock behind.
pub(super) async fn lost_answers_leave_no_ghost(suite: &Suite) {
    let (client, faults) = suite.faulty();
    let (other, key) = (suite.client(), suite.key("ghost"));
    faults.set(FaultMode::AnswersLost);
    let lock = client.mutex(key.as_str()).ttl(suite.nearest(Duration::from_secs(60)));
    let cancelled = timeout(Duration::from_millis(100), lock.lock()).await;
    assert!(cancelled.is_err());
    faults.set(FaultMode::Healthy);
    eventually("free long before the ttl", async || is_free(&other, &key).await).await;
    // If it is not cancelled, the retry is the same claim.
    faults.set(FaultMode::AnswersLost);
    let acquiring = tokio::spawn(async move { lock.lock().await });
    sleep(Duration::from_millis(120)).await;
    faults.set(FaultMode::Healthy);
    let guard = timeout(LONG_WAIT, acquiring).await.expect("in time").expect("the task");
    let guard = guard.expect("the lock, by the retry");
    // A release whose answer is lost is reported as unknown and repeated.
    faults.set(FaultMode::AnswersLost);
    let error = guard.release().await.expect_err("no answer");
    assert_eq!(error.kind(), ErrorKind::Unknown);
    faults.set(FaultMode::Healthy);
    eventually("free", async || is_free(&other, &key).await).await;
}

pub(super) async fn run_stops_when_lost(suite: &Suite) {
    let (one, two, key) = (suite.client(), suite.client(), suite.key("run"));
    let guard = one.mutex(key.as_str()).lock().await.expect("the lock");
    assert_eq!(guard.run(async { 7 }).await.expect("held"), 7);
    let running = tokio::spawn(async move { guard.run(std::future::pending::<()>()).await });
    sleep(Duration::from_millis(20)).await;
    two.break_lock(key.as_str()).await.expect("broken");
    let error = timeout(LONG_WAIT, running).await.expect("in time").expect("the task");
    assert_eq!(error.expect_err("lost").kind(), ErrorKind::Lost);
}

pub(super) async fn max_hold_ends_a_hold(suite: &Suite) {
    let (one, two, key) = (suite.client(), suite.client(), suite.key("max-hold"));
    let lock = one.mutex(key.as_str()).max_hold(Duration::from_millis(200));
    let guard = lock.lock().await.expect("the lock");
    let began = Instant::now();
    assert!(guard.valid_for() <= Duration::from_millis(200));
    assert_eq!(
        timeout(LONG_WAIT, guard.lost()).await.expect("the loss is reported"),
        LossReason::MaxHold
    );
    assert!(began.elapsed() >= Duration::from_millis(190) && began.elapsed() < SOON * 2);
    // Its body may still run: nobody gets the lock until it is released or its ttl ends.
    assert!(two.mutex(key.as_str()).try_lock().await.expect("an answer").is_none());
    drop(two.mutex(key.as_str()).lock().await.expect("not renewed, so it ends"));
    assert_eq!(guard.release().await.expect("an answer"), ReleaseOutcome::AlreadyLost);
    // A release frees it at once.
    let guard = lock.lock().await.expect("the lock");
    guard.lost().await;
    drop(guard);
    let began = Instant::now();
    drop(two.mutex(key.as_str()).lock().await.expect("the lock"));
    assert!(began.elapsed() < suite.ttl(), "{:?}", began.elapsed());
}

pub(super) async fn release_after_keeps_the_key_taken(suite: &Suite) {
    let (one, two, key) = (suite.client(), suite.client(), suite.key("after"));
    let delay = Duration::from_millis(1_500);
    let guard = one.mutex(key.as_str()).lock().await.expect("the lock");
    let began = Instant::now();
    assert_eq!(guard.release_after(delay).await.expect("an answer"), ReleaseOutcome::Released);
    assert!(two.mutex(key.as_str()).try_lock().await.expect("an answer").is_none());
    assert!(one.mutex(key.as_str()).try_lock().await.expect("an answer").is_none());
    drop(two.mutex(key.as_str()).lock().await.expect("the lock, afterwards"));
    let taken = began.elapsed();
    assert!(taken >= delay - Duration::from_millis(20) && taken < delay + SOON * 2, "{taken:?}");
    let guard = one.mutex(key.as_str()).lock().await.expect("the lock");
    let error = guard.release_after(Duration::from_secs(86_401)).await.expect_err("above a day");
    assert_eq!(error.kind(), ErrorKind::Invalid);
    eventually("released all the same", async || is_free(&two, &key).await).await;
}

/// A rolling restart: one process shuts down while its bodies run and another
/// waits for the same lock.
pub(super) async fn shutdown_lets_nobody_overlap(suite: &Suite) {
    let history = Arc::new(History::default());
    let key = suite.key("shutdown");
    let (leaving, staying) = (suite.client(), suite.client());
    let mut tasks = Vec::new();
    for client in [&leaving, &staying] {
        for _ in 0..4 {
            let (lock, history) = (client.mutex(key.as_str()), history.clone());
            tasks.push(tokio::spawn(async move {
                for _ in 0..10 {
                    let guard = match lock.lock().await {
                        Ok(guard) => guard,
                        Err(error) => {
                            assert_eq!(error.kind(), ErrorKind::ShuttingDown, "{error}");
                            return;
                        }
                    };
                    let entry = history.enter(&guard);
                    let _ = guard.run(sleep(Duration::from_millis(15))).await;
                    drop(entry);
                }
            }));
        }
    }
    sleep(Duration::from_millis(60)).await;
    // A holder that ignores the shutdown: its lock is not released under it.
    let ignoring_key = suite.key("ignoring");
    let ignoring = leaving.mutex(ignoring_key.as_str()).lock().await.expect("the lock");
    let left = timeout(LONG_WAIT, leaving.shutdown(Duration::from_millis(5))).await;
    assert_eq!(left.expect("in time"), 1);
    assert_eq!(ignoring.state(), State::Lost);
    let error = leaving.mutex(key.as_str()).lock().await.expect_err("closed");
    assert_eq!(error.kind(), ErrorKind::ShuttingDown);
    all(tasks).await;
    history.assert_clean();
    drop(ignoring);
    drop(staying.mutex(ignoring_key.as_str()).lock().await.expect("free in the end"));
}
