//! What a sale promises, on every store.

#![allow(clippy::unwrap_used, reason = "a failed step fails the test")]

mod common;

use std::time::{Duration, SystemTime};

use common::{Place, clean_audit, counts, eventually, is_sold_out, taken};
use dlock_segment::{
    Deduction, Effect, Error, HoldState, Inventory, Receipt, Refund, Reservation, Resolved,
};

on_both_stores!(
    create_open_remove,
    all_or_nothing_gathered,
    an_operation_happens_once,
    the_last_buyers_retry_hears_taken,
    refusals_are_not_remembered,
    resolve_settles_for_good,
    reservations,
    a_reservation_expires_by_itself,
    thousands_expire_at_once,
    cancel_before_reserve,
    refunds,
    restock_is_idempotent,
    resize_keeps_receipts,
    buyer_limit,
    an_expired_reservation_frees_the_buyer,
    window_and_pause,
    journal,
    bad_input,
    many_tasks_never_oversell,
    audit_sums_up,
    the_sold_out_flag_falls,
    throttled,
    retention_is_bounded,
    extend_is_done_once,
    one_winner_of_confirm_and_cancel,
);

fn held(reservation: Reservation) -> dlock_segment::Hold {
    match reservation {
        Reservation::Held(hold) => hold,
        other => panic!("not held: {other:?}"),
    }
}

fn refunded(refund: Refund) -> Receipt {
    match refund {
        Refund::Refunded(receipt) => receipt,
        other => panic!("not refunded: {other:?}"),
    }
}

async fn create_open_remove(place: Place) {
    let missing = Inventory::open(&place.dlock, "sale").await;
    assert!(matches!(missing, Err(Error::NotFound(_))));
    let sale = place.sale(10, 4).await;
    taken(sale.deduct(3).send().await.unwrap());
    let again = place.sale(10, 4).await;
    assert_eq!(counts(&again).await, (7, 0, 3), "the same terms: the same sale");
    let other = Inventory::builder(&place.dlock, "sale").stock(11).segments(4).create().await;
    assert!(matches!(other, Err(Error::Conflict(_))));
    let opened = Inventory::open(&place.another().await, "sale").await.unwrap();
    assert_eq!(counts(&opened).await, (7, 0, 3));
    assert!(opened.remove().await.unwrap());
    assert!(!opened.remove().await.unwrap());
    assert!(matches!(sale.deduct(1).send().await, Err(Error::NotFound(_))));
    assert!(matches!(sale.stock().await, Err(Error::NotFound(_))));
    let new = place.sale(5, 2).await;
    let stale = sale.deduct(1).send().await;
    assert!(matches!(stale, Err(Error::NotFound(_))), "an old handle is not the new sale's");
    assert_eq!(counts(&new).await, (5, 0, 0));
}

async fn all_or_nothing_gathered(place: Place) {
    let sale = place.sale(10, 4).await; // 3, 3, 2, 2
    let single = taken(sale.deduct(3).send().await.unwrap());
    assert_eq!(single.parts.len(), 1, "one segment holds 3");
    let gathered = taken(sale.deduct(6).send().await.unwrap());
    assert!(gathered.parts.len() > 1);
    assert_eq!(gathered.parts.iter().map(|(_, count)| count).sum::<u64>(), 6);
    assert!(is_sold_out(&sale.deduct(2).send().await.unwrap()));
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
    let elsewhere = Inventory::open(&place.another().await, "sale").await.unwrap();
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
    assert_eq!(sale.resolve("hold").await.unwrap(), Resolved::Reserved(hold));
    assert_eq!(counts(&sale).await, (3, 1, 1));
    clean_audit(&sale).await;
}

