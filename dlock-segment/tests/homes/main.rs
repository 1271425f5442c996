//! A sale over several homes: where they are, what happens when one of their servers fails,
//! goes back or moves, and what it costs.

#![allow(clippy::unwrap_used, reason = "a failed step fails the test")]

#[path = "../common/mod.rs"]
mod common;
mod failing;
mod moving;
mod placing;
mod repairing;
mod routing;

use std::collections::BTreeMap;
use std::time::Duration;

use common::taken;
use dlock::Dlock;
use dlock_segment::Inventory;
use dlock_testkit::redis::RedisServer;

/// A client that notices soon that a server is gone.
async fn client(url: &str) -> Dlock {
    let client = Dlock::builder().url(url).call_timeout(Duration::from_millis(1_500));
    client.connect().await.expect("a client")
}

async fn clients(servers: &[RedisServer]) -> Vec<Dlock> {
    let mut clients = Vec::new();
    for server in servers {
        clients.push(client(&server.url()).await);
    }
    clients
}

/// A sale on these servers.
async fn sale_on(clients: &[Dlock], stock: u64, homes: u32) -> Inventory {
    let sale = Inventory::builder(&clients[0], "sale").servers(clients[1..].iter().cloned());
    sale.stock(stock).homes(homes).journal(10_000).create().await.expect("a sale")
}

/// An id of each home.
async fn ids(sale: &Inventory, homes: u32, quantity: u64) -> BTreeMap<u32, String> {
    let mut ids = BTreeMap::new();
    for number in 0.. {
        let id = format!("id-{number}");
        let receipt = taken(sale.deduct(quantity).operation(&id).send().await.unwrap());
        ids.entry(receipt.home).or_insert(id);
        if ids.len() == homes as usize {
            break;
        }
    }
    ids
}

/// The keys of all homes at a server.
fn homes_at(server: &RedisServer) -> Vec<String> {
    let keys = server.cli(&["KEYS", "*}:i"]);
    keys.lines().filter(|key| !key.is_empty()).map(str::to_owned).collect()
}
