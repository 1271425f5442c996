//! Keeping the map of a cluster new.

use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use redis::{Value, cmd};
use tokio::task::JoinSet;

use super::super::connection::Link;
use super::super::node_ids::NodeIds;
use super::answers::{ReportedSlots, choose, is_anew};
use super::slots::{Node, SlotMap};
use super::{Cluster, errors};
use crate::backend::abort_on_drop::AbortOnDrop;
use crate::error::{Error, ErrorKind, Operation, Result};

/// The shortest time between two looks at the map.
const SHORTEST: Duration = Duration::from_millis(100);
/// The time between two looks while the connection to a primary is lost: a replica may be
/// promoted at any moment.
const WHILE_LOST: Duration = Duration::from_millis(200);
/// The longest time between two looks.
const LONGEST: Duration = Duration::from_secs(30);
/// How often a node is asked for its epoch while there may be leases, and how long it has
/// for the answer: who lost a lock by a failover is told within a second.
const PROBE: Duration = Duration::from_millis(400);
const PROBE_TIMEOUT: Duration = Duration::from_millis(200);
/// How many nodes are asked at once.
const ASKED: usize = 5;
/// How long the others have after the first answer. One of them may know better.
const OTHER_ANSWERS: Duration = Duration::from_millis(100);
/// For how long the map is asked for again and again after a new epoch was seen, if it does
/// not change: longer than votes take.
const ELECTION: Duration = Duration::from_secs(30);
/// The same after it changed. Another part of it may still change.
const AFTER_CHANGE: Duration = Duration::from_secs(2);

/// Whether a replica may be about to be promoted: it raises the epoch when it asks for
/// votes, which is before it is the primary.
#[derive(Default)]
struct Election {
    epoch: u64,
    changes: u64,
    until: Option<Instant>,
}

impl Election {
    /// `changes`: how often the map has changed.
    fn is_under_way(&mut self, now: Instant, epoch: u64, changes: u64) -> bool {
        let before = std::mem::replace(&mut self.epoch, epoch);
        let changed = std::mem::replace(&mut self.changes, changes) != changes;
        if before != 0 && before != epoch {
            self.until = Some(now + ELECTION);
        }
        if changed && self.until.is_some() {
            self.until = Some(now + AFTER_CHANGE);
        }
        self.until.is_some_and(|until| now < until)
    }
}

impl Cluster {
    /// Asks for the map, unless that was just done.
    ///
    /// # Errors
    /// If no node tells.
    pub(super) async fn refresh(self: &Arc<Self>, operation: Operation) -> Result<()> {
        let began = Instant::now();
        let mut refreshed = self.refreshed.lock().await;
        if refreshed.is_some_and(|last| last > began || last.elapsed() < SHORTEST) {
            return Ok(());
        }
        let reported = self.ask(operation).await?;
        *refreshed = Some(Instant::now());
        drop(refreshed);
        self.adopt(reported);
        Ok(())
    }

    /// Asks several nodes at once; [`choose`] says which of them is believed.
    async fn ask(&self, operation: Operation) -> Result<ReportedSlots> {
        let known_epoch = self.epoch.load(Ordering::Relaxed);
        let mut nodes: Vec<Node> = self.map.read().primaries().into_iter().cloned().collect();
        nodes.extend(self.seeds.iter().cloned());
        let mut links: Vec<(Node, Arc<Link>)> = Vec::new();
        for node in nodes {
            if links.iter().all(|(known, _)| *known != node) {
                links.push((node.clone(), self.link(&node)));
            }
        }
        links.sort_by_key(|(_, link)| !link.has_connection());
        links.truncate(ASKED.max(self.seeds.len()));
        let mut asked = JoinSet::new();
        // A call that is given up on ends a silent connection, so it has its usual time.
        let usual = self.settings.call_timeout;
        for (node, link) in links.clone() {
            asked.spawn(async move {
                let reported =
                    tokio::time::timeout(usual, fetch_map(&node, &link, operation)).await;
                reported.unwrap_or_else(|_| Err(errors::silent(link.shown())))
            });
        }
        let (mut answers, mut fault): (Vec<ReportedSlots>, Option<Error>) = (Vec::new(), None);
        let mut until = None;
        loop {
            let next = asked.join_next();
            let answer = match until {
                Some(until) => tokio::time::timeout_at(until, next).await.unwrap_or(None),
                None => next.await,
            };
            match answer {
                Some(Ok(Ok(reported))) => {
                    answers.push(reported);
                    let known = self.map.read();
                    if choose(&known, known_epoch, links.len(), &answers).is_some() {
                        let wait = tokio::time::Instant::now() + OTHER_ANSWERS;
                        until = Some(until.unwrap_or(wait));
                    }
                }
                Some(Ok(Err(error))) => {
                    // What the user must change is worth more than that a node is down.
                    let lasting = |error: &Error| !error.kind().is_retryable();
                    if fault.as_ref().is_none_or(|known| lasting(&error) && !lasting(known)) {
                        fault = Some(error);
                    }
                }
                Some(Err(_)) => {}
                None => break,
            }
        }
        asked.detach_all();
        let foreign = self.identity.foreign_among(links.iter().map(|(node, _)| node));
        if answers.is_empty() && is_anew(foreign, links.len()) {
            tracing::warn!(target: "dlock::redis", "the cluster was created anew");
            self.identity.set(&NodeIds::new()); // the next look may believe them
        }
        let chosen = choose(&self.map.read(), known_epoch, links.len(), &answers);
        match (chosen, fault) {
            (Some(reported), _) => {
                // Their connections may be older than what is known by now.
                let stray = answers.iter().filter(|it| it.is_of_another_cluster_than(&reported));
                let stray: Vec<&Node> = stray.map(|it| &it.teller).collect();
                self.links.lock().retain(|(node, _)| !stray.contains(&node));
                Ok(reported)
            }
            (None, Some(fault)) => Err(fault.with_operation(operation)),
            (None, None) => Err(Error::new(ErrorKind::Unavailable, operation).with_message(
                "the nodes of the Redis Cluster that answer belong to another cluster, were removed, or have an outdated map; it is tried again (see `redis-cli --cluster check`)",
            )),
        }
    }

