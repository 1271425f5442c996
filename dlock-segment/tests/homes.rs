//! A sale over several homes: where they are, what happens when one of their servers fails,
//! goes back or moves, and what it costs.

#![allow(clippy::unwrap_used, reason = "a failed step fails the test")]

mod common;

use std::collections::BTreeMap;
use std::time::Duration;

use common::{clean_audit, counts, eventually, is_sold_out, taken};
use dlock::Dlock;
use dlock_segment::{Deduction, Error, Inventory, Resolved, Routing};
use dlock_testkit::redis::RedisServer;
use dlock_testkit::topology::{ClusterServers, independent};

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

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn homes_are_even_over_the_primaries() {
    let Some(cluster) = ClusterServers::with(3, 0, &[]) else { return };
    let dlock = client(&cluster.url()).await;
    for (name, homes, each) in [("a", 6, 2), ("b", 3, 1), ("c", 12, 4)] {
        let before: Vec<usize> = cluster.nodes.iter().map(|node| homes_at(node).len()).collect();
        let sale = Inventory::builder(&dlock, name).stock(100).homes(homes).create().await.unwrap();
        assert_eq!(sale.stock().await.unwrap().homes, homes);
        for (node, before) in cluster.nodes.iter().zip(before) {
            assert_eq!(homes_at(node).len() - before, each, "{name}");
        }
    }
    // The work is shared too: each primary runs as many scripts as the others.
    let calls = |node: &RedisServer| {
        let stats = node.cli(&["INFO", "commandstats"]);
        let line = stats.lines().find(|line| line.starts_with("cmdstat_evalsha:"));
        let calls = line.and_then(|line| line.split_once("calls=")?.1.split(',').next());
        calls.and_then(|calls| calls.parse::<i64>().ok()).unwrap_or(0)
    };
    let sale = Inventory::builder(&dlock, "d").stock(30_000).homes(6).create().await.unwrap();
    let before: Vec<i64> = cluster.nodes.iter().map(calls).collect();
    for number in 0..900 {
        taken(sale.deduct(1).operation(format!("o-{number}")).send().await.unwrap());
    }
    let after: Vec<i64> = cluster.nodes.iter().map(calls).collect();
    let made: Vec<i64> = after.iter().zip(before).map(|(after, before)| after - before).collect();
    assert!(made.iter().all(|made| (240..=380).contains(made)), "{made:?}");
    // One round trip for each deduction, and some for the balancer.
    assert!(made.iter().sum::<i64>() <= 900 + 60, "{made:?}");
    assert_eq!(sale.moves(), 0);
}

/// A sale that sells evenly moves hardly anything, and sells out to the last unit.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn moves_are_rare() {
    let Some(servers) = independent(3) else { return };
    let clients = clients(&servers).await;
    let sale = sale_on(&clients, 20_000, 6).await.sold_out_for(Duration::ZERO);
    let mut buying = tokio::task::JoinSet::new();
    for task in 0..64 {
        let sale = sale.clone();
        buying.spawn(async move {
            let mut sold = 0;
            for number in 0.. {
                let deduct = sale.deduct(1).operation(format!("o-{task}-{number}"));
                match deduct.deadline(Duration::from_secs(60)).send().await.unwrap() {
                    Deduction::Taken(_) => sold += 1,
                    Deduction::SoldOut { .. } => break,
                    other => panic!("{other:?}"),
                }
            }
            sold
        });
    }
    assert_eq!(buying.join_all().await.iter().sum::<u64>(), 20_000);
    assert!(sale.moves() > 0, "the last units were brought to who asked for them");
    assert!(sale.moves() < 200, "{} moves", sale.moves());
    assert_eq!(counts(&sale).await, (0, 0, 20_000));
    clean_audit(&sale).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_list_of_other_servers_is_refused() {
    let Some(servers) = independent(3) else { return };
    let clients = clients(&servers).await;
    let sale = sale_on(&clients, 30, 3).await;
    let id = sale.creation_id();
    taken(sale.deduct(2).operation("o").send().await.unwrap());
    let [a, b, c] = [0, 1, 2].map(|at| clients[at].clone());
    let open = async |servers: &[Dlock]| Inventory::open_on(servers, "sale", id).await.map(drop);
    open(&[a.clone(), b.clone(), c.clone()]).await.unwrap();
    let reordered = open(&[a.clone(), c.clone(), b.clone()]).await;
    assert!(matches!(reordered, Err(Error::Conflict(_))), "{reordered:?}");
    for others in [vec![a.clone(), b.clone()], vec![a.clone()], vec![a.clone(), b.clone(), b]] {
        let refused = open(&others).await;
        assert!(matches!(refused, Err(Error::Conflict(_))), "{refused:?}");
    }
    let away = open(&[c.clone(), a.clone()]).await;
    assert!(away.is_err(), "the first home is at none of their first places");
    // A server that is new, or lost everything.
    assert_eq!(servers[1].cli(&["FLUSHALL"]), "OK");
    let lost = Inventory::open_on(&clients, "sale", None).await.map(drop);
    assert!(matches!(lost, Err(Error::Lost(_))), "{lost:?}");
    let again = Inventory::builder(&a, "sale").servers(clients[1..].iter().cloned());
    let again = again.stock(30).homes(3).journal(10_000).create().await.map(drop);
    assert!(matches!(again, Err(Error::Lost(_))), "it is not new: {again:?}");
    let twice = Inventory::builder(&a, "twice").servers([a.clone()]).stock(3).homes(2);
    assert!(matches!(twice.create().await.map(drop), Err(Error::Invalid(_))));
}

