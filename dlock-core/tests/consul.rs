//! The conformance suite on a real Consul, and tests of what only Consul does.

use std::time::Duration;

use dlock::backend::consul::Consul;
use dlock::{Dlock, ErrorKind, ReleaseOutcome};
use dlock_testkit::conformance::{Suite, eventually};
use dlock_testkit::consul::{ConsulCluster, ConsulServer, url};

fn client(server: &ConsulServer, options: &str) -> Dlock {
    let url = format!("{}{options}", server.url());
    Dlock::builder().url(&url).wait(Duration::from_secs(20)).connect_lazy().expect("a client")
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn conformance() {
    let Some(server) = ConsulServer::start() else { return };
    conforms(&server, "consul-lock").await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn conformance_on_three_servers() {
    let Some(cluster) = ConsulCluster::start() else { return };
    conforms(cluster.agent.as_ref().expect("an agent"), "consul-lock").await;
}

/// The layout of `LockKey` has semaphores too.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn conformance_with_semaphores() {
    let Some(server) = ConsulServer::start() else { return };
    conforms(&server, "lock-key").await;
}

async fn conforms(server: &ConsulServer, layout: &'static str) {
    let port = server.port();
    let on = move |port: u16| {
        let url = format!("{}&layout={layout}", url(port));
        Consul::new(&url, "test").expect("a backend")
    };
    Suite::new(move || on(port)).with_proxy(port, on).run().await;
    // Sessions of clients that are gone end in order; those of calls without a client, and of
    // clients that were cut off, end by their time.
    eventually("no session is left", async || server.sessions().is_empty()).await;
    assert_eq!(server.keys(), Vec::<String>::new(), "no key is left");
}

/// A key that is used for something else is neither taken nor changed.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn foreign_keys_are_refused() {
    let Some(server) = ConsulServer::start() else { return };
    let dlock = client(&server, "");
    server.run(&["kv", "put", "settings/.lock", "precious"]).expect("a key");
    server
        .run(&["kv", "put", "-flags=16210313421097356768", "permits/.lock", "{}"])
        .expect("a key");
    for (key, named) in [("settings", "flags are 0x0"), ("permits", "a semaphore")] {
        let error = dlock.mutex(key).lock().await.expect_err("not a lock");
        assert_eq!(error.kind(), ErrorKind::Invalid, "{error}");
        assert!(error.to_string().contains(named), "{error}");
        assert_eq!(
            dlock.mutex(key).try_lock().await.expect_err("not a lock").kind(),
            ErrorKind::Invalid
        );
    }
    assert_eq!(server.run(&["kv", "get", "settings/.lock"]).expect("the key"), "precious");
    let error = dlock.mutex("a//b").lock().await.expect_err("not a path");
    assert_eq!(error.kind(), ErrorKind::Invalid, "{error}");
}

/// A lock that Go's package released stays as a key that nobody has; dlock takes it, with a
/// higher token, and removes it.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_released_key_of_others_is_taken() {
    let Some(server) = ConsulServer::start() else { return };
    let dlock = client(&server, "&layout=lock-key");
    let first = dlock.mutex("job").lock().await.expect("the lock");
    let token = first.token();
    assert_eq!(server.keys(), ["job"]);
    assert_eq!(first.release().await.expect("an answer"), ReleaseOutcome::Released);
    server.run(&["kv", "put", "-flags=3304740253564472344", "job", ""]).expect("a key");
    let second = dlock.mutex("job").lock().await.expect("the lock");
    assert!(second.token() > token);
    assert_eq!(second.release().await.expect("an answer"), ReleaseOutcome::Released);
    assert_eq!(server.keys(), Vec::<String>::new());
}

