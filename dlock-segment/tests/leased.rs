//! Units that a process sells from memory.

#![allow(clippy::unwrap_used, reason = "a failed step fails the test")]

mod common;

use std::time::Duration;

use common::{Place, clean_audit, counts, eventually, taken};
use dlock_segment::{Error, LeasedDeduction, Resolved};

on_all_stores!(
    all_units_are_sold_once,
    what_was_not_reported_comes_back,
    what_was_not_sold_comes_back,
    a_late_report_without_units_is_a_debt,
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

/// A process hangs until its lot is sold to others. It reports then what it had sold: nothing
/// is available, and the audit says so.
async fn a_late_report_without_units_is_a_debt(place: Place) {
    let sale = place.sale(30, 1).await;
    let (sold, was_sold) = tokio::sync::oneshot::channel();
    let (resume, resumed) = tokio::sync::oneshot::channel();
    let hangs = tokio::task::spawn_blocking({
        let sale = sale.clone();
        move || {
            let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build();
            let runtime = runtime.unwrap(); // nothing runs in it while nobody waits for it
            let lease = sale.lease_units().lot(30, 30).ttl(Duration::from_millis(400));
            let units = runtime.block_on(lease.start()).unwrap();
            assert_eq!(units.deduct(7), LeasedDeduction::Taken);
            sold.send(()).unwrap();
            resumed.blocking_recv().unwrap();
            runtime.block_on(units.stop()).unwrap()
        }
    });
    was_sold.await.unwrap();
    eventually("the lot expires", || async { counts(&sale).await == (30, 0, 0) }).await;
    taken(sale.deduct(30).operation("all of it").send().await.unwrap());
    clean_audit(&sale).await;
    resume.send(()).unwrap();
    let totals = hangs.await.unwrap();
    assert_eq!((totals.sold, totals.late, totals.debt), (7, 0, 7), "{totals:?}");

    let audit = sale.audit().await.unwrap();
    assert_eq!((audit.owed, audit.sold, audit.is_clean()), (7, 30, false), "{audit:#?}");
    let [debt] = &audit.disagreements[..] else { panic!("{audit:#?}") };
    assert!(debt.what.contains("a debt: 7 leased units"), "{debt:?}");
    let id = debt.operation.as_ref().unwrap();
    assert!(id.starts_with("lease:"), "{id}");
    // It is not a sale, and the counts are as they were.
    assert_eq!(sale.resolve(id).await.unwrap(), Resolved::NotApplied);
    assert_eq!(counts(&sale).await, (0, 0, 30));
    assert_eq!(sale.audit().await.unwrap().owed, 7);
}
