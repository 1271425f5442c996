//! What an outage writes to the log. In a process of its own: subscribers are global.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use dlock_testkit::conformance::eventually;
use dlock_testkit::redis::{RedisServer, client};
use tracing::Level;
use tracing_subscriber::layer::{Context, Layer, SubscriberExt as _};

/// Counts the events of level WARN and of level ERROR.
#[derive(Clone, Default)]
struct Lines {
    warnings: Arc<AtomicUsize>,
    errors: Arc<AtomicUsize>,
}

impl<S: tracing::Subscriber> Layer<S> for Lines {
    fn on_event(&self, event: &tracing::Event<'_>, _: Context<'_, S>) {
        match *event.metadata().level() {
            Level::WARN => self.warnings.fetch_add(1, Ordering::Relaxed),
            Level::ERROR => self.errors.fetch_add(1, Ordering::Relaxed),
            _ => return,
        };
    }
}

/// 100 locks are held and 100 are wanted when the server dies: a handful of warnings in
/// all, not some for each lock. A lock that is lost is an error, once.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn two_hundred_locks_and_a_dead_server_write_a_handful_of_lines() {
    let lines = Lines::default();
    let subscriber = tracing_subscriber::registry().with(lines.clone());
    tracing::subscriber::set_global_default(subscriber).expect("the first one");
    let Some(mut server) = RedisServer::start() else { return };
    let ttl = Duration::from_secs(30);
    let client = client(&server.url()).ttl(ttl).connect().await.expect("a client");
    let mut guards = Vec::new();
    for number in 0..100 {
        let lock = client.mutex(format!("held:{number}")).ttl(Duration::from_secs(3));
        guards.push(lock.lock().await.expect("the lock"));
    }
    assert_eq!(lines.warnings.load(Ordering::Relaxed), 0, "all is well");
    server.kill();
    let waiting: Vec<_> = (0..100)
        .map(|number| {
            let lock = client.mutex(format!("wanted:{number}")).wait(Duration::from_secs(4));
            tokio::spawn(async move { lock.lock().await.map(drop) })
        })
        .collect();
    for task in waiting {
        task.await.expect("the task").expect_err("the server is dead");
    }
    eventually("all held locks are lost", async || {
        lines.errors.load(Ordering::Relaxed) == guards.len()
    })
    .await;
    let warnings = lines.warnings.load(Ordering::Relaxed);
    assert!((1..=5).contains(&warnings), "{warnings} warnings");
}
