//! Exclusive and shared claims: one node each, in one queue.

use std::sync::Arc;
use std::time::Duration;

use tokio::task::JoinHandle;
use zookeeper_client::{Client, CreateMode, Error as ZkError};

use super::claims::{Known, Node};
use super::layout::{self, Kind, Place, QueueStatus, grant, places, queue_status};
use super::nodes::or_none;
use super::paths::{below, parent};
use super::session::Session;
use super::{ZooKeeper, errors, node_data, watches};
use crate::claim::{AcquireOutcome, Claim, Holder, Mode, Owner, ReleaseOutcome, RenewOutcome};
use crate::error::{Error, ErrorKind, Operation, Result};

/// How often a look is repeated because a node went between two calls.
const LOOKS: usize = 16;
/// The pause before a removal that failed is tried again.
const RETRY: Duration = Duration::from_millis(20);

impl ZooKeeper {
    pub(super) async fn acquire_lock(&self, claim: &Claim) -> Result<AcquireOutcome> {
        let parent = self.root.path(&claim.key)?;
        let session = self.sessions.get(Operation::Acquire).await?;
        let failed = |error| errors::written(Operation::Acquire, error).with_key(&claim.key);
        let client = session.client().map_err(failed)?;
        if !claim.queue && session.claims.get(claim.owner).is_none() {
            // Who only tries makes no node if somebody is in the way.
            let in_the_way = |children: &[String]| {
                places(self.layout, children).into_iter().find(|place| {
                    let is_left =
                        claim.instead_of.is_some_and(|old| layout::is_of(&place.name, old));
                    let blocks = place.kind == Kind::Exclusive || claim.mode != Mode::Shared;
                    blocks && !is_left
                })
            };
            let mut children = Self::children(&client, &parent).await.map_err(failed)?;
            if in_the_way(&children).is_some() {
                let latest = Self::latest_children(&session, &client, &parent);
                children = latest.await.map_err(failed)?;
            }
            if let Some(first) = in_the_way(&children) {
                let holder = Self::holder(&client, &below(&parent, &first.name)).await;
                self.leave_old(&session, claim).await?;
                return Ok(AcquireOutcome::Busy { holder });
            }
        }
        self.leave_old(&session, claim).await?;
        let (node, mut children) = self.take_place(&session, claim, &parent).await?;
        for _ in 0..LOOKS {
            let places = places(self.layout, &children);
            let Some(QueueStatus { behind, .. }) = queue_status(&places, node.name()) else {
                session.claims.remove(claim.owner);
                return Err(Error::new(ErrorKind::Unavailable, Operation::Acquire)
                    .with_key(&claim.key)
                    .with_message("the node of this claim was removed by somebody else"));
            };
            let Some(behind) = behind else {
                let term = session.term().await.map_err(failed)?;
                session.claims.hold(claim.owner, &claim.key);
                let grant =
                    grant(node.czxid, claim.tokens).map_err(|error| error.with_key(&claim.key))?;
                return Ok(AcquireOutcome::SessionGranted { grant, term });
            };
            let first = below(&parent, &places[0].name);
            if !claim.queue {
                let holder = Self::holder(&client, &first).await;
                let _ = self.remove_all(claim).await?;
                return Ok(AcquireOutcome::Busy { holder });
            }
            let behind = below(&parent, &behind.name);
            if let Some(holder) =
                self.wait_behind(&session, &client, claim, &behind, &first).await.map_err(failed)?
            {
                return Ok(AcquireOutcome::SessionQueued { holder: Some(holder) });
            }
            children = client.list_children(&parent).await.map_err(failed)?;
        }
        Err(Error::new(ErrorKind::Unavailable, Operation::Acquire)
            .with_key(&claim.key)
            .with_message(
                "the nodes in front of this claim change faster than they can be watched",
            ))
    }