/// The session has the TTL of the client, no node checks and the lock-delay of the options.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_session_is_as_configured() {
    let Some(server) = ConsulServer::start() else { return };
    let dlock = client(&server, "&ttl=1500ms&consul.lock_delay=3s&client_name=worker-7");
    let guard = dlock.mutex("a").lock().await.expect("the lock");
    let sessions = server.http("GET", "/v1/session/list");
    for part in [r#""NodeChecks":[]"#, r#""TTL":"1500ms""#, r#""LockDelay":3000000000"#, "worker-7"]
    {
        assert!(sessions.contains(part), "{part} in {sessions}");
    }
    assert!(guard.valid_for() <= Duration::from_millis(1500));
    drop((guard, dlock));
    eventually("the session is gone", async || server.sessions().is_empty()).await;
}

/// A ttl below the minimum of Consul is rounded up, a longer one than the session's refused.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_ttl_is_that_of_the_session() {
    let Some(server) = ConsulServer::start() else { return };
    let url = format!("consul://127.0.0.1:{}?ttl=1s", server.port());
    let dlock = Dlock::builder().url(&url).connect().await.expect("a client");
    let guard = dlock.mutex("a").lock().await.expect("the lock");
    assert!(guard.valid_for() > Duration::from_secs(8), "10 s at least");
    let error = dlock.mutex("b").ttl(Duration::from_secs(60)).lock().await.expect_err("too long");
    assert!(error.to_string().contains("session"), "{error}");
    let shared = dlock.rwlock("a").read().lock().await.expect_err("no shared locks");
    assert_eq!(shared.kind(), ErrorKind::Unsupported);
    let permits = dlock.semaphore("a", 2).permits(1).lock().await.expect_err("no semaphores");
    assert_eq!(permits.kind(), ErrorKind::Unsupported);
    assert!(permits.to_string().contains("layout=lock-key"), "{permits}");
}

/// More keys than are watched at once are waited for, and all are woken.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn many_keys_are_waited_for() {
    let Some(server) = ConsulServer::start() else { return };
    let (one, two) = (client(&server, "&ttl=10s"), client(&server, "&ttl=10s"));
    let mut held = Vec::new();
    for n in 0..50 {
        held.push(one.mutex(format!("many-{n}")).lock().await.expect("the lock"));
    }
    let waiting: Vec<_> = (0..50)
        .map(|n| {
            let lock = two.mutex(format!("many-{n}"));
            tokio::spawn(async move { lock.lock().await.map(drop) })
        })
        .collect();
    eventually("all wait", async || two.local_state().waiting.len() == 50).await;
    drop(held);
    for task in waiting {
        tokio::time::timeout(Duration::from_secs(30), task)
            .await
            .expect("in time")
            .expect("the task")
            .expect("the lock");
    }
}

/// The rights of the documentation suffice; a wrong token and one without rights are refused
/// with an error that names no secret.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn tokens_are_asked_for() {
    const ROOT: &str = "6c1f8a44-9d11-4b5e-8b6a-0f2f3f0e8f10";
    let Some(server) = ConsulServer::with_token(ROOT) else { return };
    let rules = include_str!("../../docs/consul.md");
    let (_, rules) = rules.split_once("```hcl\n").expect("the rights");
    let (rules, _) = rules.split_once("```").expect("their end");
    let policy = |name: &str, rules: &str| {
        let (name, rules) = (format!("-name={name}"), format!("-rules={rules}"));
        server.run(&["acl", "policy", "create", &name, &rules]).expect("a policy");
    };
    policy("locks", rules);
    policy("others", r#"key_prefix "others/" { policy = "read" }"#);
    let token = |policy: &str| {
        let words = ["acl", "token", "create", "-format=json", policy];
        let made = server.run(&words).expect("a token");
        let made: serde_json::Value = serde_json::from_str(&made).expect("JSON");
        made["SecretID"].as_str().expect("the token").to_owned()
    };
    let (rights, none) = (token("-policy-name=locks"), token("-policy-name=others"));
    let of = |token: &str| {
        let url = format!("consul://:{token}@127.0.0.1:{}?namespace=shop", server.port());
        Dlock::builder().url(&url).wait(Duration::from_secs(5)).connect_lazy().expect("a client")
    };
    let dlock = of(&rights);
    let guard = dlock.mutex("a").lock().await.expect("the lock");
    assert!(!format!("{dlock:?}{guard:?}").contains(&rights));
    let operator = of(&rights);
    assert_eq!(operator.break_lock("a").await.expect("the rights suffice"), 1);
    tokio::time::timeout(Duration::from_secs(20), guard.lost()).await.expect("it is told");
    for bad in [none.as_str(), "00000000-0000-0000-0000-00000000dead"] {
        let error = of(bad).mutex("b").lock().await.expect_err("no rights");
        assert_eq!(error.kind(), ErrorKind::Denied, "{error}");
        assert!(!format!("{error:?}{error}").contains(bad), "{error}");
        assert!(error.to_string().contains("docs/consul.md"), "{error}");
    }
    // A file instead of the URL.
    let file = server.path("token");
    std::fs::write(&file, format!("{rights}\n")).expect("a file");
    let url = format!("consul://127.0.0.1:{}?namespace=shop&password_file={file}", server.port());
    let dlock = Dlock::builder().url(&url).connect_lazy().expect("a client");
    drop(dlock.mutex("c").lock().await.expect("the lock"));
}