    /// Uses a new map. If a primary serves nothing any more, a replica was promoted
    /// instead, perhaps without the newest locks.
    fn adopt(&self, ReportedSlots { epoch, map, is_serving, .. }: ReportedSlots) {
        self.identity.set(map.ids());
        self.epoch.store(epoch, Ordering::Relaxed);
        let was_serving = self.is_serving.swap(is_serving, Ordering::Relaxed);
        let (gone, kept) = {
            let mut known = self.map.write();
            let nodes: Vec<Node> = map.primaries().into_iter().cloned().collect();
            let gone: Vec<Node> =
                known.primaries().into_iter().filter(|it| !nodes.contains(it)).cloned().collect();
            if !known.agrees_with(&map) {
                self.map_changes.fetch_add(1, Ordering::Relaxed);
            }
            *known = map;
            (gone, nodes)
        };
        {
            let mut links = self.links.lock();
            for (_, link) in links.iter().filter(|(node, _)| gone.contains(node)) {
                link.demoted();
            }
            links.retain(|(node, _)| kept.contains(node) || self.seeds.contains(node));
        }
        let gone = !gone.is_empty();
        if gone {
            tracing::info!(target: "dlock::redis", "another node of the cluster is a primary");
        }
        // Claims that were refused meanwhile would ask again some time later.
        if (gone || (is_serving && !was_serving))
            && let Some(listener) = self.listener.get().and_then(std::sync::Weak::upgrade)
        {
            listener.on_reconnected();
        }
    }

    /// Looks at the map when it may be old, from the first request on.
    pub(super) fn watch(self: &Arc<Self>) {
        let mut watcher = self.watcher.lock();
        if watcher.as_ref().is_some_and(|watcher| !watcher.0.is_finished()) {
            return;
        }
        let _ = self.runtime.set(tokio::runtime::Handle::current());
        let (stale, leases_begin) = (self.stale.clone(), self.leases_begin.clone());
        let cluster = Arc::downgrade(self);
        let watching = tokio::spawn(async move {
            let (mut pause, mut turn, mut looked) = (LONGEST, 0, Instant::now());
            let mut election = Election::default();
            loop {
                let is_stale = tokio::select! {
                    () = stale.notified() => true,
                    () = leases_begin.notified() => false,
                    () = tokio::time::sleep(pause) => false,
                };
                let Some(cluster) = cluster.upgrade() else { return };
                let is_serving = cluster.is_serving.load(Ordering::Relaxed);
                let is_lost = !cluster.lost_primaries().is_empty() || !is_serving;
                let epoch = cluster.epoch.load(Ordering::Relaxed);
                let changes = cluster.map_changes.load(Ordering::Relaxed);
                let is_voting = election.is_under_way(Instant::now(), epoch, changes);
                if is_stale
                    || is_lost
                    || looked.elapsed() >= LONGEST
                    || is_voting
                    || cluster.has_new_epoch(turn).await
                {
                    looked = Instant::now();
                    let _ = cluster.refresh(Operation::Connect).await;
                }
                turn += 1;
                let lost = cluster.lost_primaries();
                let is_serving = cluster.is_serving.load(Ordering::Relaxed);
                pause = match (lost.is_empty() && is_serving, cluster.is_leased()) {
                    (false, _) => WHILE_LOST,
                    (true, true) => PROBE,
                    (true, false) => LONGEST.saturating_sub(looked.elapsed()),
                };
                for link in lost {
                    // At most two attempts a second are made.
                    tokio::spawn(async move { link.connected(Operation::Connect).await });
                }
                drop(cluster);
                tokio::time::sleep(SHORTEST).await;
            }
        });
        *watcher = Some(AbortOnDrop(watching.abort_handle()));
    }

