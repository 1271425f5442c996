//! What a transaction does for one call, and what its answer says.
//!
//! An acquire is a transaction inside the transaction: it makes the entry if it is not there,
//! and reads all entries of the key unless it is the only one.

use std::sync::Arc;

use etcd_client::{
    Compare, CompareOp, GetOptions, KeyValue, PutOptions, Txn, TxnOp, TxnOpResponse,
};

use super::errors::CallError;
use super::layout::Place;
use super::names::Name;
use super::queues::place;
use super::record::{Record, holder_of};
use super::session::Session;
use crate::claim::{Answer, Claim, Holder, Release};
use crate::error::Operation;

/// What a transaction does for one call.
pub(super) struct Step {
    /// The number of the call in its batch.
    pub(super) at: usize,
    pub(super) claim: Arc<Claim>,
    pub(super) name: Arc<Name>,
    /// The entry that goes when this one is made, and its create revision.
    pub(super) replaced: Option<(Arc<Name>, i64)>,
    pub(super) kind: Kind,
}

#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) enum Kind {
    /// Makes the entry.
    Acquire,
    /// Makes the entry only if there is no other one.
    Probe,
    /// Looks where the entry stands, which was made before.
    Look,
    /// Removes the entry with this create revision.
    Release(i64),
}

impl Step {
    pub(super) fn makes_entry(&self) -> bool {
        matches!(self.kind, Kind::Acquire | Kind::Probe)
    }

    pub(super) fn operation(&self, session: &Session) -> TxnOp {
        let Name { prefix, entry, .. } = &*self.name;
        let look = TxnOp::get(prefix.as_str(), Some(GetOptions::new().with_prefix()));
        match self.kind {
            Kind::Release(revision) => return TxnOp::txn(delete(entry, revision)),
            Kind::Look => return look,
            Kind::Acquire | Kind::Probe => {}
        }
        let options = PutOptions::new().with_lease(session.lease);
        let value = Record::of(&self.claim).encode();
        let make = TxnOp::put(entry.as_str(), value, Some(options));
        let is_missing = Compare::create_revision(entry.as_str(), CompareOp::Equal, 0);
        if let Some((old, revision)) = &self.replaced {
            let leave = TxnOp::txn(delete(&old.entry, *revision));
            if self.kind == Kind::Probe {
                return TxnOp::txn(Txn::new().and_then([leave, look])); // it is made next
            }
            let made = [leave.clone(), make, look.clone()];
            let made = Txn::new().when([is_missing]).and_then(made).or_else([leave, look]);
            return TxnOp::txn(made);
        }
        let is_free = Compare::create_revision(prefix.as_str(), CompareOp::Equal, 0).with_prefix();
        let queue = match self.kind {
            Kind::Probe => look,
            _ => {
                let made = Txn::new().when([is_missing]).and_then([make.clone(), look.clone()]);
                TxnOp::txn(made.or_else([look]))
            }
        };
        TxnOp::txn(Txn::new().when([is_free]).and_then([make]).or_else([queue]))
    }

    /// The entries of the key, by the answer to the operation.
    pub(super) fn queue_in(&self, answer: &TxnOpResponse) -> Queue {
        let found = match answer {
            TxnOpResponse::Txn(made) => {
                if let Some(last) = made.op_responses().pop() {
                    return self.queue_in(&last);
                }
                Vec::new()
            }
            // The entry was made and not looked at, since there is no other one.
            TxnOpResponse::Put(made) => {
                let revision = made.header().map_or(0, etcd_client::ResponseHeader::revision);
                let own = Place { revision, entry: self.name.entry.clone(), mode: self.claim.mode };
                return Queue { places: vec![own], holder: None };
            }
            TxnOpResponse::Get(look) => look.kvs().to_vec(),
            TxnOpResponse::Delete(_) => Vec::new(),
        };
        let found = sorted(&self.name.prefix, found);
        let holder = found.first().map(|(_, entry)| holder_of(entry.value(), entry.lease()));
        Queue { places: found.into_iter().map(|(place, _)| place).collect(), holder }
    }

    /// The answer when the transaction failed. An owner that has an entry, or may have one by
    /// an earlier request, is in doubt, also if this request was not carried out: it would be
    /// forgotten when its caller gives up.
    pub(super) fn failed(&self, session: &Arc<Session>, error: CallError) -> Answer {
        let Claim { key, owner, .. } = &*self.claim;
        if let Kind::Release(_) = self.kind {
            return Answer::Release(Err(error.written(Operation::Release, key)));
        }
        let has_entry = session.claims.has(*owner);
        if has_entry && error.is_passing() {
            return Answer::Acquire(Err(error.in_doubt(Operation::Acquire, key)));
        }
        if has_entry {
            drop(session.start_removal(*owner, Release::Now)); // nobody asks again
        }
        Answer::Acquire(Err(error.written(Operation::Acquire, key)))
    }
}

/// Removes the entry with this create revision, and no later one of the same name.
pub(super) fn delete(entry: &str, revision: i64) -> Txn {
    let is_same = Compare::create_revision(entry, CompareOp::Equal, revision);
    Txn::new().when([is_same]).and_then([TxnOp::delete(entry, None)])
}

/// Whether a delete found its key.
pub(super) fn was_there(answer: &TxnOpResponse) -> bool {
    match answer {
        TxnOpResponse::Delete(deleted) => deleted.deleted() > 0,
        TxnOpResponse::Txn(done) => done.op_responses().iter().any(was_there),
        _ => false,
    }
}

/// The entries of a key.
pub(super) struct Queue {
    /// In their order.
    pub(super) places: Vec<Place>,
    /// Who made the first one.
    pub(super) holder: Option<Arc<Holder>>,
}

/// The entries below a prefix in their order, with what they are.
pub(super) fn sorted(prefix: &str, found: Vec<KeyValue>) -> Vec<(Place, KeyValue)> {
    let mut places: Vec<_> =
        found.into_iter().filter_map(|it| Some((place(prefix, &it)?, it))).collect();
    places.sort_by_key(|(place, _)| place.revision);
    places
}
