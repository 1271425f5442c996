//! How an inventory is made, opened and changed, and which terms are refused.

use std::time::{Duration, SystemTime};

use dlock_segment::{CreationId, Deduction, Error, HoldState, Inventory, Reservation};

use super::common::{self, Place, clean_audit, counts, taken};
use super::{held, refunded, state_of};
use crate::on_all_stores;

on_all_stores!(
    create_open_remove,
    a_lost_sale_is_not_new,
    changed_terms_are_no_conflict,
    a_stock_of_zero,
    nothing_after_shutdown,
    window_and_pause,
    bad_input,
);

async fn a_lost_sale_is_not_new(mut place: Place) {
    let sale = place.sale(10, 2).await;
    let id = sale.creation_id();
    let kept = serde_json::to_string(&id).unwrap();
    assert_eq!(serde_json::from_str::<CreationId>(&kept).unwrap(), id);
    assert_eq!(id.to_string().parse::<CreationId>().unwrap(), id);
    assert!(matches!("phone".parse::<CreationId>(), Err(Error::Invalid(_))));
    taken(sale.deduct(3).operation("o").send().await.unwrap());
    let opened = place.open_created("sale", id).await.unwrap();
    assert_eq!(counts(&opened).await, (7, 0, 3));

    place.lose_everything().await;
    let lost = place.open_created("sale", id).await;
    assert!(matches!(lost, Err(Error::Lost(_))), "{lost:?}");
    assert!(matches!(place.open("sale").await, Err(Error::NotFound(_))));
    if place.is_remote() {
        let lost = sale.deduct(1).operation("p").send().await;
        assert!(matches!(lost, Err(Error::Lost(_))), "{lost:?}");
        assert!(matches!(sale.stock().await, Err(Error::Lost(_))));
        assert!(matches!(sale.segments().await, Err(Error::Lost(_))));
        assert!(matches!(sale.pause().await, Err(Error::Lost(_))));
    }
    // Somebody makes it again: whoever knows the old one still hears that it was lost.
    let new = place.builder("sale").stock(10).segments(2).create().await.unwrap();
    assert_ne!(new.creation_id(), id);
    let lost = place.open_created("sale", id).await;
    assert!(matches!(lost, Err(Error::Lost(_))), "{lost:?}");
    // What was removed on purpose is not lost.
    assert!(new.remove().await.unwrap());
    let removed = place.open_created("sale", new.creation_id()).await;
    assert!(matches!(removed, Err(Error::NotFound(_))), "{removed:?}");
}

async fn changed_terms_are_no_conflict(place: Place) {
    let builder = |segments, limit| {
        let sale = place.builder_by_buyer("sale").stock(10);
        sale.segments(segments).per_buyer(limit).create()
    };
    let sale = builder(4, 2).await.unwrap();
    sale.resize(8).await.unwrap();
    sale.limit_per_buyer(3).await.unwrap();
    for (segments, limit) in [(4, 2), (8, 3), (8, 2)] {
        assert_eq!(builder(segments, limit).await.unwrap().creation_id(), sale.creation_id());
    }
    let other = place.builder_by_buyer("sale").stock(11).segments(5).per_buyer(3);
    let Err(Error::Conflict(what)) = other.create().await else { panic!("other terms") };
    assert!(
        what.contains("stock is 10, not 11") && what.contains("segments is 8, not 5"),
        "{what}"
    );
    assert!(!what.contains("per_buyer") && !what.contains("remove"), "{what}");
}

async fn a_stock_of_zero(place: Place) {
    let sale = place.sale(0, 3).await;
    assert!(common::is_sold_out(&sale.deduct(1).operation("o").send().await.unwrap()));
    sale.restock(2).operation("delivery").send().await.unwrap();
    taken(sale.deduct(1).operation("o").send().await.unwrap());
    assert_eq!(counts(&sale).await, (1, 0, 1));
    clean_audit(&sale).await;
    let forgotten = place.builder("other").create().await;
    assert!(matches!(forgotten, Err(Error::Invalid(what)) if what.contains("stock")));
}

async fn nothing_after_shutdown(place: Place) {
    let sale = place.sale(1, 1).await.sold_out_for(Duration::from_secs(3_600));
    taken(sale.deduct(1).operation("o").send().await.unwrap());
    assert!(common::is_sold_out(&sale.deduct(1).send().await.unwrap()), "and it is cached");
    place.dlock.shutdown(Duration::ZERO).await;
    let refused = |result: Result<(), Error>| {
        let Err(Error::Store(error)) = &result else { panic!("{result:?}") };
        assert_eq!(error.kind(), dlock::ErrorKind::ShuttingDown, "{error}");
    };
    refused(sale.deduct(1).send().await.map(drop));
    refused(sale.reserve(1).operation("r").send().await.map(drop));
    refused(sale.reservation("r").confirm().await.map(drop));
    refused(sale.restock(1).send().await.map(drop));
    refused(sale.stock().await.map(drop));
    refused(sale.pause().await.map(drop));
    refused(place.open("sale").await.map(drop));
    refused(Inventory::builder(&place.dlock, "new").stock(1).create().await.map(drop));
}

async fn create_open_remove(place: Place) {
    let missing = place.open("sale").await;
    assert!(matches!(missing, Err(Error::NotFound(_))));
    let sale = place.sale(10, 4).await;
    taken(sale.deduct(3).send().await.unwrap());
    let again = place.sale(10, 4).await;
    assert_eq!(counts(&again).await, (7, 0, 3), "the same terms: the same sale");
    let other = place.builder("sale").stock(11).segments(4).create().await;
    assert!(matches!(other, Err(Error::Conflict(_))));
    let opened = place.open_elsewhere("sale").await;
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

async fn window_and_pause(place: Place) {
    let hour = Duration::from_secs(3_600);
    let now = SystemTime::now();
    let sale = place.builder("sale").stock(10).opens_at(now + hour);
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
    assert_eq!(state_of(sale.reservation("r").confirm().await), HoldState::Confirmed);
    sale.resume().await.unwrap();
    taken(sale.deduct(1).send().await.unwrap());
    sale.window(None, Some(now - hour)).await.unwrap();
    assert_eq!(sale.deduct(1).send().await.unwrap(), Deduction::Ended);
    refunded(sale.refund("r").send().await.unwrap());
    let backwards = sale.window(Some(now), Some(now - hour)).await;
    assert!(matches!(backwards, Err(Error::Invalid(_))));
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
        if quantity > 0 {
            let other = Inventory::builder(&place.dlock, "bad").stock(quantity);
            invalid(other.create().await.map(drop));
        }
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
    invalid(sale.clone().rate_limit_per_process(0).map(drop));
    assert!(matches!(Inventory::open(&place.dlock, "bad").await, Err(Error::NotFound(_))));
    assert_eq!(counts(&sale).await, (10, 0, 0), "nothing was changed");
    let largest = u64::from(u32::MAX);
    taken(sale.deduct(1).operation("x".repeat(256)).buyer("b b:{}%,é").send().await.unwrap());
    sale.restock(largest).send().await.unwrap();
    taken(sale.deduct(largest).operation("all").send().await.unwrap());
    assert_eq!(counts(&sale).await, (9, 0, largest + 1));
    clean_audit(&sale).await;
}