async fn reservations(place: Place) {
    let sale = place.sale(5, 2).await;
    let reserve = || sale.reserve(2).operation("r-1").buyer("u").send();
    let hold = held(reserve().await.unwrap());
    assert_eq!(hold.state, HoldState::Open);
    assert_eq!(held(reserve().await.unwrap()), hold, "asked again: the same");
    assert_eq!(counts(&sale).await, (3, 2, 0));
    match sale.deduct(4).send().await.unwrap() {
        Deduction::SoldOut { reserved: 2, next_expiry: Some(left) } => {
            assert!(left <= Duration::from_secs(900) && left > Duration::from_secs(600));
        }
        other => panic!("{other:?}"),
    }
    let elsewhere = Inventory::open(&place.another().await, "sale").await.unwrap();
    for _ in 0..3 {
        assert_eq!(elsewhere.reservation("r-1").confirm().await.unwrap(), HoldState::Confirmed);
    }
    assert_eq!(sale.reservation("r-1").cancel().await.unwrap(), HoldState::Confirmed);
    assert_eq!(counts(&sale).await, (3, 0, 2));
    held(sale.reserve(3).operation("r-2").send().await.unwrap());
    for _ in 0..3 {
        assert_eq!(sale.reservation("r-2").cancel().await.unwrap(), HoldState::Cancelled);
    }
    assert_eq!(sale.reservation("r-2").confirm().await.unwrap(), HoldState::Cancelled);
    assert_eq!(counts(&sale).await, (3, 0, 2));
    let missing = sale.reservation("r-3").confirm().await;
    assert!(matches!(missing, Err(Error::NotFound(_))));
    taken(sale.deduct(1).operation("d").send().await.unwrap());
    assert!(matches!(sale.reservation("d").confirm().await, Err(Error::Conflict(_))));
    assert!(matches!(sale.reservation("d").cancel().await, Err(Error::Conflict(_))));
    clean_audit(&sale).await;
}

async fn a_reservation_expires_by_itself(place: Place) {
    let sale = place.sale(1, 3).await.sold_out_for(Duration::from_secs(3_600));
    let short = Duration::from_millis(60);
    held(sale.reserve(1).operation("r").expires_in(short).send().await.unwrap());
    // The local flag knows when the reservation expires: it does not outlive it.
    eventually("the unit comes back", || async {
        !is_sold_out(&sale.deduct(1).send().await.unwrap())
    })
    .await;
    assert_eq!(sale.reservation("r").confirm().await.unwrap(), HoldState::Expired);
    assert_eq!(sale.reservation("r").cancel().await.unwrap(), HoldState::Expired);
    assert_eq!(counts(&sale).await, (0, 0, 1), "the late confirm took nothing");
    let hold = held(sale.reserve(1).operation("r").send().await.unwrap());
    assert_eq!(hold.state, HoldState::Expired, "its record stays");
    clean_audit(&sale).await;
}

async fn thousands_expire_at_once(place: Place) {
    let sale = place.sale(2_000, 7).await;
    let short = Duration::from_millis(400);
    let mut holds = tokio::task::JoinSet::new();
    for number in 0..2_000 {
        let sale = sale.clone();
        holds.spawn(async move {
            sale.reserve(1).operation(format!("r-{number}")).expires_in(short).send().await
        });
    }
    while let Some(hold) = holds.join_next().await {
        held(hold.unwrap().unwrap());
    }
    tokio::time::sleep(short + Duration::from_millis(50)).await;
    let all = taken(sale.deduct(2_000).send().await.unwrap());
    assert_eq!(all.quantity, 2_000, "every one of them came back");
    assert_eq!(counts(&sale).await, (0, 0, 2_000));
    clean_audit(&sale).await;
}

async fn cancel_before_reserve(place: Place) {
    let sale = place.sale(5, 2).await;
    assert_eq!(sale.reservation("r").cancel().await.unwrap(), HoldState::Refused);
    assert_eq!(sale.reserve(1).operation("r").send().await.unwrap(), Reservation::Refused);
    assert_eq!(sale.reservation("r").confirm().await.unwrap(), HoldState::Refused);
    assert_eq!(counts(&sale).await, (5, 0, 0));
}

