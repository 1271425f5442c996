//! Gathering units from several segments, and merging thin ones, on both stores.

#![allow(clippy::unwrap_used, reason = "a failed step fails the test")]

mod common;

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
use std::time::Duration;

use common::Place;
use dlock::{Error, ErrorKind, testing};
use dlock_segment::{Segment, SegmentOutcome, SegmentShare, SegmentedLock};
use tokio::sync::Barrier;

on_both_stores!(
    thin_segments_serve_more_than_each_has,
    two_gatherers_in_opposite_orders_do_not_deadlock,
    many_gatherers_and_single_takers_lose_no_unit,
    an_error_or_a_lost_lock_takes_nothing,
    busy_segments_are_waited_for_only_if_needed,
    inside_the_lock_of_a_segment_it_does_not_wait_out_of_order,
    thin_segments_are_merged,
);

/// Columns of stock that detect two tasks in one of them at the same time.
#[derive(Default)]
struct Columns(Vec<Column>);

#[derive(Default)]
struct Column {
    units: AtomicU64,
    inside: AtomicUsize,
}

impl Columns {
    fn of(units: &[u64]) -> Arc<Self> {
        let column = |units: &u64| Column { units: (*units).into(), ..Column::default() };
        Arc::new(Columns(units.iter().map(column).collect()))
    }

    fn units(&self) -> Vec<u64> {
        self.0.iter().map(|column| column.units.load(Ordering::SeqCst)).collect()
    }

    async fn available(&self, segment: &Segment) -> Result<u64, Error> {
        tokio::task::yield_now().await;
        Ok(self.0[segment.index()].units.load(Ordering::SeqCst))
    }

    /// Reads, thinks, writes: only the locks keep others out.
    async fn take(&self, shares: &[SegmentShare]) -> Result<u64, Error> {
        let columns: Vec<_> = shares.iter().map(|share| &self.0[share.segment.index()]).collect();
        for column in &columns {
            assert_eq!(column.inside.fetch_add(1, Ordering::SeqCst), 0, "two in one segment");
        }
        let before: Vec<u64> = columns.iter().map(|it| it.units.load(Ordering::SeqCst)).collect();
        tokio::task::yield_now().await;
        for ((column, share), before) in columns.iter().zip(shares).zip(before) {
            column.units.store(before.checked_sub(share.units).unwrap(), Ordering::SeqCst);
            column.inside.fetch_sub(1, Ordering::SeqCst);
        }
        Ok(shares.iter().map(|share| share.units).sum())
    }

    async fn take_one(&self, segment: &Segment) {
        let column = &self.0[segment.index()];
        assert_eq!(column.inside.fetch_add(1, Ordering::SeqCst), 0, "two in one segment");
        let before = column.units.load(Ordering::SeqCst);
        tokio::task::yield_now().await;
        column.units.store(before - 1, Ordering::SeqCst);
        column.inside.fetch_sub(1, Ordering::SeqCst);
    }
}

async fn gather(stock: &SegmentedLock, columns: &Columns, want: u64) -> Result<Option<u64>, Error> {
    stock
        .gather(
            want,
            |segment| async move { columns.available(&segment).await },
            |shares| async move {
                assert!(shares.iter().all(|share| share.units > 0));
                assert_eq!(shares.iter().map(|share| share.units).sum::<u64>(), want);
                columns.take(&shares).await
            },
        )
        .await
}

async fn thin_segments_serve_more_than_each_has(place: Place) {
    let columns = Columns::of(&[2; 20]);
    let stock = SegmentedLock::new(&place.dlock, "stock", 20);
    for _ in 0..13 {
        assert_eq!(gather(&stock, &columns, 3).await.unwrap(), Some(3));
    }
    assert_eq!(gather(&stock, &columns, 3).await.unwrap(), None, "one is left");
    assert_eq!(gather(&stock, &columns, 1).await.unwrap(), Some(1), "which was not locked up");
    assert_eq!(gather(&stock, &columns, 1).await.unwrap(), None);
    assert_eq!(columns.units(), [0; 20]);
    let error = gather(&stock, &columns, 0).await.unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Invalid);
    assert!(place.dlock.local_state().held.is_empty());
}

