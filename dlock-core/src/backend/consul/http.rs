//! Requests to an agent of Consul over HTTP/1.1.
//!
//! One connection has one request under way. A connection whose answer was read to its end
//! is kept for the next request; one whose request was dropped is closed. So a request that
//! waits (a blocking query) has a connection for itself, and calls do not wait for it.

use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use http_body_util::{BodyExt as _, Full, Limited};
use hyper::body::Bytes;
use hyper::client::conn::http1::{self, SendRequest};
use hyper::header::{CONTENT_TYPE, HOST, HeaderValue};
use hyper::{Method, Request, StatusCode};
use hyper_util::rt::TokioIo;
use parking_lot::Mutex;
use rustls::pki_types::pem::PemObject as _;
use rustls::pki_types::{CertificateDer, PrivateKeyDer, ServerName};
use tokio::net::TcpStream;
use tokio::sync::Notify;
use tokio_rustls::TlsConnector;

use super::errors::Failure;
use crate::config::Settings;
use crate::config::values::{Secret, read_password};
use crate::error::{Error, Result};

/// How many connections without a request are kept.
const IDLE: usize = 8;
/// A longer answer is not read: it would fill the memory.
const MAX_ANSWER: usize = 64 * 1024 * 1024;
/// How long a connection may take.
const CONNECT: Duration = Duration::from_secs(5);

type Connection = SendRequest<Full<Bytes>>;

/// The way to an agent.
pub(super) struct Http {
    host: String,
    port: u16,
    tls: Option<(TlsConnector, ServerName<'static>)>,
    token: Option<Token>,
    idle: Mutex<Vec<Connection>>,
    /// All connections are given up.
    given_up: Notify,
}

/// Who a client says it is.
struct Token {
    source: Secret,
    current: Mutex<HeaderValue>,
}

impl Token {
    fn new(source: Secret) -> Result<Self> {
        let token = match &source {
            Secret::Written(token) => token.clone(),
            Secret::File(path) => read_password(path)?,
        };
        Ok(Token { source, current: Mutex::new(header(&token)?) })
    }

    /// The token after that one was refused; `None` if there is no other.
    async fn after(&self, refused: &HeaderValue) -> Option<HeaderValue> {
        let read = self.source.read().await.and_then(|token| header(&token));
        let token = match read {
            Ok(token) => token,
            Err(error) => {
                tracing::warn!(why = %error, "Consul refused the token, and there is no other");
                return None;
            }
        };
        *self.current.lock() = token.clone();
        (token != *refused).then_some(token)
    }
}

fn header(token: &str) -> Result<HeaderValue> {
    let mut value = HeaderValue::from_str(token).map_err(|_| {
        Error::config("the token (the password of the URL, or `password_file`) is not valid")
    })?;
    value.set_sensitive(true);
    Ok(value)
}

/// A call without an answer.
struct Unanswered<'a>(&'a Http);

impl Drop for Unanswered<'_> {
    fn drop(&mut self) {
        self.0.idle.lock().clear();
        self.0.given_up.notify_waiters();
    }
}

/// An answer of the agent.
#[derive(Debug)]
pub(super) struct Response {
    pub(super) status: StatusCode,
    /// What a blocking query goes on from; zero if the agent did not say.
    pub(super) index: u64,
    pub(super) body: Bytes,
}

impl Response {
    /// The text of an error.
    pub(super) fn text(&self) -> String {
        let text = String::from_utf8_lossy(&self.body);
        text.chars().filter(|c| !c.is_control()).take(200).collect()
    }
}

impl Http {
    pub(super) fn new(host: String, port: u16, tls: bool, config: &Settings) -> Result<Self> {
        let tls = match tls {
            true => {
                let name = ServerName::try_from(host.clone());
                let name =
                    name.map_err(|_| Error::config("the host of the URL is not a valid name"))?;
                Some((TlsConnector::from(Arc::new(tls_config(config)?)), name))
            }
            false => None,
        };
        Ok(Http { host, port, tls, token: None, idle: Mutex::default(), given_up: Notify::new() })
    }

    /// Sends this token with every request.
    pub(super) fn with_token(mut self, token: Secret) -> Result<Self> {
        self.token = Some(Token::new(token)?);
        Ok(self)
    }

    /// The address for messages.
    pub(super) fn address(&self) -> String {
        format!("{}:{}", self.host, self.port)
    }

    /// Makes a call. The failure says whether it may have arrived.
    ///
    /// If there is no answer, or the caller does not wait for it any more, all other
    /// connections are given up: they may be as dead as that of the call.
    pub(super) async fn call(
        &self,
        method: Method,
        path: &str,
        body: Vec<u8>,
    ) -> Result<Response, Failure> {
        let unanswered = Unanswered(self);
        let response = self.send(method, path, body).await?;
        std::mem::forget(unanswered);
        Ok(response)
    }

    /// Makes a query that may wait for long at the agent. It fails when a call does.
    pub(super) async fn query(&self, path: &str) -> Result<Response, Failure> {
        tokio::select! {
            answer = self.send(Method::GET, path, Vec::new()) => answer,
            () = self.given_up.notified() => Err(Failure::unknown("the connection is given up")),
        }
    }

    /// Sends a request; once more if the token was refused, and another one is in its file by
    /// now: a request that is refused does nothing.
    async fn send(&self, method: Method, path: &str, body: Vec<u8>) -> Result<Response, Failure> {
        let body = Bytes::from(body);
        let token = self.token.as_ref().map(|token| token.current.lock().clone());
        let response = self.send_as(token.as_ref(), &method, path, body.clone()).await?;
        if response.status == StatusCode::FORBIDDEN
            && let (Some(refused), Some(tokens)) = (&token, &self.token)
            && let Some(token) = tokens.after(refused).await
        {
            return self.send_as(Some(&token), &method, path, body).await;
        }
        Ok(response)
    }

