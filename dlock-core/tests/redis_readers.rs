//! Readers of one key on a real Redis.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use dlock::Dlock;
use dlock_testkit::redis::{RedisServer, client};
use tokio::task::JoinSet;

const TASKS: u64 = 100;
const HOLD: Duration = Duration::from_millis(50);

/// When the writers that waited are done, no reader waits for long: a wake-up that is lost
/// would cost most of a second, until the waiter looks again.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn readers_do_not_stall_after_writers() {
    let Some(server) = RedisServer::start() else { return };
    for fair in [false, true] {
        let client = client(&server.url()).ttl(Duration::from_secs(30));
        let client = client.connect().await.expect("a client");
        let (writing, stop) = (Arc::new(AtomicBool::new(true)), Arc::new(AtomicBool::new(false)));
        let mut tasks = JoinSet::new();
        for number in 0..TASKS {
            tasks.spawn(read(client.clone(), number, fair, writing.clone(), stop.clone()));
        }
        tokio::time::sleep(Duration::from_millis(700)).await;
        writing.store(false, Ordering::Relaxed);
        // One of sixteen waits for writing, until all readers before it have left, and
        // then holds the lock.
        let writers = u32::try_from(TASKS / 16 + 1).expect("a small number");
        let from = Instant::now() + 2 * writers * 2 * HOLD;
        tokio::time::sleep(from - Instant::now() + Duration::from_secs(2)).await;
        stop.store(true, Ordering::Relaxed);
        let waits = tasks.join_all().await.into_iter().flatten();
        let waits: Vec<_> =
            waits.filter(|(began, _)| *began > from).map(|(_, wait)| wait).collect();
        assert!(waits.len() > 1_000, "{} reads (fair: {fair})", waits.len());
        let longest = waits.iter().max().expect("some reads");
        assert!(*longest < Duration::from_millis(400), "{longest:?} (fair: {fair})");
        drop(client);
        server.assert_nothing_left().await;
    }
}

/// Reads again and again, and writes now and then at first. Returns when each read began
/// and how long it waited.
async fn read(
    client: Dlock,
    number: u64,
    fair: bool,
    writing: Arc<AtomicBool>,
    stop: Arc<AtomicBool>,
) -> Vec<(Instant, Duration)> {
    let (mut cycle, mut waits) = (number, Vec::new());
    while !stop.load(Ordering::Relaxed) {
        cycle += 1;
        let writes = writing.load(Ordering::Relaxed) && cycle % 16 == 0;
        let lock = client.rwlock("r");
        let lock = if writes { lock.write() } else { lock.read() };
        let lock = if fair { lock.fair() } else { lock };
        let began = Instant::now();
        let guard = lock.lock().await.expect("the lock");
        waits.push((began, began.elapsed()));
        tokio::time::sleep(HOLD).await;
        drop(guard);
    }
    waits
}
