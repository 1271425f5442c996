//! Options by name, as a URL, the environment or a file writes them.

use std::ffi::OsString;

use super::check::MAX_NAME_BYTES;
use super::url::parse_url;
use super::values::{dotted, duration, is_foreign, number, ssl_mode, wait_limit, yes_or_no};
use super::{Config, Eviction};
use crate::error::{Error, Result};

/// The names of all options. They are the same in a file, in a URL's query and, in
/// capitals after the prefix, in the environment.
pub(super) const OPTIONS: &[&str] = &[
    "url",
    "namespace",
    "ttl",
    "wait",
    "call_timeout",
    "max_handovers",
    "max_handover_time",
    "break_delay",
    "max_waiters",
    "client_name",
    "password_file",
    "database",
    "eviction",
    "tls_ca",
    "tls_cert",
    "tls_key",
    "sentinel.user",
    "sentinel.password",
    "sentinel.password_file",
    "sentinel.tls",
    "sentinel.tls_ca",
    "sentinel.tls_cert",
    "sentinel.tls_key",
    "min_replicas",
    "max_ttl",
    "migrate",
    "sslmode",
    "layout",
    "consul.datacenter",
    "consul.lock_delay",
    "consul.node_checks",
    "consul.session_ttl_min",
    "policy.NAME.ttl",
    "policy.NAME.wait",
];

impl Config {
    /// A configuration with the options of this URL's query:
    /// `memory://?ttl=10s`.
    ///
    /// # Errors
    /// `Config` if the URL is not valid or names an unknown scheme or option.
    pub fn from_url(url: &str) -> Result<Self> {
        let mut config = Config::default();
        config.set("url", url)?;
        Ok(config)
    }

    /// A configuration with the options of environment variables: with the
    /// prefix `DLOCK_` these are `DLOCK_URL`, `DLOCK_TTL` and so on.
    ///
    /// # Errors
    /// `Config` if a variable with the prefix is not an option or its value is not
    /// valid. `DLOCK_KEY`, `DLOCK_TOKEN`, `DLOCK_REQUIRE_SERVERS`, `DLOCK_TEST_*` and
    /// the variables that Kubernetes sets for a service of that name are ignored.
    pub fn from_env(prefix: &str) -> Result<Self> {
        let utf8 = |(name, value): (OsString, OsString)| {
            Some((name.into_string().ok()?, value.to_string_lossy().into_owned()))
        };
        Self::from_vars(prefix, std::env::vars_os().filter_map(utf8))
    }

    /// A configuration with the options of these variables, which are read
    /// as [`from_env`](Self::from_env) reads those of the process.
    ///
    /// # Errors
    /// `Config`, as [`from_env`](Self::from_env).
    pub fn from_vars(
        prefix: &str,
        vars: impl IntoIterator<Item = (String, String)>,
    ) -> Result<Self> {
        let mut config = Config::default();
        let mut found: Vec<(String, String, String)> = vars
            .into_iter()
            .filter_map(|(variable, value)| {
                let name = variable.strip_prefix(prefix).filter(|name| !is_foreign(name))?;
                Some((dotted(&name.to_ascii_lowercase()), variable, value))
            })
            .collect();
        found.sort_by_key(|(name, ..)| name != "url"); // the URL's query first: the rest overrides it
        for (name, variable, value) in found {
            let set = config.set(&name, &value);
            set.map_err(|error| Error::config(format!("{variable}: {}", error.detail())))?;
        }
        Ok(config)
    }

