//! What operators see and do.

use std::sync::Arc;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use zookeeper_client::{Client, Error as ZkError, Stat};

use super::layout::{
    self, Kind, Layout, PERMIT_LEASES, PERMIT_LOCKS, Place, grant, holders, leases, places,
};
use super::node_data::{self, Broken};
use super::nodes::or_none;
use super::paths::below;
use super::{ZooKeeper, errors};
use crate::backend::{Break, HolderState, KeyState, Page, WaiterState};
use crate::claim::Mode;
use crate::error::{Operation, Result};
use crate::key::Key;

/// How long `break_lock` waits for its own removal of the nodes at most.
const MAX_WAIT: Duration = Duration::from_secs(1);

/// The nodes of a key, with their data.
#[derive(Default)]
struct Nodes {
    places: Vec<(Place, Vec<u8>, Stat)>,
    permits: Vec<(Place, Vec<u8>, Stat)>,
    waiting_for_permits: Vec<(Place, Vec<u8>, Stat)>,
    broken_by: Option<String>,
}

impl ZooKeeper {
    async fn nodes_of(&self, client: &Client, path: &str) -> Result<Nodes, ZkError> {
        let (locks, permits) = (below(path, PERMIT_LOCKS), below(path, PERMIT_LEASES));
        // All leave together.
        let key_data = client.get_data(path);
        let children = client.list_children(path);
        let waiting = client.list_children(&locks);
        let taken = client.list_children(&permits);
        let broken_by = match key_data.await {
            Ok((data, _)) => node_data::key_broken_by(&data),
            Err(ZkError::NoNode) => None,
            Err(error) => return Err(error),
        };
        let places = places(self.layout, &or_none(children.await)?);
        let waiting = layout::places(Layout::Mutex, &or_none(waiting.await)?);
        let permits_taken = leases(&or_none(taken.await)?);
        Ok(Nodes {
            places: with_data(client, path, places).await?,
            permits: with_data(client, &permits, permits_taken).await?,
            waiting_for_permits: with_data(client, &locks, waiting).await?,
            broken_by,
        })
    }

    pub(super) async fn state_of(&self, key: &Key) -> Result<KeyState> {
        let path = self.root.path(key).map_err(|error| error.with_operation(Operation::Inspect))?;
        let session = self.sessions.get(Operation::Inspect).await?;
        let failed = |error| errors::read(Operation::Inspect, error).with_key(key);
        let client = session.client().map_err(failed)?;
        let nodes = self.nodes_of(&client, &path).await.map_err(failed)?;
        let expires_in = session.timeout();
        let held =
            holders(&nodes.places.iter().map(|(place, ..)| place.clone()).collect::<Vec<_>>());
        let mut state = KeyState { broken_by: nodes.broken_by, ..KeyState::default() };
        for (at, (place, data, stat)) in nodes.places.into_iter().enumerate() {
            let mode = match place.kind {
                Kind::Exclusive => Mode::Exclusive,
                Kind::Shared => Mode::Shared,
            };
            let holder = node_data::decode(&data).0;
            if at < held {
                let token = token_of(&stat);
                let held_for = age(&stat);
                state.holders.push(HolderState {
                    holder,
                    mode,
                    token,
                    held_for,
                    expires_in,
                    is_over: node_data::broken(&data).is_some(),
                });
            } else {
                state.waiters.push(WaiterState { holder, mode, waiting_for: age(&stat) });
            }
        }
        for permits in nodes.permits.chunk_by(|(one, ..), (two, ..)| one.claim() == two.claim()) {
            let (_, data, stat) = &permits[0];
            let count = u32::try_from(permits.len()).unwrap_or(u32::MAX);
            state.holders.push(HolderState {
                holder: node_data::decode(data).0,
                mode: Mode::Permits { count, of: count },
                token: None,
                held_for: age(stat),
                expires_in,
                is_over: node_data::broken(data).is_some(),
            });
        }
        let holding: Vec<&str> = nodes.permits.iter().map(|(place, ..)| place.claim()).collect();
        for (place, data, stat) in &nodes.waiting_for_permits {
            if !holding.contains(&place.claim()) {
                let holder = node_data::decode(data).0;
                let mode = Mode::Permits { count: 1, of: 1 };
                state.waiters.push(WaiterState { holder, mode, waiting_for: age(stat) });
            }
        }
        Ok(state)
    }