    /// The place of a claim in the queue, made if it is not there, and all nodes of the queue.
    pub(super) async fn take_place(
        &self,
        session: &Session,
        claim: &Claim,
        parent: &str,
    ) -> Result<(Node, Vec<String>)> {
        let failed = |error| errors::written(Operation::Acquire, error).with_key(&claim.key);
        let known = session.claims.get(claim.owner);
        let client = session.client().map_err(failed)?;
        let place = match known {
            Some(Known { is_doubtful: true, .. }) => {
                let found = Self::find_nodes(session, &client, parent, claim.owner).await;
                found.map_err(failed)?.into_iter().next()
            }
            Some(Known { place, .. }) => place,
            None => None,
        };
        let leases = session.claims.get(claim.owner).unwrap_or_default().leases;
        if let Some(node) = place {
            let children = Self::children(&client, parent).await.map_err(failed)?;
            if children.iter().any(|name| name == node.name()) {
                session.claims.set(claim.owner, &claim.key, Some(node.clone()), leases);
                return Ok((node, children));
            }
        }
        let name = match claim.mode {
            Mode::Permits { .. } => layout::mutex_name(claim.owner),
            mode => self.layout.name(claim.owner, mode),
        };
        let (node, children) = self.make_node(session, claim, parent, &name).await?;
        session.claims.set(claim.owner, &claim.key, Some(node.clone()), leases);
        Ok((node, children))
    }

    /// Watches a node, and tells who holds the key; `None` if the node is gone.
    pub(super) async fn wait_behind(
        &self,
        session: &Session,
        client: &Client,
        claim: &Claim,
        behind: &str,
        first: &str,
    ) -> Result<Option<Arc<Holder>>, ZkError> {
        if session.claims.waits_for(claim.owner, behind) {
            return Ok(Some(Self::holder(client, first).await.unwrap_or_else(unknown_holder)));
        }
        let watching = client.get_and_watch_data(behind);
        let holder = (first != behind).then(|| client.get_data(first));
        let (data, watcher) = match watching.await {
            Ok((data, _, watcher)) => (data, watcher),
            Err(ZkError::NoNode) => return Ok(None),
            Err(error) => return Err(error),
        };
        let (owner, key) = (claim.owner, claim.key.clone());
        let listener = self.sessions.listener();
        let watch = watches::ask_again(listener, key, owner, behind.to_owned(), watcher);
        session.claims.wait(owner, &claim.key, watch);
        let data = match holder {
            Some(holder) => holder.await.map(|(data, _)| data).unwrap_or(data),
            None => data,
        };
        Ok(Some(node_data::decode(&data).0))
    }

    /// Who made a node, if it is there.
    pub(super) async fn holder(client: &Client, path: &str) -> Option<Arc<Holder>> {
        client.get_data(path).await.ok().map(|(data, _)| node_data::decode(&data).0)
    }

    /// Removes the lease that a claim takes the place of.
    async fn leave_old(&self, session: &Arc<Session>, claim: &Claim) -> Result<()> {
        match claim.instead_of {
            Some(old)
                if session.claims.get(old).is_some()
                    || session.claims.removals.is_under_way(old) =>
            {
                self.remove_owner(session.clone(), claim, old).await.map(drop)
            }
            _ => Ok(()),
        }
    }

    pub(super) async fn renew_all(&self, leases: &[Arc<Claim>]) -> Vec<Result<RenewOutcome>> {
        let unavailable = |what: &str| {
            let error = Error::new(ErrorKind::Unavailable, Operation::Renew).with_message(what);
            leases.iter().map(|lease| Err(error.clone().with_key(&lease.key))).collect()
        };
        let Some(session) = self.sessions.current() else {
            return leases.iter().map(|_| Ok(RenewOutcome::Lost)).collect();
        };
        if !session.is_connected() {
            return unavailable("the connection to ZooKeeper is broken; it is being restored");
        }
        let Ok(client) = session.client() else {
            return leases.iter().map(|_| Ok(RenewOutcome::Lost)).collect();
        };
        // The calls leave when they are made, so all looks are on their way before the first
        // answer: after a reconnect there may be hundreds of leases.
        let known: Vec<_> = leases.iter().map(|lease| session.claims.get(lease.owner)).collect();
        let looked_at: Vec<_> = known.iter().map(Self::parents_of).collect();
        let looks: Vec<Vec<_>> = looked_at
            .iter()
            .map(|paths| paths.iter().map(|path| client.list_children(path)).collect())
            .collect();
        let mut answers = Vec::with_capacity(leases.len());
        for ((lease, known), looks) in leases.iter().zip(&known).zip(looks) {
            let mut found = Vec::with_capacity(looks.len());
            for look in looks {
                found.push(or_none(look.await));
            }
            let found: Result<Vec<_>, ZkError> = found.into_iter().collect();
            let renewed = self.renew_one(&session, &client, lease, known.as_ref(), found).await;
            answers.push(renewed);
        }
        answers
    }

