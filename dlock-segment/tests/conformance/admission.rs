//! Answers without the store: the cached "sold out" and the rate limit.

use std::time::Duration;

use dlock_segment::{Error, HoldState};

use super::common::{Place, counts, eventually, is_sold_out, taken};
use super::{held, refunded};
use crate::on_all_stores;

on_all_stores!(
    the_sold_out_flag_falls,
    the_flag_falls_however_units_return,
    an_age_that_no_clock_can_count,
    throttled,
    the_limit_outlives_a_handle,
    handles_share_the_limit_and_what_was_learned,
);

/// Two handles that are opened independently know the same limit and the same "sold out".
async fn handles_share_the_limit_and_what_was_learned(place: Place) {
    let long = Duration::from_secs(3_600);
    let one = place.sale(1, 1).await.sold_out_for(long);
    let id = one.creation_id();
    let two = place.open_created("sale", id).await.unwrap().sold_out_for(long);
    taken(two.deduct(1).send().await.unwrap());
    assert!(is_sold_out(&one.deduct(1).send().await.unwrap()));
    let elsewhere = place.open_elsewhere("sale").await;
    if place.is_remote() {
        elsewhere.restock(1).send().await.unwrap();
        assert!(is_sold_out(&two.deduct(1).send().await.unwrap()), "learned by the other handle");
    }
    let one = one.rate_limit_per_process(1).unwrap();
    let mut refused = 0;
    for _ in 0..20 {
        refused += u32::from(matches!(two.deduct(1).send().await, Err(Error::Throttled { .. })));
    }
    assert!(refused > 0, "the limit is that of the process");
    drop(one);
}

/// A service that opens the sale for each request has one limit.
async fn the_limit_outlives_a_handle(place: Place) {
    drop(place.sale(1_000, 1).await);
    let began = std::time::Instant::now();
    let mut sent = 0;
    for _ in 0..50 {
        let sale = place.open("sale").await.unwrap();
        let sale = sale.rate_limit_per_process(2).unwrap();
        match sale.deduct(1).send().await {
            Ok(_) => sent += 1,
            Err(Error::Throttled { .. }) => {}
            Err(other) => panic!("{other}"),
        }
    }
    let allowed = 2 + 2 * began.elapsed().as_secs() + 2;
    assert!(sent <= allowed, "{sent} of {allowed}");
}

async fn the_sold_out_flag_falls(place: Place) {
    let sale = place.sale(1, 1).await.sold_out_for(Duration::from_secs(3_600));
    taken(sale.deduct(1).operation("o").send().await.unwrap());
    assert!(is_sold_out(&sale.deduct(1).send().await.unwrap()));
    let elsewhere = place.open_elsewhere("sale").await;
    if place.is_remote() {
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

/// When this process sees that units are available again, the cached answer ends at once.
async fn the_flag_falls_however_units_return(place: Place) {
    let sale = place.sale(3, 2).await.sold_out_for(Duration::from_secs(3_600));
    taken(sale.deduct(2).operation("bought").send().await.unwrap());
    let short = Duration::from_secs(2);
    held(sale.reserve(1).operation("brief").expires_in(short).send().await.unwrap());
    let buys_again = async |what: &str| {
        taken(sale.deduct(1).send().await.unwrap());
        assert!(is_sold_out(&sale.deduct(1).send().await.unwrap()), "after {what}");
        assert!(is_sold_out(&sale.deduct(1).send().await.unwrap()), "believed, after {what}");
    };
    assert!(is_sold_out(&sale.deduct(1).send().await.unwrap()));
    eventually("it expires", async || sale.stock().await.unwrap().available == 1).await;
    buys_again("an expiry").await;
    refunded(sale.refund("bought").quantity(1).operation("refund").send().await.unwrap());
    buys_again("a refund").await;
    sale.restock(1).send().await.unwrap();
    buys_again("a restock").await;
    sale.restock(1).send().await.unwrap();
    held(sale.reserve(1).operation("held").send().await.unwrap());
    assert!(is_sold_out(&sale.deduct(1).send().await.unwrap()));
    assert_eq!(sale.reservation("held").cancel().await.unwrap(), HoldState::Cancelled);
    buys_again("a cancellation").await;
    assert_eq!(counts(&sale).await, (0, 0, 5));
}

async fn throttled(place: Place) {
    let sale = place.sale(1_000, 1).await.rate_limit_per_process(1).unwrap();
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

async fn an_age_that_no_clock_can_count(place: Place) {
    let sale = place.sale(1, 1).await.sold_out_for(Duration::MAX);
    taken(sale.deduct(1).operation("o").send().await.unwrap());
    assert!(is_sold_out(&sale.deduct(1).send().await.unwrap()));
    refunded(sale.refund("o").send().await.unwrap());
    taken(sale.deduct(1).send().await.unwrap());
}
