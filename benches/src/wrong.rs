//! What was asked for makes no sense.

use std::fmt;

/// What a run fails with before it begins: the text says what to give instead.
#[derive(Debug)]
pub struct Wrong(String);

impl Wrong {
    /// An error that says so.
    pub fn because(what: impl Into<String>) -> anyhow::Error {
        Wrong(what.into()).into()
    }
}

impl fmt::Display for Wrong {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

impl std::error::Error for Wrong {}
