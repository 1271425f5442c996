//! The way to the servers: one connection at a time, to one member of the cluster.
//!
//! All calls and streams of a client use it. When a call is not answered, or the member says
//! that it has no leader, the connection is given up: whoever waits for an answer hears at
//! once that there will be none, and the next call goes to another member. (A connection
//! balanced over all members would send every third call to a member that is down.)
//!
//! A member that accepts a connection need not serve: its process may be stopped, or it may
//! follow a leader that is. So all members are tried, and the first that answers a read by way
//! of the leader is taken.

use std::future::Future;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use etcd_client::{Client, ConnectOptions, Error as EtcdError, KvClient};
use parking_lot::Mutex;
use tokio::sync::watch;
use tokio::task::JoinSet;

use super::errors::{CallError, is_login_over};
use crate::clock::Moment;
use crate::config::values::Secret;
use crate::error::{Error, ErrorKind, Operation, Result};

/// How long a member may take to accept a connection.
const CONNECT: Duration = Duration::from_secs(1);
/// How long a member may take to let the user in.
const LOGIN: Duration = Duration::from_secs(2);
/// How long a member may take to answer a read.
const PROBE: Duration = Duration::from_secs(1);
/// The pause before a member without a leader is asked again.
const ELECTION: Duration = Duration::from_millis(50);
/// The next member is tried too when one has not answered for so long. Members that answer
/// are not asked for more than they need to, and clients spread over them.
const HEAD_START: Duration = Duration::from_millis(100);
/// The shortest time between the beginnings of two attempts to reach a member.
const PAUSE: Duration = Duration::from_millis(500);

/// How to reach the members.
#[derive(Clone)]
pub(super) struct Address {
    /// Host and port of each.
    pub(super) members: Vec<(String, u16)>,
    pub(super) is_tls: bool,
    pub(super) options: ConnectOptions,
    /// User and password; these are asked for with each connection.
    pub(super) credentials: Option<(String, Secret)>,
    /// The key that is read to see whether a member serves.
    pub(super) probe: String,
    /// A call that is not answered for so long is given up, and its connection with it.
    pub(super) silence: Duration,
}

impl Address {
    /// Whether the password is in a file, which may have another one each time.
    fn reads_password(&self) -> bool {
        matches!(self.credentials, Some((_, Secret::File(_))))
    }

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
    /// Whether another password may be in the file by now.
    may_log_in_anew: bool,
    silence: Duration,
    /// When a call was answered last.
    answered: Mutex<Moment>,
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

    /// Whether a call was answered since this moment.
    pub(super) fn has_answered_since(&self, moment: Moment) -> bool {
        *self.answered.lock() >= moment
    }

    /// The answer to a call.
    pub(super) async fn call<T>(
        &self,
        call: impl Future<Output = Result<T, EtcdError>>,
    ) -> Result<T, CallError> {
        let answer = self.send(call).await;
        if answer.is_ok() {
            *self.answered.lock() = Moment::now();
        }
        answer
    }

    /// The same for a message on a stream, which is not answered by itself.
    pub(super) async fn send<T>(
        &self,
        message: impl Future<Output = Result<T, EtcdError>>,
    ) -> Result<T, CallError> {
        let answer = tokio::select! {
            answer = message => answer.map_err(CallError::of),
            () = self.ended() => Err(CallError::Lost(None)),
            () = tokio::time::sleep(self.silence) => Err(CallError::Lost(None)),
        };
        match answer {
            // The next connection logs in with the password that is in the file by then.
            Err(CallError::Refused(error)) if self.may_log_in_anew && is_login_over(&error) => {
                self.give_up();
                Err(CallError::NotSent(
                    Error::new(ErrorKind::Unavailable, Operation::Connect)
                        .with_message("etcd asks for the password again; it is read from `password_file` for the next connection")
                        .with_source(error),
                ))
            }
            Err(CallError::Lost(_) | CallError::NoLeader(_)) => {
                self.give_up();
                answer
            }
            answer => answer,
        }
    }
}

/// The connections of a client, one at a time.
pub(super) struct Connections {
    address: Address,
    current: Mutex<Option<Arc<Connection>>>,
    /// The member to try next.
    next: AtomicUsize,
    /// Who has it connects. When the last attempt began that reached no member, and why.
    connecting: tokio::sync::Mutex<Option<(Moment, Error)>>,
}

impl Connections {
    pub(super) fn new(address: Address) -> Arc<Self> {
        // Clients spread over the members.
        let next = AtomicUsize::new(rand::random_range(0..address.members.len().max(1)));
        let connecting = tokio::sync::Mutex::new(None);
        Arc::new(Connections { address, current: Mutex::default(), next, connecting })
    }

