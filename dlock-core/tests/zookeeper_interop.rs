//! dlock, Curator and kazoo on the same locks of a real ZooKeeper, checked from outside: no
//! two programs held a lock at the same time. Each test also runs its negative control: on
//! two different locks the same check must find overlaps.
//!
//! Each test takes some seconds; `DLOCK_TEST_SECONDS=60` makes them longer.

use std::time::Duration;

use dlock::Dlock;
use dlock_testkit::interop::{Held, Peer, Span, overlap};
use dlock_testkit::process::now;
use dlock_testkit::zookeeper::ZooKeeperServer;

/// Two programs of each side, and two tasks in each of dlock's.
const PEERS: usize = 2;

fn seconds() -> u64 {
    let seconds = std::env::var("DLOCK_TEST_SECONDS").ok();
    seconds.and_then(|seconds| seconds.parse().ok()).unwrap_or(6)
}

fn client(url: &str, layout: &str) -> Dlock {
    let url = format!("{url}?layout={layout}");
    let builder = Dlock::builder().url(&url).ttl(Duration::from_secs(2));
    builder.wait(Duration::from_secs(30)).connect_lazy().expect("a client")
}

/// Takes the lock again and again, and tells when it was held.
async fn work(
    dlock: Dlock,
    kind: &'static str,
    key: String,
    seconds: u64,
    who: usize,
) -> Vec<Span> {
    let end = now() + seconds * 1_000_000_000;
    let mut spans = Vec::new();
    while now() < end {
        let (from, held) = match kind {
            "semaphore" => {
                let permits = dlock.semaphore(key.as_str(), 2).permits(1);
                let guard = permits.lock().await.expect("a permit");
                let from = now();
                tokio::time::sleep(Duration::from_millis(10)).await;
                spans.push(Span { held: Held::Permit, from, to: now(), who });
                let _ = guard.release().await.expect("an answer");
                continue;
            }
            "read" => (dlock.rwlock(key.as_str()).read(), Held::Shared),
            _ => (dlock.mutex(key.as_str()), Held::Exclusive),
        };
        let guard = from.lock().await.expect("the lock");
        let from = now();
        tokio::time::sleep(Duration::from_millis(1)).await;
        spans.push(Span { held, from, to: now(), who });
        let _ = guard.release().await.expect("an answer");
    }
    spans
}

type Start = fn(&str, &str, &str, u64) -> Option<Peer>;

/// Runs both sides, on locks of these names, and gives the spans of each.
async fn together(
    layout: &str,
    start: Start,
    kinds: [&'static str; 2],
    keys: [&str; 2],
    seconds: u64,
) -> Option<[Vec<Span>; 2]> {
    let server = ZooKeeperServer::start()?;
    let host = format!("127.0.0.1:{}", server.port());
    let mut peers = Vec::new();
    for n in 0..PEERS {
        peers.push(start(&host, kinds[n % 2], &format!("/{}", keys[0]), seconds)?);
    }
    // One more, which is killed while it holds the lock or waits for it; and one that is
    // stopped for a while.
    let mut killed = start(&host, kinds[0], &format!("/{}", keys[0]), seconds)?;
    peers.iter_mut().chain([&mut killed]).for_each(Peer::go);
    let mut tasks = Vec::new();
    for n in 0..PEERS {
        let dlock = client(&server.url(), layout);
        for task in 0..2 {
            let (kind, key) = (kinds[task % 2], keys[1].to_owned());
            tasks.push(tokio::spawn(work(dlock.clone(), kind, key, seconds, 100 + n * 2 + task)));
        }
    }
    tokio::time::sleep(Duration::from_millis(700)).await;
    killed.process.kill();
    peers[0].process.pause();
    tokio::time::sleep(Duration::from_millis(700)).await;
    peers[0].process.resume();
    let mut ours = Vec::new();
    for task in tasks {
        ours.extend(task.await.expect("the task"));
    }
    let within = Duration::from_secs(30);
    let theirs = peers.into_iter().enumerate().flat_map(|(who, peer)| peer.spans(who, within));
    let theirs = tokio::task::block_in_place(|| theirs.collect());
    Some([theirs, ours])
}

async fn exclude_each_other(layout: &str, start: Start, kinds: [&'static str; 2]) {
    let keys = ["shared/lock"; 2];
    let Some([theirs, ours]) = together(layout, start, kinds, keys, seconds()).await else {
        return;
    };
    println!("{layout} {kinds:?}: {} of them, {} of ours", theirs.len(), ours.len());
    assert!(theirs.len() > 10 && ours.len() > 10, "{} and {}", theirs.len(), ours.len());
    let all = [theirs, ours].concat();
    assert_eq!(overlap(&all, 2), None);
    // The negative control: a lock each.
    let keys = ["theirs/lock", "ours/lock"];
    let apart = together(layout, start, kinds, keys, 3).await.expect("the servers");
    assert!(overlap(&apart.concat(), 2).is_some(), "the check finds nothing");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn curators_mutex() {
    exclude_each_other("mutex", Peer::curator, ["mutex", "mutex"]).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn curators_read_write_lock() {
    exclude_each_other("rwlock", Peer::curator, ["write", "read"]).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn curators_semaphore() {
    exclude_each_other("mutex", Peer::curator, ["semaphore", "semaphore"]).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn kazoos_lock() {
    exclude_each_other("kazoo", Peer::kazoo, ["mutex", "mutex"]).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn kazoos_readers_and_writers() {
    exclude_each_other("kazoo", Peer::kazoo, ["write", "read"]).await;
}
