//! Rows of the list of faults on a real ZooKeeper.

use std::time::{Duration, Instant};

use dlock::{Dlock, State};
use dlock_testkit::proxy::Proxy;
use dlock_testkit::session_faults;
use dlock_testkit::zookeeper::{ZooKeeperEnsemble, ZooKeeperServer};

session_faults!(ZooKeeperServer:
    row_01_a_paused_holder_is_lost_and_its_successor_untouched,
    row_04_an_entry_whose_answer_was_lost_is_found_again,
    row_05_an_entry_that_nobody_wants_any_more_is_removed,
    row_07_a_half_open_connection_is_left,
    row_11_and_23_a_killed_process_holds_nobody_up,
    row_12_a_blocked_executor_loses_no_lock,
    row_18_a_session_ended_from_outside_is_told_to_all_guards,
    row_18_a_session_that_expires_is_lost_by_its_deadline,
    row_25_a_rolling_restart_never_has_two_holders,
    a_waiter_survives_the_end_of_its_session,
);

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_leader_is_killed_under_load() {
    session_faults::the_leader_is_killed_under_load(ZooKeeperEnsemble::start()).await;
}

fn client(url: &str) -> Dlock {
    let builder = Dlock::builder().url(url).namespace("test").ttl(Duration::from_secs(2));
    builder.wait(Duration::from_secs(30)).connect_lazy().expect("a client")
}

/// A follower that is cut off answers reads while the leader lets the session expire: the
/// guard is lost before its successor is granted.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_holder_on_a_cut_off_follower_is_lost_in_time() {
    let Some((ensemble, link)) = ZooKeeperEnsemble::start_with_link() else { return };
    let cut_off = client(&ensemble.servers[2].url());
    let other = client(&ensemble.servers[ensemble.leader()].url());
    let guard = cut_off.mutex("a").lock().await.expect("the lock");
    let token = guard.token();
    let successor = tokio::spawn(async move {
        let guard = other.mutex("a").lock().await.expect("the lock");
        (Instant::now(), guard)
    });
    tokio::time::sleep(Duration::from_millis(300)).await;
    assert_eq!(guard.state(), State::Held);
    link.iter().for_each(Proxy::go_silent);
    guard.lost().await;
    let lost = Instant::now();
    let (granted, successor) = successor.await.expect("the task");
    assert!(granted >= lost, "granted {:?} before the loss", lost.duration_since(granted));
    assert!(successor.token() > token);
}
