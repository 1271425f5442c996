//! What the examples share: a client of the store in `DLOCK_URL`, or of this
//! process's memory if there is none.

use dlock::{Config, Dlock, Result};

/// A client, set up by the environment: `DLOCK_URL` and its like.
///
/// # Errors
/// If a variable is wrong or the store does not answer.
pub async fn connect() -> Result<Dlock> {
    Dlock::builder().config(Config::from_env("DLOCK_")?).connect().await
}

/// Whether the locks are inside this process, where no other can see them.
pub fn is_embedded(dlock: &Dlock) -> bool {
    dlock.capabilities().name == "memory"
}

/// The snippets of the READMEs compile and run.
#[cfg(doctest)]
mod documents {
    #[doc = include_str!("../../README.md")]
    struct Readme;
    #[doc = include_str!("../../README.zh.md")]
    struct ReadmeZh;
}