    /// All keys in use with this prefix: the nodes are looked at level by level.
    pub(super) async fn keys_with(&self, prefix: &str) -> Result<Page> {
        let session = self.sessions.get(Operation::List).await?;
        let failed = |error| errors::read(Operation::List, error);
        let client = session.client().map_err(failed)?;
        let wanted = prefix.strip_prefix('/').unwrap_or(prefix);
        let mut keys = Vec::new();
        let mut level = vec![self.root.above(prefix)];
        while !level.is_empty() {
            let listings: Vec<_> = level.iter().map(|path| client.list_children(path)).collect();
            let mut next = Vec::new();
            for (path, listing) in level.iter().zip(listings) {
                let children = or_none(listing.await).map_err(failed)?;
                let name = path.rsplit('/').next().unwrap_or("");
                let of_semaphore = match name {
                    PERMIT_LEASES => !leases(&children).is_empty(),
                    PERMIT_LOCKS => !layout::places(Layout::Mutex, &children).is_empty(),
                    _ => false,
                };
                let above = path.rsplit_once('/').map_or("", |(above, _)| above);
                let is_used = !places(self.layout, &children).is_empty();
                let used = [is_used.then_some(path.as_str()), of_semaphore.then_some(above)];
                keys.extend(used.into_iter().flatten().filter_map(|path| self.root.key(path)));
                let is_node = |name: &&String| {
                    let one = std::slice::from_ref(*name);
                    [Layout::Mutex, Layout::RwLock, Layout::Kazoo]
                        .iter()
                        .all(|layout| layout::places(*layout, one).is_empty())
                        && leases(one).is_empty()
                        && !(path == "/" && name.as_str() == "zookeeper")
                };
                next.extend(children.iter().filter(is_node).map(|name| below(path, name)));
            }
            level = next;
        }
        keys.retain(|key| key.as_str().starts_with(wanted));
        keys.sort();
        keys.dedup();
        Ok(Page { keys, next: None })
    }

    /// Marks the nodes of the holders, so that they hear of it, and removes them later.
    pub(super) async fn break_holders(&self, key: &Key, how: &Break) -> Result<usize> {
        let Break { by, target, delay } = how.clone();
        let path = self.root.path(key).map_err(|error| error.with_operation(Operation::Break))?;
        let session = self.sessions.get(Operation::Break).await?;
        let failed = |error| errors::written(Operation::Break, error).with_key(key);
        let client = session.client().map_err(failed)?;
        let nodes = self.nodes_of(&client, &path).await.map_err(failed)?;
        let places: Vec<Place> = nodes.places.iter().map(|(place, ..)| place.clone()).collect();
        let (parent, held) = match target.is_permits() {
            true => (below(&path, PERMIT_LEASES), &nodes.permits[..]),
            false => (path.clone(), &nodes.places[..holders(&places)]),
        };
        // A name is never used again, so what is done to a node hits nobody who came later.
        let held: Vec<_> = held
            .iter()
            .filter(|(.., stat)| target.includes(token_of(stat)))
            .map(|(place, data, _)| (below(&parent, &place.name), place.claim(), data))
            .collect();
        if held.is_empty() {
            return Ok(0);
        }
        let delay_ms = u64::try_from(delay.as_millis()).unwrap_or(u64::MAX);
        let broken = Broken { by: by.to_string(), delay_ms };
        let record = node_data::encode_key(broken.clone());
        let mut claims: Vec<&str> = Vec::new();
        for (node, claim, data) in &held {
            let (holder, is_ours) = node_data::decode(data);
            if is_ours {
                let data = node_data::encode(&holder, Some(broken.clone()));
                match session.write(|| client.set_data(node, &data, None)).await {
                    Ok(_) => {}
                    Err(ZkError::NoNode) => continue, // who has left is not broken
                    Err(error) => return Err(failed(error)),
                }
            }
            if !claims.contains(claim) {
                claims.push(claim);
            }
        }
        let count = claims.len();
        if count == 0 {
            return Ok(0);
        }
        let _ = session.write(|| client.set_data(&path, &record, None)).await;
        let nodes: Vec<String> = held.iter().map(|(node, ..)| node.clone()).collect();
        let removing = tokio::spawn({
            let (session, client) = (session.clone(), Arc::clone(&client));
            async move {
                tokio::time::sleep(delay).await;
                for node in nodes {
                    let _ = session.write(|| client.delete(&node, None)).await;
                }
            }
        });
        // A command that breaks a lock ends after this call.
        let _ = tokio::time::timeout(MAX_WAIT, removing).await;
        Ok(count)
    }
}

/// Nodes with their data; without those that are gone.
async fn with_data(
    client: &Client,
    parent: &str,
    places: Vec<Place>,
) -> Result<Vec<(Place, Vec<u8>, Stat)>, ZkError> {
    let reads: Vec<_> =
        places.iter().map(|place| client.get_data(&below(parent, &place.name))).collect();
    let mut nodes = Vec::with_capacity(places.len());
    for (place, read) in places.into_iter().zip(reads) {
        match read.await {
            Ok((data, stat)) => nodes.push((place, data, stat)),
            Err(ZkError::NoNode) => {}
            Err(error) => return Err(error),
        }
    }
    Ok(nodes)
}

fn token_of(stat: &Stat) -> Option<u64> {
    grant(stat.czxid, 1).ok().map(|grant| grant.first)
}

/// How long a node is there, by the clocks of server and client.
fn age(stat: &Stat) -> Duration {
    let made = UNIX_EPOCH + Duration::from_millis(stat.ctime.unsigned_abs());
    SystemTime::now().duration_since(made).unwrap_or_default()
}