    /// What is looked at to renew a claim: the nodes beside its own, and of permits also those
    /// that wait for one.
    fn parents_of(known: &Option<Known>) -> Vec<String> {
        let Some(Known { place, leases, .. }) = known else { return Vec::new() };
        match (leases.first(), place) {
            (Some(permit), _) => {
                let permits = parent(&permit.path);
                vec![permits.to_owned(), below(parent(permits), layout::PERMIT_LOCKS)]
            }
            (None, Some(node)) => vec![parent(&node.path).to_owned()],
            (None, None) => Vec::new(),
        }
    }

    async fn renew_one(
        &self,
        session: &Arc<Session>,
        client: &Client,
        lease: &Claim,
        known: Option<&Known>,
        found: Result<Vec<Vec<String>>, ZkError>,
    ) -> Result<RenewOutcome> {
        let failed = |error| errors::written(Operation::Renew, error).with_key(&lease.key);
        let Some(known) = known else { return Ok(RenewOutcome::Lost) };
        let others_wait = match (lease.mode, found.map_err(failed)?.as_slice()) {
            (Mode::Permits { .. }, [taken, waiting]) => Self::permits_held(lease, taken, waiting),
            (Mode::Permits { .. }, _) => None,
            (_, [children, ..]) => {
                self.lock_held(session, client, lease, known, children).await.map_err(failed)?
            }
            _ => None,
        };
        let Some(others_wait) = others_wait else {
            // Some of its permits may be there, and nobody releases what is lost.
            if session.claims.removals.begin(lease.owner) {
                Self::start_removal(session.clone(), lease.owner, self.parents(lease)?);
            }
            return Ok(RenewOutcome::Lost);
        };
        let term = session.term().await.map_err(failed)?;
        Ok(RenewOutcome::SessionHeld { others_wait, term })
    }

    /// Whether others wait for the key; `None` if it is not held.
    async fn lock_held(
        &self,
        session: &Session,
        client: &Client,
        lease: &Claim,
        known: &Known,
        children: &[String],
    ) -> Result<Option<bool>, ZkError> {
        let Some(node) = &known.place else { return Ok(None) };
        let places = places(self.layout, children);
        // A downgrade that was not answered to its end may have left the writer, its reader,
        // or both. The first of them holds the key.
        let is_own = |place: &&Place| match known.is_doubtful {
            true => layout::is_of(&place.name, lease.owner),
            false => place.name == node.name(),
        };
        let Some(own) = places.iter().find(is_own) else { return Ok(None) };
        let Some(QueueStatus { behind: None, others_wait }) = queue_status(&places, &own.name)
        else {
            return Ok(None);
        };
        if lease.mode == Mode::Shared && (own.kind == Kind::Exclusive || known.is_doubtful) {
            self.downgrade(session, client, lease, node, own).await?;
        }
        Ok(Some(others_wait))
    }

    /// Makes a reader of a writer as Curator does: with the same sequence, and before the
    /// writer goes. From the first request on until the last one is answered it is in doubt
    /// which of the two nodes are there.
    async fn downgrade(
        &self,
        session: &Session,
        client: &Client,
        lease: &Claim,
        node: &Node,
        own: &Place,
    ) -> Result<(), ZkError> {
        let parent = parent(&node.path);
        let name = format!("{}{:010}", self.layout.name(lease.owner, Mode::Shared), own.sequence);
        let path = below(parent, &name);
        if !session.claims.doubt_if_there(lease.owner) {
            return Ok(()); // it is being released
        }
        if own.kind == Kind::Exclusive {
            let data = node_data::encode(&lease.holder, None);
            let options = CreateMode::Ephemeral.with_acls(self.acls());
            match session.write(|| client.create(&path, &data, &options)).await {
                Ok(_) | Err(ZkError::NodeExists) => {} // by an attempt that was not answered
                Err(error) => return Err(error),
            }
        }
        // Before the writer goes: its watch would take that for a loss.
        session.claims.renamed(lease.owner, Node { path, czxid: node.czxid });
        if own.kind == Kind::Exclusive {
            let writer = below(parent, &own.name);
            match session.write(|| client.delete(&writer, None)).await {
                Ok(()) | Err(ZkError::NoNode) => {}
                Err(error) => return Err(error),
            }
        }
        session.claims.settled(lease.owner);
        Ok(())
    }

