//! Tests of `#[distributed_lock]`: every option, outcome and signature.
//!
//! What depends on the backend runs on the embedded one and on a real Redis: a
//! scenario is a function of a [`Fixture`], and `on_both!` makes two tests of it.

// Tests as far as clippy is concerned: scenarios may unwrap, as tests do.
#[cfg(test)]
mod clients;
#[cfg(test)]
mod combined;
#[cfg(test)]
mod durations;
mod fixture;
#[cfg(test)]
mod keys;
#[cfg(test)]
mod options;
#[cfg(test)]
mod outcomes;
#[cfg(test)]
mod reentry;
#[cfg(test)]
mod signatures;

use fixture::Fixture;

/// A test on the embedded backend and one on Redis for each scenario.
macro_rules! on_both {
    ($($scenario:ident),* $(,)?) => {
        mod memory {
            $(#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
            async fn $scenario() {
                super::$scenario(crate::Fixture::memory()).await;
            })*
        }
        mod redis {
            $(#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
            async fn $scenario() {
                if let Some(fixture) = crate::Fixture::redis() {
                    super::$scenario(fixture).await;
                }
            })*
        }
    };
}
pub(crate) use on_both;
