//! Measures the memory of a held lock. It is a test file of its own because it looks at
//! the memory of the whole process.

use std::process::Command;
use std::time::Duration;

use dlock::{Dlock, State};

const LOCKS: usize = 100_000;

fn resident_bytes() -> usize {
    let statm = std::fs::read_to_string("/proc/self/statm").expect("a Linux machine");
    let pages: usize = statm.split(' ').nth(1).and_then(|pages| pages.parse().ok()).expect("pages");
    pages * 4096
}

/// Each lock takes at most 1 KiB, and one timer renews all of them.
///
/// By default glibc's allocator decides anew where large tables go whenever one was freed, and
/// the same locks take up to a tenth more by chance. So this runs with a fixed rule.
#[test]
fn a_hundred_thousand_held_locks() {
    let this_program = std::env::current_exe().expect("a path");
    let run = Command::new(this_program)
        .args(["--exact", "held_locks", "--ignored", "--nocapture"])
        .env("MALLOC_MMAP_THRESHOLD_", "131072")
        .output()
        .expect("it runs");
    let printed = String::from_utf8_lossy(&run.stdout);
    println!("{printed}{}", String::from_utf8_lossy(&run.stderr));
    assert!(run.status.success() && printed.contains("1 passed"), "it failed; see above");
}

#[tokio::test(start_paused = true)]
#[ignore = "a_hundred_thousand_held_locks runs it"]
async fn held_locks() {
    let dlock = Dlock::builder().url("memory://held").ttl(Duration::from_secs(30)).connect();
    let dlock = dlock.await.unwrap();
    let warm_up = dlock.mutex("warm-up").lock().await.unwrap();
    let mut guards = Vec::with_capacity(LOCKS);
    let before = resident_bytes();
    for n in 0..LOCKS {
        guards.push(dlock.mutex(format!("order:{n}")).lock().await.unwrap());
    }
    let each = resident_bytes().saturating_sub(before) / LOCKS;
    println!("{each} bytes for each of {LOCKS} held locks, guards included");
    assert!(each <= 1024, "{each} bytes each");
    let tasks = tokio::runtime::Handle::current().metrics().num_alive_tasks();
    assert!(tasks <= 1, "{tasks} tasks for {LOCKS} locks");

    tokio::time::sleep(Duration::from_secs(95)).await;
    assert!(guards.iter().all(|guard| guard.state() == State::Held), "renewed, all of them");
    drop((guards, warm_up));
    assert!(dlock.local_state().held.is_empty());
}
