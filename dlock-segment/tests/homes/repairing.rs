//! A server with homes comes back empty, or a removal ends half-way: the runbook, carried out.

use std::collections::{BTreeMap, HashSet};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use dlock::Dlock;
use dlock_segment::{
    Deduction, Effect, Error, Inventory, OrderState, Reconciliation, Refund, ShopOrder,
};
use dlock_testkit::redis::RedisServer;
use dlock_testkit::topology::independent;
use futures_util::stream;
use parking_lot::Mutex;

use crate::common::{clean_audit, counts, eventually, is_sold_out, refunded, taken};
use crate::{clients, homes_at, sale_on};

const STOCK: u64 = 6_000;

/// The orders of a shop, in its own database.
#[derive(Clone, Default)]
struct Shop {
    sold: Arc<Mutex<BTreeMap<String, u64>>>,
    is_closed: Arc<AtomicBool>,
}

impl Shop {
    /// Sells until it is closed. What is not answered is asked for again under the same id,
    /// unless its home is lost.
    async fn sell(self, sale: Inventory, name: &'static str) {
        for number in 0.. {
            let (id, quantity) = (format!("{name}-{number}"), 1 + number % 2);
            let answered = loop {
                match sale.deduct(quantity).operation(&id).send().await {
                    Err(error) if error.is_retryable() => {}
                    answered => break answered,
                }
                tokio::time::sleep(Duration::from_millis(5)).await;
            };
            match answered {
                Ok(Deduction::Taken(_)) => {
                    self.sold.lock().insert(id, quantity);
                }
                Ok(Deduction::SoldOut { .. } | Deduction::NotEnough { .. } | Deduction::Paused) => {
                }
                Err(Error::Lost(_) | Error::NotFound(_)) => {}
                other => panic!("{id}: {other:?}"),
            }
            if self.is_closed.load(Ordering::SeqCst) {
                return;
            }
            tokio::time::sleep(Duration::from_millis(3)).await; // so that some are left
        }
    }

    fn units(&self) -> u64 {
        self.sold.lock().values().sum()
    }

    fn orders(&self) -> Vec<ShopOrder> {
        let sold = self.sold.lock();
        let order = |(id, quantity): (&String, &u64)| ShopOrder {
            operation: id.clone(),
            quantity: *quantity,
            state: OrderState::Sold,
            buyer: None,
            at: None,
        };
        sold.iter().map(order).collect()
    }
}

async fn reconcile(sale: &Inventory, orders: Vec<ShopOrder>, apply: bool) -> Reconciliation {
    let orders = orders.into_iter().map(Ok::<_, Error>);
    sale.reconcile(stream::iter(orders), apply).await.unwrap()
}

async fn open(clients: &[Dlock]) -> Result<Inventory, Error> {
    Inventory::open_on(clients, "sale", None).await
}

/// Buys so many units in this home: more than it has, so that others send it some.
async fn buy_in(sale: &Inventory, home: u32, quantity: u64) {
    for number in 0.. {
        let id = format!("{quantity}-{number}");
        if taken(sale.deduct(quantity).operation(&id).send().await.unwrap()).home == home {
            return;
        }
        refunded(sale.refund(&id).send().await.unwrap());
    }
}