    async fn send_as(
        &self,
        token: Option<&HeaderValue>,
        method: &Method,
        path: &str,
        body: Bytes,
    ) -> Result<Response, Failure> {
        let mut request = Some(self.request(token, method, path, body)?);
        // A kept connection may have been closed by the agent in the meantime: then the
        // request was not sent, and another connection is used.
        loop {
            let kept = self.idle.lock().pop();
            let is_new = kept.is_none();
            let mut connection = match kept {
                Some(connection) => connection,
                None => self.connect().await?,
            };
            if connection.ready().await.is_err() {
                if is_new {
                    return Err(Failure::not_sent("the agent closed the connection"));
                }
                continue;
            }
            let Some(this) = request.take() else {
                return Err(Failure::unknown("the request was given back without its content"));
            };
            match connection.try_send_request(this).await {
                Ok(response) => {
                    let (head, body) = response.into_parts();
                    let body = Limited::new(body, MAX_ANSWER).collect().await;
                    let body = body.map_err(|error| {
                        Failure::unknown(format_args!("its answer cannot be read ({error})"))
                    });
                    let body = body?.to_bytes();
                    let index = head.headers.get("x-consul-index");
                    let index = index.and_then(|it| it.to_str().ok()?.parse().ok()).unwrap_or(0);
                    let mut idle = self.idle.lock();
                    if idle.len() < IDLE && !connection.is_closed() {
                        idle.push(connection);
                    }
                    return Ok(Response { status: head.status, index, body });
                }
                Err(mut failed) => match failed.take_message() {
                    Some(unsent) if !is_new => request = Some(unsent),
                    Some(_) => return Err(Failure::not_sent(failed.into_error())),
                    None => return Err(Failure::cut_off(failed.into_error())),
                },
            }
        }
    }

    fn request(
        &self,
        token: Option<&HeaderValue>,
        method: &Method,
        path: &str,
        body: Bytes,
    ) -> Result<Request<Full<Bytes>>, Failure> {
        let mut request = Request::builder().method(method).uri(path).header(HOST, self.address());
        if let Some(token) = token {
            request = request.header("x-consul-token", token);
        }
        if !body.is_empty() {
            request = request.header(CONTENT_TYPE, "application/json");
        }
        request.body(Full::new(body)).map_err(Failure::not_sent)
    }

    async fn connect(&self) -> Result<Connection, Failure> {
        let connecting = async {
            let stream = TcpStream::connect((self.host.as_str(), self.port)).await;
            let stream = stream.map_err(Failure::not_sent)?;
            let _ = stream.set_nodelay(true);
            match &self.tls {
                None => handshake(stream).await,
                Some((tls, name)) => {
                    let stream = tls.connect(name.clone(), stream).await;
                    handshake(stream.map_err(Failure::not_sent)?).await
                }
            }
        };
        let connected = tokio::time::timeout(CONNECT, connecting).await;
        connected.unwrap_or_else(|_| Err(Failure::not_sent("the connection took too long")))
    }
}

async fn handshake<S>(stream: S) -> Result<Connection, Failure>
where
    S: tokio::io::AsyncRead + tokio::io::AsyncWrite + Unpin + Send + 'static,
{
    let made = http1::handshake(TokioIo::new(stream)).await;
    let (sender, connection) = made.map_err(Failure::not_sent)?;
    // It ends when the sender is dropped. Whoever sends is told of an error.
    tokio::spawn(async move {
        let _ = connection.await;
    });
    Ok(sender)
}

fn tls_config(config: &Settings) -> Result<rustls::ClientConfig> {
    let unreadable = |path: &Path, error: &dyn std::fmt::Display| {
        Error::config(format!(
            "cannot read the certificates or the key in {}: {error}",
            path.display()
        ))
    };
    let mut roots = rustls::RootCertStore::empty();
    match &config.tls_ca {
        Some(path) => {
            let certificates = CertificateDer::pem_file_iter(path);
            for certificate in certificates.map_err(|error| unreadable(path, &error))? {
                let certificate = certificate.map_err(|error| unreadable(path, &error))?;
                roots.add(certificate).map_err(|error| unreadable(path, &error))?;
            }
        }
        None => {
            roots.add_parsable_certificates(rustls_native_certs::load_native_certs().certs);
        }
    }
    let provider = Arc::new(rustls::crypto::ring::default_provider());
    let builder = rustls::ClientConfig::builder_with_provider(provider)
        .with_safe_default_protocol_versions()
        .map_err(|error| Error::config(format!("TLS cannot be used: {error}")))?
        .with_root_certificates(roots);
    let (Some(cert), Some(key)) = (&config.tls_cert, &config.tls_key) else {
        if config.tls_cert.is_some() || config.tls_key.is_some() {
            return Err(Error::config(
                "`tls_cert` and `tls_key` belong together; set both or neither",
            ));
        }
        return Ok(builder.with_no_client_auth());
    };
    let chain = CertificateDer::pem_file_iter(cert).and_then(Iterator::collect);
    let chain: Vec<_> = chain.map_err(|error| unreadable(cert, &error))?;
    let private = PrivateKeyDer::from_pem_file(key).map_err(|error| unreadable(key, &error))?;
    builder.with_client_auth_cert(chain, private).map_err(|error| {
        Error::config(format!("the certificate of the client cannot be used: {error}"))
    })
}
