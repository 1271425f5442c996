//! Locks at a majority of independent Redis servers: conformance, faults of some of the
//! nodes, and errors that say what to change.

use std::time::{Duration, Instant};

use dlock::backend::redis::RedLock;
use dlock::{Config, Dlock, ErrorKind, LossReason, ReleaseOutcome, State};
use dlock_testkit::conformance::{Suite, eventually};
use dlock_testkit::failover::Load;
use dlock_testkit::process::now;
use dlock_testkit::proxy::{Proxy, Way};
use dlock_testkit::redis::{Clock, RedisServer, client};
use dlock_testkit::topology::{ClusterServers, QuorumServers};

/// The longest ttl of these tests.
const MAX_TTL: Duration = Duration::from_secs(2);
/// How long a node that has lost its data does not vote then, and a little more.
const SILENCE: Duration = Duration::from_millis(6_300);

fn patient(url: &str) -> Dlock {
    let builder = client(url).ttl(Duration::from_millis(1_500)).wait(Duration::from_secs(20));
    builder.connect_lazy().expect("a client")
}

/// Runs what blocks the thread beside the tasks of the test.
fn blocking<T>(what: impl FnOnce() -> T) -> T {
    tokio::task::block_in_place(what)
}

/// Checks that nothing is left at the nodes: no lock, no place among those who wait.
async fn nothing_is_left(servers: &QuorumServers) {
    for node in &servers.nodes {
        eventually("nothing is left", async || {
            blocking(|| node.keys()).iter().all(|key| key.ends_with("{test}:v"))
        })
        .await;
    }
}

/// A node of another layout has no vote; with a majority of them there is no lock.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn nodes_of_another_layout_do_not_vote() {
    let Some(servers) = QuorumServers::start(3, Duration::from_secs(60)).await else { return };
    let mark = |node: &RedisServer| blocking(|| node.cli(&["SET", "dlock:layout:test", "3"]));
    assert_eq!(mark(&servers.nodes[0]), "OK");
    drop(patient(&servers.url()).mutex("a").lock().await.expect("a majority"));
    assert_eq!(mark(&servers.nodes[1]), "OK");
    let error = patient(&servers.url()).mutex("a").try_lock().await.expect_err("refused");
    assert!(error.to_string().contains("layout"), "{error}");
    assert_eq!(error.kind(), ErrorKind::Config, "{error}");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn conformance_with_the_least_rights() {
    let Some(servers) = QuorumServers::start(5, Duration::from_secs(60)).await else { return };
    let rights = include_str!("../../docs/redis-redlock.acl");
    let lines = rights.lines().filter(|line| !line.starts_with('#'));
    let rights: Vec<&str> = lines.flat_map(str::split_whitespace).collect();
    for node in &servers.nodes {
        let command = [&["ACL", "SETUSER", "dlock", "reset", "on", ">secret"], &rights[..]];
        assert_eq!(blocking(|| node.cli(&command.concat())), "OK");
        blocking(|| node.cli(&["ACL", "SETUSER", "dlock", "+client|setinfo"])); // from 7.2 on
    }
    let url = servers.url().replace("://", "://dlock:secret@");
    Suite::new(move || RedLock::new(&url, "test").expect("a URL")).run().await;
    nothing_is_left(&servers).await;
    for node in &servers.nodes {
        let denied = blocking(|| node.cli(&["ACL", "LOG"]));
        assert!(!denied.contains("dlock"), "{denied}");
    }
}

/// What is done to two of five nodes, and undone.
#[derive(Clone, Copy, Debug)]
enum NodeFault {
    Killed,
    Paused,
    RestartedEmpty,
    Flushed,
}

fn inject(node: &mut RedisServer, fault: NodeFault) {
    match fault {
        NodeFault::Killed => node.kill(),
        NodeFault::Paused => node.pause(),
        NodeFault::RestartedEmpty => node.restart(),
        NodeFault::Flushed => drop(node.cli(&["FLUSHALL"])),
    }
}

fn mend(node: &mut RedisServer, fault: NodeFault) {
    match fault {
        NodeFault::Killed => node.restart(),
        NodeFault::Paused => node.resume(),
        NodeFault::RestartedEmpty | NodeFault::Flushed => {}
    }
}