async fn one_of_three_is_lost(place: usize) {
    let Some(servers) = independent(3) else { return };
    let before = clients(&servers).await;
    let sale = sale_on(&before, STOCK, 3).await;
    let (shop, mut moved) = (Shop::default(), HashSet::new());
    // Units are moved to the home that is lost, and out of it.
    let other = u32::from(place == 0);
    for (home, quantity) in [(place as u32, STOCK / 2), (other, STOCK / 4)] {
        buy_in(&sale, home, quantity).await;
        sale.rebalance().await.unwrap();
    }
    let mut refunded_ids = HashSet::new();
    for entry in sale.journal(0).await.unwrap() {
        if entry.home == place as u32 {
            moved.insert(entry.effect);
        }
        match (entry.effect, entry.operation, entry.whose) {
            (Effect::Taken, Some(id), _) => drop(shop.sold.lock().insert(id, entry.quantity)),
            (Effect::Refunded, _, Some(of)) => drop(refunded_ids.insert(of)),
            _ => {}
        }
    }
    shop.sold.lock().retain(|id, _| !refunded_ids.contains(id));
    assert!(moved.contains(&Effect::Sent) && moved.contains(&Effect::Received), "{moved:?}");
    let (kept_id, kept) = loop {
        let id = format!("kept-{}", shop.sold.lock().len());
        let receipt = taken(sale.deduct(2).operation(&id).send().await.unwrap());
        shop.sold.lock().insert(id.clone(), 2);
        if receipt.home == place as u32 {
            break (id, receipt);
        }
    };
    let selling = tokio::spawn(shop.clone().sell(sale.clone(), "before"));
    let had = shop.units();
    eventually("it sells", || async { shop.units() > had + 10 }).await;

    assert_eq!(servers[place].cli(&["FLUSHALL"]), "OK");
    let had = shop.units();
    eventually("the other homes go on selling", || async { shop.units() > had + 10 }).await;
    // Nobody sells it a second time, and nobody opens it as if nothing had happened.
    let admin = clients(&servers).await;
    assert!(matches!(open(&admin).await.map(drop), Err(Error::Lost(_))));
    shop.is_closed.store(true, Ordering::SeqCst);
    selling.await.unwrap();
    shop.is_closed.store(false, Ordering::SeqCst);

    let repaired = Inventory::repair(&admin, "sale").await.unwrap();
    assert_eq!(repaired.homes, [place as u32]);
    let again = Inventory::repair(&admin, "sale").await.unwrap();
    assert!(again.homes.is_empty(), "it is repeated: {:?}", again.homes);
    let fixed = repaired.inventory;
    clean_audit(&fixed).await;
    assert_eq!(fixed.creation_id() == sale.creation_id(), place != 0);

    fixed.pause().await.unwrap();
    let stock = fixed.stock().await.unwrap();
    let is_there = stock.initial + stock.restocked - stock.written_off;
    assert!(is_there < STOCK, "the units of the lost home are not made up: {is_there}");
    fixed.restock(STOCK - is_there).operation("what was lost").send().await.unwrap();
    let plan = reconcile(&fixed, shop.orders(), false).await;
    assert!(plan.different > 0 && plan.corrected == 0, "{plan:#?}");
    let report = reconcile(&fixed, shop.orders(), true).await;
    assert_eq!(report.different, plan.different);
    assert!(report.is_clean(), "{report:#?}");
    assert!(reconcile(&fixed, shop.orders(), false).await.different == 0);
    fixed.resume().await.unwrap();
    assert_eq!(counts(&fixed).await, (STOCK - shop.units(), 0, shop.units()));
    clean_audit(&fixed).await;
    if place != 0 {
        // The receipt is of the home that was lost: it gives nothing back a second time.
        let back = |id: &'static str| fixed.refund(&kept_id).quantity(1).operation(id);
        refunded(back("back-1").receipt(&kept).send().await.unwrap());
        refunded(back("back-2").send().await.unwrap());
        let more = back("back-3").receipt(&kept).send().await.unwrap();
        assert_eq!(more, Refund::TooMuch { left: 0 });
        taken(fixed.deduct(2).operation("instead").send().await.unwrap());
        shop.sold.lock().remove(&kept_id);
        shop.sold.lock().insert("instead".into(), 2);
        clean_audit(&fixed).await;
    }

    // The services start again, and sell the rest: each unit once.
    let after = open(&clients(&servers).await).await.unwrap().sold_out_for(Duration::ZERO);
    let selling = tokio::spawn(shop.clone().sell(after.clone(), "after"));
    eventually("it is sold out", || async { shop.units() == STOCK }).await;
    shop.is_closed.store(true, Ordering::SeqCst);
    selling.await.unwrap();
    assert!(is_sold_out(&after.deduct(1).operation("one more").send().await.unwrap()));
    assert_eq!(counts(&after).await, (0, 0, STOCK));
    assert_eq!(shop.units(), STOCK);
    clean_audit(&after).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_lost_home_is_repaired() {
    one_of_three_is_lost(1).await;
}

/// The first home has the name of the sale, its creation id, and the lock of its settings.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_first_home_is_repaired() {
    one_of_three_is_lost(0).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn only_what_is_lost_is_repaired() {
    let Some(mut servers) = independent(3) else { return };
    let all = clients(&servers).await;
    let none = Inventory::repair(&all, "sale").await.map(drop);
    assert!(matches!(none, Err(Error::NotFound(_))), "{none:?}");
    let sale = sale_on(&all, 90, 6).await;
    assert!(Inventory::repair(&all, "sale").await.unwrap().homes.is_empty());
    assert_eq!(counts(&sale).await, (90, 0, 0));
    // A server that is away is not lost.
    assert_eq!(servers[2].cli(&["FLUSHALL"]), "OK");
    servers[1].kill();
    let away = Inventory::repair(&all, "sale").await.map(drop);
    assert!(matches!(&away, Err(Error::OutOfReach { homes }) if homes == &[1, 4]), "{away:?}");
    servers[1].restart();
    // It kept nothing on disk: two of three are lost now. Four homes are made again at once.
    eventually("it is back", || async { all[1].health().await.is_ok() }).await;
    let repaired = Inventory::repair(&all, "sale").await.unwrap();
    assert_eq!(repaired.homes, [1, 2, 4, 5]);
    assert_eq!(counts(&repaired.inventory).await, (30, 0, 0));
    clean_audit(&repaired.inventory).await;
    // Another order of the servers is refused.
    let reordered = [all[0].clone(), all[2].clone(), all[1].clone()];
    let other = Inventory::repair(&reordered, "sale").await.map(drop);
    assert!(matches!(other, Err(Error::Conflict(_))), "{other:?}");
}

/// The settings of the others are those of the home that is made again.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_repaired_home_has_the_settings_of_the_others() {
    let Some(servers) = independent(2) else { return };
    let all = clients(&servers).await;
    let sale = sale_on(&all, 20, 2).await;
    sale.pause().await.unwrap();
    assert_eq!(servers[1].cli(&["FLUSHALL"]), "OK");
    let repaired = Inventory::repair(&all, "sale").await.unwrap().inventory;
    // This process has it open as it was before, too.
    assert!(sale.stock().await.is_err());
    for number in 0..12 {
        let answer = repaired.deduct(1).operation(format!("o-{number}")).send().await.unwrap();
        assert_eq!(answer, Deduction::Paused);
    }
}

/// A removal that was killed after some homes is finished by the name of the sale.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_removal_that_was_interrupted_is_finished_by_name() {
    let Some(servers) = independent(3) else { return };
    let all = clients(&servers).await;
    let sale = sale_on(&all, 90, 3).await;
    let delete = |server: &RedisServer| {
        for key in server.cli(&["KEYS", "dlock:2:*home*"]).lines() {
            server.cli(&["DEL", key]);
        }
    };
    delete(&servers[2]);
    assert!(matches!(open(&all).await.map(drop), Err(Error::Lost(_))));
    assert!(Inventory::remove_by_name(&all, "sale").await.unwrap());
    assert!(!Inventory::remove_by_name(&all, "sale").await.unwrap());
    assert!(servers.iter().all(|server| homes_at(server).is_empty()));
    let removed = Inventory::open_on(&all, "sale", sale.creation_id()).await.map(drop);
    assert!(matches!(removed, Err(Error::NotFound(_))), "removed, and not lost: {removed:?}");
    let sale = sale_on(&all, 60, 3).await;
    assert_eq!(counts(&sale).await, (60, 0, 0));
    clean_audit(&sale).await;
}