async fn refunds(place: Place) {
    let sale = place.sale(10, 4).await;
    taken(sale.deduct(7).operation("o").buyer("u").send().await.unwrap());
    let part = || sale.refund("o").quantity(2).operation("f-1").send();
    let first = refunded(part().await.unwrap());
    assert_eq!(refunded(part().await.unwrap()), first, "once");
    assert_eq!(counts(&sale).await, (5, 0, 5));
    let other = sale.refund("o").quantity(3).operation("f-1").send().await;
    assert!(matches!(other, Err(Error::Conflict(_))));
    let much = sale.refund("o").quantity(6).operation("f-2").send().await.unwrap();
    assert_eq!(much, Refund::TooMuch { left: 5 });
    let nameless = sale.refund("o").quantity(1).send().await;
    assert!(matches!(nameless, Err(Error::Invalid(_))));
    let rest = refunded(sale.refund("o").send().await.unwrap());
    assert_eq!(rest.quantity, 5);
    assert_eq!(refunded(sale.refund("o").send().await.unwrap()), rest, "once");
    let none = sale.refund("o").quantity(1).operation("f-3").send().await.unwrap();
    assert_eq!(none, Refund::TooMuch { left: 0 });
    assert!(matches!(sale.refund("missing").send().await, Err(Error::NotFound(_))));
    held(sale.reserve(1).operation("r").send().await.unwrap());
    assert!(matches!(sale.refund("r").send().await, Err(Error::Conflict(_))));
    sale.reservation("r").confirm().await.unwrap();
    refunded(sale.refund("r").send().await.unwrap());
    assert_eq!(counts(&sale).await, (10, 0, 0));
    clean_audit(&sale).await;
}

async fn restock_is_idempotent(place: Place) {
    let sale = place.sale(1, 3).await;
    for _ in 0..3 {
        sale.restock(10).operation("delivery").send().await.unwrap();
    }
    assert!(matches!(sale.restock(9).operation("delivery").send().await, Err(Error::Conflict(_))));
    assert_eq!(counts(&sale).await, (11, 0, 0));
    clean_audit(&sale).await;
}

async fn resize_keeps_receipts(place: Place) {
    let sale = place.sale(100, 16).await;
    for number in 0..30 {
        let receipt = taken(sale.deduct(2).operation(format!("o-{number}")).send().await.unwrap());
        let json = serde_json::to_string(&receipt).unwrap();
        assert_eq!(serde_json::from_str::<Receipt>(&json).unwrap(), receipt);
    }
    for number in 0..10 {
        held(sale.reserve(1).operation(format!("r-{number}")).send().await.unwrap());
    }
    for (round, segments) in [3, 40, 1, 7].into_iter().enumerate() {
        let from = round * 6;
        assert_eq!(sale.resize(segments).await.unwrap().segments, segments);
        clean_audit(&sale).await;
        for number in from..from + 5 {
            refunded(sale.refund(format!("o-{number}")).send().await.unwrap());
        }
        let number = round * 2;
        assert_eq!(
            sale.reservation(format!("r-{number}")).confirm().await.unwrap(),
            HoldState::Confirmed
        );
        assert_eq!(
            sale.reservation(format!("r-{}", number + 1)).cancel().await.unwrap(),
            HoldState::Cancelled
        );
        taken(sale.deduct(1).send().await.unwrap());
        clean_audit(&sale).await;
        sale.rebalance().await.unwrap();
        let audit = clean_audit(&sale).await;
        let available: Vec<u64> =
            audit.segments.iter().map(|segment| segment.counts.available).collect();
        let (least, most) = (available.iter().min(), available.iter().max());
        assert!(most.unwrap() - least.unwrap() <= 1, "even: {available:?}");
    }
}

async fn buyer_limit(place: Place) {
    let sale = Inventory::builder(&place.dlock, "sale").stock(100).segments(8).per_buyer(3);
    let sale = sale.create().await.unwrap();
    assert!(matches!(sale.deduct(1).send().await, Err(Error::Invalid(_))), "a buyer is wanted");
    taken(sale.deduct(1).operation("a").buyer("u").send().await.unwrap());
    held(sale.reserve(1).operation("b").buyer("u").send().await.unwrap());
    let two = || sale.deduct(2).buyer("u").send();
    assert_eq!(two().await.unwrap(), Deduction::LimitReached);
    taken(sale.deduct(2).buyer("other").send().await.unwrap());
    sale.reservation("b").cancel().await.unwrap();
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
    taken(sale.deduct(1).send().await.unwrap());
    clean_audit(&sale).await;
}

