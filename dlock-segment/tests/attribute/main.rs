//! `#[segmented_lock]`: on the embedded backend and on a real Redis.

#![allow(clippy::unwrap_used, reason = "a failed step fails the test")]

#[path = "../common/mod.rs"]
mod common;
mod options;
mod outcomes;
mod signatures;

use std::sync::Arc;
use std::sync::atomic::{AtomicI64, AtomicU64, AtomicUsize, Ordering};

use common::Place;
use dlock::{Dlock, Error, Token};
use dlock_segment::{SegmentOutcome, segmented_lock};

on_both_stores!(
    every_segment_is_asked_once_until_one_is_done,
    one_at_a_time_in_each_segment,
    what_is_dry_is_asked_last,
);

/// Columns of stock that detect two tasks in one of them at the same time, or a task with
/// an older token than one before it.
#[derive(Default)]
struct Columns(Vec<Column>);

#[derive(Default)]
struct Column {
    units: AtomicI64,
    inside: AtomicUsize,
    last: AtomicU64,
    visits: AtomicUsize,
}

impl Columns {
    fn of(units: &[i64]) -> Arc<Self> {
        let column = |units: &i64| Column { units: (*units).into(), ..Column::default() };
        Arc::new(Columns(units.iter().map(column).collect()))
    }

    async fn take(&self, index: usize, token: Token) -> SegmentOutcome<usize> {
        let column = &self.0[index];
        column.visits.fetch_add(1, Ordering::SeqCst);
        assert_eq!(column.inside.fetch_add(1, Ordering::SeqCst), 0, "two in one segment");
        let last = column.last.swap(token.get(), Ordering::SeqCst);
        assert!(last < token.get(), "{last} before {token}");
        // Read, think, write: only the lock keeps others out.
        let units = column.units.load(Ordering::SeqCst);
        tokio::task::yield_now().await;
        if units > 0 {
            column.units.store(units - 1, Ordering::SeqCst);
        }
        column.inside.fetch_sub(1, Ordering::SeqCst);
        if units > 0 { SegmentOutcome::Done(index) } else { SegmentOutcome::Dry }
    }

    fn units(&self) -> Vec<i64> {
        self.0.iter().map(|column| column.units.load(Ordering::SeqCst)).collect()
    }

    /// How often each column was used since the last call.
    fn visits(&self) -> Vec<usize> {
        self.0.iter().map(|column| column.visits.swap(0, Ordering::SeqCst)).collect()
    }
}

#[segmented_lock(key = "stock:{sku}", segments = 20, client = dlock, dry_for = "1h")]
async fn take(
    dlock: &Dlock,
    columns: Arc<Columns>,
    sku: u64,
) -> Result<SegmentOutcome<usize>, Error> {
    Ok(columns.take(segment.index(), guard.token()).await)
}

async fn every_segment_is_asked_once_until_one_is_done(place: Place) {
    let mut units = [0; 20];
    units[7] = 1;
    let columns = Columns::of(&units);
    assert_eq!(take(&place.dlock, columns.clone(), 7).await.unwrap(), SegmentOutcome::Done(7));
    let mut visits = columns.visits();
    visits[7] = 0; // it was not dry
    assert_eq!(take(&place.dlock, columns.clone(), 7).await.unwrap(), SegmentOutcome::Dry);
    visits.iter_mut().zip(columns.visits()).for_each(|(visits, more)| *visits += more);
    assert_eq!(visits, [1; 20], "what was dry a moment ago is not asked again");
    assert!(place.dlock.local_state().held.is_empty());
}

async fn one_at_a_time_in_each_segment(place: Place) {
    let columns = Columns::of(&[10; 20]);
    let clients = [place.dlock.clone(), place.another().await];
    let mut buyers = tokio::task::JoinSet::new();
    for number in 0..250 {
        let (dlock, columns) = (clients[number % 2].clone(), columns.clone());
        buyers.spawn(async move { take(&dlock, columns, 7).await.expect("the store answers") });
    }
    let mut sold = [0; 20];
    let mut dry = 0;
    while let Some(taken) = buyers.join_next().await {
        match taken.expect("neither overlap nor an old token") {
            SegmentOutcome::Done(index) => sold[index] += 1,
            SegmentOutcome::Dry => dry += 1,
        }
    }
    assert_eq!((sold, dry), ([10; 20], 50), "each unit once");
    assert_eq!(columns.units(), [0; 20]);
}

#[segmented_lock(key = "stock", segments = 5, client = dlock, dry_for = "1h")]
async fn first(
    dlock: &Dlock,
    seen: &mut Vec<usize>,
    dry: usize,
) -> Result<SegmentOutcome<()>, Error> {
    seen.push(segment.index());
    Ok(if segment.index() == dry { SegmentOutcome::Dry } else { SegmentOutcome::Done(()) })
}

async fn what_is_dry_is_asked_last(place: Place) {
    let mut seen = Vec::new();
    while !seen.contains(&3) {
        let _ = first(&place.dlock, &mut seen, 3).await.unwrap();
    }
    for _ in 0..50 {
        seen.clear();
        assert_eq!(first(&place.dlock, &mut seen, 3).await.unwrap(), SegmentOutcome::Done(()));
        assert!(seen.len() == 1 && seen[0] != 3, "{seen:?}");
    }
}
