//! Deductions and their ids.

use std::time::{Duration, SystemTime};

use dlock_segment::{
    Deduction, Error, HoldState, Inventory, Refund, Reservation, Resolved, WriteOff,
};

use super::common::{self, Place, clean_audit, counts, is_sold_out, taken};
use super::{held, refunded, state_of};
use crate::on_all_stores;

on_all_stores!(
    all_or_nothing_gathered,
    an_operation_happens_once,
    the_last_buyers_retry_hears_taken,
    refusals_are_not_remembered,
    resolve_settles_for_good,
    a_lookup_leaves_no_trace,
    as_many_as_there_are,
    buyer_limit,
    many_tasks_never_oversell,
    retention_is_bounded,
    an_order_that_comes_too_late_is_not_sold_again,
);

async fn all_or_nothing_gathered(place: Place) {
    let sale = place.sale(10, 4).await; // 3, 3, 2, 2
    let single = taken(sale.deduct(3).send().await.unwrap());
    assert!(single.parts.len() == 1 || place.homes > 1, "one segment holds 3");
    let gathered = taken(sale.deduct(6).send().await.unwrap());
    assert!(gathered.parts.len() > 1);
    assert_eq!(gathered.parts.iter().map(|(_, count)| count).sum::<u64>(), 6);
    let two = sale.deduct(2).send().await.unwrap();
    assert!(matches!(two, Deduction::NotEnough { available: 1, .. }), "{two:?}");
    assert_eq!(counts(&sale).await, (1, 0, 9));
    taken(sale.deduct(1).send().await.unwrap());
    assert!(is_sold_out(&sale.deduct(1).send().await.unwrap()));
    clean_audit(&sale).await;
}

async fn an_operation_happens_once(place: Place) {
    let sale = place.sale(10, 3).await;
    let send = || sale.deduct(2).operation("order-1").buyer("u-1").send();
    let first = taken(send().await.unwrap());
    assert_eq!(taken(send().await.unwrap()), first);
    let elsewhere = place.open_elsewhere("sale").await;
    let there = elsewhere.deduct(2).operation("order-1").buyer("u-1").send().await.unwrap();
    assert_eq!(taken(there), first);
    for other in [
        sale.deduct(3).operation("order-1").buyer("u-1").send().await,
        sale.deduct(2).operation("order-1").buyer("u-2").send().await,
        sale.deduct(2).operation("order-1").send().await,
    ] {
        assert!(matches!(other, Err(Error::Conflict(_))), "{other:?}");
    }
    let reserve = sale.reserve(2).operation("order-1").buyer("u-1").send().await;
    assert!(matches!(reserve, Err(Error::Conflict(_))));
    assert_eq!(counts(&sale).await, (8, 0, 2));
    clean_audit(&sale).await;
}

async fn the_last_buyers_retry_hears_taken(place: Place) {
    let sale = place.sale(1, 1).await;
    let first = taken(sale.deduct(1).operation("last").send().await.unwrap());
    assert!(is_sold_out(&sale.deduct(1).operation("late").send().await.unwrap()));
    assert_eq!(taken(sale.deduct(1).operation("last").send().await.unwrap()), first);
    sale.pause().await.unwrap();
    assert_eq!(taken(sale.deduct(1).operation("last").send().await.unwrap()), first);
}

async fn refusals_are_not_remembered(place: Place) {
    let sale = place.sale(1, 2).await;
    taken(sale.deduct(1).send().await.unwrap());
    for _ in 0..20 {
        assert!(is_sold_out(&sale.deduct(1).operation("patient").send().await.unwrap()));
    }
    assert_eq!(sale.audit().await.unwrap().operations, 0);
    sale.restock(1).send().await.unwrap();
    taken(sale.deduct(1).operation("patient").send().await.unwrap());
}

