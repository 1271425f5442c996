//! Reservations: confirmed, cancelled, extended, expired.

use std::time::Duration;

use dlock_segment::{Deduction, Error, HoldState, Reservation};

use super::common::{Place, clean_audit, counts, eventually, is_sold_out, taken};
use super::{held, state_of};
use crate::on_all_stores;

on_all_stores!(
    reservations,
    a_reservation_expires_by_itself,
    thousands_expire_at_once,
    an_expired_reservation_frees_the_buyer,
    cancel_before_reserve,
    extend_is_done_once,
    one_winner_of_confirm_and_cancel,
    a_receipt_of_another_inventory_is_refused,
);

async fn reservations(place: Place) {
    let sale = place.sale(5, 2).await;
    let reserve = || sale.reserve(2).operation("r-1").buyer("u").send();
    let hold = held(reserve().await.unwrap());
    assert_eq!(hold.state, HoldState::Open);
    assert_eq!(held(reserve().await.unwrap()), hold, "asked again: the same");
    assert_eq!(counts(&sale).await, (3, 2, 0));
    match sale.deduct(4).send().await.unwrap() {
        Deduction::NotEnough { available: 3, reserved: 2, next_expiry: Some(left) } => {
            assert!(left <= Duration::from_secs(900) && left > Duration::from_secs(600));
        }
        other => panic!("{other:?}"),
    }
    let elsewhere = place.open_elsewhere("sale").await;
    for _ in 0..3 {
        assert_eq!(state_of(elsewhere.reservation("r-1").confirm().await), HoldState::Confirmed);
    }
    assert_eq!(sale.reservation("r-1").cancel().await.unwrap(), HoldState::Confirmed);
    assert_eq!(counts(&sale).await, (3, 0, 2));
    held(sale.reserve(3).operation("r-2").send().await.unwrap());
    for _ in 0..3 {
        assert_eq!(sale.reservation("r-2").cancel().await.unwrap(), HoldState::Cancelled);
    }
    assert_eq!(state_of(sale.reservation("r-2").confirm().await), HoldState::Cancelled);
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
    // The cached "sold out" ends when the reservation expires.
    eventually("the unit comes back", || async {
        !is_sold_out(&sale.deduct(1).send().await.unwrap())
    })
    .await;
    assert_eq!(state_of(sale.reservation("r").confirm().await), HoldState::Expired);
    assert_eq!(sale.reservation("r").cancel().await.unwrap(), HoldState::Expired);
    assert_eq!(counts(&sale).await, (0, 0, 1), "the late confirm took nothing");
    let again = sale.reserve(1).operation("r").send().await.unwrap();
    assert!(matches!(again, Reservation::Expired(_)), "its record stays: {again:?}");
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

async fn an_expired_reservation_frees_the_buyer(place: Place) {
    let sale = place.builder_by_buyer("sale").stock(100).per_buyer(1);
    let sale = sale.create().await.unwrap();
    let short = Duration::from_secs(1);
    held(sale.reserve(1).operation("r").buyer("u").expires_in(short).send().await.unwrap());
    assert_eq!(sale.deduct(1).buyer("u").send().await.unwrap(), Deduction::LimitReached);
    eventually("the buyer may buy again", || async {
        sale.deduct(1).buyer("u").send().await.unwrap() != Deduction::LimitReached
    })
    .await;
    assert_eq!(counts(&sale).await, (99, 0, 1));
}

async fn cancel_before_reserve(place: Place) {
    let sale = place.sale(5, 2).await;
    assert_eq!(sale.reservation("r").cancel().await.unwrap(), HoldState::Refused);
    assert_eq!(sale.reserve(1).operation("r").send().await.unwrap(), Reservation::Refused);
    assert_eq!(state_of(sale.reservation("r").confirm().await), HoldState::Refused);
    assert_eq!(counts(&sale).await, (5, 0, 0));
}

async fn extend_is_done_once(place: Place) {
    let sale = place.sale(5, 1).await;
    let minute = Duration::from_secs(60);
    let hold = held(sale.reserve(1).operation("r").expires_in(minute).send().await.unwrap());
    let reservation = sale.reservation("r");
    assert_eq!(reservation.extend(minute / 2).await.unwrap(), hold, "never shorter");
    let longer = reservation.extend(2 * minute).await.unwrap();
    assert!(longer.expires_at > hold.expires_at + 50_000);
    assert_eq!(reservation.get().await.unwrap(), longer);
    assert_eq!(reservation.cancel().await.unwrap(), HoldState::Cancelled);
    let late = reservation.extend(minute).await;
    assert!(matches!(late, Err(Error::NotHeld(HoldState::Cancelled))), "{late:?}");
    let missing = sale.reservation("none").extend(minute).await;
    assert!(matches!(missing, Err(Error::NotFound(_))));
    clean_audit(&sale).await;
}

async fn one_winner_of_confirm_and_cancel(place: Place) {
    let sale = place.sale(50, 4).await;
    let elsewhere = place.open_elsewhere("sale").await;
    for number in 0..50 {
        let id = format!("r-{number}");
        held(sale.reserve(1).operation(&id).send().await.unwrap());
        let (one, two) = (sale.reservation(&id), elsewhere.reservation(&id));
        let (confirmed, cancelled) = tokio::join!(one.confirm(), two.cancel());
        assert_eq!(state_of(confirmed), cancelled.unwrap(), "both hear who won");
    }
    clean_audit(&sale).await;
}

/// The receipt says where the reservation is: a wrong one must not lead to another home, where
/// a cancellation would forbid the id and keep the units reserved.
async fn a_receipt_of_another_inventory_is_refused(place: Place) {
    let sale = place.sale(5, 1).await;
    let other = place.builder("other").stock(5).create().await.unwrap();
    let hold = held(sale.reserve(1).operation("r").send().await.unwrap());
    let foreign = held(other.reserve(1).operation("r").send().await.unwrap());
    let another = held(sale.reserve(1).operation("s").send().await.unwrap());
    for wrong in [&foreign.receipt, &another.receipt] {
        let handle = sale.reservation("r").receipt(wrong);
        let lasts = Duration::from_secs(3_600);
        for refused in [
            handle.cancel().await.map(drop),
            handle.confirm().await.map(drop),
            handle.extend(lasts).await.map(drop),
            handle.get().await.map(drop),
        ] {
            assert!(matches!(refused, Err(Error::Invalid(_))), "{refused:?}");
        }
    }
    let cancelled = sale.reservation("r").receipt(&hold.receipt).cancel().await.unwrap();
    assert_eq!(cancelled, HoldState::Cancelled);
    clean_audit(&sale).await;
}
