//! Configuration: from code, a file, the environment or a URL. Each option has
//! one name and one meaning, wherever it is written.

mod backends;
mod file;
pub(crate) mod values;

use std::collections::BTreeMap;
use std::ffi::OsString;
use std::fmt;
use std::path::PathBuf;
use std::time::Duration;

use url::Url;

use self::backends::parse_url;
use self::values::{dotted, duration, fault, is_not_ours, number, patience};
use crate::error::Result;
use crate::machine::HandoverLimits;
use crate::machine::Limits;

/// The longest ttl and the longest `release_after`.
pub const MAX_TTL: Duration = Duration::from_secs(24 * 60 * 60);

/// The options of a [`Config`]; the same names in a file, in a URL's query and,
/// in capitals after the prefix, in the environment.
const OPTIONS: &[&str] = &[
    "url",
    "namespace",
    "ttl",
    "wait",
    "call_timeout",
    "max_handovers",
    "max_handover_time",
    "max_waiters",
    "client_name",
    "password_file",
    "database",
    "eviction",
    "tls_ca",
    "tls_cert",
    "tls_key",
    "policy.NAME.ttl",
    "policy.NAME.wait",
];

/// How a client behaves.
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
    /// Where the locks are kept: `memory://`, `memory://name`,
    /// `redis://user:password@host:port/database`, `rediss://` for TLS,
    /// `redis+unix:///run/redis.sock`. Default `memory://`.
    pub url: String,
    /// Keeps the keys of one application apart from others'. Default `default`.
    pub namespace: String,
    /// How long a lock outlives its process. Default 30 s.
    pub ttl: Duration,
    /// How long `lock()` waits; `None` (written `unlimited`): for ever. Default 10 s.
    pub wait: Option<Duration>,
    /// How long one call to the backend may take. Default 2 s.
    pub call_timeout: Duration,
    /// How often a lock is passed on inside the process before others get a chance. Default 64.
    pub max_handovers: u32,
    /// How long a lock is passed on inside the process before others get a chance. Default 5 ms.
    pub max_handover_time: Duration,
    /// How many tasks of this process may wait for one key. Default 10,000.
    pub max_waiters: usize,
    /// What operators see. Default: `POD_NAME` or the host's name, and the process id.
    pub client_name: Option<String>,
    /// A file with the password, for backends that want one.
    pub password_file: Option<PathBuf>,
    /// The number of the database, for backends that number them; else as the URL says.
    pub database: Option<i64>,
    /// What to do about a server that may throw locks out of its memory. Default: refuse it.
    pub eviction: Eviction,
    /// A file with the certificates of the authorities to trust (PEM), instead of
    /// the system's, for `rediss://`.
    pub tls_ca: Option<PathBuf>,
    /// A file with this client's certificate (PEM), for servers that want one.
    pub tls_cert: Option<PathBuf>,
    /// A file with the key of that certificate (PEM).
    pub tls_key: Option<PathBuf>,
    /// Settings by name, for code that says `policy = "name"`: operators change
    /// them without a new build. Written `policy.name.ttl`, `policy.name.wait`.
    pub policies: BTreeMap<String, Policy>,
}

/// What to do about a server that may throw locks out of its memory.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Eviction {
    /// Do not use it.
    #[default]
    Refuse,
    /// Use it, with a warning in the log.
    Warn,
}

/// What the locks of one policy have instead of what the code says.
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
    /// How long a lock outlives its process; `None`: as the code says.
    pub ttl: Option<Duration>,
    /// How long `lock()` waits, `Some(None)`: for ever; `None`: as the code says.
    pub wait: Option<Option<Duration>>,
}

