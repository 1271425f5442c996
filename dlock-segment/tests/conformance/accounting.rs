//! Accounting: refunds, restocks, segments, audit and journal.

use std::time::{Duration, Instant};

use dlock_segment::{Effect, Error, HoldState, JournalCursor, Receipt, Refund, Resolved};

use super::common::{self, Place, clean_audit, counts, taken};
use super::{held, refunded, state_of};
use crate::on_all_stores;

on_all_stores!(
    refunds,
    restock_is_idempotent,
    resize_keeps_receipts,
    audit_sums_up,
    an_audit_is_clean_at_any_age,
    an_audit_of_a_live_sale_gives_no_false_alarm,
    segments_are_read_without_an_audit,
    journal,
);

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
    assert_eq!(state_of(sale.reservation("r").confirm().await), HoldState::Confirmed);
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
            state_of(sale.reservation(format!("r-{number}")).confirm().await),
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

async fn audit_sums_up(place: Place) {
    let sale = place.sale(50, 5).await;
    taken(sale.deduct(3).send().await.unwrap());
    taken(sale.deduct(4).operation("o").send().await.unwrap());
    held(sale.reserve(5).operation("r").send().await.unwrap());
    let audit = clean_audit(&sale).await;
    assert_eq!((audit.available, audit.reserved, audit.sold), (38, 5, 7));
    assert_eq!(audit.operations, 2);
    assert_eq!(audit.segments.len(), 5 * place.homes as usize);
    let sums = audit
        .segments
        .iter()
        .fold((0, 0), |(held, sold), segment| (held + segment.held, sold + segment.sold_by_id));
    assert_eq!(sums, (5, 4));
}

/// Records are written and deleted while the audit counts.
async fn an_audit_is_clean_at_any_age(place: Place) {
    let retention = Duration::from_millis(40);
    let sale = place.builder_by_buyer("sale").stock(1_000_000).segments(4);
    let sale = sale.per_buyer(1_000_000).retention(retention).create().await.unwrap();
    let began = Instant::now();
    let mut number = 0;
    while began.elapsed() < 12 * retention {
        for _ in 0..10 {
            number += 1;
            let id = format!("o-{number}");
            taken(sale.deduct(2).operation(&id).buyer("u").send().await.unwrap());
            if number % 3 == 0 {
                // Unless it is forgotten already, on a slow machine.
                let _ = sale.refund(&id).quantity(1).operation(format!("f-{number}")).send().await;
            }
        }
        let id = format!("r-{number}");
        let lasts = Duration::from_millis(number % 60 + 1);
        held(sale.reserve(1).operation(id).buyer("u").expires_in(lasts).send().await.unwrap());
        let audit = sale.audit().await.unwrap();
        assert_eq!(audit.disagreements, [], "{audit:#?}");
        tokio::time::sleep(Duration::from_millis(1)).await;
    }
    counts(&sale).await;
}

/// Refunds and resizes come while the audit reads.
async fn an_audit_of_a_live_sale_gives_no_false_alarm(place: Place) {
    let sale = place.sale(1_000_000, 8).await;
    let buying = (0..3_000).map(|number| {
        let sale = sale.clone();
        async move { sale.deduct(2).operation(format!("o-{number}")).send().await.unwrap() }
    });
    for bought in futures_util::future::join_all(buying).await {
        taken(bought);
    }
    let live = tokio::spawn({
        let sale = sale.clone();
        async move {
            for number in 0.. {
                let id = format!("o-{}", number % 3_000);
                let _ = sale.refund(&id).quantity(1).operation(format!("f-{number}")).send().await;
                if number % 10 == 0 {
                    sale.resize(1 + number % 13).await.unwrap();
                }
            }
        }
    });
    for _ in 0..15 {
        let audit = sale.audit().await.unwrap();
        assert_eq!(audit.disagreements, [], "exact: {}", audit.exact);
        assert_eq!(audit.is_clean(), audit.exact, "clean means that everything was checked");
    }
    live.abort();
    let _ = live.await;
    common::eventually("it is quiet", async || sale.audit().await.unwrap().exact).await;
    clean_audit(&sale).await;
}

