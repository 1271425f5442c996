//! Requests whose answer is lost: a refusal is only final when no earlier copy can have an
//! effect any more, and a call ends at its deadline whatever the server does.

#![allow(clippy::unwrap_used, reason = "a failed step fails the test")]

mod common;

use std::time::{Duration, Instant};

use common::{Place, clean_audit, counts, eventually, held, is_sold_out, taken};
use dlock::{Dlock, ErrorKind};
use dlock_segment::{Deduction, Error, Inventory, Refund, Reservation, Resolved};
use dlock_testkit::proxy::{Proxy, Way};
use dlock_testkit::redis::RedisServer;

/// A sale of a single unit behind a proxy, and a handle without the proxy.
struct LastUnit {
    proxy: Proxy,
    sale: Inventory,
    direct: Inventory,
    server: RedisServer,
}

impl LastUnit {
    async fn new() -> Option<Self> {
        let server = RedisServer::start()?;
        let proxy = Proxy::start(server.port()).await;
        let behind = Dlock::builder().url(&proxy.url()).call_timeout(Duration::from_millis(400));
        let behind = behind.connect().await.expect("a client");
        let direct = Dlock::connect(&server.url()).await.expect("a client");
        let direct = Inventory::builder(&direct, "sale").stock(1).create().await.expect("a sale");
        let sale = Inventory::open(&behind, "sale").await.expect("a sale");
        sale.stock().await.expect("the server has the script");
        Some(LastUnit { proxy, sale, direct, server })
    }

    /// Somebody else buys the last unit, and the network recovers. What it held back is
    /// gone: the test delivers the late copy itself.
    async fn sell_out_and_heal(&self) {
        taken(self.direct.deduct(1).operation("other").send().await.unwrap());
        self.proxy.cut();
        self.proxy.heal();
    }