async fn two_gatherers_in_opposite_orders_do_not_deadlock(place: Place) {
    let another = place.another().await;
    for round in 0..20 {
        let columns = Columns::of(&[2, 2]);
        let both_hold_one = Barrier::new(2);
        let one = |dlock, first: usize| {
            let stock = SegmentedLock::new(dlock, format!("stock-{round}"), 2);
            let stock = stock.prefer(first).wait_unlimited();
            let (columns, both_hold_one, asked) = (&columns, &both_hold_one, AtomicUsize::new(0));
            async move {
                let asked = &asked;
                let available = |segment: Segment| async move {
                    if asked.fetch_add(1, Ordering::SeqCst) == 0 {
                        assert_eq!(segment.index(), first);
                        both_hold_one.wait().await;
                    }
                    columns.available(&segment).await
                };
                stock
                    .gather(3, available, |shares| async move { columns.take(&shares).await })
                    .await
            }
        };
        let both = async { tokio::join!(one(&place.dlock, 0), one(&another, 1)) };
        let ends = tokio::time::timeout(Duration::from_secs(30), both);
        let (here, there) = ends.await.expect("they do not wait for each other");
        let mut taken = [here.unwrap(), there.unwrap()];
        taken.sort_unstable();
        assert_eq!(taken, [None, Some(3)]);
    }
}

async fn many_gatherers_and_single_takers_lose_no_unit(place: Place) {
    let another = place.another().await;
    let columns = Columns::of(&[9; 6]);
    let mut tasks = tokio::task::JoinSet::new();
    for number in 0..9_u64 {
        let dlock = if number % 2 == 0 { &place.dlock } else { &another };
        let stock = SegmentedLock::new(dlock, "stock", 6).wait_unlimited();
        let (columns, want) = (columns.clone(), 1 + number % 5);
        tasks.spawn(async move {
            let mut taken = 0;
            while let Some(units) = gather(&stock, &columns, want).await.unwrap() {
                taken += units;
                let one = stock.run(|segment, _guard| {
                    let columns = &columns;
                    async move {
                        if columns.available(&segment).await? == 0 {
                            return Ok::<_, Error>(SegmentOutcome::Dry);
                        }
                        columns.take_one(&segment).await;
                        Ok(SegmentOutcome::Done(()))
                    }
                });
                taken += u64::from(one.await.unwrap().is_some());
            }
            taken
        });
    }
    let all = async { tasks.join_all().await.into_iter().sum::<u64>() };
    let sold = tokio::time::timeout(Duration::from_secs(60), all).await.expect("no deadlock");
    assert_eq!(sold, 54);
    assert_eq!(columns.units(), [0; 6]);
}

async fn an_error_or_a_lost_lock_takes_nothing(place: Place) {
    let columns = Columns::of(&[2, 2]);
    let stock = SegmentedLock::new(&place.dlock, "stock", 2);
    let available = |segment: Segment| {
        let columns = &columns;
        async move { columns.available(&segment).await }
    };
    let refused = Error::new(ErrorKind::Invalid, dlock::Operation::Acquire);
    let failing = stock.gather(3, available, async |_| Err::<(), _>(refused));
    assert_eq!(failing.await.unwrap_err().kind(), ErrorKind::Invalid);

    let losing = stock.gather(3, available, async |shares| {
        assert_eq!(shares.len(), 2);
        place.dlock.break_lock("stock:1").await?;
        std::future::pending::<Result<(), Error>>().await
    });
    assert_eq!(losing.await.unwrap_err().kind(), ErrorKind::Lost);
    assert_eq!(columns.units(), [2, 2]);
    assert_eq!(gather(&stock, &columns, 4).await.unwrap(), Some(4), "nothing stays locked");
}

