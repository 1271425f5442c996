//! The backends that a URL can name. A new backend is added here.

use std::sync::Arc;

use ::url::Url;

use super::url::parse_url;
use super::values::{fault, read_password};
use super::{Config, Settings};
use crate::backend::Backend;
use crate::backend::memory::Memory;
#[cfg(feature = "redis")]
use crate::backend::redis::{Provider, Redis, TlsFiles};
use crate::error::Result;

/// The URL schemes of the backends that are compiled in.
pub(super) const SCHEMES: &[&str] = &[
    "memory",
    #[cfg(feature = "redis")]
    "redis",
    #[cfg(feature = "redis")]
    "rediss",
    #[cfg(feature = "redis")]
    "redis+unix",
];

impl Settings {
    /// The files of the TLS options.
    #[cfg(feature = "redis")]
    pub(crate) fn tls_files(&self) -> TlsFiles {
        let (ca, cert, key) = (self.tls_ca.clone(), self.tls_cert.clone(), self.tls_key.clone());
        TlsFiles { ca, cert, key }
    }

    /// The backend that the URL names.
    pub(crate) fn backend(&self) -> Result<Arc<dyn Backend>> {
        let url = self.parsed_url()?;
        let password = self.password_file.as_deref().map(read_password).transpose()?;
        match url.scheme() {
            "memory" => {
                if password.is_some() || !url.username().is_empty() || url.password().is_some() {
                    return Err(fault(
                        "memory:// has no users or passwords; remove them and `password_file`"
                            .into(),
                    ));
                }
                if !matches!(url.path(), "" | "/") {
                    return Err(fault(
                        "memory:// takes a name but no path; write memory://name".into(),
                    ));
                }
                let name = url.host_str().unwrap_or("");
                Ok(Arc::new(Memory::shared(name, &self.namespace)))
            }
            #[cfg(feature = "redis")]
            "redis" | "rediss" | "redis+unix" => Ok(Arc::new(Redis::configured(self, &url, None)?)),
            unknown => Err(fault(format!("no backend has the scheme `{unknown}://`"))),
        }
    }

    /// The Redis backend that the URL names, with credentials from a provider.
    #[cfg(feature = "redis")]
    pub(crate) fn redis_with(&self, provider: Provider) -> Result<Arc<dyn Backend>> {
        let url = self.parsed_url()?;
        if url.scheme() == "memory" {
            return Err(fault("memory:// takes no credentials; remove the provider of Redis credentials, or set a redis:// URL".into()));
        }
        Ok(Arc::new(Redis::configured(self, &url, Some(provider))?))
    }

    /// The URL. There is no default: a program that does not say where its locks are
    /// must not run without exclusion.
    fn parsed_url(&self) -> Result<Url> {
        let url = self.url.as_deref().ok_or_else(|| {
            fault("no backend is configured; set `url`, for example redis://localhost:6379 (DLOCK_URL if you read the environment), or ask for memory:// to lock inside this process only".into())
        })?;
        parse_url(url)
    }
}

#[cfg(feature = "redis")]
impl Config {
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
}
