//! Every way in which a call can end. After each of them nothing is held.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::time::Duration;

use dlock::{BodyStatus, Dlock, Error, ErrorKind, State};
use dlock_segment::{SegmentOutcome, segmented_lock};

use super::common::{self, Place, eventually};
use crate::on_both_stores;

on_both_stores!(
    busy_segments_are_passed_over_then_told,
    an_error_of_the_body_ends_the_pass,
    lost_and_cancelled,
    lost_and_finished,
    a_panic,
    a_cancelled_caller,
    unusable_segments_and_keys,
);

#[derive(Debug, PartialEq)]
enum AppError {
    Lock(ErrorKind, BodyStatus),
    Own(usize),
}

impl From<Error> for AppError {
    fn from(error: Error) -> Self {
        AppError::Lock(error.kind(), error.body_status())
    }
}

async fn assert_nothing_is_left(place: &Place) {
    let other = place.another().await;
    let wait = Duration::from_secs(30);
    drop(other.mutex("stock:0").wait(wait).lock().await.expect("it becomes free"));
    let state = place.dlock.local_state();
    eventually("nothing is held", || async { place.dlock.local_state().held.is_empty() }).await;
    assert!(state.waiting.is_empty(), "{state:?}");
}

#[segmented_lock(key = "stock", segments = 3, client = dlock, wait = "0s")]
async fn index(dlock: &Dlock, ran: &AtomicUsize) -> Result<SegmentOutcome<usize>, AppError> {
    ran.fetch_add(1, Ordering::SeqCst);
    Ok(SegmentOutcome::Done(segment.index()))
}

async fn busy_segments_are_passed_over_then_told(place: Place) {
    let (other, ran) = (place.another().await, AtomicUsize::new(0));
    let zero = other.mutex("stock:0").lock().await.unwrap();
    let two = other.mutex("stock:2").lock().await.unwrap();
    for _ in 0..10 {
        assert_eq!(index(&place.dlock, &ran).await, Ok(SegmentOutcome::Done(1)));
    }
    // The release is sent without waiting for the answer.
    let one = other.mutex("stock:1").lock().await.unwrap();
    let busy = index(&place.dlock, &ran).await.unwrap_err();
    assert_eq!(busy, AppError::Lock(ErrorKind::TimedOut, BodyStatus::NotRun));
    assert_eq!(ran.load(Ordering::SeqCst), 10);
    drop((zero, one, two));
    assert_nothing_is_left(&place).await;
}

#[segmented_lock(key = "stock", segments = 3, client = dlock)]
async fn failing(dlock: &Dlock, ran: &AtomicUsize) -> Result<SegmentOutcome<()>, AppError> {
    ran.fetch_add(1, Ordering::SeqCst);
    Err(AppError::Own(segment.index()))?;
    Ok(SegmentOutcome::Dry)
}

async fn an_error_of_the_body_ends_the_pass(place: Place) {
    let ran = AtomicUsize::new(0);
    let failed = failing(&place.dlock, &ran).await;
    assert!(matches!(failed, Err(AppError::Own(_))), "{failed:?}");
    assert_eq!(ran.load(Ordering::SeqCst), 1, "an error is not dry");
    assert_nothing_is_left(&place).await;
}

#[derive(Default)]
struct Trace {
    entered: AtomicUsize,
    dropped: AtomicBool,
}

struct Marks<'a>(&'a AtomicBool);

impl Drop for Marks<'_> {
    fn drop(&mut self) {
        self.0.store(true, Ordering::SeqCst);
    }
}

/// Is dry once, then never returns from the second segment.
#[segmented_lock(key = "stock", segments = 2, client = dlock)]
async fn stuck(dlock: Dlock, trace: Arc<Trace>) -> Result<SegmentOutcome<()>, AppError> {
    if trace.entered.fetch_add(1, Ordering::SeqCst) == 0 {
        return Ok(SegmentOutcome::Dry);
    }
    let _marks = Marks(&trace.dropped);
    std::future::pending().await
}

