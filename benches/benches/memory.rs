//! Compares the embedded backend with `tokio::sync::Mutex` in the same run.
//!
//! `cargo bench -p dlock-bench --bench memory`

use std::hint::black_box;
use std::sync::Arc;

use criterion::{Criterion, Throughput, criterion_group, criterion_main};
use dlock::{Dlock, Key};
use dlock_bench::run_contended;
use tokio::runtime::{Builder, Runtime};

fn current_thread() -> Runtime {
    Builder::new_current_thread().enable_all().build().expect("a runtime")
}

fn multi_thread() -> Runtime {
    Builder::new_multi_thread().enable_all().build().expect("a runtime")
}

/// One task locks and releases without contention.
fn uncontended(c: &mut Criterion) {
    let mut group = c.benchmark_group("uncontended");
    let dlock = Dlock::connect_lazy("memory://bench").expect("a client");
    let key = Key::new("order:7").expect("a key");
    let lock = dlock.mutex(&key);
    group.bench_function("dlock", |b| {
        b.to_async(current_thread()).iter(|| async {
            drop(black_box(lock.lock().await.expect("the lock")));
        });
    });
    group.bench_function("dlock, builder and release().await", |b| {
        b.to_async(current_thread()).iter(|| async {
            let guard = dlock.mutex(&key).lock().await.expect("the lock");
            black_box(guard.release().await.expect("released"))
        });
    });
    let mutex = tokio::sync::Mutex::new(());
    group.bench_function("tokio", |b| {
        b.to_async(current_thread()).iter(|| async {
            drop(black_box(mutex.lock().await));
        });
    });
    group.finish();
}

/// 500 tasks wait for one key with an empty critical section: each cycle is a hand-over.
fn hot_key(c: &mut Criterion) {
    const TASKS: usize = 500;
    const CYCLES: u64 = 500_000;
    let mut group = c.benchmark_group("500 tasks on one key");
    group.throughput(Throughput::Elements(CYCLES)).sample_size(10);
    for (name, runtime) in [("one thread", current_thread()), ("all cores", multi_thread())] {
        let dlock = Dlock::connect_lazy("memory://bench").expect("a client");
        group.bench_function(format!("dlock, {name}"), |b| {
            b.to_async(&runtime).iter_custom(|iterations| {
                let lock = Arc::new(dlock.mutex("hot").wait_unlimited());
                async move {
                    let first = lock.lock().await.expect("the lock");
                    run_contended(TASKS, CYCLES * iterations, first, move || {
                        let lock = lock.clone();
                        async move { drop(lock.lock().await.expect("the lock")) }
                    })
                    .await
                }
            });
        });
        group.bench_function(format!("tokio, {name}"), |b| {
            b.to_async(&runtime).iter_custom(|iterations| async move {
                let mutex = Arc::new(tokio::sync::Mutex::new(()));
                let first = mutex.clone().lock_owned().await;
                run_contended(TASKS, CYCLES * iterations, first, move || {
                    let mutex = mutex.clone();
                    async move { drop(mutex.lock().await) }
                })
                .await
            });
        });
    }
    group.finish();
}

criterion_group!(benches, uncontended, hot_key);
criterion_main!(benches);
