//! Units that come back after the retention, a retention that is changed, and units that
//! leave the inventory unsold.

use std::time::Duration;

use dlock_segment::{
    Confirmation, Deduction, Effect, Error, GivenBack, HoldState, Inventory, Receipt, Refund,
    Reservation, Resolved, WriteOff,
};

use super::common::{Place, clean_audit, counts, eventually, held, refunded, taken};
use crate::on_all_stores;

on_all_stores!(
    a_return_after_the_retention,
    a_return_is_applied_once_before_and_after_the_retention,
    a_late_return_is_remembered,
    an_id_that_is_used_again_is_another_purchase,
    a_receipt_must_be_that_of_the_sale,
    damaged_units_are_written_off,
    a_write_off,
    a_longer_retention_keeps_what_is_known,
    a_shorter_retention_forgets_nothing_early,
    an_order_is_given_back_whatever_became_of_it,
);

const SHORT: Duration = Duration::from_millis(40);
const DAY: Duration = Duration::from_secs(24 * 3_600);

async fn short_sale(place: &Place) -> Inventory {
    sale_with(place, SHORT).await
}

async fn sale_with(place: &Place, retention: Duration) -> Inventory {
    let sale = place.builder_by_buyer("sale").stock(10).segments(3).per_buyer(4);
    sale.journal(1_000).retention(retention).create().await.unwrap()
}

async fn buy(sale: &Inventory, id: &str, quantity: u64) -> Receipt {
    taken(sale.deduct(quantity).operation(id).buyer("u").send().await.unwrap())
}

/// Waits until the retention of all records is over.
async fn forgotten(sale: &Inventory) {
    eventually("the records are forgotten", || async {
        sale.audit().await.unwrap().operations == 0
    })
    .await;
}

/// Lets the retention pass now, however long the calls before took, and no more from then on.
async fn let_retention_pass(sale: &Inventory) {
    sale.retention(SHORT).await.unwrap();
    forgotten(sale).await;
    sale.retention(DAY).await.unwrap();
}

async fn a_return_after_the_retention(place: Place) {
    let sale = short_sale(&place).await;
    let receipt = buy(&sale, "order", 3).await;
    // A reservation that was confirmed gives a receipt as well.
    let hold = held(sale.reserve(1).operation("held").buyer("u").send().await.unwrap());
    let confirmed = match sale.reservation("held").confirm().await.unwrap() {
        Confirmation::Confirmed(receipt) => receipt,
        other => panic!("{other:?}"),
    };
    // The receipts were stored with the orders.
    let [receipt, confirmed]: [Receipt; 2] = [receipt, confirmed]
        .map(|receipt| serde_json::from_str(&serde_json::to_string(&receipt).unwrap()).unwrap());
    sale.resize(2).await.unwrap();
    forgotten(&sale).await;
    assert_eq!(sale.deduct(1).buyer("u").send().await.unwrap(), Deduction::LimitReached);

    let Err(Error::NotFound(what)) = sale.refund("order").send().await else { panic!("known") };
    assert!(what.contains(".receipt("), "it says what to do: {what}");
    let part = || sale.refund("order").receipt(&receipt).quantity(1).operation("part").send();
    let back = refunded(part().await.unwrap());
    assert_eq!((back.quantity, back.effect), (1, Effect::Refunded));
    assert_eq!(counts(&sale).await, (7, 0, 3));
    assert_eq!(refunded(part().await.unwrap()), back, "the same again");
    refunded(sale.refund("order").receipt(&receipt).send().await.unwrap());
    refunded(sale.refund("held").receipt(&confirmed).send().await.unwrap());
    assert_eq!(counts(&sale).await, (10, 0, 0));
    clean_audit(&sale).await;
    buy(&sale, "next", 4).await; // the buyer's limit is free again

    // Once more, when the records of the refunds are gone as well.
    forgotten(&sale).await;
    assert_eq!(refunded(part().await.unwrap()).parts, back.parts);
    refunded(sale.refund("order").receipt(&receipt).send().await.unwrap());
    let more = sale.refund("order").receipt(&receipt).operation("more").send().await.unwrap();
    assert_eq!(more, Refund::TooMuch { left: 0 });
    assert_eq!(counts(&sale).await, (6, 0, 4));
    clean_audit(&sale).await;

    let refunds: Vec<_> = sale.journal(0).await.unwrap();
    let refunds = refunds.iter().filter(|entry| entry.effect == Effect::Refunded);
    let refunds: Vec<_> = refunds.map(|entry| (entry.whose.as_deref(), entry.quantity)).collect();
    assert_eq!(refunds, [(Some("order"), 1), (Some("order"), 2), (Some("held"), 1)]);
    drop(hold);
}

