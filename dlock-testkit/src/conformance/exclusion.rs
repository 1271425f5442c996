//! Trials of mutual exclusion: who may hold a lock at the same time.

use std::sync::Arc;
use std::time::Duration;

use dlock::backend::{AcquireOutcome, Claim, Moment, Notice, Owner, Release, RenewOutcome};
use dlock::backend::{Backend, Listener};
use dlock::{Holder, Key, Mode, ReleaseOutcome};

use super::{Suite, all, eventually, is_free};
use crate::SingleCalls as _;
use crate::history::History;

/// Tasks of several processes, with hand-overs inside each: overlap and tokens.
pub(super) async fn one_holder_at_a_time(suite: &Suite) {
    let history = Arc::new(History::default());
    let key = suite.key("exclusion");
    let mut tasks = Vec::new();
    for process in 0..3 {
        let client = suite.client();
        for task in 0..6 {
            let (client, key, history) = (client.clone(), key.clone(), history.clone());
            tasks.push(tokio::spawn(async move {
                for round in 0..15 {
                    let lock = client.mutex(key.as_str());
                    let fair = client.capabilities().fifo && (process + task + round) % 5 == 0;
                    let lock = if fair { lock.fair() } else { lock };
                    let guard = lock.lock().await.expect("the lock");
                    let entry = history.enter(&guard);
                    tokio::task::yield_now().await;
                    drop(entry);
                    if round % 2 == 0 {
                        assert_eq!(
                            guard.release().await.expect("an answer"),
                            ReleaseOutcome::Released
                        );
                    }
                }
            }));
        }
    }
    all(tasks).await;
    history.assert_clean();
    assert_eq!(history.entries(), 3 * 6 * 15);
    let client = suite.client();
    eventually("rest", async || is_free(&client, &key).await).await;
}

pub(super) async fn try_lock_says_busy(suite: &Suite) {
    let (one, two, key) = (suite.client(), suite.client(), suite.key("try"));
    let guard = one.mutex(key.as_str()).try_lock().await.expect("an answer").expect("the lock");
    assert!(one.mutex(key.as_str()).try_lock().await.expect("an answer").is_none());
    assert!(two.mutex(key.as_str()).try_lock().await.expect("an answer").is_none());
    assert_eq!(guard.release().await.expect("an answer"), ReleaseOutcome::Released);
    assert!(two.mutex(key.as_str()).try_lock().await.expect("an answer").is_some());
}

pub(super) async fn tokens_rise_over_clients(suite: &Suite) {
    let (one, two, key) = (suite.client(), suite.client(), suite.key("tokens"));
    let mut last = 0;
    for round in 0..20 {
        let client = if round % 3 == 0 { &one } else { &two };
        let guard = client.mutex(key.as_str()).lock().await.expect("the lock");
        assert!(guard.token().get() > last, "round {round}");
        last = guard.token().get();
        let _ = guard.release().await.expect("an answer");
    }
}

pub(super) async fn readers_share_and_writers_exclude(suite: &Suite) {
    let (one, two, key) = (suite.client(), suite.client(), suite.key("rw"));
    let (one, two) = (one.rwlock(key.as_str()), two.rwlock(key.as_str()));
    let first = one.read().lock().await.expect("the lock");
    let second = one.read().try_lock().await.expect("an answer").expect("a reader beside it");
    let third = two.read().try_lock().await.expect("an answer").expect("a reader elsewhere");
    assert!(two.write().try_lock().await.expect("an answer").is_none());
    assert!(one.write().try_lock().await.expect("an answer").is_none());
    let highest = third.token().max(second.token()).max(first.token());
    for guard in [first, second, third] {
        assert_eq!(guard.release().await.expect("an answer"), ReleaseOutcome::Released);
    }
    let writer = two.write().try_lock().await.expect("an answer").expect("the lock");
    assert!(writer.token() > highest);
    assert!(one.read().try_lock().await.expect("an answer").is_none());
}

/// Readers share the lock even if they come late or with another ttl.
pub(super) async fn late_readers_share(suite: &Suite) {
    let (one, two, key) = (suite.client(), suite.client(), suite.key("late"));
    let (here, there) = (one.rwlock(key.as_str()).read(), two.rwlock(key.as_str()).read());
    let mut guards = vec![here.lock().await.expect("the lock")];
    for _ in 0..4 {
        tokio::time::sleep(Duration::from_millis(20)).await;
        guards.push(here.try_lock().await.expect("an answer").expect("a reader beside it"));
        guards.push(here.lock().await.expect("a reader beside it"));
        guards.push(there.try_lock().await.expect("an answer").expect("a reader elsewhere"));
    }
    let other_ttl = suite.nearest(suite.ttl() * 2);
    guards.push(here.clone().ttl(other_ttl).lock().await.expect("a reader with another ttl"));
    drop(guards);
    drop(two.mutex(key.as_str()).lock().await.expect("the writer"));
}

