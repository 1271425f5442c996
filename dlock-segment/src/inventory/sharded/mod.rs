//! An inventory with several homes: each request goes to one of them.
//!
//! ```text
//! answered ----------------------------------------------------> done, one round trip
//! sold out there -- units were brought -----------------------> sent again
//!                -- proven that there are none ---------------> sold out
//!                -- a home cannot be reached -----------------> `OutOfReach`
//! ```
//! A request whose home cannot be reached fails like one of an inventory with one home. It
//! never goes to another home, where its id could have its effect again.

mod balance;
mod create;
mod names;
mod open;
mod repair;
mod search;
mod totals;

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use dlock::Dlock;
use parking_lot::Mutex;
use tokio::time::Instant;

use self::balance::Balancer;
pub(super) use self::create::NewSale;
pub(super) use self::totals::limit_needs_buyers;
use super::backing::Backing;
use super::combiner::LIMITS_OF_ONE_HOME;
use super::unknown_outcomes::UnknownOutcomes;
use super::{Inventory, checks};
use crate::error::{Error, OperationId, Result};
use crate::homes::{Directory, Homes, Refilled, Routing, Site, home_of};
use crate::store::{Answer, Id, Request, Snapshot, View};

/// How many requests without an id go to one home before the next one has its turn: about
/// as many as share a call.
const PER_TURN: u64 = 256;
/// The longest pause before a request is sent again whose units others were faster to take.
const LONGEST_PAUSE: Duration = Duration::from_millis(16);

/// What the handles of an inventory with several homes share.
pub(crate) struct ShardedInventory {
    pub(super) directory: Directory,
    pub(super) homes: Homes,
    pub(super) handles: Vec<Handle>,
    turn: AtomicU64,
    /// When the last proof of "sold out" was begun, and what it found.
    proof: Mutex<Option<(Instant, Box<View>)>>,
    /// One task at a time brings units; for each home, how it went.
    refilling: tokio::sync::Mutex<Vec<LastRefill>>,
    pub(super) balancer: Balancer,
}

/// What those who brought units to a home have to tell those who wait for their turn.
#[derive(Default)]
struct LastRefill {
    /// When the last one began that brought some.
    brought: Option<Instant>,
    /// When the last one began that failed, how many units it wanted, and why it failed.
    failed: Option<(Instant, u64, Error)>,
}

/// One home, as this process uses it.
pub(super) struct Handle {
    pub(super) backing: Backing,
    unknown_outcomes: UnknownOutcomes,
    /// The latest change that an answer has shown: a home that is behind it went back.
    pub(super) latest: AtomicU64,
}

/// What is known about the home of a request besides what it says.
#[derive(Clone, Debug, Default)]
pub(crate) struct Hint {
    pub(crate) buyer: Option<Id>,
    pub(crate) home: Option<u32>,
}

enum Target {
    Home(usize),
    /// The home is found by the id.
    Any,
}

impl ShardedInventory {
    fn new(directory: Directory, sites: Vec<Site>) -> Result<Self> {
        let handle = |site: &Site| {
            let dlock = site.dlock.as_ref().ok_or_else(|| no_home(0))?;
            Ok(Handle {
                backing: Backing::new(dlock, &site.id, LIMITS_OF_ONE_HOME)?,
                unknown_outcomes: UnknownOutcomes::default(),
                latest: AtomicU64::new(0),
            })
        };
        let handles = sites.iter().map(handle).collect::<Result<Vec<_>>>()?;
        let start = rand::random::<u32>();
        Ok(ShardedInventory {
            directory,
            balancer: Balancer::new(handles.len()),
            refilling: tokio::sync::Mutex::new(
                handles.iter().map(|_| LastRefill::default()).collect(),
            ),
            handles,
            homes: Homes::new(sites),
            turn: AtomicU64::new(u64::from(start) * PER_TURN),
            proof: Mutex::default(),
        })
    }

    /// Whether its homes are those of the other one, as far as both know them.
    pub(super) fn has_homes_of(&self, other: &Self) -> bool {
        let births = self.homes.sites.iter().zip(&other.homes.sites);
        let mut births = births.map(|(one, other)| (one.id.birth, other.id.birth));
        births.all(|(one, other)| one == other || one == 0 || other == 0)
    }

    /// Whether a home was made after this time, in milliseconds.
    pub(super) fn is_younger(&self, home: u32, at: u64) -> bool {
        let site = self.homes.sites.get(home as usize);
        site.is_some_and(|site| site.id.birth / 1_000 > at)
    }

    pub(super) fn count(&self) -> usize {
        self.handles.len()
    }

