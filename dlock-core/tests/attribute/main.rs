//! `#[distributed_lock]`: every option, outcome and signature.
//!
//! What depends on the backend runs on the embedded one and on a real Redis: a
//! scenario is a function of a [`World`], and `on_both!` makes two tests of it.

// Tests as far as clippy is concerned: scenarios may unwrap, as tests do.
#[cfg(test)]
mod clients;
#[cfg(test)]
mod combined;
#[cfg(test)]
mod durations;
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
mod world;

use world::World;

/// A test on the embedded backend and one on Redis for each scenario.
macro_rules! on_both {
    ($($scenario:ident),* $(,)?) => {
        mod memory {
            $(#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
            async fn $scenario() {
                super::$scenario(crate::World::memory()).await;
            })*
        }
        mod redis {
            $(#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
            async fn $scenario() {
                if let Some(world) = crate::World::redis() {
                    super::$scenario(world).await;
                }
            })*
        }
    };
}
pub(crate) use on_both;