/// The token in the file is replaced, and the old one is removed: a held lock stays held, and
/// others are taken.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_rotated_token_is_read_again() {
    const ROOT: &str = "6c1f8a44-9d11-4b5e-8b6a-0f2f3f0e8f11";
    let Some(server) = ConsulServer::with_token(ROOT) else { return };
    let rules = r#"session_prefix "" { policy = "write" } key_prefix "" { policy = "write" }"#;
    let rules = format!("-rules={rules}");
    server.run(&["acl", "policy", "create", "-name=locks", &rules]).expect("a policy");
    let token = || {
        let words = ["acl", "token", "create", "-format=json", "-policy-name=locks"];
        let made = server.run(&words).expect("a token");
        let made: serde_json::Value = serde_json::from_str(&made).expect("JSON");
        ["SecretID", "AccessorID"].map(|name| made[name].as_str().expect("an id").to_owned())
    };
    let (old, new) = (token(), token());
    let file = server.path("token");
    std::fs::write(&file, &old[0]).expect("a file");
    let url = format!("{}&ttl=6s&password_file={file}", server.url());
    let dlock = Dlock::builder().url(&url).wait(Duration::from_secs(5)).connect_lazy();
    let dlock = dlock.expect("a client");
    let guard = dlock.mutex("a").lock().await.expect("the lock");
    let lock = dlock.mutex("a").wait(Duration::from_secs(30));
    std::fs::write(&file, &new[0]).expect("a file");
    server.run(&["acl", "token", "delete", "-accessor-id", &old[1]]).expect("removed");
    drop(dlock.mutex("b").lock().await.expect("the lock, with the new token"));
    tokio::time::sleep(Duration::from_secs(7)).await;
    assert_eq!(guard.state(), dlock::State::Held);
    // The queries that wait have the new token too.
    let waiting = tokio::spawn(async move { lock.lock().await.map(drop) });
    eventually("it waits", async || dlock.local_state().waiting.len() == 1).await;
    assert_eq!(guard.release().await.expect("an answer"), ReleaseOutcome::Released);
    waiting.await.expect("the task").expect("the lock");
    let error = {
        std::fs::write(&file, "00000000-0000-0000-0000-00000000dead").expect("a file");
        server.run(&["acl", "token", "delete", "-accessor-id", &new[1]]).expect("removed");
        dlock.mutex("c").lock().await.expect_err("no token is right")
    };
    assert_eq!(error.kind(), ErrorKind::Denied, "{error}");
}

