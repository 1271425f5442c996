//! The error for options that cannot be used.

use std::fmt;

/// The error of a run that cannot start, because an option has a wrong value.
///
/// The message says what to give instead.
#[derive(Debug)]
pub struct UsageError(String);

/// Makes a [`UsageError`] with this message.
pub fn usage_error(message: impl Into<String>) -> anyhow::Error {
    UsageError(message.into()).into()
}

impl fmt::Display for UsageError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

impl std::error::Error for UsageError {}
