//! The bounds of the options.

use std::time::Duration;

use super::settings::DEFAULT_MAX_WAITERS;
use super::{MAX_TTL, MIN_TTL, Settings};
use crate::error::{Error, Result};

/// The longest `call_timeout`.
const MAX_CALL_TIMEOUT: Duration = Duration::from_secs(60);
/// The longest namespace and the longest name of a policy.
pub(super) const MAX_NAME_BYTES: usize = 64;
/// The longest `client_name`.
const MAX_CLIENT_NAME_BYTES: usize = 256;

impl Settings {
    /// Checks that every value is within its bounds.
    pub(crate) fn check(&self) -> Result<()> {
        let bounded = |name: &str, value: Duration, max: Duration| {
            if value < MIN_TTL || value > max {
                return Err(Error::config(format!(
                    "`{name}` is {}; write a duration from {} to {}",
                    humantime::format_duration(value),
                    humantime::format_duration(MIN_TTL),
                    humantime::format_duration(max),
                )));
            }
            Ok(())
        };
        bounded("ttl", self.ttl, MAX_TTL)?;
        for (name, policy) in &self.policies {
            if let Some(ttl) = policy.ttl {
                bounded(&format!("policy.{name}.ttl"), ttl, MAX_TTL)?;
            }
        }
        if let Some(longest) = self.max_ttl {
            bounded("max_ttl", longest, MAX_TTL)?;
        }
        bounded("call_timeout", self.call_timeout, MAX_CALL_TIMEOUT)?;
        if self.break_delay > MAX_TTL {
            return Err(Error::config("`break_delay` is above a day"));
        }
        if self.max_waiters == 0 {
            return Err(Error::config(format!(
                "`max_waiters` is 0, so no task could wait; the default is {DEFAULT_MAX_WAITERS}"
            )));
        }
        check_namespace(&self.namespace)?;
        let client = self.client_name.as_deref().unwrap_or("ok");
        if client.is_empty()
            || client.len() > MAX_CLIENT_NAME_BYTES
            || client.chars().any(char::is_control)
        {
            return Err(Error::config(format!(
                "`client_name` must be 1 to {MAX_CLIENT_NAME_BYTES} bytes without control characters"
            )));
        }
        Ok(())
    }
}

/// Checks that a namespace can be a part of the names in the store.
pub(crate) fn check_namespace(name: &str) -> Result<()> {
    let plain = |c: char| c.is_ascii_alphanumeric() || matches!(c, '-' | '_' | '.');
    if name.is_empty() || name.len() > MAX_NAME_BYTES || !name.chars().all(plain) {
        return Err(Error::config(format!(
            "`namespace` must be 1 to {MAX_NAME_BYTES} letters, digits, `-`, `_` or `.`"
        )));
    }
    Ok(())
}