/// One home is lost in part; the others say so and do not take its place.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_lost_home_is_not_made_again() {
    let Some(cluster) = ClusterServers::with(3, 0, &[]) else { return };
    let dlock = client(&cluster.url()).await;
    let build = || Inventory::builder(&dlock, "sale").stock(60).homes(3);
    let sale = build().create().await.unwrap();
    let ids = ids(&sale, 3, 1).await;
    let node =
        cluster.nodes.iter().find(|node| homes_at(node).iter().any(|key| key.contains("home2")));
    assert_eq!(node.unwrap().cli(&["FLUSHALL"]), "OK");
    let opened = Inventory::open(&client(&cluster.url()).await, "sale").await.map(drop);
    assert!(matches!(opened, Err(Error::Lost(_))), "{opened:?}");
    let created = build().create().await.map(drop);
    assert!(matches!(created, Err(Error::Lost(_))), "{created:?}");
    let lost = sale.deduct(1).operation(&ids[&2]).send().await.map(drop);
    assert!(matches!(lost, Err(Error::Lost(_))), "{lost:?}");
    taken(sale.deduct(1).operation(&ids[&0]).send().await.unwrap());
    taken(sale.deduct(1).operation(&ids[&1]).send().await.unwrap());
}

/// Whoever dies while a sale is made leaves nothing that cannot be finished.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_interrupted_creation_goes_on() {
    let Some(servers) = independent(3) else { return };
    let clients = clients(&servers).await;
    let build = || {
        let sale = Inventory::builder(&clients[0], "sale").servers(clients[1..].iter().cloned());
        sale.stock(31).homes(3)
    };
    // The identities are made first, and then the homes: the last server fails in between.
    let other = Inventory::builder(&clients[0], "other").servers(clients[1..].iter().cloned());
    drop(other.stock(3).homes(3).create().await.unwrap());
    servers[2].pause();
    let failed = build().create().await.map(drop);
    assert!(failed.is_err(), "{failed:?}");
    servers[2].resume();
    let opened = Inventory::open_on(&clients, "sale", None).await.map(drop);
    assert!(matches!(opened, Err(Error::NotFound(_))), "{opened:?}");
    eventually("the server is back", || async { build().create().await.is_ok() }).await;
    let sale = build().create().await.unwrap();
    assert_eq!(counts(&sale).await, (31, 0, 0));
    let opened = Inventory::open_on(&clients, "sale", sale.creation_id()).await.unwrap();
    taken(opened.deduct(31).operation("all").send().await.unwrap());
    clean_audit(&sale).await;
}

