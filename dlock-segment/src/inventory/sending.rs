//! How a request is sent.

use tokio::time::Instant;

use super::Inventory;
use super::backing::{Backing, refuse_after_shutdown};
use super::sharded::Hint;
use super::unknown_outcomes::UnknownOutcomes;
use crate::error::Result;
use crate::observe;
use crate::store::{Answer, Id, InventoryId, Request, Snapshot};

impl Inventory {
    /// Sends a request. If it has an id, it is sent again while its outcome is not known.
    pub(super) async fn send(
        &self,
        request: Request,
        id: Option<&Id>,
        deadline: Instant,
    ) -> Result<(Snapshot, Answer)> {
        self.send_to(request, &Hint::default(), id, deadline).await
    }

    /// Sends a request of whose home more is known.
    pub(super) async fn send_to(
        &self,
        request: Request,
        hint: &Hint,
        id: Option<&Id>,
        deadline: Instant,
    ) -> Result<(Snapshot, Answer)> {
        refuse_after_shutdown(&self.dlock)?;
        let only_reads = !request.class().counts_units;
        let shared = &*self.shared;
        let answered = match &shared.sharded {
            None => {
                let backing = &shared.backing;
                backing
                    .send(&shared.inventory, &shared.unknown_outcomes, request, id, deadline, true)
                    .await
            }
            Some(sharded) => sharded.send(self, request, hint, id, deadline).await,
        };
        if let (Ok((snapshot, answer)), None) = (&answered, &shared.sharded) {
            shared.admission.update(snapshot, answer, self.sold_out_for);
            shared.unknown_outcomes.count_tombstones(&shared.inventory.key, snapshot);
        }
        observe::answered(&shared.inventory.key, &shared.failures, &answered, only_reads);
        answered
    }

    /// Spreads units that came to one home over the others. If it fails, they are brought to
    /// a home when it needs them.
    pub(super) async fn spread(&self) {
        if let Some(sharded) = &self.shared.sharded {
            let _ = sharded.balance(true).await;
        }
    }
}

impl Backing {
    /// Sends a request to one home. Unless `is_final`, "sold out" leaves the id in doubt if it
    /// was.
    pub(super) async fn send(
        &self,
        inventory: &InventoryId,
        unknown_outcomes: &UnknownOutcomes,
        request: Request,
        id: Option<&Id>,
        deadline: Instant,
        is_final: bool,
    ) -> Result<(Snapshot, Answer)> {
        match self {
            Backing::Memory(memory, home) => loop {
                match memory.apply_one(inventory, home, &request) {
                    Ok((_, Answer::Again)) => {}
                    answered => {
                        break answered.map(|(view, answer)| (Snapshot::from(&view), answer));
                    }
                }
            },
            Backing::Remote(_, combiner) => match id {
                Some(id) => {
                    unknown_outcomes.settle(combiner, request, id, deadline, is_final).await
                }
                None => combiner.send(request).until(deadline).await,
            },
        }
    }
}
