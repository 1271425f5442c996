//! The first thing anybody tries.
use dlock::{Dlock, ReleaseOutcome, key};

#[tokio::test]
async fn lock_write_release() {
    let dlock = Dlock::connect("memory://smoke").await.unwrap();
    let id = 7;
    let guard = dlock.mutex(key!("order:{id}")).lock().await.unwrap();
    let first = guard.token();
    assert!(dlock.mutex(key!("order:{id}")).try_lock().await.unwrap().is_none());
    assert_eq!(guard.release().await.unwrap(), ReleaseOutcome::Released);
    let guard = dlock.mutex(key!("order:{id}")).lock().await.unwrap();
    assert!(guard.token() > first);
}