async fn an_expired_reservation_frees_the_buyer(place: Place) {
    let sale = Inventory::builder(&place.dlock, "sale").stock(100).per_buyer(1);
    let sale = sale.create().await.unwrap();
    let short = Duration::from_millis(60);
    held(sale.reserve(1).operation("r").buyer("u").expires_in(short).send().await.unwrap());
    assert_eq!(sale.deduct(1).buyer("u").send().await.unwrap(), Deduction::LimitReached);
    eventually("the buyer may buy again", || async {
        sale.deduct(1).buyer("u").send().await.unwrap() != Deduction::LimitReached
    })
    .await;
    assert_eq!(counts(&sale).await, (99, 0, 1));
}

async fn window_and_pause(place: Place) {
    let hour = Duration::from_secs(3_600);
    let now = SystemTime::now();
    let sale = Inventory::builder(&place.dlock, "sale").stock(10).opens_at(now + hour);
    let sale = sale.create().await.unwrap();
    match sale.deduct(1).send().await.unwrap() {
        Deduction::NotStarted { opens_in } => {
            assert!(opens_in <= hour + hour / 60 && opens_in > hour / 2)
        }
        other => panic!("{other:?}"),
    }
    sale.window(Some(now - hour), Some(now + hour)).await.unwrap();
    held(sale.reserve(1).operation("r").send().await.unwrap());
    sale.pause().await.unwrap();
    assert_eq!(sale.deduct(1).send().await.unwrap(), Deduction::Paused);
    assert_eq!(sale.reserve(1).operation("x").send().await.unwrap(), Reservation::Paused);
    assert_eq!(sale.reservation("r").confirm().await.unwrap(), HoldState::Confirmed);
    sale.resume().await.unwrap();
    taken(sale.deduct(1).send().await.unwrap());
    sale.window(None, Some(now - hour)).await.unwrap();
    assert_eq!(sale.deduct(1).send().await.unwrap(), Deduction::Ended);
    refunded(sale.refund("r").send().await.unwrap());
    let backwards = sale.window(Some(now), Some(now - hour)).await;
    assert!(matches!(backwards, Err(Error::Invalid(_))));
}

async fn journal(place: Place) {
    let sale = place.sale(10, 2).await;
    assert!(matches!(sale.journal(0).await, Err(Error::Invalid(_))), "it keeps none");
    sale.remove().await.unwrap();
    let sale = Inventory::builder(&place.dlock, "sale").stock(10).segments(2).journal(1_000);
    let sale = sale.create().await.unwrap();
    assert!(sale.journal(0).await.unwrap().is_empty());
    taken(sale.deduct(2).operation("o").buyer("u").send().await.unwrap());
    taken(sale.deduct(2).operation("o").buyer("u").send().await.unwrap());
    held(sale.reserve(1).operation("r").send().await.unwrap());
    sale.reservation("r").confirm().await.unwrap();
    refunded(sale.refund("o").quantity(1).operation("f").send().await.unwrap());
    sale.restock(5).send().await.unwrap();
    sale.resolve("lost").await.unwrap();
    sale.resize(3).await.unwrap();
    taken(sale.deduct(1).send().await.unwrap());
    let entries = sale.journal(0).await.unwrap();
    let sequences: Vec<u64> = entries.iter().map(|entry| entry.sequence).collect();
    assert_eq!(sequences, (1..=8).collect::<Vec<u64>>());
    let effects: Vec<Effect> = entries.iter().map(|entry| entry.effect).collect();
    use Effect::{Confirmed, Refunded, Reserved, Resized, Restocked, Settled, Taken};
    assert_eq!(effects, [Taken, Reserved, Confirmed, Refunded, Restocked, Settled, Resized, Taken]);
    assert_eq!(entries[0].operation.as_deref(), Some("o"));
    assert_eq!(entries[0].whose.as_deref(), Some("u"));
    assert_eq!(entries[3].whose.as_deref(), Some("o"));
    assert_eq!(entries[0].parts.iter().map(|(_, count)| count).sum::<u64>(), 2);
    let rest = sale.journal(5).await.unwrap();
    assert_eq!(rest, entries[5..]);
    assert!(sale.journal(8).await.unwrap().is_empty());
}

