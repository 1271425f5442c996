//! Rows 4, 5 and 9 of the list of faults, for every request of an inventory: its reply is
//! lost, it is delivered twice, its future is dropped at any poll, the server has forgotten
//! the scripts. The journal shows that each id has its effect once.

#![allow(clippy::unwrap_used, reason = "a failed step fails the test")]

mod common;

use std::collections::{BTreeMap, HashMap};
use std::task::{Context, Waker};
use std::time::Duration;

use common::{Place, clean_audit, counts, eventually, refunded};
use dlock::Dlock;
use dlock_segment::{Effect, Error, HoldState, Inventory, JournalEntry, Resolved};
use dlock_testkit::proxy::{Once, Proxy};

const HOUR: Duration = Duration::from_secs(3_600);
const STOCK: u64 = 10_000;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Request {
    Deduct,
    Reserve,
    Confirm,
    Cancel,
    CancelFirst,
    Extend,
    Refund,
    Restock,
    Resolve,
}

impl Request {
    const ALL: [Request; 9] = [
        Request::Deduct,
        Request::Reserve,
        Request::Confirm,
        Request::Cancel,
        Request::CancelFirst,
        Request::Extend,
        Request::Refund,
        Request::Restock,
        Request::Resolve,
    ];

    /// Prepares what the request needs.
    async fn prepare(self, sale: &Inventory, id: &str) {
        match self {
            Request::Confirm | Request::Cancel | Request::Extend => {
                sale.reserve(2).operation(id).buyer("u").send().await.map(drop)
            }
            Request::Refund => {
                sale.deduct(2).operation(bought(id)).buyer("u").send().await.map(drop)
            }
            _ => Ok(()),
        }
        .expect("prepared");
    }

    /// Sends the request. Returns its answer as a string, to be compared.
    async fn send(self, sale: &Inventory, id: &str) -> Result<String, Error> {
        fn text<T: std::fmt::Debug>(answer: T) -> String {
            format!("{answer:?}")
        }
        match self {
            Request::Deduct => sale.deduct(2).operation(id).buyer("u").send().await.map(text),
            Request::Reserve => sale.reserve(2).operation(id).buyer("u").send().await.map(text),
            Request::Confirm => sale.reservation(id).confirm().await.map(text),
            Request::Cancel | Request::CancelFirst => sale.reservation(id).cancel().await.map(text),
            Request::Extend => {
                // The new end is later each time; what is asked again is still open.
                sale.reservation(id).extend(HOUR).await.map(|hold| text(hold.state))
            }
            Request::Refund => {
                sale.refund(bought(id)).quantity(1).operation(id).send().await.map(text)
            }
            Request::Restock => sale.restock(5).operation(id).send().await.map(text),
            Request::Resolve => sale.resolve(id).await.map(text),
        }
    }

    /// Sends the request until its outcome is known.
    async fn done(self, sale: &Inventory, id: &str) -> String {
        for _ in 0..200 {
            match self.send(sale, id).await {
                Ok(answer) => return answer,
                Err(error) if error.is_retryable() => {
                    tokio::time::sleep(Duration::from_millis(50)).await;
                }
                Err(error) => panic!("{self:?}: {error:?}"),
            }
        }
        panic!("{self:?} is never answered");
    }

    fn effect(self) -> Effect {
        match self {
            Request::Deduct => Effect::Taken,
            Request::Reserve => Effect::Reserved,
            Request::Confirm => Effect::Confirmed,
            Request::Cancel => Effect::Cancelled,
            Request::Extend => Effect::Extended,
            Request::Refund => Effect::Refunded,
            Request::Restock => Effect::Restocked,
            Request::CancelFirst | Request::Resolve => Effect::Settled,
        }
    }

    /// What the request adds to available, reserved and sold.
    fn adds(self) -> [i64; 3] {
        match self {
            Request::Deduct => [-2, 0, 2],
            Request::Reserve => [-2, 2, 0],
            Request::Confirm => [0, -2, 2],
            Request::Cancel => [2, -2, 0],
            Request::Refund => [1, 0, -1],
            Request::Restock => [5, 0, 0],
            Request::CancelFirst | Request::Extend | Request::Resolve => [0; 3],
        }
    }

    /// A string that is in its own message and in no message that only reads.
    fn mark(self, id: &str) -> String {
        if self == Request::Extend { "e\0".to_owned() } else { id.to_owned() }
    }
}

fn bought(id: &str) -> String {
    format!("bought-{id}")
}

