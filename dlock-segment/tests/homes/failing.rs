//! A server of some homes is away, or comes back without its last changes.

use std::time::{Duration, Instant};

use dlock_segment::{Deduction, Error, Inventory};
use dlock_testkit::redis::RedisServer;
use dlock_testkit::topology::independent;

use crate::common::{clean_audit, counts, eventually, is_sold_out, taken};
use crate::{clients, ids, sale_on};

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
    assert!(
        said.iter().any(|what| what.contains("home 1 lost data: it is at change")),
        "{said:#?}"
    );
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
    assert!(
        said.iter().any(|what| what.contains("home 0 lost data: it is at change")),
        "{said:#?}"
    );
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

/// Pause and window reach all homes; a home that was away gets them from whoever looks next.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_pause_reaches_a_home_that_was_away() {
    let Some(servers) = independent(2) else { return };
    let clients = clients(&servers).await;
    let sale = sale_on(&clients, 20_000, 2).await;
    servers[1].pause();
    let paused = sale.pause().await.map(drop);
    assert!(matches!(&paused, Err(Error::OutOfReach { homes }) if homes == &[1]), "{paused:?}");
    servers[1].resume();
    let mut round = 0;
    eventually("whoever looks brings it along", || {
        round += 1;
        let (sale, round) = (sale.clone(), round);
        async move {
            let _ = sale.rebalance().await; // it looks at the homes that answer
            for id in 0..12 {
                let deduct = sale.deduct(1).operation(format!("n-{round}-{id}"));
                if !matches!(deduct.send().await, Ok(Deduction::Paused)) {
                    return false;
                }
            }
            true
        }
    })
    .await;
    sale.resume().await.unwrap();
    taken(sale.deduct(1).operation("again").send().await.unwrap());
    clean_audit(&sale).await;
}

/// A server hangs, without refusing anything. Others bring their units to a home that is dry as
/// if it were not there, and what they do not have is out of reach, soon.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_server_that_hangs_costs_the_others_nothing() {
    let Some(servers) = independent(3) else { return };
    let clients = clients(&servers).await;
    let sale = sale_on(&clients, 30, 3).await.sold_out_for(Duration::ZERO);
    // Another sale with as many homes says which ids belong to the first home.
    let other = Inventory::builder(&clients[0], "other").servers(clients[1..].iter().cloned());
    let other = other.stock(10_000).homes(3).create().await.unwrap();
    let mut ids = Vec::new();
    for number in 0.. {
        let id = format!("o-{number}");
        if taken(other.deduct(1).operation(&id).send().await.unwrap()).home == 0 {
            ids.push(id);
        }
        if ids.len() == 24 {
            break;
        }
    }
    servers[1].pause();
    for (number, id) in ids.iter().enumerate() {
        let began = Instant::now();
        let answer = sale.deduct(1).operation(id).send().await;
        let took = began.elapsed();
        if number < 20 {
            assert!(matches!(answer, Ok(Deduction::Taken(_))), "{number}: {answer:?}");
            assert!(took < Duration::from_millis(1_000), "{number}: {took:?}");
        } else {
            let rest = matches!(&answer, Err(Error::OutOfReach { homes }) if homes == &[1]);
            assert!(rest, "{number}: {answer:?}");
            assert!(took < Duration::from_millis(2_500), "{number}: {took:?}");
        }
    }
    servers[1].resume();
    eventually("the server is back", async || {
        sale.deduct(1).operation(&ids[20]).send().await.is_ok()
    })
    .await;
    clean_audit(&sale).await;
}
