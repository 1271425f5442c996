//! How to test code that takes locks, without a server: a client of its own for
//! each test, a lock that is busy, a lock that is lost.
//!
//! `cargo run -p examples --bin testing` plays the three cases, `cargo test -p
//! examples --bin testing` runs them as tests.

use dlock::{ErrorKind, Result, assert_locked, distributed_lock, key, testing};

/// The code under test.
#[distributed_lock(key = "order:{order}", wait = "0s")]
async fn ship(order: u64) -> Result<String> {
    let label = print_label(order);
    tokio::task::yield_now().await;
    Ok(label)
}

/// Relies on its caller's lock, and says so.
fn print_label(order: u64) -> String {
    assert_locked!(key!("order:{order}"));
    format!("label of {order}")
}

async fn ships_once_it_has_the_lock() -> Result<()> {
    assert_eq!(ship(7).await?, "label of 7");
    Ok(())
}

async fn does_not_ship_while_somebody_else_does() -> Result<()> {
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
    testing::scope(ships_once_it_has_the_lock()).await?;
    testing::scope(does_not_ship_while_somebody_else_does()).await?;
    testing::scope(stops_when_the_lock_is_lost()).await?;
    println!("shipped, refused while busy, stopped when lost: all without a server");
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn ships() -> Result<()> {
        testing::scope(ships_once_it_has_the_lock()).await
    }

    #[tokio::test]
    async fn busy() -> Result<()> {
        testing::scope(does_not_ship_while_somebody_else_does()).await
    }

    #[tokio::test]
    async fn lost() -> Result<()> {
        testing::scope(stops_when_the_lock_is_lost()).await
    }
}
