//! The memory that an operation costs, as the documents state it.

mod common;

use common::{Place, taken};
use dlock_segment::Inventory;
use dlock_testkit::redis::RedisServer;

/// The bytes of all keys of this kind.
fn bytes(server: &RedisServer, kind: &str) -> usize {
    let keys = server.cli(&["KEYS", &format!("*:i{kind}*")]);
    let of = |key: &str| server.cli(&["MEMORY", "USAGE", key, "SAMPLES", "0"]).parse::<usize>();
    keys.lines().map(|key| of(key).expect("a number")).sum()
}

/// Buys under ids of 20 bytes. With buyers, each operation has its own buyer, whose id is
/// as long.
async fn buy(sale: &Inventory, ids: std::ops::Range<u32>, with_buyers: bool) {
    let mut buying = tokio::task::JoinSet::new();
    for number in ids {
        let sale = sale.clone();
        buying.spawn(async move {
            let deduct = sale.deduct(1).operation(format!("operation-{number:010}"));
            let buyer = format!("a-buyer---{number:010}");
            let deduct = if with_buyers { deduct.buyer(buyer) } else { deduct };
            taken(deduct.send().await.expect("an answer"));
        });
    }
    buying.join_all().await;
}

/// The figures of `docs/inventory.md`, when the hash table has just grown.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn bytes_per_operation_are_as_published() {
    let Some(place) = Place::redis().await else { return };
    let server = place.server.as_ref().expect("a server");
    for (with_buyers, at_most) in [(false, 115), (true, 235)] {
        let name = format!("sale-{with_buyers}");
        let sale = Inventory::builder(&place.dlock, name).stock(100_000).segments(4);
        let sale = sale.create().await.expect("a sale");
        let before = bytes(server, "o") + bytes(server, "b");
        let mut bought = 0;
        for many in [1_000, 4_200, 8_000] {
            buy(&sale, bought..many, with_buyers).await;
            bought = many;
            let each = (bytes(server, "o") + bytes(server, "b") - before) / many as usize;
            println!("{many} operations, with buyers: {with_buyers}: {each} bytes each");
            assert!((60..=at_most).contains(&each), "{each} bytes, {many} operations");
        }
        // Who hears "sold out" leaves nothing.
        let rest = sale.stock().await.expect("the stock").available;
        taken(sale.deduct(rest).send().await.expect("the rest"));
        let before_refusals = bytes(server, "");
        for number in 0..200 {
            let refused = sale.deduct(1).operation(format!("too-late-{number}")).send().await;
            assert!(common::is_sold_out(&refused.expect("an answer")));
        }
        assert_eq!(bytes(server, ""), before_refusals);
    }
}
