//! What the tests of an inventory share.
#![allow(dead_code, reason = "each test uses some of it")]

#[cfg(all(feature = "mysql", feature = "postgres", feature = "sqlite"))]
pub(crate) mod databases;

use std::pin::Pin;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, Weak};
use std::time::Duration;

use dlock::Dlock;
use dlock_segment::{
    Audit, Confirmation, CreationId, Deduction, Error, Hold, HoldState, Inventory,
    InventoryBuilder, Receipt, Refund, Reservation, Routing, Stock,
};
use dlock_testkit::redis::RedisServer;
use dlock_testkit::topology::{ClusterServers, independent};

/// A test that runs on any store.
pub(crate) type Trial = fn(Place) -> Pin<Box<dyn Future<Output = ()>>>;

/// A client, and the servers that must live as long as it.
pub(crate) struct Place {
    pub(crate) dlock: Dlock,
    /// The server, if there is one of its own.
    pub(crate) server: Option<RedisServer>,
    /// How many homes a sale has.
    pub(crate) homes: u32,
    servers: Servers,
    /// The clients of further servers.
    further: Vec<Dlock>,
    namespace: String,
}

/// Servers that the tests of a process share, each with a namespace of its own.
enum Servers {
    None,
    Cluster(Arc<ClusterServers>),
    Independent(Arc<Vec<RedisServer>>),
    #[cfg(all(feature = "mysql", feature = "postgres", feature = "sqlite"))]
    Database(Arc<databases::Database>),
}

/// What tests share as long as one of them uses it. It is started by the first.
fn shared<T>(place: &Mutex<Weak<T>>, start: impl FnOnce() -> Option<T>) -> Option<Arc<T>> {
    let mut known = place.lock().unwrap_or_else(std::sync::PoisonError::into_inner);
    if let Some(it) = known.upgrade() {
        return Some(it);
    }
    let it = Arc::new(start()?);
    *known = Arc::downgrade(&it);
    Some(it)
}

impl Place {
    pub(crate) fn alone(dlock: Dlock, server: Option<RedisServer>, homes: u32) -> Self {
        let (servers, further, namespace) = (Servers::None, Vec::new(), "default".to_owned());
        Place { dlock, server, homes, servers, further, namespace }
    }

    pub(crate) fn memory() -> Option<Self> {
        Some(Self::alone(dlock::testing::client(), None, 1))
    }

    /// Three homes in the embedded store.
    pub(crate) fn memory_homes() -> Option<Self> {
        Some(Self::alone(dlock::testing::client(), None, 3))
    }

    pub(crate) async fn redis() -> Option<Self> {
        let server = RedisServer::start()?;
        let dlock = patient(&server.url(), "default").await;
        Some(Self::alone(dlock, Some(server), 1))
    }

    fn a_namespace() -> String {
        static COUNT: AtomicU64 = AtomicU64::new(0);
        format!("test{}", COUNT.fetch_add(1, Ordering::Relaxed))
    }

    /// Six homes in a cluster of three primaries.
    pub(crate) async fn cluster() -> Option<Self> {
        static CLUSTER: Mutex<Weak<ClusterServers>> = Mutex::new(Weak::new());
        let cluster = shared(&CLUSTER, || ClusterServers::with(3, 0, &[]))?;
        let namespace = Self::a_namespace();
        let dlock = patient(&cluster.url(), &namespace).await;
        let servers = Servers::Cluster(cluster);
        Some(Place { namespace, servers, ..Self::alone(dlock, None, 6) })
    }

    /// Six homes on three independent servers.
    pub(crate) async fn servers() -> Option<Self> {
        static SERVERS: Mutex<Weak<Vec<RedisServer>>> = Mutex::new(Weak::new());
        let all = shared(&SERVERS, || independent(3))?;
        let namespace = Self::a_namespace();
        let (dlock, further) = Self::clients(&all, &namespace).await;
        let servers = Servers::Independent(all);
        Some(Place { namespace, servers, further, ..Self::alone(dlock, None, 6) })
    }

    async fn clients(servers: &[RedisServer], namespace: &str) -> (Dlock, Vec<Dlock>) {
        let mut clients = Vec::new();
        for server in servers {
            clients.push(patient(&server.url(), namespace).await);
        }
        let first = clients.remove(0);
        (first, clients)
    }

