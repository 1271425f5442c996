//! The backends that a URL can name.

use std::sync::Arc;

use url::Url;

use super::Config;
use super::values::{fault, read_password};
use crate::backend::Backend;
use crate::backend::memory::Memory;
#[cfg(feature = "redis")]
use crate::backend::redis::{Provider, Redis, TlsFiles};
use crate::error::{Error, Result};

/// The URL schemes that are built in.
const SCHEMES: &[&str] = &[
    "memory",
    #[cfg(feature = "redis")]
    "redis",
    #[cfg(feature = "redis")]
    "rediss",
    #[cfg(feature = "redis")]
    "redis+unix",
];

impl Config {
    #[cfg(feature = "redis")]
    pub(crate) fn tls_files(&self) -> TlsFiles {
        let (ca, cert, key) = (self.tls_ca.clone(), self.tls_cert.clone(), self.tls_key.clone());
        TlsFiles { ca, cert, key }
    }

    /// The backend that the URL names. The only list of backends there is.
    pub(crate) fn backend(&self) -> Result<Arc<dyn Backend>> {
        let url = parse_url(&self.url)?;
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
                    return Err(fault("memory:// takes a name and no path: memory://name".into()));
                }
                let name = url.host_str().unwrap_or("");
                Ok(Arc::new(Memory::shared(name, &self.namespace)))
            }
            #[cfg(feature = "redis")]
            "redis" | "rediss" | "redis+unix" => Ok(Arc::new(Redis::configured(self, &url, None)?)),
            unknown => Err(unknown_scheme(unknown)),
        }
    }

    /// A client of the driver crate with the address, credentials and certificates of
    /// this moment. Hidden, and not covered by semantic versioning.
    ///
    /// # Errors
    /// `Config` if it is no Redis, or files cannot be used.
    #[doc(hidden)]
    #[cfg(feature = "redis")]
    pub async fn redis_client(&self) -> Result<redis::Client> {
        crate::backend::redis::client(self, &parse_url(&self.url)?).await
    }

    /// The Redis that the URL names, with credentials from a provider.
    #[cfg(feature = "redis")]
    pub(crate) fn redis_with(&self, provider: Provider) -> Result<Arc<dyn Backend>> {
        let url = parse_url(&self.url)?;
        if url.scheme() == "memory" {
            return Err(fault("credentials are of no use to memory://".into()));
        }
        Ok(Arc::new(Redis::configured(self, &url, Some(provider))?))
    }
}

fn unknown_scheme(scheme: &str) -> Error {
    fault(format!("unknown scheme `{scheme}://`; built in: {}://", SCHEMES.join("://, ")))
}

pub(super) fn parse_url(text: &str) -> Result<Url> {
    // The text may hold a password, so it is never repeated.
    let url = Url::parse(text).map_err(|error| {
        fault(format!("the URL cannot be read ({error}); write for example memory://"))
    })?;
    if !SCHEMES.contains(&url.scheme()) {
        return Err(unknown_scheme(url.scheme()));
    }
    Ok(url)
}
