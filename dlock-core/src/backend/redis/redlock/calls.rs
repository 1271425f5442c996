//! Calls of the driver on their way to the nodes.
//!
//! ```text
//!   batch of calls --> rounds: one round for each call, one run of the script for each node
//!                        |            every node's answer goes to all rounds
//!                        |-- decided --> the answer of the call
//!                        '-- again ----> more rounds, with a new try
//! ```
//!
//! A call is answered as soon as its round is decided, and the batch when all its calls are.
//! What nodes say later still counts: a try that failed has been taken back behind
//! its request, and what was not answered is released again later at that node.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use parking_lot::Mutex;
use rand::RngExt as _;
use redis::Value;

use super::super::errors;
use super::super::scripts::PackedRun;
use super::answer_sink::AnswerSink;
use super::node::OnReply;
use super::quorum::{NodeReply, NodeRequest, Outcome, Round};
use super::quorum_claim::QuorumClaim;
use super::{Shared, codec};
use crate::claim::{AcquireOutcome, Answer, Mode, Release, RenewOutcome, Request};
use crate::clock::Moment;
use crate::error::{Error, ErrorKind, Operation, Result};

/// How often a `try_lock` tries when the votes are divided.
const TRIES: u32 = 4;
/// How long a divided try waits for nodes that have not answered, at least. It also waits
/// as long as it took until a majority had answered.
const STRAGGLERS: Duration = Duration::from_millis(10);

/// Calls that are answered together.
pub(super) struct CallBatch {
    pub(super) requests: Vec<Request>,
    until: Instant,
    state: Mutex<CallBatchState>,
}

struct CallBatchState {
    answers: Vec<Option<Answer>>,
    tries: Vec<u32>,
    sink: Option<AnswerSink>,
}

impl CallBatch {
    /// Answers calls, and finishes when it was the last one.
    fn answer(&self, answers: Vec<(usize, Answer)>) {
        let (sink, answers) = {
            let mut state = self.state.lock();
            for (call, answer) in answers {
                state.answers[call].get_or_insert(answer);
            }
            if state.answers.iter().any(Option::is_none) {
                return;
            }
            let Some(sink) = state.sink.take() else { return };
            (sink, state.answers.iter_mut().filter_map(Option::take).collect())
        };
        sink.send(answers);
    }
}

/// Rounds that are sent together.
struct RoundBatch {
    shared: Arc<Shared>,
    batch: Arc<CallBatch>,
    /// Each with the call that it is for.
    rounds: Mutex<Vec<(usize, Round)>>,
    /// Whether divided tries will be decided without those who do not answer.
    hurries: AtomicBool,
}

/// What is to be done when all locks are free again.
#[derive(Default)]
struct FollowUps {
    answers: Vec<(usize, Answer)>,
    again: Vec<usize>,
    later: Vec<usize>,
    /// What is given back, with the call that it is of, and the nodes.
    give_back: Vec<(usize, NodeRequest, Vec<usize>)>,
}

impl Shared {
    /// Makes calls. They are answered in time, or given up.
    pub(super) fn start(
        self: &Arc<Self>,
        requests: Vec<Request>,
        until: Instant,
        sink: AnswerSink,
    ) {
        let calls = 0..requests.len();
        let state = CallBatchState {
            answers: requests.iter().map(|_| None).collect(),
            tries: vec![0; requests.len()],
            sink: Some(sink),
        };
        let batch = Arc::new(CallBatch { requests, until, state: Mutex::new(state) });
        self.send_rounds(&batch, calls.collect());
    }

    fn send_rounds(self: &Arc<Self>, batch: &Arc<CallBatch>, calls: Vec<usize>) {
        let mut answers = Vec::new();
        let mut rounds = Vec::with_capacity(calls.len());
        let (now, clock) = (self.clock.now(), self.nodes_clock());
        for call in calls {
            match self.plan(&batch.requests[call], now, clock) {
                Ok(round) => rounds.push((call, round)),
                Err(answer) => answers.push((call, answer)),
            }
        }
        let asks: Vec<(usize, NodeRequest)> =
            rounds.iter().map(|(call, round)| (*call, round.ask)).collect();
        let round_batch = Arc::new(RoundBatch {
            shared: self.clone(),
            batch: batch.clone(),
            rounds: Mutex::new(rounds),
            hurries: AtomicBool::new(false),
        });
        if !asks.is_empty() {
            let mut failed = Vec::new();
            let run = self.encode(batch, &asks);
            let operation = batch.requests[asks[0].0].operation();
            for place in 0..self.nodes.len() {
                let listener = round_batch.clone();
                let done = Box::new(move |answer| listener.on_reply(place, answer));
                let on_reply = OnReply { operation, until: batch.until, done };
                if let Err(error) = self.send(place, run.clone(), on_reply) {
                    failed.push((place, error));
                }
            }
            for (place, error) in failed {
                round_batch.on_reply(place, Some(Err(error)));
            }
        }
        batch.answer(answers);
    }

