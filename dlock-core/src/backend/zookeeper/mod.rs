//! Locks in ZooKeeper, in the layouts of Curator and kazoo, so that programs in other
//! languages hold and wait for the same locks.
//!
//! A claim is an ephemeral sequential node below the node of its key (`layout.rs`). The node
//! is there for as long as the session (`session.rs`), so nothing is renewed but the session.
//! Who is not first watches the node in front of it and no other.
//!
//! - *Ghosts*: a create whose answer was lost may have made a node. The owner is in its name;
//!   so it is looked for before another one is made, and before a release is answered.
//! - *Servers that are behind*: such a look, and one that would say "busy" to who only tries,
//!   comes after a write that changes nothing (`latest_children`).
//! - *Order*: calls of a session are carried out in the order of their sending. A create and
//!   the look at its neighbours leave together, and an old lease is removed before the new one
//!   is made.
//! - *Tokens*: the number of the transaction that made the node. So a node that waited has a
//!   lower number than nodes made later, and its tokens are not prolonged.

mod claims;
mod errors;
mod layout;
mod locks;
mod node_data;
mod nodes;
mod operators;
mod paths;
mod permits;
mod session;
mod watches;

use std::sync::Weak;
use std::time::Duration;

use url::Url;

use self::layout::Layout;
use self::paths::Root;
use self::session::{Address, Sessions};
use super::{Backend, Break, Call, Capabilities, Cursor, KeyState, Listener, Page, TtlSupport};
use crate::claim::{AcquireOutcome, Answer, Claim, Mode, Release, ReleaseOutcome, Request};
use crate::config::{Settings, parse_url};
use crate::error::{Error, ErrorKind, Operation, Result};
use crate::key::Key;

/// A store of locks in ZooKeeper, seen by one client.
pub struct ZooKeeper {
    sessions: Sessions,
    root: Root,
    layout: Layout,
    /// Whether nodes are for the user of the URL alone.
    is_private: bool,
}

impl ZooKeeper {
    /// A backend on these servers; it connects when it is first used. The URL is that of
    /// [`Dlock::connect`](crate::Dlock::connect), and the ttl is the session's.
    ///
    /// ```
    /// use std::time::Duration;
    /// use dlock::backend::zookeeper::ZooKeeper;
    ///
    /// let url = "zookeeper://zk1,zk2,zk3/shop?layout=rwlock";
    /// let backend = ZooKeeper::new(url, "default", Duration::from_secs(10))?;
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
        settings.refuse_tls_files("zookeeper:// has none, so remove them (docs/zookeeper.md)")?;
        let text = settings.url.as_deref().unwrap_or_default();
        let hosts = parse_url(text)?.hosts;
        let server = |(host, port): &(String, u16)| match host.contains(':') {
            true => format!("[{host}]:{port}"),
            false => format!("{host}:{port}"),
        };
        let servers: Vec<String> = hosts.iter().map(server).collect();
        let credentials = settings.credentials(url)?;
        let address = Address { servers: servers.join(","), ttl: settings.ttl, credentials };
        let is_private = address.credentials.is_some();
        Ok(ZooKeeper {
            root: Root::new(url.path(), &settings.namespace)?,
            layout: Layout::named(settings.layout.as_deref())?,
            sessions: Sessions::new(address),
            is_private,
        })
    }
}

impl ZooKeeper {
    /// The error of an acquire, when a node of it may be there: it is unknown then, so that
    /// the client asks again or releases; or the node is removed if that would not help.
    async fn failed(&self, claim: &Claim, error: Error) -> Error {
        let session = self.sessions.current();
        if session.is_none_or(|session| session.claims.get(claim.owner).is_none()) {
            return error;
        }
        if !error.kind().is_retryable() && self.remove_all(claim).await.is_ok() {
            return error;
        }
        Error::new(ErrorKind::Unknown, Operation::Acquire)
            .with_key(&claim.key)
            .with_message("ZooKeeper failed after the claim may have been made")
            .with_source(error)
    }

