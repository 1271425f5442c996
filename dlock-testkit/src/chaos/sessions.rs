//! The stores of sessions of a chaos run, and what goes wrong with their members.
//!
//! There are three members. Each worker has a proxy of its own in front of each of them; at
//! Consul in front of the agent, which knows the members. A member that is killed or stopped
//! is put right when everything works again without it.

use std::sync::Arc;
use std::time::{Duration, Instant};

use rand::RngExt as _;
use rand::rngs::StdRng;

use super::failover_faults::blocking;
use super::faults::Fault;
use super::load::{KEYS, LOCK_DELAY, SLOW_KEYS, TTL};
use super::run::{Run, nanos};
use super::servers::Topology;
use crate::consul::ConsulCluster;
use crate::etcd::EtcdCluster;
use crate::process::now;
use crate::proxy::Proxy;
use crate::session_servers::{Member, Members, wait_until_it_serves};
use crate::zookeeper::ZooKeeperEnsemble;

/// Empty parents are removed at once, and not each minute: their sequence numbers start again.
/// So are those that never had a child, which ZooKeeper keeps unless it is told.
const REMOVE_PARENTS: [&str; 2] =
    ["-Dznode.container.checkIntervalMs=500", "-Dznode.container.maxNeverUsedIntervalMs=5000"];
/// All guards of a session that was ended from outside know it after this time.
const TOLD_WITHIN: Duration = Duration::from_secs(1);

/// The members of a store.
pub(super) enum SessionStore {
    ZooKeeper(ZooKeeperEnsemble),
    Etcd(EtcdCluster),
    Consul(ConsulCluster),
}

/// Does the same with the members of any store.
macro_rules! with_members {
    ($store:expr, $members:ident => $what:expr) => {
        match $store {
            SessionStore::ZooKeeper($members) => $what,
            SessionStore::Etcd($members) => $what,
            SessionStore::Consul($members) => $what,
        }
    };
}

impl SessionStore {
    /// Starts the members; `None` if they are not installed.
    pub(super) fn start(topology: Topology) -> Option<Self> {
        Some(match topology {
            Topology::ZooKeeper => {
                SessionStore::ZooKeeper(ZooKeeperEnsemble::start_with(&REMOVE_PARENTS)?)
            }
            Topology::Etcd => SessionStore::Etcd(EtcdCluster::start()?),
            _ => SessionStore::Consul(ConsulCluster::start()?),
        })
    }

    /// The ports that clients connect to.
    pub(super) fn ports(&self) -> Vec<u16> {
        with_members!(self, members => members.ports())
    }

    pub(super) fn url(&self) -> String {
        self.url_at(&self.ports())
    }

    /// The URL behind the proxies of a worker.
    pub(super) fn url_of(&self, worker: usize, proxies: &[Arc<Proxy>]) -> String {
        let count = self.ports().len();
        let own = &proxies[worker * count..][..count];
        self.url_at(&own.iter().map(|proxy| proxy.port()).collect::<Vec<_>>())
    }

    fn url_at(&self, ports: &[u16]) -> String {
        let url = with_members!(self, members => members.url_at(ports));
        match self {
            // The layouts with readers and with semaphores.
            SessionStore::ZooKeeper(_) => format!("{url}?layout=rwlock"),
            SessionStore::Etcd(_) => url,
            SessionStore::Consul(_) => {
                format!("{url}&layout=lock-key&consul.lock_delay={}s", LOCK_DELAY.as_secs())
            }
        }
    }

    /// A fault of the members or the sessions. It is over when this returns; a member that is
    /// out stays so until [`repair`](Self::repair).
    pub(super) async fn inject(
        &mut self,
        fault: Fault,
        (lasts, slack): (Duration, Duration),
        run: &Run,
        random: &mut StdRng,
    ) {
        if fault == Fault::EndSessions {
            return self.end_sessions(run, slack);
        }
        let number = random.random_range(1..3);
        with_members!(self, members => strike(members, fault, number));
        tokio::time::sleep(lasts).await;
    }

    /// Ends the sessions of all workers. Another one may get a lock before its holder hears
    /// of it, but not at Consul, which has a lock-delay.
    fn end_sessions(&self, run: &Run, slack: Duration) {
        let from = now();
        blocking(|| with_members!(self, members => members.end_sessions()));
        let over = now();
        let told_by = over + nanos(TOLD_WITHIN + slack);
        let until = over + nanos(TTL + Duration::from_secs(1));
        let mut state = run.state();
        if !matches!(self, SessionStore::Consul(_)) {
            state.checker.failed_over(from, told_by);
        }
        for key in KEYS.into_iter().chain(SLOW_KEYS) {
            state.checker.broken(key, from, told_by, until);
        }
    }

    /// Puts the members right that are out.
    pub(super) fn repair(&mut self) {
        with_members!(self, members => members.repair());
    }

    /// What clients have left behind, when they had this long.
    pub(super) async fn left_after(&self, within: Duration) -> Vec<String> {
        let began = Instant::now();
        loop {
            let left = blocking(|| self.left());
            if left.is_empty() {
                return left;
            }
            if began.elapsed() >= within {
                for report in blocking(|| with_members!(self, members => members.reports())) {
                    eprintln!("{report}");
                }
                return left;
            }
            tokio::time::sleep(Duration::from_millis(100)).await;
        }
    }

    fn left(&self) -> Vec<String> {
        let mut left = with_members!(self, members => members.left());
        if matches!(self, SessionStore::Consul(_)) {
            // The value of a semaphore whose holders have died stays until their lock-delay is
            // over and somebody uses the semaphore again. Their keys are looked for.
            left.retain(|key| !key.ends_with("/.lock"));
        }
        if let SessionStore::ZooKeeper(ensemble) = self {
            let nodes = ensemble.servers[ensemble.leader()].nodes();
            left.extend((nodes != Some(0)).then(|| format!("nodes: {nodes:?}")));
        }
        left
    }
}

/// Takes one member out, and waits until there is a leader and clients are served.
fn strike<S: Member>(members: &mut Members<S>, fault: Fault, number: usize) {
    blocking(|| {
        let leader = members.leader();
        let follower = (leader + number) % members.servers.len();
        match fault {
            Fault::KillLeader => members.kill(leader),
            Fault::StopLeader => members.pause(leader),
            Fault::KillFollower => members.kill(follower),
            _ => members.pause(follower),
        }
        if matches!(fault, Fault::KillLeader | Fault::StopLeader) {
            members.next_leader(leader);
        }
        if let Some(agent) = &members.agent {
            wait_until_it_serves(agent); // it may use the member that is out
        }
    });
}
