//! How calls are made on the driver's thread.
//!
//! A backend that [combines](crate::Capabilities::combines) calls gets all that
//! are due together in one: they stand in line, and a *courier* takes what stands
//! there, has it made, brings the answers back, and looks again until nobody stands
//! there. There are at most [`COURIERS`]. So a lone call leaves at once, and under
//! load the line grows while they are away, and the batches with it. No timer.
//!
//! Other backends get each call by itself, except renewals.

use std::collections::VecDeque;
use std::sync::Arc;

use parking_lot::Mutex;

use super::{Core, Order};
use crate::claim::{Answer, Request};
use crate::engine::CallId;

/// How many batches are under way: one is worked on by the backend while the
/// next is on its way.
const COURIERS: usize = 2;

/// A call, and where its answer goes.
struct Placed {
    shard: usize,
    call: CallId,
}

/// The calls that wait for a courier.
#[derive(Default)]
pub(super) struct Line(Mutex<Standing>);

#[derive(Default)]
struct Standing {
    places: VecDeque<(Placed, Request)>,
    couriers: usize,
}

impl Core {
    /// Does what was ordered.
    pub(super) fn make_all(self: &Arc<Self>, orders: &mut Vec<Order>) {
        let combines = self.backend.capabilities().combines > 1;
        let mut renewals = (Vec::new(), Vec::new());
        let mut standing = self.line.0.lock();
        for order in orders.drain(..) {
            let (place, request) = match order {
                Order::Call { shard, call, request } => (Placed { shard, call }, request),
                Order::Job(job) => {
                    tokio::spawn(job);
                    continue;
                }
            };
            match request {
                request if combines => standing.places.push_back((place, request)),
                Request::Renew(lease) => {
                    renewals.0.push(place);
                    renewals.1.push(lease);
                }
                request => {
                    tokio::spawn(make_one(self.clone(), place, request));
                }
            }
        }
        if !renewals.0.is_empty() {
            tokio::spawn(renew(self.clone(), renewals.0, renewals.1));
        }
        if standing.couriers < COURIERS && !standing.places.is_empty() {
            standing.couriers += 1;
            tokio::spawn(carry(self.clone()));
        }
    }

    /// The calls at the head of the line. If there are none, the courier has gone.
    fn take(&self) -> (Vec<Placed>, Vec<Request>) {
        let mut standing = self.line.0.lock();
        let count = standing.places.len().min(self.backend.capabilities().combines);
        if count == 0 {
            standing.couriers -= 1;
        }
        standing.places.drain(..count).unzip()
    }
}

async fn carry(core: Arc<Core>) {
    loop {
        let (places, requests) = core.take();
        if places.is_empty() {
            return;
        }
        let made = core.backend.combined(&requests);
        let made = tokio::time::timeout(core.call_timeout, made).await;
        let mut answers = made.unwrap_or_default().into_iter();
        for (Placed { shard, call }, request) in places.into_iter().zip(requests) {
            let answer = answers.next().unwrap_or_else(|| request.unanswered());
            core.answered(shard, call, answer);
        }
    }
}

async fn make_one(core: Arc<Core>, place: Placed, request: Request) {
    let made = async {
        match &request {
            Request::Acquire(claim) => Answer::Acquire(core.backend.acquire(claim).await),
            Request::Release(claim, how) => {
                Answer::Release(core.backend.release(claim, *how).await)
            }
            Request::Renew(_) => request.unanswered(), // renewals are made together
        }
    };
    let made = tokio::time::timeout(core.call_timeout, made).await;
    let answer = made.unwrap_or_else(|_| request.unanswered());
    core.answered(place.shard, place.call, answer);
}

async fn renew(core: Arc<Core>, places: Vec<Placed>, leases: Vec<Arc<crate::Claim>>) {
    let made = tokio::time::timeout(core.call_timeout, core.backend.renew(&leases)).await;
    let mut answers = made.unwrap_or_default().into_iter();
    for (Placed { shard, call }, lease) in places.into_iter().zip(leases) {
        let silence = || Request::Renew(lease).unanswered();
        let answer = answers.next().map_or_else(silence, Answer::Renew);
        core.answered(shard, call, answer);
    }
}
