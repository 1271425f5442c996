//! The first steps: a mutex and its fencing token, a busy lock, a semaphore, and two
//! keys at once.
//!
//! Run it with `cargo run -p examples --bin quickstart`. Set `DLOCK_URL`, for example to
//! `redis://localhost`, to lock between machines.

use std::time::Duration;

use dlock::{ErrorKind, ReleaseOutcome, Result, key};

#[tokio::main]
async fn main() -> Result<()> {
    let dlock = examples::connect().await?;
    let order = 7;

    // One holder at a time, on all machines. `lock` waits without polling, and the lock is
    // renewed while the guard lives.
    let guard = dlock.mutex(key!("order:{order}")).lock().await?;
    println!("holding {} with token {}", guard.key().as_str(), guard.token());

    // Another client does not get the lock: `try_lock` returns `None` at once, and `lock`
    // fails when the waiting time is over.
    let other = examples::connect().await?;
    assert!(other.mutex(key!("order:{order}")).try_lock().await?.is_none());
    let timed_out = other.mutex(key!("order:{order}")).wait(Duration::from_millis(50)).lock().await;
    if let Err(error) = timed_out
        && error.kind() == ErrorKind::TimedOut
    {
        println!("another client: {error}");
    }

    // `run` stops the work if the lock is lost. `release` tells whether the lock was held
    // until the end.
    let paid = guard.run(async { "paid" }).await?;
    assert_eq!(guard.release().await?, ReleaseOutcome::Released);
    println!("{paid}, lock released");

    // A semaphore of ten permits; this guard takes three of them.
    let permits = dlock.semaphore("exports", 10).permits(3).lock().await?;
    println!("holding {} of 10 permits", permits.count());

    // Several keys at once. The order of the keys does not matter: there is no deadlock.
    let both = dlock.all_of(["account:7", "account:3"]).lock().await?;
    println!("holding both accounts");
    drop((permits, both));

    let not_released = dlock.shutdown(Duration::from_secs(1)).await;
    assert_eq!(not_released, 0, "all locks are released");
    Ok(())
}