/// TLS needs the authority of the server, and the server the certificate of the client.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn tls_is_asked_for() {
    let Some(server) = ConsulServer::with_tls() else { return };
    let (port, ca) = (server.tls_port(), server.path("ca.pem"));
    let cert = format!(
        "&tls_cert={}&tls_key={}",
        server.path("client.pem"),
        server.path("client-key.pem")
    );
    let on = |options: &str| {
        let url = format!("consuls://127.0.0.1:{port}?wait=3s{options}");
        Dlock::builder().url(&url).connect_lazy().expect("a client")
    };
    let dlock = on(&format!("&tls_ca={ca}{cert}"));
    let guard = dlock.mutex("a").lock().await.expect("the lock");
    assert_eq!(guard.release().await.expect("an answer"), ReleaseOutcome::Released);
    for bad in [format!("&tls_ca={ca}"), cert] {
        let error = on(&bad).mutex("a").try_lock().await.expect_err("not trusted");
        assert!(error.kind().is_retryable() || error.kind() == ErrorKind::Config, "{error}");
        assert!(error.to_string().contains("127.0.0.1"), "{error}");
    }
    let url = format!("consul://127.0.0.1:{}?tls_ca={ca}", server.port());
    let error = Dlock::builder().url(&url).connect_lazy().expect_err("no TLS");
    assert!(error.to_string().contains("consuls://"), "{error}");
}

/// The datacenter is that of the URL; one that there is not is told.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_datacenter_is_that_of_the_url() {
    let Some(server) = ConsulServer::start() else { return };
    let dlock = client(&server, "&consul.datacenter=dc1");
    drop(dlock.mutex("a").lock().await.expect("the lock"));
    let nowhere = client(&server, "&consul.datacenter=nowhere");
    let error = nowhere.mutex("a").lock().await.expect_err("there is no such datacenter");
    assert_eq!(error.kind(), ErrorKind::Config, "{error}");
    assert!(error.to_string().contains("consul.datacenter"), "{error}");
}

/// Permits are sessions; those of other programs count, and another number of permits is
/// refused.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn permits_are_shared_with_consul_lock() {
    let Some(server) = ConsulServer::start() else { return };
    let dlock = client(&server, "&layout=lock-key&ttl=20s");
    let two = dlock.semaphore("pool", 3).permits(2).lock().await.expect("permits");
    let more = ["lock", "-n=3", "-try=30s", "-shell=false", "pool", "true"];
    server.run(&more).expect("the third permit");
    let one = dlock.semaphore("pool", 3).permits(1).lock().await.expect("the third permit");
    let full = ["lock", "-n=3", "-try=1s", "-shell=false", "pool", "true"];
    assert!(server.run(&full).is_err(), "there are three permits");
    let error = dlock.semaphore("pool", 4).permits(1).lock().await.expect_err("another number");
    assert_eq!(error.kind(), ErrorKind::Invalid, "{error}");
    let state = dlock.inspect("pool").await.expect("an inspection");
    assert_eq!(state.holders.len(), 2, "{state:?}");
    assert_eq!(two.release().await.expect("an answer"), ReleaseOutcome::Released);
    assert_eq!(one.release().await.expect("an answer"), ReleaseOutcome::Released);
    let semaphore = "pool/.lock".to_owned();
    assert!(!server.keys().contains(&semaphore), "nothing is left");
    // The session of a permit ends: its guard knows at once.
    let lost = dlock.semaphore("pool", 3).permits(2).lock().await.expect("permits");
    let value = server.run(&["kv", "get", &semaphore]).expect("the semaphore");
    let value: serde_json::Value = serde_json::from_str(&value).expect("JSON");
    let session = value["Holders"].as_object().and_then(|it| it.keys().next()).expect("a holder");
    server.http("PUT", &format!("/v1/session/destroy/{session}"));
    tokio::time::timeout(Duration::from_secs(5), lost.lost()).await.expect("it is told");
    let is_gone = async || !server.keys().contains(&semaphore);
    eventually("the other permit is given back", is_gone).await;
}
