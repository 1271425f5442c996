//! One call at a time, for tests that use a backend without a client.

use std::sync::Arc;

use dlock::backend::{AcquireOutcome, Answer, Backend, Claim, Release, RenewOutcome, Request};
use dlock::{ReleaseOutcome, Result};

/// The calls of a [`Backend`], one by one.
#[allow(async_fn_in_trait, reason = "for tests, which do not need to know that it is Send")]
pub trait SingleCalls: Backend {
    /// Takes the lock, or joins its queue.
    ///
    /// # Errors
    /// Those of the backend.
    async fn acquire(&self, claim: &Claim) -> Result<AcquireOutcome> {
        match one(self, Request::Acquire(Arc::new(claim.clone()))).await {
            Answer::Acquire(outcome) => outcome,
            other => panic!("another answer than was asked for: {other:?}"),
        }
    }

    /// Prolongs leases, all in one call.
    async fn renew(&self, leases: &[Arc<Claim>]) -> Vec<Result<RenewOutcome>> {
        let requests: Vec<_> = leases.iter().cloned().map(Request::Renew).collect();
        let answers = self.call(&requests).await.into_iter().map(|answer| match answer {
            Answer::Renew(outcome) => outcome,
            other => panic!("another answer than was asked for: {other:?}"),
        });
        answers.collect()
    }

    /// Gives back a lease, or a place in the queue.
    ///
    /// # Errors
    /// Those of the backend.
    async fn release(&self, lease: &Claim, how: Release) -> Result<ReleaseOutcome> {
        match one(self, Request::Release(Arc::new(lease.clone()), how)).await {
            Answer::Release(outcome) => outcome,
            other => panic!("another answer than was asked for: {other:?}"),
        }
    }
}

impl<B: Backend + ?Sized> SingleCalls for B {}

async fn one<B: Backend + ?Sized>(backend: &B, request: Request) -> Answer {
    backend.call(&[request]).await.pop().expect("an answer to each call")
}
