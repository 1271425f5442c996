//! Calls of the driver on their way to the nodes.
//!
//! ```text
//!   batch of calls --> wave: one round for each call, one run of the script for each node
//!                        |            every node's answer is heard by all rounds
//!                        |-- decided --> the answer of the call
//!                        '-- again ----> another wave, with a new try
//! ```
//!
//! A call is answered as soon as its round is decided, and the batch when all its calls are.
//! What nodes say later is heard all the same: a try that failed has been taken back behind
//! its request, and what was not answered is owed by that node.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use parking_lot::Mutex;
use rand::RngExt as _;
use redis::Value;
use tokio::sync::oneshot;

use super::super::errors;
use super::super::scripts::PackedRun;
use super::node::Then;
use super::quorum::{Ask, Outcome, Round, Said};
use super::quorum_claim::QuorumClaim;
use super::{Shared, codec};
use crate::backend::Batch;
use crate::claim::{AcquireOutcome, Answer, Mode, Release, RenewOutcome, Request};
use crate::clock::Moment;
use crate::error::{Error, ErrorKind, Operation, Result};

/// How often a `try_lock` tries when the votes are divided.
const TRIES: u32 = 4;
/// How long a divided try waits for nodes that have not answered, at least. It also waits
/// as long as it took until a majority had answered.
const STRAGGLERS: Duration = Duration::from_millis(10);

/// Where the answers of calls go.
pub(super) enum Finish {
    Batch(Box<dyn Batch>),
    Channel(oneshot::Sender<Vec<Answer>>),
}

/// Calls that are answered together.
pub(super) struct Flight {
    pub(super) requests: Vec<Request>,
    until: Instant,
    state: Mutex<FlightState>,
}

struct FlightState {
    answers: Vec<Option<Answer>>,
    tries: Vec<u32>,
    finish: Option<Finish>,
}

impl Flight {
    /// Answers calls, and finishes when it was the last one.
    fn answer(&self, answers: Vec<(usize, Answer)>) {
        let (finish, answers) = {
            let mut state = self.state.lock();
            for (call, answer) in answers {
                state.answers[call].get_or_insert(answer);
            }
            if state.answers.iter().any(Option::is_none) {
                return;
            }
            let Some(finish) = state.finish.take() else { return };
            (finish, state.answers.iter_mut().filter_map(Option::take).collect())
        };
        match finish {
            Finish::Batch(batch) => batch.complete(answers),
            Finish::Channel(channel) => drop(channel.send(answers)), // it may have been given up
        }
    }
}

/// Rounds that are sent together.
struct Wave {
    shared: Arc<Shared>,
    flight: Arc<Flight>,
    /// Each with the call that it is for.
    rounds: Mutex<Vec<(usize, Round)>>,
    /// Whether divided tries will be decided without those who do not answer.
    hurries: AtomicBool,
}

/// What is to be done when all locks are free again.
#[derive(Default)]
struct Todo {
    answers: Vec<(usize, Answer)>,
    again: Vec<usize>,
    later: Vec<usize>,
    /// What is given back, with the call that it is of, and the nodes.
    give_back: Vec<(usize, Ask, Vec<usize>)>,
}

impl Shared {
    /// Makes calls. They are answered in time, or given up.
    pub(super) fn start(self: &Arc<Self>, requests: Vec<Request>, until: Instant, finish: Finish) {
        let calls = 0..requests.len();
        let state = FlightState {
            answers: requests.iter().map(|_| None).collect(),
            tries: vec![0; requests.len()],
            finish: Some(finish),
        };
        let flight = Arc::new(Flight { requests, until, state: Mutex::new(state) });
        self.send_wave(&flight, calls.collect());
    }

