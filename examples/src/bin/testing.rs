//! How to test code that takes locks, without a server: the lock is free, is busy, or is
//! lost. Each test has its own client.
//!
//! `cargo run -p examples --bin testing` shows the three cases;
//! `cargo test -p examples --bin testing` runs them as tests.

use dlock::{ErrorKind, Result, assert_locked, distributed_lock, key, testing};

/// The code under test.
#[distributed_lock(key = "order:{order}", wait = "0s")]
async fn ship(order: u64) -> Result<String> {
    let label = print_label(order);
    tokio::task::yield_now().await;
    Ok(label)
}

/// Must be called while the lock is held, and checks that.
fn print_label(order: u64) -> String {
    assert_locked!(key!("order:{order}"));
    format!("label of {order}")
}

async fn ships_when_the_lock_is_free() -> Result<()> {
    assert_eq!(ship(7).await?, "label of 7");
    Ok(())
}

async fn does_not_ship_while_the_lock_is_busy() -> Result<()> {
    let busy = testing::force_busy("order:7").await?;
    let refused = ship(7).await.map_err(|error| error.kind().is_busy());
    assert_eq!(refused, Err(true));
    drop(busy);
    assert_eq!(ship(7).await?, "label of 7");
    Ok(())
}

async fn stops_when_the_lock_is_lost() -> Result<()> {
    let (shipped, lost) = tokio::join!(ship(7), testing::force_lost("order:7"));
    lost?;
    assert_eq!(shipped.map_err(|error| error.kind()), Err(ErrorKind::Lost));
    Ok(())
}

#[tokio::main]
async fn main() -> Result<()> {
    testing::scope(ships_when_the_lock_is_free()).await?;
    testing::scope(does_not_ship_while_the_lock_is_busy()).await?;
    testing::scope(stops_when_the_lock_is_lost()).await?;
    println!("shipped when free, refused when busy, stopped when lost: all without a server");
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn free() -> Result<()> {
        testing::scope(ships_when_the_lock_is_free()).await
    }

    #[tokio::test]
    async fn busy() -> Result<()> {
        testing::scope(does_not_ship_while_the_lock_is_busy()).await
    }

    #[tokio::test]
    async fn lost() -> Result<()> {
        testing::scope(stops_when_the_lock_is_lost()).await
    }
}