    fn home_of(&self, id: &str) -> usize {
        // A refund without an id of its own is known by that of its purchase.
        home_of(checks::purchase_of(id), self.count())
    }

    /// The home in which a purchase is, or would be.
    pub(super) fn home_of_purchase(&self, id: &str, buyer: Option<&str>) -> usize {
        match self.directory.routing {
            Routing::Operation => self.home_of(id),
            Routing::Buyer => self.home_of(buyer.unwrap_or(id)),
        }
    }

    /// The home of a request that any home can serve.
    fn next_turn(&self) -> usize {
        let number = self.turn.fetch_add(1, Ordering::Relaxed);
        (number / PER_TURN % self.count() as u64) as usize
    }

    fn target(&self, request: &Request, hint: &Hint) -> Result<Target> {
        if let Some(home) = hint.home {
            let home = home as usize;
            return if home < self.count() { Ok(Target::Home(home)) } else { Err(no_home(home)) };
        }
        let by_id = |id: &Option<Id>| {
            Target::Home(id.as_ref().map_or_else(|| self.next_turn(), |id| self.home_of(id)))
        };
        Ok(match request.what() {
            Request::Deduct { buyer, .. }
            | Request::Reserve { buyer, .. }
            | Request::Import { buyer, .. }
                if self.directory.routing == Routing::Buyer =>
            {
                let buyer = buyer.as_ref().ok_or_else(buyer_missing)?;
                Target::Home(self.home_of(buyer))
            }
            Request::Deduct { operation, .. } | Request::Restock { operation, .. } => {
                by_id(operation)
            }
            Request::Reserve { operation, .. }
            | Request::WriteOff { operation, .. }
            | Request::Import { operation, .. } => Target::Home(self.home_of(operation)),
            // A refund has the id of its own choice and is in the home of its purchase.
            Request::Resolve { .. } => match &hint.buyer {
                Some(buyer) => Target::Home(self.home_of(buyer)),
                None => Target::Any,
            },
            Request::Confirm { operation: id }
            | Request::ConfirmPart { operation: id, .. }
            | Request::Cancel { operation: id }
            | Request::Extend { operation: id, .. }
            | Request::Look { operation: id }
            | Request::Refund { of: id, .. } => match (self.directory.routing, &hint.buyer) {
                (Routing::Operation, _) => Target::Home(self.home_of(id)),
                (Routing::Buyer, Some(buyer)) => Target::Home(self.home_of(buyer)),
                (Routing::Buyer, None) => Target::Any,
            },
            Request::Send { .. } | Request::Receive { .. } | Request::Placed { .. } => {
                return Err(no_home(0));
            }
        })
    }

    pub(super) async fn send(
        self: &Arc<Self>,
        sale: &Inventory,
        request: Request,
        hint: &Hint,
        id: Option<&Id>,
        deadline: Instant,
    ) -> Result<(Snapshot, Answer)> {
        let answered = match self.target(&request, hint)? {
            Target::Home(home) => self.send_to(sale, home, request, id, deadline).await,
            Target::Any => self.search(sale, request, id, deadline).await,
        };
        self.balancer.look_after(self, sale);
        answered
    }

    /// Sends a request to its home, and again when units were brought there.
    async fn send_to(
        &self,
        sale: &Inventory,
        home: usize,
        request: Request,
        id: Option<&Id>,
        deadline: Instant,
    ) -> Result<(Snapshot, Answer)> {
        let quantity = request.class().takes;
        let unknown_outcomes = &self.handles[home].unknown_outcomes;
        let mut pause = Duration::ZERO;
        loop {
            let began = Instant::now();
            let answered = self.ask(sale, home, request.clone(), id, deadline, false).await?;
            let (Some(quantity), Answer::SoldOut { .. }) = (quantity, &answered.1) else {
                return Ok(answered);
            };
            match self.refill(sale, home, quantity, began, deadline).await {
                Ok(Refilled::Units) => {
                    tokio::time::sleep(pause).await; // others were faster, once or more
                    pause = (pause * 2).clamp(Duration::from_millis(1), LONGEST_PAUSE);
                }
                Ok(Refilled::SoldOut(view)) => {
                    if id.is_some_and(|id| unknown_outcomes.contains(id)) {
                        // An earlier copy may be under way: make the refusal final.
                        let last = self.ask(sale, home, request, id, deadline, true).await?;
                        if !matches!(last.1, Answer::SoldOut { .. }) {
                            return Ok(last);
                        }
                    }
                    let available = view.available;
                    let snapshot = Snapshot { home: home as u32, ..Snapshot::from(&*view) };
                    return Ok((snapshot, Answer::SoldOut { available }));
                }
                Err(error) => {
                    return Err(match id {
                        Some(id) if unknown_outcomes.contains(id) => {
                            Error::Unknown(Some(OperationId(id.clone())))
                        }
                        _ => nothing_taken(error),
                    });
                }
            }
        }
    }

