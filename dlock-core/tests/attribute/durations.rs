//! Options that are durations.

use std::time::Duration;

use dlock::{Dlock, Error, ErrorKind, Result, distributed_lock, key};

use crate::fixture::{LONG, until};
use crate::{Fixture, on_both};

on_both!(ttl, wait, max_hold, hold_at_least, hold_at_least_of_permits_and_several_keys);

#[distributed_lock(key = "ttl", ttl = "1500ms", client = dlock, guard = lock)]
async fn short_lived(dlock: &Dlock) -> Result<Duration> {
    Ok(lock.valid_for())
}

#[distributed_lock(key = "ttl", ttl = ttl, client = dlock, guard = lock)]
async fn lived(dlock: &Dlock, ttl: Duration) -> Result<Duration> {
    Ok(lock.valid_for())
}

async fn ttl(fixture: Fixture) {
    let within = |valid: Duration, ttl: u64| {
        assert!(valid > Duration::ZERO && valid <= Duration::from_millis(ttl), "{valid:?}");
    };
    within(short_lived(&fixture.dlock).await.unwrap(), 1_500);
    within(lived(&fixture.dlock, Duration::from_millis(2_500)).await.unwrap(), 2_500);
    let error = lived(&fixture.dlock, Duration::ZERO).await.unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Invalid);
}

#[distributed_lock(key = "wait", wait = "0s", client = dlock)]
async fn try_once(dlock: &Dlock) -> Result<()> {
    Ok(())
}

#[distributed_lock(key = "wait", wait = Duration::from_millis(150), client = dlock)]
async fn try_shortly(dlock: &Dlock) -> Result<()> {
    Ok(())
}

#[distributed_lock(key = "wait", wait = "unlimited", client = dlock)]
async fn try_for_ever(dlock: &Dlock) -> Result<()> {
    Ok(())
}

async fn wait(fixture: Fixture) {
    let busy = fixture.busy("wait").await;
    let began = tokio::time::Instant::now();
    assert_eq!(try_once(&fixture.dlock).await.unwrap_err().kind(), ErrorKind::TimedOut);
    assert_eq!(try_shortly(&fixture.dlock).await.unwrap_err().kind(), ErrorKind::TimedOut);
    let waited = began.elapsed();
    assert!(waited >= Duration::from_millis(150) && waited < LONG, "{waited:?}");
    let dlock = fixture.dlock.clone();
    let waiting = tokio::spawn(async move { try_for_ever(&dlock).await });
    until(async || !fixture.dlock.local_state().waiting.is_empty()).await;
    drop(busy);
    waiting.await.unwrap().unwrap();
    try_shortly(&fixture.dlock).await.unwrap();
}

#[distributed_lock(key = "max_hold", max_hold = "100ms", client = dlock)]
async fn overlong(dlock: &Dlock) -> Result<()> {
    std::future::pending().await
}

async fn max_hold(fixture: Fixture) {
    let error = overlong(&fixture.dlock).await.unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Lost);
    fixture.assert_free("max_hold").await;
}

#[distributed_lock(key = "job:{how}", wait = "0s", hold_at_least = "1h", client = dlock)]
async fn job(dlock: &Dlock, how: &str) -> Result<()> {
    match how {
        "fails" => Err(Error::new(ErrorKind::Invalid, dlock::Operation::Hold)),
        "panics" => panic!("as the test wants it"),
        "stays" => std::future::pending().await,
        _ => Ok(()),
    }
}

async fn hold_at_least(fixture: Fixture) {
    let Fixture { dlock, other, .. } = &fixture;
    job(dlock, "ends").await.unwrap();
    job(dlock, "fails").await.unwrap_err();
    let panicking = tokio::spawn({
        let dlock = dlock.clone();
        async move { job(&dlock, "panics").await }
    });
    assert!(panicking.await.unwrap_err().is_panic());
    let cancelled = tokio::spawn({
        let dlock = dlock.clone();
        async move { job(&dlock, "stays").await }
    });
    until(async || !dlock.local_state().held.is_empty()).await;
    cancelled.abort();
    assert!(cancelled.await.unwrap_err().is_cancelled());
    for how in ["ends", "fails", "panics", "stays"] {
        // The release is on its way; once it has arrived, the key stays taken.
        let key = key!("job:{how}").unwrap();
        until(async || {
            let holders = other.inspect(&key).await.unwrap().holders;
            holders.iter().any(|holder| holder.expires_in > Duration::from_secs(60))
        })
        .await;
        for client in [dlock, other] {
            assert_eq!(job(client, how).await.unwrap_err().kind(), ErrorKind::TimedOut, "{how}");
        }
    }
    assert!(dlock.local_state().held.is_empty());
}

#[distributed_lock(key = "slots", of = 2, wait = "0s", hold_at_least = "1h", client = dlock)]
async fn slot(dlock: &Dlock) -> Result<()> {
    Ok(())
}

#[distributed_lock(keys = ["left", "right"], wait = "0s", hold_at_least = "1h", client = dlock)]
async fn sides(dlock: &Dlock) -> Result<()> {
    Ok(())
}

async fn hold_at_least_of_permits_and_several_keys(fixture: Fixture) {
    slot(&fixture.dlock).await.unwrap();
    slot(&fixture.other).await.unwrap();
    assert_eq!(slot(&fixture.dlock).await.unwrap_err().kind(), ErrorKind::TimedOut);
    sides(&fixture.dlock).await.unwrap();
    for side in ["left", "right"] {
        until(async || {
            let holders = fixture.other.inspect(side).await.unwrap().holders;
            holders.iter().any(|holder| holder.expires_in > Duration::from_secs(60))
        })
        .await;
    }
    assert_eq!(sides(&fixture.other).await.unwrap_err().kind(), ErrorKind::TimedOut);
}
