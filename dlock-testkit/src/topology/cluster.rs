//! A Redis Cluster.

use std::process::Command;
use std::time::Duration;

use super::{REPLICATING, field, is_synchronized, wait_until};
use crate::redis::RedisServer;

/// How long a node is silent before the others take it for down.
const NODE_TIMEOUT: Duration = Duration::from_millis(1_000);

/// A cluster: three primaries and three replicas.
#[derive(Debug)]
pub struct ClusterServers {
    /// The nodes: the first three start as primaries.
    pub nodes: Vec<RedisServer>,
    ids: Vec<String>,
    /// The port at which the others and the clients reach each node.
    ports: Vec<u16>,
}

impl ClusterServers {
    /// Starts a cluster of three primaries with a replica each; `None` if `redis-server`
    /// is not installed. It does not require full coverage: when one primary is down, the
    /// slots of the others are served.
    ///
    /// # Panics
    /// If a server does not start.
    pub fn start() -> Option<Self> {
        Self::with(3, 1, &["--cluster-require-full-coverage", "no"])
    }

    /// Starts a cluster of this many primaries, each with this many replicas.
    ///
    /// # Panics
    /// If a server does not start.
    pub fn with(primaries: usize, replicas: usize, options: &[&str]) -> Option<Self> {
        let timeout = NODE_TIMEOUT.as_millis().to_string();
        let clustered = [
            &["--cluster-enabled", "yes", "--cluster-node-timeout", &timeout][..],
            // A replica that was cut off for a while may still be promoted.
            &["--cluster-replica-validity-factor", "0"],
        ];
        let options = [REPLICATING, clustered[0], clustered[1], options].concat();
        let count = primaries * (1 + replicas);
        let nodes: Option<Vec<_>> = (0..count).map(|_| RedisServer::with(&options)).collect();
        let nodes = nodes?;
        let addresses = nodes.iter().map(|node| format!("127.0.0.1:{}", node.port()));
        let created = Command::new("redis-cli")
            .args(["--cluster", "create"])
            .args(addresses)
            .args(["--cluster-replicas", &replicas.to_string(), "--cluster-yes"])
            .output()
            .expect("redis-cli comes with redis-server");
        let said = String::from_utf8_lossy(&created.stdout);
        assert!(created.status.success(), "the cluster is not created: {said}");
        let ids = nodes.iter().map(|node| node.cli(&["CLUSTER", "MYID"])).collect();
        let ports = nodes.iter().map(RedisServer::port).collect();
        let cluster = ClusterServers { nodes, ids, ports };
        cluster.settle();
        Some(cluster)
    }

    /// The same as [`start`](Self::start), and everybody reaches a node at the port that
    /// `public` gives for its own: that of a proxy. Among themselves the nodes talk
    /// directly.
    ///
    /// # Panics
    /// If a server does not start.
    pub fn behind(mut public: impl FnMut(u16) -> u16) -> Option<Self> {
        let mut cluster = Self::start()?;
        for (node, port) in cluster.nodes.iter_mut().zip(&mut cluster.ports) {
            *port = public(*port);
            let announced = port.to_string();
            assert_eq!(node.cli(&["CONFIG", "SET", "cluster-announce-port", &announced]), "OK");
            node.add_options(&["--cluster-announce-port", &announced]);
        }
        wait_until("every node knows the announced ports", || {
            cluster.nodes.iter().all(|node| {
                let known = node.cli(&["CLUSTER", "NODES"]);
                cluster.ports.iter().all(|port| known.contains(&format!(":{port}@")))
            })
        });
        cluster.settle();
        Some(cluster)
    }

    /// The URL of the cluster, by three of its nodes.
    pub fn url(&self) -> String {
        let hosts: Vec<_> =
            self.ports.iter().take(3).map(|port| format!("127.0.0.1:{port}")).collect();
        format!("redis+cluster://{}", hosts.join(","))
    }

    /// The same by all nodes, those first that are replicas at the start.
    pub fn url_of_all(&self) -> String {
        let hosts: Vec<_> =
            self.ports.iter().rev().map(|port| format!("127.0.0.1:{port}")).collect();
        format!("redis+cluster://{}", hosts.join(","))
    }

