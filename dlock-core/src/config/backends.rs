//! The backends that a URL can name. A new backend is added here.

use std::sync::Arc;

use ::url::Url;

use super::url::parse_url;
#[cfg(any(feature = "consul", feature = "etcd", feature = "zookeeper"))]
use super::values::Secret;
use super::values::read_password;
use super::{ConsulConfig, SentinelConfig, Settings};
use crate::backend::Backend;
#[cfg(feature = "consul")]
use crate::backend::consul::Consul;
#[cfg(feature = "etcd")]
use crate::backend::etcd::Etcd;
use crate::backend::memory::Memory;
#[cfg(feature = "redis")]
use crate::backend::redis::{Provider, RedLock, Redis, Redisson, TlsFiles, UserConnection};
#[cfg(feature = "mysql")]
use crate::backend::sql::MySql;
#[cfg(feature = "postgres")]
use crate::backend::sql::Postgres;
#[cfg(feature = "sqlite")]
use crate::backend::sql::Sqlite;
#[cfg(feature = "zookeeper")]
use crate::backend::zookeeper::ZooKeeper;
use crate::error::{Error, Result};

/// The URL schemes of the backends that are compiled in.
pub(super) const SCHEMES: &[&str] = &[
    "memory",
    #[cfg(feature = "redis")]
    "redis",
    #[cfg(feature = "redis")]
    "rediss",
    #[cfg(feature = "redis")]
    "redis+unix",
    #[cfg(feature = "redis")]
    "redis+sentinel",
    #[cfg(feature = "redis")]
    "rediss+sentinel",
    #[cfg(feature = "redis")]
    "redis+cluster",
    #[cfg(feature = "redis")]
    "rediss+cluster",
    #[cfg(feature = "redis")]
    "redlock",
    #[cfg(feature = "redis")]
    "redlocks",
    #[cfg(feature = "sqlite")]
    "sqlite",
    #[cfg(feature = "postgres")]
    "postgres",
    #[cfg(feature = "postgres")]
    "postgresql",
    #[cfg(feature = "mysql")]
    "mysql",
    #[cfg(feature = "mysql")]
    "mariadb",
    #[cfg(feature = "consul")]
    "consul",
    #[cfg(feature = "consul")]
    "consuls",
    #[cfg(feature = "zookeeper")]
    "zookeeper",
    #[cfg(feature = "etcd")]
    "etcd",
    #[cfg(feature = "etcd")]
    "etcds",
];

impl Settings {
    /// The files of the TLS options.
    #[cfg(feature = "redis")]
    pub(crate) fn tls_files(&self) -> TlsFiles {
        let (ca, cert, key) = (self.tls_ca.clone(), self.tls_cert.clone(), self.tls_key.clone());
        TlsFiles { ca, cert, key }
    }

    /// The files of the TLS options for Sentinels: where they have none of their own,
    /// those of the servers, if Sentinels are reached by TLS at all.
    #[cfg(feature = "redis")]
    pub(crate) fn sentinel_tls_files(&self, tls: bool) -> TlsFiles {
        let SentinelConfig { tls_ca, tls_cert, tls_key, .. } = self.sentinel.clone();
        let TlsFiles { ca, cert, key } = if tls { self.tls_files() } else { TlsFiles::default() };
        TlsFiles { ca: tls_ca.or(ca), cert: tls_cert.or(cert), key: tls_key.or(key) }
    }

    /// The password or token of the URL, or that of `password_file`, which is read once here:
    /// what cannot be used is told at once.
    #[cfg(any(feature = "consul", feature = "etcd", feature = "zookeeper"))]
    pub(crate) fn secret(&self, url: &Url) -> Result<Option<Secret>> {
        match &self.password_file {
            Some(file) => {
                read_password(file)?;
                Ok(Some(Secret::File(file.clone())))
            }
            None => Ok(url.password().map(decoded).transpose()?.map(Secret::Written)),
        }
    }

    /// User and password of the URL, or with the password of `password_file`.
    #[cfg(any(feature = "etcd", feature = "zookeeper"))]
    pub(crate) fn credentials(&self, url: &Url) -> Result<Option<(String, Secret)>> {
        match (url.username(), self.secret(url)?) {
            ("", None) => Ok(None),
            ("", Some(_)) | (_, None) => Err(Error::config(format!(
                "{}:// needs a user and a password, or neither of them",
                url.scheme()
            ))),
            (user, Some(password)) => Ok(Some((decoded(user)?, password))),
        }
    }

