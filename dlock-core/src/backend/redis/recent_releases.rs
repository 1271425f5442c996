//! Releases that a failover may have lost.
//!
//! A release that was answered is gone if the promoted replica had not heard of it: the key
//! would stay taken until the end of its ttl, by nobody. So the latest releases are
//! remembered where there are failovers, and made again when a connection was made again
//! or another node is a primary. That is safe: an owner is used once, and a release
//! compares it, so it never touches the lock of a successor.

use std::collections::VecDeque;
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

/// How long before the latest release others are remembered: far more than replication is
/// behind.
const REMEMBERED: Duration = Duration::from_millis(300);
/// The most that are remembered.
const MOST: usize = 2_048;
/// How many leave together.
const TOGETHER: usize = 64;
/// How long they may take.
const PATIENCE: Duration = Duration::from_secs(2);

/// The latest releases.
#[derive(Default)]
pub(super) struct RecentReleases(Mutex<VecDeque<(Instant, Released)>>);

/// What was released.
struct Released {
    key: Key,
    permits: bool,
    owner: Owner,
}

impl RecentReleases {
    /// Remembers what this request has given back.
    pub(super) fn on_answered(&self, request: &Request) {
        let claim = request.claim();
        let owner = match request {
            Request::Release(_, Release::Now) => Some(claim.owner),
            Request::Acquire(_) => claim.instead_of,
            _ => None,
        };
        let Some(owner) = owner else { return };
        let released = Released { key: claim.key.clone(), permits: claim.mode.is_permits(), owner };
        let now = Instant::now();
        let mut recent = self.0.lock();
        while recent.len() >= MOST
            || recent.front().is_some_and(|(at, _)| now.duration_since(*at) > REMEMBERED)
        {
            recent.pop_front();
        }
        recent.push_back((now, released));
    }

    fn take(&self) -> Vec<Released> {
        self.0.lock().drain(..).map(|(_, released)| released).collect()
    }
}

/// Makes releases again when a server was found again, and passes everything on.
pub(super) struct AfterFailover {
    pub(super) listener: Weak<dyn Listener>,
    pub(super) releases: Arc<RecentReleases>,
    pub(super) route: Route,
    pub(super) names: Names,
    pub(super) scripts: &'static Scripts,
}

impl Listener for AfterFailover {
    fn on_notice(&self, key: &Key, owner: Owner, notice: Notice) {
        if let Some(listener) = self.listener.upgrade() {
            listener.on_notice(key, owner, notice);
        }
    }

    fn on_reconnected(&self) {
        let released = self.releases.take();
        if !released.is_empty() {
            let (route, names, scripts) = (self.route.clone(), self.names.clone(), self.scripts);
            tokio::spawn(async move {
                let again = release_again(&route, &names, scripts, &released);
                let _ = tokio::time::timeout(PATIENCE, again).await; // else the ttl ends them
            });
        }
        if let Some(listener) = self.listener.upgrade() {
            listener.on_reconnected();
        }
    }
}

async fn release_again(
    route: &Route,
    names: &Names,
    scripts: &'static Scripts,
    released: &[Released],
) {
    let one_server = route.server().is_some();
    for some in released.chunks(TOGETHER) {
        // In a cluster a run is on one key.
        let runs = some.chunks(if one_server { TOGETHER } else { 1 }).map(|run_of| async {
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