    /// Raises the epoch of the cluster by this much, as so many failovers would.
    ///
    /// # Panics
    /// If a node refuses.
    pub fn raise_epoch(&self, by: usize) {
        let primaries = self.primaries();
        for _ in 0..by {
            // The node that has the highest epoch keeps it.
            wait_until("the epoch is raised", || {
                let raises = |place: &usize| {
                    self.nodes[*place].cli(&["CLUSTER", "BUMPEPOCH"]).starts_with("BUMPED")
                };
                primaries.iter().any(raises)
            });
        }
    }

    /// Removes a replica from the cluster, as `redis-cli --cluster del-node` does, and leaves
    /// it running.
    ///
    /// # Panics
    /// If a node refuses.
    pub fn remove_replica(&self, place: usize) {
        for (other, node) in self.nodes.iter().enumerate() {
            if other != place {
                assert_eq!(node.cli(&["CLUSTER", "FORGET", &self.ids[place]]), "OK");
            }
        }
        assert_eq!(self.nodes[place].cli(&["CLUSTER", "RESET", "SOFT"]), "OK");
    }

    /// Waits until every node agrees that the cluster works, and every replica follows
    /// its primary and has what that has.
    ///
    /// # Panics
    /// If that does not happen.
    pub fn settle(&self) {
        let count = self.nodes.len().to_string();
        wait_until("every node knows the whole cluster", || {
            self.nodes.iter().all(|node| {
                let info = node.cli(&["CLUSTER", "INFO"]);
                field(&info, "cluster_state") == Some("ok")
                    && field(&info, "cluster_known_nodes") == Some(&count)
                    && field(&info, "cluster_slots_ok") == Some("16384")
            })
        });
        wait_until("every replica follows its primary", || {
            let replicas = self.nodes.iter().filter(|node| is_synchronized(node)).count();
            let followers: usize = self.nodes.iter().map(super::followers).sum();
            let is_either = |node| is_synchronized(node) || super::is_primary(node);
            replicas == followers && self.nodes.iter().all(is_either)
        });
        wait_until("every node agrees on who is a primary", || {
            let primaries = |node: &RedisServer| {
                let known = node.cli(&["CLUSTER", "NODES"]);
                let mut ids: Vec<_> = known
                    .lines()
                    .filter(|line| line.contains("master") && !line.contains("fail"))
                    .filter_map(|line| Some(line.split(' ').next()?.to_owned()))
                    .collect();
                ids.sort();
                ids
            };
            let first = primaries(&self.nodes[0]);
            self.nodes.iter().all(|node| primaries(node) == first)
        });
        super::await_replication(&self.nodes);
    }

    /// The slot of a key, by the server's own account.
    ///
    /// # Panics
    /// If no node answers.
    pub fn slot_of(&self, key: &str) -> u16 {
        let said = self.a_live_node().cli(&["CLUSTER", "KEYSLOT", key]);
        said.parse().expect("a slot")
    }

    /// The place in `nodes` of the primary that serves a slot.
    ///
    /// # Panics
    /// If no live node knows one.
    pub fn primary_of(&self, slot: u16) -> usize {
        self.find_primary_of(slot).expect("a primary of the slot")
    }

    fn find_primary_of(&self, slot: u16) -> Option<usize> {
        let known = self.a_live_node().cli(&["CLUSTER", "NODES"]);
        let serves = |range: &str| {
            let (from, to) = range.split_once('-').unwrap_or((range, range));
            matches!((from.parse(), to.parse()), (Ok(from), Ok(to)) if (from..=to).contains(&slot))
        };
        known.lines().find_map(|line| {
            let mut words = line.split(' ');
            let (id, flags) = (words.next()?, words.nth(1)?);
            let serves =
                flags.contains("master") && !flags.contains("fail") && words.skip(5).any(serves);
            if !serves {
                return None;
            }
            self.ids.iter().position(|known| known == id)
        })
    }

    /// The places of the primaries.
    pub fn primaries(&self) -> Vec<usize> {
        let is_one = |place: &usize| super::is_primary(&self.nodes[*place]);
        (0..self.nodes.len()).filter(is_one).collect()
    }

    /// Puts everything right that was stopped, killed or blocked, and waits until all is
    /// well again.
    ///
    /// # Panics
    /// If that does not happen.
    pub fn repair(&mut self) {
        for node in &mut self.nodes {
            node.resume();
            if !node.is_running() {
                node.restart();
            }
            super::allow_replication(node);
        }
        self.settle();
    }

