//! Every way in which a call can end. After each the key is free.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};

use dlock::{BodyStatus, Dlock, Error, ErrorKind, Result, State, distributed_lock};
use tokio::sync::Notify;

use crate::fixture::until;
use crate::{Fixture, on_both};

on_both!(
    busy,
    timed_out,
    unavailable,
    lost_and_cancelled,
    lost_and_finished,
    lost_of_several,
    lost_before_the_body,
    an_error_of_the_body,
    a_panic,
    a_cancelled_caller,
    a_caller_cancelled_while_waiting,
    shutdown,
);

#[derive(Debug, PartialEq)]
enum AppError {
    Lock(ErrorKind, BodyStatus),
    Own(&'static str),
}

impl From<Error> for AppError {
    fn from(error: Error) -> Self {
        AppError::Lock(error.kind(), error.body_status())
    }
}

type AppResult<T> = std::result::Result<T, AppError>;

#[distributed_lock(key = "k", wait = "0s", client = dlock)]
async fn once(dlock: &Dlock, ran: &AtomicU32) -> AppResult<u32> {
    Ok(ran.fetch_add(1, Ordering::SeqCst))
}

async fn busy(fixture: Fixture) {
    let ran = AtomicU32::new(0);
    let busy = fixture.busy("k").await;
    let error = once(&fixture.dlock, &ran).await.unwrap_err();
    assert_eq!(error, AppError::Lock(ErrorKind::TimedOut, BodyStatus::NotRun));
    assert_eq!(ran.load(Ordering::SeqCst), 0);
    drop(busy);
    fixture.assert_free("k").await;
    assert_eq!(once(&fixture.dlock, &ran).await, Ok(0));
}

#[distributed_lock(key = "k", wait = "60ms", client = dlock)]
async fn patient(dlock: &Dlock, ran: &AtomicU32) -> AppResult<u32> {
    Ok(ran.fetch_add(1, Ordering::SeqCst))
}

async fn timed_out(fixture: Fixture) {
    let ran = AtomicU32::new(0);
    let busy = fixture.busy("k").await;
    let error = patient(&fixture.dlock, &ran).await.unwrap_err();
    assert_eq!(error, AppError::Lock(ErrorKind::TimedOut, BodyStatus::NotRun));
    assert_eq!(ran.load(Ordering::SeqCst), 0);
    drop(busy);
    fixture.assert_free("k").await;
}

async fn unavailable(mut fixture: Fixture) {
    let ran = AtomicU32::new(0);
    fixture.end_backend();
    for error in [
        once(&fixture.dlock, &ran).await.unwrap_err(),
        patient(&fixture.dlock, &ran).await.unwrap_err(),
    ] {
        let AppError::Lock(ErrorKind::Unavailable | ErrorKind::Unknown, BodyStatus::NotRun) = error
        else {
            panic!("{error:?}");
        };
    }
    assert_eq!(ran.load(Ordering::SeqCst), 0);
}

/// What a body that waits for ever did.
#[derive(Default)]
struct Trace {
    entered: AtomicBool,
    dropped: AtomicBool,
    passed: AtomicBool,
    go_on: Notify,
}

struct Marks<'a>(&'a AtomicBool);

impl Drop for Marks<'_> {
    fn drop(&mut self) {
        self.0.store(true, Ordering::SeqCst);
    }
}

#[distributed_lock(key = "k", client = dlock)]
async fn cancelled(dlock: Dlock, trace: Arc<Trace>) -> AppResult<&'static str> {
    let _marks = Marks(&trace.dropped);
    trace.entered.store(true, Ordering::SeqCst);
    trace.go_on.notified().await;
    trace.passed.store(true, Ordering::SeqCst);
    Ok("the end")
}

async fn lost_and_cancelled(fixture: Fixture) {
    let trace = Arc::new(Trace::default());
    let running = tokio::spawn(cancelled(fixture.dlock.clone(), trace.clone()));
    until(async || trace.entered.load(Ordering::SeqCst)).await;
    fixture.break_lock("k").await;
    let error = running.await.unwrap().unwrap_err();
    assert_eq!(error, AppError::Lock(ErrorKind::Lost, BodyStatus::Cancelled));
    assert!(trace.dropped.load(Ordering::SeqCst), "the body is gone");
    assert!(!trace.passed.load(Ordering::SeqCst));
    fixture.assert_free("k").await;
}

#[distributed_lock(key = "k", client = dlock, on_lost = "finish", guard = lock)]
async fn finished(dlock: Dlock, trace: Arc<Trace>) -> AppResult<State> {
    trace.entered.store(true, Ordering::SeqCst);
    let _ = lock.lost().await; // the body that wants to know is told
    trace.go_on.notified().await;
    trace.passed.store(true, Ordering::SeqCst);
    Ok(lock.state())
}

async fn lost_and_finished(fixture: Fixture) {
    let trace = Arc::new(Trace::default());
    let running = tokio::spawn(finished(fixture.dlock.clone(), trace.clone()));
    until(async || trace.entered.load(Ordering::SeqCst)).await;
    fixture.break_lock("k").await;
    drop(fixture.busy("k").await); // somebody else may have it meanwhile
    trace.go_on.notify_one();
    assert_eq!(running.await.unwrap(), Ok(State::Lost));
    assert!(trace.passed.load(Ordering::SeqCst));
    fixture.assert_free("k").await;
}