/// An inventory with a journal of everything.
async fn journalled(dlock: &Dlock) -> Inventory {
    let sale = Inventory::builder(dlock, "sale").stock(STOCK).segments(4).per_buyer(STOCK);
    sale.journal(1_000_000).create().await.expect("a sale")
}

async fn entries(sale: &Inventory) -> Vec<JournalEntry> {
    let mut entries: Vec<JournalEntry> = Vec::new();
    loop {
        let after = entries.last().map_or(0, |last| last.sequence);
        let more = sale.journal(after).await.expect("the journal");
        if more.is_empty() {
            return entries;
        }
        entries.extend(more);
    }
}

/// How often each id had each effect.
async fn effects(sale: &Inventory) -> HashMap<(String, Effect), usize> {
    let mut effects = HashMap::new();
    for entry in entries(sale).await {
        *effects.entry((entry.operation.unwrap_or_default(), entry.effect)).or_default() += 1;
    }
    effects
}

async fn signed_counts(sale: &Inventory) -> [i64; 3] {
    let (available, reserved, sold) = counts(sale).await;
    [available, reserved, sold].map(|count| i64::try_from(count).expect("small"))
}

/// Every request of the server is made once, and `hinder` disturbs each of them.
async fn each_once(sale: &Inventory, direct: &Inventory, hinder: impl Fn(Request, &str)) {
    for request in Request::ALL {
        let id = format!("{request:?}").to_lowercase();
        request.prepare(direct, &id).await;
        let before = signed_counts(direct).await;
        hinder(request, &id);
        let answer = request.done(sale, &id).await;
        let after = signed_counts(direct).await;
        let adds = request.adds();
        assert_eq!(after, [0, 1, 2].map(|at| before[at] + adds[at]), "{request:?}");
        let times = effects(direct).await.get(&(id.clone(), request.effect())).copied();
        assert_eq!(times, Some(1), "{request:?}");
        assert_eq!(request.done(direct, &id).await, answer, "asked again: the same");
        assert_eq!(signed_counts(direct).await, after, "{request:?} again");
        clean_audit(direct).await;
    }
}

struct Behind {
    proxy: Proxy,
    sale: Inventory,
    direct: Inventory,
    _place: Place,
}

