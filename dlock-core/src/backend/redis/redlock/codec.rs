//! How requests to a node and its answers are written; the other half is
//! `lua/redlock_calls.lua`.

use std::fmt::Write as _;
use std::sync::Arc;
use std::time::Duration;

use redis::Value;

use super::super::scripts::Run;
use super::super::{codec, errors};
use super::quorum::{AttemptId, NodeReply, NodeRequest, silence};
use crate::claim::{Claim, Grant, Holder, Owner};
use crate::error::Operation;

/// Writes the letters of the calls, what follows them, and the arguments of the calls.
/// Votes on the same terms, which is what a program asks for that has many locks, write them
/// once.
pub(super) fn write<'a>(
    run: &mut Run,
    calls: impl Iterator<Item = (&'a NodeRequest, &'a Claim)> + Clone,
    longest: Duration,
    info: impl Fn(&Arc<Holder>) -> Arc<str>,
    channel: &str,
) {
    let mut letters = String::new();
    let mut last: Option<(Grant, &Claim)> = None;
    for (ask, claim) in calls.clone() {
        letters.push(match ask {
            NodeRequest::Acquire { tokens, instead_of: None, .. }
                if last.is_some_and(|(known, of)| known == *tokens && has_terms_of(claim, of)) =>
            {
                's'
            }
            NodeRequest::Acquire { tokens, instead_of, .. } => {
                last = instead_of.is_none().then_some((*tokens, claim));
                'a'
            }
            NodeRequest::Renew { .. } => 'r',
            NodeRequest::Undo { .. } => 'u',
            NodeRequest::Release { .. } => 'x',
        });
    }
    run.arg(&letters);
    write_silence(run, longest);
    for ((ask, claim), letter) in calls.zip(letters.chars()) {
        match ask {
            NodeRequest::Acquire { attempt_id, .. } if letter == 's' => {
                write_attempt_id(run, *attempt_id)
            }
            _ => write_call(run, ask, claim, &info(&claim.holder), channel),
        }
    }
}

/// Writes what follows the letters of the calls.
pub(super) fn write_silence(run: &mut Run, longest: Duration) {
    run.arg(codec::micros(silence(longest))).arg(codec::millis(longest));
}

fn has_terms_of(claim: &Claim, other: &Claim) -> bool {
    claim.ttl == other.ttl
        && claim.queue == other.queue
        && Arc::ptr_eq(&claim.holder, &other.holder)
}

fn write_call(run: &mut Run, ask: &NodeRequest, claim: &Claim, info: &str, channel: &str) {
    match *ask {
        NodeRequest::Acquire { attempt_id, tokens, instead_of } => {
            write_attempt_id(run, attempt_id);
            run.arg(codec::micros(claim.ttl));
            write_token(run, tokens.first);
            write_token(run, last_of(tokens));
            run.arg(info);
            run.arg(if claim.queue { codec::micros(claim.queue_ttl()) } else { 0 }).arg(channel);
            match instead_of {
                Some(owner) => run.write(|word| codec::write_owner(owner, word)),
                None => drop(run.arg("")),
            }
        }
        NodeRequest::Renew { attempt_id, tokens, further, restore } => {
            write_attempt_id(run, attempt_id);
            run.arg(codec::micros(claim.ttl)).arg(tokens.first).arg(last_of(tokens)).arg(info);
            let (first, last) = further.map_or((0, 0), |it| (it.first, last_of(it)));
            run.arg(first).arg(last).arg(u8::from(restore));
        }
        NodeRequest::Undo { attempt_id } | NodeRequest::Release { attempt_id } => {
            write_attempt_id(run, attempt_id)
        }
    }
}

/// The scripts call it a mark.
pub(super) fn write_attempt_id(run: &mut Run, attempt_id: AttemptId) {
    run.write(|word| {
        codec::write_owner(attempt_id.owner, word);
        let _ = write!(word, "{:016}", attempt_id.attempt); // a String takes everything
    });
}

/// With sixteen digits, as many as 2^53 has.
fn write_token(run: &mut Run, token: u64) {
    run.write(|word| {
        let _ = write!(word, "{token:016}"); // a String takes everything
    });
}

fn last_of(tokens: Grant) -> u64 {
    tokens.first + u64::from(tokens.count) - 1
}

/// What a node said to each of the calls, each with what its clock showed if it told; `None`
/// if that makes no sense.
pub(super) fn read_all(
    answer: &Value,
    operations: impl ExactSizeIterator<Item = Operation>,
) -> Option<Vec<(NodeReply, Option<u64>)>> {
    match answer {
        Value::Int(1) => {
            let yes = NodeReply::Accepted { others_wait: false, extended: false };
            Some(vec![(yes, None); operations.len()])
        }
        Value::Array(answers) if answers.len() == operations.len() => Some(
            answers.iter().zip(operations).map(|(it, operation)| read(it, operation)).collect(),
        ),
        _ => None,
    }
}

fn read(answer: &Value, operation: Operation) -> (NodeReply, Option<u64>) {
    if let Value::ServerError(error) = answer {
        return (NodeReply::Refused(errors::refused(operation, error)), None);
    }
    let unreadable = || (NodeReply::NoReply(errors::unreadable(operation)), None);
    decode(answer).unwrap_or_else(unreadable)
}

fn decode(answer: &Value) -> Option<(NodeReply, Option<u64>)> {
    let yes = |others_wait, extended| Some((NodeReply::Accepted { others_wait, extended }, None));
    let fields = match answer {
        Value::Int(0) => return Some((NodeReply::NoLease, None)),
        Value::Int(1) => return yes(false, false),
        Value::Int(2) => return yes(true, false),
        Value::Int(3) => return yes(false, true),
        Value::Array(fields) => fields,
        _ => return None,
    };
    let number = |place: usize| match fields.get(place)? {
        Value::Int(number) => u64::try_from(*number).ok(),
        _ => None,
    };
    match text(fields.first()?)? {
        "b" => {
            let (next, free_in) = (number(1)?, Duration::from_micros(number(2)?));
            let by = attempt_id_of(text(fields.get(3)?)?)?;
            let holder = codec::holder(text(fields.get(4)?)?);
            Some((NodeReply::HeldByOther { by, next, free_in, holder }, None))
        }
        "y" => Some((NodeReply::Yielded { next: number(1)? }, None)),
        "l" => Some((NodeReply::TokenTooLow { next: number(1)? }, number(2))),
        "h" => Some((NodeReply::TokenTooHigh, number(1))),
        "z" => Some((NodeReply::NotVoting { yet: Duration::from_micros(number(1)?) }, None)),
        _ => None,
    }
}

pub(super) fn attempt_id_of(text: &str) -> Option<AttemptId> {
    let (owner, attempt) = text.split_at_checked(32)?;
    let owner = Owner::from_bits(u128::from_str_radix(owner, 16).ok()?);
    Some(AttemptId { owner, attempt: attempt.parse().ok()? })
}

pub(super) fn text(value: &Value) -> Option<&str> {
    match value {
        Value::BulkString(bytes) => std::str::from_utf8(bytes).ok(),
        Value::SimpleString(text) => Some(text),
        _ => None,
    }
}
