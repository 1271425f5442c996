//! The faults of a chaos run, for servers and network and for the workers.

use std::time::Duration;

use rand::RngExt as _;
use rand::rngs::StdRng;

use super::servers::Topology;

/// Defines the faults, and a list of them for each group to draw from.
macro_rules! faults {
    ($($(#[$about:meta])* $group:ident: $($fault:ident $what:literal),*;)*) => {
        /// A fault that the run can inject.
        #[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
        pub(super) enum Fault { $($(#[doc = $what] $fault),*),* }

        $($(#[$about])* const $group: &[Fault] = &[$(Fault::$fault),*];)*

        impl Fault {
            /// One sentence on what happens.
            pub(super) fn about(self) -> &'static str {
                match self { $($(Fault::$fault => $what),*),* }
            }
        }
    };
}

faults! {
    /// Faults of servers and network, in every topology.
    COMMON:
        KillCommandConnections "The servers close all connections for commands.",
        KillNoticeConnections "The servers close all connections for notices.",
        ForgetScripts "The servers forget their scripts.",
        Cut "Connections are closed.",
        LoseReplies "Requests arrive, and the connection ends instead of their replies.",
        DuplicateRequests "Requests arrive twice.",
        LoseNotices "Notices are lost.",
        DuplicateNotices "Notices arrive twice.";
    /// What an operator does, where there is one place that decides.
    OPERATOR:
        BreakLocks "An operator breaks locks that are held and wanted.";
    /// Faults of one server and its network.
    SERVER:
        StallReplies "Replies arrive late.",
        StallRequests "Requests arrive late.",
        StallBoth "Requests and replies arrive late.",
        HalfOpen "All connections stay open, and nothing arrives on them any more.",
        HalfOpenNotices "Only the connections for notices stay open without anything arriving.",
        Silence "Nothing arrives, and new connections are not answered.",
        Delay "Each message takes longer.",
        PauseServer "The server is stopped with SIGSTOP.",
        PauseClients "The server stops answering (CLIENT PAUSE).",
        OutOfMemory "The server has no memory left.",
        DemotePrimary "The server is made a replica and keeps its connections.",
        RestartServer "The server is killed and starts again with its data.";
    /// Faults of the server that lose its data. They are rare.
    LOSSES:
        FlushAll "The server loses its data.",
        RestartEmpty "The server is killed and starts again without its data.";
    /// Failovers, with Sentinels and in a cluster.
    FAILOVERS:
        KillPrimary "A primary is killed, and a replica is promoted.",
        PausePrimary "A primary is stopped with SIGSTOP, and a replica is promoted.",
        ForceFailover "A replica is promoted while its primary lives.",
        BlockReplication "A replica that does not know the newest locks is promoted.",
        PartitionPrimary "Nothing reaches a primary, and new connections are not answered.";
    /// Faults of Sentinels.
    SENTINELS:
        KillSentinel "A Sentinel is killed, and started again later.";
    /// Faults of slots of a cluster.
    SLOTS:
        MoveSlots "The slots of all keys move to other nodes.",
        HalfMigratedSlot "A slot stays half-way between two nodes for some time.";
    /// Faults of the nodes of a quorum.
    QUORUM:
        KillNodes "One or two nodes are killed, and started again later without their data.",
        StopNodes "One or two nodes are stopped with SIGSTOP.",
        SlowNodes "One or two nodes answer two seconds late.",
        EmptyNodes "One or two nodes are killed and start again at once without their data.",
        FlushNodes "One or two nodes lose their data.",
        StopMajority "Three of five nodes are stopped with SIGSTOP.",
        KillMajority "Three of five nodes are killed, and start again without their data.";
    /// Faults of the members of a store of sessions.
    MEMBERS:
        KillLeader "The leader is killed, another one is elected, and it starts again later.",
        StopLeader "The leader is stopped with SIGSTOP, and another one is elected.",
        KillFollower "A member that does not lead is killed, and starts again later.",
        StopFollower "A member that does not lead is stopped with SIGSTOP.";
    /// What only databases know, and stores of sessions the first of it.
    DATABASE:
        EndSessions "The server ends all sessions.",
        LockRows "Somebody else's transaction locks the rows of a key.";
    /// Faults of a worker.
    WORKER:
        PauseWorker "A worker is stopped with SIGSTOP.",
        KillWorker "A worker is killed, and another one started.",
        ReplaceWorker "A worker shuts down, and another one is started.",
        PanicInHooks "The hook and the log subscriber of a worker panic at each event.";
}

/// The faults that a run may draw.
#[derive(Clone, Debug)]
pub(super) struct Choice {
    server: Vec<Fault>,
    losses: Vec<Fault>,
    worker: Vec<Fault>,
}

/// Faults of the network in front of a server, and what an operator does.
const ANY_NETWORK: &[Fault] = &[
    Fault::Cut,
    Fault::LoseReplies,
    Fault::StallReplies,
    Fault::StallRequests,
    Fault::StallBoth,
    Fault::HalfOpen,
    Fault::Silence,
    Fault::Delay,
    Fault::BreakLocks,
];

/// The faults of the servers of a topology beside those that it shares with others.
fn of_topology(topology: Topology) -> Vec<Fault> {
    match topology {
        Topology::Single => [SERVER, OPERATOR].concat(),
        Topology::Sentinel => [FAILOVERS, SENTINELS, OPERATOR].concat(),
        Topology::Cluster => [FAILOVERS, SLOTS, OPERATOR].concat(),
        Topology::Redlock => QUORUM.to_vec(),
        Topology::Postgres | Topology::MariaDb => DATABASE.to_vec(),
        Topology::Sqlite => Vec::new(),
        Topology::ZooKeeper | Topology::Etcd | Topology::Consul => {
            [MEMBERS, &[Fault::EndSessions]].concat()
        }
    }
}

/// The faults that a topology shares with others.
fn shared(topology: Topology) -> Vec<Fault> {
    match topology {
        Topology::Single | Topology::Sentinel | Topology::Cluster | Topology::Redlock => {
            COMMON.to_vec()
        }
        Topology::Postgres | Topology::MariaDb => {
            [ANY_NETWORK, &[Fault::PauseServer, Fault::RestartServer]].concat()
        }
        Topology::Sqlite => vec![Fault::BreakLocks],
        Topology::ZooKeeper | Topology::Etcd | Topology::Consul => ANY_NETWORK.to_vec(),
    }
}

impl Choice {
    /// All faults of a topology.
    pub(super) fn all(topology: Topology) -> Self {
        let own = of_topology(topology);
        let losses = if topology == Topology::Single { LOSSES } else { &[] };
        // Elsewhere its own faults are few, and the ones that matter.
        let times = if topology == Topology::Single { 1 } else { 2 };
        let server = [shared(topology), own.repeat(times)].concat();
        Choice { server, losses: losses.to_vec(), worker: WORKER.to_vec() }
    }

    /// Only these faults, by their names with commas between.
    pub(super) fn parse(names: &str, topology: Topology) -> Result<Self, String> {
        let mut choice = Choice { server: vec![], losses: vec![], worker: vec![] };
        let all = Self::all(topology);
        for name in names.split(',') {
            let is = |fault: &&Fault| format!("{fault:?}").eq_ignore_ascii_case(name.trim());
            if let Some(fault) = all.server.iter().chain(&all.losses).find(is) {
                // Whoever names a loss of data wants it as often as the others.
                choice.server.push(*fault);
            } else if let Some(fault) = WORKER.iter().find(is) {
                choice.worker.push(*fault);
            } else {
                return Err(format!(
                    "{name} is not a fault of the topology {}; --list-faults prints their names",
                    topology.name()
                ));
            }
        }
        Ok(choice)
    }

    /// The faults that happen next, at the same time: one of the server, one of a worker,
    /// or both.
    pub(super) fn draw(&self, random: &mut StdRng) -> (Option<Fault>, Option<Fault>) {
        let of_server = if !self.losses.is_empty() && random.random_bool(0.02) {
            pick(&self.losses, random)
        } else {
            pick(&self.server, random)
        };
        let of_worker = pick(&self.worker, random);
        match random.random_range(0..4) {
            0 if of_worker.is_some() => (None, of_worker),
            1 => (of_server, of_worker),
            _ if of_server.is_some() => (of_server, None),
            _ => (None, of_worker),
        }
    }
}

fn pick(faults: &[Fault], random: &mut StdRng) -> Option<Fault> {
    (!faults.is_empty()).then(|| faults[random.random_range(0..faults.len())])
}

/// How long a fault lasts: mostly less than a lease, sometimes more than the longest
/// lease.
pub(super) fn lasts(random: &mut StdRng) -> Duration {
    let long = random.random_bool(0.15);
    Duration::from_millis(random.random_range(if long { 1_000..4_000 } else { 20..700 }))
}

/// Prints the name of each fault and what it does.
pub(super) fn list() {
    println!("every topology:");
    print(WORKER);
    for topology in Topology::ALL {
        println!("--topology {}:", topology.name());
        let losses = if topology == Topology::Single { LOSSES } else { &[] };
        print(&[&shared(topology)[..], &of_topology(topology), losses].concat());
    }

    fn print(faults: &[Fault]) {
        for fault in faults {
            println!("{:<24} {}", format!("{fault:?}"), fault.about());
        }
    }
}
