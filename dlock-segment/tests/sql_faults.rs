//! Faults of SQL servers, networks and clients while stock is sold.

#![allow(clippy::unwrap_used, reason = "a failed step fails the test")]

mod common;

use std::process::{Command, Stdio};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use common::databases::Database;
use common::{Place, clean_audit, counts, eventually, sell_in_every_way, taken};
use dlock::{Dlock, ErrorKind, State};
use dlock_segment::sql::deduct_in;
use dlock_segment::{Deduction, Error, Inventory, Resolved};
use dlock_testkit::commit_proxy::cut_at_commit;
use dlock_testkit::database_servers::{MariaDbServer, PostgresServer};

async fn client(url: &str) -> Dlock {
    let client = Dlock::builder().url(url).migrate(true).namespace("test");
    client.connect().await.expect("a client")
}

/// A commit whose answer is lost is settled by the operation id; without one it is unknown.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_lost_commit_is_settled_by_its_id() {
    let Some(server) = PostgresServer::start() else { return };
    let direct = client(&server.url()).await;
    let direct = Inventory::builder(&direct, "sale").stock(100).create().await.unwrap();
    let cut = Arc::new(AtomicBool::new(false));
    let port = cut_at_commit(server.port(), cut.clone()).await;
    let through = client(&format!("postgres://dlock@127.0.0.1:{port}/dlock")).await;
    let sale = Inventory::open(&through, "sale").await.unwrap();
    taken(sale.deduct(1).operation("warm").send().await.unwrap());
    for round in 0..5 {
        cut.store(true, Ordering::SeqCst);
        let id = format!("o-{round}");
        taken(sale.deduct(2).operation(&id).send().await.unwrap());
        assert!(!cut.load(Ordering::SeqCst), "a commit was cut");
        assert_eq!(counts(&direct).await.2, 1 + 2 * (round + 1), "taken once");
    }
    cut.store(true, Ordering::SeqCst);
    let unknown = sale.deduct(1).send().await;
    assert!(matches!(unknown, Err(Error::Unknown(None))), "{unknown:?}");
    eventually("it was committed", async || counts(&direct).await.2 == 12).await;
    // A refusal after a lost answer is final.
    let few = Inventory::builder(&through, "few").stock(1).create().await.unwrap();
    cut.store(true, Ordering::SeqCst);
    let taken_or_not = few.deduct(1).operation("last").send().await.unwrap();
    taken(taken_or_not);
    assert_eq!(counts(&few).await, (0, 0, 1));
    clean_audit(&direct).await;
    clean_audit(&few).await;
}

/// Tasks that buy until they are told to stop, with an id for each purchase.
struct Buyers {
    sale: Inventory,
    stop: Arc<AtomicBool>,
    /// Each answers how many ids it used.
    tasks: Vec<tokio::task::JoinHandle<u64>>,
}

impl Buyers {
    fn start(sale: &Inventory, count: usize) -> Self {
        let stop = Arc::new(AtomicBool::new(false));
        let buying = |buyer| {
            let (sale, stop) = (sale.clone(), stop.clone());
            tokio::spawn(async move {
                let mut number = 0;
                while !stop.load(Ordering::Relaxed) {
                    let _ = sale.deduct(1).operation(format!("b{buyer}-{number}")).send().await;
                    number += 1;
                }
                number
            })
        };
        let tasks = (0..count).map(buying).collect();
        Buyers { sale: sale.clone(), stop, tasks }
    }

    /// Stops them, and settles what was not answered. Answers how many units were bought.
    async fn settle(self) -> u64 {
        self.stop.store(true, Ordering::Relaxed);
        let mut bought = 0;
        for (buyer, task) in self.tasks.into_iter().enumerate() {
            for number in 0..task.await.unwrap() {
                match self.sale.resolve(&format!("b{buyer}-{number}")).await.unwrap() {
                    Resolved::Taken(_) => bought += 1,
                    Resolved::NotApplied => {}
                    other => panic!("{other:?}"),
                }
            }
        }
        bought
    }
}