    fn send_wave(self: &Arc<Self>, flight: &Arc<Flight>, calls: Vec<usize>) {
        let mut answers = Vec::new();
        let mut rounds = Vec::with_capacity(calls.len());
        let (now, clock) = (self.clock.now(), self.nodes_clock());
        for call in calls {
            match self.plan(&flight.requests[call], now, clock) {
                Ok(round) => rounds.push((call, round)),
                Err(answer) => answers.push((call, answer)),
            }
        }
        let asks: Vec<(usize, Ask)> =
            rounds.iter().map(|(call, round)| (*call, round.ask)).collect();
        let wave = Arc::new(Wave {
            shared: self.clone(),
            flight: flight.clone(),
            rounds: Mutex::new(rounds),
            hurries: AtomicBool::new(false),
        });
        if !asks.is_empty() {
            let mut failed = Vec::new();
            let run = self.said(flight, &asks);
            let operation = flight.requests[asks[0].0].operation();
            for place in 0..self.nodes.len() {
                let heard = wave.clone();
                let done = Box::new(move |answer| heard.heard(place, answer));
                let then = Then { operation, until: flight.until, done };
                if let Err(error) = self.send(place, run.clone(), then) {
                    failed.push((place, error));
                }
            }
            for (place, error) in failed {
                wave.heard(place, Some(Err(error)));
            }
        }
        flight.answer(answers);
    }

    /// What is asked, in the words of the script.
    pub(super) fn said(&self, flight: &Flight, asks: &[(usize, Ask)]) -> Arc<PackedRun> {
        let mut run = self.run(asks.len());
        for (call, _) in asks {
            let key = &flight.requests[*call].claim().key;
            run.write(|word| self.names.write_quorum(key, word));
        }
        let calls = asks.iter().map(|(call, ask)| (ask, &**flight.requests[*call].claim()));
        codec::write(&mut run, calls, self.longest, |it| self.info(it), &self.channel);
        Arc::new(run.packed())
    }

    /// Sends it to one node.
    pub(super) fn send(&self, place: usize, run: Arc<PackedRun>, then: Then) -> Result<()> {
        let Some(runtime) = self.runtime.get() else {
            return Err(Error::new(ErrorKind::Unavailable, then.operation));
        };
        self.nodes[place].send(runtime, run, then).map_err(|(_, error)| error)
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
            request.failed(Error::new(kind, request.operation()).on(&claim.key).saying(what))
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
                let rules = self.rules;
                let known = claims
                    .entry(claim.owner)
                    .or_insert_with(|| QuorumClaim::new(rules, claim.owner, next));
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
                        self.owe(place, request, &round, true);
                    }
                    round
                }
                None => QuorumClaim::unknown(self.rules, claim.owner).release(now, claim.ttl),
            }),
        }
    }
}

impl Wave {
    /// A node answered, or did not.
    fn heard(self: &Arc<Self>, place: usize, answer: Option<Result<Value>>) {
        let mut rounds = self.rounds.lock();
        let said = self.read(place, answer, &rounds);
        let now = self.shared.clock.now();
        let mut todo = Todo::default();
        {
            let mut claims = self.shared.claims.lock();
            for ((call, round), said) in rounds.iter_mut().zip(said) {
                let request = &self.flight.requests[*call];
                let owner = request.claim().owner;
                let known = claims.get_mut(&owner);
                self.note_silence(place, request, round, known.is_some(), &said);
                let Some(known) = known else {
                    if let Some(outcome) = round.heard(now, place, said) {
                        self.conclude(*call, round, outcome, None, &mut todo);
                    }
                    continue;
                };
                known.learn(round, place, &said);
                if let Some(outcome) = round.heard(now, place, said) {
                    let outcome = known.settle(round, outcome);
                    if !self.conclude(*call, round, outcome, Some(known), &mut todo) {
                        claims.remove(&owner);
                    }
                }
            }
        }
        let divided = rounds.iter().find(|(_, round)| round.is_divided());
        let pause = divided.map(|(_, round)| STRAGGLERS.max(now.since(round.sent())));
        drop(rounds);
        self.carry_out(todo);
        if let (Some(pause), Some(runtime)) = (pause, self.shared.runtime.get())
            && !self.hurries.swap(true, Ordering::Relaxed)
        {
            let wave = self.clone();
            runtime.spawn(async move {
                tokio::time::sleep(pause).await;
                wave.hurries.store(false, Ordering::Relaxed);
                wave.decide_divided();
            });
        }
    }