    /// Units come back, and only then a copy of the first request arrives.
    async fn late_copy(&self, id: &str) -> Deduction {
        self.direct.restock(1).send().await.unwrap();
        self.direct.deduct(1).operation(id).send().await.unwrap()
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_refusal_after_unknown_is_final() {
    let Some(it) = LastUnit::new().await else { return };
    it.proxy.stall(&[Way::ToServer]);
    let buy = || it.sale.deduct(1).operation("o").deadline(Duration::from_millis(300)).send();
    let unknown = buy().await;
    assert!(matches!(unknown, Err(Error::Unknown(Some(_)))), "{unknown:?}");
    it.sell_out_and_heal().await;
    let mut answer = buy().await;
    while matches!(&answer, Err(error) if error.is_retryable()) {
        answer = buy().await;
    }
    assert!(is_sold_out(answer.as_ref().unwrap()), "{answer:?}");
    assert_eq!(it.late_copy("o").await, Deduction::Refused, "the buyer was told sold out");
    assert_eq!(counts(&it.direct).await, (1, 0, 1));
    assert_eq!(it.sale.resolve("o").await.unwrap(), Resolved::NotApplied);
    clean_audit(&it.direct).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_refusal_of_what_was_sent_again_is_final() {
    let Some(it) = LastUnit::new().await else { return };
    it.proxy.stall(&[Way::ToServer]);
    let connections = it.proxy.attempts().len();
    let sale = it.sale.clone();
    let buying = tokio::spawn(async move {
        sale.deduct(1).operation("o").deadline(Duration::from_secs(30)).send().await
    });
    // It was sent and got no answer, so its connection is given up.
    eventually("a new connection", async || it.proxy.attempts().len() > connections).await;
    it.sell_out_and_heal().await;
    assert!(is_sold_out(&buying.await.unwrap().unwrap()));
    assert_eq!(it.late_copy("o").await, Deduction::Refused, "the buyer was told sold out");
    clean_audit(&it.direct).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_refusal_after_a_dropped_call_is_final() {
    let Some(it) = LastUnit::new().await else { return };
    it.proxy.stall(&[Way::ToServer]);
    let reserve = || it.sale.reserve(1).operation("r").send();
    assert!(tokio::time::timeout(Duration::from_millis(100), reserve()).await.is_err());
    it.sell_out_and_heal().await;
    let mut answer = reserve().await;
    while matches!(&answer, Err(error) if error.is_retryable()) {
        answer = reserve().await;
    }
    assert!(matches!(answer, Ok(Reservation::SoldOut { .. })), "{answer:?}");
    it.direct.restock(1).send().await.unwrap();
    let late = it.direct.reserve(1).operation("r").send().await.unwrap();
    assert_eq!(late, Reservation::Refused, "the buyer was told sold out");
}

/// What was dropped before it left the queue cannot have an effect, and what was dropped and
/// answered later is known. Both need no tombstone.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_dropped_call_without_a_copy_under_way_is_not_in_doubt() {
    let Some(it) = LastUnit::new().await else { return };
    taken(it.direct.deduct(1).operation("other").send().await.unwrap());
    it.server.pause();
    let soon = Duration::from_millis(50);
    for id in ["sent", "sent too", "queued", "queued too"] {
        let dropped = tokio::time::timeout(soon, it.sale.deduct(1).operation(id).send()).await;
        assert!(dropped.is_err(), "the server is stopped: {dropped:?}");
    }
    it.server.resume();
    // Answers come in order: those of the requests before have come.
    let mut last = it.sale.deduct(1).operation("last").send().await;
    while last.is_err() {
        last = it.sale.deduct(1).operation("last").send().await;
    }
    for id in ["sent", "sent too", "queued", "queued too"] {
        let answer = it.sale.deduct(1).operation(id).send().await.unwrap();
        assert!(is_sold_out(&answer), "{id}: {answer:?}");
    }
    it.direct.restock(4).send().await.unwrap();
    for id in ["sent", "sent too", "queued", "queued too"] {
        taken(it.direct.deduct(1).operation(id).send().await.unwrap());
    }
    clean_audit(&it.direct).await;
}

/// There is no room for a tombstone: the refusal is answered at once all the same.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_full_table_of_tombstones_costs_one_call() {
    let Some(it) = LastUnit::new().await else { return };
    it.proxy.stall(&[Way::ToServer]);
    let buy = |deadline| it.sale.deduct(1).operation("o").deadline(deadline).send();
    let unknown = buy(Duration::from_millis(300)).await;
    assert!(matches!(unknown, Err(Error::Unknown(Some(_)))), "{unknown:?}");
    it.sell_out_and_heal().await;
    let full = "redis.call('SETRANGE', KEYS[1], 22 * 8, struct.pack('>i8', 100000))";
    it.server.cli(&["EVAL", full, "1", "dlock:2:{default:sale}:i"]);
    assert_eq!(it.direct.stock().await.unwrap().tombstones, 100_000);
    eventually("it answers", async || it.sale.stock().await.is_ok()).await;
    let began = Instant::now();
    let answer = buy(Duration::from_secs(10)).await.unwrap();
    assert!(is_sold_out(&answer), "{answer:?}");
    assert!(began.elapsed() < Duration::from_secs(2), "{:?}", began.elapsed());
    let cancelled = it.direct.resolve("never").await;
    assert!(matches!(cancelled, Err(Error::Store(_))), "{cancelled:?}");
}

#[tokio::test]
async fn tombstones_are_counted() {
    let sale = Place::memory().expect("it is embedded").sale(1, 1).await;
    assert_eq!(sale.stock().await.unwrap().tombstones, 0);
    assert_eq!(sale.resolve("o").await.unwrap(), Resolved::NotApplied);
    assert_eq!(sale.stock().await.unwrap().tombstones, 1);
}

/// A refund that was refused as too much after a lost answer does not happen later.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_refused_refund_is_final_too() {
    let Some(it) = LastUnit::new().await else { return };
    taken(it.direct.deduct(1).operation("o").send().await.unwrap());
    it.proxy.stall(&[Way::ToServer]);
    let refund = || it.sale.refund("o").quantity(1).operation("f").send();
    assert!(tokio::time::timeout(Duration::from_millis(100), refund()).await.is_err());
    let other = it.direct.refund("o").quantity(1).operation("g").send().await.unwrap();
    assert!(matches!(other, Refund::Refunded(_)));
    it.proxy.cut();
    it.proxy.heal();
    let mut answer = refund().await;
    while matches!(&answer, Err(error) if error.is_retryable()) {
        answer = refund().await;
    }
    assert_eq!(answer.unwrap(), Refund::TooMuch { left: 0 });
    let late = it.direct.refund("o").quantity(1).operation("f").send().await.unwrap();
    assert_eq!(late, Refund::Refused);
    clean_audit(&it.direct).await;
}

/// The call ends at its deadline, with an error that tells whether it may have happened.
async fn ends_in_time<T: std::fmt::Debug>(
    what: &str,
    call: impl Future<Output = Result<T, Error>>,
) -> Error {
    let began = Instant::now();
    let error = call.await.expect_err("the server is stopped");
    let took = began.elapsed();
    assert!(took < 4 * DEADLINE, "{what} took {took:?}: {error}");
    let unavailable =
        matches!(&error, Error::Store(error) if error.kind() == ErrorKind::Unavailable);
    assert!(unavailable || matches!(error, Error::Unknown(_)), "{what}: {error:?}");
    error
}

const DEADLINE: Duration = Duration::from_millis(250);

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_stopped_server_does_not_outlast_the_deadline() {
    let Some(place) = Place::redis().await else { return }; // a call_timeout of 20 s
    let server = place.server.as_ref().expect("a server");
    let sale = place.sale(100, 2).await;
    taken(sale.deduct(2).operation("bought").send().await.unwrap());
    held(sale.reserve(1).operation("held").send().await.unwrap());
    server.pause();
    let reservation = sale.reservation("held").deadline(DEADLINE);
    let first = sale.deduct(1).operation("o-1").deadline(DEADLINE).send();
    let first = ends_in_time("deduct", first).await;
    assert!(matches!(first, Error::Unknown(Some(_))), "it was sent: {first:?}");
    ends_in_time("deduct without id", sale.deduct(1).deadline(DEADLINE).send()).await;
    let third = sale.deduct(1).operation("o-3").deadline(DEADLINE).send();
    let third = ends_in_time("deduct, queued", third).await;
    let reserve = sale.reserve(1).operation("r").deadline(DEADLINE).send();
    ends_in_time("reserve", reserve).await;
    ends_in_time("confirm", reservation.confirm()).await;
    ends_in_time("cancel", reservation.cancel()).await;
    ends_in_time("extend", reservation.extend(DEADLINE)).await;
    ends_in_time("get", reservation.get()).await;
    ends_in_time("refund", sale.refund("bought").deadline(DEADLINE).send()).await;
    ends_in_time("write-off", sale.write_off(1).operation("w").deadline(DEADLINE).send()).await;
    ends_in_time("restock", sale.restock(5).operation("s").deadline(DEADLINE).send()).await;
    server.resume();
    eventually("it answers again", async || sale.stock().await.is_ok()).await;
    assert!(matches!(sale.resolve("o-1").await.unwrap(), Resolved::Taken(_)), "it was sent");
    if matches!(third, Error::Store(_)) {
        assert_eq!(sale.resolve("o-3").await.unwrap(), Resolved::NotApplied, "it was not");
    }
    clean_audit(&sale).await;
}

/// Without a deadline of its own a call ends after twice the `call_timeout`.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_stopped_server_does_not_outlast_the_default() {
    let Some(server) = RedisServer::start() else { return };
    let dlock = Dlock::builder().url(&server.url()).call_timeout(DEADLINE).connect().await.unwrap();
    let sale = Inventory::builder(&dlock, "sale").stock(100).create().await.unwrap();
    server.pause();
    let began = Instant::now();
    let answer = sale.deduct(1).operation("o").send().await;
    let took = began.elapsed();
    assert!(matches!(answer, Err(Error::Unknown(Some(_)))), "{answer:?}");
    assert!(took >= DEADLINE && took < 4 * DEADLINE, "{took:?}");
    server.resume();
}

#[tokio::test]
async fn a_deadline_of_nothing_is_invalid() {
    let sale = Place::memory().expect("it is embedded").sale(1, 1).await;
    let answer = sale.deduct(1).deadline(Duration::ZERO).send().await;
    assert!(matches!(answer, Err(Error::Invalid(_))), "{answer:?}");
}
