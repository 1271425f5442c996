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

pub(crate) use self::settings::Settings;
#[cfg(feature = "redis")]
pub(crate) use self::url::HostPort;
#[cfg(any(feature = "etcd", feature = "redis", feature = "zookeeper"))]
pub(crate) use self::url::parse_url;
use self::url::redacted;

/// The longest ttl, `release_after` and `hold_at_least`: a day.
pub const MAX_TTL: Duration = Duration::from_secs(24 * 60 * 60);
/// The shortest ttl and the shortest `call_timeout`.
pub(crate) const MIN_TTL: Duration = Duration::from_millis(1);

/// The options of a client that were set explicitly. `None` means not set: then the value
/// of another configuration or the default is used.
///
/// Several configurations are merged option by option: an option that is set in the later
/// one overrides the earlier value. See
/// [`DlockBuilder::config`](crate::DlockBuilder::config).
///
/// ```
/// use std::time::Duration;
///
/// let config: dlock::Config =
///     serde_json::from_str(r#"{ "url": "memory://", "ttl": "10s", "wait": "unlimited" }"#).unwrap();
/// assert_eq!(config.ttl, Some(Duration::from_secs(10)));
/// assert_eq!(config.wait, Some(None));
/// assert_eq!(config.call_timeout, None); // not set: 2 s
/// ```
#[derive(Clone, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct Config {
    /// The URL of the backend that keeps the locks: `memory://`, `memory://name`,
    /// `redis://user:password@host:port/database`, `rediss://` for TLS,
    /// `redis+unix:///run/redis.sock`, `redis+sentinel://host,host,host/name` (or
    /// `rediss+sentinel://`) for the primary that these Sentinels know by that name,
    /// `redis+cluster://host,host` for a Redis Cluster (`rediss+cluster://` for TLS),
    /// `redlock://host,host,host` for a majority of independent servers (`redlocks://` for
    /// TLS), `postgres://user:password@host:port/database`, `mysql://..`,
    /// `sqlite:///path/file.db`, `zookeeper://host,host,host/path`,
    /// `etcd://host,host,host/path` (`etcds://` for TLS), `consul://:token@host:8500`
    /// (`consuls://` for TLS). There is no default.
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
    /// processes get it. Default 64; on Consul 1000.
    pub max_handovers: Option<u32>,
    /// For how long a lock is handed over between tasks of this process before other
    /// processes get it. Default 5 ms; on Consul 20 ms.
    pub max_handover_time: Option<Duration>,
    /// How long a broken lock stays taken, so that its holder is notified before
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
    /// the system's, for connections with TLS: Redis, PostgreSQL, MySQL, etcd and Consul.
    pub tls_ca: Option<PathBuf>,
    /// The file with this client's certificate (PEM), for servers that require one.
    pub tls_cert: Option<PathBuf>,
    /// The file with the private key of this client's certificate (PEM).
    pub tls_key: Option<PathBuf>,
    /// How the Sentinels of a `redis+sentinel://` URL are reached. Written
    /// `sentinel.user` and so on.
    pub sentinel: SentinelConfig,
    /// How many replicas must have every grant and every renewal before it counts.
    /// Default 0: replication is not waited for.
    pub min_replicas: Option<u32>,
    /// The longest ttl of a `redlock://` backend; it must be the same in all programs. A
    /// node that lost its data does not vote for this long. Default 60 s.
    pub max_ttl: Option<Duration>,
    /// Whether the tables of a SQL database are made if they are missing. Default: they
    /// are not.
    pub migrate: Option<bool>,
    /// How the connection to a SQL server is encrypted. Default: [`SslMode::VerifyFull`],
    /// but not encrypted to a server of this machine.
    pub sslmode: Option<SslMode>,
    /// The layout of locks that are shared with other programs, for backends that have
    /// several. Default: the backend's first.
    pub layout: Option<String>,
    /// What is special about the session with Consul. Written `consul.datacenter` and so
    /// on.
    pub consul: ConsulConfig,
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

