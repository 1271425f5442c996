//! Trials of what operators see and do.

use std::time::Duration;

use dlock::{LossReason, Mode, State};
use tokio::time::timeout;

use super::{LONG_WAIT, SOON, Suite, eventually, is_free, keys_in_use, waiters};

pub(super) async fn holders_and_waiters_are_shown(suite: &Suite) {
    let one = suite.client_of(|builder| builder.client_name("worker-1"));
    let two = suite.client_of(|builder| builder.client_name("worker-2"));
    let key = suite.key("shown");
    let guard = one.mutex(key.as_str()).tag("order", 7).lock().await.expect("the lock");
    let lock = two.mutex(key.as_str());
    let waiting = tokio::spawn(async move { lock.lock().await.map(drop) });
    let look = async || two.inspect(key.as_str()).await.expect("an inspection");
    eventually("it waits", async || waiters(&two, &key).await == 1).await;
    let state = look().await;
    let held = &state.holders[0];
    assert_eq!(held.holder.name, "worker-1");
    assert_eq!(held.holder.pid, std::process::id());
    assert!(!held.holder.host.is_empty());
    assert_eq!(held.holder.tags, [("order".to_owned(), "7".to_owned())]);
    assert_eq!(held.mode, Mode::Exclusive);
    assert_eq!(held.token, Some(guard.token().get()));
    assert!(held.expires_in <= suite.ttl() && held.expires_in > Duration::ZERO);
    if two.capabilities().waiters {
        assert_eq!(state.waiters[0].holder.name, "worker-2");
    }

    let local = one.local_state();
    assert_eq!(local.held.len(), 1);
    assert_eq!(local.held[0].key.as_str(), key);
    assert_eq!(local.held[0].token, Some(guard.token().get()));
    assert_eq!(local.held[0].state, State::Held);
    assert_eq!(two.local_state().waiting.len(), 1);
    drop(guard);
    waiting.await.expect("the task").expect("the lock");
}

pub(super) async fn keys_are_listed(suite: &Suite) {
    let client = suite.client();
    let (prefix, long) = (suite.key("list"), suite.nearest(Duration::from_secs(60)));
    let mut guards = Vec::new();
    for n in 0..250 {
        let key = format!("{prefix}:{n:03}");
        guards.push(client.mutex(key).ttl(long).lock().await.expect("the lock"));
    }
    let listed = keys_in_use(&client, &prefix).await;
    let expected: Vec<String> = (0..250).map(|n| format!("{prefix}:{n:03}")).collect();
    assert_eq!(listed, expected);
    drop(guards);
    eventually("none is listed", async || keys_in_use(&client, &prefix).await.is_empty()).await;
}

pub(super) async fn broken_locks_are_told(suite: &Suite) {
    let long = suite.nearest(Duration::from_secs(60));
    let one = suite.client_of(|builder| builder.ttl(long));
    let two = suite.client_of(|builder| builder.client_name("operator"));
    let key = suite.key("broken");
    assert_eq!(two.break_lock(key.as_str()).await.expect("an answer"), 0);
    let guard = one.mutex(key.as_str()).lock().await.expect("the lock");
    assert_eq!(two.break_lock(key.as_str()).await.expect("an answer"), 1);
    let reason = timeout(SOON, guard.lost()).await.expect("the loss is reported at once");
    let LossReason::Broken { by } = reason else { panic!("{reason:?}") };
    assert!(by.contains("operator"), "{by}");
    let state = two.inspect(key.as_str()).await.expect("an inspection");
    assert!(state.broken_by.is_some_and(|by| by.contains("operator")), "who did it is recorded");
    let next = timeout(LONG_WAIT, two.mutex(key.as_str()).lock()).await.expect("in time");
    assert!(next.expect("the lock").token() > guard.token());
}

/// Between the operator's look and the break the lock changes hands.
pub(super) async fn only_the_holder_that_was_shown_is_broken(suite: &Suite) {
    let long = suite.nearest(Duration::from_secs(60));
    let clients = [(); 3].map(|()| suite.client_of(|builder| builder.ttl(long)));
    let [sick, healthy, operator] = clients;
    let key = suite.key("shown-and-broken");
    let shown = async || {
        let state = operator.inspect(key.as_str()).await.expect("an inspection");
        state.holders.first().and_then(|held| held.token).expect("a holder with a token")
    };
    let guard = sick.mutex(key.as_str()).lock().await.expect("the lock");
    let seen = shown().await;
    assert!(guard.release().await.is_ok());
    let guard = healthy.mutex(key.as_str()).lock().await.expect("the lock");
    let broken = operator.break_holder(key.as_str(), seen).await.expect("an answer");
    assert!(!broken, "the holder that was shown is gone");
    let state = operator.inspect(key.as_str()).await.expect("an inspection");
    assert_eq!((state.holders.len(), state.broken_by), (1, None));
    assert!(timeout(SOON, guard.lost()).await.is_err(), "the new holder keeps the lock");
    assert_eq!(guard.state(), State::Held);

    let broken = operator.break_holder(key.as_str(), shown().await).await.expect("an answer");
    assert!(broken, "the holder that is shown now");
    let reason = timeout(SOON, guard.lost()).await.expect("the loss is reported at once");
    assert!(matches!(reason, LossReason::Broken { .. }), "{reason:?}");
    eventually("free", async || is_free(&operator, &key).await).await;
}

