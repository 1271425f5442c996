//! Rows 4, 5 and 8 to 10 of the list of faults, for inventories. Row 11 is the soak test of
//! `dlock-testkit`.

#![allow(clippy::unwrap_used, reason = "a failed step fails the test")]

mod common;

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::task::{Context, Waker};
use std::time::Duration;

use common::{Place, clean_audit, counts, eventually, held, sell_in_every_way, state_of, taken};
use dlock::{Dlock, ErrorKind};
use dlock_segment::{Deduction, Error, HoldState, Inventory, Reservation, Resolved};
use dlock_testkit::proxy::{Once, Proxy, Way};
use dlock_testkit::redis::RedisServer;
use dlock_testkit::topology::ClusterServers;

const CALL: Duration = Duration::from_millis(500);

/// An inventory behind a proxy, and a handle without the proxy.
struct Faulty {
    proxy: Proxy,
    sale: Inventory,
    direct: Inventory,
    _server: RedisServer,
}

async fn faulty(stock: u64) -> Option<Faulty> {
    let server = RedisServer::start()?;
    let proxy = Proxy::start(server.port()).await;
    let client = Dlock::builder().url(&proxy.url()).call_timeout(CALL);
    let behind = client.connect().await.expect("a client");
    let direct = Dlock::connect(&server.url()).await.expect("a client");
    let direct = Inventory::builder(&direct, "sale").stock(stock).segments(4).create().await;
    let sale = Inventory::open(&behind, "sale").await.expect("a sale");
    Some(Faulty { proxy, sale, direct: direct.expect("a sale"), _server: server })
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn row_04_a_lost_reply_is_asked_for_again() {
    let Some(it) = faulty(10).await else { return };
    it.proxy.once(Once::LoseReply, "EVALSHA");
    let receipt = taken(it.sale.deduct(2).operation("o").send().await.unwrap());
    assert_eq!(it.proxy.done(), 1, "the reply was lost");
    assert_eq!(counts(&it.direct).await, (8, 0, 2), "and the units taken once");
    assert_eq!(taken(it.direct.deduct(2).operation("o").send().await.unwrap()), receipt);

    it.proxy.once(Once::DuplicateRequest, "EVALSHA");
    eventually("it answers again", async || {
        it.sale.deduct(1).operation("twice").send().await.is_ok()
    })
    .await;
    assert_eq!(it.proxy.done(), 2);
    assert_eq!(counts(&it.direct).await, (7, 0, 3), "delivered twice, taken once");

    // Without an id nobody can find out.
    it.proxy.once(Once::LoseReply, "EVALSHA");
    let unknown = it.sale.deduct(1).send().await;
    assert!(matches!(unknown, Err(Error::Unknown(None))), "{unknown:?}");
    assert_eq!(counts(&it.direct).await, (6, 0, 4), "it was applied");
    clean_audit(&it.direct).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn row_04_unknown_is_resolved() {
    let Some(it) = faulty(10).await else { return };
    it.sale.stock().await.unwrap(); // the server has the script
    it.proxy.stall(&[Way::ToClient]); // applied, and nobody hears
    let error = it.sale.deduct(3).operation("applied").send().await.unwrap_err();
    let Error::Unknown(Some(operation)) = &error else { panic!("{error}") };
    assert!(error.is_retryable() && !format!("{error:?}{error}").contains("applied-id"));
    assert_eq!(operation.as_str(), "applied");
    let resolved = it.direct.resolve(operation).await.unwrap();
    assert!(matches!(resolved, Resolved::Taken(receipt) if receipt.quantity == 3));
    it.proxy.heal();
    it.proxy.cut();

    // The network delays the request. It is resolved as not applied, so it comes too late.
    eventually("it answers again", async || it.sale.stock().await.is_ok()).await;
    it.proxy.stall(&[Way::ToServer]);
    let error = it.sale.deduct(3).operation("late").send().await.unwrap_err();
    assert!(matches!(error, Error::Unknown(Some(_)) | Error::Store(_)), "{error:?}");
    assert_eq!(it.direct.resolve("late").await.unwrap(), Resolved::NotApplied);
    it.proxy.heal();
    eventually("it answers again", async || it.sale.stock().await.is_ok()).await;
    assert_eq!(it.sale.deduct(3).operation("late").send().await.unwrap(), Deduction::Refused);
    assert_eq!(counts(&it.direct).await, (7, 0, 3));
    clean_audit(&it.direct).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn row_05_dropped_at_any_await() {
    let Some(place) = Place::redis().await else { return };
    let sale = place.sale(100_000, 4).await;
    let mut taken = 0;
    for polls in 0..400_u32 {
        let id = format!("o-{polls}");
        let mut sending = Box::pin(sale.deduct(1).operation(&id).send());
        for _ in 0..polls % 6 {
            let mut context = Context::from_waker(Waker::noop());
            if sending.as_mut().poll(&mut context).is_ready() {
                break;
            }
            tokio::time::sleep(Duration::from_micros(u64::from(polls * 3))).await;
        }
        drop(sending);
        let was_taken = match sale.resolve(&id).await.unwrap() {
            Resolved::Taken(_) => 1,
            Resolved::NotApplied => 0,
            other => panic!("{other:?}"),
        };
        assert!(polls % 6 != 0 || was_taken == 0, "never polled, never sent");
        taken += was_taken;
    }
    assert!(taken > 0, "some were sent");
    assert_eq!(counts(&sale).await.2, taken);
    clean_audit(&sale).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn row_08_cancel_races_expiry() {
    let Some(place) = Place::redis().await else { return };
    let sale = place.sale(50, 3).await;
    let elsewhere = Inventory::open(&place.another().await, "sale").await.unwrap();
    for number in 0..60 {
        let id = format!("r-{number}");
        let lasts = Duration::from_millis(number % 4 + 1);
        let held = sale.reserve(1).operation(&id).expires_in(lasts).send().await.unwrap();
        assert!(matches!(held, Reservation::Held(_)));
        tokio::time::sleep(Duration::from_millis(number % 3)).await;
        let (one, two) = (sale.reservation(&id), elsewhere.reservation(&id));
        let settle = async |number: u64| match number % 2 {
            0 => one.cancel().await,
            _ => Ok(state_of(one.confirm().await)),
        };
        let (first, second) = tokio::join!(settle(number), two.cancel());
        let last = one.get().await.unwrap().state;
        assert_eq!((first.unwrap(), second.unwrap()), (last, last), "one winner");
        assert_ne!(last, HoldState::Open);
    }
    let audit = clean_audit(&sale).await;
    assert_eq!(audit.reserved, 0);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn row_09_forgotten_scripts_and_a_restart() {
    let options = ["--appendonly", "yes", "--appendfsync", "always"];
    let Some(mut server) = RedisServer::with(&options) else { return };
    let dlock = Dlock::connect(&server.url()).await.unwrap();
    let sale = Inventory::builder(&dlock, "sale").stock(100_000).segments(4).create().await;
    let sale = sale.unwrap();
    let stop = Arc::new(AtomicBool::new(false));
    let buying = tokio::spawn({
        let (sale, stop) = (sale.clone(), stop.clone());
        async move {
            let mut number = 0;
            while !stop.load(Ordering::Relaxed) {
                taken(sale.deduct(1).operation(format!("o-{number}")).send().await.unwrap());
                number += 1;
            }
            number
        }
    });
    for _ in 0..50 {
        server.cli(&["SCRIPT", "FLUSH"]);
    }
    stop.store(true, Ordering::Relaxed);
    let sold = buying.await.unwrap();
    assert_eq!(counts(&sale).await.2, sold);
    let health = sale.health().await;
    assert_eq!(health.at_risk(), None, "{health:?}");

    // A killed server has everything that was answered, and no scripts.
    tokio::task::block_in_place(|| server.restart());
    eventually("it answers again", async || sale.stock().await.is_ok()).await;
    assert_eq!(counts(&sale).await.2, sold);
    let again = taken(sale.deduct(1).operation("o-0").send().await.unwrap());
    assert_eq!(again.quantity, 1);
    assert_eq!(counts(&sale).await.2, sold);
    clean_audit(&sale).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn row_10_out_of_memory() {
    let Some(place) = Place::redis().await else { return };
    let server = place.server.as_ref().expect("a server");
    let sale = place.sale(1_000, 4).await;
    taken(sale.deduct(1).operation("before").send().await.unwrap());
    server.cli(&["CONFIG", "SET", "maxmemory", "1"]);
    let error = sale.deduct(1).operation("o").send().await.unwrap_err();
    assert!(
        matches!(&error, Error::Store(error) if error.kind() == ErrorKind::Unavailable),
        "{error}"
    );
    assert!(error.to_string().contains("out of memory"), "{error}");
    server.cli(&["CONFIG", "SET", "maxmemory", "0"]);
    assert_eq!(counts(&sale).await, (999, 0, 1), "nothing was applied");
    taken(sale.deduct(1).operation("o").send().await.unwrap());
    clean_audit(&sale).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn row_10_stock_that_is_gone_is_lost() {
    let Some(place) = Place::redis().await else { return };
    let server = place.server.as_ref().expect("a server");
    let sale = place.sale(1_000, 4).await;
    taken(sale.deduct(1).operation("before").send().await.unwrap());
    server.cli(&["FLUSHALL"]);
    for result in [
        sale.deduct(1).send().await.map(drop),
        sale.deduct(1).operation("o").send().await.map(drop),
        sale.restock(5).send().await.map(drop),
        sale.refund("before").send().await.map(drop),
        sale.resize(3).await.map(drop),
        sale.stock().await.map(drop),
        sale.audit().await.map(drop),
    ] {
        assert!(matches!(result, Err(Error::Lost(_))), "{result:?}");
    }
    assert_eq!(server.cli(&["DBSIZE"]), "0", "nothing is made by accident");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn persistence_is_reported() {
    let Some(place) = Place::redis().await else { return };
    let server = place.server.as_ref().expect("a server");
    let sale = place.sale(10, 1).await;
    let health = sale.health().await;
    assert_eq!(health.durability.append_only, Some(false));
    assert!(health.is_ok() && health.at_risk().is_some());
    server.cli(&["CONFIG", "SET", "appendonly", "yes"]);
    let health = sale.health().await;
    assert_eq!(health.durability.append_only, Some(true));
    assert_eq!(health.durability.fsync.as_deref(), Some("everysec"));
    assert_eq!(health.at_risk(), Some("a crash may lose about the last second of changes"));
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn tampering_is_named_by_the_audit() {
    let Some(place) = Place::redis().await else { return };
    let server = place.server.as_ref().expect("a server");
    let sale = place.sale(100, 4).await;
    for number in 0..5 {
        taken(sale.deduct(2).operation(format!("o-{number}")).send().await.unwrap());
        let hold = sale.reserve(1).operation(format!("r-{number}")).send().await.unwrap();
        assert!(matches!(hold, Reservation::Held(_)));
    }
    clean_audit(&sale).await;
    let records = server.cli(&["KEYS", "*:io*"]);
    server.cli(&["HSET", &records, "o-3", "garbage"]);
    let audit = sale.audit().await.unwrap();
    let named = |audit: &dlock_segment::Audit, id: &str| {
        audit.disagreements.iter().any(|it| it.operation.as_deref() == Some(id))
    };
    assert!(named(&audit, "o-3"), "{audit:#?}");
    server.cli(&["HDEL", &records, "o-3"]);
    assert!(!sale.audit().await.unwrap().is_clean(), "an effect without a record");
    server.cli(&["HDEL", &server.cli(&["KEYS", "*:ih"]), "r-1"]);
    let audit = sale.audit().await.unwrap();
    assert!(audit.disagreements.iter().any(|it| it.what.contains("reservations have")));
}

/// The rights that the documents list are enough.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_documented_rights_suffice() {
    let Some(server) = RedisServer::start() else { return };
    let rights = concat!(
        include_str!("../../docs/redis.acl"),
        include_str!("../../docs/redis-inventory.acl")
    );
    let rights = rights.lines().filter(|line| !line.starts_with('#'));
    let mut command = vec!["ACL", "SETUSER", "seller", "on", ">horse"];
    command.extend(rights.flat_map(str::split_whitespace));
    assert_eq!(server.cli(&command), "OK");
    let url = format!("redis://seller:horse@127.0.0.1:{}", server.port());
    let dlock = Dlock::connect(&url).await.unwrap();
    let place = Place::alone(dlock, None, 1);
    let sale = Inventory::builder(&place.dlock, "sale").stock(10).segments(2).journal(100);
    let sale = sale.create().await.unwrap();
    sell_in_every_way(&sale).await;
    assert!(!sale.journal(0).await.unwrap().is_empty());
    assert_eq!(sale.health().await.durability.append_only, Some(false));
    clean_audit(&sale).await;
    assert!(sale.remove().await.unwrap());
}

/// Ten thousand inventories are open in one process: an idle one costs almost nothing.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn many_sales_are_open_in_one_process() {
    let Some(place) = Place::redis().await else { return };
    let mut making = tokio::task::JoinSet::new();
    let mut sales = Vec::new();
    for number in 0..10_000 {
        if making.len() >= 100 {
            let made = making.join_next().await.expect("some are being made");
            sales.push(made.expect("no panic"));
        }
        let dlock = place.dlock.clone();
        making.spawn(async move {
            let name = format!("sale-{number}");
            let sale = Inventory::builder(&dlock, name).stock(2).create().await.expect("a sale");
            taken(sale.deduct(1).operation("o").send().await.expect("a unit"));
            sale
        });
    }
    while let Some(sale) = making.join_next().await {
        sales.push(sale.expect("no panic"));
    }
    for sale in sales.iter().step_by(997) {
        assert_eq!(counts(sale).await, (1, 0, 1));
    }
}

/// A missing right is reported before anything is written, not half way.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_missing_right_is_told_at_open() {
    let Some(place) = Place::redis().await else { return };
    let server = place.server.as_ref().expect("a server");
    let version = server.cli(&["INFO", "server"]);
    if version.contains("redis_version:6.") {
        return; // it cannot tell
    }
    place.sale(10, 2).await;
    for right in ["pexpireat", "xadd", "zadd", "hset", "bitfield"] {
        let without = format!("-{right}");
        let user = ["ACL", "SETUSER", "seller", "reset", "on", ">horse", "~*", "&*", "+@all"];
        server.cli(&[&user[..], &[without.as_str()]].concat());
        let url = format!("redis://seller:horse@127.0.0.1:{}", server.port());
        let dlock = Dlock::connect(&url).await.unwrap();
        for result in [
            Inventory::open(&dlock, "sale").await.map(drop),
            Inventory::builder(&dlock, "another").stock(1).create().await.map(drop),
        ] {
            let Err(Error::Store(error)) = result else { panic!("{right}: {result:?}") };
            assert_eq!(error.kind(), ErrorKind::Denied, "{right}: {error}");
        }
    }
    assert_eq!(server.cli(&["EXISTS", "dlock:2:{default:another}:i"]), "0", "nothing was made");
}

/// Requests that free memory work when the server has none left.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn row_10_reservations_end_without_memory() {
    let Some(place) = Place::redis().await else { return };
    let server = place.server.as_ref().expect("a server");
    let sale = place.sale(10, 4).await;
    for id in ["confirmed", "cancelled", "expired"] {
        let lasts = Duration::from_millis(if id == "expired" { 1 } else { 600_000 });
        held(sale.reserve(1).operation(id).expires_in(lasts).send().await.unwrap());
    }
    server.cli(&["CONFIG", "SET", "maxmemory", "1"]);
    assert_eq!(state_of(sale.reservation("confirmed").confirm().await), HoldState::Confirmed);
    assert_eq!(sale.reservation("cancelled").cancel().await.unwrap(), HoldState::Cancelled);
    tokio::time::sleep(Duration::from_millis(5)).await;
    assert_eq!(counts(&sale).await, (9, 0, 1));
    assert!(matches!(sale.deduct(1).send().await, Err(Error::Store(_))), "takes nothing new");
    server.cli(&["CONFIG", "SET", "maxmemory", "0"]);
    clean_audit(&sale).await;
}

/// A record that cannot be read does not affect other requests.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_unreadable_record_concerns_its_operation_alone() {
    let Some(place) = Place::redis().await else { return };
    let server = place.server.as_ref().expect("a server");
    let sale = place.sale(10, 2).await;
    taken(sale.deduct(1).operation("sold").send().await.unwrap());
    let lasts = Duration::from_millis(1);
    held(sale.reserve(1).operation("held").expires_in(lasts).send().await.unwrap());
    server.cli(&["HSET", &server.cli(&["KEYS", "*:io*"]), "sold", "future words"]);
    server.cli(&["HSET", &server.cli(&["KEYS", "*:ih"]), "held", "future words"]);
    tokio::time::sleep(Duration::from_millis(5)).await;
    // The formats are almost valid.
    let held = server.cli(&["KEYS", "*:ih"]);
    for (number, record) in [
        "z 1 0 0 1 0 0:1 ",
        "t 1 5 0 1 0 0:1 ",
        "t 2 0 0 1 0 0:1 ",
        "t 1 0 7 1 0 0:1 ",
        "t 99999999999999999999 0 0 1 0 0:1 ",
        "t 1 0 0 1 0 abc ",
        "h 1 0 0 1 1 999:1 ",
    ]
    .into_iter()
    .enumerate()
    {
        let id = format!("odd-{number}");
        server.cli(&["HSET", &held, &id, record]);
        server.cli(&["ZADD", &held.replace(":ih", ":ix"), "1", &id]);
        for result in [
            sale.reservation(&id).get().await.map(drop),
            sale.reservation(&id).confirm().await.map(drop),
            sale.refund(&id).send().await.map(drop),
            sale.deduct(1).operation(&id).send().await.map(drop),
        ] {
            let Err(Error::Conflict(what)) = &result else { panic!("{record}: {result:?}") };
            assert!(what.contains("cannot be read"), "{record}: {what}");
        }
        assert_eq!(counts(&sale).await, (8, 1, 1), "{record}");
        server.cli(&["HDEL", &held, &id]);
    }
    let all = tokio::join!(
        sale.deduct(1).operation("sold").send(),
        sale.deduct(1).operation("new").send(),
        sale.deduct(1).send(),
        sale.refund("sold").send(),
        sale.resolve("held"),
        sale.restock(1).send(),
    );
    let unreadable = |result: Result<(), Error>| {
        let error = result.unwrap_err();
        assert!(matches!(&error, Error::Conflict(what) if what.contains("cannot be read")));
    };
    unreadable(all.0.map(drop));
    unreadable(all.3.map(drop));
    unreadable(all.4.map(drop));
    taken(all.1.unwrap());
    taken(all.2.unwrap());
    all.5.unwrap();
    assert_eq!(counts(&sale).await, (7, 1, 3), "the hold stays until somebody looks");
    let audit = sale.audit().await.unwrap();
    for id in ["sold", "held"] {
        let named = audit.disagreements.iter().any(|it| it.operation.as_deref() == Some(id));
        assert!(named, "{audit:#?}");
    }
}

/// All keys of an inventory are declared and exist, so a cluster that moves its slot refuses
/// nothing half-way.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn stock_in_a_cluster_survives_a_move_of_its_slot() {
    let Some(cluster) = ClusterServers::with(3, 0, &[]) else { return };
    let client = Dlock::connect(&cluster.url()).await.expect("a client");
    let sale = Inventory::builder(&client, "sale").stock(10).journal(100);
    let sale = sale.retention(Duration::from_millis(30)).create().await.expect("a sale");
    let slot = cluster.slot_of("dlock:2:{default:sale}:i");
    for round in 0..3 {
        let moving = cluster.begin_move(slot, (cluster.primary_of(slot) + 1) % 3);
        taken(sale.deduct(1).operation(format!("a-{round}")).send().await.unwrap());
        tokio::time::sleep(Duration::from_millis(70)).await; // another generation
        taken(sale.deduct(1).operation(format!("b-{round}")).send().await.unwrap());
        moving.move_keys(usize::MAX);
        taken(sale.deduct(1).operation(format!("c-{round}")).send().await.unwrap());
        moving.finish();
    }
    assert_eq!(counts(&sale).await, (1, 0, 9));
    assert_eq!(sale.journal(0).await.unwrap().len(), 9);
    clean_audit(&sale).await;
}