pub(super) async fn mixed_readers_and_writers(suite: &Suite) {
    let history = Arc::new(History::default());
    let key = suite.key("mixed");
    let mut tasks = Vec::new();
    for _ in 0..2 {
        let client = suite.client();
        for task in 0..8 {
            let (client, key, history) = (client.clone(), key.clone(), history.clone());
            tasks.push(tokio::spawn(async move {
                for round in 0..10 {
                    let lock = client.rwlock(key.as_str());
                    let writes = (task + round) % 4 == 0;
                    let lock = if writes { lock.write() } else { lock.read() };
                    let guard = lock.lock().await.expect("the lock");
                    let entry = history.enter(&guard);
                    tokio::task::yield_now().await;
                    drop(entry);
                }
            }));
        }
    }
    all(tasks).await;
    history.assert_clean();
}

pub(super) async fn a_mutex_is_a_writer(suite: &Suite) {
    let (one, two, key) = (suite.client(), suite.client(), suite.key("same"));
    let guard = one.mutex(key.as_str()).lock().await.expect("the lock");
    assert!(two.rwlock(key.as_str()).read().try_lock().await.expect("an answer").is_none());
    assert!(one.rwlock(key.as_str()).read().try_lock().await.expect("an answer").is_none());
    drop(guard);
}

pub(super) async fn downgrade_lets_readers_in(suite: &Suite) {
    let (one, two, key) = (suite.client(), suite.client(), suite.key("downgrade"));
    let writer = one.rwlock(key.as_str()).write().lock().await.expect("the lock");
    let token = writer.token();
    let reader = writer.downgrade();
    assert_eq!(reader.mode(), Mode::Shared);
    assert!(reader.token() > token, "the fence tells a reader from the writer it was");
    let other = two.rwlock(key.as_str()).read().lock().await.expect("a reader elsewhere");
    let beside = one.rwlock(key.as_str()).read().lock().await.expect("a reader beside it");
    assert!(two.mutex(key.as_str()).try_lock().await.expect("an answer").is_none());
    drop((reader, other, beside));
    let guard = two.mutex(key.as_str()).lock().await.expect("the lock");
    assert!(guard.token() > token);
}

pub(super) async fn a_semaphore_has_a_capacity(suite: &Suite) {
    let (one, two, key) = (suite.client(), suite.client(), suite.key("semaphore"));
    let (one, two) = (one.semaphore(key.as_str(), 5), two.semaphore(key.as_str(), 5));
    let three = one.permits(3).lock().await.expect("permits");
    assert_eq!(three.count(), 3);
    assert!(two.permits(3).try_lock().await.expect("an answer").is_none());
    let rest = two.permits(2).try_lock().await.expect("an answer").expect("permits");
    assert!(one.permits(1).try_lock().await.expect("an answer").is_none());
    assert_eq!(three.release().await.expect("an answer"), ReleaseOutcome::Released);
    let again = two.permits(3).try_lock().await.expect("an answer").expect("permits");
    drop((rest, again));
}

pub(super) async fn a_semaphore_is_apart_from_a_lock(suite: &Suite) {
    let (client, key) = (suite.client(), suite.key("apart"));
    let guard = client.mutex(key.as_str()).lock().await.expect("the lock");
    let permit = client.semaphore(key.as_str(), 1).permits(1).try_lock().await.expect("an answer");
    assert!(permit.is_some());
    drop(guard);
}

pub(super) async fn all_of_never_deadlocks(suite: &Suite) {
    let (a, b, c) = (suite.key("all-a"), suite.key("all-b"), suite.key("all-c"));
    let orders = [[&a, &b, &c], [&c, &b, &a], [&b, &c, &a], [&b, &b, &a]];
    let mut tasks = Vec::new();
    for order in orders {
        let client = suite.client();
        let keys: Vec<String> = order.into_iter().cloned().collect();
        tasks.push(tokio::spawn(async move {
            for _ in 0..10 {
                let all = client.all_of(keys.iter().map(String::as_str)).lock().await;
                let all = all.expect("all of them");
                tokio::task::yield_now().await;
                assert_eq!(all.release().await.expect("an answer"), ReleaseOutcome::Released);
            }
        }));
    }
    all(tasks).await;
}

pub(super) async fn all_of_releases_on_failure(suite: &Suite) {
    let (one, two) = (suite.client(), suite.client());
    let (a, b) = (suite.key("part-a"), suite.key("part-b"));
    let (first, last) = (a.clone().min(b.clone()), a.max(b));
    let busy = two.mutex(last.as_str()).lock().await.expect("the lock");
    let both = one.all_of([first.as_str(), last.as_str()]);
    assert!(both.try_lock().await.expect("an answer").is_none());
    let error = both.clone().wait(Duration::from_millis(300)).lock().await.expect_err("busy");
    assert!(error.kind().is_busy(), "{error}");
    eventually("the first is free", async || is_free(&one, &first).await).await;
    drop(busy);
    let both = both.lock().await.expect("both");
    assert_eq!(both.tokens().count(), 2);
}

/// A listener that ignores notices, for calls made to the backend itself.
struct NoOpListener;

impl Listener for NoOpListener {
    fn on_notice(&self, _: &Key, _: Owner, _: Notice) {}
}