/// How the Sentinels of a `redis+sentinel://` URL are reached: they have users and
/// certificates of their own.
///
/// ```
/// use dlock::Config;
///
/// let config = Config::from_url("rediss+sentinel://a,b,c/shop?sentinel.tls=no&sentinel.user=ops")?;
/// assert_eq!(config.sentinel.tls, Some(false));
/// assert_eq!(config.sentinel.user.as_deref(), Some("ops"));
/// # Ok::<(), dlock::Error>(())
/// ```
#[derive(Clone, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct SentinelConfig {
    /// The user at the Sentinels. Default: their default user.
    pub user: Option<String>,
    /// The password at the Sentinels. Default: none.
    pub password: Option<String>,
    /// The file that the password at the Sentinels is read from, for each connection.
    pub password_file: Option<PathBuf>,
    /// Whether the Sentinels are reached by TLS. Default: as the servers, which is what
    /// the scheme of the URL says.
    pub tls: Option<bool>,
    /// As `tls_ca`, for the Sentinels. Default: `tls_ca`.
    pub tls_ca: Option<PathBuf>,
    /// As `tls_cert`, for the Sentinels. Default: `tls_cert`.
    pub tls_cert: Option<PathBuf>,
    /// As `tls_key`, for the Sentinels. Default: `tls_key`.
    pub tls_key: Option<PathBuf>,
}

impl fmt::Debug for SentinelConfig {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("SentinelConfig")
            .field("user", &self.user)
            .field("tls", &self.tls)
            .finish_non_exhaustive()
    }
}

/// What is special about the session of a client with Consul.
///
/// ```
/// use dlock::Config;
///
/// let url = "memory://?consul.datacenter=eu&consul.lock_delay=1s";
/// let config = Config::from_url(url)?;
/// assert_eq!(config.consul.datacenter.as_deref(), Some("eu"));
/// # Ok::<(), dlock::Error>(())
/// ```
#[derive(Clone, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct ConsulConfig {
    /// The datacenter that keeps the locks. Default: that of the agent.
    pub datacenter: Option<String>,
    /// How long Consul keeps everybody from a lock whose session ended without a release.
    /// Default 15 s, as Consul itself; 60 s at most.
    pub lock_delay: Option<Duration>,
    /// Whether the session also ends when the machine of the agent is not healthy
    /// (`serfHealth`). Default: it does not.
    pub node_checks: Option<bool>,
    /// The servers' `session_ttl_min`, if it is not 10 s: a shorter ttl is rounded up to it.
    pub session_ttl_min: Option<Duration>,
}

/// How the connection to a SQL server is encrypted. None of them falls back to another.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum SslMode {
    /// The connection is not encrypted.
    Disable,
    /// The connection is encrypted, but the identity of the server is not verified.
    Require,
    /// The connection is encrypted, and the certificate of the server is signed by a trusted
    /// authority.
    VerifyCa,
    /// As [`VerifyCa`](Self::VerifyCa), and the certificate is for the host of the URL.
    VerifyFull,
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
            sentinel,
            min_replicas,
            max_ttl,
            migrate,
            sslmode,
            layout,
            consul,
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
        or(&mut self.sentinel.user, sentinel.user);
        or(&mut self.sentinel.password, sentinel.password);
        or(&mut self.sentinel.password_file, sentinel.password_file);
        or(&mut self.sentinel.tls, sentinel.tls);
        or(&mut self.sentinel.tls_ca, sentinel.tls_ca);
        or(&mut self.sentinel.tls_cert, sentinel.tls_cert);
        or(&mut self.sentinel.tls_key, sentinel.tls_key);
        or(&mut self.min_replicas, min_replicas);
        or(&mut self.max_ttl, max_ttl);
        or(&mut self.migrate, migrate);
        or(&mut self.sslmode, sslmode);
        or(&mut self.layout, layout);
        or(&mut self.consul.datacenter, consul.datacenter);
        or(&mut self.consul.lock_delay, consul.lock_delay);
        or(&mut self.consul.node_checks, consul.node_checks);
        or(&mut self.consul.session_ttl_min, consul.session_ttl_min);
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
