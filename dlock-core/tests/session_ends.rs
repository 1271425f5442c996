//! A session that somebody ends from outside is told to every guard within a second, on each
//! store whose locks live by a session.

use std::time::{Duration, Instant};

use dlock::{Dlock, LossReason, ReleaseOutcome, State};
use dlock_testkit::consul::ConsulServer;
use dlock_testkit::etcd::EtcdServer;
use dlock_testkit::zookeeper::ZooKeeperServer;
use tokio::time::timeout;

/// The guards of the session.
const GUARDS: usize = 10;
/// How often a session is ended. A busy machine may delay one or another.
const ROUNDS: usize = 3;
/// A second, and as much again for a busy machine.
const AT_ONCE: Duration = Duration::from_secs(2);

/// Ends the session of a client some times, and checks that the guards know it at once, and
/// that the client goes on with another session.
async fn is_told_at_once(url: &str, end: impl Fn()) {
    let dlock = Dlock::builder().url(url).wait(Duration::from_secs(60)).connect_lazy();
    let dlock = dlock.expect("a client");
    let mut shortest = Duration::MAX;
    for _ in 0..ROUNDS {
        let mut guards = Vec::new();
        for n in 0..GUARDS {
            guards.push(dlock.mutex(format!("told-{n}")).lock().await.expect("the lock"));
        }
        let began = Instant::now();
        end();
        for guard in &guards {
            let reason = timeout(Duration::from_secs(60), guard.lost()).await.expect("it is told");
            assert_eq!(reason, LossReason::SessionLost);
            assert_eq!(guard.state(), State::Lost);
        }
        println!("all guards know it after {:?}", began.elapsed());
        shortest = shortest.min(began.elapsed());
        let again = dlock.mutex("told-0").lock().await.expect("the lock, by a new session");
        assert!(again.token() > guards[0].token());
        for guard in guards {
            assert_eq!(guard.release().await.expect("an answer"), ReleaseOutcome::AlreadyLost);
        }
        assert_eq!(again.state(), State::Held, "no release touches the successor");
        assert_eq!(again.release().await.expect("an answer"), ReleaseOutcome::Released);
    }
    assert!(shortest < AT_ONCE, "{shortest:?}");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_session_of_consul_that_is_destroyed() {
    let Some(server) = ConsulServer::start() else { return };
    // A renewal would see it after nearly seven seconds.
    is_told_at_once(&format!("{}&ttl=20s", server.url()), || server.destroy_sessions()).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_lease_of_etcd_that_is_revoked() {
    let Some(server) = EtcdServer::start() else { return };
    // A keep-alive would see it after four seconds.
    is_told_at_once(&format!("{}?ttl=20s", server.url()), || server.revoke_leases()).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_session_of_zookeeper_that_is_closed() {
    let Some(server) = ZooKeeperServer::start() else { return };
    // The longest session that the server has: its guards would be lost after 2.6 s.
    is_told_at_once(&format!("{}?ttl=4s", server.url()), || server.end_sessions()).await;
}