/// Two of five nodes fail in every way under load: everybody goes on, and nothing is held
/// twice.
#[tokio::test(flavor = "multi_thread", worker_threads = 4)]
async fn row_17_two_of_five_nodes_fail() {
    let Some(mut servers) = QuorumServers::start(5, MAX_TTL).await else { return };
    let clients: Vec<_> = (0..3).map(|_| patient(&servers.url())).collect();
    let load = Load::start(&clients, 8, 6);
    load.keys_granted_since(now()).await;
    let pairs =
        [[NodeFault::Killed, NodeFault::Paused], [NodeFault::RestartedEmpty, NodeFault::Flushed]];
    for (round, pair) in pairs.into_iter().enumerate() {
        let hit = || pair.into_iter().enumerate().map(|(n, fault)| (2 * round + n, fault));
        blocking(|| hit().for_each(|(node, fault)| inject(&mut servers.nodes[node], fault)));
        for _ in 0..3 {
            let took = load.keys_granted_since(now()).await;
            println!("{pair:?}: every key was granted after {took:?}");
            assert!(took < Duration::from_secs(5), "{pair:?}: {took:?}");
            tokio::time::sleep(Duration::from_millis(300)).await;
        }
        blocking(|| hit().for_each(|(node, fault)| mend(&mut servers.nodes[node], fault)));
        if round == 0 {
            // Others are hit next: these must vote again by then.
            tokio::time::sleep(SILENCE).await;
        }
    }
    let report = load.stop().await;
    println!("{} locks held", report.checked);
    assert_eq!(report.violations, Vec::<String>::new());
    assert_eq!(report.excused, 0);
    assert_eq!(report.errors, Vec::<String>::new());
    assert!(report.checked > 500, "{}", report.checked);
    drop(clients);
    nothing_is_left(&servers).await;
}

/// Two of five nodes answer two seconds late: nobody waits for them.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn row_17_two_slow_nodes_delay_nobody() {
    let Some(servers) = QuorumServers::start(5, MAX_TTL).await else { return };
    let (one, two) =
        (Proxy::start(servers.nodes[0].port()).await, Proxy::start(servers.nodes[1].port()).await);
    let mut ports: Vec<u16> = servers.nodes.iter().map(RedisServer::port).collect();
    (ports[0], ports[1]) = (one.port(), two.port());
    let client = patient(&servers.url_of(&ports));
    drop(client.mutex("warm").lock().await.expect("the lock"));
    for proxy in [&one, &two] {
        proxy.delay(Way::ToClient, Duration::from_secs(2));
    }
    let mut slowest = Duration::ZERO;
    for n in 0..50 {
        let began = Instant::now();
        let guard = client.mutex(format!("key:{n}")).lock().await.expect("the lock");
        assert_eq!(guard.release().await.expect("an answer"), ReleaseOutcome::Released);
        slowest = slowest.max(began.elapsed());
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
    assert!(slowest < Duration::from_millis(1_900), "{slowest:?}");
    let held = client.mutex("held").lock().await.expect("the lock");
    tokio::time::sleep(Duration::from_secs(4)).await;
    assert_eq!(held.state(), State::Held, "renewed by the other three");
}

/// Three of five nodes are gone: the error is typed, and comes within the wait.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn row_17_three_nodes_down_is_an_error_in_time() {
    let Some(mut servers) = QuorumServers::start(5, MAX_TTL).await else { return };
    let client = patient(&servers.url());
    let other = patient(&servers.url());
    let held = client.mutex("held").lock().await.expect("the lock");
    drop(other.mutex("warm").lock().await.expect("the lock"));
    for paused in [false, true] {
        for node in &mut servers.nodes[..3] {
            if paused { node.pause() } else { blocking(|| node.kill()) }
        }
        let began = Instant::now();
        let lock = client.mutex("other").wait(Duration::from_secs(3));
        let error = lock.lock().await.expect_err("no majority");
        assert!(began.elapsed() < Duration::from_millis(3_500), "{:?}", began.elapsed());
        assert_eq!(error.kind(), ErrorKind::Unavailable, "{error}");
        assert!(error.to_string().contains("3 of 5 nodes must agree"), "{error}");
        // Two nodes may say that it is taken: nobody knows whether it is.
        for _ in 0..if paused { 1 } else { 20 } {
            let error = other.mutex("held").try_lock().await.map(drop).expect_err("no majority");
            assert_eq!(error.kind(), ErrorKind::Unavailable, "{error}");
        }
        if paused {
            servers.nodes[..3].iter().for_each(RedisServer::resume);
        } else {
            assert_eq!(held.lost().await, LossReason::Deadline);
            for node in &mut servers.nodes[..3] {
                blocking(|| node.restart());
            }
            tokio::time::sleep(SILENCE).await;
        }
    }
    drop(client.mutex("other").lock().await.expect("the lock, when they are back"));
}

