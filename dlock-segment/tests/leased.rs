//! Units that a process sells from memory.

#![allow(clippy::unwrap_used, reason = "a failed step fails the test")]

mod common;

use std::time::Duration;

use common::{Place, clean_audit, counts, eventually};
use dlock_segment::{Error, LeasedDeduction};

on_all_stores!(
    all_units_are_sold_once,
    what_was_not_reported_comes_back,
    what_was_not_sold_comes_back,
);

#[cfg(all(feature = "mysql", feature = "postgres", feature = "sqlite"))]
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn on_databases() {
    common::databases::on_each(trials).await;
}

/// Three processes sell everything from memory, to the last unit.
async fn all_units_are_sold_once(place: Place) {
    let sale = place.sale(5_000, 2).await;
    let mut selling = tokio::task::JoinSet::new();
    for process in 0..3 {
        let sale = if process == 0 { sale.clone() } else { place.open_elsewhere("sale").await };
        selling.spawn(async move {
            let units = sale.lease_units().lot(50, 400).start().await.unwrap();
            let mut sold = 0;
            while units.deduct_or_wait(1).await == LeasedDeduction::Taken {
                sold += 1;
            }
            let totals = units.stop().await.unwrap();
            assert_eq!((totals.sold, totals.reported), (sold, sold), "{totals:?}");
            assert_eq!(units.deduct(1), LeasedDeduction::SoldOut, "it is stopped");
            sold
        });
    }
    let sold: u64 = selling.join_all().await.iter().sum();
    // A process that stops gives back what the others had stopped asking for.
    let (available, reserved, counted) = counts(&sale).await;
    assert_eq!((reserved, counted), (0, sold));
    assert_eq!(available + sold, 5_000);
    clean_audit(&sale).await;
}

/// A process that dies has promised at most what its lots had.
async fn what_was_not_reported_comes_back(place: Place) {
    let sale = place.sale(100, 1).await;
    let runtime =
        tokio::runtime::Builder::new_multi_thread().worker_threads(1).enable_all().build();
    let runtime = runtime.unwrap();
    let units = runtime.spawn({
        let sale = sale.clone();
        async move {
            let units =
                sale.lease_units().lot(30, 30).ttl(Duration::from_millis(400)).start().await;
            let units = units.unwrap();
            assert_eq!(units.deduct(7), LeasedDeduction::Taken);
            units
        }
    });
    let units = units.await.unwrap();
    runtime.shutdown_background(); // as if the process died
    assert_eq!(counts(&sale).await, (70, 30, 0));
    eventually("the lot expires", || async { counts(&sale).await == (100, 0, 0) }).await;
    assert_ne!(units.deduct(1), LeasedDeduction::Taken, "it is over here too");
    clean_audit(&sale).await;
}

async fn what_was_not_sold_comes_back(place: Place) {
    let sale = place.sale(100, 2).await;
    let units = sale.lease_units().lot(40, 40).start().await.unwrap();
    assert_eq!(counts(&sale).await.1, 40);
    assert_eq!(units.deduct(41), LeasedDeduction::NotNow, "more than a lot");
    assert_eq!(units.deduct(3), LeasedDeduction::Taken);
    let totals = units.stop().await.unwrap();
    assert_eq!((totals.sold, totals.reported, totals.debt), (3, 3, 0));
    assert_eq!(counts(&sale).await, (97, 0, 3));
    clean_audit(&sale).await;
    let limited = place.builder_by_buyer("other").stock(5).per_buyer(1).create().await.unwrap();
    let refused = limited.lease_units().start().await.map(drop);
    assert!(matches!(refused, Err(Error::Invalid(_))), "{refused:?}");
}