    /// The place of a replica of the node at this place.
    pub fn replica_of(&self, primary: usize) -> Option<usize> {
        let known = self.a_live_node().cli(&["CLUSTER", "NODES"]);
        known.lines().find_map(|line| {
            let mut words = line.split(' ');
            let (id, flags, follows) = (words.next()?, words.nth(1)?, words.next()?);
            let is_down = flags.split(',').any(|flag| flag == "fail" || flag == "fail?");
            (follows == self.ids[primary] && !is_down)
                .then(|| self.ids.iter().position(|known| known == id))?
        })
    }

    fn a_live_node(&self) -> &RedisServer {
        let answers = |node: &&RedisServer| node.answers() && node.cli(&["PING"]) == "PONG";
        self.nodes.iter().find(answers).expect("a live node")
    }

    /// Promotes a replica of the node at this place, which lives, and returns its place.
    ///
    /// # Panics
    /// If there is no failover.
    pub fn force_failover(&self, primary: usize) -> usize {
        self.promote_replica(primary, &["CLUSTER", "FAILOVER"])
    }

    /// The same without the old primary's consent, and without what was not replicated.
    ///
    /// # Panics
    /// If there is no failover.
    pub fn force_lossy_failover(&self, primary: usize) -> usize {
        self.promote_replica(primary, &["CLUSTER", "FAILOVER", "FORCE"])
    }

    fn promote_replica(&self, primary: usize, command: &[&str]) -> usize {
        let replica = self.replica_of(primary).expect("a replica");
        wait_until("the replica is a primary", || {
            self.nodes[replica].cli(command);
            super::is_primary(&self.nodes[replica])
        });
        replica
    }

    /// Waits until another node than this one serves the slot, and returns its place.
    ///
    /// # Panics
    /// If there is no failover.
    pub fn await_failover(&self, slot: u16, from: usize) -> usize {
        let mut primary = from;
        wait_until("another node serves the slot", || {
            primary = self.find_primary_of(slot).unwrap_or(from);
            primary != from && super::is_primary(&self.nodes[primary])
        });
        primary
    }

    /// Kills the primary at this place with SIGKILL, waits until its replica has taken over,
    /// and puts everything right.
    ///
    /// # Panics
    /// If it has no replica, or there is no failover.
    pub fn kill_and_fail_over(&mut self, primary: usize) {
        let replica = self.replica_of(primary).expect("a replica");
        self.nodes[primary].kill();
        wait_until("the replica is a primary", || super::is_primary(&self.nodes[replica]));
        self.repair();
    }

    /// Kills the primary at this place with SIGKILL and restarts it. Its replica, if it has
    /// one, does not take over.
    ///
    /// # Panics
    /// If it does not come back.
    pub fn kill_and_restart(&mut self, primary: usize) {
        let replica = self.replica_of(primary);
        self.may_take_over(replica, false);
        self.nodes[primary].restart();
        self.settle();
        self.may_take_over(replica, true);
    }

    fn may_take_over(&self, replica: Option<usize>, may: bool) {
        if let Some(replica) = replica {
            let is_forbidden = if may { "no" } else { "yes" };
            let set = ["CONFIG", "SET", "cluster-replica-no-failover", is_forbidden];
            assert_eq!(self.nodes[replica].cli(&set), "OK");
        }
    }

    /// Begins to move a slot from the node that serves it to another primary, and stops
    /// half-way: keys that exist are still served by the old one, others by the new one.
    ///
    /// # Panics
    /// If a node refuses.
    pub fn begin_move(&self, slot: u16, to: usize) -> SlotMove<'_> {
        let from = self.primary_of(slot);
        let number = slot.to_string();
        let said =
            self.nodes[to].cli(&["CLUSTER", "SETSLOT", &number, "IMPORTING", &self.ids[from]]);
        assert_eq!(said, "OK");
        let said =
            self.nodes[from].cli(&["CLUSTER", "SETSLOT", &number, "MIGRATING", &self.ids[to]]);
        assert_eq!(said, "OK");
        SlotMove { cluster: self, slot, from, to }
    }

    /// Moves a slot with its keys to another primary.
    ///
    /// # Panics
    /// If a node refuses.
    pub fn move_slot(&self, slot: u16, to: usize) {
        if self.primary_of(slot) != to {
            let moving = self.begin_move(slot, to);
            moving.move_keys(usize::MAX);
            moving.finish();
        }
    }
}

