//! The faults of topologies: failovers of all kinds, and slots that move.
//!
//! Each returns when another server is the primary. What it stopped, killed or blocked is
//! put right later, when everything works again without it.

use std::time::Duration;

use rand::RngExt as _;
use rand::rngs::StdRng;

use super::faults::Fault;
use super::inject::Faults;
use super::load::{KEYS, SLOW_KEYS};
use super::servers::Servers;
use crate::redis::RedisServer;
use crate::topology::{ClusterServers, SentinelServers, block_replication};

/// Runs what waits for servers beside the other tasks.
pub(super) fn blocking<T>(what: impl FnOnce() -> T) -> T {
    tokio::task::block_in_place(what)
}

impl Faults {
    pub(super) async fn of_topology(&mut self, fault: Fault, lasts: Duration, random: &mut StdRng) {
        match &mut self.servers {
            Servers::Single(_) | Servers::Database(_) | Servers::Sessions(_) => {}
            Servers::Redlock(_) => self.of_quorum(fault, lasts, random).await,
            Servers::Sentinel(servers) => {
                let place = blocking(|| servers.primary());
                if fault == Fault::PartitionPrimary {
                    self.proxies[place].go_silent();
                    blocking(|| servers.await_failover(place));
                } else {
                    with_sentinels(servers, place, fault, lasts, random).await;
                }
            }
            Servers::Cluster(cluster) => {
                let slots = slots_of_keys(cluster);
                let slot = slots[random.random_range(0..slots.len())];
                let place = blocking(|| cluster.primary_of(slot));
                match fault {
                    Fault::PartitionPrimary => {
                        // The nodes still see each other, so there is no failover.
                        self.proxies[place].go_silent();
                        tokio::time::sleep(lasts).await;
                        self.proxies[place].heal();
                    }
                    Fault::MoveSlots => blocking(|| {
                        for slot in slots {
                            let to = another_primary(cluster, slot, random);
                            cluster.move_slot(slot, to);
                        }
                    }),
                    Fault::HalfMigratedSlot => half_way(cluster, slot, lasts, random).await,
                    _ => in_cluster(cluster, slot, place, fault, lasts, random).await,
                }
            }
        }
    }
}

/// How a replica is promoted.
enum Promotion {
    /// By itself, since the primary does not answer.
    Awaited,
    Forced,
    /// Without what was not replicated.
    ForcedWithLoss,
}

/// Does to a primary what the fault says.
async fn strike(
    primary: &mut RedisServer,
    fault: Fault,
    lasts: Duration,
    random: &mut StdRng,
) -> Promotion {
    match fault {
        Fault::KillPrimary => primary.kill(),
        Fault::PausePrimary => primary.pause(),
        Fault::BlockReplication => {
            blocking(|| block_replication(primary));
            tokio::time::sleep(lasts.min(Duration::from_millis(700))).await;
            if random.random_bool(0.5) {
                return Promotion::ForcedWithLoss;
            }
            primary.kill();
        }
        _ => return Promotion::Forced,
    }
    Promotion::Awaited
}

async fn with_sentinels(
    servers: &mut SentinelServers,
    place: usize,
    fault: Fault,
    lasts: Duration,
    random: &mut StdRng,
) {
    if fault == Fault::KillSentinel {
        let sentinel = random.random_range(0..servers.sentinels.len());
        servers.sentinels[sentinel].kill();
        return tokio::time::sleep(lasts).await;
    }
    let promotion = strike(&mut servers.servers[place], fault, lasts, random).await;
    blocking(|| match promotion {
        Promotion::Awaited => servers.await_failover(place),
        Promotion::Forced | Promotion::ForcedWithLoss => servers.force_failover(),
    });
}

async fn in_cluster(
    cluster: &mut ClusterServers,
    slot: u16,
    place: usize,
    fault: Fault,
    lasts: Duration,
    random: &mut StdRng,
) {
    let promotion = strike(&mut cluster.nodes[place], fault, lasts, random).await;
    blocking(|| match promotion {
        Promotion::Awaited => cluster.await_failover(slot, place),
        Promotion::Forced => cluster.force_failover(place),
        Promotion::ForcedWithLoss => cluster.force_lossy_failover(place),
    });
}

/// Holds a slot half-way, with its keys at the old node, or at the new one.
async fn half_way(cluster: &ClusterServers, slot: u16, lasts: Duration, random: &mut StdRng) {
    let moving = blocking(|| cluster.begin_move(slot, another_primary(cluster, slot, random)));
    if random.random_bool(0.5) {
        blocking(|| moving.move_keys(usize::MAX));
    }
    tokio::time::sleep(lasts).await;
    blocking(|| {
        moving.move_keys(usize::MAX);
        moving.finish();
    });
}

fn another_primary(cluster: &ClusterServers, slot: u16, random: &mut StdRng) -> usize {
    let from = cluster.primary_of(slot);
    let others: Vec<_> = cluster.primaries().into_iter().filter(|it| *it != from).collect();
    others[random.random_range(0..others.len())]
}

/// The slots of the keys that the workers want.
fn slots_of_keys(cluster: &ClusterServers) -> Vec<u16> {
    let keys = KEYS.into_iter().chain(SLOW_KEYS);
    blocking(|| keys.map(|key| cluster.slot_of(&format!("{{chaos:{key}}}"))).collect())
}