#[distributed_lock(keys = ["a", "b"], client = dlock)]
async fn of_several(dlock: Dlock, trace: Arc<Trace>) -> AppResult<()> {
    trace.entered.store(true, Ordering::SeqCst);
    std::future::pending().await
}

async fn lost_of_several(fixture: Fixture) {
    let trace = Arc::new(Trace::default());
    let running = tokio::spawn(of_several(fixture.dlock.clone(), trace.clone()));
    until(async || trace.entered.load(Ordering::SeqCst)).await;
    fixture.break_lock("b").await;
    let error = running.await.unwrap().unwrap_err();
    assert_eq!(error, AppError::Lock(ErrorKind::Lost, BodyStatus::Cancelled));
    fixture.assert_free("a").await;
    fixture.assert_free("b").await;
}

#[distributed_lock(keys = ["a", "b"], client = dlock)]
async fn begun(dlock: &Dlock, ran: &AtomicU32) -> AppResult<u32> {
    Ok(ran.fetch_add(1, Ordering::SeqCst))
}

#[distributed_lock(keys = ["a", "b"], on_lost = "finish", client = dlock)]
async fn begun_to_finish(dlock: &Dlock, ran: &AtomicU32) -> AppResult<u32> {
    Ok(ran.fetch_add(1, Ordering::SeqCst))
}

/// The first key is lost while the second is waited for.
async fn lost_before_the_body(fixture: Fixture) {
    let ran = AtomicU32::new(0);
    for to_finish in [false, true] {
        let busy = fixture.busy("b").await;
        let call = async {
            if to_finish {
                begun_to_finish(&fixture.dlock, &ran).await
            } else {
                begun(&fixture.dlock, &ran).await
            }
        };
        let holds_a = || {
            let held = fixture.dlock.local_state().held;
            held.iter().any(|hold| hold.key.as_str() == "a" && hold.state == State::Held)
        };
        let losing = async {
            until(async || holds_a()).await;
            fixture.break_lock("a").await;
            until(async || !holds_a()).await;
            drop(busy);
        };
        let (outcome, ()) = tokio::join!(call, losing);
        assert_eq!(outcome, Err(AppError::Lock(ErrorKind::Lost, BodyStatus::NotRun)));
    }
    assert_eq!(ran.load(Ordering::SeqCst), 0);
    fixture.assert_free("a").await;
    fixture.assert_free("b").await;
}

#[distributed_lock(key = "k", client = dlock)]
async fn failing(dlock: &Dlock, early: bool) -> AppResult<()> {
    if early {
        return Err(AppError::Own("returned"));
    }
    let failed: AppResult<u32> = std::future::ready(Err(AppError::Own("by ?"))).await;
    let _number = failed?;
    Ok(())
}

async fn an_error_of_the_body(fixture: Fixture) {
    assert_eq!(failing(&fixture.dlock, true).await, Err(AppError::Own("returned")));
    fixture.assert_free("k").await;
    assert_eq!(failing(&fixture.dlock, false).await, Err(AppError::Own("by ?")));
    fixture.assert_free("k").await;
}

#[distributed_lock(key = "k", client = dlock)]
async fn panicking(dlock: Dlock) -> Result<()> {
    tokio::task::yield_now().await;
    panic!("as the test wants it")
}

async fn a_panic(fixture: Fixture) {
    let panicked = tokio::spawn(panicking(fixture.dlock.clone())).await.unwrap_err();
    let said = panicked.into_panic();
    assert_eq!(said.downcast_ref::<&str>(), Some(&"as the test wants it"), "the panic goes on");
    fixture.assert_free("k").await;
}

async fn a_cancelled_caller(fixture: Fixture) {
    let trace = Arc::new(Trace::default());
    let running = tokio::spawn(cancelled(fixture.dlock.clone(), trace.clone()));
    until(async || trace.entered.load(Ordering::SeqCst)).await;
    running.abort();
    assert!(running.await.unwrap_err().is_cancelled());
    assert!(trace.dropped.load(Ordering::SeqCst));
    fixture.assert_free("k").await;
}

async fn a_caller_cancelled_while_waiting(fixture: Fixture) {
    let trace = Arc::new(Trace::default());
    let busy = fixture.busy("k").await;
    let waiting = tokio::spawn(cancelled(fixture.dlock.clone(), trace.clone()));
    until(async || !fixture.other.inspect("k").await.unwrap().waiters.is_empty()).await;
    waiting.abort();
    assert!(waiting.await.unwrap_err().is_cancelled());
    until(async || fixture.other.inspect("k").await.unwrap().waiters.is_empty()).await;
    drop(busy);
    fixture.assert_free("k").await;
    assert!(!trace.entered.load(Ordering::SeqCst), "the body never ran");
}

async fn shutdown(fixture: Fixture) {
    let trace = Arc::new(Trace::default());
    let running = tokio::spawn(cancelled(fixture.dlock.clone(), trace.clone()));
    until(async || trace.entered.load(Ordering::SeqCst)).await;
    // Whether the body ends within a grace of nothing is up to the scheduler.
    let _left = fixture.dlock.shutdown(std::time::Duration::ZERO).await;
    let error = running.await.unwrap().unwrap_err();
    assert_eq!(error, AppError::Lock(ErrorKind::Lost, BodyStatus::Cancelled));
    let error = once(&fixture.dlock, &AtomicU32::new(0)).await.unwrap_err();
    assert_eq!(error, AppError::Lock(ErrorKind::ShuttingDown, BodyStatus::NotRun));
    fixture.assert_free("k").await;
}
