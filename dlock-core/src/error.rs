//! What can go wrong, on which key, and what to do about it.

use std::error::Error as StdError;
use std::fmt;
use std::sync::Arc;

use crate::key::Key;

/// A result whose error is [`Error`].
pub type Result<T, E = Error> = std::result::Result<T, E>;

/// The kind of an [`Error`]: what a program decides by.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum ErrorKind {
    /// An argument is out of bounds: key, ttl, permits. Mend the call.
    Invalid,
    /// The URL or the configuration is wrong. Mend it and start again.
    Config,
    /// The backend cannot do this; see its `Capabilities`.
    Unsupported,
    /// The lock was still held by somebody else when the wait was over.
    TimedOut,
    /// Too many tasks of this process wait for this key already.
    Overloaded,
    /// Waiting here could never end: the caller itself is in the way.
    WouldDeadlock,
    /// The lock was held and is no longer: deadline passed, broken, or ended by
    /// `max_hold` or `shutdown`. A write under way may or may not have happened.
    Lost,
    /// The backend could not be reached or refused for now; nothing was applied.
    Unavailable,
    /// The backend did not answer: applied or not, nobody knows yet.
    Unknown,
    /// The backend refuses these credentials or rights.
    Denied,
    /// The client is shutting down and takes no new claims.
    ShuttingDown,
    /// No client was set up: see [`init`](crate::init).
    NoClient,
}

impl ErrorKind {
    /// Whether the same call may succeed later without anybody mending anything.
    pub fn is_retryable(self) -> bool {
        matches!(
            self,
            ErrorKind::TimedOut
                | ErrorKind::Overloaded
                | ErrorKind::Lost
                | ErrorKind::Unavailable
                | ErrorKind::Unknown
        )
    }

    /// Whether somebody else holding the lock is the reason.
    pub fn is_busy(self) -> bool {
        matches!(self, ErrorKind::TimedOut | ErrorKind::Overloaded)
    }

    fn words(self) -> &'static str {
        match self {
            ErrorKind::Invalid => "invalid argument",
            ErrorKind::Config => "invalid configuration",
            ErrorKind::Unsupported => "not supported by this backend",
            ErrorKind::TimedOut => "timed out waiting",
            ErrorKind::Overloaded => "too many waiters",
            ErrorKind::WouldDeadlock => "would deadlock",
            ErrorKind::Lost => "lock lost",
            ErrorKind::Unavailable => "backend unavailable",
            ErrorKind::Unknown => "outcome unknown",
            ErrorKind::Denied => "permission denied",
            ErrorKind::ShuttingDown => "client is shutting down",
            ErrorKind::NoClient => "no client",
        }
    }
}

/// What was being done when an [`Error`] arose.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum Operation {
    /// Reading the configuration or the URL.
    Configure,
    /// Reaching the backend.
    Connect,
    /// Taking a lock.
    Acquire,
    /// Prolonging a lease.
    Renew,
    /// Giving a lock back.
    Release,
    /// Running under a lock.
    Hold,
    /// Looking at a key.
    Inspect,
    /// Listing keys.
    List,
    /// Breaking somebody's lock.
    Break,
    /// Counting the units of an inventory, in the store of the locks.
    Inventory,
}

impl Operation {
    fn words(self) -> &'static str {
        match self {
            Operation::Configure => "configure",
            Operation::Connect => "connect",
            Operation::Acquire => "acquire",
            Operation::Renew => "renew",
            Operation::Release => "release",
            Operation::Hold => "hold",
            Operation::Inspect => "inspect",
            Operation::List => "list",
            Operation::Break => "break",
            Operation::Inventory => "inventory",
        }
    }
}

/// What became of the work that was to run under the lock.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum Body {
    /// It did not begin.
    NotRun,
    /// It was dropped at an await because the lock was lost: what it had sent out
    /// may or may not have happened.
    Cancelled,
}

/// What happened, during what, on which key, and what to do.
///
/// The message names the key by its label (see [`Key::label`]); the values in it
/// are to be had from [`Error::key`] only.
#[derive(Clone)]
pub struct Error(Box<Inner>);

#[derive(Clone)]
struct Inner {
    kind: ErrorKind,
    operation: Operation,
    key: Option<Key>,
    key_label: &'static str,
    detail: String,
    body: Body,
    source: Option<Arc<dyn StdError + Send + Sync>>,
}

impl Error {
    /// An error of this kind; the other methods add what is known.
    pub fn new(kind: ErrorKind, operation: Operation) -> Self {
        Error(Box::new(Inner {
            kind,
            operation,
            key: None,
            key_label: "",
            detail: String::new(),
            body: Body::NotRun,
            source: None,
        }))
    }

    /// Says in words what happened and what to do. No secrets, no key values.
    #[must_use]
    pub fn saying(mut self, detail: impl Into<String>) -> Self {
        self.0.detail = detail.into();
        self
    }

    /// Says on which key.
    #[must_use]
    pub fn on(mut self, key: &Key) -> Self {
        self.0.key = Some(key.clone());
        self
    }

    /// Says what made it fail.
    #[must_use]
    pub fn because(mut self, source: impl StdError + Send + Sync + 'static) -> Self {
        self.0.source = Some(Arc::new(source));
        self
    }

    /// The same fault, met while doing something else.
    #[cfg(feature = "redis")]
    #[must_use]
    pub(crate) fn during(mut self, operation: Operation) -> Self {
        self.0.operation = operation;
        self
    }

    pub(crate) fn about_key_text(mut self, template: &'static str) -> Self {
        self.0.key_label = template;
        self
    }

    pub(crate) fn with_body(mut self, body: Body) -> Self {
        self.0.body = body;
        self
    }

    /// What became of the work that was to run under the lock.
    pub fn body(&self) -> Body {
        self.0.body
    }

    /// The kind, to decide by.
    pub fn kind(&self) -> ErrorKind {
        self.0.kind
    }

    /// What was being done.
    pub fn operation(&self) -> Operation {
        self.0.operation
    }

    /// The key, where one is concerned.
    pub fn key(&self) -> Option<&Key> {
        self.0.key.as_ref()
    }
}

impl fmt::Display for Error {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Inner { kind, operation, key, key_label, detail, .. } = &*self.0;
        write!(f, "{}: {}", operation.words(), kind.words())?;
        match key {
            Some(key) => write!(f, " (key `{}`)", key.label())?,
            None if !key_label.is_empty() => write!(f, " (key `{key_label}`)")?,
            None => {}
        }
        if !detail.is_empty() {
            write!(f, ": {detail}")?;
        }
        Ok(())
    }
}

impl fmt::Debug for Error {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Error({self}")?;
        if let Some(source) = &self.0.source {
            write!(f, "; because {source}")?;
        }
        f.write_str(")")
    }
}

impl StdError for Error {
    fn source(&self) -> Option<&(dyn StdError + 'static)> {
        self.0.source.as_deref().map(|source| source as _)
    }
}
