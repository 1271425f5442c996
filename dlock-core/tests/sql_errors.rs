//! What a wrong URL, a wrong password or wrong tables lead to: an error that says what to
//! change.

use dlock::backend::sql::make_tables;
use dlock::{Config, Dlock, Error, ErrorKind};
use dlock_testkit::database_servers::{MariaDbServer, PostgresServer};

/// Connects, takes a lock, and says why that fails.
async fn refused(url: &str) -> Error {
    let dlock = match Dlock::connect(url).await {
        Ok(dlock) => dlock,
        Err(error) => return error,
    };
    dlock.mutex("a").try_lock().await.expect_err("it cannot work")
}

async fn check(url: &str, kind: ErrorKind, says: &str) {
    let error = refused(url).await;
    assert_eq!(error.kind(), kind, "{error}");
    assert!(error.to_string().contains(says), "{error}");
    assert!(!error.to_string().contains("secret"), "it tells the password: {error}");
}

/// The tables are missing and then made; the name of the database is wrong; the server has no
/// TLS.
async fn wrong_urls(url: &str) {
    check(url, ErrorKind::Config, "dlock schema").await;
    make_tables(&Config::from_url(url).expect("a URL")).await.expect("tables");
    let other = format!("{}shop", url.trim_end_matches("dlock"));
    check(&other, ErrorKind::Config, "no database with this name").await;
    check(&format!("{url}?sslmode=require"), ErrorKind::Unavailable, "sslmode=disable").await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn mariadb() {
    let Some(server) = MariaDbServer::start() else { return };
    let url = server.url();
    wrong_urls(&url).await;

    server.sql("CREATE USER shop IDENTIFIED BY 'right'; GRANT ALL ON dlock.* TO shop");
    let user = url.replace("root@", "shop:right@");
    let wrong = user.replace("right", "secret");
    check(&wrong, ErrorKind::Denied, "the user or the password").await;
    server.sql("SET GLOBAL read_only = 1");
    check(&user, ErrorKind::Unavailable, "the address of the primary").await;
    server.sql("SET GLOBAL read_only = 0");

    server.sql("UPDATE dlock.dlock_meta SET value = 99 WHERE name = 'layout'");
    check(&url, ErrorKind::Config, "use the same version").await;
    server.sql("ALTER TABLE dlock.dlock_meta RENAME COLUMN value TO other");
    check(&url, ErrorKind::Config, "use the same version").await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn sqlite() {
    let directory = tempfile::TempDir::new().expect("a directory");
    let file = directory.path().join("locks.db");
    let url = format!("sqlite://{}", file.display());
    std::fs::write(&file, "a text that is long enough to be no header of SQLite").expect("a file");
    check(&url, ErrorKind::Config, "not one of SQLite").await;
}

/// Without a host in the URL the driver takes that of `PGHOST`. It is verified like that of a
/// URL, unless it is local. A process of its own has the variables.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_host_of_the_environment_is_verified() {
    const EXPECTED: &str = "DLOCK_TEST_EXPECTED";
    const URL: &str = "postgres:///dlock";
    match std::env::var(EXPECTED).as_deref() {
        Ok("plain text") => return check(URL, ErrorKind::Config, "dlock schema").await,
        Ok(_) => return check(URL, ErrorKind::Unavailable, "does not support TLS").await,
        Err(_) => {}
    }
    let Some(server) = PostgresServer::start() else { return };
    // In capitals it is a name like any other, and leads to the same server.
    let directory = server.directory().display().to_string();
    for (host, expected) in
        [("LOCALHOST", "TLS"), ("localhost", "plain text"), (&*directory, "plain text")]
    {
        let mut child = std::process::Command::new(std::env::current_exe().expect("this program"));
        child.args(["a_host_of_the_environment_is_verified", "--nocapture"]);
        child.env_remove("PGHOSTADDR").env("PGPORT", server.port().to_string());
        child.env("PGUSER", "dlock");
        let output = child.env("PGHOST", host).env(EXPECTED, expected).output().expect("it runs");
        let told = [output.stdout, output.stderr].concat();
        let told = String::from_utf8_lossy(&told);
        assert!(output.status.success() && told.contains("1 passed"), "{host}: {told}");
    }
}

/// Databases that only speak the language of another one, and whose locks nobody has tested.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn other_databases_are_refused() {
    if let Some(server) = PostgresServer::start() {
        let says = |version: &str| {
            server.sql(&format!(
                "CREATE OR REPLACE FUNCTION public.version() RETURNS text LANGUAGE sql \
                 AS $$ SELECT '{version}'::text $$"
            ))
        };
        says("PostgreSQL 15.0");
        server.sql("ALTER DATABASE dlock SET search_path = public, pg_catalog");
        check(&server.url(), ErrorKind::Config, "dlock schema").await;
        says("CockroachDB CCL v24.1.0 (x86_64-pc-linux-gnu)");
        check(&server.url(), ErrorKind::Config, "could end early and be held twice").await;
        says("PostgreSQL 15.2-YB-2.25.0.0-b0 on x86_64-pc-linux-gnu");
        check(&server.url(), ErrorKind::Config, "it is YugabyteDB").await;
    }
    if let Some(server) = MariaDbServer::with(&["--version=8.0.11-TiDB-v7.5.0"]) {
        check(&server.url(), ErrorKind::Config, "it is TiDB").await;
    }
}
