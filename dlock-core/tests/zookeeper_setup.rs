//! How a client reaches ZooKeeper: as a user, whose nodes are for this user alone.

use std::time::Duration;

use dlock::{Dlock, ErrorKind, ReleaseOutcome};
use dlock_testkit::session_servers::SessionServer as _;
use dlock_testkit::zookeeper::ZooKeeperServer;

fn client(server: &ZooKeeperServer, user: &str) -> Dlock {
    let url = format!("zookeeper://{user}127.0.0.1:{}/shop?ttl=4s", server.port());
    Dlock::builder().url(&url).wait(Duration::from_secs(20)).connect_lazy().expect("a client")
}

/// The locks of a user are taken and waited for by clients with that user, and refused to
/// others with an error that tells no password.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_nodes_of_a_user_are_for_this_user_alone() {
    let Some(server) = ZooKeeperServer::start() else { return };
    let (one, two) = (client(&server, "me:open-sesame@"), client(&server, "me:open-sesame@"));
    let guard = one.mutex("a").lock().await.expect("the lock");
    let lock = two.mutex("a");
    let waiting = tokio::spawn(async move { lock.lock().await.map(|guard| guard.token()) });
    let token = guard.token();
    assert_eq!(guard.release().await.expect("an answer"), ReleaseOutcome::Released);
    assert!(waiting.await.expect("the task").expect("the lock") > token);
    let guard = one.mutex("a").lock().await.expect("the lock");
    assert_eq!(two.inspect("a").await.expect("a look").holders.len(), 1);
    assert!(!format!("{one:?}{guard:?}").contains("open-sesame"));
    for user in ["me:wrong-word@", "other:open-sesame@", ""] {
        let error = client(&server, user).mutex("a").lock().await.expect_err("no rights");
        assert_eq!(error.kind(), ErrorKind::Denied, "{user}: {error}");
        let told = format!("{error:?}{error}");
        assert!(!told.contains("open-sesame") && !told.contains("wrong-word"), "{told}");
    }
    assert_eq!(guard.release().await.expect("an answer"), ReleaseOutcome::Released);
}

/// The password file is read for each session. Another password is another identity, to
/// which the nodes of before do not belong.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_new_session_has_the_password_of_the_file() {
    let Some(server) = ZooKeeperServer::start() else { return };
    let file = std::env::temp_dir().join(format!("dlock-password-{}", server.port()));
    std::fs::write(&file, "first\n").expect("a file");
    let url = format!("zookeeper://me@127.0.0.1:{}/shop?ttl=4s", server.port());
    let builder = Dlock::builder().url(&url).password_file(&file).wait(Duration::from_secs(20));
    let dlock = builder.connect_lazy().expect("a client");
    let guard = dlock.mutex("a").lock().await.expect("the lock");
    std::fs::write(&file, "second").expect("a file");
    drop(client(&server, "me:first@").mutex("b").lock().await.expect("the same identity"));
    tokio::task::block_in_place(|| server.end_sessions());
    guard.lost().await;
    let error = dlock.mutex("a").lock().await.expect_err("another identity");
    assert_eq!(error.kind(), ErrorKind::Denied, "{error}");
    let _ = std::fs::remove_file(&file);
}

/// There is no TLS to ZooKeeper, and that is said rather than left out.
#[test]
fn files_of_tls_are_refused() {
    let url = "zookeeper://127.0.0.1?tls_ca=/etc/ca.pem";
    let error = Dlock::builder().url(url).connect_lazy().expect_err("no TLS");
    assert_eq!(error.kind(), ErrorKind::Config, "{error}");
    assert!(error.to_string().contains("need TLS"), "{error}");
}