fn claim(suite: &Suite, key: &str, owner: u128) -> Claim {
    let holder =
        Holder { client: u64::MAX, name: "raw".into(), host: "raw".into(), pid: 1, tags: vec![] };
    Claim {
        key: Key::new(key).expect("a key"),
        owner: Owner::from_bits(owner),
        mode: Mode::Exclusive,
        ttl: suite.ttl(),
        queue: false,
        instead_of: None,
        tokens: 3,
        holder: Arc::new(holder),
        sent: Moment::default(),
    }
}

/// A backend that is called without a client.
fn raw(suite: &Suite) -> (Box<dyn Backend>, Arc<dyn Listener>) {
    let backend = (suite.backend)();
    let listener: Arc<dyn Listener> = Arc::new(NoOpListener);
    backend.open(u64::MAX, Arc::downgrade(&listener));
    (backend, listener)
}

async fn try_claim(backend: &dyn Backend, claim: &Claim) -> AcquireOutcome {
    backend.acquire(claim).await.expect("an answer")
}

pub(super) async fn same_owner_same_grant(suite: &Suite) {
    let (backend, _listener) = raw(suite);
    let claim = claim(suite, &suite.key("owner"), 1);
    let first = try_claim(&*backend, &claim).await.grant().expect("a free key");
    let again = try_claim(&*backend, &claim).await.grant().expect("its own key");
    assert_eq!(first, again, "a retry after a lost reply is no second grant");
    assert!(first.count >= 3, "a token for each hand-over");
    assert_eq!(
        backend.release(&claim, Release::Now).await.expect("an answer"),
        ReleaseOutcome::Released
    );
    assert_eq!(
        backend.release(&claim, Release::Now).await.expect("an answer"),
        ReleaseOutcome::AlreadyLost
    );
}

pub(super) async fn a_release_never_touches_a_successor(suite: &Suite) {
    let (backend, _listener) = raw(suite);
    let key = suite.key("successor");
    let (stale, holder) = (claim(suite, &key, 2), claim(suite, &key, 3));
    assert!(try_claim(&*backend, &holder).await.grant().is_some());
    assert_eq!(
        backend.release(&stale, Release::Now).await.expect("an answer"),
        ReleaseOutcome::AlreadyLost
    );
    let plain = |claim: &Claim| Arc::new(Claim { tokens: 0, ..claim.clone() });
    let stale_and_live = [plain(&stale), plain(&holder)];
    let renewed = backend.renew(&stale_and_live).await;
    assert!(matches!(renewed[0], Ok(RenewOutcome::Lost)), "one answer each, in order");
    assert!(matches!(renewed[1], Ok(outcome) if outcome.others_wait().is_some()));
    assert!(matches!(try_claim(&*backend, &stale).await, AcquireOutcome::Busy { .. }));
    let _ = backend.release(&holder, Release::Now).await.expect("an answer");
}

pub(super) async fn further_tokens_rise_and_are_remembered(suite: &Suite) {
    let (backend, _listener) = raw(suite);
    let key = suite.key("extend");
    let holder = claim(suite, &key, 2);
    let first = try_claim(&*backend, &holder).await.grant().expect("a free key");
    let renewal = [Arc::new(Claim { tokens: 5, ..holder.clone() })];
    match backend.renew(&renewal).await.remove(0).expect("an answer") {
        RenewOutcome::Extended(grant) => {
            assert!(grant.first >= first.first + u64::from(first.count), "{first:?}, {grant:?}");
            let again = try_claim(&*backend, &holder).await.grant();
            assert_eq!(again, Some(grant), "who asks again must not get a token twice");
        }
        outcome => assert_eq!(outcome.others_wait(), Some(false)),
    }
    if backend.capabilities().fifo {
        let waiter = Claim { queue: true, ..claim(suite, &key, 3) };
        assert!(try_claim(&*backend, &waiter).await.is_queued());
        let renewed = backend.renew(&renewal).await.remove(0).expect("an answer");
        assert_eq!(renewed.others_wait(), Some(true), "somebody waits");
        let _ = backend.release(&waiter, Release::Now).await.expect("an answer");
    }
    let _ = backend.release(&holder, Release::Now).await.expect("an answer");
}

pub(super) async fn a_replaced_lease_is_freed_first(suite: &Suite) {
    let (backend, _listener) = raw(suite);
    let key = suite.key("replace");
    let old = claim(suite, &key, 4);
    let new = Claim { instead_of: Some(old.owner), ..claim(suite, &key, 5) };
    let first = try_claim(&*backend, &old).await.grant().expect("a free key");
    let second = try_claim(&*backend, &new).await.grant();
    let second = second.expect("nobody waits, so giving up and asking anew is granted");
    assert!(second.first > first.first + u64::from(first.count) - 1, "new tokens are higher");
    assert_eq!(
        backend.release(&old, Release::Now).await.expect("an answer"),
        ReleaseOutcome::AlreadyLost
    );
    assert_eq!(
        backend.release(&new, Release::Now).await.expect("an answer"),
        ReleaseOutcome::Released
    );
}
