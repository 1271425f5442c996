//! Deductions from leased units, by one task and by one on each core.

use std::time::{Duration, Instant};

use criterion::{Criterion, Throughput, criterion_group, criterion_main};
use dlock::Dlock;
use dlock_segment::{Inventory, LeasedDeduction, LeasedUnits};
use tokio::runtime::Runtime;

/// More than a run can sell.
const STOCK: u64 = 4_000_000_000;

fn sell(units: &LeasedUnits, count: u64) {
    let mut sold = 0;
    while sold < count {
        match units.deduct(1) {
            LeasedDeduction::Taken => sold += 1,
            _ => std::thread::yield_now(), // the next lot is on its way
        }
    }
}

fn leased(criterion: &mut Criterion) {
    let runtime = Runtime::new().expect("a runtime");
    let units = runtime.block_on(async {
        let dlock = Dlock::connect("memory://").await.expect("a client");
        let sale = Inventory::builder(&dlock, "phone").stock(STOCK).create();
        let lease = sale.await.expect("a sale").lease_units().lot(100_000, 10_000_000);
        lease.start().await.expect("a lease")
    });
    let mut group = criterion.benchmark_group("leased");
    group.throughput(Throughput::Elements(1)).measurement_time(Duration::from_secs(3));
    group.bench_function("one thread", |bencher| {
        bencher.iter_custom(|count| {
            let began = Instant::now();
            sell(&units, count);
            began.elapsed()
        });
    });
    group.bench_function("two threads", |bencher| {
        bencher.iter_custom(|count| {
            let began = Instant::now();
            std::thread::scope(|scope| {
                for _ in 0..2 {
                    scope.spawn(|| sell(&units, count.div_ceil(2)));
                }
            });
            began.elapsed()
        });
    });
    group.finish();
}

criterion_group!(benches, leased);
criterion_main!(benches);
