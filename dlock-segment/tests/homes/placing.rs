//! Where the homes are, and how they are made.

use std::time::{Duration, Instant};

use dlock::Dlock;
use dlock_segment::{Deduction, Error, Inventory};
use dlock_testkit::redis::RedisServer;
use dlock_testkit::topology::{ClusterServers, independent};

use crate::common::{clean_audit, counts, eventually, taken};
use crate::{client, clients, homes_at, ids, sale_on};

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
    let began = Instant::now();
    for number in 0..900 {
        taken(sale.deduct(1).operation(format!("o-{number}")).send().await.unwrap());
    }
    let after: Vec<i64> = cluster.nodes.iter().map(calls).collect();
    let made: Vec<i64> = after.iter().zip(before).map(|(after, before)| after - before).collect();
    // One round trip for each deduction, and some for the balancer, which looks about once a
    // second: twice at each of the homes, under a lock.
    let looks = 2 + began.elapsed().as_secs() as i64;
    let each = 240..=380 + 8 * looks;
    assert!(made.iter().all(|made| each.contains(made)), "{made:?}");
    assert!(made.iter().sum::<i64>() <= 900 + 20 * looks, "{made:?} and {looks} looks");
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
