//! Requests of a process that are in flight at the same time share calls.
//!
//! A request joins the last batch that waits. As long as fewer than
//! [`IN_FLIGHT`] calls are under way, the first batch that waits leaves at once,
//! however small: a lone request does not wait. Each call, when it is answered,
//! takes the next batch along, on the driver's thread; so a busy sale crosses to
//! that thread only when it wakes up. An idle sale holds nothing here.
//!
//! Each request has its own answer. One whose future is dropped before its batch
//! left is taken out of it.

use std::collections::VecDeque;
use std::future::Future;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll, Waker};

use dlock_core::beside::Beside;
use parking_lot::Mutex;

use crate::error::{Error, Result};
use crate::store::{Answer, Ask, Glance, Sale, Store};

/// The most requests in one call, by their weight: some hundred microseconds of the
/// server's time. 256 deductions with an id, twice as many without, 85 of the rest.
const MOST: usize = 512;
/// Calls of one sale under way at a time: one is worked on while the other
/// travels.
const IN_FLIGHT: usize = 2;

pub(crate) struct Combiner {
    store: Arc<dyn Store>,
    beside: Beside,
    sale: Sale,
    line: Mutex<Line>,
}

#[derive(Default)]
struct Line {
    waiting: VecDeque<Arc<Batch>>,
    /// How much the last of them weighs.
    weight: usize,
    in_flight: usize,
}

#[derive(Default)]
struct Batch(Mutex<Vec<Slot>>);

struct Slot {
    /// `None` when it left, or was given up before.
    ask: Option<Ask>,
    waker: Option<Waker>,
    answer: Option<Result<(Glance, Answer)>>,
}

impl Combiner {
    pub(crate) fn new(store: Arc<dyn Store>, beside: Beside, sale: Sale) -> Self {
        Combiner { store, beside, sale, line: Mutex::default() }
    }

    /// Sends a request along with others.
    pub(crate) fn send(
        self: &Arc<Self>,
        ask: Ask,
    ) -> impl Future<Output = Result<(Glance, Answer)>> {
        let mut line = self.line.lock();
        let (batch, at) = line.join(ask);
        let starts = line.in_flight < IN_FLIGHT;
        if starts {
            line.in_flight += 1;
        }
        drop(line);
        if starts {
            let pump = Pump { combiner: self.clone(), in_order: false };
            // If the driver has ended the pump is dropped, which tells everybody.
            let _ = self.beside.spawn(pump.run());
        }
        Sent { batch, at, done: false }
    }

    /// The next batch that waits; without one, this call's turn is over.
    fn next(&self) -> Option<Arc<Batch>> {
        let mut line = self.line.lock();
        let next = line.waiting.pop_front();
        if next.is_none() {
            line.in_flight -= 1;
            if line.waiting.is_empty() && line.in_flight == 0 {
                line.waiting = VecDeque::new();
            }
        }
        next
    }

    /// Room for batches that wait, and the calls under way.
    #[cfg(test)]
    pub(super) fn kept(&self) -> (usize, usize) {
        let line = self.line.lock();
        (line.waiting.capacity(), line.in_flight)
    }

    fn fail_all(&self, error: &Error) {
        let waiting = std::mem::take(&mut self.line.lock().waiting);
        for batch in waiting {
            let (_, places) = batch.leave();
            batch.answer(places.into_iter().map(|at| (at, Err(error.clone()))));
        }
    }

    async fn make(&self, batch: &Batch) {
        let (mut asks, mut places) = batch.leave();
        while !asks.is_empty() {
            match self.store.apply(&self.sale, &asks).await {
                Ok((view, answers)) => {
                    let glance = Glance::from(&view);
                    // Those who are to ask again do so at once: each call gives
                    // back some more of what expired.
                    let mut again = (Vec::new(), Vec::new());
                    let mut done = Vec::with_capacity(answers.len());
                    for ((ask, at), answer) in asks.into_iter().zip(places).zip(answers) {
                        if answer == Answer::Again {
                            again.0.push(ask);
                            again.1.push(at);
                        } else {
                            done.push((at, Ok((glance, answer))));
                        }
                    }
                    batch.answer(done);
                    (asks, places) = again;
                }
                Err(error) => {
                    batch.answer(places.into_iter().map(|at| (at, Err(error.clone()))));
                    return;
                }
            }
        }
    }
}