    /// Decides tries that are divided, without the nodes that have not answered.
    fn decide_divided(&self) {
        let mut rounds = self.rounds.lock();
        let mut todo = Todo::default();
        {
            let mut claims = self.shared.claims.lock();
            for (call, round) in &mut *rounds {
                let owner = self.flight.requests[*call].claim().owner;
                let Some(known) = claims.get_mut(&owner) else { continue };
                if let Some(outcome) = round.decide_divided() {
                    let outcome = known.settle(round, outcome);
                    if !self.conclude(*call, round, outcome, Some(known), &mut todo) {
                        claims.remove(&owner);
                    }
                }
            }
        }
        drop(rounds);
        self.carry_out(todo);
    }

    /// What a node said to each round.
    fn read(
        &self,
        place: usize,
        answer: Option<Result<Value>>,
        rounds: &[(usize, Round)],
    ) -> Vec<Said> {
        let operation = |call: usize| self.flight.requests[call].operation();
        let shown = self.shared.nodes[place].link.shown();
        let failed = |error: Error| {
            let said = rounds.iter().map(|(call, _)| {
                let error = error.clone().during(operation(*call));
                match error.kind() {
                    ErrorKind::Unknown => Said::Silent(error),
                    _ => Said::Failed(error),
                }
            });
            said.collect()
        };
        match answer {
            None => {
                let silent = Error::new(ErrorKind::Unknown, Operation::Acquire)
                    .saying(format!("Redis at {shown} did not answer in time"));
                failed(silent)
            }
            Some(Err(error)) => failed(error),
            Some(Ok(answer)) => {
                let operations = rounds.iter().map(|(call, _)| operation(*call));
                let Some(answers) = codec::read_all(&answer, operations) else {
                    return failed(errors::unreadable(Operation::Acquire));
                };
                let heard = |(said, clock): (Said, Option<u64>)| {
                    if let Some(clock) = clock {
                        self.shared.nodes[place].voter.shows(clock);
                    }
                    said
                };
                answers.into_iter().map(heard).collect()
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
        said: &Said,
    ) {
        let gives_back = matches!(round.ask, Ask::Release { .. } | Ask::Undo { .. });
        match said {
            Said::Silent(_) if gives_back || !known => {
                self.shared.owe(place, request, round, true);
            }
            Said::Failed(_) if gives_back && round.had_vote_of(place) => {
                self.shared.owe(place, request, round, false);
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
        todo: &mut Todo,
    ) -> bool {
        let request = &self.flight.requests[call];
        let on_key = |error: Error| error.on(&request.claim().key);
        let in_doubt = known.as_ref().map_or_else(Vec::new, |known| known.in_doubt());
        let mut give_back = |ask: Ask| {
            todo.give_back.push((call, ask, round.may_have_voted().collect()));
            for place in &in_doubt {
                self.shared.owe(*place, request, round, true);
            }
        };
        let mark = round.mark();
        match (request, outcome) {
            (Request::Acquire(_), Outcome::Granted(grant)) => {
                todo.answers.push((call, Answer::Acquire(Ok(AcquireOutcome::Granted(grant)))));
                true
            }
            (Request::Acquire(_), Outcome::Held { .. }) => match known.and_then(|it| it.grant()) {
                Some(grant) => {
                    todo.answers.push((call, Answer::Acquire(Ok(AcquireOutcome::Granted(grant)))));
                    true
                }
                None => {
                    todo.again.push(call);
                    true
                }
            },
            (Request::Acquire(_), Outcome::Again | Outcome::Lost) => {
                todo.again.push(call);
                true
            }
            (Request::Acquire(claim), Outcome::Taken { holder, free_in }) => {
                give_back(Ask::Undo { mark });
                // It may have become free between the answers of the nodes.
                let again = known.is_some_and(|known| known.was_woken_since(round));
                let soon = || Duration::from_millis(rand::rng().random_range(1..6));
                let free_in = if again { Some(soon()) } else { free_in };
                let outcome = if claim.queue {
                    AcquireOutcome::Queued { holder, free_in }
                } else {
                    AcquireOutcome::Busy { holder }
                };
                todo.answers.push((call, Answer::Acquire(Ok(outcome))));
                self.shared.waits();
                claim.queue
            }
            (Request::Acquire(claim), Outcome::Split { holder }) => {
                give_back(Ask::Undo { mark });
                if claim.queue {
                    let longer = known.map_or(0, |known| known.splits()).clamp(1, 5) - 1;
                    let pause = rand::rng().random_range(2_u64..30) << longer;
                    let free_in = Some(Duration::from_millis(pause));
                    let outcome = AcquireOutcome::Queued { holder, free_in };
                    todo.answers.push((call, Answer::Acquire(Ok(outcome))));
                    return true;
                }
                let tries = &mut self.flight.state.lock().tries[call];
                *tries += 1;
                if *tries < TRIES {
                    todo.later.push(call);
                    return true;
                }
                todo.answers.push((call, Answer::Acquire(Ok(AcquireOutcome::Busy { holder }))));
                false
            }
            (Request::Acquire(_), Outcome::NoMajority(error)) => {
                give_back(Ask::Release { mark });
                todo.answers.push((call, Answer::Acquire(Err(on_key(error)))));
                false
            }
            (Request::Renew(_), outcome) => {
                let answer = match outcome {
                    Outcome::Held { others_wait } => Ok(RenewOutcome::Held { others_wait }),
                    Outcome::Extended(grant) => Ok(RenewOutcome::Extended(grant)),
                    Outcome::NoMajority(error) => Err(on_key(error)),
                    _ => {
                        give_back(Ask::Release { mark });
                        Ok(RenewOutcome::Lost)
                    }
                };
                let held = !matches!(answer, Ok(RenewOutcome::Lost));
                todo.answers.push((call, Answer::Renew(answer)));
                held
            }
            (Request::Release(..), outcome) => {
                let answer = match outcome {
                    Outcome::Released(outcome) => Ok(outcome),
                    Outcome::NoMajority(error) => Err(on_key(error)),
                    _ => Err(errors::unreadable(Operation::Release)),
                };
                todo.answers.push((call, Answer::Release(answer)));
                false
            }
            (Request::Acquire(_), Outcome::Extended(_) | Outcome::Released(_)) => true,
        }
    }

    /// Sends what is to be sent, and then answers.
    fn carry_out(&self, todo: Todo) {
        for place in 0..self.shared.nodes.len() {
            let asks: Vec<(usize, Ask)> = todo
                .give_back
                .iter()
                .filter(|(_, _, places)| places.contains(&place))
                .map(|(call, ask, _)| (*call, *ask))
                .collect();
            if !asks.is_empty() {
                self.shared.give_back(&self.flight, place, asks);
            }
        }
        if !todo.again.is_empty() {
            self.shared.send_wave(&self.flight, todo.again);
        }
        if let (false, Some(runtime)) = (todo.later.is_empty(), self.shared.runtime.get()) {
            let (shared, flight) = (self.shared.clone(), self.flight.clone());
            let pause = Duration::from_millis(rand::rng().random_range(1..20));
            runtime.spawn(async move {
                tokio::time::sleep(pause).await;
                shared.send_wave(&flight, todo.later);
            });
        }
        if !todo.answers.is_empty() {
            self.flight.answer(todo.answers);
        }
    }
}
