//! A lock, its token, a busy lock, permits and two keys at once.
//!
//! `cargo run -p examples --bin quickstart`, with `DLOCK_URL=redis://localhost`
//! between machines.

use std::time::Duration;

use dlock::{ErrorKind, ReleaseOutcome, Result, key};

#[tokio::main]
async fn main() -> Result<()> {
    let dlock = examples::connect().await?;
    let order = 7;

    // One task at a time, on any machine. Waits without polling; renewed while held.
    let guard = dlock.mutex(key!("order:{order}")).lock().await?;
    println!("holding {} with token {}", guard.key().as_str(), guard.token());

    // Somebody else does not get it: at once, or after as long as they want to wait.
    let other = examples::connect().await?;
    assert!(other.mutex(key!("order:{order}")).try_lock().await?.is_none());
    let late = other.mutex(key!("order:{order}")).wait(Duration::from_millis(50)).lock().await;
    if let Err(error) = late
        && error.kind() == ErrorKind::TimedOut
    {
        println!("somebody else: {error}");
    }

    // Work that stops should the lock be lost, and the outcome of the release.
    let paid = guard.run(async { "paid" }).await?;
    assert_eq!(guard.release().await?, ReleaseOutcome::Released);
    println!("{paid}, and given back");

    // At most ten at a time; this one counts for three.
    let permits = dlock.semaphore("exports", 10).permits(3).lock().await?;
    println!("{} of 10 permits", permits.count());

    // Several keys, in whatever order they are named: never a deadlock.
    let both = dlock.all_of(["account:7", "account:3"]).lock().await?;
    println!("both accounts");
    drop((permits, both));

    let left = dlock.shutdown(Duration::from_secs(1)).await;
    assert_eq!(left, 0, "every lock was given back");
    Ok(())
}
