//! Deductions inside transactions of the caller.

use std::time::{Duration, Instant};

use dlock_segment::sql::{deduct_first_free_in, deduct_in};
use dlock_segment::{Deduction, Error, Inventory, Resolved};
use dlock_testkit::latencies::{Latencies, held_for};

use super::common::{Place, clean_audit, counts, is_sold_out, taken};
use super::shop::Shop;

pub(crate) async fn the_order_and_its_units_are_one<S: Shop>(place: &Place, shop: &S) {
    let sale = place.sale(5, 2).await;
    let mut tx = shop.begin().await;
    S::run(&mut tx, "INSERT INTO orders (units) VALUES (2)").await;
    let receipt = taken(deduct_in(&mut tx, &sale, 2).await.unwrap());
    assert_eq!((receipt.quantity, receipt.inventory), (2, sale.creation_id()));
    taken(deduct_in(&mut tx, &sale, 1).await.unwrap());
    S::roll_back(tx).await;
    assert_eq!(counts(&sale).await, (5, 0, 0), "neither");
    assert_eq!(shop.number("SELECT COUNT(*) FROM orders").await, 0);

    let mut tx = shop.begin().await;
    S::run(&mut tx, "INSERT INTO orders (units) VALUES (2)").await;
    taken(deduct_in(&mut tx, &sale, 2).await.unwrap());
    S::commit(tx).await.unwrap();
    assert_eq!(counts(&sale).await, (3, 0, 2), "both");
    assert_eq!(shop.number("SELECT COUNT(*) FROM orders").await, 1);

    let mut tx = shop.begin().await;
    let few = deduct_in(&mut tx, &sale, 4).await.unwrap();
    assert!(matches!(few, Deduction::NotEnough { available: 3, .. }), "{few:?}");
    taken(deduct_in(&mut tx, &sale, 3).await.unwrap());
    assert!(is_sold_out(&deduct_in(&mut tx, &sale, 1).await.unwrap()), "it sees its own");
    S::commit(tx).await.unwrap();
    assert!(is_sold_out(&sale.deduct(1).send().await.unwrap()));
    let mut tx = shop.begin().await;
    let zero = deduct_in(&mut tx, &sale, 0).await;
    assert!(matches!(zero, Err(Error::Invalid(_))), "{zero:?}");
    S::roll_back(tx).await;
    clean_audit(&sale).await;

    // What expires meanwhile is given back in the same transaction.
    let other = Inventory::builder(&place.dlock, "other").stock(600).create().await.unwrap();
    let short = Duration::from_millis(1);
    let holds = (0..600).map(|number| {
        let other = other.clone();
        async move {
            let id = format!("r-{number}");
            other.reserve(1).operation(id).expires_in(short).send().await.unwrap()
        }
    });
    let _ = futures_util::future::join_all(holds).await;
    tokio::time::sleep(Duration::from_millis(20)).await;
    let mut tx = shop.begin().await;
    taken(deduct_in(&mut tx, &other, 600).await.unwrap());
    S::commit(tx).await.unwrap();
    clean_audit(&other).await;

    // A sale that is gone, or that never was in this database.
    let handle = other.clone();
    assert!(other.remove().await.unwrap());
    let mut tx = shop.begin().await;
    let gone = deduct_in(&mut tx, &handle, 1).await;
    assert!(matches!(gone, Err(Error::NotFound(_) | Error::Lost(_))), "{gone:?}");
    S::roll_back(tx).await;
}

pub(crate) async fn an_id_has_its_effect_once<S: Shop>(place: &Place, shop: &S) {
    let sale = place.sale(10, 1).await;
    let mut tx = shop.begin().await;
    taken(sale.deduct(2).operation("order-1").send_in(&mut tx).await.unwrap());
    S::roll_back(tx).await;
    for _ in 0..3 {
        let mut tx = shop.begin().await;
        let receipt = taken(sale.deduct(2).operation("order-1").send_in(&mut tx).await.unwrap());
        assert_eq!(receipt.operation.as_deref(), Some("order-1"));
        S::commit(tx).await.unwrap();
    }
    assert_eq!(counts(&sale).await, (8, 0, 2));
    taken(sale.deduct(2).operation("order-1").send().await.unwrap());
    let mut tx = shop.begin().await;
    let other = sale.deduct(3).operation("order-1").send_in(&mut tx).await;
    assert!(matches!(other, Err(Error::Conflict(_))), "{other:?}");
    S::roll_back(tx).await;
    assert!(matches!(sale.resolve("order-1").await.unwrap(), Resolved::Taken(_)));
    assert_eq!(counts(&sale).await, (8, 0, 2));
    clean_audit(&sale).await;
}

