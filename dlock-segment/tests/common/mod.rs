//! What the tests of an inventory share.
#![allow(dead_code, reason = "each test uses some of it")]

use std::time::Duration;

use dlock::Dlock;
use dlock_segment::{
    Audit, Confirmation, Deduction, Error, Hold, HoldState, Inventory, Receipt, Refund,
    Reservation, Stock,
};
use dlock_testkit::redis::RedisServer;

/// A client, and the server that must live as long as it.
pub(crate) struct Place {
    pub(crate) dlock: Dlock,
    pub(crate) server: Option<RedisServer>,
}

impl Place {
    pub(crate) fn memory() -> Option<Self> {
        Some(Place { dlock: dlock::testing::client(), server: None })
    }

    pub(crate) async fn redis() -> Option<Self> {
        let server = RedisServer::start()?;
        let dlock = patient(&server).await;
        Some(Place { dlock, server: Some(server) })
    }

    /// Another client of the same store, as another process would have.
    pub(crate) async fn another(&self) -> Dlock {
        match &self.server {
            Some(server) => patient(server).await,
            None => self.dlock.clone(),
        }
    }

    pub(crate) async fn sale(&self, stock: u64, segments: u32) -> Inventory {
        Inventory::builder(&self.dlock, "sale")
            .stock(stock)
            .segments(segments)
            .create()
            .await
            .expect("a sale")
    }
}

/// A client that does not give up on a busy machine.
async fn patient(server: &RedisServer) -> Dlock {
    let client = Dlock::builder().url(&server.url()).call_timeout(Duration::from_secs(20));
    client.connect().await.expect("a client")
}

/// Runs each test on both stores.
#[macro_export]
macro_rules! on_both_stores {
    ($($test:ident),* $(,)?) => {
        mod on_memory {
            $(#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
            async fn $test() {
                super::$test(super::common::Place::memory().expect("it is embedded")).await;
            })*
        }
        mod on_redis {
            $(#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
            async fn $test() {
                let Some(place) = super::common::Place::redis().await else { return };
                super::$test(place).await;
            })*
        }
    };
}

pub(crate) fn taken(deduction: Deduction) -> Receipt {
    match deduction {
        Deduction::Taken(receipt) => receipt,
        other => panic!("not taken: {other:?}"),
    }
}

pub(crate) fn held(reservation: Reservation) -> Hold {
    match reservation {
        Reservation::Held(hold) => hold,
        other => panic!("not held: {other:?}"),
    }
}

pub(crate) fn refunded(refund: Refund) -> Receipt {
    match refund {
        Refund::Refunded(receipt) => receipt,
        other => panic!("not refunded: {other:?}"),
    }
}

/// The state of a reservation after a confirmation, whether it succeeded or not.
pub(crate) fn state_of(confirmed: Result<Confirmation, Error>) -> HoldState {
    match confirmed {
        Ok(Confirmation::Confirmed(_)) => HoldState::Confirmed,
        Ok(Confirmation::Refunded(_)) => HoldState::Refunded,
        Ok(other) => panic!("{other:?}"),
        Err(Error::NotHeld(state)) => state,
        Err(error) => panic!("{error}"),
    }
}

pub(crate) fn is_sold_out(deduction: &Deduction) -> bool {
    matches!(deduction, Deduction::SoldOut { .. })
}

/// Reads the counts and checks their sum.
pub(crate) async fn counts(sale: &Inventory) -> (u64, u64, u64) {
    let Stock { initial, restocked, available, reserved, sold, .. } =
        sale.stock().await.expect("the stock");
    assert_eq!(initial + restocked, available + reserved + sold, "I2");
    (available, reserved, sold)
}

pub(crate) async fn clean_audit(sale: &Inventory) -> Audit {
    let audit = sale.audit().await.expect("an audit");
    assert!(audit.is_clean() && audit.exact, "{audit:#?}");
    audit
}

/// Waits for a long time until it is true.
pub(crate) async fn eventually<F: Future<Output = bool>>(
    what: &str,
    mut is_true: impl FnMut() -> F,
) {
    for _ in 0..2_000 {
        if is_true().await {
            return;
        }
        tokio::time::sleep(Duration::from_millis(10)).await;
    }
    panic!("never: {what}");
}
