//! scratch
#[tokio::main(flavor = "current_thread")]
async fn main() {
    let dlock = dlock_core::Dlock::connect_lazy("memory://bench").expect("a client");
    let lock = dlock.mutex("order:7");
    let n: u64 = std::env::args().nth(1).map_or(100_000, |n| n.parse().expect("n"));
    let t = std::time::Instant::now();
    for _ in 0..n {
        drop(lock.lock().await.expect("lock"));
    }
    let d = t.elapsed() / n as u32;
    let m = tokio::sync::Mutex::new(());
    let t = std::time::Instant::now();
    for _ in 0..n * 10 {
        drop(std::hint::black_box(m.lock().await));
    }
    println!("{d:?} tokio {:?}", t.elapsed() / (10 * n) as u32);
}
