//! Measures what it costs to open a sale for each request instead of once, on a Redis of its
//! own:
//!
//! ```text
//! cargo run -p dlock-segment --all-features --example dlock-open-cost
//! ```

use std::time::{Duration, Instant};

use dlock::Dlock;
use dlock_segment::Inventory;
use dlock_testkit::redis::RedisServer;

const EACH: u32 = 5_000;
const TASKS: u32 = 50;

#[tokio::main(worker_threads = 2)]
async fn main() -> dlock_segment::Result<()> {
    let Some(server) = RedisServer::start() else { return Ok(()) };
    println!("                          one task      {TASKS} tasks");
    for (name, url) in [("memory", "memory://".to_owned()), ("redis", server.url())] {
        let dlock = Dlock::connect(&url).await?;
        let sale = Inventory::builder(&dlock, "open").stock(1 << 30).create().await?;
        let id = sale.creation_id();
        let open = async || Inventory::open_created(&dlock, "open", id).await.map(drop);
        let deduct = async || sale.deduct(1).send().await.map(drop);
        print(name, "open", one(open).await?, many(&dlock, id, true).await?);
        print(name, "deduct", one(deduct).await?, many(&dlock, id, false).await?);
    }
    Ok(())
}

fn print(store: &str, what: &str, one: Duration, many: Duration) {
    println!("{store:8} {what:8} {one:>17.2?} {many:>13.2?}");
}

/// The time of one call, one after the other.
async fn one(call: impl AsyncFn() -> dlock_segment::Result<()>) -> dlock_segment::Result<Duration> {
    let began = Instant::now();
    for _ in 0..EACH {
        call().await?;
    }
    Ok(began.elapsed() / EACH)
}

/// The time for each call if many tasks make them at once.
async fn many(
    dlock: &Dlock,
    id: dlock_segment::CreationId,
    opens: bool,
) -> dlock_segment::Result<Duration> {
    let began = Instant::now();
    let mut tasks = tokio::task::JoinSet::new();
    for _ in 0..TASKS {
        let dlock = dlock.clone();
        tasks.spawn(async move {
            let sale = Inventory::open_created(&dlock, "open", id).await?;
            for _ in 0..EACH / 10 {
                if opens {
                    drop(Inventory::open_created(&dlock, "open", id).await?);
                } else {
                    drop(sale.deduct(1).send().await?);
                }
            }
            Ok::<_, dlock_segment::Error>(())
        });
    }
    for done in tasks.join_all().await {
        done?;
    }
    Ok(began.elapsed() / (EACH / 10 * TASKS))
}
