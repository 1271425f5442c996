//! Tests of connections to a Redis, of the checks of its settings, and of the rights
//! that a user needs.

mod certificates;

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::time::Duration;

use self::certificates::Certificates;
use dlock::backend::redis::{Credentials, FENCED_SET, RedLock, Redis};
use dlock::{Access, Config, Dlock, ErrorKind, Fence, ReleaseOutcome, State, Token};
use dlock_testkit::conformance::{Suite, eventually};
use dlock_testkit::ports::free_port;
use dlock_testkit::proxy::Proxy;
use dlock_testkit::redis::RedisServer;
use rand::rngs::StdRng;
use rand::{RngExt as _, SeedableRng as _};

/// The rights that docs/redis.md names.
const RIGHTS: &str = include_str!("../../docs/redis.acl");

async fn works(client: &Dlock) {
    let guard = client.mutex("works").lock().await.expect("the lock");
    let waiting = tokio::spawn({
        let lock = client.mutex("works");
        let lock = if client.capabilities().fifo { lock.fair() } else { lock };
        async move { lock.lock().await.map(|guard| guard.token()) }
    });
    let token = guard.token();
    let _ = guard.release().await.expect("an answer");
    assert!(waiting.await.expect("the task").expect("the lock") > token);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_client_of_the_redis_crate_will_do() {
    let Some(server) = RedisServer::start() else { return };
    let given = redis::Client::open(server.url()).expect("a client");
    let client = Dlock::builder().redis(given).namespace("own").connect().await.expect("a client");
    works(&client).await;
    assert_eq!(client.health().await.backend, "redis");
    drop(client);
    server.assert_nothing_left().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_connection_manager_will_do() {
    let Some(mut server) = RedisServer::start() else { return };
    let given = redis::Client::open(server.url()).expect("a client");
    let manager = given.get_connection_manager().await.expect("a manager");
    let builder = Dlock::builder().redis_manager(given, manager);
    let client = builder.wait(Duration::from_secs(20)).connect().await.expect("a client");
    works(&client).await;
    assert_eq!(connections(&server), 2, "the manager's and one for notices");
    server.kill();
    server.restart();
    works(&client).await;
    drop(client);
    server.assert_nothing_left().await;
}

/// A proxy in front of several servers calls itself one, and refuses a script whose keys are
/// in several slots. Calls are then on one key each, from the first one on.
#[tokio::test(flavor = "multi_thread", worker_threads = 4)]
async fn a_proxy_that_shards_gets_one_key_at_a_time() {
    let options = ["--cluster-enabled", "yes", "--save", ""];
    let Some(node) = RedisServer::with(&options) else { return };
    assert_eq!(node.cli(&["CLUSTER", "ADDSLOTSRANGE", "0", "16383"]), "OK");
    let proxy = Proxy::sharding(node.port());
    eventually("the slots are served", async || {
        node.cli(&["CLUSTER", "INFO"]).contains("cluster_state:ok")
    })
    .await;
    let builder = dlock_testkit::redis::client(&proxy.url()).ttl(Duration::from_secs(3));
    let client = builder.connect_lazy().expect("a client");
    let tasks: Vec<_> = (0..200)
        .map(|n| {
            let lock = client.mutex(format!("key-{}", n % 20));
            tokio::spawn(async move {
                let guard = lock.lock().await?;
                tokio::time::sleep(Duration::from_millis(2)).await;
                guard.release().await
            })
        })
        .collect();
    for task in tasks {
        assert_eq!(task.await.expect("the task").expect("the lock"), ReleaseOutcome::Released);
    }
    // Renewals are combined too.
    let mut guards = Vec::new();
    for n in 0..10 {
        guards.push(client.mutex(format!("held-{n}")).lock().await.expect("the lock"));
    }
    tokio::time::sleep(Duration::from_secs(4)).await; // longer than the ttl
    assert!(guards.iter().all(|guard| guard.state() == State::Held));
    assert!(client.semaphore("permits", 2).permits(1).lock().await.is_ok());
    let reader = async || client.rwlock("shared").read().lock().await;
    let shared = [reader().await, reader().await];
    assert!(shared.iter().all(Result::is_ok));
    assert_eq!(client.inspect("held-3").await.expect("a state").holders.len(), 1);
    let refused = node.cli(&["INFO", "errorstats"]);
    let times = refused.lines().find_map(|line| line.trim().strip_prefix("errorstat_CROSSSLOT:"));
    assert_eq!(times, Some("count=1"), "only the question at the connection: {refused}");
    // As a node of a cluster it is told what to write, which then works.
    let url = proxy.url().replace("redis://", "redis+cluster://");
    let error = Dlock::connect(&url).await.expect_err("refused");
    assert!(error.to_string().contains("write redis://"), "{error}");
}

fn connections(server: &RedisServer) -> usize {
    let list = server.cli(&["CLIENT", "LIST"]);
    list.lines().filter(|line| line.contains("cmd=") && !line.contains("cmd=client")).count()
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_process_has_two_connections() {
    let Some(server) = RedisServer::start() else { return };
    let client = server.client();
    let tasks: Vec<_> = (0..100)
        .map(|n| {
            let lock = client.mutex(format!("key-{}", n % 10));
            tokio::spawn(async move { lock.lock().await.map(drop) })
        })
        .collect();
    for task in tasks {
        task.await.expect("the task").expect("the lock");
    }
    assert_eq!(connections(&server), 2);
    drop(client);
    server.assert_nothing_left().await;
}

/// A single call is sent at once; concurrent calls are combined in one script call.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn calls_in_flight_are_combined() {
    const TASKS: usize = 300;
    let Some(server) = RedisServer::start() else { return };
    let client = server.client();
    let _ = client.mutex("first").lock().await.expect("the lock").release().await;
    server.cli(&["SET", "dlock:2:{default:key-7}:q", "no list"]);
    server.cli(&["HSET", "dlock:2:{default:key-9}:l", "no", "string"]);
    server.cli(&["CONFIG", "RESETSTAT"]);
    let tasks: Vec<_> = (0..TASKS)
        .map(|n| {
            let lock = client.mutex(format!("key-{n}"));
            tokio::spawn(async move { lock.lock().await?.release().await })
        })
        .collect();
    for (n, task) in tasks.into_iter().enumerate() {
        match task.await.expect("the task") {
            Err(error) if n == 9 => assert_eq!(error.kind(), ErrorKind::Config, "{error}"),
            outcome => {
                let _ = outcome.expect("one call's error is no other's");
            }
        }
    }
    let statistics = server.cli(&["INFO", "commandstats"]);
    let runs = statistics.lines().find_map(|line| line.strip_prefix("cmdstat_evalsha:calls="));
    let runs: usize = runs.and_then(|it| it.split(',').next()?.parse().ok()).expect("runs");
    println!("{} calls in {runs} runs", 2 * TASKS);
    assert!(runs < TASKS, "{} calls in {runs} runs", 2 * TASKS);
    server.cli(&["DEL", "dlock:2:{default:key-7}:q", "dlock:2:{default:key-9}:l"]);
    drop(client);
    server.assert_nothing_left().await;
}

/// A provider that blocks its thread does not block the one that renews locks: here for a new
/// connection that is to listen, while the one for commands works on.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_provider_that_blocks_loses_no_lock() {
    let Some(server) = RedisServer::with(&["--requirepass", "first"]) else { return };
    let proxy = Proxy::start(server.port()).await;
    let (is_slow, blocked) = (Arc::new(AtomicBool::new(false)), Arc::new(AtomicUsize::new(0)));
    let builder = Dlock::builder().url(&proxy.url()).ttl(Duration::from_secs(1));
    let builder = builder.redis_credentials({
        let (is_slow, blocked) = (is_slow.clone(), blocked.clone());
        move || {
            let (is_slow, blocked) = (is_slow.clone(), blocked.clone());
            async move {
                if is_slow.load(Ordering::Relaxed) {
                    blocked.fetch_add(1, Ordering::Relaxed);
                    std::thread::sleep(Duration::from_secs(4));
                }
                Ok::<_, std::io::Error>(Credentials { user: None, password: "first".into() })
            }
        }
    });
    let dlock = builder.connect().await.expect("a client");
    let guard = dlock.mutex("a").lock().await.expect("the lock");
    eventually("it listens", async || proxy.subscribers() == 1).await;
    is_slow.store(true, Ordering::Relaxed);
    proxy.freeze_subscribers();
    proxy.heal(); // which cuts them
    eventually("it is asked again", async || blocked.load(Ordering::Relaxed) > 0).await;
    for _ in 0..60 {
        assert_ne!(guard.state(), State::Lost);
        tokio::time::sleep(Duration::from_millis(50)).await;
    }
    assert_eq!(guard.release().await.expect("an answer"), ReleaseOutcome::Released);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn credentials_may_change() {
    let Some(server) = RedisServer::with(&["--requirepass", "first"]) else { return };
    let file = server.directory().join("password");
    std::fs::write(&file, "first\n").expect("a file");
    let asked = Arc::new(AtomicUsize::new(0));
    let provided = Dlock::builder().url(&server.url()).redis_credentials({
        let (file, asked) = (file.clone(), asked.clone());
        move || {
            asked.fetch_add(1, Ordering::Relaxed);
            let password = std::fs::read_to_string(&file).map(|text| text.trim().to_owned());
            async move { password.map(|password| Credentials { user: None, password }) }
        }
    });
    let provided = provided.wait(Duration::from_secs(20)).connect().await.expect("a client");
    let read = Dlock::builder().url(&server.url()).password_file(&file);
    let read = read.wait(Duration::from_secs(20)).connect().await.expect("a client");
    works(&provided).await;
    works(&read).await;
    let before = asked.load(Ordering::Relaxed);
    std::fs::write(&file, "second").expect("a file");
    let cli = |arguments: &[&str]| server.cli(arguments);
    cli(&["-a", "first", "CONFIG", "SET", "requirepass", "second"]);
    cli(&["-a", "second", "CLIENT", "KILL", "TYPE", "normal"]);
    cli(&["-a", "second", "CLIENT", "KILL", "TYPE", "pubsub"]);
    works(&provided).await;
    works(&read).await;
    assert!(asked.load(Ordering::Relaxed) > before);
    let wrong = Dlock::connect_lazy(&server.url().replace("redis://", "redis://:gone@"));
    let error = wrong.expect("a client").mutex("a").lock().await.expect_err("denied");
    assert_eq!(error.kind(), ErrorKind::Denied);
    assert!(!format!("{error} {error:?}").contains("gone"), "{error:?}");
    drop((provided, read));
    cli(&["-a", "second", "CONFIG", "SET", "requirepass", ""]);
    server.assert_nothing_left().await;
}

/// A user with the documented rights and no others passes the whole suite.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_least_rights_suffice() {
    let Some(server) = RedisServer::start() else { return };
    let rights: Vec<&str> = RIGHTS.lines().filter(|line| !line.starts_with('#')).collect();
    let rights = rights.join(" ");
    let mut command = vec!["ACL", "SETUSER", "dlock", "reset", "on", ">secret"];
    command.extend(rights.split_whitespace());
    assert_eq!(server.cli(&command), "OK");
    server.cli(&["ACL", "SETUSER", "dlock", "+client|setinfo"]); // unknown before 7.2
    let url = server.url().replace("redis://", "redis://dlock:secret@");
    let suite = Suite::new({
        let url = url.clone();
        move || Redis::new(&url, "default").expect("a backend")
    });
    suite.run().await;
    let denied = server.cli(&["ACL", "LOG"]);
    assert!(!denied.contains("dlock"), "{denied}");
    // No more than that: another's keys are out of reach.
    let mut outside = redis::Client::open(url).expect("a client");
    let outside = redis::cmd("GET").arg("other").query::<Option<String>>(&mut outside);
    assert_eq!(outside.expect_err("denied").code(), Some("NOPERM"));
    drop(suite);
    server.assert_nothing_left().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_server_that_evicts_is_refused() {
    for policy in ["allkeys-lru", "volatile-ttl"] {
        let Some(server) = RedisServer::with(&["--maxmemory-policy", policy]) else { return };
        let error = Dlock::connect(&server.url()).await.expect_err("refused");
        assert_eq!(error.kind(), ErrorKind::Config);
        let text = error.to_string();
        assert!(text.contains(policy) && text.contains("eviction=warn"), "{text}");
        let accepted = Dlock::connect(&format!("{}?eviction=warn", server.url())).await;
        works(&accepted.expect("a client")).await;
        // As soon as it is mended it is used.
        let lazy = Dlock::builder().url(&server.url()).connect_lazy().expect("a client");
        assert_eq!(lazy.mutex("a").lock().await.expect_err("refused").kind(), ErrorKind::Config);
        server.cli(&["CONFIG", "SET", "maxmemory-policy", "noeviction"]);
        let began = std::time::Instant::now();
        while lazy.mutex("a").lock().await.is_err() {
            assert!(began.elapsed() < Duration::from_secs(20));
            tokio::time::sleep(Duration::from_millis(50)).await;
        }
        drop(lazy);
        server.assert_nothing_left().await;
    }
}

impl Certificates {
    /// A server with its certificate, and the port for TLS.
    fn server(&self) -> Option<(RedisServer, String)> {
        let port = free_port().to_string();
        let (ca, served, key) =
            (self.path("ca.pem"), self.path("server.pem"), self.path("server.key"));
        let options = ["--tls-port", &port, "--tls-ca-cert-file", &ca, "--tls-cert-file", &served];
        let server = RedisServer::with(&[&options[..], &["--tls-key-file", &key]].concat())?;
        Some((server, port))
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_quorum_by_tls() {
    let certificates = Certificates::new();
    let path = |name: &str| certificates.path(name);
    let (mut servers, mut hosts) = (Vec::new(), Vec::new());
    for _ in 0..3 {
        let Some((server, port)) = certificates.server() else { return };
        servers.push(server);
        hosts.push(format!("localhost:{port}"));
    }
    let (ca, cert, key) = (path("ca.pem"), path("client.pem"), path("client.key"));
    let url = format!("redlocks://{}?tls_ca={ca}&tls_cert={cert}&tls_key={key}", hosts.join(","));
    let config = Config::from_url(&url).expect("a URL");
    RedLock::prepare_new_nodes(&config).await.expect("they are new");
    let client = Dlock::connect(&url).await.expect("a client");
    works(&client).await;
    let plain = Dlock::connect(&url.replace("redlocks://", "redlock://")).await;
    assert!(plain.expect_err("files of TLS").to_string().contains("redlocks://"));
    servers[0].kill();
    works(&client).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn tls_with_an_authority_and_a_client_certificate_of_ones_own() {
    let certificates = Certificates::new();
    let path = |name: &str| certificates.path(name);
    let (ca, cert, key) = (path("ca.pem"), path("client.pem"), path("client.key"));
    let Some((server, port)) = certificates.server() else { return };
    let url = format!("rediss://localhost:{port}");
    let with = |options: &str| Dlock::connect_lazy(&format!("{url}?{options}"));
    let client = with(&format!("tls_ca={ca}&tls_cert={cert}&tls_key={key}")).expect("a client");
    works(&client).await;
    // Another authority, no certificate, no TLS there at all, TLS where none was
    // expected: refused in time, told why, and never plain.
    let plain =
        format!("rediss://localhost:{}?tls_ca={ca}&tls_cert={cert}&tls_key={key}", server.port());
    for client in [
        with(&format!("tls_cert={cert}&tls_key={key}")),
        with(&format!("tls_ca={ca}")),
        Dlock::connect_lazy(&plain),
        Dlock::connect_lazy(&format!("redis://localhost:{port}")),
    ] {
        let lock = client.expect("a client").mutex("a").wait(Duration::from_secs(1));
        let error = lock.lock().await.expect_err("refused");
        assert_eq!(error.kind(), ErrorKind::Unavailable, "{error:?}");
        println!("{error:?}");
    }
    let error = with(&format!("tls_cert={cert}")).expect_err("half");
    assert!(error.to_string().contains("go together"), "{error}");
    let error = with("tls_ca=/nowhere").expect_err("no file");
    assert!(error.to_string().contains("/nowhere"), "{error}");
    let error = Dlock::connect_lazy(&format!("{}?tls_ca={ca}", server.url())).expect_err("plain");
    assert!(error.to_string().contains("rediss://"), "{error}");
    drop(client);
    server.assert_nothing_left().await;
}

/// The script decides as the in-process fence does, up to the highest token.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn fenced_writes_are_exact() {
    let Some(server) = RedisServer::start() else { return };
    let client = redis::Client::open(server.url()).expect("a client");
    let mut connection = client.get_multiplexed_async_connection().await.expect("a connection");
    let script = redis::Script::new(FENCED_SET);
    let seed = rand::random::<u32>();
    println!("seed {seed}");
    let mut random = StdRng::seed_from_u64(u64::from(seed));
    for round in 0..50 {
        let highest: u64 = [20, 1_794_812_422_192_935, (1 << 53) - 1][round % 3];
        let (value, register) = (format!("{{{round}}}"), format!("{{{round}}}:fence"));
        let mut fence = Fence::default();
        for step in 0..40 {
            let token = Token::new(highest - random.random_range(0..20)).expect("a token");
            let (access, letter) =
                if random.random() { (Access::Exclusive, "x") } else { (Access::Shared, "s") };
            let passes = fence.pass(access, token);
            let mut invocation = script.key(&value);
            invocation.key(&register).arg(letter).arg(token.get()).arg(step);
            let written: bool = invocation.invoke_async(&mut connection).await.expect("an answer");
            assert_eq!(written, passes, "{access:?} {token:?} in round {round}");
        }
    }
}

#[tokio::test]
async fn a_database_or_namespace_that_cannot_be_is_a_fault_of_the_configuration() {
    let Some(server) = RedisServer::start() else { return };
    let url = format!("{}?database=99", server.url());
    let error = Dlock::connect(&url).await.unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Config, "{error}");
    assert!(error.to_string().contains("no database of this number"), "{error}");
    for namespace in ["", "a b", "a{b}", "a:b"] {
        let error = dlock::backend::redis::Redis::new(&server.url(), namespace).map(|_| ());
        assert_eq!(error.unwrap_err().kind(), ErrorKind::Config, "{namespace}");
    }
}

#[tokio::test]
async fn a_wait_ends_with_the_true_cause() {
    let Some(server) = RedisServer::start() else { return };
    let dlock = Dlock::connect(&server.url()).await.expect("a client");
    let lock = dlock.mutex("order:7").wait(Duration::from_millis(300));
    let says = async |words: &str| {
        let error = lock.lock().await.unwrap_err();
        assert_eq!(error.kind(), ErrorKind::Unavailable, "{error}");
        assert!(error.to_string().contains(words), "{words}: {error}");
        assert!(error.to_string().contains("`order:7`"), "{error}");
        assert!(std::error::Error::source(&error).is_some(), "{error:?}");
    };
    server.cli(&["CONFIG", "SET", "maxmemory", "1"]);
    says("Redis is out of memory; raise `maxmemory`").await;
    server.cli(&["CONFIG", "SET", "maxmemory", "0"]);
    server.cli(&["REPLICAOF", "127.0.0.1", "1"]);
    says("read-only replica; connect to the primary").await;
}
