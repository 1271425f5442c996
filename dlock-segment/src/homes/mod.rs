//! A sale over several homes: what holds between the homes, over any store.
//!
//! # What is promised
//!
//! ```text
//! I1  for each home    initial + restocked + received
//!                        = available + reserved + sold + written off + sent
//! I2  for each pair    received[A at B] <= sent[B at A]; the difference is in transit
//! I3  for the sale     initial + restocked
//!                        = available + reserved + sold + written off + in transit
//! I4  "sold out"       is answered only if there was a moment, after the request, at which
//!                        all homes together had too little and nothing was in transit
//! ```
//!
//! Every step is one request to one home. Whoever takes it may die after any of them:
//! - a process that died after a send leaves units in transit. Whoever looks at both homes
//!   next has them received ([`finish`](Homes::finish));
//! - a home that lost its last changes (a failover to a replica that was behind) breaks I2 by
//!   exactly what it lost, and only then. If it was the sender, it has units that are at the
//!   receiver too. They are taken out by sending them again: the receiver, which has them,
//!   counts nothing.
//!
//! # The proof of "sold out"
//!
//! All homes are looked at, and then all of them once more. If a home has the same `inflow`
//! (all that ever became available) and the same counters in both looks, then nothing became
//! available and nothing was moved between them, so it had at most what the first look saw
//! all that time. So at any moment between the two looks all homes together had at most the
//! sum of the first look, and exactly what the counters say was in transit.

mod consistency;
mod directory;
mod moves;
mod plan;
mod settings;
mod sold_out;
#[cfg(all(test, feature = "simulation"))]
mod tests_simulation;

use std::future::Future;
use std::sync::Arc;
use std::time::Duration;

use dlock::Dlock;
use futures_util::future::join_all;
use parking_lot::Mutex;

pub(crate) use self::consistency::compare as compare_homes;
pub(crate) use self::directory::{Directory, home_of};
pub use self::directory::{MAX_HOMES, Routing};
pub(crate) use self::settings::newest as newest_settings;
pub(crate) use self::sold_out::{Refilled, out_of_reach};
use crate::error::{Error, Result};
use crate::inventory::on_driver;
use crate::store::{Answer, Change, InventoryId, Request, Store, View};

/// How long a home is waited for if others may have units, or if it did not answer before.
const PATIENCE: Duration = Duration::from_millis(100);

/// Where one home is.
#[derive(Clone)]
pub(crate) struct Site {
    pub(crate) store: Arc<dyn Store>,
    pub(crate) id: InventoryId,
    /// The client on whose driver the store is called; `None` in the simulation.
    pub(crate) dlock: Option<Dlock>,
}

/// All homes of a sale, in the order of the directory.
#[derive(Clone)]
pub(crate) struct Homes {
    pub(crate) sites: Vec<Site>,
    /// Why each home did not answer when it was last looked at.
    away: Arc<Mutex<Vec<Option<Error>>>>,
    /// The bug that a simulation planted.
    #[cfg(test)]
    pub(crate) answers_in_transit: bool,
}

/// One home at one moment, with its counters for each home of the sale.
#[derive(Clone, Debug)]
pub(crate) struct Seen {
    pub(crate) view: View,
    pub(crate) sent: Vec<u64>,
    /// What was received, and the latest change of the sender that was named.
    pub(crate) received: Vec<(u64, u64)>,
}

/// What all homes answered.
pub(crate) type Collected = Vec<Result<Seen>>;

impl Site {
    /// Makes a call where the connections of the store are.
    pub(crate) async fn call<T, C, F>(&self, call: C) -> Result<T>
    where
        T: Send + 'static,
        C: FnOnce(Arc<dyn Store>, InventoryId) -> F + Send + 'static,
        F: Future<Output = Result<T>> + Send + 'static,
    {
        let id = self.id.clone();
        match &self.dlock {
            None => call(self.store.clone(), id).await,
            Some(dlock) => on_driver(dlock, self.store.clone(), move |store| call(store, id)).await,
        }
    }

    pub(crate) async fn apply(&self, batch: Vec<Request>) -> Result<(View, Vec<Answer>)> {
        self.call(|store, id| async move { store.apply(&id, &batch).await }).await
    }

    pub(crate) async fn change(&self, change: Change) -> Result<View> {
        self.call(move |store, id| async move { store.change(&id, change).await }).await
    }
}