    /// What is asked, in the words of the script.
    pub(super) fn encode(
        &self,
        batch: &CallBatch,
        asks: &[(usize, NodeRequest)],
    ) -> Arc<PackedRun> {
        let mut run = self.run(asks.len());
        for (call, _) in asks {
            let key = &batch.requests[*call].claim().key;
            run.write(|word| self.names.write_quorum(key, word));
        }
        let calls = asks.iter().map(|(call, ask)| (ask, &**batch.requests[*call].claim()));
        codec::write(&mut run, calls, self.longest, |it| self.info(it), &self.channel);
        Arc::new(run.packed())
    }

    /// Sends it to one node.
    pub(super) fn send(&self, place: usize, run: Arc<PackedRun>, on_reply: OnReply) -> Result<()> {
        let Some(runtime) = self.runtime.get() else {
            return Err(Error::new(ErrorKind::Unavailable, on_reply.operation));
        };
        self.nodes[place].send(runtime, run, on_reply).map_err(|(_, error)| error)
    }

    /// The round of a call, or its answer if it needs none.
    fn plan(
        self: &Arc<Self>,
        request: &Request,
        now: Moment,
        clock: u64,
    ) -> std::result::Result<Round, Answer> {
        let claim = request.claim();
        let refused = |kind, what: String| {
            request.failed(
                Error::new(kind, request.operation()).with_key(&claim.key).with_message(what),
            )
        };
        if claim.mode != Mode::Exclusive
            || matches!(request, Request::Release(_, Release::After(_)))
        {
            let what = "redlock:// has exclusive locks only, which are free when they are released";
            return Err(refused(ErrorKind::Unsupported, what.into()));
        }
        if claim.ttl > self.longest && !matches!(request, Request::Release(..)) {
            return Err(refused(
                ErrorKind::Invalid,
                format!(
                    "the ttl is longer than `max_ttl`, which is {}; use a shorter one, or change that at all nodes and in all programs",
                    humantime::format_duration(self.longest)
                ),
            ));
        }
        let mut claims = self.claims.lock();
        match request {
            Request::Acquire(asked) => {
                let old = asked.instead_of.and_then(|old| claims.remove(&old));
                let next = old.map_or(0, |old| old.tokens_end());
                let attempt = self.attempts.fetch_add(1, Ordering::Relaxed) + 1;
                let quorum = self.quorum;
                let known = claims
                    .entry(claim.owner)
                    .or_insert_with(|| QuorumClaim::new(quorum, claim.owner, next));
                Ok(known.acquire(now, clock, attempt, asked))
            }
            Request::Renew(lease) => {
                let known = claims.get_mut(&claim.owner);
                known
                    .and_then(|known| known.renew(now, clock, lease))
                    .ok_or(Answer::Renew(Ok(RenewOutcome::Lost)))
            }
            Request::Release(..) => Ok(match claims.get_mut(&claim.owner) {
                Some(known) => {
                    let round = known.release(now, claim.ttl);
                    for place in known.in_doubt() {
                        self.retry_release(place, request, &round, true);
                    }
                    round
                }
                None => QuorumClaim::unknown(self.quorum, claim.owner).release(now, claim.ttl),
            }),
        }
    }
}

impl RoundBatch {
    /// A node answered, or did not.
    fn on_reply(self: &Arc<Self>, place: usize, answer: Option<Result<Value>>) {
        let mut rounds = self.rounds.lock();
        let replies = self.read(place, answer, &rounds);
        let now = self.shared.clock.now();
        let mut follow_ups = FollowUps::default();
        {
            let mut claims = self.shared.claims.lock();
            for ((call, round), reply) in rounds.iter_mut().zip(replies) {
                let request = &self.batch.requests[*call];
                let owner = request.claim().owner;
                let known = claims.get_mut(&owner);
                self.note_silence(place, request, round, known.is_some(), &reply);
                let Some(known) = known else {
                    if let Some(outcome) = round.on_reply(now, place, reply) {
                        self.conclude(*call, round, outcome, None, &mut follow_ups);
                    }
                    continue;
                };
                known.learn(round, place, &reply);
                if let Some(outcome) = round.on_reply(now, place, reply) {
                    let outcome = known.settle(round, outcome);
                    if !self.conclude(*call, round, outcome, Some(known), &mut follow_ups) {
                        claims.remove(&owner);
                    }
                }
            }
        }
        let divided = rounds.iter().find(|(_, round)| round.is_divided());
        let pause = divided.map(|(_, round)| STRAGGLERS.max(now.since(round.sent())));
        drop(rounds);
        self.carry_out(follow_ups);
        if let (Some(pause), Some(runtime)) = (pause, self.shared.runtime.get())
            && !self.hurries.swap(true, Ordering::Relaxed)
        {
            let round_batch = self.clone();
            runtime.spawn(async move {
                tokio::time::sleep(pause).await;
                round_batch.hurries.store(false, Ordering::Relaxed);
                round_batch.decide_divided();
            });
        }
    }