/// The others go on selling what they have; nothing is sold twice, nothing is "sold out".
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_server_fails_and_the_others_go_on() {
    let durable = ["--appendonly", "yes", "--appendfsync", "always"];
    let Some(mut servers) = (0..3).map(|_| RedisServer::with(&durable)).collect::<Option<Vec<_>>>()
    else {
        return;
    };
    let clients = clients(&servers).await;
    let sale = sale_on(&clients, 60, 3).await.sold_out_for(Duration::ZERO);
    let ids = ids(&sale, 3, 1).await;
    let sold = counts(&sale).await.2;
    servers[1].kill();
    let down = sale.deduct(1).operation(&ids[&1]).send().await.map(drop);
    assert!(
        matches!(down, Err(Error::Store(_) | Error::Unknown(_))),
        "its ids have no other home: {down:?}"
    );
    let unknown = sale.resolve("never-sent").await.map(drop);
    assert!(matches!(unknown, Err(Error::OutOfReach { .. })), "{unknown:?}");
    // The two that are left sell what they have, also what the other one of them has.
    let mut sold_now = 0;
    let last = loop {
        let id = format!("after-{sold_now}");
        let deduct = sale.deduct(1).operation(&id);
        match deduct.send().await {
            Ok(Deduction::Taken(_)) => sold_now += 1,
            Err(Error::Store(_) | Error::Unknown(_)) => {
                // It belongs to the home that is down: the next id.
                let other = sale.deduct(1).operation(format!("{id}-other")).send().await;
                match other {
                    Ok(Deduction::Taken(_)) => sold_now += 1,
                    Err(Error::Store(_) | Error::Unknown(_)) => {
                        taken_any(&sale, &mut sold_now).await;
                    }
                    other => break other,
                }
            }
            other => break other,
        }
    };
    let Err(Error::OutOfReach { homes }) = &last else { panic!("{last:?}") };
    assert_eq!(homes, &[1], "the rest is out of reach");
    assert!(last.unwrap_err().is_retryable());
    // Another process opens the sale meanwhile.
    let elsewhere = Inventory::open_on(&clients, "sale", sale.creation_id()).await.unwrap();
    taken(elsewhere.deduct(1).operation(&ids[&0]).send().await.unwrap());

    servers[1].restart();
    eventually("the server is back", || async { sale.stock().await.is_ok() }).await;
    let (available, _, counted) = counts(&sale).await;
    // An answer that was not heard may have been an effect of the killed server.
    assert!(counted >= sold + sold_now && available > 0, "{available} {counted}");
    taken(sale.deduct(available).operation("the rest").send().await.unwrap());
    assert!(is_sold_out(&sale.deduct(1).send().await.unwrap()));
    assert_eq!(counts(&sale).await, (0, 0, 60));
    clean_audit(&sale).await;
}

/// Buys one unit under ids until one belongs to a home that answers.
async fn taken_any(sale: &Inventory, sold: &mut u64) {
    for number in 0..20 {
        let id = format!("any-{sold}-{number}");
        if let Ok(Deduction::Taken(_)) = sale.deduct(1).operation(&id).send().await {
            *sold += 1;
            return;
        }
    }
}

/// Saves all keys of a server under other names, or brings them back.
fn copy(server: &RedisServer, from: &str, to: &str) {
    let keys = |prefix: &str| -> Vec<String> {
        let keys = server.cli(&["KEYS", &format!("{prefix}dlock:*")]);
        keys.lines().filter(|key| !key.is_empty()).map(str::to_owned).collect()
    };
    for key in keys(to) {
        server.cli(&["DEL", &key]);
    }
    for key in keys(from) {
        let name = key.strip_prefix(from).unwrap();
        assert_eq!(server.cli(&["COPY", &key, &format!("{to}{name}")]), "1", "{key}");
    }
}