impl Homes {
    pub(crate) fn new(sites: Vec<Site>) -> Self {
        Homes {
            sites,
            away: Arc::default(),
            #[cfg(test)]
            answers_in_transit: false,
        }
    }

    pub(crate) fn count(&self) -> usize {
        self.sites.len()
    }

    /// Looks at a home, after what expired there was given back.
    async fn look(&self, home: usize) -> Result<Seen> {
        let count = self.count() as u32;
        let sent = (0..count).map(|to| Request::Send { to, quantity: 0, after: 0 });
        let received = (0..count).map(|from| Request::Receive { from, total: 0, seen: 0 });
        let requests: Vec<Request> = sent.chain(received).collect();
        loop {
            let (view, answers) = self.sites[home].apply(requests.clone()).await?;
            // Thousands of reservations that expired together are given back in steps.
            if view.next_expiry != 0 && view.next_expiry <= view.now {
                continue;
            }
            let moved = answers.iter().map(|answer| match *answer {
                Answer::Moved { total, seen } => Ok((total, seen)),
                ref other => Err(Error::Conflict(format!("the store answered {other:?}"))),
            });
            let moved = moved.collect::<Result<Vec<_>>>()?;
            let (sent, received) = moved.split_at(self.count());
            let sent = sent.iter().map(|(total, _)| *total).collect();
            return Ok(Seen { view, sent, received: received.to_vec() });
        }
    }

    /// Looks at all homes at once.
    pub(crate) async fn collect(&self) -> Collected {
        join_all((0..self.count()).map(|home| self.look(home))).await
    }

    /// Looks at all homes at once, without much patience for those that are away or slow.
    /// With `quickly`, it has little patience for any.
    async fn collect_near(&self, quickly: bool) -> Collected {
        join_all((0..self.count()).map(|home| self.look_near(home, quickly))).await
    }

    async fn look_near(&self, home: usize, quickly: bool) -> Result<Seen> {
        let known = self.away.lock().get(home).cloned().flatten();
        // A simulation has no clock of its own.
        if self.sites[home].dlock.is_none() || (known.is_none() && !quickly) {
            return self.look(home).await.inspect_err(|error| self.note_away(home, error));
        }
        // A late answer still tells whether the home is there: it may be far away.
        let homes = self.clone();
        let looking = tokio::spawn(async move {
            let seen = homes.look(home).await;
            match &seen {
                Ok(_) => homes.forget_away(home),
                Err(error) => homes.note_away(home, error),
            }
            seen
        });
        match tokio::time::timeout(PATIENCE, looking).await {
            Ok(Ok(seen)) => seen,
            Ok(Err(_)) | Err(_) => Err(known.unwrap_or_else(slow)),
        }
    }

    /// Remembers that a home does not answer, until it does.
    fn note_away(&self, home: usize, error: &Error) {
        if matches!(error, Error::Store(_) | Error::Unknown(_)) && self.sites[home].dlock.is_some()
        {
            let mut away = self.away.lock();
            away.resize(self.count(), None);
            away[home] = Some(error.clone());
        }
    }

    fn forget_away(&self, home: usize) {
        if let Some(away) = self.away.lock().get_mut(home) {
            *away = None;
        }
    }
}

/// The error of a home that is not waited for.
fn slow() -> Error {
    Error::Store(
        dlock::Error::new(dlock::ErrorKind::Unavailable, dlock::Operation::Inventory)
            .with_message("the home answers too slowly; nothing was taken; try again"),
    )
}

/// The counts of all homes together. The first of them stands for what they share.
pub(crate) fn whole<'a>(views: impl IntoIterator<Item = &'a View>) -> View {
    let mut views = views.into_iter();
    let Some(mut sum) = views.next().cloned() else { return View::default() };
    for view in views {
        sum.now = sum.now.max(view.now);
        sum.available += view.available;
        sum.reserved += view.reserved;
        sum.sold += view.sold;
        sum.initial += view.initial;
        sum.restocked += view.restocked;
        sum.written_off += view.written_off;
        sum.holds += view.holds;
        sum.sold_by_id += view.sold_by_id;
        sum.changes += view.changes;
        sum.sent += view.sent;
        sum.received += view.received;
        sum.inflow += view.inflow;
        sum.leased += view.leased;
        sum.tombstones = sum.tombstones.max(view.tombstones);
        sum.next_expiry = match (sum.next_expiry, view.next_expiry) {
            (0, other) | (other, 0) => other,
            (one, other) => one.min(other),
        };
    }
    sum
}