async fn bad_input(place: Place) {
    let sale = place.sale(10, 2).await;
    let invalid =
        |result: Result<(), Error>| assert!(matches!(result, Err(Error::Invalid(_))), "{result:?}");
    let huge = "x".repeat(257);
    for quantity in [0, 1 << 32, u64::MAX] {
        invalid(sale.deduct(quantity).send().await.map(drop));
        invalid(sale.reserve(quantity).operation("r").send().await.map(drop));
        invalid(sale.restock(quantity).send().await.map(drop));
        invalid(sale.refund("o").quantity(quantity).operation("f").send().await.map(drop));
        invalid(sale.limit_per_buyer(quantity).await.map(drop));
        let other = Inventory::builder(&place.dlock, "bad").stock(quantity);
        invalid(other.create().await.map(drop));
    }
    for id in ["", huge.as_str(), "a\nb", "tab\t", "nul\0"] {
        invalid(sale.deduct(1).operation(id).send().await.map(drop));
        invalid(sale.deduct(1).buyer(id).send().await.map(drop));
        invalid(sale.reserve(1).operation(id).send().await.map(drop));
        invalid(sale.reservation(id).confirm().await.map(drop));
        invalid(sale.refund(id).send().await.map(drop));
        invalid(sale.resolve(id).await.map(drop));
        invalid(sale.restock(1).operation(id).send().await.map(drop));
    }
    for segments in [0, 4_097, u32::MAX] {
        invalid(sale.resize(segments).await.map(drop));
        let other = Inventory::builder(&place.dlock, "bad").stock(1).segments(segments);
        invalid(other.create().await.map(drop));
    }
    for name in ["", &"n".repeat(600), "a\nb"] {
        invalid(Inventory::open(&place.dlock, name).await.map(drop));
        invalid(Inventory::builder(&place.dlock, name).stock(1).create().await.map(drop));
    }
    for duration in [Duration::ZERO, Duration::from_nanos(1), Duration::MAX] {
        invalid(sale.reserve(1).operation("r").expires_in(duration).send().await.map(drop));
        invalid(sale.reservation("r").extend(duration).await.map(drop));
        let other = Inventory::builder(&place.dlock, "bad").stock(1).retention(duration);
        invalid(other.create().await.map(drop));
    }
    invalid(sale.reserve(1).send().await.map(drop));
    invalid(sale.clone().admit_per_process(0).map(drop));
    assert!(matches!(Inventory::open(&place.dlock, "bad").await, Err(Error::NotFound(_))));
    assert_eq!(counts(&sale).await, (10, 0, 0), "nothing was changed");
    let largest = u64::from(u32::MAX);
    taken(sale.deduct(1).operation("x".repeat(256)).buyer("b b:{}%,é").send().await.unwrap());
    sale.restock(largest).send().await.unwrap();
    taken(sale.deduct(largest).operation("all").send().await.unwrap());
    assert_eq!(counts(&sale).await, (9, 0, largest + 1));
    clean_audit(&sale).await;
}

