//! Nodes: how ours are made, found and removed.

use std::sync::Arc;

use zookeeper_client::{Acls, Client, CreateMode, Error as ZkError};

use super::claims::Node;
use super::layout::is_of;
use super::paths::{ancestors, below};
use super::session::Session;
use super::{ZooKeeper, errors, node_data};
use crate::claim::{Claim, Owner};
use crate::clock::Moment;
use crate::error::{Error, ErrorKind, Operation, Result};

/// Below this a name has no order any more: the counter of the parent is a 32-bit number.
const LAST_SEQUENCE: i64 = i32::MAX as i64;

impl ZooKeeper {
    /// Who may use our nodes.
    pub(super) fn acls(&self) -> Acls<'static> {
        if self.is_private { Acls::creator_all() } else { Acls::anyone_all() }
    }

    /// Makes a node of this claim below `parent` and lists all nodes there, in one round trip.
    pub(super) async fn make_node(
        &self,
        session: &Session,
        claim: &Claim,
        parent: &str,
        name: &str,
    ) -> Result<(Node, Vec<String>)> {
        let failed = |error| errors::written(Operation::Acquire, error).with_key(&claim.key);
        let client = session.client().map_err(failed)?;
        session.claims.doubt(claim.owner, &claim.key);
        let data = node_data::encode(&claim.holder, None);
        let path = below(parent, name);
        let mut parents_made = false;
        loop {
            let options = CreateMode::EphemeralSequential.with_acls(self.acls());
            let mut listing = None;
            let made = session.write(|| {
                let made = client.create(&path, &data, &options);
                listing = Some(client.list_children(parent));
                made
            });
            match made.await {
                Ok((stat, sequence)) => {
                    let node = Node { path: format!("{path}{sequence}"), czxid: stat.czxid };
                    if !(0..LAST_SEQUENCE).contains(&sequence.into_i64()) {
                        return Err(self.run_out(session, &client, claim, &node.path).await);
                    }
                    let children = match listing {
                        Some(listing) => listing.await.map_err(failed)?,
                        None => Vec::new(),
                    };
                    return Ok((node, children));
                }
                Err(ZkError::NoNode) if !parents_made => {
                    parents_made = true;
                    self.make_parents(session, &client, &path).await.map_err(failed)?;
                }
                Err(error) => {
                    if errors::is_answer(&error) {
                        session.claims.refused(claim.owner);
                    }
                    return Err(failed(error));
                }
            }
        }
    }

    /// The order of the nodes of this key has an end.
    async fn run_out(
        &self,
        session: &Session,
        client: &Client,
        claim: &Claim,
        path: &str,
    ) -> Error {
        let _ = session.write(|| client.delete(path, None)).await;
        session.claims.remove(claim.owner);
        Error::new(ErrorKind::Unavailable, Operation::Acquire).with_key(&claim.key).with_message(
            "the node of this key has had 2^31 locks, so the order of new ones cannot be told; delete the node while nobody holds the lock",
        )
    }

    /// Makes the nodes above a path. They are containers: ZooKeeper removes them about a
    /// minute after the last node in them is gone.
    pub(super) async fn make_parents(
        &self,
        session: &Session,
        client: &Client,
        path: &str,
    ) -> Result<(), ZkError> {
        for parent in ancestors(path) {
            let options = CreateMode::Container.with_acls(self.acls());
            match session.write(|| client.create(parent, &[], &options)).await {
                // One that is there already may belong to somebody else.
                Ok(_) | Err(ZkError::NodeExists | ZkError::NoAuth) => {}
                Err(error) => return Err(error),
            }
        }
        Ok(())
    }

    /// The nodes of this owner below `parent`, when a create of it may have gone astray.
    pub(super) async fn find_nodes(
        session: &Session,
        client: &Client,
        parent: &str,
        owner: Owner,
    ) -> Result<Vec<Node>, ZkError> {
        let children = Self::latest_children(session, client, parent).await?;
        let mut nodes = Vec::new();
        for name in children.iter().filter(|name| is_of(name, owner)) {
            let path = below(parent, name);
            match client.check_stat(&path).await? {
                // One of an earlier session goes with it, and holds nothing for us.
                Some(stat) if stat.ephemeral_owner == client.session_id().0 => {
                    nodes.push(Node { path, czxid: stat.czxid });
                }
                _ => {}
            }
        }
        Ok(nodes)
    }

    /// The names of the nodes below `parent`, with all that was written before this call. The
    /// server may be behind the others, and the leader behind its followers: so a write goes
    /// first, which changes nothing. (A `sync` is no help at the leader, which does not wait for
    /// its own writes then.)
    pub(super) async fn latest_children(
        session: &Session,
        client: &Client,
        parent: &str,
    ) -> Result<Vec<String>, ZkError> {
        let (written, listing) = (session.write_nothing(client), client.list_children(parent));
        written.await?;
        or_none(listing.await)
    }

    /// The names of the nodes below `parent`; none if it is not there.
    pub(super) async fn children(client: &Client, parent: &str) -> Result<Vec<String>, ZkError> {
        or_none(client.list_children(parent).await)
    }

    /// Removes nodes, and tells whether one of them was there.
    pub(super) async fn remove_nodes(
        session: &Session,
        client: &Arc<Client>,
        nodes: &[Node],
    ) -> Result<bool, ZkError> {
        let (mut any, now) = (false, Moment::now());
        // The calls leave when they are made, so all are on their way before the first answer.
        let sent: Vec<_> = nodes.iter().map(|node| client.delete(&node.path, None)).collect();
        for removal in sent {
            match removal.await {
                Ok(()) => any = true,
                Err(ZkError::NoNode) => {}
                Err(error) => return Err(error),
            }
            session.wrote(now);
        }
        Ok(any)
    }
}

/// What is known of a node, and nothing if it is not there.
pub(super) fn or_none<T: Default>(answer: Result<T, ZkError>) -> Result<T, ZkError> {
    match answer {
        Err(ZkError::NoNode) => Ok(T::default()),
        answer => answer,
    }
}
