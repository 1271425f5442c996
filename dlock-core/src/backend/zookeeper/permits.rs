//! Permits of a semaphore, as Curator's `InterProcessSemaphoreV2` has them.
//!
//! Who wants permits takes the mutex `P/locks` first. Who has it waits until there is room
//! below `P/leases`, makes a node there for each permit, and leaves the mutex. So permits are
//! given in the order of the mutex, and nobody overtakes one who wants many.

use zookeeper_client::{Client, CreateMode, Error as ZkError};

use super::claims::{Known, Node};
use super::layout::{self, Layout, PERMIT_LEASES, PERMIT_LOCKS, leases, places, queue_status};
use super::paths::below;
use super::session::Session;
use super::{ZooKeeper, errors, node_data, watches};
use crate::claim::{AcquireOutcome, Claim, Grant, Mode};
use crate::error::{Error, ErrorKind, Operation, Result};

/// Permits have no tokens.
const NO_TOKENS: Grant = Grant { first: 0, count: 0 };
/// How often a look is repeated because a node went between two calls.
const LOOKS: usize = 16;

/// How many permits of how many a claim wants.
fn wanted(claim: &Claim) -> (usize, usize) {
    match claim.mode {
        Mode::Permits { count, of } => (count as usize, of as usize),
        _ => (1, 1),
    }
}

impl ZooKeeper {
    pub(super) async fn acquire_permits(&self, claim: &Claim) -> Result<AcquireOutcome> {
        let path = self.root.path(&claim.key)?;
        let (locks, permits) = (below(&path, PERMIT_LOCKS), below(&path, PERMIT_LEASES));
        let session = self.sessions.get(Operation::Acquire).await?;
        let failed = |error| errors::written(Operation::Acquire, error).with_key(&claim.key);
        let client = session.client().map_err(failed)?;
        let (count, of) = wanted(claim);
        if let Some(known) = self.known_permits(&session, &client, claim, &permits).await? {
            if known.leases.len() >= count {
                return self.granted(&session, &client, claim, known).await;
            }
        } else if !claim.queue {
            // Who only tries makes no node if there is no room, or if somebody waits.
            let is_full = |waiting: &[String], taken: &[String]| {
                !places(Layout::Mutex, waiting).is_empty() || leases(taken).len() + count > of
            };
            let waiting = Self::children(&client, &locks).await.map_err(failed)?;
            let taken = Self::children(&client, &permits).await.map_err(failed)?;
            if is_full(&waiting, &taken) {
                let latest = Self::latest_children(&session, &client, &locks);
                let waiting = latest.await.map_err(failed)?;
                let taken = Self::children(&client, &permits).await.map_err(failed)?;
                if is_full(&waiting, &taken) {
                    let first = leases(&taken).first().map(|place| below(&permits, &place.name));
                    let holder = match first {
                        Some(first) => Self::holder(&client, &first).await,
                        None => None,
                    };
                    return Ok(AcquireOutcome::Busy { holder });
                }
            }
        }
        let (place, mut waiting) = self.take_place(&session, claim, &locks).await?;
        for _ in 0..LOOKS {
            let queue = places(Layout::Mutex, &waiting);
            let Some(status) = queue_status(&queue, place.name()) else {
                session.claims.remove(claim.owner);
                return Err(removed(claim));
            };
            if let Some(behind) = status.behind {
                if !claim.queue {
                    let _ = self.remove_all(claim).await?;
                    return Ok(AcquireOutcome::Busy { holder: None });
                }
                let behind = below(&locks, &behind.name);
                let holder = self.wait_behind(&session, &client, claim, &behind, &behind).await;
                if let Some(holder) = holder.map_err(failed)? {
                    return Ok(AcquireOutcome::SessionQueued { holder: Some(holder) });
                }
                waiting = Self::children(&client, &locks).await.map_err(failed)?;
                continue;
            }
            let own = session.claims.get(claim.owner).unwrap_or_default().leases;
            let watched = match client.get_and_watch_children(&permits).await {
                Err(ZkError::NoNode) => {
                    let node = below(&permits, "x");
                    self.make_parents(&session, &client, &node).await.map_err(failed)?;
                    continue;
                }
                watched => watched,
            };
            let (taken, _, watcher) = watched.map_err(failed)?;
            let taken = leases(&taken);
            let others = taken.iter().filter(|place| !layout::is_of(&place.name, claim.owner));
            if others.count() + count <= of {
                drop(watcher);
                let known = Known { is_doubtful: false, place: Some(place), leases: own };
                let known = self.make_permits(&session, &client, claim, known, &permits).await?;
                return self.granted(&session, &client, claim, known).await;
            }
            let first = taken.first().map(|place| below(&permits, &place.name));
            let holder = match first {
                Some(first) => Self::holder(&client, &first).await,
                None => None,
            };
            if !claim.queue {
                let _ = self.remove_all(claim).await?;
                return Ok(AcquireOutcome::Busy { holder });
            }
            let (owner, key) = (claim.owner, claim.key.clone());
            let listener = self.sessions.listener();
            let watch = watches::ask_again(listener, key, owner, permits.clone(), watcher);
            session.claims.wait(owner, &claim.key, watch);
            return Ok(AcquireOutcome::SessionQueued { holder });
        }
        Err(removed(claim))
    }

