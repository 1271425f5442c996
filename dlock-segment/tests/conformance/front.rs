//! What stands in front of the store.

use std::time::Duration;

use dlock_segment::{Error, Inventory};

use super::common::{self, Place, counts, eventually, is_sold_out, taken};
use super::refunded;
use crate::on_both_stores;

on_both_stores!(the_sold_out_flag_falls, an_age_that_no_clock_can_count, throttled,);

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

async fn an_age_that_no_clock_can_count(place: Place) {
    let sale = place.sale(1, 1).await.sold_out_for(Duration::MAX);
    taken(sale.deduct(1).operation("o").send().await.unwrap());
    assert!(is_sold_out(&sale.deduct(1).send().await.unwrap()));
    refunded(sale.refund("o").send().await.unwrap());
    taken(sale.deduct(1).send().await.unwrap());
}
