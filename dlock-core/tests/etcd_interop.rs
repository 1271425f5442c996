//! dlock and programs with Go's concurrency package exclude each other on one lock of etcd,
//! while some of them are killed and paused. The times at which each held the lock are
//! compared from outside. The negative control: on two different locks the same check must
//! find overlaps.
//!
//! It takes some seconds; `DLOCK_TEST_SECONDS=60` makes it longer.

use std::time::Duration;

use dlock::Dlock;
use dlock_testkit::etcd::EtcdServer;
use dlock_testkit::holder::HolderProcess;
use dlock_testkit::interop::{Held, Peer, Span, etcdctl, overlap};
use dlock_testkit::process::{ChildProcess, now};

/// Programs of the other side, one of which is paused, and clients of dlock. One more of each
/// side is killed.
const PEERS: usize = 4;
/// The ttl of all leases. A program that is paused is so for a shorter time.
const TTL: Duration = Duration::from_secs(2);
const PAUSE: Duration = Duration::from_millis(700);

fn seconds() -> u64 {
    let seconds = std::env::var("DLOCK_TEST_SECONDS").ok();
    seconds.and_then(|seconds| seconds.parse().ok()).unwrap_or(6)
}

fn client(url: &str) -> Dlock {
    let builder = Dlock::builder().url(url).ttl(TTL);
    builder.wait(Duration::from_secs(30)).connect_lazy().expect("a client")
}

/// Takes the lock again and again, and tells when it was held.
async fn work(dlock: Dlock, key: String, seconds: u64, who: usize) -> Vec<Span> {
    let end = now() + seconds * 1_000_000_000;
    let mut spans = Vec::new();
    while now() < end {
        let guard = dlock.mutex(key.as_str()).lock().await.expect("the lock");
        let from = now();
        tokio::time::sleep(Duration::from_millis(1)).await;
        spans.push(Span { held: Held::Exclusive, from, to: now(), who });
        let _ = guard.release().await.expect("an answer");
    }
    spans
}

/// Runs both sides on locks of these names, and gives the spans of each.
async fn together(names: [&str; 2], seconds: u64) -> Option<[Vec<Span>; 2]> {
    let server = EtcdServer::start()?;
    let host = format!("127.0.0.1:{}", server.port());
    let mut peers = Vec::new();
    for _ in 0..PEERS {
        peers.push(Peer::go_etcd(&host, "mutex", names[0], seconds)?);
    }
    let mut killed = Peer::go_etcd(&host, "mutex", names[0], seconds)?;
    // And one of ours, which is killed while it holds the lock or waits for it.
    let url = format!("{}?ttl={}ms", server.url(), TTL.as_millis());
    let mut killed_of_ours = HolderProcess::start(&url);
    peers.iter_mut().chain([&mut killed]).for_each(Peer::go);
    let mut tasks = Vec::new();
    for n in 0..PEERS {
        let (dlock, key) = (client(&server.url()), names[1].to_owned());
        tasks.push(tokio::spawn(work(dlock, key, seconds, 100 + n)));
    }
    killed_of_ours.send(&format!("fair {} {} 3", names[1], TTL.as_millis()));
    tokio::time::sleep(PAUSE).await;
    killed.process.kill();
    killed_of_ours.process.kill();
    peers[0].process.pause();
    tokio::time::sleep(PAUSE).await;
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

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn gos_mutex() {
    let Some([theirs, ours]) = together(["shared/lock"; 2], seconds()).await else { return };
    println!("{} of them, {} of ours", theirs.len(), ours.len());
    assert!(theirs.len() > 10 && ours.len() > 10, "{} and {}", theirs.len(), ours.len());
    assert_eq!(overlap(&[theirs, ours].concat(), 1), None);
    // The negative control: a lock each.
    let apart = together(["theirs/lock", "ours/lock"], 3).await.expect("the servers");
    assert!(overlap(&apart.concat(), 1).is_some(), "the check finds nothing");
}

/// `etcdctl lock` waits for a lock of dlock, and dlock for one of `etcdctl lock`.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn etcdctl_lock() {
    let Some(server) = EtcdServer::start() else { return };
    let Some(etcdctl) = etcdctl() else { return };
    let endpoint = format!("--endpoints=127.0.0.1:{}", server.port());
    let lock = || ChildProcess::start(&etcdctl, &[&endpoint, "lock", "--ttl=2", "nightly"]);
    let is_key = |line: &str| line.starts_with("nightly/").then_some(());
    let dlock = client(&server.url());
    let waiters = async || dlock.inspect("nightly").await.expect("a look").waiters.len();
    let guard = dlock.mutex("nightly").lock().await.expect("the lock");
    let mut other = lock();
    while waiters().await == 0 {
        tokio::time::sleep(Duration::from_millis(10)).await;
    }
    assert!(other.take_lines().is_empty(), "it waits");
    drop(guard);
    tokio::task::block_in_place(|| other.wait_for_line("the lock", is_key));
    // It holds the lock now, and is shown.
    assert!(dlock.mutex("nightly").try_lock().await.expect("an answer").is_none());
    let state = dlock.inspect("nightly").await.expect("a look");
    assert!(state.holders[0].holder.name.contains("without dlock"), "{state:?}");
    other.kill();
    drop(dlock.mutex("nightly").lock().await.expect("the lock, when its lease is over"));
}
