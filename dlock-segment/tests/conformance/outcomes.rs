//! An answer cannot be taken for more than it is: what was given back is not sold, what is
//! over is not held, and what is too few is not sold out.

use std::time::Duration;

use dlock_segment::{
    Confirmation, Deduction, Error, HoldState, Receipt, Refund, Reservation, Resolved,
};

use super::common::{Place, clean_audit, counts, eventually, is_sold_out, taken};
use super::{held, refunded, state_of};
use crate::on_all_stores;

on_all_stores!(
    a_refunded_order_is_not_sold_again,
    a_refunded_reservation_is_not_confirmed_again,
    only_an_open_reservation_is_held,
    a_late_confirmation_is_an_error,
    too_few_is_not_sold_out,
    too_few_is_remembered_as_too_few,
);

fn units(receipt: &Receipt) -> (u64, u64) {
    (receipt.quantity, receipt.left)
}

/// A message that is delivered again must not make an order out of units that were given
/// back.
async fn a_refunded_order_is_not_sold_again(place: Place) {
    let sale = place.sale(5, 2).await;
    let order = || sale.deduct(3).operation("o").buyer("u").send();
    assert_eq!(units(&taken(order().await.unwrap())), (3, 3));

    let part = || sale.refund("o").quantity(1).operation("f").send();
    assert_eq!(units(&refunded(part().await.unwrap())), (1, 1));
    match order().await.unwrap() {
        Deduction::Refunded(receipt) => assert_eq!(units(&receipt), (3, 2)),
        other => panic!("{other:?}"),
    }
    assert_eq!(units(&refunded(sale.refund("o").send().await.unwrap())), (2, 2));
    let elsewhere = place.open_elsewhere("sale").await;
    for sale in [&sale, &elsewhere] {
        match sale.deduct(3).operation("o").buyer("u").send().await.unwrap() {
            Deduction::Refunded(receipt) => assert_eq!(units(&receipt), (3, 0)),
            other => panic!("{other:?}"),
        }
        match sale.resolve("o").await.unwrap() {
            Resolved::Refunded(receipt) => assert_eq!(units(&receipt), (3, 0)),
            other => panic!("{other:?}"),
        }
    }
    refunded(part().await.unwrap()); // the refund itself stays done
    assert!(matches!(sale.resolve("f").await.unwrap(), Resolved::RefundDone(_)));
    let more = sale.refund("o").quantity(1).operation("g").send().await.unwrap();
    assert_eq!(more, Refund::TooMuch { left: 0 });
    assert_eq!(counts(&sale).await, (5, 0, 0));
    clean_audit(&sale).await;
}

async fn a_refunded_reservation_is_not_confirmed_again(place: Place) {
    let sale = place.sale(5, 2).await;
    let reserve = || sale.reserve(2).operation("r").send();
    held(reserve().await.unwrap());
    let reservation = sale.reservation("r");
    match reservation.confirm().await.unwrap() {
        Confirmation::Confirmed(receipt) => assert_eq!(units(&receipt), (2, 2)),
        other => panic!("{other:?}"),
    }
    assert!(matches!(reserve().await.unwrap(), Reservation::Confirmed(_)));
    assert!(matches!(sale.resolve("r").await.unwrap(), Resolved::Confirmed(_)));

    for (quantity, left) in [(1, 1), (1, 0)] {
        let refund = sale.refund("r").quantity(quantity).operation(format!("f-{left}"));
        refunded(refund.send().await.unwrap());
        match reservation.confirm().await.unwrap() {
            Confirmation::Refunded(receipt) => assert_eq!(units(&receipt), (2, left)),
            other => panic!("{other:?}"),
        }
        match reserve().await.unwrap() {
            Reservation::Refunded(receipt) => assert_eq!(units(&receipt), (2, left)),
            other => panic!("{other:?}"),
        }
        assert!(matches!(sale.resolve("r").await.unwrap(), Resolved::Refunded(_)));
        assert_eq!(reservation.cancel().await.unwrap(), HoldState::Refunded);
        assert_eq!(reservation.get().await.unwrap().state, HoldState::Refunded);
    }
    assert_eq!(counts(&sale).await, (5, 0, 0));
    clean_audit(&sale).await;
}