impl Default for Config {
    fn default() -> Self {
        Config {
            url: "memory://".into(),
            namespace: "default".into(),
            ttl: Duration::from_secs(30),
            wait: Some(Duration::from_secs(10)),
            call_timeout: Duration::from_secs(2),
            max_handovers: 64,
            max_handover_time: Duration::from_millis(5),
            max_waiters: 10_000,
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
    /// The defaults, changed by what the URL's query says: `memory://?ttl=10s`.
    ///
    /// # Errors
    /// `Config` if the URL cannot be read or names an unknown scheme or option.
    pub fn from_url(url: &str) -> Result<Self> {
        let mut config = Config::default();
        config.set("url", url)?;
        Ok(config)
    }

    /// The defaults, changed by environment variables: with the prefix `DLOCK_`,
    /// `DLOCK_URL`, `DLOCK_TTL` and so on.
    ///
    /// # Errors
    /// `Config` if a variable with the prefix is no option or has a bad value.
    /// `DLOCK_KEY`, `DLOCK_TOKEN`, `DLOCK_REQUIRE_SERVERS`, `DLOCK_TEST_*` and what
    /// Kubernetes sets for a service of that name are left alone.
    pub fn from_env(prefix: &str) -> Result<Self> {
        let text = |(name, value): (OsString, OsString)| {
            Some((name.into_string().ok()?, value.to_string_lossy().into_owned()))
        };
        Self::from_vars(prefix, std::env::vars_os().filter_map(text))
    }

    /// As [`from_env`](Self::from_env), from these variables instead of those of the
    /// process.
    ///
    /// # Errors
    /// As [`from_env`](Self::from_env).
    pub fn from_vars(
        prefix: &str,
        vars: impl IntoIterator<Item = (String, String)>,
    ) -> Result<Self> {
        let mut config = Config::default();
        let mut found: Vec<(String, String)> = vars
            .into_iter()
            .filter_map(|(name, value)| {
                let name = name.strip_prefix(prefix)?;
                (!is_not_ours(name)).then(|| (dotted(&name.to_ascii_lowercase()), value))
            })
            .collect();
        found.sort_by_key(|(name, _)| name != "url"); // the URL's query first: the rest overrides it
        for (name, value) in found {
            config.set(&name, &value).map_err(|error| fault(format!("{prefix}*: {error}")))?;
        }
        Ok(config)
    }

    /// Sets one option by name.
    ///
    /// # Errors
    /// `Config` if there is no such option or it cannot have that value.
    pub fn set(&mut self, name: &str, value: &str) -> Result<()> {
        match name {
            "url" => return self.set_url(value),
            "namespace" => self.namespace = value.to_owned(),
            "ttl" => self.ttl = duration(name, value)?,
            "wait" => self.wait = patience(name, value)?,
            "call_timeout" => self.call_timeout = duration(name, value)?,
            "max_handovers" => self.max_handovers = number(name, value)?,
            "max_handover_time" => self.max_handover_time = duration(name, value)?,
            "max_waiters" => self.max_waiters = number(name, value)?,
            "client_name" => self.client_name = Some(value.to_owned()),
            "password_file" => self.password_file = Some(value.into()),
            "database" => self.database = Some(number(name, value)?),
            "eviction" => {
                self.eviction = match value {
                    "refuse" => Eviction::Refuse,
                    "warn" => Eviction::Warn,
                    _ => return Err(fault("`eviction` is either `refuse` or `warn`".into())),
                }
            }
            "tls_ca" => self.tls_ca = Some(value.into()),
            "tls_cert" => self.tls_cert = Some(value.into()),
            "tls_key" => self.tls_key = Some(value.into()),
            other => return self.set_policy(other, value),
        }
        Ok(())
    }

    /// `policy.payments.ttl`
    fn set_policy(&mut self, name: &str, value: &str) -> Result<()> {
        let parts = name.strip_prefix("policy.").and_then(|rest| rest.rsplit_once('.'));
        let Some((policy, option @ ("ttl" | "wait"))) = parts else {
            return Err(fault(format!(
                "unknown option `{name}`; the options are {}",
                OPTIONS.join(", ")
            )));
        };
        let plain = |c: char| c.is_ascii_lowercase() || c.is_ascii_digit() || c == '_';
        if policy.is_empty() || policy.len() > 64 || !policy.chars().all(plain) {
            return Err(fault(format!(
                "`{name}`: the name of a policy must be 1 to 64 lower-case letters, digits or `_`, so that every source can write it"
            )));
        }
        let policy = self.policies.entry(policy.to_owned()).or_default();
        match option {
            "ttl" => policy.ttl = Some(duration(name, value)?),
            _ => policy.wait = Some(patience(name, value)?),
        }
        Ok(())
    }

    pub(crate) fn policy(&self, name: &str) -> Policy {
        self.policies.get(name).copied().unwrap_or_default()
    }

    fn set_url(&mut self, text: &str) -> Result<()> {
        let mut url = parse_url(text)?;
        let options: Vec<(String, String)> = url
            .query_pairs()
            .map(|(name, value)| (name.into_owned(), value.into_owned()))
            .collect();
        for (name, value) in &options {
            if name == "url" {
                return Err(fault("a URL cannot hold the option `url`".into()));
            }
            self.set(name, value)?;
        }
        url.set_query(None);
        self.url = url.into();
        Ok(())
    }

    /// Whether every value is within its bounds.
    pub(crate) fn check(&self) -> Result<()> {
        let bounded = |name: &str, value: Duration, max: Duration| {
            if value < Duration::from_millis(1) || value > max {
                return Err(fault(format!(
                    "`{name}` is {}, but must be a millisecond at least and {} at most",
                    humantime::format_duration(value),
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
        bounded("call_timeout", self.call_timeout, Duration::from_secs(60))?;
        if self.max_waiters == 0 {
            return Err(fault(
                "`max_waiters` is 0, so nobody could wait; 10000 is the default".into(),
            ));
        }
        let name = &self.namespace;
        let plain = |c: char| c.is_ascii_alphanumeric() || matches!(c, '-' | '_' | '.');
        if name.is_empty() || name.len() > 64 || !name.chars().all(plain) {
            return Err(fault(
                "`namespace` must be 1 to 64 letters, digits, `-`, `_` or `.`".into(),
            ));
        }
        let client = self.client_name.as_deref().unwrap_or("ok");
        if client.is_empty() || client.len() > 256 || client.chars().any(char::is_control) {
            return Err(fault(
                "`client_name` must be 1 to 256 bytes without control characters".into(),
            ));
        }
        Ok(())
    }

    pub(crate) fn limits(&self) -> Limits {
        Limits {
            handover: HandoverLimits { count: self.max_handovers, time: self.max_handover_time },
            waiters: self.max_waiters,
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

#[cfg(test)]
mod tests {
    use super::values::read_password;
    use super::*;
    use crate::error::ErrorKind;

    fn env(vars: &[(&str, &str)]) -> Result<Config> {
        let vars = vars.iter().map(|(name, value)| ((*name).to_owned(), (*value).to_owned()));
        Config::from_vars("DLOCK_", vars)
    }

    #[test]
    fn every_source_says_the_same() {
        let file: Config = toml::from_str(
            "url = 'memory://shop'\nttl = '5s'\nmax_waiters = 7\nwait = 'unlimited'",
        )
        .unwrap();
        let url = Config::from_url("memory://shop?ttl=5s&max_waiters=7&wait=unlimited").unwrap();
        let vars = env(&[
            ("DLOCK_URL", "memory://shop"),
            ("DLOCK_TTL", "5s"),
            ("DLOCK_MAX_WAITERS", "7"),
            ("DLOCK_WAIT", "unlimited"),
            ("DLOCK_TOKEN", "41"),
            ("DLOCK_SERVICE_HOST", "10.0.0.1"),
            ("OTHER", "x"),
        ])
        .unwrap();
        assert_eq!(file, url);
        assert_eq!(url, vars);
    }

    #[test]
    fn every_source_says_the_same_of_a_policy() {
        let file: Config = toml::from_str(
            "[policy.flash_sale]\nttl = '5s'\nwait = 'unlimited'\n[policy.payments]\nwait = '0s'",
        )
        .unwrap();
        let url = Config::from_url(
            "memory://?policy.flash_sale.ttl=5s&policy.flash_sale.wait=unlimited&policy.payments.wait=0s",
        )
        .unwrap();
        let vars = env(&[
            ("DLOCK_POLICY_FLASH_SALE_TTL", "5s"),
            ("DLOCK_POLICY_FLASH_SALE_WAIT", "unlimited"),
            ("DLOCK_POLICY_PAYMENTS_WAIT", "0s"),
        ])
        .unwrap();
        assert_eq!(file.policies, url.policies);
        assert_eq!(url.policies, vars.policies);
        let policy = Policy { ttl: Some(Duration::from_secs(5)), wait: Some(None) };
        assert_eq!(url.policy("flash_sale"), policy);
        assert_eq!(url.policy("unheard_of"), Policy::default());
    }

    #[test]
    fn variables_override_the_query_of_the_url() {
        let config = env(&[("DLOCK_TTL", "7s"), ("DLOCK_URL", "memory://?ttl=5s")]).unwrap();
        assert_eq!(config.ttl, Duration::from_secs(7));
    }

    #[test]
    fn faults_name_what_is_valid() {
        let says = |result: Result<Config>, words: &str| {
            let error = result.unwrap_err();
            assert_eq!(error.kind(), ErrorKind::Config);
            assert!(error.to_string().contains(words), "{error}");
        };
        says(Config::from_url("carrier-pigeon://x"), "memory://");
        says(Config::from_url("memory://?color=red"), "namespace, ttl, wait");
        says(Config::from_url("no url at all"), "write for example memory://");
        says(Config::from_url("memory://?ttl=soon"), "such as 150ms, 30s");
        says(env(&[("DLOCK_NAMESPCE", "x")]), "unknown option `namespce`");
        says(Config::from_url("memory://?max_waiters=-1"), "max_waiters");
        says(Config::from_url("memory://?policy.a.color=red"), "policy.NAME.ttl");
        says(Config::from_url("memory://?policy.ttl=1s"), "policy.NAME.ttl");
        says(Config::from_url("memory://?policy.A-b.ttl=1s"), "lower-case letters");
        says(Config::from_url("memory://?policy.a.ttl=soon"), "`policy.a.ttl`");
        says(env(&[("DLOCK_POLICY_A_COLOR", "red")]), "policy.NAME.ttl");
    }

    #[test]
    fn bounds_are_checked() {
        let check = |url: &str| Config::from_url(url).and_then(|config| config.check());
        for url in [
            "memory://?ttl=0s",
            "memory://?ttl=25h",
            "memory://?policy.a.ttl=25h",
            "memory://?call_timeout=0s",
            "memory://?max_waiters=0",
            "memory://?namespace=a%20b",
            "memory://?namespace=",
            "memory://?client_name=",
        ] {
            assert_eq!(check(url).unwrap_err().kind(), ErrorKind::Config, "{url}");
        }
        check("memory://?ttl=24h").unwrap();
    }

    #[test]
    fn secrets_are_not_shown() {
        let config = Config { url: "redis://u:hunter2@h/0?x=hunter2".into(), ..Config::default() };
        assert!(!format!("{config:?}").contains("hunter2"));
        let error = Config::from_url("rediz://u:hunter2@h").unwrap_err();
        assert!(!format!("{error} {error:?}").contains("hunter2"));
        let error = Config::from_url("://u:hunter2@h").unwrap_err();
        assert!(!format!("{error} {error:?}").contains("hunter2"));
    }

    #[test]
    fn the_password_file_is_read() {
        let path = std::env::temp_dir().join(format!("dlock-password-{}", std::process::id()));
        std::fs::write(&path, "hunter2\n").unwrap();
        let mut config = Config { password_file: Some(path.clone()), ..Config::default() };
        assert_eq!(read_password(&path).unwrap(), "hunter2");
        let error = config.backend().map(|_| ()).unwrap_err();
        assert!(error.to_string().contains("no users or passwords"), "{error}");
        std::fs::remove_file(&path).unwrap();
        config.password_file = Some(path);
        assert!(config.backend().map(|_| ()).unwrap_err().to_string().contains("cannot read"));
    }
}
