//! Where connections come from: an address and credentials, or what the user has.

use std::fmt;
use std::future::Future;
use std::path::{Path, PathBuf};
use std::pin::Pin;
use std::sync::Arc;

use redis::aio::{ConnectionManager, MultiplexedConnection};
use redis::{
    AsyncConnectionConfig, Client, ClientTlsConfig, Cmd, RedisResult, TlsCertificates, Value,
};

use url::Url;

use super::address::Address;
use super::errors;
use crate::config::Settings;
use crate::config::values::read_password;
use crate::error::{Error, ErrorKind, Operation, Result};

/// How many requests may be on their way to the socket before callers wait.
const REQUESTS: usize = 16 * 1024;

/// Who a client says it is, to a server that wants to know.
#[derive(Clone)]
pub struct Credentials {
    /// The user; `None` for the server's default user.
    pub user: Option<String>,
    /// The password, or a token that serves as one.
    pub password: String,
}

impl fmt::Debug for Credentials {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Credentials").field("user", &self.user).finish_non_exhaustive()
    }
}

type Asked = Pin<Box<dyn Future<Output = Result<Credentials>> + Send>>;
pub(crate) type Provider = Arc<dyn Fn() -> Asked + Send + Sync>;

/// What a user has already.
#[derive(Clone)]
pub(crate) enum Given {
    Client(Client),
    Manager(Client, ConnectionManager),
}

/// The files of a TLS connection.
#[derive(Clone, Default)]
pub(crate) struct TlsFiles {
    pub(crate) ca: Option<PathBuf>,
    pub(crate) cert: Option<PathBuf>,
    pub(crate) key: Option<PathBuf>,
}

/// Where connections come from.
pub(super) enum Connector {
    Address {
        address: Address,
        tls: Option<TlsCertificates>,
        /// Read anew for each connection, since it may have been changed.
        password_file: Option<PathBuf>,
        /// Asked anew for each connection.
        provider: Option<Provider>,
    },
    Given(Given),
}

impl Connector {
    /// The server that the configuration names.
    pub(super) fn configured(
        config: &Settings,
        url: &Url,
        provider: Option<Provider>,
    ) -> Result<Self> {
        let address = Address::new(url, config.database)?;
        Self::address(address, &config.tls_files(), config.password_file.clone(), provider)
    }

    pub(super) fn address(
        address: Address,
        files: &TlsFiles,
        password_file: Option<PathBuf>,
        provider: Option<Provider>,
    ) -> Result<Self> {
        if address.is_tls() && rustls::crypto::CryptoProvider::get_default().is_none() {
            // Somebody else may be first; then theirs is used.
            let _ = rustls::crypto::ring::default_provider().install_default();
        }
        let connector = Connector::Address {
            tls: certificates(&address, files)?,
            address,
            password_file,
            provider,
        };
        connector.open(None)?; // what cannot be used is told now
        Ok(connector)
    }

    /// How the server is called in messages.
    pub(super) fn shown(&self) -> String {
        match self {
            Connector::Address { address, .. } => address.shown.clone(),
            Connector::Given(Given::Client(client) | Given::Manager(client, _)) => {
                client.get_connection_info().addr().to_string()
            }
        }
    }

    /// A client with the credentials of this moment.
    pub(super) async fn client(&self) -> Result<Client> {
        let Connector::Address { password_file, provider, .. } = self else {
            return self.open(None);
        };
        if let Some(provider) = provider {
            return self.open(Some(provider().await?));
        }
        let Some(path) = password_file else { return self.open(None) };
        let password = read_password(path).map_err(|error| {
            Error::new(ErrorKind::Unavailable, Operation::Connect)
                .saying("`password_file` is not to be read any more; it is tried again")
                .because(error)
        })?;
        self.open(Some(Credentials { user: None, password }))
    }

    fn open(&self, credentials: Option<Credentials>) -> Result<Client> {
        let (address, tls) = match self {
            Connector::Address { address, tls, .. } => (address, tls),
            Connector::Given(Given::Client(client) | Given::Manager(client, _)) => {
                return Ok(client.clone());
            }
        };
        let mut info = address.info.clone();
        if let Some(Credentials { user, password }) = credentials {
            let mut settings = info.redis_settings().clone().set_password(password);
            if let Some(user) = user {
                settings = settings.set_username(user);
            }
            info = info.set_redis_settings(settings);
        }
        let client = match tls {
            Some(tls) => Client::build_with_tls(info, tls.clone()),
            None => Client::open(info),
        };
        client.map_err(|error| {
            Error::new(ErrorKind::Config, Operation::Configure).saying(format!(
                "the server's address or certificates cannot be used: {}",
                error.category()
            ))
        })
    }

    pub(super) async fn connection(&self) -> Result<Connection> {
        if let Connector::Given(Given::Manager(_, manager)) = self {
            return Ok(Connection::Managed(manager.clone()));
        }
        let config = AsyncConnectionConfig::new()
            .set_connection_timeout(None)
            .set_response_timeout(None) // every call has its time-out outside
            .set_pipeline_buffer_size(REQUESTS);
        let client = self.client().await?;
        let connected = client.get_multiplexed_async_connection_with_config(&config).await;
        connected.map(Connection::Own).map_err(|error| errors::unreachable(&error, &self.shown()))
    }
}

/// A connection that many calls share.
#[derive(Clone)]
pub(super) enum Connection {
    Own(MultiplexedConnection),
    Managed(ConnectionManager),
}

impl Connection {
    pub(super) async fn send(&self, command: &Cmd) -> RedisResult<Value> {
        match self {
            Connection::Own(connection) => connection.clone().send_packed_command(command).await,
            Connection::Managed(manager) => manager.clone().send_packed_command(command).await,
        }
    }
}

fn certificates(address: &Address, files: &TlsFiles) -> Result<Option<TlsCertificates>> {
    let TlsFiles { ca, cert, key } = files;
    if ca.is_none() && cert.is_none() && key.is_none() {
        return Ok(None);
    }
    if !address.is_tls() {
        return Err(config_fault("`tls_ca`, `tls_cert` and `tls_key` want a rediss:// URL".into()));
    }
    let client_tls = match (cert, key) {
        (Some(cert), Some(key)) => Some(ClientTlsConfig {
            client_cert: read("tls_cert", cert)?,
            client_key: read("tls_key", key)?,
        }),
        (None, None) => None,
        _ => return Err(config_fault("`tls_cert` and `tls_key` go together; give both".into())),
    };
    let root_cert = ca.as_deref().map(|path| read("tls_ca", path)).transpose()?;
    Ok(Some(TlsCertificates { client_tls, root_cert }))
}

fn read(option: &str, path: &Path) -> Result<Vec<u8>> {
    std::fs::read(path).map_err(|error| {
        config_fault(format!("cannot read `{option}` {}: {error}", path.display()))
    })
}

fn config_fault(what: String) -> Error {
    Error::new(ErrorKind::Config, Operation::Configure).saying(what)
}