async fn resolve_settles_for_good(place: Place) {
    let sale = place.sale(5, 2).await;
    assert_eq!(sale.resolve("late").await.unwrap(), Resolved::NotApplied);
    assert_eq!(sale.resolve("late").await.unwrap(), Resolved::NotApplied);
    assert_eq!(sale.deduct(1).operation("late").send().await.unwrap(), Deduction::Refused);
    let reserve = sale.reserve(1).operation("late").send().await.unwrap();
    assert_eq!(reserve, Reservation::Refused);
    assert!(matches!(sale.restock(1).operation("late").send().await, Err(Error::Conflict(_))));
    let receipt = taken(sale.deduct(1).operation("done").send().await.unwrap());
    assert_eq!(sale.resolve("done").await.unwrap(), Resolved::Taken(receipt));
    let hold = held(sale.reserve(1).operation("hold").send().await.unwrap());
    assert_eq!(sale.resolve("hold").await.unwrap(), Resolved::Held(hold));
    assert_eq!(counts(&sale).await, (3, 1, 1));
    // The id that the error of an unknown refund has, if the refund was given none.
    assert!(matches!(sale.refund("done").send().await.unwrap(), Refund::Refunded(_)));
    let refund = sale.resolve("done\u{1}refund").await.unwrap();
    assert!(matches!(refund, Resolved::RefundDone(_)), "{refund:?}");
    clean_audit(&sale).await;
}

async fn as_many_as_there_are(place: Place) {
    let sale = place.builder_by_buyer("sale").stock(10).per_buyer(6).create().await.unwrap();
    let buy = async |id: &str, buyer: &str, most| {
        sale.deduct_up_to(most).operation(id).buyer(buyer).send().await
    };
    let first = taken(buy("o-1", "u-1", 6).await.unwrap());
    assert_eq!(first.quantity, 6, "all of them if there are so many");
    let last = taken(buy("o-2", "u-2", 6).await.unwrap());
    assert_eq!(last.quantity, 4, "else what is left, from all homes");
    assert_eq!(taken(buy("o-2", "u-2", 6).await.unwrap()), last, "the same call again");
    assert_eq!(taken(buy("o-1", "u-1", 6).await.unwrap()), first);
    assert!(is_sold_out(&buy("o-3", "u-3", 6).await.unwrap()));
    let other = buy("o-2", "u-2", 3).await;
    assert!(matches!(other, Err(Error::Conflict(_))), "it was for more: {other:?}");
    refunded(sale.refund("o-2").buyer("u-2").quantity(1).operation("r").send().await.unwrap());
    let again = buy("o-2", "u-2", 6).await.unwrap();
    assert!(matches!(&again, Deduction::Refunded(receipt) if receipt.left == 3), "{again:?}");
    assert_eq!(buy("o-4", "u-4", 7).await.unwrap(), Deduction::LimitReached);
    assert_eq!(taken(buy("o-5", "u-5", 6).await.unwrap()).quantity, 1);
    let stock = Inventory::stock_of(&[sale.clone(), sale.clone()]).await.unwrap();
    assert_eq!((stock[0].sold, stock[1].available), (10, 0));
    clean_audit(&sale).await;
    // Many at once share the rest, and each unit is sold once.
    let sale = place.builder("many").stock(50).segments(4).create().await.unwrap();
    let sale = sale.sold_out_for(Duration::ZERO);
    let mut buying = tokio::task::JoinSet::new();
    for task in 0..20 {
        let sale = sale.clone();
        buying.spawn(async move {
            match sale.deduct_up_to(4).operation(format!("o-{task}")).send().await.unwrap() {
                Deduction::Taken(receipt) => receipt.quantity,
                Deduction::SoldOut { .. } => 0,
                other => panic!("{other:?}"),
            }
        });
    }
    assert_eq!(buying.join_all().await.iter().sum::<u64>(), 50);
    clean_audit(&sale).await;
}

