//! How leases are renewed: the session is kept alive, and the entries are looked at.

use std::sync::Arc;

use etcd_client::{Compare, CompareOp, GetOptions, PutOptions, Txn, TxnOp, TxnOpResponse};

use super::Inner;
use super::errors::CallError;
use super::layout::holders;
use super::names::Name;
use super::record::Record;
use super::session::Session;
use super::step::sorted;
use crate::backend::SessionTerm;
use crate::claim::{Claim, Mode, Release, RenewOutcome};
use crate::error::{Error, ErrorKind, Operation, Result};

/// How many leases are looked at in one transaction.
const LOOKS: usize = 100;
/// A renewal rests on a keep-alive that is not older than this part of the ttl.
const FRESH: u32 = 12;

impl Inner {
    pub(super) async fn renew_all(&self, leases: &[Arc<Claim>]) -> Vec<Result<RenewOutcome>> {
        let Some(session) = self.sessions.current() else {
            return leases.iter().map(|_| Ok(RenewOutcome::Lost)).collect();
        };
        let looking = async {
            let mut found = Vec::with_capacity(leases.len());
            for leases in leases.chunks(LOOKS) {
                found.extend(self.look_at(&session, leases).await);
            }
            found
        };
        let (term, found) = tokio::join!(session.term(session.ttl / FRESH), looking);
        if session.is_over() {
            return leases.iter().map(|_| Ok(RenewOutcome::Lost)).collect();
        }
        let renewed = |(lease, found): (&Arc<Claim>, Result<Option<bool>>)| match (found?, term) {
            (Some(others_wait), Some(term)) => Ok(RenewOutcome::SessionHeld { others_wait, term }),
            (None, _) => Ok(RenewOutcome::Lost),
            (_, None::<SessionTerm>) => Err(Error::new(ErrorKind::Unavailable, Operation::Renew)
                .with_key(&lease.key)
                .with_message(
                    "etcd did not answer that the session lives; the connection is being restored",
                )),
        };
        leases.iter().zip(found).map(renewed).collect()
    }

    /// Whether others wait for each key; `None` if it is not held.
    async fn look_at(
        &self,
        session: &Arc<Session>,
        leases: &[Arc<Claim>],
    ) -> Vec<Result<Option<bool>>> {
        let looks: Vec<TxnOp> = leases
            .iter()
            .map(|lease| match self.root.prefix(&lease.key, lease.mode) {
                Ok(prefix) => TxnOp::get(prefix, Some(GetOptions::new().with_prefix())),
                Err(_) => TxnOp::get(self.root.nothing(), None),
            })
            .collect();
        let answers = match session.transaction(Txn::new().and_then(looks)).await {
            Ok(answer) => answer.op_responses(),
            Err(CallError::SessionOver) => return leases.iter().map(|_| Ok(None)).collect(),
            Err(error) => {
                let error = error.read(Operation::Renew);
                return leases
                    .iter()
                    .map(|lease| Err(error.clone().with_key(&lease.key)))
                    .collect();
            }
        };
        let mut found = Vec::with_capacity(leases.len());
        for (lease, answer) in leases.iter().zip(answers) {
            found.push(self.is_held(session, lease, answer).await);
        }
        found
    }

    async fn is_held(
        &self,
        session: &Arc<Session>,
        lease: &Claim,
        answer: TxnOpResponse,
    ) -> Result<Option<bool>> {
        let Some(known) = session.claims.get(lease.owner) else { return Ok(None) };
        let Name { prefix, entry, .. } = &*known.name;
        let TxnOpResponse::Get(mut look) = answer else { return Ok(None) };
        let found = sorted(prefix, look.take_kvs());
        let places: Vec<_> = found.iter().map(|(place, _)| place.clone()).collect();
        let held = holders(&places);
        let Some(own) = places.iter().position(|place| place.entry == *entry) else {
            session.discard(lease.owner);
            return Ok(None);
        };
        if own >= held {
            // Nobody asks for the entry any more, and it would be in the way of others.
            drop(session.start_removal(lease.owner, Release::Now));
            return Ok(None);
        }
        if lease.mode == Mode::Shared && places[own].mode == Mode::Exclusive {
            let record = Record::decode(found[own].1.value()).unwrap_or_else(|| Record::of(lease));
            let record = record.downgraded();
            let downgraded = self.downgrade(session, entry, places[own].revision, &record);
            downgraded.await.map_err(|error| error.written(Operation::Renew, &lease.key))?;
        }
        Ok(Some(places.len() > held))
    }

    /// Makes a reader of a writer: the entry stays where it is.
    async fn downgrade(
        &self,
        session: &Session,
        entry: &str,
        revision: i64,
        record: &Record,
    ) -> Result<(), CallError> {
        let options = PutOptions::new().with_lease(session.lease);
        let is_there = Compare::create_revision(entry, CompareOp::Equal, revision);
        let put = TxnOp::put(entry, record.encode(), Some(options));
        session.transaction(Txn::new().when([is_there]).and_then([put])).await.map(drop)
    }
}