    /// The backend that the URL names.
    pub(crate) fn backend(&self) -> Result<Arc<dyn Backend>> {
        let url = self.parsed_url()?;
        let password = self.password_file.as_deref().map(read_password).transpose()?;
        let is_sentinel = url.scheme().ends_with("+sentinel");
        if self.sentinel != SentinelConfig::default() && !is_sentinel {
            return Err(Error::config(
                "the options `sentinel.*` are for a redis+sentinel:// URL; remove them, or change the URL",
            ));
        }
        if self.max_ttl.is_some() && !url.scheme().starts_with("redlock") {
            return Err(Error::config(
                "the option `max_ttl` is for a redlock:// URL; remove it, or change the URL",
            ));
        }
        let is_consul = matches!(url.scheme(), "consul" | "consuls");
        if self.consul != ConsulConfig::default() && !is_consul {
            return Err(Error::config(
                "the options `consul.*` are for a consul:// URL; remove them, or change the URL",
            ));
        }
        let has_layouts = url.scheme() == "zookeeper"
            || is_consul
            || url.scheme().starts_with("redis") && cfg!(feature = "redis");
        if self.layout.is_some() && !has_layouts {
            return Err(Error::config(
                "`layout` is for a redis://, zookeeper:// or consul:// URL; remove it",
            ));
        }
        match url.scheme() {
            "memory" => {
                if password.is_some() || !url.username().is_empty() || url.password().is_some() {
                    return Err(Error::config(
                        "memory:// has no users or passwords; remove them and `password_file`",
                    ));
                }
                if self.min_replicas > 0 {
                    return Err(Error::config("memory:// has no replicas; remove `min_replicas`"));
                }
                if !matches!(url.path(), "" | "/") {
                    return Err(Error::config(
                        "memory:// takes a name but no path; write memory://name",
                    ));
                }
                let name = url.host_str().unwrap_or("");
                Ok(Arc::new(Memory::shared(name, &self.namespace)))
            }
            #[cfg(feature = "redis")]
            "redis" | "rediss" | "redis+unix" | "redis+sentinel" | "rediss+sentinel"
            | "redis+cluster" | "rediss+cluster" => self.redis_at(&url, None),
            #[cfg(feature = "redis")]
            "redlock" | "redlocks" => Ok(Arc::new(RedLock::configured(self, &url, None)?)),
            #[cfg(feature = "mysql")]
            "mysql" | "mariadb" => Ok(Arc::new(MySql::configured(self, &url)?)),
            #[cfg(feature = "postgres")]
            "postgres" | "postgresql" => Ok(Arc::new(Postgres::configured(self, &url)?)),
            #[cfg(feature = "sqlite")]
            "sqlite" => Ok(Arc::new(Sqlite::configured(self, &url)?)),
            #[cfg(feature = "consul")]
            "consul" | "consuls" => Ok(Arc::new(Consul::configured(self, &url)?)),
            #[cfg(feature = "zookeeper")]
            "zookeeper" => Ok(Arc::new(ZooKeeper::configured(self, &url)?)),
            #[cfg(feature = "etcd")]
            "etcd" | "etcds" => Ok(Arc::new(Etcd::configured(self, &url)?)),
            unknown => Err(Error::config(format!("no backend has the scheme `{unknown}://`"))),
        }
    }

    /// The Redis backend that the URL names, with credentials from a provider.
    #[cfg(feature = "redis")]
    pub(crate) fn redis_with(&self, provider: Provider) -> Result<Arc<dyn Backend>> {
        let url = self.parsed_url()?;
        if url.scheme() == "memory" {
            return Err(Error::config(
                "memory:// takes no credentials; remove the provider of Redis credentials, or set a redis:// URL",
            ));
        }
        if url.scheme().starts_with("redlock") {
            return Ok(Arc::new(RedLock::configured(self, &url, Some(provider))?));
        }
        self.redis_at(&url, Some(provider))
    }

    #[cfg(feature = "redis")]
    fn redis_at(&self, url: &Url, provider: Option<Provider>) -> Result<Arc<dyn Backend>> {
        if self.is_redissons_layout()? {
            return Ok(Arc::new(Redisson::configured(self, url, provider)?));
        }
        Ok(Arc::new(Redis::configured(self, url, provider)?))
    }

    /// The Redis backend over a client or a connection of the user.
    #[cfg(feature = "redis")]
    pub(crate) fn redis_over(&self, connection: UserConnection) -> Result<Arc<dyn Backend>> {
        if self.is_redissons_layout()? {
            return Ok(Arc::new(Redisson::with_connection(connection, self)?));
        }
        Ok(Arc::new(Redis::with_connection(connection, self)?))
    }

    #[cfg(feature = "redis")]
    fn is_redissons_layout(&self) -> Result<bool> {
        match self.layout.as_deref() {
            None => Ok(false),
            Some("redisson") => Ok(true),
            Some(other) => Err(Error::config(format!(
                "`{other}` is not a layout of redis://; write `redisson` to share locks with Redisson, or remove `layout`"
            ))),
        }
    }

    /// The URL. There is no default: a program that does not say where its locks are
    /// must not run without exclusion.
    fn parsed_url(&self) -> Result<Url> {
        let url = self.url.as_deref().ok_or_else(|| {
            Error::config("no backend is configured; set `url`, for example redis://localhost:6379 (DLOCK_URL if you read the environment), or ask for memory:// to lock inside this process only")
        })?;
        Ok(parse_url(url)?.url)
    }
}

/// A part of a URL without its percent signs.
#[cfg(any(feature = "consul", feature = "etcd", feature = "zookeeper"))]
fn decoded(text: &str) -> Result<String> {
    let decoded = percent_encoding::percent_decode_str(text).decode_utf8();
    let bad = |_| Error::config("user or password of the URL is not valid UTF-8");
    decoded.map(|text| text.into_owned()).map_err(bad)
}

#[cfg(feature = "redis")]
impl super::Config {
    /// A client of the crate `redis` with the address, credentials and certificates
    /// that the configuration has now. Hidden, and not covered by semantic versioning.
    ///
    /// # Errors
    /// `Config` if the URL is not one of Redis, or a file cannot be used.
    ///
    /// # Cancel safety
    /// Dropping the future changes nothing: it only reads files.
    #[doc(hidden)]
    pub async fn redis_client(&self) -> Result<redis::Client> {
        let settings = Settings::from(self.clone());
        crate::backend::redis::client(&settings, &settings.parsed_url()?).await
    }

    /// The same for every server that a `redlock://` URL names.
    ///
    /// # Errors
    /// As [`redis_client`](Self::redis_client).
    ///
    /// # Cancel safety
    /// Dropping the future changes nothing: it only reads files.
    #[doc(hidden)]
    pub async fn redis_clients(&self) -> Result<Vec<redis::Client>> {
        let settings = Settings::from(self.clone());
        crate::backend::redis::clients(&settings, &settings.parsed_url()?).await
    }
}