    async fn acquire_once(&self, claim: &Claim) -> Result<AcquireOutcome> {
        if claim.mode.is_permits() {
            self.acquire_permits(claim).await
        } else {
            self.acquire_lock(claim).await
        }
    }

    async fn acquire(&self, claim: &Claim) -> Result<AcquireOutcome> {
        let before = self.sessions.current();
        let mut answer = self.acquire_once(claim).await;
        if answer.as_ref().is_err_and(|error| error.kind() == ErrorKind::Unavailable)
            && before.is_some()
            && self.sessions.current().is_none()
        {
            // What the call left went with the session, so it is made in a new one.
            answer = self.acquire_once(claim).await;
        }
        match answer {
            Err(error) => Err(self.failed(claim, error).await),
            answer => answer,
        }
    }

    async fn release(&self, lease: &Claim, how: Release) -> Result<ReleaseOutcome> {
        let released = self.remove_all(lease).await;
        match how {
            Release::Now => released,
            // The node is gone, as it would be if the process ended.
            Release::After(_) => {
                let _ = released?;
                Err(Error::new(ErrorKind::Unsupported, Operation::Release).with_key(&lease.key).with_message(
                    "zookeeper:// cannot keep a key taken after a release; the lock was released at once",
                ))
            }
        }
    }
}

impl std::fmt::Debug for ZooKeeper {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("ZooKeeper").field("layout", &self.layout).finish_non_exhaustive()
    }
}

impl Backend for ZooKeeper {
    fn capabilities(&self) -> Capabilities {
        Capabilities {
            shared: self.layout.has_readers(),
            permits: self.layout.has_permits(),
            release_after: false,
            ttl: TtlSupport::PerSession { ttl: self.sessions.ttl() },
            ..Capabilities::all("zookeeper")
        }
    }

    fn unsupported_hint(&self, mode: Mode) -> Option<&'static str> {
        Some(match mode {
            Mode::Shared => {
                "Curator's mutex would not see readers; add ?layout=rwlock (or kazoo) to the URL, for all programs that use these keys"
            }
            _ => {
                "kazoo's semaphores have another layout; add ?layout=mutex or ?layout=rwlock to the URL"
            }
        })
    }

    fn open(&self, _client: u64, listener: Weak<dyn Listener>) {
        self.sessions.listen(listener);
    }

    fn call<'a>(&'a self, requests: &'a [Request]) -> Call<'a, Vec<Answer>> {
        Call::new(async move {
            match requests {
                [Request::Acquire(claim)] => vec![Answer::Acquire(self.acquire(claim).await)],
                [Request::Release(lease, how)] => {
                    vec![Answer::Release(self.release(lease, *how).await)]
                }
                renewals => {
                    let leases: Vec<_> = renewals.iter().map(Request::claim).cloned().collect();
                    self.renew_all(&leases).await.into_iter().map(Answer::Renew).collect()
                }
            }
        })
    }

    fn inspect<'a>(&'a self, key: &'a Key) -> Call<'a, Result<KeyState>> {
        Call::new(self.state_of(key))
    }

    fn list<'a>(&'a self, prefix: &'a str, _cursor: Cursor) -> Call<'a, Result<Page>> {
        Call::new(self.keys_with(prefix))
    }

    fn break_lock<'a>(&'a self, key: &'a Key, how: &'a Break) -> Call<'a, Result<usize>> {
        Call::new(self.break_holders(key, how))
    }

    fn ping(&self) -> Call<'_, Result<()>> {
        Call::new(async move {
            let session = self.sessions.get(Operation::Connect).await?;
            let failed = |error| errors::read(Operation::Connect, error);
            session.term().await.map(drop).map_err(failed)
        })
    }

    fn close(&self) -> Call<'_, ()> {
        Call::new(self.sessions.close())
    }
}
