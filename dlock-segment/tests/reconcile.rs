//! The inventory is compared with the orders of the shop, corrected, and rebuilt.

#![allow(clippy::unwrap_used, reason = "a failed step fails the test")]

mod common;

use std::time::Duration;

use common::{Place, clean_audit, counts, held, taken};
use dlock_segment::{
    Correction, DifferenceKind, Error, Inventory, LeasedDeduction, OrderState, Reconciliation,
    ShopOrder,
};
use futures_util::stream;

on_all_stores!(
    differences_are_found_and_corrected,
    a_sale_is_rebuilt_after_a_total_loss,
    what_is_too_old_is_compared_by_its_sum,
    a_longer_retention_sells_nothing_twice,
    an_order_that_comes_twice_is_refused_before_anything_is_changed,
    an_input_that_fails_changes_nothing,
    leased_lots_are_not_unknown,
    what_is_given_back_is_sold_again,
);

#[cfg(all(feature = "mysql", feature = "postgres", feature = "sqlite"))]
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn on_databases() {
    common::databases::on_each(trials).await;
}

fn order(id: &str, quantity: u64, state: OrderState, buyer: &str) -> ShopOrder {
    ShopOrder { operation: id.into(), quantity, state, buyer: Some(buyer.into()), at: None }
}

async fn reconcile(sale: &Inventory, orders: &[ShopOrder], apply: bool) -> Reconciliation {
    let orders = orders.iter().cloned().map(Ok::<_, Error>);
    sale.reconcile(stream::iter(orders), apply).await.unwrap()
}

fn kinds(report: &Reconciliation) -> Vec<(&str, DifferenceKind, u64)> {
    let mut kinds: Vec<_> = report
        .differences
        .iter()
        .map(|difference| (&*difference.operation, difference.kind, difference.units))
        .collect();
    kinds.sort_by_key(|(operation, ..)| *operation);
    kinds
}

async fn differences_are_found_and_corrected(place: Place) {
    use DifferenceKind::{Missing, NotConfirmed, NotReserved, TooFew, TooMany, Unknown};
    use OrderState::{Cancelled, Reserved, Sold};
    let sale = place.builder_by_buyer("sale").stock(60).per_buyer(4).create().await.unwrap();
    for id in ["agrees", "more", "fewer", "cancelled", "unknown"] {
        taken(sale.deduct(2).operation(id).buyer(id).send().await.unwrap());
    }
    held(sale.reserve(2).operation("paid").buyer("paid").send().await.unwrap());
    held(sale.reserve(1).operation("held").buyer("held").send().await.unwrap());
    sale.pause().await.unwrap(); // corrections are made all the same
    let orders = [
        order("agrees", 2, Sold, "agrees"),
        order("more", 1, Sold, "more"),
        order("fewer", 3, Sold, "fewer"),
        order("cancelled", 2, Cancelled, "cancelled"),
        order("paid", 2, Sold, "paid"),
        order("held", 1, Reserved, "held"),
        order("lost", 5, Sold, "lost"), // above the limit: it was sold before that changed
        order("lost hold", 1, Reserved, "lost"),
        order("never", 1, Cancelled, "never"),
    ];
    let found = [
        ("cancelled", TooMany, 2),
        ("fewer", TooFew, 1),
        ("lost", Missing, 5),
        ("lost hold", NotReserved, 1),
        ("more", TooMany, 1),
        ("paid", NotConfirmed, 2),
        ("unknown", Unknown, 2),
    ];
    let before = counts(&sale).await;
    let report = reconcile(&sale, &orders, false).await;
    assert_eq!(kinds(&report), found);
    assert_eq!((report.orders, report.agree, report.corrected), (9, 3, 0));
    assert!(!report.is_clean());
    assert_eq!(counts(&sale).await, before, "it only looked");

    let plan = report;
    let report = reconcile(&sale, &orders, true).await;
    assert_eq!(kinds(&report), found);
    assert_eq!(report.corrected, 4, "{report:#?}");
    for (planned, done) in plan.differences.iter().zip(&report.differences) {
        assert_eq!((&planned.operation, planned.correction), (&done.operation, done.correction));
        assert_eq!(planned.correction.is_some(), done.corrected, "what is shown is done");
    }
    // agrees 2, more 1, fewer 2, unknown 2, paid 2, lost 5; held 1
    assert_eq!(counts(&sale).await, (60 - 15, 1, 14));
    let report = reconcile(&sale, &orders, true).await;
    assert_eq!((report.different, report.corrected), (3, 0), "the rest is for people: {report:#?}");
    assert_eq!(counts(&sale).await, (60 - 15, 1, 14), "what agrees is left alone");
    clean_audit(&sale).await;
}

