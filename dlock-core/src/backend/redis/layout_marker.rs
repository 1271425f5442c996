//! The marker of a namespace: the layout that its keys are kept in.
//!
//! The number of the layout is in the name of every key, so programs of two layouts would
//! not see each other's locks, and both would hold the same one. They meet at the marker,
//! whose name has no number: each new connection reads it, and a program of another layout
//! is refused. The first program of a namespace writes it.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use redis::{Cmd, ServerError, Value, cmd};

use super::codec::LAYOUT;
use super::errors;
use crate::backend::Call;
use crate::config::Settings;
use crate::error::{Error, ErrorKind, Operation, Result};

/// What a node of a cluster says that does not serve the slot of the marker now.
const NOT_HERE: [&str; 4] = ["MOVED", "ASK", "TRYAGAIN", "CLUSTERDOWN"];

/// The marker of a namespace, as one client knows it.
pub(super) struct LayoutMarker {
    namespace: String,
    name: String,
    /// Whether the layout is this program's, as far as known.
    confirmed: AtomicBool,
    /// Whether it was told that the user may not read the marker.
    warned: AtomicBool,
}

impl LayoutMarker {
    pub(super) fn of(config: &Settings) -> Arc<Self> {
        let namespace = &config.namespace;
        Arc::new(LayoutMarker {
            namespace: namespace.clone(),
            name: format!("dlock:layout:{namespace}"),
            confirmed: AtomicBool::new(false),
            warned: AtomicBool::new(false),
        })
    }

    pub(super) fn name(&self) -> &str {
        &self.name
    }

    /// Whether the layout was this program's when it was last read.
    pub(super) fn is_confirmed(&self) -> bool {
        self.confirmed.load(Ordering::Acquire)
    }

    /// Reads the marker, and writes it if there is none. A node that does not serve its slot
    /// says nothing about it.
    ///
    /// # Errors
    /// `Config` if the namespace is kept in another layout.
    pub(super) async fn check<'a>(
        &self,
        ask: impl Fn(Cmd) -> Call<'a, Result<Value>>,
    ) -> Result<()> {
        let mut get = cmd("GET");
        get.arg(&self.name);
        let mut found = ask(get.clone()).await?;
        if found == Value::Nil {
            let mut set = cmd("SET");
            set.arg(&self.name).arg(LAYOUT).arg("NX");
            if let Value::ServerError(error) = ask(set).await? {
                // A server that takes no writes now grants no lock either.
                self.unwritten(&error);
            }
            found = ask(get).await?; // another program may have been first
        }
        match found {
            Value::Nil => {}
            Value::BulkString(layout) if layout == LAYOUT.as_bytes() => {}
            Value::BulkString(layout) => {
                self.confirmed.store(false, Ordering::Release);
                return Err(self.other(&layout));
            }
            Value::ServerError(error) if NOT_HERE.contains(&error.code()) => return Ok(()),
            Value::ServerError(error) if error.code() == "NOPERM" => self.unwritten(&error),
            Value::ServerError(error) => return Err(errors::refused(Operation::Connect, &error)),
            _ => return Err(errors::unreadable(Operation::Connect)),
        }
        self.confirmed.store(true, Ordering::Release);
        Ok(())
    }

    fn unwritten(&self, error: &ServerError) {
        if error.code() != "NOPERM" {
            tracing::debug!(target: "dlock::redis", code = error.code(), "no marker was written");
        } else if !self.warned.swap(true, Ordering::Relaxed) {
            tracing::warn!(
                target: "dlock::redis",
                "the Redis user may not read and write `{}`, so programs of another layout are not refused; grant it `~dlock:layout:*` (docs/redis.acl)",
                self.name
            );
        }
    }

    fn other(&self, found: &[u8]) -> Error {
        let namespace = &self.namespace;
        // Somebody else's value could be a secret.
        let found = std::str::from_utf8(found).ok().and_then(|text| text.parse::<u32>().ok());
        let found = found.map_or_else(|| "an unknown layout".into(), |it| format!("layout {it}"));
        Error::new(ErrorKind::Config, Operation::Connect).with_message(format!(
            "the keys of the namespace `{namespace}` are kept in {found}, and this program writes layout {LAYOUT}; run the same version of dlock everywhere, or use another namespace (docs/upgrade.md says how a layout is changed)"
        ))
    }
}