pub(crate) async fn the_limit_counts_what_is_not_committed<S: Shop>(place: &Place, shop: &S) {
    let sale = Inventory::builder(&place.dlock, "sale").stock(10).per_buyer(2);
    let sale = sale.create().await.unwrap();
    let mut tx = shop.begin().await;
    taken(sale.deduct(2).buyer("u").send_in(&mut tx).await.unwrap());
    let more = sale.deduct(1).buyer("u").send_in(&mut tx).await.unwrap();
    assert_eq!(more, Deduction::LimitReached);
    assert!(deduct_in(&mut tx, &sale, 1).await.is_err(), "the buyer is missing");
    S::commit(tx).await.unwrap();
    assert_eq!(sale.deduct(1).buyer("u").send().await.unwrap(), Deduction::LimitReached);
    taken(sale.deduct(2).buyer("v").send().await.unwrap());
    clean_audit(&sale).await;
}

/// Transactions and the usual requests sell the same stock at the same time.
pub(crate) async fn many_transactions_never_oversell<S: Shop>(place: &Place, shop: &S) {
    let sale = place.sale(60, 4).await.sold_out_for(Duration::ZERO);
    let before = shop.number("SELECT COUNT(*) FROM orders").await;
    let mut buyers = tokio::task::JoinSet::new();
    for buyer in 0..8 {
        let (shop, sale) = (shop.clone(), sale.clone());
        buyers.spawn(async move {
            let mut bought = 0;
            for round in 0..10 {
                if buyer % 2 == 0 {
                    let id = format!("o-{buyer}-{round}");
                    let deduction = sale.deduct(1).operation(id).send().await.unwrap();
                    bought += i64::from(matches!(deduction, Deduction::Taken(_)));
                    continue;
                }
                let mut tx = shop.begin().await;
                S::run(&mut tx, "INSERT INTO orders (units) VALUES (1)").await;
                let deduction = deduct_in(&mut tx, &sale, 1).await;
                let is_kept = |it| matches!(it, Deduction::Taken(_)) && round % 3 != 0;
                bought += S::finish(tx, deduction.map(is_kept)).await;
            }
            bought
        });
    }
    let bought: i64 = buyers.join_all().await.into_iter().sum();
    let (available, _, sold) = counts(&sale).await;
    assert_eq!((sold, available), (bought.try_into().unwrap(), 60 - sold));
    let orders = shop.number("SELECT COUNT(*) FROM orders").await - before;
    assert!(orders > 0 && orders < bought, "{orders} of {bought}");
    clean_audit(&sale).await;
}

pub(crate) async fn a_locked_part_is_skipped_and_then_waited_for<S: Shop>(place: &Place, shop: &S) {
    const PARTS: usize = 6; // more than are looked at first
    let mut parts = Vec::new();
    for part in 0..PARTS {
        let sale = Inventory::builder(&place.dlock, format!("part-{part}")).stock(2);
        parts.push(sale.create().await.unwrap());
    }
    let mut open = Vec::new();
    let mut used = std::collections::BTreeSet::new();
    for _ in 0..PARTS {
        let mut tx = shop.begin().await;
        let receipt = taken(deduct_first_free_in(&mut tx, &parts, 2).await.unwrap());
        used.insert(receipt.inventory.to_string());
        open.push(tx); // not committed: each has locked another part
    }
    assert_eq!(used.len(), PARTS, "nobody waited");
    // All are locked, and none is known to be dry.
    let waiting = tokio::spawn({
        let (shop, parts) = (shop.clone(), parts.clone());
        async move {
            let mut tx = shop.begin().await;
            let deduction = deduct_first_free_in(&mut tx, &parts, 1).await.unwrap();
            S::commit(tx).await.unwrap();
            deduction
        }
    });
    tokio::time::sleep(Duration::from_millis(200)).await;
    assert!(!waiting.is_finished(), "skipped is not dry");
    for (place, tx) in open.into_iter().enumerate() {
        match place {
            place if place == PARTS - 1 => S::roll_back(tx).await,
            _ => S::commit(tx).await.unwrap(),
        }
    }
    taken(waiting.await.unwrap());
    let mut tx = shop.begin().await;
    taken(deduct_first_free_in(&mut tx, &parts, 1).await.unwrap());
    assert!(is_sold_out(&deduct_first_free_in(&mut tx, &parts, 1).await.unwrap()));
    S::commit(tx).await.unwrap();
    let mut sold = 0;
    for part in &parts {
        sold += counts(part).await.2;
        clean_audit(part).await;
    }
    assert_eq!(sold, 2 * PARTS as u64);
}

