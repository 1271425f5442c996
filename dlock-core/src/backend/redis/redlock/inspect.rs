//! What operators see: a key, and the nodes.

use std::sync::Arc;
use std::time::Duration;

use redis::Value;
use tokio::task::JoinSet;

use super::super::codec as names;
use super::super::scripts::Run;
use super::quorum::AttemptId;
use super::scripts::QuorumScripts;
use super::voter::NodeHello;
use super::{Node, Shared, codec};
use crate::backend::{HolderState, KeyState, ServerRole, ServerState, WaiterState};
use crate::claim::{Holder, Mode, Owner};
use crate::error::{Error, ErrorKind, Operation, Result};
use crate::key::Key;

/// How long the other nodes have when a majority has answered.
const OTHERS: Duration = Duration::from_millis(150);
/// The same when it matters what is wrong with them.
pub(super) const ALL: Duration = Duration::from_secs(1);

/// From how many microseconds on a clock is worth a note.
const WRONG_CLOCK: u64 = 1_000_000;

/// A lease at one node.
struct Seen {
    attempt_id: AttemptId,
    state: HolderState,
}

impl Shared {
    /// Runs a script at every node. Returns when all have answered, or when a majority has and
    /// the others have had their time; `None` for those that have not.
    pub(super) async fn ask_all(
        self: &Arc<Self>,
        others: Duration,
        operation: Operation,
        run: impl Fn(&Node) -> Run,
    ) -> Vec<Option<Result<Value>>> {
        let mut asked = JoinSet::new();
        for (place, node) in self.nodes.iter().enumerate() {
            let (run, node) = (run(node), node.clone());
            asked.spawn(async move {
                let answer = node.link.run(operation, &run).await;
                if let Some(hello) = answer.as_ref().ok().and_then(NodeHello::read) {
                    node.voter.shows(hello.clock);
                }
                (place, answer)
            });
        }
        let mut answers: Vec<_> = self.nodes.iter().map(|_| None).collect();
        let (mut good, mut until) = (0, tokio::time::Instant::now() + self.call_timeout);
        while let Ok(Some(answered)) = tokio::time::timeout_at(until, asked.join_next()).await {
            let Ok((place, answer)) = answered else { continue };
            good += usize::from(answer.is_ok());
            answers[place] = Some(answer);
            if good == self.quorum.majority {
                until = until.min(tokio::time::Instant::now() + others);
            }
        }
        answers
    }

    /// The good answers.
    ///
    /// # Errors
    /// If they are fewer than a majority.
    fn majority(
        &self,
        operation: Operation,
        answers: Vec<Option<Result<Value>>>,
    ) -> Result<Vec<Value>> {
        let mut good = Vec::new();
        let mut why: Option<Error> = None;
        for answer in answers.into_iter().flatten() {
            match answer {
                Ok(answer) => good.push(answer),
                Err(error) if why.as_ref().is_none_or(|it| it.kind().is_retryable()) => {
                    why = Some(error);
                }
                Err(_) => {}
            }
        }
        if good.len() >= self.quorum.majority {
            return Ok(good);
        }
        let (nodes, majority) = (self.nodes.len(), self.quorum.majority);
        let what = format!("{} of {nodes} nodes answer, and {majority} must", good.len());
        Err(match why {
            Some(why) => {
                Error::new(why.kind(), operation).with_message(format!("{what}; {}", why.detail()))
            }
            None => Error::new(ErrorKind::Unavailable, operation).with_message(what),
        })
    }

    /// Whether a majority answers, and no node is one that cannot be used.
    pub(super) async fn ping(self: &Arc<Self>) -> Result<()> {
        self.open(&tokio::runtime::Handle::current());
        let answers = self.ask_all(ALL, Operation::Connect, |node| node.voter.hello()).await;
        let wrong = answers.iter().flatten().filter_map(|answer| answer.as_ref().err());
        if let Some(wrong) = wrong.into_iter().find(|error| error.kind() == ErrorKind::Config) {
            return Err(wrong.clone());
        }
        self.majority(Operation::Connect, answers).map(drop)
    }