    /// Decides tries that are divided, without the nodes that have not answered.
    fn decide_divided(&self) {
        let mut rounds = self.rounds.lock();
        let mut follow_ups = FollowUps::default();
        {
            let mut claims = self.shared.claims.lock();
            for (call, round) in &mut *rounds {
                let owner = self.batch.requests[*call].claim().owner;
                let Some(known) = claims.get_mut(&owner) else { continue };
                if let Some(outcome) = round.decide_divided() {
                    let outcome = known.settle(round, outcome);
                    if !self.conclude(*call, round, outcome, Some(known), &mut follow_ups) {
                        claims.remove(&owner);
                    }
                }
            }
        }
        drop(rounds);
        self.carry_out(follow_ups);
    }

    /// What a node replied to each round.
    fn read(
        &self,
        place: usize,
        answer: Option<Result<Value>>,
        rounds: &[(usize, Round)],
    ) -> Vec<NodeReply> {
        let operation = |call: usize| self.batch.requests[call].operation();
        let shown = self.shared.nodes[place].link.shown();
        let failed = |error: Error| {
            let replies = rounds.iter().map(|(call, _)| {
                let error = error.clone().with_operation(operation(*call));
                match error.kind() {
                    ErrorKind::Unknown => NodeReply::NoReply(error),
                    _ => NodeReply::Refused(error),
                }
            });
            replies.collect()
        };
        match answer {
            None => {
                let silent = Error::new(ErrorKind::Unknown, Operation::Acquire)
                    .with_message(format!("Redis at {shown} did not answer in time"));
                failed(silent)
            }
            Some(Err(error)) => failed(error),
            Some(Ok(answer)) => {
                let operations = rounds.iter().map(|(call, _)| operation(*call));
                let Some(answers) = codec::read_all(&answer, operations) else {
                    return failed(errors::unreadable(Operation::Acquire));
                };
                let note_clock = |(reply, clock): (NodeReply, Option<u64>)| {
                    if let Some(clock) = clock {
                        self.shared.nodes[place].voter.shows(clock);
                    }
                    reply
                };
                answers.into_iter().map(note_clock).collect()
            }
        }
    }

    /// Remembers what a node has not confirmed.
    fn note_silence(
        &self,
        place: usize,
        request: &Request,
        round: &Round,
        known: bool,
        reply: &NodeReply,
    ) {
        let gives_back =
            matches!(round.ask, NodeRequest::Release { .. } | NodeRequest::Undo { .. });
        match reply {
            NodeReply::NoReply(_) if gives_back || !known => {
                self.shared.retry_release(place, request, round, true);
            }
            NodeReply::Refused(_) if gives_back && round.had_vote_of(place) => {
                self.shared.retry_release(place, request, round, false);
            }
            _ => {}
        }
    }