async fn a_return_is_applied_once_before_and_after_the_retention(place: Place) {
    let sale = sale_with(&place, DAY).await;
    let receipt = buy(&sale, "order", 3).await;
    // With the receipt it is an ordinary refund while the operation is on record.
    let first = || sale.refund("order").receipt(&receipt).quantity(1).operation("first").send();
    let back = refunded(first().await.unwrap());
    let again = sale.deduct(3).operation("order").buyer("u").send().await.unwrap();
    let Deduction::Refunded(left) = again else { panic!("{again:?}") };
    assert_eq!(left.left, 2);
    let_retention_pass(&sale).await;
    let after = refunded(first().await.unwrap());
    assert_eq!((after.quantity, after.at), (back.quantity, back.at), "it is the same return");
    assert_eq!(counts(&sale).await, (8, 0, 2));
    // The receipt that was stored says that 3 are left, and the inventory knows better.
    let all = sale.refund("order").receipt(&receipt).quantity(3).operation("all").send();
    assert_eq!(all.await.unwrap(), Refund::TooMuch { left: 2 });
    let other = sale.refund("order").receipt(&receipt).quantity(2).operation("first").send().await;
    assert!(matches!(other, Err(Error::Conflict(_))), "another quantity: {other:?}");
    refunded(sale.refund("order").receipt(&receipt).send().await.unwrap());
    assert_eq!(counts(&sale).await, (10, 0, 0));
    clean_audit(&sale).await;
}

/// The message of an order is delivered again after its late return.
async fn a_late_return_is_remembered(place: Place) {
    let sale = short_sale(&place).await;
    let receipt = buy(&sale, "order", 2).await;
    held(sale.reserve(1).operation("held").buyer("v").send().await.unwrap());
    let confirmed = sale.reservation("held").confirm().await.unwrap();
    let Confirmation::Confirmed(confirmed) = confirmed else { panic!("{confirmed:?}") };
    forgotten(&sale).await;
    sale.retention(DAY).await.unwrap();
    refunded(sale.refund("order").receipt(&receipt).send().await.unwrap());
    refunded(sale.refund("held").receipt(&confirmed).send().await.unwrap());
    let again = sale.deduct(2).operation("order").buyer("u").send().await.unwrap();
    assert!(matches!(again, Deduction::Refunded(_)), "{again:?}");
    let again = sale.reserve(1).operation("held").buyer("v").send().await.unwrap();
    assert!(matches!(again, Reservation::Refunded(_)), "{again:?}");
    assert_eq!(counts(&sale).await, (10, 0, 0));
    clean_audit(&sale).await;
}

async fn an_id_that_is_used_again_is_another_purchase(place: Place) {
    let sale = short_sale(&place).await;
    let first = buy(&sale, "order", 2).await;
    forgotten(&sale).await;
    sale.retention(DAY).await.unwrap();
    let second = buy(&sale, "order", 1).await;
    assert_ne!(first.at, second.at);
    refunded(sale.refund("order").receipt(&first).send().await.unwrap());
    assert_eq!(counts(&sale).await, (9, 0, 1));
    // The refund of the first must not pass for one of the second.
    let refund = sale.refund("order").send().await;
    assert!(matches!(refund, Err(Error::Conflict(_))), "{refund:?}");
    refunded(sale.refund("order").receipt(&first).send().await.unwrap());
    assert_eq!(counts(&sale).await, (9, 0, 1), "the first was given back once");
    refunded(sale.refund("order").operation("second").send().await.unwrap());
    assert_eq!(counts(&sale).await, (10, 0, 0));
    clean_audit(&sale).await;
}

