//! The way to the server of a key: one server, or a node of a cluster.

use std::sync::{Arc, Weak};

use redis::{Cmd, Value};

use super::cluster::{Cluster, Sent};
use super::connection::Link;
use super::replication::ServedBy;
use super::scripts::{Run, Scripts};
use crate::backend::Listener;
use crate::error::{Operation, Result};

/// How many partitions a cluster has. More primaries than these share some of them.
const PARTITIONS: usize = 64;

/// The way to the server of a key.
#[derive(Clone)]
pub(super) enum Route {
    Server(Arc<Link>),
    Cluster(Arc<Cluster>),
}

impl Route {
    /// Who is told when a connection was made again.
    pub(super) fn set_listener(&self, listener: Weak<dyn Listener>) {
        match self {
            Route::Server(link) => link.set_listener(listener),
            Route::Cluster(cluster) => cluster.set_listener(listener),
        }
    }

    /// The only server, if there is one.
    pub(super) fn server(&self) -> Option<&Arc<Link>> {
        match self {
            Route::Server(link) => Some(link),
            Route::Cluster(_) => None,
        }
    }

    /// Whether a run of a script must be on one key.
    pub(super) fn wants_one_key(&self) -> bool {
        self.server().is_none_or(|link| link.wants_one_slot())
    }

    /// The scripts. Behind a proxy a slot may move as in a cluster.
    pub(super) fn scripts(&self) -> &'static Scripts {
        if self.wants_one_key() { Scripts::of_a_cluster() } else { Scripts::of_a_server() }
    }

    /// How many slots of a cluster nobody serves.
    pub(super) fn uncovered(&self) -> usize {
        match self {
            Route::Server(_) => 0,
            Route::Cluster(cluster) => cluster.uncovered(),
        }
    }

    pub(super) fn partitions(&self) -> usize {
        match self {
            Route::Server(_) => 1,
            Route::Cluster(_) => PARTITIONS,
        }
    }

    pub(super) fn partition_of(&self, name: &str) -> usize {
        match self {
            Route::Server(_) => 0,
            Route::Cluster(cluster) => cluster.partition_of(name) % PARTITIONS,
        }
    }

    /// Sees to it that there is a connection.
    pub(super) async fn connected(&self, operation: Operation) -> Result<()> {
        match self {
            Route::Server(link) => link.connected(operation).await,
            Route::Cluster(cluster) => cluster.connected(operation).await,
        }
    }

    /// Waits for a link that has a connection, at which notices are heard.
    pub(super) async fn is_up(&self) -> Arc<Link> {
        match self {
            Route::Server(link) => {
                link.is_up().await;
                link.clone()
            }
            Route::Cluster(cluster) => cluster.any_link().await,
        }
    }

    /// Runs a script on a key of this name, and tells on which connection.
    pub(super) async fn run(
        &self,
        operation: Operation,
        name: &str,
        run: &Run,
    ) -> Result<(ServedBy, Value)> {
        match self {
            Route::Server(link) => {
                let (live, answer) = link.run_behind(None, operation, run).await?;
                let answer = link.checked(&live, operation, answer)?;
                Ok(((link.clone(), live), answer))
            }
            Route::Cluster(cluster) => cluster.send(operation, name, Sent::Run(run)).await,
        }
    }

    /// Sends a command on a key of this name.
    pub(super) async fn command(
        &self,
        operation: Operation,
        name: &str,
        command: &Cmd,
    ) -> Result<Value> {
        match self {
            Route::Server(link) => link.command(operation, command).await,
            Route::Cluster(cluster) => {
                let (_, answer) = cluster.send(operation, name, Sent::Command(command)).await?;
                Ok(answer)
            }
        }
    }

    /// The name of the server that serves a key of this name; empty if there is only one.
    pub(super) async fn server_of(&self, operation: Operation, name: &str) -> Result<String> {
        match self {
            Route::Server(_) => Ok(String::new()),
            Route::Cluster(cluster) => cluster.server_of(operation, name).await,
        }
    }

    /// All servers that have keys, each with its name, in an order that stays.
    pub(super) async fn servers(&self, operation: Operation) -> Result<Vec<(String, Arc<Link>)>> {
        match self {
            Route::Server(link) => Ok(vec![(String::new(), link.clone())]),
            Route::Cluster(cluster) => cluster.primaries(operation).await,
        }
    }
}