/// The running call is in its second segment.
async fn entered(trace: &Trace) {
    let inside = || async { trace.entered.load(Ordering::SeqCst) == 2 };
    eventually("the body is in the second segment", inside).await;
}

async fn break_what_is_held(place: &Place) {
    let held = place.dlock.local_state().held;
    let operator = place.another().await;
    for hold in held {
        operator.break_lock(&hold.key).await.expect("the store answers");
    }
}

async fn lost_and_cancelled(place: Place) {
    let trace = Arc::new(Trace::default());
    let running = tokio::spawn(stuck(place.dlock.clone(), trace.clone()));
    entered(&trace).await;
    break_what_is_held(&place).await;
    let error = running.await.unwrap().unwrap_err();
    assert_eq!(error, AppError::Lock(ErrorKind::Lost, BodyStatus::Cancelled));
    assert!(trace.dropped.load(Ordering::SeqCst), "the body is gone");
    assert_eq!(trace.entered.load(Ordering::SeqCst), 2, "it does not go on elsewhere");
    assert_nothing_is_left(&place).await;
}

#[segmented_lock(key = "stock", segments = 1, client = dlock, on_lost = "finish")]
async fn finished(dlock: Dlock, trace: Arc<Trace>) -> Result<SegmentOutcome<State>, AppError> {
    trace.entered.store(2, Ordering::SeqCst);
    let _ = guard.lost().await;
    tokio::task::yield_now().await;
    Ok(SegmentOutcome::Done(guard.state()))
}

async fn lost_and_finished(place: Place) {
    let trace = Arc::new(Trace::default());
    let running = tokio::spawn(finished(place.dlock.clone(), trace.clone()));
    entered(&trace).await;
    break_what_is_held(&place).await;
    assert_eq!(running.await.unwrap(), Ok(SegmentOutcome::Done(State::Lost)));
    assert_nothing_is_left(&place).await;
}

#[segmented_lock(key = "stock", segments = 2, client = dlock)]
async fn panicking(dlock: Dlock) -> Result<SegmentOutcome<()>, AppError> {
    tokio::task::yield_now().await;
    panic!("in the body of {segment:?}")
}

async fn a_panic(place: Place) {
    assert!(tokio::spawn(panicking(place.dlock.clone())).await.unwrap_err().is_panic());
    assert_nothing_is_left(&place).await;
}

async fn a_cancelled_caller(place: Place) {
    let trace = Arc::new(Trace::default());
    let running = tokio::spawn(stuck(place.dlock.clone(), trace.clone()));
    entered(&trace).await;
    running.abort();
    assert!(running.await.unwrap_err().is_cancelled());
    assert!(trace.dropped.load(Ordering::SeqCst));
    assert_nothing_is_left(&place).await;
}

#[segmented_lock(key = key, segments = segments, client = dlock)]
async fn anything(
    dlock: &Dlock,
    key: &str,
    segments: Vec<(&str, u32)>,
) -> Result<SegmentOutcome<usize>, AppError> {
    Ok(SegmentOutcome::Done(segment.index()))
}

async fn unusable_segments_and_keys(place: Place) {
    let invalid = Err(AppError::Lock(ErrorKind::Invalid, BodyStatus::NotRun));
    let many: Vec<String> = (0..4_097).map(|number| number.to_string()).collect();
    for (key, segments) in [
        ("stock", Vec::new()),
        ("stock", many.iter().map(|name| (name.as_str(), 1)).collect()),
        ("stock", vec![("", 1)]),
        ("stock", vec![("eu", 1), ("eu", 1)]),
        ("stock", vec![("eu", 0)]),
        ("", vec![("eu", 1)]),
    ] {
        assert_eq!(anything(&place.dlock, key, segments).await, invalid);
    }
    assert_eq!(anything(&place.dlock, "stock", vec![("eu", 1)]).await, Ok(SegmentOutcome::Done(0)));
    assert_nothing_is_left(&place).await;
}