async fn a_receipt_must_be_that_of_the_sale(place: Place) {
    let sale = short_sale(&place).await;
    let receipt = buy(&sale, "order", 2).await;
    let hold = sale.reserve(1).operation("held").buyer("u").expires_in(SHORT).send().await.unwrap();
    let Reservation::Held(hold) = hold else { panic!("{hold:?}") };
    let other = place.builder("other").stock(10).create().await.unwrap();
    taken(other.deduct(5).operation("order").send().await.unwrap());
    forgotten(&sale).await;
    let before = counts(&sale).await;
    let invalid = |refund: dlock_segment::Result<Refund>| match refund {
        Err(Error::Invalid(what)) => what,
        refund => panic!("{refund:?}"),
    };
    // An expired reservation gave its units back by itself.
    invalid(sale.refund("held").receipt(&hold.receipt).send().await);
    invalid(sale.refund("held").receipt(&receipt).send().await);
    invalid(other.refund("order").receipt(&receipt).send().await);
    let mut wrong = receipt.clone();
    wrong.quantity += 1;
    invalid(sale.refund("order").receipt(&wrong).send().await);
    // Counts never go below zero, whatever a receipt says.
    let mut wrong = receipt.clone();
    (wrong.quantity, wrong.at) = (9, wrong.at + 1);
    wrong.parts = [(0, 9)].into_iter().collect();
    let refund = sale.refund("order").receipt(&wrong).send().await;
    assert!(matches!(refund, Err(Error::Conflict(_))), "{refund:?}");
    assert_eq!(counts(&sale).await, before);
    refunded(sale.refund("order").receipt(&receipt).send().await.unwrap());
    clean_audit(&sale).await;
}

async fn damaged_units_are_written_off(place: Place) {
    let sale = sale_with(&place, DAY).await;
    let receipt = buy(&sale, "order", 4).await;
    let broken = || sale.refund("order").quantity(1).operation("broken").damaged();
    let back = refunded(broken().send().await.unwrap());
    assert_eq!(back.effect, Effect::RefundedDamaged);
    let stock = sale.stock().await.unwrap();
    assert_eq!((stock.available, stock.sold, stock.written_off), (6, 3, 1));
    refunded(broken().send().await.unwrap());
    let intact = sale.refund("order").quantity(1).operation("broken").send().await;
    assert!(matches!(intact, Err(Error::Conflict(_))), "{intact:?}");
    let_retention_pass(&sale).await;
    refunded(broken().receipt(&receipt).send().await.unwrap());
    refunded(sale.refund("order").receipt(&receipt).damaged().send().await.unwrap());
    let stock = sale.stock().await.unwrap();
    assert_eq!((stock.available, stock.sold, stock.written_off), (6, 0, 4));
    let audit = clean_audit(&sale).await;
    assert_eq!(audit.written_off, 4);
    buy(&sale, "next", 4).await; // it does not count against the buyer any more
}

async fn a_write_off(place: Place) {
    let sale = short_sale(&place).await;
    sale.retention(DAY).await.unwrap();
    held(sale.reserve(2).operation("held").buyer("u").send().await.unwrap());
    sale.pause().await.unwrap();
    let write_off = |units, id: &str| sale.write_off(units).operation(id).send();
    let answer = write_off(7, "damage").await.unwrap();
    let WriteOff::WrittenOff(receipt) = &answer else { panic!("{answer:?}") };
    assert_eq!((receipt.quantity, receipt.effect), (7, Effect::WrittenOff));
    assert_eq!(write_off(7, "damage").await.unwrap(), answer, "once");
    assert!(matches!(write_off(6, "damage").await, Err(Error::Conflict(_))));
    assert!(matches!(sale.write_off(1).send().await, Err(Error::Invalid(_))));
    let more = write_off(2, "more").await.unwrap();
    assert_eq!(more, WriteOff::NotEnough { available: 1, reserved: 2 });
    let _ = sale.resolve("never").await.unwrap();
    assert_eq!(write_off(1, "never").await.unwrap(), WriteOff::Refused);
    assert!(matches!(sale.resolve("damage").await.unwrap(), Resolved::WrittenOff(_)));
    let refund = sale.refund("damage").send().await;
    assert!(matches!(refund, Err(Error::Conflict(_))), "it was not sold: {refund:?}");
    assert_eq!(counts(&sale).await, (1, 2, 0));
    for segments in [5, 1] {
        sale.resize(segments).await.unwrap();
        clean_audit(&sale).await;
    }
    sale.rebalance().await.unwrap();
    assert_eq!(sale.restock(7).send().await.unwrap().quantity, 7);
    let audit = clean_audit(&sale).await;
    assert_eq!((audit.available, audit.written_off), (8, 7));
    let entries = sale.journal(0).await.unwrap();
    let entry = entries.iter().find(|entry| entry.effect == Effect::WrittenOff).unwrap();
    assert_eq!((entry.operation.as_deref(), entry.quantity), (Some("damage"), 7));
    assert_eq!(entry.parts.iter().map(|part| part.1).sum::<u64>(), 7);
}

