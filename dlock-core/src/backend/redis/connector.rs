//! Where connections come from: an address and credentials, or what the user has.

use std::fmt;
use std::future::Future;
use std::path::{Path, PathBuf};
use std::pin::Pin;
use std::sync::Arc;

use redis::aio::{ConnectionManager, MultiplexedConnection};
use redis::sentinel::SentinelClient;
use redis::{
    AsyncConnectionConfig, Client, ClientTlsConfig, Cmd, ProtocolVersion, RedisResult,
    TlsCertificates, Value,
};

use tokio::sync::watch;
use url::Url;

use super::address::Address;
use super::cluster::Member;
use super::errors;
use super::pipeline::Pipeline;
use super::redlock::Voter;
use super::sentinel::Sentinels;
use super::server_check::ServerKind;
use super::socket::Socket;
use crate::config::Settings;
use crate::config::values::Secret;
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

type CredentialsFuture = Pin<Box<dyn Future<Output = Result<Credentials>> + Send>>;
pub(crate) type Provider = Arc<dyn Fn() -> CredentialsFuture + Send + Sync>;

/// What a user has already.
#[derive(Clone)]
pub(crate) enum UserConnection {
    Client(Client),
    Manager(Client, ConnectionManager),
    Sentinel(Arc<tokio::sync::Mutex<SentinelClient>>),
}

/// The files of a TLS connection.
#[derive(Clone, Default)]
pub(crate) struct TlsFiles {
    pub(crate) ca: Option<PathBuf>,
    pub(crate) cert: Option<PathBuf>,
    pub(crate) key: Option<PathBuf>,
}

/// A server that is named, and how it is reached.
pub(super) struct Endpoint {
    address: Address,
    tls: Option<TlsCertificates>,
    /// Read anew for each connection, since it may have been changed.
    password_file: Option<PathBuf>,
    /// Asked anew for each connection.
    provider: Option<Provider>,
}

impl Endpoint {
    pub(super) fn new(
        address: Address,
        files: &TlsFiles,
        password_file: Option<PathBuf>,
        provider: Option<Provider>,
    ) -> Result<Self> {
        if address.is_tls() && rustls::crypto::CryptoProvider::get_default().is_none() {
            // Somebody else may be first; then theirs is used.
            let _ = rustls::crypto::ring::default_provider().install_default();
        }
        let tls = certificates(&address, files)?;
        let endpoint = Endpoint { address, tls, password_file, provider };
        endpoint.open(&endpoint.address, None)?; // what cannot be used is told now
        Ok(endpoint)
    }

    /// How the server is called in messages.
    pub(super) fn shown(&self) -> &str {
        &self.address.shown
    }

    /// A client with the credentials of this moment.
    pub(super) async fn client(&self) -> Result<Client> {
        self.client_at(&self.address).await
    }

    /// Another server that is reached in the same way.
    pub(super) fn at(&self, host: &str, port: u16) -> Self {
        Endpoint {
            address: self.address.moved_to(host, port),
            tls: self.tls.clone(),
            password_file: self.password_file.clone(),
            provider: self.provider.clone(),
        }
    }

    /// The same server over connections on which it tells of something by itself.
    pub(super) fn with_pushes(mut self) -> Self {
        let settings = self.address.info.redis_settings().clone();
        let settings = settings.set_protocol(ProtocolVersion::RESP3);
        self.address.info = self.address.info.set_redis_settings(settings);
        self
    }

    /// A client of another server that is reached in the same way.
    async fn client_of(&self, host: &str, port: u16) -> Result<Client> {
        self.client_at(&self.address.moved_to(host, port)).await
    }

    async fn client_at(&self, address: &Address) -> Result<Client> {
        if let Some(provider) = &self.provider {
            return self.open(address, Some(ask(provider.clone()).await?));
        }
        let Some(path) = &self.password_file else { return self.open(address, None) };
        let password = Secret::File(path.clone()).read().await?;
        self.open(address, Some(Credentials { user: None, password }))
    }

    fn open(&self, address: &Address, credentials: Option<Credentials>) -> Result<Client> {
        let mut info = address.info.clone();
        if let Some(Credentials { user, password }) = credentials {
            let mut settings = info.redis_settings().clone().set_password(password);
            if let Some(user) = user {
                settings = settings.set_username(user);
            }
            info = info.set_redis_settings(settings);
        }
        let client = match &self.tls {
            Some(tls) => Client::build_with_tls(info, tls.clone()),
            None => Client::open(info),
        };
        client.map_err(|error| {
            Error::config(format!(
                "the server's address or certificates cannot be used: {}",
                error.category()
            ))
        })
    }
}

/// Asks for credentials on another thread: a provider that blocks must not hold up the thread
/// that renews leases.
async fn ask(provider: Provider) -> Result<Credentials> {
    let runtime = tokio::runtime::Handle::current();
    let asking = tokio::task::spawn_blocking(move || runtime.block_on(provider()));
    asking.await.unwrap_or_else(|error| {
        Err(Error::new(ErrorKind::Unavailable, Operation::Connect)
            .with_message("the provider of Redis credentials panicked")
            .with_source(error))
    })
}

