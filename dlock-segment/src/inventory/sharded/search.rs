//! A bare id in an inventory that is routed by buyer: its home is found by looking in all.
//!
//! There an operation is known by its buyer and its id, so a bare id is acted upon only if all
//! homes have answered and one of them alone has it.

use std::sync::Arc;

use futures_util::future::join_all;
use tokio::time::Instant;

use super::{Inventory, ShardedInventory};
use crate::error::{Error, OperationId, Result};
use crate::homes::{Routing, out_of_reach};
use crate::store::{Answer, Id, Request, Snapshot, Status};

/// What one home answered.
type Answered = Result<(Snapshot, Answer)>;

impl ShardedInventory {
    /// Finds the home of an id and sends the request there. If no home has it, a request
    /// that settles the id for good goes to all of them.
    pub(in super::super) async fn search(
        self: &Arc<Self>,
        sale: &Inventory,
        request: Request,
        id: Option<&Id>,
        deadline: Instant,
    ) -> Answered {
        let of = match &request {
            Request::Refund { of, .. } => Some(of),
            _ => id,
        };
        let Some(operation) = of.cloned() else {
            return Err(Error::Invalid("the request has no operation id".into()));
        };
        let look = Request::Look { operation };
        let looked = self.ask_all(sale, &look, of, deadline).await;
        if self.directory.routing == Routing::Buyer
            && let Some(error) = out_of_reach(&looked)
        {
            return Err(error); // it may have an operation of another buyer with this id
        }
        let mut found = (0..).zip(&looked).filter(|(_, answered)| is_record(answered));
        match (found.next(), found.next()) {
            (Some((home, _)), None) => {
                return self.send_to(sale, home, request, id, deadline).await;
            }
            (Some(_), Some(_)) => {
                return Err(Error::Conflict(
                    "several buyers have an operation with this id; name the buyer with .buyer(id), or give the receipt"
                        .into(),
                ));
            }
            (None, _) => {}
        }
        if let Some(error) = out_of_reach(&looked) {
            return Err(error);
        }
        let settles = matches!(request, Request::Resolve { .. } | Request::Cancel { .. });
        if !settles {
            // No home has it, or only a tombstone: any home gives that answer.
            let is_found = |answered: &Answered| matches!(answered, Ok((_, Answer::Found(_))));
            let home = looked.iter().position(is_found).unwrap_or(0);
            return self.send_to(sale, home, request, id, deadline).await;
        }
        let settled = self.ask_all(sale, &request, id, deadline).await;
        if let Some(record) = settled.iter().position(is_record) {
            return settled.into_iter().nth(record).unwrap_or(Err(Error::Unknown(None)));
        }
        if out_of_reach(&settled).is_some() {
            return Err(Error::Unknown(id.map(|id| OperationId(id.clone()))));
        }
        // If a home has no room for a tombstone, nothing is settled.
        let full = settled.iter().position(|it| !matches!(it, Ok((_, Answer::Found(_)))));
        settled.into_iter().nth(full.unwrap_or(0)).unwrap_or(Err(Error::Unknown(None)))
    }

    async fn ask_all(
        &self,
        sale: &Inventory,
        request: &Request,
        id: Option<&Id>,
        deadline: Instant,
    ) -> Vec<Answered> {
        let homes = 0..self.count();
        join_all(homes.map(|home| self.ask(sale, home, request.clone(), id, deadline, true))).await
    }
}

/// Whether a home has a record of the operation, other than that it is refused.
fn is_record(answered: &Answered) -> bool {
    match answered {
        Ok((_, Answer::Found(record))) => record.status != Status::Tombstone,
        Ok((_, Answer::Absent | Answer::Full)) | Err(_) => false,
        Ok(_) => true, // it belongs to another kind of request, or cannot be read
    }
}
