//! The journal as an outbox.

use dlock_segment::{Effect, Error, Inventory};

use super::common::{Place, taken};
use super::shop::Shop;

pub(crate) async fn entries_are_delivered_until_they_are_acknowledged<S: Shop>(
    place: &Place,
    shop: &S,
) {
    let sale = Inventory::builder(&place.dlock, "sale").stock(100).journal(10);
    let sale = sale.create().await.unwrap();
    for number in 0..5 {
        taken(sale.deduct(1).operation(format!("o-{number}")).buyer("u").send().await.unwrap());
    }
    let outbox = sale.outbox("billing").unwrap();
    let first = outbox.next(3).await.unwrap();
    assert_eq!(first.iter().map(|it| it.sequence).collect::<Vec<_>>(), [1, 2, 3]);
    assert_eq!((first[0].effect, first[0].quantity), (Effect::Taken, 1));
    assert_eq!(first[0].operation.as_deref(), Some("o-0"));
    assert_eq!(outbox.next(3).await.unwrap(), first, "nothing was acknowledged");
    outbox.acknowledge(2).await.unwrap();
    outbox.acknowledge(1).await.unwrap(); // an old one comes late
    let next = outbox.next(10).await.unwrap();
    assert_eq!(next.iter().map(|it| it.sequence).collect::<Vec<_>>(), [3, 4, 5]);

    // With what is written about the entries: all or nothing.
    let mut tx = shop.begin().await;
    outbox.acknowledge_in(&mut tx, 5).await.unwrap();
    S::roll_back(tx).await;
    assert_eq!(outbox.next(10).await.unwrap(), next);
    let mut tx = shop.begin().await;
    outbox.acknowledge_in(&mut tx, 4).await.unwrap();
    S::commit(tx).await.unwrap();
    assert_eq!(outbox.next(10).await.unwrap().len(), 1);

    // Another reader begins from the start, and nobody gets ahead of the journal.
    assert_eq!(sale.outbox("report").unwrap().next(10).await.unwrap().len(), 5);
    outbox.acknowledge(1_000).await.unwrap();
    assert_eq!(outbox.next(10).await.unwrap(), []);
    let mut tx = shop.begin().await;
    taken(sale.deduct(1).buyer("u").send_in(&mut tx).await.unwrap());
    assert_eq!(
        sale.journal(5).await.map(|entries| entries.len()).unwrap_or(0),
        0,
        "it is not committed"
    );
    S::commit(tx).await.unwrap();
    assert_eq!(outbox.next(10).await.unwrap()[0].sequence, 6, "in the caller's commit");

    let silent = Inventory::builder(&place.dlock, "silent").stock(1).create().await.unwrap();
    let none = silent.outbox("billing").unwrap().next(1).await;
    assert!(matches!(none, Err(Error::Invalid(_))), "{none:?}");
    assert!(matches!(sale.outbox(""), Err(Error::Invalid(_))));
}

pub(crate) async fn what_is_not_acknowledged_is_kept(place: &Place) {
    let sale = Inventory::builder(&place.dlock, "sale").stock(10_000).journal(1);
    let sale = sale.create().await.unwrap();
    let outbox = sale.outbox("slow").unwrap();
    assert_eq!(outbox.next(1).await.unwrap(), [], "now it is known");
    let buy = async |count: u64| {
        for _ in 0..count {
            taken(sale.deduct(1).send().await.unwrap());
        }
    };
    buy(200).await;
    let all = outbox.next(1_000).await.unwrap();
    assert_eq!((all.len(), all[0].sequence), (200, 1));
    outbox.acknowledge(150).await.unwrap();
    buy(1).await;
    let oldest = sale.journal(0).await.unwrap()[0].sequence;
    assert!((2..=151).contains(&oldest), "{oldest}");
    assert_eq!(outbox.next(1_000).await.unwrap().len(), 51);
    outbox.forget().await.unwrap();
    buy(70).await;
    let oldest = sale.journal(0).await.unwrap()[0].sequence;
    assert!(oldest > 200, "nobody reads it: {oldest}");
}
