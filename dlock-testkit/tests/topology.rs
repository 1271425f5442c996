//! The topologies of real servers do what their tests rely on.

use std::time::Duration;

use dlock_testkit::topology::{
    ClusterServers, SentinelServers, allow_replication, block_replication, independent,
};

/// How long a server may be silent before it counts as down, when none is down.
const PATIENCE: Duration = Duration::from_secs(20);

fn count(said: &str) -> usize {
    said.parse().unwrap_or_else(|_| panic!("not a number: {said}"))
}

#[test]
fn sentinels_promote_a_replica() {
    let Some(mut topology) = SentinelServers::start() else { return };
    // On a busy machine a server that lives may be silent for half a second.
    topology.set_down_after(PATIENCE);
    topology.settle();
    let first = topology.primary();
    assert_eq!(topology.servers[first].cli(&["SET", "a", "1"]), "OK");
    assert_eq!(count(&topology.servers[first].cli(&["WAIT", "2", "20000"])), 2);
    let killed = topology.kill_primary();
    topology.set_down_after(Duration::from_millis(500));
    let primary = topology.await_failover(killed);
    assert_ne!(primary, killed);
    assert_eq!(topology.servers[primary].cli(&["GET", "a"]), "1");
    topology.set_down_after(PATIENCE);
    topology.rejoin(killed);
    assert_eq!(topology.servers[killed].cli(&["GET", "a"]), "1");
    let next = topology.force_failover();
    assert_ne!(next, primary);
}

#[test]
fn blocked_replication_loses_writes() {
    let Some(topology) = SentinelServers::with(3, 1) else { return };
    let primary = &topology.servers[0];
    block_replication(primary);
    assert_eq!(primary.cli(&["SET", "a", "1"]), "OK");
    assert_eq!(count(&primary.cli(&["WAIT", "1", "300"])), 0);
    assert_eq!(topology.servers[1].cli(&["GET", "a"]), "");
    allow_replication(primary);
    topology.settle();
    assert_eq!(topology.servers[1].cli(&["GET", "a"]), "1");
}

#[test]
fn a_cluster_fails_over_and_moves_slots() {
    let Some(mut cluster) = ClusterServers::start() else { return };
    let slot = cluster.slot_of("{a}");
    let primary = cluster.primary_of(slot);
    assert!(primary < 3);
    let other = (primary + 1) % 3;
    for key in ["{a}1", "{a}2"] {
        assert_eq!(cluster.nodes[primary].cli(&["SET", key, "x"]), "OK");
    }
    let moving = cluster.begin_move(slot, other);
    assert_eq!(moving.move_keys(1), 1);
    let answers: Vec<_> =
        ["{a}1", "{a}2"].map(|key| cluster.nodes[primary].cli(&["GET", key])).into();
    assert!(answers.iter().any(|said| said == "x"), "{answers:?}");
    assert!(answers.iter().any(|said| said.starts_with("ASK")), "{answers:?}");
    assert_eq!(moving.move_keys(usize::MAX), 1);
    moving.finish();
    assert_eq!(cluster.primary_of(slot), other);
    assert_eq!(cluster.nodes[other].cli(&["GET", "{a}2"]), "x");
    cluster.move_slot(slot, primary);
    assert_eq!(cluster.nodes[primary].cli(&["GET", "{a}2"]), "x");

    let replica = cluster.force_failover(primary);
    cluster.settle();
    assert_eq!(cluster.primary_of(slot), replica);
    cluster.nodes[replica].kill();
    assert_eq!(cluster.await_failover(slot, replica), primary);
    cluster.nodes[replica].restart();
    cluster.settle();
}

#[test]
fn independent_servers_know_nothing_of_each_other() {
    let Some(servers) = independent(5) else { return };
    servers[0].cli(&["SET", "a", "1"]);
    assert!(servers[1..].iter().all(|server| server.cli(&["GET", "a"]).is_empty()));
}
