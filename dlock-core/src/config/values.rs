//! What the text of an option means.

use std::fmt;
use std::path::Path;
use std::time::Duration;

use crate::error::{Error, ErrorKind, Operation, Result};

pub(crate) fn read_password(path: &Path) -> Result<String> {
    let text = std::fs::read_to_string(path).map_err(|error| {
        fault(format!("cannot read `password_file` {}: {error}", path.display()))
    })?;
    Ok(text.trim_end_matches(['\r', '\n']).to_owned())
}

pub(super) fn fault(what: String) -> Error {
    Error::new(ErrorKind::Config, Operation::Configure).saying(what)
}

pub(super) fn duration(name: &str, value: &str) -> Result<Duration> {
    humantime::parse_duration(value)
        .or_else(|error| if value == "0" { Ok(Duration::ZERO) } else { Err(error) })
        .map_err(|error| {
            fault(format!("`{name}`: {error}; write a duration such as 150ms, 30s, 5m or 1h"))
        })
}

pub(super) fn patience(name: &str, value: &str) -> Result<Option<Duration>> {
    if value == "unlimited" { Ok(None) } else { duration(name, value).map(Some) }
}

/// `policy_payments_ttl`, as a variable has to be called, is `policy.payments.ttl`.
pub(super) fn dotted(name: &str) -> String {
    let policy = name.strip_prefix("policy_").and_then(|rest| rest.rsplit_once('_'));
    policy.map_or_else(|| name.to_owned(), |(policy, option)| format!("policy.{policy}.{option}"))
}

pub(super) fn number<T: std::str::FromStr<Err: fmt::Display>>(
    name: &str,
    value: &str,
) -> Result<T> {
    value.parse().map_err(|error| fault(format!("`{name}` is no such number: {error}")))
}

/// Variables that start like ours and are not.
pub(super) fn is_not_ours(name: &str) -> bool {
    // Kubernetes tells of a service `dlock`, or `dlock-redis`, like this.
    let of_a_service = ["_SERVICE_HOST_", "_SERVICE_PORT_", "_PORT_"];
    let name_parts = format!("_{name}_");
    matches!(name, "KEY" | "TOKEN" | "REQUIRE_SERVERS")
        || name.starts_with("TEST_")
        || of_a_service.iter().any(|part| name_parts.contains(part))
}