/// A home goes back to before or after each step of a move: the audit says exactly what is
/// missing, and what is in transit is received again.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_home_that_went_back_is_found_out() {
    let Some(servers) = independent(2) else { return };
    let made = sale_on(&clients(&servers).await, 20, 2).await;
    // A process that has seen nothing: what it knows is what the homes know.
    let open = async || {
        let clients = clients(&servers).await;
        Inventory::open_on(&clients, "sale", made.creation_id()).await.unwrap()
    };
    for server in &servers {
        copy(server, "", "saved:");
    }
    // All units are gathered in the first home: the other one sends what it has.
    let mut number = 0;
    let sale = loop {
        let (sale, id) = (open().await, format!("all-{number}"));
        if taken(sale.deduct(20).operation(&id).send().await.unwrap()).home == 0 {
            break sale;
        }
        for server in &servers {
            copy(server, "saved:", ""); // it was the other home: the next id
        }
        number += 1;
    };
    assert_eq!(counts(&sale).await, (0, 0, 20));
    clean_audit(&sale).await;
    let sent = sent_by(&sale, 1).await;
    assert_eq!(sent, 10);

    // The sender goes back to before the sending: it has the units too.
    copy(&servers[1], "", "after:");
    copy(&servers[1], "saved:", "");
    let audit = open().await.audit().await.unwrap();
    let said: Vec<&str> = audit.disagreements.iter().map(|it| &*it.what).collect();
    let lost = format!("lost the sending of {sent} units, and has them too");
    assert!(said.iter().any(|what| what.contains("home 1") && what.contains(&lost)), "{said:#?}");
    assert!(said.iter().any(|what| what.contains("home 1 went back from change")), "{said:#?}");
    assert_eq!(said.len(), 2, "and nothing else: {said:#?}");
    // Whoever looks next takes them out again: they are not sold twice.
    let elsewhere = open().await.sold_out_for(Duration::ZERO);
    elsewhere.rebalance().await.unwrap();
    assert!(is_sold_out(&elsewhere.deduct(1).send().await.unwrap()));
    let audit = elsewhere.audit().await.unwrap();
    let said: Vec<&str> = audit.disagreements.iter().map(|it| &*it.what).collect();
    assert!(!said.iter().any(|what| what.contains("lost the sending")), "{said:#?}");

    // The receiver goes back to before the receipt: the units are in transit again, and so
    // are the orders gone that it had since.
    copy(&servers[1], "after:", "");
    copy(&servers[0], "saved:", "");
    let elsewhere = open().await;
    let stock = elsewhere.stock().await.unwrap();
    assert_eq!((stock.in_transit, stock.sold), (sent, 0));
    let audit = elsewhere.audit().await.unwrap();
    assert_eq!((audit.in_transit, audit.disagreements.len()), (sent, 0), "{audit:#?}");
    let mine = sale.audit().await.unwrap();
    let said: Vec<&str> = mine.disagreements.iter().map(|it| &*it.what).collect();
    assert!(said.iter().any(|what| what.contains("home 0 went back from change")), "{said:#?}");
    taken(elsewhere.deduct(20).operation("all-again").send().await.unwrap());
    assert_eq!(elsewhere.stock().await.unwrap().in_transit, 0);
}

/// All that a home ever sent, by its journal.
async fn sent_by(sale: &Inventory, home: u32) -> u64 {
    let entries = sale.journal(0).await.unwrap();
    let sent =
        entries.iter().filter(|it| it.home == home && it.effect == dlock_segment::Effect::Sent);
    sent.map(|entry| entry.quantity).sum()
}

