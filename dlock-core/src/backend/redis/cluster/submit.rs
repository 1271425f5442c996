//! Calls that callers write to the nodes by themselves.
//!
//! Each call is a run of its own, on one key; those of a batch that go to the same node
//! are written together. What is refused because the slot is elsewhere, and what found
//! its connection gone, goes on as [`Cluster::send`] on the driver's thread, before the
//! caller hears anything. So the calls of one owner keep their order.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Instant;

use parking_lot::Mutex;
use redis::Value;

use super::super::answers::{AnswerReader, one_each};
use super::super::connection::{Link, Live, OnAnswer, Submitted, SubmittedRun};
use super::super::scripts::Run;
use super::slots::{Node, Redirection, slot_of};
use super::{Cluster, Sent};
use crate::backend::Batch;
use crate::claim::{Answer, Request};
use crate::error::{ErrorKind, Result};

/// The calls of a batch that go to one node.
struct ToNode {
    node: Node,
    link: Arc<Link>,
    live: Arc<Live>,
    /// Their places in the batch, and the names of their keys.
    calls: Vec<(usize, String)>,
}

impl Cluster {
    /// Sends the calls of a batch without waiting. `name` is the key of a call, `run` its
    /// script.
    ///
    /// # Errors
    /// The batch, which was not sent, if a node is not connected.
    pub(in super::super) fn submit(
        self: &Arc<Self>,
        batch: Box<dyn Batch>,
        reader: &AnswerReader,
        name: impl Fn(&Request) -> String,
        run: impl Fn(&Request) -> Run,
    ) -> std::result::Result<(), Box<dyn Batch>> {
        let (Some(nodes), true) =
            (self.by_node(batch.requests(), name), self.runtime.get().is_some())
        else {
            return Err(batch);
        };
        let until = Instant::now() + batch.time_left();
        let requests = batch.requests().to_vec();
        let parts = Parts::of(batch);
        for ToNode { node, link, live, calls } in nodes {
            let submitted = calls.into_iter().map(|(place, name)| {
                let request = requests[place].clone();
                let (operation, run) = (request.operation(), run(&request));
                let call = SubmittedCall {
                    part: Part { parts: parts.clone(), place, answer: None },
                    cluster: self.clone(),
                    reader: reader.clone(),
                    node: node.clone(),
                    request,
                    name,
                    until,
                };
                (run, OnAnswer { operation, until, done: Box::new(move |it| call.done(it)) })
            });
            link.submit_all(live, submitted.collect());
        }
        Ok(())
    }

    /// The nodes that calls go to; `None` if one of them is not known or not connected.
    fn by_node(
        &self,
        requests: &[Request],
        name: impl Fn(&Request) -> String,
    ) -> Option<Vec<ToNode>> {
        if !self.layout.is_confirmed() {
            return None; // `send` asks
        }
        let mut nodes: Vec<ToNode> = Vec::new();
        let map = self.map.read();
        for (place, request) in requests.iter().enumerate() {
            let name = name(request);
            let node = map.owner(slot_of(&name))?;
            if let Some(known) = nodes.iter_mut().find(|known| known.node == *node) {
                known.calls.push((place, name));
                continue;
            }
            let link = self.known_link(node)?;
            let live = link.plain()?;
            nodes.push(ToNode { node: node.clone(), link, live, calls: vec![(place, name)] });
        }
        Some(nodes)
    }
}

/// A call that was written to a node.
struct SubmittedCall {
    part: Part,
    cluster: Arc<Cluster>,
    reader: AnswerReader,
    node: Node,
    request: Request,
    name: String,
    until: Instant,
}

impl SubmittedCall {
    fn done(self, Submitted { link, live, run, answer }: Submitted) {
        let operation = self.request.operation();
        let SubmittedRun::Own(run) = run else { return }; // the part tells it
        match answer {
            None => {} // the part tells it
            Some(Ok(answer)) => {
                let redirection = match &answer {
                    Value::ServerError(error) => Redirection::of(error, &self.node),
                    _ => None,
                };
                match redirection {
                    None => self.answered(link.checked(&live, operation, answer)),
                    Some(redirection) => {
                        if let Redirection::Moved { slot, to } = redirection {
                            self.cluster.map.write().correct(slot, to);
                            self.cluster.stale.notify_one();
                        }
                        self.go_on(run);
                    }
                }
            }
            // It was not sent, so another node may get it.
            Some(Err(error)) if error.kind() == ErrorKind::Unavailable => self.go_on(run),
            Some(Err(error)) => {
                self.cluster.stale.notify_one();
                self.answered(Err(error));
            }
        }
    }

    fn answered(mut self, answer: Result<Value>) {
        let requests = std::slice::from_ref(&self.request);
        let answer = answer.and_then(|answer| one_each(requests, answer));
        self.part.answer = self.reader.read(requests, answer).pop();
    }

    /// Sends the call again, wherever its key is by now.
    fn go_on(self, run: Run) {
        let Some(runtime) = self.cluster.runtime.get().cloned() else { return };
        // Should the runtime end, the part is dropped, and its caller is told.
        runtime.spawn(async move {
            let operation = self.request.operation();
            let sending = self.cluster.send(operation, &self.name, Sent::Run(&run));
            let left = self.until.saturating_duration_since(Instant::now());
            if let Ok(sent) = tokio::time::timeout(left, sending).await {
                self.answered(sent.map(|(_, answer)| answer));
            }
        });
    }
}

/// A batch whose calls are answered one by one.
struct Parts {
    batch: Mutex<Option<Box<dyn Batch>>>,
    answers: Mutex<Vec<Option<Answer>>>,
    left: AtomicUsize,
}

impl Parts {
    fn of(batch: Box<dyn Batch>) -> Arc<Self> {
        let count = batch.requests().len();
        Arc::new(Parts {
            batch: Mutex::new(Some(batch)),
            answers: Mutex::new((0..count).map(|_| None).collect()),
            left: AtomicUsize::new(count),
        })
    }
}

/// One call of a batch. Dropping it says that it has been answered, or will not be.
struct Part {
    parts: Arc<Parts>,
    place: usize,
    answer: Option<Answer>,
}

impl Drop for Part {
    fn drop(&mut self) {
        let Parts { batch, answers, left } = &*self.parts;
        if let Some(place) = answers.lock().get_mut(self.place) {
            *place = self.answer.take();
        }
        if left.fetch_sub(1, Ordering::AcqRel) > 1 {
            return;
        }
        let (Some(batch), answers) = (batch.lock().take(), std::mem::take(&mut *answers.lock()))
        else {
            return;
        };
        let requests = batch.requests().iter().zip(answers);
        let each = |(request, answer): (&Request, Option<Answer>)| {
            answer.unwrap_or_else(|| request.unanswered())
        };
        let answers = requests.map(each).collect();
        batch.complete(answers);
    }
}