async fn a_lookup_leaves_no_trace(place: Place) {
    let sale = place.builder_by_buyer("sale").stock(10).journal(100).create().await.unwrap();
    assert_eq!(sale.lookup("o").await.unwrap(), None);
    assert_eq!(sale.lookup_for("o", "u").await.unwrap(), None);
    assert_eq!(sale.journal(0).await.unwrap(), []);
    let receipt = taken(sale.deduct(3).operation("o").buyer("u").send().await.unwrap());
    let found = Some(Resolved::Taken(receipt));
    assert_eq!(sale.lookup("o").await.unwrap(), found);
    assert_eq!(sale.lookup_for("o", "u").await.unwrap(), found);
    let hold = held(sale.reserve(1).operation("h").buyer("u").send().await.unwrap());
    assert_eq!(sale.lookup("h").await.unwrap(), Some(Resolved::Held(hold)));
    let back = sale.refund("o").buyer("u").quantity(1).operation("back").send().await.unwrap();
    assert_eq!(sale.lookup("back").await.unwrap(), Some(Resolved::RefundDone(refunded(back))));
    assert!(matches!(sale.lookup("o").await.unwrap(), Some(Resolved::Refunded(_))));
    assert_eq!(sale.resolve("never").await.unwrap(), Resolved::NotApplied);
    assert_eq!(sale.lookup("never").await.unwrap(), Some(Resolved::NotApplied));
    assert_eq!(counts(&sale).await, (7, 1, 2));
    // Routed by operation id, a refund is in the home of its purchase, whatever its own id is.
    let sale = place.builder("other").stock(10).create().await.unwrap();
    taken(sale.deduct(6).operation("o").send().await.unwrap());
    for number in 0..6 {
        let id = format!("back-{number}");
        assert_eq!(sale.lookup(&id).await.unwrap(), None);
        refunded(sale.refund("o").quantity(1).operation(&id).send().await.unwrap());
        assert!(matches!(sale.lookup(&id).await.unwrap(), Some(Resolved::RefundDone(_))), "{id}");
    }
}

async fn buyer_limit(place: Place) {
    let sale = place.builder_by_buyer("sale").stock(100).segments(8).per_buyer(3);
    let sale = sale.create().await.unwrap();
    assert!(matches!(sale.deduct(1).send().await, Err(Error::Invalid(_))), "a buyer is wanted");
    taken(sale.deduct(1).operation("a").buyer("u").send().await.unwrap());
    held(sale.reserve(1).operation("b").buyer("u").send().await.unwrap());
    let two = || sale.deduct(2).buyer("u").send();
    assert_eq!(two().await.unwrap(), Deduction::LimitReached);
    taken(sale.deduct(2).buyer("other").send().await.unwrap());
    assert_eq!(sale.reservation("b").cancel().await.unwrap(), HoldState::Cancelled);
    taken(two().await.unwrap());
    assert_eq!(sale.deduct(1).buyer("u").send().await.unwrap(), Deduction::LimitReached);
    assert_eq!(
        sale.reserve(1).operation("c").buyer("u").send().await.unwrap(),
        Reservation::LimitReached
    );
    refunded(sale.refund("a").send().await.unwrap());
    taken(sale.deduct(1).buyer("u").send().await.unwrap());
    sale.limit_per_buyer(4).await.unwrap();
    taken(sale.deduct(1).buyer("u").send().await.unwrap());
    assert_eq!(sale.deduct(1).buyer("u").send().await.unwrap(), Deduction::LimitReached);
    sale.limit_per_buyer(None).await.unwrap();
    taken(sale.deduct(50).buyer("u").send().await.unwrap());
    if place.homes == 1 {
        taken(sale.deduct(1).send().await.unwrap());
    } else {
        assert!(matches!(sale.deduct(1).send().await, Err(Error::Invalid(_))), "its home?");
    }
    clean_audit(&sale).await;
}

async fn many_tasks_never_oversell(place: Place) {
    let sale = place.sale(500, 16).await.sold_out_for(Duration::ZERO);
    let elsewhere = place.open_elsewhere("sale").await;
    let mut tasks = tokio::task::JoinSet::new();
    for number in 0..1_000_u64 {
        let sale = if number % 2 == 0 { sale.clone() } else { elsewhere.clone() };
        tasks.spawn(async move {
            let deduct = sale.deduct(1 + number % 2);
            let deduct = match number % 3 {
                0 => deduct,
                1 => deduct.operation(format!("o-{number}")),
                _ => deduct.operation(format!("o-{number}")).buyer(format!("u-{}", number % 50)),
            };
            match deduct.clone().send().await.unwrap() {
                Deduction::Taken(receipt) => {
                    if receipt.operation.is_some() {
                        assert_eq!(taken(deduct.send().await.unwrap()), receipt);
                    }
                    receipt.quantity
                }
                Deduction::SoldOut { .. } | Deduction::NotEnough { available: 1, .. } => 0,
                other => panic!("{other:?}"),
            }
        });
    }
    let mut sold = 0;
    while let Some(quantity) = tasks.join_next().await {
        sold += quantity.unwrap();
    }
    let (available, _, counted) = counts(&sale).await;
    assert_eq!(sold, counted);
    assert!(available <= 1, "only a pair may find one left: {available}");
    clean_audit(&sale).await;
}