/// A slot is held half-migrated while its home sells: no script fails half-way.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_slot_moves_while_its_home_sells() {
    let Some(cluster) = ClusterServers::with(3, 0, &[]) else { return };
    let dlock = client(&cluster.url()).await;
    let sale = Inventory::builder(&dlock, "sale").stock(100_000).homes(3).journal(1_000_000);
    let sale = sale.create().await.unwrap();
    let home = homes_at(&cluster.nodes[0]).remove(0);
    let slot = cluster.slot_of(&home);
    let buyers: Vec<_> = (0..8)
        .map(|task| {
            let sale = sale.clone();
            tokio::spawn(async move {
                let mut sold = 0_u64;
                for number in 0..400 {
                    let id = format!("o-{task}-{number}");
                    loop {
                        match sale.deduct(1).operation(&id).send().await {
                            Ok(Deduction::Taken(_)) => break sold += 1,
                            // Some keys are here and some there: for a moment nobody can.
                            Err(error) if error.is_retryable() => {}
                            other => panic!("{other:?}"),
                        }
                    }
                    if number % 40 == 0 {
                        tokio::time::sleep(Duration::from_millis(20)).await;
                    }
                }
                sold
            })
        })
        .collect();
    let moving = cluster.begin_move(slot, 1);
    // All keys exist, so the old node serves all of them for as long as it takes.
    tokio::time::sleep(Duration::from_millis(1_500)).await;
    let entries = sale.journal(0).await.unwrap();
    assert!(!entries.is_empty(), "it sells meanwhile");
    moving.move_keys(4);
    tokio::time::sleep(Duration::from_millis(100)).await;
    moving.move_keys(usize::MAX);
    moving.finish();
    let mut sold = 0;
    for buyer in buyers {
        sold += buyer.await.unwrap();
    }
    assert_eq!(sold, 3_200);
    assert_eq!(counts(&sale).await, (96_800, 0, 3_200));
    clean_audit(&sale).await;
    let mut cursor = dlock_segment::JournalCursor::default();
    let mut journalled = 0;
    loop {
        let entries = sale.journal(&cursor).await.unwrap();
        if entries.is_empty() {
            break;
        }
        for entry in &entries {
            assert_eq!(entry.sequence, cursor.sequence(entry.home) + 1);
            cursor.advance(entry);
            journalled += entry.quantity;
        }
    }
    assert_eq!(journalled, 3_200, "the journal leads to the counts");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_routing_is_settled_at_the_creation() {
    let dlock = dlock::testing::client();
    let build = |name: &'static str| Inventory::builder(&dlock, name).stock(60).homes(4);
    let limited = build("a").per_buyer(2).create().await.map(drop);
    assert!(matches!(limited, Err(Error::Invalid(_))), "{limited:?}");
    let by_id = build("a").create().await.unwrap();
    assert_eq!(by_id.routing(), Some(Routing::Operation));
    assert!(matches!(by_id.limit_per_buyer(2).await, Err(Error::Invalid(_))));
    let other = build("a").routed_by(Routing::Buyer).create().await.map(drop);
    assert!(matches!(other, Err(Error::Conflict(_))), "{other:?}");

    let sale = build("b").routed_by(Routing::Buyer).per_buyer(3).create().await.unwrap();
    // All that a buyer has is in one home, so the limit is exact.
    let first = taken(sale.deduct(1).operation("o-1").buyer("u").send().await.unwrap());
    let second = taken(sale.deduct(2).operation("o-2").buyer("u").send().await.unwrap());
    assert_eq!(first.home, second.home);
    let third = sale.deduct(1).operation("o-3").buyer("u").send().await.unwrap();
    assert_eq!(third, Deduction::LimitReached);
    // The same id of a buyer in another home is another operation; a bare id is then not clear.
    let mut other = 0;
    let there = loop {
        other += 1;
        let buyer = format!("v-{other}");
        match sale.deduct(1).operation("o-1").buyer(&buyer).send().await {
            Ok(Deduction::Taken(receipt)) => break receipt,
            Err(Error::Conflict(_)) => {} // it shares the home
            other => panic!("{other:?}"),
        }
    };
    assert_ne!(there.home, first.home);
    let unclear = sale.refund("o-1").send().await;
    assert!(matches!(unclear, Err(Error::Conflict(_))), "{unclear:?}");
    let _ = sale.refund("o-1").buyer("u").send().await.unwrap();
    let _ = sale.refund("o-1").receipt(&there).send().await.unwrap();
    assert_eq!(counts(&sale).await, (58, 0, 2));
    assert!(matches!(sale.resolve("o-2").await.unwrap(), Resolved::Taken(_)), "a bare id is found");
    clean_audit(&sale).await;
}

/// Pause and window reach all homes; a home that was away gets them from whoever looks next.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_pause_reaches_a_home_that_was_away() {
    let Some(servers) = independent(2) else { return };
    let clients = clients(&servers).await;
    let sale = sale_on(&clients, 20, 2).await;
    servers[1].pause();
    let paused = sale.pause().await.map(drop);
    assert!(matches!(&paused, Err(Error::OutOfReach { homes }) if homes == &[1]), "{paused:?}");
    servers[1].resume();
    eventually("whoever looks brings it along", || async {
        sale.rebalance().await.is_ok() && sale.stock().await.is_ok_and(|stock| stock.paused)
    })
    .await;
    for id in 0..12 {
        assert_eq!(
            sale.deduct(1).operation(format!("n-{id}")).send().await.unwrap(),
            Deduction::Paused
        );
    }
    sale.resume().await.unwrap();
    taken(sale.deduct(1).operation("again").send().await.unwrap());
    clean_audit(&sale).await;
}
