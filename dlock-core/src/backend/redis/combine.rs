//! Calls that are in flight together share one run of a script.
//!
//! A call is put in line; a *courier* takes all that stand there, up to a batch,
//! sends them, hands out the answers, and looks again until nobody stands there.
//! There are at most [`COURIERS`]: so a lone call leaves at once, and under load
//! the line grows while they are away and the batches with it. No timer.
//!
//! Invariants: a call whose caller gave up before it was sent is never sent; a
//! batch that all callers gave up on is given up; an error of the whole batch is
//! the error of each call in it.

use std::collections::VecDeque;
use std::sync::Arc;

use parking_lot::Mutex;
use redis::{Cmd, Value};
use tokio::sync::oneshot;

use super::connection::Link;
use super::faults;
use super::scripts::{Code, Run};
use crate::error::{Operation, Result};

/// How many batches are under way: one is worked on by the server while the
/// next is on the wire.
const COURIERS: usize = 2;
/// The most calls in a batch: some hundred microseconds of the server's time,
/// which everybody else waits for.
const BATCH: usize = 128;

/// One call, in the words of the script.
pub(super) struct Item {
    pub(super) operation: Operation,
    pub(super) key: String,
    pub(super) words: Cmd,
}

struct Placed {
    item: Item,
    answer: oneshot::Sender<Result<Value>>,
}

#[derive(Default)]
struct Line {
    standing: VecDeque<Placed>,
    couriers: usize,
}

/// The line and its couriers.
pub(super) struct Combiner {
    link: Arc<Link>,
    code: &'static Code,
    line: Mutex<Line>,
}

impl Combiner {
    pub(super) fn new(link: Arc<Link>, code: &'static Code) -> Arc<Self> {
        Arc::new(Combiner { link, code, line: Mutex::default() })
    }

    /// Puts calls in line; one answer each, in order.
    pub(super) fn place(
        self: &Arc<Self>,
        items: impl Iterator<Item = Item>,
    ) -> Vec<oneshot::Receiver<Result<Value>>> {
        let mut line = self.line.lock();
        let answers = items
            .map(|item| {
                let (answer, answered) = oneshot::channel();
                line.standing.push_back(Placed { item, answer });
                answered
            })
            .collect();
        if line.couriers < COURIERS {
            line.couriers += 1;
            tokio::spawn(Courier { combiner: self.clone(), gone: false }.run());
        }
        answers
    }

    /// Makes one call.
    pub(super) async fn call(self: &Arc<Self>, item: Item) -> Result<Value> {
        let operation = item.operation;
        match self.place(std::iter::once(item)).pop() {
            Some(answered) => answer(operation, answered).await,
            None => Err(faults::unsent(operation)),
        }
    }

    /// The calls at the head of the line that somebody still waits for. If there
    /// are none, the courier has gone.
    fn take(&self) -> Vec<Placed> {
        let mut line = self.line.lock();
        let mut batch = Vec::with_capacity(line.standing.len().min(BATCH));
        while batch.len() < BATCH
            && let Some(placed) = line.standing.pop_front()
        {
            if !placed.answer.is_closed() {
                batch.push(placed);
            }
        }
        if batch.is_empty() {
            line.couriers -= 1;
        }
        batch
    }
}

/// The answer to a call in line.
pub(super) async fn answer(
    operation: Operation,
    answered: oneshot::Receiver<Result<Value>>,
) -> Result<Value> {
    answered.await.unwrap_or_else(|_| Err(faults::unsent(operation)))
}

struct Courier {
    combiner: Arc<Combiner>,
    gone: bool,
}

impl Courier {
    async fn run(mut self) {
        loop {
            let mut batch = self.combiner.take();
            let Some(operation) = batch.first().map(|placed| placed.item.operation) else {
                self.gone = true;
                return;
            };
            let run = written(self.combiner.code, &batch);
            let made = tokio::select! {
                made = self.combiner.link.run(operation, &run) => made,
                () = given_up(&mut batch) => continue,
            };
            hand_out(batch, made);
        }
    }
}

impl Drop for Courier {
    /// The runtime may have ended under it.
    fn drop(&mut self) {
        if !self.gone {
            self.combiner.line.lock().couriers -= 1;
        }
    }
}

fn written(code: &'static Code, batch: &[Placed]) -> Run {
    let mut run = code.on(batch.iter().map(|placed| &placed.item.key));
    for placed in batch {
        run.say(&placed.item.words);
    }
    run
}

async fn given_up(batch: &mut [Placed]) {
    for placed in batch {
        placed.answer.closed().await;
    }
}

fn hand_out(batch: Vec<Placed>, made: Result<Value>) {
    let mut answers = match made {
        Ok(Value::Array(answers)) if answers.len() == batch.len() => Ok(answers.into_iter()),
        Ok(_) => Err(None),
        Err(error) => Err(Some(error)),
    };
    for Placed { item, answer } in batch {
        let operation = item.operation;
        let _ = answer.send(match &mut answers {
            Ok(answers) => match answers.next() {
                Some(Value::ServerError(error)) => Err(faults::refused(operation, &error)),
                Some(answer) => Ok(answer),
                None => Err(faults::unreadable(operation)),
            },
            Err(Some(error)) => Err(error.clone().during(operation)),
            Err(None) => Err(faults::unreadable(operation)),
        });
    }
}