    /// Turns what came of a round into an answer. False if its claim is over.
    fn conclude(
        &self,
        call: usize,
        round: &Round,
        outcome: Outcome,
        known: Option<&mut QuorumClaim>,
        follow_ups: &mut FollowUps,
    ) -> bool {
        let request = &self.batch.requests[call];
        let on_key = |error: Error| error.with_key(&request.claim().key);
        let in_doubt = known.as_ref().map_or_else(Vec::new, |known| known.in_doubt());
        let mut give_back = |ask: NodeRequest| {
            follow_ups.give_back.push((call, ask, round.may_have_voted().collect()));
            for place in &in_doubt {
                self.shared.retry_release(*place, request, round, true);
            }
        };
        let attempt_id = round.attempt_id();
        match (request, outcome) {
            (Request::Acquire(_), Outcome::Granted(grant)) => {
                follow_ups
                    .answers
                    .push((call, Answer::Acquire(Ok(AcquireOutcome::Granted(grant)))));
                true
            }
            (Request::Acquire(_), Outcome::Held { .. }) => match known.and_then(|it| it.grant()) {
                Some(grant) => {
                    follow_ups
                        .answers
                        .push((call, Answer::Acquire(Ok(AcquireOutcome::Granted(grant)))));
                    true
                }
                None => {
                    follow_ups.again.push(call);
                    true
                }
            },
            (Request::Acquire(_), Outcome::Again | Outcome::Lost) => {
                follow_ups.again.push(call);
                true
            }
            (Request::Acquire(claim), Outcome::Taken { holder, free_in }) => {
                give_back(NodeRequest::Undo { attempt_id });
                // It may have become free between the answers of the nodes.
                let again = known.is_some_and(|known| known.was_woken_since(round));
                let soon = || Duration::from_millis(rand::rng().random_range(1..6));
                let free_in = if again { Some(soon()) } else { free_in };
                let outcome = if claim.queue {
                    AcquireOutcome::Queued { holder, free_in }
                } else {
                    AcquireOutcome::Busy { holder }
                };
                follow_ups.answers.push((call, Answer::Acquire(Ok(outcome))));
                self.shared.waits();
                claim.queue
            }
            (Request::Acquire(claim), Outcome::Split { holder }) => {
                give_back(NodeRequest::Undo { attempt_id });
                if claim.queue {
                    let longer = known.map_or(0, |known| known.splits()).clamp(1, 5) - 1;
                    let pause = rand::rng().random_range(2_u64..30) << longer;
                    let free_in = Some(Duration::from_millis(pause));
                    let outcome = AcquireOutcome::Queued { holder, free_in };
                    follow_ups.answers.push((call, Answer::Acquire(Ok(outcome))));
                    return true;
                }
                let tries = &mut self.batch.state.lock().tries[call];
                *tries += 1;
                if *tries < TRIES {
                    follow_ups.later.push(call);
                    return true;
                }
                follow_ups
                    .answers
                    .push((call, Answer::Acquire(Ok(AcquireOutcome::Busy { holder }))));
                false
            }
            (Request::Acquire(_), Outcome::NoMajority(error)) => {
                give_back(NodeRequest::Release { attempt_id });
                follow_ups.answers.push((call, Answer::Acquire(Err(on_key(error)))));
                false
            }
            (Request::Renew(_), outcome) => {
                let answer = match outcome {
                    Outcome::Held { others_wait } => Ok(RenewOutcome::Held { others_wait }),
                    Outcome::Extended(grant) => Ok(RenewOutcome::Extended(grant)),
                    Outcome::NoMajority(error) => Err(on_key(error)),
                    _ => {
                        give_back(NodeRequest::Release { attempt_id });
                        Ok(RenewOutcome::Lost)
                    }
                };
                let held = !matches!(answer, Ok(RenewOutcome::Lost));
                follow_ups.answers.push((call, Answer::Renew(answer)));
                held
            }
            (Request::Release(..), outcome) => {
                let answer = match outcome {
                    Outcome::Released(outcome) => Ok(outcome),
                    Outcome::NoMajority(error) => Err(on_key(error)),
                    _ => Err(errors::unreadable(Operation::Release)),
                };
                follow_ups.answers.push((call, Answer::Release(answer)));
                false
            }
            (Request::Acquire(_), Outcome::Extended(_) | Outcome::Released(_)) => true,
        }
    }

    /// Sends what is to be sent, and then answers.
    fn carry_out(&self, follow_ups: FollowUps) {
        for place in 0..self.shared.nodes.len() {
            let asks: Vec<(usize, NodeRequest)> = follow_ups
                .give_back
                .iter()
                .filter(|(_, _, places)| places.contains(&place))
                .map(|(call, ask, _)| (*call, *ask))
                .collect();
            if !asks.is_empty() {
                self.shared.give_back(&self.batch, place, asks);
            }
        }
        if !follow_ups.again.is_empty() {
            self.shared.send_rounds(&self.batch, follow_ups.again);
        }
        if let (false, Some(runtime)) = (follow_ups.later.is_empty(), self.shared.runtime.get()) {
            let (shared, batch) = (self.shared.clone(), self.batch.clone());
            let pause = Duration::from_millis(rand::rng().random_range(1..20));
            runtime.spawn(async move {
                tokio::time::sleep(pause).await;
                shared.send_rounds(&batch, follow_ups.later);
            });
        }
        if !follow_ups.answers.is_empty() {
            self.batch.answer(follow_ups.answers);
        }
    }
}
