//! Scripts that callers write to the connection by themselves, from any thread and without
//! waiting. What is to be done with the answer goes along.

use std::sync::Arc;
use std::time::{Duration, Instant};

use redis::Value;

use super::super::connector::Connection;
use super::super::errors;
use super::super::pipeline::{Outcome, Reply};
use super::super::scripts::{PackedRun, Run};
use super::{Link, Live, is_unknown_script};
use crate::backend::Batch;
use crate::claim::{Answer, Request};
use crate::error::{Operation, Result};

/// What is done with the answer of a script that was submitted.
pub(in super::super) struct OnAnswer {
    pub(in super::super) operation: Operation,
    /// When the answer is too late.
    pub(in super::super) until: Instant,
    /// Called once, or dropped. No lock is held meanwhile.
    pub(in super::super) done: Box<dyn FnOnce(Submitted) + Send>,
}

impl OnAnswer {
    fn time_left(&self) -> Duration {
        self.until.saturating_duration_since(Instant::now())
    }
}

/// A script that was submitted: of this server alone, or shared with others.
pub(in super::super) enum SubmittedRun {
    Own(Run),
    Shared(Arc<PackedRun>),
}

impl SubmittedRun {
    fn run(&self) -> &Run {
        match self {
            SubmittedRun::Own(run) => run,
            SubmittedRun::Shared(run) => run.run(),
        }
    }
}

/// A script that was submitted, and what became of it.
pub(in super::super) struct Submitted {
    pub(in super::super) link: Arc<Link>,
    pub(in super::super) live: Arc<Live>,
    pub(in super::super) run: SubmittedRun,
    /// The answer, in which a refusal of the server is to be [checked](Link::checked);
    /// `None` if none came in time.
    pub(in super::super) answer: Option<Result<Value>>,
}

impl Link {
    /// Runs a script from any thread, without waiting.
    pub(in super::super) fn submit(
        self: &Arc<Self>,
        live: Arc<Live>,
        run: Run,
        on_answer: OnAnswer,
    ) {
        let request = run.by_digest().get_packed_command();
        self.submit_run(live, &request, SubmittedRun::Own(run), on_answer);
    }

    /// The same of a script that other servers are sent too.
    pub(in super::super) fn submit_packed(
        self: &Arc<Self>,
        live: Arc<Live>,
        run: &Arc<PackedRun>,
        on_answer: OnAnswer,
    ) {
        self.submit_run(live, run.request(), SubmittedRun::Shared(run.clone()), on_answer);
    }

    /// Runs a script that makes the calls of a batch, and completes the batch with what is
    /// read in the answer. If none comes in time the calls are left without one.
    pub(in super::super) fn submit_batch(
        self: &Arc<Self>,
        live: Arc<Live>,
        run: Run,
        batch: Box<dyn Batch>,
        read: impl FnOnce(&[Request], Result<Value>) -> Vec<Answer> + Send + 'static,
    ) {
        let operation = batch.requests().first().map_or(Operation::Acquire, Request::operation);
        let until = Instant::now() + batch.time_left();
        let done = Box::new(move |Submitted { link, live, answer, .. }: Submitted| {
            let answers = answer.map(|answer| {
                let answer = answer.and_then(|it| link.checked(&live, operation, it));
                read(batch.requests(), answer)
            });
            batch.complete(answers.unwrap_or_default());
        });
        self.submit(live, run, OnAnswer { operation, until, done });
    }

    fn submit_run(
        self: &Arc<Self>,
        live: Arc<Live>,
        request: &[u8],
        run: SubmittedRun,
        on_answer: OnAnswer,
    ) {
        let Connection::Plain(pipeline) = &live.connection else { return };
        let (pipeline, timeout) = (pipeline.clone(), on_answer.time_left());
        pipeline.submit(request, Some(timeout), self.reply(live, run, true, on_answer));
    }

    /// The same for several runs that have the same time; they leave together.
    pub(in super::super) fn submit_all(
        self: &Arc<Self>,
        live: Arc<Live>,
        runs: Vec<(Run, OnAnswer)>,
    ) {
        let Connection::Plain(pipeline) = &live.connection else { return };
        let Some((_, first)) = runs.first() else { return };
        let (pipeline, timeout, count) = (pipeline.clone(), first.time_left(), runs.len());
        let mut requests = Vec::new();
        for (run, _) in &runs {
            run.by_digest().write_packed_command(&mut requests);
        }
        let reply =
            |(run, on_answer)| self.reply(live.clone(), SubmittedRun::Own(run), true, on_answer);
        pipeline.submit_all(&requests, Some(timeout), count, runs.into_iter().map(reply));
    }

    /// `by_digest`: the script is sent with its text if the server does not know it.
    fn reply(
        self: &Arc<Self>,
        live: Arc<Live>,
        run: SubmittedRun,
        by_digest: bool,
        on_answer: OnAnswer,
    ) -> Reply {
        let link = self.clone();
        Box::new(move |outcome| link.replied(live, outcome, run, by_digest, on_answer))
    }

    fn replied(
        self: Arc<Self>,
        live: Arc<Live>,
        outcome: Outcome,
        run: SubmittedRun,
        by_digest: bool,
        on_answer: OnAnswer,
    ) {
        let answer = match outcome {
            Outcome::Answered(answer) if by_digest && is_unknown_script(&answer) => {
                let Connection::Plain(pipeline) = &live.connection else { return };
                let (pipeline, timeout) = (pipeline.clone(), on_answer.time_left());
                let request = run.run().by_text().get_packed_command();
                let reply = self.reply(live, run, false, on_answer);
                return pipeline.submit(&request, Some(timeout), reply);
            }
            Outcome::Answered(answer) => Some(Ok(answer)),
            Outcome::Late { silent } => {
                if silent {
                    self.end(&live);
                }
                None
            }
            Outcome::Broken => {
                self.end(&live);
                Some(Err(errors::broken(on_answer.operation)))
            }
            Outcome::NotSent => {
                self.end(&live);
                Some(Err(self.broke().with_operation(on_answer.operation)))
            }
        };
        (on_answer.done)(Submitted { link: self, live, run, answer });
    }
}
