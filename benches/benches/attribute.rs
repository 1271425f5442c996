//! Compares an annotated function with the same body that takes the lock by hand, on
//! the embedded backend.
//!
//! `cargo bench -p dlock-bench --bench attribute`

use std::hint::black_box;

use criterion::{Criterion, criterion_group, criterion_main};
use dlock::{Dlock, Result, distributed_lock, key};
use tokio::runtime::Builder;

#[distributed_lock(key = "order:{id}", client = dlock)]
async fn annotated(dlock: &Dlock, id: u64) -> Result<u64> {
    Ok(black_box(id))
}

/// Unlike the attribute, this does not stop when the lock is lost and is not re-entrant.
async fn lock_and_release(dlock: &Dlock, id: u64) -> Result<u64> {
    let guard = dlock.mutex(key!("order:{id}")).lock().await?;
    let value = black_box(id);
    let _ = guard.release().await?;
    Ok(value)
}

/// The same as what the attribute does.
async fn lock_and_run(dlock: &Dlock, id: u64) -> Result<u64> {
    let guard = dlock.mutex(key!("order:{id}")).lock().await?;
    guard.run(async move { Ok(black_box(id)) }).await?
}

fn attribute(c: &mut Criterion) {
    let mut group = c.benchmark_group("attribute");
    let runtime = Builder::new_current_thread().enable_all().build().expect("a runtime");
    let dlock = Dlock::connect_lazy("memory://bench").expect("a client");
    group.bench_function("by hand: lock, body, release", |b| {
        b.to_async(&runtime).iter(|| lock_and_release(&dlock, 7));
    });
    group.bench_function("by hand: lock, run(body)", |b| {
        b.to_async(&runtime).iter(|| lock_and_run(&dlock, 7));
    });
    group.bench_function("annotated", |b| {
        b.to_async(&runtime).iter(|| annotated(&dlock, 7));
    });
    group.finish();
}

criterion_group!(benches, attribute);
criterion_main!(benches);
