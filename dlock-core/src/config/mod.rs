//! The configuration of a client, from code, a file, the environment or a URL. An
//! option has the same name and the same meaning wherever it is written.
//!
//! `sources` reads options by name, `file` reads them through serde, `values` parses
//! single values, `check` knows the bounds, and `backends` makes the backend that
//! the URL names.

mod backends;
mod check;
mod file;
mod sources;
#[cfg(test)]
mod tests;
pub(crate) mod values;

use std::collections::BTreeMap;
use std::fmt;
use std::path::PathBuf;
use std::time::Duration;

use url::Url;

use crate::machine::{HandoverLimits, Limits};

/// The longest ttl, `release_after` and `hold_at_least`: a day.
pub const MAX_TTL: Duration = Duration::from_secs(24 * 60 * 60);
/// The shortest ttl and the shortest `call_timeout`.
pub(crate) const MIN_TTL: Duration = Duration::from_millis(1);

const DEFAULT_URL: &str = "memory://";
const DEFAULT_NAMESPACE: &str = "default";
/// Long enough for a process that is paused for some seconds, short enough to wait
/// for after a crash.
const DEFAULT_TTL: Duration = Duration::from_secs(30);
const DEFAULT_WAIT: Duration = Duration::from_secs(10);
/// Well below a third of the default ttl, after which a lease is renewed.
const DEFAULT_CALL_TIMEOUT: Duration = Duration::from_secs(2);
/// With the time below: a hot lock is handed over often enough to hide the network,
/// and other processes wait some milliseconds at most.
const DEFAULT_MAX_HANDOVERS: u32 = 64;
const DEFAULT_MAX_HANDOVER_TIME: Duration = Duration::from_millis(5);
/// A notice takes some milliseconds; this leaves room for a slow network.
const DEFAULT_BREAK_DELAY: Duration = Duration::from_millis(500);
/// How long `try_lock` waits for the backend's answer at most.
const MAX_ATTEMPT: Duration = Duration::from_secs(1);
const DEFAULT_MAX_WAITERS: usize = 10_000;

/// The options of a client.
///
/// ```
/// let config: dlock::Config =
///     serde_json::from_str(r#"{ "url": "memory://", "ttl": "10s", "wait": "unlimited" }"#).unwrap();
/// assert_eq!(config.ttl.as_secs(), 10);
/// assert_eq!(config.wait, None);
/// ```
#[derive(Clone, PartialEq, Eq)]
#[non_exhaustive]
pub struct Config {
    /// The URL of the backend that keeps the locks: `memory://`, `memory://name`,
    /// `redis://user:password@host:port/database`, `rediss://` for TLS,
    /// `redis+unix:///run/redis.sock`. Default `memory://`.
    pub url: String,
    /// The namespace, which separates the keys of one application from those of
    /// others. Default `default`.
    pub namespace: String,
    /// How long a lock outlives its process. Default 30 s.
    pub ttl: Duration,
    /// How long `lock()` waits; `None` (written `unlimited`) is without limit.
    /// Default 10 s.
    pub wait: Option<Duration>,
    /// How long one call to the backend may take. Default 2 s.
    pub call_timeout: Duration,
    /// How often a lock is handed over between tasks of this process before other
    /// processes get it. Default 64.
    pub max_handovers: u32,
    /// For how long a lock is handed over between tasks of this process before other
    /// processes get it. Default 5 ms.
    pub max_handover_time: Duration,
    /// How long a broken lock stays taken, so that its holder hears of it before
    /// somebody else is let in. Default 500 ms.
    pub break_delay: Duration,
    /// How many tasks of this process may wait for one key. Default 10,000.
    pub max_waiters: usize,
    /// The name under which operators see this client. Default: `POD_NAME` or the
    /// host's name, and the process id.
    pub client_name: Option<String>,
    /// The file that the password is read from, for backends that need one.
    pub password_file: Option<PathBuf>,
    /// The number of the database, for backends that number them. Default: the
    /// URL's.
    pub database: Option<i64>,
    /// Whether a server that may evict locks from its memory is used. Default: it is
    /// refused.
    pub eviction: Eviction,
    /// The file with the certificates of the authorities to trust (PEM), instead of
    /// the system's, for `rediss://`.
    pub tls_ca: Option<PathBuf>,
    /// The file with this client's certificate (PEM), for servers that require one.
    pub tls_cert: Option<PathBuf>,
    /// The file with the private key of this client's certificate (PEM).
    pub tls_key: Option<PathBuf>,
    /// The policies by name, for locks with `.policy("name")`: operators change them
    /// without a new build. Written `policy.name.ttl`, `policy.name.wait`.
    pub policies: BTreeMap<String, Policy>,
}

/// Whether a server that may evict locks from its memory is used.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Eviction {
    /// The server is not used; requests fail.
    #[default]
    Refuse,
    /// The server is used, with a warning in the log.
    Warn,
}

/// The options that override those in the code, for all locks of one policy.
///
/// ```
/// use dlock::Config;
///
/// let config = Config::from_url("memory://?policy.payments.ttl=5s&policy.payments.wait=unlimited")?;
/// assert_eq!(config.policies["payments"].ttl, Some(std::time::Duration::from_secs(5)));
/// assert_eq!(config.policies["payments"].wait, Some(None));
/// # Ok::<(), dlock::Error>(())
/// ```
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct Policy {
    /// How long a lock outlives its process; `None` keeps the value of the code.
    pub ttl: Option<Duration>,
    /// How long `lock()` waits; `Some(None)` is without limit, `None` keeps the value
    /// of the code.
    pub wait: Option<Option<Duration>>,
}

impl Default for Config {
    fn default() -> Self {
        Config {
            url: DEFAULT_URL.into(),
            namespace: DEFAULT_NAMESPACE.into(),
            ttl: DEFAULT_TTL,
            wait: Some(DEFAULT_WAIT),
            call_timeout: DEFAULT_CALL_TIMEOUT,
            max_handovers: DEFAULT_MAX_HANDOVERS,
            max_handover_time: DEFAULT_MAX_HANDOVER_TIME,
            break_delay: DEFAULT_BREAK_DELAY,
            max_waiters: DEFAULT_MAX_WAITERS,
            client_name: None,
            password_file: None,
            database: None,
            eviction: Eviction::default(),
            tls_ca: None,
            tls_cert: None,
            tls_key: None,
            policies: BTreeMap::new(),
        }
    }
}

impl Config {
    /// The policy of this name; one that changes nothing if it is not configured.
    pub(crate) fn policy(&self, name: &str) -> Policy {
        self.policies.get(name).copied().unwrap_or_default()
    }

    pub(crate) fn limits(&self) -> Limits {
        Limits {
            handover: HandoverLimits { count: self.max_handovers, time: self.max_handover_time },
            waiters: self.max_waiters,
            attempt: self.call_timeout.min(MAX_ATTEMPT),
        }
    }
}

impl fmt::Debug for Config {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Config")
            .field("url", &redacted(&self.url))
            .field("namespace", &self.namespace)
            .field("ttl", &self.ttl)
            .field("wait", &self.wait)
            .finish_non_exhaustive()
    }
}

/// The URL without user, password and query.
fn redacted(url: &str) -> String {
    match Url::parse(url) {
        Ok(url) => format!("{}://{}", url.scheme(), url.host_str().unwrap_or("")),
        Err(_) => "(not a URL)".into(),
    }
}
