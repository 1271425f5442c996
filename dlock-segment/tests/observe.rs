//! What metrics and traces show of segments and inventories. This test needs a process of
//! its own, because recorders and subscribers are global.

#![allow(clippy::unwrap_used, reason = "a failed step fails the test")]

mod common;

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use common::{held, is_sold_out, refunded, state_of, taken};
use dlock::{Key, key};
use dlock_segment::{
    Deduction, Error, HoldState, Inventory, Resolved, SegmentOutcome, SegmentedLock,
};
use dlock_testkit::redis::RedisServer;
use metrics_util::debugging::{DebugValue, DebuggingRecorder, Snapshotter};

/// The counters, as `name label=value ...`.
fn counters(snapshotter: &Snapshotter) -> BTreeMap<String, u64> {
    let mut counted = BTreeMap::new();
    for (key, _, _, value) in snapshotter.snapshot().into_vec() {
        let (_, key) = key.into_parts();
        let mut name = key.name().to_owned();
        for label in key.labels() {
            name.push_str(&format!(" {}={}", label.key(), label.value()));
        }
        if let DebugValue::Counter(count) = value {
            counted.insert(name, count);
        }
    }
    counted
}

/// The writer that collects the traces.
#[derive(Clone)]
struct Written(Arc<Mutex<Vec<u8>>>);

impl Written {
    fn new() -> (Arc<Mutex<Vec<u8>>>, impl Fn() -> Self) {
        let text = Arc::default();
        (Arc::clone(&text), move || Written(Arc::clone(&text)))
    }
}

impl std::io::Write for Written {
    fn write(&mut self, bytes: &[u8]) -> std::io::Result<usize> {
        self.0.lock().expect("no panic").write(bytes)
    }

    fn flush(&mut self) -> std::io::Result<()> {
        Ok(())
    }
}

#[tokio::test]
async fn metrics_and_traces() {
    let recorder = DebuggingRecorder::new();
    let snapshotter = recorder.snapshotter();
    recorder.install().unwrap();
    let (written, writer) = Written::new();
    let subscriber = tracing_subscriber::fmt()
        .with_max_level(tracing::Level::TRACE)
        .with_ansi(false)
        .without_time()
        .with_writer(writer)
        .finish();
    tracing::subscriber::set_global_default(subscriber).unwrap();

    let dlock = dlock::testing::client();
    let email = "secret@example.org";
    let stock = SegmentedLock::new(&dlock, key!("stock:{email}"), 3);
    let all_dry = async |stock: &SegmentedLock| {
        let dry =
            stock.run(|_, _| async { Ok::<_, dlock::Error>(SegmentOutcome::<()>::Dry) }).await;
        assert_eq!(dry.unwrap(), None);
    };
    all_dry(&stock).await;
    stock.restocked(); // else no lock is taken
    all_dry(&stock.clone().name("hot")).await;
    all_dry(&SegmentedLock::new(&dlock, "plain", 1)).await;

    let sale = Inventory::builder(&dlock, key!("sale:{email}")).stock(10).create().await.unwrap();
    let sale = sale.sold_out_for(Duration::from_secs(3_600));
    let order = || sale.deduct(4).operation("secret-order").buyer("secret-buyer").send();
    let receipt = taken(order().await.unwrap());
    assert!(matches!(sale.resolve("secret-order").await.unwrap(), Resolved::Taken(_)));
    for _ in 0..2 {
        let seven = sale.deduct(7).send().await.unwrap();
        assert!(matches!(seven, Deduction::NotEnough { available: 6, .. }), "{seven:?}");
    }
    held(sale.reserve(5).operation("secret-hold").send().await.unwrap());
    assert_eq!(state_of(sale.reservation("secret-hold").confirm().await), HoldState::Confirmed);
    let refund = sale.refund("secret-order").quantity(1).operation("secret-refund");
    refunded(refund.send().await.unwrap());
    assert!(matches!(order().await.unwrap(), Deduction::Refunded(_)));
    sale.pause().await.unwrap();
    assert_eq!(sale.deduct(1).send().await.unwrap(), Deduction::Paused);
    let conflict = sale.deduct(5).operation("secret-order").buyer("secret-buyer").send().await;
    assert!(matches!(conflict, Err(Error::Conflict(_))));
    let throttled = sale.clone().rate_limit_per_process(1).unwrap();
    while throttled.deduct(1).send().await.is_ok() {}
    drop(receipt);
    // A key can have its own string as its name.
    let nightly = Key::new("nightly").unwrap().named("nightly");
    let named = Inventory::builder(&dlock, nightly).stock(1).create().await.unwrap();
    let named = named.sold_out_for(Duration::from_secs(3_600));
    taken(named.deduct(1).send().await.unwrap());
    for _ in 0..2 {
        assert!(is_sold_out(&named.deduct(1).send().await.unwrap()));
    }
    let plain = Inventory::builder(&dlock, "phone").stock(1).create().await.unwrap();
    taken(plain.deduct(1).send().await.unwrap());

    let counted = counters(&snapshotter);
    for (name, count) in [
        ("dlock_segment_dry_total lock=stock:{email}", 3),
        ("dlock_segment_dry_total lock=hot", 3),
        ("dlock_segment_dry_total lock=unnamed", 1),
        ("dlock_acquired_total lock=stock:{email}", 3),
        ("dlock_acquired_total lock=hot", 3),
        ("dlock_inventory_answers_total inventory=sale:{email} answer=taken", 2),
        ("dlock_inventory_units_total inventory=sale:{email} effect=taken", 4),
        ("dlock_inventory_answers_total inventory=sale:{email} answer=already_refunded", 1),
        ("dlock_inventory_answers_total inventory=sale:{email} answer=not_enough", 1),
        ("dlock_inventory_answers_total inventory=sale:{email} answer=not_enough_cached", 1),
        ("dlock_inventory_answers_total inventory=nightly answer=sold_out", 1),
        ("dlock_inventory_answers_total inventory=nightly answer=sold_out_cached", 1),
        ("dlock_inventory_units_total inventory=sale:{email} effect=reserved", 5),
        ("dlock_inventory_units_total inventory=sale:{email} effect=confirmed", 5),
        ("dlock_inventory_units_total inventory=sale:{email} effect=refunded", 1),
        ("dlock_inventory_answers_total inventory=sale:{email} answer=conflict", 1),
        ("dlock_inventory_answers_total inventory=sale:{email} answer=throttled", 1),
        ("dlock_inventory_units_total inventory=nightly effect=taken", 1),
        ("dlock_inventory_units_total inventory=phone effect=taken", 1),
    ] {
        assert_eq!(counted.get(name), Some(&count), "{name} in {counted:#?}");
    }
    let paused = counted.get("dlock_inventory_answers_total inventory=sale:{email} answer=paused");
    assert!(paused.is_some_and(|paused| *paused >= 2), "{counted:#?}");
    unknown(&snapshotter).await;
    warned_once(&written).await;

    let traced = String::from_utf8(written.lock().unwrap().clone()).unwrap();
    for line in [
        "DEBUG dlock::segment: dry key=\"stock:{email}\" segment=",
        "DEBUG dlock::segment: dry key=\"hot\" segment=",
        "DEBUG dlock::inventory: answered inventory=\"sale:{email}\" answer=\"taken\" available=6",
        "DEBUG dlock::inventory: answered inventory=\"nightly\" answer=\"sold_out_cached\"",
        "DEBUG dlock::inventory: answered inventory=\"sale:{email}\" answer=\"throttled\"",
        " INFO dlock::inventory: changed inventory=\"sale:{email}\" change=Pause",
        " WARN dlock::inventory: requests fail inventory=\"gone:{email}\" kind=\"Unknown\" error=",
        "ERROR dlock::inventory: the inventory is lost inventory=\"gone:{email}\" error=",
    ] {
        assert!(traced.contains(line), "{line} is not in\n{traced}");
    }
    // A crowd meets an outage: a few lines, not one for each request.
    let loud = traced.lines().filter(|line| {
        (line.contains(" WARN ") || line.contains("ERROR")) && line.contains("gone:{email}")
    });
    assert_eq!(loud.count(), 2, "{traced}");
    let shown = format!("{counted:?} {traced}");
    assert!(!shown.contains("secret"), "neither values of keys nor ids:\n{shown}");
}