    pub(super) async fn inspect_key(self: &Arc<Self>, key: &Key) -> Result<KeyState> {
        let name = self.names.quorum(key);
        let run = |_: &Node| {
            let mut run = QuorumScripts::get().inspect.on(1);
            run.arg(&name);
            run
        };
        let answers = self.ask_all(OTHERS, Operation::Inspect, run).await;
        let answers = self.majority(Operation::Inspect, answers)?;
        let mut seen: Vec<Seen> = Vec::new();
        let mut waiters: Vec<(Owner, WaiterState)> = Vec::new();
        for answer in &answers {
            let Value::Array(fields) = answer else { continue };
            seen.extend(lease(fields));
            for waiter in fields[fields.len().min(5)..].chunks(3).filter_map(waiter) {
                if waiters.iter().all(|(known, _)| *known != waiter.0) {
                    waiters.push(waiter);
                }
            }
        }
        waiters.sort_by_key(|(_, waiter)| std::cmp::Reverse(waiter.waiting_for));
        Ok(KeyState {
            holders: self.holder_in(seen).into_iter().collect(),
            waiters: waiters.into_iter().map(|(_, waiter)| waiter).collect(),
            broken_by: None,
        })
    }

    /// Who has a majority, if anybody.
    fn holder_in(&self, seen: Vec<Seen>) -> Option<HolderState> {
        let votes =
            |attempt_id: AttemptId| seen.iter().filter(|it| it.attempt_id == attempt_id).count();
        let attempt_id =
            seen.iter().map(|it| it.attempt_id).find(|it| votes(*it) >= self.quorum.majority)?;
        // It is held for as long as a majority has it.
        let mut states: Vec<_> =
            seen.into_iter().filter(|it| it.attempt_id == attempt_id).map(|it| it.state).collect();
        states.sort_by_key(|state| std::cmp::Reverse(state.expires_in));
        states.into_iter().nth(self.quorum.majority - 1)
    }

    /// The nodes, and what is wrong with them.
    pub(super) async fn server_states(self: &Arc<Self>) -> Result<Vec<ServerState>> {
        let answers = self.ask_all(ALL, Operation::Connect, |node| node.voter.hello()).await;
        let middle = self.middle_offset();
        let note = |node: &Node, answer: Option<Result<Value>>| match answer {
            None => Some("it does not answer in time".to_owned()),
            Some(Err(error)) => Some(error.detail().to_owned()),
            Some(Ok(answer)) => {
                let silent =
                    NodeHello::read(&answer).and_then(|hello| node.voter.silent_for(&hello));
                let silent = silent.map(|silent| {
                    format!("it was started or emptied, and votes in {} s", silent.as_secs() + 1)
                });
                silent.or_else(|| clock_note(node.voter.offset()? - middle))
            }
        };
        let states = self.nodes.iter().zip(answers).map(|(node, answer)| ServerState {
            address: node.link.shown().to_owned(),
            role: ServerRole::Primary,
            behind: None,
            note: note(node, answer),
        });
        Ok(states.collect())
    }
}

/// What is wrong with a clock that is so many microseconds ahead of that in the middle.
fn clock_note(ahead: i64) -> Option<String> {
    let seconds = ahead.unsigned_abs() as f64 / 1e6;
    let side = if ahead > 0 { "ahead of" } else { "behind" };
    (ahead.unsigned_abs() >= WRONG_CLOCK).then(|| {
        format!("its clock is {seconds:.1} s {side} that of the others; with more than 2 s it does not vote: correct it, without a step")
    })
}

fn number(field: &Value) -> Option<u64> {
    match field {
        Value::Int(number) => u64::try_from(*number).ok(),
        _ => None,
    }
}

fn lease(fields: &[Value]) -> Option<Seen> {
    let [attempt_id, token, since, ends, info, ..] = fields else { return None };
    let state = HolderState {
        holder: holder(info)?,
        mode: Mode::Exclusive,
        token: Some(number(token)?),
        held_for: Duration::from_micros(number(since)?),
        expires_in: Duration::from_micros(number(ends)?),
        is_over: false,
    };
    Some(Seen { attempt_id: codec::attempt_id_of(codec::text(attempt_id)?)?, state })
}

fn waiter(fields: &[Value]) -> Option<(Owner, WaiterState)> {
    let [owner, since, info] = fields else { return None };
    let owner = u128::from_str_radix(codec::text(owner)?, 16).ok().map(Owner::from_bits)?;
    let waiting_for = Duration::from_micros(number(since)?);
    let waiter = WaiterState { holder: holder(info)?, mode: Mode::Exclusive, waiting_for };
    Some((owner, waiter))
}

fn holder(info: &Value) -> Option<Arc<Holder>> {
    names::holder(codec::text(info)?)
}