    /// Removes all that an owner has. A node would stay for as long as the session lives, so
    /// this goes on until it is done or the session is over, whoever still waits for it.
    pub(super) async fn remove_all(&self, lease: &Claim) -> Result<ReleaseOutcome> {
        let Some(session) = self.sessions.current() else {
            return Ok(ReleaseOutcome::AlreadyLost); // it went with the session
        };
        self.remove_owner(session, lease, lease.owner).await
    }

    /// Removes all that this owner has of the key of a claim.
    async fn remove_owner(
        &self,
        session: Arc<Session>,
        lease: &Claim,
        owner: Owner,
    ) -> Result<ReleaseOutcome> {
        let parents = self.parents(lease)?;
        while !session.claims.removals.begin(owner) {
            tokio::time::sleep(RETRY).await;
            if !session.claims.removals.is_under_way(owner) && session.claims.get(owner).is_none() {
                return Ok(ReleaseOutcome::Released); // by the removal that was under way
            }
        }
        match Self::start_removal(session, owner, parents).await {
            Ok(Ok(true)) => Ok(ReleaseOutcome::Released),
            Ok(Ok(false) | Err(ZkError::SessionExpired | ZkError::ClientClosed)) => {
                Ok(ReleaseOutcome::AlreadyLost)
            }
            Ok(Err(error)) => Err(errors::written(Operation::Release, error).with_key(&lease.key)),
            Err(_) => Err(Error::new(ErrorKind::Unknown, Operation::Release).with_key(&lease.key)),
        }
    }

    /// Removes all that an owner has of a key, and tries again for as long as that may help.
    /// To be called by whoever made the owner leave.
    fn start_removal(
        session: Arc<Session>,
        owner: Owner,
        parents: Vec<String>,
    ) -> JoinHandle<Result<bool, ZkError>> {
        tokio::spawn(async move {
            let mut outcome = Self::remove_of(&session, owner, &parents).await;
            while outcome.as_ref().is_err_and(errors::may_pass) && !session.is_over() {
                tokio::time::sleep(RETRY).await;
                outcome = Self::remove_of(&session, owner, &parents).await;
            }
            session.claims.removals.end(owner);
            outcome
        })
    }

    /// Removes what is known of an owner or, in doubt, what is found of it.
    async fn remove_of(
        session: &Session,
        owner: Owner,
        parents: &[String],
    ) -> Result<bool, ZkError> {
        let client = session.client()?;
        let nodes = match session.claims.get(owner) {
            Some(Known { is_doubtful: false, place, leases }) => {
                place.into_iter().chain(leases).collect()
            }
            _ => {
                let mut nodes = Vec::new();
                for parent in parents {
                    nodes.extend(Self::find_nodes(session, &client, parent, owner).await?);
                }
                nodes
            }
        };
        // Should the answer be lost, it is looked for.
        session.claims.doubt_again(owner);
        let removed = Self::remove_nodes(session, &client, &nodes).await?;
        session.claims.remove(owner);
        Ok(removed)
    }

    /// The nodes below which a claim may have nodes.
    fn parents(&self, claim: &Claim) -> Result<Vec<String>> {
        let path = self.root.path(&claim.key)?;
        Ok(match claim.mode {
            Mode::Permits { .. } => {
                [layout::PERMIT_LEASES, layout::PERMIT_LOCKS].map(|name| below(&path, name)).into()
            }
            _ => vec![path],
        })
    }
}

fn unknown_holder() -> Arc<Holder> {
    node_data::decode(&[]).0
}