/// A majority forgets a lock that is held. Nobody else gets it before its holder has lost it.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_majority_that_lost_its_data_does_not_vote() {
    let Some(mut servers) = QuorumServers::start(3, MAX_TTL).await else { return };
    let (one, two) = (patient(&servers.url()), patient(&servers.url()));
    let held = one.mutex("a").lock().await.expect("the lock");
    drop(two.mutex("b").lock().await.expect("the lock"));
    blocking(|| servers.nodes[0].cli(&["FLUSHALL"]));
    blocking(|| servers.nodes[1].restart());
    let began = Instant::now();
    // The third says that it is taken, but it is not a majority.
    let error = two.mutex("a").try_lock().await.map(drop).expect_err("they do not vote");
    assert_eq!(error.kind(), ErrorKind::Unavailable, "{error}");
    let error = two.mutex("free").try_lock().await.expect_err("they do not vote");
    assert_eq!(error.kind(), ErrorKind::Unavailable, "{error}");
    assert!(error.to_string().contains("vote again in"), "{error}");
    let token = held.token();
    assert_eq!(held.lost().await, LossReason::Deadline);
    let next = two.mutex("a").lock().await.expect("the lock, when they vote again");
    assert!(began.elapsed() > MAX_TTL, "{:?}", began.elapsed());
    assert!(next.token() > token);
}

/// A lock is held on while its nodes are restarted one after the other.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_held_lock_survives_that_every_node_is_restarted() {
    let Some(mut servers) = QuorumServers::start(3, MAX_TTL).await else { return };
    let client = patient(&servers.url());
    let held = client.mutex("a").lock().await.expect("the lock");
    for node in 0..3 {
        blocking(|| servers.nodes[node].restart());
        tokio::time::sleep(SILENCE + Duration::from_secs(1)).await;
        assert_eq!(held.state(), State::Held, "node {node}");
    }
    assert_eq!(held.release().await.expect("an answer"), ReleaseOutcome::Released);
    nothing_is_left(&servers).await;
}

/// Nodes that did not answer an acquire give it back when they are reached again, long
/// before its ttl is over.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn row_21_nodes_that_did_not_answer_give_it_back() {
    let Some(servers) = QuorumServers::start(5, Duration::from_secs(60)).await else { return };
    let client = patient(&servers.url());
    drop(client.mutex("warm").lock().await.expect("the lock"));
    for pause in [Duration::from_millis(100), Duration::from_secs(4)] {
        servers.nodes[..2].iter().for_each(RedisServer::pause);
        let guard = client.mutex("a").ttl(Duration::from_secs(60)).lock().await.expect("the lock");
        assert_eq!(guard.release().await.expect("an answer"), ReleaseOutcome::Released);
        tokio::time::sleep(pause).await;
        servers.nodes[..2].iter().for_each(RedisServer::resume);
        nothing_is_left(&servers).await;
    }
}

