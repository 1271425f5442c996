//! Faults of SQL servers, networks and clients, on real servers.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU16, Ordering};
use std::time::{Duration, Instant};

use dlock::backend::sql::{MySql, Postgres, Sqlite};
use dlock::{Dlock, DlockBuilder, ErrorKind, ReleaseOutcome, State};
use dlock_testkit::commit_proxy::cut_at_commit;
use dlock_testkit::conformance::eventually;
use dlock_testkit::database_servers::{MariaDbServer, MySqlServer, PostgresServer};
use dlock_testkit::holder::{HolderProcess, number};
use tokio::net::{TcpListener, TcpStream};

fn builder(url: &str) -> DlockBuilder {
    let builder = Dlock::builder().url(&format!("{url}?migrate=true"));
    builder.namespace("test").ttl(Duration::from_secs(3)).wait(Duration::from_secs(30))
}

async fn client(url: &str) -> Dlock {
    builder(url).connect().await.expect("a client")
}

/// A server is killed and comes back: what was held is held, and tokens rise.
async fn killed(url: &str, mut kill: impl FnMut(), mut restart: impl FnMut()) {
    let (one, two) = (client(url).await, client(url).await);
    let kept = one.mutex("kept").ttl(Duration::from_secs(60)).lock().await.expect("the lock");
    let short = one.mutex("short").lock().await.expect("the lock");
    let token = short.token();
    kill();
    let error = two.mutex("c").wait(Duration::ZERO).lock().await.expect_err("no server");
    assert!(matches!(error.kind(), ErrorKind::Unavailable | ErrorKind::Unknown), "{error}");
    let waiting = tokio::spawn({
        let lock = two.mutex("short");
        async move { lock.lock().await }
    });
    tokio::time::timeout(Duration::from_secs(20), short.lost()).await.expect("it is lost in time");
    restart();
    let next = waiting.await.expect("the task").expect("the lock");
    assert!(next.token() > token);
    eventually("it is held for certain", async || kept.state() == State::Held).await;
    assert!(two.mutex("kept").try_lock().await.expect("an answer").is_none());
    assert_eq!(kept.release().await.expect("an answer"), ReleaseOutcome::Released);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_killed_postgres_keeps_its_locks() {
    let Some(server) = PostgresServer::start() else { return };
    let (url, server) = (server.url(), std::cell::RefCell::new(server));
    killed(&url, || server.borrow_mut().kill(), || server.borrow_mut().restart()).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_killed_mariadb_keeps_its_locks() {
    let Some(server) = MariaDbServer::start() else { return };
    let (url, server) = (server.url(), std::cell::RefCell::new(server));
    killed(&url, || server.borrow_mut().kill(), || server.borrow_mut().restart()).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_killed_mysql_keeps_its_locks() {
    let Some(server) = MySqlServer::start() else { return };
    let (url, server) = (server.url(), std::cell::RefCell::new(server));
    killed(&url, || server.borrow_mut().kill(), || server.borrow_mut().restart()).await;
}

/// The holder's process is killed: its lock ends with its ttl, and its place in a queue is
/// given up.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_killed_client_loses_its_locks() {
    let Some(server) = PostgresServer::start() else { return };
    let mut holder = HolderProcess::start(&format!("{}?migrate=true&namespace=test", server.url()));
    holder.send("lock a 2000");
    let token = number(&holder.wait_for("granted"), "token");
    let other = client(&server.url()).await;
    assert!(other.mutex("a").try_lock().await.expect("an answer").is_none());
    drop(holder); // with SIGKILL
    let began = Instant::now();
    let guard = other.mutex("a").lock().await.expect("the lock");
    assert!(guard.token().get() > token);
    assert!(began.elapsed() < Duration::from_secs(4), "{:?}", began.elapsed());
}

/// All connections are ended by an administrator, again and again: locks go on, and
/// nobody holds one twice.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn terminated_connections_are_replaced() {
    let Some(server) = PostgresServer::start() else { return };
    let (one, two) = (client(&server.url()).await, client(&server.url()).await);
    let kept = one.mutex("kept").lock().await.expect("the lock");
    let done = Arc::new(AtomicBool::new(false));
    let inside = Arc::new(AtomicBool::new(false));
    let mut tasks = Vec::new();
    for client in [&one, &two] {
        for _ in 0..4 {
            let (lock, done, inside) = (client.mutex("a"), done.clone(), inside.clone());
            tasks.push(tokio::spawn(async move {
                let mut cycles = 0_u32;
                while !done.load(Ordering::Relaxed) {
                    let guard = lock.lock().await.expect("the lock");
                    assert!(!inside.swap(true, Ordering::SeqCst), "it is held twice");
                    tokio::task::yield_now().await;
                    inside.store(false, Ordering::SeqCst);
                    drop(guard);
                    cycles += 1;
                }
                cycles
            }));
        }
    }
    for _ in 0..20 {
        server.sql("SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE application_name = 'dlock'");
        tokio::time::sleep(Duration::from_millis(150)).await;
        assert_ne!(kept.state(), State::Lost);
    }
    done.store(true, Ordering::Relaxed);
    for task in tasks {
        assert!(task.await.expect("nobody held it twice") > 0);
    }
    eventually("it is held for certain", async || kept.state() == State::Held).await;
}

/// Locks the row of the key `stuck`.
const LOCK_STUCK: &str = "SELECT 1 FROM dlock_lock WHERE id = 'test/l/stuck' FOR UPDATE";

/// A row that somebody else has locked holds up its own key only.
async fn locked_row<T>(url: &str, client: Dlock, lock_row: impl AsyncFn() -> T) {
    drop(client.mutex("stuck").lock().await.expect("the lock"));
    let kept = client.mutex("kept").lock().await.expect("the lock");
    eventually("it is released", async || {
        client.inspect("stuck").await.expect("a look").holders.is_empty()
    })
    .await;
    let transaction = lock_row().await;
    let began = Instant::now();
    let waiting = tokio::spawn({
        let lock = client.mutex("stuck");
        async move { lock.lock().await }
    });
    let mut cycles = 0;
    while began.elapsed() < Duration::from_secs(4) {
        drop(client.mutex("free").lock().await.expect("the lock"));
        cycles += 1;
        assert_ne!(kept.state(), State::Lost, "{url}");
    }
    assert!(cycles >= 5, "{cycles} cycles on another key");
    assert!(!waiting.is_finished());
    drop(transaction);
    waiting.await.expect("the task").map(drop).expect("the lock, once the row is free");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_locked_row_holds_up_its_own_key_only() {
    let Some(server) = PostgresServer::start() else { return };
    let pool = sqlx::PgPool::connect(&server.url()).await.expect("a pool");
    locked_row(&server.url(), client(&server.url()).await, async || {
        let mut tx = pool.begin().await.expect("a transaction");
        sqlx::query(LOCK_STUCK).fetch_one(&mut *tx).await.expect("the row");
        tx
    })
    .await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_locked_row_of_mariadb_holds_up_its_own_key_only() {
    let Some(server) = MariaDbServer::start() else { return };
    let pool = sqlx::MySqlPool::connect(&server.url()).await.expect("a pool");
    locked_row(&server.url(), client(&server.url()).await, async || {
        let mut tx = pool.begin().await.expect("a transaction");
        sqlx::query(LOCK_STUCK).fetch_one(&mut *tx).await.expect("the row");
        tx
    })
    .await;
}

/// Two rows that somebody else has locked, and a hundred locks with a short ttl that are renewed
/// in the same batches, over a network that takes its time.
async fn locked_rows_among_many<T>(url: &str, port: u16, lock_rows: impl AsyncFn(&str) -> T) {
    let proxy = dlock_testkit::proxy::Proxy::opaque(port);
    let behind = url.replace(&format!(":{port}/"), &format!(":{}/", proxy.port()));
    let dlock = builder(&behind).ttl(Duration::from_secs(2)).connect().await.expect("a client");
    for way in [dlock_testkit::proxy::Way::ToServer, dlock_testkit::proxy::Way::ToClient] {
        proxy.delay(way, Duration::from_millis(1));
    }
    let mut kept = Vec::new();
    for n in 0..100 {
        kept.push(dlock.mutex(format!("kept:{n}")).lock().await.expect("the lock"));
    }
    for key in ["stuck:1", "stuck:2"] {
        drop(dlock.mutex(key).lock().await.expect("the lock"));
    }
    eventually("they are released", async || {
        dlock.inspect("stuck:2").await.expect("a look").holders.is_empty()
    })
    .await;
    let ids = "('test/l/stuck:1', 'test/l/stuck:2')";
    let locked = format!("SELECT 1 FROM dlock_lock WHERE id IN {ids} FOR UPDATE");
    let transaction = lock_rows(&locked).await;
    let waiting: Vec<_> = ["stuck:1", "stuck:2"]
        .map(|key| {
            let lock = dlock.mutex(key);
            tokio::spawn(async move { lock.lock().await })
        })
        .into();
    let (began, mut slowest) = (Instant::now(), Duration::ZERO);
    while began.elapsed() < Duration::from_secs(12) {
        let cycle = Instant::now();
        drop(dlock.mutex("free").lock().await.expect("the lock"));
        slowest = slowest.max(cycle.elapsed());
        tokio::time::sleep(Duration::from_millis(20)).await;
        let lost = kept.iter().filter(|guard| guard.state() == State::Lost).count();
        assert_eq!(lost, 0, "locks of other keys after {:?}", began.elapsed());
    }
    println!("a lock of another key took {slowest:?} at most");
    drop(transaction);
    for task in waiting {
        task.await.expect("the task").map(drop).expect("the lock, once the row is free");
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn locked_rows_lose_no_other_lock_with_a_short_ttl() {
    if let Some(server) = PostgresServer::start() {
        let pool = sqlx::PgPool::connect(&server.url()).await.expect("a pool");
        locked_rows_among_many(&server.url(), server.port(), async |sql: &str| {
            let mut tx = pool.begin().await.expect("a transaction");
            let sql = sqlx::AssertSqlSafe(sql.to_owned());
            let _ = sqlx::query(sql).fetch_all(&mut *tx).await.expect("the rows");
            tx
        })
        .await;
    }
    if let Some(server) = MariaDbServer::start() {
        let pool = sqlx::MySqlPool::connect(&server.url()).await.expect("a pool");
        locked_rows_among_many(&server.url(), server.port(), async |sql: &str| {
            let mut tx = pool.begin().await.expect("a transaction");
            let sql = sqlx::AssertSqlSafe(sql.to_owned());
            let _ = sqlx::query(sql).fetch_all(&mut *tx).await.expect("the rows");
            tx
        })
        .await;
    }
}

/// The rows of `lock_in` are removed when there are many; those that are locked stay.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn rows_of_lock_in_do_not_grow_for_ever() {
    use dlock::sql::{lock_in, try_lock_in};
    const COUNT: &str = "SELECT count(*) FROM dlock_row";
    if let Some(server) = PostgresServer::start() {
        let url = server.url();
        drop(client(&url).await);
        server.sql("INSERT INTO dlock_row SELECT 'order:' || n FROM generate_series(1, 10500) n");
        let pool = sqlx::PgPool::connect(&url).await.expect("a pool");
        let mut tx = pool.begin().await.expect("a transaction");
        lock_in(&mut tx, "order:1").await.expect("the lock");
        let sweeper = Postgres::new(&url, "test").expect("a backend");
        let _ = sweeper.sweep(Duration::ZERO).await.expect("a sweep");
        let left: u64 = server.sql(COUNT).parse().expect("a number");
        assert!((5_000..=10_000).contains(&left), "{left}");
        let mut other = pool.begin().await.expect("a transaction");
        assert!(!try_lock_in(&mut other, "order:1").await.expect("an answer"), "it is locked");
        assert!(try_lock_in(&mut other, "order:2").await.expect("an answer"));
    }
    if let Some(server) = MariaDbServer::start() {
        let url = server.url();
        drop(client(&url).await);
        server.sql(
            "USE dlock; INSERT INTO dlock_row SELECT CONCAT('order:', seq) FROM seq_1_to_10500",
        );
        let pool = sqlx::MySqlPool::connect(&url).await.expect("a pool");
        let mut tx = pool.begin().await.expect("a transaction");
        lock_in(&mut tx, "order:1").await.expect("the lock");
        let sweeper = MySql::new(&url, "test").expect("a backend");
        let _ = sweeper.sweep(Duration::ZERO).await.expect("a sweep");
        let left: u64 = server.sql(&format!("USE dlock; {COUNT}")).parse().expect("a number");
        assert!((5_000..=10_000).contains(&left), "{left}");
        let mut other = pool.begin().await.expect("a transaction");
        assert!(!try_lock_in(&mut other, "order:1").await.expect("an answer"), "it is locked");
        assert!(try_lock_in(&mut other, "order:2").await.expect("an answer"));
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_locked_row_of_mysql_holds_up_its_own_key_only() {
    let Some(server) = MySqlServer::start() else { return };
    let url = format!("{}?ssl-mode=disabled", server.url());
    let pool = sqlx::MySqlPool::connect(&url).await.expect("a pool");
    locked_row(&server.url(), client(&server.url()).await, async || {
        let mut tx = pool.begin().await.expect("a transaction");
        sqlx::query(LOCK_STUCK).fetch_one(&mut *tx).await.expect("the row");
        tx
    })
    .await;
}

/// Several replicas of a program start at the same time on an empty database, and each may make
/// the tables.
async fn migrated_by_many(url: &str, sql: impl Fn(&str) -> String) {
    for round in 0..3 {
        sql(&format!("CREATE DATABASE empty{round}"));
        let url = format!("{}empty{round}", url.trim_end_matches("dlock"));
        let connecting: Vec<_> = (0..8)
            .map(|_| {
                let builder = builder(&url);
                tokio::spawn(async move { builder.connect().await })
            })
            .collect();
        let mut clients = Vec::new();
        for client in connecting {
            clients.push(client.await.expect("the task").expect("a client"));
        }
        for dlock in &clients {
            drop(dlock.mutex("a").lock().await.expect("the lock"));
        }
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn many_may_make_the_tables_at_once() {
    if let Some(server) = PostgresServer::start() {
        migrated_by_many(&server.url(), |statement| server.sql(statement)).await;
    }
    if let Some(server) = MariaDbServer::start() {
        migrated_by_many(&server.url(), |statement| server.sql(statement)).await;
    }
    if let Some(server) = MySqlServer::start() {
        migrated_by_many(&server.url(), |statement| server.sql(statement)).await;
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_full_server_is_told_and_survived() {
    let Some(server) = PostgresServer::with(&["max_connections=7"]) else { return };
    let url = server.url();
    dlock::backend::sql::make_tables(&dlock::Config::from_url(&url).expect("a URL"))
        .await
        .expect("tables");
    // A superuser has three more; nobody else may be one here.
    server.sql("CREATE ROLE plain LOGIN; GRANT ALL ON ALL TABLES IN SCHEMA public TO plain");
    let plain = url.replace("dlock@", "plain@");
    let mut taken = Vec::new();
    while let Ok(conn) = <sqlx::PgConnection as sqlx::Connection>::connect(&plain).await {
        taken.push(conn);
    }
    let error = Dlock::connect(&plain).await.expect_err("it is full");
    assert_eq!(error.kind(), ErrorKind::Unavailable);
    assert!(error.to_string().contains("too many connections"), "{error}");
    taken.clear();
    let dlock = Dlock::builder().url(&plain).connect_lazy().expect("a client");
    drop(dlock.mutex("a").lock().await.expect("the lock"));
}

/// Tokens rise although rows are removed and the clock is set back by an hour.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn tokens_rise_over_a_sweep_and_a_clock_set_back() {
    let Some((server, clock)) = PostgresServer::with_clock() else { return };
    let url = server.url();
    let dlock = client(&url).await;
    let sweeper = Postgres::new(&format!("{url}?migrate=true"), "test").expect("a backend");
    clock.set(3_600);
    let guard = dlock.mutex("a").lock().await.expect("the lock");
    let first = guard.token();
    assert_eq!(guard.release().await.expect("an answer"), ReleaseOutcome::Released);
    tokio::time::sleep(Duration::from_millis(50)).await;
    assert!(sweeper.sweep(Duration::ZERO).await.expect("a sweep") >= 1);
    assert_eq!(server.sql("SELECT count(*) FROM dlock_lock"), "0");
    clock.set(0);
    let guard = dlock.mutex("a").lock().await.expect("the lock");
    assert!(guard.token() > first, "{} after {first}", guard.token());
}

/// Only what is idle is removed.
async fn swept(dlock: Dlock, sweep: impl AsyncFn() -> usize) {
    let held = dlock.mutex("held").ttl(Duration::from_secs(60)).lock().await.expect("the lock");
    let mut last = 0;
    for n in 0..700 {
        let guard = dlock.mutex(format!("once:{n}")).lock().await.expect("the lock");
        last = guard.token().get();
        drop(guard);
    }
    eventually("all are released", async || {
        let page = dlock.list("once:", dlock::backend::Cursor::default()).await.expect("a page");
        page.keys.is_empty()
    })
    .await;
    tokio::time::sleep(Duration::from_millis(20)).await;
    assert_eq!(sweep().await, 700);
    assert_eq!(sweep().await, 0);
    assert_eq!(held.state(), State::Held);
    let again = dlock.mutex("once:0").lock().await.expect("the lock");
    assert!(again.token().get() > last);
    assert_eq!(held.release().await.expect("an answer"), ReleaseOutcome::Released);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn idle_rows_are_removed() {
    let directory = tempfile::TempDir::new().expect("a directory");
    let url = format!("sqlite://{}/locks.db", directory.path().display());
    let sqlite = Sqlite::new(&format!("{url}?migrate=true"), "test").expect("a backend");
    let sweep = async || sqlite.sweep(Duration::ZERO).await.expect("a sweep");
    swept(client(&url).await, sweep).await;
    let Some(server) = MariaDbServer::start() else { return };
    let url = server.url();
    let mysql = MySql::new(&format!("{url}?migrate=true"), "test").expect("a backend");
    swept(client(&url).await, async || mysql.sweep(Duration::ZERO).await.expect("a sweep")).await;
}

/// Forwards each new connection to the server at this port; open ones stay where they are.
async fn forward_new(to: Arc<AtomicU16>) -> u16 {
    let listener = TcpListener::bind("127.0.0.1:0").await.expect("a port");
    let port = listener.local_addr().expect("an address").port();
    tokio::spawn(async move {
        while let Ok((mut client, _)) = listener.accept().await {
            let to = to.load(Ordering::SeqCst);
            tokio::spawn(async move {
                let mut server = TcpStream::connect(("127.0.0.1", to)).await.expect("a server");
                let _ = tokio::io::copy_bidirectional(&mut client, &mut server).await;
            });
        }
    });
    port
}

/// A planned switchover: the primary is made read-only and goes on with its connections, while
/// the address leads to another server. The client follows, and takes no lock on the old one.
async fn demoted(url: impl Fn(u16) -> String, old: (u16, impl Fn()), new: u16) {
    let to = Arc::new(AtomicU16::new(old.0));
    let dlock = client(&url(forward_new(to.clone()).await)).await;
    let at = async |port| builder(&url(port)).connect().await.expect("a client");
    let (at_old, at_new) = (at(old.0).await, at(new).await);
    drop(dlock.mutex("warm").lock().await.expect("the lock"));
    to.store(new, Ordering::SeqCst);
    (old.1)();
    let began = Instant::now();
    let guard = dlock.mutex("a").lock().await.expect("the lock");
    assert!(began.elapsed() < Duration::from_secs(3), "{:?}", began.elapsed());
    let holders = async |dlock: &Dlock| dlock.inspect("a").await.expect("a look").holders.len();
    assert_eq!(holders(&at_old).await, 0, "it took the lock on the old primary");
    assert_eq!(holders(&at_new).await, 1);
    assert_eq!(guard.release().await.expect("an answer"), ReleaseOutcome::Released);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_demoted_mariadb_is_left() {
    // `root` may write although `read_only` is on.
    for user in ["shop", "root"] {
        let (Some(old), Some(new)) = (MariaDbServer::start(), MariaDbServer::start()) else {
            return;
        };
        for server in [&old, &new] {
            server.sql("CREATE USER shop; GRANT ALL ON dlock.* TO shop");
        }
        let url = |port| format!("mysql://{user}@127.0.0.1:{port}/dlock");
        let demote = || drop(old.sql("SET GLOBAL read_only = 1"));
        demoted(url, (old.port(), demote), new.port()).await;
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_demoted_mysql_is_left() {
    let (Some(old), Some(new)) = (MySqlServer::start(), MySqlServer::start()) else { return };
    let url = |port| format!("mysql://root@127.0.0.1:{port}/dlock");
    let demote = || drop(old.sql("SET GLOBAL read_only = 1"));
    demoted(url, (old.port(), demote), new.port()).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_demoted_postgres_is_left() {
    let (Some(old), Some(new)) = (PostgresServer::start(), PostgresServer::start()) else { return };
    let url = |port| format!("postgres://dlock@127.0.0.1:{port}/dlock");
    let demote = || {
        old.sql("ALTER SYSTEM SET default_transaction_read_only = on");
        old.sql("SELECT pg_reload_conf()");
    };
    demoted(url, (old.port(), demote), new.port()).await;
}

/// A commit whose answer is lost is settled by the owner: the lock is neither lost nor
/// given twice.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_lost_commit_is_settled() {
    let Some(server) = PostgresServer::start() else { return };
    let direct = client(&server.url()).await;
    let cut = Arc::new(AtomicBool::new(false));
    let port = cut_at_commit(server.port(), cut.clone()).await;
    let url = format!("postgres://dlock@127.0.0.1:{port}/dlock");
    let through = client(&url).await;
    drop(through.mutex("warm").lock().await.expect("the lock"));
    tokio::time::sleep(Duration::from_millis(100)).await;
    for round in 0..5 {
        let key = format!("a:{round}");
        cut.store(true, Ordering::SeqCst);
        let guard = through.mutex(key.as_str()).lock().await.expect("the lock, by asking again");
        assert!(!cut.load(Ordering::SeqCst), "a commit was cut");
        assert!(direct.mutex(key.as_str()).try_lock().await.expect("an answer").is_none());
        assert_eq!(guard.release().await.expect("an answer"), ReleaseOutcome::Released);
        drop(direct.mutex(key.as_str()).lock().await.expect("the lock"));
    }
}