async fn busy_segments_are_waited_for_only_if_needed(place: Place) {
    let columns = Columns::of(&[2, 2, 2]);
    let stock = SegmentedLock::new(&place.dlock, "stock", 3).wait(Duration::from_secs(20));
    let busy = place.dlock.mutex("stock:1").lock().await.unwrap();
    let hasty = stock.clone().wait(Duration::ZERO);
    assert_eq!(gather(&hasty, &columns, 3).await.unwrap(), Some(3), "the others have enough");
    assert_eq!(gather(&hasty, &columns, 3).await.unwrap_err().kind(), ErrorKind::TimedOut);
    let release = async {
        while place.dlock.local_state().waiting.is_empty() {
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
        drop(busy);
    };
    let (taken, ()) = tokio::join!(gather(&stock, &columns, 3), release);
    assert_eq!(taken.unwrap(), Some(3));
}

async fn inside_the_lock_of_a_segment_it_does_not_wait_out_of_order(place: Place) {
    let columns = Columns::of(&[2, 2]);
    let stock = SegmentedLock::new(&place.dlock, "stock", 2).prefer(1).wait_unlimited();
    let (stock, columns) = (&stock, &columns);
    let nested = || {
        let run = stock.run(|segment, _guard| async move {
            assert_eq!(segment.index(), 1);
            gather(stock, columns, 3).await.map(SegmentOutcome::Done)
        });
        tokio::time::timeout(Duration::from_secs(20), run)
    };
    let another = place.another().await;
    let busy = another.mutex("stock:0").lock().await.unwrap();
    let error = nested().await.expect("it does not wait").unwrap_err();
    assert_eq!(error.kind(), ErrorKind::WouldDeadlock);
    let _ = busy.release().await.unwrap();
    assert_eq!(nested().await.unwrap().unwrap(), Some(Some(3)), "what is free is taken");
}

#[tokio::test(start_paused = true)]
async fn one_wait_is_for_all_segments() {
    let dlock = testing::client();
    let columns = Columns::of(&[2, 2, 2]);
    let stock = SegmentedLock::new(&dlock, "stock", 3).wait(Duration::from_secs(1));
    let brief = dlock.mutex("stock:0").lock().await.unwrap();
    let _busy = dlock.mutex("stock:2").lock().await.unwrap();
    let start = tokio::time::Instant::now();
    let release = async {
        tokio::time::sleep(Duration::from_millis(600)).await;
        drop(brief);
    };
    let (taken, ()) = tokio::join!(gather(&stock, &columns, 5), release);
    assert_eq!(taken.unwrap_err().kind(), ErrorKind::TimedOut);
    assert_eq!(start.elapsed(), Duration::from_secs(1));
    assert_eq!(dlock.local_state().held.len(), 1, "what was gathered is released");
}

async fn thin_segments_are_merged(place: Place) {
    let columns = Columns::of(&[1, 0, 3, 50, 2]);
    let a_minute = Duration::from_secs(60);
    let stock = SegmentedLock::new(&place.dlock, "stock", 5).dry_for(a_minute);
    let merge = |columns: Arc<Columns>| {
        let stock = &stock;
        async move {
            let available = |segment: Segment| {
                let columns = &columns;
                async move { columns.available(&segment).await }
            };
            let body = |from: Vec<SegmentShare>, into: SegmentShare| {
                let columns = &columns;
                async move {
                    let moved = columns.take(&from).await?;
                    assert_eq!(moved, into.units);
                    columns.0[into.segment.index()].units.fetch_add(moved, Ordering::SeqCst);
                    Ok(moved)
                }
            };
            stock.merge(10, available, body).await.unwrap()
        }
    };
    let busy = place.dlock.mutex("stock:4").lock().await.unwrap();
    assert_eq!(merge(columns.clone()).await, Some(1));
    assert_eq!(columns.units(), [0, 0, 4, 50, 2], "what is busy stays");
    let _ = busy.release().await.unwrap();
    assert_eq!(merge(columns.clone()).await, Some(2));
    assert_eq!(columns.units(), [0, 0, 6, 50, 0]);
    assert_eq!(merge(columns.clone()).await, None, "there are not two thin ones");
    let offered = AtomicUsize::new(0);
    let all = stock.run(|_, _| {
        offered.fetch_add(1, Ordering::SeqCst);
        async { Ok::<_, Error>(SegmentOutcome::<()>::Dry) }
    });
    assert_eq!(all.await.unwrap(), None);
    assert_eq!(offered.into_inner(), 2, "what was emptied counts as dry");
}
