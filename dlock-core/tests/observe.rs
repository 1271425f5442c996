//! What metrics and traces show. In a process of its own: recorders and
//! subscribers are global.

use std::fmt::Debug;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use dlock::{Dlock, ReleaseOutcome, key};
use metrics_util::debugging::{DebugValue, DebuggingRecorder, Snapshotter};
use tracing::field::{Field, Visit};
use tracing_subscriber::layer::{Context, Layer, SubscriberExt as _};

/// Events as `target message field=value ...`.
#[derive(Clone, Default)]
struct Lines(Arc<Mutex<Vec<String>>>);

impl<S: tracing::Subscriber> Layer<S> for Lines {
    fn on_event(&self, event: &tracing::Event<'_>, _: Context<'_, S>) {
        struct Words(String, String);
        impl Visit for Words {
            fn record_debug(&mut self, field: &Field, value: &dyn Debug) {
                if field.name() == "message" {
                    self.0 = format!("{value:?}");
                } else {
                    self.1.push_str(&format!(" {}={value:?}", field.name()));
                }
            }
        }
        let mut words = Words(String::new(), String::new());
        event.record(&mut words);
        let line = format!("{} {}{}", event.metadata().target(), words.0, words.1);
        self.0.lock().expect("the lines").push(line);
    }
}

#[tokio::test(start_paused = true)]
async fn metrics_and_traces() {
    let recorder = DebuggingRecorder::new();
    let snapshotter = recorder.snapshotter();
    recorder.install().unwrap();
    let lines = Lines::default();
    tracing::subscriber::set_global_default(tracing_subscriber::registry().with(lines.clone()))
        .unwrap();

    let dlock = Dlock::connect("memory://observe?ttl=3s").await.unwrap();
    let other = Dlock::connect("memory://observe?client_name=operator").await.unwrap();
    let email = "secret@example.org";
    let lock = dlock.mutex(key!("user:{email}"));
    let guard = lock.lock().await.unwrap();
    let waiting = tokio::spawn({
        let lock = lock.clone();
        async move {
            let guard = lock.lock().await.unwrap();
            tokio::time::sleep(Duration::from_secs(2)).await;
            drop(guard);
        }
    });
    tokio::time::sleep(Duration::from_millis(2)).await;
    assert!(lock.try_lock().await.unwrap().is_none());
    drop(guard);
    waiting.await.unwrap();
    let guard = lock.clone().name("profile").lock().await.unwrap();
    assert_eq!(other.break_lock("user:secret@example.org").await.unwrap(), 1);
    drop(guard);
    let _held = lock.lock().await.unwrap();
    let _asking = tokio::spawn({
        let lock = lock.clone();
        async move { drop(lock.lock().await) }
    });
    tokio::task::yield_now().await;
    let cancelled = tokio::time::timeout(Duration::from_millis(1), lock.lock());
    assert!(cancelled.await.is_err());

    let mut counted = Vec::new();
    for (key, _, help, value) in snapshotter.snapshot().into_vec() {
        let (_, key) = key.into_parts();
        assert!(help.is_some_and(|help| help.ends_with('.')), "{} has no help", key.name());
        let labels: Vec<String> =
            key.labels().map(|label| format!("{}={}", label.key(), label.value())).collect();
        let value = match value {
            DebugValue::Counter(count) => count.to_string(),
            DebugValue::Histogram(values) => format!("{} values", values.len()),
            DebugValue::Gauge(value) => value.to_string(),
        };
        counted.push(format!("{} {} {value}", key.name(), labels.join(" ")));
    }
    let counted = counted.join("\n");
    for line in [
        "dlock_acquired_total lock=user:{email} 3",
        "dlock_held lock=user:{email} 1",
        "dlock_held lock=profile 0",
        "dlock_waiting lock=user:{email} 1",
        "dlock_acquired_total lock=profile 1",
        "dlock_handed_over_total lock=user:{email} 1",
        "dlock_waited_total lock=user:{email} 2",
        "dlock_refused_total lock=user:{email} kind=TimedOut 1",
        "dlock_renewed_total lock=user:{email}",
        "dlock_lost_total lock=profile 1",
        "dlock_wait_seconds lock=user:{email} 3 values",
        "dlock_hold_seconds lock=user:{email} 2 values",
    ] {
        assert!(counted.contains(line), "{line} is not in\n{counted}");
    }
    let traced = lines.0.lock().unwrap().join("\n");
    for line in [
        "dlock::client connected backend=\"memory\" address=\"memory://observe\" namespace=\"default\" ttl=3s wait=\"10s\"",
        "dlock::lock acquired key=\"user:{email}\" token=",
        "handed_over=true",
        "dlock::lock refused key=\"user:{email}\" error=",
        "dlock::lock released key=\"user:{email}\" held_us=",
        "dlock::lease renewed key=\"user:{email}\"",
        "dlock::lease lost key=\"profile\" reason=it was broken by operator",
    ] {
        assert!(traced.contains(line), "{line} is not in\n{traced}");
    }
    assert!(!counted.contains("secret") && !traced.contains("secret"), "no values of keys");
}

