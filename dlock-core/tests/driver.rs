//! Tests of the driver of a remote backend: its thread, its time-outs, its shutdown.

use std::time::{Duration, Instant};

use dlock::backend::memory::Memory;
use dlock::{Dlock, ErrorKind, ReleaseOutcome, State};
use dlock_testkit::{FaultControl, FaultMode, FaultyBackend};

const TTL: Duration = Duration::from_millis(600);

fn remote(store: &Memory) -> (Dlock, FaultControl) {
    let (backend, faults) = FaultyBackend::remote(store.another(), Duration::from_micros(100));
    let client = Dlock::builder()
        .backend(backend)
        .ttl(TTL)
        .wait(Duration::from_secs(20))
        .call_timeout(Duration::from_millis(150));
    (client.connect_lazy().expect("a client"), faults)
}

fn eventually(what: &str, mut condition: impl FnMut() -> bool) {
    let began = Instant::now();
    while !condition() {
        assert!(began.elapsed() < Duration::from_secs(20), "{what} never came true");
        std::thread::sleep(Duration::from_millis(5));
    }
}

/// Rule 8, row 12: every worker of the user's runtime is blocked.
#[tokio::test]
async fn a_blocked_executor_loses_no_lock() {
    let store = Memory::new();
    let ((one, _), (two, _)) = (remote(&store), remote(&store));
    let guard = one.mutex("a").lock().await.unwrap();
    std::thread::sleep(TTL * 3);
    assert_eq!(guard.state(), State::Held);
    assert!(two.mutex("a").try_lock().await.unwrap().is_none());
    assert_eq!(guard.release().await.unwrap(), ReleaseOutcome::Released);
}

/// Rule 8, row 11: the runtime ends before the guard.
#[test]
fn an_ended_runtime_loses_no_lock() {
    let store = Memory::new();
    outlives_its_runtime(&remote(&store).0, &remote(&store).0);
}

/// The same for the embedded backend, whose timer lives in that runtime.
#[test]
fn an_ended_runtime_loses_no_embedded_lock() {
    let store = Memory::new();
    let client = || {
        let builder = Dlock::builder().backend(store.another()).ttl(TTL);
        builder.connect_lazy().expect("a client")
    };
    outlives_its_runtime(&client(), &client());
}

fn outlives_its_runtime(one: &Dlock, two: &Dlock) {
    let runtime = || {
        let builder = &mut tokio::runtime::Builder::new_current_thread();
        builder.enable_all().build().expect("a runtime")
    };
    let guard = runtime().block_on(one.mutex("a").lock()).expect("the lock");
    std::thread::sleep(TTL * 2);
    assert_eq!(guard.state(), State::Held);
    assert!(runtime().block_on(two.mutex("a").try_lock()).expect("an answer").is_none());
    drop(guard);
    assert!(runtime().block_on(two.mutex("a").lock()).is_ok());
}

/// A lock works without any runtime of tokio.
#[test]
fn any_executor_will_do() {
    struct Park(std::thread::Thread);
    impl std::task::Wake for Park {
        fn wake(self: std::sync::Arc<Self>) {
            self.0.unpark();
        }
    }
    let store = Memory::new();
    for client in
        [remote(&store).0, Dlock::builder().backend(store.another()).connect_lazy().unwrap()]
    {
        let busy = client.mutex("a");
        let mut future = Box::pin(async {
            let guard = busy.lock().await.unwrap();
            let waited = busy.clone().wait(Duration::from_millis(50)).lock().await;
            assert_eq!(waited.unwrap_err().kind(), ErrorKind::TimedOut);
            guard.release().await.unwrap()
        });
        let waker = std::sync::Arc::new(Park(std::thread::current())).into();
        let mut context = std::task::Context::from_waker(&waker);
        let outcome = loop {
            match future.as_mut().poll(&mut context) {
                std::task::Poll::Ready(outcome) => break outcome,
                std::task::Poll::Pending => std::thread::park_timeout(Duration::from_secs(5)),
            }
        };
        assert_eq!(outcome, ReleaseOutcome::Released);
    }
}