/// A node that voted is stopped, and others have lost the lease: the release is answered when
/// a majority has answered it. The same without the stopped node is the control.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_stopped_node_delays_no_release() {
    const CALL_TIMEOUT: Duration = Duration::from_secs(30);
    let max_ttl = Duration::from_secs(60);
    let Some(servers) = QuorumServers::start(5, max_ttl).await else { return };
    let builder = client(&servers.url()).ttl(max_ttl).call_timeout(CALL_TIMEOUT);
    let client = builder.connect_lazy().expect("a client");
    let mut took = Vec::new();
    for stopped in [false, true] {
        let guard = client.mutex("a").lock().await.expect("the lock");
        eventually("all have voted", async || {
            let has = |node: &RedisServer| node.cli(&["STRLEN", "dlock:2:{test:a}:q"]) != "0";
            blocking(|| servers.nodes.iter().all(has))
        })
        .await;
        for node in &servers.nodes[3..] {
            blocking(|| node.cli(&["DEL", "dlock:2:{test:a}:q"]));
        }
        if stopped {
            servers.nodes[2].pause();
        }
        let began = Instant::now();
        assert_eq!(guard.release().await.expect("an answer"), ReleaseOutcome::Released);
        took.push(began.elapsed());
    }
    servers.nodes[2].resume();
    println!("released after {:?}, and after {:?} with a stopped node", took[0], took[1]);
    assert!(took[1] < took[0] + CALL_TIMEOUT / 2, "{took:?}");
    nothing_is_left(&servers).await;
}

/// Processes take turns on a hot key, and each gets its share.
#[tokio::test(flavor = "multi_thread", worker_threads = 4)]
async fn a_hot_key_is_shared_between_processes() {
    let Some(servers) = QuorumServers::start(5, MAX_TTL).await else { return };
    let clients: Vec<_> = (0..3).map(|_| patient(&servers.url())).collect();
    let load = Load::start(&clients, 10, 1);
    let began = Instant::now();
    while began.elapsed() < Duration::from_secs(3) {
        let took = load.clients_served_since(now()).await;
        assert!(took < Duration::from_secs(3), "{took:?}");
    }
    let report = load.stop().await;
    println!("{} locks held", report.checked);
    assert_eq!(report.violations, Vec::<String>::new());
    assert_eq!(report.errors, Vec::<String>::new());
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn new_nodes_say_why_they_do_not_vote() {
    let Some(servers) = QuorumServers::unprepared(3, MAX_TTL) else { return };
    let client = patient(&servers.url());
    let error = client.mutex("a").try_lock().await.expect_err("they do not vote yet");
    assert!(error.to_string().contains("dlock schema"), "{error}");
    let states = client.servers().await.expect("the nodes");
    assert!(states.iter().all(|it| it.note.as_ref().is_some_and(|it| it.contains("votes in"))));
    // Who waits gets it when they vote.
    drop(client.mutex("a").lock().await.expect("the lock"));
    let states = client.servers().await.expect("the nodes");
    assert!(states.iter().all(|it| it.note.is_none()), "{states:?}");
}

/// Nodes are emptied one after the other, as by a rollout of servers without persistence,
/// and each time somebody says that the nodes are new, as a hook of a deployment does. They
/// are not, so nobody else gets what is held.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn nodes_that_were_emptied_are_not_prepared_again() {
    let long = Duration::from_secs(60);
    let Some(servers) = QuorumServers::start(5, long).await else { return };
    let (one, two) = (patient(&servers.url()), patient(&servers.url()));
    let held = one.mutex("a").ttl(long).lock().await.expect("the lock");
    drop(two.mutex("b").lock().await.expect("the lock"));
    let mut config = Config::from_url(&servers.url()).expect("a URL");
    config.namespace = Some("test".into());
    assert_eq!(RedLock::prepare_new_nodes(&config).await.expect("once more"), Duration::ZERO);
    for node in &servers.nodes[..3] {
        blocking(|| node.cli(&["FLUSHALL"]));
        let votes_in = RedLock::prepare_new_nodes(&config).await.expect("an answer");
        assert!(votes_in > long, "{votes_in:?}");
    }
    assert!(two.mutex("a").try_lock().await.map(drop).is_err(), "three of five do not vote");
    assert_eq!(held.state(), State::Held);
}

/// A program met the nodes before they were prepared, so they stay silent; and that is told.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn nodes_that_a_program_has_met_are_not_called_prepared() {
    let Some(servers) = QuorumServers::unprepared(3, MAX_TTL) else { return };
    let client = patient(&servers.url());
    assert!(client.mutex("a").try_lock().await.map(drop).is_err());
    let mut config = Config::from_url(&servers.url()).expect("a URL");
    config.namespace = Some("test".into());
    let votes_in = RedLock::prepare_new_nodes(&config).await.expect("an answer");
    assert!(votes_in > Duration::ZERO && votes_in <= SILENCE, "{votes_in:?}");
    drop(client.mutex("a").lock().await.expect("the lock, when they vote"));
    assert_eq!(RedLock::prepare_new_nodes(&config).await.expect("they vote"), Duration::ZERO);
}

