//! How a client reaches etcd: by TLS, as a user with rights, and when a member is removed.

mod certificates;

use std::time::{Duration, Instant};

use dlock::{Dlock, ErrorKind, ReleaseOutcome, State};
use dlock_testkit::etcd::{EtcdCluster, EtcdServer};
use serde_json::{Value, json};

use self::certificates::Certificates;

fn client(url: &str) -> Dlock {
    let builder = Dlock::builder().url(url).wait(Duration::from_secs(20));
    builder.connect_lazy().expect("a client")
}

/// What needs rights: a lock that is waited for, permits, and what operators do.
async fn works(dlock: &Dlock) {
    let guard = dlock.mutex("works").lock().await.expect("the lock");
    let lock = dlock.mutex("works").fair();
    let waiting = tokio::spawn(async move { lock.lock().await.map(|guard| guard.token()) });
    let token = guard.token();
    assert_eq!(guard.release().await.expect("an answer"), ReleaseOutcome::Released);
    assert!(waiting.await.expect("the task").expect("the lock") > token);
    let permit = dlock.semaphore("works", 2).permits(1).lock().await.expect("a permit");
    assert_eq!(permit.release().await.expect("an answer"), ReleaseOutcome::Released);
    let guard = dlock.mutex("works").lock().await.expect("the lock");
    let taken = guard.release_after(Duration::from_millis(10)).await.expect("an answer");
    assert_eq!(taken, ReleaseOutcome::Released);
    let guard = dlock.mutex("works").lock().await.expect("the lock");
    assert_eq!(dlock.inspect("works").await.expect("a look").holders.len(), 1);
    assert_eq!(dlock.break_lock("works").await.expect("the rights suffice"), 1);
    tokio::time::timeout(Duration::from_secs(30), guard.lost()).await.expect("it is told");
}

/// TLS needs the authority of the server, and the server the certificate of the client.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn tls_is_asked_for() {
    let certificates = Certificates::new();
    let path = |name: &str| certificates.path(name);
    let arguments = [
        format!("--trusted-ca-file={}", path("ca.pem")),
        format!("--cert-file={}", path("server.pem")),
        format!("--key-file={}", path("server.key")),
        "--client-cert-auth".to_owned(),
    ];
    let arguments: Vec<&str> = arguments.iter().map(String::as_str).collect();
    let Some((server, port)) = EtcdServer::start_with_tls(&arguments) else { return };
    let ca = format!("tls_ca={}", path("ca.pem"));
    let cert = format!("tls_cert={}&tls_key={}", path("client.pem"), path("client.key"));
    works(&client(&format!("etcds://localhost:{port}?{ca}&{cert}"))).await;
    // Without the certificate of the client, without the authority, and without TLS.
    for bad in [
        format!("etcds://localhost:{port}?{ca}&wait=3s"),
        format!("etcds://localhost:{port}?{cert}&wait=3s"),
        format!("etcd://localhost:{port}?wait=3s"),
    ] {
        let dlock = Dlock::builder().url(&bad).connect_lazy().expect("a client");
        let error = dlock.mutex("a").lock().await.expect_err("not trusted");
        assert!(!error.kind().is_retryable() || error.kind() == ErrorKind::Unavailable, "{error}");
    }
    let plain = format!("{}?{ca}", server.url());
    let error = Dlock::builder().url(&plain).connect_lazy().expect_err("no TLS");
    assert!(error.to_string().contains("etcds://"), "{error}");
}

/// The rights of the documentation suffice; others are refused, and no error tells a password.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn users_are_asked_for() {
    let Some(server) = EtcdServer::start() else { return };
    let ask = |path: &str, body: Value| {
        let answer = server.ask(path, &body);
        assert!(answer["error"].is_null() && !answer.is_null(), "{path}: {answer}");
    };
    for name in ["root", "dlock"] {
        ask("/v3/auth/user/add", json!({ "name": name, "password": "open-sesame" }));
        ask("/v3/auth/role/add", json!({ "name": name }));
        ask("/v3/auth/user/grant", json!({ "user": name, "role": name }));
    }
    // From `shop/` to `shop0`, in Base64: all keys with that prefix.
    let rights = json!({ "permType": "READWRITE", "key": "c2hvcC8=", "range_end": "c2hvcDA=" });
    ask("/v3/auth/role/grant", json!({ "name": "dlock", "perm": rights }));
    ask("/v3/auth/enable", json!({}));
    let of = |user: &str, path: &str| {
        client(&format!("etcd://{user}127.0.0.1:{}/{path}?wait=5s", server.port()))
    };
    let dlock = of("dlock:open-sesame@", "shop");
    works(&dlock).await;
    assert!(!format!("{dlock:?}").contains("open-sesame"));
    for (user, path) in
        [("dlock:open-sesame@", "stock"), ("dlock:wrong-word@", "shop"), ("", "shop")]
    {
        let error = of(user, path).mutex("a").lock().await.expect_err("no rights");
        assert_eq!(error.kind(), ErrorKind::Denied, "{user}{path}: {error}");
        let told = format!("{error:?}{error}");
        assert!(!told.contains("open-sesame") && !told.contains("wrong-word"), "{told}");
    }
}