/// One of the calls in flight. Should the driver end under it, nobody waits for
/// an answer that does not come.
struct Pump {
    combiner: Arc<Combiner>,
    in_order: bool,
}

impl Pump {
    async fn run(mut self) {
        while let Some(batch) = self.combiner.next() {
            let unanswered = Unanswered(&batch);
            self.combiner.make(&batch).await;
            drop(unanswered);
        }
        self.in_order = true;
    }
}

impl Drop for Pump {
    fn drop(&mut self) {
        if !self.in_order {
            self.combiner.line.lock().in_flight -= 1;
            self.combiner.fail_all(&gone());
        }
    }
}

/// What was not sent yet is certainly not applied.
fn gone() -> Error {
    Error::Store(
        dlock_core::Error::new(dlock_core::ErrorKind::Unavailable, dlock_core::Operation::Stock)
            .saying("the client's driver has ended"),
    )
}

struct Unanswered<'a>(&'a Batch);

impl Drop for Unanswered<'_> {
    fn drop(&mut self) {
        let slots = self.0.0.lock();
        let silent = |(at, slot): (usize, &Slot)| slot.answer.is_none().then_some(at);
        let silent: Vec<usize> = slots.iter().enumerate().filter_map(silent).collect();
        drop(slots);
        self.0.answer(silent.into_iter().map(|at| (at, Err(Error::Unknown(None)))));
    }
}

impl Line {
    /// Puts a request into the last batch that waits, or into a new one.
    fn join(&mut self, ask: Ask) -> (Arc<Batch>, usize) {
        let weight = ask.weight();
        let last = self.waiting.back().filter(|_| self.weight + weight <= MOST).cloned();
        let batch = last.unwrap_or_else(|| {
            self.weight = 0;
            let batch: Arc<Batch> = Arc::default();
            self.waiting.push_back(batch.clone());
            batch
        });
        self.weight += weight;
        let at = batch.join(ask);
        (batch, at)
    }
}

impl Batch {
    /// The place of a request in it.
    fn join(&self, ask: Ask) -> usize {
        let mut slots = self.0.lock();
        slots.push(Slot { ask: Some(ask), waker: None, answer: None });
        slots.len() - 1
    }

    /// Its requests and their places. It waits no longer, so nobody joins.
    fn leave(&self) -> (Vec<Ask>, Vec<usize>) {
        let mut slots = self.0.lock();
        let taken = |(at, slot): (usize, &mut Slot)| slot.ask.take().map(|ask| (ask, at));
        slots.iter_mut().enumerate().filter_map(taken).unzip()
    }

    fn answer(&self, answers: impl IntoIterator<Item = (usize, Result<(Glance, Answer)>)>) {
        let mut batch = self.0.lock();
        let mut wakers = Vec::new();
        for (at, answer) in answers {
            let slot = &mut batch[at];
            slot.answer = Some(answer);
            wakers.extend(slot.waker.take());
        }
        drop(batch);
        wakers.into_iter().for_each(Waker::wake);
    }
}

/// A request on its way.
struct Sent {
    batch: Arc<Batch>,
    at: usize,
    done: bool,
}

impl Future for Sent {
    type Output = Result<(Glance, Answer)>;

    fn poll(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Self::Output> {
        let at = self.at;
        let mut batch = self.batch.0.lock();
        let slot = &mut batch[at];
        if let Some(answer) = slot.answer.take() {
            drop(batch);
            self.done = true;
            return Poll::Ready(answer);
        }
        let before = slot.waker.replace(cx.waker().clone());
        drop(batch);
        drop(before); // here, where no lock is held
        Poll::Pending
    }
}

impl Drop for Sent {
    fn drop(&mut self) {
        if self.done {
            return;
        }
        let mut batch = self.batch.0.lock();
        let slot = &mut batch[self.at];
        let given_up = (slot.ask.take(), slot.waker.take());
        drop(batch);
        drop(given_up);
    }
}
