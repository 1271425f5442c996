//! The fixture of the tests: a store with two clients.

use std::future::Future;
use std::time::Duration;

use dlock::backend::memory::Memory;
use dlock::{Dlock, DlockBuilder, Guard, IntoKey};
use dlock_testkit::redis::RedisServer;
use dlock_testkit::{FaultControl, FaultMode, FaultyBackend};

/// Longer than anything takes here.
pub(crate) const LONG: Duration = Duration::from_secs(30);

pub(crate) struct Fixture {
    /// The client of the code under test.
    pub(crate) dlock: Dlock,
    /// A client as if of another process.
    pub(crate) other: Dlock,
    store: Store,
}

enum Store {
    Memory(Memory, FaultControl),
    Redis(RedisServer),
}

/// The options of every client of these tests.
fn configured(builder: DlockBuilder) -> DlockBuilder {
    builder.ttl(Duration::from_secs(9)).wait(LONG).call_timeout(Duration::from_secs(5))
}

fn connected(builder: DlockBuilder) -> Dlock {
    builder.connect_lazy().expect("a client")
}

impl Fixture {
    pub(crate) fn memory() -> Self {
        let store = Memory::new();
        let (backend, faults) = FaultyBackend::new(store.another());
        Fixture {
            dlock: connected(configured(Dlock::builder().backend(backend))),
            other: connected(configured(Dlock::builder().backend(store.another()))),
            store: Store::Memory(store, faults),
        }
    }

    pub(crate) fn redis() -> Option<Self> {
        let server = RedisServer::start()?;
        let client = || connected(configured(Dlock::builder().url(&server.url())));
        Some(Fixture { dlock: client(), other: client(), store: Store::Redis(server) })
    }

    /// One more client, with the options of a URL query and of the builder.
    pub(crate) fn client(
        &self,
        query: &str,
        more: impl FnOnce(DlockBuilder) -> DlockBuilder,
    ) -> Dlock {
        let builder = configured(Dlock::builder());
        let builder = match &self.store {
            Store::Memory(store, _) => {
                builder.url(&format!("memory://?{query}")).backend(store.another())
            }
            Store::Redis(server) => builder.url(&format!("{}?{query}", server.url())),
        };
        connected(more(builder))
    }

    /// Makes the backend unreachable.
    pub(crate) fn end_backend(&mut self) {
        match &mut self.store {
            Store::Memory(_, faults) => faults.set(FaultMode::Unreachable),
            Store::Redis(server) => server.kill(),
        }
    }

    /// Lets the other client hold the key.
    pub(crate) async fn busy(&self, key: &str) -> Guard {
        self.other.mutex(key).lock().await.expect("somebody else's lock")
    }

    /// Lets the other client break the lock.
    pub(crate) async fn break_lock(&self, key: impl IntoKey) {
        let broken = self.other.break_lock(key).await.expect("the backend answers");
        assert!(broken > 0, "nobody held it");
    }

    /// Checks that nothing is left: the other client gets the key, and this one neither
    /// holds nor waits for anything.
    pub(crate) async fn assert_free(&self, key: &str) {
        let taken = tokio::time::timeout(LONG, self.other.mutex(key).lock()).await;
        let taken = taken.expect("the key becomes free").expect("the backend answers");
        let _ = taken.release().await.expect("the backend answers");
        let state = self.dlock.local_state();
        assert!(state.held.is_empty() && state.waiting.is_empty(), "{state:?}");
    }
}

/// Waits until a condition is true.
pub(crate) async fn until<F: Future<Output = bool>>(mut is_so: impl FnMut() -> F) {
    let waiting = async {
        while !is_so().await {
            tokio::time::sleep(Duration::from_millis(2)).await;
        }
    };
    tokio::time::timeout(LONG, waiting).await.expect("it comes to be");
}