    /// What the owner has, after a look if that is in doubt; `None` if it never asked.
    async fn known_permits(
        &self,
        session: &Session,
        client: &Client,
        claim: &Claim,
        permits: &str,
    ) -> Result<Option<Known>> {
        let failed = |error| errors::written(Operation::Acquire, error).with_key(&claim.key);
        let Some(known) = session.claims.get(claim.owner) else { return Ok(None) };
        if !known.is_doubtful {
            return Ok(Some(known));
        }
        let path = permits.rsplit_once('/').map_or("/", |(path, _)| path);
        let locks = below(path, PERMIT_LOCKS);
        let place =
            Self::find_nodes(session, client, &locks, claim.owner).await.map_err(failed)?.pop();
        let leases =
            Self::find_nodes(session, client, permits, claim.owner).await.map_err(failed)?;
        session.claims.set(claim.owner, &claim.key, place.clone(), leases.clone());
        Ok(Some(Known { is_doubtful: false, place, leases }))
    }

    /// Makes the nodes of the permits that are missing. One call each, so that each is a
    /// transaction of its own.
    async fn make_permits(
        &self,
        session: &Session,
        client: &Client,
        claim: &Claim,
        mut known: Known,
        permits: &str,
    ) -> Result<Known> {
        let failed = |error| errors::written(Operation::Acquire, error).with_key(&claim.key);
        let path = below(permits, &layout::lease_name(claim.owner));
        let data = node_data::encode(&claim.holder, None);
        let options = CreateMode::EphemeralSequential.with_acls(self.acls());
        session.claims.doubt(claim.owner, &claim.key);
        let missing = wanted(claim).0.saturating_sub(known.leases.len());
        let now = crate::clock::Moment::now();
        let sent: Vec<_> = (0..missing).map(|_| client.create(&path, &data, &options)).collect();
        for made in sent {
            let (stat, sequence) = made.await.map_err(failed)?;
            session.wrote(now);
            known.leases.push(Node { path: format!("{path}{sequence}"), czxid: stat.czxid });
        }
        session.claims.set(claim.owner, &claim.key, known.place.clone(), known.leases.clone());
        Ok(known)
    }

    /// Leaves the mutex: the permits are there.
    async fn granted(
        &self,
        session: &Session,
        client: &std::sync::Arc<Client>,
        claim: &Claim,
        known: Known,
    ) -> Result<AcquireOutcome> {
        let failed = |error| errors::written(Operation::Acquire, error).with_key(&claim.key);
        if let Some(place) = known.place {
            Self::remove_nodes(session, client, &[place]).await.map_err(failed)?;
            session.claims.set(claim.owner, &claim.key, None, known.leases);
        }
        let term = session.term().await.map_err(failed)?;
        session.claims.hold(claim.owner, &claim.key);
        Ok(AcquireOutcome::SessionGranted { grant: NO_TOKENS, term })
    }

    /// Whether others wait for permits; `None` if ours are not there.
    pub(super) fn permits_held(
        lease: &Claim,
        taken: &[String],
        waiting: &[String],
    ) -> Option<bool> {
        let own = taken.iter().filter(|name| layout::is_of(name, lease.owner)).count();
        let others_wait = !places(Layout::Mutex, waiting).is_empty();
        (own >= wanted(lease).0).then_some(others_wait)
    }
}

fn removed(claim: &Claim) -> Error {
    Error::new(ErrorKind::Unavailable, Operation::Acquire)
        .with_key(&claim.key)
        .with_message("the node of this claim was removed by somebody else")
}
