//! The configuration of a client, from code, a file, the environment or a URL. An
//! option has the same name and the same meaning wherever it is written.
//!
//! A [`Config`] is what was said. Several are merged, and `settings` adds the defaults:
//! what the client uses is a [`Settings`]. Only the URL has no default, so that nobody
//! gets a backend that nobody chose.
//!
//! `sources` reads options by name, `file` reads them through serde, `values` parses
//! single values, `check` knows the bounds, `url` reads the URL, and `backends` makes the
//! backend that it names.

mod backends;
mod check;
mod file;
mod settings;
mod sources;
#[cfg(test)]
mod tests;
mod url;
pub(crate) mod values;

use std::collections::BTreeMap;
use std::fmt;
use std::path::PathBuf;
use std::time::Duration;

use ::url::Url;

#[cfg(feature = "redis")]
pub(crate) use self::check::check_namespace;
pub(crate) use self::settings::Settings;

/// The longest ttl, `release_after` and `hold_at_least`: a day.
pub const MAX_TTL: Duration = Duration::from_secs(24 * 60 * 60);
/// The shortest ttl and the shortest `call_timeout`.
pub(crate) const MIN_TTL: Duration = Duration::from_millis(1);

/// What was said about the options of a client. `None` is what was not said: it has
/// its default, or what another configuration says.
///
/// Several configurations are merged option by option, and the later one wins where it
/// says something: [`DlockBuilder::config`](crate::DlockBuilder::config).
///
/// ```
/// use std::time::Duration;
///
/// let config: dlock::Config =
///     serde_json::from_str(r#"{ "url": "memory://", "ttl": "10s", "wait": "unlimited" }"#).unwrap();
/// assert_eq!(config.ttl, Some(Duration::from_secs(10)));
/// assert_eq!(config.wait, Some(None));
/// assert_eq!(config.call_timeout, None); // not said: 2 s
/// ```
#[derive(Clone, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct Config {
    /// The URL of the backend that keeps the locks: `memory://`, `memory://name`,
    /// `redis://user:password@host:port/database`, `rediss://` for TLS,
    /// `redis+unix:///run/redis.sock`. There is no default.
    pub url: Option<String>,
    /// The namespace, which separates the keys of one application from those of
    /// others. Default `default`.
    pub namespace: Option<String>,
    /// How long a lock outlives its process. Default 30 s.
    pub ttl: Option<Duration>,
    /// How long `lock()` waits; `Some(None)` (written `unlimited`) is without limit.
    /// Default 10 s.
    pub wait: Option<Option<Duration>>,
    /// How long one call to the backend may take. Default 2 s.
    pub call_timeout: Option<Duration>,
    /// How often a lock is handed over between tasks of this process before other
    /// processes get it. Default 64.
    pub max_handovers: Option<u32>,
    /// For how long a lock is handed over between tasks of this process before other
    /// processes get it. Default 5 ms.
    pub max_handover_time: Option<Duration>,
    /// How long a broken lock stays taken, so that its holder hears of it before
    /// somebody else is let in. Default 500 ms.
    pub break_delay: Option<Duration>,
    /// How many tasks of this process may wait for one key. Default 10,000.
    pub max_waiters: Option<usize>,
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
    pub eviction: Option<Eviction>,
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

impl Config {
    /// Adds what another configuration says; it wins where both say something.
    pub(crate) fn merge(&mut self, later: Config) {
        fn or<T>(option: &mut Option<T>, later: Option<T>) {
            if later.is_some() {
                *option = later;
            }
        }
        // Without `..`, so that no option can be forgotten here.
        let Config {
            url,
            namespace,
            ttl,
            wait,
            call_timeout,
            max_handovers,
            max_handover_time,
            break_delay,
            max_waiters,
            client_name,
            password_file,
            database,
            eviction,
            tls_ca,
            tls_cert,
            tls_key,
            policies,
        } = later;
        or(&mut self.url, url);
        or(&mut self.namespace, namespace);
        or(&mut self.ttl, ttl);
        or(&mut self.wait, wait);
        or(&mut self.call_timeout, call_timeout);
        or(&mut self.max_handovers, max_handovers);
        or(&mut self.max_handover_time, max_handover_time);
        or(&mut self.break_delay, break_delay);
        or(&mut self.max_waiters, max_waiters);
        or(&mut self.client_name, client_name);
        or(&mut self.password_file, password_file);
        or(&mut self.database, database);
        or(&mut self.eviction, eviction);
        or(&mut self.tls_ca, tls_ca);
        or(&mut self.tls_cert, tls_cert);
        or(&mut self.tls_key, tls_key);
        for (name, Policy { ttl, wait }) in policies {
            let policy = self.policies.entry(name).or_default();
            or(&mut policy.ttl, ttl);
            or(&mut policy.wait, wait);
        }
    }
}

impl fmt::Debug for Config {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Config")
            .field("url", &self.url.as_deref().map(redacted))
            .field("namespace", &self.namespace)
            .field("ttl", &self.ttl)
            .field("wait", &self.wait)
            .finish_non_exhaustive()
    }
}

/// The URL without user, password and query.
fn redacted(url: &str) -> String {
    let Ok(url) = Url::parse(url) else { return "(not a URL)".into() };
    let host = url.host_str().unwrap_or("");
    let port = url.port().map(|port| format!(":{port}")).unwrap_or_default();
    let path = url.path().trim_end_matches('/');
    format!("{}://{host}{port}{path}", url.scheme())
}