/// A caller holds the rows of one inventory for long: leases of locks and other inventories
/// go on. `DLOCK_TEST_HELD_SECONDS=30` makes it longer.
pub(crate) async fn a_long_transaction_holds_up_nothing_else<S: Shop>(place: &Place, shop: &S) {
    let held = place.sale(10, 1).await;
    let other = Inventory::builder(&place.dlock, "other").stock(1_000_000).create().await.unwrap();
    let kept = place.dlock.mutex("kept").ttl(Duration::from_secs(2)).lock().await.unwrap();
    let deductions = async |lasts| {
        let mut took = Latencies::default();
        while took.began.elapsed() < lasts {
            let began = Instant::now();
            taken(other.deduct(1).send().await.unwrap());
            took.add(began.elapsed());
            assert_ne!(kept.state(), dlock::State::Lost);
        }
        took
    };
    let before = deductions(held_for() / 2).await;
    let mut tx = shop.begin().await;
    taken(deduct_in(&mut tx, &held, 1).await.unwrap());
    let meanwhile = deductions(held_for()).await;
    println!("a deduction: {before} before, {meanwhile} while another inventory was locked");
    assert!(meanwhile.slowest() < Duration::from_secs(2), "{meanwhile}");
    S::commit(tx).await.unwrap();
    assert_eq!(counts(&held).await.2, 1);
}

/// The snapshot of a transaction is older than the sale of the same id: it must not decide.
pub(crate) async fn an_old_snapshot_sells_nothing_twice<S: Shop>(place: &Place, shop: &S) {
    let sale = Inventory::builder(&place.dlock, "sale").stock(10).per_buyer(2);
    let sale = sale.create().await.unwrap();
    let mut tx = shop.begin().await;
    // The snapshot is taken here.
    S::run(&mut tx, "SELECT COUNT(*) FROM dlock_stock_record").await;
    taken(sale.deduct(2).operation("order-1").buyer("u").send().await.unwrap());
    taken(sale.deduct(2).operation("order-1").buyer("u").send_in(&mut tx).await.unwrap());
    let more = sale.deduct(1).buyer("u").send_in(&mut tx).await.unwrap();
    assert_eq!(more, Deduction::LimitReached);
    S::commit(tx).await.unwrap();
    assert_eq!(counts(&sale).await, (8, 0, 2));
    clean_audit(&sale).await;
}

/// Parts that do not sell are passed over, and what is told in the end is the most useful.
pub(crate) async fn a_part_that_does_not_sell_is_passed_over<S: Shop>(place: &Place, shop: &S) {
    let mut parts = Vec::new();
    for name in ["a", "b", "c", "d", "e", "f"] {
        let part = Inventory::builder(&place.dlock, name).stock(10).create().await.unwrap();
        parts.push(part);
    }
    let hour = Duration::from_secs(3_600);
    let now = std::time::SystemTime::now();
    parts[0].pause().await.unwrap();
    parts[2].window(None, Some(now - hour)).await.unwrap();
    parts[4].window(Some(now + hour), None).await.unwrap();
    let buy = async || {
        let mut tx = shop.begin().await;
        let deduction = deduct_first_free_in(&mut tx, &parts, 1).await.unwrap();
        S::commit(tx).await.unwrap();
        deduction
    };
    for number in 0..30 {
        let deduction = buy().await;
        assert!(matches!(deduction, Deduction::Taken(_)), "{number}: {deduction:?}");
    }
    assert_eq!(buy().await, Deduction::Paused, "the first one may sell again");
    parts[0].resume().await.unwrap();
    for _ in 0..10 {
        taken(buy().await);
    }
    assert!(matches!(buy().await, Deduction::NotStarted { .. }));
    parts[4].window(None, None).await.unwrap();
    for _ in 0..10 {
        taken(buy().await);
    }
    assert!(is_sold_out(&buy().await), "one is sold out, another one has ended");
    for part in &parts {
        clean_audit(part).await;
    }
}

/// A shop that sells only in transactions of its own: what is kept no longer is deleted.
pub(crate) async fn a_shop_with_transactions_only_is_tidied<S: Shop>(place: &Place, shop: &S) {
    let sale = Inventory::builder(&place.dlock, "sale").stock(100_000).journal(10);
    let sale = sale.retention(Duration::from_millis(300)).create().await.unwrap();
    let records = "SELECT COUNT(*) FROM dlock_stock_record WHERE operation LIKE 'tidied-%'";
    let entries = "SELECT COUNT(*) FROM dlock_stock_journal WHERE operation LIKE 'tidied-%'";
    let (mut sold, began) = (0, Instant::now());
    loop {
        for _ in 0..100 {
            let mut tx = shop.begin().await;
            let id = format!("tidied-{sold}");
            taken(sale.deduct(1).operation(id).send_in(&mut tx).await.unwrap());
            S::commit(tx).await.unwrap();
            sold += 1;
        }
        let (records, entries) = (shop.number(records).await, shop.number(entries).await);
        if sold >= 500 && records < sold - 100 && entries < sold / 2 {
            return;
        }
        let kept = format!("{records} records and {entries} entries of {sold}");
        assert!(began.elapsed() < Duration::from_secs(60), "{kept}");
    }
}
