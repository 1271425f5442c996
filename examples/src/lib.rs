//! What the examples share: how they connect to the backend in `DLOCK_URL`, or to the
//! memory of this process if the variable is not set.

use dlock::{Config, Dlock, Result};

/// Connects a client that is configured by the environment: `DLOCK_URL`,
/// `DLOCK_NAMESPACE` and so on.
///
/// # Errors
/// Fails if a variable is not valid or the backend does not answer.
pub async fn connect() -> Result<Dlock> {
    Dlock::builder().url("memory://").config(Config::from_env("DLOCK_")?).connect().await
}

/// Whether the locks exist only inside this process.
pub fn is_embedded(dlock: &Dlock) -> bool {
    dlock.capabilities().name == "memory"
}

/// The snippets of the READMEs compile and run.
#[cfg(doctest)]
mod documents {
    #[doc = include_str!("../../README.md")]
    struct Readme;
    #[doc = include_str!("../../docs/axum.md")]
    struct Axum;
    #[doc = include_str!("../../README.zh.md")]
    struct ReadmeZh;
}