async fn many_tasks_never_oversell(place: Place) {
    let sale = place.sale(500, 16).await.sold_out_for(Duration::ZERO);
    let elsewhere = Inventory::open(&place.another().await, "sale").await.unwrap();
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
                other => {
                    assert!(is_sold_out(&other), "{other:?}");
                    0
                }
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

async fn audit_sums_up(place: Place) {
    let sale = place.sale(50, 5).await;
    taken(sale.deduct(3).send().await.unwrap());
    taken(sale.deduct(4).operation("o").send().await.unwrap());
    held(sale.reserve(5).operation("r").send().await.unwrap());
    let audit = clean_audit(&sale).await;
    assert_eq!((audit.available, audit.reserved, audit.sold), (38, 5, 7));
    assert_eq!(audit.operations, 2);
    assert_eq!(audit.segments.len(), 5);
    let sums = audit
        .segments
        .iter()
        .fold((0, 0), |(held, sold), segment| (held + segment.held, sold + segment.sold_by_id));
    assert_eq!(sums, (5, 4));
}

async fn the_sold_out_flag_falls(place: Place) {
    let sale = place.sale(1, 1).await.sold_out_for(Duration::from_secs(3_600));
    taken(sale.deduct(1).operation("o").send().await.unwrap());
    assert!(is_sold_out(&sale.deduct(1).send().await.unwrap()));
    let elsewhere = Inventory::open(&place.another().await, "sale").await.unwrap();
    if place.server.is_some() {
        elsewhere.restock(1).send().await.unwrap();
        assert!(is_sold_out(&sale.deduct(1).send().await.unwrap()), "believed without asking");
        assert!(is_sold_out(&sale.deduct(1).operation("n").first_try().send().await.unwrap()));
        taken(sale.deduct(1).operation("retry").send().await.unwrap());
        assert!(is_sold_out(&sale.deduct(1).send().await.unwrap()));
    }
    refunded(sale.refund("o").send().await.unwrap());
    taken(sale.deduct(1).send().await.unwrap());
    let brief = sale.sold_out_for(Duration::from_millis(20));
    eventually("the flag grows old", || async {
        is_sold_out(&brief.deduct(1).send().await.unwrap())
    })
    .await;
    elsewhere.restock(1).send().await.unwrap();
    eventually("the flag grows old", || async {
        !is_sold_out(&brief.deduct(1).send().await.unwrap())
    })
    .await;
}

async fn throttled(place: Place) {
    let sale = place.sale(1_000, 1).await.admit_per_process(1).unwrap();
    let mut refused = 0;
    for _ in 0..20 {
        match sale.deduct(1).send().await {
            Ok(_) => {}
            Err(Error::Throttled { retry_after }) => {
                refused += 1;
                assert!(retry_after <= Duration::from_secs(1));
            }
            Err(other) => panic!("{other}"),
        }
    }
    assert!(refused > 0);
    assert_eq!(counts(&sale).await.2, 20 - refused);
}

async fn retention_is_bounded(place: Place) {
    let retention = Duration::from_millis(300);
    let sale = Inventory::builder(&place.dlock, "sale").stock(100).retention(retention);
    let sale = sale.create().await.unwrap();
    let first = taken(sale.deduct(1).operation("o").send().await.unwrap());
    assert_eq!(taken(sale.deduct(1).operation("o").send().await.unwrap()), first);
    held(sale.reserve(1).operation("r").send().await.unwrap());
    tokio::time::sleep(retention * 2 + Duration::from_millis(50)).await;
    let second = taken(sale.deduct(1).operation("o").send().await.unwrap());
    assert_ne!(second.at, first.at, "its record is gone");
    assert_eq!(
        sale.reservation("r").confirm().await.unwrap(),
        HoldState::Confirmed,
        "an open reservation is kept for as long as it lasts"
    );
    assert_eq!(counts(&sale).await, (97, 0, 3));
    assert!(sale.audit().await.unwrap().is_clean());
}

async fn extend_is_done_once(place: Place) {
    let sale = place.sale(5, 1).await;
    let minute = Duration::from_secs(60);
    let hold = held(sale.reserve(1).operation("r").expires_in(minute).send().await.unwrap());
    let reservation = sale.reservation("r");
    assert_eq!(reservation.extend(minute / 2).await.unwrap(), HoldState::Open);
    assert_eq!(reservation.look().await.unwrap(), hold, "never shorter");
    assert_eq!(reservation.extend(2 * minute).await.unwrap(), HoldState::Open);
    assert!(reservation.look().await.unwrap().expires_at > hold.expires_at + 50_000);
    reservation.cancel().await.unwrap();
    assert_eq!(reservation.extend(minute).await.unwrap(), HoldState::Cancelled);
    let missing = sale.reservation("none").extend(minute).await;
    assert!(matches!(missing, Err(Error::NotFound(_))));
    clean_audit(&sale).await;
}

async fn one_winner_of_confirm_and_cancel(place: Place) {
    let sale = place.sale(50, 4).await;
    let elsewhere = Inventory::open(&place.another().await, "sale").await.unwrap();
    for number in 0..50 {
        let id = format!("r-{number}");
        held(sale.reserve(1).operation(&id).send().await.unwrap());
        let (one, two) = (sale.reservation(&id), elsewhere.reservation(&id));
        let (confirmed, cancelled) = tokio::join!(one.confirm(), two.cancel());
        assert_eq!(confirmed.unwrap(), cancelled.unwrap(), "both hear who won");
    }
    clean_audit(&sale).await;
}
