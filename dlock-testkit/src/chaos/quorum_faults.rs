//! The faults of a quorum: some of its nodes are killed, stopped, slow, or lose their data.
//!
//! At most two of five are out at a time, and everything must go on meanwhile. A node that
//! lost its data is out until it votes again; so a later fault hits the nodes that are out
//! already before it hits others. When a majority is out nobody gets a lock, and nobody may
//! hold one twice.

use std::time::{Duration, Instant};

use rand::RngExt as _;
use rand::rngs::StdRng;
use rand::seq::SliceRandom as _;

use super::failover_faults::blocking;
use super::faults::Fault;
use super::inject::Faults;
use super::load::TTL;
use super::servers::Servers;
use crate::proxy::Way;
use crate::topology::QuorumServers;

/// How many nodes there are.
pub(super) const NODES: usize = 5;
/// How many of them may be out.
const MINORITY: usize = 2;
/// By how much a slow node is slow.
const SLOW: Duration = Duration::from_secs(2);
/// How long a node that lost its data does not vote, and a little more: see ADR 8.
const SILENCE: Duration = Duration::from_millis(7_500);

/// The nodes of a quorum, and which of them do not vote.
pub(super) struct QuorumNodes {
    pub(super) servers: QuorumServers,
    /// For each node until when it does not vote.
    silent_until: Vec<Instant>,
}

impl QuorumNodes {
    pub(super) fn start() -> Option<Self> {
        let servers = tokio::runtime::Handle::current()
            .block_on(QuorumServers::start_in("chaos", NODES, TTL))?;
        Some(QuorumNodes { servers, silent_until: vec![Instant::now(); NODES] })
    }

    /// The nodes of the next fault: those that are out already, and others if there is room.
    fn pick(&self, random: &mut StdRng) -> Vec<usize> {
        let mut nodes: Vec<usize> = (0..NODES).collect();
        nodes.shuffle(random);
        nodes.sort_by_key(|node| std::cmp::Reverse(self.silent_until[*node] > Instant::now()));
        let out = nodes.iter().filter(|node| self.silent_until[**node] > Instant::now()).count();
        nodes.truncate(random.random_range(1..=MINORITY).max(out));
        nodes
    }

    fn lost_data(&mut self, node: usize) {
        self.silent_until[node] = Instant::now() + SILENCE;
    }

    /// Waits until all nodes vote.
    async fn all_vote(&self) {
        let last = self.silent_until.iter().max();
        tokio::time::sleep_until(last.copied().unwrap_or_else(Instant::now).into()).await;
    }

    /// Starts what was killed, without its data, and resumes what was stopped.
    pub(super) fn repair(&mut self) {
        for node in 0..NODES {
            let server = &mut self.servers.nodes[node];
            if server.is_running() {
                server.resume();
            } else {
                server.restart();
                self.lost_data(node);
            }
        }
    }
}

impl Faults {
    pub(super) async fn of_quorum(&mut self, fault: Fault, lasts: Duration, random: &mut StdRng) {
        let Servers::Redlock(quorum) = &mut self.servers else { return };
        if matches!(fault, Fault::StopMajority | Fault::KillMajority) {
            return majority(quorum, fault, lasts).await;
        }
        for node in quorum.pick(random) {
            let server = &mut quorum.servers.nodes[node];
            match fault {
                Fault::KillNodes => server.kill(),
                Fault::StopNodes => server.pause(),
                Fault::SlowNodes => self.proxies[node].delay(Way::ToClient, SLOW),
                Fault::EmptyNodes => {
                    blocking(|| server.restart());
                    quorum.lost_data(node);
                }
                Fault::FlushNodes => {
                    blocking(|| server.cli(&["FLUSHALL"]));
                    quorum.lost_data(node);
                }
                _ => {}
            }
        }
        tokio::time::sleep(lasts).await;
    }
}

/// Three of five nodes are out. It is over when they vote again.
async fn majority(quorum: &mut QuorumNodes, fault: Fault, lasts: Duration) {
    quorum.all_vote().await;
    for node in &mut quorum.servers.nodes[..=MINORITY] {
        if fault == Fault::KillMajority { node.kill() } else { node.pause() }
    }
    tokio::time::sleep(lasts).await;
    blocking(|| quorum.repair());
    quorum.all_vote().await;
}
