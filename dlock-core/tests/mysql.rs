//! The conformance suite on a real MySQL 8, and what only MySQL does.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use dlock::backend::sql::MySql;
use dlock::{Dlock, ErrorKind};
use dlock_testkit::conformance::Suite;
use dlock_testkit::database_servers::MySqlServer;
use dlock_testkit::proxy::Proxy;

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn conformance() {
    let Some(server) = MySqlServer::start() else { return };
    let url = format!("{}?migrate=true", server.url());
    Suite::new(move || MySql::new(&url, "test").expect("a backend")).run().await;
}

/// Logs in, and takes a lock.
async fn log_in(url: &str) -> dlock::Result<()> {
    let dlock = Dlock::connect(url).await?;
    dlock.mutex("a").lock().await.map(drop)
}

/// The default account of MySQL 8 (`caching_sha2_password`) logs in at a server of this machine
/// without any option, and with each mode of TLS. What cannot work is told.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_default_account_logs_in() {
    let Some(server) = MySqlServer::start() else { return };
    server.sql("CREATE USER shop IDENTIFIED BY 'right'; GRANT ALL ON dlock.* TO shop");
    let plugin = "SELECT plugin FROM mysql.user WHERE user = 'shop'";
    assert_eq!(server.sql(plugin), "caching_sha2_password");
    let user = server.url().replace("root@", "shop:right@");
    // The server remembers a password that was checked; each attempt is the first.
    let forget = || drop(server.sql("FLUSH PRIVILEGES"));
    log_in(&format!("{user}?migrate=true")).await.expect("without TLS in the URL");
    forget();
    log_in(&format!("{user}?sslmode=require")).await.expect("with TLS");
    forget();
    let ca = server.directory().join("data/ca.pem");
    let ca = format!("{user}?sslmode=verify-ca&tls_ca={}", ca.display());
    log_in(&ca).await.expect("with the authority of the server");
    forget();
    let error = log_in(&format!("{user}?sslmode=disable")).await.expect_err("in plain text");
    assert_eq!(error.kind(), ErrorKind::Config, "{error}");
    assert!(error.to_string().contains("over TLS only"), "{error}");
    let error = log_in(&user.replace("right", "secret")).await.expect_err("a wrong password");
    assert_eq!(error.kind(), ErrorKind::Denied, "{error}");
    assert!(!error.to_string().contains("secret"), "{error}");
}

/// A client that is cut off in the middle of a transaction does not keep its rows: the server
/// ends the transaction after the time of a call.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_silent_transaction_ends() {
    let Some(server) = MySqlServer::start() else { return };
    let proxy = Proxy::opaque(server.port());
    let url = format!("{}?migrate=true", server.url());
    let direct = Dlock::connect(&url).await.expect("a client");
    drop(direct.mutex("a").lock().await.expect("the lock"));
    let behind = url.replace(&format!(":{}/", server.port()), &format!(":{}/", proxy.port()));
    let through = Dlock::connect(&behind).await.expect("a client");
    let done = Arc::new(AtomicBool::new(false));
    let busy = tokio::spawn({
        let (lock, done) = (through.mutex("a").fair(), done.clone());
        async move {
            while !done.load(Ordering::Relaxed) {
                let _ = lock.lock().await;
            }
        }
    });
    let open = "SELECT count(*) FROM information_schema.innodb_trx";
    let mut caught = false;
    for _ in 0..50 {
        proxy.freeze();
        tokio::time::sleep(Duration::from_millis(100)).await;
        caught = server.sql(open) != "0";
        if caught {
            break;
        }
        tokio::time::sleep(Duration::from_millis(150)).await;
    }
    assert!(caught, "no transaction was open when the network froze");
    proxy.go_silent();
    done.store(true, Ordering::Relaxed);
    let began = Instant::now();
    while server.sql(open) != "0" {
        assert!(began.elapsed() < Duration::from_secs(6), "the transaction stays open");
        tokio::time::sleep(Duration::from_millis(50)).await;
    }
    assert_ne!(server.sql("SELECT @@GLOBAL.wait_timeout"), "2");
    busy.abort();
}
