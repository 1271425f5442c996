//! Releases that a failover may have lost.
//!
//! A release that was answered is gone if the promoted replica had not heard of it: the key
//! would stay taken until the end of its ttl, by nobody. So the latest releases are
//! remembered, and made again when a connection was made again
//! or another node is a primary. That is safe: an owner is used once, and a release
//! compares it, so it never touches the lock of a successor.

use std::collections::{HashMap, VecDeque};
use std::sync::{Arc, Weak};
use std::time::{Duration, Instant};

use parking_lot::Mutex;

use super::codec::{self, Names};
use super::join_all::join_all;
use super::route::Route;
use super::scripts::{Run, Scripts};
use crate::backend::{Listener, Notice, Owner};
use crate::claim::{Release, Request};
use crate::error::Operation;
use crate::key::Key;

/// How long before the latest release at a server others are remembered: far more than
/// replication is behind.
const REMEMBERED: Duration = Duration::from_millis(300);
/// The most that are remembered of a server.
const MOST: usize = 2_048;
/// How many leave together.
const TOGETHER: usize = 64;
/// How long they may take.
const PATIENCE: Duration = Duration::from_secs(2);

/// The latest releases at each server. Those at other servers do not push out what is
/// remembered of a server that is down.
pub(super) struct RecentReleases {
    route: Route,
    names: Names,
    of_servers: Mutex<HashMap<usize, VecDeque<Released>>>,
}

/// What was released.
#[derive(Clone)]
struct Released {
    at: Instant,
    key: Key,
    permits: bool,
    owner: Owner,
}

impl RecentReleases {
    pub(super) fn new(route: Route, names: Names) -> Self {
        RecentReleases { route, names, of_servers: Mutex::default() }
    }

    /// Remembers what this request has given back.
    pub(super) fn on_answered(&self, request: &Request) {
        let claim = request.claim();
        let owner = match request {
            Request::Release(_, Release::Now) => Some(claim.owner),
            Request::Acquire(_) => claim.instead_of,
            _ => None,
        };
        let Some(owner) = owner else { return };
        let (key, permits) = (claim.key.clone(), claim.mode.is_permits());
        let server = match &self.route {
            Route::Server(_) => 0,
            Route::Cluster(cluster) => cluster.partition_of(&self.names.state(&key, permits)),
        };
        let released = Released { at: Instant::now(), key, permits, owner };
        let mut of_servers = self.of_servers.lock();
        remember(of_servers.entry(server).or_default(), released);
    }

    /// For each server what was released last. It stays: the server that hears of it now may
    /// be lost too, or may not answer.
    fn latest(&self) -> Vec<Vec<Released>> {
        self.of_servers.lock().values().map(|recent| recent.iter().cloned().collect()).collect()
    }
}

fn remember(recent: &mut VecDeque<Released>, released: Released) {
    let is_old = |old: &Released| released.at.duration_since(old.at) > REMEMBERED;
    while recent.len() >= MOST || recent.front().is_some_and(is_old) {
        recent.pop_front();
    }
    recent.push_back(released);
}

/// Makes releases again when a server was found again, and passes everything on.
pub(super) struct AfterFailover {
    pub(super) listener: Weak<dyn Listener>,
    pub(super) releases: Arc<RecentReleases>,
}

impl Listener for AfterFailover {
    fn on_notice(&self, key: &Key, owner: Owner, notice: Notice) {
        if let Some(listener) = self.listener.upgrade() {
            listener.on_notice(key, owner, notice);
        }
    }

    fn on_reconnected(&self) {
        for released in self.releases.latest() {
            let releases = self.releases.clone();
            tokio::spawn(async move {
                let again = release_again(&releases, &released);
                let _ = tokio::time::timeout(PATIENCE, again).await; // else the ttl ends them
            });
        }
        if let Some(listener) = self.listener.upgrade() {
            listener.on_reconnected();
        }
    }
}

/// Makes releases at one server again.
async fn release_again(
    RecentReleases { route, names, .. }: &RecentReleases,
    released: &[Released],
) {
    let scripts = route.scripts();
    let together = if route.wants_one_key() { 1 } else { TOGETHER };
    for some in released.chunks(TOGETHER) {
        let runs = some.chunks(together).map(|run_of| async {
            let name = names.state(&run_of[0].key, run_of[0].permits);
            route.run(Operation::Release, &name, &run(names, scripts, run_of)).await
        });
        join_all(runs).await;
    }
}

fn run(names: &Names, scripts: &'static Scripts, released: &[Released]) -> Run {
    let mut run = scripts.calls.on(released.len());
    for Released { key, permits, .. } in released {
        run.write(|word| names.write_state(key, *permits, word));
    }
    run.write(|letters| letters.extend(released.iter().map(|_| 'x')));
    for Released { owner, .. } in released {
        run.write(|word| codec::write_mark(*owner, word));
    }
    run
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_was_released_long_before_the_latest_is_forgotten() {
        let (start, key) = (Instant::now(), Key::new("a").unwrap());
        let mut recent = VecDeque::new();
        let mut release = |millis| {
            let (at, owner) = (start + Duration::from_millis(millis), Owner::from_bits(0));
            remember(&mut recent, Released { at, key: key.clone(), permits: false, owner });
            recent.len()
        };
        assert_eq!([0, 200, 300].map(&mut release), [1, 2, 3]);
        assert_eq!(release(450), 3, "the first one is replicated by now");
        assert_eq!(release(5_000), 1);
        assert_eq!((0..5_000).map(|_| release(5_000)).max(), Some(MOST));
    }
}