    /// Sets the option of this name.
    ///
    /// # Errors
    /// `Config` if there is no such option or the value is not valid for it.
    pub fn set(&mut self, name: &str, value: &str) -> Result<()> {
        match name {
            "url" => return self.set_url(value),
            "namespace" => self.namespace = Some(value.to_owned()),
            "ttl" => self.ttl = Some(duration(name, value)?),
            "wait" => self.wait = Some(wait_limit(name, value)?),
            "call_timeout" => self.call_timeout = Some(duration(name, value)?),
            "max_handovers" => self.max_handovers = Some(number(name, value)?),
            "max_handover_time" => self.max_handover_time = Some(duration(name, value)?),
            "break_delay" => self.break_delay = Some(duration(name, value)?),
            "max_waiters" => self.max_waiters = Some(number(name, value)?),
            "client_name" => self.client_name = Some(value.to_owned()),
            "password_file" => self.password_file = Some(value.into()),
            "database" => self.database = Some(number(name, value)?),
            "eviction" => {
                self.eviction = Some(match value {
                    "refuse" => Eviction::Refuse,
                    "warn" => Eviction::Warn,
                    _ => {
                        let what = format!("`eviction` is `{value}`; write `refuse` or `warn`");
                        return Err(Error::config(what));
                    }
                });
            }
            "tls_ca" => self.tls_ca = Some(value.into()),
            "tls_cert" => self.tls_cert = Some(value.into()),
            "tls_key" => self.tls_key = Some(value.into()),
            "sentinel.user" => self.sentinel.user = Some(value.to_owned()),
            "sentinel.password" => self.sentinel.password = Some(value.to_owned()),
            "sentinel.password_file" => self.sentinel.password_file = Some(value.into()),
            "sentinel.tls" => self.sentinel.tls = Some(yes_or_no(name, value)?),
            "sentinel.tls_ca" => self.sentinel.tls_ca = Some(value.into()),
            "sentinel.tls_cert" => self.sentinel.tls_cert = Some(value.into()),
            "sentinel.tls_key" => self.sentinel.tls_key = Some(value.into()),
            "min_replicas" => self.min_replicas = Some(number(name, value)?),
            "max_ttl" => self.max_ttl = Some(duration(name, value)?),
            "migrate" => self.migrate = Some(yes_or_no(name, value)?),
            "sslmode" => self.sslmode = Some(ssl_mode(value)?),
            "layout" => self.layout = Some(value.to_owned()),
            "consul.datacenter" => self.consul.datacenter = Some(value.to_owned()),
            "consul.lock_delay" => self.consul.lock_delay = Some(duration(name, value)?),
            "consul.node_checks" => self.consul.node_checks = Some(yes_or_no(name, value)?),
            "consul.session_ttl_min" => {
                self.consul.session_ttl_min = Some(duration(name, value)?);
            }
            other => return self.set_policy(other, value),
        }
        Ok(())
    }

    /// Sets an option of a policy, such as `policy.payments.ttl`.
    fn set_policy(&mut self, name: &str, value: &str) -> Result<()> {
        let parts = name.strip_prefix("policy.").and_then(|rest| rest.rsplit_once('.'));
        let Some((policy, option @ ("ttl" | "wait"))) = parts else {
            let meant = super::url::nearest(name, OPTIONS);
            let hint = meant.map(|meant| format!("; did you mean `{meant}`?"));
            return Err(Error::config(format!(
                "unknown option `{name}`{} (the options are {})",
                hint.unwrap_or_default(),
                OPTIONS.join(", ")
            )));
        };
        let plain = |c: char| c.is_ascii_lowercase() || c.is_ascii_digit() || c == '_';
        if policy.is_empty() || policy.len() > MAX_NAME_BYTES || !policy.chars().all(plain) {
            return Err(Error::config(format!(
                "`{name}`: the name of a policy must be 1 to {MAX_NAME_BYTES} lower-case letters, digits or `_`, so that it can be written in every source"
            )));
        }
        let policy = self.policies.entry(policy.to_owned()).or_default();
        match option {
            "ttl" => policy.ttl = Some(duration(name, value)?),
            _ => policy.wait = Some(wait_limit(name, value)?),
        }
        Ok(())
    }

    /// Sets the URL, and the options of its query.
    fn set_url(&mut self, url: &str) -> Result<()> {
        let parsed = parse_url(url)?;
        let options: Vec<(String, String)> = parsed
            .url
            .query_pairs()
            .map(|(name, value)| (name.into_owned(), value.into_owned()))
            .collect();
        for (name, value) in &options {
            if name == "url" {
                return Err(Error::config("the URL's query holds the option `url`; remove it"));
            }
            self.set(name, value)?;
        }
        self.url = Some(parsed.without_query(url));
        Ok(())
    }
}