    /// A namespace of a database.
    #[cfg(all(feature = "mysql", feature = "postgres", feature = "sqlite"))]
    pub(crate) async fn on(database: &Arc<databases::Database>, namespace: &str) -> Self {
        let dlock = database.client(namespace).await;
        let servers = Servers::Database(database.clone());
        Place { namespace: namespace.to_owned(), servers, ..Self::alone(dlock, None, 1) }
    }

    /// Whether other processes have the store, too.
    pub(crate) fn is_remote(&self) -> bool {
        self.dlock.capabilities().remote
    }

    /// Another client of the same store, as another process would have.
    pub(crate) async fn another(&self) -> Dlock {
        self.others().await.remove(0)
    }

    async fn others(&self) -> Vec<Dlock> {
        match (&self.server, &self.servers) {
            (Some(server), _) => vec![patient(&server.url(), "default").await],
            (None, Servers::None) => vec![self.dlock.clone()],
            (None, Servers::Cluster(cluster)) => {
                vec![patient(&cluster.url(), &self.namespace).await]
            }
            (None, Servers::Independent(servers)) => {
                let (first, further) = Self::clients(servers, &self.namespace).await;
                [vec![first], further].concat()
            }
            #[cfg(all(feature = "mysql", feature = "postgres", feature = "sqlite"))]
            (None, Servers::Database(database)) => vec![database.client(&self.namespace).await],
        }
    }

    /// The clients of all servers.
    pub(crate) fn clients_of_all(&self) -> Vec<Dlock> {
        [vec![self.dlock.clone()], self.further.clone()].concat()
    }

    /// A sale with the homes of this place, routed by operation id.
    pub(crate) fn builder(&self, name: &'static str) -> InventoryBuilder {
        Inventory::builder(&self.dlock, name).homes(self.homes).servers(self.further.clone())
    }

    /// A sale with the homes of this place, routed by buyer.
    pub(crate) fn builder_by_buyer(&self, name: &'static str) -> InventoryBuilder {
        self.builder(name).routed_by(Routing::Buyer)
    }

    pub(crate) async fn open(&self, name: &'static str) -> Result<Inventory, Error> {
        Inventory::open_on(&self.clients_of_all(), name, None).await
    }

    pub(crate) async fn open_created(
        &self,
        name: &'static str,
        id: CreationId,
    ) -> Result<Inventory, Error> {
        Inventory::open_on(&self.clients_of_all(), name, id).await
    }

    /// The sale as another process would open it.
    pub(crate) async fn open_elsewhere(&self, name: &'static str) -> Inventory {
        Inventory::open_on(&self.others().await, name, None).await.expect("the sale")
    }

    pub(crate) async fn sale(&self, stock: u64, segments: u32) -> Inventory {
        self.builder("sale").stock(stock).segments(segments).create().await.expect("a sale")
    }

    /// Deletes everything that this test has stored. The embedded store is replaced.
    pub(crate) async fn lose_everything(&mut self) {
        let servers: Vec<&RedisServer> = match (&self.server, &self.servers) {
            (Some(server), _) => vec![server],
            (None, Servers::None) => {
                self.dlock = dlock::testing::client();
                return;
            }
            (None, Servers::Cluster(cluster)) => cluster.nodes.iter().collect(),
            (None, Servers::Independent(servers)) => servers.iter().collect(),
            #[cfg(all(feature = "mysql", feature = "postgres", feature = "sqlite"))]
            (None, Servers::Database(database)) => {
                database.sql("DELETE FROM dlock_stock; DELETE FROM dlock_stock_removed").await;
                return;
            }
        };
        for server in servers {
            let pattern = format!("dlock:2:{{{}:*", self.namespace);
            for key in server.cli(&["KEYS", &pattern]).lines().filter(|key| !key.is_empty()) {
                server.cli(&["DEL", key]);
            }
        }
    }
}

/// A client that does not give up on a busy machine.
async fn patient(url: &str, namespace: &str) -> Dlock {
    let client = Dlock::builder().url(url).call_timeout(Duration::from_secs(20));
    client.namespace(namespace).connect().await.expect("a client")
}