async fn a_sale_is_rebuilt_after_a_total_loss(mut place: Place) {
    let create = async |place: &Place| place.sale(40, 2).await;
    let sale = create(&place).await;
    let mut orders = Vec::new();
    for number in 0..12 {
        let id = format!("o-{number}");
        taken(sale.deduct(3).operation(&id).send().await.unwrap());
        orders.push(ShopOrder { buyer: None, ..order(&id, 3, OrderState::Sold, "") });
    }
    place.lose_everything().await;
    drop(sale);
    let sale = create(&place).await;
    let report = reconcile(&sale, &orders, true).await;
    assert_eq!((report.different, report.corrected), (12, 12), "{report:#?}");
    assert_eq!(counts(&sale).await, (4, 0, 36));
    assert!(reconcile(&sale, &orders, true).await.is_clean());
    // A message that is delivered again sells nothing.
    taken(sale.deduct(3).operation("o-7").send().await.unwrap());
    assert_eq!(counts(&sale).await, (4, 0, 36));
    // More was sold than there is: that is said, and not hidden, also before it is tried.
    orders.push(ShopOrder { buyer: None, ..order("too-much", 5, OrderState::Sold, "") });
    for apply in [false, true] {
        let report = reconcile(&sale, &orders, apply).await;
        assert_eq!((report.different, report.corrected), (1, 0));
        assert!(report.differences[0].why_not.as_ref().unwrap().contains("only 4"), "{report:#?}");
    }
    clean_audit(&sale).await;
}

async fn what_is_too_old_is_compared_by_its_sum(place: Place) {
    let sale = place.builder("sale").stock(30).retention(Duration::from_millis(20));
    let sale = sale.create().await.unwrap();
    let orders =
        ["a", "b"].map(|id| ShopOrder { buyer: None, ..order(id, 2, OrderState::Sold, "") });
    for order in &orders {
        taken(sale.deduct(2).operation(&order.operation).send().await.unwrap());
    }
    common::eventually("they are forgotten", || async {
        tokio::time::sleep(Duration::from_millis(50)).await;
        sale.audit().await.unwrap().operations == 0
    })
    .await;
    let report = reconcile(&sale, &orders, true).await;
    assert_eq!((report.too_old, report.too_old_units, report.forgotten_units), (2, 4, 4));
    assert!(report.is_clean() && report.corrected == 0, "{report:#?}");
    assert_eq!(counts(&sale).await, (26, 0, 4));
    // One that is not so old must be on record.
    let changed = sale.retention(Duration::from_secs(3_600)).await.unwrap().now;
    let at = Some(changed + 1);
    let lost = ShopOrder { at, ..order("lost", 1, OrderState::Sold, "u") };
    let report = reconcile(&sale, &[&orders[..], &[lost]].concat(), true).await;
    assert_eq!((report.corrected, report.too_old), (1, 2), "{report:#?}");
    assert_eq!(counts(&sale).await, (25, 0, 5));
}

/// The retention is raised after orders were forgotten. That does not bring them back, and the
/// orders are not lost.
async fn a_longer_retention_sells_nothing_twice(place: Place) {
    let sale = place.builder("sale").stock(30).retention(Duration::from_millis(20));
    let sale = sale.create().await.unwrap();
    let at = Some(sale.stock().await.unwrap().now);
    taken(sale.deduct(5).operation("forgotten").send().await.unwrap());
    common::eventually("it is forgotten", || async {
        tokio::time::sleep(Duration::from_millis(50)).await;
        sale.audit().await.unwrap().operations == 0
    })
    .await;
    sale.retention(Duration::from_secs(3_600)).await.unwrap();
    taken(sale.deduct(1).operation("known").send().await.unwrap());
    let sold = |id, quantity, at| ShopOrder {
        at,
        buyer: None,
        ..order(id, quantity, OrderState::Sold, "")
    };
    let orders = [sold("forgotten", 5, at), sold("known", 1, None)];
    let report = reconcile(&sale, &orders, true).await;
    assert_eq!((report.too_old_units, report.forgotten_units), (5, 5), "{report:#?}");
    assert!(report.is_clean() && report.corrected == 0, "{report:#?}");
    assert_eq!(counts(&sale).await, (24, 0, 6));

    // The time of the last change instead of the time of the order, or a clock that is ahead.
    let later = Some(sale.stock().await.unwrap().now + 60_000);
    let report =
        reconcile(&sale, &[sold("forgotten", 5, later), sold("known", 1, None)], true).await;
    assert_eq!((report.different, report.corrected), (1, 0), "{report:#?}");
    assert_eq!(counts(&sale).await, (24, 0, 6), "what may be forgotten is not sold again");
}