/// Of several readers one is broken.
pub(super) async fn one_of_several_readers_is_broken(suite: &Suite) {
    let long = suite.nearest(Duration::from_secs(60));
    let [sick, healthy, operator] = [(); 3].map(|()| suite.client_of(|builder| builder.ttl(long)));
    let key = suite.key("one-reader");
    let sick = sick.rwlock(key.as_str()).read().lock().await.expect("the lock");
    let healthy = healthy.rwlock(key.as_str()).read().lock().await.expect("the lock");
    let token = sick.token().get();
    assert!(operator.break_holder(key.as_str(), token).await.expect("an answer"));
    timeout(SOON, sick.lost()).await.expect("the loss is reported at once");
    assert!(timeout(SOON, healthy.lost()).await.is_err(), "the other reader keeps the lock");
    eventually("the broken one is gone", async || {
        let state = operator.inspect(key.as_str()).await.expect("an inspection");
        state.holders.len() == 1
    })
    .await;
    assert_eq!(healthy.state(), State::Held);
    let writer = operator.rwlock(key.as_str()).write();
    assert!(writer.try_lock().await.expect("an answer").is_none(), "a reader is there");
}

/// The lock and the semaphore of a key are broken apart.
pub(super) async fn a_lock_and_its_namesake_are_broken_apart(suite: &Suite) {
    let long = suite.nearest(Duration::from_secs(60));
    let [holder, operator] = [(); 2].map(|()| suite.client_of(|builder| builder.ttl(long)));
    let key = suite.key("broken-lock");
    let permits = holder.semaphore(key.as_str(), 3).permits(2).lock().await.expect("permits");
    assert_eq!(operator.break_lock(key.as_str()).await.expect("an answer"), 0);
    let guard = holder.mutex(key.as_str()).lock().await.expect("the lock");
    assert_eq!(operator.break_lock(key.as_str()).await.expect("an answer"), 1);
    timeout(SOON, guard.lost()).await.expect("the loss is reported at once");
    assert!(timeout(SOON, permits.lost()).await.is_err(), "the permits are left alone");
    assert_eq!(permits.state(), State::Held);

    let key = suite.key("broken-permits");
    let guard = holder.mutex(key.as_str()).lock().await.expect("the lock");
    assert_eq!(operator.break_permits(key.as_str()).await.expect("an answer"), 0);
    let permits = holder.semaphore(key.as_str(), 3).permits(2).lock().await.expect("permits");
    assert_eq!(operator.break_permits(key.as_str()).await.expect("an answer"), 1);
    timeout(SOON, permits.lost()).await.expect("the loss is reported at once");
    assert!(timeout(SOON, guard.lost()).await.is_err(), "the lock is left alone");
    assert_eq!(guard.state(), State::Held);
}

/// A holder that is done is told from one that may be dead.
pub(super) async fn a_key_that_is_kept_is_shown_as_kept(suite: &Suite) {
    let long = suite.nearest(Duration::from_secs(60));
    let [client, operator] = [(); 2].map(|()| suite.client_of(|builder| builder.ttl(long)));
    let key = suite.key("kept");
    let holder = async || {
        let state = operator.inspect(key.as_str()).await.expect("an inspection");
        state.holders.into_iter().next().expect("a holder")
    };
    let guard = client.mutex(key.as_str()).lock().await.expect("the lock");
    assert!(!holder().await.is_over);
    assert!(guard.release_after(Duration::from_secs(3)).await.is_ok());
    let kept = holder().await;
    assert!(kept.is_over, "{kept:?}");
    eventually("free", async || is_free(&operator, &key).await).await;
}

pub(super) async fn health_is_told(suite: &Suite) {
    let (client, faults) = suite.faulty();
    assert!(client.health().await.is_ok());
    faults.set(crate::faulty_backend::FaultMode::Unreachable);
    assert!(!client.health().await.is_ok());
}

/// Invariant I3: after all trials nothing is left.
pub(super) async fn nothing_is_left(suite: &Suite) {
    let client = suite.client();
    let prefix = format!("conformance:{}:", std::process::id());
    eventually("rest", async || {
        let keys = keys_in_use(&client, &prefix).await;
        for key in &keys {
            let _ = is_free(&client, key).await;
        }
        keys.is_empty()
    })
    .await;
}
