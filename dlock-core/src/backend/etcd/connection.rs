//! The way to the servers: one connection at a time, to one member of the cluster.
//!
//! All calls and streams of a client use it. When a call is not answered, or the member says
//! that it has no leader, the connection is given up: whoever waits for an answer hears at
//! once that there will be none, and the next call goes to the next member. (A connection
//! balanced over all members would send every third call to a member that is down.)

use std::future::Future;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use etcd_client::{Client, ConnectOptions, Error as EtcdError, KvClient};
use parking_lot::Mutex;
use tokio::sync::watch;

use super::errors::CallError;
use crate::clock::Moment;
use crate::error::{Error, ErrorKind, Operation, Result};

/// How long a member may take to accept a connection.
const CONNECT: Duration = Duration::from_secs(1);
/// A call that is not answered for so long is given up, and its connection with it.
const SILENCE: Duration = Duration::from_secs(2);
/// The pause after no member could be reached.
const PAUSE: Duration = Duration::from_millis(500);

/// How to reach the members.
#[derive(Clone)]
pub(super) struct Address {
    /// Host and port of each.
    pub(super) members: Vec<(String, u16)>,
    pub(super) is_tls: bool,
    pub(super) options: ConnectOptions,
}

impl Address {
    /// The URL of a member, for the driver crate.
    fn url(&self, (host, port): &(String, u16)) -> String {
        let scheme = if self.is_tls { "https" } else { "http" };
        match host.contains(':') {
            true => format!("{scheme}://[{host}]:{port}"),
            false => format!("{scheme}://{host}:{port}"),
        }
    }
}

/// A connection to one member.
pub(super) struct Connection {
    client: Client,
    kv: KvClient,
    given_up: watch::Sender<bool>,
}

impl Connection {
    pub(super) fn client(&self) -> Client {
        self.client.clone()
    }

    pub(super) fn kv(&self) -> KvClient {
        self.kv.clone()
    }

    /// Whoever waits for an answer gets none, and the next call goes elsewhere.
    pub(super) fn give_up(&self) {
        self.given_up.send_replace(true);
    }

    pub(super) fn is_given_up(&self) -> bool {
        *self.given_up.borrow()
    }

    /// Returns when the connection is given up.
    pub(super) async fn ended(&self) {
        let mut given_up = self.given_up.subscribe();
        let _ = given_up.wait_for(|given_up| *given_up).await;
    }

    /// The answer to a call.
    pub(super) async fn call<T>(
        &self,
        call: impl Future<Output = Result<T, EtcdError>>,
    ) -> Result<T, CallError> {
        let answer = tokio::select! {
            answer = call => answer.map_err(CallError::of),
            () = self.ended() => Err(CallError::Lost(None)),
            () = tokio::time::sleep(SILENCE) => Err(CallError::Lost(None)),
        };
        if let Err(CallError::Lost(_)) = &answer {
            self.give_up();
        }
        answer
    }
}

/// The connections of a client, one at a time.
pub(super) struct Connections {
    address: Address,
    current: Mutex<Option<Arc<Connection>>>,
    /// The member to try next.
    next: AtomicUsize,
    /// Who has it connects. When no member could be reached last, and why.
    connecting: tokio::sync::Mutex<Option<(Moment, Error)>>,
}

impl Connections {
    pub(super) fn new(address: Address) -> Arc<Self> {
        // Clients spread over the members.
        let next = AtomicUsize::new(rand::random_range(0..address.members.len().max(1)));
        let connecting = tokio::sync::Mutex::new(None);
        Arc::new(Connections { address, current: Mutex::default(), next, connecting })
    }

    pub(super) fn members(&self) -> &[(String, u16)] {
        &self.address.members
    }

    fn current(&self) -> Option<Arc<Connection>> {
        self.current.lock().clone().filter(|connection| !connection.is_given_up())
    }

    /// The connection; a new one if there is none.
    pub(super) async fn get(&self) -> Result<Arc<Connection>, CallError> {
        if let Some(connection) = self.current() {
            return Ok(connection);
        }
        let mut failed = self.connecting.lock().await;
        if let Some(connection) = self.current() {
            return Ok(connection);
        }
        if let Some((at, error)) = &*failed
            && Moment::now().since(*at) < PAUSE
        {
            return Err(CallError::NotSent(error.clone()));
        }
        let mut last = None;
        for _ in 0..self.address.members.len() {
            let at = self.next.fetch_add(1, Ordering::Relaxed) % self.address.members.len();
            match self.connect(&self.address.members[at]).await {
                Ok(client) => {
                    *failed = None;
                    let (given_up, kv) = (watch::Sender::new(false), client.kv_client());
                    let connection = Arc::new(Connection { client, kv, given_up });
                    *self.current.lock() = Some(connection.clone());
                    return Ok(connection);
                }
                Err(error) => last = Some(error),
            }
        }
        let error = last.unwrap_or_else(|| Error::new(ErrorKind::Config, Operation::Connect));
        *failed = Some((Moment::now(), error.clone()));
        Err(CallError::NotSent(error))
    }

    /// Connects to a member. The driver crate connects with the first call, which would have
    /// to be taken for one that may have been made; so it is tried before.
    pub(super) async fn connect(&self, member: &(String, u16)) -> Result<Client> {
        let (host, port) = member;
        let unreachable = || {
            Error::new(ErrorKind::Unavailable, Operation::Connect)
                .saying(format!("etcd could not be reached at {host}:{port}"))
        };
        let trial = tokio::net::TcpStream::connect((host.as_str(), *port));
        match tokio::time::timeout(CONNECT, trial).await {
            Ok(Ok(_)) => {}
            Ok(Err(error)) => return Err(unreachable().because(error)),
            Err(_) => return Err(unreachable()),
        }
        let options = Some(self.address.options.clone());
        let connecting = Client::connect([self.address.url(member)], options);
        match tokio::time::timeout(SILENCE, connecting).await {
            Ok(Ok(client)) => Ok(client),
            Ok(Err(error)) => Err(CallError::of(error).read(Operation::Connect)),
            Err(_) => Err(unreachable()),
        }
    }

    pub(super) fn close(&self) {
        if let Some(connection) = self.current.lock().take() {
            connection.give_up();
        }
    }
}
