//! Telling a node of this cluster from a server that was given its address.
//!
//! An address is no name: a pod dies, and its address is given to a node of another
//! cluster, which answers, and would grant locks that nobody there has heard of. So each
//! connection to a node, once a map is known, begins with the question for its map.

use std::collections::BTreeSet;
use std::sync::Arc;

use parking_lot::Mutex;
use redis::{Value, cmd};

use super::super::connector::Connection;
use super::super::node_ids::{NodeIds, are_of_one_group};
use super::errors;
use super::slots::{Node, SlotMap};
use crate::error::{Error, ErrorKind, Operation, Result};

/// The nodes of a cluster by their ids.
#[derive(Default)]
pub(super) struct Identity {
    /// By the map of this moment; empty while none is known.
    ids: Mutex<NodeIds>,
    /// The addresses at which a node of another cluster answered last.
    foreign: Mutex<BTreeSet<Node>>,
}

impl Identity {
    pub(super) fn set(&self, ids: &NodeIds) {
        self.ids.lock().clone_from(ids);
    }

    /// How many of these addresses lead to another cluster.
    pub(super) fn foreign_among<'a>(&self, nodes: impl IntoIterator<Item = &'a Node>) -> usize {
        let foreign = self.foreign.lock();
        nodes.into_iter().filter(|node| foreign.contains(*node)).count()
    }
}

/// A node that is taken for one of this cluster.
pub(in super::super) struct Member {
    pub(super) node: Node,
    pub(super) identity: Arc<Identity>,
}

impl Member {
    /// Asks the node for its map, before anything else.
    ///
    /// # Errors
    /// `Unavailable` if it belongs to another cluster than the one that is known.
    pub(in super::super) async fn handshake(&self, connection: &Connection) -> Result<()> {
        let Member { node, identity } = self;
        if identity.ids.lock().is_empty() {
            return Ok(());
        }
        let mut slots = cmd("CLUSTER");
        let answer = connection.send(slots.arg("SLOTS")).await;
        let answer = answer.map_err(|error| errors::unanswered(Operation::Connect, &error))?;
        if let Value::ServerError(error) = &answer {
            return Err(errors::refused(Operation::Connect, error));
        }
        let map = SlotMap::read(&answer, node);
        let map = map.ok_or_else(|| errors::unreadable(Operation::Connect))?;
        let ids = identity.ids.lock();
        if ids.is_empty() || are_of_one_group(&ids, map.ids()) {
            identity.foreign.lock().remove(node);
            return Ok(());
        }
        identity.foreign.lock().insert(node.clone());
        Err(Error::new(ErrorKind::Unavailable, Operation::Connect).with_message(format!(
            "the server at {node} does not belong to the Redis Cluster that this client uses: it was removed, or its address was given to a node of another cluster; take the address out of the URL, and restart this program if the cluster was created anew"
        )))
    }
}
