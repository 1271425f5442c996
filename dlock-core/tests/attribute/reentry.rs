//! Annotated functions that call each other.

use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};

use dlock::{Dlock, ErrorKind, Result, assert_locked, distributed_lock, key, testing};

use crate::fixture::until;
use crate::{Fixture, on_both};

on_both!(
    nested_calls_go_through,
    recursion,
    siblings_exclude_each_other,
    another_task_waits,
    a_reader_cannot_write,
    the_outermost_holds_at_least,
);

#[distributed_lock(key = "order:{id}", wait = "0s", client = dlock, guard = lock)]
async fn pay(dlock: &Dlock, id: u64) -> Result<(u64, u64)> {
    let outer = lock.token().get();
    let inner = book(dlock, id).await?;
    assert_locked!("order:{id}");
    Ok((outer, inner))
}

#[distributed_lock(key = "order:{id}", wait = "0s", client = dlock, guard = lock)]
async fn book(dlock: &Dlock, id: u64) -> Result<u64> {
    save(id);
    Ok(lock.token().get())
}

fn save(id: u64) {
    assert_locked!("order:{id}");
}

async fn nested_calls_go_through(fixture: Fixture) {
    let (outer, inner) = pay(&fixture.dlock, 7).await.unwrap();
    assert_eq!(outer, inner, "the same grant");
    fixture.assert_free("order:7").await;
}

#[distributed_lock(key = "tree", wait = "0s", client = dlock)]
async fn walk(dlock: &Dlock, depth: u32) -> Result<u32> {
    match depth {
        0 => Ok(0),
        _ => Ok(1 + Box::pin(walk(dlock, depth - 1)).await?),
    }
}

async fn recursion(fixture: Fixture) {
    assert_eq!(walk(&fixture.dlock, 20).await.unwrap(), 20);
    fixture.assert_free("tree").await;
}

#[distributed_lock(key = "parent", client = dlock)]
async fn parent(dlock: &Dlock, inside: &AtomicU32) -> Result<()> {
    let child = || async {
        for _ in 0..5 {
            child(dlock, inside).await?;
        }
        Ok(())
    };
    tokio::try_join!(child(), child(), child()).map(|_| ())
}

#[distributed_lock(key = "parent", client = dlock)]
async fn child(dlock: &Dlock, inside: &AtomicU32) -> Result<()> {
    assert_eq!(inside.fetch_add(1, Ordering::SeqCst), 0, "a sibling is inside");
    tokio::time::sleep(std::time::Duration::from_millis(1)).await;
    inside.fetch_sub(1, Ordering::SeqCst);
    Ok(())
}

async fn siblings_exclude_each_other(fixture: Fixture) {
    parent(&fixture.dlock, &AtomicU32::new(0)).await.unwrap();
    fixture.assert_free("parent").await;
}

#[distributed_lock(key = "spawned", client = dlock)]
async fn spawns(
    dlock: Dlock,
    entered: Arc<AtomicU32>,
) -> Result<tokio::task::JoinHandle<Result<()>>> {
    let task = tokio::spawn(spawned(dlock.clone(), entered.clone()));
    until(async || !dlock.local_state().waiting.is_empty()).await;
    assert_eq!(entered.load(Ordering::SeqCst), 0, "another task waits");
    Ok(task)
}

#[distributed_lock(key = "spawned", client = dlock)]
async fn spawned(dlock: Dlock, entered: Arc<AtomicU32>) -> Result<()> {
    entered.fetch_add(1, Ordering::SeqCst);
    Ok(())
}

async fn another_task_waits(fixture: Fixture) {
    let entered = Arc::new(AtomicU32::new(0));
    let task = spawns(fixture.dlock.clone(), entered.clone()).await.unwrap();
    task.await.unwrap().unwrap();
    assert_eq!(entered.load(Ordering::SeqCst), 1);
}

#[distributed_lock(key = "rw", mode = "shared", client = dlock)]
async fn reads(dlock: &Dlock) -> Result<()> {
    writes(dlock).await
}

#[distributed_lock(key = "rw", client = dlock)]
async fn writes(dlock: &Dlock) -> Result<()> {
    Ok(())
}

async fn a_reader_cannot_write(fixture: Fixture) {
    assert_eq!(reads(&fixture.dlock).await.unwrap_err().kind(), ErrorKind::WouldDeadlock);
    fixture.assert_free("rw").await;
}

#[distributed_lock(key = "nested-job", client = dlock)]
async fn outer_job(dlock: &Dlock) -> Result<()> {
    inner_job(dlock).await
}

#[distributed_lock(key = "nested-job", hold_at_least = "1h", client = dlock)]
async fn inner_job(dlock: &Dlock) -> Result<()> {
    Ok(())
}

async fn the_outermost_holds_at_least(fixture: Fixture) {
    outer_job(&fixture.dlock).await.unwrap();
    fixture.assert_free("nested-job").await;
}

#[tokio::test]
async fn assert_locked_takes_templates_and_keys() {
    let dlock = testing::client();
    let id = 7;
    let guard = dlock.mutex(key!("order:{id}")).lock().await.unwrap();
    let fails = |assertion: fn(u32)| std::panic::catch_unwind(move || assertion(7)).unwrap_err();
    guard
        .run(async {
            assert_locked!("order:{id}");
            assert_locked!("order:{id:01}",);
            assert_locked!("order:7");
            assert_locked!(key!("order:{id}"));
            assert_locked!(String::from("order:7"));
            let said = fails(|id| assert_locked!("invoice:{id}"));
            let said = said.downcast::<String>().unwrap();
            assert_eq!(*said, "not under a lock of `invoice:{id}`");
        })
        .await
        .unwrap();
    fails(|id| assert_locked!("order:{id}"));
}