async fn retention_is_bounded(place: Place) {
    let retention = Duration::from_millis(300);
    let sale = place.builder("sale").stock(100).retention(retention);
    let sale = sale.create().await.unwrap();
    let first = taken(sale.deduct(1).operation("o").send().await.unwrap());
    assert_eq!(taken(sale.deduct(1).operation("o").send().await.unwrap()), first);
    held(sale.reserve(1).operation("r").send().await.unwrap());
    tokio::time::sleep(retention * 2 + Duration::from_millis(50)).await;
    let second = taken(sale.deduct(1).operation("o").send().await.unwrap());
    assert_ne!(second.at, first.at, "its record is gone");
    assert_eq!(
        state_of(sale.reservation("r").confirm().await),
        HoldState::Confirmed,
        "an open reservation is kept for as long as it lasts"
    );
    assert_eq!(counts(&sale).await, (97, 0, 3));
    assert!(sale.audit().await.unwrap().is_clean());
}

/// An order comes once more when its record is forgotten.
async fn an_order_that_comes_too_late_is_not_sold_again(place: Place) {
    let sale = place.builder("sale").stock(20).retention(Duration::from_secs(1));
    let sale = sale.create().await.unwrap();
    let placed = SystemTime::now();
    let buy = || sale.deduct(1).operation("o").placed_at(placed).send();
    let reserve = || sale.reserve(1).operation("r").placed_at(placed).send();
    let restock = || sale.restock(1).operation("s").placed_at(placed).send();
    let write_off = || sale.write_off(1).operation("w").placed_at(placed).send();
    taken(buy().await.unwrap());
    held(reserve().await.unwrap());
    restock().await.unwrap();
    assert!(matches!(write_off().await.unwrap(), WriteOff::WrittenOff(_)));
    assert_eq!(state_of(sale.reservation("r").confirm().await), HoldState::Confirmed);
    let before = counts(&sale).await;
    common::eventually("all is forgotten", async || sale.audit().await.unwrap().operations == 0)
        .await;
    assert_eq!(buy().await.unwrap(), Deduction::TooOld);
    assert_eq!(reserve().await.unwrap(), Reservation::TooOld);
    assert!(matches!(restock().await, Err(Error::Conflict(_))));
    assert_eq!(write_off().await.unwrap(), WriteOff::TooOld);
    assert_eq!(counts(&sale).await, before, "nothing happens twice");
    // A new order is not too old, also beside the old one.
    let (old, new) = tokio::join!(buy(), async {
        sale.deduct(1).operation("new").placed_at(SystemTime::now()).send().await
    });
    assert_eq!(old.unwrap(), Deduction::TooOld);
    taken(new.unwrap());
    // Without the time, it is sold again.
    taken(sale.deduct(1).operation("o").send().await.unwrap());
    let nameless = sale.deduct(1).placed_at(placed).send().await;
    assert!(matches!(nameless, Err(Error::Invalid(_))), "{nameless:?}");
}

/// Within the retention, an order is never too old, and is found.
#[tokio::test]
async fn an_order_of_the_retention_is_not_too_old() {
    let sale = Place::memory().expect("it is embedded").sale(20, 1).await;
    let placed = SystemTime::now() - Duration::from_secs(23 * 3_600);
    for _ in 0..2 {
        taken(sale.deduct(1).operation("o").placed_at(placed).send().await.unwrap());
    }
    assert_eq!(counts(&sale).await, (19, 0, 1));
}
