//! The server's clock is set ahead and back across the ends of retentions. What was bought
//! under an id is bought once, and an audit reports nothing wrong.

#![allow(clippy::unwrap_used, reason = "a failed step fails the test")]

mod common;

use std::time::Duration;

use common::{clean_audit, counts, refunded, state_of, taken};
use dlock::Dlock;
use dlock_segment::{Deduction, Error, HoldState, Inventory, Receipt, Refund, Reservation};
use dlock_testkit::redis::{Clock, RedisServer};

const RETENTION: Duration = Duration::from_secs(3_600);

async fn sale(server: &RedisServer) -> Inventory {
    let dlock = Dlock::connect(&server.url()).await.expect("a client");
    let sale = Inventory::builder(&dlock, "sale").stock(100).segments(3).retention(RETENTION);
    sale.per_buyer(50).journal(1_000).create().await.expect("a sale")
}

async fn buy(sale: &Inventory, id: &str) -> Receipt {
    taken(sale.deduct(2).operation(id).buyer("u").send().await.expect("an answer"))
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn what_was_bought_before_a_clock_was_set_back_is_bought_once() {
    let Some((server, clock)) = Clock::of_a_server() else { return };
    let sale = sale(&server).await;
    let first = buy(&sale, "first").await;
    // Into the next generation of records, and back.
    clock.ahead(RETENTION);
    let second = buy(&sale, "second").await;
    let lasts = Duration::from_secs(600);
    let hold = sale.reserve(3).operation("held").buyer("u").expires_in(lasts).send().await;
    assert!(matches!(hold, Ok(Reservation::Held(_))), "{hold:?}");
    clean_audit(&sale).await;
    clock.ahead(Duration::ZERO);
    let audit = clean_audit(&sale).await;
    assert_eq!(audit.operations, 3, "nothing is overlooked");
    let third = buy(&sale, "third").await;
    for (id, receipt) in [("first", &first), ("second", &second), ("third", &third)] {
        assert_eq!(buy(&sale, id).await, *receipt, "{id} again");
    }
    assert_eq!(counts(&sale).await, (91, 3, 6), "each was sold once");
    assert_eq!(clean_audit(&sale).await.operations, 4);
    // If the clock is set back, a reservation lasts longer, never shorter.
    assert_eq!(state_of(sale.reservation("held").confirm().await), HoldState::Confirmed);
    refunded(sale.refund("second").send().await.unwrap());
    // The clock has caught up, and everything works as before.
    clock.ahead(RETENTION);
    assert_eq!(buy(&sale, "third").await, third);
    assert_eq!(counts(&sale).await, (93, 0, 7));
    clean_audit(&sale).await;
}

/// A clock that runs ahead ends the retention of what is on record; set back, the
/// audit must not claim that anything was lost.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_audit_after_a_clock_ran_ahead_and_was_set_back_claims_nothing_wrong() {
    let Some((server, clock)) = Clock::of_a_server() else { return };
    let sale = sale(&server).await;
    buy(&sale, "first").await;
    for generations in [2, 4] {
        clock.ahead(RETENTION * generations);
        buy(&sale, &format!("ahead-{generations}")).await;
        clean_audit(&sale).await;
    }
    clock.ahead(Duration::ZERO);
    let audit = clean_audit(&sale).await;
    assert_eq!((audit.available, audit.sold), (94, 6));
    buy(&sale, "ahead-2").await;
    buy(&sale, "ahead-4").await;
    assert_eq!(counts(&sale).await, (94, 0, 6), "what is on record is sold once");
    // The clock was more than two retentions ahead, so the id is forgotten, as documented.
    buy(&sale, "first").await;
    assert_eq!(counts(&sale).await, (92, 0, 8));
    clean_audit(&sale).await;
}

/// An audit reports what the server deleted while the inventory was not in use.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_audit_says_so_when_a_clock_ahead_made_the_server_drop_records() {
    let Some((server, clock)) = Clock::of_a_server() else { return };
    let sale = sale(&server).await;
    buy(&sale, "first").await;
    let records = server.cli(&["KEYS", "*:io*"]);
    clock.ahead(RETENTION * 4);
    assert_eq!(server.cli(&["EXISTS", &records]), "0", "{records}");
    clock.ahead(Duration::ZERO);
    let audit = sale.audit().await.unwrap();
    let missing = audit.disagreements.iter().any(|it| it.what.contains("sold under an id"));
    assert!(audit.exact && missing, "{audit:#?}");
    assert_eq!(counts(&sale).await, (98, 0, 2), "the counts depend on no clock");
}

/// The record of a purchase is forgotten, its units come back, and then the clock is set back,
/// so that the record is found again.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_return_counts_once_however_the_clock_is_set() {
    let Some((server, clock)) = Clock::of_a_server() else { return };
    let sale = sale(&server).await;
    let receipt = buy(&sale, "first").await;
    clock.ahead(RETENTION * 2);
    assert!(matches!(sale.refund("first").send().await, Err(Error::NotFound(_))));
    refunded(sale.refund("first").receipt(&receipt).send().await.unwrap());
    clock.ahead(Duration::ZERO);
    refunded(sale.refund("first").send().await.unwrap()); // the same refund
    let more = sale.refund("first").operation("more").send().await.unwrap();
    assert_eq!(more, Refund::TooMuch { left: 0 });
    assert_eq!(counts(&sale).await, (100, 0, 0));
    let again = sale.deduct(2).operation("first").buyer("u").send().await.unwrap();
    assert!(matches!(again, Deduction::Refunded(_)), "{again:?}");
    clean_audit(&sale).await;
}