/// A server is killed again and again while it sells: nothing is lost and nothing is sold
/// twice.
async fn killed(url: &str, mut restart: impl FnMut()) {
    let dlock = client(url).await;
    let sale = Inventory::builder(&dlock, "sale").stock(1_000_000).segments(4).create().await;
    let sale = sale.unwrap();
    let buyers = Buyers::start(&sale, 8);
    for _ in 0..2 {
        tokio::time::sleep(Duration::from_millis(300)).await;
        tokio::task::block_in_place(&mut restart);
        eventually("it sells again", async || {
            matches!(sale.deduct(1).operation("probe").send().await, Ok(Deduction::Taken(_)))
        })
        .await;
    }
    let bought = 1 + buyers.settle().await; // the probe, too
    assert!(bought > 1, "something was sold");
    assert_eq!(counts(&sale).await.2, bought);
    clean_audit(&sale).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_killed_postgres_loses_nothing() {
    let Some(mut server) = PostgresServer::start() else { return };
    killed(&server.url(), || server.restart()).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_killed_mariadb_loses_nothing() {
    let Some(mut server) = MariaDbServer::start() else { return };
    killed(&server.url(), || server.restart()).await;
}

/// The other process of [`a_killed_buyer_leaves_nothing_open`].
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_buyer_that_is_killed() {
    let Ok(url) = std::env::var("DLOCK_TEST_BUYER_URL") else { return };
    let sale = Inventory::open(&client(&url).await, "sale").await.unwrap();
    for buyer in Buyers::start(&sale, 4).tasks {
        let _ = buyer.await;
    }
}

/// A process is killed in the middle of batches: they are committed or rolled back as a
/// whole, and nobody waits for it.
async fn killed_buyer(url: &str) {
    let sale = Inventory::builder(&client(url).await, "sale").stock(1_000_000).segments(3);
    let sale = sale.create().await.unwrap();
    for _ in 0..3 {
        let before = counts(&sale).await.2;
        let mut buyer = Command::new(std::env::current_exe().unwrap())
            .args(["the_buyer_that_is_killed", "--exact"])
            .env("DLOCK_TEST_BUYER_URL", url)
            .stdout(Stdio::null())
            .spawn()
            .unwrap();
        eventually("it buys", async || counts(&sale).await.2 > before + 20).await;
        buyer.kill().unwrap();
        buyer.wait().unwrap();
        let began = Instant::now();
        taken(sale.deduct(1).operation(format!("after-{before}")).send().await.unwrap());
        assert!(began.elapsed() < Duration::from_secs(5), "{:?}", began.elapsed());
        clean_audit(&sale).await;
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_killed_buyer_leaves_nothing_open() {
    if let Some(server) = PostgresServer::start() {
        killed_buyer(&server.url()).await;
    }
    let directory = tempfile::TempDir::new().unwrap();
    killed_buyer(&format!("sqlite://{}/stock.db", directory.path().display())).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_killed_buyer_of_mariadb_leaves_nothing_open() {
    let Some(server) = MariaDbServer::start() else { return };
    killed_buyer(&server.url()).await;
}

/// A caller holds `deduct_in` open for long. That sale waits, and says so; other sales and
/// all locks go on as before.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_long_transaction_stalls_its_own_sale_only() {
    let Some(server) = PostgresServer::start() else { return };
    let dlock = Dlock::builder().url(&server.url()).migrate(true).ttl(Duration::from_secs(2));
    let dlock = dlock.connect().await.unwrap();
    let stuck = Inventory::builder(&dlock, "stuck").stock(100).create().await.unwrap();
    let other = Inventory::builder(&dlock, "other").stock(1_000_000).create().await.unwrap();
    let lease = dlock.mutex("kept").lock().await.unwrap();
    let pool = sqlx::PgPool::connect(&server.url()).await.unwrap();
    let mut tx = pool.begin().await.unwrap();
    taken(deduct_in(&mut tx, &stuck, 1).await.unwrap());

    let waiting = tokio::spawn({
        let stuck = stuck.clone();
        async move { stuck.deduct(1).operation("o").send().await }
    });
    let (began, mut slowest) = (Instant::now(), Duration::ZERO);
    while began.elapsed() < Duration::from_secs(4) {
        let each = Instant::now();
        taken(other.deduct(1).send().await.unwrap());
        drop(dlock.mutex("a").lock().await.unwrap());
        slowest = slowest.max(each.elapsed());
        assert_eq!(lease.state(), State::Held);
    }
    assert!(slowest < Duration::from_secs(2), "{slowest:?}");
    let told = waiting.await.unwrap().unwrap_err();
    assert!(
        matches!(&told, Error::Store(error) if error.kind() == ErrorKind::Unavailable),
        "nothing was sold, and it is known: {told:?}"
    );
    tx.commit().await.unwrap();
    eventually("it sells again", async || {
        matches!(stuck.deduct(1).operation("o").send().await, Ok(Deduction::Taken(_)))
    })
    .await;
    assert_eq!(counts(&stuck).await, (98, 0, 2));
}

/// All connections are ended by an administrator, again and again.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn terminated_connections_are_replaced() {
    let Some(server) = PostgresServer::start() else { return };
    let dlock = client(&server.url()).await;
    let sale = Inventory::builder(&dlock, "sale").stock(1_000_000).create().await.unwrap();
    let buyers = Buyers::start(&sale, 8);
    for _ in 0..10 {
        server.sql("SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE application_name = 'dlock'");
        tokio::time::sleep(Duration::from_millis(100)).await;
    }
    let bought = buyers.settle().await;
    assert!(bought > 0);
    assert_eq!(counts(&sale).await.2, bought);
    clean_audit(&sale).await;
}

/// Everything that an inventory does.
async fn everything_works(url: &str) {
    let dlock = Dlock::builder().url(url).connect().await.unwrap();
    let sale = Inventory::builder(&dlock, "sale").stock(10).segments(2).journal(2);
    let sale = sale.create().await.unwrap();
    sell_in_every_way(&sale).await;
    let outbox = sale.outbox("reader").unwrap();
    assert!(!outbox.next(10).await.unwrap().is_empty());
    outbox.acknowledge(1).await.unwrap();
    outbox.forget().await.unwrap();
    for _ in 0..70 {
        taken(sale.deduct(1).send().await.unwrap());
        sale.restock(1).send().await.unwrap();
    }
    assert_eq!(sale.health().await.at_risk(), None);
    clean_audit(&sale).await;
    assert!(sale.remove().await.unwrap());
}

/// The rights that the documents list are enough, and without them it is said so.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_documented_rights_suffice_on_postgres() {
    let Some(server) = PostgresServer::start() else { return };
    drop(client(&server.url()).await);
    server.sql("CREATE ROLE shop LOGIN");
    server.sql(include_str!("../../docs/postgres-grants.sql"));
    let url = server.url().replace("dlock@", "shop@");
    is_denied(&url).await;
    server.sql(include_str!("../../docs/postgres-stock-grants.sql"));
    everything_works(&url).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_documented_rights_suffice_on_mariadb() {
    let Some(server) = MariaDbServer::start() else { return };
    drop(client(&server.url()).await);
    server.sql("CREATE USER shop");
    server.sql(&format!("USE dlock; {}", include_str!("../../docs/mysql-grants.sql")));
    let url = server.url().replace("root@", "shop@");
    is_denied(&url).await;
    server.sql(&format!("USE dlock; {}", include_str!("../../docs/mysql-stock-grants.sql")));
    everything_works(&url).await;
}

async fn is_denied(url: &str) {
    let dlock = Dlock::builder().url(url).connect().await.unwrap();
    let error = Inventory::builder(&dlock, "sale").stock(1).create().await.unwrap_err();
    assert!(matches!(&error, Error::Store(error) if error.kind() == ErrorKind::Denied), "{error}");
    assert!(error.to_string().contains("docs/sql.md"), "{error}");
}

/// Something in the tables that this version cannot read is told, and nothing is changed.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_unreadable_row_is_told() {
    let Some(database) = Database::sqlite() else { return };
    let database = Arc::new(database);
    let place = Place::on(&database, "test").await;
    let sale = place.sale(10, 1).await;
    taken(sale.deduct(1).operation("o").send().await.unwrap());
    database.sql("UPDATE dlock_stock_record SET record = 'garbage'").await;
    assert!(sale.deduct(1).operation("o").send().await.is_err());
    taken(sale.deduct(1).operation("other").send().await.unwrap());
    let audit = sale.audit().await.unwrap();
    let named = audit.disagreements.iter().any(|it| it.operation.as_deref() == Some("o"));
    assert!(named, "{audit:#?}");
    database.sql("UPDATE dlock_stock SET state = '99 ' || state").await;
    let error = sale.deduct(1).send().await.unwrap_err();
    let source = std::error::Error::source(&error).map(ToString::to_string);
    assert!(matches!(error, Error::Store(_)) && source.is_some(), "{error:?}");
}

/// A small file system, which is unmounted when this value is dropped.
struct SmallDisk(std::path::PathBuf);

impl SmallDisk {
    /// `None` if this user may not mount one.
    fn mount(directory: &std::path::Path) -> Option<Self> {
        let path = directory.join("small");
        std::fs::create_dir_all(&path).unwrap();
        let mount = ["-t", "tmpfs", "-o", "size=8m,mode=0777", "tmpfs"];
        let mounted = Command::new("mount").args(mount).arg(&path).stderr(Stdio::null()).status();
        let is_mounted = mounted.is_ok_and(|status| status.success());
        if !is_mounted {
            println!("SKIPPED: a file system cannot be mounted here");
        }
        is_mounted.then_some(SmallDisk(path))
    }

    /// Writes until nothing fits any more.
    fn fill(&self) {
        let filled = std::fs::write(self.0.join("filler"), vec![0; 16 << 20]);
        assert!(filled.is_err(), "it is not that small");
    }

    fn empty(&self) {
        std::fs::remove_file(self.0.join("filler")).unwrap();
    }
}

impl Drop for SmallDisk {
    fn drop(&mut self) {
        let _ = Command::new("umount").arg("-l").arg(&self.0).status();
    }
}

/// The disk is full: nothing is sold, and it says why. It sells again when there is room.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_full_disk_is_told_and_survived() {
    let Some(server) = PostgresServer::start() else { return };
    let Some(disk) = SmallDisk::mount(server.directory()) else { return };
    let sale = Inventory::builder(&client(&server.url()).await, "sale").stock(1_000_000);
    let sale = sale.create().await.unwrap();
    let owned = Command::new("chown").arg("postgres").arg(&disk.0).status();
    assert!(owned.unwrap().success());
    server.sql(&format!("CREATE TABLESPACE small LOCATION '{}'", disk.0.display()));
    server.sql("ALTER TABLE dlock_stock_record SET TABLESPACE small");
    server.sql("ALTER INDEX dlock_stock_record_pkey SET TABLESPACE small");
    taken(sale.deduct(1).operation("before").send().await.unwrap());
    disk.fill();
    let mut bought = 1;
    let error = loop {
        let id = format!("{bought}-{}", "x".repeat(200));
        match sale.deduct(1).operation(id).send().await {
            Ok(deduction) => taken(deduction),
            Err(error) => break error,
        };
        bought += 1;
        assert!(bought < 5_000, "the disk never becomes full");
    };
    assert!(
        matches!(&error, Error::Store(error) if error.kind() == ErrorKind::Unavailable),
        "{error:?}"
    );
    assert!(error.to_string().contains("disk is full"), "{error}");
    assert_eq!(counts(&sale).await.2, bought, "nothing was sold");
    disk.empty();
    taken(sale.deduct(1).operation("after").send().await.unwrap());
    assert_eq!(counts(&sale).await.2, bought + 1);
    clean_audit(&sale).await;
}
