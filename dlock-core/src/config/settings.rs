//! The options that a client uses: what was said, and the defaults for the rest.

use std::collections::BTreeMap;
use std::fmt;
use std::path::PathBuf;
use std::time::Duration;

use super::{Config, ConsulConfig, Eviction, Policy, SentinelConfig, SslMode, redacted};
use crate::backend::Capabilities;
use crate::machine::{HandoverLimits, Limits};

const DEFAULT_NAMESPACE: &str = "default";
/// Long enough for a process that is paused for some seconds, short enough to wait
/// for after a crash.
const DEFAULT_TTL: Duration = Duration::from_secs(30);
const DEFAULT_WAIT: Duration = Duration::from_secs(10);
/// Well below a third of the default ttl, after which a lease is renewed.
const DEFAULT_CALL_TIMEOUT: Duration = Duration::from_secs(2);
/// A lease is extended after a quarter of its hand-overs (64, unless the client says
/// otherwise), so that the answer is there before they are used up.
const EXTENDED_AFTER: u32 = 16;
/// A notice takes some milliseconds; this leaves room for a slow network.
const DEFAULT_BREAK_DELAY: Duration = Duration::from_millis(500);
/// How long `try_lock` waits for the backend's answer at most.
const MAX_ATTEMPT: Duration = Duration::from_secs(1);
pub(super) const DEFAULT_MAX_WAITERS: usize = 10_000;

/// The options of a client, each with its value; see [`Config`] for what they mean.
#[derive(Clone, PartialEq, Eq)]
#[cfg_attr(
    not(all(feature = "postgres", feature = "redis", feature = "sqlite")),
    allow(dead_code, reason = "some options are of one backend")
)]
pub(crate) struct Settings {
    /// `None` only if the program gave a backend or a connection of its own.
    pub(crate) url: Option<String>,
    pub(crate) namespace: String,
    pub(crate) ttl: Duration,
    /// `None` is without limit.
    pub(crate) wait: Option<Duration>,
    pub(crate) call_timeout: Duration,
    /// `None` is what the backend says.
    pub(crate) max_handovers: Option<u32>,
    pub(crate) max_handover_time: Option<Duration>,
    pub(crate) break_delay: Duration,
    pub(crate) max_waiters: usize,
    pub(crate) client_name: Option<String>,
    pub(crate) password_file: Option<PathBuf>,
    pub(crate) database: Option<i64>,
    pub(crate) eviction: Eviction,
    pub(crate) tls_ca: Option<PathBuf>,
    pub(crate) tls_cert: Option<PathBuf>,
    pub(crate) tls_key: Option<PathBuf>,
    pub(crate) sentinel: SentinelConfig,
    pub(crate) min_replicas: u32,
    pub(crate) max_ttl: Option<Duration>,
    pub(crate) migrate: bool,
    pub(crate) sslmode: Option<SslMode>,
    pub(crate) layout: Option<String>,
    pub(crate) consul: ConsulConfig,
    pub(crate) policies: BTreeMap<String, Policy>,
}

impl From<Config> for Settings {
    fn from(config: Config) -> Self {
        Settings {
            url: config.url,
            namespace: config.namespace.unwrap_or_else(|| DEFAULT_NAMESPACE.into()),
            ttl: config.ttl.unwrap_or(DEFAULT_TTL),
            wait: config.wait.unwrap_or(Some(DEFAULT_WAIT)),
            call_timeout: config.call_timeout.unwrap_or(DEFAULT_CALL_TIMEOUT),
            max_handovers: config.max_handovers,
            max_handover_time: config.max_handover_time,
            break_delay: config.break_delay.unwrap_or(DEFAULT_BREAK_DELAY),
            max_waiters: config.max_waiters.unwrap_or(DEFAULT_MAX_WAITERS),
            client_name: config.client_name,
            password_file: config.password_file,
            database: config.database,
            eviction: config.eviction.unwrap_or_default(),
            tls_ca: config.tls_ca,
            tls_cert: config.tls_cert,
            tls_key: config.tls_key,
            sentinel: config.sentinel,
            min_replicas: config.min_replicas.unwrap_or(0),
            max_ttl: config.max_ttl,
            migrate: config.migrate.unwrap_or(false),
            sslmode: config.sslmode,
            layout: config.layout,
            consul: config.consul,
            policies: config.policies,
        }
    }
}

impl Settings {
    /// The settings and the URL of a backend that is made without a client.
    #[allow(dead_code, reason = "each backend that uses it is a feature")]
    pub(crate) fn of_url(url: &str, namespace: &str) -> crate::error::Result<(Settings, url::Url)> {
        super::check::check_namespace(namespace)?;
        let mut config = Config::from_url(url)?;
        config.namespace = Some(namespace.to_owned());
        let settings = Settings::from(config);
        let url = super::url::parse_url(settings.url.as_deref().unwrap_or(url))?.url;
        Ok((settings, url))
    }

    /// Refuses the files of TLS for a URL without TLS, with this advice.
    #[cfg(any(feature = "consul", feature = "etcd", feature = "zookeeper"))]
    pub(crate) fn refuse_tls_files(&self, advice: &str) -> crate::error::Result<()> {
        if self.tls_ca.is_none() && self.tls_cert.is_none() && self.tls_key.is_none() {
            return Ok(());
        }
        let what = "`tls_ca`, `tls_cert` and `tls_key` need TLS";
        Err(crate::Error::config(format!("{what}; {advice}")))
    }

    /// The policy of this name; one that changes nothing if it is not configured.
    pub(crate) fn policy(&self, name: &str) -> Policy {
        self.policies.get(name).copied().unwrap_or_default()
    }

    pub(crate) fn limits(&self, backend: &Capabilities) -> Limits {
        Limits {
            handover: HandoverLimits {
                count: self.max_handovers.unwrap_or(backend.max_handovers),
                time: self.max_handover_time.unwrap_or(backend.max_handover_time),
                extend_after: EXTENDED_AFTER,
            },
            waiters: self.max_waiters,
            attempt: self.attempt(),
        }
    }

    /// How long `try_lock` waits for the backend's answer at most.
    pub(crate) fn attempt(&self) -> Duration {
        self.call_timeout.min(MAX_ATTEMPT)
    }

    /// The address for people: without user, password and query. `sqlite://` is a file, which is
    /// named.
    pub(crate) fn address(&self) -> Option<String> {
        let address = redacted(self.url.as_deref()?);
        #[cfg(feature = "sqlite")]
        if address == "sqlite://"
            && let Ok(file) = crate::backend::sql::default_file()
        {
            return Some(format!("sqlite://{}", file.display()));
        }
        Some(address)
    }
}

impl fmt::Debug for Settings {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Settings")
            .field("url", &self.address())
            .field("namespace", &self.namespace)
            .field("ttl", &self.ttl)
            .field("wait", &self.wait)
            .finish_non_exhaustive()
    }
}
