//! Waiting until replicas have what was granted (`min_replicas`).
//!
//! `WAIT` covers the writes of its own connection, so it is sent on the connection of the
//! script, after its answer. It holds that connection up until enough replicas answered or
//! its time is over, so locks then have one of their own, and operators and stock another.
//! Releases go with the locks, behind the acquires of their owners. A grant that too few of them have is given back, and a renewal that
//! too few of them have counts as failed: a failover could lose either.

use std::sync::Arc;
use std::time::Duration;

use redis::Value;

use super::Redis;
use super::answers::one_each;
use super::connection::{Link, Live};
use crate::claim::{AcquireOutcome, Answer, Release, RenewOutcome, Request};
use crate::error::{Error, ErrorKind, Operation, Result};

/// How many replicas must have a grant, and how long is waited for them.
#[derive(Clone, Copy)]
pub(super) struct MinReplicas {
    pub(super) count: u32,
    pub(super) patience: Duration,
}

/// Where a script was run.
pub(super) type ServedBy = (Arc<Link>, Arc<Live>);

impl Redis {
    /// Turns answers that too few replicas would remember into errors.
    pub(super) async fn replicated(
        &self,
        requests: &[Request],
        mut answers: Vec<Answer>,
        served_by: Option<ServedBy>,
    ) -> Vec<Answer> {
        let Some(MinReplicas { count, patience }) = self.min_replicas else { return answers };
        let is_kept = |answer: &Answer| {
            matches!(
                answer,
                Answer::Acquire(Ok(AcquireOutcome::Granted(_)))
                    | Answer::Renew(Ok(RenewOutcome::Held { .. } | RenewOutcome::Extended(_)))
            )
        };
        let Some((link, live)) = served_by.filter(|_| answers.iter().any(is_kept)) else {
            return answers;
        };
        let mut wait = redis::cmd("WAIT");
        wait.arg(count).arg(u64::try_from(patience.as_millis()).unwrap_or(1).max(1));
        let found = match link.command_on(&live, Operation::Acquire, &wait).await {
            Ok(Value::Int(found)) if found >= i64::from(count) => return answers,
            Ok(Value::Int(found)) => found,
            _ => 0, // not known, so not promised
        };
        for (request, answer) in requests.iter().zip(&mut answers) {
            if is_kept(answer) {
                let given_back = match request {
                    Request::Acquire(claim) => {
                        let release = [Request::Release(claim.clone(), Release::Now)];
                        let run = self.encode(&release);
                        let ran = link.run_on(&live, Operation::Release, &run).await;
                        ran.and_then(|answer| one_each(&release, answer)).map(drop)
                    }
                    _ => Ok(()),
                };
                *answer = request.failed(self.too_few(request, found, given_back));
            }
        }
        answers
    }

    fn too_few(&self, request: &Request, found: i64, given_back: Result<()>) -> Error {
        let count = self.min_replicas.map_or(0, |least| least.count);
        let kind = match given_back {
            Ok(()) => ErrorKind::Unavailable,
            Err(_) => ErrorKind::Unknown,
        };
        Error::new(kind, request.operation()).with_key(&request.claim().key).with_message(format!(
            "{found} replicas of Redis have the lock in time, and `min_replicas` wants {count}; check the replicas, or lower it"
        ))
    }
}
