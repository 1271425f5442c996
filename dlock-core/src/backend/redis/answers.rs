//! What the scripts answered, and what it means.

use std::sync::Arc;
use std::time::Duration;

use redis::Value;

use super::cluster::ShardNotices;
use super::codec::Names;
use super::notices::Waits;
use super::recent_releases::RecentReleases;
use super::{codec, errors, further_tokens, tokens};
use crate::claim::{AcquireOutcome, Answer, Grant, ReleaseOutcome, RenewOutcome, Request};
use crate::error::{Operation, Result};

fn attempt(answer: &Value, tokens: u32) -> Option<AcquireOutcome> {
    if let Value::Int(first) = answer {
        let first = u64::try_from(*first).ok()?;
        return Some(AcquireOutcome::Granted(Grant { first, count: tokens }));
    }
    if let Value::BulkString(_) = answer {
        let first = word(answer)?.parse().ok()?;
        return Some(AcquireOutcome::Granted(Grant { first, count: tokens }));
    }
    let Value::Array(fields) = answer else { return None };
    let holder = || codec::holder(word(fields.get(1)?)?);
    match word(fields.first()?)? {
        "g" => {
            let first = u64::try_from(number(fields.get(1)?)?).ok()?;
            let count = u32::try_from(number(fields.get(2)?)?).ok()?;
            Some(AcquireOutcome::Granted(Grant { first, count }))
        }
        "b" => Some(AcquireOutcome::Busy { holder: holder() }),
        "q" => {
            let free_in = u64::try_from(number(fields.get(2)?)?).ok();
            let free_in = free_in.map(Duration::from_micros);
            Some(AcquireOutcome::Queued { holder: holder(), free_in })
        }
        _ => None,
    }
}

fn renewed(answer: &Value, tokens: u32) -> Option<RenewOutcome> {
    match answer {
        Value::Int(1) => Some(RenewOutcome::Held { others_wait: false }),
        Value::Int(2) => Some(RenewOutcome::Held { others_wait: true }),
        Value::Int(0) => Some(RenewOutcome::Lost),
        Value::Int(_) | Value::Array(_) => match attempt(answer, tokens)? {
            AcquireOutcome::Granted(grant) => Some(RenewOutcome::Extended(grant)),
            _ => None,
        },
        _ => None,
    }
}

fn released(answer: &Value) -> Option<ReleaseOutcome> {
    match answer {
        Value::Int(1) => Some(ReleaseOutcome::Released),
        Value::Int(0) => Some(ReleaseOutcome::AlreadyLost),
        _ => None,
    }
}

/// Reads answers, and tells whoever must know that a claim waits.
#[derive(Clone)]
pub(super) struct AnswerReader {
    pub(super) names: Names,
    /// Told when a claim was queued.
    pub(super) waits: Arc<Waits>,
    /// In a cluster.
    pub(super) shards: Option<Arc<ShardNotices>>,
    pub(super) releases: Arc<RecentReleases>,
}

impl AnswerReader {
    /// What the script answered to calls.
    pub(super) fn read(&self, requests: &[Request], answers: Result<Vec<Value>>) -> Vec<Answer> {
        let answers = read_all(requests, answers);
        let is_queued =
            |answer: &Answer| matches!(answer, Answer::Acquire(Ok(AcquireOutcome::Queued { .. })));
        if answers.iter().any(is_queued) {
            self.waits.on_queued();
        }
        for (request, answer) in requests.iter().zip(&answers) {
            if let Answer::Release(Ok(_)) | Answer::Acquire(Ok(_)) = answer {
                self.releases.on_answered(request);
            }
            if let Some(shards) = self.shards.as_ref().filter(|_| is_queued(answer)) {
                let claim = request.claim();
                shards.wait_for(self.names.state(&claim.key, claim.mode.is_permits()));
            }
        }
        answers
    }
}

pub(super) fn read_all(requests: &[Request], answers: Result<Vec<Value>>) -> Vec<Answer> {
    let answers = match answers {
        Ok(answers) => answers,
        Err(error) => {
            let failed = |request: &Request| {
                let error = error.clone().with_operation(request.operation());
                request.failed(error.with_key(&request.claim().key))
            };
            return requests.iter().map(failed).collect();
        }
    };
    requests.iter().zip(answers).map(|(request, it)| read(request, it)).collect()
}

/// One answer for each call.
pub(super) fn one_each(requests: &[Request], answer: Value) -> Result<Vec<Value>> {
    match answer {
        Value::Array(answers) if answers.len() == requests.len() => Ok(answers),
        Value::Int(1) => Ok(vec![Value::Int(1); requests.len()]), // the answer to all
        Value::BulkString(_) if requests.len() == 1 => Ok(vec![answer]),
        _ => {
            Err(errors::unreadable(requests.first().map_or(Operation::Acquire, Request::operation)))
        }
    }
}

/// What the script answered to a call.
fn read(request: &Request, answer: Value) -> Answer {
    let operation = request.operation();
    if let Value::ServerError(error) = answer {
        return request.failed(errors::refused(operation, &error).with_key(&request.claim().key));
    }
    let unreadable = || errors::unreadable(operation);
    match request {
        Request::Acquire(claim) => {
            Answer::Acquire(attempt(&answer, tokens(claim)).ok_or_else(unreadable))
        }
        Request::Renew(lease) => {
            Answer::Renew(renewed(&answer, further_tokens(lease)).ok_or_else(unreadable))
        }
        Request::Release(..) => Answer::Release(released(&answer).ok_or_else(unreadable)),
    }
}

fn word(value: &Value) -> Option<&str> {
    match value {
        Value::BulkString(bytes) => std::str::from_utf8(bytes).ok(),
        Value::SimpleString(text) => Some(text),
        _ => None,
    }
}

fn number(value: &Value) -> Option<i64> {
    match value {
        Value::Int(number) => Some(*number),
        _ => None,
    }
}