/// Rule 10: a backend that never answers blocks nobody for longer than the time-out of
/// the call and of the wait.
#[tokio::test]
async fn every_call_ends_by_its_timeout() {
    let store = Memory::new();
    let (client, faults) = remote(&store);
    let guard = client.mutex("held").ttl(Duration::from_secs(60)).lock().await.unwrap();
    faults.set(FaultMode::NoAnswer);
    let began = Instant::now();
    let error = client.mutex("a").try_lock().await.unwrap_err();
    // The call and the attempt end at the same moment.
    assert!(matches!(error.kind(), ErrorKind::Unknown | ErrorKind::Unavailable), "{error}");
    let lock = client.mutex("a").wait(Duration::from_millis(300));
    let error = lock.lock().await.unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Unavailable, "{error}");
    assert!(!client.health().await.is_ok());
    assert!(client.inspect("a").await.is_err());
    assert_eq!(guard.release().await.unwrap_err().kind(), ErrorKind::Unknown);
    assert!(began.elapsed() < Duration::from_secs(3), "{:?}", began.elapsed());
    faults.set(FaultMode::Healthy);
    // What was requested meanwhile is released: no lock is left.
    let (other, _) = remote(&store);
    for key in ["a", "held"] {
        drop(other.mutex(key).lock().await.unwrap());
    }
}

/// `connect_lazy` starts with the backend down and recovers.
#[tokio::test]
async fn a_client_starts_before_its_backend() {
    let store = Memory::new();
    let (client, faults) = remote(&store);
    faults.set(FaultMode::Unreachable);
    let lock = client.mutex("a");
    let waiting = tokio::spawn(async move { lock.lock().await.map(drop) });
    tokio::time::sleep(Duration::from_millis(300)).await;
    assert!(!waiting.is_finished());
    let calls = faults.calls();
    assert!(calls < 20, "{calls} calls in 300 ms: it must back off");
    faults.set(FaultMode::Healthy);
    waiting.await.unwrap().unwrap();
}

/// Rule 7: pending releases are sent when the last client is dropped, without blocking.
#[test]
fn the_last_client_flushes_what_it_owes() {
    let store = Memory::new();
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
    let (client, _) = remote(&store);
    let guard = runtime.block_on(client.mutex("a").ttl(Duration::from_secs(60)).lock()).unwrap();
    drop(client);
    let began = Instant::now();
    drop(guard);
    assert!(began.elapsed() < Duration::from_millis(50), "drop does not block");
    let (other, _) = remote(&store);
    eventually("free", || runtime.block_on(other.mutex("a").try_lock()).unwrap().is_some());
}

/// One release grants the lock to thousands: their notices do not nest on the stack.
#[tokio::test]
async fn thousands_of_permits_are_given_at_once() {
    const MANY: u32 = 8_000;
    let dlock = dlock::testing::client();
    let all = dlock.semaphore("s", MANY).permits(MANY).lock().await.unwrap();
    let one = dlock.semaphore("s", MANY).permits(1).wait_unlimited();
    let waiting: Vec<_> = (0..MANY)
        .map(|_| {
            let one = one.clone();
            tokio::spawn(async move { one.lock().await })
        })
        .collect();
    while dlock.local_state().waiting.len() < MANY as usize {
        tokio::task::yield_now().await;
    }
    let release = std::thread::Builder::new().stack_size(256 * 1024);
    release.spawn(move || drop(all)).unwrap().join().unwrap();
    for task in waiting {
        drop(task.await.unwrap().unwrap());
    }
}

/// Rule 7: a guard in a thread-local variable is released when its thread ends.
#[test]
fn a_guard_in_a_thread_local_ends_with_its_thread() {
    thread_local! {
        static KEPT: std::cell::RefCell<Option<dlock::Guard>> =
            const { std::cell::RefCell::new(None) };
    }
    let store = Memory::new();
    let clients = [
        Dlock::builder().backend(store.another()).connect_lazy().expect("a client"),
        remote(&store).0,
    ];
    for (dlock, key) in clients.iter().zip(["embedded", "remote"]) {
        let client = dlock.clone();
        let thread = std::thread::spawn(move || {
            KEPT.with_borrow_mut(|kept| assert!(kept.is_none())); // touched first, so it ends last
            let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build();
            let guard = runtime.unwrap().block_on(client.mutex(key).lock()).unwrap();
            KEPT.set(Some(guard));
        });
        thread.join().expect("no panic");
        eventually("it is free", || dlock.local_state().held.is_empty());
    }
}