async fn behind() -> Option<Behind> {
    let place = Place::redis().await?;
    let direct = journalled(&place.dlock).await;
    let proxy = Proxy::start(place.server.as_ref().expect("a server").port()).await;
    let client = Dlock::builder().url(&proxy.url()).call_timeout(Duration::from_secs(3));
    let client = client.connect().await.expect("a client");
    let sale = Inventory::open(&client, "sale").await.expect("the sale");
    sale.stock().await.expect("the server has the script");
    Some(Behind { proxy, sale, direct, _place: place })
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn row_04_whatever_loses_its_reply_is_done_once() {
    let Some(it) = behind().await else { return };
    let lose = |request: Request, id: &str| {
        it.proxy.once(Once::LoseReply, &request.mark(id));
    };
    each_once(&it.sale, &it.direct, lose).await;
    assert_eq!(it.proxy.done(), Request::ALL.len() as u64, "every reply was lost");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn row_04_whatever_is_delivered_twice_is_done_once() {
    let Some(it) = behind().await else { return };
    let double =
        |request: Request, id: &str| it.proxy.once(Once::DuplicateRequest, &request.mark(id));
    each_once(&it.sale, &it.direct, double).await;
    assert_eq!(it.proxy.done(), Request::ALL.len() as u64, "every request was doubled");
}

/// A change of the inventory as a whole has no id. A lost reply is reported, and making the
/// change twice has the same effect as once.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn row_04_a_resize_or_rebalance_twice_is_as_good_as_once() {
    let Some(it) = behind().await else { return };
    for number in 0..20 {
        Request::Deduct.done(&it.direct, &format!("d-{number}")).await;
        Request::Reserve.done(&it.direct, &format!("r-{number}")).await;
    }
    it.direct.rebalance().await.unwrap(); // the server has the script
    let before = counts(&it.direct).await;
    for (round, what) in [Once::LoseReply, Once::DuplicateRequest].into_iter().enumerate() {
        let segments = [9, 2][round];
        it.proxy.once(what, "\r\nz\r\n");
        let resized = it.sale.resize(segments).await;
        eventually("it answers again", async || it.sale.stock().await.is_ok()).await;
        it.proxy.once(what, "\r\nb\r\n");
        let rebalanced = it.sale.rebalance().await;
        eventually("it answers again", async || it.sale.stock().await.is_ok()).await;
        for answer in [resized, rebalanced] {
            match what {
                Once::LoseReply => {
                    assert!(matches!(answer, Err(Error::Unknown(None))), "{answer:?}");
                }
                _ => assert_eq!(answer.unwrap().segments, segments),
            }
        }
        assert_eq!(it.direct.stock().await.unwrap().segments, segments, "it was applied");
        assert_eq!(it.sale.resize(segments).await.unwrap().segments, segments);
        it.sale.rebalance().await.unwrap();
        assert_eq!(counts(&it.direct).await, before, "no unit came or went");
        clean_audit(&it.direct).await;
    }
    assert_eq!(it.proxy.done(), 4);
    // Earlier receipts stay valid.
    for number in 0..20 {
        refunded(it.direct.refund(format!("d-{number}")).send().await.unwrap());
        let cancelled = it.direct.reservation(format!("r-{number}")).cancel().await.unwrap();
        assert_eq!(cancelled, HoldState::Cancelled);
    }
    assert_eq!(counts(&it.direct).await, (STOCK, 0, 0));
    clean_audit(&it.direct).await;
}

/// Polls a future this many times, then drops it.
async fn dropped_after<F: Future>(polls: u32, between: Duration, sending: F) {
    let mut sending = Box::pin(sending);
    for _ in 0..polls {
        let mut context = Context::from_waker(Waker::noop());
        if sending.as_mut().poll(&mut context).is_ready() {
            return;
        }
        tokio::time::sleep(between).await;
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn row_05_whatever_is_dropped_at_any_poll_is_done_once_or_never() {
    const ROUNDS: u32 = 30;
    let Some(place) = Place::redis().await else { return };
    let sale = journalled(&place.dlock).await;
    let mut resolved = BTreeMap::new();
    for round in 0..ROUNDS {
        let (polls, between) = (round % 5, Duration::from_micros(u64::from(round * 17)));
        for request in Request::ALL {
            let id = format!("{request:?}-{round}");
            request.prepare(&sale, &id).await;
            dropped_after(polls, between, request.send(&sale, &id)).await;
            match request {
                Request::Deduct | Request::Reserve | Request::Refund | Request::Restock => {
                    resolved.insert(id.clone(), sale.resolve(&id).await.unwrap());
                }
                Request::Extend => {} // again, it would last for longer again
                _ if round % 2 == 0 => drop(request.done(&sale, &id).await),
                _ => {}
            }
        }
        let segments = 1 + round % 7;
        dropped_after(polls, between, sale.resize(segments)).await;
        dropped_after(polls, between, sale.rebalance()).await;
    }
    let now = signed_counts(&sale).await;
    let effects = effects(&sale).await;
    let mut expected = [STOCK.cast_signed(), 0, 0];
    let mut add = |request: Request, times: usize| {
        for (sum, adds) in expected.iter_mut().zip(request.adds()) {
            *sum += adds * i64::try_from(times).expect("small");
        }
    };
    for request in Request::ALL {
        let mut applied = 0;
        for round in 0..ROUNDS {
            let id = format!("{request:?}-{round}");
            match request {
                Request::Confirm | Request::Cancel | Request::Extend => add(Request::Reserve, 1),
                Request::Refund => add(Request::Deduct, 1),
                _ => {}
            }
            let times = effects.get(&(id.clone(), request.effect())).copied().unwrap_or(0);
            assert!(times <= 1, "{id}: {times} times");
            add(request, times);
            applied += times;
            if let Some(resolved) = resolved.get(&id) {
                assert_eq!(*resolved != Resolved::NotApplied, times == 1, "{id}: {resolved:?}");
                assert!(round % 5 != 0 || times == 0, "{id}: never polled, never sent");
            }
        }
        assert!(applied > 0, "{request:?}: some were sent");
    }
    assert_eq!(now, expected);
    clean_audit(&sale).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn row_09_whatever_finds_no_script_is_done_once() {
    let Some(place) = Place::redis().await else { return };
    let server = place.server.as_ref().expect("a server");
    let flush = || assert_eq!(server.cli(&["SCRIPT", "FLUSH"]), "OK");
    flush();
    let sale = journalled(&place.dlock).await;
    each_once(&sale, &sale, |_, _| flush()).await;
    let before = counts(&sale).await;
    flush();
    assert_eq!(sale.resize(9).await.unwrap().segments, 9);
    flush();
    sale.rebalance().await.unwrap();
    flush();
    sale.pause().await.unwrap();
    flush();
    sale.resume().await.unwrap();
    flush();
    assert_eq!(counts(&sale).await, before);
    flush();
    clean_audit(&sale).await;
    flush();
    let opened = Inventory::open(&place.dlock, "sale").await.unwrap();
    flush();
    assert!(opened.remove().await.unwrap());
}
