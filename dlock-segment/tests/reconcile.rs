//! The inventory is compared with the orders of the shop, corrected, and rebuilt.

#![allow(clippy::unwrap_used, reason = "a failed step fails the test")]

mod common;

use std::time::Duration;

use common::{Place, clean_audit, counts, held, taken};
use dlock_segment::{DifferenceKind, Inventory, OrderState, Reconciliation, ShopOrder};
use futures_util::stream;

on_all_stores!(
    differences_are_found_and_corrected,
    a_sale_is_rebuilt_after_a_total_loss,
    what_is_too_old_is_compared_by_its_sum,
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
    sale.reconcile(stream::iter(orders.to_vec()), apply).await.unwrap()
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

    let report = reconcile(&sale, &orders, true).await;
    assert_eq!(kinds(&report), found);
    assert_eq!(report.corrected, 4, "{report:#?}");
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
    // More was sold than there is: that is said, and not hidden.
    orders.push(ShopOrder { buyer: None, ..order("too-much", 5, OrderState::Sold, "") });
    let report = reconcile(&sale, &orders, true).await;
    assert_eq!((report.different, report.corrected), (1, 0));
    assert!(report.differences[0].why_not.as_ref().unwrap().contains("only 4"), "{report:#?}");
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
    let now = sale.stock().await.unwrap().now;
    sale.retention(Duration::from_secs(3_600)).await.unwrap();
    let lost = ShopOrder { at: Some(now), ..order("lost", 1, OrderState::Sold, "u") };
    let report = reconcile(&sale, &[&orders[..], &[lost]].concat(), true).await;
    assert_eq!((report.corrected, report.too_old), (1, 2), "{report:#?}");
    assert_eq!(counts(&sale).await, (25, 0, 5));
}
