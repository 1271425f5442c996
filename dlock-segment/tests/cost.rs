//! What an operation and an open handle cost, as the documents state it.

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

/// What was given back is kept for ever, so it is small.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn bytes_per_refund_are_as_published() {
    let Some(place) = Place::redis().await else { return };
    let server = place.server.as_ref().expect("a server");
    let sale = place.sale(100_000, 4).await;
    let many = 4_200; // the hash table has just grown
    buy(&sale, 0..many, true).await;
    let mut refunds = tokio::task::JoinSet::new();
    for number in 0..many {
        let sale = sale.clone();
        refunds.spawn(async move {
            let refund = sale.refund(format!("operation-{number:010}")).send().await;
            common::refunded(refund.expect("an answer"));
        });
    }
    refunds.join_all().await;
    let each = bytes(server, "r") / many as usize;
    println!("{each} bytes for each refund");
    assert!((60..=175).contains(&each), "{each} bytes");
}

/// The calls of this command that the server has run.
fn calls(server: &RedisServer, command: &str) -> u64 {
    let stats = server.cli(&["INFO", "commandstats"]);
    let line = stats.lines().find(|line| line.starts_with(&format!("cmdstat_{command}:")));
    let calls = line.and_then(|line| line.split("calls=").nth(1)?.split(',').next()?.parse().ok());
    calls.unwrap_or(0)
}

/// A service may open the sale for each request: it costs one script call, writes nothing,
/// and makes no connection.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn to_open_a_sale_costs_one_call() {
    let Some(place) = Place::redis().await else { return };
    let server = place.server.as_ref().expect("a server");
    let sale = place.sale(100, 4).await;
    let id = sale.creation_id();
    drop(Inventory::open_created(&place.dlock, "sale", id).await.expect("the sale"));
    let clients = || server.cli(&["CLIENT", "LIST"]).lines().count();
    let before = (calls(server, "evalsha"), calls(server, "set"), bytes(server, ""), clients());
    for _ in 0..100 {
        drop(Inventory::open_created(&place.dlock, "sale", id).await.expect("the sale"));
    }
    let after = (calls(server, "evalsha"), calls(server, "set"), bytes(server, ""), clients());
    assert_eq!(after, (before.0 + 100, before.1, before.2, before.3));
}