/// A node whose clock is off does not vote; `health` names it, since all works without it.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_node_whose_clock_is_off_is_named() {
    let Some(servers) = QuorumServers::unprepared(2, MAX_TTL) else { return };
    let Some((third, clock)) = Clock::of_a_server() else { return };
    let mut ports: Vec<u16> = servers.nodes.iter().map(RedisServer::port).collect();
    ports.push(third.port());
    let client = patient(&servers.url_of(&ports));
    drop(client.mutex("a").lock().await.expect("the lock"));
    let note = async || client.servers().await.expect("the nodes").remove(2).note;
    clock.ahead(Duration::from_secs(5));
    let said = note().await.expect("a note");
    assert!(said.contains("s ahead of that of the others"), "{said}");
    drop(client.mutex("a").lock().await.expect("the lock, by the two others"));
    clock.ahead(Duration::ZERO);
    eventually("nothing is wrong any more", async || note().await.is_none()).await;
}

/// Checks that no client is made, and why.
async fn refused(url: &str, kind: ErrorKind, advice: &str) {
    let error = client(url).ttl(Duration::from_secs(1)).connect().await.expect_err("refused");
    assert_eq!(error.kind(), kind, "{error}");
    assert!(error.to_string().contains(advice), "no {advice:?} in: {error}");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn bad_input_says_what_to_change() {
    refused("redlock://h1,h2", ErrorKind::Config, "three nodes or more").await;
    refused("redlock://h1,h2,h1", ErrorKind::Config, "named twice").await;
    refused("redlock://h1,h2,h3/x", ErrorKind::Config, "number of a database").await;
    refused("redlock://h1,h2,h3?max_ttl=500ms", ErrorKind::Config, "`max_ttl`").await;
    refused("redis://h1?max_ttl=5s", ErrorKind::Config, "is for a redlock://").await;
    refused("redlock://h1,h2,h3?min_replicas=1", ErrorKind::Config, "`min_replicas`").await;
    let Some(servers) = QuorumServers::start(3, MAX_TTL).await else { return };
    let ports: Vec<u16> = servers.nodes.iter().map(RedisServer::port).collect();
    // Two names of one server.
    let url = servers.url().replacen("127.0.0.1", "localhost", 1);
    let url = url.replacen(&ports[1].to_string(), &ports[0].to_string(), 1);
    refused(&url, ErrorKind::Config, "are the same server").await;
    // Another longest ttl.
    let url = servers.url().replace("max_ttl=2000ms", "max_ttl=9s");
    refused(&url, ErrorKind::Config, "the longest ttl is 2s").await;
    // One wrong node among three.
    let Some(cluster) = ClusterServers::with(3, 0, &[]) else { return };
    let url = servers.url_of(&[ports[0], ports[1], cluster.nodes[0].port()]);
    refused(&url, ErrorKind::Config, "node of a Redis Cluster").await;
    // A majority is not there.
    let url = servers.url_of(&[ports[0], 1, 2]);
    refused(&url, ErrorKind::Unavailable, "1 of 3 nodes answer").await;
    // One node that is not there does no harm.
    let url = servers.url_of(&[ports[0], ports[1], 1]);
    let client = client(&url).connect().await.expect("a client");
    drop(client.mutex("a").lock().await.expect("the lock"));
    let error = client.mutex("a").ttl(Duration::from_secs(3)).lock().await.expect_err("too long");
    assert_eq!(error.kind(), ErrorKind::Invalid, "{error}");
    for unsupported in [
        client.mutex("a").fair().lock().await.map(drop).expect_err("fair"),
        client.rwlock("a").read().lock().await.map(drop).expect_err("shared"),
        client.semaphore("a", 2).permits(1).lock().await.map(drop).expect_err("permits"),
        client.break_lock("a").await.map(drop).expect_err("break"),
    ] {
        assert_eq!(unsupported.kind(), ErrorKind::Unsupported, "{unsupported}");
    }
}
