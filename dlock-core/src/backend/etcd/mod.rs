//! Locks in etcd, in the layout of Go's `concurrency` package, so that Go programs and
//! `etcdctl lock` hold and wait for the same locks.
//!
//! A claim is an entry below the prefix of its key (`layout.rs`), attached to the lease of
//! the client's session (`session.rs`). The oldest entry holds the lock; who waits watches the
//! prefix (`queues.rs`, `mirror.rs`).
//!
//! - *Calls that are due together* share one transaction (`batch.rs`, `step.rs`).
//! - *Ghosts*: the calls of a client are carried out in any order, so a request that was not
//!   answered may be applied after the release that followed it. A release after such a
//!   request therefore makes another version of the session first (`Session::fence`), for
//!   which that request does nothing.
//! - *Tokens*: the create revision of the entry. An entry that waited has a lower one than
//!   entries made later, and its tokens are not prolonged.

mod batch;
mod claims;
mod connection;
mod errors;
mod layout;
mod mirror;
mod names;
mod operators;
mod queues;
mod record;
mod removal;
mod renewal;
mod session;
mod step;

use std::sync::{Arc, Weak};
use std::time::Duration;

use etcd_client::{Certificate, ConnectOptions, Identity, TlsOptions};
use tokio::sync::oneshot;
use url::Url;

use self::connection::{Address, Connections};
use self::errors::CallError;
use self::layout::Root;
use self::session::Sessions;
use super::{
    Backend, Break, Call, Capabilities, Cursor, KeyState, Listener, Page, ServerState, TtlSupport,
};
use crate::claim::{Answer, Request};
use crate::config::{Settings, parse_url};
use crate::error::{Error, Operation, Result};
use crate::key::Key;

/// How many calls share a transaction: etcd allows 128 operations in one by default.
const COMBINES: usize = 64;

/// How many transactions are on their way: most of the time that one takes is spent waiting
/// for the disks of the members, which several can do together.
const IN_FLIGHT: usize = 4;

/// A store of locks in etcd, seen by one client.
pub struct Etcd(Arc<Inner>);

struct Inner {
    sessions: Sessions,
    root: Root,
}

impl Etcd {
    /// A backend on these servers; it connects when it is first used. The URL is that of
    /// [`Dlock::connect`](crate::Dlock::connect), and the ttl is the session's.
    ///
    /// ```
    /// use std::time::Duration;
    /// use dlock::backend::etcd::Etcd;
    ///
    /// let url = "etcd://etcd1,etcd2,etcd3/shop";
    /// let backend = Etcd::new(url, "default", Duration::from_secs(10))?;
    /// # Ok::<(), dlock::Error>(())
    /// ```
    ///
    /// # Errors
    /// `Config` if the URL is not valid.
    pub fn new(url: &str, namespace: &str, ttl: Duration) -> Result<Self> {
        let (settings, url) = Settings::of_url(url, namespace)?;
        Self::configured(&Settings { ttl, ..settings }, &url)
    }

    pub(crate) fn configured(settings: &Settings, url: &Url) -> Result<Self> {
        let members = parse_url(settings.url.as_deref().unwrap_or_default())?.hosts;
        let is_tls = url.scheme() == "etcds";
        let mut options =
            ConnectOptions::new().with_require_leader(true).with_auto_token_refresh(true);
        let credentials = settings.credentials(url)?;
        match is_tls {
            true => options = options.with_tls(tls(settings)?),
            false => settings.refuse_tls_files("write etcds:// instead of etcd://")?,
        }
        let root = Root::new(url.path(), &settings.namespace);
        let (probe, silence) = (root.nothing(), session::silence(settings.ttl));
        let address = Address { members, is_tls, options, credentials, probe, silence };
        let connections = Connections::new(address);
        let sessions = Sessions::new(connections, root.clone(), settings.ttl);
        Ok(Etcd(Arc::new(Inner { sessions, root })))
    }
}

/// The certificates of the options.
fn tls(settings: &Settings) -> Result<TlsOptions> {
    let read = |path: &std::path::Path| {
        std::fs::read(path).map_err(|error| {
            Error::config(format!("the TLS file {} could not be read", path.display()))
                .with_source(error)
        })
    };
    let mut tls = TlsOptions::new();
    tls = match &settings.tls_ca {
        Some(ca) => tls.ca_certificate(Certificate::from_pem(read(ca)?)),
        None => tls.with_native_roots(),
    };
    match (&settings.tls_cert, &settings.tls_key) {
        (Some(cert), Some(key)) => Ok(tls.identity(Identity::from_pem(read(cert)?, read(key)?))),
        (None, None) => Ok(tls),
        _ => Err(Error::config("`tls_cert` and `tls_key` belong together; set both or neither")),
    }
}

impl std::fmt::Debug for Etcd {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Etcd").field("root", &self.0.root).finish_non_exhaustive()
    }
}

impl Backend for Etcd {
    fn capabilities(&self) -> Capabilities {
        Capabilities {
            max_batch: COMBINES,
            in_flight: IN_FLIGHT,
            ttl: TtlSupport::PerSession { ttl: self.0.sessions.ttl() },
            ..Capabilities::all("etcd")
        }
    }

    fn open(&self, _client: u64, listener: Weak<dyn Listener>) {
        self.0.sessions.listen(listener);
    }

    /// By a task of its own, which goes on when nobody waits for it any more: an answer that
    /// comes late still tells what is at the store. But it makes no entry then.
    fn call<'a>(&'a self, requests: &'a [Request]) -> Call<'a, Vec<Answer>> {
        let (caller, answers) = oneshot::channel();
        let answering = self.0.clone().answer_all(requests.to_vec(), caller);
        Call::new(async move {
            tokio::spawn(answering);
            answers.await.unwrap_or_default()
        })
    }

    fn partitions(&self) -> usize {
        2
    }

    /// Renewals wait for a keep-alive. An acquire in their batch would be given up with them.
    fn partition_of(&self, request: &Request) -> usize {
        usize::from(matches!(request, Request::Renew(_)))
    }

    fn inspect<'a>(&'a self, key: &'a Key) -> Call<'a, Result<KeyState>> {
        Call::new(self.0.state_of(key))
    }

    fn list<'a>(&'a self, prefix: &'a str, cursor: Cursor) -> Call<'a, Result<Page>> {
        Call::new(self.0.keys_with(prefix, cursor))
    }

    fn break_lock<'a>(&'a self, key: &'a Key, how: &'a Break) -> Call<'a, Result<usize>> {
        Call::new(self.0.break_holders(key, how))
    }

    fn ping(&self) -> Call<'_, Result<()>> {
        Call::new(async move {
            let failed = |error: CallError| error.read(Operation::Connect);
            let connection = self.0.sessions.connections.get().await.map_err(failed)?;
            let read = connection.kv().get(self.0.root.nothing(), None).await;
            read.map(drop).map_err(|error| failed(CallError::of(error)))
        })
    }

    fn servers(&self) -> Call<'_, Result<Vec<ServerState>>> {
        Call::new(self.0.members())
    }

    fn close(&self) -> Call<'_, ()> {
        Call::new(self.0.sessions.close())
    }
}