/// Runs each test on all stores: one home in memory and in Redis, three homes in memory,
/// six in a cluster of three primaries, and six on three independent servers. And lists them
/// for the databases.
#[macro_export]
macro_rules! on_all_stores {
    ($($test:ident),* $(,)?) => {
        $crate::on_all_stores! { @ on_memory [async { $crate::common::Place::memory() }] $($test)* }
        $crate::on_all_stores! { @ on_redis [$crate::common::Place::redis()] $($test)* }
        $crate::on_all_stores! {
            @ on_homes [async { $crate::common::Place::memory_homes() }] $($test)*
        }
        $crate::on_all_stores! { @ on_cluster [$crate::common::Place::cluster()] $($test)* }
        $crate::on_all_stores! { @ on_servers [$crate::common::Place::servers()] $($test)* }
        #[allow(dead_code, reason = "without the features of SQL, they do not run there")]
        pub(crate) fn trials() -> Vec<(&'static str, $crate::common::Trial)> {
            vec![$((stringify!($test), |place| Box::pin($test(place)))),*]
        }
    };
    (@ $module:ident [$place:expr] $($test:ident)*) => {
        mod $module {
            $(#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
            async fn $test() {
                let Some(place) = $place.await else { return };
                super::$test(place).await;
            })*
        }
    };
}

/// Runs each test on both stores with one home.
#[macro_export]
macro_rules! on_both_stores {
    ($($test:ident),* $(,)?) => {
        mod on_memory {
            $(#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
            async fn $test() {
                super::$test(super::common::Place::memory().expect("it is embedded")).await;
            })*
        }
        mod on_redis {
            $(#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
            async fn $test() {
                let Some(place) = super::common::Place::redis().await else { return };
                super::$test(place).await;
            })*
        }
    };
}

pub(crate) fn taken(deduction: Deduction) -> Receipt {
    match deduction {
        Deduction::Taken(receipt) => receipt,
        other => panic!("not taken: {other:?}"),
    }
}

pub(crate) fn held(reservation: Reservation) -> Hold {
    match reservation {
        Reservation::Held(hold) => hold,
        other => panic!("not held: {other:?}"),
    }
}

pub(crate) fn refunded(refund: Refund) -> Receipt {
    match refund {
        Refund::Refunded(receipt) => receipt,
        other => panic!("not refunded: {other:?}"),
    }
}

/// The state of a reservation after a confirmation, whether it succeeded or not.
pub(crate) fn state_of(confirmed: Result<Confirmation, Error>) -> HoldState {
    match confirmed {
        Ok(Confirmation::Confirmed(_)) => HoldState::Confirmed,
        Ok(Confirmation::Refunded(_)) => HoldState::Refunded,
        Ok(other) => panic!("{other:?}"),
        Err(Error::NotHeld(state)) => state,
        Err(error) => panic!("{error}"),
    }
}

pub(crate) fn is_sold_out(deduction: &Deduction) -> bool {
    matches!(deduction, Deduction::SoldOut { .. })
}

/// Reads the counts and checks their sum.
pub(crate) async fn counts(sale: &Inventory) -> (u64, u64, u64) {
    let Stock { initial, restocked, available, reserved, sold, written_off, in_transit, .. } =
        sale.stock().await.expect("the stock");
    let counted = available + reserved + sold + written_off + in_transit;
    assert_eq!(initial + restocked, counted, "I2");
    (available, reserved, sold)
}

pub(crate) async fn clean_audit(sale: &Inventory) -> Audit {
    let audit = sale.audit().await.expect("an audit");
    assert!(audit.is_clean() && audit.exact, "{audit:#?}");
    audit
}

/// Sells from ten units in every way, and changes the number of segments. One is sold then.
pub(crate) async fn sell_in_every_way(sale: &Inventory) {
    let bought = sale.deduct(1).operation("o").buyer("u").send().await;
    taken(bought.expect("a deduction"));
    taken(sale.deduct(1).send().await.expect("a deduction"));
    let lasts = Duration::from_millis(1);
    let short = sale.reserve(1).operation("r").buyer("u").expires_in(lasts).send().await;
    held(short.expect("a reservation"));
    held(sale.reserve(1).operation("s").send().await.expect("a reservation"));
    assert_eq!(state_of(sale.reservation("s").confirm().await), HoldState::Confirmed);
    refunded(sale.refund("o").send().await.expect("a refund"));
    sale.resize(3).await.expect("three segments");
    refunded(sale.refund("s").send().await.expect("a refund"));
    tokio::time::sleep(Duration::from_millis(5)).await;
    assert_eq!(counts(sale).await, (9, 0, 1));
}

/// Waits for a long time until it is true.
pub(crate) async fn eventually<F: Future<Output = bool>>(
    what: &str,
    mut is_true: impl FnMut() -> F,
) {
    for _ in 0..2_000 {
        if is_true().await {
            return;
        }
        tokio::time::sleep(Duration::from_millis(10)).await;
    }
    panic!("never: {what}");
}