/// Whoever matches `Held` goes on to the payment.
async fn only_an_open_reservation_is_held(place: Place) {
    let sale = place.sale(9, 2).await;
    let reserve = |id: &'static str, lasts: u64| {
        sale.reserve(2).operation(id).expires_in(Duration::from_millis(lasts)).send()
    };
    for id in ["open", "confirmed", "cancelled"] {
        assert_eq!(held(reserve(id, 60_000).await.unwrap()).state, HoldState::Open);
    }
    held(reserve("expired", 40).await.unwrap());
    assert_eq!(state_of(sale.reservation("confirmed").confirm().await), HoldState::Confirmed);
    assert_eq!(sale.reservation("cancelled").cancel().await.unwrap(), HoldState::Cancelled);
    eventually("it expires", || async { counts(&sale).await.1 == 2 }).await;

    assert_eq!(held(reserve("open", 60_000).await.unwrap()).receipt.left, 2);
    match reserve("confirmed", 60_000).await.unwrap() {
        Reservation::Confirmed(receipt) => assert_eq!(units(&receipt), (2, 2)),
        other => panic!("{other:?}"),
    }
    match reserve("cancelled", 60_000).await.unwrap() {
        Reservation::Cancelled(hold) => assert_eq!(units(&hold.receipt), (2, 0)),
        other => panic!("{other:?}"),
    }
    match reserve("expired", 40).await.unwrap() {
        Reservation::Expired(hold) => assert_eq!(units(&hold.receipt), (2, 0)),
        other => panic!("{other:?}"),
    }
    assert!(matches!(sale.resolve("open").await.unwrap(), Resolved::Held(_)));
    assert!(matches!(sale.resolve("expired").await.unwrap(), Resolved::Expired(_)));
    assert!(matches!(sale.resolve("cancelled").await.unwrap(), Resolved::Cancelled(_)));
    assert_eq!(counts(&sale).await, (5, 2, 2));
    clean_audit(&sale).await;
}

/// `confirm().await?` must not let a payment through that came too late.
async fn a_late_confirmation_is_an_error(place: Place) {
    let sale = place.sale(5, 1).await;
    let short = Duration::from_millis(40);
    held(sale.reserve(1).operation("late").expires_in(short).send().await.unwrap());
    held(sale.reserve(1).operation("cancelled").send().await.unwrap());
    assert_eq!(sale.reservation("cancelled").cancel().await.unwrap(), HoldState::Cancelled);
    assert_eq!(sale.reservation("refused").cancel().await.unwrap(), HoldState::Refused);
    eventually("it expires", || async { counts(&sale).await.1 == 0 }).await;
    for (id, state) in [
        ("late", HoldState::Expired),
        ("cancelled", HoldState::Cancelled),
        ("refused", HoldState::Refused),
    ] {
        let reservation = sale.reservation(id);
        let confirmed = reservation.confirm().await.map(drop);
        let extended = reservation.extend(short).await.map(drop);
        for answer in [confirmed, extended] {
            let Err(error @ Error::NotHeld(said)) = &answer else { panic!("{id}: {answer:?}") };
            assert_eq!(*said, state, "{id}");
            assert!(!error.is_retryable(), "{error}");
            assert!(error.to_string().contains("give the money back"), "{error}");
        }
        assert_eq!(reservation.cancel().await.unwrap(), state);
    }
    assert_eq!(counts(&sale).await, (5, 0, 0), "nothing was sold");
    held(sale.reserve(1).operation("sold").send().await.unwrap());
    assert_eq!(state_of(sale.reservation("sold").confirm().await), HoldState::Confirmed);
    let error = sale.reservation("sold").extend(short).await.unwrap_err();
    assert!(matches!(error, Error::NotHeld(HoldState::Confirmed)), "{error:?}");
    assert!(!error.to_string().contains("money"), "it is sold: {error}");
    clean_audit(&sale).await;
}

async fn too_few_is_not_sold_out(place: Place) {
    let sale = place.sale(12, 3).await.sold_out_for(Duration::ZERO);
    held(sale.reserve(2).operation("r").send().await.unwrap());
    for (id, answer) in [
        ("", sale.deduct(11).send().await.unwrap()),
        ("o", sale.deduct(11).operation("o").send().await.unwrap()),
    ] {
        let Deduction::NotEnough { available, reserved, next_expiry } = answer else {
            panic!("{id}: {answer:?}");
        };
        assert_eq!((available, reserved, next_expiry.is_some()), (10, 2, true), "{id}");
    }
    let reservation = sale.reserve(11).operation("s").send().await.unwrap();
    assert!(
        matches!(reservation, Reservation::NotEnough { available: 10, reserved: 2, .. }),
        "{reservation:?}"
    );
    taken(sale.deduct(10).operation("o").send().await.unwrap()); // all that is left
    let none = sale.deduct(1).send().await.unwrap();
    assert!(matches!(none, Deduction::SoldOut { reserved: 2, .. }), "{none:?}");
    clean_audit(&sale).await;
}

/// The answers that need no round trip tell the same.
async fn too_few_is_remembered_as_too_few(place: Place) {
    let sale = place.sale(3, 2).await.sold_out_for(Duration::from_secs(3_600));
    for _ in 0..3 {
        let four = sale.deduct(4).operation("o").first_try().send().await.unwrap();
        assert!(matches!(four, Deduction::NotEnough { available: 3, .. }), "{four:?}");
        let four = sale.reserve(4).operation("r").first_try().send().await.unwrap();
        assert!(matches!(four, Reservation::NotEnough { available: 3, .. }), "{four:?}");
    }
    taken(sale.deduct(3).send().await.unwrap());
    for _ in 0..3 {
        assert!(is_sold_out(&sale.deduct(1).send().await.unwrap()));
        assert!(is_sold_out(&sale.deduct(4).send().await.unwrap()));
    }
}