async fn segments_are_read_without_an_audit(place: Place) {
    let sale = place.sale(10, 4).await;
    taken(sale.deduct(3).operation("o").send().await.unwrap());
    let lasts = Duration::from_millis(1);
    held(sale.reserve(2).operation("r").expires_in(lasts).send().await.unwrap());
    tokio::time::sleep(lasts * 5).await;
    let (stock, segments) = sale.segments().await.unwrap();
    assert_eq!((stock.available, stock.reserved, stock.sold), (7, 0, 3), "what expired is back");
    let audit = clean_audit(&sale).await;
    let audited: Vec<_> = audit.segments.iter().map(|segment| segment.counts).collect();
    assert_eq!(segments, audited);
}

async fn journal(place: Place) {
    if place.homes > 1 {
        return journals_of_homes(place).await;
    }
    let sale = place.sale(10, 2).await;
    assert!(matches!(sale.journal(0).await, Err(Error::Invalid(_))), "it keeps none");
    sale.remove().await.unwrap();
    let sale = place.builder("sale").stock(10).segments(2).journal(1_000);
    let sale = sale.create().await.unwrap();
    assert!(sale.journal(0).await.unwrap().is_empty());
    taken(sale.deduct(2).operation("o").buyer("u").send().await.unwrap());
    taken(sale.deduct(2).operation("o").buyer("u").send().await.unwrap());
    held(sale.reserve(1).operation("r").send().await.unwrap());
    assert_eq!(state_of(sale.reservation("r").confirm().await), HoldState::Confirmed);
    refunded(sale.refund("o").quantity(1).operation("f").send().await.unwrap());
    sale.restock(5).send().await.unwrap();
    assert_eq!(sale.resolve("lost").await.unwrap(), Resolved::NotApplied);
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

/// Every home has its own numbers, and the journals together lead to the counts.
async fn journals_of_homes(place: Place) {
    let sale = place.builder("sale").stock(60).segments(2).journal(1_000).create().await.unwrap();
    for number in 0..20 {
        taken(sale.deduct(2).operation(format!("o-{number}")).send().await.unwrap());
    }
    taken(sale.deduct(15).operation("gathered").send().await.unwrap());
    refunded(sale.refund("o-7").send().await.unwrap());
    sale.restock(4).operation("delivery").send().await.unwrap();
    let mut cursor = JournalCursor::default();
    let (mut available, mut in_transit, mut sold, mut taken) = (60, 0_i64, 0_i64, 0);
    loop {
        let entries = sale.journal(&cursor).await.unwrap();
        if entries.is_empty() {
            break;
        }
        for entry in entries {
            assert_eq!(entry.sequence, cursor.sequence(entry.home) + 1);
            let units = entry.quantity as i64;
            let (free, moved, bought) = match entry.effect {
                Effect::Taken => (-units, 0, units),
                Effect::Refunded => (units, 0, -units),
                Effect::Restocked => (units, 0, 0),
                Effect::Sent => (-units, units, 0),
                Effect::Received => (units, -units, 0),
                other => panic!("{other:?}"),
            };
            taken += u32::from(entry.effect == Effect::Taken);
            (available, in_transit, sold) = (available + free, in_transit + moved, sold + bought);
            cursor.advance(&entry);
        }
        // A cursor is stored with what was made of the entries.
        let stored = serde_json::to_string(&cursor).unwrap();
        cursor = serde_json::from_str(&stored).unwrap();
    }
    assert_eq!((available, in_transit, sold, taken), (11, 0, 53, 21));
    assert_eq!(counts(&sale).await, (11, 0, 53));
    clean_audit(&sale).await;
}