impl ClusterServers {
    /// Moves slots with their keys to the next primary after the one that serves each,
    /// many at a time.
    ///
    /// # Panics
    /// If a node refuses.
    pub fn move_slots(&self, slots: &[u16]) {
        let primaries = self.primaries();
        let served: Vec<_> = primaries.iter().map(|place| self.slots_of(*place)).collect();
        for (n, served) in served.iter().enumerate() {
            let (from, to) = (primaries[n], primaries[(n + 1) % primaries.len()]);
            let here: Vec<u16> = slots.iter().copied().filter(|it| served.contains(it)).collect();
            for some in here.chunks(100) {
                self.move_together(some, from, to);
            }
        }
    }

    fn move_together(&self, slots: &[u16], from: usize, to: usize) {
        let each = |command: &dyn Fn(u16) -> String| slots.iter().map(|it| command(*it)).collect();
        let all = |place: usize, commands: Vec<String>| {
            let said = self.nodes[place].cli_all(&commands);
            assert!(said.iter().all(|it| it == "OK" || it.is_empty()), "{said:?}");
        };
        let (source, target) = (&self.ids[from], &self.ids[to]);
        all(to, each(&|slot| format!("CLUSTER SETSLOT {slot} IMPORTING {source}")));
        all(from, each(&|slot| format!("CLUSTER SETSLOT {slot} MIGRATING {target}")));
        let count = each(&|slot| format!("CLUSTER COUNTKEYSINSLOT {slot}"));
        let counts = self.nodes[from].cli_all(&count);
        for (slot, count) in slots.iter().zip(counts) {
            if count != "0" {
                SlotMove { cluster: self, slot: *slot, from, to }.move_keys(usize::MAX);
            }
        }
        for place in [to, from] {
            all(place, each(&|slot| format!("CLUSTER SETSLOT {slot} NODE {target}")));
        }
    }

    /// The slots that a node serves.
    fn slots_of(&self, place: usize) -> std::collections::BTreeSet<u16> {
        let known = self.nodes[place].cli(&["CLUSTER", "NODES"]);
        let own = known.lines().find(|line| line.starts_with(&self.ids[place])).unwrap_or_default();
        let ranges = own.split(' ').skip(8).filter_map(|range| {
            let (from, to) = range.split_once('-').unwrap_or((range, range));
            Some(from.parse::<u16>().ok()?..=to.parse().ok()?)
        });
        ranges.flatten().collect()
    }
}

/// A slot that is being moved.
#[derive(Debug)]
pub struct SlotMove<'a> {
    cluster: &'a ClusterServers,
    slot: u16,
    from: usize,
    to: usize,
}

impl SlotMove<'_> {
    /// Moves keys of the slot, at most this many, and returns how many were moved.
    ///
    /// # Panics
    /// If a node refuses.
    pub fn move_keys(&self, most: usize) -> usize {
        let (source, target) = (&self.cluster.nodes[self.from], &self.cluster.nodes[self.to]);
        let port = target.port().to_string();
        let mut moved = 0;
        while moved < most {
            let count = (most - moved).min(100).to_string();
            let found = source.cli(&["CLUSTER", "GETKEYSINSLOT", &self.slot.to_string(), &count]);
            let keys: Vec<&str> = found.lines().filter(|key| !key.is_empty()).collect();
            if keys.is_empty() {
                break;
            }
            let start = ["MIGRATE", "127.0.0.1", &port, "", "0", "5000", "KEYS"];
            let said = source.cli(&[&start[..], &keys].concat());
            assert!(matches!(&*said, "OK" | "NOKEY"), "{said}");
            moved += keys.len();
        }
        moved
    }

    /// Gives the slot to its new node. Its keys must have been moved.
    ///
    /// # Panics
    /// If a node refuses.
    pub fn finish(self) {
        self.give_to(self.to);
    }

    /// Leaves the slot with its old node.
    ///
    /// # Panics
    /// If a node refuses.
    pub fn cancel(self) {
        self.give_to(self.from);
    }

    fn give_to(&self, place: usize) {
        let ClusterServers { nodes, ids, .. } = self.cluster;
        let other = if place == self.to { self.from } else { self.to };
        // The new owner first: it raises its epoch, and the others believe it.
        let number = self.slot.to_string();
        for node in [place, other] {
            let said = nodes[node].cli(&["CLUSTER", "SETSLOT", &number, "NODE", &ids[place]]);
            assert_eq!(said, "OK");
        }
    }
}
