//! Parsing the values of options.

use std::fmt;
use std::path::Path;
use std::time::Duration;

use super::SslMode;
use crate::error::{Error, Result};

/// The password in a file, without the line break at its end.
pub(crate) fn read_password(path: &Path) -> Result<String> {
    let password = std::fs::read_to_string(path).map_err(|error| {
        Error::config(format!(
            "cannot read `password_file` {}: {error}; check the path and its permissions",
            path.display()
        ))
    })?;
    Ok(password.trim_end_matches(['\r', '\n']).to_owned())
}

/// A password or a token.
#[cfg(any(feature = "redis", feature = "consul", feature = "etcd", feature = "zookeeper"))]
#[derive(Clone)]
pub(crate) enum Secret {
    /// It was written into the URL.
    #[cfg(any(feature = "consul", feature = "etcd", feature = "zookeeper"))]
    Written(String),
    /// It is in a file, and may be another one the next time.
    File(std::path::PathBuf),
}

#[cfg(any(feature = "redis", feature = "consul", feature = "etcd", feature = "zookeeper"))]
impl Secret {
    /// The one to use now. A file is read on another thread: a slow disk must not hold up the
    /// thread that renews leases.
    pub(crate) async fn read(&self) -> Result<String> {
        let path = match self {
            #[cfg(any(feature = "consul", feature = "etcd", feature = "zookeeper"))]
            Secret::Written(secret) => return Ok(secret.clone()),
            Secret::File(path) => path.clone(),
        };
        let read = tokio::task::spawn_blocking(move || read_password(&path)).await;
        let unreadable = || {
            Error::new(crate::ErrorKind::Unavailable, crate::Operation::Connect)
                .with_message("`password_file` could not be read; it is read again at the next connection (check the path and its permissions)")
        };
        match read {
            Ok(Ok(secret)) => Ok(secret),
            Ok(Err(error)) => Err(unreadable().with_source(error)),
            Err(error) => Err(unreadable().with_source(error)),
        }
    }
}

pub(super) fn duration(name: &str, value: &str) -> Result<Duration> {
    humantime::parse_duration(value)
        .or_else(|error| if value == "0" { Ok(Duration::ZERO) } else { Err(error) })
        .map_err(|error| {
            Error::config(format!(
                "`{name}` is not a valid duration: {error}; write one such as 150ms, 30s, 5m or 1h"
            ))
        })
}

/// A duration, or `unlimited`.
pub(super) fn wait_limit(name: &str, value: &str) -> Result<Option<Duration>> {
    if value == "unlimited" { Ok(None) } else { duration(name, value).map(Some) }
}

pub(super) fn yes_or_no(name: &str, value: &str) -> Result<bool> {
    match value {
        "yes" | "true" => Ok(true),
        "no" | "false" => Ok(false),
        _ => Err(Error::config(format!("`{name}` is `{value}`; write `yes` or `no`"))),
    }
}

/// A mode of TLS. Those that fall back to a connection in plain text are refused.
pub(super) fn ssl_mode(value: &str) -> Result<SslMode> {
    match value {
        "disable" => Ok(SslMode::Disable),
        "require" => Ok(SslMode::Require),
        "verify-ca" => Ok(SslMode::VerifyCa),
        "verify-full" => Ok(SslMode::VerifyFull),
        _ => Err(Error::config(format!(
            "`sslmode` is `{value}`; write `verify-full`, `verify-ca`, `require` or `disable` (`prefer` and `allow` may send the password in plain text)"
        ))),
    }
}

/// The option that an environment variable names: `policy_payments_ttl` is
/// `policy.payments.ttl`, since a variable cannot have dots in its name.
pub(super) fn dotted(name: &str) -> String {
    for group in ["sentinel", "consul"] {
        let option = name.strip_prefix(group).and_then(|rest| rest.strip_prefix('_'));
        if let Some(option) = option {
            return format!("{group}.{option}");
        }
    }
    let policy = name.strip_prefix("policy_").and_then(|rest| rest.rsplit_once('_'));
    policy.map_or_else(|| name.to_owned(), |(policy, option)| format!("policy.{policy}.{option}"))
}

pub(super) fn number<T: std::str::FromStr<Err: fmt::Display>>(
    name: &str,
    value: &str,
) -> Result<T> {
    value.parse().map_err(|error| Error::config(format!("`{name}` is not a valid number: {error}")))
}

/// Whether a variable with our prefix is not an option.
pub(super) fn is_foreign(name: &str) -> bool {
    // Kubernetes sets such variables for a service `dlock` or `dlock-redis`.
    let of_a_service = ["_SERVICE_HOST_", "_SERVICE_PORT_", "_PORT_"];
    let name_parts = format!("_{name}_");
    matches!(name, "KEY" | "TOKEN" | "REQUIRE_SERVERS")
        || name.starts_with("TEST_")
        || of_a_service.iter().any(|part| name_parts.contains(part))
}