/// How often a lock of this label was acquired, and after a wait.
fn acquired(snapshotter: &Snapshotter, label: &str) -> (u64, u64) {
    let mut counted = (0, 0);
    for (key, _, _, value) in snapshotter.snapshot().into_vec() {
        let (_, key) = key.into_parts();
        if let (DebugValue::Counter(count), true) =
            (value, key.labels().any(|its| its.value() == label))
        {
            match key.name() {
                "dlock_acquired_total" => counted.0 += count,
                "dlock_waited_total" => counted.1 += count,
                _ => {}
            }
        }
    }
    counted
}

/// A round trip is no wait: only those who found the lock with somebody else are counted.
#[tokio::test]
async fn only_those_who_waited_are_counted() {
    let recorder = DebuggingRecorder::new();
    let snapshotter = recorder.snapshotter();
    let _local = metrics::set_default_local_recorder(&recorder);
    let Some(server) = dlock_testkit::redis::RedisServer::start() else { return };
    let dlock = Dlock::connect(&server.url()).await.unwrap();
    let other = Dlock::connect(&server.url()).await.unwrap();
    let id = 7;

    for _ in 0..20 {
        let free = dlock.mutex(key!("free:{id}")).lock().await.unwrap();
        assert_eq!(free.release().await.unwrap(), ReleaseOutcome::Released);
    }
    assert_eq!(acquired(&snapshotter, "free:{id}"), (20, 0));

    let readers = dlock.rwlock(key!("read:{id}"));
    let reader = readers.read();
    let (a, b) = tokio::join!(reader.lock(), reader.lock());
    assert!(a.is_ok() && b.is_ok());
    assert_eq!(acquired(&snapshotter, "read:{id}"), (2, 0), "readers do not exclude each other");

    // Held by another client, and then by another task of this one.
    let held = other.mutex(key!("there:{id}")).lock().await.unwrap();
    let there = dlock.mutex(key!("there:{id}"));
    let (waited, _) = tokio::join!(there.lock(), async {
        while other.inspect("there:7").await.unwrap().waiters.is_empty() {
            tokio::task::yield_now().await;
        }
        drop(held);
    });
    assert_eq!(waited.unwrap().release().await.unwrap(), ReleaseOutcome::Released);
    assert_eq!(acquired(&snapshotter, "there:{id}"), (2, 1), "one of two clients waited");

    let here = dlock.mutex(key!("here:{id}"));
    let held = here.lock().await.unwrap();
    let (waited, _) = tokio::join!(here.lock(), async { drop(held) });
    assert_eq!(waited.unwrap().release().await.unwrap(), ReleaseOutcome::Released);
    let once = async || drop(here.lock().await.unwrap());
    tokio::join!(once(), once());
    assert_eq!(acquired(&snapshotter, "here:{id}"), (4, 2));
}
