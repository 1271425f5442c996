//! The slot of a home moves to another primary.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::Duration;

use dlock_segment::{Deduction, Effect, Inventory, JournalCursor};
use dlock_testkit::topology::ClusterServers;

use crate::common::{clean_audit, counts, eventually};
use crate::{client, homes_at};

/// How long the slot is held half-way: `DLOCK_TEST_HELD_SLOT` in seconds, else a moment.
fn held_for() -> Duration {
    let seconds = std::env::var("DLOCK_TEST_HELD_SLOT").ok().and_then(|text| text.parse().ok());
    Duration::from_secs_f64(seconds.unwrap_or(1.5))
}

/// Buys one unit; false if its home cannot answer now.
async fn attempt(sale: &Inventory, id: &str) -> bool {
    let deduct = sale.deduct(1).operation(id).deadline(Duration::from_millis(500));
    match deduct.send().await {
        Ok(Deduction::Taken(_)) => true,
        Err(error) if error.is_retryable() => false,
        other => panic!("{other:?}"),
    }
}

/// Buys under ids of its own until it is stopped, and in the end what could not be bought
/// meanwhile. Returns the number of units.
async fn buy(sale: Inventory, task: u64, stop: Arc<AtomicBool>, bought: Arc<AtomicU64>) -> u64 {
    let mut open = Vec::new();
    let mut count = 0;
    while !stop.load(Ordering::Relaxed) {
        let id = format!("o-{task}-{count}");
        count += 1;
        match attempt(&sale, &id).await {
            true => drop(bought.fetch_add(1, Ordering::Relaxed)),
            false => open.push(id),
        }
        tokio::time::sleep(Duration::from_millis(5)).await;
    }
    for id in open {
        eventually("its home answers again", || attempt(&sale, &id)).await;
    }
    count
}

/// A slot is held half-migrated while its home sells: first with all keys at the old node,
/// which serves them, and then with some here and some there, when nobody can. No script fails
/// half-way.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_slot_moves_while_its_home_sells() {
    let Some(cluster) = ClusterServers::with(3, 0, &[]) else { return };
    let dlock = client(&cluster.url()).await;
    let sale = Inventory::builder(&dlock, "sale").stock(1_000_000).homes(3).journal(1_000_000);
    let sale = sale.create().await.unwrap();
    let slot = cluster.slot_of(&homes_at(&cluster.nodes[0]).remove(0));
    let (stop, bought) = (Arc::new(AtomicBool::new(false)), Arc::new(AtomicU64::new(0)));
    let buyers: Vec<_> = (0..8)
        .map(|task| tokio::spawn(buy(sale.clone(), task, stop.clone(), bought.clone())))
        .collect();
    let more = async |than: u64| {
        eventually("more is sold", || async { bought.load(Ordering::Relaxed) > than }).await;
    };

    let moving = cluster.begin_move(slot, 1);
    // All keys exist, so the old node serves all of them for as long as it takes.
    let before = counts(&sale).await.2;
    tokio::time::sleep(held_for() / 2).await;
    more(before + 100).await;
    assert!(counts(&sale).await.2 > before, "all homes answer");
    moving.move_keys(4);
    let before = bought.load(Ordering::Relaxed);
    tokio::time::sleep(held_for() / 2).await;
    more(before + 20).await; // by the homes that do not move
    moving.move_keys(usize::MAX);
    moving.finish();
    eventually("all homes answer", || async { sale.stock().await.is_ok() }).await;
    stop.store(true, Ordering::Relaxed);
    let mut sold = 0;
    for buyer in buyers {
        sold += buyer.await.unwrap();
    }
    assert_eq!(counts(&sale).await, (1_000_000 - sold, 0, sold));
    clean_audit(&sale).await;
    assert_eq!(journalled(&sale).await, sold, "the journal leads to the counts");
}

/// The units that were sold by the journal, which has each entry once.
async fn journalled(sale: &Inventory) -> u64 {
    let (mut cursor, mut units) = (JournalCursor::default(), 0);
    loop {
        let entries = sale.journal(&cursor).await.unwrap();
        if entries.is_empty() {
            return units;
        }
        for entry in entries {
            assert_eq!(entry.sequence, cursor.sequence(entry.home) + 1);
            cursor.advance(&entry);
            if entry.effect == Effect::Taken {
                units += entry.quantity;
            }
        }
    }
}