async fn a_longer_retention_keeps_what_is_known(place: Place) {
    let sale = place.builder_by_buyer("sale").stock(10).per_buyer(4).retention(DAY);
    let sale = sale.create().await.unwrap();
    // Two generations: nearly forgotten, and just written.
    sale.retention(Duration::from_secs(2)).await.unwrap();
    let old = buy(&sale, "old", 1).await;
    let made = sale.stock().await.unwrap().now;
    eventually("the next generation", || async { sale.stock().await.unwrap().now > made + 2_000 })
        .await;
    let new = buy(&sale, "new", 1).await;
    assert_eq!(sale.retention(DAY).await.unwrap().retention, DAY.as_millis() as u64);
    let made = sale.stock().await.unwrap().now;
    eventually("the old retention is over twice", || async {
        sale.stock().await.unwrap().now > made + 6_400
    })
    .await;
    assert_eq!(buy(&sale, "old", 1).await, old);
    assert_eq!(buy(&sale, "new", 1).await, new);
    assert_eq!(counts(&sale).await, (8, 0, 2));
    assert_eq!(clean_audit(&sale).await.operations, 2);
}

async fn a_shorter_retention_forgets_nothing_early(place: Place) {
    let sale = place.builder_by_buyer("sale").stock(10).per_buyer(4).retention(DAY);
    let sale = sale.create().await.unwrap();
    let receipt = buy(&sale, "order", 1).await;
    let now = sale.retention(Duration::from_secs(5)).await.unwrap().now;
    assert_eq!(buy(&sale, "order", 1).await, receipt, "still known");
    sale.retention(SHORT).await.unwrap();
    forgotten(&sale).await;
    assert!(sale.stock().await.unwrap().now - now >= SHORT.as_millis() as u64);
    buy(&sale, "order", 1).await;
    assert_eq!(counts(&sale).await, (8, 0, 2), "it counts as new");
    clean_audit(&sale).await;
    assert!(matches!(sale.retention(Duration::ZERO).await, Err(Error::Invalid(_))));
}

async fn an_order_is_given_back_whatever_became_of_it(place: Place) {
    let sale = place.builder_by_buyer("sale").stock(20).create().await.unwrap();
    let give_back = async |id: &str| sale.give_back(id).buyer("u").send().await;
    taken(sale.deduct(2).operation("sold").buyer("u").send().await.unwrap());
    let reserve = async |id: &str| sale.reserve(3).operation(id).buyer("u").send().await.unwrap();
    held(reserve("held").await);
    held(reserve("paid").await);
    let paid = sale.reservation("paid").buyer("u").confirm().await.unwrap();
    assert!(matches!(paid, Confirmation::Confirmed(_)), "{paid:?}");
    taken(sale.deduct(4).operation("in parts").buyer("u").send().await.unwrap());
    for (id, quantity) in [("part-1", 1), ("part-2", 3)] {
        let part = sale.refund("in parts").buyer("u").quantity(quantity).operation(id);
        refunded(part.send().await.unwrap());
    }
    let _ = sale.restock(1).operation("restock").send().await.unwrap();
    for _ in 0..2 {
        for (id, units) in [("sold", 2), ("paid", 3)] {
            let back = give_back(id).await.unwrap();
            let GivenBack::Refunded(receipt) = &back else { panic!("{id}: {back:?}") };
            assert_eq!(receipt.quantity, units);
        }
        assert_eq!(give_back("held").await.unwrap(), GivenBack::NotSold(HoldState::Cancelled));
        assert_eq!(give_back("in parts").await.unwrap(), GivenBack::NothingLeft);
        assert_eq!(give_back("not yet").await.unwrap(), GivenBack::NotOnRecord);
    }
    let refused = sale.deduct(1).operation("not yet").buyer("u").send().await.unwrap();
    assert_eq!(refused, Deduction::Refused);
    let other = sale.give_back("restock").send().await;
    assert!(matches!(other, Err(Error::Conflict(_))), "{other:?}");
    assert_eq!(counts(&sale).await, (21, 0, 0));
    clean_audit(&sale).await;
    // After the retention, by its receipt.
    let sale = place.builder("other").stock(5).retention(SHORT).create().await.unwrap();
    let receipt = taken(sale.deduct(2).operation("old").send().await.unwrap());
    eventually("it is forgotten", || async {
        tokio::time::sleep(SHORT).await;
        sale.audit().await.unwrap().operations == 0
    })
    .await;
    let back = sale.give_back("old").receipt(&receipt).send().await.unwrap();
    assert!(matches!(back, GivenBack::Refunded(_)), "{back:?}");
    assert_eq!(counts(&sale).await, (5, 0, 0));
}