/// A server that keeps nothing on disk is told of once for each client, and one that does is not.
async fn warned_once(written: &Mutex<Vec<u8>>) {
    let warned = || {
        let written = written.lock().unwrap();
        String::from_utf8_lossy(&written).matches("(appendonly no)").count()
    };
    let before = warned();
    let (Some(volatile), Some(durable)) =
        (RedisServer::start(), RedisServer::with(&["--appendonly", "yes"]))
    else {
        return;
    };
    for server in [&durable, &volatile] {
        let dlock = dlock::Dlock::connect(&server.url()).await.unwrap();
        for name in ["one", "two"] {
            let sale = Inventory::builder(&dlock, name).stock(1).create().await.unwrap();
            taken(sale.deduct(1).send().await.unwrap());
            // The question is answered before this one, which comes later on the same way.
            assert!(sale.health().await.is_ok());
        }
        dlock.shutdown(Duration::from_secs(5)).await;
    }
    common::eventually("it warns", async || warned() > before).await;
    assert_eq!(warned(), before + 1);
}

/// A server that does not answer.
async fn unknown(snapshotter: &Snapshotter) {
    let Some(server) = RedisServer::start() else { return };
    let url = format!("{}?call_timeout=200ms", server.url());
    let dlock = dlock::Dlock::connect(&url).await.unwrap();
    let email = "secret@example.org";
    let sale = Inventory::builder(&dlock, key!("gone:{email}")).stock(10).create().await.unwrap();
    server.pause();
    let unknown = sale.deduct(1).send().await;
    assert!(matches!(unknown, Err(Error::Unknown(None))), "{unknown:?}");
    let counted = counters(snapshotter);
    assert_eq!(counted.get("dlock_inventory_unknown_total inventory=gone:{email}"), Some(&1));
    server.resume();
    server.cli(&["CONFIG", "SET", "maxmemory", "1"]);
    common::eventually("it says that it has no memory", async || {
        matches!(sale.deduct(1).send().await, Err(Error::Store(_)))
    })
    .await;
    let counted = counters(snapshotter);
    let failed = "dlock_inventory_failed_total inventory=gone:{email} kind=Unavailable";
    assert!(counted.get(failed).is_some_and(|failed| *failed > 0), "{counted:#?}");
    server.cli(&["CONFIG", "SET", "maxmemory", "0"]);
    server.cli(&["FLUSHALL"]);
    for _ in 0..20 {
        common::eventually("it is lost", async || {
            matches!(sale.deduct(1).send().await, Err(Error::Lost(_)))
        })
        .await;
    }
    let counted = counters(snapshotter);
    let lost = "dlock_inventory_failed_total inventory=gone:{email} kind=Lost";
    assert_eq!(counted.get(lost), Some(&20), "{counted:#?}");
}