/// An export with a row for each item of an order.
async fn an_order_that_comes_twice_is_refused_before_anything_is_changed(place: Place) {
    let sale = place.sale(30, 2).await;
    taken(sale.deduct(5).operation("o-1").send().await.unwrap());
    let rows = ["lost", "o-1", "o-1"]
        .map(|id| ShopOrder { buyer: None, ..order(id, 2, OrderState::Sold, "") });
    let rows = rows.map(Ok::<_, Error>);
    let refused = sale.reconcile(stream::iter(rows), true).await;
    let what = refused.unwrap_err().to_string();
    assert!(what.contains("`o-1`") && what.contains("nothing was changed"), "{what}");
    assert_eq!(counts(&sale).await, (25, 0, 5));
}

/// The database of the shop goes away in the middle of the export.
async fn an_input_that_fails_changes_nothing(place: Place) {
    let sale = place.sale(30, 2).await;
    let mut rows: Vec<Result<ShopOrder, Error>> = (0..600)
        .map(|id| {
            let id = format!("o-{id}");
            Ok(ShopOrder { buyer: None, ..order(&id, 1, OrderState::Sold, "") })
        })
        .collect();
    rows.push(Err(Error::Invalid("the database is away".into())));
    let failed = sale.reconcile(stream::iter(rows), true).await.unwrap_err();
    assert!(failed.to_string().contains("the database is away"), "{failed}");
    assert_eq!(counts(&sale).await, (30, 0, 0));
}

/// What was sold from memory has no operation id that the shop could know.
async fn leased_lots_are_not_unknown(place: Place) {
    let sale = place.sale(300, 2).await;
    let units = sale.lease_units().lot(50, 50).start().await.unwrap();
    assert_eq!(units.deduct(7), LeasedDeduction::Taken);
    units.stop().await.unwrap();
    taken(sale.deduct(2).operation("o-1").send().await.unwrap());
    let orders = [ShopOrder { buyer: None, ..order("o-1", 2, OrderState::Sold, "") }];
    let report = reconcile(&sale, &orders, false).await;
    assert!(report.is_clean(), "{report:#?}");
    assert_eq!((report.leased_units, report.agree), (7, 1));
}

/// What one correction gives back is there for another, whatever comes first in the input. The
/// ids of corrections cannot be taken by orders.
async fn what_is_given_back_is_sold_again(place: Place) {
    let sale = place.sale(5, 1).await;
    taken(sale.deduct(4).operation("back").send().await.unwrap());
    taken(sale.deduct(1).operation("reconcile:4:back").send().await.unwrap());
    let sold =
        |id, quantity| ShopOrder { buyer: None, ..order(id, quantity, OrderState::Sold, "") };
    let orders = [sold("lost", 3), sold("back", 1), sold("reconcile:4:back", 1)];
    let plan = reconcile(&sale, &orders, false).await;
    let planned: Vec<_> = plan.differences.iter().map(|it| it.correction).collect();
    assert_eq!(planned, [Some(Correction::SellAgain), Some(Correction::GiveBack)], "{plan:#?}");
    let report = reconcile(&sale, &orders, true).await;
    assert_eq!((report.different, report.corrected), (2, 2), "{report:#?}");
    assert_eq!(counts(&sale).await, (0, 0, 5));
    let own = sale.deduct(1).operation("back\u{1}reconcile:4").send().await;
    assert!(matches!(own, Err(Error::Invalid(_))), "{own:?}");
    assert!(reconcile(&sale, &orders, true).await.is_clean());
}