    /// Asks one home. With `is_final`, "sold out" of an id in doubt is made final.
    async fn ask(
        &self,
        sale: &Inventory,
        home: usize,
        request: Request,
        id: Option<&Id>,
        deadline: Instant,
        is_final: bool,
    ) -> Result<(Snapshot, Answer)> {
        let Handle { backing, unknown_outcomes, latest, .. } = &self.handles[home];
        let key = &self.homes.sites[home].id;
        let answered = backing.send(key, unknown_outcomes, request, id, deadline, is_final).await;
        let (mut snapshot, answer) = answered?;
        snapshot.home = home as u32;
        if snapshot.changes > latest.load(Ordering::Relaxed) {
            latest.fetch_max(snapshot.changes, Ordering::Relaxed);
        }
        unknown_outcomes.count_tombstones(sale.name(), &snapshot);
        if !matches!(answer, Answer::SoldOut { .. }) {
            sale.saw_units(snapshot);
        }
        Ok((snapshot, answer))
    }

    /// Brings units to a home, or proves that there are none. Requests that wait for this
    /// at the same time share what one of them does.
    async fn refill(
        &self,
        sale: &Inventory,
        home: usize,
        quantity: u64,
        began: Instant,
        deadline: Instant,
    ) -> Result<Refilled> {
        let proven = || {
            let proof = self.proof.lock();
            let (at, view) = proof.as_ref()?;
            let holds = *at >= began && view.available < quantity;
            holds.then(|| Refilled::SoldOut(view.clone()))
        };
        let turn = tokio::time::timeout_at(deadline, self.refilling.lock());
        let Ok(mut refilling) = turn.await else { return Err(too_slow()) };
        let last = &mut refilling[home];
        if last.brought.is_some_and(|at| at >= began) {
            return Ok(Refilled::Units);
        }
        if let Some(known) = proven() {
            return Ok(known);
        }
        // A home that does not answer is not asked once more by each of those who wait.
        if let Some((at, wanted, error)) = &last.failed
            && *at >= began
            && quantity >= *wanted
        {
            return Err(error.clone());
        }
        let at = Instant::now();
        let refilled = tokio::time::timeout_at(deadline, self.homes.refill(home, quantity));
        let refilled = refilled.await.map_err(|_| too_slow())?;
        match &refilled {
            Err(error) => last.failed = Some((at, quantity, error.clone())),
            Ok(Refilled::Units) => {
                last.brought = Some(at);
                self.balancer.count_moves(1);
            }
            Ok(Refilled::SoldOut(view)) => {
                *self.proof.lock() = Some((at, view.clone()));
                let seen = Snapshot { changes: 0, ..Snapshot::from(&**view) };
                let answer = Answer::SoldOut { available: view.available };
                sale.shared.admission.update(&seen, &answer, sale.sold_out_for);
            }
        }
        refilled
    }
}

/// The clients of all servers of an inventory, the first one first.
pub(super) fn site(dlock: &Dlock, id: crate::store::InventoryId) -> Result<Site> {
    Ok(Site { store: super::backing::store(dlock)?, id, dlock: Some(dlock.clone()) })
}

fn no_home(home: usize) -> Error {
    Error::Invalid(format!(
        "the inventory has no home {home}; the receipt or the reference is of another inventory"
    ))
}

fn buyer_missing() -> Error {
    Error::Invalid(
        "the inventory is routed by buyer; name the buyer with .buyer(id) in every deduction and reservation"
            .into(),
    )
}

/// The error of a home that did not answer while units were looked for. The request itself was
/// answered: it took nothing.
fn nothing_taken(error: Error) -> Error {
    match error {
        Error::Unknown(_) => Error::Store(
            dlock::Error::new(dlock::ErrorKind::Unavailable, dlock::Operation::Inventory)
                .with_message("a home did not answer while units were brought from other homes; nothing was taken; try again"),
        ),
        error => error,
    }
}

fn too_slow() -> Error {
    Error::Store(
        dlock::Error::new(dlock::ErrorKind::Unavailable, dlock::Operation::Inventory).with_message(
            "the deadline passed while units were brought from other homes; nothing was taken; try again, or give it a longer .deadline(..)",
        ),
    )
}

impl Inventory {
    /// Ends a cached "sold out" if a home has units. Each home counts its own changes.
    fn saw_units(&self, snapshot: Snapshot) {
        let seen = Snapshot { changes: 0, ..snapshot };
        self.shared.admission.update(&seen, &Answer::Absent, self.sold_out_for);
    }
}
