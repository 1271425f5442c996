//! Units that a process sells from memory.

#![allow(clippy::unwrap_used, reason = "a failed step fails the test")]

mod common;

use std::time::{Duration, Instant, SystemTime};

use common::{Place, clean_audit, counts, eventually, taken};
use dlock::Dlock;
use dlock_segment::{Deduction, Error, Inventory, LeasedDeduction, LeasedUnits, Resolved};
use dlock_testkit::redis::RedisServer;

on_all_stores!(
    all_units_are_sold_once,
    what_was_not_reported_comes_back,
    what_was_not_sold_comes_back,
    a_late_report_without_units_is_a_debt,
    a_pause_is_heard_and_no_unit_is_sold_twice,
    nothing_is_sold_after_the_end,
    it_sells_from_the_opening_on,
    more_than_a_lot_or_than_is_left,
    ten_processes_have_units_at_once,
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
            assert_eq!(units.deduct(1), LeasedDeduction::Stopped);
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

/// An operator pauses, longer than a lot lasts, and somebody else buys the rest at once after it.
async fn a_pause_is_heard_and_no_unit_is_sold_twice(place: Place) {
    let sale = place.sale(30, 1).await;
    let other = place.open_elsewhere("sale").await;
    let units = sale.lease_units().lot(30, 30).ttl(Duration::from_millis(400)).start().await;
    let units = units.unwrap();
    assert_eq!(units.deduct(7), LeasedDeduction::Taken);
    sale.pause().await.unwrap();
    eventually("it reports", || async { counts(&sale).await == (23, 0, 7) }).await;
    eventually("it hears", async || units.deduct(1) == LeasedDeduction::Paused).await;
    assert_eq!(units.deduct_or_wait(1).await, LeasedDeduction::Paused);
    tokio::time::sleep(Duration::from_millis(800)).await; // the lot would be over
    assert_eq!(counts(&sale).await, (23, 0, 7));
    other.resume().await.unwrap();
    let mut promised = 7;
    while other.deduct(1).send().await.is_ok_and(|it| matches!(it, Deduction::Taken(_))) {
        promised += 1;
    }
    while units.deduct_or_wait(1).await == LeasedDeduction::Taken {
        promised += 1;
    }
    let totals = units.stop().await.unwrap();
    assert_eq!((totals.reported, totals.debt, totals.late), (totals.sold, 0, 0), "{totals:?}");
    assert_eq!(promised, 30 - counts(&sale).await.0);
    clean_audit(&sale).await;
}

/// A lot that lasts long does not outlast a pause or the end of the sale.
async fn nothing_is_sold_after_the_end(place: Place) {
    let sale = place.sale(1_000, 1).await;
    let units = sale.lease_units().lot(100, 100).ttl(Duration::from_secs(600)).start().await;
    let units = units.unwrap();
    assert_eq!(units.deduct(3), LeasedDeduction::Taken);
    let paused = Instant::now();
    sale.pause().await.unwrap();
    eventually("it is heard", async || units.deduct(1) == LeasedDeduction::Paused).await;
    assert!(paused.elapsed() < Duration::from_secs(5), "{:?}", paused.elapsed());
    eventually("it reports", || async { counts(&sale).await.1 == 0 }).await;
    sale.resume().await.unwrap();
    eventually("it sells", async || units.deduct(1) == LeasedDeduction::Taken).await;

    let closes = SystemTime::now() + Duration::from_millis(2_500);
    sale.window(None, Some(closes)).await.unwrap();
    let mut last = SystemTime::now();
    eventually("it ends", || {
        let answer = units.deduct(1);
        if answer == LeasedDeduction::Taken {
            last = SystemTime::now();
        }
        async move { answer == LeasedDeduction::Ended }
    })
    .await;
    assert!(last < closes + Duration::from_millis(300), "{last:?} and {closes:?}");
    assert_eq!(units.deduct_or_wait(1).await, LeasedDeduction::Ended);
    let sold = 1_000 - counts(&sale).await.0;
    eventually("it reports", || async { counts(&sale).await.1 == 0 }).await;
    let totals = units.stop().await.unwrap();
    assert_eq!((totals.sold, totals.reported), (totals.reported, counts(&sale).await.2));
    assert!(sold >= totals.sold);
    clean_audit(&sale).await;
}

async fn it_sells_from_the_opening_on(place: Place) {
    let sale = place.sale(1_000, 1).await;
    let opens = SystemTime::now() + Duration::from_millis(2_500);
    sale.window(Some(opens), None).await.unwrap();
    let units = sale.lease_units().start().await.unwrap();
    let LeasedDeduction::NotStarted { opens_in } = units.deduct(1) else {
        panic!("{:?}", units.deduct(1))
    };
    assert!(opens_in <= Duration::from_millis(2_500), "{opens_in:?}");
    let waited = units.deduct_or_wait(1).await;
    assert!(matches!(waited, LeasedDeduction::NotStarted { .. }), "{waited:?}");
    eventually("it opens", async || units.deduct(1) == LeasedDeduction::Taken).await;
    let (early, late) = (opens - Duration::from_millis(100), opens + Duration::from_secs(1));
    let now = SystemTime::now();
    assert!(early < now && now < late, "{now:?} and {opens:?}");
    assert_eq!(units.stop().await.unwrap().reported, 1);
    clean_audit(&sale).await;
}

async fn more_than_a_lot_or_than_is_left(place: Place) {
    let sale = place.sale(100, 1).await;
    let units = sale.lease_units().lot(10, 10).start().await.unwrap();
    let ends = async |quantity| {
        let answer = tokio::time::timeout(Duration::from_secs(30), units.deduct_or_wait(quantity));
        answer.await.expect("an answer")
    };
    assert_eq!(ends(11).await, LeasedDeduction::Taken);
    assert_eq!(ends(87).await, LeasedDeduction::Taken, "also those of its own lot");
    assert_eq!(ends(3).await, LeasedDeduction::NotEnough { available: 2 });
    assert_eq!(ends(u64::MAX).await, LeasedDeduction::NotEnough { available: 2 });
    assert_eq!(ends(2).await, LeasedDeduction::Taken);
    assert_eq!(ends(1).await, LeasedDeduction::SoldOut);
    assert_eq!(units.stop().await.unwrap().reported, 100);
    assert_eq!(counts(&sale).await, (0, 0, 100));
    clean_audit(&sale).await;
}

async fn ten_processes_have_units_at_once(place: Place) {
    let sale = place.sale(1_000, 1).await;
    let mut all = Vec::new();
    for process in 0..10 {
        let units = place.open_elsewhere("sale").await.lease_units().start().await.unwrap();
        assert_eq!(units.deduct(1), LeasedDeduction::Taken, "process {process}");
        all.push(units);
    }
    for units in all {
        assert_eq!(units.stop().await.unwrap().reported, 1);
    }
    clean_audit(&sale).await;
}

/// A server, and a process that gives up soon.
async fn impatient() -> Option<(RedisServer, Inventory)> {
    let server = RedisServer::start()?;
    let client = Dlock::builder().url(&server.url()).call_timeout(Duration::from_millis(200));
    let dlock = client.connect().await.unwrap();
    let sale = Inventory::builder(&dlock, "sale").stock(100).create().await.unwrap();
    Some((server, sale))
}

async fn small_lots(sale: &Inventory) -> LeasedUnits {
    let lease = sale.lease_units().lot(30, 30).ttl(Duration::from_millis(400));
    lease.start().await.unwrap()
}

/// The server is away for three times as long as a lot lasts, while units are sold.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_report_is_repeated_until_it_is_answered() {
    let Some((server, sale)) = impatient().await else { return };
    let units = small_lots(&sale).await;
    assert_eq!(units.deduct(7), LeasedDeduction::Taken);
    server.pause();
    tokio::time::sleep(Duration::from_millis(1_600)).await;
    let began = Instant::now();
    assert_eq!(units.deduct_or_wait(1).await, LeasedDeduction::NotNow, "it has a deadline");
    assert!(began.elapsed() < Duration::from_secs(2), "{:?}", began.elapsed());
    server.resume();
    eventually("it reports", async || {
        let totals = units.totals();
        totals.reported + totals.late + totals.debt == 7
    })
    .await;
    let totals = units.stop().await.unwrap();
    assert_eq!((totals.sold, totals.late, totals.unknown), (7, 7, 0), "{totals:?}");
    eventually("what was not sold is back", || async { counts(&sale).await == (93, 0, 7) }).await;
    clean_audit(&sale).await;
}

