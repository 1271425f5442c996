//! Which home a request goes to.

use std::time::Duration;

use dlock_segment::{Deduction, Error, Inventory, Refund, Resolved, Routing};
use dlock_testkit::topology::independent;

use crate::clients;
use crate::common::{clean_audit, counts, taken};

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_routing_is_settled_at_the_creation() {
    let dlock = dlock::testing::client();
    let build = |name: &'static str| Inventory::builder(&dlock, name).stock(60).homes(4);
    let limited = build("a").per_buyer(2).create().await.map(drop);
    assert!(matches!(limited, Err(Error::Invalid(_))), "{limited:?}");
    let by_id = build("a").create().await.unwrap();
    assert_eq!(by_id.routing(), Some(Routing::Operation));
    assert!(matches!(by_id.limit_per_buyer(2).await, Err(Error::Invalid(_))));
    let other = build("a").routed_by(Routing::Buyer).create().await.map(drop);
    assert!(matches!(other, Err(Error::Conflict(_))), "{other:?}");

    let sale = build("b").routed_by(Routing::Buyer).per_buyer(3).create().await.unwrap();
    // All that a buyer has is in one home, so the limit is exact.
    let first = taken(sale.deduct(1).operation("o-1").buyer("u").send().await.unwrap());
    let second = taken(sale.deduct(2).operation("o-2").buyer("u").send().await.unwrap());
    assert_eq!(first.home, second.home);
    let third = sale.deduct(1).operation("o-3").buyer("u").send().await.unwrap();
    assert_eq!(third, Deduction::LimitReached);
    // The same id of a buyer in another home is another operation; a bare id is then not clear.
    let mut other = 0;
    let there = loop {
        other += 1;
        let buyer = format!("v-{other}");
        match sale.deduct(1).operation("o-1").buyer(&buyer).send().await {
            Ok(Deduction::Taken(receipt)) => break receipt,
            Err(Error::Conflict(_)) => {} // it shares the home
            other => panic!("{other:?}"),
        }
    };
    assert_ne!(there.home, first.home);
    let unclear = sale.refund("o-1").send().await;
    assert!(matches!(unclear, Err(Error::Conflict(_))), "{unclear:?}");
    let _ = sale.refund("o-1").buyer("u").send().await.unwrap();
    let _ = sale.refund("o-1").receipt(&there).send().await.unwrap();
    assert_eq!(counts(&sale).await, (58, 0, 2));
    assert!(matches!(sale.resolve("o-2").await.unwrap(), Resolved::Taken(_)), "a bare id is found");
    clean_audit(&sale).await;
}

/// A bare id is acted upon only if all homes have answered: the one that is away may have an
/// operation of another buyer with this id. With the buyer, one home is asked.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_bare_id_is_not_guessed_while_a_home_is_away() {
    let Some(servers) = independent(2) else { return };
    let clients = clients(&servers).await;
    let sale = Inventory::builder(&clients[0], "sale").servers(clients[1..].iter().cloned());
    let sale = sale.stock(20).homes(2).routed_by(Routing::Buyer).create().await.unwrap();
    let mut buyers = [None, None];
    for number in 0.. {
        let buyer = format!("u-{number}");
        let id = format!("o-{number}");
        let receipt = taken(sale.deduct(1).operation(&id).buyer(&buyer).send().await.unwrap());
        buyers[receipt.home as usize].get_or_insert((id, buyer));
        if buyers.iter().all(Option::is_some) {
            break;
        }
    }
    let [(id, buyer), (away_id, away_buyer)] = buyers.map(Option::unwrap);
    servers[1].pause();
    let away = |error: &Error| matches!(error, Error::OutOfReach { homes } if homes == &[1]);
    let bare = sale.refund(&id).send().await.map(drop);
    assert!(matches!(&bare, Err(error) if away(error)), "{bare:?}");
    let bare = sale.resolve(&id).await.map(drop);
    assert!(matches!(&bare, Err(error) if away(error)), "{bare:?}");
    let known = sale.resolve_for(&id, &buyer).await.unwrap();
    assert!(matches!(known, Resolved::Taken(_)), "{known:?}");
    let refunded = sale.refund(&id).buyer(&buyer).send().await.unwrap();
    assert!(matches!(refunded, Refund::Refunded(_)), "{refunded:?}");
    let deadline = Duration::from_millis(300);
    let there = sale.refund(&away_id).buyer(&away_buyer).deadline(deadline).send().await;
    assert!(there.is_err(), "its home is away: {there:?}");
    servers[1].resume();
    let known = sale.resolve_for("never-sent", &buyer).await.unwrap();
    assert_eq!(known, Resolved::NotApplied);
}