/// Where connections come from.
pub(super) enum Connector {
    Address(Endpoint),
    /// The server that the Sentinels name, reached as the endpoint says.
    Sentinel(Arc<Sentinels>, Endpoint),
    /// A node of a cluster that the user has named.
    Node(Endpoint, Member),
    /// A node of a cluster that another node has told of.
    AnnouncedNode(Endpoint, Member),
    /// A node of a quorum.
    Voter(Endpoint, Arc<Voter>),
    UserConnection(UserConnection),
}

impl Connector {
    /// The server that the configuration names.
    pub(super) fn configured(
        config: &Settings,
        url: &Url,
        provider: Option<Provider>,
    ) -> Result<Self> {
        let address = Address::new(url, config.database)?;
        let files = config.tls_files();
        let endpoint = Endpoint::new(address, &files, config.password_file.clone(), provider)?;
        if url.scheme().ends_with("+sentinel") {
            return Ok(Connector::Sentinel(Sentinels::configured(config, url)?, endpoint));
        }
        Ok(Connector::Address(endpoint))
    }

    /// How the server is called in messages.
    pub(super) fn shown(&self) -> String {
        match self {
            Connector::Address(endpoint)
            | Connector::Node(endpoint, _)
            | Connector::AnnouncedNode(endpoint, _)
            | Connector::Voter(endpoint, _) => endpoint.shown().to_owned(),
            Connector::Sentinel(sentinels, _) => sentinels.shown(),
            Connector::UserConnection(
                UserConnection::Client(client) | UserConnection::Manager(client, _),
            ) => client.get_connection_info().addr().to_string(),
            Connector::UserConnection(UserConnection::Sentinel(_)) => {
                "the primary of the given Sentinels".to_owned()
            }
        }
    }

    /// What the server must be.
    pub(super) fn kind(&self) -> ServerKind {
        match self {
            Connector::Node(..) | Connector::AnnouncedNode(..) => ServerKind::Node,
            _ => ServerKind::Primary,
        }
    }

    /// Whether there may be a proxy with several servers behind the address.
    pub(super) fn may_be_a_proxy(&self) -> bool {
        matches!(
            self,
            Connector::Address(_)
                | Connector::UserConnection(
                    UserConnection::Client(_) | UserConnection::Manager(..)
                )
        )
    }

    /// Says what must be said on a connection before anything else.
    pub(super) async fn handshake(&self, connection: &Connection) -> Result<()> {
        match self {
            Connector::Voter(endpoint, voter) => {
                voter.handshake(connection, endpoint.shown()).await
            }
            Connector::Node(_, member) | Connector::AnnouncedNode(_, member) => {
                member.handshake(connection).await
            }
            _ => Ok(()),
        }
    }

    /// Who knows where the server is, if it is not always the same one.
    pub(super) fn sentinels(&self) -> Option<Arc<Sentinels>> {
        match self {
            Connector::Sentinel(sentinels, _) => Some(sentinels.clone()),
            _ => None,
        }
    }

    /// A client with the credentials of this moment, of the server that is meant at this
    /// moment.
    pub(super) async fn client(&self) -> Result<Client> {
        match self {
            Connector::Address(endpoint)
            | Connector::Node(endpoint, _)
            | Connector::AnnouncedNode(endpoint, _)
            | Connector::Voter(endpoint, _) => endpoint.client().await,
            Connector::Sentinel(sentinels, endpoint) => {
                let primary = sentinels.primary().await?;
                endpoint.client_of(&primary.host, primary.port).await
            }
            Connector::UserConnection(
                UserConnection::Client(client) | UserConnection::Manager(client, _),
            ) => Ok(client.clone()),
            Connector::UserConnection(UserConnection::Sentinel(sentinels)) => {
                let client = sentinels.lock().await.async_get_client().await;
                client.map_err(|error| errors::unreachable(&error, &self.shown()))
            }
        }
    }

    /// The error of a connection that was not made, with what the user may change.
    pub(super) fn explained(&self, error: Error) -> Error {
        if !matches!(self, Connector::AnnouncedNode(..)) || error.kind() != ErrorKind::Unavailable {
            return error;
        }
        let what = error.detail();
        let certificates = match self {
            Connector::AnnouncedNode(endpoint, _) if endpoint.address.is_tls() => {
                "; if its certificate is for a name, set `cluster-announce-hostname` and `cluster-preferred-endpoint-type hostname`"
            }
            _ => "",
        };
        let what = format!(
            "{what}. The Redis Cluster announces this address; if it is wrong for this machine, set `cluster-announce-ip` and `cluster-announce-port` on its nodes{certificates}"
        );
        error.with_message(what)
    }