/// It is stopped while the server is away.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn what_nobody_could_report_is_said_at_the_end() {
    let Some((server, sale)) = impatient().await else { return };
    let units = small_lots(&sale).await;
    assert_eq!(units.deduct(7), LeasedDeduction::Taken);
    server.pause();
    let stopped = tokio::time::timeout(Duration::from_secs(10), units.stop()).await;
    assert!(matches!(stopped, Ok(Err(Error::Unknown(None)))), "{stopped:?}");
    assert_eq!((units.totals().sold, units.totals().unknown), (7, 7));
    server.resume();
}

/// While nothing can be sold, a process asks less than once a second.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn what_cannot_be_sold_costs_few_calls() {
    let Some(place) = Place::redis().await else { return };
    let server = place.server.as_ref().expect("a server");
    let in_an_hour = SystemTime::now() + Duration::from_secs(3_600);
    let an_hour_ago = SystemTime::now() - Duration::from_secs(3_600);
    let sale = place.sale(10, 1).await;
    for state in ["paused", "not started", "ended", "sold out"] {
        let units = sale.lease_units().lot(10, 10).start().await.unwrap();
        match state {
            "paused" => drop(sale.pause().await.unwrap()),
            "not started" => drop(sale.window(Some(in_an_hour), None).await.unwrap()),
            "ended" => drop(sale.window(None, Some(an_hour_ago)).await.unwrap()),
            _ => while units.deduct_or_wait(1).await == LeasedDeduction::Taken {},
        }
        eventually(state, async || {
            !matches!(units.deduct(1), LeasedDeduction::Taken | LeasedDeduction::NotNow)
        })
        .await;
        eventually(state, || async { counts(&sale).await.1 == 0 }).await;
        server.cli(&["CONFIG", "RESETSTAT"]);
        let began = Instant::now();
        while began.elapsed() < Duration::from_secs(4) {
            let _ = units.deduct(1);
            tokio::time::sleep(Duration::from_millis(1)).await;
        }
        let told = server.cli(&["INFO", "commandstats"]);
        let told = told.lines().filter_map(|line| line.strip_prefix("cmdstat_evalsha:calls="));
        let calls: u32 = told.filter_map(|line| line.split(',').next()?.parse::<u32>().ok()).sum();
        assert!(calls < 4, "{state}: {calls} calls");
        units.stop().await.unwrap();
        sale.resume().await.unwrap();
        sale.window(None, None).await.unwrap();
    }
    clean_audit(&sale).await;
}
