//! What depends on time: on the embedded store with paused time, exact to the millisecond
//! and without waiting.

#![allow(clippy::unwrap_used, reason = "a failed step fails the test")]

mod common;

use std::time::{Duration, SystemTime};

use common::{Place, clean_audit, counts, is_sold_out, state_of, taken};
use dlock::Dlock;
use dlock_segment::{Deduction, HoldState, Inventory, Reservation};
use tokio::time::{Instant, advance};

const MS: Duration = Duration::from_millis(1);
const MINUTE: Duration = Duration::from_secs(60);

/// The embedded clock starts with the real time, a moment after the clock of the test was
/// paused.
async fn clock_runs() {
    advance(MINUTE).await;
}

async fn sale(stock: u64) -> Inventory {
    Place::memory().expect("it is embedded").sale(stock, 2).await
}

async fn reserved(sale: &Inventory, operation: &str, expires_in: Duration) {
    let reserved = sale.reserve(1).operation(operation).expires_in(expires_in).send().await;
    assert!(matches!(reserved, Ok(Reservation::Held(_))), "{reserved:?}");
}

#[tokio::test(start_paused = true)]
async fn a_reservation_ends_in_its_millisecond() {
    clock_runs().await;
    let sale = sale(1).await.sold_out_for(Duration::ZERO);
    reserved(&sale, "r", 15 * MINUTE).await;
    advance(15 * MINUTE - 2 * MS).await;
    match sale.deduct(1).send().await.unwrap() {
        Deduction::SoldOut { reserved: 1, next_expiry: Some(left) } => {
            assert!(left <= 2 * MS, "{left:?}")
        }
        other => panic!("{other:?}"),
    }
    advance(2 * MS).await;
    taken(sale.deduct(1).send().await.unwrap());
    assert_eq!(state_of(sale.reservation("r").confirm().await), HoldState::Expired);
    assert_eq!(counts(&sale).await, (0, 0, 1));
    clean_audit(&sale).await;
}

#[tokio::test(start_paused = true)]
async fn an_extended_reservation_ends_later() {
    clock_runs().await;
    let sale = sale(1).await.sold_out_for(Duration::ZERO);
    reserved(&sale, "r", MINUTE).await;
    advance(MINUTE - MS).await;
    assert_eq!(sale.reservation("r").extend(MINUTE).await.unwrap().state, HoldState::Open);
    advance(MINUTE - MS).await;
    assert!(is_sold_out(&sale.deduct(1).send().await.unwrap()));
    assert_eq!(state_of(sale.reservation("r").confirm().await), HoldState::Confirmed);
    assert_eq!(counts(&sale).await, (0, 0, 1));
}

#[tokio::test(start_paused = true)]
async fn the_flag_is_believed_for_its_age_and_no_longer_than_the_next_reservation() {
    clock_runs().await;
    let connect = || Dlock::connect("memory://time-of-the-flag");
    let (here, there) = (connect().await.unwrap(), connect().await.unwrap());
    let age = 10 * MINUTE;
    let sale = Inventory::builder(&here, "sale").stock(1).create().await.unwrap();
    let sale = sale.sold_out_for(age);
    let elsewhere = Inventory::open(&there, "sale").await.unwrap();
    taken(sale.deduct(1).send().await.unwrap());
    assert!(is_sold_out(&sale.deduct(1).send().await.unwrap()));
    elsewhere.restock(1).send().await.unwrap(); // which this client does not see
    advance(age - MS).await;
    assert!(is_sold_out(&sale.deduct(1).send().await.unwrap()), "believed without asking");
    advance(MS).await;
    taken(sale.deduct(1).send().await.unwrap());

    sale.restock(1).send().await.unwrap();
    reserved(&sale, "r", MINUTE).await;
    assert!(is_sold_out(&sale.deduct(1).send().await.unwrap()));
    advance(MINUTE).await;
    taken(sale.deduct(1).send().await.unwrap());
}

#[tokio::test(start_paused = true)]
async fn a_window_opens_and_closes() {
    clock_runs().await;
    let place = Place::memory().expect("it is embedded");
    let opens = SystemTime::now() + 60 * MINUTE;
    let sale = Inventory::builder(&place.dlock, "window").stock(10).opens_at(opens);
    let sale = sale.closes_at(opens + 60 * MINUTE).create().await.unwrap();
    let Deduction::NotStarted { opens_in } = sale.deduct(1).send().await.unwrap() else {
        panic!("it has begun");
    };
    advance(opens_in - MS).await;
    assert!(matches!(sale.deduct(1).send().await.unwrap(), Deduction::NotStarted { .. }));
    advance(MS).await;
    taken(sale.deduct(1).send().await.unwrap());
    advance(60 * MINUTE - MS).await;
    taken(sale.deduct(1).send().await.unwrap());
    advance(MS).await;
    assert_eq!(sale.deduct(1).send().await.unwrap(), Deduction::Ended);
}

#[tokio::test(start_paused = true)]
async fn a_record_lasts_for_the_retention_and_at_most_twice_as_long() {
    clock_runs().await;
    let place = Place::memory().expect("it is embedded");
    let sale = Inventory::builder(&place.dlock, "sale").stock(10).retention(MINUTE);
    let sale = sale.create().await.unwrap();
    let once = || async { taken(sale.deduct(1).operation("o").send().await.unwrap()) };
    let first = once().await;
    let began = Instant::now();
    while began.elapsed() < MINUTE - MS {
        assert_eq!(once().await, first);
        advance((MINUTE - MS) / 10).await;
    }
    advance(2 * MINUTE).await;
    assert_ne!(once().await, first, "its record is gone");
    assert_eq!(counts(&sale).await, (8, 0, 2));
}