    /// Whether a primary, each time another one, tells another epoch than that of the map,
    /// or nothing: nobody tells clients of a failover.
    async fn has_new_epoch(&self, turn: usize) -> bool {
        let links: Vec<_> = {
            let map = self.map.read();
            map.primaries().into_iter().filter_map(|node| self.known_link(node)).collect()
        };
        let links: Vec<_> = links.into_iter().filter(|link| link.has_connection()).collect();
        let Some(link) = links.get(turn % links.len().max(1)).cloned() else { return true };
        // A call that is given up on ends a silent connection, so it has its usual time.
        let usual = self.settings.call_timeout;
        let asking = tokio::spawn(async move {
            let info = info();
            tokio::time::timeout(usual, link.command(Operation::Connect, &info)).await
        });
        match tokio::time::timeout(PROBE_TIMEOUT, asking).await {
            Ok(Ok(Ok(Ok(answer)))) => epoch_in(&answer) != Some(self.epoch.load(Ordering::Relaxed)),
            _ => true,
        }
    }

    fn lost_primaries(&self) -> Vec<Arc<Link>> {
        let map = self.map.read();
        let primaries = map.primaries();
        let links = self.links.lock();
        let lost = links.iter().filter(|(node, link)| primaries.contains(&node) && link.is_lost());
        lost.map(|(_, link)| link.clone()).collect()
    }
}

async fn fetch_map(node: &Node, link: &Arc<Link>, operation: Operation) -> Result<ReportedSlots> {
    let ask = async |what: &str| {
        let mut command = cmd("CLUSTER");
        command.arg(what);
        let (live, answer) = link.command_behind(None, operation, &command).await?;
        match &answer {
            Value::ServerError(error)
                if error.details().unwrap_or_default().contains("cluster support disabled") =>
            {
                Err(not_a_cluster(node))
            }
            _ => link.checked(&live, operation, answer),
        }
    };
    // In this order, an old map never has a new epoch.
    let info = ask("INFO").await?;
    let epoch = epoch_in(&info).unwrap_or(0);
    let is_serving = field_in(&info, "cluster_state:") == Some("ok");
    let map = SlotMap::read(&ask("SLOTS").await?, node);
    let map = map.ok_or_else(|| errors::unreadable(operation))?;
    Ok(ReportedSlots { teller: node.clone(), epoch, map, is_serving })
}

fn info() -> redis::Cmd {
    let mut info = cmd("CLUSTER");
    info.arg("INFO");
    info
}

/// The epoch in the answer to `CLUSTER INFO`.
fn epoch_in(answer: &Value) -> Option<u64> {
    field_in(answer, "cluster_current_epoch:")?.parse().ok()
}

/// What follows this name in the answer to `CLUSTER INFO`.
fn field_in<'a>(answer: &'a Value, name: &str) -> Option<&'a str> {
    let text = match answer {
        Value::BulkString(text) => std::str::from_utf8(text).ok()?,
        Value::VerbatimString { text, .. } => text,
        _ => return None,
    };
    text.lines().find_map(|line| line.strip_prefix(name)).map(str::trim)
}

fn not_a_cluster(node: &Node) -> Error {
    Error::new(ErrorKind::Config, Operation::Connect).with_message(format!(
        "the server at {node} is not a node of a Redis Cluster; write redis://{node} for one server"
    ))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_promotion_is_looked_for_until_the_map_has_changed() {
        let (start, mut election) = (Instant::now(), Election::default());
        let mut is_under_way = |seconds, epoch, changes| {
            election.is_under_way(start + Duration::from_secs(seconds), epoch, changes)
        };
        assert!(!is_under_way(0, 7, 1), "the first look");
        assert!(!is_under_way(1, 7, 1));
        assert!(is_under_way(2, 8, 1), "votes are asked for");
        assert!(is_under_way(12, 8, 1), "they take long");
        assert!(is_under_way(13, 8, 2), "the map has changed");
        assert!(is_under_way(14, 8, 2), "another part of it may change");
        assert!(!is_under_way(15, 8, 2));
        assert!(is_under_way(16, 9, 2));
        assert!(!is_under_way(46, 9, 2), "nobody was promoted");
    }
}