    /// How long a call may take.
    pub(super) fn silence(&self) -> Duration {
        self.address.silence
    }

    pub(super) fn members(&self) -> &[(String, u16)] {
        &self.address.members
    }

    fn current(&self) -> Option<Arc<Connection>> {
        self.current.lock().clone().filter(|connection| !connection.is_given_up())
    }

    /// The connection; a new one if there is none.
    pub(super) async fn get(self: &Arc<Self>) -> Result<Arc<Connection>, CallError> {
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
        let began = Moment::now();
        match self.connect_to_any().await {
            Ok(client) => {
                *failed = None;
                let connection = Arc::new(Connection {
                    kv: client.kv_client(),
                    client,
                    may_log_in_anew: self.address.reads_password(),
                    silence: self.address.silence,
                    answered: Mutex::new(Moment::now()),
                    given_up: watch::Sender::new(false),
                });
                *self.current.lock() = Some(connection.clone());
                Ok(connection)
            }
            Err(error) => {
                *failed = Some((began, error.clone()));
                Err(CallError::NotSent(error))
            }
        }
    }

    /// Connects to the first member that serves.
    async fn connect_to_any(self: &Arc<Self>) -> Result<Client> {
        let members = &self.address.members;
        let first = self.next.load(Ordering::Relaxed);
        let mut trials = JoinSet::new();
        let mut start = Duration::ZERO;
        for turn in 0..members.len() {
            let (connections, at) = (self.clone(), (first + turn) % members.len());
            trials.spawn(async move {
                tokio::time::sleep(start).await;
                let member = &connections.address.members[at];
                connections.connect_if_it_serves(member).await.map(|client| (at, client))
            });
            start += HEAD_START;
        }
        let mut unavailable = Error::new(ErrorKind::Unavailable, Operation::Connect);
        while let Some(tried) = trials.join_next().await {
            match tried {
                Ok(Ok((at, client))) => {
                    self.next.store(at + 1, Ordering::Relaxed);
                    return Ok(client);
                }
                // Every member would refuse this user.
                Ok(Err(error)) if error.kind() != ErrorKind::Unavailable => return Err(error),
                Ok(Err(error)) => unavailable = error,
                Err(_) => {}
            }
        }
        Err(unavailable)
    }

    /// Connects to a member that answers a read, which it cannot do without a leader.
    async fn connect_if_it_serves(&self, member: &(String, u16)) -> Result<Client> {
        let mut may_try_again = true;
        loop {
            let client = self.connect(member).await?;
            match tokio::time::timeout(PROBE, self.probe(client.kv_client())).await {
                Ok(Ok(())) => return Ok(client),
                // A connection from before the network was repaired breaks when it is.
                Ok(Err(CallError::Lost(_))) if may_try_again => may_try_again = false,
                Ok(Err(error)) => return Err(error.read(Operation::Connect)),
                Err(_) => return Err(unreachable(member)),
            }
        }
    }

    /// Reads by way of the leader, and waits for one.
    async fn probe(&self, mut kv: KvClient) -> Result<(), CallError> {
        loop {
            let read = kv.get(self.address.probe.as_str(), None).await;
            match read.map_err(CallError::of) {
                Ok(_) | Err(CallError::Refused(_)) => return Ok(()),
                Err(CallError::NoLeader(_)) => tokio::time::sleep(ELECTION).await,
                Err(error) => return Err(error),
            }
        }
    }

    /// Connects to a member. The driver crate connects with the first call, which would have
    /// to be taken for one that may have been made; so it is tried before.
    pub(super) async fn connect(&self, member: &(String, u16)) -> Result<Client> {
        let (host, port) = member;
        let trial = tokio::net::TcpStream::connect((host.as_str(), *port));
        match tokio::time::timeout(CONNECT, trial).await {
            Ok(Ok(_)) => {}
            Ok(Err(error)) => return Err(unreachable(member).with_source(error)),
            Err(_) => return Err(unreachable(member)),
        }
        let mut options = self.address.options.clone();
        if let Some((user, password)) = &self.address.credentials {
            options = options.with_user(user, password.read().await?);
        }
        let connecting = Client::connect([self.address.url(member)], Some(options));
        match tokio::time::timeout(LOGIN, connecting).await {
            Ok(Ok(client)) => Ok(client),
            Ok(Err(error)) => Err(CallError::of(error).read(Operation::Connect)),
            Err(_) => Err(unreachable(member)),
        }
    }

    pub(super) fn close(&self) {
        if let Some(connection) = self.current.lock().take() {
            connection.give_up();
        }
    }
}

fn unreachable((host, port): &(String, u16)) -> Error {
    Error::new(ErrorKind::Unavailable, Operation::Connect)
        .with_message(format!("etcd could not be reached at {host}:{port}"))
}
