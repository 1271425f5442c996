//! Locks on two nodes of a real Galera cluster, where each node takes changes.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::{Duration, Instant};

use dlock::Dlock;
use dlock_testkit::database_servers::galera;

/// Two clients contend for one key, each at a node of its own. Nobody holds it at the same time
/// as somebody else, and tokens rise from one to the next.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn locks_of_two_nodes_exclude_each_other() {
    let Some(nodes) = galera(2) else { return };
    let inside = Arc::new(AtomicBool::new(false));
    let last = Arc::new(AtomicU64::new(0));
    let until = Instant::now() + Duration::from_secs(10);
    let mut tasks = Vec::new();
    for node in &nodes {
        let builder = Dlock::builder().url(&format!("{}?migrate=true", node.url()));
        let builder = builder.ttl(Duration::from_secs(20)).wait(Duration::from_secs(60));
        let dlock = builder.connect().await.expect("a client");
        for _ in 0..3 {
            let (dlock, inside, last) = (dlock.clone(), inside.clone(), last.clone());
            tasks.push(tokio::spawn(async move {
                let mut cycles = 0_u32;
                while Instant::now() < until {
                    // Fair: each cycle asks the node, and none is handed over in the process.
                    let guard = dlock.mutex("a").fair().lock().await.expect("the lock");
                    assert!(!inside.swap(true, Ordering::SeqCst), "it is held twice");
                    let token = guard.token().get();
                    assert!(last.swap(token, Ordering::SeqCst) < token, "a token fell");
                    tokio::time::sleep(Duration::from_millis(1)).await;
                    inside.store(false, Ordering::SeqCst);
                    let _ = guard.release().await.expect("an answer");
                    cycles += 1;
                }
                cycles
            }));
        }
    }
    for task in tasks {
        assert!(task.await.expect("nobody held it twice") > 0);
    }
}