/// The password in the file is replaced: the next connection logs in with it, and a held lock
/// stays held.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_changed_password_is_read_again() {
    let Some(server) = EtcdServer::start() else { return };
    for name in ["root", "dlock"] {
        server.ask("/v3/auth/user/add", &json!({ "name": name, "password": "first" }));
        server.ask("/v3/auth/role/add", &json!({ "name": name }));
        server.ask("/v3/auth/user/grant", &json!({ "user": name, "role": name }));
    }
    let rights = json!({ "permType": "READWRITE", "key": "c2hvcC8=", "range_end": "c2hvcDA=" });
    server.ask("/v3/auth/role/grant", &json!({ "name": "dlock", "perm": rights }));
    server.ask("/v3/auth/enable", &json!({}));
    let file = std::env::temp_dir().join(format!("dlock-password-{}", server.port()));
    std::fs::write(&file, "first\n").expect("a file");
    let url = format!("etcd://dlock@127.0.0.1:{}/shop?ttl=5s", server.port());
    let builder = Dlock::builder().url(&url).password_file(&file).wait(Duration::from_secs(20));
    let dlock = builder.connect_lazy().expect("a client");
    let guard = dlock.mutex("a").lock().await.expect("the lock");
    std::fs::write(&file, "second").expect("a file");
    let login = json!({ "name": "root", "password": "first" });
    let token = server.ask("/v3/auth/authenticate", &login)["token"].clone();
    let token = token.as_str().expect("a token");
    let change = json!({ "name": "dlock", "password": "second" });
    let answer = server.ask_as(token, "/v3/auth/user/changepw", &change);
    assert!(answer["header"].is_object(), "{answer}");
    let began = Instant::now();
    while began.elapsed() < Duration::from_secs(7) {
        assert_ne!(guard.state(), State::Lost, "after {:?}", began.elapsed());
        tokio::time::sleep(Duration::from_millis(50)).await;
    }
    drop(dlock.mutex("b").lock().await.expect("the lock, with the new password"));
    assert_eq!(guard.release().await.expect("an answer"), ReleaseOutcome::Released);
    let _ = std::fs::remove_file(&file);
}

/// Clients that know three members go on when one is removed, whichever they used.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_member_is_removed() {
    let Some(cluster) = EtcdCluster::start() else { return };
    let clients: Vec<Dlock> = (0..8).map(|_| client(&cluster.url())).collect();
    let mut guards = Vec::new();
    for (n, dlock) in clients.iter().enumerate() {
        guards.push(dlock.mutex(format!("k{n}")).lock().await.expect("the lock"));
    }
    let removed = cluster.leader();
    let other = &cluster.servers[(removed + 1) % 3];
    let list = other.ask("/v3/cluster/member/list", &json!({}));
    let of_port = format!("http://127.0.0.1:{}", cluster.servers[removed].port());
    let members = list["members"].as_array().expect("the members");
    let member = members.iter().find(|it| it["clientURLs"][0] == json!(of_port)).expect("it");
    let id = json!({ "ID": member["ID"] });
    // The cluster must have been healthy for some seconds.
    let began = Instant::now();
    loop {
        let answer = tokio::task::block_in_place(|| other.ask("/v3/cluster/member/remove", &id));
        if answer["members"].as_array().is_some_and(|members| members.len() == 2) {
            break;
        }
        assert!(began.elapsed() < Duration::from_secs(60), "{answer}");
        tokio::time::sleep(Duration::from_millis(200)).await;
    }
    for (n, (guard, dlock)) in guards.into_iter().zip(&clients).enumerate() {
        // Its member may be gone, and the others elect a leader: this waits for both.
        drop(dlock.mutex(format!("other-{n}")).lock().await.expect("the lock"));
        assert_ne!(guard.state(), State::Lost, "{n}");
        let token = guard.token();
        assert_eq!(guard.release().await.expect("an answer"), ReleaseOutcome::Released, "{n}");
        let again = dlock.mutex(format!("k{n}")).lock().await.expect("the lock");
        assert!(again.token() > token);
    }
}