    pub(super) async fn connection(&self) -> Result<Connection> {
        if let Connector::UserConnection(UserConnection::Manager(_, manager)) = self {
            return Ok(Connection::Managed(manager.clone()));
        }
        let client = self.client().await?;
        let unreachable = |error| match self {
            Connector::Sentinel(sentinels, _) => {
                sentinels.unreachable(&error, &client.get_connection_info().addr().to_string())
            }
            _ => errors::unreachable(&error, &self.shown()),
        };
        let socket = Socket::connect(client.get_connection_info()).await;
        if let Some(socket) = socket.map_err(unreachable)? {
            return Ok(Connection::Plain(Pipeline::start(socket)));
        }
        let connected = client.get_multiplexed_async_connection_with_config(&settings()).await;
        connected.map(|it| Connection::Tls(TlsConnection::new(it))).map_err(unreachable)
    }
}

/// The settings of every connection for commands.
pub(super) fn settings() -> AsyncConnectionConfig {
    AsyncConnectionConfig::new()
        .set_connection_timeout(None)
        .set_response_timeout(None) // every call has its time-out outside
        .set_pipeline_buffer_size(REQUESTS)
}

/// A connection that many calls share.
#[derive(Clone)]
pub(super) enum Connection {
    Plain(Arc<Pipeline>),
    Tls(Arc<TlsConnection>),
    Managed(ConnectionManager),
}

/// A connection of the driver crate that can be ended while requests are on it.
pub(super) struct TlsConnection {
    connection: MultiplexedConnection,
    closed: watch::Sender<bool>,
}

impl TlsConnection {
    fn new(connection: MultiplexedConnection) -> Arc<Self> {
        Arc::new(TlsConnection { connection, closed: watch::Sender::new(false) })
    }

    /// The answer, unless the connection is closed before it comes.
    async fn unless_closed<T>(
        &self,
        answer: impl AsyncFnOnce(MultiplexedConnection) -> RedisResult<T>,
    ) -> RedisResult<T> {
        let mut closed = self.closed.subscribe();
        tokio::select! {
            answer = answer(self.connection.clone()) => answer,
            _ = closed.wait_for(|closed| *closed) => {
                Err(std::io::Error::from(std::io::ErrorKind::BrokenPipe).into())
            }
        }
    }
}

impl Connection {
    pub(super) async fn send(&self, command: &Cmd) -> RedisResult<Value> {
        match self {
            Connection::Plain(pipeline) => pipeline.send(command).await,
            Connection::Tls(tls) => {
                tls.unless_closed(async |mut it| it.send_packed_command(command).await).await
            }
            Connection::Managed(manager) => manager.clone().send_packed_command(command).await,
        }
    }

    /// Sends a command behind another one, with nothing in between, and returns its
    /// answer.
    pub(super) async fn send_after(&self, first: &Cmd, command: &Cmd) -> RedisResult<Value> {
        let mut both = redis::pipe();
        both.add_command(first.clone()).add_command(command.clone());
        let mut answers = match self {
            Connection::Plain(pipeline) => return pipeline.send_after(first, command).await,
            Connection::Tls(tls) => {
                tls.unless_closed(async |mut it| it.send_packed_commands(&both, 0, 2).await).await?
            }
            Connection::Managed(manager) => {
                manager.clone().send_packed_commands(&both, 0, 2).await?
            }
        };
        Ok(answers.pop().unwrap_or(Value::Nil))
    }

    /// Ends the connection, unless it is the user's.
    pub(super) fn close(&self) {
        match self {
            Connection::Plain(pipeline) => pipeline.close(),
            Connection::Tls(tls) => drop(tls.closed.send_replace(true)),
            Connection::Managed(_) => {}
        }
    }
}

fn certificates(address: &Address, files: &TlsFiles) -> Result<Option<TlsCertificates>> {
    let TlsFiles { ca, cert, key } = files;
    if ca.is_none() && cert.is_none() && key.is_none() {
        return Ok(None);
    }
    if !address.is_tls() {
        return Err(Error::config(
            "`tls_ca`, `tls_cert` and `tls_key` are for TLS; write rediss:// (rediss+sentinel://, redlocks://) in the URL",
        ));
    }
    let client_tls = match (cert, key) {
        (Some(cert), Some(key)) => Some(ClientTlsConfig {
            client_cert: read("tls_cert", cert)?,
            client_key: read("tls_key", key)?,
        }),
        (None, None) => None,
        _ => return Err(Error::config("`tls_cert` and `tls_key` go together; give both")),
    };
    let root_cert = ca.as_deref().map(|path| read("tls_ca", path)).transpose()?;
    Ok(Some(TlsCertificates { client_tls, root_cert }))
}

fn read(option: &str, path: &Path) -> Result<Vec<u8>> {
    std::fs::read(path).map_err(|error| {
        Error::config(format!("cannot read `{option}` {}: {error}", path.display()))
    })
}
